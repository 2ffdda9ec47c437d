"""A cast is a value that can be printed and parsed again; meaningless casts raise errors."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowp import formats
from lowp.casts import Cast, Overflow, Rounding, ScalingSpec, carry_of, doubles, parse, possible_overflows
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, IntFormat, PowerOfTwo, ScaledFormat, Scope, Specials

WIDE = ["e11m20", "e9m52fn", "e11m20@e11m52/row"]
SPELLED = [*WIDE, "e5m7", "e4m3b11fnuz", "ue5m3", "e8m7ftz", "i6s", "e2m1@e8m0/16", "i8@fp32/channel", "i4@2^-9..9/row"]
EVERY = [*FORMATS.values(), *(formats.parse(text) for text in SPELLED)]


@st.composite
def scalings(draw: st.DrawFn, format: ScaledFormat) -> ScalingSpec:
    """Draw a description of how a format's scale is chosen."""
    kind, scale = draw(st.sampled_from(ScalingSpec.KINDS)), format.scale
    exponent = draw(st.integers(scale.min_exponent, scale.max_exponent)) if kind == "static" else None
    return ScalingSpec(kind, draw(st.integers(1, 99)), draw(st.integers(0, 9)), exponent, draw(st.integers(1, 2)))


NAMES = st.sampled_from(["mine", "", "a:b", "e5m2", "fp16", "i8s", "bf16-trunc", "mxfp8"])  # a user's own


@st.composite
def own_floats(draw: st.DrawFn) -> FloatFormat:
    """Draw a floating-point format with a user's name, which may be that of another format."""
    bits = draw(st.integers(1, 11)), draw(st.integers(0, 52))
    offset, flags = draw(st.integers(-40, 40)), (draw(st.booleans()), draw(st.booleans()))
    try:
        specials, offset = draw(st.sampled_from(Specials)), draw(st.just(0) | st.just(offset))
        return FloatFormat(draw(NAMES), *bits, specials, offset, *flags)
    except InvalidInput:
        return FloatFormat(draw(NAMES), 4, draw(st.integers(1, 52)))


@st.composite
def own_formats(draw: st.DrawFn) -> formats.Format:
    """Draw a format of any kind with a user's name."""
    integer = st.builds(IntFormat, NAMES, st.integers(1, 32), st.booleans())
    element = draw(own_floats() | integer)
    if draw(st.booleans()):
        return element
    low = draw(st.integers(-200, 200))
    scale = draw(own_floats() | st.just(PowerOfTwo(low, low + 9)))
    scope = draw(st.sampled_from([Scope("tensor"), Scope("row"), Scope("channel"), Scope("block", 16)]))
    outer = None if scope.kind == "tensor" else draw(st.none() | own_floats())
    return ScaledFormat(
        draw(NAMES), element, scale, scope, outer, isinstance(element, IntFormat) and draw(st.booleans())
    )


@st.composite
def casts(draw: st.DrawFn) -> Cast:
    """Draw a cast."""
    format = draw(st.sampled_from(EVERY) | own_formats())
    rounding = draw(st.sampled_from(Rounding))
    random_bits = draw(st.integers(1, 32)) if rounding.is_stochastic else None
    if rounding is Rounding.STOCHASTIC:
        random_bits = draw(st.none() | st.just(random_bits))
    scaling = draw(st.none() | scalings(format)) if isinstance(format, ScaledFormat) else None
    return Cast(format, rounding, draw(st.sampled_from(possible_overflows(format))), scaling, random_bits)


@given(casts())
def test_a_cast_reads_back_from_what_it_prints(cast: Cast) -> None:
    again = parse(str(cast))
    assert again == cast
    assert hash(again) == hash(cast)
    assert str(again) == str(cast)
    assert parse(str(cast).upper()) == cast


@pytest.mark.parametrize("format", EVERY, ids=str)
def test_a_format_alone_is_a_cast_to_nearest_even(format: formats.Format) -> None:
    cast = parse(format)
    assert cast == parse(str(format)) == Cast(format)
    assert (cast.rounding, cast.random_bits, cast.is_stochastic) == (Rounding.NEAREST_EVEN, None, False)
    assert cast.overflow is possible_overflows(format)[0]
    assert (cast.scaling is None) == (not isinstance(format, ScaledFormat))
    assert parse(cast) is cast


