"""Triton's codes, values of codes and statistics, in its interpreter, are those of the definition."""

from __future__ import annotations

import pytest
import torch
from exact_casts import FORMATS_TRIED, bits, inputs
from torch import Tensor

import lowp
from lowp import kernels
from lowp.casts import Cast, parse
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels import triton
from lowp.kernels.numbers import bitwise, packing, reference
from lowp.kernels.numbers.packing import as_integers, code_dtype, wrapped
from lowp.kernels.numbers.philox import Draw

SEED = 0x1234_5678_9ABC_DEF0
SOME = ["fp16", "bf16-tpu", "e4m3fn", "e4m3fnuz", "e8m0", "e2m1", "ue5m3nuz", "e8m10ftz", "fp64", "i8s", "i25"]
FORMATS_FAST = [format for format in FORMATS_TRIED if str(format) in SOME]

pytest.importorskip("triton", reason="triton is not installed")


def check_codes(format: FloatFormat | IntFormat, dtype: torch.dtype, rounding: str = "nearest-even") -> None:
    check_cast(Cast(format).with_rounding(rounding), dtype)


def check_cast(cast: Cast, dtype: torch.dtype) -> None:
    format = cast.element
    x = inputs(format, dtype, random=100)
    has_code = ~x.isnan() if isinstance(format, IntFormat) or not format.has_nan else torch.ones_like(x).bool()
    wanted, found = (torch.empty(x.shape, dtype=code_dtype(format)) for _ in range(2))
    assert triton.encode(x, cast, SEED, found) == bitwise.encode(x, cast, SEED, wanted)
    assert torch.equal(as_integers(found)[has_code], as_integers(wanted)[has_code])


def every_code(format: FloatFormat | IntFormat) -> Tensor:
    count = 1 << format.bits
    codes = torch.arange(count) if format.bits <= 16 else torch.arange(2000) * 0x9E3779B97F4A7C15 % min(count, 1 << 62)
    codes = wrapped(codes, code_dtype(format))
    if isinstance(format, IntFormat):
        codes = codes[(as_integers(codes) >= format.minimum) & (as_integers(codes) <= format.maximum)]
    return codes


def check_values(format: FloatFormat | IntFormat, dtype: torch.dtype) -> None:
    codes = every_code(format)
    wanted, found = (torch.empty(codes.shape, dtype=dtype) for _ in range(2))
    bitwise.decode(codes, format, wanted)
    triton.decode(codes, format, found)
    assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("format", FORMATS_FAST, ids=str)
def test_codes_and_their_values_are_those_of_the_definition(format: FloatFormat | IntFormat) -> None:
    check_codes(format, torch.float32)
    check_values(format, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
def test_codes_of_every_format_and_dtype_are_those_of_the_definition(format: FloatFormat | IntFormat) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        check_codes(format, dtype)
        check_codes(format, dtype, "stochastic")
    check_values(format, torch.float64)
    if format.bits > 1:
        check_values(format, torch.float32) if format.bits < 26 else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", ["up", "down", "toward-zero"])
def test_codes_are_rounded_in_a_direction_with_every_overflow(rounding: str, dtype: torch.dtype) -> None:
    for name in ("e5m2", "e4m3fn", "e4m3fnuz", "e2m1", "e3m4", "fp16"):
        for overflow in ("", ":saturate", ":nan"):
            try:
                cast = parse(f"{name}:{rounding}{overflow}")
            except InvalidInput:  # a format without NaN
                continue
            check_cast(cast, dtype)


OVERFLOWS = ["e5m2:nan", "e5m2:stochastic:nan", "e5m2:stochastic-8:nan", "e4m3nuz:nan", "bf16:nearest-away:nan"]
DIRECT = [
    "i8",
    "i8:nearest-away",
    "e4m3fn:nearest-away",
    "i8:stochastic",
    "i4",
    "i16:up",
    "e4m3fn:stochastic-1",
    "e4m3b127:stochastic-8",
    "ue4m3:stochastic",
]


@pytest.mark.parametrize("name", [*OVERFLOWS, *DIRECT])
def test_codes_of_every_overflow_and_of_integers_are_those_of_the_definition(name: str) -> None:
    check_cast(parse(name), torch.float32)


def test_codes_decode_into_16_bits() -> None:
    half, brain = torch.float16, torch.bfloat16
    for name in ("e4m3fn", "e5m2", "e5m2fnuz", "e4m3nuz", "e4m3fnuz", "e3m4", "e2m1", "fp16"):
        check_values(parse(name).element, half)
    for name in ("e4m3fn", "e5m2", "e5m2fnuz", "e4m3nuz", "e2m1", "e2m3", "bf16", "bf16-tpu"):
        check_values(parse(name).element, brain)
        check_values(parse(name).element, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_statistics_are_those_of_the_definition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.triton import launch

    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 8192)
    x = inputs(parse("e5m7").element, dtype, random=5000)
    tiny = torch.tensor([1, 0x400000, 0x7FFFFF], dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, tiny.double().to(dtype)])
    histogram, maximum, squares, *counts = triton.statistics(x)
    wanted, most, energy, *others = reference.statistics(x)
    assert torch.equal(histogram, wanted)
    assert float(maximum) == most and [int(count) for count in counts] == others
    # sums in another order: at most n roundings of 2**-53 each
    assert float(squares) == pytest.approx(energy, rel=len(x) * 2.0**-53)


