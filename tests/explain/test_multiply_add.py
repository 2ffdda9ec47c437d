"""D = A B + C on a tensor core."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lowp.casts import Rounding
from lowp.errors import InvalidInput, UnknownName
from lowp.explain import (
    evaluate,
    fused_multiply_add,
    render,
)
from lowp.explain.multiply_add import render_multiply_add


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
        (("1 2; 3", "1; 2", None), "A has rows of 2 + 1 numbers: give 1 to 4 rows of the same length"),
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
        evaluate("%", 1, 2, "fp16")


def test_a_product_is_shown_with_seven_digits_of_its_factors_and_all_of_its_own() -> None:
    lines = [
        one.split(None, 1) for one in render(fused_multiply_add("1.23456789 1", "0.987654321; 2", "1")).splitlines()
    ]
    products = [words[1] for words in lines if words[:1] == ["product"]]
    assert products == ["1.234375 * 0.9877930 = 1.21930694580078125", "1 * 2 = 2"] * 2


def test_the_element_that_is_shown_is_the_one_where_accumulators_differ_most() -> None:
    assert fused_multiply_add("1; 2048", "1 1", "1 1; 1 2").farthest == (1, 0)  # 2049 is none of fp16
    assert fused_multiply_add("1; 2048; 4096", "1 1", "1 1; 1 1; 1 1").farthest == (1, 0)
    assert fused_multiply_add("1; 2048; 60000", "1 2", "1 1; 1 1; 1 1").farthest == (2, 1)  # one is infinite
    assert fused_multiply_add("1; 2", "1 1", "1 1; 1 1").farthest == (0, 0)


@pytest.mark.parametrize(("accumulate", "other"), [("fp16", "fp32"), ("fp32", "fp16"), ("e8m11", "fp16")])
def test_the_other_accumulator_is_fp16_beside_wider_ones(accumulate: str, other: str) -> None:
    found = fused_multiply_add("1", "1", accumulate=accumulate)
    assert (str(found.accumulate), str(found.other[0][0].accumulate)) == (accumulate, other)


def test_zeros_align_nothing() -> None:
    found = fused_multiply_add("0 2^-14", "1; 2^-14").d[0][0]
    assert found.rounded.result.value == Fraction(1, 1 << 28) and all(one.kept == one.exact for one in found.addends)


def test_an_element_beyond_d_is_refused() -> None:
    found = fused_multiply_add("1; 2; 3", "1 2")
    assert "D[3,2] step by step" in render_multiply_add(found, (2, 1))
    for element in ((3, 0), (0, 2)):
        with pytest.raises(InvalidInput, match=f"D is 3 x 2: it has no element {element[0] + 1},{element[1] + 1}"):
            render_multiply_add(found, element)
