"""Rows of fp32 times weights that are stored in fp16, bf16, or codes of 8 or 6 bits under scales.

A language model's next token has few rows: such a product reads every weight once and does two operations with it, so
that it takes what the memory takes. The weights are read as they are stored. Sums of weights in 16 bits are fp64, where
their products with fp32 are exact, and rounded once; those of codes are fp32. Their order is fixed: of the products
under one scale, every 16th is added up one after the other; these 16 sums times the scale are added to those of the
scales before; the 16 totals are added in halves (the first 8 and the last 8, and so on), then the bias in fp64. So the
bits are the same with every instruction set, with any number of threads, and without the C++ library. With many rows
it is a product in fp32, which may read weights in 16 bits as they are; of codes panels are converted, one after the
other.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import real_tensors
from lowp.formats import FloatFormat, IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.numbers import bitwise, groups, packing, scaled
from lowp.kernels.packed.byte_rows import numbered, up

SUMS = 16  # partial ones, as in cpu/rows.hpp
# with more rows a product in fp32 takes less time, of weights converted to it where they are codes
FEW, FEW_OF_16_BITS = 8, 2
PANEL = 1 << 20  # weights that are converted at a time: 4 MiB
_SIXTEEN = {torch.float16: 0, torch.bfloat16: 1}
_CODES, _SIX, _INTEGERS, _WITH_NAN = 2, 3, 4, 5  # kinds of weights, as in cpu/rows.hpp


# Returns x @ weight.T (+ bias) in fp32, of x fp32 [rows, k] and a weight [n, k] in fp32 or 16 bits.
LinearProduct = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


class StoredRows(NamedTuple):
    """A weight [n, k] as it is stored; made by `stored_rows`. value = number of the code * scale * factor.

    Several may be one behind the other: then memory and scales have a first dimension of them.
    """

    memory: Tensor  # [n, k] in fp16 or bf16, else codes of `element` in bytes [n, ...]
    k: int
    element: FloatFormat | IntFormat | None = None
    scales: Tensor | None = None  # fp32, or uint8 exponents e of 2 ** (e - 127), [n / together, groups]
    group: int = 0  # neighbours under a scale, a multiple of 16; 0: the whole row
    together: int = 1  # rows that share their scales
    factor: float = 1.0

    @property
    def n(self) -> int:
        """The number of rows."""
        return self.memory.shape[-2]


def stored_rows(
    memory: Tensor, k: int, cast: Cast | None = None, scale: Tensor | None = None, outer: Tensor | None = None
) -> StoredRows | None:
    """Return a weight of `k` columns as the product reads it: in 16 bits, or codes and scales as `encode` has them.

    None for formats that it does not read: integers and floats of other than 8 or 6 bits or of more than 5 bits of
    exponent, blocks that are no multiple of 16, zero points.
    """
    if memory.dtype in _SIXTEEN:
        return StoredRows(memory, k)
    if cast is None or not is_read(cast.element):
        return None
    format = cast.format
    if not isinstance(format, ScaledFormat):
        return StoredRows(memory, k, cast.element)
    assert scale is not None
    scope, factor = format.scope, 1.0 if outer is None else float(outer)
    if format.affine or format.other or scope.kind == "channel" or scope.size % SUMS:
        return None
    if scope.kind == "tensor":
        return StoredRows(memory, k, cast.element, factor=factor * float(scaled.read_scales(scale, format)))
    if isinstance(format.scale, PowerOfTwo) or not format.scale.has_zero:
        if scale.dtype is not torch.uint8:
            return None
        factor *= 2.0 ** (format.scale.min_exponent + 127)
    elif scale.dtype is not torch.float32:
        scale = scaled.read_scales(scale, format).float()
    together = groups.tile_rows(scope, torch.Size((memory.shape[0], k))) if scope.kind == "tile" else 1
    return StoredRows(
        memory, k, cast.element, scale if scale.ndim == 2 else scale[:, None], scope.size, together, factor
    )


@functools.cache
def is_read(element: FloatFormat | IntFormat) -> bool:
    """Whether codes of a format of 8 or 6 bits are read: integers, and floats that fp16 has, times a factor."""
    if isinstance(element, IntFormat):
        return element.bits == 8
    if element.bits not in (8, 6) or not element.signed:
        return False
    shift, last, factor = as_halves(element)
    with real_tensors():
        codes = torch.arange(1 << element.bits, dtype=torch.uint8, device="cpu")
        places = codes.to(torch.int16) << (8 - element.bits)
        magnitudes = torch.where(places & 127 > last, 0x7FFF, (places & 127) << shift)
        halves = (magnitudes | (places & 128) << 8).to(torch.int16).view(torch.float16)
        wanted = bitwise.decoded(codes, element, torch.float64)
        return torch.equal((halves.double() * factor).nan_to_num(-0.1), wanted.nan_to_num(-0.1))


@functools.cache
def as_halves(element: FloatFormat) -> tuple[int, int, float]:
    """How codes become fp16: the shift of their magnitude of 7 bits, the last that is no NaN, the value's factor."""
    left = 8 - element.bits
    with real_tensors():
        codes = torch.arange(1 << element.bits - 1, dtype=torch.uint8, device="cpu")
        last = int(bitwise.decoded(codes, element, torch.float64).isfinite().nonzero().max())
    if element.has_infinity:  # as in fp16, or `is_read` finds that they differ
        last = 127
    return 10 - element.mantissa_bits - left, last << left, 2.0 ** (15 - element.bias)


