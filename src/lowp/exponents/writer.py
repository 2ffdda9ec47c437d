"""The writer of an op at one spot of the step: it writes each result of the op under the site of the result's role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from torch import Tensor

from lowp.casts import Cast
from lowp.exponents.shared import SharedExponents
from lowp.exponents.sites import Tell, Trail
from lowp.exponents.table import ExponentTable, Written
from lowp.kernels.int16 import entries, payloads
from lowp.kernels.int16.cpu_int16 import Seen
from lowp.kernels.int16.integer_run import Multiplied
from lowp.kernels.int16.mantissas import values


class SumEntry(NamedTuple):
    """An entry of a table under which an exact sum may be written from its integers."""

    table: ExponentTable
    place: int

    def write(self, found: Multiplied, exponent: Tensor) -> Tensor:
        """Return the values of a sum given as mantissas, keep the mantissas with them, and note what was seen."""
        payload, saturated, most, sums, _ = found
        seen = Seen(most, False, most == 0 and sums > 0, saturated, payload.numel())
        self.table.note(self.place, entries.record_of(seen))
        made = values(payload, exponent)
        payloads.keep(made, self.table.cast.format, exponent, payload)
        return made

    @property
    def has_begun(self) -> bool:
        """Whether the entry has begun."""
        return bool(self.table.state.started[self.place])


@dataclass(eq=False)
class SiteWriter:
    """One op at one spot of the step: writes each of its results under the site of the result's role.

    `tell` is called with the tensor, its role and its cast, for observers.
    """

    exponents: SharedExponents
    cast: Cast
    where: str
    training: bool
    trail: Trail | None = None
    tell: Tell | None = None
    _parts: Iterator[int] = field(default_factory=count, init=False)

    def write(self, x: Tensor, role: str, unless_exact: bool = False, in_place: bool = False) -> Written:
        """Return x (fp32 or fp64, outside the graph) as values of the format, in fp32, under the role's exponent.

        `unless_exact`: a tensor that is already in the format stays unchanged. `in_place`: unless an observer has seen
        x, its memory may be overwritten. See `SharedExponents.write`.
        """
        if self.tell is not None:
            self.tell(x, role, self.cast)
        site = f"{role} of {self.where}"
        trail = None if self.trail is None else self._trail_of(role)
        is_repeated = trail is not None and trail.is_repeated
        training = trail.exponents.get(site, self.training) if trail is not None and is_repeated else self.training
        in_place = in_place and self.tell is None
        result = self.exponents.write(
            x, self.cast, site, training=training, unless_exact=unless_exact, in_place=in_place
        )
        if trail is not None and not is_repeated and result.exponent is not None:
            trail.exponents[site] = result.exponent
        return result

    def entry(self, role: str) -> SumEntry | None:
        """Return the entry for writing an exact sum of a role from its integers; None if `write` must see the sum.

        Sums of an entry that has not begun have to be passed to `write`, too.
        """
        trail, site = self._trail_of(role), f"{role} of {self.where}"
        if not self.training or (trail is not None and trail.is_repeated) or self.tell is not None:
            return None
        if (table := self.exponents.table(self.cast)) is None or not table.is_quick:
            return None
        entry = SumEntry(table, table.place(site))
        if trail is not None:
            trail.exponents[site] = table.exponent(entry.place)
        return entry

    def places_of(self, roles: Sequence[str]) -> tuple[ExponentTable, list[int]] | None:
        """Return the table, and the entries of roles for exact sums of one call.

        None, with nothing done, if a role has no entry or was written in this step, or if `write` must see the sums.
        """
        if not self.training or self.tell is not None:
            return None
        if (table := self.exponents.table(self.cast)) is None or not table.is_quick:
            return None
        found = []
        for role in roles:
            index = table.names.get(f"{role} of {self.where}")
            if index is None or index in table.written:
                return None
            found.append(index)
        return table, found

    def _trail_of(self, role: str) -> Trail | None:
        """Return the trail for results. Gradients have none: they are written once, by the repeated run."""
        return None if role.endswith("gradient") else self.trail

    def part(self) -> SiteWriter:
        """Return the writer of the op's first product, at the next call that of its second, and so on."""
        number = next(self._parts)
        return self if number == 0 else replace(self, where=f"{self.where}, product {number + 1}")
