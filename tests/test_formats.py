"""Every format follows its standard, and can be printed and parsed again."""

from __future__ import annotations

import itertools
import math
import re

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from libraries import LIBRARIES

from lowp import formats
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, IntFormat, PowerOfTwo, ScaledFormat, Scope, Specials

FLOATS = [row for row in FORMATS.values() if isinstance(row, FloatFormat)]
SCALED = [row for row in FORMATS.values() if isinstance(row, ScaledFormat)]
SMALL = [row for row in FLOATS if row.bits <= 16]

# maximum, smallest normal, smallest subnormal, bias: IEEE 754-2019 table 3.5, OCP OFP8 1.0 table 2, OCP MX 1.0 tables
# 3 to 5, and for the FNUZ formats the documentation of ml_dtypes
LIMITS = {
    "fp64": (1.7976931348623157e308, 2.0**-1022, 2.0**-1074, 1023),
    "fp32": (3.4028234663852886e38, 2.0**-126, 2.0**-149, 127),
    "tf32": (2.0**128 - 2.0**117, 2.0**-126, 2.0**-136, 127),
    "fp16": (65504.0, 2.0**-14, 2.0**-24, 15),
    "bf16": (2.0**128 - 2.0**120, 2.0**-126, 2.0**-133, 127),
    "bf16-tpu": (2.0**128 - 2.0**120, 2.0**-126, None, 127),
    "e5m2": (57344.0, 2.0**-14, 2.0**-16, 15),
    "e4m3fn": (448.0, 2.0**-6, 2.0**-9, 7),
    "e5m2fnuz": (57344.0, 2.0**-15, 2.0**-17, 16),
    "e4m3fnuz": (240.0, 2.0**-7, 2.0**-10, 8),
    "e8m0": (2.0**127, 2.0**-127, None, 127),
    "e3m2": (28.0, 0.25, 0.0625, 3),
    "e2m3": (7.5, 1.0, 0.125, 1),
    "e2m1": (6.0, 1.0, 0.5, 1),
}


@st.composite
def spellings(draw: st.DrawFn) -> str:
    """Draw the spelling of a floating-point format, which may be impossible."""
    exponent = draw(st.integers(1, 11))
    mantissa = draw(st.integers(0, 52))
    bias = draw(st.sampled_from(["", f"b{draw(st.integers(-20, 1100))}"]))
    specials = draw(st.sampled_from(["", "fn", "fnuz", "nuz", "finite", "ieee"]))
    return (
        f"{draw(st.sampled_from(['', 'u']))}e{exponent}m{mantissa}{bias}{specials}{draw(st.sampled_from(['', 'ftz']))}"
    )


def parse_if_possible(text: str) -> FloatFormat | None:
    try:
        found = formats.parse(text)
    except InvalidInput:
        return None
    assert isinstance(found, FloatFormat)
    return found


# -- limits -----------------------------------------------------------------------------------------------------------
def test_the_limits_of_every_row_are_those_of_its_standard() -> None:
    assert {row.name for row in FLOATS} == set(LIMITS)
    for row in FLOATS:
        found = (row.maximum, row.smallest_normal, row.smallest_subnormal, row.bias)
        assert found == LIMITS[row.name], row.name


def test_the_limits_are_those_of_torch_and_ml_dtypes() -> None:
    for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32), ("fp16", torch.float16)):
        row, info = formats.parse(name), torch.finfo(dtype)
        assert isinstance(row, FloatFormat)
        assert (row.maximum, row.smallest_normal, row.ulp(1.0)) == (info.max, info.tiny, info.eps)
    for name, dtype in LIBRARIES.items():
        row, info = formats.parse(name), ml_dtypes.finfo(dtype)
        assert isinstance(row, FloatFormat)
        assert row.maximum == float(info.max), name
        assert row.smallest_normal == float(info.smallest_normal), name


# OCP MX 1.0, table 1; NVFP4 of NVIDIA's Blackwell; IF4, arXiv 2603.28765; Koester et al. 2017; Das et al. 2018; and the
# usual symmetric integers
SPELLINGS = {
    **{"mxfp8": "e4m3fn@e8m0/32", "mxfp8-e5m2": "e5m2@e8m0/32", "mxfp6": "e2m3@e8m0/32", "mxfp6-e3m2": "e3m2@e8m0/32"},
    **{"mxfp4": "e2m1@e8m0/32", "mxint8": "i8s@2^-133..121/32", "nvfp4": "e2m1@e4m3fn@fp32/16"},
    **{"if4": "e2m1+i4s@e4m3fn@fp32/16", "flex16+5": "i16@2^-31..0/tensor", "dfp16": "i16s@2^-128..127/tensor"},
    **{"int16": "i16s@fp32/row", "int8": "i8s@fp32/row", "int8-affine": "i8@fp32/row/affine", "int4": "i4s@fp32/32"},
    **{"ternary": "i2s@fp32/row", "binary": "i1@fp32/row"},
}


