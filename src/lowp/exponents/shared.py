"""Shared exponents of sites: which entry a tensor is written under, and the state of all entries.

A site is one tensor that one operation writes at one spot of the step (`sites` defines spots). Its name is a text:
"output of 0 linear", "weight gradient of layer1.0.conv1 conv2d", "update of fc.bias". All sites of one cast share one
vectorised state. The maxima of a step's writes are observed together at the end of the step, when ranks agree on them.
Writes outside of training (no gradients recorded) are not remembered and use the exponent of the tensor's own maximum:
an evaluation does not change the training and does not depend on earlier evaluations.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.3 and algorithms 1 and 2.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.exponents.base import Sites
from lowp.exponents.sites import features_axis, is_of_optimizer, is_result
from lowp.exponents.summary import Summary, summarised
from lowp.exponents.table import Condition, ExponentTable, Flush, Onlookers, Written, both
from lowp.hooks import listed
from lowp.kernels.int16 import low_words, payloads
from lowp.kernels.int16.mantissas import own_exponent
from lowp.kernels.tracing import is_sharded


class SharedExponents(Sites[ExponentTable]):
    """The exponents of all sites of a training run: `write` uses them, `flush` updates them, `summary` sums them up."""

    def __init__(self) -> None:
        super().__init__()
        self.onlookers = Onlookers()
        self._unless: Tensor | None = None
        self._is_apart = False

    def _new(self, cast: Cast, device: torch.device) -> ExponentTable:
        return ExponentTable(cast, device, self.onlookers)

    # -- writing --------------------------------------------------------------------------------------------------
    def write(
        self,
        x: Tensor,
        cast: Cast,
        site: str,
        *,
        training: bool | Tensor = True,
        unless_exact: bool = False,
        in_place: bool = False,
    ) -> Written:
        """Return x, fp32 or fp64, as values of the cast's format in fp32, rounded once under the site's exponent.

        Saturates what does not fit. What is infinite or NaN stays so, and the site is among the `faults`.
        `unless_exact` gives x back where it is in the format, under whatever exponent, and notes nothing. Outside of
        `training` nothing is noted, and the exponent is that of x's own maximum, or the site's where the cast predicts
        none; in place of a bool it may be the exponent of an earlier write that is made again. `in_place`: nobody else
        reads x, and the values may take its memory. The mantissas are those of a write on a CPU that was noted, if they
        are all of it: None beside a second word, and of what is not finite.
        """
        if type(x) is not Tensor and is_sharded(x):
            raise InvalidInput(_distributed(x, cast))
        x = x.detach() if x.requires_grad else x  # the same tensor object if possible, for data cached by tensor
        table = self._table(cast, x.device)
        when: Condition = True
        otherwise, is_apart = None, training is not True or self._is_apart
        finds_exact = unless_exact and not is_apart and table.may_find_exact(x, site)
        if unless_exact and not finds_exact:
            is_exact, otherwise = payloads.exact_under(x, cast)
            if is_exact is True:
                return Written(x.float())
            when = ~is_exact if isinstance(is_exact, Tensor) else True
        if is_apart:
            return self._written_apart(table, x, site, training, when)
        if self._unless is not None and not table.is_host:
            when = both(when, ~self._unless)
        index, listeners = table.place(site, when), self.onlookers.listeners
        is_long = max(x.shape, default=0) >= low_words.FEATURES
        in_place = in_place and not is_long and not listeners
        if finds_exact:
            written = table.write_unless_exact(x, index, in_place)
        else:
            written = table.write(x, index, in_place, when, otherwise)
        if (exponent := written.exponent) is None:
            return written
        if is_long:
            written = self._in_two_words(table, x, written.values, site, exponent, when)
        for listener in listeners:
            listener(site, x, _told(table, index))
        return written

    def _written_apart(
        self, table: ExponentTable, x: Tensor, site: str, training: bool | Tensor, when: Condition
    ) -> Written:
        """Return what is written of x outside of training where `when` is true, and x elsewhere; nothing is noted."""
        result = table.write_at(x, training if isinstance(training, Tensor) else self._apart(table, x, site))
        return Written(result if when is True else torch.where(when, result, x.float()))

    def _in_two_words(
        self, table: ExponentTable, x: Tensor, high: Tensor, site: str, exponent: Tensor, when: Condition
    ) -> Written:
        """Return what was written of x with a second word, where it needs one and `when` is true; x elsewhere."""
        result = self._with_low_word(table, x, high, site, exponent)
        if when is not True:  # x + (x - x) is not x if x is infinite
            result = torch.where(when, result, x.float())
        if not table.is_host:
            payloads.keep(result, table.cast.format, exponent)
        return Written(result, exponent)

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
    def _apart(table: ExponentTable, x: Tensor, site: str) -> Tensor:
        """Return the exponent for a write of x outside of training."""
        spec = table.cast.scaling
        assert spec is not None
        if spec.kind != "autoflex" and site in table.names:
            return table.exponent(table.names[site])
        return own_exponent(x, table.own, only_finite=True)

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
        if self.onlookers.listeners or self._is_apart or table is None or not (table.is_host and table.is_plain):
            return None
        return table

    def begin(self, cast: Cast, sites: Sequence[str], maxima: Callable[[list[int]], Iterable[Tensor]]) -> None:
        """Let sites that have not begun begin with the exponents of first writes of `maxima`, told for their places.

        A site has begun on a CPU with a write of numbers other than 0, on a device with any. Nothing is written.
        """
        known = self._tables.get(cast)
        new = [place for place, site in enumerate(sites) if known is None or not known.has_begun(site)]
        for place, maximum in zip(new, maxima(new), strict=True):
            table = self._table(cast, maximum.device)
            table.begin(maximum, table.place(sites[place]))

    def admit(self, tensors: Sequence[Tensor], cast: Cast, sites: list[str]) -> None:
        """Restart sites that hold less than what stands there, which was set from outside; nothing is read.

        Weights that were loaded or scaled between two steps were not predicted, so they must not be cut off.
        """
        table = self._tables.get(cast)
        known = [place for place, site in enumerate(sites) if table is not None and site in table.names]
        if table is not None and known:
            when: Condition = True if self._unless is None or table.is_host else ~self._unless
            table.admit([tensors[place].detach() for place in known], [sites[place] for place in known], when)

    # -- what was seen --------------------------------------------------------------------------------------------
    def faults(self) -> list[str]:
        """Return the sites where a non-finite value was written in this step, in order.

        Empty if only results, and no gradient, are not finite: a program may mask with infinities, or not use an
        overflowed result. Waits for an accelerator, once; a CPU knows the answer.
        """
        found: list[str] = []
        for table in self._tables.values():
            if table.met()[0]:
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
            for found, more in zip((beyond, most), table.cut_off(), strict=True):
                found += more
        return beyond, most

    def exponent(self, site: str) -> int:
        """Return the exponent of the next write at a site. Raises InvalidInput for a site that was never written."""
        table, index = self._found(site, "has been recorded")
        return int(table.state.exponent[index])

    def summary(self) -> dict[str, Summary]:
        """Return a summary of all flushed writes, by class of tensors and as ``all``."""
        return summarised(self._tables.values())

    def watch(self, callback: Callable[[Flush], object]) -> Callable[[], None]:
        """Call `callback` with the writes of each step when the step is flushed. Return a function that ends this."""
        return listed(self.onlookers.watchers, callback)

    def listen(self, callback: Callable[[str, Tensor, int], object]) -> Callable[[], None]:
        """Call `callback` at every write with site, unrounded tensor and exponent. Return a function to end it.

        On an accelerator the exponent is the one with which the site began.
        """
        return listed(self.onlookers.listeners, callback)


def _distributed(x: Tensor, cast: Cast) -> str:
    return (
        f"a tensor {tuple(x.shape)} that is distributed over ranks (a DTensor, by tensor parallelism) cannot be "
        f"written in {cast}: an exponent belongs to the whole tensor. Use dfp16, or another precision whose exponents "
        "are not predicted"
    )


def _told(table: ExponentTable, index: int) -> int:
    """Return the exponent of an entry that listeners are told: on a device, which nobody waits for, the first one."""
    return int(table.state.exponent[index]) if table.is_host else table.scaling.first_exponent
