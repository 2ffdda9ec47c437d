"""Enumerations whose members are texts, and print as these (enum.StrEnum, which Python 3.10 does not have)."""

from __future__ import annotations

from enum import Enum

__all__ = ["TextEnum"]


class TextEnum(str, Enum):
    """A member equals its text, and prints as it."""

    def __str__(self) -> str:
        return str(self.value)
