"""Formats with a shared scale: the scales of groups, the elements under them, and their values.

All computations are in fp64, so that there is one rounding to the element and one to the result's dtype. The functions
that cast elements are arguments, and the rest is common to all implementations.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding, ScalingSpec, carry_of
from lowp.compat import has_fp64, remembered_by_identity
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, Format, IntFormat, PowerOfTwo, ScaledFormat, Scope, Specials
from lowp.kernels.numbers import bitwise
from lowp.kernels.numbers.floats import floor_log2, largest_finite, maximum, narrow, two_to_the, widen
from lowp.kernels.numbers.groups import fold, group_shape, spread
from lowp.kernels.numbers.packing import as_integers, code_dtype
from lowp.kernels.numbers.philox import Draw, Seed
from lowp.scaling.powers import sum_by_halves

FP32 = FORMATS["fp32"]
assert isinstance(FP32, FloatFormat)
TO_FP32 = Cast(FP32, overflow=Overflow.SATURATE)

_EDEN = 0.93 * 17 / 16  # of the authors' code: a few clipped numbers cost less than a coarser grid
MOST_TRIED = 256  # kMostTried of cpu/cast.hpp

Quantize = Callable[[Tensor, Cast, Seed, Tensor], None]  # of an implementation


class Scales(NamedTuple):
    """The scales of a tensor's groups, in fp64 and in the groups' shape; `outer` is one number for all."""

    scale: Tensor
    zero_point: Tensor | None = None
    outer: Tensor | None = None


def scaled_format(cast: Cast) -> ScaledFormat:
    """Return the cast's format, which has a shared scale."""
    assert isinstance(cast.format, ScaledFormat)
    return cast.format


def scaling_of(cast: Cast) -> ScalingSpec:
    """Return the scaling of a cast whose format has a shared scale."""
    assert cast.scaling is not None
    return cast.scaling


# -- choice of scales -------------------------------------------------------------------------------------------------
def choose(x: Tensor, cast: Cast) -> Scales:
    """Return the scales of the tensor `x` (any float dtype) under current or static scaling.

    Sources: OCP MX 1.0 section 6.3 (e8m0); Das et al. 2018, arXiv 1802.00930, section 3.1 (a power of two per tensor);
    Rastegari et al. 2016, arXiv 1603.05279, equation 6 (binary: the mean magnitude); Li et al. 2016, arXiv 1605.04711,
    equations 5 and 6 (ternary: the mean of the magnitudes above 0.7 of their mean).
    """
    format, scaling = scaled_format(cast), scaling_of(cast)
    if scaling.kind == "static":
        assert scaling.exponent is not None
        exponent = torch.full(group_shape(x.shape, format.scope), scaling.exponent, device=x.device)
        return Scales(two_to_the(exponent))
    if scaling.kind != "current":
        raise InvalidInput(
            f"{cast}: a {scaling.kind} scale depends on earlier tensors, which a cast does not record: use current "
            "scaling, or lowp.quantize with scale= computed from those tensors (lowp.statistics(x).maximum)"
        )
    if format.affine or is_mean(format):
        wide = widen(x)
        if format.affine:
            return _affine(wide, format)
        mean = _mean_magnitude if format.element.bits == 1 else _mean_of_large
        return Scales(mean(wide, format.scope))
    largest, is_finite = largest_finite(fold(x, format.scope))
    if isinstance(format.scale, PowerOfTwo) or not format.scale.has_zero:
        scale, outer = _power_of_two(largest, cast), None
    else:
        outer = None if format.outer is None else outer_scale(maximum(largest.reshape(-1)), cast)
        largest = largest * 2.0**scaling.headroom
        is_tried = scaling.rule == "4/6" or format.other is not None
        scale = _tried(x, largest, outer, cast) if is_tried else _ratio(largest, outer, cast, aim(cast))
    if isinstance(format.scale, FloatFormat) and format.scale.bits <= 8 and format.scale.has_nan:
        # a scale of NaN marks a group with a NaN or an infinity, for scales of few bits (OCP MX 1.0 section 6.3)
        scale = torch.where(is_finite, scale, torch.nan)
    return Scales(scale, None, outer)


def _power_of_two(largest: Tensor, cast: Cast) -> Tensor:
    format, headroom = scaled_format(cast), scaling_of(cast).headroom
    exponent = floor_log2(largest, carry_of(cast, 52)) - format.element.max_exponent + headroom
    if format.scope.kind == "tensor":
        exponent = torch.where(largest == 0, 0, exponent)
    return two_to_the(exponent.clamp(format.scale.min_exponent, format.scale.max_exponent))


