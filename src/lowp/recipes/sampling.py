"""What a precision loses in a step, counted against fp32 on the same weights and the same batch, at sampled steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lowp.random_state import random_states, restore_random_states
from lowp.recipes.recipe import Recipe, Size

__all__ = ["Sampler"]

SMALLEST_FP16 = 2.0**-24  # the smallest subnormal of fp16: what is smaller in magnitude cannot be stored in it


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
        states = random_states()
        self._recipe = recipe
        self._reference = recipe.make_model(size).to(device)
        self._double = copy.deepcopy(self._reference).double()
        restore_random_states(states)
        self._at = [(number + 0.5) / count for number in range(count)]
        self._taken = 0
        self._before: dict[str, Tensor] = {}
        self._states: dict[str, Any] = {}
        self._counts = {name: [0, 0] for name in ("flushed_gradients", "lost_updates", "small_updates")}

    def wants(self, progress: float) -> bool:
        """Whether the step at this share of the run is to be looked at."""
        if self._taken >= len(self._at) or progress < self._at[self._taken]:
            return False
        self._taken += 1
        return True

    def before_forward(self) -> None:
        """Remember the random states, so that the reference drops out the same units."""
        self._states = random_states()

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Compare the gradients, which are unscaled by now, and remember the weights."""
        states = random_states()
        weights = model.state_dict()
        self._reference.load_state_dict(weights)
        self._reference.train()
        self._reference.zero_grad()
        restore_random_states(self._states)
        torch.autograd.backward(self._recipe.loss(self._reference, batch))
        restore_random_states(states)
        own = dict(model.named_parameters())
        for name, parameter in self._reference.named_parameters():
            if parameter.grad is not None:
                present = parameter.grad != 0
                gradient = own[name].grad
                zero = present if gradient is None else present & (gradient == 0)
                self._count("flushed_gradients", zero, present)
        self._before = {name: weights[name].detach().clone() for name in own}
        self._count_small(weights, own, optimizer)

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

    def _count_small(
        self, weights: dict[str, Tensor], own: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Take the step in fp64 with the recipe's optimizer in the state that the run's is in."""
        self._double.load_state_dict(weights)
        wanting = self._recipe.make_optimizer(self._double, 1.0)
        state = optimizer.state_dict()
        wanting.load_state_dict({name: state[name] for name in ("state", "param_groups")})
        for name, parameter in self._double.named_parameters():
            gradient = own[name].grad
            parameter.grad = None if gradient is None else gradient.double()
        wanting.step()
        with torch.no_grad():
            for name, parameter in self._double.named_parameters():
                change = (parameter - self._before[name].double()).abs()
                self._count("small_updates", (change > 0) & (change < SMALLEST_FP16), change > 0)

    def _count(self, name: str, some: Tensor, among: Tensor) -> None:
        self._counts[name][0] += int(some.sum())
        self._counts[name][1] += int(among.sum())