@pytest.mark.parametrize("power", [0, -100, -122])
def test_exponents_in_and_outside_of_the_window_and_zeros_are_counted(power: int) -> None:
    x = torch.randn(600, generator=torch.Generator().manual_seed(0)) * 2.0**power
    x[::7] = 0.0
    for far in (None, 2.0**-40, 2.0**126):
        if far is not None:
            x[100] = far  # below the window, or above it
        found, wanted = triton.statistics(x), reference.statistics(x)
        assert torch.equal(found[0], wanted[0]) and [float(one) for one in found[3:]] == list(map(float, wanted[3:]))
        assert float(found[1]) == float(wanted[1])
        assert float(found[2]) == pytest.approx(float(wanted[2]), rel=600 * 2.0**-53)


@pytest.mark.parametrize("offset", [0, 1, 15])
def test_the_last_numbers_of_every_length_are_cast_and_counted(offset: int) -> None:
    for length in (1, 2, 15, 16, 17, 18, 32, 33):
        x = torch.randn(length, generator=torch.Generator().manual_seed(length))
        cast, drawn = parse("e4m3fn"), parse("e4m3fn:stochastic")
        with kernels.use("bitwise"):
            wanted = lowp.quantize(x, drawn, seed=3, offset=offset), lowp.encode(x, cast, offset=offset)
        with kernels.use("triton"):
            found = lowp.quantize(x, drawn, seed=3, offset=offset), lowp.encode(x, cast, offset=offset)
            assert torch.equal(lowp.decode(found[1], "e4m3fn"), lowp.quantize(x, cast))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert torch.equal(triton.statistics(x)[0], reference.statistics(x)[0])


def test_statistics_of_nothing_are_zero() -> None:
    histogram, *numbers = triton.statistics(torch.empty(0))
    assert histogram.sum() == 0 and [float(number) for number in numbers] == [0.0] * 5


FOUR_BITS = ["e2m1", "e3m0finite", "i4", "i4s"]


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("way", ["", ":stochastic"])
def test_codes_of_four_bits_are_packed_and_read_in_the_kernel(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 4
    expected = lowp.encode(x, name + way, seed=3, packed=True)
    values = lowp.decode(expected, name, packed=True)
    with monkeypatch.context() as patch, kernels.use("triton"):
        for second_pass in ("pack", "unpack"):
            patch.setattr(packing, second_pass, None)
        assert torch.equal(lowp.encode(x, name + way, seed=3, packed=True), expected)
        assert torch.equal(lowp.encode(x[1], name + way, seed=3, offset=10, packed=True), expected[1])
        assert torch.equal(lowp.decode(expected, name, packed=True), values)
        assert torch.equal(lowp.decode(expected[:, :4], name, dtype=torch.float64, packed=True), values[:, :8].double())


@pytest.mark.parametrize("name", ["e2m1", "i4", "e2m3"])
def test_rows_that_are_no_whole_bytes_of_two_codes_are_packed_afterwards(name: str) -> None:
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    expected = lowp.encode(x, name, packed=True)
    with kernels.use("triton"):
        found = lowp.encode(x, name, packed=True)
        assert torch.equal(found, expected)
        assert torch.equal(lowp.decode(found, name, packed=True, length=7), lowp.quantize(x, name))
        drawn = lowp.encode(x[:, :6], name + ":stochastic", seed=1, offset=5, packed=True)
    assert torch.equal(drawn, lowp.encode(x[:, :6], name + ":stochastic", seed=1, offset=5, packed=True))


@pytest.mark.parametrize("count", [1, 7, 37, 48])
def test_nothing_is_written_but_the_result(count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    e4m3fn, e2m1, i16 = parse("e4m3fn"), parse("e2m1"), parse("i16")
    guard = 40

    def inside(dtype: torch.dtype, length: int) -> tuple[Tensor, Tensor]:
        whole = torch.full((length + 2 * guard,), 85).to(dtype)
        return whole, whole[guard : guard + length]

    def is_whole(whole: Tensor) -> bool:
        return bool((whole[:guard] == 85).all() and (whole[-guard:] == 85).all())

    for seed in (0, Draw(0, 3)):
        whole, out = inside(torch.float32, count)
        triton.quantize(x, e4m3fn, seed, out)
        assert is_whole(whole) and torch.equal(out, lowp.quantize(x, "e4m3fn"))
        whole, out = inside(torch.uint8, count)
        triton.encode(x, e4m3fn, seed, out)
        assert is_whole(whole) and torch.equal(out, lowp.encode(x, "e4m3fn"))
        whole, out = inside(torch.int16, count)
        triton.encode(100 * x, i16, seed, out)
        assert is_whole(whole) and torch.equal(out, lowp.encode(100 * x, "i16"))
    even = torch.cat((x, x))
    whole, out = inside(torch.uint8, count)
    triton.encode(even, e2m1, 0, out, packed=True)
    assert is_whole(whole) and torch.equal(out, lowp.encode(even, "e2m1", packed=True))
    whole, values = inside(torch.float32, 2 * count)
    triton.decode(out.clone(), e2m1.element, values, packed=True)
    assert is_whole(whole) and torch.equal(values, lowp.quantize(even, "e2m1"))
    whole, values = inside(torch.float64, count)
    triton.decode(lowp.encode(x, "e4m3fn"), e4m3fn.element, values)
    assert is_whole(whole) and torch.equal(values, lowp.quantize(x, "e4m3fn").double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_of_the_smallest_numbers_are_those_of_the_definition(dtype: torch.dtype) -> None:
    tiny = 1e-45 if dtype is torch.float32 else 5e-324
    for x in (torch.full((40,), tiny, dtype=dtype), torch.tensor([0.0, tiny, -tiny, 0.0], dtype=dtype)):
        found, wanted = triton.statistics(x), reference.statistics(x)
        assert torch.equal(found[0], wanted[0]) and list(map(float, found[1:])) == list(map(float, wanted[1:]))
