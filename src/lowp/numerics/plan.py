"""The plan of the next step: the modules to look at, whether to guard the step, and when to decide again."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from lowp import distributed
from lowp.compat import has_compiled, is_compiled
from lowp.numerics.clock import Clock
from lowp.numerics.models import Models
from lowp.numerics.modes import Paths, tensors_in
from lowp.numerics.sampling import Rounds

_REST = 8  # steps without any recording once the time budget is used up
_GUARD, _GUARD_AGAIN = 0.5, 0.8  # of the budget, what guarding may take; and of that, where it begins again
_MOST_FAILURES = 3
_GUARD_FIRST = 0.3  # the same until each module was looked at once
# where guesses of what a look costs begin, in seconds; looks that were made correct them
_A_TENSOR, _A_NUMBER, _TENSORS = 5e-5, 3e-9, 4


class RecordingPlan:
    """Decides before each step, by what the budget has room for.

    `modules` are the paths of those that the step to come is looked at in, `guards` says whether it is guarded against
    NaN, `rounds` whose turn it is. `beside`: the step runs compiled, and once more for what is looked at. With
    a budget the first step is spent on what modules write, from which the cost of a look is guessed.
    """

    def __init__(self, models: Models, paths: Paths, clock: Clock, divergence: bool) -> None:
        self.rounds = Rounds()
        self.modules: list[str] = []
        self.guards = self.beside = False
        self.in_region = clock.budget.share is None  # whether regions of lowp's may round what is watched
        self._models, self._paths, self._clock, self._divergence = models, paths, clock, divergence
        self._sizes: dict[int, int] | None = None  # of outputs, by module; None where nothing is to be guessed
        self._end_sizing: Callable[[], None] | None = None
        self._idle_until, self._idle_steps = 0.0, 0
        self._compiled: tuple[int, bool] = 0, False  # of how many models, and whether one of them is
        self._failures = 0

    # -- whose turn it is ---------------------------------------------------------------------------------------------
    def take_turns(self) -> None:
        """Let every module have its turn, and what runs outside of them: the loss; how large they are is seen first."""
        self.rounds.add("")
        for path in self._models.modules:
            self.rounds.add(path)
        self._sizes = {} if self._clock.budget.share is not None else None

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
        if self._sizes is not None:
            room = 0.0
        elif self.runs_otherwise:
            room = math.inf if room >= self.rounds.whole else 0.0  # the step is dear, however few modules are seen
        self.modules = self.rounds.turn(step, room)
        looks = bool(self.modules) or self._sizes is not None
        # other ranks need not look at the same step, and what a model does in the forward pass may need them all; of
        # several models one may have been called before another one's backward pass, with which the tape ends
        may = len(self._models.roots) == 1 and self._failures < _MOST_FAILURES and not distributed.has_other_ranks()
        self.beside = looks and may and self._is_compiled
        self.guards = (self._divergence and self._can_guard(step)) or self.beside

    @property
    def is_busy(self) -> bool:
        """Whether anything is to be done in the step."""
        return bool(self.modules) or self.guards or self._sizes is not None

    def _can_guard(self, step: int) -> bool:
        """Whether guarding every step takes little enough; once it did not, it rests for a while."""
        return self._clock.budget.may_guard(self._part * (1.0 if self.guards or not step else _GUARD_AGAIN))

    @property
    def _part(self) -> float:
        """Of the budget, what guarding may take."""
        return _GUARD if self.rounds.taken else _GUARD_FIRST

    # -- rest ---------------------------------------------------------------------------------------------------------
    def rest(self, step: int) -> None:
        """Do nothing until there can be room for a look or for guarding, and for a few steps at least."""
        budget = self._clock.budget
        self._idle_steps = self.rounds.idle_steps(step)
        is_due = not self._idle_steps
        self._idle_steps = max(self._idle_steps, step + _REST)
        next_look = budget.time_of(self.rounds.whole if self.runs_otherwise else self.rounds.next_cost)
        next_guard = budget.time_of_guarding(_GUARD_AGAIN * self._part) if self._divergence else math.inf
        self._idle_until = min(next_guard, next_look if is_due else math.inf)

    def rests(self, step: int, now: float) -> bool:
        """Whether it is too early to decide again."""
        return now < self._idle_until or step < self._idle_steps

    # -- sizes --------------------------------------------------------------------------------------------------------
    @property
    def wants_sizes(self) -> bool:
        """Whether what modules write is to be seen in this step, and is not yet."""
        return self._sizes is not None and self._end_sizing is None

    @property
    def is_sizing(self) -> bool:
        """Whether what modules write is seen just now."""
        return self._end_sizing is not None

    def begin_sizing(self, running: nn.Module | None) -> None:
        """See how much each module writes; `running` is a model whose call has begun, if one has."""
        sizes = self._sizes = {}
        clock = self._clock

        def left(module: nn.Module, result: Any) -> None:
            sizes[id(module)] = sum(one.numel() for one in tensors_in(result))
            clock.budget.spent(2 * clock.costs.hook, False)

        self._end_sizing = self._paths.follow(left=left, running=running)

    def end_sizing(self) -> bool:
        """Guess what looks cost, from what modules have written in the step that ends; whether that was seen."""
        if self._end_sizing is None or self._sizes is None:
            return False
        self._end_sizing()
        for path, module in self._models.modules.items():
            self.rounds.guess(path, _guessed_cost(module, self._sizes.get(id(module), 0)))
        self._end_sizing = self._sizes = None
        return True

    def stop(self) -> None:
        """Remove the hooks that remain."""
        if self._end_sizing is not None:
            self._end_sizing()
            self._end_sizing = None


def _guessed_cost(module: nn.Module, written: int) -> float:
    """Return how long a look at a module that writes so many numbers may take, in seconds, before one was made."""
    own = [one.numel() for one in module.parameters(recurse=False)]
    # input, output and gradient; of a parameter value, gradient and update, which is counted twice
    return (_TENSORS + _TENSORS * len(own)) * _A_TENSOR + (_TENSORS * sum(own) + 3 * written) * _A_NUMBER
