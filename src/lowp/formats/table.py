"""The named formats, and the grammar of spelled formats."""

import re
from dataclasses import replace

from lowp.errors import InvalidInput, UnknownName, unknown
from lowp.formats import checks
from lowp.formats.checks import Dtype
from lowp.formats.scaled import Format, PowerOfTwo, ScaledFormat, Scope
from lowp.formats.types import FORMATS, MOST_EXPONENT_BITS, FloatFormat, IntFormat, Specials, usual_bias


def _rows() -> dict[str, Format]:
    e8m0 = FloatFormat("e8m0", 8, 0, Specials.FN, signed=False)
    e5m2 = FloatFormat("e5m2", 5, 2)
    e4m3fn = FloatFormat("e4m3fn", 4, 3, Specials.FN)
    e3m2 = FloatFormat("e3m2", 3, 2, Specials.FINITE)
    e2m3 = FloatFormat("e2m3", 2, 3, Specials.FINITE)
    e2m1 = FloatFormat("e2m1", 2, 1, Specials.FINITE)
    fp32 = FloatFormat("fp32", 8, 23)
    i16, i16s, i8, i8s, i4s = (
        IntFormat(f"i{n}{'s' * s}", n, bool(s)) for n, s in ((16, 0), (16, 1), (8, 0), (8, 1), (4, 1))
    )
    tensor, row, block = Scope("tensor"), Scope("row"), Scope("block", 32)
    rows: list[Format] = [
        FloatFormat("fp64", 11, 52),
        fp32,
        FloatFormat("tf32", 8, 10),
        FloatFormat("fp16", 5, 10),
        FloatFormat("bf16", 8, 7),
        FloatFormat("bf16-tpu", 8, 7, subnormals=False),
        e5m2,
        e4m3fn,
        FloatFormat("e5m2fnuz", 5, 2, Specials.FNUZ),
        FloatFormat("e4m3fnuz", 4, 3, Specials.FNUZ),
        e8m0,
        e3m2,
        e2m3,
        e2m1,
        ScaledFormat("mxfp8", e4m3fn, e8m0, block),
        ScaledFormat("mxfp8-e5m2", e5m2, e8m0, block),
        ScaledFormat("mxfp6", e2m3, e8m0, block),
        ScaledFormat("mxfp6-e3m2", e3m2, e8m0, block),
        ScaledFormat("mxfp4", e2m1, e8m0, block),
        # OCP MX 1.0 section 5.3.4: the element of MXINT8 is a fixed-point number with an implied scale of 2**-6
        ScaledFormat("mxint8", i8s, PowerOfTwo(-133, 121), block),
        ScaledFormat("nvfp4", e2m1, e4m3fn, Scope("block", 16), outer=fp32),
        ScaledFormat("if4", e2m1, e4m3fn, Scope("block", 16), outer=fp32, other=i4s),
        ScaledFormat("flex16+5", i16, PowerOfTwo(-31, 0), tensor),
        ScaledFormat("dfp16", i16s, PowerOfTwo(-128, 127), tensor),
        ScaledFormat("int16", i16s, fp32, row),
        ScaledFormat("int8", i8s, fp32, row),
        ScaledFormat("int8-affine", i8, fp32, row, affine=True),
        ScaledFormat("int4", i4s, fp32, block),
        ScaledFormat("ternary", IntFormat("i2s", 2, symmetric=True), fp32, row),
        ScaledFormat("binary", IntFormat("i1", 1), fp32, row),
    ]
    return {row_.name: row_ for row_ in rows}


FORMATS.update(_rows())

