"""The entries of shared exponents of a device: what the host would ask there is decided there, and read by nobody.

A CPU looks at a tensor and then writes it or not: a gradient that is in the format already stays as it is, a step with
infinities is not taken, a weight that was put there from outside begins anew. On a device each of these is a flag, a
0-d tensor of bools, and a write that is not to happen is computed all the same and left out of everything that
remembers writes. So the numbers are those of a CPU, and a captured graph makes the decisions anew at each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.exponents.first import FirstExponents
from lowp.exponents.sites import is_result
from lowp.exponents.table import COUNTS, MOST_MANTISSA, ExponentTable, Flush, Written, largest
from lowp.kernels.choose.dispatch import by_triton, has_integer_kernels, runs_triton
from lowp.kernels.int16 import low_words, payloads, predictions
from lowp.kernels.int16.cpu_int16 import Seen
from lowp.kernels.int16.device_mantissas import exponent_of_finite
from lowp.kernels.int16.mantissas import Mantissas
from lowp.kernels.int16.writes import write_there
from lowp.scaling import Autoflex, AutoflexState
from lowp.scaling.powers import times

__all__ = ["Condition", "DeviceTable", "both", "new_table"]

Condition: TypeAlias = Literal[True] | Tensor  # of a write: True, or a 0-d tensor of its device


def both(one: Condition, other: Condition) -> Condition:
    """Return whether both hold; no operation where one of them is True."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one & other
    return one if isinstance(one, Tensor) else other


