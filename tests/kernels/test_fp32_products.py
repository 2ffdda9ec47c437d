"""Matrix products in fp32: the bits of the definition on every instruction set, with any number of threads."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from exact_casts import bits
from fp32_defined import defined
from torch import Tensor

from lowp import kernels
from lowp.casts import Cast, parse
from lowp.kernels import cpu
from lowp.kernels.products.fp32_products import DEPTH, multiply
from lowp.kernels.products.programs import Memory, ProductStep, Program, is_reached

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# one element; less and more than a tile; a block of the depth, one more, and several; several units; sides of zero
SHAPES = [(1, 1, 1), (3, 5, 7), (15, 33, DEPTH), (16, 40, DEPTH + 1), (29, 65, 2 * DEPTH + 3), (530, 520, 3)]
SHAPES += [(0, 3, 4), (3, 0, 4), (2, 3, 0)]


@pytest.fixture(params=cpu.available() if cpu.library() else ())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = cpu.asked()
    cpu.select(request.param)
    yield request.param
    cpu.select(before or None)


def rounded_product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    casts: tuple[Cast | None, Cast | None, Cast | None] = (None, None, None),
    seeds: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """Return a product whose operands and sum are rounded, in a dtype, by a program of one step."""
    operands = []
    for place, (x, to) in enumerate(((left, casts[0]), (right, casts[1]))):
        # the random words of a number go by its place in memory
        x = x if is_reached(tuple(x.shape), x.stride()) and not (to and to.is_stochastic) else x.contiguous()
        operands.append((x, Memory(place, tuple(x.shape), x.stride(), x.dtype, to)))
    (left, one), (right, other) = operands
    out = torch.empty(*left.shape[:-1], right.shape[-1], dtype=dtype)
    Program([ProductStep(one, other, 2, 3, dtype, casts[2])])([left, right, bias, out], seeds)
    return out


def _operands(shape: tuple[int, int, int], dtype: torch.dtype, turned: int) -> tuple[Tensor, Tensor]:
    """Numbers of magnitudes far apart, so that sums in another order have other bits; stored either way."""
    rows, columns, depth = shape
    torch.manual_seed(rows + depth)
    left = torch.randn(rows, depth) * 2.0 ** torch.randint(-9, 9, (rows, depth))
    right = torch.randn(depth, columns) * 2.0 ** torch.randint(-9, 9, (depth, columns))
    left, right = left.to(dtype), right.to(dtype)
    return left.t().contiguous().t() if turned & 1 else left, right.t().contiguous().t() if turned & 2 else right


@functools.cache
def _defined(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    return defined(*_operands(shape, dtype, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set_has_the_bits_of_the_definition(
    level: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    bias = torch.linspace(-1, 1, shape[1])
    wanted = _defined(shape, dtype)
    for turned in range(4):
        left, right = _operands(shape, dtype, turned)
        for given, expected in ((None, wanted), (bias, wanted + bias)):
            for result in (torch.float32, dtype):
                found = rounded_product(left, right, given, result)
                assert found.dtype is result and torch.equal(bits(found), bits(expected.to(result)))


def test_the_number_of_threads_changes_no_bit() -> None:
    left, right = _operands((200, 300, 500), torch.float32, 0)
    before, wanted = torch.get_num_threads(), multiply(left, right)
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            assert torch.equal(multiply(left, right), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name", ["fp16", "bf16:stochastic", "e4m3fn", "e5m7:toward-zero", "bf16-tpu", "e8m10:stochastic"]
)
def test_operands_and_results_are_rounded_as_by_quantize(level: str, name: str) -> None:
    cast = parse(name)
    for dtype in (torch.float32, torch.bfloat16):
        for turned in range(4):
            left, right = _operands((20, 70, 230), dtype, turned)
            first, second = (
                kernels.quantize(one.contiguous().float(), cast, seed=seed)
                for one, seed in ((left, 5), (right, 2**40 + 1))
            )
            total = defined(first, second)
            wanted = kernels.quantize(total, cast, seed=9)
            found = rounded_product(left, right, casts=(cast, cast, cast), seeds=(5, 2**40 + 1, 9))
            assert torch.equal(bits(found), bits(wanted))


def test_matrices_in_a_batch_are_read_where_they_lie(level: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(2, 7, 3, 8).transpose(1, 2)
    found = multiply(q.bfloat16(), k.bfloat16().transpose(-1, -2))
    assert found.shape == (2, 3, 5, 7)
    assert torch.equal(found, defined(q.bfloat16(), k.bfloat16().transpose(-1, -2)))
    spaced = torch.randn(4, 6, 10)[:, ::2, ::3]  # neighbours in no direction
    assert torch.equal(multiply(spaced, spaced.transpose(1, 2)), defined(spaced, spaced.transpose(1, 2)))
    alike = torch.ones(1, 1).expand(1, 6)  # sums of columns
    assert torch.equal(multiply(alike, torch.ones(6, 2)), torch.full((1, 2), 6.0))


def test_extreme_numbers_are_those_of_fp32(level: str) -> None:
    left = torch.tensor([[3e38, 3e38], [2.0**-149, 1.0], [torch.inf, 1.0], [-0.0, 0.0], [torch.nan, 0.0]])
    right = torch.tensor([[1.0, -1.0, 0.5], [1.0, 2.0**-149, -0.5]])
    torch.set_flush_denormal(True)
    try:
        found = multiply(left, right)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(found), bits(defined(left, right)))
    assert bits(multiply(-torch.tensor([[torch.nan]]), torch.ones(1, 1)))[0, 0] == 0x7FC00000
