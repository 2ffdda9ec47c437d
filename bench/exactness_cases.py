"""The inputs of the comparison of casts, their kinds, and the right results by rational arithmetic.

The inputs follow Berkeley TestFloat (Hauser, TestFloat 3e, level 1): every extreme exponent of the carrier and of the
format with significands of few set or few cleared bits, and random ones. For narrow formats every code, midpoint and
neighbour is added, and NaNs whose payload is destroyed by a carry or by truncation.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from exact_casts import INTEGERS, exact_cast, inputs, uniform
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import FloatFormat

KINDS = ("NaN", "infinity", "zero", "double rounding", "overflow", "subnormal", "tie", "other")
SEED = 0x5EED
_LAYOUT = {torch.float32: (8, 23), torch.float64: (11, 52)}


def cases(format: FloatFormat, dtype: torch.dtype) -> Tensor:
    """Return the inputs for a format, in a carrier's dtype, the same in every run."""
    dense = inputs(format, dtype, random=0)
    dense = dense[:: max(1, len(dense) // 1200)]
    return torch.cat([_level_one(format, dtype), dense, _random(format, dtype), _nans(dtype)])


def _level_one(format: FloatFormat, dtype: torch.dtype) -> Tensor:
    exponent_bits, mantissa_bits = _LAYOUT[dtype]
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    lowest = format.min_exponent - format.mantissa_bits
    wanted = {-1, 0, 1, *range(lowest - 2, lowest + 2)}
    wanted |= {*range(format.min_exponent - 2, format.min_exponent + 3)}
    wanted |= {*range(format.max_exponent - 1, format.max_exponent + 3)}
    fields = {0, 1, 2, top - 2, top - 1, *(e + bias for e in wanted if 0 <= e + bias < top)}
    ones = (1 << mantissa_bits) - 1
    walking = range(0, mantissa_bits, 1 if dtype == torch.float32 else 3)
    patterns = {0, 1, ones, ones - 1, *(1 << bit for bit in walking), *(ones ^ (1 << bit) for bit in walking)}
    patterns |= {ones >> bit for bit in walking} | {ones >> bit << bit for bit in walking}
    cut = mantissa_bits - format.mantissa_bits
    if cut > 1:  # around half an ulp of a normal number
        half = 1 << (cut - 1)
        patterns |= {half - 1, half, half + 1, 3 * half, (ones >> cut << cut) | half, (ones >> cut << cut) | (half - 1)}
    bits = [(field << mantissa_bits) | (pattern & ones) for field in sorted(fields) for pattern in sorted(patterns)]
    integer = INTEGERS[dtype]
    return _signed(torch.tensor(bits, dtype=torch.int64).to(integer).view(dtype))


def _random(format: FloatFormat, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    limits = torch.iinfo(INTEGERS[dtype])
    anywhere = torch.randint(limits.min, limits.max, (300,), generator=generator, dtype=torch.int64)
    low, high = format.min_exponent - format.mantissa_bits - 2, format.max_exponent + 2
    exponents = torch.randint(low, high, (300,), generator=generator)
    inside = torch.ldexp(1 + torch.rand(300, generator=generator, dtype=torch.float64), exponents)
    return torch.cat([anywhere.to(INTEGERS[dtype]).view(dtype), _signed(inside.to(dtype))])


def _nans(dtype: torch.dtype) -> Tensor:
    _, mantissa_bits = _LAYOUT[dtype]
    infinity = torch.tensor([math.inf], dtype=dtype).view(INTEGERS[dtype]).item()
    ones = (1 << mantissa_bits) - 1
    payloads = [1, 2, ones, ones >> 1, 1 << (mantissa_bits - 1), 1 << (mantissa_bits // 2), (1 << 12) - 1]
    bits = torch.tensor([int(infinity) | payload for payload in payloads], dtype=torch.int64)
    specials = torch.tensor([0.0, math.inf], dtype=dtype)
    return _signed(torch.cat([bits.to(INTEGERS[dtype]).view(dtype), specials]))


def _signed(x: Tensor) -> Tensor:
    integer = INTEGERS[x.dtype]
    return torch.cat([x, (x.view(integer) | torch.iinfo(integer).min).view(x.dtype)])


def right(x: Tensor, cast: Cast, seed: int = SEED) -> list[float]:
    """Return each number after the cast by its definition; stochastic rounding draws by the logical index."""
    draws = _draws(seed, cast.random_bits, len(x)) if cast.is_stochastic else [None] * len(x)
    return [exact_cast(value, cast, draw) for value, draw in zip(x.double().tolist(), draws, strict=True)]


@lru_cache(maxsize=8)
def _draws(seed: int, random_bits: int | None, count: int) -> list[Fraction | None]:
    return [uniform(seed, index, random_bits) for index in range(count)]


def kinds(x: Tensor, cast: Cast, results: list[float]) -> list[str]:
    """Return the kind of each input, from KINDS; `results` are the right ones.

    "Double rounding" is an fp64 input whose result is wrong if it is first rounded to fp32.
    """
    through: list[float | None] = [None] * len(x)
    if x.dtype == torch.float64 and not cast.is_stochastic:
        single = x.to(torch.float32).double().tolist()
        through = [exact_cast(value, cast) for value in single]
    return [_kind(*one, cast) for one in zip(x.double().tolist(), results, through, strict=True)]


def _kind(value: float, result: float, through: float | None, cast: Cast) -> str:
    format = cast.element
    assert isinstance(format, FloatFormat)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity"
    if value == 0:
        return "zero"
    if through is not None and through != result and not math.isnan(result):
        return "double rounding"
    if abs(value) > format.maximum:
        return "overflow"
    if abs(value) < format.smallest_normal:
        return "subnormal"
    unit = Fraction(2) ** (math.frexp(value)[1] - 1 - format.mantissa_bits)
    return "tie" if (2 * abs(Fraction(value)) / unit) % 2 == 1 else "other"


def differ(found: Tensor, results: list[float]) -> Tensor:
    """Return which results differ from the right ones; all NaNs are equal, zeros of different sign are not."""
    wanted = torch.tensor(results, dtype=torch.float64)
    found = found.double()
    same = (found == wanted) & (found.signbit() == wanted.signbit())
    return ~(same | (found.isnan() & wanted.isnan()))


def bits_of(x: Tensor) -> str:
    """Return the bits of one number in hexadecimal."""
    width = x.itemsize * 8
    return f"0x{int(x.view(INTEGERS[x.dtype]).item()) & ((1 << width) - 1):0{width // 4}x}"
