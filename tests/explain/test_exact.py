"""Rounding, against torch, ml_dtypes and gfloat."""

from __future__ import annotations

from fractions import Fraction
from math import isnan

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowp.casts import Overflow, Rounding, parse
from lowp.errors import InvalidInput
from lowp.explain import (
    RoundingRule,
    outcomes,
    parse_number,
    round_exact,
)
from lowp.explain.exact import share_away
from lowp.formats import FORMATS, FloatFormat

SMALL_FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat) and f.bits <= 16]
ORACLES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "bf16-tpu": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def edges(format: FloatFormat, every: int = 1) -> np.ndarray:
    """Return values, the midpoints above them, and the fp32 neighbours of those.

    One value in `every`, and a few of the negative ones of 16-bit formats.
    """
    negative_from, step = 1 << (format.bits - 1), 97 if format.bits == 16 else 1
    codes = [c for c in format.codes if not format.signed or c < negative_from or c % step == 0]
    if not format.subnormals and format.bits == 16:
        codes = [c for c in codes if c < 1024 or c % 5 == 0]  # bf16-tpu: bf16, but for the smallest numbers
    values = np.array([format.decode(code) for code in codes[::every]], np.float64)
    finite = values[np.isfinite(values)]
    ulps = np.array([format.ulp(value) for value in finite])
    middle = (finite + np.where(np.signbit(finite), -ulps, ulps) / 2).astype(np.float32)
    with np.errstate(over="ignore"):
        beside = [np.nextafter(middle, np.float32(limit)) for limit in (np.inf, -np.inf)]
    top = min(format.maximum * 1.25, 3.4e38)
    extra = np.array([top, -top, 3.0e38, -3.0e38, 1e-45, -1e-45, 0.0, -0.0, np.inf, -np.inf], np.float32)
    return np.concatenate([finite.astype(np.float32), middle, *beside, extra])


def nearest_even_codes(format: FloatFormat, x: np.ndarray) -> np.ndarray:
    dtype = np.dtype(ORACLES[format.name])
    if format.name == "bf16-tpu":
        x = np.where(np.abs(x) < np.float32(format.smallest_normal), np.copysign(np.float32(0), x), x)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype).view(np.uint16 if format.bits == 16 else np.uint8)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 31], ids=["all", "every 31st"])
@pytest.mark.parametrize("format", SMALL_FLOATS, ids=str)
def test_nearest_even_agrees_with_ml_dtypes_on_every_code_midpoint_and_neighbour(
    format: FloatFormat, every: int
) -> None:
    x = edges(format, every if format.bits == 16 else 1)
    if format.specials.value == "finite":
        x = x[np.isfinite(x)]
    if not format.signed:
        # the scale format has no zero; between its two smallest numbers, which are subnormal in fp32, ml_dtypes rounds
        # everything up
        x = x[((x > 0) & (x <= 2.0**-127)) | (x >= 1.5 * 2.0**-127)]
    expected = nearest_even_codes(format, x)
    cast = parse(format)
    for value, code in zip(x.tolist(), expected.tolist(), strict=True):
        got = round_exact(value, cast)
        same = got.code == code or (got.result.special == "nan" and isnan(format.decode(code)))
        assert same, f"{value!r} in {format}: {got.code:#x}, expected {code:#x}"


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3fn"])
def test_nearest_even_agrees_with_torch(name: str) -> None:
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "e5m2": torch.float8_e5m2, "e4m3fn": torch.float8_e4m3fn}
    format = FORMATS[name]
    assert isinstance(format, FloatFormat)
    x = edges(format, 23 if format.bits == 16 else 1)
    # torch 2.12 and later saturate e4m3fn, the others go to infinity
    cast = parse(f"{name}:saturate" if name == "e4m3fn" else name)
    expected = torch.from_numpy(x).to(dtypes[name]).double().tolist()
    for value, number in zip(x.tolist(), expected, strict=True):
        got = float(round_exact(value, cast).result)
        assert got == number and str(got) == str(number), value


GFLOAT_MODES = {
    Rounding.NEAREST_EVEN: gfloat.RoundMode.TiesToEven,
    Rounding.NEAREST_AWAY: gfloat.RoundMode.TiesToAway,
    Rounding.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
    Rounding.UP: gfloat.RoundMode.TowardPositive,
    Rounding.DOWN: gfloat.RoundMode.TowardNegative,
}
GFLOAT_FORMATS = {
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
}


