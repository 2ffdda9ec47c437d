"""A precision as one value: the casts, the loss scale, and how master weights are kept."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from lowp import distributed, precision_state, presets, region
from lowp.errors import InvalidInput, Misuse
from lowp.exponents import DelayedScales, SharedExponents, is_flexpoint
from lowp.optim.preparing import FlexStorage, MasterStorage, agree_on_masters, check_masters
from lowp.optim.releasing import refuse_released
from lowp.optim.skipping import skipping
from lowp.optim.storage import Storage, check_seed
from lowp.policy import Accumulation, Policy
from lowp.presets import LossScale, Masters, Preset
from lowp.rng_state import restore_rng_states, rng_states
from lowp.step import (
    FirstStep,
    GradScaler,
    NonFinite,
    StepGuard,
    Trained,
    UnscaledSteps,
    as_flag,
    expect_step,
    first_scale,
    not_rounded,
    step_comes,
)

_NOTHING = nullcontext()
Optimizer = TypeVar("Optimizer", bound="torch.optim.Optimizer | None")
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class Precision:
    """Trains a model in a precision, with five additional lines in a PyTorch loop.

        precision = lowp.Precision("fp16")
        model, optimizer = precision.prepare(model, optimizer)
        with precision.autocast():
            loss = loss_function(model(x), y)
        precision.backward(loss)
        precision.step(optimizer)

    `precision` is a preset (``fp16``, ``bf16-storage``, ``fp8`` …), any format for contraction operands and their
    gradients (``e5m7``), a floating dtype of torch (``torch.float16`` is ``fp16``), a `Policy`, a `Preset`, or the path
    of a policy file. `loss_scale` (``none``, a number, ``dynamic``), `masters` (``fp32``, ``split``, ``stochastic``,
    ``none``) and `accumulate` (``fp16/16``) replace those of the preset. `strict=True` raises if a rule is never used
    or a contraction is matched by no rule.
    """

    def __init__(
        self,
        precision: str | Preset | Policy | Path | torch.dtype = "fp32",
        *,
        loss_scale: str | float | LossScale | None = None,
        masters: str | Masters | None = None,
        accumulate: str | Accumulation | None = None,
        strict: bool = False,
        seed: int = 0,
    ) -> None:
        preset = presets.parse(precision, loss_scale, masters, accumulate)
        check_masters(preset)
        check_seed(seed)
        self.preset = preset
        self.policy = preset.policy
        self.seed = seed
        self.steps = 0
        self._region = region.autocast(self.policy, strict=strict)
        self._scaler: GradScaler | None = None
        self._searches_scale = preset.loss_scale.search
        self._clipped = presets.clipped_gradients(preset)  # a warning that the first backward pass gives
        self._device = torch.device("cpu")
        self._storing = self._new_storing()
        self._trained = Trained(preset, self._storing)
        self._first: FirstStep | None = None  # from the first backward pass to its step
        self._is_compared = False  # with the precisions of other ranks
        is_plain = not self.policy.rules and self.policy.parameters is None  # fp32 is torch, bit for bit
        self._unscaled = UnscaledSteps(preset.name, self.exponents, is_plain)

    # -- a training step, in the order of its calls ---------------------------------------------------------------
    def prepare(self, model: nn.Module, optimizer: Optimizer = None) -> tuple[nn.Module, Optimizer]:  # type: ignore[assignment]
        """Prepare model and optimizer for this precision, in place; returns both, the optimizer wrapped if necessary.

        If the policy stores parameters in few bits, they are converted, `lowp.MasterWeights` around the optimizer keeps
        masters (lowp's own optimizers keep their own), and `model.state_dict()` returns and accepts fp32. Running
        statistics of BatchNorm are restored when a step is skipped, and overflows are reported by parameter name. Call
        it once per model, before the first step; again for further models or optimizers.

        Calls `prepare_model` and `prepare_optimizer`. If DistributedDataParallel or fully_shard will wrap the model,
        call them separately: prepare_model(model), wrap, create the optimizer, prepare_optimizer(optimizer).
        """
        prepared: Any = optimizer
        if isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer):
            self._trained.admit(optimizer, model)
        model = self.prepare_model(model)
        if optimizer is not None:
            prepared = self.prepare_optimizer(optimizer)
        if self._storing is not None:
            self._storing.release(model)
        return model, prepared

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Do what `prepare` does to a model, in place, before it is wrapped or sharded; returns it.

        Parameters are converted to the format that the policy stores them in; their fp32 values are kept for the
        optimizer to come. Raises InvalidInput, with nothing changed, for a wrapped model that would be converted.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"prepare takes a torch module and its optimizer, not {type(model).__name__}")
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._trained.admit(None, model)
        self._require_same_on_all_ranks()
        if self._storing is not None:
            self._storing.model(model)
        if self.scales is not None:
            self.scales.passes.keep_sites_of(model)
        if self._scaler is None:
            self._scaler = self._new_scaler(self._device.type)
        if self._trained.add(model):
            self._watch(model)
        return model

    def prepare_optimizer(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Do what `prepare` does to an optimizer of prepared models; returns it, or the wrapper to be used for it."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"prepare_optimizer takes a torch optimizer, not {type(optimizer).__name__}")
        self._trained.admit(optimizer)
        if self.scaler.is_enabled():
            refuse_released(optimizer)
        self._require_same_on_all_ranks()
        prepared: Any = optimizer if self._storing is None else self._storing.optimizer(optimizer)
        return cast("AnyOptimizer", prepared)

    def _require_same_on_all_ranks(self) -> None:
        if not self._is_compared and not torch.compiler.is_compiling() and distributed.has_other_ranks():
            distributed.require_same_precision(self.preset.name, precision_state.lines_of(self.preset, self.seed))
            self._is_compared = True

    def _watch(self, model: nn.Module) -> None:
        """Give names to a model's parameters in reports, and restore its running statistics when a step is skipped."""
        if self.scaler.is_enabled():
            self.scaler.watch(model)
            return
        if not self._unscaled.is_plain:
            self._unscaled.names.watch(model)
            self.guard.protect(model)

    def autocast(self) -> region.autocast:
        """The region in which ops are cast by this precision's policy: ``with precision.autocast():``."""
        return self._region

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scale the loss and run backward; `options` go to `Tensor.backward` (retain_graph, inputs …).

        Before the first step a dynamic loss scale without a number is searched with this loss. Raises InvalidInput if
        the loss is not a tensor.
        """
        if not isinstance(loss, Tensor):
            raise InvalidInput(
                f"backward takes the loss as a tensor that the model has computed, not {type(loss).__name__}: give the "
                "loss itself, not loss.item()"
            )
        self._require_same_on_all_ranks()
        scaler = self.scaler
        if self._searches_scale and not torch.compiler.is_compiling():
            self._searches_scale = False
            scale = self.preset.loss_scale
            if self.steps == 0 and scaler.get_scale() == scale.initial:
                scaler.begin_with(first_scale(loss, scale.initial, scale.floor, **options))
        if scaler.is_enabled():
            expect_step(scaler)
            if self._clipped is not None:
                warnings.warn(self._clipped, UserWarning, stacklevel=2)
                self._clipped = None
        else:
            self._unscaled.saw(loss)
        scaler.scale(loss).backward(**options)
        if (self.steps == 0 or self._first is not None) and not torch.compiler.is_compiling():
            self._first = FirstStep(self._trained.models() if scaler.is_enabled() else ())

    @region.at_rest
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this optimizer's gradients by the loss scale, for clipping; `step` does it otherwise."""
        self._require_backward("unscale_")
        self.scaler.unscale_(optimizer)

    @region.at_rest
    def step(self, *optimizers: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer whose gradients are finite, then update the loss scale; call it once per iteration.

        Returns what the last optimizer's step returned, None where it was skipped; see `stepped`.
        """
        if not optimizers or any(map(callable, optimizers)):
            raise Misuse(
                "step() needs the optimizers to step: precision.step(optimizer); and a closure by its name: "
                "precision.step(optimizer, closure=closure)"
            )
        scaler = self.scaler
        is_scaled = scaler.is_enabled()
        self._trained.check(optimizers, is_scaled or closure is not None)
        if self._first is not None:
            report = self._region.report()
            forgotten = not_rounded(self.preset, report.ops, report.unused, self._region.was_entered)
            if self._first.begins(scaler, optimizers, forgotten):
                self._first = None
        if closure is not None and is_scaled:
            raise Misuse(
                "a closure computes its loss without the loss scale: compute loss and gradients first, or train this "
                "optimizer with Precision(..., loss_scale='none')"
            )
        skip: torch.Tensor | bool = False
        if is_scaled:
            self._require_backward("step")
            step_comes(scaler)
        else:
            skip = self._unscaled.skips(() if closure is not None else optimizers, self.steps + 1)
            if skip is True:
                self._end_step()
                return None
        self._agree_on_masters(optimizers)
        result = None
        try:
            for optimizer in optimizers:
                with skipping(optimizer, skip) if isinstance(skip, Tensor) else _NOTHING:
                    result = scaler.step(optimizer) if closure is None else optimizer.step(closure)
            scaler.update()
        except BaseException:  # after Ctrl-C in a notebook the loop goes on with the next batch
            scaler.abandon()
            raise
        self._end_step()
        if not is_scaled:
            self._unscaled.end(self.steps, optimizers, skip)
        return result

    @region.at_rest
    def step_one(self, optimizer: torch.optim.Optimizer) -> Any:
        """Step one of several optimizers that share a loss scale; `end_step` updates it after the last of them.

        For callers that see one optimizer at a time. With a loss scale only.
        """
        self._trained.check((optimizer,), True)
        self._require_backward("step_one")
        step_comes(self.scaler)
        self._agree_on_masters((optimizer,))
        return self.scaler.step(optimizer)

    @region.at_rest
    def end_step(self) -> None:
        """Count a step and update the loss scale after calls of `step_one`; `step` includes this."""
        self.scaler.update()
        self._end_step()
        self._first = None

    def _end_step(self) -> None:
        self.steps += 1
        if self.scales is not None:
            self.scales.flush()

    def _agree_on_masters(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self.steps == 0 and isinstance(self._storing, MasterStorage):
            agree_on_masters(optimizers)

    def _require_backward(self, what: str) -> None:
        if self.scaler.is_enabled() and not self.scaler.has_scaled:
            raise Misuse(
                f"{what}() needs precision.backward(loss) since the last step: gradients of loss.backward() are not "
                f"multiplied by the loss scale, and {what}() would divide them by it. Call precision.backward(loss); "
                "with several optimizers give all of them to one call, precision.step(first, second)"
            )

    # -- what can be asked ----------------------------------------------------------------------------------------
    @property
    def scaler(self) -> GradScaler:
        """The loss scaler, disabled in precisions without a loss scale."""
        if self._scaler is None:
            self._scaler = self._new_scaler(None)
        return self._scaler

    @property
    def guard(self) -> StepGuard:
        """The consequences of steps and skipped steps: counts, running statistics, the error after too many."""
        return self.scaler.guard if self.scaler.is_enabled() else self._unscaled.guard

    @property
    def scale(self) -> float:
        """The loss scale, 1 in precisions without one. Waits for the device."""
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else 1.0

    @property
    def exponents(self) -> SharedExponents | None:
        """The shared exponents of all sites of a step; None in precisions without them."""
        return self._region.exponents

    @property
    def scales(self) -> DelayedScales | None:
        """The scales of operands that come from earlier steps; None in precisions without delayed scaling."""
        return self._region.scales

    @property
    def faults(self) -> list[str]:
        """The sites of the infinities and NaNs for which the latest step was skipped, in the order of the step."""
        return self._unscaled.faults

    @property
    def stepped(self) -> Tensor:
        """Whether the last `step` changed the weights: a 0-d bool tensor on the device."""
        return self.scaler.stepped if self.scaler.is_enabled() else as_flag(self.guard.stepped)

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was infinite or NaN. Waits for the device."""
        return self.guard.skipped_steps

    @property
    def nonfinite(self) -> NonFinite | None:
        """The first non-finite gradient of the latest skipped step, or None. Waits for the device."""
        return self.scaler.nonfinite

    def report(self) -> Any:
        """A report of rules that were never used, and contractions that no rule matched."""
        return self._region.report()

    def __str__(self) -> str:
        preset = self.preset
        return f"{preset.name}: {preset.summary} (loss scale {preset.loss_scale}, masters {preset.masters})"

    def __repr__(self) -> str:
        preset = self.preset
        return f"Precision({preset.name!r}, loss_scale={str(preset.loss_scale)!r}, masters={str(preset.masters)!r})"

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Policy, loss scale, counters, seed and random states, as plain values; the optimizer's has the masters."""
        return {
            "version": precision_state.VERSION,
            "name": self.preset.name,
            "policy": self.policy.to_toml(),
            "loss_scale": str(self.preset.loss_scale),
            "masters": str(self.preset.masters),
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "seed": self.seed,
            "random": rng_states(),
            "exponents": None if self.exponents is None else self.exponents.state_dict(),
            **({} if self.scales is None else {"scales": self.scales.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; raises InvalidInput, with nothing changed, if it is of another precision."""
        needs = {"exponents": self.exponents, "scales": self.scales}
        precision_state.check(state, self.preset, [name for name, one in needs.items() if one is not None])
        check_seed(state["seed"], "a precision's state with ")
        before = self.scaler.state_dict()
        self.scaler.load_state_dict(state["scaler"])
        try:
            for name, one in needs.items():
                if one is not None:
                    one.load_state_dict(state[name], self._device)
        except Exception:
            self.scaler.load_state_dict(before)
            raise
        self.steps, self.seed = state["steps"], state["seed"]
        self.guard.skipped_steps = state["skipped_steps"]
        restore_rng_states(state["random"])

    # -- parts ----------------------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_skipped_steps": self.skipped_steps, "_first": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        skipped = state.pop("_skipped_steps")
        self.__dict__.update(state)
        self.guard.skipped_steps = skipped
        for model in self._trained.models():
            self._watch(model)

    def _new_storing(self) -> MasterStorage | FlexStorage | None:
        """Return the object that stores parameters in the policy's format; None if the policy has none."""
        stored = self.policy.parameters
        if stored is None:
            return None
        if is_flexpoint(stored):
            return FlexStorage(stored, self.exponents)
        return MasterStorage(Storage.of(stored, self.preset.masters.kind), self.seed)

    def _new_scaler(self, device: str | None) -> GradScaler:
        scale = self.preset.loss_scale
        if scale.kind == "none":
            return GradScaler(device, enabled=False)
        return GradScaler(device, loss_scale=scale)
