"""The plan of the next step: which modules to look at, whether to guard it, and what both cost, on a clock."""

import math
import statistics
import sys
import time
from collections import deque

from torch import nn

from lowp import distributed
from lowp.compat import has_compiled, is_compiled
from lowp.numerics.models import Models
from lowp.numerics.sampling import Budget, Rounds

MODE, HOOK = 2e-6, 1.2e-6  # seconds that torch takes to call a function mode, and a hook, which these cannot see
_TYPICAL = 20  # number of steps whose time is typical of a step
_MOST_HIDDEN = 3.0  # times what is measured of guarding; of half-millisecond steps it is two to three
_LOOKS = 5  # the last steps that were looked at, which say what a look hides


class Clock:
    """Counts, step by step, what goes to the account of a budget.

    What the profiler's own code takes is measured. What torch takes longer for it (a mode in force, caches that a look
    has emptied) is the difference to other steps. One step tells little of that, as an evaluation or another program
    may have run in it: medians are taken, and where the step runs as ever a look hides no more than it took itself.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._plain: deque[float] = deque(maxlen=_TYPICAL)  # seconds of steps that were not looked at, without own time
        self._idle: deque[float] = deque(maxlen=_TYPICAL)  # of those of which nothing was kept
        self._guarded: deque[float] = deque(maxlen=_TYPICAL)
        self._hidden: deque[float] = deque(maxlen=_LOOKS)  # by looks: seconds that were not measured
        self._guard_costs = 0.0  # seconds that guarding adds to a step, as the difference tells
        self._begun = self._own_before = 0.0

    def start(self) -> None:
        """Begin the first step."""
        self.budget.started = self._begun = time.perf_counter()

    def spent_since(self, started: float, looking: bool) -> None:
        """Count what ran in a hook since it was entered."""
        self.budget.spent(time.perf_counter() - started + HOOK, looking)

    def pass_by(self, started: float) -> None:
        """Count a step of which nothing is kept, which has just ended, and the time that this takes."""
        self._idle.append(started - self._begun)
        self._plain.append(started - self._begun)
        self._begun = started
        self.budget.pass_by(time.perf_counter() - started + HOOK)

    def end_unwatched(self, guarded: bool) -> None:
        """End a step that was not looked at."""
        took, own = self._ended()
        if guarded:
            hidden = self._hidden_by_guard(took, own)
            self.budget.spent(hidden, False)
            own += hidden
        self._plain.append(took - own)
        self._own_before = self.budget.own

    def end_watched(self, runs_otherwise: bool) -> float:
        """End a step that was looked at; return the seconds that the look took.

        `runs_otherwise`: the whole step ran in another way, for example without torch.compile.
        """
        took, own = self._ended()
        hidden = self._hidden_by_look(took, own, runs_otherwise)
        self.budget.spent(hidden, True)
        self._own_before = self.budget.own
        return own + hidden

    def _ended(self) -> tuple[float, float]:
        """The seconds of the step that ends now, and of them those that were counted."""
        now = time.perf_counter()
        took, self._begun = now - self._begun, now
        return took, self.budget.own - self._own_before

    def _hidden_by_look(self, took: float, own: float, runs_otherwise: bool) -> float:
        if not self._plain or not own:
            return 0.0
        self._hidden.append(took - own - statistics.median(self._plain))
        return min(max(statistics.median(self._hidden), 0.0), math.inf if runs_otherwise else own)

    def _hidden_by_guard(self, took: float, own: float) -> float:
        """What a guarded step took beside what was measured, once as many steps without a guard are known."""
        self._guarded.append(took)
        if len(self._guarded) == _TYPICAL and len(self._idle) == _TYPICAL:
            self._guard_costs = statistics.median(self._guarded) - statistics.median(self._idle)
            self._guarded.clear()
        return min(max(self._guard_costs - own, 0.0), _MOST_HIDDEN * own)


# -- the plan ----------------------------------------------------------------------------------------------------------
_REST, _LONGEST_REST = 8, 512  # steps without any recording once the time budget is used up
_GUARD, _GUARD_AGAIN = 0.5, 0.8  # of the budget, what guarding may take; and of that, where it begins again
_MOST_FAILURES = 3
_GUARD_FIRST = 0.3  # the same until each module was looked at once
# where guesses of what a look at a module costs begin, in seconds; looks that were made correct them
_A_TENSOR, _A_NUMBER, _TENSORS, _A_LOOK, _BLOCKS = 5e-5, 3e-9, 4, 3e-4, 2e-3


class RecordingPlan:
    """Decides before each step, by what the budget has room for.

    `modules` are the paths of those that the step to come is looked at in, `guards` says whether it is guarded against
    NaN, `rounds` whose turn it is. `beside`: the step runs compiled, and once more for what is looked at.
    """

    def __init__(self, models: Models, clock: Clock, divergence: bool) -> None:
        self.rounds = Rounds()
        self.modules: list[str] = []
        self.guards = self.beside = False
        self.in_region = clock.budget.share is None  # whether regions of lowp's may round what is watched
        self._models, self._clock, self._divergence = models, clock, divergence
        self._period, self._idle_steps = _REST // 2, 0
        self._compiled: tuple[int, bool] = 0, False  # of how many models, and whether one of them is
        self._failures = 0

    # -- whose turn it is ---------------------------------------------------------------------------------------------
    def take_turns(self) -> None:
        """Let every module have its turn, and what runs outside of them: the loss."""
        self.rounds.add("", _A_LOOK)
        for path, module in self._models.modules.items():
            self.rounds.add(path, _guessed_cost(module))

    def rename(self, goes_on: bool) -> None:
        """Begin the rounds again, as modules have other names now; `goes_on`: this step is looked at as a whole."""
        self.rounds = Rounds()
        self.modules = ["", *self._models.modules] if goes_on else []

    @property
    def is_whole(self) -> bool:
        """Whether the step is looked at in every module."""
        return len(self.modules) == self.rounds.modules

    @property
    def runs_otherwise(self) -> bool:
        """Whether a step that is looked at runs otherwise as a whole: not compiled, or observed by regions."""
        otherwise = self.in_region and self._clock.budget.share is not None
        return self._is_compiled or has_compiled() or otherwise

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

    def decide(self, step: int) -> None:
        """Choose the modules for a step, and whether to guard it."""
        room = self._clock.budget.room
        if self.runs_otherwise:
            room = math.inf if room >= self.rounds.whole else 0.0  # the step is dear, however few modules are seen
        self.modules = self.rounds.turn(step, room)
        # other ranks need not look at the same step, and what a model does in the forward pass may need them all; of
        # several models one may have been called before another one's backward pass, with which the tape ends
        may = len(self._models.roots) == 1 and self._failures < _MOST_FAILURES and not distributed.has_other_ranks()
        self.beside = bool(self.modules) and may and self._is_compiled
        self.guards = (self._divergence and self._can_guard(step)) or self.beside
        self._period = _REST // 2 if self.is_busy else self._period

    @property
    def is_busy(self) -> bool:
        """Whether anything is to be done in the step."""
        return bool(self.modules) or self.guards

    def _can_guard(self, step: int) -> bool:
        """Whether guarding every step takes little enough; once it did not, it rests for a while."""
        return self._clock.budget.may_guard(self._part * (1.0 if self.guards or not step else _GUARD_AGAIN))

    @property
    def _part(self) -> float:
        """Of the budget, what guarding may take."""
        return _GUARD if self.rounds.taken else _GUARD_FIRST

    # -- rest ---------------------------------------------------------------------------------------------------------
    def rest(self, step: int) -> None:
        """Do nothing for some steps, twice as many as the last time if nothing was done since."""
        self._period = min(2 * self._period, _LONGEST_REST)
        self._idle_steps = max(self.rounds.idle_steps(step), step + self._period)

    def rests(self, step: int) -> bool:
        """Whether it is too early to decide again."""
        return step < self._idle_steps


def _guessed_cost(module: nn.Module) -> float:
    """Return how long a look at a module may take, in seconds, before any was made: by its parameters."""
    parameters = list(module.parameters(recurse=False))
    numbers = sum(one.numel() for one in parameters)
    # input, output and gradient; of a parameter value, gradient and update, which is counted twice; blocks of a product
    seconds = _TENSORS * (1 + len(parameters)) * _A_TENSOR + 3 * _TENSORS * numbers * _A_NUMBER
    return max(seconds, _A_LOOK) + _BLOCKS * any(one.ndim > 1 for one in parameters)
