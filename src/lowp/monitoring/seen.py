"""What a monitor knows of a run on the host: the numbers of one look, and those that later looks are compared with."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_SKIPPED = 64  # looks whose skipped steps are counted
_FIRST = 3  # looks that say what a run was like at its beginning


class Spike(NamedTuple):
    """A loss that is far above the latest ones: its step, and the largest and the median of those."""

    step: int
    loss: float
    largest: float
    usual: float


@dataclass
class Sight:
    """One look, as numbers of the host: see `Look` for `numbers`. None marks what is not known."""

    step: int
    numbers: Mapping[str, Mapping[str, float]]
    losses: list[tuple[int, float]] = field(default_factory=list)  # those since the look before, by step
    are_late: bool = False  # whether losses have come from a device
    spikes: list[Spike] = field(default_factory=list)
    scale: float | None = None
    skipped: int = 0  # steps since the look before that the scaler has skipped
    jump: tuple[float, float] | None = None  # two scales after one another, the second far larger
    passed: int = 1  # steps since the look before
    steps: int = 1  # those of them whose losses were seen, the skipped ones included
    backwards: int = 1  # backward passes of this step
    adds_up: bool = False  # whether their losses were means that nothing divides
    suspects: list[str] = field(default_factory=list)  # weights that were not finite when the loss became so
    half: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    is_kept: Callable[[str], bool] = lambda name: False  # whether an optimizer keeps a parameter in fp32 elsewhere
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
        self.activations: dict[str, list[float]] = {}  # the first of each module
        self.weights: dict[str, float] = {}  # the root mean squares of the first look
        self.rates: dict[str, float] = {}  # the largest
        self._rates: dict[str, float] = {}  # the latest
        self.dtypes: dict[str, str] = {}
        self.has_learned = False  # whether a parameter has had a gradient
        self.scaled: deque[tuple[float, float]] = deque(maxlen=_FIRST + 1)  # norms of all gradients, and loss scales
        self.skipped: deque[tuple[int, int]] = deque(maxlen=_SKIPPED)
        self.saw_finite = -1  # the latest look in which all was finite
        self.origin = ""  # the layer in which it ended

    def add(self, seen: Sight) -> None:
        """Take in a look after the rules have judged it."""
        for path, size in seen.numbers.get("activation", {}).items():
            first = self.activations.setdefault(path, [])
            if len(first) < _FIRST:
                first.append(size)
        self.weights = {**seen.numbers.get("weight", {}), **self.weights}
        if seen.rates != self._rates:
            self._rates = seen.rates
            self.rates.update((name, max(rate, self.rates.get(name, 0.0))) for name, rate in seen.rates.items())
        self.dtypes = seen.dtypes
        self.has_learned = self.has_learned or any(seen.numbers.get("gradient", {}).values())

    def first_activation(self, path: str) -> float | None:
        """The typical magnitude of a module's results at the beginning; None while that is not known."""
        first = self.activations.get(path, [])
        return statistics.median(first) if len(first) == _FIRST else None


def group_of(path: str) -> str:
    """Return the layer group of a module: its path up to the first number, or the first part of it."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
