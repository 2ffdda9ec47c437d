"""The table of shared exponents: what one write does, and how the writes of a step update all entries at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast, Rounding
from lowp.compat import widest_float
from lowp.exponents.scalings import current, scaling_of
from lowp.exponents.sites import is_result
from lowp.formats import PowerOfTwo, ScaledFormat
from lowp.kernels.choose.dispatch import has_integer_kernels
from lowp.kernels.int16 import lists as int16_lists
from lowp.kernels.int16 import low_words, payloads, predictions
from lowp.kernels.int16.cpu_int16 import Seen, is_direct
from lowp.kernels.int16.integer import Exact
from lowp.kernels.int16.mantissas import Mantissas, current_exponent, int16_element, mantissas_and_values, values
from lowp.kernels.int16.writes import write_, write_words_
from lowp.kernels.int16.written import WrittenMantissas
from lowp.scaling import Autoflex, AutoflexState, Reactive, WritesSeen
from lowp.scaling.powers import times

__all__ = ["COUNTS", "MOST_MANTISSA", "ExponentTable", "Flush", "SumEntry", "Written", "largest"]


class Flush(NamedTuple):
    """The data that a watcher gets for one step, by entry: exponents and predictions at the time of the writes."""

    sites: list[str]
    written: Tensor  # bool[n]
    mantissa: Tensor  # int32[n], Γ
    exponent: Tensor  # int32[n], log2 κ
    predicted: Tensor | None  # fp64[n], χ; None of scalings that predict no maximum


# observations of a write, by the fields of `Seen`: the maximum, flags, and counts that only reactive exponents read
_FLAGS = {"nonfinite": torch.bool, "vanished": torch.bool}
_COUNTED = {"overflowed": torch.int64, "crowded": torch.int64, "elements": torch.int64}
_SEEN = {"mantissa": torch.int32, **_FLAGS, **_COUNTED, "mask": torch.bool}  # in the order of `Seen`
_LOWEST = -1000  # below every exponent
MOST_MANTISSA = 1 << 29  # that is noted of a single number beyond the entry's exponent, in its units
COUNTS = ("raises_needed", "raises_in_time", "headroom_sum", "measured")


class Written(NamedTuple):
    """A tensor that was written: its values in fp32, whether any is not finite, and its mantissas."""

    values: Tensor
    nonfinite: Any
    mantissas: Mantissas | None = None  # None if any is not finite, and on an accelerator
    exponent: Any = None  # of the values, on an accelerator


class SumEntry(NamedTuple):
    """The entry of a table under which an exact sum is written from its mantissas."""

    table: ExponentTable
    place: int
    exponent: int

    def write(self, found: Exact) -> Tensor:
        """Return the values of a sum given as mantissas, cache the mantissas with them, and note the observations."""
        payload, saturated, largest, sums = found
        payload = payload.contiguous()
        seen = Seen(largest, False, largest == 0 and sums > 0, saturated, 0, payload.numel())
        return self.wrote(WrittenMantissas(values(payload, self.exponent), payload, self.exponent, seen))

    def wrote(self, found: WrittenMantissas) -> Tensor:
        """Return the values of what was written under this entry, and do the same."""
        self.table.note(self.place, found.seen)
        payloads.keep(found.values, self.table.cast.format, self.exponent, found.payload)
        return found.values


class ExponentTable:
    """The entries of one cast.

    `own` is the cast under the exponent of a tensor's own maximum. `is_plain`: writes on a CPU are rounded to nearest
    even, and only their maximum is observed.
    """

    def __init__(self, cast: Cast, device: torch.device) -> None:
        self.cast, self.scaling, self.device = cast, scaling_of(cast), device
        self.has_integer_kernels = has_integer_kernels(device)
        self.is_symmetric = int16_element(cast).symmetric
        is_fixed = cast.scaling is not None and cast.scaling.exponent is not None
        self.own = cast if is_fixed else current(cast)
        is_nearest = cast.rounding is Rounding.NEAREST_EVEN
        self.is_plain = self.has_integer_kernels and is_nearest and not isinstance(self.scaling, Reactive)
        self.names: dict[str, int] = {}
        self.state: Any = self.scaling.init(device, 0)
        self.counts = {name: torch.zeros(0, dtype=widest_float(device), device=device) for name in COUNTS}
        self.before = torch.zeros(0, dtype=torch.int32, device=device)  # the exponent of the previous write
        self.exponents: list[int] = []  # copy of `state.exponent`, for kernels that take numbers
        self.started: list[bool] = []
        self.pending: dict[int, Seen] = {}
        self._ordered: list[str] = []
        self._order = torch.zeros(0, dtype=torch.int64, device=device)

    def index(self, site: str) -> int:
        """Return the entry of a site; a new site gets a new entry."""
        found = self.names.get(site)
        if found is None:
            found = self.names[site] = len(self.names)
            self.state = self.scaling.extend(self.state, 1)
            self.counts = {name: torch.cat((value, value.new_zeros(1))) for name, value in self.counts.items()}
            self.before = torch.cat((self.before, self.state.exponent[-1:]))
            self.exponents.append(self.scaling.first_exponent)
            self.started.append(False)
        return found

    # -- one write ------------------------------------------------------------------------------------------------
    def write(self, x: Tensor, index: int, site: str = "", in_place: bool = False) -> Written:
        """Return x as values of the format under the entry's exponent.

        Notes the observations. Non-finite values stay unchanged. In results, where infinities are ordinary values, the
        entry uses the other values.
        """
        self.begin(x, index)
        predicted = self.exponents[index]
        exponent = self._holding(x, predicted)
        result, seen, found = self._rounded(x, exponent, in_place)
        if exponent != predicted:
            seen = seen._replace(mantissa=min(seen.mantissa << (exponent - predicted), MOST_MANTISSA))
        nonfinite = seen.nonfinite
        if nonfinite and is_result(site):
            seen = seen._replace(nonfinite=bool(x.isnan().any()))
        self.note(index, seen)
        return Written(result, nonfinite, found)

    def begin(self, x: Tensor, index: int) -> None:
        """Let an entry begin, unless it has begun, with the exponent of a first write of x."""
        if not self.started[index]:
            self._start(x, index)

    def exponent_of(self, index: int) -> Any:
        """Return the exponent of an entry's next write: a number on a CPU, a 0-d tensor on an accelerator."""
        return self.exponents[index]

    def low_word(self, x: Tensor, high: Tensor, index: int, axis: int | None) -> Tensor | None:
        """Return the value of the second word of x, just written as `high`; None if x needs none.

        Without an axis x always needs one.
        """
        exponent = self.exponents[index]
        return (
            low_words.low_value(x, high, exponent, self.cast)
            if axis is None or low_words.is_coarse(x, exponent, axis)
            else None
        )

    def is_coarse(self, x: Tensor, index: int, axis: int) -> bool:
        """Whether one word under the entry's exponent loses features of x."""
        self.begin(x, index)
        return bool(low_words.is_coarse(x, self.exponents[index], axis))

    def write_(self, x: Tensor, index: int) -> None:
        """Write x, an fp32 tensor, in place."""
        self.begin(x, index)
        if self.is_plain:
            self.note(index, write_(x, self.cast, self.exponents[index]))
        else:
            x.copy_(self.write(x, index)[0])

    def write_list_(self, tensors: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Write fp32 tensors in place, each at its own entry; one call writes all tensors that it can."""
        direct = [is_direct(x) and self.is_plain for x in tensors]
        for x, index, at_once in zip(tensors, indices, direct, strict=True):
            if not at_once:
                self.write_(x, index)
            else:
                self.begin(x, index)
        chosen = [(x, index) for x, index, at_once in zip(tensors, indices, direct, strict=True) if at_once]
        exponents = [self.exponents[index] for _, index in chosen]
        seen = int16_lists.write_([x for x, _ in chosen], self.cast, exponents) if chosen else []
        for (_, index), one in zip(chosen, seen, strict=True):
            self.note(index, one)

    def write_words_(self, x: Tensor, index: int) -> bool:
        """Write x, an fp32 tensor, in place as two words. Returns False, with nothing done, if `write` must do it."""
        if not self.is_plain:
            return False
        self.begin(x, index)
        seen = write_words_(x, self.cast, self.exponents[index], low_words.LOW_BITS)
        if seen is not None:
            self.note(index, seen)
        return seen is not None

    def may_step(self, weight: Tensor, old: Mantissas, update_index: int, index: int) -> bool:
        """Whether update and weight can be written in one pass, so that neither must be examined first."""
        assert old.seen is not None  # set when the mantissas were made from the weight
        largest = math.ldexp(old.seen.mantissa, old.exponent)
        held = self.scaling_adapts and largest > math.ldexp(self.scaling.limit, self.exponents[index])
        if held or not (self.is_plain and self.started[update_index] and self.started[index]):
            return False
        return not (update_index in self.pending or index in self.pending) and is_direct(weight)

    def write_steps(
        self, weights: Sequence[Tensor], old: Sequence[Mantissas], indices: Sequence[tuple[int, int]]
    ) -> None:
        """Write what a step has changed of weights that `may_step`, and each as the sum, in place.

        `indices` are the entries of update and weight; `old` takes the mantissas.
        """
        exponents = [(self.exponents[update], self.exponents[weight]) for update, weight in indices]
        for pair, seen in zip(indices, int16_lists.write_steps(weights, old, exponents, self.cast), strict=True):
            for index, one in zip(pair, seen, strict=True):
                self.note(index, one)

    def write_apart(self, x: Tensor, site: str) -> Tensor:
        """Return x as values of the format, and remember nothing."""
        spec = self.cast.scaling
        assert spec is not None
        if spec.kind != "autoflex" and site in self.names:
            exponent: int | None = self.exponents[self.names[site]]
        else:
            exponent = current_exponent(x, self.own)
            if exponent is None:
                exponent = current_exponent(torch.where(x.isfinite(), x, 0.0), self.own)
        assert exponent is not None
        return self.write_at(x, exponent)

    def write_at(self, x: Tensor, exponent: Any) -> Tensor:
        """Return x as values of the format under an exponent, and remember nothing."""
        return self._rounded(x, self._holding(x, exponent))[0]

    def _holding(self, x: Tensor, exponent: Any) -> Any:
        """Return the exponent for a write of x: of a single number, such as a loss, one that holds it.

        Nothing of a single number would be left if it were cut off: a loss that is another than the one before.
        """
        if x.numel() != 1 or not self.scaling_adapts:
            return exponent
        if not math.ldexp(self.scaling.limit, exponent) < abs(float(x)) < math.inf:
            return exponent
        own = current_exponent(x, self.own)
        return exponent if own is None else max(own, exponent)

    def _rounded(self, x: Tensor, exponent: Any, in_place: bool = False) -> tuple[Tensor, Seen, Mantissas | None]:
        """Return x as values of the format, the observations, and the mantissas, which are kept, if x is finite."""
        found, result = mantissas_and_values(x, self.cast, exponent, in_place)
        payload, _, seen = found
        assert seen is not None
        if isinstance(self.scaling, Reactive):
            half = int16_element(self.cast).maximum // 2  # not by abs: of -32768 int16 has none
            seen = seen._replace(crowded=int(((payload > half) | (payload < -half)).sum()))
        if seen.nonfinite:
            return result, seen, None
        payloads.keep(result, self.cast.format, exponent, payload)
        return result, seen, found

    def admit(self, x: Tensor, index: int) -> None:
        """Forget the entry's past if x would saturate under its exponent."""
        held = math.ldexp(self.scaling.limit, self.exponents[index])
        if x.numel() and self.scaling_adapts and float(x.abs().amax()) > held:
            self.started[index] = False
            self.state.started[index] = False
            if isinstance(self.state, AutoflexState):
                self.state.seen[index] = 0
                self.state.history[index] = 0.0

    def cut_off(self) -> list[int]:
        """Return the entries whose writes in this step saturated under the largest exponent; [] on an accelerator."""
        format = self.cast.format
        assert isinstance(format, ScaledFormat) and isinstance(format.scale, PowerOfTwo)
        if not (self.has_integer_kernels and self.scaling_adapts):
            return []
        highest = format.scale.max_exponent
        return [i for i, seen in self.pending.items() if seen.overflowed > 0 and self.exponents[i] >= highest]

    def cut_most(self) -> list[int]:
        """Return the entries whose writes in this step lost most of their numbers; [] on an accelerator."""
        if not (self.has_integer_kernels and self.scaling_adapts):
            return []
        return [i for i, seen in self.pending.items() if 2 * seen.overflowed > seen.elements]

    @property
    def scaling_adapts(self) -> bool:
        """Whether exponents may change at all."""
        return not isinstance(self.scaling, Autoflex) or self.scaling.adapt

    def _start(self, x: Tensor, index: int) -> None:
        maximum = largest(x, True)
        one = type(self.state)(*(part[index : index + 1] for part in self.state))
        begun = self.scaling.start(one, maximum.reshape(1).to(self.device))
        for part, new in zip(self.state, begun, strict=True):
            part[index : index + 1] = new
        self.before[index : index + 1] = begun.exponent
        self.exponents[index], self.started[index] = int(begun.exponent), bool(begun.started)

    def note(self, index: int, seen: Seen) -> None:
        """Note the observations of one write at an entry until the step is flushed."""
        earlier = self.pending.get(index)
        self.pending[index] = seen if earlier is None else earlier.merged(seen)

    # -- the end of a step ----------------------------------------------------------------------------------------
    def flush(self, agreed: Tensor | None = None, tell: bool = True) -> Flush | None:
        """Observe all writes since the last flush, or the observations of all ranks from `AgreedSites.agree`.

        Returns the data for a watcher if `tell`, else None; None if nothing was written.
        """
        if not self.names or (not self.pending and agreed is None):
            return None
        if agreed is None and not tell and self.has_integer_kernels and predictions.observes(self.scaling):
            columns = (*self.state, self.before, *(self.counts[name] for name in COUNTS))
            predictions.observe(self.scaling, columns, self.pending.items())
            self.pending.clear()
            self._learn()
            return None
        seen = self._observed() if agreed is None else self._adopted(agreed)
        mask = seen.mask
        assert mask is not None
        self._count(seen, mask)
        flush = self._told(seen, mask) if tell else None
        before, state = torch.where(mask, self.state.exponent, self.before), self.scaling.observe(self.state, seen)
        self._keep(before, state)
        self.pending.clear()
        self._learn()
        return flush

    def _told(self, seen: WritesSeen, mask: Tensor) -> Flush:
        predicted = None
        if isinstance(self.scaling, Autoflex):
            # κ in the prediction is that of the previous write
            predicted = self.scaling.predicted_maximum(self.state._replace(exponent=self.before))
            predicted = torch.where(self.state.seen > 0, predicted, math.nan)
        return Flush(list(self.names), mask, seen.mantissa, self.state.exponent.clone(), predicted)

    def _observed(self, whole: bool = False) -> WritesSeen:
        """Return the observations by entry; unless `whole`, without unset flags and counts that are not read."""
        columns = dict(zip(_SEEN, zip(*self.pending.values(), strict=True), strict=True))
        if not whole:
            unread = {} if isinstance(self.scaling, Reactive) else _COUNTED
            columns = {name: column for name, column in columns.items() if name not in unread}
            columns = {name: column for name, column in columns.items() if name not in _FLAGS or self._is_set(column)}
        vectors = {
            name: self._vector(dict(zip(self.pending, column, strict=True)), _SEEN[name])
            for name, column in columns.items()
        }
        return WritesSeen(**vectors)

    def _vector(self, numbers: dict[int, Any], dtype: torch.dtype) -> Tensor:
        """Return observations of some entries as one vector."""
        return torch.tensor([numbers.get(index, 0) for index in range(len(self.names))], dtype=dtype, device="cpu")

    def _is_set(self, flags: Sequence[Any]) -> bool:
        """Whether any of some flags may be set."""
        return any(flags)

    def columns(self, sites: list[str]) -> Tensor:
        """Return this rank's observations at some sites, fp64[9, n], for a maximum over ranks; zeros if it saw nothing.

        Rows: the maximum as a real value; the exponent, counted from `_LOWEST`; the flags written, not finite, not
        vanished and started; the numbers of elements that did not fit, that were crowded, and that were written.
        """
        if self.pending:
            own = self._observed(whole=True)
        else:
            zeros = torch.zeros(len(self.names), dtype=torch.int64, device=self.device)
            flags = zeros.bool()
            own = WritesSeen(zeros.int(), flags, flags, flags, zeros, zeros, zeros)
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

    def order_of(self, sites: list[str]) -> Tensor:
        """Return where the entries of sites are, int64[n] on the table's device; sent there anew for other sites."""
        if self._ordered != sites:
            self._ordered = list(sites)
            self._order = torch.tensor([self.names[site] for site in sites], device=self.device)
        return self._order

    def _adopted(self, agreed: Tensor) -> WritesSeen:
        """Take over the largest exponent under which a rank has written. Return the observations of all ranks."""
        exponent = torch.where(agreed[1] > 0, (agreed[1] + _LOWEST).to(torch.int32), self.state.exponent)
        mantissa = torch.ldexp(agreed[0], -exponent).round().clamp(max=MOST_MANTISSA).to(torch.int32)
        self.state = self.state._replace(exponent=exponent, started=agreed[5] > 0)
        written, nonfinite = agreed[2] > 0, agreed[3] > 0
        vanished = written & (agreed[4] == 0)
        return WritesSeen(mantissa, written, nonfinite, vanished, *(agreed[row].to(torch.int64) for row in (6, 7, 8)))

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

    def _keep(self, before: Tensor, state: Any) -> None:
        """Take over what the writes of a step have made of the entries."""
        self.before, self.state = before, state

    def _learn(self) -> None:
        """Copy the new exponents for kernels that take numbers."""
        self.exponents = self.state.exponent.tolist()
        self.started = self.state.started.tolist()


def largest(x: Tensor, is_known: bool) -> Tensor:
    """Return the largest finite |x|, 0 if there is none. `is_known`: reading whether all are finite costs nothing."""
    magnitude = x.detach().abs()
    found = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    if not is_known or not bool(found.isfinite()):
        found = torch.where(magnitude.isfinite(), magnitude, 0.0).amax() if x.numel() else found
    return found
