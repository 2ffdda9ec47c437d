"""Casts under shared scales by the C++ library, in one pass over contiguous tensors; `scaled` is the definition.

It finds the scales of casts of which `scaled.follow_largest` is true; others are given.
"""

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import remembered_by_identity
from lowp.errors import InvalidInput
from lowp.formats import Scope
from lowp.kernels import cpu
from lowp.kernels.cpu.abi import TYPE_NUMBERS, sharing_parameters
from lowp.kernels.numbers import groups, packing, scaled
from lowp.kernels.numbers.philox import Draw, Seed
from lowp.quantized import Quantized

_LOST = 1  # kLost of cpu/cast.hpp
_MOST_COLUMNS = 256  # kBeside


def quantize_groups(x: Tensor, cast: Cast, seed: Seed, out: Tensor | None = None) -> Tensor | None:
    """Return `x` rounded under its own scales, in `out` (which may be x) if given; None for casts left to `scaled`."""
    layout = groups_along(x.shape, cast, -1) if x.numel() and is_one_pass(cast) else None
    is_part = cast.is_corrected and isinstance(seed, Draw) and x.ndim < 2  # of one row, whose scales are drawn on
    if layout is None or is_part:
        return None
    out = torch.empty_like(x) if out is None else out
    _quantize(x, cast, layout, None, None, seed, out)
    return out


@remembered_by_identity
def is_one_pass(cast: Cast) -> bool:
    """Whether the library finds the scales: they follow from the largest magnitudes, or from the elements of blocks."""
    scope = scaled.scaled_format(cast).scope
    is_short = scope.kind == "block" and scope.elements <= scaled.MOST_TRIED
    return scaled.follow_largest(cast) or (cast.is_corrected and is_short)


def quantize_scaled(x: Tensor, cast: Cast, scale: Tensor, seed: Seed, zero_point: Tensor | None = None) -> Tensor:
    """Return `x` rounded under scales in the shape of its groups (fp64, contiguous).

    With a `zero_point` for every scale the integer element is limited so that their sum is in the format's range.
    """
    out, scope = torch.empty_like(x), scaled.scaled_format(cast).scope
    if scope.kind == "tile":
        scale = groups.of_rows(scale, x.shape, scope).contiguous()
        zero_point = None if zero_point is None else groups.of_rows(zero_point, x.shape, scope)
    _quantize(x, cast, GroupLayout(*_layout(x.shape, scope)), scale, zero_point, seed, out)
    return out


class GroupLayout(NamedTuple):
    """How many numbers a tensor has, how many a row of them, and how many neighbours there share a scale.

    `inner`: the distance of a row's numbers; `across`: how many neighbouring rows share scales, where they lie as
    columns.
    """

    numbers: int
    row: int
    group: int
    inner: int = 1
    across: int = 1


def quantize_finite(x: Tensor, cast: Cast, seed: int, out: Tensor, axis: int) -> bool:
    """Write fp32 `x` rounded under its own scales into `out`; groups run along `axis`.

    Returns False, with `out` undefined, if x is not finite, and where `groups_along` is None.
    """
    layout = groups_along(x.shape, cast, axis)
    return layout is not None and not (x.numel() and _quantize(x, cast, layout, None, None, seed, out))


def quantize_measured(x: Tensor, cast: Cast, scale: float, seed: Seed, out: Tensor) -> tuple[float, bool]:
    """Write fp32 `x` rounded under one scale into `out`; return the largest finite |x|, and whether all is finite."""
    largest = array("d", (0.0,))
    given = TYPE_NUMBERS[x.dtype], x, out, x.numel(), scale, largest, *cpu.drawn_bits(seed), torch.get_num_threads()
    is_finite = cpu.loaded().lowp_quantize_measured(sharing_parameters(cast), *given)
    return largest[0], bool(is_finite)


def groups_along(shape: torch.Size, cast: Cast, axis: int) -> GroupLayout | None:
    """Return the layout of groups along `axis`.

    None for groups of whole channels and tiles, which are cast as if `axis` were moved to the last place, and for tiles
    of very many columns. There random words are counted.
    """
    scope, last = scaled.scaled_format(cast).scope, len(shape) - 1
    if scope.kind == "tile" and last > 0 and axis in (-1, last):
        return _tiles(shape, scope)
    if axis in (-1, last) or scope.kind == "tensor":
        return GroupLayout(*_layout(shape, scope))
    if scope.kind == "tile" or (scope.kind == "channel" and last > 1):
        return None
    row, inner = shape[axis], shape[axis % (last + 1) + 1 :].numel()
    return GroupLayout(shape.numel(), row, groups.block_size(scope, row) if scope.kind == "block" else row, inner)


def _tiles(shape: torch.Size, scope: Scope) -> GroupLayout | None:
    """Return the layout of tiles: as groups along columns, or where they are as wide as a row of whole rows."""
    height, width = shape[-2:]
    rows, columns = groups.tile_rows(scope, shape), groups.block_size(scope, width)
    if columns >= width:
        return GroupLayout(shape.numel(), height * width, rows * width)
    return GroupLayout(shape.numel(), height, rows, width, columns) if columns <= _MOST_COLUMNS else None


