"""What a precision loses in a step, counted against fp32 on the same weights and the same batch, at sampled steps."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowp.recipes.recipe import Recipe, Size
from lowp.rng_state import restore_rng_states, rng_states

__all__ = ["Observer", "Reference", "Sampler", "WantedChanges"]

SMALLEST_FP16 = 2.0**-24  # the smallest subnormal of fp16: what is smaller in magnitude cannot be stored in it


class Observer(Protocol):
    """What looks at some steps of a training: `Training` calls the four in this order, the last if it stepped."""

    def wants(self, progress: float) -> bool:
        """Whether the step at this share of the run is to be looked at; the other calls come for such a step only."""

    def before_forward(self) -> None:
        """The gradients are dropped, and nothing is computed yet."""

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """The gradients are there, unscaled and clipped."""

    def after_step(self, model: nn.Module) -> None:
        """The weights are updated."""


class Reference:
    """An fp32 copy of a run's model, for a backward on the run's weights (its masters), batch and random draws."""

    def __init__(self, recipe: Recipe, size: Size, device: torch.device) -> None:
        self._states = rng_states()
        self._recipe = recipe
        self.model = recipe.make_model(size).to(device)
        restore_rng_states(self._states)

    def remember(self) -> None:
        """Remember the random states before the run's own forward, so that the copy drops out the same units."""
        self._states = rng_states()

    def backward(self, weights: dict[str, Tensor], batch: Any) -> None:
        """Put the gradients of the unscaled loss into the copy's parameters; random states are put back."""
        states = rng_states()
        self.model.load_state_dict(weights)
        self.model.train()
        self.model.zero_grad()
        restore_rng_states(self._states)
        torch.autograd.backward(self._recipe.loss(self.model, batch))
        restore_rng_states(states)


class WantedChanges:
    """What the recipe's own optimizer, in the state that the run's is in, would do to the weights in fp64."""

    def __init__(self, recipe: Recipe, size: Size, device: torch.device) -> None:
        states = rng_states()
        self._recipe = recipe
        self._double = recipe.make_model(size).to(device).double()
        restore_rng_states(states)

    def of(
        self, weights: dict[str, Tensor], own: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        """By name, the fp64 change that these gradients ask for, before anything is rounded to fp32 or less."""
        self._double.load_state_dict(weights)
        wanting = self._recipe.make_optimizer(self._double, 1.0)
        state = optimizer.state_dict()
        # Copied, since Adam's count of steps would be taken over as it is, and the run's own counted up.
        wanting.load_state_dict({name: deepcopy(state[name]) for name in ("state", "param_groups")})
        for name, parameter in self._double.named_parameters():
            gradient = own[name].grad
            parameter.grad = None if gradient is None else gradient.double()
        wanting.step()
        with torch.no_grad():
            return {name: parameter - weights[name].double() for name, parameter in self._double.named_parameters()}


class Sampler:
    """Counts flushed gradients and lost updates at `count` steps spread evenly over a run.

    * flushed gradients: elements that are not zero in an fp32 backward on the same weights (the masters), batch and
      random draws, and zero in this precision, as a share of those not zero in fp32.
    * lost updates: weights whose gradient is not zero in this precision and whose value (the master's, where there is
      one, else the stored one) the step left as it was, as a share of those whose gradient is not zero.
    * small updates: wanted changes below 2**-24, which is the smallest number of fp16, as a share of the wanted
      changes that are not zero. Wanted is what the recipe's own optimizer would do with these gradients in fp64.

    Random states are put back, and nothing of the run is changed. Skipped steps are not counted as updates.
    """

    def __init__(self, recipe: Recipe, size: Size, device: torch.device, count: int = 8) -> None:
        self._reference = Reference(recipe, size, device)
        self._wanted = WantedChanges(recipe, size, device)
        self._at = [(number + 0.5) / count for number in range(count)]
        self._taken = 0
        self._before: dict[str, Tensor] = {}
        self._counts = {name: [0, 0] for name in ("flushed_gradients", "lost_updates", "small_updates")}

    def wants(self, progress: float) -> bool:
        """Whether the step at this share of the run is to be looked at."""
        if self._taken >= len(self._at) or progress < self._at[self._taken]:
            return False
        self._taken += 1
        return True

    def before_forward(self) -> None:
        """Remember the random states for the reference."""
        self._reference.remember()

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Compare the gradients, which are unscaled by now, and remember the weights."""
        weights = model.state_dict()
        self._reference.backward(weights, batch)
        own = dict(model.named_parameters())
        for name, parameter in self._reference.model.named_parameters():
            if parameter.grad is not None:
                present = parameter.grad != 0
                gradient = own[name].grad
                zero = present if gradient is None else present & (gradient == 0)
                self._count("flushed_gradients", zero, present)
        self._before = {name: weights[name].detach().clone() for name in own}
        for change in self._wanted.of(weights, own, optimizer).values():
            self._count("small_updates", (change != 0) & (change.abs() < SMALLEST_FP16), change != 0)

    def after_step(self, model: nn.Module) -> None:
        """Compare the weights with what they were."""
        weights = model.state_dict()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                moving = parameter.grad != 0
                self._count("lost_updates", moving & (weights[name] == self._before[name]), moving)

    def shares(self) -> dict[str, float | None]:
        """The three shares, 0 to 1, over all sampled steps; None where there was nothing to count."""
        return {name: lost / present if present else None for name, (lost, present) in self._counts.items()}

    def _count(self, name: str, some: Tensor, among: Tensor) -> None:
        self._counts[name][0] += int(some.sum())
        self._counts[name][1] += int(among.sum())
