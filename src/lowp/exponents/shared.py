"""Shared exponents that belong to sites: which entry a tensor is written under, and what all entries remember.

A site is one tensor that one operation writes at one spot of the step (`sites` says what a spot is), named in words:
"output of 0 linear", "weight gradient of layer1.0.conv1 conv2d", "update of fc.bias". All sites of one cast are one
vectorised state; the maxima of a step's writes are observed together at its end, which is also when ranks agree on
them. What is written outside of training (no gradients recorded) is not remembered, and has the exponent that its own
maximum asks for: an evaluation changes nothing of the training, and does not depend on the one before.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.3 and algorithms 1 and 2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp import casts, distributed
from lowp.callbacks import listed
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.exponents.ranks import AgreedSites
from lowp.exponents.saved import check_whole, copied
from lowp.exponents.sites import (
    Passes,
    Spots,
    features_axis,
    is_of_optimizer,
    is_result,
)
from lowp.exponents.summary import Summary, summarised
from lowp.exponents.table import COUNTS, ExponentTable, Flush, SumEntry
from lowp.kernels import low_words, payloads
from lowp.kernels.cpu_int16 import is_direct
from lowp.kernels.int16_lists import exact_mantissas as exact_list
from lowp.kernels.mantissas import Mantissas, exact_mantissas
from lowp.scaling.powers import times

__all__ = ["SharedExponents"]

_VERSION = 2


class SharedExponents:
    """The exponents of all sites of a training run: `write` uses them, `flush` moves them, `summary` tells of them."""

    def __init__(self) -> None:
        self._groups: dict[Cast, ExponentTable] = {}
        self._passes = Passes()
        self._faults: list[str] = []
        self._watchers: list[Callable[[Flush], object]] = []
        self._listeners: list[Callable[[str, Tensor, int], object]] = []
        self._agreed = AgreedSites()
        self.has_told_beyond = False  # of numbers that the format is too small for

    # -- writing --------------------------------------------------------------------------------------------------
    def write(self, x: Tensor, cast: Cast, site: str, *, training: bool = True, unless_exact: bool = False) -> Tensor:
        """Return x, fp32 or fp64, as values of the cast's format in fp32, rounded once under the site's exponent.

        Saturates what does not fit. What is infinite or NaN stays so, and the site is among the `faults`.
        `unless_exact` gives x back where it is in the format, under whatever exponent, and notes nothing. Outside of
        `training` the exponent is that of x's own maximum, or the site's where the cast predicts none.
        """
        x = x.detach() if x.requires_grad else x  # the same tensor where that can be, for what is known of it
        if unless_exact and payloads.is_exact(x, cast):
            return x.float()
        group = self._group(cast, x.device)
        if not training:
            return group.write_apart(x, site)
        index = self._begun(group, site)
        result, nonfinite = group.write(x, index, site)
        if max(x.shape, default=0) >= low_words.FEATURES:
            result = self._with_low_word(group, x, result, site)
        if not isinstance(nonfinite, Tensor) and nonfinite and site not in self._faults:
            self._faults.append(site)
        for listener in self._listeners:
            listener(site, x, group.exponents[index])
        return result

    @staticmethod
    def _with_low_word(group: ExponentTable, x: Tensor, high: Tensor, site: str) -> Tensor:
        """Return what was written of x at a site, with its second word where one would lose features of a gradient."""
        axis = features_axis(site, x)
        if axis is None:
            return high
        if not low_words.has_low_word(group.cast):
            low_words.warn_of_loss(x, high, group.cast, f"the {site}", axis)
            return high
        low = group.low_word(x, high, group.names[site], None if is_of_optimizer(site) else axis)
        return high if low is None else low.add_(high)

    def sum_entry(self, cast: Cast, site: str) -> SumEntry | None:
        """Return where an exact sum of training is written from its integers; see `ExponentTable.sum_entry`.

        None where the sum itself has to be seen first, and is to be given to `write`.
        """
        if self._listeners:
            return None
        group = self._group(cast, torch.device("cpu"))
        return group.sum_entry(self._begun(group, site))

    def write_(self, x: Tensor, cast: Cast, site: str) -> None:
        """Write x, of fp32, in place, as `write` does."""
        if self._listeners:
            x.copy_(self.write(x, cast, site))
            return
        group = self._group(cast, x.device)
        if not group.has_integer_kernels:  # which would have to be asked whether x is coarse
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
        """Write tensors of fp32 in place, each at a site of its own, as `write_` does."""
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
        """The mantissas of what stands at each site, to the bit; None where a tensor is not in the format."""
        group = self._groups.get(cast)
        found: list[Mantissas | None] = [None] * len(tensors)
        if group is None:
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
        for group in self._groups.values():  # one or two
            if group.cast is cast:
                return group
        found = self._groups.get(cast)
        if found is None:
            found = self._groups[cast] = ExponentTable(cast, device)
        return found

    def _begun(self, group: ExponentTable, site: str) -> int:
        """The entry of a site, ready for a write of training."""
        index = group.index(site)
        if index in group.pending and not distributed.has_other_ranks():
            self._tell_beyond(group)
            self._flush(group)  # a second write at one site sees what the first one taught
        return index

    def _tell_beyond(self, group: ExponentTable) -> None:
        """Warn once of what was cut off in a step that ends without `flush`, as in a region of its own."""
        if self.has_told_beyond:
            return
        cut_off = group.cut_off()
        if cut_off:
            site = list(group.names)[min(cut_off)]
            self.has_told_beyond = True
            warnings.warn(
                f"numbers beyond the largest of {group.cast.format} are cut off, first in the {site}. If this "
                "continues, look at the learning rate and at the scale of inputs and loss",
                UserWarning,
                stacklevel=2,
            )

    def admit(self, x: Tensor, cast: Cast, site: str) -> None:
        """Let a site begin anew if x, which was put there from outside, is larger than its exponent can hold.

        Weights that were loaded or scaled between two steps are no prediction's fault, and are not cut off for it.
        """
        group = self._groups.get(cast)
        if group is not None and site in group.names:
            group.admit(x.detach(), group.names[site])

    def write_again(self, x: Tensor, cast: Cast, site: str, exponent: int | Tensor, unless_exact: bool) -> Tensor:
        """Return what `write` has returned before under this exponent, and note nothing."""
        x = x.detach() if x.requires_grad else x
        if unless_exact and payloads.is_exact(x, cast):
            return x.float()
        return self._group(cast, x.device).write_at(x, exponent)

    def latest_exponent(self, cast: Cast, site: str) -> int | Tensor | None:
        """The exponent of the latest write at a site in this step, on an accelerator as a tensor; None without one."""
        group = self._groups.get(cast)
        index = None if group is None else group.names.get(site)
        if group is None or index is None or index not in group.pending:
            return None
        return group.exponent_of(index)

    def spots(self) -> Spots:
        """The spots of an entry of a region that begins."""
        return Spots(self._passes)

    # -- steps ----------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """End a step: observe all writes of training, with all ranks if there are several, and predict anew.

        With several ranks each of them has to call this.
        """
        self._passes.end_step()
        agreed: dict[Cast, Tensor] = {}
        if distributed.has_other_ranks():
            agreed = self._agreed.agree(self._groups, self._group, distributed.world())
        for cast, group in self._groups.items() if len(self._groups) < 2 else self._in_order():
            self._flush(group, agreed.get(cast))
        self._faults = []

    def _in_order(self) -> list[tuple[Cast, ExponentTable]]:
        """The tables in an order that is that of every rank."""
        return sorted(self._groups.items(), key=lambda one: str(one[0]))

    def _flush(self, group: ExponentTable, agreed: Tensor | None = None) -> None:
        done = group.flush(agreed, tell=bool(self._watchers))
        if done is not None:
            for watcher in self._watchers:
                watcher(done)

    def any_rank(self, is_faulty: bool) -> bool:
        """Return whether any rank found its step faulty; every rank has to call this before it ends its step.

        Raises Misuse, on all ranks, where they do not remember the same sites.
        """
        return self._agreed.fault(is_faulty, distributed.world()) if distributed.has_other_ranks() else is_faulty

    def faults(self) -> list[str]:
        """The sites where a value that was not finite has been written in this step, the first one first.

        None where results alone are not finite, and no gradient: a program may mask with infinities, or not use what
        overflowed. Waits for an accelerator, once; a CPU knows.
        """
        found, flags = list(self._faults), dict[str, Tensor]()
        for group in self._groups.values():
            names = list(group.names)
            for index, seen in group.pending.items():
                if isinstance(seen.nonfinite, Tensor):
                    flags[names[index]] = seen.nonfinite
        if flags:
            found += [
                name for name, is_bad in zip(flags, torch.stack([*flags.values()]).tolist(), strict=True) if is_bad
            ]
        return [] if all(is_result(site) for site in found) else found

    def beyond(self) -> list[str]:
        """The sites where numbers were cut off in this step that no exponent of the format holds.

        Of what a CPU has written: it knows; an accelerator is not waited for.
        """
        found = []
        for group in self._groups.values():
            if cut_off := group.cut_off():
                names = list(group.names)
                found += [names[index] for index in sorted(cut_off)]
        return found

    # -- what was seen --------------------------------------------------------------------------------------------
    def sites(self) -> list[str]:
        """The sites, in the order in which they were first written."""
        return [name for group in self._groups.values() for name in group.names]

    def exponent(self, site: str) -> int:
        """The exponent of the next write at a site; raises InvalidInput for one that was never written."""
        for group in self._groups.values():
            if site in group.names:
                return int(group.state.exponent[group.names[site]])
        raise InvalidInput(
            f"nothing has been recorded at the site {site!r}; sites have names such as {self.sites()[:3]}"
        )

    def unit(self, site: str) -> Tensor:
        """2 ** exponent of the last write at a site in this step, fp32 and 0-d, on its device without a wait for it.

        Raises KeyError for a site that was never written.
        """
        group = next(group for group in self._groups.values() if site in group.names)
        exponent = group.state.exponent[group.names[site]]
        return times(torch.ones((), dtype=torch.float32, device=exponent.device), exponent)

    def summary(self) -> dict[str, Summary]:
        """What was written so far, by class of tensors, and as ``all``; counts what `flush` has seen."""
        return summarised(self._groups.values())

    def watch(self, callback: Callable[[Flush], object]) -> Callable[[], None]:
        """Call back with what each step has written, when it is flushed; return what ends that."""
        return listed(self._watchers, callback)

    def listen(self, callback: Callable[[str, Tensor, int], object]) -> Callable[[], None]:
        """Call back at every write, with the site, what is written, not yet rounded, and the exponent; return the end.

        On an accelerator the exponent is the one that the site began with.
        """
        return listed(self._listeners, callback)

    # -- copies and checkpoints ----------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """What is remembered; a copy has no watchers and listeners."""
        return {**self.__dict__, "_watchers": [], "_listeners": []}

    def state_dict(self) -> dict[str, Any]:
        """Everything that is remembered, as plain values and tensors. Take it between steps: it flushes nothing."""
        groups = [
            {
                "cast": str(cast),
                "sites": list(group.names),
                "state": {name: value.clone() for name, value in group.state._asdict().items()},
                "counts": {name: value.clone() for name, value in group.counts.items()},
                "before": group.before.clone(),
            }
            for cast, group in self._groups.items()
        ]
        return {"version": _VERSION, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Go on from `state_dict`; raises InvalidInput, with nothing changed, for one of another kind."""
        if not isinstance(state, Mapping) or not isinstance(state.get("groups", []), list):
            raise InvalidInput(
                f"the state of shared exponents must be a dictionary with groups, not {type(state).__name__}"
            )
        if state.get("version") != _VERSION:
            raise InvalidInput(
                f"shared exponents of version {state.get('version')!r} cannot be read: this lowp reads {_VERSION}"
            )
        groups = {}
        for saved in state["groups"]:
            if not isinstance(saved, Mapping) or not isinstance(saved.get("cast"), str):
                raise InvalidInput("the shared exponents in this checkpoint are incomplete: a group without its cast")
            cast = casts.parse(saved["cast"])
            group = ExponentTable(cast, torch.device(device))
            check_whole(group, saved)
            names, values = saved["sites"], saved["state"]
            fields = type(group.state)._fields
            group.names = {name: index for index, name in enumerate(names)}
            group.state = type(group.state)(*(copied(values[name], device) for name in fields))
            group.counts = {name: copied(saved["counts"][name], device) for name in COUNTS}
            group.before = copied(saved["before"], device)
            group.exponents, group.started = group.state.exponent.tolist(), group.state.started.tolist()
            groups[cast] = group
        self._groups, self._faults, self._agreed = groups, [], AgreedSites(groups)
