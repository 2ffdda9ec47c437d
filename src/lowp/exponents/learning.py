"""What the entries of a table of shared exponents learn: the writes of a step update all entries at once, at its end.

An exponent is a slot of a tensor on every device. A CPU's are read by the C++ library, those of other devices by
Triton's kernels or by torch, and nobody reads them. There each thing that a CPU decides (a gradient that is in the
format already stays as it is, a step with infinities is not taken, a weight that was put there from outside begins
anew) is a flag, a 0-d tensor of bools, and a write that is not to happen is computed all the same and left out of
everything that remembers writes. So the numbers are those of a CPU, and a captured graph makes the decisions anew at
each replay.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import widest_float
from lowp.exponents.base import SiteTable
from lowp.exponents.scalings import scaling_of
from lowp.exponents.sites import is_result
from lowp.formats import PowerOfTwo, ScaledFormat
from lowp.kernels.choose.dispatch import answers_at_once, runs_triton, uses_library
from lowp.kernels.int16 import entries
from lowp.scaling import Autoflex, AutoflexState, Reactive, ReactiveState, WritesSeen
from lowp.scaling.autoflex import extended
from lowp.scaling.powers import times

Condition: TypeAlias = Literal[True] | Tensor  # of a write: True, or a 0-d tensor of its device
_LOWEST = -1000  # below every exponent
COUNTS = ("raises_needed", "raises_in_time", "headroom_sum", "measured")


class Flush(NamedTuple):
    """The data that a watcher gets for one step, by entry: exponents and predictions at the time of the writes."""

    sites: list[str]
    written: Tensor  # bool[n]
    mantissa: Tensor  # int32[n], Γ
    exponent: Tensor  # int32[n], log2 κ
    predicted: Tensor | None  # fp64[n], χ; None of scalings that predict no maximum


class Run:
    """What the tables of a run share: who watches its steps, which writes do not count, what was warned of once."""

    def __init__(self) -> None:
        self.watchers: list[Callable[[Flush], object]] = []  # copies have none
        self.uncounted: Condition | None = None  # see `SharedExponents.uncounted`
        self.has_told_beyond = False  # about numbers too large for the format
        self.has_told_most = False  # about tensors of which most was cut off

    def counts(self, is_host: bool) -> Condition:
        """Whether writes of a table count, as far as a flag of its device says."""
        return ~self.uncounted if isinstance(self.uncounted, Tensor) and not is_host else True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "watchers": [], "uncounted": None}


def both(one: Condition, other: Condition) -> Condition:
    """Return whether both hold; no operation where one of them is True."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one & other
    return one if isinstance(one, Tensor) else other


