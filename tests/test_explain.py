"""The exact arithmetic: the worked cases to the last digit, and rounding against torch, ml_dtypes and gfloat."""

from __future__ import annotations

import json
from fractions import Fraction
from math import isnan, nan

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowp.casts import Overflow, Rounding, parse
from lowp.errors import InvalidInput, UnknownName
from lowp.explain import (
    Number,
    Rule,
    Verdict,
    add,
    as_json,
    convert,
    divide,
    fused_multiply_add,
    multiply,
    outcomes,
    parse_number,
    render,
    round_exact,
    split_expression,
    subtract,
    weight_update,
)
from lowp.explain.text import bits_text, brief, decimal_text, power_text
from lowp.formats import FORMATS, FloatFormat
from lowp.formats import parse as parse_format

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


def bits(value: object) -> str:
    """The fields of the result of an explanation."""
    rounded = value.rounded if hasattr(value, "rounded") else value
    return bits_text(rounded.code, rounded.format)  # type: ignore[attr-defined]


# -- the worked cases -------------------------------------------------------------------------------------------------
def test_a_decimal_in_fp32_and_fp16_comes_out_to_the_last_digit() -> None:
    wide, half = convert("1.12156456132", "fp32"), convert("1.12156456132", "fp16")
    assert str(wide.result) == "1.12156450748443603515625"
    assert str(half.result) == "1.12109375"
    assert bits(half) == "0 01111 0001111100"
    assert half.rounded.rule is Rule.BELOW_HALF
    assert (half.rounded.guard, half.rounded.round_bit, half.rounded.sticky) == (0, 1, 1)
    assert half.error == Fraction("1.12109375") - Fraction("1.12156456132")
    assert half.error_ulp == half.error * 1024
    assert half.relative_error == -half.error / Fraction("1.12156456132")


def test_the_sum_takes_exactly_the_published_steps() -> None:
    result = add("1.125", "0.12457275390625", "fp16")
    assert bits(result.left) == "0 01111 0010000000"
    assert bits(result.right) == "0 01011 1111111001"
    aligned = result.alignment
    assert aligned is not None
    assert (aligned.larger_field, aligned.smaller_field, aligned.shift) == (0b01111, 0b01011, 4)
    assert (aligned.larger_significand, aligned.smaller_significand) == (0b10010000000, 0b11111111001)
    assert (aligned.kept, aligned.cut) == (0b00001111111, "1001")
    assert (aligned.guard, aligned.round_bit, aligned.sticky) == (1, 0, 1)
    assert result.rounded.kept == 0b10011111111
    assert result.rounded.away and result.rounded.rule is Rule.ABOVE_HALF
    assert bits(result) == "0 01111 0100000000"
    assert str(result.result) == "1.25"
    assert str(result.exact) == "1.24957275390625"
    assert result.wider is not None and result.wider.is_exact
    assert bits(result.wider) == "0 01111111 00111111111001000000000"
    text = render(result)
    for shown in (
        "exponents 01111 - 01011 = 4",
        "1.1111111001 moves right by 4 places to 0.0001111111|1001",
        "guard 1, the rest (001) sticky 1",
        "0010000000 + 0001111111 = 0011111111, rounded up to 0100000000",
        "in fp32     1.24957275390625 (exact)",
    ):
        assert shown in text


def test_the_gradient_widens_to_fp32_exactly() -> None:
    result = convert("0b0 01011 1111111001", "fp32", source="fp16")
    assert str(result.given) == "0.12457275390625"
    assert bits(result) == "0 01111011 11111110010000000000000"
    assert result.rounded.is_exact
    assert "exponent field +112, and 13 zero bits are appended" in render(result)


def test_the_misprinted_digit_rounds_to_the_same_bits() -> None:
    assert bits(convert("0.12457275190625", "fp16")) == "0 01011 1111111001"


def test_the_small_gradient_in_fp16() -> None:
    result = convert("0.00041999", "fp16")
    assert str(result.result) == "0.000420093536376953125"
    assert bits(result) == "0 00011 1011100010"


def test_the_update_never_arrives_in_fp16_and_does_in_fp32() -> None:
    update = weight_update("1.125", "0.00041999", "fp16", steps=101)
    assert update.verdict is Verdict.LOST
    assert update.step == Fraction("0.000420093536376953125")
    assert update.trajectory is not None
    assert (str(update.trajectory.last), update.trajectory.stuck_after) == ("1.125", 0)
    assert str(update.fp32.last) == "1.167429447174072265625"
    assert update.expected == Fraction("1.167429447174072265625")
    assert update.threshold is not None
    assert (update.threshold.size, update.threshold.inclusive) == (Fraction(1, 2**11), False)


