"""Storage of tensors of a format in a file: in torch's dtype if there is one, else as packed codes and scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowp import casts, kernels
from lowp.casts import Cast
from lowp.errors import InvalidInput, brief
from lowp.formats import FORMATS, FloatFormat, IntFormat, ScaledFormat
from lowp.kernels.numbers import groups, packing, scaled
from lowp.kernels.numbers.floats import CARRIERS
from lowp.quantized import Quantized

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_DTYPES = {casts.parse(dtype).format: dtype for dtype in (*CARRIERS, *_EIGHT_BITS)}
_DTYPES[FORMATS["bf16-tpu"]] = torch.bfloat16
_PIECE = 1 << 17  # elements processed at once: 1 MiB of fp64, which stays in the cache
_MOST_DIMENSIONS = 64  # of torch's operations
SUFFIXES = {"payload": ".codes", "scale": ".scale", "outer": ".outer", "zero_point": ".zero_point"}


def stored_dtype(cast: Cast) -> torch.dtype | None:
    """Return the dtype that represents a format in as many bits; None if its values are packed."""
    return _DTYPES.get(cast.format)


def is_narrow(cast: Cast) -> bool:
    """Whether a format is only for matrices: one with shared scales, or fewer than 16 bits."""
    return isinstance(cast.format, ScaledFormat) or cast.format.bits < 16


def is_shape(value: Any) -> bool:
    """Whether plain values from a file are the shape of a tensor that torch can have: the strides must not overflow."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(size) is int and size >= 0 for size in value) and math.prod(size or 1 for size in value) < 1 << 60


@dataclass(frozen=True)
class Packed:
    """The metadata of a packed tensor: its cast, shape and original dtype."""

    cast: Cast
    shape: tuple[int, ...]
    dtype: torch.dtype

    def as_json(self) -> dict[str, Any]:
        """Return plain values for the metadata of a file."""
        return {"cast": str(self.cast), "shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}

    @staticmethod
    def from_json(given: Any) -> Packed:
        """Return the object from plain values; raise InvalidInput for others."""
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in CARRIERS}
        try:
            if not is_shape(given["shape"]):
                raise ValueError(f"a shape of {brief(given['shape'])}")
            return Packed(casts.parse(given["cast"]), tuple(given["shape"]), dtypes[given["dtype"]])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"the description of a packed tensor must be cast, shape and dtype: {error}") from None


@dataclass
class Errors:
    """The errors of rounding a tensor, accumulated over its parts."""

    largest: float = 0.0
    squares: float = 0.0
    elements: int = 0
    flushed: int = 0
    overflowed: int = 0

    @property
    def rms(self) -> float:
        """The root of the mean squared error."""
        return math.sqrt(self.squares / self.elements) if self.elements else 0.0

    def add(self, before: Tensor, after: Tensor, cast: Cast, limit: Tensor | float) -> None:
        """Count a part; |x| from `limit` on, a number or one per group, would be rounded beyond the largest number."""
        if not before.numel():
            return
        error = after - before
        low, high = (float(one) for one in torch.aminmax(error))
        if not (math.isfinite(low) and math.isfinite(high)):
            error = error.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            low, high = (float(one) for one in torch.aminmax(error))
        self.largest = max(self.largest, -low, high)
        wide = error.double().reshape(-1)
        self.squares += float(wide.dot(wide))
        self.elements += error.numel()
        self.flushed += int(torch.count_nonzero(before)) - int(torch.count_nonzero(after))
        element = cast.element
        if not (element.has_zero if isinstance(element, FloatFormat) else element.bits > 1):
            self.flushed += int(((before == 0) & (after != 0)).sum())
        self.overflowed += _overflowed(before, cast, limit)


def _overflowed(x: Tensor, cast: Cast, limit: Tensor | float) -> int:
    """Return how many finite numbers are at or beyond the limit."""
    if isinstance(limit, Tensor):
        scope = scaled.scaled_format(cast).scope
        largest = groups.fold(x.abs(), scope).amax(-1)
        if not bool((largest.reshape(limit.shape) >= limit).any()):
            return 0
        limit = groups.spread(limit, x.shape, scope)
    elif max(map(abs, torch.aminmax(x))) < limit:
        return 0
    return int((x.isfinite() & (x.double().abs() >= limit)).sum())


