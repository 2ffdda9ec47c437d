"""Hugging Face transformers: a Trainer that trains in a precision of lowp.

    trainer = LowpTrainer(model, args, train_dataset=data, precision="fp16")

Tested with transformers 4.57 to 5.24.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

import lowp
from lowp.integrations.accelerate import lend

_HALF = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")


class LowpMixin:
    """Trains a class derived from Trainer in a precision: ``class MyTrainer(LowpMixin, SFTTrainer): pass``.

    `precision` is a `lowp.Precision` or what that takes; all other arguments are the Trainer's. Checkpoints hold the
    state of the precision, from which `train(resume_from_checkpoint=True)` goes on with the same bits. The logs have
    `loss_scale` and `skipped_steps` if the precision scales the loss. Raises InvalidInput, before anything is trained,
    if TrainingArguments ask for fp16 or bf16 themselves.
    """

    accelerator: Any
    args: Any
    callback_handler: Any

    def __init__(self, *arguments: Any, precision: Any = "bf16", **keywords: Any) -> None:
        self.lowp = precision if isinstance(precision, lowp.Precision) else lowp.Precision(precision)
        super().__init__(*arguments, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, as the Trainer does, and let it train in the precision."""
        asked = [name for name in _HALF if getattr(self.args, name, False)]
        if asked:
            raise lowp.InvalidInput(
                f"TrainingArguments({', '.join(f'{name}=True' for name in asked)}) comes beside the lowp precision "
                f"{self.lowp.preset.name}: omit it, and give precision={asked[0][:4]!r} to the trainer if that is meant"
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        lend(self.accelerator, self.lowp)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log, as the Trainer does, with the loss scale and the number of skipped steps beside the loss."""
        if "loss" in logs and self.lowp.scaler.is_enabled():
            logs = {**logs, "loss_scale": self.lowp.scale, "skipped_steps": self.lowp.skipped_steps}
        for callback in self.callback_handler.callbacks:
            if "loss" in logs and isinstance(callback, LowpCallback):  # before the callbacks that report the logs
                logs = {**logs, **callback.numbers}
        super().log(logs, *arguments, **keywords)  # type: ignore[misc]


class LowpTrainer(LowpMixin, Trainer):  # type: ignore[misc]
    """A Trainer in a precision of lowp: see LowpMixin."""


class LowpCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the training of any Trainer with `lowp.Monitor`, and adds its numbers to the Trainer's log history.

    Those of a LowpTrainer also go where its logs are reported. `options` are Monitor's (on_alarm, patience,
    max_overhead, sinks …). `monitor` is the Monitor, with its alarms; None before training. `numbers` are those of the
    latest look that are not logged.
    """

    def __init__(self, **options: Any) -> None:
        self.monitor: lowp.Monitor | None = None
        self._options = options
        self.numbers: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to watch."""
        optimizer = given["optimizer"]
        scaler: Any = getattr(optimizer, "scaler", None)
        sinks = self._options.get("sinks", ())
        scales = {"precision": scaler.turns.precision} if hasattr(scaler, "turns") else {"scaler": scaler}
        sinks = [*(sinks if isinstance(sinks, (list, tuple)) else [sinks]), self]
        inner = getattr(optimizer, "optimizer", optimizer)
        self.monitor = lowp.Monitor(given["model"], inner, **{**scales, **self._options, "sinks": sinks})

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Stop watching."""
        if self.monitor is not None:
            self.monitor.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **given: Any) -> None:
        """Add the latest numbers of the monitor to the log history."""
        if logs is not None and "loss" in logs:
            state.log_history[-1].update(self.numbers)
            self.numbers = {}

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Take the numbers of one look, as a sink of the monitor does."""
        self.numbers = numbers