def scale_of_maxima(largest: Tensor, cast: Cast) -> Tensor:
    """Return the scales of groups with these largest magnitudes, in their dtype, for formats without outer scale.

    On a device without fp64 a ratio is that of fp32.
    """
    format = scaled_format(cast)
    wide = widen(largest) if has_fp64(largest.device.type) else largest
    if isinstance(format.scale, PowerOfTwo) or not format.scale.has_zero:
        return _power_of_two(wide, cast).to(largest.dtype)
    return _ratio(wide * 2.0 ** scaling_of(cast).headroom, None, cast, aim(cast)).to(largest.dtype)


def _ratio(largest: Tensor, outer: Tensor | None, cast: Cast, target: float) -> Tensor:
    """Return scale = largest / target (/ outer), rounded to the scale's format."""
    format = scaled_format(cast).scale
    assert isinstance(format, FloatFormat)
    if outer is None:
        return _rounded_scale(largest / target, format)
    return bitwise.quantized(largest / target / outer, Cast(format, overflow=Overflow.SATURATE))


def _tried(x: Tensor, largest: Tensor, outer: Tensor | None, cast: Cast) -> Tensor:
    """Return the scales of the smaller error: to 6, or by the rule 4/6 to 4, or with a minus sign for `other`.

    The squared errors of the finite numbers are those of nearest elements in fp64, added by halves. In a tie the first.
    """
    format = scaled_format(cast)
    numbers = fold(widen(torch.where(x.isfinite(), x, 0.0).abs()), format.scope)
    found = []
    for target, element in ((aim(cast), format.element), (aim(cast) if format.other else 4.0, format.other)):
        scale = _ratio(largest, outer, cast, target)
        scale = scale if element is None or element is format.element else -scale
        by = divisor(Scales(scale, None, outer), format).unsqueeze(-1)
        quotient = torch.where(by == 0, 0.0, numbers / by)
        error = bitwise.quantized(quotient, Cast(element or format.element, overflow=Overflow.SATURATE)) * by - numbers
        found.append((scale, sum_by_halves(error * error)))
    (first, error_of_first), (second, error_of_second) = found
    return torch.where(error_of_second < error_of_first, second, first)


def outer_scale(largest: Tensor, cast: Cast) -> Tensor:
    """Return the outer scale of a tensor from its largest finite magnitude."""
    outer = scaled_format(cast).outer
    assert outer is not None
    return _rounded_scale(largest / largest_scaled(cast), outer)


def largest_scaled(cast: Cast) -> float:
    """Return what the largest number of a tensor becomes under its outer scale: the largest scale times element.

    Under the rules 4/6 and eden that scale is the power of two of which 6 / 4 times is in the format of scales, too: of
    e4m3 256.
    """
    format = scaled_format(cast)
    assert isinstance(format.scale, FloatFormat)
    highest = aim(cast)
    if scaling_of(cast).rule not in ("4/6", "eden"):
        return format.scale.maximum * highest
    return 2.0 ** math.floor(math.log2(format.scale.maximum * 4 / 6)) * highest


def aim(cast: Cast) -> float:
    """Return what the largest number of a group is divided to: the largest element, with eden a little more."""
    return float(cast.element.maximum) / (_EDEN if cast.is_corrected else 1.0)


def _rounded_scale(scale: Tensor, format: FloatFormat) -> Tensor:
    """Return a scale in its format: 1 for an all-zero group, otherwise normal, as subnormal numbers have few bits."""
    if format == FP32:  # torch's own conversion, which rounds to nearest even, too
        rounded = scale.float().to(scale.dtype).clamp(max=format.maximum)
    else:
        rounded = bitwise.quantized(scale, Cast(format, overflow=Overflow.SATURATE))
    return torch.where(scale == 0, 1.0, rounded.clamp(min=format.smallest_normal))


def _mean_magnitude(x: Tensor, scope: Scope) -> Tensor:
    finite = torch.where(x.isfinite(), x, 0.0)
    count = fold(x.isfinite().to(torch.float64), scope).sum(-1)
    mean = fold(finite.abs(), scope).sum(-1) / count.clamp(min=1)
    return _rounded_scale(mean, FP32)  # type: ignore[arg-type]


def is_mean(format: ScaledFormat) -> bool:
    """Whether scales are means of magnitudes, not maxima: of binary and ternary formats."""
    return format.element.bits == 1 or is_ternary(format)


def is_ternary(format: Format) -> bool:
    """Whether a scaled format has elements -1, 0 and 1 and scales with fractions, which are not the maximum."""
    if not isinstance(format, ScaledFormat) or format.affine or format.scale != FP32:
        return False
    element = format.element
    return isinstance(element, IntFormat) and element.bits == 2 and element.symmetric


