"""An explanation as plain data for machines: numbers, as text where no number of JSON is exact, and bits by field."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction

from lowp.casts import Cast
from lowp.explain.conversion import Conversion
from lowp.explain.exact import Rounded
from lowp.explain.flexpoint import FlexArithmetic, FlexNumber
from lowp.explain.numbers import Number
from lowp.explain.text import bits_text, decimal_text, power_text
from lowp.formats import FloatFormat, IntFormat, ScaledFormat


def as_json(value: object) -> object:
    """Return data for the json module: exact numbers as `_number` gives them, infinities and NaNs as text."""
    if isinstance(value, Fraction):
        return _number(value)
    if isinstance(value, Number) and value.is_finite:
        return -0.0 if value.negative and not value.magnitude else _number(value.value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (Number, Cast, FloatFormat, IntFormat, ScaledFormat)):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): as_json(item) for name, item in value.items()}
    if not is_dataclass(value):
        return value
    data = {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Rounded):
        data["bits"] = None if value.code is None else bits_text(value.code, value.format)
        more: tuple[str, ...] = ("guard", "round_bit", "sticky", "error", "error_ulp", "relative_error", "is_exact")
    elif isinstance(value, Conversion):
        more = ("result", "error", "error_ulp", "relative_error")
    elif isinstance(value, FlexNumber):
        more = ("value",)
    elif isinstance(value, FlexArithmetic):
        more = ("result",)
    else:
        more = ()
    return {**data, **{name: as_json(getattr(value, name)) for name in more}}


def _number(value: Fraction) -> int | float | str:
    """Return a number that fp64 or its decimal notation has exactly (0.4); otherwise text, such as 1/3 or 2^-1100."""
    if value.denominator == 1 and abs(value) < 1 << 53:
        return int(value)
    is_binary = value.denominator & (value.denominator - 1) == 0
    try:
        nearest = float(value)
    except OverflowError:
        return power_text(value)
    if value in (Fraction(nearest), Fraction(repr(nearest))):
        return nearest
    return power_text(value) if is_binary else decimal_text(value)
