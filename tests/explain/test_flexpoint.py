"""Products and sums of mantissas with their exponents, and moves to another exponent."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.explain import (
    FlexNumber,
    as_json,
    flex_arithmetic,
    flex_number,
    flex_product,
    flex_sum,
    render,
    rescale,
)

FLEX = parse("flex16+5")
NUMBERS = st.builds(FlexNumber, st.integers(-(2**15), 2**15 - 1), st.integers(-31, 0))


@given(NUMBERS, NUMBERS)
def test_a_product_adds_the_exponents_and_keeps_every_bit(left: FlexNumber, right: FlexNumber) -> None:
    found = flex_product(left, right, FLEX)
    assert found.exact == FlexNumber(left.mantissa * right.mantissa, left.exponent + right.exponent)
    assert found.exact.value == left.value * right.value
    unit = Fraction(2) ** found.result.exponent
    if not found.written.saturated:
        assert abs(found.result.value - found.exact.value) <= unit / 2
    assert -31 <= found.result.exponent <= 0


@given(NUMBERS, NUMBERS, st.booleans())
def test_a_sum_takes_the_larger_exponent_or_the_next(left: FlexNumber, right: FlexNumber, minus: bool) -> None:
    found = flex_sum(left, right, FLEX, minus=minus)
    larger = max(left.exponent, right.exponent)
    assert found.result.exponent == larger + found.carried
    exact = left.value - right.value if minus else left.value + right.value
    lost = exact - found.exact.value  # an arithmetic shift cuts toward minus infinity
    assert 0 <= lost < Fraction(2) ** larger
    assert found.carried == (not -(2**15) <= found.exact.mantissa < 2**15 and larger < 0)


@given(NUMBERS, st.integers(-31, 0))
def test_a_move_rounds_to_nearest_even_and_saturates(number: FlexNumber, exponent: int) -> None:
    moved = rescale(number, exponent)
    ideal = round(number.value / Fraction(2) ** exponent)  # Python's round goes to even
    assert moved.result == FlexNumber(min(max(ideal, -(2**15)), 2**15 - 1), exponent)
    assert moved.saturated == (moved.result.mantissa != ideal)


def test_worked_cases() -> None:
    carried = flex_sum(FlexNumber(30000, -14), FlexNumber(30000, -14), FLEX)
    assert carried.carried and carried.result == FlexNumber(30000, -13)
    aligned = flex_sum(FlexNumber(100, -8), FlexNumber(0b1011, -10), FLEX)
    assert (aligned.shift, aligned.cut, aligned.result) == (2, "11", FlexNumber(102, -8))
    below = flex_sum(FlexNumber(100, -8), FlexNumber(-1, -10), FLEX)
    assert below.result == FlexNumber(99, -8)  # -1/4 of a unit is shifted to -1
    assert flex_sum(FlexNumber(32767, 0), FlexNumber(1, 0), FLEX).written.saturated  # there is no next exponent
    assert flex_product(FlexNumber(3, -2), FlexNumber(5, -3), FLEX, exponent=-5).result == FlexNumber(15, -5)
    assert flex_number("0.3", FLEX, -8) == FlexNumber(77, -8)


def test_a_product_of_exactly_the_smallest_mantissa_needs_no_larger_exponent() -> None:
    found = flex_product(FlexNumber(-256, -10), FlexNumber(128, -10), FLEX)
    assert found.result == FlexNumber(-32768, -20) and not found.written.saturated
    assert flex_product(FlexNumber(256, -10), FlexNumber(128, -10), FLEX).result == FlexNumber(16384, -19)
    assert flex_product(FlexNumber(-256, -10), FlexNumber(128, -10), parse("dfp16")).result == FlexNumber(-16384, -19)


def test_dfp16_mantissas_are_symmetric() -> None:
    dfp16 = parse("dfp16")
    total = flex_sum(FlexNumber(-32767, 0), FlexNumber(-1, 0), dfp16)
    assert total.carried and total.result == FlexNumber(-16384, 1)
    assert rescale(FlexNumber(-32768, 0), 0, symmetric=True).result.mantissa == -32767


def words(found: object) -> str:
    """Return the rendered text without line breaks and columns."""
    return " ".join(render(found).split())


def test_the_text_shows_alignment_carry_and_what_was_cut() -> None:
    text = words(flex_arithmetic("+", "1.9", "1.8", FLEX))
    for part in ("31130 x 2^-14", "needs more than 16 bits: the next exponent, -13", "0111011001100110 30310 x 2^-13"):
        assert part in text
    assert "moves right by 8; 11001101 is cut off" in words(flex_arithmetic("+", "0.3", "100", FLEX))
    product = words(flex_arithmetic("*", "0.3", "2.5", FLEX))
    assert "every bit kept" in product and "-16 + -13 = -29" in product
    assert "does not fit into 16 bits there" in words(rescale(FlexNumber(20000, -8), -10))


def test_the_same_as_plain_data() -> None:
    data = json.loads(json.dumps(as_json(flex_arithmetic("-", "3", "4", FLEX, -8))))
    assert data["operator"] == "-" and data["result"] == {"mantissa": -256, "exponent": -8, "value": -1}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: flex_arithmetic("/", "1", "2", FLEX), "of mantissas, not /"),
        (lambda: flex_arithmetic("+", "nan", "2", FLEX), "which has no infinity and no NaN"),
        (
            lambda: flex_sum(FlexNumber(1, 0), FlexNumber(1, 0), parse("fp16")),
            "fp16 is not a format of integers with one power",
        ),
    ],
)
def test_what_the_arithmetic_lacks_is_said(call: object, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        call()  # type: ignore[operator]


def test_a_sum_is_carried_from_beyond_the_bounds_of_a_mantissa() -> None:
    sums = {32767: 0, 32768: 1, -32768: 0, -32769: 1}
    for total, carried in sums.items():
        found = flex_sum(FlexNumber(total // 2, -3), FlexNumber(total - total // 2, -3), FLEX)
        assert (found.exact.mantissa, found.carried, found.written.saturated) == (total, carried, False)
        assert found.result.exponent == -3 + carried
