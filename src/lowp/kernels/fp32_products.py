"""Matrix products of the C++ library that sum in fp32, in one order: the same bits on every processor.

Each element of the result is ((block 0 + block 1) + block 2) + ... + bias, in fp32, where a block is a chain of fused
multiply-adds over `DEPTH` elements in order of depth, from +0 (cpu/product.hpp). Operands in fp16 and bf16 become fp32
while they are packed, or are rounded there by a cast; the result is rounded while it is written. `defined` is the same
in torch's operations.
"""

from __future__ import annotations

import functools
import math
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import constant_when_compiled
from lowp.kernels import cpu
from lowp.kernels.abi import TYPE_NUMBERS, cast_address, product_blocks, seed_block
from lowp.kernels.dispatch import chosen, forced
from lowp.kernels.tracing import is_quiet, is_wrapped

__all__ = [
    "DEPTH",
    "defined",
    "linear",
    "linear_gradients",
    "multiply",
    "multiply_traced",
    "serves",
    "serves_compiled",
    "sum_of_rows",
]

DEPTH = 192  # kDepth of cpu/product.hpp
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_Casts = tuple[Cast | None, Cast | None, Cast | None]
_NO_CASTS: _Casts = (None, None, None)


class _Plan(NamedTuple):
    """Products of given shapes, strides and dtypes, as one call of the library.

    `copies`: the operands that are made contiguous first; `shapes`: of the results.
    """

    blocks: Any
    shapes: tuple[tuple[int, ...], ...]
    copies: tuple[bool, ...]


def serves(*tensors: Tensor) -> bool:
    """Whether the library may multiply these: tensors with memory on a CPU, of up to 32 bits, unseen by torch."""
    way = chosen()
    if not (way is None or way == "cpu") or not _is_here() or not is_quiet():
        return False
    is_recorded = torch.is_grad_enabled()
    for x in tensors:
        if type(x) not in cpu.PLAIN or not x.is_cpu or x.dtype not in _DTYPES or x.layout is not torch.strided:
            return False
        if x.is_nested or x.is_neg() or (is_recorded and x.requires_grad) or is_wrapped(x):
            return False
        if x.data_ptr() == x.storage_offset() * x.element_size() and x.numel():  # as if freed: see `cpu.begin`
            return False
    return True


@functools.cache
def _is_here() -> bool:
    """Whether the library is there, and the processor has its multiply-adds."""
    return cpu.library() is not None and cpu.has_multiply_add()


@constant_when_compiled
def serves_compiled() -> bool:
    """Whether the library multiplies what torch.compile traces."""
    return forced() in (None, "cpu") and _is_here()


def multiply(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    casts: _Casts = _NO_CASTS,
    seeds: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """Return left [..., m, k] times right [..., k, n], plus bias [n] in fp32, rounded once to `dtype`.

    All are tensors that `serves` answers for, with the same leading dimensions; the bias is contiguous.
    `casts` round the operands, and the sum, to values that their dtypes hold; without one the sum is rounded to nearest
    even. The random words of stochastic casts are those of the elements of contiguous tensors. NaN is the positive
    quiet NaN of `dtype`.
    """
    plan = _planned(left.shape, left.stride(), left.dtype, right.shape, right.stride(), right.dtype, dtype, casts)
    if plan.copies[0]:
        left = left.contiguous()
    if plan.copies[1]:
        right = right.contiguous()
    out = torch.empty(plan.shapes[0], dtype=dtype, device="cpu")
    added = 0 if bias is None else bias.data_ptr()
    memory = array("q", (left.data_ptr(), right.data_ptr(), added, out.data_ptr()))
    _run(plan, 1, memory, _NO_SEEDS if seeds == (0, 0, 0) else seed_block(*seeds))
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, casts: _Casts = _NO_CASTS
) -> Tensor | None:
    """Return x[..., k] weight[n, k]^T + bias[n], summed in fp32 and rounded once; None for what `serves` refuses.

    Also None for shapes that do not fit, for which torch's function raises its own error. Infinities and NaN are not
    rounded.
    """
    if not (serves(x, weight) if bias is None else serves(x, weight, bias)):
        return None
    about = bias if bias is None else (bias.shape, bias.dtype)
    plan = _planned_linear(
        x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype, dtype, about, casts
    )
    if plan is None:
        return None
    of_x, of_weight, of_bias = plan.copies
    x = x.contiguous() if of_x else x
    weight = weight.contiguous() if of_weight else weight
    added = 0
    if bias is not None:
        bias = bias.float().contiguous() if of_bias or not bias.is_contiguous() else bias
        added = bias.data_ptr()
    out = torch.empty(plan.shapes[0], dtype=dtype, device="cpu")
    _run(plan, 1, array("q", (x.data_ptr(), weight.data_ptr(), added, out.data_ptr())), _NO_SEEDS)
    return out


