"""Helpers of the tests of explanations."""

from __future__ import annotations

from lowp.explain.numbers import bits_text


def bits(value: object) -> str:
    """Return the fields of the result of an explanation."""
    rounded = value.rounded if hasattr(value, "rounded") else value
    return bits_text(rounded.code, rounded.format)  # type: ignore[attr-defined]
