"""The worked cases are right to the last digit."""

from __future__ import annotations

import doctest
from fractions import Fraction

from explained import bits

from lowp import casts, explain
from lowp.explain import (
    RoundingRule,
    Verdict,
    add,
    convert,
    render,
    round_exact,
    weight_update,
)
from lowp.formats import FloatFormat
from lowp.formats import parse as parse_format


def test_a_decimal_in_fp32_and_fp16_comes_out_to_the_last_digit() -> None:
    wide, half = convert("1.12156456132", "fp32"), convert("1.12156456132", "fp16")
    assert str(wide.result) == "1.12156450748443603515625"
    assert str(half.result) == "1.12109375"
    assert bits(half) == "0 01111 0001111100"
    assert half.rounded.rule is RoundingRule.BELOW_HALF
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
    assert result.rounded.away and result.rounded.rule is RoundingRule.ABOVE_HALF
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
    smallest = {
        text: "zero bits are appended" in render(convert(text, "fp32", source="fp16")) for text in ("2^-14", "2^-15")
    }
    assert smallest == {"2^-14": True, "2^-15": False}  # of subnormal numbers the exponent is another one


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
    assert (str(tie.result), tie.rounded.rule) == ("0", RoundingRule.TIE_TO_EVEN)
    assert convert("2^-25", "fp32").rounded.is_exact
    assert convert("2^-24", "fp16").rounded.is_exact
    assert convert("65519.99", "fp16").result.value == 65504
    assert str(convert("65520", "fp16").result) == "inf"
    absorbed = add("2^-3", "2^-14", "fp16")
    assert absorbed.result.value == Fraction(1, 8)
    assert absorbed.rounded.rule is RoundingRule.TIE_TO_EVEN
    assert add("2^-3", "2^-13", "fp16").rounded.is_exact


def test_the_largest_relative_errors() -> None:
    for name, error in (("fp32", Fraction(1, 2**24)), ("fp16", Fraction(1, 2**11))):
        format = parse_format(name)
        assert isinstance(format, FloatFormat)
        assert Fraction(format.relative_error) == error
        worst = round_exact(1 + error, name).relative_error
        assert worst is not None and error * Fraction(999, 1000) < worst < error


def test_whole_explanations_are_those_that_were_read_and_checked() -> None:
    names = {**vars(explain), "Fraction": Fraction, "parse": casts.parse}
    failed, tried = doctest.testfile("worked.txt", globs=names, raise_on_error=False, encoding="utf-8")
    assert (failed, tried > 60) == (0, True)
