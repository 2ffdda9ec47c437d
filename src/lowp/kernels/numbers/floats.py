"""Floating-point numbers split into bits and assembled from bits, in torch operations.

Ordinary arithmetic on subnormal numbers follows the processor's flush-to-zero mode; reading and writing bits does not.
Conversions between the dtypes here are exact in every mode, and keep the sign of zeros and NaNs. A NaN is written as
the canonical quiet one: sign | 0x7fc00000 in fp32, and likewise in the other dtypes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.compat import has_fp64
from lowp.errors import Unavailable


class Carrier(NamedTuple):
    """The layout of a dtype's numbers, in the terms of `FloatFormat`."""

    integer: torch.dtype
    mantissa_bits: int
    bias: int
    precision: int
    max_exponent: int

    @property
    def magnitude_mask(self) -> int:
        """All bits but the sign."""
        return (1 << (self.integer.itemsize * 8 - 1)) - 1

    @property
    def infinity(self) -> int:
        """The bits of +infinity; magnitudes above it are NaN."""
        return self.magnitude_mask >> self.mantissa_bits << self.mantissa_bits

    @property
    def nan(self) -> int:
        """The bits of the canonical quiet NaN."""
        return self.infinity | 1 << (self.mantissa_bits - 1)

    @property
    def min_exponent(self) -> int:
        """log2 of the smallest normal number."""
        return 1 - self.bias

    def bits(self, value: float) -> int:
        """The bits of a positive number of this dtype or zero."""
        if value == 0:
            return 0
        significand, divisor = value.as_integer_ratio()  # a power of two
        leading = significand.bit_length() - divisor.bit_length()
        unit = max(leading, self.min_exponent) - self.mantissa_bits
        kept, lost = divmod(significand << max(-unit, 0), divisor << max(unit, 0))
        if lost:
            raise ValueError(f"{value!r} has more bits than this dtype holds")
        return kept + (max(leading - self.min_exponent, 0) << self.mantissa_bits)


CARRIERS = {
    torch.float64: Carrier(torch.int64, 52, 1023, 53, 1023),
    torch.float32: Carrier(torch.int32, 23, 127, 24, 127),
    torch.float16: Carrier(torch.int16, 10, 15, 11, 15),
    torch.bfloat16: Carrier(torch.int16, 7, 127, 8, 127),
}


