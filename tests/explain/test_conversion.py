"""Numbers as typed, conversions, and explanations as plain data."""

from __future__ import annotations

import json
from fractions import Fraction
from math import nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowp
from lowp.errors import InvalidInput
from lowp.explain import (
    Number,
    add,
    as_json,
    convert,
    fused_multiply_add,
    parse_number,
    render,
    weight_update,
)
from lowp.explain.numbers import brief, decimal_text, line, power_text


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


def test_an_exponent_that_its_field_cannot_hold_is_said_to_be_beyond() -> None:
    largest, beyond = render(convert("65536", "fp16")), render(convert("131072", "fp16"))
    assert "field 16 + 15 = 31 = 11111" in largest and "field 17 + 15 = 32, beyond the field" in beyond


def test_a_significand_in_units_of_one_has_no_power_beside_it() -> None:
    assert "significand 101|01\n" in render(convert("5.25", "i8s"))
    assert "significand 1.0101000000|0 x 2^2\n" in render(convert("5.25", "fp16"))
    assert "significand 1.0000000000|0 x 2^10\n" in render(convert("1024", "fp16"))


@pytest.mark.parametrize(("length", "lines"), [(65, [79]), (66, [80]), (67, [79, 15]), (90, [79, 38])])
def test_a_fact_has_lines_of_80_letters_of_which_14_are_its_label_s(length: int, lines: list[int]) -> None:
    text = ("a " * 50)[: length - 1] + "b"
    assert [len(one) for one in line("exact", text).splitlines()] == lines


def test_words_are_not_broken() -> None:
    assert line("exact", "1" * 90) == f"  exact       {'1' * 90}"
    assert line("exact", f"{'1' * 60} away-from-zero") == f"  exact       {'1' * 60}\n{' ' * 14}away-from-zero"
    assert line("exact", "  1.0  x") == "  exact         1.0  x" and line("exact", "") == "  exact"


@pytest.mark.parametrize("text", ["inf", "-inf", "nan"])
def test_a_float_that_is_not_finite_is_the_number_of_its_name(text: str) -> None:
    assert Number.of(float(text)) == parse_number(text)


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


def test_the_scale_of_zeros_is_one_for_a_tensor_if_it_has_that_and_else_the_smallest() -> None:
    exponents = {"flex16+5": 0, "dfp16": 0, "mxfp8": -127, "nvfp4": -9, "i8s@e4m3fn/16": -9, "int8": -149}
    exponents |= {"i16@2^-31..-1/tensor": -31, "i16@2^1..9/tensor": 1, "i16@2^0..9/tensor": 0, "e4m3fn@fp32/tensor": 0}
    for name, exponent in exponents.items():
        scale = convert("0", name).scale
        assert scale is not None and scale.exponent == exponent, name


@pytest.mark.parametrize(("number", "target"), [("0.3", 6), ("1", 4), ("5", 4), ("0.1", 4)])
def test_under_the_rule_4_6_the_closer_of_both_is_shown(number: str, target: int) -> None:
    found = convert(number, "e2m1@e4m3fn/16:4/6")
    assert found.scale is not None and found.rounded.result.value == target
    assert float(found.result) == lowp.quantize(torch.tensor([[float(number)]]), "e2m1@e4m3fn/16:4/6").item()


@pytest.mark.parametrize("to", ["nvfp4", "nvfp4:4/6", "e2m1@e4m3fn/16:4/6"])
def test_the_scale_of_a_number_too_small_for_any_is_one(to: str) -> None:
    found = convert("1e-44", to)
    assert found.scale is not None and (found.scale.value, found.result.value) == (1, 0)