def test_the_elements_and_scales_of_every_scaled_row_are_those_of_its_definition() -> None:
    assert {row.name: row.spelling for row in SCALED} == SPELLINGS


@pytest.mark.parametrize("row", [*FLOATS, *map(formats.parse, ("ue5m3", "e9m52fn", "e4m0finite"))], ids=str)
def test_the_facts_of_a_row_follow_from_its_width_and_its_ulp(row: FloatFormat) -> None:
    assert row.bytes * 8 == row.bits == row.codes.stop.bit_length() - 1
    assert row.relative_error == row.ulp(1.0) / 2 == 2.0**-row.precision
    assert row.decimal_digits == pytest.approx(math.log10(2 / row.ulp(1.0)))
    assert row.has_zero == (row.decode(0) == 0)
    assert (row.smallest_subnormal is None) == (row.smallest == row.smallest_normal)


def test_the_facts_of_an_integer_follow_from_its_numbers() -> None:
    for bits in range(1, 33):
        row = IntFormat("mine", bits)
        assert row.bytes * 8 == bits == (row.maximum - row.minimum).bit_length() - (bits == 1)
        assert row.has_zero == (bits > 1)
        assert row.decimal_digits == pytest.approx(math.log10(row.maximum + (bits > 1)) or math.log10(2))


# -- codes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # of ml_dtypes, at NaN
def test_every_code_means_what_the_library_says(name: str) -> None:
    row = formats.parse(name)
    assert isinstance(row, FloatFormat)
    codes = np.arange(1 << row.bits, dtype=np.uint8 if row.bits <= 8 else np.uint16)
    wanted = codes.view(LIBRARIES[name]).astype(np.float64)
    found = np.array(list(row.values()))
    np.testing.assert_array_equal(found, wanted)
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(wanted[number]))


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 17], ids=["all", "sample"])
@pytest.mark.parametrize("row", SMALL, ids=str)
def test_every_number_encodes_to_its_code(row: FloatFormat, step: int) -> None:
    for code in row.codes[:: step if row.bits > 11 else 1]:
        value = row.decode(code)
        if math.isnan(value):
            assert math.isnan(row.decode(row.encode(value)))
        elif row.subnormals or value != 0 or row.fields(code)[2] == 0:
            assert row.encode(value) == code


@given(spellings())
def test_codes_of_any_format_are_in_order(text: str) -> None:
    row = parse_if_possible(text)
    if row is None or row.bits > 12:
        return
    half = row.codes[: 1 << (row.exponent_bits + row.mantissa_bits)]
    numbers = [v for v in (row.decode(code) for code in half) if not math.isnan(v)]
    assert numbers == sorted(numbers)
    finite = [v for v in numbers if math.isfinite(v)]
    assert max(finite) == row.maximum
    assert min(v for v in finite if v > 0) == row.smallest
    assert all(row.encode(v) in row.codes for v in numbers)


def test_the_codes_of_infinities_and_of_quiet_nans_are_those_of_the_standards() -> None:
    """IEEE 754-2019, 6.2.1: a quiet NaN has the first bit behind the exponent; OCP FP8 1.0, table 1; OCP MX 1.0."""
    found = {row.name: (row.infinity_code, row.nan_code) for row in FLOATS}
    codes = {
        **{"fp64": (0x7FF << 52, 0x7FF8 << 48), "fp32": (0x7F800000, 0x7FC00000), "fp16": (0x7C00, 0x7E00)},
        **{"tf32": (0x3FC00, 0x3FE00), "bf16": (0x7F80, 0x7FC0), "bf16-tpu": (0x7F80, 0x7FC0), "e5m2": (0x7C, 0x7E)},
        **{"e4m3fn": (None, 0x7F), "e5m2fnuz": (None, 0x80), "e4m3fnuz": (None, 0x80), "e8m0": (None, 0xFF)},
        **dict.fromkeys(("e3m2", "e2m3", "e2m1"), (None, None)),
    }
    assert found == codes


def test_what_has_no_code_is_refused() -> None:
    fp16, e2m1 = formats.parse("fp16"), formats.parse("e2m1")
    assert isinstance(fp16, FloatFormat) and isinstance(e2m1, FloatFormat)
    for value in (1.0 + 2.0**-11, 65520.0, 2.0**-25):
        with pytest.raises(InvalidInput, match=re.escape(f"{value!r} is not a number of fp16: round it first")):
            fp16.encode(value)
    with pytest.raises(InvalidInput, match="e2m1 has no code for NaN"):
        e2m1.encode(math.nan)
    with pytest.raises(InvalidInput, match="0x10 is not a code of e2m1: codes are 0 to 0xf"):
        e2m1.decode(16)