@pytest.mark.parametrize("mode", GFLOAT_MODES, ids=str)
@pytest.mark.parametrize("name", GFLOAT_FORMATS)
def test_every_mode_agrees_with_gfloat(name: str, mode: Rounding) -> None:
    info, cast = GFLOAT_FORMATS[name], parse(f"{name}:{mode}:saturate")
    format = cast.format
    assert isinstance(format, FloatFormat)
    for value in edges(format).tolist():
        expected = gfloat.round_float(info, value, rnd=GFLOAT_MODES[mode], sat=True)
        got = float(round_exact(value, cast).result)
        assert got == expected and str(got) == str(expected), value


# IEEE P3109's StochasticA, B and C
GFLOAT_STOCHASTIC = {
    "stochastic": gfloat.RoundMode.StochasticFastest,
    "stochastic-b": gfloat.RoundMode.StochasticFast,
    "stochastic-c": gfloat.RoundMode.Stochastic,
}


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("mode", GFLOAT_STOCHASTIC)
def test_rounding_with_few_random_bits_agrees_with_gfloat(mode: str, bits: int) -> None:
    steps = 1 << bits
    for name in ("e3m2", "e4m3fn"):
        info, cast = GFLOAT_FORMATS[name], parse(f"{name}:{mode}-{bits}:saturate")
        format = cast.format
        assert isinstance(format, FloatFormat)
        some = edges(format, 3)
        for index, value in enumerate(np.concatenate([some, some * np.float32(1.0371094)]).tolist()):
            drawn = index * 37 % steps  # gfloat adds the number where lowp compares with it: counted from the other end
            random = Fraction(steps - 1 - drawn, steps)
            expected = gfloat.round_float(
                info, value, rnd=GFLOAT_STOCHASTIC[mode], sat=True, srbits=drawn, srnumbits=bits
            )
            got = float(round_exact(value, cast, random).result)
            assert got == expected and str(got) == str(expected), (value, drawn)


def test_stochastic_c_is_unbiased_over_all_numbers_of_some_bits_and_b_but_for_their_ties() -> None:
    # the bias of the share in units of 2**-2, summed over 4 bits: ties are a quarter of all, and B rounds them up
    sums = {}
    for mode in GFLOAT_STOCHASTIC:
        cast = parse(f"fp16:{mode}-2")
        sums[mode] = sum(share_away(Fraction(n, 16), cast) - Fraction(n, 16) for n in range(16)) * 4
    assert sums == {"stochastic": -6, "stochastic-b": 2, "stochastic-c": 0}


def test_to_odd_keeps_the_right_result_of_a_second_rounding() -> None:
    # Boldo and Melquiond 2008, theorem 3: two more bits, rounded to odd, lose nothing that a later rounding asks for
    wide, narrow = parse("e5m4:to-odd"), parse("e5m2")
    assert isinstance(narrow.format, FloatFormat)
    for value in np.concatenate([edges(narrow.format), edges(narrow.format) * np.float32(1.0371094)]).tolist():
        twice = round_exact(round_exact(value, wide).result, narrow)
        assert twice.code == round_exact(value, narrow).code, value
    assert [round_exact(x, "fp16:to-odd").code for x in ("1e6", "-1e6", "inf")] == [0x7BFF, 0xFBFF, 0x7C00]
    assert round_exact("449", "e4m3fn:to-odd").result.value == 448
    assert [round_exact(x, "e8m0:to-odd").code for x in ("1.9", "2^-130")] == [127, 0]
    assert [round_exact(x, "i8:to-odd").result.value for x in ("2.1", "3.9", "-2.1", "-0.1")] == [3, 3, -3, -1]


@given(st.floats(allow_nan=False))
def test_fp64_to_fp32_is_rounded_once(value: float) -> None:
    with np.errstate(over="ignore"):
        expected = float(np.float32(value))
    got = float(round_exact(value, "fp32").result)
    assert got == expected and str(got) == str(expected)


@given(st.fractions(), st.sampled_from([f for f in SMALL_FLOATS if f.has_zero]), st.sampled_from(list(GFLOAT_MODES)))
def test_a_rounding_is_a_neighbour_on_the_side_its_mode_names(
    value: Fraction, format: FloatFormat, mode: Rounding
) -> None:
    got = round_exact(value, f"{format}:{mode}")
    if not got.result.is_finite or got.rule is RoundingRule.FLUSHED:
        return
    error = got.error
    assert error is not None
    if mode is Rounding.UP:
        assert error >= 0 or got.result.value == Fraction(format.maximum)
    elif mode is Rounding.DOWN:
        assert error <= 0 or got.result.value == -Fraction(format.maximum)
    elif mode is Rounding.TOWARD_ZERO:
        assert got.result.magnitude <= abs(value)
    if abs(value) <= Fraction(format.maximum):
        unit = got.error_ulp
        assert unit is not None
        assert abs(unit) <= (Fraction(1, 2) if mode in (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY) else 1)
        assert got.is_exact == (error == 0)


