"""The table of shared exponents: what one write does.

A CPU's exponents are begun by the C++ library, in the call that writes; those of other devices by Triton's kernels or
by torch, and nobody reads them.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp import distributed
from lowp.casts import Cast, Rounding
from lowp.exponents.learning import Condition, LearningTable, Run
from lowp.exponents.scalings import FirstExponents
from lowp.kernels.choose.dispatch import by_triton, uses_library
from lowp.kernels.int16 import entries, payloads
from lowp.kernels.int16.cpu_int16 import memory_of
from lowp.kernels.int16.mantissas import Mantissas, laid_out, mantissas_and_values, own_exponent
from lowp.scaling import AutoflexState
from lowp.scaling.powers import times


class Written(NamedTuple):
    """A tensor that was written: its values in fp32, the exponent of a write that is noted, and a CPU's mantissas."""

    values: Tensor
    exponent: Tensor | None = None
    mantissas: Mantissas | None = None  # those that the C++ library has written, if all is finite


class ExponentTable(LearningTable):
    """The entries of one cast, and the writes at them.

    `is_quick`: the C++ library may write entries by itself, each in its first write of a step, as writes are rounded to
    nearest even and only their maximum is observed.
    """

    def __init__(self, cast: Cast, device: torch.device, run: Run | None = None) -> None:
        super().__init__(cast, device, run)
        self._is_fixed = cast.scaling is not None and cast.scaling.exponent is not None  # the exponent is given
        # under the exponent of a tensor's own maximum
        self._own = cast if self._is_fixed else Cast(cast.format, cast.rounding, cast.overflow)
        is_one = self.scaling.guess is self.scaling
        self.is_quick = self.is_host and cast.rounding is Rounding.NEAREST_EVEN and is_one
        self._scratch = torch.zeros(2, dtype=torch.int32, device=device)  # of Triton's kernel, which leaves zeros there
        self._looked_up = None if self.is_host else FirstExponents(self.scaling, device)

    def place(self, site: str, when: Condition = True) -> int:
        """Return the entry of a site, ready for a write of training, which counts if `when` holds."""
        index = self.names.get(site)
        if index is None:
            return self.index(site)
        if index in self.written and not distributed.has_other_ranks():
            # a second write at a site uses the result of the first; a step may end without `flush`, in a region alone
            if not self.run.has_told_beyond and (beyond := self.cut_off()[0]):
                self.run.has_told_beyond = True
                warnings.warn(
                    f"numbers beyond the largest of {self.cast.format} are cut off, first in the {beyond[0]}. If "
                    "this continues, look at the learning rate and at the scale of inputs and loss",
                    UserWarning,
                    stacklevel=3,
                )
            self._flush_before(index, when)
        return index

    def finds_exact(self, x: Tensor, site: str) -> bool:
        """Whether a write may be `unless_exact`: x was not looked at before, nor its site written in this step."""
        index = self.names.get(site)
        if index is None or index in self.written or not self.is_host or self._is_fixed:
            return False
        return payloads.hint(x, self.cast.format) is None and memory_of(x) is not None  # which the library reads

    def write(
        self, x: Tensor, index: int, in_place: bool = False, when: Condition = True, otherwise: Tensor | None = None,
        unless_exact: bool = False,
    ) -> Written:  # fmt: skip
        """Return x as values of the format under the entry's exponent; what was seen is noted where `when` holds.

        Non-finite values stay unchanged. Where `when` does not hold, the values are those of x, and the exponent is
        `otherwise`, if given. On a CPU the values may take x's memory, `in_place`; with `unless_exact`, where
        `finds_exact`, x that is in the format is returned as it is, without an exponent.
        """
        if not (self.is_host and uses_library()):
            return self._write_unread(x, index, when, otherwise)
        given, x = x, laid_out(x, self.cast)
        payload = torch.empty_like(x, dtype=torch.int16)
        result = x if in_place and x.dtype is torch.float32 else torch.empty_like(x, dtype=torch.float32)
        how = entries.UNLESS_EXACT if unless_exact else entries.VALUES
        exponent, nonfinite = entries.write(self.block, self.cast, index, x, payload, result, how)
        if nonfinite < 0:
            payloads.keep(given, self.cast.format, exponent)
            return Written(given)
        self.written[index] = True
        if nonfinite:
            return Written(result, exponent)
        payloads.keep(result, self.cast.format, exponent, payload)
        return Written(result, exponent, Mantissas(payload, exponent))

    def _write_unread(self, x: Tensor, index: int, when: Condition, otherwise: Tensor | None) -> Written:
        """Do that without the C++ library; nothing waits for a device."""
        x = laid_out(x, self.cast)
        self.begin(x, index, when)
        how = when if isinstance(when, Tensor) else None, otherwise, None if index in self.written else self.seen[index]
        if x.numel() == 1:
            predicted = self.exponent(index)
            held = self._holding(x, predicted)
            found = entries.write_unread(x, self.cast, held.reshape(1), 0, *how)
            found.record[:1] = (found.record[:1] << (held - predicted).long()).clamp(max=entries.MOST_MANTISSA)
        else:
            found = entries.write_unread(x, self.cast, self.state.exponent, index, *how)
        if index in self.written:
            self.note(index, found.record, when)
        self.written.setdefault(index, when)
        self._keep(found.values, found.exponent)
        return Written(found.values, found.exponent)

    def _keep(self, values: Tensor, exponent: Tensor) -> None:
        """Keep the exponent of values; on a CPU only where they are finite, so that mantissas stand for them."""
        if not self.is_host or bool(values.isfinite().all()):
            payloads.keep(values, self.cast.format, exponent)

    def write_apart(self, x: Tensor, site: str, exponent: Tensor | None) -> Tensor:
        """Return x as values of the format under an exponent, and remember nothing.

        By default that of x's own maximum, or the site's where the cast predicts none.
        """
        if exponent is None:
            spec = self.cast.scaling
            is_kept = spec is not None and spec.kind != "autoflex" and site in self.names
            exponent = self.exponent(self.names[site]) if is_kept else own_exponent(x, self._own, only_finite=True)
        held = self._holding(x, exponent)
        x = laid_out(x, self.cast)
        if self.is_host and uses_library():
            found, result, seen = mantissas_and_values(x, self.cast, held)
            if not seen.nonfinite:
                payloads.keep(result, self.cast.format, held, found.payload)
            return result
        result = entries.write_unread(x, self.cast, held.reshape(1), 0).values
        self._keep(result, held)
        return result

    def _holding(self, x: Tensor, exponent: Tensor) -> Tensor:
        """Return the exponent for a write of x: of a single number, such as a loss, one that holds it.

        Nothing of a single number would be left if it were cut off: a loss that is another than the one before.
        """
        if x.numel() != 1 or not self._adapts:
            return exponent
        size = x.detach().abs().reshape(())
        is_beyond = size.isfinite() & (size > times(torch.full_like(size, self.scaling.limit), exponent))
        return torch.where(is_beyond, torch.maximum(own_exponent(x, self._own), exponent), exponent)

    def exponent(self, index: int) -> Tensor:
        """The exponent of an entry's next write: a copy, 0-d."""
        exponent: Tensor = self.state.exponent[index].clone()
        return exponent

    def has_begun(self, site: str) -> bool:
        """Whether a site has an exponent: on a CPU that of numbers other than 0, on a device that of any write."""
        index = self.names.get(site)
        return index is not None and (not self.is_host or bool(self.state.started[index]))

    def begin(self, x: Tensor, index: int, when: Condition = True) -> None:
        """Let an entry begin, unless it has begun, with the exponent of a first write of x; nothing is written."""
        if self.is_host and bool(self.state.started[index]):
            return
        if by_triton(x):
            from lowp.kernels.triton import mantissas

            given = x, (self.state.exponent, self.before, self.state.started), index
            flag = when if isinstance(when, Tensor) else None
            mantissas.begin(
                *given, flag, self._first.bounds, self._first.exponents, self._first.of_zeros, self._scratch
            )
            return
        exponent, begins = self._first(largest(x, self.is_host).to(self.device))
        anew = ~self.state.started[index] & when
        for column, first in ((self.state.exponent, exponent), (self.before, exponent), (self.state.started, begins)):
            column[index] = torch.where(anew, first, column[index])  # a captured graph reads where it has read

    @property
    def _first(self) -> FirstExponents:
        if self._looked_up is None:  # the C++ library has no need of it
            self._looked_up = FirstExponents(self.scaling, self.device)
        return self._looked_up

    def admit(self, tensors: Sequence[Tensor], sites: Sequence[str]) -> None:
        """Restart entries that hold less than what stands at their sites, set from outside: they begin anew.

        Weights that were loaded or scaled between two steps were not predicted, so they must not be cut off. Nothing is
        read.
        """
        known = [place for place, site in enumerate(sites) if site in self.names]
        if not (self._adapts and known):
            return
        tensors, sites = [tensors[place].detach() for place in known], [sites[place] for place in known]
        places = self.order_of(sites)
        wide = self.counts["measured"]
        maxima = torch.stack([x.abs().amax().to(wide) if x.numel() else wide.new_zeros(()) for x in tensors])
        held = times(torch.full_like(maxima, self.scaling.limit), self.state.exponent[places])
        anew = (maxima > held) & self.run.counts(self.is_host)
        self.state.started[places] &= ~anew
        if isinstance(self.state, AutoflexState):
            self.state.seen[places] = torch.where(anew, 0, self.state.seen[places])
            self.state.history[places] = torch.where(anew[:, None], 0.0, self.state.history[places])


def largest(x: Tensor, is_known: bool) -> Tensor:
    """Return the largest finite |x|, 0 if there is none. `is_known`: reading whether all are finite costs nothing."""
    magnitude = x.detach().abs()
    found = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    if not is_known or not bool(found.isfinite()):
        found = torch.where(magnitude.isfinite(), magnitude, 0.0).amax() if x.numel() else found
    return found
