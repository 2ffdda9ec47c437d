"""Shared exponents of sites: which entry a tensor is written under, and the state of all entries.

A site is one tensor that one operation writes at one spot of the step (`sites` defines spots). Its name is a text:
"output of 0 linear", "weight gradient of layer1.0.conv1 conv2d", "update of fc.bias". All sites of one cast share one
vectorised state. The maxima of a step's writes are observed together at the end of the step, when ranks agree on them.
Writes outside of training (no gradients recorded) are not remembered and use the exponent of the tensor's own maximum:
an evaluation does not change the training and does not depend on earlier evaluations.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.3 and algorithms 1 and 2.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowp import distributed
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.exponents import saved
from lowp.exponents.ranks import AgreedSites
from lowp.exponents.sites import Passes, features_axis, is_of_optimizer, is_result
from lowp.exponents.summary import Summary, cut_off, summarised
from lowp.exponents.table import Condition, ExponentTable, Flush, both
from lowp.hooks import listed
from lowp.kernels.choose import hardware
from lowp.kernels.int16 import low_words, payloads
from lowp.kernels.int16.mantissas import Mantissas, own_exponent
from lowp.kernels.tracing import is_sharded


class SharedExponents:
    """The exponents of all sites of a training run: `write` uses them, `flush` updates them, `summary` sums them up."""

    def __init__(self) -> None:
        self._tables: dict[Cast, ExponentTable] = {}
        self.passes = Passes()
        self._watchers: list[Callable[[Flush], object]] = []
        self._listeners: list[Callable[[str, Tensor, int], object]] = []
        self._unless: Tensor | None = None
        self._is_apart = False
        self._agreed = AgreedSites()
        self.has_told_beyond = False  # about numbers too large for the format
        self.has_told_most = False  # about tensors of which most was cut off

    # -- writing --------------------------------------------------------------------------------------------------
    def write(self, x: Tensor, cast: Cast, site: str, **how: bool) -> Tensor:
        """Return the values of `written`, which takes the same arguments."""
        return self.written(x, cast, site, **how)[0]

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
        table = self._table(cast, x.device)
        when: Condition = True
        otherwise = None
        if unless_exact:
            is_exact, otherwise = payloads.exact_under(x, cast)
            if is_exact is True:
                return x.float(), None
            when = ~is_exact if isinstance(is_exact, Tensor) else True
        if not training or self._is_apart:
            result = self._written_apart(table, x, site)
            return result if when is True else torch.where(when, result, x.float()), None
        if self._unless is not None and not table.is_host:
            when = both(when, ~self._unless)
        index = self.place(table, site, when)
        is_long = max(x.shape, default=0) >= low_words.FEATURES
        in_place = in_place and not is_long and not self._listeners
        result, exponent, found = table.write(x, index, in_place, when, otherwise)
        if is_long:
            result, found = self._with_low_word(table, x, result, site, exponent), None
            if when is not True:  # x + (x - x) is not x if x is infinite
                result = torch.where(when, result, x.float())
            if not table.is_host:
                payloads.keep(result, cast.format, exponent)
        for listener in self._listeners:
            listener(site, x, int(table.state.exponent[index]) if table.is_host else table.scaling.first_exponent)
        return result, found

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
    def _written_apart(table: ExponentTable, x: Tensor, site: str) -> Tensor:
        """Return x as values of the format outside of training: nothing is remembered."""
        spec = table.cast.scaling
        assert spec is not None
        if spec.kind != "autoflex" and site in table.names:
            return table.write_at(x, table.exponent(table.names[site]))
        return table.write_at(x, own_exponent(x, table.own, only_finite=True))

    @staticmethod
    def _with_low_word(table: ExponentTable, x: Tensor, high: Tensor, site: str, exponent: Tensor) -> Tensor:
        """Return the written value of x, with a second word if one word would lose features of a gradient."""
        axis = features_axis(site, x)
        if axis is None:
            return high
        if not low_words.has_low_word(table.cast):
            low_words.warn_of_loss(x, high, table.cast, f"the {site}", axis)
            return high
        needed = None if is_of_optimizer(site) else axis
        if table.is_host and needed is not None and not low_words.is_coarse(x, exponent, axis):
            return high
        return low_words.low_value(x, high, exponent, needed).add_(high)

    def quick(self, cast: Cast) -> ExponentTable | None:
        """Return the table of a CPU whose entries the C++ library may write, each in its first write of a step.

        None where every tensor has to be passed to `write`: `apart`, for listeners, and in other rounding modes.
        """
        table = next(iter(self._tables.values()), None)
        if table is not None and table.cast is not cast:  # of two or more
            table = self._tables.get(cast)
        if self._listeners or self._is_apart or table is None or not (table.is_host and table.is_plain):
            return None
        return table

    def _table(self, cast: Cast, device: torch.device) -> ExponentTable:
        for table in self._tables.values():  # one or two
            if table.cast is cast and table.device == device:
                return table
        if not hardware.has_numbers(device):  # a model that is called for its shapes writes no numbers
            return ExponentTable(cast, device)
        found = self._tables.get(cast)
        if found is None:
            found = self._tables[cast] = ExponentTable(cast, device)
        return found

    def place(self, table: ExponentTable, site: str, when: Condition = True) -> int:
        """Return the entry of a site, ready for a write of training, which counts if `when` holds."""
        index = table.names.get(site)
        if index is None:
            return table.index(site)
        if index in table.written and not distributed.has_other_ranks():
            # a second write at a site uses the result of the first; a step may end without `flush`, in a region alone
            if not self.has_told_beyond and (beyond := cut_off(table)[0]):
                self.has_told_beyond = True
                warnings.warn(
                    f"numbers beyond the largest of {table.cast.format} are cut off, first in the {beyond[0]}. If "
                    "this continues, look at the learning rate and at the scale of inputs and loss",
                    UserWarning,
                    stacklevel=3,
                )
            self._tell(table.flush_before(index, when, bool(self._watchers)))
        return index

    def has_begun(self, cast: Cast, site: str) -> bool:
        """Whether a site has an exponent: on a CPU that of numbers other than 0, on a device that of any write."""
        table = self._tables.get(cast)
        index = None if table is None else table.names.get(site)
        return table is not None and index is not None and (not table.is_host or bool(table.state.started[index]))

    def begin(self, x: Tensor, cast: Cast, site: str) -> None:
        """Let a site begin, unless it has begun, with the exponent of a first write of x; nothing is written."""
        table = self._table(cast, x.device)
        table.begin(x, self.place(table, site))

    def admit(self, tensors: Sequence[Tensor], cast: Cast, sites: list[str]) -> None:
        """Restart sites that hold less than what stands there, which was set from outside; nothing is read.

        Weights that were loaded or scaled between two steps were not predicted, so they must not be cut off.
        """
        table = self._tables.get(cast)
        known = [place for place, site in enumerate(sites) if table is not None and site in table.names]
        if table is not None and known:
            when: Condition = True if self._unless is None or table.is_host else ~self._unless
            table.admit([tensors[place].detach() for place in known], [sites[place] for place in known], when)

    def write_again(self, x: Tensor, cast: Cast, site: str, exponent: Tensor, unless_exact: bool) -> Tensor:
        """Return the earlier result of `write` under this exponent, and note nothing."""
        x, table = x.detach() if x.requires_grad else x, self._table(cast, x.device)
        is_exact = payloads.exact_under(x, cast)[0] if unless_exact else False
        if isinstance(is_exact, bool):
            return x.float() if is_exact else table.write_at(x, exponent)
        return torch.where(is_exact, x.float(), table.write_at(x, exponent))

    def latest_exponent(self, cast: Cast, site: str) -> Tensor | None:
        """Return the exponent of the latest write at a site in this step, a 0-d tensor, or None."""
        table = self._tables.get(cast)
        index = None if table is None else table.names.get(site)
        if table is None or index is None or index not in table.written:
            return None
        return table.exponent(index)

    # -- steps ----------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """End a step: observe all writes of training, on all ranks, and predict the next exponents.

        With several ranks, each rank must call this.
        """
        self.passes.end_step()
        agreed: dict[Cast, Tensor] = {}
        if distributed.has_other_ranks():
            agreed = self._agreed.agree(self._tables, self._table, distributed.world())
        tables = list(self._tables.items())
        if len(tables) > 1:
            tables.sort(key=lambda one: str(one[0]))  # the same order on every rank
        for cast, table in tables:
            self._tell(table.flush(agreed.get(cast) if agreed else None, tell=bool(self._watchers)))

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
        found: list[str] = []
        for table in self._tables.values():
            if table.names and (table.faults.any() if table.is_host else True):
                found += [site for site, is_bad in zip(table.names, table.faults.tolist(), strict=True) if is_bad]
        return found if not all(map(is_result, found)) else []

    def flags(self) -> dict[str, Tensor]:
        """Whether what was written in this step was not finite, by site, of the sites of devices: nothing is read."""
        found: dict[str, Tensor] = {}
        for table in self._tables.values():
            if table.names and not table.is_host:
                found |= zip(table.names, table.faults.unbind(), strict=True)
        return found

    def beyond(self) -> tuple[list[str], list[str]]:
        """Return the sites where numbers were cut off in this step that no exponent of the format can hold.

        And results of which most numbers were, as exponents predicted from earlier steps hold less. Only for writes on
        a CPU: an accelerator is not waited for.
        """
        beyond, most = list[str](), list[str]()
        for table in self._tables.values():
            for found, more in zip((beyond, most), cut_off(table), strict=True):
                found += more
        return beyond, most

    # -- what was seen --------------------------------------------------------------------------------------------
    def sites(self) -> list[str]:
        """Return the sites, in the order of their first writes."""
        return [name for table in self._tables.values() for name in table.names]

    def exponent(self, site: str) -> int:
        """Return the exponent of the next write at a site. Raises InvalidInput for a site that was never written."""
        for table in self._tables.values():
            if site in table.names:
                return int(table.state.exponent[table.names[site]])
        raise InvalidInput(
            f"nothing has been recorded at the site {site!r}; sites have names such as {self.sites()[:3]}"
        )

    def summary(self) -> dict[str, Summary]:
        """Return a summary of all flushed writes, by class of tensors and as ``all``."""
        return summarised(self._tables.values())

    def counted(self) -> list[tuple[list[str], Tensor, Tensor]]:
        """Return sites, their writes, and those that were saturated, int64 [sites], on their devices; never waits."""
        return [(list(one.names), one.state.writes, one.state.saturated) for one in self._tables.values() if one.names]

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
        return saved.state_of(self._tables)

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Continue from `state_dict`. Raises InvalidInput, with nothing changed, for any other state."""
        self._tables = saved.tables_of(state, lambda cast: ExponentTable(cast, torch.device(device)))
        self._agreed = AgreedSites(self._tables)