def test_overflow_is_the_cast_s() -> None:
    table = {
        "e4m3fn": ["448", "448", "nan", "nan", "-nan"],
        "e4m3fn:saturate": ["448", "448", "448", "448", "-448"],
        "e4m3fn:nearest-away": ["448", "nan", "nan", "nan", "-nan"],
        "e4m3fn:toward-zero": ["448", "448", "448", "nan", "-nan"],
        "e4m3fn:down": ["448", "448", "448", "nan", "-nan"],
        "e4m3fn:up": ["nan", "nan", "nan", "nan", "-nan"],
        "e5m2:nan": ["448", "448", "448", "nan", "-nan"],
    }
    for cast, expected in table.items():
        got = [str(round_exact(text, cast).result) for text in ("463", "464", "465", "inf", "-inf")]
        assert got == expected, cast
    assert str(round_exact("-1e6", "fp16:up").result) == "-65504"
    assert str(round_exact("-1e6", "fp16:down").result) == "-inf"
    assert str(round_exact("1e6", "fp16:nan").result) == "nan"
    assert round_exact("1e6", "fp16:saturate").overflowed
    assert parse("fp16").overflow is Overflow.INFINITY


def test_specials_keep_their_sign_and_their_codes() -> None:
    codes = {
        "fp16": (0x7E00, 0xFE00, 0x8000),
        "bf16": (0x7FC0, 0xFFC0, 0x8000),
        "e5m2": (0x7E, 0xFE, 0x80),
        "e4m3fn": (0x7F, 0xFF, 0x80),
        "e4m3fnuz": (0x80, 0x80, 0x00),
        "e8m0": (0xFF, 0xFF, 0xFF),
        "e2m1": (None, None, 0x8),
    }
    for name, expected in codes.items():
        assert tuple(round_exact(text, name).code for text in ("nan", "-nan", "-0")) == expected, name


def test_subnormals_are_flushed_before_rounding_in_every_mode() -> None:
    for mode in Rounding:
        bits = "-8" if mode.is_stochastic else ""
        got = round_exact(-Fraction(0x007FFFFF, 1 << 149), f"bf16-tpu:{mode}{bits}")
        assert (got.code, got.rule) == (0x8000, RoundingRule.FLUSHED)
    assert round_exact("2^-126", "bf16-tpu").is_exact


def test_the_scale_format_has_no_zero_and_sends_ties_up() -> None:
    cases = {
        "1.5": 128,
        "3": 129,
        "0": 255,
        "-1": 255,
        "2^-140": 0,
        "2^127": 254,
        "2^128": 255,
        "1.4": 127,
        "6": 130,
        "2^-127": 0,
    }
    assert {text: round_exact(text, "e8m0").code for text in cases} == cases
    assert round_exact("2^200", "e8m0:saturate").code == 254
    assert round_exact("2^-140", "e8m0:down").rule is RoundingRule.TO_SMALLEST


def test_integers_round_and_saturate() -> None:
    values = {"2.5": 2, "3.5": 4, "-2.5": -2, "1000": 127, "-1000": -128, "inf": 127, "-inf": -128, "-0": 0}
    assert {text: round_exact(text, "i8").result.value for text in values} == values
    assert round_exact("-1000", "i8s").result.value == -127
    beside = {text: round_exact(text, "i8") for text in ("126.6", "127.4", "127.6", "-128.4", "-128.6")}
    assert [float(one.result) for one in beside.values()] == [127, 127, 127, -128, -128]
    assert [text for text, one in beside.items() if one.overflowed] == ["127.6", "-128.6"]
    assert round_exact("-1", "i8").code == 0xFF
    assert round_exact("nan", "i8").code is None
    assert [round_exact(text, "i1").result.value for text in ("-0", "0", "-0.1", "5")] == [1, 1, -1, 1]


def test_a_stochastic_rounding_is_a_comparison_with_the_part_cut_off() -> None:
    third = Fraction(1, 3)
    value = 1 + third / 1024
    up = Fraction(1025, 1024)
    assert round_exact(value, "fp16:stochastic", Fraction(0)).result.value == up
    assert round_exact(value, "fp16:stochastic", third - Fraction(1, 1 << 100)).result.value == up
    assert round_exact(value, "fp16:stochastic", third).result.value == 1
    # 2 bits: a third is 01, so 00 alone rounds up
    assert [round_exact(value, "fp16:stochastic-2", Fraction(n, 4)).away for n in range(4)] == [1, 0, 0, 0]
    exact = round_exact(1, "fp16:stochastic")
    assert exact.is_exact and not exact.away and not round_exact("nan", "fp16").away
    with pytest.raises(InvalidInput, match="depends on a random number"):
        round_exact(value, "fp16:stochastic")
    with pytest.raises(InvalidInput, match=r"outside \[0, 1\)"):
        round_exact(value, "fp16:stochastic", Fraction(1))


