"""Whether all that a step without a loss scale reads is finite: the gradients, and what the optimizer keeps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowp import distributed
from lowp.kernels.choose import hardware
from lowp.optim.shards import local
from lowp.step import gradients as grads
from lowp.step.provenance import Names

__all__ = ["FiniteSteps"]

_INTERVAL = 16  # steps after which all of an optimizer's state is read again; in between, what was written since
_GRADIENT = "gradient"


class _Site(NamedTuple):
    """A tensor that a step reads: a gradient by its place in the optimizer, or another by its key and its id."""

    optimizer: weakref.ref[Optimizer]
    key: str
    number: int


class FiniteSteps:
    """Looks at what a step is about to read. The numbers are read once; nothing waits for a device.

    A finite step leaves finite state, so state is read when something else has written it (a checkpoint, the script),
    and every few steps in any case: writes through NumPy or `.data` leave no trace.
    """

    def __init__(self) -> None:
        self.names = Names()
        self._here: list[str] = []  # what was not finite in the coming step, if the host knows
        self._written: dict[int, int] = {}  # the version of each tensor of state after the latest step, by its id
        self._steps = 0
        self._there: dict[
            bool, tuple[list[_Site], Tensor]
        ] = {}  # of a device: the latest skipped step, gradients apart

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy has other models and optimizers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    @torch.no_grad()
    def skips(self, optimizers: Sequence[Optimizer], has_gradients: bool = True) -> bool | Tensor:
        """Return whether something that the step reads is infinite or NaN, on any rank that shares its tensors.

        A 0-dimensional bool tensor if it lies on a device. `faults` then says what it was. Without gradients only what
        the optimizers keep is read.
        """
        parts = list(self._gradients(optimizers)) if has_gradients else [], list(self._state(optimizers))
        values = [value for part in parts for _, value in part]
        parameters = [parameter for one in optimizers for parameter in grads.parameters_of(one)]
        groups = distributed.mesh_groups(one.grad for one in parameters if one.grad is not None)
        if all(map(hardware.is_on_host, values)):
            bad = [site for part in parts for site, value in part if not _is_finite(value)]
            is_bad = bool(bad)
            if groups:
                is_bad = bool(_agreed(torch.full((), float(is_bad), device="cpu"), groups))
            self._here = [self._name(site) for site in bad]
            return is_bad
        device = next(one.device for one in values if not hardware.is_on_host(one))
        kinds = grads.by_kind(grads.Gradient(_real(one), place) for place, one in enumerate(values))
        flags = ~torch.isfinite(grads.largest(kinds, len(values), device))
        skip = _agreed(flags.any().float(), groups) > 0
        count = len(parts[0])
        for is_state, found in ((False, flags[:count]), (True, flags[count:])):
            self._latch(is_state, [site for site, _ in parts[is_state]], found, skip)
        return skip

    def faults(self) -> list[str]:
        """The names of what was not finite in the latest step that was skipped. Waits for a device."""
        pairs = [pair for sites, flags in self._there.values() for pair in zip(sites, flags.tolist(), strict=True)]
        return self._here or [self._name(site) for site, is_bad in pairs if is_bad]

    def stepped(self, optimizers: Sequence[Optimizer]) -> None:
        """Note what a step has written."""
        self.names.learned()
        self._steps += 1
        is_due = self._steps % _INTERVAL == 0
        self._written = {} if is_due else {id(one): _version(one) for _, _, one in _kept(optimizers)}

    def _latch(self, is_state: bool, sites: list[_Site], flags: Tensor, skip: Tensor) -> None:
        """Keep the flags of this step if it is skipped, else those before; in place, for captured graphs."""
        if not sites:
            return
        before = self._there.get(is_state)
        if before is None or before[0] != sites:
            before = self._there[is_state] = sites, torch.zeros_like(flags)
        before[1].copy_(torch.where(skip, flags, before[1]))

    def _gradients(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[_Site, Tensor]]:
        """Yield the gradients, in the order of backward."""
        for optimizer in optimizers:
            present = {one.position: one.values for one in grads.collect(optimizer, True)}
            for place in self.names.backward_order(optimizer):
                if place in present:
                    yield _Site(weakref.ref(optimizer), _GRADIENT, place), present[place]

    def _state(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[_Site, Tensor]]:
        for optimizer, key, value in _kept(optimizers):
            if self._written.get(id(value)) != _version(value):
                yield _Site(weakref.ref(optimizer), key, id(value)), local(value)

    def _name(self, site: _Site) -> str:
        optimizer, names = site.optimizer(), list[str]()
        if optimizer is not None and site.key == _GRADIENT:
            names = [self.names.of(optimizer)[site.number]]
        elif optimizer is not None:
            owners = [
                parameter
                for parameter, entry in optimizer.state.items()
                if any(id(one) == site.number for one in entry.values())
            ]
            known = dict(zip(grads.parameters_of(optimizer), self.names.of(optimizer), strict=True))
            names = [known[one] for one in owners if one in known]
        return f"{site.key} of {names[0] if names else 'a parameter'}"


def _agreed(flag: Tensor, groups: Sequence[torch.distributed.ProcessGroup]) -> Tensor:
    for group in groups:
        distributed.agree_on_maximum_(flag, group)
    return flag


def _kept(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, str, Tensor]]:
    """Yield the tensors of numbers that optimizers keep of parameters, each with its key."""
    for optimizer in optimizers:
        for entry in getattr(optimizer, "inner", optimizer).state.values():
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                    yield optimizer, key, value


def _version(value: Tensor) -> int:
    return -1 if value.is_inference() else value._version


def _is_finite(values: Tensor) -> bool:
    """Whether all numbers are finite: they are if their sum is; a sum that overflows says nothing."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values
