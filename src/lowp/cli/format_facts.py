"""The properties of a format, as numbers for tables and JSON, and as lines of text."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

from lowp.casts import Cast, possible_overflows
from lowp.cost import SOURCE, cost
from lowp.explain.numbers import Number, bits_text, code_of_value, decimal_text, line, power_text
from lowp.explain.numbers import brief as brief_text
from lowp.formats import FORMATS, FloatFormat, Format, IntFormat, PowerOfTwo, ScaledFormat, Scope, Specials

SOURCES = {
    **dict.fromkeys(("fp64", "fp32", "fp16"), "IEEE 754-2019"),
    "tf32": "NVIDIA A100 white paper 2020",
    "bf16": "Google; Kalamkar et al. 2019, arXiv 1905.12322",
    "bf16-tpu": "Google Cloud TPU documentation",
    **dict.fromkeys(("e5m2", "e4m3fn"), "OCP OFP8 1.0"),
    **dict.fromkeys(("e5m2fnuz", "e4m3fnuz"), "Noune et al. 2022, arXiv 2206.02915"),
    **dict.fromkeys(
        ("e8m0", "e3m2", "e2m3", "e2m1", "mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp6-e3m2", "mxfp4", "mxint8"), "OCP MX 1.0"
    ),
    "nvfp4": "NVIDIA Blackwell; NVIDIA 2025, arXiv 2509.25149",
    "if4": "Cook et al. 2026, arXiv 2603.28765",
    "flex16+5": "Köster et al. 2017, arXiv 1711.02213",
    "dfp16": "Das et al. 2018, arXiv 1802.00930",
    **dict.fromkeys(("int8", "int16", "int4"), "Jacob et al. 2018, arXiv 1712.05877 (symmetric)"),
    "int8-affine": "Jacob et al. 2018, arXiv 1712.05877",
    "ternary": "Li et al. 2016, arXiv 1605.04711",
    "binary": "Rastegari et al. 2016, arXiv 1603.05279",
}
_SPECIALS = {
    Specials.IEEE: "the top exponent holds infinity (mantissa 0) and NaN (any other)",
    Specials.FN: "no infinity; all ones is NaN",
    Specials.FNUZ: "no infinity, no -0: its code is the one NaN; the bias is one larger",
    Specials.NUZ: "no -0: its code is the one NaN; the largest code of each sign is infinity; the bias is one larger",
    Specials.FINITE: "none: every code is a number",
}
_SCOPES = {"tensor": "the tensor", "row": "a row (last dimension)", "channel": "a channel (first index)"}


def source(format: Format) -> str:
    """Return the source that defines the format; "spelled out" for a format without a name."""
    return SOURCES.get(format.name, "spelled out") if FORMATS.get(format.name) == format else "spelled out"


def scope_words(scope: Scope) -> str:
    """Return a description of the numbers that share a scale."""
    return _SCOPES.get(scope.kind, f"a {'tile' if scope.rows else 'block'} of {scope}")


def brief(value: object) -> str:
    """Return a limit in few characters: a number, a word, or a dash for None."""
    if isinstance(value, Fraction):
        return brief_text(value, 6) if value.denominator == 1 and value < 10**6 else brief_text(value, 3)
    return "-" if value is None else str(value)


def _scales(format: ScaledFormat) -> tuple[Fraction, Fraction]:
    """Return the smallest and the largest scale."""
    if isinstance(format.scale, PowerOfTwo):
        return Fraction(2) ** format.scale.min_exponent, Fraction(2) ** format.scale.max_exponent
    factors = [format.scale, *([format.outer] if format.outer else [])]
    low, high = ([Fraction(getattr(one, name)) for one in factors] for name in ("smallest", "maximum"))
    return prod(low, start=Fraction(1)), prod(high, start=Fraction(1))


@dataclass(frozen=True)
class Limits:
    """The exact limits of a format, including a shared scale; None for a limit that does not exist.

    `ulp_at_1` is None if it depends on the shared scale.
    """

    smallest: Fraction
    smallest_subnormal: Fraction | None
    smallest_normal: Fraction | None
    maximum: Fraction
    minimum: Fraction
    ulp_at_1: Fraction | None


def limits(format: Format) -> Limits:
    """Return the limits of a format, over all values of a shared scale."""
    if isinstance(format, IntFormat):
        unit = Fraction(1)
        return Limits(unit, None, None, Fraction(format.maximum), Fraction(format.minimum), unit)
    if isinstance(format, FloatFormat):
        subnormal = format.smallest_subnormal
        return Limits(
            Fraction(format.smallest),
            None if subnormal is None else Fraction(subnormal),
            Fraction(format.smallest_normal),
            Fraction(format.maximum),
            Fraction(format.minimum),
            Fraction(format.ulp(1.0)),
        )
    (low, high), element = _scales(format), limits(format.element)
    subnormal_, normal = (None if x is None else x * low for x in (element.smallest_subnormal, element.smallest_normal))
    return Limits(element.smallest * low, subnormal_, normal, element.maximum * high, element.minimum * high, None)


def maximum_error(format: Format) -> str:
    """Return the maximum error of rounding to nearest: relative for normal floats, half a unit for integers."""
    element = format.element if isinstance(format, ScaledFormat) else format
    if isinstance(element, IntFormat):
        return "half unit" if element.bits > 1 else "sign only"
    return f"2^-{element.precision} {percent(element)}"


def percent(element: FloatFormat) -> str:
    """Return the largest relative error in percent with two digits, without an exponent down to fp32's 0.0000060%."""
    value = element.relative_error * 100
    if 1e-6 < value < 1e-4:
        return f"{value:.7f}%"
    return f"{value:.3g}%" if value > 1 else f"{value:.2g}%"


