"""Which optimizers train the models, and when each has stepped: a step of the training has one of each optimizer."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from lowp.compat import unwrapped
from lowp.numerics.models import Models

_FORGOTTEN = 64  # steps of others after which an optimizer is no longer expected


class _Found(NamedTuple):
    """The parameters of one optimizer, those of them that the models have, and the version of the models' names."""

    version: int
    given: list[nn.Parameter]
    named: list[tuple[str, nn.Parameter]]

    def holds_for(self, version: int, given: list[nn.Parameter]) -> bool:
        """Whether the optimizer still has these parameters, and they their names."""
        return (
            version == self.version
            and len(given) == len(self.given)
            and all(one is other for one, other in zip(given, self.given, strict=True))
        )


class Cycle:
    """The optimizers that step in turn. A step of the training ends when each has stepped, or one has stepped twice."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._found: dict[int, _Found] = {}
        self._last: dict[int, int] = {}  # by optimizer, its last step, counted in steps of all
        self._optimizers: dict[int, Optimizer] = {}
        self._wrappers: dict[int, Optimizer] = {}
        self._stepped: set[int] = set()
        self._count = 0

    def parameters(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the models that an optimizer steps, with their names in the record."""
        given = [one for group in optimizer.param_groups for one in group["params"]]
        known = self._found.get(id(optimizer))
        if known is None or not known.holds_for(self._models.version, given):
            if not all(id(one) in self._models.parameters for one in given):
                self._models.renew()
            names = self._models.parameters
            found = [(names[id(one)], one) for one in given if id(one) in names]
            known = self._found[id(optimizer)] = _Found(self._models.version, given, found)
        return known.named

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has stepped the models before."""
        return id(optimizer) in self._last

    def is_wrapper(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that has not stepped before has the parameters of one that has, in the same order."""
        one = id(optimizer)
        if one not in self._last and one not in self._wrappers:
            mine = [id(parameter) for _, parameter in self.parameters(optimizer)]
            others = ([id(parameter) for _, parameter in self._found[other].named] for other in self._last)
            if mine and mine in others:
                self._wrappers[one] = optimizer
        return one in self._wrappers

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer has stepped. Return whether that ends the step of the training."""
        one = id(optimizer)
        is_new = one not in self._last
        self._optimizers[one] = optimizer
        self._count += 1
        self._last[one] = self._count
        if is_new or len(self._last) == 1:  # those that step first in the loop begin the steps to come
            self._stepped.clear()
            return True
        waited_for = {other for other, last in self._last.items() if self._count - last < _FORGOTTEN}
        if one not in self._stepped and not (self._stepped | {one}) >= waited_for:
            self._stepped.add(one)
            return False
        self._stepped.clear()
        return True

    @property
    def alone(self) -> Optimizer | None:
        """The only optimizer that steps; None if there are several, or if none has stepped."""
        return next(iter(self._optimizers.values())) if len(self._optimizers) == 1 else None

    def trains(self, model: nn.Module) -> bool:
        """Whether an optimizer that has stepped holds a parameter of the model."""
        trained = {id(one) for found in self._found.values() for _, one in found.named}
        return any(id(one) in trained for one in unwrapped(model).parameters())
