"""int16 products of int8 digits, in Triton's interpreter, are exact whatever the operands are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowp import kernels
from lowp.kernels import integer

pytest.importorskip("triton", reason="triton is not installed")


def normal(*shape: int) -> Tensor:
    return (torch.randn(shape) * 4000).round().clamp(-32767, 32767).to(torch.int16)


def random_int16(*shape: int) -> Tensor:
    return torch.randint(-32768, 32768, shape).to(torch.int16)


FILLS: dict[str, Callable[..., Tensor]] = {
    "random": random_int16,
    "normal": normal,
    "all largest": lambda *shape: torch.full(shape, 32767, dtype=torch.int16),
    "all smallest": lambda *shape: torch.full(shape, -32768, dtype=torch.int16),
    "mixed signs": lambda *shape: torch.where(torch.rand(shape) < 0.5, 32767, -32768).to(torch.int16),
}


def int64_product(a: Tensor, b: Tensor) -> Tensor:
    """Exact for a depth below 2^23: every partial sum is an integer that fp64 holds."""
    return (a.double() @ b.double()).to(torch.int64)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", (1, 257, 4099))
def test_exact_sums_equal_int64(fill: str, depth: int) -> None:
    torch.manual_seed(depth)
    a, b = FILLS[fill](7, depth), FILLS[fill](depth, 19)
    expected = int64_product(a, b)
    result = integer.matmul_exact(a, b, dtype=torch.int64, kernel="triton")
    assert torch.equal(result.values, expected)
    assert result.largest_sum == expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", (32767, 32768, 32769, 65535, 100_000))
def test_exact_sums_equal_int64_at_the_depths_where_int32_ends(fill: str, depth: int) -> None:
    a, b = FILLS[fill](3, depth), FILLS[fill](depth, 5)
    expected = int64_product(a, b)
    assert torch.equal(integer.matmul_exact(a, b, dtype=torch.int64, kernel="triton").values, expected)
    for dtype, exponent in ((torch.int16, -32), (torch.float32, -7), (torch.float64, 3)):
        wanted = integer.matmul_exact(a, b, dtype=dtype, exponent=exponent, kernel="reference")
        found = integer.matmul_exact(a, b, dtype=dtype, exponent=exponent, kernel="triton")
        assert torch.equal(found.values, wanted.values) and found[1:] == wanted[1:]


@pytest.mark.parametrize("exponent", (0, -15, -31, -900, 3, 900))
def test_int16_is_rounded_once_to_nearest_even_saturated_and_looked_at(exponent: int) -> None:
    torch.manual_seed(0)
    a, b = random_int16(13, 300), random_int16(300, 37)
    a[0], a[1, 3:], b[:, :4] = 0, 0, torch.tensor([1, 2, 3, -6])
    for symmetric in (False, True):
        wanted = integer.matmul_exact(a, b, exponent=exponent, symmetric=symmetric, kernel="reference")
        found = integer.matmul_exact(a, b, exponent=exponent, symmetric=symmetric, kernel="triton")
        assert torch.equal(found.values, wanted.values) and found[1:] == wanted[1:]


def test_ties_go_to_even_in_both_signs() -> None:
    a = torch.tensor([[1], [-1]], dtype=torch.int16)
    b = torch.arange(0, 32, dtype=torch.int16).reshape(1, 32)
    expected = torch.tensor([round(n / 2) for n in range(32)])
    values = integer.matmul_exact(a, b, exponent=-1, kernel="triton").values
    assert values[0].tolist() == expected.tolist() and values[1].tolist() == (-expected).tolist()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_floats_are_the_sum_rounded_once(dtype: torch.dtype) -> None:
    a, b = random_int16(5, 1000), random_int16(1000, 33)
    for exponent in (-30, -170):
        expected = (int64_product(a, b).double() * 2.0**exponent).to(dtype)
        found = integer.matmul_exact(a, b, exponent=exponent, dtype=dtype, kernel="triton")
        assert torch.equal(found.values, expected)


def test_chained_has_the_bits_of_its_definition() -> None:
    a, b = normal(7, 777), random_int16(777, 19)
    wanted = integer.matmul_chained(a, b, exponent=-31, kernel="reference")
    found = integer.matmul_chained(a, b, exponent=-31, kernel="triton")
    assert torch.equal(found.values, wanted.values) and found.largest == wanted.largest


def test_batches_views_and_empty_operands_are_taken_as_they_lie() -> None:
    a, b = random_int16(2, 40, 5), random_int16(1, 30, 40)
    expected = int64_product(a.mT, b.mT)
    with kernels.use("triton"):
        found = integer.matmul_exact(a, b, transpose_a=True, transpose_b=True, dtype=torch.int64)
        assert integer.matmul_exact(a[:, :0], b[..., :0], transpose_a=True, transpose_b=True).values.sum() == 0
    assert torch.equal(found.values, expected)