def facts(format: Format) -> dict[str, Any]:
    """Return the properties of a format, as in its row of `lowp formats`."""
    element = format.element if isinstance(format, ScaledFormat) else format
    kind = "scaled" if isinstance(format, ScaledFormat) else "integer" if isinstance(format, IntFormat) else "float"
    return {
        "name": str(format),
        "layout": format.spelling,
        "kind": kind,
        "bits": format.bits,
        "bytes": format.bytes,
        "limits": limits(format),
        "maximum_error": maximum_error(format),
        "decimal_digits": element.decimal_digits,
        "cost": cost(format),
    }


def in_full(cast: Cast) -> Iterator[str]:
    """Yield a heading, and the properties of a format, one per line."""
    format, element = cast.format, cast.element
    yield f"{format}" if str(cast) == str(format) else f"{format}, cast as {cast}"
    if isinstance(format, ScaledFormat):
        yield from _scaled_lines(format)
    if isinstance(element, FloatFormat):
        yield from _float_lines(element)
    else:
        yield from _integer_lines(element)
    possible = [str(overflow) for overflow in possible_overflows(format)]
    yield line("overflow", f"{', '.join(possible)}; here {cast.overflow}")
    yield line("rounding", f"{cast.rounding}; another as in {format}:stochastic")
    yield from _cost_lines(format)
    yield line("source", source(format))
    for index, value in enumerate(_example_values(element)):
        text = str(value) if len(str(value)) < 24 else brief_text(value.value, 6)
        yield line("" if index else "examples", f"{bits_text(code_of_value(value, element), element)}   {text}")


def _scaled_lines(format: ScaledFormat) -> Iterator[str]:
    scale = format.scale
    kind = "a power of two, exponent" if isinstance(scale, PowerOfTwo) else "a number of"
    size = f"{scale.min_exponent} .. {scale.max_exponent}" if isinstance(scale, PowerOfTwo) else str(scale)
    yield line("spelling", format.spelling)
    yield line(
        "value",
        "(element - zero point) x scale" if format.affine else "element x scale" + " x outer" * bool(format.outer),
    )
    yield line("scale", f"{kind} {size}, {format.scale_bits} bits, shared by {scope_words(format.scope)}")
    if format.outer:
        yield line("outer", f"one more scale for the tensor, {format.outer}")
    bounds = limits(format)
    for label, value in (("smallest", bounds.smallest), ("maximum", bounds.maximum)):
        yield line(label, f"{brief_text(value, 6)} = {power_text(value)} over all scales")
    yield line(
        "bytes", f"{format.bytes:g} a number" + ", its share of the scale included" * bool(format.scope.elements)
    )
    if other := format.other:
        ratio = f"{format.element.maximum:g} / {other.maximum}"
        yield line(
            "or", f"{other} x scale x outer x {ratio} where that has a smaller error; the scale is then negative"
        )
    yield f"  element {format.element}"


