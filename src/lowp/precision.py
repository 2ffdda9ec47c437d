"""A precision as one value: what is cast where, how the loss is scaled, and how the master weights are kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowp import presets, region
from lowp.errors import InvalidInput, Misuse, shown
from lowp.exponents import SharedExponents
from lowp.grad_scaler import GradScaler, NonFinite, NonFiniteGradients
from lowp.ops.predicted import is_predicted
from lowp.optim import FlexWeights, MasterWeights
from lowp.optim.blockwise import BlockwiseOptimizer
from lowp.optim.model_state import StoredModel, attach
from lowp.optim.storage import Storage
from lowp.policy import Accumulation, Policy, Rule
from lowp.presets import LossScale, Masters, Preset
from lowp.random_state import check_random_states, random_states, restore_random_states
from lowp.session import BatchNormJournal

__all__ = ["Precision"]

_VERSION = 1
_ENTRIES = ("name", "policy", "loss_scale", "masters", "scaler", "steps", "skipped_steps", "seed", "random")
_PATIENCE = 20  # steps skipped in a row, with nothing that could be made smaller, before training is given up
Optimizer = TypeVar("Optimizer", bound="torch.optim.Optimizer | None")


class Precision:
    """Trains a model in a precision: five lines beside plain PyTorch.

        precision = lowp.Precision("fp16")
        model, optimizer = precision.prepare(model, optimizer)
        with precision.autocast():
            loss = loss_function(model(x), y)
        precision.backward(loss)
        precision.step(optimizer)

    `precision` is a preset (``fp16``, ``bf16-storage``, ``fp8`` …), any format for contraction operands and their
    gradients (``e5m7``), a `Policy`, a `Preset`, or the path of a policy file. `loss_scale` (``none``, a number,
    ``dynamic``), `masters` (``fp32``, ``split``, ``stochastic``, ``none``) and `accumulate` (``fp16/16``) take the
    place of the preset's own. `strict` raises where a rule is never used or a contraction is met by no rule.
    """

    def __init__(
        self,
        precision: str | Preset | Policy | Path = "fp32",
        *,
        loss_scale: str | float | LossScale | None = None,
        masters: str | Masters | None = None,
        accumulate: str | Accumulation | None = None,
        strict: bool = False,
        seed: int = 0,
    ) -> None:
        preset = presets.parse(precision)
        if loss_scale is not None:
            preset = replace(preset, loss_scale=LossScale.parse(loss_scale))
        if masters is not None:
            preset = replace(preset, masters=masters if isinstance(masters, Masters) else Masters(masters))
        if accumulate is not None:
            preset = replace(preset, policy=_accumulating(preset.policy, Accumulation.parse(accumulate)))
        if is_predicted(preset.policy.parameters) and preset.masters.kind != "none":
            raise InvalidInput(
                f"masters={preset.masters}: in {preset.policy.parameters} weights and updates have exponents of their "
                "own and no masters: leave masters out, or use dfp16, whose parameters are fp32"
            )
        if preset.masters.kind != "none" and preset.policy.parameters is None:
            raise InvalidInput(
                f"masters={preset.masters} keep the fp32 value of parameters in few bits, but {preset.name} leaves the "
                f"parameters in fp32: use {preset.name}-storage if there is one, or a policy with parameters="
            )
        self.preset = preset
        self.policy = preset.policy
        self.seed = seed
        self.steps = 0
        self._strict = strict
        self._region = region.autocast(self.policy, strict=strict)
        self._scaler: GradScaler | None = None
        self._skipped: Tensor | None = None
        self._device = torch.device("cpu")
        self._prepared = 0
        self._journals: list[BatchNormJournal] = []
        self._skipped_in_a_row = 0
        self._faults: list[str] = []

    # -- a training step, in the order of its calls ---------------------------------------------------------------
    def prepare(self, model: nn.Module, optimizer: Optimizer = None) -> tuple[nn.Module, Optimizer]:  # type: ignore[assignment]
        """Bring model and optimizer into this precision, in place; returns both, the optimizer wrapped if need be.

        Where the policy stores parameters in few bits they are converted, masters are kept by `lowp.MasterWeights`
        around the optimizer (lowp's own optimizers keep theirs themselves), and `model.state_dict()` gives and takes
        fp32. Running statistics of BatchNorm are put back when a step is skipped, and overflows are reported by
        parameter name. Call it once a model, before the first step; again for further models or optimizers.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"prepare takes a torch module and its optimizer, not {type(model).__name__}")
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._device = device
        if self._scaler is None:
            self._scaler = self._new_scaler(device.type)
        prepared: Any = optimizer
        if self.policy.parameters is not None:
            prepared = self._store(model, optimizer)
        if self._scaler.is_enabled():
            self._scaler.watch(model)
        elif self.exponents is not None:
            self._journals.append(BatchNormJournal(model))
        return model, prepared

    def autocast(self) -> region.autocast:
        """The region in which ops are cast by this precision's policy: ``with precision.autocast():``."""
        return self._region

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scale the loss and run backward; `options` go to `Tensor.backward` (retain_graph, inputs …)."""
        self.scaler.scale(loss).backward(**options)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this optimizer's gradients by the loss scale, for clipping; `step` does it otherwise."""
        self.scaler.unscale_(optimizer)

    def step(self, *optimizers: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer whose gradients are finite, then move the loss scale; once an iteration, with them all.

        Returns what the last optimizer's step returned, None where it was skipped; see `stepped`.
        """
        if not optimizers:
            raise Misuse("step() needs the optimizers to step: precision.step(optimizer)")
        if closure is not None and self.scaler.is_enabled():
            raise Misuse(
                "a closure computes its loss without the loss scale: compute loss and gradients first, or train this "
                "optimizer with Precision(..., loss_scale='none')"
            )
        if self.exponents is not None and not self.scaler.is_enabled() and self._skips_faulty(self.exponents):
            return None
        result = None
        for optimizer in optimizers:
            result = self.scaler.step(optimizer) if closure is None else optimizer.step(closure)
        if self.scaler.is_enabled():
            stepped = [self.scaler.stepped_for(optimizer) for optimizer in optimizers]
            skipped = ~torch.stack(stepped).all()
            self._skipped = skipped.to(torch.int64) if self._skipped is None else self._skipped + skipped
        self.scaler.update()
        self.steps += 1
        if self.exponents is not None:
            self._skipped_in_a_row = 0
            self._end_step(self.exponents, stepped=True)
        return result

    def _skips_faulty(self, exponents: SharedExponents) -> bool:
        """Skip the step if a value that is not finite was written in it, here or on another rank: told, and counted."""
        faults = exponents.faults()
        if not exponents.any_rank(bool(faults)):
            return False
        self._faults = faults
        self._skipped = (0 if self._skipped is None else self._skipped) + torch.ones((), dtype=torch.int64)
        self.steps += 1
        self._skipped_in_a_row += 1
        self._end_step(exponents, stepped=False)
        where = f"first in the {faults[0]}" if faults else "on another rank"
        text = f"an infinity or a NaN, {where}: int16 has neither, and step {self.steps} was skipped"
        if self._skipped_in_a_row >= _PATIENCE:
            raise NonFiniteGradients(
                f"{text}, as were the {_PATIENCE - 1} steps before it: look at the inputs, the learning rate and the "
                "loss, or keep that op in fp32 by a rule of its own"
            )
        warnings.warn(text, UserWarning, stacklevel=4)
        return True

    def _end_step(self, exponents: SharedExponents, stepped: bool) -> None:
        for journal in self._journals:
            journal.settle(torch.tensor(stepped))
        exponents.flush()

    # -- what can be asked ----------------------------------------------------------------------------------------
    @property
    def scaler(self) -> GradScaler:
        """The loss scaler, disabled where this precision scales nothing."""
        if self._scaler is None:
            self._scaler = self._new_scaler(None)
        return self._scaler

    @property
    def scale(self) -> float:
        """The loss scale, 1 where nothing is scaled. Waits for the device."""
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else 1.0

    @property
    def exponents(self) -> SharedExponents | None:
        """The shared exponents of everything that is written under a place; None in precisions without any."""
        return self._region.exponents

    @property
    def faults(self) -> list[str]:
        """The places where the latest step that was skipped for it had written an infinity or a NaN, in order."""
        return list(self._faults)

    @property
    def stepped(self) -> Tensor:
        """Whether the last `step` changed the weights: a 0-d bool tensor on the device."""
        if self.exponents is not None and not self.scaler.is_enabled():
            return torch.tensor(self.steps > 0 and self._skipped_in_a_row == 0)
        return self.scaler.stepped

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was infinite or NaN. Waits for the device."""
        return 0 if self._skipped is None else int(self._skipped)

    @property
    def nonfinite(self) -> NonFinite | None:
        """Where the latest skipped step was first not finite, or None. Waits for the device."""
        return self.scaler.nonfinite

    def report(self) -> Any:
        """Rules that were never used, and contractions that no rule saw."""
        return self._region.report()

    def __str__(self) -> str:
        preset = self.preset
        return f"{preset.name}: {preset.summary} (loss scale {preset.loss_scale}, masters {preset.masters})"

    def __repr__(self) -> str:
        preset = self.preset
        return f"Precision({preset.name!r}, loss_scale={str(preset.loss_scale)!r}, masters={str(preset.masters)!r})"

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Policy, loss scale, counters, seed and random states, as plain values; masters are in the optimizer's."""
        return {
            "version": _VERSION,
            "name": self.preset.name,
            "policy": self.policy.to_toml(),
            "loss_scale": str(self.preset.loss_scale),
            "masters": str(self.preset.masters),
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "seed": self.seed,
            "random": random_states(),
            "exponents": None if self.exponents is None else self.exponents.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; raises InvalidInput, with nothing changed, for that of another precision."""
        self._check(state)
        before = self.scaler.state_dict()
        self.scaler.load_state_dict(state["scaler"])
        if self.exponents is not None and state.get("exponents") is not None:
            try:
                self.exponents.load_state_dict(state["exponents"], self._device)
            except Exception:
                self.scaler.load_state_dict(before)
                raise
        self.steps, self.seed = state["steps"], state["seed"]
        self._skipped = torch.tensor(state["skipped_steps"])
        restore_random_states(state["random"])

    def _check(self, state: dict[str, Any]) -> None:
        """Raise InvalidInput for a state that cannot be continued from; changes nothing."""
        if not isinstance(state, dict):
            raise InvalidInput(f"a precision's state is a dictionary as state_dict() gives, not {type(state).__name__}")
        if state.get("version") != _VERSION:
            raise InvalidInput(
                f"a precision's state of version {shown(state.get('version'))}: this lowp reads {_VERSION}"
            )
        missing = [name for name in _ENTRIES if name not in state]
        if missing:
            raise InvalidInput(f"a precision's state needs {', '.join(_ENTRIES)}; missing: {', '.join(missing)}")
        if not isinstance(state["policy"], str):
            raise InvalidInput(f"the policy of a precision's state is TOML text, not {type(state['policy']).__name__}")
        if Policy.from_toml(state["policy"], "the checkpoint's policy") != self.policy:
            raise InvalidInput(
                f"the checkpoint was trained in {state['name']} and this run is in {self.preset.name}: use "
                f"Precision({state['name']!r}), or load the model alone, whose state is fp32 in every precision"
            )
        for name, own in (("loss_scale", str(self.preset.loss_scale)), ("masters", str(self.preset.masters))):
            if state[name] != own:
                raise InvalidInput(
                    f"the checkpoint was trained with {name}={shown(state[name])} and this run has {name}={own!r}: "
                    "give the same to Precision, or load model and optimizer without the precision"
                )
        for name in ("steps", "skipped_steps"):
            if type(state[name]) is not int or not 0 <= state[name] < 2**63:
                raise InvalidInput(
                    f"a precision's state with {name}={shown(state[name])}: a number of steps is 0 or more"
                )
        if self.exponents is not None and state.get("exponents") is None:
            raise InvalidInput(f"a precision's state without exponents: {self.preset.name} cannot go on without them")
        if type(state["seed"]) is not int:
            raise InvalidInput(f"a precision's state with seed={shown(state['seed'])}: a seed is a whole number")
        check_random_states(state["random"])

    # -- parts ----------------------------------------------------------------------------------------------------
    def _new_scaler(self, device: str | None) -> GradScaler:
        scale = self.preset.loss_scale
        if scale.kind == "none":
            return GradScaler(device, enabled=False)
        if scale.kind == "static":
            return GradScaler(device, loss_scale=scale.initial, floor=scale.floor, ceiling=scale.ceiling)
        return GradScaler(
            device,
            scale.initial,
            scale.growth,
            scale.backoff,
            scale.interval,
            hysteresis=scale.hysteresis,
            floor=scale.floor,
            ceiling=scale.ceiling,
        )

    def _store(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        """Convert the parameters to the format that the policy stores them in; returns the optimizer to use."""
        if is_predicted(self.policy.parameters):
            return self._store_predicted(model, optimizer)
        storage = Storage(self.policy.parameters, self.preset.masters.kind)
        if isinstance(optimizer, (MasterWeights, BlockwiseOptimizer)):
            optimizer.attach(model)
        elif optimizer is not None and storage.kind != "none":
            optimizer = MasterWeights(optimizer, storage.cast, kind=storage.kind, seed=self.seed)
            optimizer.attach(model)
        kept = {parameter for group in optimizer.param_groups for parameter in group["params"]} if optimizer else set()
        if not isinstance(optimizer, (MasterWeights, BlockwiseOptimizer)):
            kept = set()
        others = [one for one in model.parameters() if one not in kept and one.is_floating_point()]
        if others:
            stored = StoredModel(storage)
            stored.store(model, keep=False)
            attach(model, stored)
        return optimizer

    def _store_predicted(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        """Write the parameters under exponents that belong to their names."""
        exponents, cast = self.exponents, self.policy.parameters
        if exponents is None or cast is None:
            raise InvalidInput(
                f"parameters={cast} needs a rule that writes results in the same way, such as Rule.of(output={cast!s})"
            )
        names = {parameter: name for name, parameter in model.named_parameters()}
        prefix = f"model {self._prepared + 1}: " if self._prepared else ""
        self._prepared += 1
        if optimizer is not None:
            optimizer = FlexWeights(optimizer, cast, exponents, {one: prefix + name for one, name in names.items()})
            optimizer.attach(model)
        kept = {parameter for group in optimizer.param_groups for parameter in group["params"]} if optimizer else set()
        with torch.no_grad():
            for parameter, name in names.items():
                if parameter not in kept and parameter.is_floating_point():
                    parameter.copy_(exponents.write(parameter, cast, f"weight of {prefix}{name}"))
        exponents.flush()
        return optimizer


def _accumulating(policy: Policy, accumulate: Accumulation) -> Policy:
    """The policy with every rule that casts operands of a product summing in `accumulate`."""
    if not any(rule.weight is not None or rule.input is not None for rule in policy.rules):
        return policy.before(Rule.of("contraction", accumulate=accumulate))
    return replace(
        policy,
        rules=tuple(replace(rule, accumulate=accumulate) if rule.weight is not None else rule for rule in policy.rules),
    )
