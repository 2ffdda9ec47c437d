"""An explanation as plain data for machines: exact numbers as text, bits by field."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction

from lowp.casts import Cast
from lowp.explain.conversion import Conversion
from lowp.explain.exact import Rounded
from lowp.explain.flexpoint import FlexArithmetic, FlexNumber
from lowp.explain.numbers import Number
from lowp.explain.text import bits_text, decimal_text
from lowp.formats import FloatFormat, IntFormat, ScaledFormat


def as_json(value: object) -> object:
    """Return data for the json module; exact numbers become text (``"1.12109375"``, ``"1/3"``)."""
    if isinstance(value, Fraction):
        return decimal_text(value)
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
