"""Scales of the operands of products from earlier steps: which entry an operand is read under, and all their state.

An operand has a site, as what is written under shared exponents has: "input of 0 linear", "grad of layer1.0.conv1
conv2d": of a module and a role, for all batches of a step. It is cast under a scale for the maxima of earlier steps at
its site, and its own maximum, met in the same pass, is remembered at the end of the step, when ranks agree on it. In
its first step a site takes the tensor's own maximum. A step that is skipped counts: the maxima that were finite say
what is to come. Without gradients, as in an evaluation, operands are cast as in training and nothing is remembered.
Nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import widest_float
from lowp.exponents.base import Sites, SiteTable
from lowp.kernels.casts.functions import quantize_measured, quantize_operand, remember_maxima
from lowp.kernels.choose import hardware
from lowp.kernels.numbers.scaled import scale_of_maxima
from lowp.scaling.autoflex import extended
from lowp.scaling.delayed import DelayedMaximum, DelayedState, MaximaSeen

Entries = list[Tensor | None]


class DelayedTable(SiteTable):
    """The entries of one cast: their state, the scale of each, and the maxima met since the last flush.

    `entries` are rows of one tensor, [3] each in the widest dtype of the device: the scale of the next casts, the
    largest magnitude since the last flush, infinite or NaN if one was, and whether there was any. The C++ library reads
    and writes them, too. `knows`: whether there is a scale, on a host.
    """

    def __init__(self, cast: Cast, device: torch.device) -> None:
        assert cast.scaling is not None
        super().__init__(cast, device)
        self.is_host = hardware.is_on_host(device)
        self.scaling = DelayedMaximum(cast.scaling.window, cast.scaling.headroom)
        self._hold({}, {"state": self.scaling.init(device, 0)._asdict()})

    @property
    def _parts(self) -> dict[str, Tensor | dict[str, Tensor]]:
        """What a checkpoint holds of the entries."""
        return {"state": self.state._asdict()}

    def _hold(self, names: dict[str, int], parts: Mapping[str, Any]) -> None:
        self.names, self.state = names, DelayedState(**parts["state"])
        self.rows = torch.zeros(len(names), 3, dtype=widest_float(self.device), device=self.device)
        self.entries = self.rows.unbind()
        self._choose()

    def _choose(self) -> None:
        self.rows[:, 0] = self._scales(self.state.largest)
        self.knows: list[bool] = (self.state.largest > 0).tolist() if self.is_host else []

    def _grow(self, site: str) -> None:
        """Make the entry of a new site."""
        self.state = extended(self.scaling, self.state)
        self.rows = torch.cat((self.rows, self.rows.new_zeros(1, 3)))
        self.entries = self.rows.unbind()
        self.rows[-1, 0] = self._scales(self.state.largest[-1])
        self.knows.append(False)

    def rounded(self, x: Tensor, index: int, seed: int | Tensor, training: bool) -> Tensor:
        """Return fp32 x under the scale of an entry; infinities and NaN stay. Its maximum is noted in training."""
        entry = self.entries[index]
        known, scale = self.state.largest[index], entry[0]
        if not (self.is_host and self.knows[index]):  # a device is not asked whether anything is known
            own = torch.where(x.isfinite(), x.abs(), 0.0).amax() if x.numel() else known
            scale = torch.where(known > 0, scale, self._scales(own.to(self.device)))
        values, maximum = quantize_measured(x, self.cast, scale.to(x.device), seed)
        if training:
            entry[1] = torch.maximum(entry[1], maximum.to(entry))
            entry[2] = 1.0
        return values

    def _scales(self, maxima: Tensor) -> Tensor:
        return scale_of_maxima(maxima.to(widest_float(self.device)), self.cast)

    def flush(self, agreed: Tensor | None = None) -> None:
        """Remember the maxima met since the last flush, or those of all ranks."""
        if agreed is not None:
            self.rows[:, 1], self.rows[:, 2] = torch.where(agreed[1] > 0, torch.inf, agreed[0]), agreed[2]
        if self.is_host and remember_maxima(self.rows, self.state, self.cast):
            self.knows = (self.state.largest > 0).tolist()
            return
        for kept, new in zip(self.state, self.scaling.observe(self.state, self.seen), strict=True):
            kept.copy_(new)  # in place: a captured graph reads where it has read
        self.rows.zero_()
        self._choose()

    @property
    def seen(self) -> MaximaSeen:
        """The maxima since the last flush."""
        return MaximaSeen(self.rows[:, 1].float(), self.rows[:, 2] > 0)

    def columns(self, sites: list[str]) -> Tensor:
        """Return this rank's observations at some sites, fp64[3, n], for a maximum over ranks; zeros without any.

        Rows: the maximum, whether one was not finite, whether the site was written.
        """
        largest, mask = self.seen
        is_finite = largest.isfinite()
        rows = torch.stack((torch.where(is_finite, largest, 0.0), ~is_finite, mask)).double()
        return rows[:, self.order_of(sites)]


class DelayedScales(Sites[DelayedTable]):
    """The scales of all sites of a training run: `rounded` uses them, `flush` updates them."""

    def __init__(self) -> None:
        super().__init__(apart=False)
        self._step = 0  # of `passes`, when the last step was flushed

    def _new(self, cast: Cast, device: torch.device) -> DelayedTable:
        return DelayedTable(cast, device)

    def rounded(self, x: Tensor, cast: Cast, site: str, *, seed: int | Tensor = 0, training: bool = True) -> Tensor:
        """Return x as values of the cast in fp32, detached from the graph, under the scale of its site.

        Outside of `training` nothing is noted, and a site that has no entry takes the tensor's own maximum, as does a
        DTensor, of which a rank has a part.
        """
        x = x.detach().float()
        self._settle()
        has_entry = type(x) is Tensor and hardware.has_numbers(x.device)
        table = self._table(cast, x.device) if has_entry else None
        if table is None or not (training or site in table.names):
            return quantize_operand(x, cast.current, seed, False)
        return table.rounded(x, table.index(site), seed, training)

    def entry(self, cast: Cast, site: str, training: bool) -> Tensor | None:
        """Return the entry of a site on the CPU, of which `DelayedTable` tells; None where no scale is known there.

        Outside of `training` it is a copy.
        """
        self._settle()
        table = self._tables.get(cast)
        index = None if table is None or not table.is_host else table.names.get(site)
        if table is None or index is None or not table.knows[index]:
            return None
        return table.entries[index] if training else table.entries[index].clone()

    def _settle(self) -> None:
        if self.passes.step != self._step:  # an optimizer has stepped, without `Precision`
            self._flush({})

    def flush(self) -> None:
        """End a step: remember its maxima, on all ranks, and choose the next scales. Every rank must call this."""
        self.any_rank(False)
        super().flush()

    def _flush(self, agreed: Mapping[Cast, Tensor]) -> None:
        super()._flush(agreed)
        self._step = self.passes.step

    def scale(self, site: str) -> Tensor:
        """Return the scale of the next cast at a site, 0-d on its device; 1 where nothing is known of it.

        Raises InvalidInput for a site that was never used.
        """
        table, index = self._found(site, "was cast")
        return table.entries[index][0].clone()


@dataclass(eq=False)
class SiteScales:
    """One op at one spot of the step: casts each of its operands under the scale of the operand's site."""

    scales: DelayedScales
    where: str
    training: bool
    _parts: Iterator[int] = field(default_factory=count, init=False)

    def rounded(self, x: Tensor, cast: Cast, role: str, seed: int | Tensor) -> Tensor:
        """Return x rounded by a cast under the scale of a role, in fp32 and detached from the graph."""
        return self.scales.rounded(x, cast, f"{role} of {self.where}", seed=seed, training=self.training)

    def entries(self, casts: Sequence[Cast | None], roles: Sequence[str] = ("input", "weight")) -> Entries | None:
        """Return the entries of the delayed casts of roles, see `DelayedScales.entry`; None if one has no scale yet."""
        found: Entries = []
        for cast, role in zip(casts, roles, strict=True):
            if cast is None or not cast.is_delayed:
                found.append(None)
            elif (entry := self.scales.entry(cast, f"{role} of {self.where}", self.training)) is not None:
                found.append(entry)
            else:
                return None
        return found

    def part(self) -> SiteScales:
        """Return the scales of the op's first product, at the next call those of its second, and so on."""
        number = next(self._parts)
        return self if number == 0 else replace(self, where=f"{self.where}, product {number + 1}")
