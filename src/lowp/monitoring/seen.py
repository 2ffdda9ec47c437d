"""What a monitor knows of a run on the host: the numbers of one look, and those that later looks are compared with."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

_LOSSES = 64
_FIRST = 3  # looks that say what a run was like at its beginning


@dataclass
class Sight:
    """One look, as numbers of the host: see `Look` for `numbers`. None marks what is not known."""

    step: int
    numbers: Mapping[str, Mapping[str, float]]
    losses: list[tuple[int, float]] = field(default_factory=list)  # those since the look before, by step
    scale: float | None = None
    skipped: int = 0  # steps since the look before that the scaler has skipped
    jump: tuple[float, float] | None = None  # two scales after one another, the second far larger
    steps: int = 1  # steps since the look before, the skipped ones included
    backwards: int = 1  # backward passes of this step
    adds_up: bool = False  # whether their losses were means that nothing divides
    suspects: list[str] = field(default_factory=list)  # weights that were not finite when the loss became so
    half: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    dtypes: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # of learning, by parameter
    left: list[str] = field(default_factory=list)  # parameters of the model that no optimizer holds any more
    resumed: int = 0  # steps that the optimizer had taken before this run
    is_fresh_scale: bool = False  # whether the loss scale has never been moved
    matrices: set[str] = field(default_factory=set)  # parameters of two dimensions and more
    saturated: dict[str, float] = field(default_factory=dict)  # shares of the writes since the look before, by site
    averages: dict[str, float] = field(default_factory=dict)  # shares that have not moved, by average
    apart: dict[str, tuple[int, float]] = field(default_factory=dict)  # parameters: the rank, and the difference
    compared: dict[str, float] = field(default_factory=dict)  # mean differences, see `Monitor.compare`

    @property
    def gradient(self) -> float | None:
        """The norm of all gradients together."""
        norms = self.numbers.get("gradient", {}).values()
        return math.sqrt(sum(norm * norm for norm in norms)) if norms else None

    @property
    def loss(self) -> float | None:
        """The latest loss."""
        return self.losses[-1][1] if self.losses else None


class History:
    """What was seen in earlier looks, as far as rules compare with it."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=_LOSSES)
        self.scale: float | None = None
        self.activations: dict[str, list[float]] = {}  # the first of each module
        self.weights: dict[str, float] = {}  # the root mean squares of the first look
        self.rates: dict[str, float] = {}  # the largest
        self.dtypes: dict[str, str] = {}
        self.reached: set[str] = set()  # parameters that have had a gradient
        self.scaled: deque[float] = deque(maxlen=_FIRST + 1)  # norms of all gradients times the loss scale
        self.skipped: deque[tuple[int, int]] = deque(maxlen=_LOSSES)
        self.saw_finite = -1  # the latest look in which all was finite
        self.origin = ""  # the layer in which it ended

    def add(self, seen: Sight) -> None:
        """Take in a look after the rules have judged it."""
        self.losses.extend(loss for _, loss in seen.losses if math.isfinite(loss))
        self.scale = seen.scale
        for path, size in seen.numbers.get("activation", {}).items():
            first = self.activations.setdefault(path, [])
            if len(first) < _FIRST:
                first.append(size)
        for name, size in seen.numbers.get("weight", {}).items():
            self.weights.setdefault(name, size)
        for name, rate in seen.rates.items():
            self.rates[name] = max(rate, self.rates.get(name, 0.0))
        self.dtypes.update(seen.dtypes)
        self.reached.update(name for name, norm in seen.numbers.get("gradient", {}).items() if norm)

    def first_activation(self, path: str) -> float | None:
        """The typical magnitude of a module's results at the beginning; None while that is not known."""
        first = self.activations.get(path, [])
        return statistics.median(first) if len(first) == _FIRST else None


def group_of(path: str) -> str:
    """Return the layer group of a module: its path up to the first number, or the first part of it."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