def test_the_two_outcomes_of_a_stochastic_rounding_are_unbiased() -> None:
    value = Fraction("0.3")
    for cast, slack in (("e5m2:stochastic", Fraction(1, 1 << 160)), ("e5m2:stochastic-8", Fraction(1, 256))):
        both = outcomes(value, cast)
        assert [float(x.rounded.result) for x in both] == [0.3125, 0.25]
        assert sum(x.probability for x in both) == 1
        mean = sum(x.probability * x.rounded.result.value for x in both)
        assert 0 <= value - mean <= slack / 16
    assert [x.probability for x in outcomes(Fraction(1, 2), "binary".replace("binary", "i1:stochastic"))] == [
        Fraction(3, 4),
        Fraction(1, 4),
    ]


def test_a_sign_alone_is_drawn_between_minus_one_and_one_and_follows_from_it_elsewhere() -> None:
    def results(text: str) -> dict[int, Fraction]:
        return {int(x.rounded.result.value): x.probability for x in outcomes(parse_number(text), "i1:stochastic")}

    for text, sign in (("1", 1), ("-1", -1), ("2", 1), ("-inf", -1), ("inf", 1)):
        found = round_exact(parse_number(text), "i1:stochastic")
        assert (found.result.value, found.rule, results(text)) == (sign, RoundingRule.SIGN, {sign: 1})
    shares = {"0.5": (3, 4), "-0.5": (1, 4), "-0": (1, 2), "-63/64": (1, 128)}
    for text, share in shares.items():
        assert results(text) == {1: Fraction(*share), -1: 1 - Fraction(*share)}
    drawn = [round_exact(Fraction(1, 2), "i1:stochastic", Fraction(n, 4)).result.value for n in range(4)]
    assert drawn == [1, 1, 1, -1]
    with pytest.raises(InvalidInput, match="depends on a random number: give random"):
        round_exact(Fraction(1, 2), "i1:stochastic")
    plain = [round_exact(parse_number(text), "i1").result.value for text in ("0.1", "-0.1", "0", "-0", "-inf")]
    assert plain == [1, -1, 1, 1, -1]


@pytest.mark.parametrize("text", ["2^-3", "2^-4", "2^-5", "2^-6", "0.2"])
def test_without_mantissa_bits_what_is_below_the_smallest_number_is_rounded_to_the_odd_code(text: str) -> None:
    assert round_exact(text, "e3m0finite:to-odd").result.value == Fraction(1, 4)
    assert round_exact(f"-{text}", "e3m0finite:to-odd").code == 0b1001


def test_without_mantissa_bits_ties_go_to_even_codes() -> None:
    even = {"1.5": 2, "3": 2, "6": 8, "0.75": Fraction(1, 2), "0.375": Fraction(1, 2), "0.125": 0}
    assert {text: round_exact(text, "e3m0finite").result.value for text in even} == even


def test_what_an_integer_or_an_unsigned_format_does_not_have_is_at_its_bound() -> None:
    for text, value in (("inf", 127), ("-inf", -128), ("127.5", 127), ("-128.5", -128), ("-129", -128)):
        found = round_exact(text, "i8")
        assert (found.result.value, found.overflowed) == (value, text != "-128.5"), text
    negative = round_exact("-1", "ue5m3")
    assert negative.rule is RoundingRule.NEGATIVE and negative.result == -parse_number("nan")


def test_random_numbers_below_the_share_round_away() -> None:
    for mode, share in (("stochastic-1", 0), ("stochastic-2", 1), ("stochastic-b-1", 1), ("stochastic-3", 1.5)):
        rest = Fraction(7, 16)  # of a unit: truncated to 0/2, 1/4 and 3/8, and rounded half up to 1/2
        number = 1 + rest / 1024
        exact = {"stochastic-1": Fraction(0), "stochastic-2": Fraction(1, 4), "stochastic-b-1": Fraction(1, 2)}.get(
            mode, Fraction(3, 8)
        )
        assert share_away(rest, parse(f"fp16:{mode}")) == exact, share
        for random in (Fraction(0), Fraction(1, 8), Fraction(31, 128), Fraction(1, 4), Fraction(3, 8), Fraction(1, 2)):
            assert round_exact(number, f"fp16:{mode}", random).away is (random < exact), (mode, random)