@functools.lru_cache(maxsize=4096)
def _planned_linear(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    x_dtype: torch.dtype,
    weight: tuple[int, ...],
    weight_strides: tuple[int, ...],
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
    bias: tuple[tuple[int, ...], torch.dtype] | None,
    casts: _Casts,
) -> _Plan | None:
    """Return the plan of a linear layer; `copies` also tells whether the bias is converted to fp32."""
    if len(weight) != 2 or not shape or shape[-1] != weight[1] or (bias is not None and bias[0] != weight[:1]):
        return None
    copies = len(shape) != 2 and strides != _strides(shape)
    rows = (math.prod(shape[:-1]), shape[-1])
    blocks = product_blocks(1)
    left = (rows, _strides(rows) if len(shape) != 2 else strides, x_dtype)
    right = (weight[::-1], weight_strides[::-1], weight_dtype)
    _, (of_x, of_weight) = _describe(blocks[0], left, right, dtype, casts, keeps=True)
    if of_weight:  # made contiguous as it is, not turned over
        right = (weight[::-1], _strides(weight)[::-1], weight_dtype)
        _, (of_x, _) = _describe(
            blocks[0], left, (weight[::-1], _strides(weight)[::-1], weight_dtype), dtype, _NO_CASTS
        )
    converts = bias is not None and bias[1] is not torch.float32
    return _Plan(blocks, ((*shape[:-1], weight[0]),), (copies or of_x, of_weight, converts))