class DeviceTable(ExponentTable):
    """The entries of one cast whose exponents are tensors of a device, and stay there.

    `flags` has whether something that is not finite was written in this step, by entry.
    """

    def __init__(self, cast: Cast, device: torch.device) -> None:
        super().__init__(cast, device)
        self._first = FirstExponents(self.scaling, device)
        self._scratch = torch.zeros(2, dtype=torch.int32, device=device)  # of Triton's kernel, which leaves zeros there
        self.flags: dict[int, Tensor] = {}
        self._places = torch.zeros(0, dtype=torch.int32, device=device)  # of all entries

    def index(self, site: str) -> int:
        """Return the entry of a site; a new site gets a new entry."""
        found = super().index(site)
        self._number()
        return found

    def _number(self) -> None:
        if len(self._places) != len(self.names):
            self._places = torch.arange(len(self.names), dtype=torch.int32, device=self.device)

    # -- one write ------------------------------------------------------------------------------------------------
    def write(
        self,
        x: Tensor,
        index: int,
        site: str = "",
        in_place: bool = False,
        when: Condition = True,
        otherwise: Any = None,
    ) -> Written:
        """Return x as values of the format, and their exponent, 0-d; note what was seen where `when` holds.

        Where it does not, the values are those of x, and the exponent is `otherwise`, if given. Never in place.
        """
        self._start(x, index, when)
        condition = when if isinstance(when, Tensor) else None
        if x.numel() == 1:
            predicted = self.exponent_of(index)
            held = self._holding(x, predicted)
            result, seen, has_nan, exponent = write_there(x, self.cast, held.reshape(1), 0, condition, otherwise)
            mantissa = (seen.mantissa.long() << (held - predicted).long()).clamp(max=MOST_MANTISSA)
            seen = seen._replace(mantissa=mantissa.to(torch.int32))
        else:
            result, seen, has_nan, exponent = write_there(
                x, self.cast, self.state.exponent, index, condition, otherwise
            )
        payloads.keep(result, self.cast.format, exponent)
        told = seen.nonfinite
        self.flags[index] = self.flags[index] | told if index in self.flags else told
        self.note(index, seen._replace(nonfinite=has_nan) if is_result(site) else seen)
        return Written(result, told, None, exponent)

    def _holding(self, x: Tensor, exponent: Tensor) -> Tensor:
        """Return the exponent for a write of x: of a single number one that holds it."""
        if x.numel() != 1 or not self.scaling_adapts:
            return exponent
        size = x.detach().abs().reshape(())
        is_beyond = size.isfinite() & (size > times(torch.full_like(size, self.scaling.limit), exponent))
        return torch.where(is_beyond, torch.maximum(exponent_of_finite(x, self.own), exponent), exponent)

    def begin(self, x: Tensor, index: int) -> None:
        """Let an entry begin, unless it has begun, with the exponent of a first write of x; nothing is read."""
        self._start(x, index)

    def exponent_of(self, index: int) -> Tensor:
        """The exponent of an entry's next write, a 0-d tensor."""
        exponent: Tensor = self.state.exponent[index].clone()
        return exponent

    def _start(self, x: Tensor, index: int, when: Condition = True) -> None:
        if by_triton(x):
            self._start_by_triton(x, index, when if isinstance(when, Tensor) else None)
            return
        exponent, begins = self._first(largest(x, False))
        anew = ~self.state.started[index] & when
        self._begin(slice(index, index + 1), anew.reshape(1), exponent.reshape(1), begins.reshape(1))

    def _start_by_triton(self, x: Tensor, index: int, when: Tensor | None) -> None:
        from lowp.kernels.triton import mantissas

        entries, first = (self.state.exponent, self.before, self.state.started), self._first
        mantissas.begin(x, entries, index, when, first.bounds, first.exponents, first.of_zeros, self._scratch)

    def _begin(self, places: Any, anew: Tensor, exponents: Tensor, begin: Tensor) -> None:
        """Let entries begin with exponents where `anew` holds, in place: a captured graph reads where it has read."""
        for kept in (self.state.exponent, self.before):
            kept[places] = torch.where(anew, exponents, kept[places])
        self.state.started[places] = torch.where(anew, begin, self.state.started[places])

    def _rounded(self, x: Tensor, exponent: Any, in_place: bool = False) -> tuple[Tensor, Seen, Mantissas | None]:
        there = write_there(x, self.cast, exponent.reshape(1), 0)
        payloads.keep(there.values, self.cast.format, exponent)
        return there.values, there.seen, None

    def low_word(self, x: Tensor, high: Tensor, index: int, axis: int | None) -> Tensor:
        """Return the value of the second word of x, zeros where it needs none."""
        return low_words.low_value_there(x, high, self.state.exponent[index], axis)

    def write_apart(self, x: Tensor, site: str) -> Tensor:
        """Return x as values of the format, and remember nothing."""
        spec = self.cast.scaling
        assert spec is not None
        if spec.kind != "autoflex" and site in self.names:
            return self.write_at(x, self.exponent_of(self.names[site]))
        return self.write_at(x, exponent_of_finite(x, self.own))

    # -- weights ----------------------------------------------------------------------------------------------------
    def admit(self, x: Tensor, index: int) -> None:
        """Forget the entry's past where x would saturate under its exponent; what is written next is the first."""
        anew = self._are_beyond([x], slice(index, index + 1))
        self._forget(slice(index, index + 1), anew)
        self.state.started[index : index + 1] &= ~anew

    def admit_all(
        self, standing: Sequence[Tensor], coming: Sequence[Tensor], sites: list[str], when: Condition
    ) -> None:
        """Let the entries begin anew of which what stands there would saturate; `coming` is what is written next."""
        places = self.order_of(sites)
        anew = self._are_beyond(standing, places) & when
        exponents, begin = self._first(torch.stack([largest(x, False).to(self.before.device) for x in coming]))
        self._forget(places, anew)
        self._begin(places, anew, exponents, begin)

    def _are_beyond(self, tensors: Sequence[Tensor], places: Any) -> Tensor:
        """Whether tensors have an element that entries do not hold, by entry."""
        maxima = torch.stack([x.abs().amax() if x.numel() else x.new_zeros(()) for x in tensors])
        held = times(torch.full_like(maxima, self.scaling.limit), self.state.exponent[places])
        return maxima > held if self.scaling_adapts else torch.zeros_like(maxima, dtype=torch.bool)

    def _forget(self, places: Any, anew: Tensor) -> None:
        if isinstance(self.state, AutoflexState):
            self.state.seen[places] = torch.where(anew, 0, self.state.seen[places])
            self.state.history[places] = torch.where(anew[:, None], 0.0, self.state.history[places])

    # -- the end of a step --------------------------------------------------------------------------------------------
    def flush(self, agreed: Tensor | None = None, tell: bool = True) -> Flush | None:
        """Do `ExponentTable.flush`; if nobody watches, by one kernel of Triton, where that runs."""
        if self.pending and agreed is None and not tell and self._is_observed_by_triton():
            self._observe_by_triton()
            self.pending.clear()
            return None
        return super().flush(agreed, tell)

    def _is_observed_by_triton(self) -> bool:
        is_known = isinstance(self.scaling, Autoflex) and self.scaling.window <= predictions.MOST_WINDOW
        return is_known and self.counts["measured"].dtype is torch.float64 and runs_triton(self.before)

    def _observe_by_triton(self) -> None:
        from lowp.kernels.triton import predictions as kernels

        scaling, entries, seen = self.scaling, list(self.pending), list(self.pending.values())
        assert isinstance(scaling, Autoflex)
        self._number()  # those of a checkpoint
        is_whole = entries == list(range(len(self.names)))
        places = self._places if is_whole else torch.stack([self._places[index] for index in entries])
        written = None
        if any(one.written is not True for one in seen):
            always = torch.ones((), dtype=torch.bool, device=self.device)
            written = torch.stack([always if one.written is True else one.written for one in seen])
        rows = kernels.Writes(
            places,
            torch.stack([one.mantissa for one in seen]),
            torch.stack([one.nonfinite for one in seen]),
            torch.stack([one.vanished for one in seen]),
            written,
        )
        columns = (*self.state, self.before, *(self.counts[name] for name in COUNTS))
        kernels.observe(scaling, columns, rows)

    def flush_before(self, index: int, when: Condition, tell: bool) -> Flush | None:
        """Do `flush` before another write at an entry that was written, where both of them count."""
        earlier = both(self.pending[index].written, when)
        if earlier is True:
            return self.flush(tell=tell)
        left = {place: _counted(seen, ~earlier) for place, seen in self.pending.items()}
        self.pending = {place: _counted(seen, earlier) for place, seen in self.pending.items()}
        told = self.flush(tell=tell)
        self.pending = left
        return told

    def end_step(self) -> None:
        """Forget what was not finite in the step."""
        self.flags.clear()

    def _keep(self, before: Tensor, state: Any) -> None:
        for kept, new in zip((self.before, *self.state), (before, *state), strict=True):
            kept.copy_(new)

    def _learn(self) -> None:
        """Learn nothing: no kernel takes numbers of the host."""

    def _is_set(self, flags: Sequence[Any]) -> bool:
        return True

    def _vector(self, numbers: dict[int, Any], dtype: torch.dtype) -> Tensor:
        """Return what was seen of some entries, 0-d tensors or numbers, as a vector of all.

        All of it is made on the device: a copy from the host is no part of a captured graph.
        """
        parts = {
            index: one.to(dtype) if isinstance(one, Tensor) else torch.full((), one, dtype=dtype, device=self.device)
            for index, one in numbers.items()
        }
        nothing = torch.zeros((), dtype=dtype, device=self.device)
        return torch.stack([parts.get(index, nothing) for index in range(len(self.names))])


def _counted(seen: Seen, when: Condition) -> Seen:
    """Return what a write saw, and nothing where it does not count."""
    return Seen(*[*(one * when for one in seen[:-1]), both(seen.written, when)])


def new_table(cast: Cast, device: torch.device) -> ExponentTable:
    """Return an empty table of a cast for the tensors of a device."""
    return ExponentTable(cast, device) if has_integer_kernels(device) else DeviceTable(cast, device)