def multiply(
    x: Tensor,
    weight: Tensor | StoredRows,
    bias: Tensor | None = None,
    linear_of: Callable[[Tensor], LinearProduct] = lambda x: by_torch,
) -> Tensor:
    """Return x @ weight.T (+ bias) in fp32, of x fp32 [rows, k] and a weight [n, k] in fp16, bf16 or codes.

    Of several weights, x [count, rows, k] has as many, and there is no bias.

    More rows, and those on an accelerator, are products in fp32, by `linear_of(x)`.
    """
    if isinstance(weight, Tensor):
        weight = StoredRows(weight, weight.shape[1])
    rows, k = x.shape[-2:]
    memory, several = weight.memory, weight.memory.ndim > 2
    most = FEW if weight.element is not None else FEW_OF_16_BITS
    if rows > most or memory.stride(-1) != 1 or not (x.is_cpu and memory.is_cpu):
        if several:
            return x @ torch.stack([values(one) for one in _each(weight)]).transpose(1, 2)
        linear = linear_of(x)
        if weight.element is None and linear is not by_torch and memory.is_cpu:
            return linear(x, memory, bias)
        return in_panels(x, functools.partial(values, weight), (weight.n, k), bias, linear)
    x = numbered(x.detach())
    bias = None if bias is None else numbered(bias.detach().float())
    if not uses_library():
        if several:
            return torch.stack([_defined(*pair, None) for pair in zip(x, _each(weight), strict=True)])
        return _defined(x, weight, bias)
    out = torch.empty(*x.shape[:-1], weight.n, dtype=torch.float32, device="cpu")
    given = x, rows, array("q", (x.stride(0), x.stride(-2))), memory, *_described(weight), bias, out
    has_memory = cpu.loaded().lowp_rows_multiply(cpu.level(), *given, torch.get_num_threads())
    if not has_memory:
        raise MemoryError(f"a product of {rows} rows of {k}: give fewer rows")
    return out


def _each(weight: StoredRows) -> Iterator[StoredRows]:
    """The weights that are one behind the other."""
    for i, memory in enumerate(weight.memory):
        yield weight._replace(memory=memory, scales=None if weight.scales is None else weight.scales[i])


def values(weight: StoredRows, first: int = 0, count: int | None = None) -> Tensor:
    """Return rows of a weight in fp32 [count, k], from the first; all of them by default."""
    count = weight.n - first if count is None else count
    if weight.element is None:
        return weight.memory[first : first + count].float()
    if not (uses_library() and weight.memory.is_cpu and weight.memory.stride(1) == 1):
        numbers, scales = _numbers(weight)
        group = weight.group or up(weight.k, SUMS)
        spread = scales.repeat_interleave(group, 1)[:, : weight.k]
        return (numbers * spread)[first : first + count].float()
    out = torch.empty(count, weight.k, dtype=torch.float32, device="cpu")
    described, shared, factor = _described(weight)
    cpu.loaded().lowp_rows_values(
        cpu.level(), weight.memory, described, shared, factor, first, count, out, torch.get_num_threads()
    )
    return out