def test_the_limits_of_fp16() -> None:
    tie = convert("2^-25", "fp16")
    assert (str(tie.result), tie.rounded.rule) == ("0", Rule.TIE_TO_EVEN)
    assert convert("2^-25", "fp32").rounded.is_exact
    assert convert("2^-24", "fp16").rounded.is_exact
    assert convert("65519.99", "fp16").result.value == 65504
    assert str(convert("65520", "fp16").result) == "inf"
    absorbed = add("2^-3", "2^-14", "fp16")
    assert absorbed.result.value == Fraction(1, 8)
    assert absorbed.rounded.rule is Rule.TIE_TO_EVEN
    assert add("2^-3", "2^-13", "fp16").rounded.is_exact


def test_the_largest_relative_errors() -> None:
    for name, error in (("fp32", Fraction(1, 2**24)), ("fp16", Fraction(1, 2**11))):
        format = parse_format(name)
        assert isinstance(format, FloatFormat)
        assert Fraction(format.relative_error) == error
        worst = round_exact(1 + error, name).relative_error
        assert worst is not None and error * Fraction(999, 1000) < worst < error


# -- rounding, against others -----------------------------------------------------------------------------------------
def edges(format: FloatFormat) -> np.ndarray:
    """Every value (of the 16-bit formats' negative ones a few), the midpoints above, and fp32's neighbours of those."""
    negative_from, step = 1 << (format.bits - 1), 97 if format.bits == 16 else 1
    codes = [c for c in format.codes if not format.signed or c < negative_from or c % step == 0]
    values = np.array([format.decode(code) for code in codes], np.float64)
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


@pytest.mark.parametrize("format", SMALL_FLOATS, ids=str)
def test_nearest_even_agrees_with_ml_dtypes_on_every_code_midpoint_and_neighbour(format: FloatFormat) -> None:
    x = edges(format)
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
    x = edges(format)
    x = x[:: 11 if format.bits == 16 else 1]
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
    if not got.result.is_finite or got.rule is Rule.FLUSHED:
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
        got = round_exact(-Fraction(0x007FFFFF, 1 << 149), f"bf16-tpu:{mode}")
        assert (got.code, got.rule) == (0x8000, Rule.FLUSHED)
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
    assert round_exact("2^-140", "e8m0:down").rule is Rule.TO_SMALLEST


def test_integers_round_and_saturate() -> None:
    values = {"2.5": 2, "3.5": 4, "-2.5": -2, "1000": 127, "-1000": -128, "inf": 127, "-inf": -128, "-0": 0}
    assert {text: round_exact(text, "i8").result.value for text in values} == values
    assert round_exact("-1000", "i8s").result.value == -127
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
    assert round_exact(1, "fp16:stochastic").is_exact
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


# -- conversions ------------------------------------------------------------------------------------------------------
def test_rounding_twice_is_shown() -> None:
    text = "1.00048828125000001"
    once, twice = convert(text, "fp16"), convert(text, "fp16", via="fp32")
    assert str(once.result) == "1.0009765625"
    assert str(twice.result) == "1"
    assert twice.rounded_twice_differs
    assert once.through_fp32 is not None and once.through_fp32.code == twice.code
    assert "double rounding" in render(once)
    assert "two roundings are not one" in render(twice)
    assert convert("0.1", "fp16").through_fp32 is None
    assert not convert("0.1", "fp16", via="fp32").rounded_twice_differs


def test_a_shared_scale_is_given_or_chosen() -> None:
    flex = convert("0.3", "flex16+5", exponent=-8)
    assert (flex.code, flex.result.value, flex.error_ulp) == (77, Fraction(77, 256), Fraction(1, 5))
    chosen = {"flex16+5": -16, "dfp16": -16, "mxfp8": -10, "mxint8": -8, "mxfp4": -4}
    for name, exponent in chosen.items():
        scale = convert("0.3", name).scale
        assert scale is not None and scale.exponent == exponent, name
    assert convert("0.3", "int8", scale=Fraction(1, 100)).code == 30
    saturated = convert("3", "flex16+5", exponent=-16)
    assert saturated.rounded.overflowed and saturated.result.value == Fraction(32767, 65536)
    assert convert("0", "mxfp8").scale is not None
    nvfp4 = convert("6", "nvfp4").scale
    assert nvfp4 is not None and abs(nvfp4.value - 1) < Fraction(1, 1 << 20)


