"""The scaler itself: torch's methods, and lowp's additions to them."""

import inspect
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast, overload

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from lowp.compat import skipped_by_compilers
from lowp.errors import InvalidInput, Misuse
from lowp.kernels.choose import hardware
from lowp.optim.releasing import refuse_released
from lowp.optim.skipping import begin_momentum, flagged, steps_by_itself
from lowp.presets import LossScale
from lowp.scaling import DynamicLossScale, GradientsSeen, LossScaling
from lowp.step import gradients as grads
from lowp.step.checking import Checks, Optimizer, combined
from lowp.step.guard import StepGuard, as_flag
from lowp.step.provenance import NonFinite, NonFiniteGradients
from lowp.step.state import Options, OutOfOrder, new_stage


class GradScaler(Checks):
    """Scale the loss so that small gradients are not flushed, skip steps that overflow, and adapt the scale.

    Replaces torch.amp.GradScaler(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled) and
    torch.cuda.amp.GradScaler(init_scale, ...), which is recognised by a number as its first argument; isinstance holds
    for both. The default device is the accelerator of this machine, or the CPU. By keyword:

    * loss_scale: a number (static), "dynamic", or a `lowp.scaling` object; `dynamic=False` keeps init_scale.
    * floor, ceiling: bounds of the scale; by default the normal fp32 numbers, so it is never 0, inf or NaN.
    * hysteresis: number of overflows since the last growth after which the scale is reduced (1: at once).
    * target_underflow: grow as needed if fp16 would flush more than this share of the gradients.
    * sample_interval: steps between two measurements of the exponents of the gradients (0: none).
    * patience: steps in a row that may overflow with the scale at its floor before NonFiniteGradients is raised.
    * process_group: the ranks that skip together: "auto" (all, once torch.distributed is initialised), a group, or None
      (this rank alone, for scalers that only some ranks step). One all-reduce of one number per optimizer and step.

    Not in torch: `stepped`, `stepped_for(optimizer)`, `nonfinite`, `underflow`, `watch(model)`, `protect(model)`.
    Optimizers with `_step_supports_amp_scaling` (torch's fused ones, lowp's own) are stepped without waiting for the
    device; for others one read decides. An optimizer with `allows_fp16_gradients` may hold fp16 parameters.
    """

    __signature__ = Options.signature()

    @overload
    def __init__(
        self,
        device: str | torch.device | None = ...,
        init_scale: float = ...,
        growth_factor: float = ...,
        backoff_factor: float = ...,
        growth_interval: int = ...,
        enabled: bool = ...,
        *,
        loss_scale: LossScaling | LossScale | float | str | None = ...,
        dynamic: bool = ...,
        floor: float = ...,
        ceiling: float = ...,
        hysteresis: int = ...,
        target_underflow: float | None = ...,
        sample_interval: int | None = ...,
        patience: int = ...,
        process_group: Any = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        init_scale: float,
        growth_factor: float = ...,
        backoff_factor: float = ...,
        growth_interval: int = ...,
        enabled: bool = ...,
        **keywords: Any,
    ) -> None: ...

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        options = Options.read(arguments, keywords)
        super().__init__(options, enabled=options.usable(stacklevel=3))

    # -- a step, in the order of its calls
    def scale(self, outputs: Any) -> Any:
        """Return a tensor, or nested iterables of tensors, times the scale; differentiable, reads nothing."""
        if not self._enabled:
            return outputs
        if self._per_optimizer_states:
            self._drop_cleared()
        self._remember_losses(outputs)
        self._scaled_since_update = True
        return self._scaled(outputs, {})

    def _scaled(self, outputs: Any, copies: dict[torch.device, torch.Tensor]) -> Any:
        """Scale the tensors nested in `outputs`. `copies` caches the scale by device."""
        if isinstance(outputs, torch.Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            if outputs.device not in copies:
                copies[outputs.device] = cast(torch.Tensor, self._scale).to(outputs.device, non_blocking=True)
            return outputs * copies[outputs.device]
        if isinstance(outputs, Iterable):
            scaled = (self._scaled(output, copies) for output in outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")

    @skipped_by_compilers
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, unless `unscale_` did, and call `optimizer.step(*args, **kwargs)` if all gradients were finite.

        Returns what that returns, None for a skipped step; `stepped` says which. No closures.
        """
        if not self._enabled:
            self._note_stepped(optimizer, True)
            return cast("float | None", optimizer.step(*args, **kwargs))
        if "closure" in kwargs or (args and callable(args[0])):
            raise Misuse(
                "Closure use is not currently supported if GradScaler is enabled. Compute the loss and its gradients "
                "first, then call step(optimizer); LBFGS needs a scaler with enabled=False"
            )
        refuse_released(optimizer)
        self._state("step")
        stage = self._per_optimizer_states[id(optimizer)]
        if stage["stage"] is OptState.STEPPED:
            raise Misuse("step() has already been called since the last update(). Call update() once after each step")
        if steps_by_itself(optimizer):
            returned = self._step_unread(optimizer, stage, *args, **kwargs)
        else:
            stage["untouched"] = stage["stage"] is OptState.READY
            if stage["untouched"]:
                self.unscale_(optimizer)
            self._require_checks(stage)
            returned = self._maybe_opt_step(optimizer, stage, *args, **kwargs)
        stage["stage"] = OptState.STEPPED
        return returned

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Read once whether the gradients were finite, and step if they were."""
        state = self._state("step")
        found = combined(optimizer_state["found_inf_per_device"].values(), state.scale.device)
        is_on_host = hardware.is_on_host(state.scale)
        if is_on_host:
            skip = found.item()
            scale = state.scale.item() if skip else self._scaling.floor
        else:
            skip, scale = torch.stack((found, state.scale.reshape(()))).tolist()
        at_floor = scale <= self._scaling.floor or not isinstance(self._scaling, DynamicLossScale)
        self._skipped_at_floor.append(bool(skip) and at_floor)
        self._note_stepped(optimizer, not skip if is_on_host else found.logical_not())
        if not skip:
            return cast("float | None", optimizer.step(*args, **kwargs))
        if optimizer_state.get("untouched"):
            largest = grads.largest_finite(grads.by_kind(grads.collect(optimizer, True)))
            self._provenance.sharpen(optimizer, self._steps, largest)
        return None

    def _step_unread(self, optimizer: Optimizer, stage: dict[str, Any], *args: Any, **kwargs: Any) -> float | None:
        """Pass the flag and the scale to an optimizer that skips and unscales by itself; nothing is read."""
        scale = self._state("step").scale
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near "
                "future GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and "
                "let the optimizer use them directly.",
                FutureWarning,
                stacklevel=3,
            )
            returned = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
            found = combined(stage["found_inf_per_device"].values(), scale.device)
            self._note_stepped(optimizer, found.logical_not())
            return cast("float | None", returned)
        unscaled = stage["stage"] is OptState.UNSCALED
        if not unscaled:
            self._check_inf_per_device(optimizer)
        self._require_checks(stage)
        found = combined(stage["found_inf_per_device"].values(), scale.device)
        if begin_momentum(optimizer) and bool(found):
            self._note_stepped(optimizer, found.logical_not())
            return None
        given = getattr(optimizer, "grad_scale", None)
        whole = given if unscaled else scale * (1 if given is None else given)
        with flagged(optimizer, grad_scale=whole, found_inf=found):
            returned = optimizer.step(*args, **kwargs)
        self._note_stepped(optimizer, found.logical_not())
        return cast("float | None", returned)

    def _require_checks(self, stage: dict[str, Any]) -> None:
        if not stage["found_inf_per_device"]:
            raise OutOfOrder(
                "No inf checks were recorded for this optimizer. None of its parameters has a gradient: call "
                "scaler.scale(loss).backward() before scaler.step(optimizer)"
            )

    def _note_stepped(self, optimizer: Optimizer, stepped: torch.Tensor | bool) -> None:
        self._stepped = stepped
        self._stepped_by[id(optimizer)] = weakref.ref(optimizer), stepped

    @skipped_by_compilers
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to the results of the steps since the last update; call it once, after all steps.

        `new_scale`, a number or a 1-element tensor, sets it instead (a tensor is read). Raises NonFiniteGradients when
        gradients overflowed `patience` times in a row with the scale at its floor; the update is done all the same.
        """
        if not self._enabled:
            return
        state = self._state("update")
        found = [
            flag for stage in self._per_optimizer_states.values() for flag in stage["found_inf_per_device"].values()
        ]
        if new_scale is not None:
            state.scale.fill_(self._manual_scale(new_scale))
        elif not found:
            raise OutOfOrder("No inf checks were recorded prior to update. Call step(optimizer) or unscale_ before")
        if found:
            nonfinite = combined(found, state.scale.device)
            known = bool(nonfinite.item()) if hardware.is_on_host(nonfinite) else None
            self._guard.settle(nonfinite.logical_not() if known is None else not known)
            if new_scale is None:
                seen = GradientsSeen(nonfinite, self._exponents_of_all(state.scale.device))
                self._scaling.observe_(state, seen, known is False)
        skipped_at_floor = self._skipped_at_floor
        self.abandon()
        self._steps += 1
        self._provenance.names.learned()
        if skipped_at_floor:
            self._guard.count(any(skipped_at_floor))
        if found and self._guard.too_many(state.stuck):
            self._raise_stuck()

    def abandon(self) -> None:
        """Forget what is known of a step that was not completed, as of one that was interrupted."""
        self._per_optimizer_states = defaultdict(new_stage)
        self._losses, self._skipped_at_floor = [], []
        self._scaled_since_update = False
        self._exponents = self._told = None

    def _drop_cleared(self) -> None:
        """Forget the optimizers whose gradients were unscaled and then cleared, without a step, as by an interrupt."""
        for key, stage in list(self._per_optimizer_states.items()):
            if stage["stage"] is OptState.UNSCALED and (optimizer := stage["of"]()) is not None:
                if all(one.grad is None for one in grads.parameters_of(optimizer)):
                    del self._per_optimizer_states[key]

    def add_exponents(self, counts: torch.Tensor) -> None:
        """Include further gradients of this step, such as those of activations, in the decision of `update`.

        `counts`: int64 [256], the number of finite nonzero SCALED gradients by biased fp32 exponent. Without effect
        unless the scale follows underflow (`target_underflow`).
        """
        if not isinstance(counts, torch.Tensor) or counts.shape != (256,):
            raise InvalidInput(
                "add_exponents takes a count for each of the 256 exponents of fp32, an int64 tensor [256]"
            )
        if self._enabled:
            counts = counts.to(self._device, torch.int64)
            self._told = counts if self._told is None else self._told + counts

    def _manual_scale(self, new_scale: float | torch.Tensor) -> float:
        if isinstance(new_scale, torch.Tensor):
            if new_scale.device.type != self._device or new_scale.numel() != 1 or new_scale.requires_grad:
                raise OutOfOrder(
                    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
                    f"requires_grad=False. It has {new_scale.numel()} elements on {new_scale.device} and "
                    f"requires_grad={new_scale.requires_grad}; this scaler works on {self._device}"
                )
            new_scale = float(new_scale.item())
        return self._scaling.check(new_scale, "new_scale")

    def _raise_stuck(self) -> None:
        known = self.nonfinite
        raise NonFiniteGradients(
            f"{self._patience} steps in a row were skipped with the loss scale at {self.get_scale():.6g}, its "
            f"floor: {known or 'no gradient of this rank was seen to overflow'}. A smaller scale cannot "
            "help: look at that module's inputs and weights, at the learning rate and at the loss, or keep it in fp32"
        )

    # -- beside torch's
    @property
    def stepped(self) -> torch.Tensor:
        """Whether the last `step` stepped: a 0-dimensional bool tensor on the device; False before the first.

        `if scaler.stepped: scheduler.step()` waits for the device; `torch.where(scaler.stepped, new, old)` does not.
        """
        return as_flag(self._stepped)

    def stepped_for(self, optimizer: Optimizer) -> torch.Tensor:
        """Return whether the last `step` of this optimizer stepped, as `stepped` does."""
        known, stepped = self._stepped_by.get(id(optimizer), (None, None))
        return as_flag(stepped if known is not None and known() is optimizer else None)

    @property
    def nonfinite(self) -> NonFinite | None:
        """The first non-finite gradient of the latest skipped step, or None before one. Waits for the device."""
        return self._provenance.last() if self._enabled else None

    @property
    def underflow(self) -> torch.Tensor | None:
        """The share of the nonzero gradients that fp16 flushes at the scale of the last sample; None before it."""
        return self._underflow

    def holds_scaled_gradients(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer of a watched model has gradients that neither `unscale_` nor `step` has divided."""
        stage = self._per_optimizer_states.get(id(optimizer))
        if not self._scaled_since_update or (stage is not None and stage["stage"] is not OptState.READY):
            return False
        parameters = grads.parameters_of(optimizer)
        return any(one.grad is not None and self._provenance.names.has(one) for one in parameters)

    def watch(self, model: nn.Module) -> None:
        """Use the names of this model's parameters and the order of its backward in `nonfinite`, and `protect` it."""
        self._provenance.names.watch(model)
        self.protect(model)

    def protect(self, model: nn.Module) -> None:
        """Restore a model's running statistics (BatchNorm) at `update` if any step since the last one was skipped."""
        self._guard.protect(model)

    @property
    def guard(self) -> StepGuard:
        """The consequences of steps and skipped steps: counts, running statistics, the error after too many."""
        return self._guard

    @property
    def has_scaled(self) -> bool:
        """Whether a loss was scaled since the last update."""
        return self._scaled_since_update
