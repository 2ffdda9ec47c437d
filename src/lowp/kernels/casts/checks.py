"""Argument checks of the public functions: casts and dtypes, seeds, scales, results, and dtypes that can hold them."""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding, parse
from lowp.compat import real_tensors
from lowp.errors import InvalidInput, Misuse
from lowp.formats import FloatFormat, Format, IntFormat, PowerOfTwo, ScaledFormat
from lowp.formats.checks import whole_number
from lowp.kernels.choose.dispatch import fastest
from lowp.kernels.numbers import bitwise
from lowp.kernels.numbers.floats import CARRIERS, floor_log2, home, narrow, two_to_the, widen
from lowp.kernels.numbers.groups import group_shape
from lowp.kernels.numbers.scaled import FP32, Scales, cannot_hold, scaled_format

LARGEST_OFFSET = 1 << 62

_parse = functools.lru_cache(maxsize=1024)(parse)


def as_cast(cast: str | Cast | Format | torch.dtype) -> Cast:
    """Return the cast for a text, a cast or a format."""
    return cast if isinstance(cast, Cast) else _parse(cast) if isinstance(cast, str) else parse(cast)


@functools.lru_cache(maxsize=1024)
def plan(cast: str | Cast | Format | torch.dtype, dtype: torch.dtype) -> Cast:
    """Return the parsed cast, after the checks that depend only on the dtype."""
    planned = as_cast(cast)
    check_dtype(dtype)
    if not holds(planned, dtype):
        raise InvalidInput(cannot_hold(planned, dtype))
    return planned


def carriers() -> str:
    """Return the dtypes that lowp accepts, in words."""
    return ", ".join(str(carrier).removeprefix("torch.") for carrier in CARRIERS)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError for a dtype that lowp does not round."""
    if dtype not in CARRIERS:
        raise TypeError(f"lowp rounds tensors of {carriers()}, not {dtype}: convert first, for example with x.float()")


def check_seed(x: Tensor, seed: int | Tensor) -> int | Tensor:
    """Return the seed, an integer of NumPy as one of Python; refuse other seeds, and tensors without strides."""
    if x.layout is not torch.strided:
        raise TypeError(f"lowp takes strided tensors, not {x.layout}: give x.to_dense(), or its values")
    if x.is_nested:
        raise TypeError("lowp takes strided tensors, not nested ones: give each of x.unbind()")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.ndim != 0:
            raise TypeError(f"a seed must be an int or a 0-d int64 tensor, not {seed.ndim}-d {seed.dtype}")
        return seed
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"a seed must be an int or a 0-d int64 tensor, not {type(seed).__name__}")
    return whole_number("a seed", seed)


def check_packed(packed: object) -> None:
    """Raise TypeError unless the value is True or False."""
    if not isinstance(packed, bool):
        raise TypeError(f"packed must be True or False, not {type(packed).__name__}")


def draw(x: Tensor, seed: int | Tensor, offset: Any) -> tuple[int | Tensor, int]:
    """Return `seed` and `offset`, checked; tensors without strides are refused."""
    seed = check_seed(x, seed)
    first = whole_number("offset, the index of x's first element", offset)
    if not 0 <= first <= LARGEST_OFFSET:
        raise InvalidInput(f"offset {first}; allowed: 0 to 2**62, the index of x's first element in the whole tensor")
    return seed, first


def scales(scale: object, cast: Cast, x: Tensor) -> Scales | None:
    """Return the caller's scales: a number, or a tensor with one per group; (scale, zero_point) if affine.

    None if the cast finds its own. Scales in fp32 are rounded to it. Raises ValueError for a wrong shape, and for a
    scale that is not positive or, if it must be a power of two, not a number of its format.
    """
    if scale is None:
        return None
    if cast.scaling is None:
        raise InvalidInput(
            f"{cast} has no shared scale for scale=: use a format with one, such as {cast.format.spelling}@fp32/tensor"
        )
    format = scaled_format(cast)
    if format.outer is not None:
        raise InvalidInput(f"{cast}: its two levels of scale are always computed from the tensor: omit scale=")
    zero_point = None
    if format.affine:
        if not isinstance(scale, tuple) or len(scale) != 2:
            raise InvalidInput(f"{cast} is affine: give scale=(scale, zero_point)")
        scale, offset = scale
        zero_point = _given(offset, "zero_point", cast, x).round()
        _check_zero_point(zero_point, offset, cast)
    found = _given(scale, "scale", cast, x)
    if format.scale == FP32:
        found = widen(found.to(torch.float32))
    if not found.is_cuda and not bool(_is_scale(found, format.scale).all()):
        raise InvalidInput(
            f"{cast}: scale {scale} is not a number of the format of its scale, {format.scale}: "
            "give positive numbers of that format"
        )
    return Scales(found, zero_point)


def _check_zero_point(zero_point: Tensor, given: object, cast: Cast) -> None:
    element = cast.element
    if zero_point.is_cuda or bool(((zero_point >= element.minimum) & (zero_point <= element.maximum)).all()):
        return
    raise InvalidInput(
        f"{cast}: zero point {given} is not a number of {element}: "
        f"give whole numbers from {element.minimum} to {element.maximum}"
    )


def _given(scale: object, name: str, cast: Cast, x: Tensor) -> Tensor:
    if isinstance(scale, bool) or not isinstance(scale, (int, float, Tensor)):
        raise TypeError(f"{cast}: {name} must be a number or a tensor, not {type(scale).__name__}")
    shape = group_shape(x.shape, scaled_format(cast).scope)
    if isinstance(scale, Tensor):
        if scale.is_meta or scale.layout is not torch.strided or scale.is_complex():
            raise TypeError(
                f"{cast}: {name} must be a strided tensor of real numbers, not {scale.layout} {scale.dtype}"
            )
        if scale.dtype not in CARRIERS:
            scale = scale.to(home(scale.device)).to(torch.float64)
        found = scale.detach().to(home(x.device))
    else:
        found = torch.full((), float(scale), dtype=torch.float64, device=home(x.device))
    if found.numel() == 1:
        return widen(found.reshape(()).expand(shape))
    if found.numel() != math.prod(shape):
        expected = f"shape {shape}" if shape else "one number"
        raise InvalidInput(f"{cast}: {name} has shape {tuple(found.shape)}; a tensor {tuple(x.shape)} takes {expected}")
    return widen(found.reshape(shape))


def _is_scale(scale: Tensor, format: FloatFormat | PowerOfTwo) -> Tensor:
    if isinstance(format, FloatFormat) and format.has_zero:
        return (bitwise.quantized(scale, Cast(format)) == scale) & (scale > 0) & scale.isfinite()
    nearest = two_to_the(floor_log2(scale).clamp(max(format.min_exponent, -1022), format.max_exponent))
    found = nearest == scale
    return found | scale.isnan() if isinstance(format, FloatFormat) else found


def check_out(x: Tensor, out: Any) -> None:
    """Raise for an `out` that cannot hold the result: of another shape, dtype or device, or followed by autograd."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor if x is one, not {type(out).__name__}")
    for name in ("shape", "dtype", "device"):
        wanted, found = getattr(x, name), getattr(out, name)
        if wanted != found:
            wanted, found = (tuple(v) if name == "shape" else v for v in (wanted, found))
            raise InvalidInput(f"out has {name} {found} and x {wanted}: give an out of x's shape, dtype and device")
    if torch.is_grad_enabled() and (out.requires_grad or x.requires_grad):
        if out.requires_grad and out.is_leaf:
            raise Misuse(
                "a leaf Variable that requires grad is being used in an in-place operation: "
                "quantize it under torch.no_grad(), or without out="
            )
        raise Misuse(
            "quantize with out= has no gradient, but one of its tensors requires grad: "
            "omit out= (the gradient then passes straight through), or call it under torch.no_grad()"
        )


