"""Roundings that other roundings follow, and scales, in Triton's interpreter, are those of the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from lowp.kernels.triton.device.scales import power_bits, to_odd
from lowp.kernels.triton.launch import run


@triton.jit
def _to_odd(x, out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, to_odd(tl.load(x + places)))


@triton.jit
def _power_bits(x, out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, power_bits(tl.load(x + places)))


def test_numbers_of_fp64_are_rounded_to_odd() -> None:
    halves = torch.tensor([1, 2, 3, 4, 5, 1 << 23, (1 << 23) + 1, (1 << 24) - 1, 0x3F800000, 0x3F800001, 0x3F800002])
    halves = torch.cat((halves, halves + 3, torch.tensor([0x7F7FFFFE, 0x7F7FFFFF, 0])))
    x = halves.to(torch.int32).view(torch.float32).double()
    between = [
        x,
        x * (1 + 2.0**-40),
        x * (1 - 2.0**-40),
        x * (1 + 2.0**-24),
        x * (1 + 2.0**-25),
        x * (1 + 3 * 2.0**-25),
    ]
    x = torch.cat((*between, torch.tensor([1e-60, 2.0**-150, 1e39, torch.inf, 3.5e38], dtype=torch.float64)))
    x = torch.cat((x, torch.full((256 - len(x),), torch.nan, dtype=torch.float64)))
    out = torch.empty(256, dtype=torch.int32)
    run(_to_odd, (1,), x, out, 256)
    below = x.float().view(torch.int32).clone()  # toward zero, and the last bit is set where something is cut
    below -= (below.view(torch.float32).double() > x).to(torch.int32)
    wanted = below | (below.view(torch.float32).double() != x).to(torch.int32)
    wanted = torch.where(x > torch.finfo(torch.float32).max, 0x7F7FFFFF, wanted)
    assert torch.equal(out, torch.where(x.isnan(), 0x7FC00000, wanted))


def test_bits_of_powers_of_two() -> None:
    exponents = torch.arange(-149, 128, dtype=torch.int32)
    x = torch.cat((exponents, torch.zeros(512 - len(exponents), dtype=torch.int32)))
    out = torch.empty(512, dtype=torch.int32)
    run(_power_bits, (1,), x, out, 512)
    assert out.view(torch.float32).tolist() == np.exp2(x.double().numpy()).astype(np.float32).tolist()
