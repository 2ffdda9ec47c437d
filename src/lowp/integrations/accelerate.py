"""Hugging Face Accelerate: an Accelerator that trains in a precision of lowp.

    accelerator = LowpAccelerator("fp16", gradient_accumulation_steps=4)

The rest of the script stays as it is. Tested with accelerate 1.10 to 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

import lowp
from lowp.integrations.turns import Turns


class LowpAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator in a precision of lowp, a `lowp.Precision` or what that takes; `options` are Accelerator's.

    A prepared model computes in the precision and returns fp32. `backward`, `clip_grad_norm_`, `clip_grad_value_` and
    `step` of prepared optimizers know the loss scale; `save_state` and `load_state` keep it, with all that a run needs
    to go on with the same bits. `lowp` is the Precision. Raises InvalidInput beside a mixed_precision of Accelerate's
    own, and for DeepSpeed and Megatron-LM.
    """

    lowp: lowp.Precision
    scaler: Any

    def __init__(self, precision: Any, **options: Any) -> None:
        super().__init__(**options)
        lend(self, precision)

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, as Accelerator.prepare does."""
        for model in args:
            if isinstance(model, nn.Module):
                self._serve(model)
        return super().prepare(*args, **options)

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Prepare a model, as Accelerator.prepare_model does."""
        self._serve(model)
        prepared: nn.Module = super().prepare_model(model, *args, **options)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        """Prepare an optimizer, as Accelerator.prepare_optimizer does."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = self.lowp.prepare_optimizer(optimizer)
        return super().prepare_optimizer(optimizer, *args, **options)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward pass of the loss, multiplied by the loss scale and divided by the steps of accumulation."""
        self.scaler.turns.backward(loss / self.gradient_accumulation_steps, **options)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients of an optimizer, of several, or of all, by the loss scale."""
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            self.scaler.turns.unscale_(_inner(one))

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Return the region of the precision, for what is computed outside of prepared models.

        With ``AutocastKwargs(enabled=False)`` it leaves what it contains in the dtypes that it has.
        """
        is_off = autocast_handler is not None and not autocast_handler.enabled
        with lowp.autocast("fp32") if is_off else self.lowp.autocast():
            yield

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Save the state, as Accelerator.save_state does; one process writes the scaler's file, not all at once."""
        scaler, on_each_node = self.scaler, self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if on_each_node else self.is_main_process
        try:
            self.scaler = scaler if writes else None
            with scaler.uncounted():
                return super().save_state(*args, **options)
        finally:
            self.scaler = scaler

    def load_state(self, *args: Any, **options: Any) -> None:
        """Load a state, as Accelerator.load_state does."""
        with self.scaler.uncounted():
            super().load_state(*args, **options)

    def _serve(self, model: nn.Module) -> None:
        """Let a model compute in the precision and return fp32, before it is wrapped; once."""
        if "_original_forward" in vars(model) or getattr(model, "_is_accelerate_prepared", False):
            return
        self.lowp.prepare_model(model)
        # where `unwrap_model` looks for it; bound anew, so that a copy of the model, such as an average, calls its own
        model._original_forward = forward = model.forward  # type: ignore[assignment]
        served = convert_outputs_to_fp32(self.lowp.autocast()(getattr(forward, "__func__", forward)))
        model.forward = MethodType(served, model) if hasattr(forward, "__func__") else served


def lend(accelerator: Accelerator, precision: Any) -> lowp.Precision:
    """Let an Accelerator that exists train in a precision, before anything is prepared with it; return the Precision.

    For libraries that make the Accelerator themselves. Raises InvalidInput as LowpAccelerator does.
    """
    if accelerator.mixed_precision != "no":
        raise lowp.InvalidInput(
            f"Accelerate's mixed_precision={accelerator.mixed_precision!r} comes beside the lowp precision: omit it in "
            "Accelerator(...), `accelerate launch`, `accelerate config` and TrainingArguments (fp16, bf16), and unset "
            "ACCELERATE_MIXED_PRECISION, which may be left of them"
        )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise lowp.InvalidInput(
            f"{accelerator.distributed_type.value} scales the loss and steps by itself: use DDP or FSDP, which lowp's "
            "precisions know"
        )
    made = precision if isinstance(precision, lowp.Precision) else lowp.Precision(precision)
    if made.policy.parameters is not None and getattr(accelerator, "is_fsdp2", False):
        raise lowp.InvalidInput(
            f"{made.preset.name} stores parameters in {made.policy.parameters}, and Accelerate makes the optimizer of "
            "FSDP2 before it shards the model: take a precision with fp32 parameters, such as fp16, bf16, fp8 or dfp16"
        )
    accelerator.__class__ = LowpAccelerator
    accelerator.lowp = made
    accelerator.scaler = _Scaler(accelerator, Turns(made))
    return made


class _Scaler:
    """A precision in the place of Accelerate's GradScaler, which Accelerate steps, saves and loads."""

    def __init__(self, accelerator: Accelerator, turns: Turns) -> None:
        self.turns, self._accelerator, self._counts = turns, accelerator, True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let optimizers step by themselves, as those of FSDP2 do, on zeros, to have a state to save or to fill."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        if not self._counts:
            return optimizer.step(closure)
        return self.turns.step(optimizer, self._accelerator._optimizers, closure)

    def update(self) -> None:
        """Do nothing: `step` includes it."""

    def state_dict(self) -> dict[str, Any]:
        self.turns.end()
        return self.turns.precision.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns.precision.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name == "turns" or name.startswith("__"):  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.turns.precision.scaler, name)


def _inner(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