# -- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", FORMATS.values(), ids=list(FORMATS))
def test_a_row_reads_back_from_its_name_and_its_spelling(row: formats.Format) -> None:
    assert formats.parse(str(row)) == row
    assert str(row) == row.name
    assert formats.parse(row.name.upper()) is row
    assert formats.parse(row) is row
    assert formats.parse(row.spelling) == row


@given(spellings())
def test_any_spelling_reads_back(text: str) -> None:
    row = parse_if_possible(text)
    if row is not None:
        assert formats.parse(str(row)) == row
        assert formats.parse(row.spelling) == row
        assert hash(formats.parse(row.spelling)) == hash(row)


@given(st.integers(1, 32), st.booleans())
def test_any_integer_reads_back(bits: int, symmetric: bool) -> None:
    row = IntFormat("mine", bits, symmetric)
    assert formats.parse(str(row)) == row
    assert row.symmetric == (row.maximum == -row.minimum)
    assert row.maximum - row.minimum + 1 == (1 << bits) - (row.symmetric and bits > 1) + (bits == 1)


@pytest.mark.parametrize("alias", formats.ALIASES)
def test_other_names_mean_a_row(alias: str) -> None:
    assert formats.parse(alias) is FORMATS[formats.ALIASES[alias]]


REFUSED = {
    "bf61": "unknown format 'bf61'; did you mean bf16",
    "": "unknown format ''",
    "FP8": "FP8 is a width, which several formats have: give one of e4m3fn, e5m2, mxfp8",
    "float4": "float4 is a width, which several formats have: give one of e2m1, mxfp4, nvfp4",
    "e12m2": "e12m2: 12 exponent and 2 mantissa bits are not possible: give 1 to 11 exponent bits",
    "e8m53": "give 1 to 11 exponent bits and 0 to 52 mantissa bits, for example e5m10",
    "e5m0": "without a mantissa bit infinity and NaN would have the same code",
    "e1m3": "its special codes leave no normal number: give another exponent bit, or fewer specials",
    "ue1m1nuz": "its special codes leave no normal number",
    "binary8p9se": "P3109's binaryKpP takes a precision P from 1 to K (unsigned) or K - 1 (signed)",
    "binary8p0se": "P3109's binaryKpP takes a precision P",
    "binary20p3se": "e17m2nuz: 17 exponent and 2 mantissa bits are not possible",
    "e11m52fn": "lies outside that of fp64 (2**-1074 .. 2**1023): give a smaller bias_offset",
    "i0": "0 bits are not possible: give 1 to 32",
    "i33": "33 bits are not possible",
    "bf16-trunc": "bf16-trunc is a cast, not a format",
    "e4m3fn@e8m0": "is not ELEMENT@SCALE/SCOPE",
    "i8@fp32/row/affin": "is not ELEMENT@SCALE/SCOPE",
    "i8@fp32/row/affine/affine": "is not ELEMENT@SCALE/SCOPE",
    "e2m1@e4m3fn@fp32@fp32/16": "is not ELEMENT@SCALE/SCOPE",
    "e4m3fn@i8/32": "a scale is a float format (e8m0, fp32) or a power of two",
    "mxfp8@e8m0/32": "the element mxfp8 already has a shared scale",
    "i8@fp32/rows": "unknown scope 'rows'; did you mean row?",
    "i8@2^3..1/row": "is empty: give the smaller exponent first",
    "i8@fp32/0": "a block needs a size of 1 or more",
    "e4m3fn@fp32/row/affine": "a zero point needs an integer element",
    "i8@fp32@fp32/tensor": "an outer scale adds nothing",
    "e2m1+i4@e4m3fn@fp32/16": "blocks choose between a signed float element without NaN and a symmetric integer",
    "e2m1+i5s@e4m3fn@fp32/16": "of as many bits, such as e2m1+i4s, not e2m1+i5s by 16",
    "e2m1+i4s@e4m3fn@fp32/row": "not e2m1+i4s by row",
    "e2m1+i4s@e4m3fn/16": "give a float scale with a sign, and one more for the tensor, such as e4m3fn@fp32",
    "e2m1+i4s@e8m0@fp32/32": "the sign of a scale says which element a block has",
    "e2m1+e2m1@e4m3fn@fp32/16": "the other element of a block is an integer format, such as i4s, not e2m1",
    "e2m1+@e4m3fn@fp32/16": "unknown format ''",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_format_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(REFUSED[text])):
        formats.parse(text)


