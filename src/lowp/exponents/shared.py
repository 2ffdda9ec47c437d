"""Shared exponents of sites: which entry a tensor is written under, and the state of all entries.

A site is one tensor that one operation writes at one spot of the step (`sites` defines spots). Its name is a text:
"output of 0 linear", "weight gradient of layer1.0.conv1 conv2d", "update of fc.bias". All sites of one cast share one
vectorised state. The maxima of a step's writes are observed together at the end of the step, when ranks agree on them.
Writes outside of training (no gradients recorded) are not remembered and use the exponent of the tensor's own maximum:
an evaluation does not change the training and does not depend on earlier evaluations.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.3 and algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowp import distributed
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.exponents import saved
from lowp.exponents.device_table import Condition, DeviceTable, both, new_table
from lowp.exponents.faults import cut_off_sites, faulty_sites, nonfinite_flags, warn_of_cut_off
from lowp.exponents.ranks import AgreedSites
from lowp.exponents.sites import Passes, Spots, features_axis, is_of_optimizer
from lowp.exponents.summary import Summary, counted_by_site, summarised
from lowp.exponents.table import ExponentTable, Flush, SumEntry
from lowp.exponents.weights import WeightSteps
from lowp.hooks import listed
from lowp.kernels.choose import hardware
from lowp.kernels.int16 import low_words, payloads, squares
from lowp.kernels.int16.cpu_int16 import Seen, is_direct
from lowp.kernels.int16.lists import exact_mantissas as exact_list
from lowp.kernels.int16.mantissas import Mantissas, exact_mantissas
from lowp.kernels.tracing import is_sharded
from lowp.scaling.powers import LARGEST_NORMAL, times

__all__ = ["SharedExponents"]


class SharedExponents:
    """The exponents of all sites of a training run: `write` uses them, `flush` updates them, `summary` sums them up."""

    def __init__(self) -> None:
        self._groups: dict[Cast, ExponentTable] = {}
        self._passes = Passes()
        self._faults: list[str] = []
        self._watchers: list[Callable[[Flush], object]] = []
        self._listeners: list[Callable[[str, Tensor, int], object]] = []
        self._unless: Tensor | None = None
        self._is_apart = False
        self._agreed = AgreedSites()
        self.has_told_beyond = False  # about numbers too large for the format
        self.has_told_most = False  # about tensors of which most was cut off

    # -- writing --------------------------------------------------------------------------------------------------
    def write(
        self,
        x: Tensor,
        cast: Cast,
        site: str,
        *,
        training: bool = True,
        unless_exact: bool = False,
        in_place: bool = False,
    ) -> Tensor:
        """Return the values of `written`, which takes the same arguments."""
        return self.written(x, cast, site, training=training, unless_exact=unless_exact, in_place=in_place)[0]

    def written(
        self,
        x: Tensor,
        cast: Cast,
        site: str,
        *,
        training: bool = True,
        unless_exact: bool = False,
        in_place: bool = False,
    ) -> tuple[Tensor, Mantissas | None]:
        """Return x, fp32 or fp64, as values of the cast's format in fp32, rounded once under the site's exponent.

        Saturates what does not fit. What is infinite or NaN stays so, and the site is among the `faults`.
        `unless_exact` gives x back where it is in the format, under whatever exponent, and notes nothing. Outside of
        `training` the exponent is that of x's own maximum, or the site's where the cast predicts none. `in_place`:
        nobody else reads x, and the values may take its memory. The mantissas are those of a write on a CPU that was
        noted, if they are all of it: None beside a second word, and of what is not finite.
        """
        if type(x) is not Tensor and is_sharded(x):
            raise InvalidInput(
                f"a tensor {tuple(x.shape)} that is distributed over ranks (a DTensor, by tensor parallelism) cannot "
                f"be written in {cast}: an exponent belongs to the whole tensor. Use dfp16, or another precision whose "
                "exponents are not predicted"
            )
        x = x.detach() if x.requires_grad else x  # the same tensor object if possible, for data cached by tensor
        if unless_exact and payloads.is_exact(x, cast):
            return x.float(), None
        group, training = self._group(cast, x.device), training and not self._is_apart
        if isinstance(group, DeviceTable):
            return self._write_there(group, x, site, training, unless_exact), None
        if not training:
            return group.write_apart(x, site), None
        index = self._begun(group, site)
        is_long = max(x.shape, default=0) >= low_words.FEATURES
        result, nonfinite, found, _ = group.write(x, index, site, in_place and not is_long and not self._listeners)
        if is_long:
            result, found = self._with_low_word(group, x, result, site), None
        if nonfinite and site not in self._faults:
            self._faults.append(site)
        for listener in self._listeners:
            listener(site, x, group.exponents[index])
        return result, found

    def _write_there(self, group: DeviceTable, x: Tensor, site: str, training: bool, unless_exact: bool) -> Tensor:
        """Do `write` on a device, which decides by itself whether it happens."""
        found = payloads.exact_there(x, group.cast) if unless_exact else None
        when: Condition = True if found is None else ~found[0]
        if not training:
            result = group.write_apart(x, site)
            return result if when is True else torch.where(when, result, x.float())
        when = when if self._unless is None else both(when, ~self._unless)
        index = self._begun(group, site, when)
        otherwise = None if found is None else found[1]
        result, _, _, exponent = group.write(x, index, site, when=when, otherwise=otherwise)
        if max(x.shape, default=0) >= low_words.FEATURES:
            result = self._with_low_word(group, x, result, site)
            if when is not True:  # x + (x - x) is not x if x is infinite
                result = torch.where(when, result, x.float())
            payloads.keep(result, group.cast.format, exponent)
        for listener in self._listeners:
            listener(site, x, group.exponents[index])
        return result

    @contextmanager
    def unless(self, is_skipped: Tensor | None) -> Iterator[None]:
        """Let writes on a device give back what they are given, and be forgotten, where a flag of it is set."""
        before, self._unless = self._unless, is_skipped
        try:
            yield
        finally:
            self._unless = before

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let `write` take all tensors as outside of training, in all threads: none is cut off, and none noted."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    @staticmethod
    def _with_low_word(group: ExponentTable, x: Tensor, high: Tensor, site: str) -> Tensor:
        """Return the written value of x, with a second word if one word would lose features of a gradient."""
        axis = features_axis(site, x)
        if axis is None:
            return high
        if not low_words.has_low_word(group.cast):
            low_words.warn_of_loss(x, high, group.cast, f"the {site}", axis)
            return high
        low = group.low_word(x, high, group.names[site], None if is_of_optimizer(site) else axis)
        return high if low is None else low.add_(high)

    def sum_entry(self, cast: Cast, site: str) -> SumEntry | None:
        """Return the entry for writing an exact sum of training directly from its integers.

        None if the sum itself must be examined and passed to `write`: at a first write, `apart`, for listeners, and in
        other rounding modes.
        """
        if self._listeners or self._is_apart:
            return None
        group = self._group(cast, torch.device("cpu"))
        index = self._begun(group, site)
        return SumEntry(group, index, group.exponents[index]) if group.is_plain and group.started[index] else None

    def sum_entries(self, cast: Cast, sites: Sequence[str]) -> list[SumEntry] | None:
        """Return `sum_entry` of several sites; None, with nothing done, if a site has none or was written before."""
        group = None if self._listeners else self._groups.get(cast)
        if group is None or not group.is_plain:
            return None
        found = []
        for site in sites:
            index = group.names.get(site)
            if index is None or index in group.pending or not group.started[index]:
                return None
            found.append(SumEntry(group, index, group.exponents[index]))
        return found

    def write_(self, x: Tensor, cast: Cast, site: str) -> None:
        """Write x, an fp32 tensor, in place, as `write` does."""
        if self._listeners:
            x.copy_(self.write(x, cast, site))
            return
        group = self._group(cast, x.device)
        if not group.has_integer_kernels:  # an accelerator would have to be read to know whether x is coarse
            x.copy_(self.write(x, cast, site))
            return
        index = self._begun(group, site)
        axis = features_axis(site, x) if low_words.has_low_word(cast) else None
        if axis is not None and (is_of_optimizer(site) or group.is_coarse(x, index, axis)):
            if not group.write_words_(x, index):
                x.copy_(self.write(x, cast, site))
                return
        else:
            group.write_(x, index)
        self._note_faults(group, ((site, index),))

    def write_list_(self, tensors: Sequence[Tensor], cast: Cast, sites: Sequence[str]) -> None:
        """Write fp32 tensors in place, each at its own site, as `write_` does."""
        group = self._group(cast, tensors[0].device) if tensors else None
        if group is None or self._listeners or not group.has_integer_kernels or len(set(sites)) < len(sites):
            for x, site in zip(tensors, sites, strict=True):
                self.write_(x, cast, site)
            return
        has_words = low_words.has_low_word(cast)
        chosen: dict[str, Tensor] = {}
        for x, site in zip(tensors, sites, strict=True):
            if has_words and features_axis(site, x) is not None:
                self.write_(x, cast, site)
            else:
                chosen[site] = x
        indices = [self._begun(group, site) for site in chosen]
        group.write_list_(list(chosen.values()), indices)
        self._note_faults(group, zip(chosen, indices, strict=True))

    def square_entry(self, x: Tensor, cast: Cast, site: str) -> SumEntry | None:
        """Return the entry under which `squares.write_` may write x, in fp32; None, with nothing done, if it may not.

        It may not where `write` has to see the root: as for `sum_entries`, `apart`, where a root may need a second
        word, and where `squares` does not serve x.
        """
        if self._is_apart or max(x.shape, default=0) >= low_words.FEATURES:
            return None
        found = self.sum_entries(cast, [site])
        return found[0] if found is not None and squares.serves(x, found[0].exponent) else None

    def note(self, site: str, entry: SumEntry, seen: Seen) -> None:
        """Note what was seen of a tensor that was written under an entry of a site."""
        entry.table.note(entry.place, seen)
        self._note_faults(entry.table, ((site, entry.place),))

    def begin_steps(
        self, weights: Sequence[Tensor], cast: Cast, sites: Sequence[tuple[str, str]]
    ) -> WeightSteps | None:
        """Return the steps to come of those weights that `end_steps` can write all at once; None if there are none.

        `sites` are those of update and weight.
        """
        group = None if self._listeners else self._groups.get(cast)
        return None if group is None else WeightSteps.begin(group, weights, sites)

    def end_steps(self, steps: WeightSteps) -> bool:
        """Write what a step has changed of weights, as `write_steps` does. False, with nothing done, if moved."""
        bad = None if self._listeners else steps.write()
        for index in bad or ():
            site = next(name for name, place in steps.table.names.items() if place == index)
            if site not in self._faults:
                self._faults.append(site)
        return bad is not None

    def write_steps(
        self, weights: Sequence[Tensor], old: Sequence[Mantissas], cast: Cast, sites: Sequence[tuple[str, str]]
    ) -> list[bool]:
        """Write what a step has changed of weights since they had the mantissas `old`, and each as the sum, in place.

        In one pass; `sites` are those of update and weight. Returns False, with nothing done, for each weight where
        `write` has to see one after the other.
        """
        group = self._groups.get(cast)
        if group is None or self._listeners or len({site for pair in sites for site in pair}) < 2 * len(sites):
            return [False] * len(weights)
        chosen: dict[int, tuple[int, int]] = {}
        for number, (weight, one, (update, site)) in enumerate(zip(weights, old, sites, strict=True)):
            places = group.names.get(update), group.names.get(site)
            if places[0] is not None and places[1] is not None and group.may_step(weight, one, places[0], places[1]):
                chosen[number] = places[0], places[1]
        if chosen:
            group.write_steps([weights[i] for i in chosen], [old[i] for i in chosen], list(chosen.values()))
        for number, indices in chosen.items():
            self._note_faults(group, zip(sites[number], indices, strict=True))
        return [number in chosen for number in range(len(weights))]

    def _note_faults(self, group: ExponentTable, written: Iterable[tuple[str, int]]) -> None:
        for site, index in written:
            if group.pending[index].nonfinite and site not in self._faults:
                self._faults.append(site)

    def mantissas(self, tensors: Sequence[Tensor], cast: Cast, sites: Sequence[str]) -> list[Mantissas | None]:
        """Return the mantissas of the tensor at each site, bit for bit; None if a tensor is not in the format."""
        group = self._groups.get(cast)
        found: list[Mantissas | None] = [None] * len(tensors)
        if group is None or not group.has_integer_kernels:
            return found
        hints = {
            i: group.exponents[group.names[site]]
            for i, (x, site) in enumerate(zip(tensors, sites, strict=True))
            if site in group.names and is_direct(x)
        }
        if not hints:  # without the library there are none
            return found
        for i, one in zip(hints, exact_list([tensors[i] for i in hints], list(hints.values())), strict=True):
            found[i] = exact_mantissas(tensors[i], cast, hints[i]) if one is None else one
        return found

    def _group(self, cast: Cast, device: torch.device) -> ExponentTable:
        if not hardware.has_numbers(device):  # a model that is called for its shapes writes no numbers
            return new_table(cast, device)
        for group in self._groups.values():  # one or two
            if group.cast is cast:
                return group
        found = self._groups.get(cast)
        if found is None:
            found = self._groups[cast] = new_table(cast, device)
        return found

    def _begun(self, group: ExponentTable, site: str, when: Condition = True) -> int:
        """Return the entry of a site, ready for a write of training, which counts if `when` holds."""
        index = group.names.get(site)
        if index is None:
            return group.index(site)
        if index in group.pending and not distributed.has_other_ranks():
            # a second write at a site uses the result of the first
            if isinstance(group, DeviceTable):
                self._tell(group.flush_before(index, when, bool(self._watchers)))
            else:  # a step that ends without `flush`, as in a region of its own
                if not self.has_told_beyond and (cut_off := cut_off_sites([group])):
                    self.has_told_beyond = True
                    warn_of_cut_off(group.cast, cut_off[0])
                self._flush(group)
        return index

    def has_begun(self, cast: Cast, site: str) -> bool:
        """Whether a site has an exponent: on a CPU that of numbers other than 0, on a device that of any write."""
        group = self._groups.get(cast)
        index = None if group is None else group.names.get(site)
        return group is not None and index is not None and (isinstance(group, DeviceTable) or group.started[index])

    def begin(self, x: Tensor, cast: Cast, site: str) -> None:
        """Let a site begin, unless it has begun, with the exponent of a first write of x; nothing is written."""
        self._group(cast, x.device).begin(x, self._begun(self._group(cast, x.device), site))

    def admit_all(self, standing: Sequence[Tensor], coming: Sequence[Tensor], cast: Cast, sites: list[str]) -> None:
        """Do `admit` for sites of a device, before `coming` is written at them; nothing is read."""
        group = self._groups.get(cast)
        if isinstance(group, DeviceTable) and sites:
            group.admit_all(standing, coming, sites, True if self._unless is None else ~self._unless)

    def admit(self, x: Tensor, cast: Cast, site: str) -> None:
        """Restart a site if x, which was set from outside, is larger than its exponent can hold.

        Weights that were loaded or scaled between two steps were not predicted, so they must not be cut off.
        """
        group = self._groups.get(cast)
        if group is not None and site in group.names:
            group.admit(x.detach(), group.names[site])

    def write_again(self, x: Tensor, cast: Cast, site: str, exponent: int | Tensor, unless_exact: bool) -> Tensor:
        """Return the earlier result of `write` under this exponent, and note nothing."""
        x = x.detach() if x.requires_grad else x
        if unless_exact and payloads.is_exact(x, cast):
            return x.float()
        result = self._group(cast, x.device).write_at(x, exponent)
        if unless_exact and isinstance(exponent, Tensor):
            return torch.where(payloads.exact_there(x, cast)[0], x.float(), result)
        return result

    def latest_exponent(self, cast: Cast, site: str) -> Any:
        """Return the exponent of the latest write at a site in this step (a tensor on an accelerator), or None."""
        group = self._groups.get(cast)
        index = None if group is None else group.names.get(site)
        if group is None or index is None or index not in group.pending:
            return None
        return group.exponent_of(index)

    def spots(self) -> Spots:
        """Return the spots of a new entry of a region."""
        return Spots(self._passes)

    def keep_sites_of(self, model: nn.Module) -> None:
        """Give the sites of a model and of its parts to no other model, also after it is gone."""
        self._passes.keep_sites_of(model)

    # -- steps ----------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """End a step: observe all writes of training, on all ranks, and predict the next exponents.

        With several ranks, each rank must call this.
        """
        self._passes.end_step()
        agreed: dict[Cast, Tensor] = {}
        if distributed.has_other_ranks():
            agreed = self._agreed.agree(self._groups, self._group, distributed.world())
        items = list(self._groups.items())
        if len(items) > 1:
            items.sort(key=lambda one: str(one[0]))  # the same order on every rank
        for cast, group in items:
            self._flush(group, agreed.get(cast))
            if isinstance(group, DeviceTable):
                group.end_step()
        self._faults = []

    def _flush(self, group: ExponentTable, agreed: Tensor | None = None) -> None:
        self._tell(group.flush(agreed, tell=bool(self._watchers)))

    def _tell(self, done: Flush | None) -> None:
        if done is not None:
            for watcher in self._watchers:
                watcher(done)

    def any_rank(self, is_faulty: bool) -> bool:
        """Return whether any rank found its step faulty. Every rank must call this before it ends its step.

        Raises Misuse, on all ranks, if they do not have the same sites.
        """
        return self._agreed.fault(is_faulty, distributed.world()) if distributed.has_other_ranks() else is_faulty

    def faults(self) -> list[str]:
        """Return the sites where a non-finite value was written in this step, in order.

        Empty if only results, and no gradient, are not finite: a program may mask with infinities, or not use an
        overflowed result. Waits for an accelerator, once; a CPU knows the answer.
        """
        return faulty_sites(self._faults, self.flags())

    def flags(self) -> dict[str, Tensor]:
        """Whether what was written in this step was not finite, by site, of the sites of devices: nothing is read."""
        return nonfinite_flags(self._groups.values())

    def beyond(self, most: bool = False) -> list[str]:
        """Return the sites where numbers were cut off in this step that no exponent of the format can hold.

        With `most`, those where most numbers were, under whatever exponent. Only for writes on a CPU: an accelerator is
        not waited for.
        """
        return cut_off_sites(self._groups.values(), most)

    # -- what was seen --------------------------------------------------------------------------------------------
    def sites(self) -> list[str]:
        """Return the sites, in the order of their first writes."""
        return [name for group in self._groups.values() for name in group.names]

    def exponent(self, site: str) -> int:
        """Return the exponent of the next write at a site. Raises InvalidInput for a site that was never written."""
        for group in self._groups.values():
            if site in group.names:
                return int(group.state.exponent[group.names[site]])
        raise InvalidInput(
            f"nothing has been recorded at the site {site!r}; sites have names such as {self.sites()[:3]}"
        )

    def unit(self, site: str) -> Tensor:
        """Return 2**exponent of the last write at a site in this step, fp32 and 0-d, on its device. Never waits.

        Raises KeyError for a site that was never written.
        """
        group = next(group for group in self._groups.values() if site in group.names)
        index = group.names[site]
        if not isinstance(group, DeviceTable) and abs(group.exponents[index]) <= LARGEST_NORMAL:
            return torch.full((), 2.0 ** group.exponents[index], dtype=torch.float32, device=group.device)
        exponent = group.state.exponent[index]
        return times(torch.ones((), dtype=torch.float32, device=exponent.device), exponent)

    def summary(self) -> dict[str, Summary]:
        """Return a summary of all flushed writes, by class of tensors and as ``all``."""
        return summarised(self._groups.values())

    def counted(self) -> list[tuple[list[str], Tensor, Tensor]]:
        """Return sites, their writes, and those that were saturated, int64 [sites], on their devices; never waits."""
        return counted_by_site(self._groups.values())

    def watch(self, callback: Callable[[Flush], object]) -> Callable[[], None]:
        """Call `callback` with the writes of each step when the step is flushed. Return a function that ends this."""
        return listed(self._watchers, callback)

    def listen(self, callback: Callable[[str, Tensor, int], object]) -> Callable[[], None]:
        """Call `callback` at every write with site, unrounded tensor and exponent. Return a function to end it.

        On an accelerator the exponent is the one with which the site began.
        """
        return listed(self._listeners, callback)

    # -- copies and checkpoints ----------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """Return the state; a copy has no watchers and listeners."""
        return {**self.__dict__, "_watchers": [], "_listeners": []}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values and tensors. Call it between steps: it flushes nothing."""
        return saved.state_of(self._groups)

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Continue from `state_dict`. Raises InvalidInput, with nothing changed, for any other state."""
        groups = saved.tables_of(state, lambda cast: new_table(cast, torch.device(device)))
        self._groups, self._faults, self._agreed = groups, [], AgreedSites(groups)