def element(format: str | Format | Cast | torch.dtype) -> FloatFormat | IntFormat:
    """Return the format of codes, also if a cast was given. Raises ValueError for a format with a shared scale."""
    found = as_cast(format).format
    if isinstance(found, ScaledFormat):
        raise InvalidInput(f"{found} needs its scales: give what lowp.encode returned to lowp.dequantize")
    return found


# -- which dtypes hold which results ----------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1024)
def holds(cast: Cast, dtype: torch.dtype) -> bool:
    """Whether `dtype` can hold every result of `cast` on numbers of `dtype`; a 16-bit dtype is tried whole."""
    if cast.scaling is not None:
        return _fits(scaled_format(cast), dtype)
    if dtype.itemsize > 2:
        return dtype == torch.float64 or holds_format(cast.element, dtype) or _is_identity_on_fp32(cast)
    both_ways = (Rounding.UP, Rounding.DOWN) if cast.is_stochastic else (cast.rounding,)
    casts = [replace(cast, rounding=mode, random_bits=None) for mode in both_ways]
    with real_tensors():  # torch.compile may call this, and its tensors have no values
        every = widen(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype))
        kernel, values = fastest(every.device), torch.empty_like(every)
        for one in casts:
            kernel.quantize(every, one, 0, values)
            if not bool(((widen(narrow(values, dtype)) == values) | values.isnan()).all()):
                return False
    return True


def _fits(format: ScaledFormat, dtype: torch.dtype) -> bool:
    """Whether `dtype` can hold values under shared scales: fp64 always, others with one more rounding.

    16 bits take that rounding under a scale of any fraction, whose products are longer than an element anyway. Under a
    power of two the value is the element's own digits, and 16 bits have to hold them all.
    """
    if dtype in (torch.float64, torch.float32) or not format.has_powers_of_two:
        return True
    element = format.element
    digits = element.precision if isinstance(element, FloatFormat) else element.bits - 1
    return digits <= CARRIERS[dtype].precision


def holds_format(format: FloatFormat | IntFormat, dtype: torch.dtype) -> bool:
    """Whether every value of a format is a number of `dtype`."""
    carrier = _parse(dtype).element
    assert isinstance(carrier, FloatFormat)
    if isinstance(format, IntFormat):
        return format.bits - 1 <= carrier.precision  # whose largest number is far beyond
    return format.fits(carrier)


def _is_identity_on_fp32(cast: Cast) -> bool:
    carrier, format = _parse("fp32").element, cast.element
    contains = isinstance(carrier, FloatFormat) and isinstance(format, FloatFormat) and carrier.fits(format)
    return contains and cast.overflow is not Overflow.SATURATE
