"""Enumerations whose members are texts and print as these texts (enum.StrEnum, which Python 3.10 lacks)."""

from enum import Enum


class TextEnum(str, Enum):
    """A member equals its text and prints as its text."""

    def __str__(self) -> str:
        return str(self.value)
