"""Statistics of many programs and rounds, and of exponents at both ends of a window, are those of the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowp.kernels.numbers import reference

pytest.importorskip("triton", reason="triton is not installed")

from lowp.kernels.triton import calls
from lowp.kernels.triton.device import counts
from lowp.kernels.triton.launch import run
from lowp.kernels.triton.plans import DTYPES

BLOCK, ROUNDS = 64, 4


def found(x: Tensor, others: bool = True) -> list[Tensor]:
    """Return the statistics by programs of four blocks of 64 numbers, as those of a device have."""
    programs = -(-len(x) // (BLOCK * ROUNDS))
    partial = torch.zeros(programs, 264, dtype=torch.int64)
    given = (calls.integers(x), partial, len(x), DTYPES[x.dtype], others, len(x) % 16 != 0)
    run(counts.statistics, (programs,), *given, ROUNDS, BLOCK)
    return list(calls.merged(partial))


def check(x: Tensor, others: bool = True) -> None:
    histogram, maximum, squares, *counted = found(x, others)
    wanted, most, energy, *more = reference.statistics(x)
    assert torch.equal(histogram, wanted)
    assert float(maximum) == float(most) and list(map(int, counted)) == list(map(int, more))
    assert float(squares) == pytest.approx(float(energy), rel=len(x) * 2.0**-53)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [600, 608, 20])
def test_programs_of_several_blocks(length: int, dtype: torch.dtype) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    x[::9] = 0.0
    check(x, others=False)
    for place in (3, length // 2, length - 1):  # of one program, which counts anew, or of all
        for special in (torch.inf, torch.nan, 3e4, 2.0**-24):
            x[place] = special
            check(x)
    if dtype in (torch.float32, torch.float64):
        x[:5] = torch.tensor([2.0**-149, 2.0**-127, 2.0**-126, 2.0**127, 3.4028234663852886e38])
        check(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("highest", [-126, -120, -97, 0, 127])
def test_exponents_at_both_ends_of_a_window(highest: int, dtype: torch.dtype) -> None:
    for below in (28, 29, 30):
        for beyond in (0, 3):  # by which a later block exceeds the first
            x = torch.full((256,), 1.5 * 2.0 ** max(highest - beyond, -126), dtype=dtype)
            x[5:10] = 0.0
            x[100] = 2.0 ** max(highest - below, -149)
            x[200] = 2.0**highest
            check(x)
            x[100] = torch.nextafter(x[100], x.new_zeros(()))  # all ones in the binade below
            check(x)


def test_numbers_beyond_fp32_are_in_its_first_and_last_bin() -> None:
    check(torch.tensor([1e300, 1e-300, 2.0**128, 2.0**-127, 2.0**-126, 5e-324, 0.0, torch.inf], dtype=torch.float64))
    check(torch.tensor([2.0**127, 2.0**128, 2.0**100], dtype=torch.float64).repeat(20))
    check(torch.tensor([2.0**-126, 2.0**-127, 2.0**-150], dtype=torch.float64).repeat(20))


def test_programs_without_numbers() -> None:
    for dtype in (torch.float32, torch.float64):
        check(torch.zeros(300, dtype=dtype))
        check(torch.full((300,), torch.nan, dtype=dtype))
        check(torch.cat((torch.zeros(256, dtype=dtype), torch.ones(3, dtype=dtype))))


def test_programs_that_meet_other_numbers_keep_the_largest_where_these_are_not_counted() -> None:
    x = torch.ones(70)
    x[3] = 2.0**-60
    histogram, maximum, *_ = found(x, others=False)
    assert not histogram.any() and int(maximum.view(torch.int64)) == 0x3F800000