def test_what_is_neither_text_nor_a_format_is_refused() -> None:
    for other, kind in ((3, "int"), (None, "NoneType"), (torch.strided, "layout")):
        with pytest.raises(TypeError, match=f"a format must be text .fp16, e5m7. or one of FORMATS, not {kind}"):
            formats.parse(other)  # type: ignore[arg-type]


# -- relations --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", SMALL, ids=str)
@pytest.mark.parametrize("other", SMALL, ids=str)
def test_a_format_fits_another_when_its_numbers_do(row: FloatFormat, other: FloatFormat) -> None:
    if row.bits > 8 or not row.signed or other.bits > 16:
        assert row.fits(row)
        return
    finite = [v for v in row.values() if math.isfinite(v)]
    assert row.fits(other) == all(is_number_of(other, v) for v in finite)


def is_number_of(row: FloatFormat, value: float) -> bool:
    try:
        row.encode(value)
    except InvalidInput:
        return False
    return True


def test_an_ulp_is_the_distance_to_the_next_number() -> None:
    for row in SMALL:
        numbers = sorted({v for v in row.values() if math.isfinite(v) and v > 0})
        for low, high in list(itertools.pairwise(numbers))[:: max(1, len(numbers) // 100)]:
            if row.subnormals or low >= row.smallest_normal:
                assert row.ulp(low) == high - low, (row.name, low)


def test_bytes_count_the_share_of_the_scale() -> None:
    found = {row.name: row.bytes for row in SCALED}
    assert found["mxfp8"] == 33 / 32
    assert found["mxfp4"] == 17 / 32
    assert found["nvfp4"] == 9 / 16
    assert found["flex16+5"] == 2.0
    assert [PowerOfTwo(*ends).bits for ends in ((-31, 0), (-128, 127), (3, 3))] == [5, 8, 0]
    assert Scope("block", 32) == Scope("block", 32)
    assert [Scope(*of).is_square for of in (("tile", 16, 16), ("tile", 16, 8), ("block", 16))] == [True, False, False]
    assert FloatFormat("other name", 5, 10) == FORMATS["fp16"]
    assert FloatFormat("no zero", 4, 0, Specials.FN, signed=False).subnormals is False


def test_a_format_of_another_name_prints_what_is_read_back() -> None:
    for row in (*FLOATS, FloatFormat("fp16", 8, 7), FloatFormat("mine", 8, 23), FloatFormat("fp32", 11, 52)):
        mine = FloatFormat(
            "mine", row.exponent_bits, row.mantissa_bits, row.specials, row.bias_offset, row.subnormals, row.signed
        )
        assert formats.parse(str(mine)) == mine == row
    widths = ((8, 7), (8, 10), (8, 23), (11, 52))
    assert [str(FloatFormat("mine", *bits)) for bits in widths] == ["e8m7", "e8m10", "fp32", "fp64"]


P3109 = [
    (width, precision, sign, domain)
    for width in range(3, 9)
    for sign, most in (("s", width - 1), ("u", width))
    for precision in range(1, most + 1)
    for domain in "ef"
]


@pytest.mark.parametrize(("width", "precision", "sign", "domain"), P3109, ids=lambda value: str(value))
def test_p3109_formats_are_gfloat_s_on_every_code(width: int, precision: int, sign: str, domain: str) -> None:
    name = f"binary{width}p{precision}{sign}{domain}"
    signedness = gfloat.types.Signedness.Signed if sign == "s" else gfloat.types.Signedness.Unsigned
    kind = gfloat.types.Domain.Extended if domain == "e" else gfloat.types.Domain.Finite
    info = gfloat.formats.format_info_p3109(width, precision, signedness, kind)
    format = formats.parse(name)
    assert isinstance(format, FloatFormat)
    assert formats.parse(str(format)) == format == formats.parse(name.upper())
    assert format.p3109_name == name
    assert (format.bits, format.bias, format.maximum, format.minimum) == (width, info.bias, info.max, info.min)
    assert (format.nan_code, format.has_infinity) == (info.code_of_nan, domain == "e")
    assert format.infinity_code == (info.code_of_posinf if domain == "e" else None)
    for code, value in enumerate(format.values()):
        expected = gfloat.decode_float(info, code).fval
        assert value == expected or (math.isnan(value) and math.isnan(expected)), code
        assert format.encode(value) == code


@pytest.mark.parametrize("other", ["fp16", "e4m3", "e4m3fn", "e4m3fnuzftz", "e4m3b11fnuz"])
def test_p3109_has_no_name_for_other_formats(other: str) -> None:
    format = formats.parse(other)
    assert isinstance(format, FloatFormat)
    assert format.p3109_name is None