def sign_and_magnitude(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sign (bool) and the bits without the sign, as integers of the dtype's width."""
    carrier = CARRIERS[x.dtype]
    bits = x.view(carrier.integer)
    return bits < 0, bits & carrier.magnitude_mask


def with_sign(magnitude: Tensor, negative: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of `dtype` with these magnitude bits and signs."""
    lowest = torch.iinfo(CARRIERS[dtype].integer).min  # the sign bit alone
    return torch.where(negative, magnitude | lowest, magnitude).view(dtype)


def two_to_the(exponent: Tensor) -> Tensor:
    """Return 2**exponent in fp64 for integers from -1022 to 1023, from bits: exact on every device."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def widen16(x: Tensor) -> Tensor:
    """Return fp16 or bf16 numbers in fp32, exactly."""
    if x.dtype == torch.bfloat16:
        return (x.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    if x.dtype == torch.float16:
        _, magnitude = sign_and_magnitude(x.to(torch.float32))  # torch loses the sign of some NaNs
        return with_sign(magnitude, x.view(torch.int16) < 0, torch.float32)
    return x


def widen(x: Tensor) -> Tensor:
    """Return the numbers in fp64, exactly; fp32 subnormals become normal numbers."""
    if x.dtype == torch.float64:
        return x
    x = widen16(x)
    negative, magnitude = sign_and_magnitude(x)
    subnormal = (magnitude < 1 << 23) & (magnitude != 0)
    tiny = magnitude.to(torch.float64) * 2.0**-149
    return torch.where(subnormal, torch.where(negative, -tiny, tiny), x.to(torch.float64))


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp64 or fp32 numbers, each of which `dtype` can hold, in `dtype`."""
    negative, magnitude = sign_and_magnitude(x)
    is_nan = magnitude > CARRIERS[x.dtype].infinity
    if x.dtype == torch.float64 and dtype != torch.float64:
        absolute = with_sign(magnitude, torch.zeros_like(negative), torch.float64)
        tiny = torch.where(absolute < 2.0**-126, absolute, 0.0) * 2.0**149
        wide = torch.where(absolute < 2.0**-126, 0.0, absolute).to(torch.float32)
        magnitude = torch.where(absolute < 2.0**-126, tiny.to(torch.int32), wide.view(torch.int32))
    if dtype == torch.bfloat16:
        magnitude = (magnitude >> 16).to(torch.int16)
    elif dtype == torch.float16:
        magnitude = magnitude.view(torch.float32).to(torch.float16).view(torch.int16)
    magnitude = torch.where(is_nan, CARRIERS[dtype].nan, magnitude)
    return with_sign(magnitude, negative, dtype)


def integer_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sign, significand and exponent of fp64 numbers: |x| = significand * 2**exponent, both int64.

    Infinities and NaNs give numbers without meaning. The significand is below 2**53 and zero for zero.
    """
    negative, magnitude = sign_and_magnitude(x)
    field = magnitude >> 52
    significand = (magnitude & ((1 << 52) - 1)) | torch.where(field > 0, 1 << 52, 0)
    return negative, significand, field.clamp(min=1) - 1075


def floor_log2(x: Tensor, carry: int = 0) -> Tensor:
    """Return floor(log2 x) of positive fp64 numbers, from their bits (int64); zero gives less than any exponent.

    `carry` is added to the bits of the 52 digits first, see `casts.carry_of`.
    """
    _, significand, exponent = integer_parts(x)
    leading = ((significand.to(torch.float64).view(torch.int64) + carry) >> 52) - 1023 + exponent
    return torch.where(significand == 0, -5000, leading)


def largest_finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest finite |x| along the last dimension, in fp64, and whether all of it is finite."""
    _, magnitude = sign_and_magnitude(x)
    infinity = CARRIERS[x.dtype].infinity
    finite = torch.where(magnitude < infinity, magnitude, 0)  # as integers they are in the order of the numbers
    return widen(maximum(finite).view(x.dtype)), maximum(magnitude) < infinity


def maximum(folded: Tensor) -> Tensor:
    """Return the maximum along the last dimension, 0 for an empty one."""
    return folded.amax(-1) if folded.shape[-1] else folded.sum(-1, dtype=folded.dtype)


def from_integer_parts(significand: Tensor, exponent: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return significand * 2**exponent in fp64 or fp32, for integers of that width and results that the dtype holds.

    Significands have no more bits than the dtype's own. A result of 2**(largest exponent + 1) or more is infinity.
    """
    carrier = CARRIERS[dtype]
    normalised = significand.to(dtype).view(carrier.integer)  # exact
    leading = (normalised >> carrier.mantissa_bits) - carrier.bias + exponent
    normal = normalised + (exponent << carrier.mantissa_bits)
    smallest = carrier.bias + carrier.mantissa_bits - 1
    subnormal = significand << (exponent + smallest).clamp(0, 8 * dtype.itemsize - 2)
    bits = torch.where(leading < 1 - carrier.bias, subnormal, normal)
    bits = torch.where(leading > carrier.bias, carrier.infinity, bits)
    return torch.where(significand == 0, 0, bits).view(dtype)


def moved_to_odd(near: Tensor, error: Tensor) -> Tensor:
    """Return the numbers that differ by `error` from the nearest fp32 or fp64 numbers, rounded to odd instead."""
    bits = near.view(CARRIERS[near.dtype].integer)
    moved = torch.where((error > 0) == (near > 0), bits + 1, bits - 1)
    return torch.where(near.isfinite() & (error != 0) & (bits & 1 == 0), moved, bits).view(near.dtype)


def need_fp64(x: Tensor, what: str) -> None:
    """Raise Unavailable if x is on a device without fp64, in which `what` computes."""
    if not has_fp64(x.device.type):
        raise Unavailable(
            f"{what} needs fp64 for its exact sums, which {x.device} does not compute in: train on the CPU or on CUDA, "
            "or in fp16, bf16 or dfp16"
        )


def home(device: torch.device) -> torch.device:
    """Return the device on which to compute in fp64: the given one, or the CPU if it has no fp64."""
    return device if has_fp64(device.type) else torch.device("cpu")
