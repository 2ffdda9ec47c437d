"""Splitting fp32 into a bf16 half and a remainder."""

from __future__ import annotations

import pytest
import torch

from lowp.optim import join, split


def _round_trip(bits: torch.Tensor) -> None:
    value = bits.view(torch.float32)
    half, remainder = split(value)
    back = join(half, remainder)
    is_nan = value.isnan()
    assert torch.equal(back.view(torch.int32)[~is_nan], bits[~is_nan])
    assert back[is_nan].isnan().all()
    assert half[is_nan].isnan().all()


def test_every_upper_half_with_telling_remainders_round_trips() -> None:
    uppers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        _round_trip(uppers | lower)


@pytest.mark.slow
def test_all_four_billion_patterns_round_trip() -> None:
    for start in range(-(1 << 31), 1 << 31, 1 << 24):
        _round_trip(torch.arange(start, start + (1 << 24), dtype=torch.int64).to(torch.int32))


def test_the_half_is_the_nearest_bf16_and_ties_go_away_from_zero() -> None:
    value = torch.tensor([1.0 + 2**-8, -1.0 - 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 - 2**-20])
    half, remainder = split(value)
    assert half.tolist() == [1.0 + 2**-7, -1.0 - 2**-7, 1.0 + 2**-6, 1.0]
    assert remainder.tolist()[:2] == [-32768, -32768]


def test_a_half_that_someone_else_has_written_is_what_the_join_rounds_to() -> None:
    _, remainder = split(torch.linspace(-1, 1, 999))
    for value in (0.0, -0.0, 1.0, -3.0, 2.0**-126, 1e30):
        half = torch.full((999,), value, dtype=torch.bfloat16)
        joined = join(half, remainder)
        # the nearest bf16 with ties away from zero is what `split` gives
        assert torch.equal(split(joined)[0].view(torch.int16), half.view(torch.int16))


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"split takes fp32, not torch\.float16"):
        split(torch.ones(2, dtype=torch.float16))
    with pytest.raises(TypeError, match="bf16 half and an int16 or int8 remainder"):
        join(torch.ones(2), torch.ones(2, dtype=torch.int16))