def in_panels(
    x: Tensor, values: Callable[[int, int], Tensor], shape: tuple[int, int], bias: Tensor | None, linear: LinearProduct
) -> Tensor:
    """Return x @ weight.T (+ bias) in fp32, of a weight of this shape whose rows `values(first, count)` gives."""
    n, k = shape
    step = max(64, PANEL // max(k, 1) // 64 * 64)
    if n <= step:
        return linear(x, values(0, n), bias)
    out = x.new_empty(x.shape[0], n)
    for first in range(0, n, step):
        count = min(step, n - first)
        some = None if bias is None else bias[first : first + count]
        out[:, first : first + count] = linear(x, values(first, count), some)
    return out


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T (+ bias) in fp32, of a weight in fp32 or 16 bits."""
    return F.linear(x, weight.float(), bias)


def _described(weight: StoredRows) -> tuple[array[int], Tensor | None, float]:
    """What the C++ library reads: numbers, scales and factor, as struct RowMatrix of cpu/rows.hpp has them."""
    element, scales, factor = weight.element, weight.scales, weight.factor
    kind, shift, last = _SIXTEEN.get(weight.memory.dtype, _INTEGERS), 0, 0
    if isinstance(element, FloatFormat):
        shift, last, of_halves = as_halves(element)
        kind = _SIX if element.bits == 6 else _CODES if last == 127 else _WITH_NAN
        factor *= of_halves
    scale_kind = 0 if scales is None else 1 if scales.dtype is torch.float32 else 2
    group, groups = weight.group or up(weight.k, SUMS), 1 if scales is None else scales.shape[-1]
    scales = None if scales is None else scales.contiguous()
    memory, (count, apart, scales_apart) = weight.memory, (1, 0, 0)
    size = memory.element_size()
    if memory.ndim > 2:
        count, apart = memory.shape[0], memory.stride(0) * size
        scales_apart = 0 if scales is None else scales.stride(0)
    numbers = kind, weight.n, weight.k, memory.stride(-2) * size, group, scale_kind, groups, weight.together
    return array("q", (*numbers, shift, last, count, apart, scales_apart)), scales, factor


def _numbers(weight: StoredRows) -> tuple[Tensor, Tensor]:
    """Return the numbers of the codes in fp64 [n, k], and the scales [n, groups] with the factor."""
    memory, element = weight.memory, weight.element
    if not isinstance(element, FloatFormat):
        numbers = memory.double()
    else:
        codes = memory.view(torch.uint8)
        codes = codes if element.bits == 8 else packing.unpack(codes, element, weight.k)
        numbers = bitwise.decoded(codes, element, torch.float64)
    return numbers, scales_of(weight)


def scales_of(weight: StoredRows) -> Tensor:
    """Return the scales in fp64 [n, groups], with the factor."""
    scales = weight.scales
    if scales is None:
        wide = torch.ones(weight.n, 1, dtype=torch.float64, device=weight.memory.device)
    elif scales.dtype is torch.float32:
        wide = scales.double()
    else:
        wide = torch.where(scales == 255, math.nan, torch.exp2(scales.double() - 127))
    return wide.repeat_interleave(weight.together, 0)[: weight.n] * weight.factor


def _defined(x: Tensor, weight: StoredRows, bias: Tensor | None) -> Tensor:
    """The sums in their order, in operations of torch: in fp64 of weights in 16 bits, else in fp32."""
    filled = 0, -x.shape[1] % SUMS
    x = F.pad(x.double() if weight.element is None else x, filled)
    numbers, scales = (one.to(x.dtype) for one in _numbers(weight))
    factors = F.pad(numbers, filled)
    group = weight.group or x.shape[1]
    total = torch.zeros(x.shape[0], weight.n, SUMS, dtype=x.dtype, device="cpu")
    for g, begin in enumerate(range(0, x.shape[1], group)):
        some = torch.zeros_like(total)
        for i in range(begin, min(begin + group, x.shape[1]), SUMS):
            some += x[:, None, i : i + SUMS] * factors[:, i : i + SUMS]
        total += some * scales[:, g, None]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    found = (total[..., 0] if bias is None else total[..., 0].double() + bias.double()).float()
    return found.nan_to_num_(math.nan, math.inf, -math.inf)  # one NaN, of the positive sign