def linear_gradients(
    x: Tensor | None, weight: Tensor | None, gradient: Tensor, wants_bias: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return what y[m, n] = x[m, k] weight[n, k]^T + bias[n] gives its operands, in `dtype`.

    The gradient of the weight is a product with x, that of x one with the weight: None for a missing operand. The bias
    gradient is a product with ones.
    """
    about: list[Any] = [gradient.shape, gradient.stride(), gradient.dtype, wants_bias, dtype]
    about += (None, None, None) if x is None else (x.shape, x.stride(), x.dtype)
    about += (None, None, None) if weight is None else (weight.shape, weight.stride(), weight.dtype)
    plan = _planned_gradients(*about)
    of_gradient, of_x, of_weight = plan.copies
    gradient = gradient.contiguous() if of_gradient else gradient
    found: list[Tensor | None] = [None, None, None]
    memory, count = array("q"), 0
    left = gradient.data_ptr()
    if weight is not None:
        weight = weight.contiguous() if of_weight else weight
        found[0] = out = torch.empty(plan.shapes[0], dtype=dtype, device="cpu")
        memory.extend((left, weight.data_ptr(), 0, out.data_ptr()))
        count = 1
    if x is not None:
        x = x.contiguous() if of_x else x
        found[1] = out = torch.empty(plan.shapes[count], dtype=dtype, device="cpu")
        memory.extend((left, x.data_ptr(), 0, out.data_ptr()))
        count += 1
    if wants_bias:
        found[2] = out = torch.empty(plan.shapes[count][1:], dtype=dtype, device="cpu")
        memory.extend((_ONE.buffer_info()[0], left, 0, out.data_ptr()))
        count += 1
    _run(plan, count, memory, _NO_SEEDS)
    return found[0], found[1], found[2]


def sum_of_rows(x: Tensor) -> Tensor:
    """Return the sum of x[m, n] along m, as a product with ones, in fp32."""
    plan = _planned((1, x.shape[0]), (0, 0), torch.float32, x.shape, x.stride(), x.dtype, torch.float32, _NO_CASTS)
    x = x.contiguous() if plan.copies[1] else x
    out = torch.empty(x.shape[1], dtype=torch.float32, device="cpu")
    _run(plan, 1, array("q", (_ONE.buffer_info()[0], x.data_ptr(), 0, out.data_ptr())), _NO_SEEDS)
    return out


def _run(plan: _Plan, count: int, memory: array[int], seeds: Any) -> None:
    product: Any = cpu.loaded().lowp_product
    # `serves` has looked at the memory
    if product.unguarded(plan.blocks, count, memory.buffer_info()[0], seeds, torch.get_num_threads()):
        raise MemoryError(f"no memory for products of {', '.join(map(str, plan.shapes))} numbers")


_ONE = array("f", (1.0,))
_NO_SEEDS = seed_block(0, 0, 0)


@torch.library.custom_op("lowp::multiply", mutates_args=(), device_types="cpu")
def multiply_traced(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`multiply` without casts, as an operator that compilers see."""
    return multiply(left, right, bias, dtype)


@multiply_traced.register_fake
def _(left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return left.new_empty(*left.shape[:-1], right.shape[-1], dtype=dtype)


_About = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # the shape, strides and dtype of an operand


@functools.lru_cache(maxsize=4096)
def _planned(*about: Any) -> _Plan:
    """Return the plan of a product of two operands, a result's dtype and casts."""
    blocks = product_blocks(1)
    shape, copies = _describe(blocks[0], about[:3], about[3:6], about[6], about[7])
    return _Plan(blocks, (shape,), copies)


@functools.lru_cache(maxsize=4096)
def _planned_gradients(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    own: torch.dtype,
    wants_bias: bool,
    dtype: torch.dtype,
    *about: Any,
) -> _Plan:
    """Return the plan of the gradients of a linear layer; the arguments: of y's gradient, x and the weight."""
    given = [(shape, strides, own), about[:3], about[3:]]
    copies = [one[0] is not None and not _is_reached(one[0], one[1]) for one in given]
    # what must be copied for one product is so for all
    incoming, x, weight = (
        (one[0], _strides(one[0]), one[2]) if copy else one for one, copy in zip(given, copies, strict=True)
    )
    turned = (shape[::-1], incoming[1][::-1], own)
    ones = ((1, shape[0]), (0, 0), torch.float32)
    wanted = ((weight[0] is not None, incoming, weight), (x[0] is not None, turned, x), (wants_bias, ones, incoming))
    blocks = product_blocks(3)
    shapes: list[tuple[int, ...]] = []
    for is_wanted, left, right in wanted:
        if is_wanted:
            shapes.append(_describe(blocks[len(shapes)], left, right, dtype, _NO_CASTS)[0])
    return _Plan(blocks, tuple(shapes), tuple(copies))


def _describe(
    block: Any, left: _About, right: _About, dtype: torch.dtype, casts: _Casts, keeps: bool = False
) -> tuple[tuple[int, ...], tuple[bool, bool]]:
    """Describe a product; return the shape of its result, and which operands must be made contiguous first.

    At most two leading dimensions may have more than one matrix.
    """
    (rows, _, _), (columns, _, _) = left, right
    shape = (*rows[:-1], columns[-1])
    block.rows, block.columns, block.depth = rows[-2], columns[-1], rows[-1]
    leading = [index for index, size in enumerate(rows[:-2]) if size != 1]
    if rows[:-2] != columns[:-2] or rows[-1] != columns[-2] or len(leading) > 2:
        raise ValueError(f"no product of {rows} and {columns}")
    block.batch[:] = _pair([rows[index] for index in leading], 1)
    copies = (
        _set(block.left, left, casts[0], leading, -2, -1, keeps),
        _set(block.right, right, casts[1], leading, -1, -2, keeps),
    )
    out = _strides(shape)
    block.out_batch[:], block.out_line = _pair([out[index] for index in leading], 0), out[-2]
    block.cast, block.type = cast_address(casts[2]), TYPE_NUMBERS[dtype]
    return shape, copies


def _set(operand: Any, about: _About, cast: Cast | None, leading: list[int], line: int, step: int, keeps: bool) -> bool:
    """Describe an operand whose lines run along dimension `step`; return whether it must be made contiguous first.

    The random words of a number go by its place in memory.
    """
    shape, strides, dtype = about
    is_drawn = cast is not None and cast.rounding.is_stochastic
    copies = not _is_reached(shape, strides) or (is_drawn and strides != _strides(shape))
    strides = _strides(shape) if copies else strides
    operand.batch[:] = _pair([strides[index] for index in leading], 0)
    operand.line, operand.step = strides[line], 1 if shape[step] == 1 else strides[step]
    operand.cast, operand.type, operand.keeps = cast_address(cast), TYPE_NUMBERS[dtype], keeps
    return copies


def _is_reached(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the library reads a matrix as it lies: with neighbours in memory along its rows or its columns."""
    return 1 in strides[-2:] or 1 in shape[-2:]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * max(size, 1))
    return tuple(reversed(found))


def _pair(numbers: list[int], other: int) -> list[int]:
    return [other] * (2 - len(numbers)) + numbers


def defined(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product in fp32 by the definition, in torch's operations: each multiply-add is rounded once.

    A product of fp32 numbers is exact in fp64; its sum there is rounded to odd, which keeps what the rounding to fp32
    needs (Boldo and Melquiond 2008).
    """
    left, right = left.double(), right.double()
    total: Tensor | None = None
    for begin in range(0, max(left.shape[-1], 1), DEPTH):
        block = left.new_zeros(*left.shape[:-1], right.shape[-1])
        for k in range(begin, min(left.shape[-1], begin + DEPTH)):
            block = _added(left[..., k, None] * right[..., None, k, :], block).float().double()
        total = block.float() if total is None else total + block.float()
    assert total is not None
    total = total if bias is None else total + bias.float()
    return total.where(~total.isnan(), torch.nan)


def _added(x: Tensor, y: Tensor) -> Tensor:
    """The sum of fp64 numbers, rounded to odd."""
    total = x + y
    of_x = total - y
    error = (x - of_x) + (y - (total - of_x))  # exact (Knuth's TwoSum)
    bits = total.view(torch.int64)
    moved = torch.where((error > 0) == (total > 0), bits + 1, bits - 1).view(torch.float64)
    return torch.where(total.isfinite() & (error != 0) & (bits & 1 == 0), moved, total)