def _is_tried(format: ScaledFormat, scaling: ScalingSpec) -> bool:
    """Whether a format with `other` elements is one whose groups try both: short ones of e2m1."""
    is_short = 0 < format.scope.elements <= MOST_TRIED
    return is_short and format.element == FORMATS["e2m1"] and scaling.kind == "current"


@remembered_by_identity
def follow_largest(cast: Cast) -> bool:
    """Whether the scales of a cast depend on the largest magnitudes of its groups of neighbours alone.

    Or are static powers of two, or tried on groups that are short: by the rule 4/6, or for e2m1 and its `other`.
    """
    format, scaling = cast.format, cast.scaling
    if not isinstance(format, ScaledFormat) or scaling is None or format.affine or not format.element.has_zero:
        return False
    if cast.is_corrected or not (format.other is None or _is_tried(format, scaling)):
        return False
    if scaling.rule == "4/6" and not 0 < format.scope.elements <= MOST_TRIED:
        return False
    scale = format.scale
    is_power = isinstance(scale, PowerOfTwo) or not scale.has_zero
    return (scaling.kind == "current" or (scaling.kind == "static" and is_power)) and not is_ternary(format)


def _mean_of_large(x: Tensor, scope: Scope) -> Tensor:
    """Return the ternary scale: the mean of magnitudes above 0.7 of their mean. Rounding cuts at half of it."""
    folded = fold(torch.where(x.isfinite(), x, 0.0).abs(), scope)
    count = fold(x.isfinite().to(torch.float64), scope).sum(-1, keepdim=True)
    large = folded > 0.7 * folded.sum(-1, keepdim=True) / count.clamp(min=1)
    mean = torch.where(large, folded, 0.0).sum(-1) / large.sum(-1).clamp(min=1)
    return _rounded_scale(mean, FP32)  # type: ignore[arg-type]


def _affine(x: Tensor, format: ScaledFormat) -> Scales:
    """Return scale = (max - min) / (2**bits - 1), for a range widened to contain 0, and the zero point."""
    element = format.element
    assert isinstance(element, IntFormat) and isinstance(format.scale, FloatFormat)
    folded = fold(torch.where(x.isfinite(), x, 0.0), format.scope)
    highest, lowest = maximum(folded).clamp(min=0), (-maximum(-folded)).clamp(max=0)
    scale = _rounded_scale((highest - lowest) / (element.maximum - element.minimum), format.scale)
    zero_point = (element.minimum - lowest / scale).round().clamp(element.minimum, element.maximum)
    return Scales(scale, zero_point)


# -- elements and values ----------------------------------------------------------------------------------------------
def divisor(scales: Scales, format: ScaledFormat) -> Tensor:
    """Return the divisor of values: scale * outer, exact in fp64; for a minus sign that of `other` elements."""
    by = scales.scale if scales.outer is None else scales.scale * scales.outer
    if format.other is None:
        return by
    return torch.where(by < 0, by * -float(format.element.maximum) / format.other.maximum, by)


def takes_other(scales: Scales, shape: torch.Size, format: ScaledFormat) -> Tensor:
    """Return which numbers of a tensor have `other` elements: those under scales with a minus sign."""
    return spread(scales.scale < 0, shape, format.scope)


def elements(x: Tensor, cast: Cast, scales: Scales, quantize: Quantize, seed: Seed) -> Tensor:
    """Return the elements of the fp64 tensor `x` in fp64: its numbers divided by their scale, and cast."""

    def element_cast(numbers: Tensor, to: Cast) -> Tensor:
        numbers = numbers.contiguous()
        quantize(numbers, to, seed, numbers)
        return numbers

    format = scaled_format(cast)
    by = spread(divisor(scales, format), x.shape, format.scope)
    quotient = torch.where(by == 0, x * 0.0, x / by)  # a zero keeps its sign
    quotient = torch.where(by.isnan(), torch.nan, quotient)
    if format.other is not None:
        whole = element_cast(quotient.clone(), replace(cast.element_cast, format=format.other))
        return torch.where(takes_other(scales, x.shape, format), whole, element_cast(quotient, cast.element_cast))
    if scales.zero_point is None:
        return element_cast(quotient, cast.element_cast)
    element = format.element
    # the integers below 2**(bits + 1) are the numbers of a format that are 1 apart
    integers = FloatFormat("integers", 1, element.bits, Specials.FINITE, 1 - element.bits)
    wide = Cast(integers, cast.rounding, Overflow.SATURATE, None, cast.random_bits)
    zero_point = spread(scales.zero_point, x.shape, format.scope)
    return (element_cast(quotient, wide) + zero_point).clamp(element.minimum, element.maximum)