# aliases of the rows above
ALIASES = {
    **{"float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "single": "fp32"},
    **{"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "tensorfloat32": "tf32"},
    **{"float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz", "float8_e5m2fnuz": "e5m2fnuz"},
    **{"float6_e3m2fn": "e3m2", "float6_e2m3fn": "e2m3", "float4_e2m1fn": "e2m1"},
    **{"float8_e8m0fnu": "e8m0", "flexpoint": "flex16+5", "flex16": "flex16+5", "dfp-16": "dfp16"},
}

# names that give only a width, with the formats of that width, bare or with a block scale
_WIDTHS = {
    **dict.fromkeys(("fp8", "float8"), "e4m3fn, e5m2, mxfp8"),
    **dict.fromkeys(("fp6", "float6"), "e3m2, e2m3, mxfp6"),
    **dict.fromkeys(("fp4", "float4"), "e2m1, mxfp4, nvfp4, if4"),
}

_FLOAT = re.compile(r"(u?)e(\d+)m(\d+)(?:b(-?\d+))?(ieee|fnuz|fn|finite|nuz)?(ftz)?", re.ASCII)
_P3109 = re.compile(r"binary(\d+)p(\d+)([su])([ef])", re.ASCII)
_INT = re.compile(r"i(\d+)(s?)", re.ASCII)
_SIZES = re.compile(r"(?:(\d+)x)?(\d+)", re.ASCII)
_POWER = re.compile(r"2\^(-?\d+)\.\.(-?\d+)", re.ASCII)


def parse(text: str | Format | Dtype) -> Format:
    """Return a format by its name (``fp16``), its spelling, or a floating dtype of torch (``torch.float16``).

    Floating point: ``eXmY`` (``ueXmY`` without a sign), then optionally ``bN`` (bias), one of ``fn fnuz nuz finite``
    (specials; IEEE without), ``ftz`` (no subnormals): ``e5m7``, ``e4m3b11fnuz``, ``e8m7ftz``. X is 1 to 11, Y 0 to 52,
    the range inside that of fp64. IEEE P3109 by its own names: ``binary8p3se`` (width, precision, signed or unsigned,
    extended or finite) is ``e5m2nuz``. Integers without a scale: ``iN``, ``iNs`` (symmetric). Shared scale:
    ``ELEMENT@SCALE/SCOPE``, with SCALE a float format or ``2^-31..0`` and SCOPE ``tensor``, ``row``, ``channel``, a
    block's length or a tile's rows and columns; ``/affine`` adds a zero point: ``e4m3fn@e8m0/32``, ``i8s@fp32/row``,
    ``e2m1@e4m3fn@fp32/16x16``, ``i8@fp32/tensor/affine``. ``e2m1+i4s@e4m3fn@fp32/16``: blocks of either element.

    Raises ValueError, with similar names, for any other text; TypeError if `text` is neither text nor a format.
    """
    if isinstance(text, (FloatFormat, IntFormat, ScaledFormat)):
        return text
    if not isinstance(text, str) and not checks.is_dtype(text):
        raise TypeError(f"a format must be text (fp16, e5m7) or one of FORMATS, not {type(text).__name__}")
    name = checks.spelling("format", str(text))
    name = ALIASES.get(name.removeprefix("torch."), name)
    if name in FORMATS:
        return FORMATS[name]
    if "@" in name:
        return _parse_scaled(name)
    if match := _FLOAT.fullmatch(name):
        return _parse_float(name, match)
    if match := _P3109.fullmatch(name):
        return _parse_p3109(name, match)
    if match := _INT.fullmatch(name):
        return IntFormat(name, int(match[1]), bool(match[2]))
    if name in _WIDTHS:
        raise UnknownName(f"{text} is a width, which several formats have: give one of {_WIDTHS[name]}")
    if name == "bf16-trunc":
        raise InvalidInput(
            "bf16-trunc is a cast, not a format: give bf16 here, or use bf16-trunc where a cast is allowed"
        )
    raise UnknownName(
        unknown("format", str(text), [*FORMATS, *ALIASES], shown=FORMATS)
        + "; or spell one out, such as e5m7, e4m3b11fnuz, i6s, e2m1@e8m0/32"
    )


def _parse_float(name: str, match: re.Match[str]) -> FloatFormat:
    unsigned, exponent, mantissa, bias, suffix, flush = match.groups()
    exponent_bits, specials, offset = int(exponent), Specials(suffix or "ieee"), 0
    if bias is not None and exponent_bits <= MOST_EXPONENT_BITS:  # a larger number is refused by FloatFormat
        offset = int(bias) - usual_bias(exponent_bits, specials)
    return FloatFormat(name, exponent_bits, int(mantissa), specials, offset, not flush, not unsigned)


def _parse_p3109(name: str, match: re.Match[str]) -> FloatFormat:
    """Read an IEEE P3109 name: the precision includes the hidden bit, and the exponent takes the remaining bits."""
    width, precision, signed = int(match[1]), int(match[2]), match[3] == "s"
    exponent_bits = width - signed - (precision - 1)
    if precision < 1 or exponent_bits < 1:
        raise InvalidInput(
            f"{name} is not possible: P3109's binaryKpP takes a precision P from 1 to K (unsigned) or K - 1 (signed), "
            "for example binary8p3se"
        )
    specials = Specials.NUZ if match[4] == "e" else Specials.FNUZ
    spelled = f"{'' if signed else 'u'}e{exponent_bits}m{precision - 1}{specials}"
    found = parse(spelled)
    assert isinstance(found, FloatFormat)
    return replace(found, name=name)


def _parse_scaled(name: str) -> ScaledFormat:
    body, *tail = name.split("/")
    element_text, *scale_texts = body.split("@")
    if not tail or len(tail) > 2 or (len(tail) == 2 and tail[1] != "affine") or len(scale_texts) > 2:
        raise InvalidInput(
            f"{name} is not ELEMENT@SCALE/SCOPE, such as e4m3fn@e8m0/32, i8s@fp32/row, i16@2^-31..0/tensor"
        )
    element_text, plus, other_text = element_text.partition("+")
    element, other = parse(element_text), parse(other_text) if plus else None
    if isinstance(element, ScaledFormat):
        raise InvalidInput(f"{name}: the element {element} already has a shared scale: give a float or integer format")
    if not isinstance(other, (IntFormat, type(None))):
        raise InvalidInput(f"{name}: the other element of a block is an integer format, such as i4s, not {other}")
    if match := _POWER.fullmatch(scale_texts[0]):
        scale: FloatFormat | PowerOfTwo = PowerOfTwo(int(match[1]), int(match[2]))
    else:
        scale = _scale_format(name, scale_texts[0])
    outer = _scale_format(name, scale_texts[1]) if len(scale_texts) == 2 else None
    sizes = _SIZES.fullmatch(tail[0])
    if sizes is None:
        scope = Scope(tail[0])
    else:
        scope = Scope("tile" if sizes[1] else "block", int(sizes[2]), int(sizes[1] or 0))
    return ScaledFormat(name, element, scale, scope, outer, affine=len(tail) == 2, other=other)


def _scale_format(name: str, text: str) -> FloatFormat:
    scale = parse(text)
    if not isinstance(scale, FloatFormat):
        raise InvalidInput(f"{name}: a scale is a float format (e8m0, fp32) or a power of two (2^-31..0), not {text}")
    return scale
