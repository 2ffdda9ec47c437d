"""All 2**32 fp32 numbers: the C++ kernels against the definition, torch and ml_dtypes. Minutes of work: -m slow.

The definition is used as a table. To nearest even, the result of a positive number is constant between two midpoints,
so a format of 16 bits has at most 2**15 steps; where each begins follows from exact midpoints of the format's values,
and the float64 reference confirms the first and the last number of every step. All numbers are then compared with it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding, parse
from lowp.formats import FloatFormat
from lowp.kernels import cpu
from lowp.kernels.numbers import reference

pytestmark = pytest.mark.slow

NAMES = ["fp16", "bf16", "bf16-tpu", "bf16-trunc", "e4m3fn", "e4m3fn:saturate", "e5m2", "e5m7"]
CHUNK = 1 << 24
INFINITY, NAN = 0x7F800000, 0x7FC00000


class Walk:
    """All chunks of numbers and their casts, in the same memory: new memory would take longer than the work."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.ascending = torch.arange(CHUNK, dtype=torch.int32)
        self.x = torch.empty(CHUNK)
        self.out = torch.empty(CHUNK)

    def numbers(self, first: int) -> Tensor:
        """Return the numbers whose bits are first .. first + CHUNK - 1."""
        signed = first - (1 << 32) if first >= 1 << 31 else first
        torch.add(self.ascending, signed, out=self.x.view(torch.int32))
        return self.x

    def bits(self, first: int) -> Tensor:
        """Return the bits of their casts."""
        cpu.quantize(self.numbers(first), self.cast, 0, self.out)
        return self.out.view(torch.int32)


def fp32_bits(value: float) -> int:
    packed = struct.pack("<f", value)
    assert struct.unpack("<f", packed)[0] == value, "every value and midpoint here is an fp32 number"
    bits: int = struct.unpack("<i", packed)[0]
    return bits


def steps(cast: Cast) -> tuple[Tensor, Tensor]:
    """Return where (bits of a positive fp32 number) each result begins, and the results (bits), ascending."""
    format = cast.element
    assert isinstance(format, FloatFormat)
    values = sorted({value for value in format.values() if 0 <= value <= format.maximum})
    truncates = cast.rounding is Rounding.TOWARD_ZERO
    if not truncates:
        values.append(values[-1] + format.ulp(values[-1]))  # the next one, had the exponent no end
    starts, results = [0], [0]
    for low, high in itertools.pairwise(values):
        if truncates or (low == 0 and not format.subnormals):
            starts.append(fp32_bits(high))
        else:  # a tie goes to the even code: here down to the lower, so the upper begins one number later
            starts.append(fp32_bits((low + high) / 2) + (format.encode(low) % 2 == 0))
        results.append(fp32_bits(high) if high <= format.maximum else beyond(cast))
    if truncates:
        starts.append(INFINITY)
        results.append(INFINITY)
    return torch.tensor([*starts, INFINITY + 1]), torch.tensor([*results, NAN], dtype=torch.int32)


def beyond(cast: Cast) -> int:
    if cast.overflow is Overflow.SATURATE:
        return fp32_bits(float(cast.element.maximum))
    return INFINITY if cast.overflow is Overflow.INFINITY else NAN


def expected(starts: Tensor, results: Tensor, first: int) -> Tensor:
    """Return the results of the positive numbers first .. first + CHUNK - 1."""
    edges = starts.clamp(first, first + CHUNK)
    ends = torch.cat([edges[1:], torch.tensor([first + CHUNK])])
    return results.repeat_interleave(ends - edges)


@pytest.mark.parametrize("isa", ["portable", None], ids=["portable", "best"])
@pytest.mark.parametrize("name", NAMES)
def test_all_fp32_numbers_become_what_the_definition_says(name: str, isa: str | None) -> None:
    cast = parse(name)
    starts, results = steps(cast)
    ends = torch.cat([starts[1:] - 1, torch.tensor([0x7FFFFFFF])])
    for edge in (starts, ends):
        for sign in (0, -(1 << 31)):
            x = (edge | sign).to(torch.int32).view(torch.float32)
            out = torch.empty_like(x)
            reference.quantize(x, cast, 0, out)
            assert torch.equal(out.view(torch.int32), results | sign)
    cpu.select(isa)
    walk = Walk(cast)
    for first in range(0, 1 << 31, CHUNK):
        wanted = expected(starts, results, first)
        assert torch.equal(walk.bits(first), wanted), f"in {first:#x} .. +{CHUNK:#x}"
        wanted |= -(1 << 31)
        assert torch.equal(walk.bits(first + (1 << 31)), wanted), f"in -{first:#x} .. +{CHUNK:#x}"


def through_torch(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(torch.float32)


def through_ml_dtypes(name: str) -> Callable[[Tensor], Tensor]:
    numpy = pytest.importorskip("numpy")
    dtype = getattr(pytest.importorskip("ml_dtypes"), name)
    return lambda x: torch.from_numpy(x.numpy().astype(dtype).astype(numpy.float32))


OTHERS: dict[str, tuple[str, Callable[[], Callable[[Tensor], Tensor]]]] = {
    "torch-fp16": ("fp16", lambda: through_torch(torch.float16)),
    "torch-bf16": ("bf16", lambda: through_torch(torch.bfloat16)),
    "torch-e5m2": ("e5m2", lambda: through_torch(torch.float8_e5m2)),
    "torch-e4m3fn": ("e4m3fn:saturate", lambda: through_torch(torch.float8_e4m3fn)),
    "ml_dtypes-bf16": ("bf16", lambda: through_ml_dtypes("bfloat16")),
    "ml_dtypes-e4m3fn": ("e4m3fn", lambda: through_ml_dtypes("float8_e4m3fn")),
    "ml_dtypes-e5m2": ("e5m2", lambda: through_ml_dtypes("float8_e5m2")),
}


@pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("other", OTHERS)
def test_all_fp32_numbers_become_what_others_make_of_them(other: str) -> None:
    name, make = OTHERS[other]
    cast, theirs = parse(name), make()
    walk = Walk(cast)
    for first in range(0, 1 << 32, CHUNK):
        found = walk.bits(first)
        x = walk.x
        wanted = theirs(x)
        # NaNs keep their sign here; which payload, and which sign, others give a NaN is not the format's matter
        nan = wanted.isnan()
        assert torch.equal(found.view(torch.float32).isnan(), nan), f"NaN in {first:#x} .. +{CHUNK:#x}"
        differ = (found != wanted.view(torch.int32)) & ~nan
        assert not differ.any(), (hex(first), x[differ][:5], wanted[differ][:5])
