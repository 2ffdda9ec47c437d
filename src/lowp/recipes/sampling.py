"""The losses of a precision at sampled steps, compared with fp32 on the same weights and the same batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowp import kernels
from lowp.rng_state import restore_rng_states, rng_states

if TYPE_CHECKING:
    from lowp.recipes.training import Training

SMALLEST_FP16 = 2.0**-24  # the smallest subnormal number of fp16


class Observer:
    """An observer of some `steps` of a training. `Training` calls the four methods in this order."""

    def __init__(self, training: Training, steps: Collection[int] = ()) -> None:
        self.training, self.steps = training, steps

    def wants(self, progress: float) -> bool:
        """Return whether to observe the step at this share of the run; the other methods are called only if so."""
        return self.training.done in self.steps

    def before_forward(self) -> None:
        """Called before the forward pass, after gradients were set to None."""

    def before_step(self, batch: Any) -> None:
        """Called before the optimizer's step; gradients are unscaled and clipped."""

    def after_step(self) -> None:
        """Called after the optimizer's step, unless it was skipped."""

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters (their masters, if any) and buffers."""
        return {name: weight.detach().clone() for name, weight in self.training.model.state_dict().items()}


class Comparing(Observer):
    """An observer with two copies of the run's model, for the gradients of an fp32 backward pass and updates in fp64.

    Both start from the run's weights (its masters), batch and random draws. The run is not changed.
    """

    def __init__(self, training: Training, steps: Collection[int] = ()) -> None:
        super().__init__(training, steps)
        self._states = rng_states()
        copies = (training.recipe.make_model(training.size).to(training.device) for _ in range(2))
        self.reference, self._double = next(copies), next(copies).double()
        restore_rng_states(self._states)

    def before_forward(self) -> None:
        """Save the random states, so that the copy drops out the same units."""
        self._states = rng_states()

    def gradients(self, batch: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each parameter, its gradient of the unscaled loss in fp32, and its gradient in the run."""
        states = rng_states()
        self.reference.load_state_dict(self.training.model.state_dict())
        self.reference.train()
        self.reference.zero_grad()
        restore_rng_states(self._states)
        torch.autograd.backward(self.training.recipe.loss(self.reference, batch))
        restore_rng_states(states)
        for name, parameter in self.reference.named_parameters():
            own = self.training.model.get_parameter(name).grad
            if parameter.grad is not None:
                yield name, parameter.grad, torch.zeros_like(parameter.grad) if own is None else own

    def updates(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each parameter, its weight, and the recipe's update from the run's gradient, in fp64."""
        weights, state = self.training.model.state_dict(), self.training.optimizer.state_dict()
        self._double.load_state_dict(weights)
        optimizer = self.training.recipe.make_optimizer(self._double, 1.0)
        # A deep copy: load_state_dict shares Adam's step counts, and a step would increase those of the run.
        optimizer.load_state_dict({name: deepcopy(state[name]) for name in ("state", "param_groups")})
        for name, parameter in self._double.named_parameters():
            gradient = self.training.model.get_parameter(name).grad
            parameter.grad = None if gradient is None else gradient.double()
        optimizer.step()
        for name, parameter in self._double.named_parameters():
            weight = weights[name].double()
            yield name, weight, parameter.detach() - weight


class Share:
    """Counts elements of tensors that are lost, as a share of those that are counted."""

    def __init__(self, lost: int = 0, counted: int = 0) -> None:
        self.lost, self.counted = lost, counted

    def add(self, lost: Tensor, counted: Tensor) -> None:
        """Count the elements of `counted` that are true, and those of them that are lost."""
        self.lost += int((lost & counted).sum())
        self.counted += int(counted.sum())

    @property
    def value(self) -> float:
        """The share, 0 to 1; 0 without any."""
        return self.lost / max(1, self.counted)


def is_lost(weight: Tensor, update: Tensor, format: str) -> Tensor:
    """Return where an update does not change a weight that is stored in a format."""
    stored = kernels.quantize(weight, format)
    found: Tensor = kernels.quantize(stored + update, format) == stored
    return found


class Sampler(Comparing):
    """Counts flushed gradients, lost updates and small updates at `count` steps spread evenly over a run.

    * flushed gradients: elements that are zero in this precision and nonzero in an fp32 backward pass, as a share of
      those nonzero in fp32.
    * lost updates: weights with a nonzero gradient whose value (that of the master, if any) is unchanged by the step,
      as a share of the weights with a nonzero gradient.
    * small updates: fp64 updates below 2**-24, the smallest number of fp16, as a share of the nonzero updates.

    Skipped steps are not counted as updates.
    """

    def __init__(self, training: Training, count: int = 8) -> None:
        super().__init__(training)
        self._moments = [(index + 0.5) / count for index in range(count)]
        self._taken = 0
        self._before: dict[str, Tensor] = {}
        self._shares = {name: Share() for name in ("flushed_gradients", "lost_updates", "small_updates")}

    def wants(self, progress: float) -> bool:
        """Return whether to sample the step at this share of the run."""
        if self._taken >= len(self._moments) or progress < self._moments[self._taken]:
            return False
        self._taken += 1
        return True

    def before_step(self, batch: Any) -> None:
        """Count flushed gradients and small updates, and copy the weights."""
        for _, exact, own in self.gradients(batch):
            self._shares["flushed_gradients"].add(own == 0, exact != 0)
        for _, _, update in self.updates():
            self._shares["small_updates"].add(update.abs() < SMALLEST_FP16, update != 0)
        self._before = self.weights()

    def after_step(self) -> None:
        """Compare the weights with those before the step."""
        weights = self.training.model.state_dict()
        for name, parameter in self.training.model.named_parameters():
            if parameter.grad is not None:
                self._shares["lost_updates"].add(weights[name] == self._before[name], parameter.grad != 0)

    def state(self) -> dict[str, Any]:
        """Return what was counted so far, as plain values."""
        counts = {name: [share.lost, share.counted] for name, share in self._shares.items()}
        return {"taken": self._taken, "counts": counts}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with what an earlier sampler has counted."""
        self._taken = state["taken"]
        self._shares = {name: Share(*counts) for name, counts in state["counts"].items()}

    def shares(self) -> dict[str, float | None]:
        """Return the three shares, 0 to 1, over all sampled steps; None for a share of no elements."""
        return {name: share.value if share.counted else None for name, share in self._shares.items()}
