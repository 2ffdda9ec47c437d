"""Sums, differences, products and quotients."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import isnan

import numpy as np
import pytest
from explained import bits
from hypothesis import given
from hypothesis import strategies as st

from lowp.errors import InvalidInput, UnknownName
from lowp.explain import (
    add,
    divide,
    multiply,
    parse_number,
    render,
    split_expression,
    subtract,
)


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
    infinities = multiply("inf", "-2", "fp16"), divide("-1", "0", "fp16"), add("1", "-inf", "fp16")
    assert {one.exact for one in infinities} == {parse_number("-inf")}
    assert divide("1", "-inf", "fp16").exact == parse_number("-0")


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


def test_what_sticks_out_further_than_is_shown_is_still_sticky() -> None:
    far = render(add("1", "2^-100", "bf16"))
    assert "guard 0, the rest (0000000000000000000000000000000...) sticky 1" in far
    assert ["..." in render(add("1", text, "fp32")) for text in ("2^-32", "2^-33")] == [False, True]
    assert "sticky 0" in render(add("1", "2^-2", "bf16"))


def test_the_exponents_of_a_subnormal_are_shown_as_they_count() -> None:
    text = render(add("1", "2^-24", "fp16"))
    assert "exponents 01111 - 00001 (a subnormal counts as 1) = 14:" in text
    assert "0.0000000001 moves right by 14 places to" in text
    assert "moves right by 1 place to" in render(add("1", "2", "fp16"))


def test_the_result_may_have_another_format() -> None:
    result = add("1.125", "0.12457275390625", "fp16", "fp32")
    assert str(result.result) == "1.24957275390625"
    assert add("100", "100", "i8").result.value == 127


def test_sums_of_shared_scales_say_what_is_possible() -> None:
    with pytest.raises(InvalidInput, match="give a format without a shared scale, such as i16"):
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
        "0b012": None,
    }
    assert {text: split_expression(text) for text in cases} == cases
    assert split_expression("0x3c7c + 0x0001", bits=True) == ("0x3c7c", "+", "0x0001")
    with pytest.raises(UnknownName, match=r"unknown operator '%'; allowed: \+, -, \*, /"):
        split_expression("1 % 2")
    with pytest.raises(InvalidInput, match="more than one operator"):
        split_expression("1 + 2 + 3")


def test_long_texts_are_refused_before_they_are_searched() -> None:
    with pytest.raises(InvalidInput, match="an expression of 5001 characters is too long: give at most 4000"):
        split_expression("9" * 5000 + "?")
    # digits that may stand on either side of an optional point would be tried at every length, for minutes
    for digits in ("9" * 3900, "0x" + "f" * 3900, "9" * 1900 + "+" + "9" * 1900):
        assert split_expression(digits + "?") is None


def test_the_bits_that_an_alignment_cuts_off_are_told_by_place() -> None:
    shifted = add("1", "2^-4", "fp16").alignment
    assert shifted is not None
    cuts = {"1": (1, 0, 0), "01": (0, 1, 0), "001": (0, 0, 1), "0001": (0, 0, 1), "110": (1, 1, 0), "": (0, 0, 0)}
    for cut, bits_cut in cuts.items():
        found = replace(shifted, cut=cut)
        assert (found.guard, found.round_bit, found.sticky) == bits_cut, cut
    assert "guard 0, the rest (10000000000) sticky 1" in render(add("1", "2^-12", "fp16"))


@pytest.mark.parametrize(
    ("left", "right", "fields", "significands", "shift", "is_left"),
    [
        ("2^-24", "2^-24", (0, 0), (1, 1), 0, True),
        ("2^-15", "2^-24", (0, 0), (512, 1), 0, True),
        ("2^-24", "2^-14", (1, 0), (1024, 1), 0, False),
        ("2^-14", "2^-13", (2, 1), (1024, 1024), 1, False),
        ("1.5", "1.5", (15, 15), (1536, 1536), 0, True),
    ],
)
def test_subnormal_numbers_have_no_hidden_bit_and_the_exponent_of_the_smallest_normal_one(
    left: str, right: str, fields: tuple[int, int], significands: tuple[int, int], shift: int, is_left: bool
) -> None:
    found = add(left, right, "fp16").alignment
    assert found is not None
    assert (found.larger_field, found.smaller_field) == fields and found.larger_is_left is is_left
    assert (found.larger_significand, found.smaller_significand, found.shift) == (*significands, shift)
    scaled = add("2", "1", "e8m0").alignment
    assert scaled is not None and (scaled.larger_significand, scaled.shift) == (1, 1)


def test_a_result_is_shown_in_the_next_wider_format() -> None:
    wider = {name: add("1", "1", name).wider for name in ("fp16", "bf16", "fp32", "fp64", "i8")}
    names = {name: None if found is None else str(found.format) for name, found in wider.items()}
    assert names == {"fp16": "fp32", "bf16": "fp32", "fp32": "fp64", "fp64": None, "i8": None}


def test_mantissas_are_added_alone_where_nothing_carries_out_of_them() -> None:
    texts = {"0.25": True, "0.49951171875": True, "0.5": False, "0.75": False}
    assert {text: "mantissas" in render(add("1.5", text, "fp16")) for text in texts} == texts


def test_significands_whose_product_is_two_or_more_move_by_a_place() -> None:
    moved = {("0.5", "0.75"): False, ("0.75", "0.75"): True, ("4", "0.25"): False, ("6", "0.375"): True}
    assert {pair: "one place to the right" in render(multiply(*pair, "bf16")) for pair in moved} == moved


def test_an_expression_of_bits_has_one_operator_between_blanks_and_no_more_than_4000_letters() -> None:
    assert split_expression("0x3c7c * 0b01", bits=True) == ("0x3c7c", "*", "0b01")
    assert split_expression("0x3c7c+0x0001", bits=True) is None
    assert split_expression("1 + 2 - 3", bits=True) is None
    assert split_expression("1" + " " * 9) is None and split_expression("1 +") is None
    assert split_expression("1" * 1999 + " + " + "1" * 1998) == ("1" * 1999, "+", "1" * 1998)
    with pytest.raises(InvalidInput, match="an expression of 4001 characters"):
        split_expression("1" * 1999 + " + " + "1" * 1999)
    with pytest.raises(InvalidInput, match="more than one operator"):
        split_expression("x + y + z")
    assert split_expression("x + y") is None


@pytest.mark.parametrize(
    ("left", "right", "to", "words"),
    [
        ("1.5", "0.25", "fp16", "1000000000 + 0100000000 = 1100000000"),
        ("1.5", "0.00048828125", "fp16", "1000000000 + 0000000000 = 1000000000, rounded down: 1000000000 stays"),
        ("1.5", "0.0006", "fp16", "1000000000 + 0000000000 = 1000000000, rounded up to 1000000001"),
        ("1.5", "0.0006", "fp32", "1000000000 + 0000000000 = 1000000000"),
        ("65504", "16", "fp16", "1111111111 + 0000000000 = 1111111111"),  # which overflows
    ],
)
def test_the_mantissas_of_a_sum_are_rounded_in_words_where_it_is_in_their_format(
    left: str, right: str, to: str, words: str
) -> None:
    lines = " ".join(render(add(left, right, "fp16", to)).split())
    assert lines.partition("mantissas ")[2].partition(" exact the")[0] == words


def test_what_is_no_product_of_significands_has_no_exponents_to_add() -> None:
    pairs = [("0", "2"), ("2", "0"), ("inf", "2"), ("2", "nan"), ("2", "2")]
    assert ["exponents are added" in render(multiply(*pair, "fp16")) for pair in pairs] == [False] * 4 + [True]
    assert "exponents are added" not in render(divide("2", "2", "fp16")) + render(multiply("2", "2", "i8"))
