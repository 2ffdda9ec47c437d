"""Powers of two without fp64, frexp and ldexp: the results of ldexp and frexp wherever these are normal."""

from __future__ import annotations

import math

import pytest
import torch

from lowp.scaling import powers

FARTHEST = torch.tensor([-(2**31), -(2**14), -1100, 1100, 2**15, 2**31 - 1])
EXPONENTS = torch.cat([torch.arange(-300, 301), FARTHEST]).to(torch.int32)
NUMBERS = torch.tensor([1.0, -1.75, 1.9999999, 2.0**-126, 3.0e38, 1.25e-20])
OTHERS = torch.tensor([2.0**-149, -0.0, -math.inf])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_with_any_power_is_that_of_ldexp(dtype: torch.dtype) -> None:
    numbers = torch.cat([NUMBERS, OTHERS])[:, None].repeat(1, len(EXPONENTS))
    found = powers.times(numbers.to(dtype), EXPONENTS)
    wanted = torch.ldexp(numbers.double(), EXPONENTS).to(dtype)
    is_normal = (wanted.abs() >= 2.0**-126) | (dtype is torch.float64)
    assert found.dtype is dtype
    assert torch.equal(found[is_normal], wanted[is_normal])
    assert found[~is_normal].abs().le(2.0**-126).all()
    assert powers.fp32_power(torch.arange(-126, 128)).tolist() == [2.0**exponent for exponent in range(-126, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exponent_of_a_number_is_that_of_frexp(dtype: torch.dtype) -> None:
    x = NUMBERS.abs().to(dtype)
    assert torch.equal(powers.floor_log2(x), torch.frexp(x)[1].to(torch.int32) - 1)
    assert powers.floor_log2(torch.zeros((), dtype=dtype)) < 0
