"""int16 mantissas whose exponent stays on its device: nothing waits for it, and a captured graph can replay it.

Triton's kernels take a launch for each look at a tensor, and one for its mantissas. Elsewhere all of it is torch's
operations in fp32 and int32, except stochastic rounding on a device with fp64: Apple's GPUs have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.casts import Cast, Rounding
from lowp.compat import has_fp64
from lowp.formats import PowerOfTwo, ScaledFormat
from lowp.kernels.choose.dispatch import by_triton
from lowp.kernels.int16 import low_words
from lowp.kernels.int16.device_exponents import NOT_FINITE, NOTHING, times
from lowp.kernels.int16.mantissas import Mantissas, int16_element, readable, wide_cast
from lowp.kernels.numbers import bitwise
from lowp.kernels.numbers.philox import Draw, Seed

_INFINITY = 0x7F800000  # in the bits of fp32; NaN is above it
_HIDDEN = 1 << 23


def rounded(x: Tensor, cast: Cast, seed: Seed = 0, hint: Tensor | None = None) -> Mantissas:
    """Return x, of fp32 or 16 bits, as `mantissas.current_mantissas` does, its exponent on the device.

    `hint`: the exponent under which x may be in the format already, to the bit; it counts where every element is.
    """
    x = readable(x)
    if by_triton(x) and not isinstance(seed, Draw):
        from lowp.kernels.triton import mantissas as kernels

        found = kernels.look(x, cast, hint)
        return Mantissas(kernels.convert(x, cast, found.exponent, seed), found.told)
    x = x.float()
    exponent, is_finite = own_exponent(x, cast)
    if hint is not None:
        exponent = torch.where(_is_under(x, hint, cast), hint, exponent)
    payload = _payload(x, exponent, cast, seed)
    return Mantissas(payload, torch.where(is_finite, exponent, NOT_FINITE))


def exact(x: Tensor, cast: Cast, hint: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return whether every element of x is in a cast's format, 0-d, and under which exponent; any where not.

    Looked at are the exponent of x's own maximum and `hint`, if one is given, which comes first where both serve.
    """
    plain = Cast(cast.format, cast.rounding, cast.overflow)
    if by_triton(x):
        from lowp.kernels.triton import mantissas as kernels

        return kernels.exact_under(readable(x), plain, hint)
    exponent, is_finite = own_exponent(x, plain)
    is_exact = is_finite & _is_under(x, exponent, plain)
    if hint is None:
        return is_exact, exponent
    is_hinted = _is_under(x, hint, plain)
    return is_exact | is_hinted, torch.where(is_hinted, hint, exponent)


def own_exponent(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Return the exponent that `mantissas.exponent_of` gives the maximum of x, and whether all of it is finite.

    Where not, the exponent is any. A number beyond fp32's counts as infinite.
    """
    assert isinstance(cast.format, ScaledFormat) and isinstance(cast.format.scale, PowerOfTwo)
    scale, scaling = cast.format.scale, cast.scaling
    if x.numel() == 0:
        largest = torch.zeros((), dtype=torch.int32, device=x.device)
    else:
        low, high = torch.aminmax(x)
        largest = _toward_zero(torch.maximum(low.abs(), high.abs())).view(torch.int32) & 0x7FFFFFFF
    is_finite = largest < _INFINITY
    if scaling is not None and scaling.exponent is not None:
        return torch.full_like(largest, scaling.exponent), is_finite
    units = largest.to(torch.float32).view(torch.int32) >> 23  # of a subnormal number: how many of 2**-149
    floor_log2 = torch.where(largest < _HIDDEN, units - 127 - 149, (largest >> 23) - 127)
    headroom = 0 if scaling is None else scaling.headroom
    exponent = floor_log2 - (cast.format.element.bits - 2) + headroom
    return torch.where(largest == 0, 0, exponent.clamp(scale.min_exponent, scale.max_exponent)), is_finite


def exponent_of_finite(x: Tensor, cast: Cast) -> Tensor:
    """Return the exponent of the maximum of what is finite in x."""
    if by_triton(x):
        from lowp.kernels.triton import mantissas as kernels

        return kernels.look(readable(x), cast, only_finite=True).exponent
    return own_exponent(torch.where(x.isfinite(), x, 0.0), cast)[0]


def _toward_zero(x: Tensor) -> Tensor:
    """Return x in fp32, in the same binade: with its first bits alone."""
    return (x.view(torch.int64) & -(1 << 29)).view(torch.float64).float() if x.dtype is torch.float64 else x.float()


def _is_under(x: Tensor, exponent: Tensor, cast: Cast) -> Tensor:
    """Whether every element of x is a mantissa * 2**exponent; of -0, too."""
    units = times(x, -exponent)
    inside = (units >= int16_element(cast).minimum) & (units <= 32767) & (units == units.round())
    return (inside & ((units != 0) | (x == 0))).all()


def _payload(x: Tensor, exponent: Tensor, cast: Cast, seed: Seed) -> Tensor:
    """Return x * 2**-exponent, rounded once and saturated, as int16; what is not finite becomes any number."""
    units = times(x, -exponent)
    if cast.rounding is Rounding.NEAREST_EVEN:
        units = units.round()
    else:
        units = units.double() if has_fp64(x.device.type) else units
        units = bitwise.quantized(units, wide_cast(cast.rounding, cast.random_bits), seed)
    return units.nan_to_num(nan=0.0).clamp(int16_element(cast).minimum, 32767).to(torch.int16)


def low_word(x: Tensor, high: Mantissas, cast: Cast, axis: int = -1) -> Mantissas:
    """Return `low_words.low_word` of x where it is coarse along an axis, and nothing where one word is enough."""
    half = times(torch.full((), 0.5, dtype=torch.float32, device=x.device), high.exponent)
    rest = (x.detach().float() - high.values).clamp(-half, half)
    exponent = high.exponent - low_words.LOW_BITS
    needed = low_words.is_coarse(x, high.exponent, axis)
    return Mantissas(_payload(rest, exponent, cast, 0), torch.where(needed, exponent, NOTHING))
