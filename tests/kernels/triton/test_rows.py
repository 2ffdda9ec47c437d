"""Rows and blocks that share a scale: many rows in a launch, their extremes, and what 16 bits lose."""

from __future__ import annotations

import math

import pytest
import torch
from exact_casts import bits
from torch import Tensor

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import InvalidInput

pytest.importorskip("triton", reason="triton is not installed")

from lowp.kernels.triton import launch, scaled


def extremes(largest: float) -> Tensor:
    """Return rows of 96 numbers below a largest one: at the bounds of what the usual path serves, and around them."""
    generator = torch.Generator().manual_seed(0)
    powers = (-149, -126, -61, -60, -39, 0, 119)
    tops = [math.ldexp(largest, power) for power in powers]
    tops += [2.0**126, 2.0**126 * (1 - 2.0**-24), 0.0, 2.0**-149]
    x = torch.rand(len(tops), 96, generator=generator, dtype=torch.float64) * 2 - 1
    x = x * torch.tensor(tops, dtype=torch.float64)[:, None]
    x[:, 7] = torch.tensor(tops, dtype=torch.float64)
    x[:, 70] = -x[:, 7] / 2
    return x.float()


def check(x: Tensor, text: str, packed: bool = False, seed: int = 5) -> None:
    found = []
    for way in ("bitwise", "triton"):
        with kernels.use(way):
            encoded = lowp.encode(x, text, seed=seed, packed=packed)
            found.append((lowp.quantize(x, text, seed=seed), encoded.payload, encoded.scale, encoded.outer))
    for one, other in zip(*found, strict=True):
        if one is None:
            assert other is None
        else:
            assert torch.equal(
                *(each.view(torch.uint8) if not each.is_floating_point() else bits(each) for each in (one, other))
            )


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("int8", "parts"),
        ("int8", "rows"),
        ("i4s@fp32/row", "parts"),
        ("i4s@fp32/row", "rows"),
        ("e4m3fn@fp32/row", "parts"),
        ("e4m3fn@fp32/row", "rows"),
        ("e5m2@fp32/row:stochastic", "parts"),
        ("e5m2@fp32/row:stochastic", "rows"),
    ],
)
def test_rows_of_every_size_are_those_of_the_definition(text: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 64)
    monkeypatch.setattr(scaled, "LONG_ROW", 80 if way == "parts" else 96)
    x = extremes(float(parse(text).element.maximum))
    x[2, 5], x[5, 90], x[4] = torch.inf, -torch.inf, torch.inf
    if text.startswith("e"):
        x[3, 95], x[6] = torch.nan, torch.nan
    check(x, text, packed=parse(text).element.bits == 4)


@pytest.mark.parametrize("way", ["rows", "parts"])
@pytest.mark.parametrize("text", ["e4m3fn@e8m0/row", "e2m1@e8m0/row"])
def test_rows_under_powers_of_two_are_those_of_the_definition(
    text: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 64)
    monkeypatch.setattr(scaled, "LONG_ROW", 80 if way == "parts" else 96)
    x = extremes(float(parse(text).element.maximum))
    check(x[4:6].bfloat16(), text)
    x[2, 5], x[5, 90], x[4], x[3, 95] = torch.inf, -torch.inf, torch.inf, torch.nan
    check(x, text)


@pytest.mark.parametrize("text", ["e2m1@e4m3fn@fp32/row", "e4m3fn@e4m3fn@fp32/channel"])
def test_rows_under_an_outer_scale_are_computed_without_a_kernel(text: str) -> None:
    x = extremes(1.0)
    check(x, text)
    assert scaled.quantize_groups(x, parse(text), 0) is None


@pytest.mark.parametrize("way", ["rows", "parts"])
def test_infinities_may_become_nan(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 64)
    monkeypatch.setattr(scaled, "LONG_ROW", 80 if way == "parts" else 96)
    x, cast = extremes(448.0)[2:7].contiguous(), parse("e4m3fn@fp32/row")
    x[1, 3], x[2, 90], x[4] = torch.inf, -torch.inf, torch.nan
    wanted = scaled.encode_groups(torch.where(x.isinf(), torch.nan, x), cast, 0, False)
    found = scaled.encode_groups(x, cast, 0, False, spoils=True)
    assert wanted is not None and found is not None
    codes, plain = (one[0].view(torch.uint8) & 0x7F for one in (found, wanted))
    assert torch.equal(codes, plain) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("place", [0, 1, 62, 63])
def test_one_value_that_16_bits_do_not_hold_is_told(place: int) -> None:
    x = torch.zeros(64, dtype=torch.float16)
    x[place ^ 1] = 2.0
    with kernels.use("triton"):
        assert torch.equal(lowp.quantize(x, "mxfp8:rceil"), x)
        x[place] = 65504.0  # 255.9 * 256
        with pytest.raises(InvalidInput, match=r"torch.float16 cannot hold every result exactly"):
            lowp.quantize(x, "mxfp8:rceil")