class LearningTable(SiteTable):
    """The entries of one cast, and what a step's writes at them make of them.

    `is_host`: integer kernels run there, so that the host knows at once what a write has seen. `written` are the
    entries that were written since the last flush, and whether that counts.
    """

    def __init__(self, cast: Cast, device: torch.device, run: Run | None = None) -> None:
        super().__init__(cast, device)
        self.scaling, self.run = scaling_of(cast), run or Run()
        self.is_host = answers_at_once(device)
        self._adapts = not isinstance(self.scaling, Autoflex) or self.scaling.adapt  # whether exponents change at all
        self.written: dict[int, Condition] = {}
        counts = {name: torch.zeros(0, dtype=widest_float(device), device=device) for name in COUNTS}
        state = self.scaling.init(device, 0)
        self._hold({}, {"state": state._asdict(), "counts": counts, "before": state.exponent.clone()})

    @property
    def _parts(self) -> dict[str, Tensor | dict[str, Tensor]]:
        """What a checkpoint holds of the entries."""
        return {"state": self.state._asdict(), "counts": self.counts, "before": self.before}

    def _hold(self, names: dict[str, int], parts: Mapping[str, Any]) -> None:
        """Take over entries with their `parts`."""
        self.names, self.counts = names, parts["counts"]
        self.state = (ReactiveState if isinstance(self.scaling, Reactive) else AutoflexState)(**parts["state"])
        self.before: Tensor = parts["before"]  # the exponent of the previous write
        self.seen = self.before.new_zeros(len(names), entries.WORDS, dtype=torch.int64)  # since the last flush
        self._faulty: Tensor = self.before.new_zeros(len(names), dtype=torch.bool)  # in this step
        self._is_result = self._faulty.clone()
        if names:
            self._is_result = torch.tensor([is_result(site) for site in names], device=self.device)
        self._places = torch.arange(len(names), dtype=torch.int32, device=self.device)
        self.__dict__.pop("block", None)

    def _grow(self, site: str) -> None:
        """Make the entry of a new site."""
        self.state = extended(self.scaling, self.state)
        self.counts = {name: torch.cat((value, value.new_zeros(1))) for name, value in self.counts.items()}
        self.before = torch.cat((self.before, self.state.exponent[-1:]))
        self.seen = torch.cat((self.seen, self.seen.new_zeros(1, entries.WORDS)))
        self._faulty = torch.cat((self._faulty, self._faulty.new_zeros(1)))
        self._is_result = torch.cat((self._is_result, self._faulty.new_full((1,), is_result(site))))
        self._places = torch.arange(len(self.names), dtype=torch.int32, device=self.device)
        self.__dict__.pop("block", None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state; a copy lies elsewhere in memory."""
        return {name: value for name, value in self.__dict__.items() if name != "block"}

    @cached_property
    def block(self) -> object:
        """What the C++ library is given of a table on a CPU, as long as it has these entries."""
        state = self.state._asdict()
        own = dict.fromkeys(("history", "seen", "writes", "saturated", "moved", "nonfinite", *COUNTS))
        if isinstance(self.scaling, Autoflex):
            own |= {name: state[name] for name in own if name in state} | self.counts
        columns = [state["exponent"], state["started"], self.before, self.seen, self._is_result, self._faulty]
        return entries.block_of(self.scaling.guess, isinstance(self.scaling, Reactive), [*columns, *own.values()])

    # -- the end of a step --------------------------------------------------------------------------------------------
    def note(self, index: int, record: Tensor, when: Condition = True) -> None:
        """Note what was seen of one write at an entry until the step is flushed: a row of `entries`."""
        row, earlier = self.seen[index], self.written.get(index)
        row.copy_(record if earlier is None else entries.joined(row, record))
        if earlier is None or earlier is True or when is True:
            self.written[index] = when if earlier is None else True
        else:
            self.written[index] = earlier | when

    def flush(self, agreed: Tensor | None = None) -> None:
        """End a step: observe all writes since the last flush, and tell of them if something was written."""
        self._flush(agreed)
        self._faulty.zero_()

    def _flush(self, agreed: Tensor | None = None) -> None:
        if not self.names or (not self.written and agreed is None):
            return
        watchers = self.run.watchers
        if agreed is not None or watchers or not self._observe_at_once():
            seen = self._observed() if agreed is None else self._adopted(agreed)
            self._faulty |= entries.nonfinite_of(self.seen)
            told = self._told(seen) if watchers else None
            self._observe(seen)
            self.seen.zero_()
            if told is not None:
                for watcher in watchers:
                    watcher(told)
        self.written.clear()

    def _flush_before(self, index: int, when: Condition) -> None:
        """Observe the writes so far before another write at an entry that was written, where both of them count."""
        earlier = both(self.written[index], when)
        if earlier is True:
            self._flush()
            return
        later, written = ~earlier, dict(self.written)
        rows = self.seen * later
        self.seen *= earlier
        self.written = {place: both(counts, earlier) for place, counts in written.items()}
        self._flush()
        self.seen.copy_(rows)
        self.written = {place: both(counts, later) for place, counts in written.items()}

    def _observe(self, seen: WritesSeen) -> None:
        """Take over what the writes of a step make of the entries, in place."""
        assert seen.mask is not None
        self._count(seen, seen.mask)
        before, state = torch.where(seen.mask, self.state.exponent, self.before), self.scaling.observe(self.state, seen)
        for kept, new in zip((self.before, *self.state), (before, *state), strict=True):
            kept.copy_(new)

    def _observe_at_once(self) -> bool:
        """Do that by one call of the C++ library or one kernel of Triton; False, with nothing done, if neither can."""
        scaling = self.scaling
        if not isinstance(scaling, Autoflex) or scaling.window > entries.MOST_WINDOW:
            return False
        if self.is_host:
            if has_library := uses_library():
                entries.observe(self.block, self.written)
            return has_library
        if self.counts["measured"].dtype is not torch.float64 or not runs_triton(self.before):
            return False
        from lowp.kernels.triton import mantissas as kernels

        places, written = self._places, None
        if list(self.written) != list(range(len(self.names))):
            places = torch.stack([self._places[index] for index in self.written])
        if any(when is not True for when in self.written.values()):
            always = self._faulty.new_ones(())
            written = torch.stack([always if when is True else when for when in self.written.values()])
        state = (*self.state, self.before, *(self.counts[name] for name in COUNTS))
        kernels.observe(scaling, state, kernels.Writes(places, written, self.seen, self._is_result, self._faulty))
        return True

    def _mask(self) -> Tensor:
        """Return which entries were written, bool[n]; made on the device, as a copy is no part of a captured graph."""
        yes, no = self._faulty.new_ones(()), self._faulty.new_zeros(())
        conditions = (self.written.get(index) for index in range(len(self.names)))
        return torch.stack([no if one is None else yes if one is True else one for one in conditions])

    def _observed(self) -> WritesSeen:
        return entries.observed(self.seen, self._is_result, self._mask())

    def _told(self, seen: WritesSeen) -> Flush:
        predicted = None
        if isinstance(self.scaling, Autoflex):
            # κ in the prediction is that of the previous write
            predicted = self.scaling.predicted_maximum(self.state._replace(exponent=self.before))
            predicted = torch.where(self.state.seen > 0, predicted, math.nan)
        assert seen.mask is not None
        return Flush(list(self.names), seen.mask, seen.mantissa, self.state.exponent.clone(), predicted)

    def _count(self, seen: WritesSeen, mask: Tensor) -> None:
        good = mask & (seen.mantissa > 0)
        if seen.nonfinite is not None:
            good = good & ~seen.nonfinite
        measured = self.counts["measured"]
        mantissa = seen.mantissa.to(measured.dtype)
        held = times(torch.full_like(measured, self.scaling.limit), self.before)
        saturated = seen.mantissa >= self.scaling.limit
        needed = good & (saturated | (times(mantissa, self.state.exponent) > held))
        free = torch.log2(32768.0 / mantissa.clamp(min=1))
        self.counts["headroom_sum"] += torch.where(good, free, 0.0)
        self.counts["measured"] += good
        self.counts["raises_needed"] += needed
        self.counts["raises_in_time"] += needed & ~saturated

    # -- what a step has met ------------------------------------------------------------------------------------------
    def faults(self) -> dict[str, bool | Tensor]:
        """Whether what was written in this step was not finite, by site: of a CPU those where it was, in order.

        Of a device all sites, each with a flag, 0-d, of which nothing is read.
        """
        if self.is_host and not self._met()[0]:
            return {}
        found = self._faulty | entries.nonfinite_of(self.seen)
        if not self.is_host:
            return dict(zip(self.names, found.unbind(), strict=True))
        return {site: True for site, is_bad in zip(self.names, found.tolist(), strict=True) if is_bad}

    def _met(self) -> tuple[bool, bool]:
        """Whether this step has written what is not finite, and what did not fit: of a CPU; else it may have."""
        if self.is_host and uses_library():
            return entries.met(self.block, len(self.names))
        return True, self.is_host

    def cut_off(self) -> tuple[list[str], list[str]]:
        """Return the sites of a CPU whose writes in this step saturated under the largest exponent.

        And the results whose writes lost most of their numbers. None on other devices, which are not waited for.
        """
        if not (self._adapts and self._met()[1]):
            return [], []
        overflowed, elements = entries.counts_of(self.seen)
        format = self.cast.format
        assert isinstance(format, ScaledFormat) and isinstance(format.scale, PowerOfTwo)
        at_most = (overflowed > 0) & (self.state.exponent >= format.scale.max_exponent)
        names, most = list(self.names), 2 * overflowed > elements
        beyond = [names[place] for place in at_most.nonzero().flatten().tolist()]
        return beyond, [site for place in most.nonzero().flatten().tolist() if is_result(site := names[place])]

    # -- ranks --------------------------------------------------------------------------------------------------------
    def columns(self, sites: list[str]) -> Tensor:
        """Return this rank's observations at some sites, fp64[9, n], for a maximum over ranks; zeros if it saw nothing.

        Rows: the maximum as a real value; the exponent, counted from `_LOWEST`; the flags written, not finite, not
        vanished and started; the numbers of elements that did not fit, that were crowded, and that were written.
        """
        own = self._observed()
        exponent, started = self.state.exponent, self.state.started
        mask, nonfinite, vanished = own.mask, own.nonfinite, own.vanished
        assert mask is not None and nonfinite is not None and vanished is not None
        assert own.overflowed is not None and own.crowded is not None and own.elements is not None
        rows = [
            torch.where(mask, torch.ldexp(own.mantissa.double(), exponent), 0.0),
            torch.where(mask | started, exponent.double() - _LOWEST, 0.0),
            *(flag.double() for flag in (mask, nonfinite, mask & ~vanished, started)),
            *(count.double() for count in (own.overflowed, own.crowded, own.elements)),
        ]
        return torch.stack(rows)[:, self.order_of(sites)]

    def _adopted(self, agreed: Tensor) -> WritesSeen:
        """Take over the largest exponent under which a rank has written. Return the observations of all ranks."""
        exponent = torch.where(agreed[1] > 0, (agreed[1] + _LOWEST).to(torch.int32), self.state.exponent)
        mantissa = torch.ldexp(agreed[0], -exponent).round().clamp(max=entries.MOST_MANTISSA).to(torch.int32)
        self.state.exponent.copy_(exponent)
        self.state.started.copy_(agreed[5] > 0)
        written, nonfinite = agreed[2] > 0, agreed[3] > 0
        vanished = written & (agreed[4] == 0)
        return WritesSeen(mantissa, written, nonfinite, vanished, *(agreed[row].to(torch.int64) for row in (6, 7, 8)))