@pytest.mark.parametrize(
    ("to", "given", "text"),
    [
        ("flex16+5", {"exponent": 1}, "flex16+5 has shared exponents from -31 to 0, not 1"),
        ("fp16", {"exponent": 1}, "fp16 has no shared scale: omit --exponent and --scale"),
        ("int8", {"scale": Fraction(-1)}, "a scale of -1 is not possible: give a positive number"),
        ("int8", {"scale": Fraction(1), "exponent": 0}, "both set the shared scale: give one of them"),
        ("int8-affine", {}, "it cannot be shown for one number"),
        ("fp16", {"via": "flex16+5"}, "give a format without a shared scale"),
    ],
)
def test_what_contradicts_itself_is_refused(to: str, given: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        convert("0.3", to, **given)  # type: ignore[arg-type]
    assert text in str(caught.value)


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
    assert [parse_number(text, "i1").value for text in ("0b0", "0b1")] == [1, -1]  # the sign, as lowp.encode packs it
    assert [convert(value, "i1").code for value in (1, -1)] == [0, 1]
    assert Number.of(nan).special == "nan"
    assert Number.of(-0.0).negative


@pytest.mark.parametrize(
    ("text", "source", "words"),
    [
        ("1.2.3", None, "'1.2.3' is not a number: give a decimal (1.125, -3e-5), a fraction (1/3)"),
        ("", None, "'' is not a number"),
        ("1/0", None, "divides by zero"),
        ("1e99999", None, "an exponent beyond 2000 is outside every format"),
        ("0b0101", "fp16", "'0b0101' has 4 bits, and fp16 has 16: give all of them"),
        ("bits:0x10000", "fp16", "0x10000 has more than the 16 bits of fp16"),
        ("0b0101", None, "give its format, for example --from fp16"),
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
    assert data["result"] == 1.12109375
    assert data["outcomes"][0]["rounded"]["bits"] == "0 01111 0001111100"
    with pytest.raises(TypeError, match="int is not an explanation of lowp"):
        render(1)


def test_plain_data_has_each_field_and_what_follows_from_them() -> None:
    rounded = {
        **{"given": 1.2, "cast": "e4m3fn:saturate", "result": 1.25, "code": 0b0_0111_010, "rule": "above-half"},
        **{"exponent": 0, "quantum_exponent": -3, "kept": 9, "rest": 0.6, "away": True, "overflowed": False},
        **{"bits": "0 0111 010", "guard": 1, "round_bit": 0, "sticky": 1, "is_exact": False},
        **{"error": 0.05, "error_ulp": 0.4, "relative_error": "1/24"},
    }
    assert as_json(convert("0.3", "mxfp8", scale=Fraction(1, 4))) == {
        **{"given": 0.3, "cast": "mxfp8", "outcomes": [{"probability": 1, "rounded": rounded}], "source": None},
        **{
            "scale": {"value": 0.25, "chosen_by": "given"},
            "via": None,
            "direct": None,
            "through_fp32": None,
            "held": None,
        },
        **{"result": 0.3125, "error": 0.0125, "error_ulp": 0.4, "relative_error": "1/24"},
    }
    widened = as_json(convert("-0", "fp32", source="fp16"))
    assert isinstance(widened, dict) and (widened["source"], repr(widened["given"])) == ("fp16", "-0.0")
    assert add("1", "2", "e4m3fn").code == 0b0_1000_100


def test_exact_numbers_are_plain_where_fp64_or_its_decimal_has_them() -> None:
    numbers = [Fraction(2, 5), Fraction(1, 3), Fraction(1, 1 << 1100), Fraction(-(2**53) + 1), Fraction(2**53)]
    assert as_json(numbers) == [0.4, "1/3", "2^-1100", -(2**53) + 1, float(2**53)]
    assert [type(one) for one in as_json(numbers)] == [float, str, str, int, float]  # type: ignore[attr-defined]
    assert as_json(Fraction(1 << 1100)) == "2^1100"
    assert as_json(Fraction((1 << 53) + 1)) == f"1.{'0' * 15}11102230246251565404236316680908203125 x 2^53"
    texts = ("nan", "-inf", "0", "1/3", "-7")
    assert as_json({1: tuple(map(parse_number, texts))}) == {"1": ["nan", "-inf", 0, "1/3", -7]}


@pytest.mark.parametrize(
    ("number", "cast", "mean"),
    [
        ("1.0001", "fp16:stochastic-4", ["-0.0399 ulp off the number: the cut part is no number of 4 bits"]),
        ("1.0007", "fp16:stochastic-1", ["-0.2168 ulp off the number: the cut part is no number of 1 bit"]),
        ("1.00006103515625", "fp16:stochastic-4", []),  # a sixteenth of a unit
        ("1.0001", "fp16:stochastic", []),
        ("1.0001", "fp16", []),
        ("65519.9", "fp16:stochastic-4", []),  # perhaps infinite
        ("460.1", "e4m3fn:stochastic-3:saturate", []),
        ("nan", "fp16:stochastic-4", []),
    ],
)
def test_the_mean_of_few_random_bits_is_told_where_it_is_not_the_number(
    number: str, cast: str, mean: list[str]
) -> None:
    lines = render(convert(number, cast)).splitlines()
    assert [line.split(None, 1)[1] for line in lines if line.split()[:1] == ["mean"]] == mean


@pytest.mark.parametrize(
    ("number", "cast", "bits"),
    [
        ("5", "i8s", "0 0000101   0x05"),
        ("-5", "i8", "1 1111011   0xfb"),
        ("-1.75", "fp16", "1 01111 1100000000   0xbf00"),
        ("0.75", "ue5m3", "01110 100   0x74"),
    ],
)
def test_the_bits_of_a_result_are_shown_by_field(number: str, cast: str, bits: str) -> None:
    assert f"  result      {bits}" in render(convert(number, cast))


@pytest.mark.parametrize("format", ["e4m3fn@fp32/tensor", "int8", "nvfp4", "mxfp8", "e5m2@fp32/tensor"])
def test_what_a_tensor_holds_under_a_scale_is_what_quantize_returns(format: str) -> None:
    rounded = 0
    for x in (torch.rand(40, 1) * 2.0 ** torch.arange(-20, 20)[:, None]).unbind():
        found = convert(x.item(), format)
        held = found.result if found.held is None else found.held
        rounded += found.held is not None
        assert float(held) == lowp.quantize(x, format).item()
    assert rounded == 0 if format == "mxfp8" else rounded > 10
    text = render(convert(0.3, "int8", scale=Fraction("0.0133")))
    assert "value       0.3059\n" in text and text.endswith(
        "in fp32     0.3059000074863433837890625, which a tensor holds"
    )
    assert convert(0.3, "fp16").held is None and "in fp32" not in render(convert(0.3, "e4m3fn"))


SHARED = ["nvfp4", "nvfp4:4/6", "e2m1@e4m3fn/16", "e2m1@e4m3fn/16:4/6", "int8", "e4m3fn@fp32/tensor", "i8s@e4m3fn/16"]
SHARED += [
    "mxfp8",
    "mxfp8:rceil",
    "mxfp4:rceil",
    "dfp16:current(headroom=2)",
    "int8:current(headroom=1)",
    "e2m1@ue5m3/16",
]


@pytest.mark.parametrize("to", [*SHARED, "nvfp4:current(headroom=1)"])
def test_a_number_of_any_size_has_the_scale_that_quantize_gives_it(to: str) -> None:
    numbers = (1e-44, 1e-41, 3e-39, 1e-36, 1e-35, 0.001, 0.3, 0.49, 5.0, 7e4, 1e30, 3e38)
    for x in map(float, torch.tensor(numbers)):
        found = convert(x, to)
        held = found.result if found.held is None else found.held
        assert float(held) == lowp.quantize(torch.tensor([[x]]), to).item(), x


def test_headroom_and_rules_move_the_shared_exponent() -> None:
    exponents = {"dfp16:current(headroom=2)": -14, "dfp16:static(-8)": -8, "mxfp8:rceil": -10, "mxfp8": -10}
    for to, exponent in exponents.items():
        scale = convert("0.3", to).scale
        assert scale is not None and scale.exponent == exponent, to
    found = [convert("0.49", to).scale for to in ("mxfp8", "mxfp8:rceil")]
    assert [one.exponent for one in found if one is not None] == [-10, -9]
    whole, half = (convert("0.3", f"int8{more}").scale for more in ("", ":current(headroom=1)"))
    assert whole is not None and half is not None and half.value == 2 * whole.value
    assert [convert("0.3", "flex16+5", exponent=at).scale is None for at in (-31, 0)] == [False, False]
    for to, named, text in (
        ("flex16+5", {"exponent": -32}, "shared exponents from -31 to 0, not -32"),
        ("int8", {"scale": Fraction(0)}, "a scale of 0 is not possible"),
        ("nvfp4:eden", {}, "corrects the scale of a block at random"),
    ):
        with pytest.raises(InvalidInput, match=text):
            convert("0.3", to, **named)  # type: ignore[arg-type]
    assert convert("0.5", "nvfp4:eden", scale=Fraction(1)).outcomes[0].rounded.result.value in (Fraction(1, 2), 0)


def test_a_number_that_goes_to_fp32_goes_through_no_other() -> None:
    for to in ("fp32", "fp32:down", "fp64", "i8"):
        assert convert("0.1", to).through_fp32 is None
    (one, *_) = convert("0", "fp16").outcomes
    assert one.rounded.exponent is None and convert("1", "fp16").rounded.exponent == 0


def test_the_value_is_a_power_of_two_too_where_it_is_small_or_large() -> None:
    texts = ["2^-9", "1.5 x 2^-9", "2^-10", "2^15", "2^16", "0"]
    values = [Fraction(1, 512), Fraction(3, 1024), Fraction(1, 1024), Fraction(1 << 15), Fraction(1 << 16), Fraction(0)]
    for text, value in zip(texts, values, strict=True):
        shown = render(convert(value, "fp32"))
        assert (f" = {text}\n" in shown.partition("  value")[2]) is (text in ("2^-10", "2^16")), text


def test_a_tie_of_an_integer_goes_to_the_even_neighbour() -> None:
    words = " ".join(render(convert("2.5", "i8")).split())
    assert "a tie: to the neighbour whose last bit is 0: down: the kept bits stay" in words


def test_numbers_of_many_digits_are_brief_from_a_bound_on() -> None:
    long = 10**12
    assert decimal_text(Fraction(1, long - 1)) == f"1/{long - 1}"
    assert decimal_text(Fraction(1, long + 1)) == brief(Fraction(1, long + 1), 17) == "9.9999999999900000e-13"
    assert [brief(Fraction(x)) for x in (9999, 10000, 12345, -12345)] == ["9999", "1.000e4", "1.234e4", "-1.234e4"]
    assert [brief(Fraction(x)) for x in (0, 50, 100, -7)] == ["0", "50", "100", "-7"]
    # up to 1,500 places after the point, and about as many digits before it
    assert (
        decimal_text(Fraction(1, 1 << 1500)).startswith("0.000") and len(decimal_text(Fraction(1, 1 << 1500))) == 1502
    )
    assert decimal_text(Fraction(1, 1 << 1501)) == brief(Fraction(1, 1 << 1501), 17)
    assert decimal_text(Fraction(1 << 4499)) == str(1 << 4499)
    for value in (Fraction(1 << 4502), Fraction((1 << 4502), 5), Fraction(-(1 << 4503), 625)):
        assert decimal_text(value) == brief(value, 17), value
    assert decimal_text(Fraction(1 << 4502, 3)) == f"{1 << 4502}/3"
    assert parse_number("2^2000").value == 2**2000 and parse_number("1e-2000").value == Fraction(1, 10**2000)
    for text in ("2^2001", "1e-2001"):
        with pytest.raises(InvalidInput, match="an exponent beyond 2000"):
            parse_number(text)
    assert parse_number("0" * 1999 + "1").value == 1
    with pytest.raises(InvalidInput, match="a number of 2001 characters"):
        parse_number("0" * 2000 + "1")


@pytest.mark.parametrize(
    ("number", "to", "words"),
    [
        ("2^-14", "fp16", "floor(log2 |x|) = -14; field -14 + 15 = 1 = 00001"),
        ("2^-15", "fp16", "floor(log2 |x|) = -15; below 2^-14: subnormal, field 0 = 00000"),
        ("1", "e3m0finite", "0 011 0x3 the exponent alone"),
        ("1", "e8m0", "01111111 0x7f the exponent alone"),
        ("1", "ue5m3", "01111 000 0x78 exponent mantissa"),
        ("1", "e4m3fn", "0 0111 000 0x38 sign exponent mantissa"),
        ("1.00000000001", "i8", "the cut part is 1e-11 of a unit"),
        ("1.49999999999", "i8", "the cut part is just below 0.5000 of a unit"),
        ("1.99999999999", "i8", "the cut part is just below 1 of a unit"),
    ],
)
def test_fields_and_shares_are_told_in_words(number: str, to: str, words: str) -> None:
    assert words in " ".join(render(convert(number, to)).split())


def test_zero_of_an_integer_has_no_sign() -> None:
    assert Number.of(0) == Number(Fraction(0)) and Number.of(Fraction(-1)).negative


def test_a_power_of_two_beside_the_value_is_short_and_zeros_have_no_exact_bits() -> None:
    for places, is_shown in ((29, True), (30, False)):  # 39 and 40 letters
        text = render(convert((1 + Fraction(1, 1 << places)) * Fraction(1, 1 << 20), "fp64"))
        assert (" x 2^-20" in text.partition("  value")[2]) is is_shown
    assert ["  exact" in render(convert(text, "fp16")) for text in ("0", "inf", "nan", "1")] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("number", "to", "words"),
    [
        ("1.5", "fp32", "exponent field +112, and 13 zero bits are appended"),
        ("1.5", "tf32", "exponent field +112, and 0 zero bits are appended"),
        ("1.5", "bf16", ""),  # of fewer mantissa bits
        ("1.0009765625", "e8m9", ""),
        ("0", "fp32", ""),
        ("1", "i8", ""),
        ("inf", "fp32", ""),
        ("100000", "fp32", ""),
    ],
)
def test_a_number_that_is_widened_exactly_keeps_its_mantissa(number: str, to: str, words: str) -> None:
    text = " ".join(render(convert(number, to, source="fp16")).split())
    assert words in text and ("widen" in text) is bool(words)
