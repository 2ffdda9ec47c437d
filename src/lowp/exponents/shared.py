"""Shared exponents of sites: which entry a tensor is written under, and the state of all entries.

A site is one tensor that one operation writes at one spot of the step (`sites` defines spots). Its name is a text:
"output of 0 linear", "weight gradient of layer1.0.conv1 conv2d", "update of fc.bias". All sites of one cast share one
vectorised state. The maxima of a step's writes are observed together at the end of the step, when ranks agree on them.
Writes outside of training (no gradients recorded) are not remembered and use the exponent of the tensor's own maximum:
an evaluation does not change the training and does not depend on earlier evaluations.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.3 and algorithms 1 and 2.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.exponents.base import Sites
from lowp.exponents.learning import Condition, Flush, Run, both
from lowp.exponents.sites import CLASSES, class_of, features_axis, is_of_optimizer
from lowp.exponents.table import ExponentTable, Written
from lowp.hooks import listed
from lowp.kernels.int16 import low_words, payloads
from lowp.kernels.tracing import is_sharded


@dataclass
class Summary:
    """Sums over writes. `raises_needed`: maxima that the exponent of the previous write could not have held."""

    tensors: int = 0
    writes: int = 0
    saturated: int = 0
    moved: int = 0
    nonfinite: int = 0
    raises_needed: int = 0
    raises_in_time: int = 0
    measured: int = 0
    headroom_sum: float = 0.0

    @property
    def headroom_bits(self) -> float:
        """The mean of log2(32768 / Γ) over the writes that were not all zero."""
        return self.headroom_sum / self.measured if self.measured else math.nan


class SharedExponents(Sites[ExponentTable]):
    """The exponents of all sites of a training run: `write` uses them, `flush` updates them, `summary` sums them up."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run()

    def _new(self, cast: Cast, device: torch.device) -> ExponentTable:
        return ExponentTable(cast, device, self.run)

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
            raise InvalidInput(
                f"a tensor {tuple(x.shape)} that is distributed over ranks (a DTensor, by tensor parallelism) cannot "
                f"be written in {cast}: an exponent belongs to the whole tensor. Use dfp16, or another precision whose "
                "exponents are not predicted"
            )
        x = x.detach() if x.requires_grad else x  # the same tensor object if possible, for data cached by tensor
        table = self._table(cast, x.device)
        when: Condition = True
        otherwise, is_apart = None, training is not True or self.run.uncounted is True
        finds_exact = unless_exact and not is_apart and table.finds_exact(x, site)
        if unless_exact and not finds_exact:
            is_exact, otherwise = payloads.exact_under(x, cast)
            if is_exact is True:
                return Written(x.float())
            when = ~is_exact if isinstance(is_exact, Tensor) else True
        if is_apart:
            result = table.write_apart(x, site, training if isinstance(training, Tensor) else None)
            return Written(result if when is True else torch.where(when, result, x.float()))
        if self.run.uncounted is not None:
            when = both(when, self.run.counts(table.is_host))
        index, is_long = table.place(site, when), max(x.shape, default=0) >= low_words.FEATURES
        in_place = in_place and not is_long
        written = table.write(x, index, in_place, when, otherwise, finds_exact)
        if (exponent := written.exponent) is None:
            return written
        return self._in_two_words(table, x, written.values, site, exponent, when) if is_long else written

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
    def uncounted(self, where: Condition) -> Iterator[None]:
        """Let writes not count, in all threads: with True all, which are then as outside of training.

        With a flag of a device its writes, where the flag is set: they give back what they are given.
        """
        before, self.run.uncounted = self.run.uncounted, where
        try:
            yield
        finally:
            self.run.uncounted = before

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

    def table(self, cast: Cast) -> ExponentTable | None:
        """Return the entries of a cast; None before its first write, and while no write counts."""
        table = next(iter(self._tables.values()), None)
        if table is not None and table.cast is not cast:  # of two or more
            table = self._tables.get(cast)
        return table if self.run.uncounted is not True else None

    # -- what was seen --------------------------------------------------------------------------------------------
    def faults(self) -> dict[str, bool | Tensor]:
        """Whether what was written in this step was not finite, by site, as `ExponentTable.faults`."""
        return {site: is_bad for table in self._tables.values() for site, is_bad in table.faults().items()}

    def flush(self) -> tuple[list[str], list[str]]:
        """End a step: observe what was met in it, on all ranks, and predict what is to come. Each rank must call it.

        Returns the sites where numbers were cut off that no exponent of the format can hold, and results of which most
        numbers were, as exponents predicted from earlier steps hold less. Only of writes on a CPU: an accelerator is
        not waited for.
        """
        beyond, most = list[str](), list[str]()
        for table in self._tables.values():
            for found, more in zip((beyond, most), table.cut_off(), strict=True):
                found += more
        super().flush()
        return beyond, most

    def exponent(self, site: str) -> int:
        """Return the exponent of the next write at a site. Raises InvalidInput for a site that was never written."""
        table, index = self._found(site, "has been recorded")
        return int(table.state.exponent[index])

    def summary(self) -> dict[str, Summary]:
        """Return sums over all flushed writes, by class of tensors, without empty classes, and as ``all``."""
        found = {"all": Summary(), **{name: Summary() for name in CLASSES}}
        for table in self._tables.values():
            counted = {name: getattr(table.state, name) for name in ("writes", "saturated", "moved", "nonfinite")}
            columns = {name: column.tolist() for name, column in (counted | table.counts).items()}
            for site, index in table.names.items():
                for one in (found["all"], found[class_of(site)]):
                    one.tensors += 1
                    for name, column in columns.items():
                        setattr(one, name, getattr(one, name) + type(getattr(one, name))(column[index]))
        return {name: one for name, one in found.items() if one.tensors or name == "all"}

    def watch(self, callback: Callable[[Flush], object]) -> Callable[[], None]:
        """Call `callback` with the writes of each step when the step is flushed. Return a function that ends this."""
        return listed(self.run.watchers, callback)
