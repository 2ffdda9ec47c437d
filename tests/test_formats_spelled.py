"""Any text given as a format or a cast quickly gives a value or one of lowp's errors."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowp import casts, formats
from lowp.casts import Cast, Rounding, ScalingSpec
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, IntFormat, PowerOfTwo, ScaledFormat, Scope, Specials

WORDS = ["e5m2", "fp16", "mxfp8", "dfp16", "i8", "e8m0", "e", "m", "u", "b", "i", "fn", "fnuz", "nuz", "ftz", "finite"]
WORDS += ["@", "/", "2^", "..", "tensor", "row", "affine", "binary", "p", "s", ":", "stochastic", "-b-", "-c-", "up"]
WORDS += ["static(", "delayed(", "window=", "headroom=", "exponent=", ")", ",", "-", "inf", "saturate", "²", "٣", "\0"]
WORDS += ["0", "1", "2", "5", "8", "16", "32", "999", "10000000000", "1" + "0" * 40, ""]
SPELLINGS = st.lists(st.sampled_from(WORDS), max_size=9).map("".join) | st.text(max_size=20)
GIVEN: list[object] = [None, True, 0, 1, -1, 3, 8, 100, 10**20, -(10**20), 1.5, float("nan"), float("inf"), "", "fp16"]
GIVEN += ["up", "current", b"e5m2", [], {}, (), 1j, object, Specials.FN, Rounding.UP, ScalingSpec("current")]
GIVEN += [PowerOfTwo(-3, 3), Scope("block", 32), FORMATS["fp16"], FORMATS["mxfp8"], casts.parse("e4m3fn:saturate")]
VALUES = st.sampled_from(GIVEN)


@given(SPELLINGS)
def test_any_text_is_a_format_or_refused(text: str) -> None:
    for parse in (formats.parse, casts.parse):
        try:
            found = parse(text)
        except InvalidInput:
            continue
        assert parse(str(found)) == found


def mixed(usual: object) -> st.SearchStrategy[object]:
    return st.just(usual) | VALUES


CONSTRUCTORS: list[tuple[Callable[..., object], list[object]]] = [
    (FloatFormat, ["mine", 5, 2, Specials.FN, 0, True, True]),
    (IntFormat, ["mine", 8, True]),
    (PowerOfTwo, [-3, 3]),
    (Scope, ["block", 32]),
    (ScaledFormat, ["mine", IntFormat("i8", 8), PowerOfTwo(-3, 3), Scope("tensor"), None, False]),
    (ScalingSpec, ["delayed", 16, 0, None]),
    (Cast, ["mxfp8", "stochastic", None, ScalingSpec("current"), 8]),
]


@pytest.mark.parametrize(("make", "usual"), CONSTRUCTORS, ids=lambda value: getattr(value, "__name__", ""))
@given(data=st.data())
def test_any_argument_of_a_constructor_is_taken_or_refused(
    make: Callable[..., object], usual: list[object], data: st.DataObject
) -> None:
    arguments = [data.draw(mixed(value)) for value in usual]
    try:
        found = make(*arguments)
    except (InvalidInput, TypeError) as error:
        assert type(error) is TypeError or isinstance(error, InvalidInput)
        return
    assert hash(found) == hash(make(*arguments)) and str(found)


@given(st.sampled_from([row for row in FORMATS.values() if isinstance(row, FloatFormat)]), VALUES)
def test_any_argument_of_a_format_s_methods_is_taken_or_refused(format: FloatFormat, value: object) -> None:
    for method in (format.encode, format.decode, format.ulp):
        try:
            method(value)  # type: ignore[arg-type]
        except (InvalidInput, TypeError) as error:
            assert type(error) is TypeError or isinstance(error, InvalidInput)


HOSTILE = {
    "e10000000000m1": "give 1 to 11 exponent bits",
    "e10000000000m1b" + "9" * 200: "give 1 to 11 exponent bits",
    "e5m2b" + "9" * 200: "its range 2**-",
    "e5m2b" + "9" * 6000: "'e5m2b999999999999999'... is not a format: it has 6005 characters; at most 300 are allowed",
    "i" + "9" * 290: "bits are not possible: give 1 to 32",
    "binary99999999999p3se": "give 1 to 11 exponent bits",
    "i8@fp32/" + "1" + "0" * 20: "a block of 100000000000000000000 elements is too long: give at most 1048576, or row",
    "i8@2^-99999..0/tensor": "exceeds fp64, in which scales are computed: give exponents from -1022 to 1023",
    "e8m0@" * 50 + "/32": "is not ELEMENT@SCALE/SCOPE",
    "@" * 100_000: "has 100000 characters",
    "e٣m٢": "unknown format",
    "i8@fp32/٣": "unknown scope",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_hostile_spellings_are_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(HOSTILE[text])):
        formats.parse(text)


HOSTILE_CASTS = {
    "fp16:" + "up:" * 1000: "is not a cast: it has 3005 characters",
    "fp16:stochastic-" + "9" * 200: "stochastic rounding takes 1 to 32 random bits",
    "dfp16:delayed(window=99999999999)": "a window of 99999999999 maxima is too long: give up to 65536",
    "dfp16:autoflex(headroom=1000)": "1000 bits of headroom are not possible: give 0 to 64",
    "dfp16:delayed(window=3,window=4)": "window is given twice",
}


@pytest.mark.parametrize("text", HOSTILE_CASTS, ids=lambda text: text[:20])
def test_hostile_casts_are_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(HOSTILE_CASTS[text])):
        casts.parse(text)


def test_a_constructor_names_what_it_was_given() -> None:
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: FloatFormat("x", "5", 2), TypeError, "x: exponent_bits is a whole number, not '5'"),  # type: ignore[arg-type]
        (
            lambda: FloatFormat("x", 5, 2, "fm"),
            InvalidInput,
            "x: unknown specials 'fm'; allowed: ieee, fn",
        ),  # type: ignore[arg-type]
        (lambda: FloatFormat("x", 5, 2, signed=1), TypeError, "x: signed is True or False, not 1"),  # type: ignore[arg-type]
        (lambda: IntFormat(3, 8), TypeError, "the name of a format is text, not 3"),  # type: ignore[arg-type]
        (lambda: Cast("fp16", scaling=3), TypeError, "the scaling of a cast is a ScalingSpec or NoneType, not 3"),  # type: ignore[arg-type]
        (lambda: FORMATS["fp16"].decode(1e300), TypeError, "a code of fp16 is a whole number, not 1e+300"),  # type: ignore[union-attr]
        (lambda: FORMATS["fp16"].encode(10**400), InvalidInput, "is beyond the largest number of fp64"),  # type: ignore[union-attr]
        (lambda: FORMATS["fp16"].encode("1"), TypeError, "a number to encode in fp16 is a number, not '1'"),  # type: ignore[union-attr]
        (lambda: FORMATS["fp16"].ulp(True), TypeError, "an ulp is asked at is a number, not True"),  # type: ignore[union-attr]
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=re.escape(text)):
            call()
    assert Cast("mxfp8", scaling="delayed(window=4)").scaling == ScalingSpec("delayed", 4)  # type: ignore[arg-type]