def test_a_scaling_without_arguments_has_its_defaults_and_prints_none() -> None:
    assert parse("dfp16:delayed").scaling == ScalingSpec("delayed", 16, 0, None, 2, "floor")
    assert [str(ScalingSpec("delayed", window)) for window in (16, 17)] == ["delayed", "delayed(window=17)"]


def test_the_bounds_of_a_scaling_are_allowed() -> None:
    scaling = parse("dfp16:delayed(window=65536,headroom=64,words=1)").scaling
    assert scaling == ScalingSpec("delayed", 65536, 64, words=1)


def test_overflow_follows_from_what_the_format_has() -> None:
    for format in EVERY:
        element = format.element if isinstance(format, ScaledFormat) else format
        default = possible_overflows(format)[0]
        if isinstance(format, ScaledFormat) or isinstance(element, IntFormat) or not element.has_nan:
            assert possible_overflows(format) == (Overflow.SATURATE,)
        else:
            assert default is (Overflow.INFINITY if element.has_infinity else Overflow.NAN)


def test_the_words_after_the_format_come_in_any_order() -> None:
    assert parse("e4m3fn:saturate:stochastic-8") == parse("e4m3fn:stochastic-8:saturate")
    assert parse("dfp16:static(-8):up") == Cast("dfp16", Rounding.UP, scaling=ScalingSpec("static", exponent=-8))
    assert parse("fp16 : up") == parse("fp16:up")
    assert parse(" BF16-trunc ") == Cast("bf16", Rounding.TOWARD_ZERO)
    assert str(parse("bf16-trunc")) == "bf16:toward-zero"


def test_the_element_cast_leaves_the_scale_out() -> None:
    cast = parse("mxfp4:stochastic-4")
    assert cast.element == FORMATS["e2m1"]
    assert cast.element_cast == parse("e2m1:stochastic-4")
    assert parse("fp16:up").element_cast == parse("fp16:up")
    assert cast.with_rounding("nearest-even") == parse("mxfp4")
    assert parse("fp16:stochastic-32").random_bits == 32
    assert cast.with_rounding(Rounding.STOCHASTIC, 7) == parse("mxfp4:stochastic-7") == parse("mxfp4:stochastic-a-7")
    assert cast.with_rounding(Rounding.STOCHASTIC_B, 7) == parse("mxfp4:stochastic-b-7")


@pytest.mark.parametrize("name", ["mxfp8", "dfp16", "e5m2@2^-9..4/row"])
def test_a_static_scale_is_any_of_the_format_s(name: str) -> None:
    scale = parse(name).format.scale  # type: ignore[union-attr]
    for exponent in (scale.min_exponent, scale.max_exponent):
        scaling = parse(f"{name}:static({exponent})").scaling
        assert scaling is not None and scaling.exponent == exponent
    for exponent in (scale.min_exponent - 1, scale.max_exponent + 1):
        with pytest.raises(InvalidInput, match=rf"static\({exponent}\) is not possible"):
            parse(f"{name}:static({exponent})")


def test_the_current_form_of_a_delayed_cast_keeps_its_headroom() -> None:
    assert parse("dfp16:up:delayed(window=3,headroom=2)").current == parse("dfp16:up:current(headroom=2)")
    assert parse("dfp16:delayed").is_delayed
    for cast in map(parse, ("dfp16:autoflex(headroom=2)", "dfp16", "fp16")):
        assert cast.current == cast and not cast.is_delayed


# 1 + field / 256 is the significand of a largest number: the field from which on the scale is twice that of floor
DOUBLED_FROM = {
    "mxfp8": 256,  # none
    "mxfp8:ceil": 1,  # all above 1
    "mxfp8:rceil": 193,  # above 448 / 256 = 1.75
    "mxfp4:rceil": 129,  # above 6 / 4
    "i4s@e8m0/32:rceil": 193,  # above 7 / 4
    "mxfp8:even": 240,  # 1.9375 is as near to 1.875 as to 2, which is even
    "mxfp4:even": 192,  # 1.75 is as near to 1.5
    "i4s@e8m0/32:even": 224,  # 1.875 is as near to 1.75
}


@pytest.mark.parametrize("text", DOUBLED_FROM)
def test_the_rule_of_a_scale_doubles_it_for_large_significands(text: str) -> None:
    cast = parse(text)
    for field in range(256):
        is_doubled = field >= DOUBLED_FROM[text]
        assert doubles(Fraction(256 + field, 256), cast) == is_doubled
        assert (256 + field + carry_of(cast, 8)) >> 9 == is_doubled  # a carry into the exponent


