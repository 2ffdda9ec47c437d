"""A summary of the writes under shared exponents, in numbers, by class of tensors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lowp.exponents.learning import COUNTS, LearningTable
from lowp.exponents.sites import CLASSES, class_of


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


def summarised(groups: Iterable[LearningTable]) -> dict[str, Summary]:
    """Return sums over all entries of some tables, as ``all`` and by class of tensors, without empty classes."""
    found = {"all": Summary(), **{name: Summary() for name in CLASSES}}
    for group in groups:
        state = group.state
        counted = {name: getattr(state, name).tolist() for name in ("writes", "saturated", "moved", "nonfinite")}
        counted |= {name: group.counts[name].tolist() for name in COUNTS}
        for site, index in group.names.items():
            for one in (found["all"], found[class_of(site)]):
                one.tensors += 1
                for name, column in counted.items():
                    setattr(one, name, getattr(one, name) + type(getattr(one, name))(column[index]))
    return {name: one for name, one in found.items() if one.tensors or name == "all"}