def _quantize(
    x: Tensor, cast: Cast, layout: GroupLayout, scale: Tensor | None, zero_point: Tensor | None, seed: Seed, out: Tensor
) -> int:
    """Cast x into `out`; return what the library met, where a scale was found: an infinity or a NaN."""
    points = None if zero_point is None else zero_point.to(torch.int32).contiguous()
    given = TYPE_NUMBERS[x.dtype], x, TYPE_NUMBERS[out.dtype], out, *layout, scale, points, *cpu.drawn_bits(seed)
    met: int = cpu.loaded().lowp_quantize_groups(sharing_parameters(cast), *given, torch.get_num_threads())
    _check(met if met < 0 else met & _LOST, cast, x.dtype)
    return met


def encode_groups(x: Tensor, cast: Cast, seed: Seed, packed: bool) -> tuple[Tensor, Tensor, Tensor | None, int] | None:
    """Return codes, scales as in `Quantized`, the outer scale, and the number of NaNs without a code; or None."""
    format = scaled.scaled_format(cast)
    if not x.numel() or not scaled.follow_largest(cast) or format.element.bits > 16 or format.scope.kind == "tile":
        return None
    layout = _, _, group = _layout(x.shape, format.scope)
    is_packed = packed and _fills_bytes(x.shape, group, format.bits)
    shape = (*x.shape[:-1], (x.shape[-1] * format.bits + 7) // 8) if is_packed else x.shape
    codes = torch.empty(shape, dtype=torch.uint8 if is_packed else packing.code_dtype(format.element), device="cpu")
    scales = torch.empty(
        groups.group_shape(x.shape, format.scope), dtype=scaled.stored_scale_dtype(format), device="cpu"
    )
    outer = array("d", (1.0,))
    given = TYPE_NUMBERS[x.dtype], x, codes, is_packed, scales, scales.element_size(), outer, *layout
    drawn, threads = cpu.drawn_bits(seed), torch.get_num_threads()
    nans: int = cpu.loaded().lowp_encode_groups(sharing_parameters(cast), *given, *drawn, threads)
    _check(min(nans, 0), cast, x.dtype)
    codes = packing.pack(codes, format.element) if packed and not is_packed else codes
    of_all = None if format.outer is None else torch.tensor(outer[0], dtype=torch.float32, device="cpu")
    return codes, scales, of_all, nans


def decode_groups(q: Quantized) -> Tensor | None:
    """Return the values of codes under their scales; None for layouts that `encode_groups` does not give."""
    format, shape = scaled.scaled_format(q.cast), q.shape
    if format.scope.kind == "tile":
        return None
    layout = count, _, group = _layout(shape, format.scope)
    is_packed = q.length is not None
    kept = torch.uint8 if is_packed else packing.code_dtype(format.element)
    if not count or format.element.bits > 16 or q.payload.dtype is not kept:
        return None
    if is_packed and not (
        _fills_bytes(shape, group, format.bits) and q.payload.shape[-1] == (shape[-1] * format.bits + 7) // 8
    ):
        return None
    if q.scale.shape != groups.group_shape(shape, format.scope) or q.scale.dtype is not scaled.stored_scale_dtype(
        format
    ):
        return None
    codes, scales = q.payload.contiguous(), q.scale.contiguous()
    points = None if q.zero_point is None else q.zero_point.to(torch.int32).expand(scales.shape).contiguous()
    out = torch.empty(shape, dtype=q.dtype, device="cpu")
    outer = 1.0 if q.outer is None else float(q.outer)
    given = codes, is_packed, scales, scales.element_size(), outer, points, TYPE_NUMBERS[q.dtype], out, *layout
    lost = cpu.loaded().lowp_decode_groups(sharing_parameters(q.cast), *given, torch.get_num_threads())
    _check(lost, q.cast, q.dtype)
    return out


def _layout(shape: torch.Size, scope: Scope) -> tuple[int, int, int]:
    """Return how many numbers a tensor has, how many a row of them, and how many neighbours there share a scale."""
    count = shape.numel()
    if scope.kind == "tensor" or not shape:
        return count, count, count
    row = count // max(shape[0], 1) if scope.kind == "channel" else shape[-1]
    return count, row, groups.block_size(scope, row) if scope.kind in ("block", "tile") else row


def _fills_bytes(shape: torch.Size, group: int, bits: int) -> bool:
    """Whether all rows and groups of packed codes begin at whole bytes."""
    is_whole = shape[-1] * bits % 8 == 0 or shape.numel() == shape[-1]
    return 1 < bits < 8 and is_whole and (group * bits % 8 == 0 or group >= shape[-1])


def _check(status: int, cast: Cast, dtype: torch.dtype) -> None:
    if status > 0:
        raise InvalidInput(scaled.cannot_hold(cast, dtype))
    if status < 0:
        raise MemoryError(f"{cast}: no memory for the scales of the groups")
