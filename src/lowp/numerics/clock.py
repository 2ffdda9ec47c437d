"""The time of a training's steps, and what of it the profiler took: measured where it runs, estimated where torch is
slower because of it."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowp.compat import real_tensors
from lowp.numerics.sampling import Budget

_TYPICAL = 20  # number of steps whose time is typical of a step
_CACHE = 1 << 19  # numbers
_MOST_HIDDEN = 3.0  # times what is measured of guarding; of half-millisecond steps it is two to three
_LOOKS = 5  # the last steps that were looked at, which say what a look hides


class Clock:
    """Counts, step by step, what goes to the account of a budget.

    What the profiler's own code takes is measured. What torch takes longer for it (a mode in force, caches that a look
    has emptied) is the difference to other steps. One step tells little of that, as an evaluation or another program
    may have run in it: medians are taken, and where the step runs as ever a look hides no more than it took itself.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget, self.costs = budget, call_costs()
        self._plain: deque[float] = deque(maxlen=_TYPICAL)  # seconds of steps that were not looked at, without own time
        self._idle: deque[float] = deque(maxlen=_TYPICAL)  # of those of which nothing was kept
        self._guarded: deque[float] = deque(maxlen=_TYPICAL)
        self._hidden: deque[float] = deque(maxlen=_LOOKS)  # by looks: seconds that were not measured
        self._shares: deque[float] = deque(maxlen=_LOOKS)  # the same as shares of what was
        self._guard_costs = 0.0  # seconds that guarding adds to a step, as the difference tells
        self._begun = self._own_before = 0.0

    def start(self) -> None:
        """Begin the first step."""
        self.budget.started = self._begun = time.perf_counter()

    def spent_since(self, started: float, looking: bool) -> None:
        """Count what ran in a hook since it was entered."""
        self.budget.spent(time.perf_counter() - started + self.costs.hook, looking)

    def pass_by(self, started: float) -> None:
        """Count a step of which nothing is kept, which has just ended, and the time that this takes."""
        self._idle.append(started - self._begun)
        self._plain.append(started - self._begun)
        self._begun = started
        self.budget.pass_by(time.perf_counter() - started + self.costs.hook)

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
        hidden = took - own - statistics.median(self._plain)
        self._hidden.append(hidden)
        self._shares.append(hidden / own)
        if runs_otherwise:
            return max(statistics.median(self._hidden), 0.0)
        return own * min(max(statistics.median(self._shares), 0.0), 1.0)

    def _hidden_by_guard(self, took: float, own: float) -> float:
        """What a guarded step took beside what was measured, once as many steps without a guard are known."""
        self._guarded.append(took)
        if len(self._guarded) == _TYPICAL and len(self._idle) == _TYPICAL:
            self._guard_costs = statistics.median(self._guarded) - statistics.median(self._idle)
            self._guarded.clear()
        return min(max(self._guard_costs - own, 0.0), _MOST_HIDDEN * own)


class CallCosts(NamedTuple):
    """Seconds that torch needs to call a function mode for one of its functions, and a hook."""

    mode: float
    hook: float


@cache
def call_costs() -> CallCosts:
    """What calls of Python cost around what is written in them, measured once: the profiler cannot see it otherwise."""
    with real_tensors():
        x, module, other = torch.zeros(1, device="cpu"), nn.Identity(), torch.zeros(_CACHE, device="cpu")
        plain, called = _typical(partial(torch.neg, x), other), _typical(partial(module, x), other)
        with _Nothing():
            mode = _typical(partial(torch.neg, x), other) - plain
        handle = module.register_forward_hook(_Nothing.hook)
        try:
            return CallCosts(max(mode, 0.0), max(_typical(partial(module, x), other) - called, 0.0))
        finally:
            handle.remove()


def _typical(call: Callable[[], object], other: Tensor, runs: int = 21) -> float:
    """The median of some calls, between which the caches are used for something else, as by a training."""
    taken = []
    for _ in range(runs):
        other.neg_()
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


class _Nothing(TorchFunctionMode):
    """A function mode, and a hook, that add nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    @staticmethod
    def hook(module: nn.Module, given: Any, output: Any) -> None:
        pass
