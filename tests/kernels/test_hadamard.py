"""Rotations of blocks by a Hadamard matrix: the product with it, along any dimension, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lowp.kernels.numbers import hadamard
from lowp.kernels.numbers.philox import draw_seed


def matrix(size: int) -> Tensor:
    """Return Sylvester's matrix of signs in fp64."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("size", [1, 2, 16, 32])
def test_blocks_are_rotated_along_a_dimension_and_what_is_left_stays(size: int, axis: int) -> None:
    x = torch.randn(35, 37, 67)
    signs = hadamard.signs(size, 3, x.device)
    assert set(signs.tolist()) <= {-1.0, 1.0} and signs.dtype is torch.float32
    lines = x.movedim(axis, -1)
    whole = lines.shape[-1] // size * size
    blocks = lines[..., :whole].double().unflatten(-1, (-1, size))
    turned = ((blocks * signs.double()) @ matrix(size) / math.sqrt(size)).flatten(-2)
    expected = torch.cat((turned, lines[..., whole:].double()), -1).movedim(-1, axis)
    found = hadamard.rotate(x, signs, axis)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    assert torch.equal(hadamard.rotate(x.half(), signs, axis), hadamard.rotate(x.half().float(), signs, axis))


@pytest.mark.parametrize("axis", [0, -1])
def test_the_gradient_is_rotated_back(axis: int) -> None:
    x, slope = torch.randn(35, 40).requires_grad_(), torch.randn(35, 40)
    signs = hadamard.signs(16, 5, x.device)
    found = hadamard.rotate(x, signs, axis)
    assert torch.equal(found, hadamard.rotate(x.detach(), signs, axis)), "the same bits in a graph"
    (gradient,) = torch.autograd.grad(found, x, slope)
    count = x.shape[axis] // 16
    whole = count * 16
    back = hadamard.rotate(slope, torch.ones(16), axis)  # the matrix is its own inverse
    factors = torch.cat((signs.repeat(count), torch.ones(x.shape[axis] - whole)))
    expected = back * (factors if axis == -1 else factors[:, None])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=2e-6)
    mapped = torch.vmap(lambda row: hadamard.rotate(row, signs))(x.detach())
    assert torch.equal(mapped, hadamard.rotate(x.detach(), signs))


def test_fewer_numbers_than_a_block_and_none_are_given_back() -> None:
    for x in (torch.randn(3, 15), torch.zeros(0, 15), torch.zeros(4, 0)):
        assert torch.equal(hadamard.rotate(x, torch.ones(16)), x)
    assert hadamard.rotate(torch.zeros(0, 32), torch.ones(16)).shape == (0, 32)
    assert hadamard.rotate(torch.full((1, 16), torch.inf), torch.ones(16)).isfinite().sum() == 0


def test_only_what_autograd_records_is_computed_by_recorded_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    x, signs = torch.randn(3, 32), hadamard.signs(16, 1, torch.device("cpu"))
    wanted = hadamard.rotate(x.clone().requires_grad_(), signs)
    assert wanted.requires_grad
    monkeypatch.setattr(hadamard, "_differentiable", lambda *given: pytest.fail("a graph that nobody asked for"))
    assert torch.equal(hadamard.rotate(x, signs), wanted)
    with torch.no_grad():
        assert torch.equal(hadamard.rotate(x.clone().requires_grad_(), signs), wanted)


def test_a_traced_product_draws_signs_of_its_own_from_torchs_generator() -> None:
    gradient = torch.randn(5, 3)
    torch.manual_seed(7)
    seeds = [draw_seed(), draw_seed()]
    torch.manual_seed(7)
    for product, seed in enumerate(seeds):
        found = torch.ops.lowp.hadamard_signs(gradient, 64, product)
        assert torch.equal(found, hadamard.signs(64, seed, gradient.device))
    traced = torch.ops.lowp.hadamard_signs(torch.empty(5, 3, dtype=torch.float16, device="meta"), 64, 0)
    assert traced.shape == (64,) and traced.dtype is torch.float32


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_ranks_rotate_whole_lines_and_gather_only_along_them(
    dim: int, axis: int, as_rank: Callable[[int, int], None]
) -> None:
    as_rank(0, 2)
    shape, signs = (4, 6, 16), hadamard.signs(2, 1, torch.device("cpu"))
    whole = torch.randn(shape).movedim(0, 1).contiguous().movedim(1, 0)  # in another order in memory
    local = whole.chunk(2, dim)[0]
    x = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(dim)], run_check=False)
    found: Any = hadamard.rotate(x, signs, axis)
    (placement,), is_kept = found.placements, dim % 3 != axis % 3
    assert placement.dim % 3 == dim % 3 if is_kept else placement == Replicate()
    assert found.shape == shape and found.stride() == (96, 16, 1) and found.dtype is torch.float32
    if is_kept:
        assert torch.equal(found.to_local(), hadamard.rotate(local, signs, axis))
