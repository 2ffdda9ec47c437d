"""Products for inference with weights in codes of 1, 2 or 4 bits, and of signs by signs: exact sums of whole numbers.

The C++ library computes them. Without it, and if `lowp.kernels.use` selects another implementation, the torch code
below does. This code is the definition: the bits are the same on every machine and in every implementation.
"""

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.packed.byte_products import PANEL
from lowp.kernels.packed.byte_rows import EIGHT, Bytes, numbered, on_cpu, up
from lowp.kernels.packed.few_rows import LinearProduct, as_halves, by_torch, in_panels
from lowp.kernels.packed.few_rows import is_read as are_halves

EXPONENTS, WHOLE_SCALES = 23, -1  # kExponentBytes and kWholeScales of cpu/bytes.hpp
BLOCK, FEW = 64, 16  # depth is filled up to it; rows that are streamed past packed weights
TOP_BITS, LEAST_EXPONENT = 18, -100  # of the whole numbers that fp32 activations become, as in cpu/bytes_lanes.hpp


class ByteScales(NamedTuple):
    """How scales in bytes are read: as exponents, 2 ** (byte - 127), or as the bits of fp16; times a factor."""

    shift: int  # of a byte to the bits of fp16; 23 for exponents, to those of fp32
    factor: Tensor  # fp32, of all

    def numbers(self, scales: Tensor) -> Tensor:
        """In fp32, without the factor. Scales of finite weights are no NaN."""
        if self.shift == EXPONENTS:
            bits = scales.int() << EXPONENTS
            return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)  # 2 ** -127 is subnormal
        bits = (scales.int() & 127) << self.shift | (scales.int() & 128) << 8
        return bits.to(torch.int16).view(torch.float16).float()


def byte_scales(format: ScaledFormat, factor: float | Tensor) -> ByteScales | None:
    """How scales of a format are read as the bytes that `encode` gives; None for those that are none."""
    scale = format.scale
    if isinstance(scale, PowerOfTwo) or not scale.has_zero:
        if scale.bits > 8 or format.scope.kind == "tensor":
            return None
        shift, by = EXPONENTS, 2.0 ** (scale.min_exponent + 127)
    elif scale.bits == 8 and are_halves(scale):
        shift, _, by = as_halves(scale)
    else:
        return None
    return ByteScales(shift, torch.as_tensor(factor * by).to(torch.float32))


class PackedCodes(NamedTuple):
    """Weights [n, k] in codes of 1, 2 or 4 bits, each of which represents an integer; made by `pack_codes`.

    value = levels[code] * scale. Of `fp32` activations a group of 16, 32 or 64 has a scale; of bytes the whole row.
    Scales of 8 bits are kept as bytes, see `ByteScales`. Of two tables of levels the second is for groups whose scale
    has a minus sign: it is its magnitude times the quotient of the largest levels, so that both reach as far.
    """

    memory: Tensor  # uint8 [n / 16, depth * bits / 32, 16, 4], filled up with code 0
    scales: Tensor  # fp32 or uint8 [n / 16, groups, 16]
    levels: Tensor  # int8 [2 ** bits], or two tables [2, 16]
    n: int
    k: int
    group: int  # 0: all of the depth
    read: ByteScales | None = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.levels.shape[-1].bit_length() - 1

    @property
    def tables(self) -> int:
        """One or two."""
        return self.levels.ndim

    @property
    def depth(self) -> int:
        """k, filled up to a multiple of the block."""
        return up(self.k, BLOCK)


class Signs(NamedTuple):
    """Rows of +1 and -1 as bits (1 is -1), 64 to a word, and what each row is multiplied by."""

    memory: Tensor  # int64 [rows, words]
    scales: Tensor  # fp32 [rows]
    length: int


# -- codes ------------------------------------------------------------------------------------------------------------
def whole_levels(values: Sequence[float]) -> tuple[list[int], float] | None:
    """The values of codes as whole numbers times a power of two; None where these are beyond 64."""
    per_unit = max(float(value).as_integer_ratio()[1] for value in values)  # of floats a power of two
    whole = [int(value * per_unit) for value in values]
    return (whole, 1 / per_unit) if max(map(abs, whole)) <= 64 else None