def corrected(x: Tensor, cast: Cast, scales: Scales, element: Tensor, seed: Seed) -> Scales:
    """Return the scales by the rule eden, of the finite numbers of x whose elements under these scales are known."""
    format = scaled_format(cast)
    assert isinstance(format.scale, FloatFormat)
    by = spread(divisor(scales, format), x.shape, format.scope)
    quotient = torch.where(x.isfinite() & (by > 0), widen(x) / by, 0.0)
    squares, products = (
        sum_by_halves(fold(quotient * one, format.scope))
        for one in (quotient, torch.where(quotient == 0, 0.0, element))
    )
    wanted = scales.scale * torch.where(products == 0, 1.0, squares / products)
    if isinstance(seed, Draw):  # of a part of a tensor along its first dimension, behind other scales
        before = torch.Size((seed.first // max(x.shape[1:].numel(), 1), *x.shape[1:]))
        seed = Draw(seed.seed, math.prod(group_shape(before, format.scope)))
    return scales._replace(
        scale=bitwise.quantized(wanted, Cast(format.scale, Rounding.STOCHASTIC, Overflow.SATURATE), seed)
    )


def values(element: Tensor, cast: Cast, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Return the values of the elements in `dtype`; inexact products are rounded once, to nearest even."""
    format = scaled_format(cast)
    if scales.zero_point is not None:
        element = element - spread(scales.zero_point, element.shape, format.scope)
    wide = element * spread(divisor(scales, format), element.shape, format.scope)
    if dtype == torch.float64:
        return narrow(wide, dtype)
    if dtype != torch.float32 and not format.has_powers_of_two:
        return narrow(bitwise.quantized(wide, replace(_TO_16_BITS[dtype], overflow=Overflow.SATURATE)), dtype)
    found = narrow(bitwise.quantized(wide, TO_FP32), torch.float32)
    if dtype != torch.float32:
        rounded = narrow(bitwise.quantized(found, _TO_16_BITS[dtype]), dtype)
        if not torch.equal(widen(rounded).nan_to_num(), widen(found).nan_to_num()):
            raise InvalidInput(cannot_hold(cast, dtype))
        return rounded
    return found


_TO_16_BITS = {torch.float16: Cast("fp16"), torch.bfloat16: Cast("bf16")}  # type: ignore[arg-type]


def cannot_hold(cast: Cast, dtype: torch.dtype) -> str:
    """Return the error message for a dtype that does not represent all results."""
    wider = "float64" if dtype == torch.float32 else "float32"
    return f"{cast}: {dtype} cannot hold every result exactly: convert to {wider} first"


# -- stored scales ----------------------------------------------------------------------------------------------------
def stored_scales(scale: Tensor, format: ScaledFormat) -> Tensor:
    """Return scales as `Quantized` stores them: fp32 values, codes, or exponents."""
    if isinstance(format.scale, PowerOfTwo):
        exponent = floor_log2(scale)
        if format.scope.kind == "tensor":
            return exponent.to(torch.int32)
        offset = exponent - format.scale.min_exponent
        return offset.to(torch.uint8) if format.scale.bits <= 8 else offset.to(torch.int16).view(torch.uint16)
    if format.scale == FP32:
        return narrow(scale, torch.float32)
    codes = torch.empty(scale.shape, dtype=code_dtype(format.scale), device=scale.device)
    bitwise.encode(scale, Cast(format.scale), 0, codes)
    return codes


def stored_scale_dtype(format: ScaledFormat) -> torch.dtype:
    """Return the dtype of `stored_scales`."""
    if isinstance(format.scale, PowerOfTwo):
        if format.scope.kind == "tensor":
            return torch.int32
        return torch.uint8 if format.scale.bits <= 8 else torch.uint16
    return torch.float32 if format.scale == FP32 else code_dtype(format.scale)


def read_scales(stored: Tensor, format: ScaledFormat) -> Tensor:
    """Return `stored_scales` as fp64 values."""
    if isinstance(format.scale, PowerOfTwo):
        if format.scope.kind == "tensor":
            return two_to_the(stored)
        exponent = as_integers(stored)
        scale = two_to_the((exponent + format.scale.min_exponent).clamp(max=format.scale.max_exponent))
        beyond = exponent > format.scale.max_exponent - format.scale.min_exponent  # the NaN of e8m0, for mxint8
        return torch.where(beyond, torch.nan, scale)
    if format.scale == FP32:
        return widen(stored)
    return bitwise.decoded(stored, format.scale, torch.float64)
