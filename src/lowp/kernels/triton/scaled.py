"""Casts to formats with a scale per block or row: values, or codes and scales, in one launch if supported."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding, carry_of
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, IntFormat, PowerOfTwo, ScaledFormat, Scope
from lowp.kernels.numbers import groups, packing
from lowp.kernels.numbers import scaled as definition
from lowp.kernels.numbers.philox import Seed, drawn
from lowp.kernels.triton import plans
from lowp.kernels.triton.calls import integers, key_of
from lowp.kernels.triton.device import rows, scaled, tries
from lowp.kernels.triton.launch import BLOCK, block_for, launch, run
from lowp.kernels.triton.plans import DTYPES, CastTraits, Codes, Layout, Numbers, exact, layout, plan

_FP32, _E8M0 = FORMATS["fp32"], FORMATS["e8m0"]
_NEAREST = (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY)
_MOST_BITS, _WIDEST_RANGE = 8, 60  # most bits of an element, and its range of exponents
_LOWEST_POWER, _HIGHEST_POWER = -133, 127
LONGEST_BLOCK = 512
LONG_ROW = 8 * BLOCK  # numbers from which on a row is cast by several programs


class Sharing(NamedTuple):
    """The properties that determine the instructions for computing and storing a scale."""

    power: bool  # the scale is a power of two, otherwise the ratio of two maxima
    low: bool  # the scale may be below 2**-127, and is at most 2**121
    outer: bool  # there is an outer scale of the whole tensor
    marks: bool  # a scale of NaN marks groups with infinities or NaNs
    codes: bool  # codes and scales are written, otherwise values
    loses: bool  # numbers may be lost, and are counted
    direct: bool  # codes are computed directly from fp32 bits
    low_bits: int  # bits of fp32 that are zero at the midpoint of two elements
    near: bool  # quotients are approximated and corrected, see `device.usual`
    summed: bool  # values under powers of two are rounded by a sum, see there
    tolerance: int  # error bound of a quotient in units of fp32's last place
    spoils: bool = False  # an infinity becomes NaN; of rows
    keeps: bool = False  # infinities and NaNs stay as they are
    again: bool = True  # rare cases are computed; False only to count the instructions of the usual path
    form: CastTraits | None = None  # the form of the scale's cast
    layout: Layout | None = None


class Shared(NamedTuple):
    """The numbers of a shared scale."""

    top: int  # the exponent of the largest element, minus the headroom
    carry: int  # added to the bits of a group's largest number before its exponent is read
    lowest: int
    highest: int
    maximum: float  # the number of the elements that the largest one is to become
    inverse: float  # the first 24 bits of its inverse
    inverse_rest: float  # the next 24 bits


class ScaledCastPlan(NamedTuple):
    """A cast under shared scales for tensors of one dtype."""

    form: CastTraits
    numbers: Numbers
    layout: Layout
    codes: Codes
    sharing: Sharing
    shared: Shared
    scale_numbers: Numbers
    scale_codes: Codes
    second: Shared | None = None  # of a second scale, where groups have the better of two, or of two elements


def _is_tried(cast: Cast) -> bool:
    """Whether each group has the better of two scales or elements, of e2m1."""
    format = definition.scaled_format(cast)
    return format.other is not None or definition.scaling_of(cast).rule == "4/6"


@functools.lru_cache(maxsize=256)
def planned(cast: Cast, dtype: torch.dtype, codes: bool) -> ScaledCastPlan | None:
    """Return the plan of a cast; None if no kernel supports it and torch computes it in fp64."""
    if dtype is torch.float64 or not _is_possible(cast, codes):
        return None
    # a draw compares all bits of a quotient, which fp32 holds of powers of two alone
    is_wide = cast.is_stochastic and not _is_power(definition.scaled_format(cast))
    form, numbers = plan(cast.element_cast, torch.float64 if is_wide else torch.float32)
    shape, places = layout(cast.element, False)
    shared = _shared(cast)
    sharing, shape = _sharing(cast, dtype, codes, form, shape)
    second = shared._replace(maximum=4.0, inverse=0.25, inverse_rest=0.0) if _is_tried(cast) else None
    found = ScaledCastPlan(form, numbers, shape, places, sharing, shared, numbers, places, second)
    return _of_powers(found, cast) if sharing.power else _of_ratios(found, cast)


def _is_possible(cast: Cast, codes: bool) -> bool:
    """Whether a kernel computes scales as the cast chooses them, for all its groups, and rounds its elements."""
    format, scaling = cast.format, cast.scaling
    if not isinstance(format, ScaledFormat) or scaling is None or scaling.kind != "current" or format.affine:
        return False
    is_tried, scope = _is_tried(cast), format.scope.kind
    if scaling.rule == "eden" or not _is_small(format.element) or (is_tried and (not format.outer or scope != "block")):
        return False
    if cast.is_stochastic and (is_tried or scope == "tile"):
        return False
    return not (codes and scope == "tensor" and _is_power(format))  # of zeros alone the scale is 1


def _is_power(format: ScaledFormat) -> bool:
    """Whether scales are powers of two."""
    return isinstance(format.scale, PowerOfTwo) or format.scale == _E8M0


def _shared(cast: Cast) -> Shared:
    """Return the numbers of a shared scale, but for the limits of its exponent."""
    element, headroom = cast.element, definition.scaling_of(cast).headroom
    maximum = float(element.maximum) / 2.0**headroom
    inverse = float(np.float32(1.0 / maximum))
    carry = 0 if _is_tried(cast) else carry_of(cast, 23)
    return Shared(element.max_exponent - headroom, carry, 0, 0, maximum, inverse, 1.0 / maximum - inverse)


def _sharing(cast: Cast, dtype: torch.dtype, codes: bool, form: CastTraits, shape: Layout) -> tuple[Sharing, Layout]:
    """Return what determines the instructions of a scale, and the layout of codes under it."""
    format, element = definition.scaled_format(cast), cast.element
    is_power = _is_power(format)
    has_outer = format.outer is not None and not is_power  # beside a power of two it is not used
    marks = format.scale == _E8M0 or has_outer
    loses = not marks and shape.nan == "none" if codes else is_power and dtype is not torch.float32
    is_direct = codes and is_power and plans.is_direct(form, shape)
    if marks and is_direct:  # the codes of a group with a NaN are zeros
        shape = shape._replace(nan="none")
    precision = element.mantissa_bits + 1 if isinstance(element, FloatFormat) else element.bits - 1
    sharing = Sharing(
        power=is_power,
        low=False,
        outer=has_outer,
        marks=marks,
        codes=codes,
        loses=loses,
        direct=is_direct,
        low_bits=23 - precision,
        near=not is_power and _is_near(form, shape, cast),
        summed=is_power and not codes and _is_summed(form),
        tolerance=0,
    )
    return sharing, shape


def _of_powers(found: ScaledCastPlan, cast: Cast) -> ScaledCastPlan | None:
    """Return the plan of a cast whose scales are powers of two; None if no kernel supports it."""
    scale = definition.scaled_format(cast).scale
    lowest, highest = scale.min_exponent, scale.max_exponent
    is_held = _LOWEST_POWER <= lowest and highest <= _HIGHEST_POWER
    is_low, top = lowest < -127, found.shared.top
    # below 2**-126 numbers count as 2**-127, whose scale is the smallest also where it is doubled
    is_doubled = found.shared.carry != 0
    if not is_held or top < is_doubled or (is_low and (highest > 121 or top < 6 + is_doubled)):
        return None
    if cast.rounding not in _NEAREST and not cast.is_stochastic:
        return None
    shared = found.shared._replace(lowest=lowest, highest=highest)
    return found._replace(sharing=found.sharing._replace(low=is_low), shared=shared)


def _of_ratios(found: ScaledCastPlan, cast: Cast) -> ScaledCastPlan | None:
    """Return the plan of a cast whose scales are ratios of maxima; None if no kernel supports it."""
    format = definition.scaled_format(cast)
    scale = format.scale
    if found.form.flush or not (cast.rounding in _NEAREST or cast.is_stochastic):
        return None
    if format.outer is None:
        return found if scale == _FP32 else None
    if format.scope.kind not in ("block", "tile"):  # a row's scale is one number, which no kernel rounds
        return None
    if format.outer != _FP32 or not isinstance(scale, FloatFormat) or not _is_small(scale):
        return None
    if not scale.has_nan or not _is_small_product(format.element, scale):
        return None
    if format.other is not None and (format.element != FORMATS["e2m1"] or cast.rounding is not Rounding.NEAREST_EVEN):
        return None
    scale_form, scale_numbers = plan(Cast(scale, overflow=Overflow.SATURATE), torch.float32)
    scale_layout, scale_codes = layout(scale, False)
    sharing = found.sharing._replace(tolerance=4, form=scale_form, layout=scale_layout)
    return found._replace(sharing=sharing, scale_numbers=scale_numbers, scale_codes=scale_codes)


def _is_nearest(form: CastTraits) -> bool:
    """Whether a sum in fp32 rounds to nearest even, of both signs."""
    return form.by_addition and form.rounding == "nearest-even" and not form.flush


def _is_summed(form: CastTraits) -> bool:
    """Whether it does that of all numbers of a small float, with -0: a power of two with their ulp is not too large."""
    return _is_nearest(form) and form.minus_zero


def _is_near(form: CastTraits, shape: Layout, cast: Cast) -> bool:
    """Whether a sum in fp32 rounds quotients to elements, and none but those under a rounded scale overflow.

    With headroom 63.5 may become 64 in int8, whose value exceeds the group's largest number, and perhaps fp16's.
    """
    if definition.scaling_of(cast).headroom:
        return False
    return _is_nearest(form) if shape.integer else _is_summed(form)


def _is_small(element: FloatFormat | IntFormat) -> bool:
    """Whether an element is signed, has 3 to 8 bits, and a range far inside that of fp32's normal numbers."""
    if isinstance(element, IntFormat):
        return 2 < element.bits <= _MOST_BITS
    in_range = -_WIDEST_RANGE < element.min_exponent - element.mantissa_bits and element.max_exponent < _WIDEST_RANGE
    return element.signed and element.has_zero and 2 < element.bits <= _MOST_BITS and in_range


