"""Every implementation gives the bits of the definition, on every code, midpoint and neighbour."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from exact_casts import FORMATS_TRIED, bits, casts, exact_cast, inputs, uniform
from torch import Tensor

from lowp import kernels
from lowp.casts import Cast, parse
from lowp.errors import Unavailable
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels import IMPLEMENTATIONS, available
from lowp.kernels.casts import checks
from lowp.kernels.numbers import bitwise, native, philox, reference
from lowp.kernels.numbers.floats import CARRIERS, widen16
from lowp.kernels.numbers.packing import as_integers, code_dtype, wrapped

FAST = [name for name in available() if name not in ("reference", "native")]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SEED = 0x1234_5678_9ABC_DEF0


def quantized(name: str, x: Tensor, cast: Cast) -> Tensor:
    out = torch.empty_like(x)
    IMPLEMENTATIONS[name].quantize(x, cast, SEED, out)
    return bits(out)


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False], ids=["all", "sample"])
@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
def test_values_are_those_of_the_definition(format: FloatFormat | IntFormat, whole: bool) -> None:
    x = {dtype: inputs(format, dtype, *([] if whole else [60, 60])) for dtype in DTYPES}
    every = list(itertools.product(casts(format), DTYPES))
    # a sample has others for each format
    for cast, dtype in every if whole else every[FORMATS_TRIED.index(format) % 19 :: 19]:
        if not checks.holds(cast, dtype):
            continue
        wanted = quantized("reference", x[dtype], cast)
        for name in FAST:
            found = quantized(name, x[dtype], cast)
            same = found == wanted
            assert same.all(), (name, str(cast), x[dtype][~same][:4], found[~same][:4], wanted[~same][:4])


@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
def test_codes_are_those_of_the_definition(format: FloatFormat | IntFormat) -> None:
    x = inputs(format, torch.float32, random=100)[::3].contiguous()
    may_have_code = ~x.isnan() if isinstance(format, IntFormat) or not format.has_nan else torch.ones_like(x).bool()
    cast = Cast(format)
    wanted = torch.empty(x.shape, dtype=code_dtype(format))
    uncodable = reference.encode(x, cast, SEED, wanted)
    for name in FAST:
        found = torch.empty_like(wanted)
        assert IMPLEMENTATIONS[name].encode(x, cast, SEED, found) == uncodable, name
        assert torch.equal(as_integers(found)[may_have_code], as_integers(wanted)[may_have_code]), name


@pytest.mark.parametrize("name", ["reference", *FAST])
@pytest.mark.parametrize("text", ["e2m1", "e3m2", "i8", "i1", "i4s", "ue4m3finite"])
def test_a_nan_without_a_code_is_counted_and_has_code_zero(text: str, name: str) -> None:
    element = parse(text).element
    x = torch.tensor([1.0, torch.nan, -torch.nan, 1.0])
    codes = torch.full((4,), 77).to(code_dtype(element))
    assert IMPLEMENTATIONS[name].encode(x, Cast(element), 0, codes) == 2
    one = element.encode(1.0) if isinstance(element, FloatFormat) else 1
    assert codes.tolist() == [one, 0, 0, one]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 37], ids=["all", "sample"])
@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
def test_every_code_decodes_to_its_value_and_back(format: FloatFormat | IntFormat, step: int) -> None:
    count = 1 << format.bits
    codes = torch.arange(0, count if format.bits <= 16 else 0, step if format.bits > 11 else 1)
    if format.bits > 16:
        codes = torch.tensor([i * 0x9E3779B97F4A7C15 % min(count, 1 << 62) for i in range(2000)])
    if format.bits == 1:
        codes = torch.tensor([1, -1])
    codes = wrapped(codes, code_dtype(format))
    if isinstance(format, IntFormat) and format.bits > 1:
        codes = codes[(as_integers(codes) >= format.minimum) & (as_integers(codes) <= format.maximum)]
    wanted = torch.empty(codes.shape, dtype=torch.float64)
    reference.decode(codes, format, wanted)
    for name in FAST:
        found = torch.empty_like(wanted)
        IMPLEMENTATIONS[name].decode(codes, format, found)
        assert torch.equal(bits(found), bits(wanted)), name
    again = torch.empty_like(codes)
    reference.encode(wanted[~wanted.isnan()], Cast(format), 0, again[~wanted.isnan()])
    for name in ["reference", *FAST]:
        again = torch.empty(int((~wanted.isnan()).sum()), dtype=codes.dtype)
        assert IMPLEMENTATIONS[name].encode(wanted[~wanted.isnan()], Cast(format), 0, again) == 0
        decoded = torch.empty(again.shape, dtype=torch.float64)
        reference.decode(again, format, decoded)
        assert torch.equal(bits(decoded), bits(wanted[~wanted.isnan()])), name


def test_native_is_the_definition_where_it_is_there() -> None:
    for text in ("fp16", "bf16", "fp32"):
        cast = parse(text)
        assert isinstance(cast.element, FloatFormat)
        x = inputs(cast.element, torch.float32, random=20_000)
        assert torch.equal(quantized("native", x, cast), quantized("reference", x, cast)), text
    x = inputs(parse("fp16").element, torch.float64)
    assert torch.equal(quantized("native", x, parse("fp64")), quantized("reference", x, parse("fp64")))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("e4m3fn", torch.float32), ("fp16:up", torch.float32), ("fp16", torch.float64), ("fp32", torch.float64)],
)
def test_native_names_who_has_what_it_lacks(text: str, dtype: torch.dtype) -> None:
    with pytest.raises(Unavailable, match=r"native does not have .* bitwise and reference have it"):
        native.quantize(torch.ones(1, dtype=dtype), parse(text), 0, torch.ones(1, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_statistics_are_those_of_the_definition(dtype: torch.dtype) -> None:
    x = inputs(parse("e5m7").element, dtype, random=5000)
    tiny = torch.tensor([1, 0x400000, 0x7FFFFF], dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, tiny.double().to(dtype)])
    histogram, *others = reference.statistics(x)
    for name in FAST:
        found, *numbers = IMPLEMENTATIONS[name].statistics(x)
        assert torch.equal(found, histogram), name
        for number, wanted in zip(numbers, others, strict=True):
            # sums in another order: at most n roundings of 2**-53 each
            assert float(number) == pytest.approx(float(wanted), rel=len(x) * 2.0**-53), name


def test_the_histogram_counts_exponents_of_fp32() -> None:
    x = torch.tensor([1.0, -1.5, 2.0, 0.0, -0.0, 1e-40, 2.0**-126, 3e38, torch.inf, torch.nan])
    for name in ("reference", *FAST):
        for dtype in (torch.float32, torch.float64):
            histogram, maximum, _, zeros, nan, infinite = IMPLEMENTATIONS[name].statistics(x.to(dtype))
            assert {i: n for i, n in enumerate(histogram.tolist()) if n} == {0: 3, 1: 1, 127: 2, 128: 1, 254: 1, 255: 2}
            assert float(maximum) == x[7].item()
            assert (int(zeros), int(nan), int(infinite)) == (2, 1, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_a_number_are_those_in_memory(dtype: torch.dtype) -> None:
    carrier, one = CARRIERS[dtype], torch.ones((), dtype=dtype)
    every = [carrier.infinity * part // 1999 for part in range(1999)]
    edges = [0, 1, (1 << carrier.mantissa_bits) - 1, 1 << carrier.mantissa_bits, int(bits(one)), carrier.infinity - 1]
    places = torch.tensor([*every, *edges], dtype=carrier.integer)
    assert [carrier.bits(value) for value in places.view(dtype).tolist()] == places.tolist()
    smallest, epsilon = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).eps
    for value in (1 + epsilon / 2, smallest * (1 + epsilon) / 2) if dtype is not torch.float64 else ():
        with pytest.raises(ValueError, match=f"{value!r} has more bits than this dtype holds"):
            carrier.bits(value)


def test_what_is_not_finite_has_no_maximum_and_no_square() -> None:
    for name in ("reference", *FAST):
        for dtype in DTYPES:
            x = torch.tensor([torch.inf, torch.nan, -torch.inf], dtype=dtype)
            histogram, maximum, squares, zeros, nan, infinite = IMPLEMENTATIONS[name].statistics(x)
            assert (float(maximum), float(squares), int(zeros), int(nan), int(infinite)) == (0.0, 0.0, 0, 1, 2), name
            assert histogram[255] == 3 == histogram.sum()


def test_the_last_bits_of_an_unlikely_draw_decide() -> None:
    # The word of element 1 under seed 0 is 0xe169c58d; a fraction that begins with it needs the words behind.
    word = torch.tensor([0xE169C58D]).double() * 2.0**-32
    tail = torch.tensor([2.0**-33 - 2.0**-50], dtype=torch.float64)
    for fraction in (word, word + tail, word + 2.0**-50):
        x = torch.cat([torch.zeros(1, dtype=torch.float64), fraction])
        cast = parse("i8:stochastic")
        wanted = quantized("reference", x, cast)
        assert all(torch.equal(quantized(name, x, cast), wanted) for name in FAST)


@pytest.mark.parametrize("place", range(5))
def test_each_of_the_160_bits_is_compared(place: int) -> None:
    # no fp64 fraction reaches the last words behind equal first ones: the comparison itself is asked
    like = torch.zeros(7, dtype=torch.float64)
    drawn = [philox.words(like, SEED), *philox.tail_words(like, SEED)]
    for difference in (0, 1, -1):
        # once a word differs, those behind it tell nothing
        signs = [0 if index < place else 1 if index == place else -1 for index in range(len(drawn))]
        digits = [word + sign * difference for sign, word in zip(signs, drawn, strict=True)]
        below = torch.full((7,), difference == 1)
        assert torch.equal(bitwise._is_below(digits, like, SEED), below)
        doubled = [digit.double() for digit in digits]
        assert torch.equal(reference._below_digits(doubled, like, parse("fp16:stochastic"), SEED), below)


@pytest.mark.parametrize("name", ["reference", *FAST])
@pytest.mark.parametrize("mode", ["stochastic", "stochastic-b", "stochastic-c"])
@pytest.mark.parametrize("random_bits", [1, 2, 24, 25, 31, 32])
def test_all_random_bits_are_compared_and_what_lies_behind_them_is_rounded(
    random_bits: int, mode: str, name: str
) -> None:
    """Fractions are the drawn bits or one more or less, and any share of a unit behind them."""
    drawn = philox.words(torch.zeros(256, dtype=torch.float64), SEED) >> 32 - random_bits
    half = 1 << 18
    for near, behind in itertools.product((-1, 0, 1), (0, 1, half - 1, half, half + 1, 2 * half - 1)):
        units = (drawn + near).clamp(0, (1 << random_bits) - 1)
        up = {
            "stochastic": torch.zeros_like(units),
            "stochastic-b": torch.full_like(units, behind >= half),
            "stochastic-c": units % 2 if behind == half else torch.full_like(units, behind > half),
        }[mode]
        fraction = (units.double() + behind / (2.0 * half)) / 2.0**random_bits  # exact
        for x, element, least in ((fraction, "i8", 0.0), (2 * fraction - 1, "i1", -1.0)):
            out = torch.empty_like(x)
            IMPLEMENTATIONS[name].quantize(x, parse(f"{element}:{mode}-{random_bits}"), SEED, out)
            assert torch.equal(out, torch.where(drawn < units + up, 1.0, least).double()), (near, behind, element)


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_bits_far_behind_the_half_of_a_unit_make_it_more(name: str) -> None:
    # of 12 random bits the half is at place 13, and 53 bits from it on end in the third word
    x = torch.full((1 << 14,), 2.0**-13 + 2.0**-65, dtype=torch.float64)
    drawn = philox.words(x, SEED) >> 20
    assert (drawn == 0).any()
    for one, is_more in ((x, True), (x - 2.0**-65, False)):
        out = torch.empty_like(one)
        IMPLEMENTATIONS[name].quantize(one, parse("i8:stochastic-c-12"), SEED, out)
        assert torch.equal(out, ((drawn == 0) & is_more).double())


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_the_smallest_number_is_no_longer_as_likely_one_as_minus_one(name: str) -> None:
    x = torch.tensor([-5e-324, 5e-324, 0.0, -0.0], dtype=torch.float64).repeat_interleave(64)
    out = torch.empty_like(x)
    IMPLEMENTATIONS[name].quantize(x, parse("i1:stochastic-1"), SEED, out)
    drawn = torch.where(philox.words(x, SEED) >> 31 == 0, 1.0, -1.0).double()
    assert torch.equal(out, torch.cat((torch.full((64,), -1.0, dtype=torch.float64), drawn[64:])))


def test_the_probabilities_of_stochastic_rounding_have_160_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [2.0**-power * odd for power in (1, 31, 32, 33, 60, 107, 108, 110, 140) for odd in (1, 1 - 2.0**-53)]
    sizes += [0.0, 0.3, 2.0**-159, 2.0**-160, 2.0**-161, 3 * 2.0**-161, 2.0**-400]
    x = torch.tensor([sign * size for size in sizes for sign in (1, -1)], dtype=torch.float64)
    seen: list[list[Tensor]] = []

    def below(digits: list[Tensor], *_: object) -> Tensor:
        seen.append(digits)
        return x > 0

    monkeypatch.setattr(bitwise, "_is_below", below)
    monkeypatch.setattr(reference, "_below_digits", below)
    for cast in (parse("i1:stochastic"), parse("i8:stochastic")):
        wanted = [
            int((1 + Fraction(v)) / 2 * 2**160 if cast.element.bits == 1 else abs(v) * 2**160) for v in x.tolist()
        ]
        for module in (bitwise, reference):
            seen.clear()
            module.quantize(x, cast, 0, torch.empty_like(x))
            (digits,) = seen
            assert len(digits) == 5
            columns = zip(*(digit.tolist() for digit in digits), strict=True)
            assert [sum(int(d) << 32 * (4 - at) for at, d in enumerate(one)) for one in columns] == wanted, module


def test_the_words_behind_the_first_are_read_where_nobody_looks_whether_they_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.linspace(-1, 1, 64, dtype=torch.float64)
    wanted = [bitwise.quantized(x, parse(one), SEED) for one in ("i1:stochastic", "fp16:stochastic")]
    monkeypatch.setattr(bitwise, "_may_be_undecided", lambda undecided: True)
    found = [bitwise.quantized(x, parse(one), SEED) for one in ("i1:stochastic", "fp16:stochastic")]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_the_third_random_word_decides_where_the_first_two_do_not(name: str) -> None:
    # found by search: the first word of element 3 under this seed is zero, so a fraction can reach the words behind it
    seed, index = 1343428, 3
    drawn = uniform(seed, index, None)
    assert drawn < Fraction(1, 1 << 32)
    last = Fraction(1, 1 << 85)  # of 53 significant bits below 2**-32
    below, cast = drawn // last * last, parse("i8:stochastic")
    found = []
    for fraction in (below - last, below, below + last):
        x = torch.zeros(index + 1, dtype=torch.float64)
        x[index] = float(fraction)
        out = torch.empty_like(x)
        IMPLEMENTATIONS[name].quantize(x, cast, seed, out)
        found.append(out[index].item())
        assert found[-1] == exact_cast(float(fraction), cast, drawn)
    assert found == [0.0, 0.0, 1.0]


def test_bitwise_never_looks_at_data_on_other_devices() -> None:
    x = torch.empty(3, 4, device="meta")
    assert bitwise.quantized(x, parse("fp16:stochastic")).shape == (3, 4)
    assert widen16(x) is x


@pytest.mark.parametrize("more", [-2, -1, 0, 1])
@pytest.mark.parametrize("mode", ["stochastic", "stochastic-b", "stochastic-c"])
@pytest.mark.parametrize(("format", "cut"), [("e8m21", 2), ("e8m20", 3), ("bf16", 16), ("e11m50", 2), ("e11m36", 16)])
def test_shares_of_as_many_bits_as_are_cut_off_are_those_of_the_definition(
    format: str, cut: int, mode: str, more: int
) -> None:
    """With a random bit fewer than bits are cut off, or two, many a rest lies in the middle of two shares."""
    draw = torch.Generator().manual_seed(cut)
    kept = torch.randint(16, (4096,), generator=draw) << cut | torch.randint(1 << cut, (4096,), generator=draw)
    x = (kept + (0x3FF << 52)).view(torch.float64)
    if not format.startswith("e11"):
        x = (kept + (0x3F8 << 20)).int().view(torch.float32)
    found = {}
    for way in ("bitwise", "reference", None):
        with kernels.use(way) if way else nullcontext():
            found[way] = kernels.quantize(x, f"{format}:{mode}-{max(cut + more, 1)}", seed=3)
    assert torch.equal(found["bitwise"], found["reference"]) and torch.equal(found[None], found["reference"])
    assert 0.1 < float((found["bitwise"] > x).double().mean()) < 0.8
