"""Which steps are looked at, and how much of the model in each: as far as the time allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lowp.errors import InvalidInput

_SHARE, _ALLOWANCE = 0.03, 0.25  # of the time, and seconds: the default
_EVERY = 50
_MARGIN = 1.5
_MOST_WRONG = 4.0  # times a guess: a first look in a region takes longer than those after it


def is_sampled(step: int) -> bool:
    """Whether a step is looked at where there is no budget: 0, the powers of two to 32, and every fiftieth."""
    return step == 0 or (step < _EVERY and step & (step - 1) == 0) or step % _EVERY == 0


@dataclass
class Budget:
    """The time that profiling itself takes, measured, and held to a share of the time of the training.

    `own` counts every second spent for the profiler, in its code or because of it; no look is begun that costs more
    than there is `room` for. The first `allowance` seconds are free, so that a training of a few seconds is seen, too.
    """

    share: float | None = _SHARE
    allowance: float = 0.0
    own: float = 0.0
    guarding: float = 0.0  # of `own`, what went to guarding steps, and to being called in those that were not looked at
    idle: float = 0.0  # of `own`, what went to counting steps of which nothing is kept
    clock: Callable[[], float] = field(default=lambda: time.perf_counter(), repr=False)
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None

    @classmethod
    def parse(cls, text: str | float | None) -> Budget:
        """Read a budget: ``3%`` or 0.03; None or ``none`` for no limit; ``auto`` for 3 % or a quarter of a second.

        Of these two, ``auto`` takes the larger. Raises InvalidInput for anything else.
        """
        word = "none" if text is None else str(text).strip().lower()
        if word == "none":
            return cls(None)
        if word == "auto":
            return cls(_SHARE, _ALLOWANCE)
        try:
            share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 < share <= 10:
            raise InvalidInput(
                f"max_overhead={text!r} is not valid: give a share of the time such as 3% or 0.03, auto, or none"
            )
        return cls(share)

    def spent(self, seconds: float, looking: bool) -> None:
        """Count time that was spent for the profiler."""
        self.own += seconds
        if not looking:
            self.guarding += seconds

    def pass_by(self, seconds: float) -> None:
        """Count what a step cost of which nothing is kept."""
        self.own += seconds
        self.idle += seconds

    def account(self) -> dict[str, float | None]:
        """Return the limit and the seconds spent, by their names in a record."""
        return {
            "max_overhead": self.share,
            "allowance": self.allowance,
            "overhead": self.overhead,
            "own_seconds": self.own,
            "every_step_seconds": self.guarding + self.idle,
            "total_seconds": self.total,
        }

    def end(self) -> None:
        """Stop the clock."""
        self.ended = self.clock()

    @property
    def room(self) -> float:
        """Seconds that may be spent now; infinite without a limit."""
        return math.inf if self.share is None else self._earned - self.own

    @property
    def _earned(self) -> float:
        """Seconds that may have been spent until now."""
        return max((self.share or 0.0) * self.training, self.allowance)

    def may_guard(self, part: float) -> bool:
        """Whether guarding has taken no more than a part of what idle steps leave of the budget."""
        return self.share is None or self.guarding <= part * (self._earned - self.idle)

    @property
    def total(self) -> float:
        """Seconds since the beginning."""
        return (self.clock() if self.ended is None else self.ended) - self.started

    @property
    def training(self) -> float:
        """Seconds of the training itself."""
        return max(self.total - self.own, 1e-9)

    @property
    def overhead(self) -> float:
        """The share that was added to the time of the training."""
        return self.own / self.training


class Rounds:
    """Whose turn it is: a look goes round all modules, in each step as many of them as there is time for.

    A round begins at each step that `is_sampled`, or as soon after it as the round before has ended. What a module
    costs is guessed before its first turn, corrected by how far the guesses for others were wrong.
    """

    def __init__(self) -> None:
        self.taken = 0  # rounds that were completed
        self._costs: dict[str, float] = {}  # seconds; guesses are in units of `_factor`
        self._measured: set[str] = set()
        self._guessed = self._found = 0.0  # seconds of the first turns
        self._waiting: list[str] = []
        self._due = False
        self._asked = -1  # the last step that was asked about

    def add(self, module: str, seconds: float) -> None:
        """Let a module take part from the next round on; `seconds` is what a look at it may cost."""
        self._costs.setdefault(module, seconds)

    def cost(self, module: str) -> float:
        """What a look at a module costs, in seconds, as far as it is known; where it is guessed, rather too much."""
        factor = _MARGIN * (min(self._found / self._guessed, _MOST_WRONG) if self._guessed else 1.0)
        return self._costs[module] * (1.0 if module in self._measured else factor)

    @property
    def whole(self) -> float:
        """What a look at every module costs, in seconds."""
        return sum(map(self.cost, self._costs))

    @property
    def done(self) -> float:
        """How many rounds were made, the part of the present one included."""
        begun = len(self._costs) - len(self._waiting) if self._waiting else 0
        return self.taken + begun / max(len(self._costs), 1)

    @property
    def modules(self) -> int:
        """How many modules there are."""
        return len(self._costs)

    @property
    def seen(self) -> int:
        """How many modules have had a turn."""
        return len(self._measured)

    def turn(self, step: int, room: float) -> list[str]:
        """Return the modules to look at in this step, for which there are `room` seconds; none where it is no turn."""
        self._due = self._due or any(map(is_sampled, range(max(self._asked + 1, step - _EVERY), step + 1)))
        self._asked = step
        if not self._waiting and self._due:
            self._due, self._waiting = False, _spread(list(self._costs))
        chosen: list[str] = []
        new = 0
        for module in self._waiting:
            room -= self.cost(module)
            new += module not in self._measured
            # guesses about many are trusted only after some were right
            if room < 0 or (math.isfinite(room) and new > max(len(self._measured), 1)):
                break
            chosen.append(module)
        return chosen

    def idle_steps(self, step: int) -> int:
        """The next step in which it is anyone's turn, 0 where one waits for its turn already."""
        return 0 if self._waiting else next(one for one in range(step, step + _EVERY + 1) if is_sampled(one))

    def looked(self, modules: list[str], seconds: float) -> None:
        """Note what a look at these modules has cost, which were the next in turn."""
        shares = {one: seconds * self.cost(one) for one in modules}
        whole = sum(self.cost(one) for one in modules)
        for one, share in shares.items():
            found = share / whole if whole else seconds / len(modules)
            if one and one not in self._measured:  # what runs outside of all modules is like none of them
                self._guessed, self._found = self._guessed + self._costs[one], self._found + found
            self._costs[one] = found
        self._measured.update(modules)
        self._waiting = self._waiting[len(modules) :]
        self.taken += not self._waiting


def _spread(modules: list[str]) -> list[str]:
    """Neighbours apart, so that the part of a round that a short run has time for is of the whole model."""
    golden = (math.sqrt(5) - 1) / 2
    return [modules[place] for place in sorted(range(len(modules)), key=lambda place: place * golden % 1)]