def _is_small_product(element: FloatFormat | IntFormat, scale: FloatFormat) -> bool:
    """Whether elements times scales have as few bits and as small a range as the largest supported element."""
    if isinstance(element, IntFormat):
        return False
    lowest = element.min_exponent - element.mantissa_bits + scale.min_exponent - scale.mantissa_bits
    highest = element.max_exponent + scale.max_exponent
    return element.precision + scale.precision <= 12 and -_WIDEST_RANGE < lowest and highest < _WIDEST_RANGE


def quantize_groups(x: Tensor, cast: Cast, seed: Seed, keeps: bool = False) -> Tensor | None:
    """Return `x`, which is contiguous, rounded by a cast under current scales; None if no kernel supports it.

    With `keeps` infinities and NaNs of x stay as they are.

    Raises InvalidInput if a 16-bit tensor cannot hold a value under a power of two; this check waits for the device.
    """
    found = _launched(x, cast, seed, False, keeps=keeps)
    if found is None:
        return None
    values, _scales, _outer, lost = found
    if lost is not None and int(lost):
        raise InvalidInput(definition.cannot_hold(cast, x.dtype))
    return values


def encode_groups(
    x: Tensor, cast: Cast, seed: Seed, packed: bool, spoils: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, int] | None:
    """Return codes, scales as in `Quantized`, the outer scale, and the number of NaNs without a code; or None.

    `spoils`: an infinity under the scale of a row or tensor has the code of NaN. Waits for the device only if neither
    elements nor scales have a NaN.
    """
    found = _launched(x, cast, seed, True, packed, spoils=spoils)
    if found is None:
        return None
    codes, scales, outer, lost = found
    codes = packing.pack(codes, cast.element) if packed and codes.shape == x.shape else codes
    return codes, scales, outer, int(x.isnan().sum()) if lost is not None and int(lost) else 0


