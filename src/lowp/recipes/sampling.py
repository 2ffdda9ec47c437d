"""The losses of a precision at sampled steps, compared with fp32 on the same weights and the same batch."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.recipe import Recipe, Size
from lowp.rng_state import restore_rng_states, rng_states

SMALLEST_FP16 = 2.0**-24  # the smallest subnormal number of fp16


class Observer:
    """An observer of some training steps, which does nothing. `Training` calls the four methods in this order."""

    def wants(self, progress: float) -> bool:
        """Return whether to observe the step at this share of the run; the other methods are called only if so."""
        return False

    def before_forward(self) -> None:
        """Called before the forward pass, after gradients were set to None."""

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Called before the optimizer's step; gradients are unscaled and clipped."""

    def after_step(self, model: nn.Module) -> None:
        """Called after the optimizer's step, unless it was skipped."""


class Reference:
    """An fp32 copy of a run's model, for backward passes on the run's weights (its masters), batch and random draws."""

    def __init__(self, recipe: Recipe, size: Size, device: torch.device) -> None:
        self._states = rng_states()
        self._recipe = recipe
        self.model = recipe.make_model(size).to(device)
        restore_rng_states(self._states)

    def remember(self) -> None:
        """Save the random states before the run's forward pass, so that the copy drops out the same units."""
        self._states = rng_states()

    def backward(self, weights: dict[str, Tensor], batch: Any) -> None:
        """Compute the gradients of the unscaled loss in the copy's parameters; restore the random states."""
        states = rng_states()
        self.model.load_state_dict(weights)
        self.model.train()
        self.model.zero_grad()
        restore_rng_states(self._states)
        torch.autograd.backward(self._recipe.loss(self.model, batch))
        restore_rng_states(states)


class ExactUpdates:
    """The updates of the recipe's optimizer, computed in fp64 from the state of the run's optimizer."""

    def __init__(self, recipe: Recipe, size: Size, device: torch.device) -> None:
        states = rng_states()
        self._recipe = recipe
        self._double = recipe.make_model(size).to(device).double()
        restore_rng_states(states)

    def of(
        self, weights: dict[str, Tensor], parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        """Return, by name, the fp64 updates of `weights` from the gradients of the run's `parameters`."""
        self._double.load_state_dict(weights)
        exact_optimizer = self._recipe.make_optimizer(self._double, 1.0)
        state = optimizer.state_dict()
        # A deep copy: load_state_dict shares Adam's step counts, and a step would increase those of the run.
        exact_optimizer.load_state_dict({name: deepcopy(state[name]) for name in ("state", "param_groups")})
        for name, parameter in self._double.named_parameters():
            gradient = parameters[name].grad
            parameter.grad = None if gradient is None else gradient.double()
        exact_optimizer.step()
        with torch.no_grad():
            return {name: parameter - weights[name].double() for name, parameter in self._double.named_parameters()}


class Sampler(Observer):
    """Counts flushed gradients, lost updates and small updates at `count` steps spread evenly over a run.

    * flushed gradients: elements that are zero in this precision and nonzero in an fp32 backward pass on the same
      weights (the masters), batch and random draws, as a share of those nonzero in fp32.
    * lost updates: weights with a nonzero gradient whose value (that of the master, if any) is unchanged by the step,
      as a share of the weights with a nonzero gradient.
    * small updates: updates below 2**-24, the smallest number of fp16, as a share of the nonzero updates. Updates are
      computed in fp64 from the run's gradients, by the recipe's optimizer.

    The run is not changed, and random states are restored. Skipped steps are not counted as updates.
    """

    def __init__(self, recipe: Recipe, size: Size, device: torch.device, count: int = 8) -> None:
        self._reference = Reference(recipe, size, device)
        self._exact = ExactUpdates(recipe, size, device)
        self._moments = [(index + 0.5) / count for index in range(count)]
        self._taken = 0
        self._before: dict[str, Tensor] = {}
        self._counts = {name: [0, 0] for name in ("flushed_gradients", "lost_updates", "small_updates")}

    def wants(self, progress: float) -> bool:
        """Return whether to sample the step at this share of the run."""
        if self._taken >= len(self._moments) or progress < self._moments[self._taken]:
            return False
        self._taken += 1
        return True

    def before_forward(self) -> None:
        """Save the random states for the reference."""
        self._reference.remember()

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Compare the gradients with those of the reference, count small updates, and copy the weights."""
        weights = model.state_dict()
        self._reference.backward(weights, batch)
        parameters = dict(model.named_parameters())
        for name, parameter in self._reference.model.named_parameters():
            if parameter.grad is not None:
                nonzero = parameter.grad != 0
                gradient = parameters[name].grad
                flushed = nonzero if gradient is None else nonzero & (gradient == 0)
                self._count("flushed_gradients", flushed, nonzero)
        self._before = {name: weights[name].detach().clone() for name in parameters}
        for update in self._exact.of(weights, parameters, optimizer).values():
            self._count("small_updates", (update != 0) & (update.abs() < SMALLEST_FP16), update != 0)

    def after_step(self, model: nn.Module) -> None:
        """Compare the weights with those before the step."""
        weights = model.state_dict()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                nonzero = parameter.grad != 0
                self._count("lost_updates", nonzero & (weights[name] == self._before[name]), nonzero)

    def state(self) -> dict[str, Any]:
        """Return what was counted so far, as plain values."""
        return {"taken": self._taken, "counts": {name: list(counts) for name, counts in self._counts.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with what an earlier sampler has counted."""
        self._taken, self._counts = state["taken"], state["counts"]

    def shares(self) -> dict[str, float | None]:
        """Return the three shares, 0 to 1, over all sampled steps; None for a share of no elements."""
        return {name: lost / count if count else None for name, (lost, count) in self._counts.items()}

    def _count(self, name: str, lost: Tensor, counted: Tensor) -> None:
        self._counts[name][0] += int(lost.sum())
        self._counts[name][1] += int(counted.sum())
