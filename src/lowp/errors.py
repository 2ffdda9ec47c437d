"""The errors that lowp raises on purpose, and words of messages. Loads no torch.

Every text says what was given, what is allowed (the nearest first) and, if it is not obvious, what to do. The command
line prints a LowpError as one line; any other exception is a defect and shows its traceback.
"""

import difflib
from collections.abc import Collection, Iterable


class LowpError(Exception):
    """Base class of all errors of lowp."""


class InvalidInput(LowpError, ValueError):
    """An invalid value: out of range, malformed, or in contradiction with another value."""


class UnknownName(InvalidInput):
    """An unknown name of a format, preset, op or other item; the text lists similar names first."""


class Unavailable(LowpError, RuntimeError):
    """A feature that this machine, this version of torch or this kernel does not have; the text names alternatives."""


class NotWritten(LowpError, OSError):
    """A file that could not be written, for example because the disk is full; an existing file is unchanged."""


class Misuse(LowpError, RuntimeError):
    """A call in the wrong order, such as unscaling the same gradients twice."""


def brief(value: object, longest: int = 60) -> str:
    """Return a value for a message: its repr in one line, shortened if it is long (a tensor, a list)."""
    text = " ".join(repr(value).split())
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 seed, 2 seeds."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def near(given: str, allowed: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of the allowed names that resemble the given one, the nearest first; case is ignored.

    A name of which the given one is a prefix, or the reverse, counts as near at any length (sat, saturate).
    """
    by_lower: dict[str, str] = {}
    for name in allowed:
        by_lower.setdefault(name.lower(), name)
    typed = given.lower()
    begun = [name for name in by_lower if min(len(name), len(typed)) >= 3 and typed[: len(name)] == name[: len(typed)]]
    begun.sort(key=lambda name: abs(len(name) - len(typed)))
    matches = difflib.get_close_matches(typed, by_lower, n=count, cutoff=0.55)
    if matches and difflib.SequenceMatcher(None, typed, matches[0]).ratio() > 0.9:  # a slip: the others only distract
        matches = matches[:1]
    return [by_lower[name] for name in dict.fromkeys([*begun, *matches])][:count]


def check_name(kind: str, given: object, allowed: Collection[str]) -> None:
    """Raise UnknownName for a name that is none of those allowed."""
    if given not in allowed:
        raise UnknownName(unknown(kind, given, allowed))


def unknown(kind: str, given: object, allowed: Iterable[str], shown: Iterable[str] | None = None) -> str:
    """Return the text for an unknown name: similar names first, then the others in the table's order.

    `shown`, if given, are the only other names listed; it leaves out the aliases of a long table. unknown("format",
    "bf61", ["fp16", "bf16"]) is "unknown format 'bf61'; did you mean bf16? Also allowed: fp16".
    """
    names = list(dict.fromkeys(allowed))
    nearest = near(str(given), names)
    rest = ", ".join(name for name in dict.fromkeys(names if shown is None else shown) if name not in nearest)
    if not nearest:
        return f"unknown {kind} {brief(given, 200)}; allowed: {rest or 'nothing'}"
    listed = " or ".join(part for part in (", ".join(nearest[:-1]), nearest[-1]) if part)
    question = f"unknown {kind} {brief(given, 200)}; did you mean {listed}?"
    return f"{question} Also allowed: {rest}" if rest else question