@pytest.mark.parametrize(
    ("to", "given", "text"),
    [
        ("flex16+5", {"exponent": 1}, "flex16+5 has shared exponents from -31 to 0, not 1"),
        ("fp16", {"exponent": 1}, "fp16 has no shared scale: leave --exponent and --scale out"),
        ("int8", {"scale": Fraction(-1)}, "a scale of -1 is not possible: give a positive number"),
        ("int8", {"scale": Fraction(1), "exponent": 0}, "say the same thing: give one of them"),
        ("int8-affine", {}, "one number cannot show it"),
        ("fp16", {"via": "flex16+5"}, "give a format without a shared scale"),
    ],
)
def test_what_contradicts_itself_is_refused(to: str, given: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        convert("0.3", to, **given)  # type: ignore[arg-type]
    assert text in str(caught.value)


# -- arithmetic -------------------------------------------------------------------------------------------------------
@given(
    st.sampled_from(["+", "-", "*", "/"]),
    st.floats(width=16),
    st.floats(width=16),
)
def test_fp16_arithmetic_agrees_with_numpy(operator: str, left: float, right: float) -> None:
    function = {"+": add, "-": subtract, "*": multiply, "/": divide}[operator]
    x, y = np.float64(left), np.float64(right)
    with np.errstate(all="ignore"):
        # fp32 holds 2 x 11 + 2 bits: the result of one operation on fp16 numbers is rounded as if once (Figueroa 1995)
        wide = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[operator](np.float32(x), np.float32(y))
        expected = float(np.float16(wide))
    result = function(left, right, "fp16")
    got = float(result.result)
    assert got == expected or (isnan(got) and isnan(expected))
    assert isnan(expected) or str(got) == str(expected)
    assert render(result).startswith(str(result.left.given))


def test_zero_sums_have_the_sign_of_ieee_754() -> None:
    assert str(subtract("1", "1", "fp16").result) == "0"
    assert str(subtract("1", "1", "fp16:down").result) == "-0"
    assert str(add("-0", "-0", "fp16").result) == "-0"
    assert str(add("0", "-0", "fp16").result) == "0"


def test_specials_in_arithmetic() -> None:
    cases = [("+", "inf", "-inf"), ("*", "0", "inf"), ("/", "0", "0"), ("/", "inf", "inf"), ("-", "nan", "1")]
    functions = {"+": add, "-": subtract, "*": multiply, "/": divide}
    for operator, left, right in cases:
        assert functions[operator](left, right, "fp32").result.special == "nan"
    assert str(divide("-1", "0", "fp16").result) == "-inf"
    assert str(divide("1", "-inf", "fp16").result) == "-0"
    assert str(divide("inf", "-2", "fp16").result) == "-inf"


def test_a_product_and_its_fields() -> None:
    result = multiply("1.5", "2.25", "bf16")
    assert (str(result.result), bits(result)) == ("3.375", "0 10000000 1011000")
    assert "exponents are added: 0 + 1 = 1" in render(result)
    assert "one place to the right" in render(multiply("1.5", "1.5", "bf16"))
    rounded = multiply("1.0078125", "1.0078125", "bf16")
    assert rounded.exact.value == Fraction(129, 128) ** 2
    assert rounded.result.value == Fraction(130, 128)


def test_a_subtraction_cancels_exactly() -> None:
    result = subtract("1.5", "1.4990234375", "fp16")
    assert result.rounded.is_exact
    assert result.result.value == Fraction(1, 1024)


def test_the_result_may_have_another_format() -> None:
    result = add("1.125", "0.12457275390625", "fp16", "fp32")
    assert str(result.result) == "1.24957275390625"
    assert add("100", "100", "i8").result.value == 127


def test_sums_of_shared_scales_say_what_is_possible() -> None:
    with pytest.raises(InvalidInput, match="possible here are formats without a shared scale, such as i16"):
        add("1", "2", "flex16+5")


def test_an_expression_is_split_at_its_operator() -> None:
    cases = {
        "1.125 + 0.5": ("1.125", "+", "0.5"),
        "1.5*2.25": ("1.5", "*", "2.25"),
        "1e-5-3": ("1e-5", "-", "3"),
        "1 - -3": ("1", "-", "-3"),
        "1/3": None,
        "1 / 3": ("1", "/", "3"),
        "1/3 + 1/7": ("1/3", "+", "1/7"),
        "2^-3 + 2^-14": ("2^-3", "+", "2^-14"),
        "2 x 3": ("2", "*", "3"),
        "2 \u00d7 3": ("2", "*", "3"),
        "0b0 01111 0010000000 + 0b0 01011 1111111001": ("0b0 01111 0010000000", "+", "0b0 01011 1111111001"),
        "0x1.8p3 * 0x1p-2": ("0x1.8p3", "*", "0x1p-2"),
        "inf - inf": ("inf", "-", "inf"),
        "-0": None,
    }
    assert {text: split_expression(text) for text in cases} == cases
    assert split_expression("0x3c7c + 0x0001", bits=True) == ("0x3c7c", "+", "0x0001")
    with pytest.raises(UnknownName, match=r"unknown operator '%'; allowed: \+, -, \*, /"):
        split_expression("1 % 2")
    with pytest.raises(InvalidInput, match="more than one operator"):
        split_expression("1 + 2 + 3")


# -- numbers ----------------------------------------------------------------------------------------------------------
def test_a_number_is_read_exactly() -> None:
    cases = {
        "1.125": Fraction(9, 8),
        "-3e-5": Fraction(-3, 100000),
        ".5": Fraction(1, 2),
        "1_000.": Fraction(1000),
        "1/3": Fraction(1, 3),
        "2^-25": Fraction(1, 1 << 25),
        "2**10": Fraction(1024),
        "-0x1.8p3": Fraction(-12),
        "0x3c7c": Fraction(0x3C7C),
        "0x.8": Fraction(1, 2),
        "0b0 01111 0001111100": Fraction("1.12109375"),
        "bits:0x3c7c": Fraction("1.12109375"),
        "bits: 0011110001111100": Fraction("1.12109375"),
    }
    assert {text: parse_number(text, "fp16").value for text in cases} == cases
    assert parse_number("0x3c7c", "fp16", bits=True).value == Fraction("1.12109375")
    assert parse_number("-0") == Number(Fraction(0), negative=True)
    assert (parse_number("-Infinity").special, parse_number("-inf").negative) == ("inf", True)
    assert parse_number("bits:0xff", "i8").value == -1
    assert Number.of(nan).special == "nan"
    assert Number.of(-0.0).negative


@pytest.mark.parametrize(
    ("text", "source", "words"),
    [
        ("1.2.3", None, "'1.2.3' is no number: give a decimal (1.125, -3e-5), a fraction (1/3)"),
        ("", None, "'' is no number"),
        ("1/0", None, "divides by zero"),
        ("1e99999", None, "an exponent beyond 2000 is outside every format"),
        ("0b0101", "fp16", "'0b0101' has 4 bits, and fp16 has 16: give all of them"),
        ("bits:0x10000", "fp16", "0x10000 has more than the 16 bits of fp16"),
        ("0b0101", None, "say of which format, for example --from fp16"),
        ("0b0101", "flex16+5", "a code has a value only with its shared scale"),
        ("1" * 3000, None, "a number of 3000 characters is too long"),
    ],
)
def test_what_is_no_number_is_refused(text: str, source: str | None, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_number(text, source)
    assert words in str(caught.value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_all_decimal_digits_are_the_number(value: float) -> None:
    assert Fraction(decimal_text(Fraction(value))) == Fraction(value)
    assert float(brief(Fraction(value), 17)) == value


def test_powers_of_two_are_named() -> None:
    assert [power_text(Fraction(x)) for x in (0.125, -1, 1.75 * 2**15, 0)] == ["2^-3", "-2^0", "1.75 x 2^15", "0"]
    assert decimal_text(Fraction(1, 3)) == "1/3"


# -- weight updates ---------------------------------------------------------------------------------------------------
def test_an_update_is_lost_distorted_or_kept() -> None:
    cases = [
        ("1.125", "2^-11", Verdict.LOST),  # a tie, and 1.125 is even
        ("1.1259765625", "2^-11", Verdict.DISTORTED),  # a tie, and the last bit is odd: moves up
        ("1.125", "0.0006", Verdict.DISTORTED),
        ("1.125", "2^-10", Verdict.KEPT),
        ("1.125", "0.01", Verdict.KEPT),
        ("1.125", "0", Verdict.NONE),
        ("1.125", "1e-9", Verdict.UNDERFLOW),
        ("65504", "1000", Verdict.OVERFLOW),
    ]
    for weight, gradient, verdict in cases:
        assert weight_update(weight, gradient, "fp16").verdict is verdict, (weight, gradient)


def test_below_a_power_of_two_half_the_size_counts() -> None:
    up, down = weight_update("1", "0.0003", "fp16"), weight_update("1", "0.0003", "fp16", minus=True)
    assert up.threshold is not None and down.threshold is not None
    assert (up.threshold.size, up.threshold.inclusive) == (Fraction(1, 1 << 11), False)
    assert (down.threshold.size, down.threshold.inclusive) == (Fraction(1, 1 << 12), False)
    assert (up.verdict, down.verdict) == (Verdict.LOST, Verdict.DISTORTED)
    assert "numbers are closer" in render(down)
    assert weight_update("1", "2^-12", "fp16", minus=True).verdict is Verdict.LOST


def test_the_threshold_lies_where_the_source_says_by_the_significand() -> None:
    for cast, low, high in (("fp16", -12, -11), ("bf16", -9, -8)):
        for weight in ("1", "1.5", "1.9921875", "3"):
            threshold = weight_update(weight, "1e-9", cast).threshold
            assert threshold is not None
            share = threshold.size / Fraction(weight)
            assert Fraction(2) ** low < share <= Fraction(2) ** high


@given(
    st.sampled_from(["fp16", "bf16", "bf16-tpu", "e4m3fn", "e5m2:saturate", "fp16:up", "fp16:toward-zero", "e3m2"]),
    st.floats(-60000, 60000, width=16),
    st.booleans(),
)
def test_the_threshold_is_exact(cast: str, weight: float, minus: bool) -> None:
    start = round_exact(weight, parse(cast).format).result
    if not start.is_finite:
        return
    threshold = weight_update(weight, 1.0, cast, minus=minus).threshold
    if threshold is None:
        return
    sign, little = (-1 if minus else 1), threshold.spacing / 1000

    def moves(size: Fraction) -> bool:
        result = round_exact(start.value + sign * size, cast).result
        return bool(result.special) or result.value != start.value

    if threshold.size:
        assert moves(threshold.size) == threshold.inclusive
        assert not moves(threshold.size - little)
    assert moves(threshold.size + little)


def test_a_learning_rate_takes_the_gradient_off() -> None:
    update = weight_update("1", "0.5", "fp16", learning_rate=Fraction("0.01"), steps=2)
    assert update.step == Fraction("-0.005")
    assert update.first is not None and update.first.result.value == Fraction("0.9951171875")
    assert render(update).startswith("weight - 0.01 x gradient in fp16: 1 - 0.01 x 0.5")
    assert "that is a gradient above 0.0244141" in render(update)


def test_stochastic_rounding_keeps_an_update_on_average() -> None:
    update = weight_update("1.125", "0.00041999", "fp16:stochastic", steps=101)
    assert update.verdict is Verdict.CHANCE
    assert update.expected == Fraction("1.167429447174072265625")
    assert update.chance is not None and abs(update.chance - Fraction("0.4301757812")) < Fraction(1, 10**9)
    assert "KEPT ON AVERAGE" in render(update)


def test_a_weight_may_get_stuck_on_its_way() -> None:
    update = weight_update("1", "0.002", "bf16", steps=5000)
    assert update.verdict is Verdict.LOST
    moving = weight_update("0.1", "0.002", "bf16", steps=5000).trajectory
    assert moving is not None and moving.stuck_after is not None
    assert float(moving.last) == 1.0  # below 1 half an ulp is 2^-9 = 0.00195, from 1 on it is twice that
    assert moving.stuck_after < 5000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("1", "1", "flex16+5", 1), "a weight update is explained in signed float formats"),
        (("1", "1", "e8m0", 1), "a weight update is explained in signed float formats"),
        (("1", "inf", "fp16", 1), "an update needs finite numbers"),
        (("1", "1", "fp16", 0), "0 steps are not possible here: give 1 to 100000"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused(arguments: tuple[str, str, str, int], text: str) -> None:
    weight, gradient, cast, steps = arguments
    with pytest.raises(InvalidInput, match=text):
        weight_update(weight, gradient, cast, steps=steps)


# -- D = A B + C ------------------------------------------------------------------------------------------------------
def test_the_accumulators_differ_where_c_is_large() -> None:
    result = fused_multiply_add("1 1 1 1", "0.25; 0.25; 0.25; 0.25", "2048", accumulate="fp16")
    assert str(result.d[0][0].rounded.result) == "2048"  # 2049 is a tie between 2048 and 2050
    assert str(result.other[0][0].rounded.result) == "2049"
    assert result.difference(0, 0) == 1


def test_the_tensor_core_cuts_what_sticks_out_under_the_largest_addend() -> None:
    # 2^-24 beside 1: each is cut before the sum, four of them are lost though their sum, 2^-22, would count
    a, b = "2^-12 2^-12 2^-12 2^-12", "2^-12; 2^-12; 2^-12; 2^-12"
    core = fused_multiply_add(a, b, "1").d[0][0]
    assert core.rounded.result.value == 1
    assert core.exact.value == 1 + Fraction(1, 1 << 22)
    assert core.error == -Fraction(1, 1 << 22)
    assert [float(x.kept) for x in core.addends] == [0, 0, 0, 0, 1]
    # one after the other to nearest even, each is a tie that goes back to 1
    loop = fused_multiply_add(a, b, "1", order="sequential").d[0][0]
    assert [str(x) for x in loop.partial] == ["1", "1", "1", "1"]
    # fp32 results are cut, not rounded: 1 + 2^-23 - a little stays below
    assert fused_multiply_add("1 -1", "2^-12; 2^-14", "1").d[0][0].rounded.cast.rounding is Rounding.TOWARD_ZERO


def test_a_sum_carries_out_and_is_cut() -> None:
    # 2^24 + 1: the products 1 stand under 2^23 and are kept, the sum has 25 bits and loses the last
    result = fused_multiply_add("2048 1", "4096; 1", "8388608").d[0][0]
    assert result.exact.value == 2**24 + 1
    assert result.rounded.result.value == 2**24


def test_the_example_multiplies_exactly_where_it_can() -> None:
    result = fused_multiply_add(accumulate="fp16")
    assert (len(result.d), len(result.d[0])) == (4, 4)
    assert [float(x.rounded.result) for x in result.d[1]] == [0.1624755859375, 1025, 0.125, 2.875]
    text = render(result)
    assert "Fasi et al. 2021" in text
    assert "D fp16" in text and "D fp32" in text


def test_specials_pass_through_the_tensor_core() -> None:
    assert str(fused_multiply_add("inf", "2", "1").d[0][0].rounded.result) == "inf"
    assert fused_multiply_add("inf", "0", "1").d[0][0].rounded.result.special == "nan"
    assert str(fused_multiply_add("60000", "2", "0", accumulate="fp16").d[0][0].rounded.result) == "inf"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("1 2; 3", "1; 2", None), "A has rows of 2 + 1 numbers: give 1 to 4 rows of as many numbers each"),
        (("1 2", "1 2", None), "A is 1 x 2 and B 1 x 2: A needs as many columns as B rows"),
        (("1", "1", "1 2"), "C is 1 x 2, and A B is 1 x 1: they must agree"),
        (("1", None, None), "needs both --a and --b"),
        (("1 1 1 1 1", "1", None), "A has rows of 5 numbers"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(given: tuple[str, str | None, str | None], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        fused_multiply_add(*given)
    assert text in str(caught.value)


def test_unknown_names_list_the_near_ones() -> None:
    with pytest.raises(UnknownName, match="unknown order 'sequental'; did you mean sequential"):
        fused_multiply_add(order="sequental")
    with pytest.raises(UnknownName, match="unknown operator '%'"):
        add.__globals__["evaluate"]("%", 1, 2, "fp16")


# -- for machines -----------------------------------------------------------------------------------------------------
def test_every_explanation_is_plain_data() -> None:
    explanations = [
        convert("0.3", "e5m2:stochastic"),
        convert("0.3", "flex16+5"),
        add("1", "2", "fp16"),
        weight_update("1", "2", "fp16"),
        fused_multiply_add("1", "2"),
    ]
    for explanation in explanations:
        data = json.loads(json.dumps(as_json(explanation)))
        assert isinstance(data, dict)
        assert render(explanation)
    data = json.loads(json.dumps(as_json(convert("1.12156456132", "fp16"))))
    assert data["result"] == "1.12109375"
    assert data["outcomes"][0]["rounded"]["bits"] == "0 01111 0001111100"
    with pytest.raises(TypeError, match="int is no explanation"):
        render(1)