def _in_tiles(
    x: Tensor, cast: Cast, codes: bool, keeps: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
    """Do what `_launched` does for tiles, each laid out as one block; None where a matrix has parts of tiles.

    Codes are not packed.
    """
    format = definition.scaled_format(cast)
    scope = format.scope
    if x.ndim < 2 or not x.numel() or x.shape[-2] % scope.rows or x.shape[-1] % scope.size:
        return None
    *lead, height, width = x.shape
    shape = *lead, height // scope.rows, scope.rows, width // scope.size, scope.size
    in_blocks = replace(cast, format=replace(format, scope=Scope("block", scope.elements)))
    found = _launched(x.reshape(shape).transpose(-3, -2).flatten(-2), in_blocks, 0, codes, keeps=keeps)
    if found is None:
        return None
    out, scales, outer, lost = found
    there = out.reshape(*shape[:-3], shape[-2], scope.rows, scope.size).transpose(-3, -2).reshape(x.shape)
    return there, scales.reshape(groups.group_shape(x.shape, scope)) if codes else scales, outer, lost


def _launched(
    x: Tensor, cast: Cast, seed: Seed, codes: bool, packed: bool = False, spoils: bool = False, keeps: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
    if definition.scaled_format(cast).scope.kind == "tile":
        return None if planned(cast, x.dtype, codes) is None else _in_tiles(x, cast, codes, keeps)
    made, size = planned(cast, x.dtype, codes), _group(x, cast)
    format = definition.scaled_format(cast)
    is_block = format.scope.kind == "block"
    if made is None or size is None or (keeps and made.second is not None) or not _draws(made, seed, size, is_block):
        return None
    x = x.contiguous()
    packed = packed and format.element.bits == 4 and x.shape[-1] % 2 == 0
    out, scales = _outputs(x, format, codes, packed)
    lost = torch.zeros((), dtype=torch.int32, device=x.device) if made.sharing.loses else None
    outer = _outer(x, cast) if made.sharing.outer else None
    key, first = key_of(x, seed, made.form.random_bits > 0)
    tables = (made.numbers, made.codes, made.shared, made.scale_numbers, made.scale_codes)
    sharing = made.sharing._replace(spoils=spoils, keeps=keeps) if spoils or keeps else made.sharing
    compiled = (DTYPES[x.dtype], made.form, exact(made.form), made.layout._replace(packed=packed), sharing)
    # any tensor for arguments that the kernel does not read
    given = (
        integers(x),
        integers(out),
        integers(scales),
        *(integers(x) if one is None else one for one in (outer, lost)),
    )
    warps = warps_of(made)
    if made.second is not None:
        tried = (*tables[:3], made.second, *tables[3:], *compiled, format.other is not None, size)
        launch(tries.tried, x, x.numel(), BLOCK, *given, x.numel(), *tried, warps=warps)
    elif is_block:
        launch(scaled.blocks, x, x.numel(), BLOCK, *given, key, x.numel(), first, *tables, *compiled, size, warps=warps)
    else:
        _launch_rows(x, size, (*given, key), (size, first, *tables, *compiled), warps)
    return out, scales, outer, lost


def _outputs(x: Tensor, format: ScaledFormat, codes: bool, packed: bool) -> tuple[Tensor, Tensor]:
    """Return the memory of values or codes, and of scales, which are kept with codes."""
    shape = (*x.shape[:-1], x.shape[-1] // 2) if packed else x.shape
    dtype = torch.uint8 if packed else packing.code_dtype(format.element) if codes else x.dtype
    sizes = groups.group_shape(x.shape, format.scope) if codes else (1,)
    scales = torch.empty(sizes, dtype=definition.stored_scale_dtype(format), device=x.device)
    return torch.empty(shape, dtype=dtype, device=x.device), scales


def _launch_rows(x: Tensor, size: int, given: Sequence[Tensor], more: Sequence[Any], warps: int) -> None:
    """Cast rows of `size` numbers, each by one program, long ones by several after their maxima are known."""
    block, count = min(block_for(x, size, BLOCK), max(16, 1 << (size - 1).bit_length())), x.numel() // size
    if size > LONG_ROW:
        run(rows.parts, (-(-size // block), count), *given, _largest_of_rows(x, size), *more, block, warps=warps)
    else:
        run(rows.rows, (count,), *given, *more, size <= block, block, warps=warps)


def _draws(made: ScaledCastPlan, seed: Seed, size: int, is_block: bool) -> bool:
    """Whether kernels can draw what a cast needs: random words, from a whole counter on."""
    return not made.form.random_bits or not (drawn(seed)[1] % 4 or (size % 4 and not is_block))


def warps_of(made: ScaledCastPlan) -> int:
    """Return the warps per program of blocks: random bits and two errors need registers, so each gets fewer numbers."""
    return 8 if made.form.random_bits or made.second is not None else 4


def _group(x: Tensor, cast: Cast) -> int | None:
    """Return how many elements share a scale; None if x is empty, or for partial blocks or sizes not a power of two."""
    if not x.numel() or not x.ndim:
        return None
    scope = definition.scaled_format(cast).scope
    if scope.kind == "tensor":
        return x.numel()
    if scope.kind == "channel":
        return x[0].numel()
    if scope.kind == "row":
        return x.shape[-1]
    size = groups.block_size(scope, x.shape[-1])
    return size if 1 < size <= LONGEST_BLOCK and size & (size - 1) == 0 and x.shape[-1] % size == 0 else None


def _outer(x: Tensor, cast: Cast) -> Tensor:
    """Return `definition.outer_scale` of the whole tensor, fp32, 0-d: its quotient is rounded once in fp32, too."""
    largest = _largest_of_rows(x, x.numel())[0, 1].view(torch.float32)
    # by a tensor: where torch is given a number it multiplies by its inverse on CUDA, which is rounded twice
    divisor = torch.full_like(largest, definition.largest_scaled(cast))
    scale = (largest / divisor).clamp(min=torch.finfo(torch.float32).smallest_normal)
    return torch.where(largest == 0, 1.0, scale)


def _largest_of_rows(x: Tensor, size: int) -> Tensor:
    """Return the bits of the largest magnitude of each row of `size` numbers, and of its largest finite one: [rows, 2].

    Blocks of rows in one launch, and rows in another.
    """
    block = block_for(x, size, BLOCK)
    grid = -(-size // block), x.numel() // size
    partial = torch.empty(grid[1], 2, grid[0], dtype=torch.int32, device=x.device)
    run(rows.largest_of_rows, grid, integers(x), partial, size, DTYPES[x.dtype], block)
    return partial.amax(-1)