def pieces_of(x: Tensor, cast: Cast) -> Iterator[tuple[Tensor, int]]:
    """Yield parts of a tensor, split along its first dimension if its groups allow it, with the first index of each."""
    format, together = cast.format, 1
    whole = isinstance(format, ScaledFormat) and (
        format.scope.kind == "tensor" or format.outer is not None or x.ndim < 2
    )
    if whole or x.ndim == 0 or x.numel() <= _PIECE:
        yield x, 0
        return
    if isinstance(format, ScaledFormat) and format.scope.kind == "tile" and x.ndim == 2:
        together = groups.tile_rows(format.scope, x.shape)
    rows = max(1, _PIECE * x.shape[0] // x.numel() // together) * together
    for first in range(0, x.shape[0], rows):
        yield x[first : first + rows], first * (x.numel() // x.shape[0])


def store(x: Tensor, cast: Cast, seed: int, errors: Errors) -> dict[str, list[Tensor]]:
    """Return the stored tensors (suffix of the name -> parts along the first dimension); add the errors to `errors`."""
    dtype = stored_dtype(cast)
    parts: dict[str, list[Tensor]] = {}
    for piece, offset in pieces_of(x, cast):
        wide = piece if piece.dtype is torch.float64 else piece.float()
        if dtype is not None:
            values = kernels.quantize(wide, cast, seed=seed, offset=offset)
            found: Mapping[str, Tensor] = {"": values.to(dtype)}
            limit: Tensor | float = overflow_limit(cast.element)
        else:
            codes = kernels.encode(wide, cast, seed=seed, offset=offset, packed=True)
            found = parts_of(codes)
            scale = _scale_of(codes, cast)
            values = kernels.quantize(wide, cast, seed=seed, offset=offset, scale=scale)
            limit = _limit(codes, cast)
        errors.add(wide, values, cast, limit)
        for suffix, part in found.items():
            parts.setdefault(suffix, []).append(part)
    return parts


def parts_of(codes: Tensor | Quantized) -> dict[str, Tensor]:
    """Return the tensors of codes by their suffixes."""
    if isinstance(codes, Tensor):
        return {SUFFIXES["payload"]: codes}
    named = {name: getattr(codes, name) for name in SUFFIXES}
    return {SUFFIXES[name]: tensor for name, tensor in named.items() if tensor is not None}


def overflow_limit(element: FloatFormat | IntFormat) -> float:
    """Return the smallest magnitude that is rounded beyond the largest number of an element, to nearest even."""
    if isinstance(element, IntFormat):
        return element.maximum + 0.5 if element.bits > 1 else math.inf
    ulp = element.ulp(element.maximum)
    limit = element.maximum + ulp / 2
    is_even = element.maximum / ulp % 2 == 0
    return math.nextafter(limit, math.inf) if is_even else limit


def _scale_of(codes: Tensor | Quantized, cast: Cast) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return the computed scale, so that `quantize` does not compute it again; None if the cast has none."""
    if not isinstance(codes, Quantized) or codes.outer is not None:
        return None
    scale = scaled.read_scales(codes.scale, scaled.scaled_format(cast))
    return scale if codes.zero_point is None else (scale, codes.zero_point)


def _limit(codes: Tensor | Quantized, cast: Cast) -> Tensor | float:
    """Return `overflow_limit` of the elements, or one per group in the shape of the scale."""
    limit = overflow_limit(cast.element)
    if not isinstance(codes, Quantized):
        return limit
    format = scaled.scaled_format(cast)
    if format.affine:
        return math.inf  # the range of an affine format is that of the numbers
    scale = scaled.read_scales(codes.scale, format)
    by = scaled.divisor(scaled.Scales(scale, None, codes.outer), format)
    return by * (limit if format.other is None else torch.where(scale < 0, overflow_limit(format.other), limit))


# -- and back ---------------------------------------------------------------------------------------------------------
def unpack(name: str, packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the values of a packed tensor in its original dtype; raise InvalidInput for missing or misshapen parts."""
    cast, shape = packed.cast, torch.Size(packed.shape)
    element, format = cast.element, cast.format
    bits, whole = element.bits, element.bits in (8, 16, 32, 64)
    length = shape[-1] if shape else 1
    in_a_file = shape if whole else torch.Size((*shape[:-1], -(-length * bits // 8)))
    if isinstance(format, ScaledFormat) and not shape:  # a 0-d tensor is not packed
        whole, in_a_file = True, shape
    dtype = packing.code_dtype(element) if whole else torch.uint8
    codes = _part(name, parts, "payload", dtype, in_a_file)
    if not isinstance(format, ScaledFormat):
        values: Tensor = kernels.decode(
            codes, cast, dtype=packed.dtype, packed=not whole, length=None if whole else length
        )
        return values.reshape(shape)
    group = torch.Size(groups.group_shape(shape, format.scope))
    scale = _part(name, parts, "scale", scaled.stored_scale_dtype(format), group)
    outer = _part(name, parts, "outer", torch.float32, torch.Size(())) if format.outer is not None else None
    zero_point = _part(name, parts, "zero_point", torch.int32, group) if format.affine else None
    packed_length = None if whole or not shape else length
    return kernels.dequantize(Quantized(codes, scale, cast, outer, zero_point, packed.dtype, packed_length))


def _part(name: str, parts: Mapping[str, Tensor], which: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    part = parts.get(name + SUFFIXES[which])
    if part is None or part.dtype is not dtype or part.shape != shape:
        found = "is missing" if part is None else f"is {tuple(part.shape)} of {part.dtype}"
        raise InvalidInput(f"{name}{SUFFIXES[which]} {found}, where {tuple(shape)} of {dtype} belongs")
    return part
