"""How a loss is scaled, a description. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from lowp.errors import InvalidInput, check_name


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled before backward, a description; `lowp.scaling.loss_scale` moves the scale by it.

    Not at all, by a constant, or dynamically between `floor` and `ceiling`.

    Dynamic: halved (`backoff`) at a non-finite gradient, doubled (`growth`) after `interval` good steps in a row
    (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). All scales are finite and positive. With `search` the
    first backward finds the scale to begin with, `initial` or smaller, so that no step is lost to the search.
    """

    kind: str = "none"
    initial: float = 1.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**40
    hysteresis: int = 1
    search: bool = False

    KINDS = ("none", "static", "dynamic")

    def __post_init__(self) -> None:
        check_name("loss scale", self.kind, self.KINDS)
        if not 0 < self.floor <= self.initial <= self.ceiling < float("inf"):
            raise InvalidInput(
                f"loss scale {self.initial}: it must be finite and lie between its floor {self.floor} and its ceiling "
                f"{self.ceiling}"
            )

    @classmethod
    def parse(cls, text: str | float | LossScale) -> LossScale:
        """Read ``none``, ``dynamic``, ``dynamic(1024)`` (with that initial scale), or a number (a static scale)."""
        if isinstance(text, LossScale):
            return text
        word = str(text).strip().lower()
        if word in ("none", "off", "1", "1.0"):
            return cls()
        if word == "dynamic":
            return DYNAMIC
        inner = word[8:-1] if word.startswith("dynamic(") and word.endswith(")") else word
        try:
            scale = float(inner)
        except ValueError:
            raise InvalidInput(
                f"loss scale {text!r} is not valid: give none, a number such as 128, dynamic, or dynamic(1024)"
            ) from None
        if not 0 < scale < float("inf"):
            raise InvalidInput(f"loss scale {text!r}: give a finite number above zero, for example 128")
        if inner is not word:
            return cls("dynamic", scale, floor=min(1.0, scale))
        return cls("static", scale, floor=min(1.0, scale))

    def __str__(self) -> str:
        if self.kind == "dynamic":
            return "dynamic" if self.search else f"dynamic({_shortest(self.initial)})"
        return "none" if self.kind == "none" else _shortest(self.initial)


def _shortest(number: float) -> str:
    """Return the shortest text that reads back as the same number: 1048576, 0.1."""
    return repr(float(number)).removesuffix(".0")


DYNAMIC = LossScale("dynamic", 2.0**16, search=True)
