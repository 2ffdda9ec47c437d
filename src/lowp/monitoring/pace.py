"""When a monitor looks: as often as the time allows that looks have taken so far."""

import math
import statistics
import time
from collections import deque

from lowp.numerics.schedule import Budget

_BEGINNING = 4.0  # seconds whose share is spent sooner
_COUNTED, _HEARD = 2e-6, 4e-6  # seconds that a step takes which is counted, and more if its loss is seen
_HEARING, _TURN = 0.0025, 256  # of the time that losses may take; steps of a turn, where not all are seen
_TYPICAL, _WARM = 5, 0.25  # looks that say what one takes; the part of the first one that later ones take
_COLD, _MOST_COLD = 0.9, 8e-4  # of a look, and seconds: what the steps after it take longer, with cold caches
_APART, _MOST_APART = 4, 8  # steps between two looks: a quarter of those so far, 8 at most
_SEEN = 0.85  # of what a monitor takes, what is measured from within
_AGAIN = 8  # of the steps since the last look, a part after which the time is asked again
_CONFIRMING = 4  # looks that may be taken in advance where something seems wrong

# the processor time of the thread, in which other programs do not count; where it is told in coarse steps, the time
now = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-5 else time.perf_counter


class Pace:
    """Counts what a monitor takes, and says which step is looked at next.

    The first look is free. Of the first four seconds' share more is spent at the beginning: after t seconds as much as
    of the root of 4 t seconds; but not in one step after the other, as that of a first step that compiles would be gone
    at once. `seconds` were spent and are not charged yet.
    """

    def __init__(self, max_overhead: str | float | None) -> None:
        self.budget = Budget.parse(max_overhead)
        self.budget.clock, self.budget.started = now, now()
        if self.budget.share is not None:
            self.budget.share *= _SEEN
        self._costs: deque[float] = deque(maxlen=_TYPICAL)  # seconds of looks
        self._cost = self._first = 0.0  # what the next one may take, and what the first one took
        self.seconds, self._counted = 0.0, 0  # and steps that are charged
        self._last = 0  # step that was looked at
        self._hearing = 0.0  # seconds that a loss has taken lately which is not as usual: under a loss scale

    def spent(self, started: float, hidden: float = 0.0) -> None:
        """Count what ran since it was entered, and what is not seen from within."""
        self.seconds += now() - started + hidden

    def heard(self, started: float) -> None:
        """Count what ran before or after a backward pass, since it was entered."""
        seconds = now() - started
        self.seconds += seconds
        self._hearing += (2 * seconds - self._hearing) / _TURN

    def turns(self, step: int) -> tuple[int, int]:
        """Return of how many steps the losses are seen, and of how many after these they are not."""
        part = (_HEARD + self._hearing) * step / (_HEARING * self.budget.training)  # of the share, if all were seen
        return _TURN, 0 if part <= 1 or self.budget.share is None else math.ceil(_TURN * (part - 1))

    def looked(self, step: int) -> None:
        """Take what was spent for what a look takes, and count what it hides."""
        self.seconds += min(_COLD * self.seconds, _MOST_COLD)
        self._first, self._last = self._first or self.seconds, step
        self._costs.append(self.seconds)
        self._cost = statistics.median(self._costs) * (1.0 if len(self._costs) > 1 else _WARM)

    def charge(self, step: int, heard: bool) -> None:
        """Take what was spent, and the steps that were not looked at, off the budget; `heard`: losses were seen."""
        self.budget.spent(self.seconds, True)
        self.budget.pass_by((_COUNTED + heard * _HEARD) * (step - self._counted))
        self.seconds, self._counted = 0.0, step

    def may_confirm(self) -> bool:
        """Whether a look may be taken in advance."""
        return self.budget.room > -_CONFIRMING * self._cost

    def next(self, step: int) -> int:
        """Return `step` if there is time for a look at it, else a later one that there will be time for."""
        budget, share = self.budget, self.budget.share
        if share is None:
            return step
        budget.allowance = self._first + share * math.sqrt(_BEGINNING * min(budget.training, _BEGINNING))
        if budget.room >= self._cost:
            return max(step, self._last + 1 + min(self._last // _APART, _MOST_APART))
        wanted = budget.own + self._cost
        seconds = (wanted - self._first) / share
        seconds = seconds * seconds / _BEGINNING if seconds < _BEGINNING else wanted / share
        later = math.ceil(step * (seconds / budget.training - 1.0))
        least = max((step - self._last) // _AGAIN, 1)
        return step + min(max(later, least), step)  # a step may have been unlike those to come