REFUSED = {
    "bf61": "unknown format 'bf61'; did you mean bf16",
    "fp16:nearest": "fp16:nearest: unknown rounding, overflow or scaling 'nearest'; did you mean nearest-even",
    "fp16:up:down": "fp16:up:down: rounding is given twice",
    "e4m3fn:inf": "e4m3fn cannot overflow to inf; allowed: nan, saturate",
    "e2m1:nan": "e2m1 cannot overflow to nan; allowed: saturate",
    "mxfp8:inf": "mxfp8 cannot overflow to inf; allowed: saturate",
    "fp16:current": "fp16 has no shared scale: omit the scaling current",
    "fp16:stochastic-0": "stochastic rounding takes 1 to 32 random bits, not 0",
    "fp16:stochastic-33": "stochastic rounding takes 1 to 32 random bits, not 33",
    "fp16:stochastic-b": "stochastic-b needs a number of random bits, such as stochastic-b-8",
    "fp16:stochastic-d-8": "did you mean stochastic",
    "mxfp8:static(200)": "so static(200) is not possible: the nearest is static(127)",
    "mxint8:static(-200)": "so static(-200) is not possible: the nearest is static(-133)",
    "flex16+5:static(99)": "so static(99) is not possible: the nearest is static(0)",
    "dfp16:static": "scaling static with exponent None: only static takes an exponent, as in static(-8)",
    "dfp16:delayed(3)": "scaling delayed with exponent 3",
    "dfp16:delayed(window=0)": "a window of 0 maxima is not possible: give 1 or more",
    "dfp16:delayed(window=x)": "'window=x' is not a whole number: give one, as in delayed(window=8)",
    "nvfp4:rceil": "nvfp4: the rule rceil is for scales that are powers of two, as of mxfp8",
    "e4m3fn@fp32/32:ceil": "e4m3fn@fp32/32: the rule ceil is for scales that are powers of two",
    "e2m1@e8m0@fp32/32:ceil": "e2m1@e8m0@fp32/32: the rule ceil is for scales that are powers of two",
    "dfp16:ceil": "integers under one exponent have that of floor by their definition",
    "mxfp8:delayed(rule=ceil)": "scaling delayed: the rule ceil is for current scales",
    "mxfp8:current(rule=up)": "unknown rule of a scale 'up'; allowed: floor, rceil, ceil, even, 4/6, eden",
    "mxfp4:4/6": "mxfp4: the rule 4/6 is for elements e2m1 under scales with a mantissa, as of nvfp4: omit it",
    "if4:4/6": "if4: the rule 4/6 is for elements e2m1",
    "int4:4/6": "int4: the rule 4/6 is for elements e2m1",
    "dfp16:delayed(size=3)": "unknown scaling argument 'size'",
    "dfp16:current(headroom=-1)": "-1 bits of headroom are not possible: give 0 to 64",
    "dfp16:current(headroom=65)": "65 bits of headroom are not possible: give 0 to 64",
    "dfp16:delayed(window=65537)": "a window of 65537 maxima is too long: give up to 65536",
    "dfp16:current(words=3)": "scaling current: 3 words are not possible: give 1 or 2",
    "dfp16:static(-1,-2)": "dfp16:static(-1,-2): exponent is given twice",
    "nvfp4:eden:up": "the rule eden rounds elements to nearest, and scales stochastically: omit up",
    "fp16:": "unknown rounding, overflow or scaling ''",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_cast_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(REFUSED[text])):
        parse(text)


def test_what_is_no_cast_at_all_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"a cast must be text \(e4m3fn:stochastic\), a Cast or a format, not float"):
        parse(1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="unknown rounding 'nearest'; did you mean nearest-"):
        Cast("fp16", "nearest")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="random_bits=3 needs stochastic rounding, not nearest-even"):
        Cast("fp16", random_bits=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="unknown scaling 'curent'; did you mean current"):
        ScalingSpec("curent")


def test_casts_that_depend_on_a_seed_round_or_correct_at_random() -> None:
    spelled = {"nvfp4:eden": True, "nvfp4:stochastic": True, "fp16:stochastic-3": True, "e2m1:stochastic-c-2": True}
    spelled |= {"nvfp4": False, "nvfp4:4/6": False, "mxfp8:rceil": False, "fp16:to-odd": False, "int8": False}
    assert {text: parse(text).is_stochastic for text in spelled} == spelled
    assert [text for text in spelled if parse(text).is_corrected] == ["nvfp4:eden"]
