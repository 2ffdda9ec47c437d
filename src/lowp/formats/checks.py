"""Checks of the arguments of the constructors of formats and casts."""

from numbers import Integral, Real
from typing import Protocol

from lowp.errors import InvalidInput, brief

LONGEST = 300  # characters of a spelled format or cast; a longer text is refused without parsing


def spelling(kind: str, text: str) -> str:
    """Return the text, stripped and in lower case. Raises InvalidInput if it is too long to be a spelling."""
    if len(text) > LONGEST:
        raise InvalidInput(
            f"{text[:20]!r}... is not a {kind}: it has {len(text)} characters; at most {LONGEST} are allowed"
        )
    return text.strip().lower()


class Dtype(Protocol):
    """A dtype of torch, which is not imported here; its text names a format, if it is a floating one."""

    @property
    def is_floating_point(self) -> bool:
        """Whether it is one."""
        ...


def is_dtype(value: object) -> bool:
    """Whether a value is a dtype of torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def text(owner: str, value: object) -> None:
    """Raise TypeError unless `value` is text."""
    if not isinstance(value, str):
        raise TypeError(f"{owner} is text, not {brief(value)}")


def whole_number(owner: str, value: object) -> int:
    """Return `value` as an int. Raises TypeError unless it is a Python or NumPy integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{owner} is a whole number, not {brief(value)}")
    return int(value)


def real_number(owner: str, value: object) -> float:
    """Return `value` as a float. Raises TypeError if it is not a number, InvalidInput if it is beyond fp64."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner} is a number, not {brief(value)}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidInput(f"{owner} is beyond the largest number of fp64: give one below 2**1024") from None


def flag(owner: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner} is True or False, not {brief(value)}")


def instance(owner: str, value: object, *kinds: type) -> None:
    """Raise TypeError unless `value` is of one of the classes."""
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{owner} is a {names}, not {brief(value)}")
