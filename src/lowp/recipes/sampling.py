"""What a step loses: steps of a run that fp32 takes first, as the profiler sees it, so that both can be compared.

The shares are those of `lowp compare`; the recorders of `lowp figure` read the record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowp.numerics.profiler import Profiler
from lowp.numerics.record import Part
from lowp.rng_state import restore_rng_states, rng_states

if TYPE_CHECKING:
    from lowp.recipes.training import Training

_SMALLEST_FP16 = -24  # the exponent of the smallest subnormal number of fp16


def moments_of(steps: range, count: int) -> list[int]:
    """Return at most `count` of the steps, at the centres of parts of equal length."""
    count = min(count, len(steps))
    return [steps[int((index + 0.5) * len(steps) / count)] for index in range(count)]


class Observer:
    """Takes some `steps` of a training, so that it sees what a step begins with and what it leaves."""

    def __init__(self, training: Training, steps: Collection[int]) -> None:
        self.training, self.steps = training, steps

    def wants(self) -> bool:
        """Return whether to take the next step of the training."""
        return self.training.done in self.steps

    def step(self, batch: Any) -> Tensor:
        """Take the step and return its loss; no bit of the run differs from that of the training's own step."""
        return self.training.step(batch)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters (their masters, if any) and buffers."""
        return {name: weight.detach().clone() for name, weight in self.training.model.state_dict().items()}

    def unmoved(self, before: dict[str, Tensor], counts: Callable[[Tensor], bool]) -> Share:
        """Return the share of weights that the last step left as they were `before`, of those with a gradient.

        `counts` tells whether a parameter is counted.
        """
        weights, share = self.training.model.state_dict(), Share()
        for name, parameter in self.training.model.named_parameters():
            if parameter.grad is not None and counts(parameter):
                share.add(weights[name] == before[name], parameter.grad != 0)
        return share


class Fp32Steps(Observer):
    """Takes each step in fp32 first, on a model of its own, from the run's weights, batch and random draws.

    The profiler records that step: its gradients are those of the unscaled loss, before they are clipped, and its
    updates those of the recipe's optimizer in fp64, with the state of the run's.
    """

    def __init__(self, training: Training, steps: Collection[int]) -> None:
        super().__init__(training, steps)
        states = rng_states()
        self.model = training.recipe.make_model(training.size).to(training.device)
        restore_rng_states(states)
        self.part = Part()

    def keep(self, part: Part) -> None:
        """Add what the profiler saw of a step, which the run takes next."""
        self.part.add(part)

    def step(self, batch: Any) -> Tensor:
        """Take the step in fp32, keep what was seen, and take it in the run."""
        states = rng_states()
        self.keep(self._recorded(batch))
        restore_rng_states(states)
        return super().step(batch)

    def _recorded(self, batch: Any) -> Part:
        run, recipe = self.training, self.training.recipe
        self.model.float().train().load_state_dict(run.model.state_dict())
        self.model.zero_grad()
        optimizer = recipe.make_optimizer(self.model, 1.0)
        profiler = Profiler(self.model, optimizer, max_overhead=None, divergence=False)
        with profiler:
            profiler.begin_within(self.model, ())  # a recipe may call parts of the model alone
            torch.autograd.backward(recipe.loss(self.model, batch))
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
            self.model.double()
            state = run.optimizer.state_dict()
            if run.done == run.precision.skipped_steps:
                state["state"] = {}  # masters alone, which some storages keep there
            # A deep copy: load_state_dict shares Adam's step counts, and a step would increase those of the run.
            optimizer.load_state_dict({name: deepcopy(state[name]) for name in ("state", "param_groups")})
            run.set_rate(optimizer)
            optimizer.step()
        return profiler.record.part


class Share:
    """Counts elements of tensors that are lost, as a share of those that are counted."""

    def __init__(self, lost: int = 0, counted: int = 0) -> None:
        self.lost, self.counted = lost, counted

    def add(self, lost: Tensor, counted: Tensor) -> None:
        """Count the elements of `counted` that are true, and those of them that are lost."""
        self += Share(int((lost & counted).sum()), int(counted.sum()))

    def __iadd__(self, other: Share) -> Share:
        self.lost += other.lost
        self.counted += other.counted
        return self

    @property
    def value(self) -> float:
        """The share, 0 to 1; 0 without any."""
        return self.lost / max(1, self.counted)


class Sampler(Fp32Steps):
    """Counts flushed gradients, lost updates and small updates at `count` steps spread evenly over a run.

    * flushed gradients: elements that are zero in this precision and nonzero in an fp32 backward pass, as a share of
      those nonzero in fp32.
    * lost updates: weights with a nonzero gradient whose value (that of the master, if any) is unchanged by the step,
      as a share of the weights with a nonzero gradient.
    * small updates: updates of fp32 below 2**-24, the smallest number of fp16, as a share of the nonzero updates.

    Skipped steps have no lost updates. `counts` tells of a parameter whether it is counted in the first two.
    """

    def __init__(
        self, training: Training, count: int = 8, counts: Callable[[Tensor], bool] = lambda weight: True
    ) -> None:
        super().__init__(training, moments_of(range(training.steps), count))
        self._counts = counts
        self._shares = {name: Share() for name in ("flushed_gradients", "lost_updates", "small_updates")}

    def keep(self, part: Part) -> None:
        """Count small updates too."""
        super().keep(part)
        for key, seen in part.tensors.items():
            if key.role == "update":
                self._shares["small_updates"] += Share(seen.below(_SMALLEST_FP16), seen.nonzero)

    def step(self, batch: Any) -> Tensor:
        """Take the step in both, and count flushed gradients and lost updates."""
        run, before = self.training, self.weights()
        loss = super().step(batch)
        for own, exact in zip(run.model.parameters(), self.model.parameters(), strict=True):
            if exact.grad is not None and self._counts(exact):
                gradient = torch.zeros_like(exact.grad) if own.grad is None else own.grad
                self._shares["flushed_gradients"].add(gradient == 0, exact.grad != 0)
        if not run.precision.scaler.is_enabled() or bool(run.precision.stepped):
            self._shares["lost_updates"] += self.unmoved(before, self._counts)
        return loss

    def state(self) -> dict[str, Any]:
        """Return what was counted so far, as plain values."""
        return {"counts": {name: [share.lost, share.counted] for name, share in self._shares.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with what an earlier sampler has counted."""
        self._shares = {name: Share(*counts) for name, counts in state["counts"].items()}

    def shares(self) -> dict[str, float | None]:
        """Return the three shares, 0 to 1, over all sampled steps; None for a share of no elements."""
        return {name: share.value if share.counted else None for name, share in self._shares.items()}
