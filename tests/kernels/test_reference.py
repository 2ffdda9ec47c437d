"""The definition agrees with rational arithmetic, number by number, and with the libraries that have the format."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_casts import FORMATS_TRIED, bits, casts, exact_cast, inputs, philox, uniform
from libraries import LIBRARIES
from torch import Tensor

from lowp.casts import Cast, parse
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.casts import checks
from lowp.kernels.numbers import reference
from lowp.kernels.numbers.philox import Draw, tail_words, words
from lowp.kernels.numbers.philox import _blocks as blocks

SEED = 0xC0FFEE_1234_5678_9ABC

TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e5m2": torch.float8_e5m2,
    "e4m3fn:saturate": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
}


def quantized(x: Tensor, cast: Cast | str, seed: int | Tensor = 0) -> Tensor:
    out = torch.empty_like(x)
    reference.quantize(x, parse(cast), seed, out)
    return out


def thinned(format: FloatFormat | IntFormat, dtype: torch.dtype) -> Tensor:
    x = inputs(format, dtype, random=40)
    return x[:: max(1, len(x) // 120)]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 7], ids=["all", "sample"])
@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_cast_is_that_of_rational_arithmetic(
    format: FloatFormat | IntFormat, dtype: torch.dtype, step: int
) -> None:
    every = thinned(format, dtype)
    for place, cast in enumerate(casts(format)):
        if not checks.holds(cast, dtype) or (step > 1 and place % 2 == (dtype == torch.float32)):
            continue  # the dtypes of a sample take turns at the casts
        x = every[place % step :: step]
        found = quantized(x, cast, SEED)
        draws: list[Fraction | None] = [None] * len(x)
        if cast.is_stochastic:
            draws = [uniform(SEED, index, cast.random_bits) for index in range(len(x))]
        expected = [exact_cast(v, cast, u) for v, u in zip(x.double().tolist(), draws, strict=True)]
        wanted = torch.tensor(expected, dtype=torch.float64)
        same = (found.double() == wanted) & (found.signbit() == wanted.signbit()) | (found.isnan() & wanted.isnan())
        assert same.all(), (str(cast), x[~same][:4], found[~same][:4], wanted[~same][:4])


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in cast:RuntimeWarning")
def test_nearest_even_is_that_of_ml_dtypes_and_numpy(name: str) -> None:
    cast = parse(name)
    assert isinstance(cast.element, FloatFormat)
    x = inputs(cast.element, torch.float32, random=20_000)
    if not cast.element.has_nan:
        x = x[x.isfinite()]  # where the MX formats saturate, ml_dtypes does, too; NaN it makes -0
    if name == "e8m0":
        # Between 2**-127 and 2**-126 both libraries give 2**-126 to every number, also where 2**-127 is nearer.
        x = x[(x.abs() <= 2.0**-127) | (x.abs() >= 1.5 * 2.0**-127)]
    wanted = torch.from_numpy(x.numpy().astype(LIBRARIES[name]).astype(np.float32))
    found = quantized(x, cast)
    assert torch.equal(found.isnan(), wanted.isnan())
    number = ~wanted.isnan()
    assert torch.equal(bits(found[number]), bits(wanted[number]))


@pytest.mark.parametrize("name", TORCH)
def test_nearest_even_is_that_of_torch(name: str) -> None:
    cast = parse(name)
    assert isinstance(cast.element, FloatFormat)
    x = inputs(cast.element, torch.float32, random=20_000)
    if name == "e8m0":
        x = x[(x == 2.0**-127) | (x >= 1.5 * 2.0**-127)]  # torch drops the sign of negative numbers
    wanted = x.to(TORCH[name]).float()
    found = quantized(x, cast)
    assert torch.equal(found.isnan(), wanted.isnan())
    number = ~wanted.isnan()
    assert torch.equal(bits(found[number]), bits(wanted[number]))


def test_fp64_is_rounded_once() -> None:
    # 1 + 2**-11 + 2**-40 lies above the middle of two fp16 numbers; by way of fp32 it would be the middle, and go down
    x = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert quantized(x, "fp16").item() == 1 + 2.0**-10
    assert x.to(torch.float16).item() == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nan_keeps_its_sign_and_gets_the_quiet_payload(dtype: torch.dtype) -> None:
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    quiet = bits(torch.tensor([torch.nan], dtype=dtype)).item()
    assert quiet == {8: 0x7FF8 << 48, 4: 0x7FC00000, 2: 0x7E00 if dtype == torch.float16 else 0x7FC0}[dtype.itemsize]
    infinity = bits(torch.tensor([torch.inf], dtype=dtype)).item()
    nans = torch.tensor([infinity + 1, torch.iinfo(integer).max, torch.iinfo(integer).min + infinity + 1, -1])
    found = bits(quantized(nans.to(integer).view(dtype), "e4m3fnuz")).tolist()
    assert found == [quiet, quiet, quiet + torch.iinfo(integer).min, quiet + torch.iinfo(integer).min]


@pytest.mark.parametrize(
    ("value", "cast", "expected"),
    [
        (65519.996, "fp16", 65504.0),
        (65520.0, "fp16", torch.inf),
        (65520.0, "fp16:toward-zero", 65504.0),
        (65505.0, "fp16:up", torch.inf),
        (-65505.0, "fp16:up", -65504.0),
        (-65505.0, "fp16:down", -torch.inf),
        (2.0**-25, "fp16", 0.0),
        (2.0**-25, "fp16:nearest-away", 2.0**-24),
        (1e-45, "fp16:up", 2.0**-24),
        (1.12156456132, "fp16", 1.12109375),
        (0.00041999, "fp16", 0.000420093536376953125),
        (464.0, "e4m3fn:saturate", 448.0),
        (464.0, "e4m3fn", 448.0),
        (1.1754942e-38, "bf16-tpu", 0.0),
        (1.1754942e-38, "bf16-tpu:up", 0.0),
        (1.1754942e-38, "bf16", 1.17549435e-38),
        (2.5, "i8", 2.0),
        (1e9, "i8s", 127.0),
        (-1e9, "i8s", -127.0),
        (-1e9, "i8", -128.0),
        (1.5, "e8m0", 2.0),
        (1e-45, "e8m0:toward-zero", 2.0**-127),
    ],
)
def test_the_cases_that_others_get_wrong(value: float, cast: str, expected: float) -> None:
    x = torch.tensor([value])
    assert quantized(x, cast).item() == torch.tensor(expected).item()


@pytest.mark.parametrize("value", [-1.0, 0.0, -0.0, torch.inf])
def test_a_scale_format_without_zero_and_sign_answers_nan(value: float) -> None:
    assert quantized(torch.tensor([value]), "e8m0").isnan().all()


def test_philox_has_the_published_words() -> None:
    # known answers of the authors' Random123 library, kat_vectors, philox4x32 10
    assert philox(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((1 << 64) - 1, (0xFFFFFFFF,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", [0, 1, SEED, (1 << 64) - 1])
def test_the_words_of_an_element_follow_from_seed_and_index(seed: int) -> None:
    x = torch.zeros(3, 5).t()  # the logical index, not the place in memory
    found = words(x, seed).flatten().tolist()
    assert found == [philox(seed, (i // 4, 0, 0, 0))[i % 4] for i in range(15)]
    tail = torch.stack(tail_words(x, seed), dim=-1).reshape(15, 4).tolist()
    assert tail == [philox(seed, (i, 0, 1, 0)) for i in range(15)]


@pytest.mark.parametrize("first", [0, 1, 3, 4, 7, 2**33 + 5])
def test_a_part_has_the_words_of_the_whole(first: int) -> None:
    whole, part = torch.zeros(12), torch.zeros(12 - first % 12)
    begin = first - first % 12  # of what the whole begins with
    for seed in (SEED, torch.tensor(5)):
        found = (words(part, Draw(seed, first)), *tail_words(part, Draw(seed, first)))
        every = (words(whole, Draw(seed, begin)), *tail_words(whole, Draw(seed, begin)))
        assert all(torch.equal(one, other[first - begin :]) for one, other in zip(found, every, strict=True))
        key = SEED if isinstance(seed, int) else 5
        assert found[0][0] == philox(key, (first // 4 & 0xFFFFFFFF, first // 4 >> 32, 0, 0))[first % 4]
        assert [int(one[0]) for one in found[1:]] == philox(key, (first & 0xFFFFFFFF, first >> 32, 1, 0))


def test_a_position_beyond_32_bits_uses_both_halves_of_the_counter() -> None:
    # no tensor of 2**34 elements here: the counters of their words alone
    counters = [2**31, 2**32 - 1, 2**32, 2**40 + 3]
    for kind in (0, 1):
        found = torch.stack(blocks(torch.tensor(counters), kind, SEED), dim=-1).tolist()
        assert found == [philox(SEED, (counter & 0xFFFFFFFF, counter >> 32, kind, 0)) for counter in counters]


def test_stochastic_rounding_is_unbiased() -> None:
    fraction = 0.3
    x = torch.full((100_000,), 1 + fraction / 8)
    share = (quantized(x, "e4m3fn:stochastic", seed=5) > 1).double().mean().item()
    assert abs(share - fraction) < 5 * (fraction * (1 - fraction) / len(x)) ** 0.5


def test_a_seed_may_be_a_tensor() -> None:
    x = torch.linspace(0, 1, 1000)
    for seed in (7, -7):
        by_tensor = quantized(x, "fp16:stochastic", torch.tensor(seed))
        assert torch.equal(by_tensor, quantized(x, "fp16:stochastic", seed % (1 << 64)))


def test_nothing_depends_on_the_flush_to_zero_mode() -> None:
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor has no flush-to-zero mode to be tested")
    try:
        for dtype in (torch.float32, torch.float64):
            x = torch.arange(1, 1 << 20, 997).to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)
            flushed = [bits(quantized(x, cast, 3)) for cast in ("bf16", "fp16:up", "fp32", "e8m0", "bf16:stochastic")]
    finally:
        torch.set_flush_denormal(False)
    plain = [bits(quantized(x, cast, 3)) for cast in ("bf16", "fp16:up", "fp32", "e8m0", "bf16:stochastic")]
    assert all(torch.equal(a, b) for a, b in zip(flushed, plain, strict=True))