def _maximum_text(format: FloatFormat) -> str:
    """The largest value with its power of two: ``(2 - 2^-10) x 2^15``."""
    significand = Fraction(format.maximum) / Fraction(2) ** format.max_exponent
    below = 2 - significand
    return f"2^{format.max_exponent}" if below == 1 else f"(2 - {power_text(below)}) x 2^{format.max_exponent}"


def _float_lines(format: FloatFormat) -> Iterator[str]:
    sign = "1 sign, " if format.signed else "no sign, "
    yield line(
        "bits",
        f"{format.bits}: {sign}{format.exponent_bits} exponent, {format.mantissa_bits} mantissa ({format.spelling})",
    )
    yield line("bias", f"{format.bias}; exponents {format.min_exponent} .. {format.max_exponent}")
    unsigned = {
        Specials.FNUZ: "no infinity; all ones is NaN; the bias is one larger",
        Specials.NUZ: "all ones is NaN, and the code below it infinity; the bias is one larger",
    }
    yield line("specials", (_SPECIALS if format.signed else {**_SPECIALS, **unsigned})[format.specials])
    if format.p3109_name is not None:
        yield line("P3109", f"{format.p3109_name}, in drafts of IEEE P3109")
    flushed = "no: |x| < 2^e_min becomes a zero of its sign before rounding"
    without = flushed if format.mantissa_bits and not format.subnormals else "no: no mantissa"
    yield line("subnormals", "yes" if format.smallest_subnormal is not None else without)
    largest = decimal_text(Fraction(format.maximum))
    yield line("maximum", f"{largest if len(largest) < 50 else format.maximum} = {_maximum_text(format)}")
    yield line("normal", f"{_both(Fraction(format.smallest_normal))}, the smallest")
    if format.smallest_subnormal is not None:
        yield line("subnormal", f"{_both(Fraction(format.smallest_subnormal))}, the smallest")
    yield line("ulp at 1", _both(Fraction(format.ulp(1.0))))
    yield line("max error", f"{_both(Fraction(format.relative_error))} = {percent(format)} of a normal number")
    yield line("digits", f"{format.decimal_digits:.2f} decimal")


def _integer_lines(format: IntFormat) -> Iterator[str]:
    yield line("bits", f"{format.bits}, two's complement" + ", symmetric" * format.symmetric)
    yield line("range", f"{format.minimum} .. {format.maximum}")
    yield line("unit", "1; rounding to nearest is off by half a unit at most" if format.bits > 1 else "the sign alone")
    yield line("digits", f"{format.decimal_digits:.2f} decimal")


def _both(value: Fraction) -> str:
    return (
        f"{power_text(value)} = {decimal_text(value) if value.denominator.bit_length() < 30 else brief_text(value, 6)}"
    )


def _cost_lines(format: Format) -> Iterator[str]:
    costs = cost(format)
    square = f"{costs.significand_bits}^2 = {costs.significand_bits**2}"
    share = f"{costs.relative_multiplier_area:.3g} of fp32's 24^2 = 576"
    yield line("multiplier", f"{square} by the square of the significand,")
    yield line("", share)
    yield line("energy", f"multiply {costs.multiply_energy}, add {costs.add_energy}")
    yield line("", ", ".join(f"read from {name} {energy}" for name, energy in costs.read_energy.items()))
    yield line("area", f"multiply {costs.multiply_area}, add {costs.add_area}")
    yield line("", f"estimates: {SOURCE}; ~ is interpolated (or extrapolated) by that square")


def _example_values(element: FloatFormat | IntFormat) -> Iterator[Number]:
    if isinstance(element, IntFormat):
        numbers: list[float] = [element.minimum, -1, 0, 1, element.maximum]
        yield from (Number.of(int(x)) for x in dict.fromkeys(numbers) if x or element.has_zero)
        return
    if element.has_zero:
        yield Number(Fraction(0))
    if element.has_minus_zero:
        yield Number(Fraction(0), negative=True)
    finite = [element.smallest, element.smallest_normal, 1.0, 1.0 + element.ulp(1.0), element.maximum]
    low, high = element.smallest, element.maximum
    yield from (Number.of(float(x)) for x in dict.fromkeys(finite) if low <= x <= high)
    if element.has_infinity:
        yield Number(Fraction(0), special="inf")
    if element.has_nan:
        yield Number(Fraction(0), special="nan")
