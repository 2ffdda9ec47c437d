"""Which steps are looked at, in how many modules, and which are guarded: as far as what both take allows."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from torch import nn

from lowp import distributed
from lowp.compat import has_compiled, is_compiled
from lowp.errors import InvalidInput
from lowp.kernels.steps.spectra import even_places
from lowp.numerics.models import Models

MODE, HOOK = 2e-6, 1.2e-6  # seconds that torch takes to call a function mode, and a hook, which these cannot see
_SHARE, _ALLOWANCE = 0.03, 0.25  # of the time, and seconds: the default
_EVERY = 50


def is_sampled(step: int) -> bool:
    """Whether a step is looked at where there is no budget: 0, the powers of two to 32, and every fiftieth."""
    return (step < _EVERY and step & (step - 1) == 0) or step % _EVERY == 0


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


# -- the schedule ------------------------------------------------------------------------------------------------------
_SHORTEST_REST, _LONGEST_REST = 8, 512  # steps
_GUARD, _GUARD_AGAIN = 0.5, 0.8  # of the budget, what guarding may take; and of that, where it begins again
_GUARD_FIRST = 0.3  # the same until each module was looked at once
_MOST_FAILURES = 3
_TYPICAL, _LOOKS = 20, 5  # steps whose time is typical: of those that were not looked at, and of those that were
_MOST_HIDDEN = 3.0  # times what is measured of guarding; of half-millisecond steps it is two to three
# guesses of what the first look at a module costs, in seconds
_A_TENSOR, _A_NUMBER, _TENSORS, _A_LOOK, _BLOCKS = 5e-5, 3e-9, 4, 3e-4, 2e-3
_MARGIN = 1.5


class Schedule:
    """Decides before each step what is done in it, from what the steps before have cost.

    A look goes round all modules, in each step as many as there is room for in the budget. A round begins at each step
    that `is_sampled`, or as soon after it as the round before has ended. Where there is room for nothing, the next step
    that is decided on is the one by which there will be.

    `modules` are the paths of those that the step to come is looked at in, `guards` says whether it is guarded against
    NaN; `beside`: the step runs compiled, and once more for what is looked at. `rounds` were completed.

    What the profiler's own code takes is measured. What torch takes longer for it (a mode in force, caches that a look
    has emptied) is the difference to other steps. One step tells little of that, as an evaluation or another program
    may have run in it: medians are taken, and where the step runs as ever a look hides no more than it took itself.
    """

    def __init__(self, models: Models, budget: Budget, divergence: bool) -> None:
        self.modules: list[str] = []
        self.guards = self.beside = False
        self.in_region = budget.share is None  # whether regions of lowp's may round what is watched
        self.looks = True  # whether it is ever a module's turn
        self.rounds = 0
        self._models, self._budget, self._divergence = models, budget, divergence
        self._costs: dict[str, float] = {}  # seconds by module; those not in `_measured` are guesses
        self._measured: set[str] = set()
        self._waiting: list[str] = []
        self._asked, self._is_due, self._wakes = -1, False, 0  # steps: the last that was asked about, the next to be
        self._begun = self._own_before = 0.0
        # seconds beside what was measured of steps of which nothing was kept, that were guarded, and looked at
        self._idle: deque[float] = deque(maxlen=_TYPICAL)
        self._guarded: deque[float] = deque(maxlen=_TYPICAL)
        self._looked: deque[float] = deque(maxlen=_LOOKS)
        self._hidden_by_guard, self._guarded_steps = 0.0, 0
        self._compiled: tuple[int, bool] = 0, False  # of how many models, and whether one of them is
        self._failures = 0

    # -- how a step runs ----------------------------------------------------------------------------------------------
    @property
    def is_whole(self) -> bool:
        """Whether the step is looked at in every module."""
        return len(self.modules) == len(self._costs)

    @property
    def is_busy(self) -> bool:
        """Whether anything is to be done in the step."""
        return bool(self.modules) or self.guards

    @property
    def _runs_otherwise(self) -> bool:
        """Whether a step that is looked at runs otherwise as a whole: not compiled, or observed by regions."""
        return self._is_compiled or has_compiled() or (self.in_region and self._budget.share is not None)

    @property
    def _is_compiled(self) -> bool:
        """Whether a model, or a module in it, is compiled as such; functions may be where it is not."""
        roots = self._models.roots
        if self._compiled[0] != len(roots):
            self._compiled = len(roots), any(map(is_compiled, roots.values()))
        return self._compiled[1]

    def failed(self, why: str = "") -> None:
        """Note that a step could not run again beside the training; once it has failed too often, look otherwise."""
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            note = f" ({why})" if why else ""
            print(
                f"lowp profile: a compiled step cannot be run again beside the training{note}: steps that are recorded "
                "run without torch.compile, and draw other random numbers",
                file=sys.stderr,
            )

    def never_beside(self) -> None:
        """Do not run steps again: they would change more than can be put back."""
        self._failures, self.beside, self.modules = _MOST_FAILURES + 1, False, []

    # -- whose turn it is ---------------------------------------------------------------------------------------------
    def take_turns(self) -> None:
        """Let every module have its turn from the next round on, and what runs outside of them: the loss."""
        self._costs.setdefault("", _A_LOOK)
        for path, module in self._models.modules.items():
            self._costs.setdefault(path, _guessed_cost(module))

    def rename(self, goes_on: bool) -> None:
        """Begin the rounds again, as modules have other names now; `goes_on`: this step is looked at as a whole."""
        self.rounds, self._costs, self._measured, self._waiting = 0, {}, set(), []
        self.take_turns()
        self.modules = [*self._costs] if goes_on else []

    def decide(self, step: int) -> None:
        """Choose the modules for a step, and whether to guard it."""
        room = self._budget.room
        if self._runs_otherwise:  # the step is dear, however few modules are seen
            room = math.inf if room >= self._whole else 0.0
        self.modules = self.turn(step, room) if self.looks else []
        # other ranks need not look at the same step, and what a model does in the forward pass may need them all; of
        # several models one may have been called before another one's backward pass, with which the tape ends
        may = len(self._models.roots) == 1 and self._failures < _MOST_FAILURES and not distributed.has_other_ranks()
        self.beside = bool(self.modules) and may and self._is_compiled
        part = (_GUARD if self.rounds else _GUARD_FIRST) * (1.0 if self.guards or not step else _GUARD_AGAIN)
        self.guards = (self._divergence and self._budget.may_guard(part)) or self.beside
        if not self.is_busy:
            self._wakes = self._next(step, part)

    def turn(self, step: int, room: float) -> list[str]:
        """Return the modules to look at in this step, for which there are `room` seconds; none where it is no turn."""
        passed = range(max(self._asked + 1, step - _EVERY), step + 1)
        self._asked, self._is_due = step, self._is_due or any(map(is_sampled, passed))
        if not self._waiting and self._is_due:
            self._is_due, self._waiting = False, _spread(list(self._costs))
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

    def cost(self, module: str) -> float:
        """What a look at a module costs, in seconds, as far as it is known; where it is guessed, rather too much."""
        return self._costs[module] * (1.0 if module in self._measured else _MARGIN)

    @property
    def _whole(self) -> float:
        """What a look at every module costs, in seconds."""
        return sum(map(self.cost, self._costs))

    def _next(self, step: int, part: float) -> int:
        """The next step to decide on: by which the training has earned a look or a guard, or a round begins."""
        share, training = self._budget.share, self._budget.training
        if share is None or not self._waiting:
            return next(filter(is_sampled, count(step + 1)))
        wanted = self._budget.own + (self._whole if self._runs_otherwise else self.cost(self._waiting[0]))
        if self._divergence:
            wanted = min(wanted, self._budget.guarding / part + self._budget.idle)
        steps = (wanted / share / training - 1.0) * (step + 1)
        return step + math.ceil(min(max(steps, _SHORTEST_REST), _LONGEST_REST))

    def rests(self, step: int) -> bool:
        """Whether it is too early to decide on the step after this one."""
        return step + 1 < self._wakes

    def account(self) -> dict[str, float]:
        """Return how much was looked at, by the names in a record."""
        begun = len(self._costs) - len(self._waiting) if self._waiting else 0
        looks = self.rounds + begun / max(len(self._costs), 1)
        return {"looks": looks, "modules": len(self._costs), "modules_seen": len(self._measured)}

    # -- what steps cost ----------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin the first step."""
        self.take_turns()
        self._budget.started = self._begun = time.perf_counter()

    def spent_since(self, started: float, looking: bool) -> None:
        """Count what ran in a hook since it was entered."""
        self._budget.spent(time.perf_counter() - started + HOOK, looking)

    def pass_by(self, started: float) -> None:
        """Count a step of which nothing is kept, which has just ended, and the time that this takes."""
        self._idle.append(started - self._begun)
        self._begun = started
        self._budget.pass_by(time.perf_counter() - started + HOOK)

    def end(self, guarded: bool) -> None:
        """End a step that was not looked at."""
        beside, own = self._ended()
        hidden = 0.0
        if guarded:
            self._guarded.append(beside)
            self._guarded_steps += 1
            if self._guarded_steps % _TYPICAL == 0 and len(self._idle) == _TYPICAL:
                self._hidden_by_guard = statistics.median(self._guarded) - statistics.median(self._idle)
            hidden = min(max(self._hidden_by_guard, 0.0), _MOST_HIDDEN * own)
        else:
            self._idle.append(beside)
        self._budget.spent(hidden, False)
        self._own_before = self._budget.own

    def end_look(self, modules: list[str], beside: bool) -> float:
        """End a step in which these modules were looked at, the next in turn; return the seconds that this took.

        `beside`: the look was at a second run, and the step itself ran as ever.
        """
        seconds, own = self._ended()
        plain, hidden = [*self._idle, *self._guarded], 0.0
        if plain and own:
            self._looked.append(seconds)
            hidden = max(statistics.median(self._looked) - statistics.median(plain), 0.0)
            hidden = hidden if self._runs_otherwise and not beside else min(hidden, own)
        self._budget.spent(hidden, True)
        self._own_before = self._budget.own
        self._note(modules, own + hidden)
        return own + hidden

    def _ended(self) -> tuple[float, float]:
        """Of the step that ends now the seconds that were not counted, and those that were."""
        now, own = time.perf_counter(), self._budget.own - self._own_before
        seconds, self._begun = now - self._begun - own, now
        return seconds, own

    def _note(self, modules: list[str], seconds: float) -> None:
        """Share what a look has cost among its modules."""
        shares = {one: self.cost(one) for one in modules}
        whole = sum(shares.values())
        for one, share in shares.items():
            self._costs[one] = seconds * share / whole if whole else seconds / len(modules)
        self._measured.update(modules)
        self._waiting = self._waiting[len(modules) :]
        self.rounds += not self._waiting


def _spread(modules: list[str]) -> list[str]:
    """Neighbours apart, so that the part of a round that a short run has time for is of the whole model."""
    return [modules[place] for place in np.argsort(even_places(1 << 40, len(modules)))]


def _guessed_cost(module: nn.Module) -> float:
    """Return how long a look at a module may take, in seconds, before any was made: by its parameters."""
    parameters = list(module.parameters(recurse=False))
    numbers = sum(one.numel() for one in parameters)
    # input, output and gradient; of a parameter value, gradient and update, which is counted twice; blocks of a product
    seconds = _TENSORS * (1 + len(parameters)) * _A_TENSOR + 3 * _TENSORS * numbers * _A_NUMBER
    return max(seconds, _A_LOOK) + _BLOCKS * any(one.ndim > 1 for one in parameters)