def levels_of(element: FloatFormat | IntFormat) -> tuple[list[int], float] | None:
    """The values of the 16 codes of a format of up to 4 bits as whole numbers, and their unit; None for others."""
    if isinstance(element, IntFormat):  # two's complement
        return ([code - (code >> 3 << 4) for code in range(16)], 1.0) if 2 <= element.bits <= 4 else None
    if element.bits != 4 or not element.signed or element.has_nan or element.has_infinity:
        return None
    return whole_levels(list(element.values()))


def is_read(cast: Cast) -> bool:
    """Whether a format is four bits or less under scales that the product has."""
    format = cast.format
    if levels_of(cast.element) is None:
        return False
    if not isinstance(format, ScaledFormat):
        return isinstance(format, FloatFormat)
    if format.affine or (format.other is not None and byte_scales(format, 1.0) is None):
        return False
    return format.scope.kind in ("tensor", "row") or format.scope.size % 16 == 0


def pack_codes(
    codes: Tensor,
    scales: Tensor,
    levels: Sequence[int] | Sequence[Sequence[int]],
    group: int,
    read: ByteScales | None = None,
) -> PackedCodes:
    """Pack codes (int64 [n, k]) for `levels`, with scales [n, groups]; `group`: 16, 32 or 64 elements, 0 for a row.

    `read` tells how to read scales in bytes. With it levels may be two tables.
    """
    n, k = on_cpu(codes, "the weight").shape
    tables = torch.tensor(levels, dtype=torch.int8, device="cpu")
    if group not in (0, 16, 32, 64):
        raise InvalidInput(f"scales for groups of {group}: give 16, 32 or 64, or 0 for a scale a row")
    bits, width, depth = tables.shape[-1].bit_length() - 1, up(n, PANEL), up(k, BLOCK)
    while group and group * int(tables.int().abs().max()) >= 1 << 12:  # or the sum of a group might leave int32
        group, scales = group // 2, scales.repeat_interleave(2, 1)
    per = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, depth - k, 0, width - n))
    places = padded.reshape(width // PANEL, PANEL, depth // (4 * per), per, 4) << torch.arange(
        0, 8, bits, device="cpu"
    ).reshape(per, 1)
    memory = places.sum(3).to(torch.uint8).transpose(1, 2).contiguous()
    groups = depth // group if group else 1
    scales = scales.float() if read is None else scales
    scales = torch.nn.functional.pad(scales, (0, groups - scales.shape[1], 0, width - n))
    scales = scales.reshape(width // PANEL, PANEL, groups).transpose(1, 2).contiguous()
    return PackedCodes(memory, scales, tables, n, k, group, read)


def codes_of(w: PackedCodes) -> Tensor:
    """Return the codes in uint8 [n, k]."""
    return _codes(w, None)[:, : w.k].contiguous()


def _codes(w: PackedCodes, rows: Tensor | None) -> Tensor:
    """Return the codes [n, depth], or some rows of them."""
    shifts = torch.arange(0, 8, w.bits, dtype=torch.uint8, device="cpu").reshape(-1, 1)
    memory = w.memory.transpose(1, 2) if rows is None else w.memory[rows // PANEL, :, rows % PANEL]
    codes = memory[..., None, :] >> shifts & ((1 << w.bits) - 1)
    return codes.reshape(-1, w.depth)[: w.n if rows is None else None]


def _numbers_of(w: PackedCodes, rows: Tensor | None, scales: Tensor) -> Tensor:
    """Return the whole numbers in fp32 [n, groups, elements], or some rows of them, under these scales."""
    codes = _codes(w, rows).int().reshape(*scales.shape, -1)
    if w.tables == 2:
        codes = codes + 16 * (scales < 0)[..., None]
    return torch.nn.functional.embedding(codes, w.levels.float().reshape(-1, 1)).squeeze(-1)


def scales_of(w: PackedCodes, rows: Tensor | None = None) -> Tensor:
    """Return the scales in fp32 [n, groups], or some rows of them.

    Of two tables in fp64, which the values are rounded from, and with a minus sign where the second one holds.
    """
    if rows is not None:
        stored = w.scales[rows // PANEL, :, rows % PANEL]
    else:
        stored = w.scales.transpose(1, 2).reshape(-1, w.scales.shape[1])[: w.n]
    if w.read is None or w.tables == 1:
        return stored if w.read is None else w.read.numbers(stored) * w.read.factor
    every = w.read.numbers(torch.arange(256, device="cpu")).double() * w.read.factor
    most, most_of_second = w.levels.amax(1).tolist()
    every = torch.where(every < 0, every * most / most_of_second, every)
    return every.index_select(0, stored.int().flatten()).view(stored.shape)


def code_values(w: PackedCodes, first: int = 0, count: int | None = None) -> Tensor:
    """Return the weights in fp32 [n, k], or `count` rows from a multiple of 16 on."""
    count = w.n - first if count is None else count
    panels = slice(first // PANEL, up(first + count, PANEL) // PANEL)
    return code_rows(w._replace(memory=w.memory[panels], scales=w.scales[panels], n=count))


def code_rows(w: PackedCodes, rows: Tensor | None = None) -> Tensor:
    """Return rows of the weights in fp32 [rows, k]; all of them for None. Raises IndexError for those that are not."""
    if not uses_library():
        _check(rows is None or not rows.numel() or bool((rows >= 0).all() and (rows < w.n).all()), w)
        scales = scales_of(w, rows)
        grouped = _numbers_of(w, rows, scales) * (scales if w.tables == 1 else scales.abs())[..., None]
        return grouped.float().flatten(1)[:, : w.k]
    rows = None if rows is None else rows.long().contiguous()
    out = torch.empty(w.n if rows is None else len(rows), w.k, dtype=torch.float32, device="cpu")
    numbers = array("q", (len(out), w.k, w.depth, w.group or w.depth, w.bits, _shift(w), w.tables, w.n))
    are_there = cpu.loaded().lowp_codes_values(
        numbers, rows, w.memory, w.levels, w.scales, w.read and w.read.factor, out, torch.get_num_threads()
    )
    _check(are_there, w)
    return out


def _check(are_there: bool, w: PackedCodes) -> None:
    if not are_there:
        raise IndexError(f"a row that is not there: give 0 to {w.n - 1}")


def _shift(w: PackedCodes) -> int:
    """How the C++ library reads the scales."""
    return WHOLE_SCALES if w.read is None else w.read.shift


def multiply_codes(
    x: Tensor | Bytes,
    w: PackedCodes,
    bias: Tensor | None = None,
    linear_of: Callable[[Tensor], LinearProduct] = lambda x: by_torch,
) -> Tensor:
    """Return x @ w.T (+ bias) in fp32, of x fp32 [rows, k] for weights in groups, or of bytes for those without.

    Every group of fp32 numbers becomes whole numbers, of which the largest has 19 bits; bytes are such. The sum of a
    group is exact, rounded to fp32, and multiplied by the product of the scales; the groups are added in their order.
    Many rows multiply the values of the weights in fp32, by `linear_of(x)`, exactly where the sums of bytes allow it;
    so do numbers that are infinite or NaN.
    """
    if isinstance(x, Bytes):
        if w.group or x.payload.shape[1] != up(w.k, EIGHT):
            raise InvalidInput(
                f"bytes of depth {x.payload.shape[1]} do not fit codes of {w.k} inputs in groups of {w.group}"
            )
        most = w.k * x.highest * int(w.levels.int().abs().max())
        if len(x.payload) > FEW and most <= 1 << 24:  # every sum of these is exact in fp32, in any order
            numbers = code_values(w._replace(scales=torch.ones_like(w.scales, dtype=torch.float32), read=None))
            exact = (x.payload[:, : w.k].float() - x.zero) @ numbers.t()
            result = exact * (torch.tensor(x.scale, dtype=torch.float32, device="cpu") * scales_of(w)[:, 0])
            return result if bias is None else result + bias.float()
        found = _multiplied(x.payload, x, w, bias)
        assert found is not None  # whole numbers are finite
        return found
    if not w.group:
        raise InvalidInput("fp32 activations do not fit weights with a scale a row: give bytes")
    found = _multiplied(numbered(x.detach()), None, w, bias) if on_cpu(x, "x").shape[0] <= FEW else None
    if found is None:
        return in_panels(x, functools.partial(code_values, w), (w.n, w.k), bias, linear_of(x))
    return found


def _multiplied(x: Tensor, of_bytes: Bytes | None, w: PackedCodes, bias: Tensor | None) -> Tensor | None:
    """Return the product of rows of fp32 or of bytes; None if a number is infinite or NaN."""
    bias = None if bias is None else numbered(bias.detach().float())
    if not uses_library():
        return _defined(x, of_bytes, w, bias)
    planes, zero, scale = 3, 0, 0.0
    if of_bytes is not None:
        planes, zero, scale = 1 if of_bytes.highest < 128 else 2, of_bytes.zero, of_bytes.scale
    rows, group = len(x), w.group or w.depth
    out = torch.empty(rows, w.n, dtype=torch.float32, device="cpu")
    numbers = (rows, w.n, w.k, x.stride(0), w.depth, group, planes, zero, w.bits, _shift(w), w.tables)
    given = x, scale, w.memory, w.levels, w.scales, w.read and w.read.factor, bias, out
    is_finite = cpu.loaded().lowp_codes_multiply(cpu.level(), array("q", numbers), *given, torch.get_num_threads())
    return out if is_finite else None


def _defined(x: Tensor, of_bytes: Bytes | None, w: PackedCodes, bias: Tensor | None) -> Tensor | None:
    """The same: sums of the groups in fp64, which holds them exactly, added one after the other in fp32."""
    scales, size = scales_of(w), w.group or w.depth
    weights = _numbers_of(w, None, scales).double()
    if w.read is not None and w.tables == 2:
        factor, (most, most_of_second) = w.read.factor, w.levels.amax(1).tolist()
        factors = torch.where(scales < 0, (factor.double() * most / most_of_second).float(), factor)
        scales = w.read.numbers(w.scales.transpose(1, 2).reshape(-1, scales.shape[1])[: w.n]).abs() * factors
    if of_bytes is not None:
        x = x[:, : w.k].double() - of_bytes.zero
    elif not bool(x.isfinite().all()):
        return None
    grouped = torch.nn.functional.pad(x.double(), (0, w.depth - w.k)).reshape(len(x), -1, size)
    largest = grouped.abs().amax(2, keepdim=True).clamp(2.0**LEAST_EXPONENT)
    if of_bytes is None:
        of_rows = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1 - TOP_BITS)
        grouped = (grouped / of_rows).round()
    else:
        of_rows = torch.full_like(largest, of_bytes.scale)
    total = torch.zeros(len(x), w.n, dtype=torch.float32, device="cpu")
    for group, some in enumerate(grouped.unbind(1)):
        total = total + (some @ weights[:, group].t()).float() * (of_rows[:, group].float() * scales[:, group])
    return total if bias is None else total + bias


# -- signs ------------------------------------------------------------------------------------------------------------
def signs(x: Tensor) -> Signs:
    """Rows [rows, k] as their signs (-1 for x < 0, else +1) and their mean magnitudes, as format binary has them."""
    return Signs(_words(on_cpu(x, "x") < 0), x.double().abs().mean(1).float(), x.shape[1])


def multiply_signs(a: Signs, b: Signs, bias: Tensor | None = None) -> Tensor:
    """Return a @ b.T (+ bias) in fp32, of rows of signs: counts of bits, exact, then scaled."""
    if a.length != b.length:
        raise InvalidInput(f"rows of {a.length} signs do not fit rows of {b.length}")
    if uses_library():
        sums = torch.empty(len(a.memory), len(b.memory), dtype=torch.int32, device="cpu")
        given = a.memory, len(a.memory), b.memory, len(b.memory), a.memory.shape[1], b.length, sums
        cpu.loaded().lowp_bits_multiply(cpu.level(), *given, torch.get_num_threads())
    else:
        sums = sign_values(a).double() @ sign_values(b).double().t()
    result = sums.float() * (a.scales[:, None] * b.scales)
    return result if bias is None else result + bias.float()


def _words(negative: Tensor) -> Tensor:
    """Rows of truth as bits, 64 to an int64."""
    rows, length = negative.shape
    padded = torch.nn.functional.pad(negative, (0, up(length, 64) - length))
    octets = padded.reshape(rows, -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device="cpu")
    return octets.sum(-1, dtype=torch.uint8).view(torch.int64)


def sign_values(s: Signs) -> Tensor:
    """The signs in fp32 [rows, length], without their scales."""
    bits = s.memory.view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    return 1.0 - 2.0 * bits.reshape(s.memory.shape[0], -1)[:, : s.length].float()
