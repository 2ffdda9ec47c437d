"""Train one recipe in one precision, with a checkpoint after each epoch, every half minute and at Ctrl-C.

  lowp train digits --precision fp16
  lowp train digits --precision fp16 --resume

A run that was stopped by Ctrl-C or kill -9 continues with --resume, with the bits of an uninterrupted run.
A monitor watches it: its alarms are printed above the progress bar.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp import files
from lowp.cli import EXIT_ERROR, print_error
from lowp.cli.interrupts import Interrupts
from lowp.cli.options import OUTPUT, TRAINING, Option, filled, given
from lowp.cli.output import print_json, say
from lowp.errors import InvalidInput, counted
from lowp.recipes import get

if TYPE_CHECKING:
    from torch import Tensor

    from lowp.monitoring import Alarm
    from lowp.recipes.runs import RunKeeper
    from lowp.recipes.training import Training
    from lowp.report.terminal import Bar

_SHOWN, _TOLD = 0.1, 30.0  # seconds between two signs of progress, on a terminal and elsewhere


OPTIONS = (
    *TRAINING,
    Option("--precision", "a preset, a format such as e5m7, or a policy file (default: fp32)", setting="precision"),
    Option("--loss-scale", "none, a number, or dynamic (default: the precision's)", "SCALE", setting="loss_scale"),
    Option("--seed", "seed of the initial weights and batches (default: 0)", kind=int, setting="seed"),
    Option("--checkpoint", "checkpoint file (default: RECIPE-PRECISION-seedN.pt)", "FILE", Path),
    Option("--resume", "continue the run in the checkpoint", kind=bool),
    Option("--overwrite", "start a new run and replace the one in the checkpoint", kind=bool),
    *OUTPUT,
    Option("--out", "write all numbers of the run to this file", "FILE.json", Path),
    Option("--monitor", "write the numbers of the monitor to this file: see lowp watch", "FILE.jsonl", Path),
)


def run(arguments: argparse.Namespace) -> int:
    """Train or resume; return 0 at the end, 130 after Ctrl-C, with the checkpoint written."""
    from lowp import checkpoint
    from lowp.monitoring.log import check_log
    from lowp.recipes import results
    from lowp.recipes.runs import RunKeeper
    from lowp.recipes.training import threads_of

    if arguments.resume and arguments.overwrite:
        raise InvalidInput("--resume continues a checkpoint and --overwrite replaces it: give one of them")
    recipe = get(arguments.recipe)
    named = given(OPTIONS, arguments)
    path = arguments.checkpoint or _default_path(recipe.name, named)
    checkpoint.check_replaceable(path)
    if arguments.out is not None:
        results.check_writable(arguments.out)
        if files.same_file(arguments.out, path):
            raise InvalidInput(f"--out and --checkpoint are both {path}: give two files")
    if arguments.monitor is not None:
        check_log(arguments.monitor)
    keeper = RunKeeper(path)
    with _interrupts(recipe.name, keeper) as interrupts, files.sole_writer(path), threads_of(recipe.threads):
        training = _begin(named, path, arguments)
        finished, alarms = _train(training, keeper, interrupts, arguments.monitor)
        document = _document(training, alarms)
        if arguments.out is not None:
            results.write(arguments.out, document)
    if not finished:
        say(
            f"stopped after step {training.step_of_epoch} of {training.steps_per_epoch} in epoch "
            f"{min(training.epoch + 1, training.epochs)} of {training.epochs}; the checkpoint is {path}. To continue: "
            f"lowp train {recipe.name} --checkpoint {path} --resume"
        )
        return interrupts.exit_code
    if arguments.json:
        print_json(document)
        return EXIT_ERROR if training.failure is not None else 0
    return _report(training, path)


def _interrupts(recipe: str, keeper: RunKeeper) -> Interrupts:
    """Return the handler of Ctrl-C; a run that is ended within a long step can be resumed from what was kept last."""
    path = keeper.path

    def last_words() -> str:
        if not path.exists():
            return "stopped within a step, before there was a checkpoint: nothing was written"
        return (
            f"stopped within a step; the checkpoint {path} is that of {keeper.at or 'the run before'}. To continue: "
            f"lowp train {recipe} --checkpoint {path} --resume"
        )

    return Interrupts(last_words, f"stopped; the checkpoint {path} is being written")


def _begin(named: dict[str, Any], path: Path, arguments: argparse.Namespace) -> Training:
    """Return a new run, or the one in the checkpoint."""
    from lowp.recipes.training import Training, read_extra

    if arguments.resume:
        training = Training.resume(path, named)
        say(f"continuing {path} after {training.epoch} of {training.epochs} epochs")
        return training
    settings = filled(named)
    if path.exists() and path.stat().st_size:
        extra = read_extra(path)
        if not arguments.overwrite:
            raise InvalidInput(_holds(path, extra))
    return Training(settings)


def _holds(path: Path, extra: dict[str, Any]) -> str:
    """Return the error message for a checkpoint that holds another run."""
    epoch, epochs = extra["epoch"], extra["settings"]["epochs"]
    if epochs is not None and epoch < epochs and extra["failure"] is None:
        return (
            f"{path} holds a run that stopped after {epoch} of {epochs} epochs: give --resume to continue it, "
            "--overwrite to replace it, or another --checkpoint"
        )
    done = counted(epoch, "epoch")
    return f"{path} holds a finished run of {done}: give --overwrite to replace it, or another --checkpoint"


def _train(training: Training, keeper: RunKeeper, interrupts: Interrupts, log: Path | None) -> tuple[bool, list[Alarm]]:
    """Train with a progress bar and a monitor, and keep checkpoints; return whether it has ended, and the alarms."""
    from lowp.monitoring import Monitor
    from lowp.report.terminal import Bar

    title = f"{training.recipe.name}, {training.precision}"
    with Bar(training.recipe.name, training.epochs, "epochs") as bar:
        if not training.finished:
            bar.line(f"{title}; {training.data.description}")
        monitor = Monitor(
            training.model,
            training.optimizer,
            precision=training.precision,
            sinks=() if log is None else (log,),
            on_alarm=lambda alarm: bar.line(f"alarm: {alarm}"),
        )
        progress = _Progress(bar, training)

        def after_epoch(training: Training) -> None:
            if training.failure is None:
                keeper.save(training)
            count = len(monitor.alarms)
            bar.line(_epoch_line(training) + (f"  {count} alarm{'s' * (count > 1)}" if count else ""))

        with monitor:
            finished = training.run(after_epoch, interrupts, keeper=keeper, on_step=progress)
    return finished, monitor.alarms


class _Progress:
    """Shows steps within an epoch: on a terminal ten times a second, elsewhere a line every half minute."""

    def __init__(self, bar: Bar, training: Training) -> None:
        from lowp.kernels.int16.late import LateNumber

        self._bar, self._shown = bar, time.monotonic()
        self._pause = _SHOWN if bar.is_live else _TOLD
        self._loss = LateNumber()
        bar.move(training.progress * training.epochs)

    def __call__(self, training: Training, loss: Tensor) -> None:
        """Take a step into account; its loss is shown when it has arrived from the device."""
        now, steps = time.monotonic(), training.steps_per_epoch
        if now - self._shown < self._pause and training.step_of_epoch < steps:
            return
        before = self._loss.read()
        self._loss.send(loss)
        value = before if self._loss.is_under_way else self._loss.read()
        where = f"step {training.step_of_epoch} of {steps}" + ("" if value is None else f", loss {value:.4f}")
        self._bar.move(training.epoch + training.step_of_epoch / steps, f"{training.recipe.name}: {where}")
        if not self._bar.is_live and now - self._shown >= self._pause:
            self._bar.line(f"epoch {training.epoch + 1}/{training.epochs}: {where}")
        if now - self._shown >= self._pause:
            self._shown = now


def _epoch_line(training: Training) -> str:
    last, metric = training.history[-1], training.recipe.metric
    from lowp.report.tables import number

    parts = [f"epoch {last['epoch']}/{training.epochs}", f"{metric.name} {number(last[metric.name], metric.share)}"]
    parts.append(f"loss {last['loss']:.4f}")
    if last["epoch"]:
        parts.append(f"training loss {last['training_loss']:.4f}")
    if training.precision.scaler.is_enabled():
        parts.append(f"loss scale {last['loss_scale']:g}, {last['skipped_steps']} skipped")
    return "  ".join(parts)


def _report(training: Training, path: Path) -> int:
    if training.failure is not None:
        print_error(f"{training.recipe.name} in {training.settings.precision} failed: {training.failure}")
        return EXIT_ERROR
    last, metric = training.history[-1], training.recipe.metric
    from lowp.report.tables import number

    print(
        f"{training.recipe.name} in {training.settings.precision}, seed {training.settings.seed}: {metric.name} "
        f"{number(last[metric.name], metric.share)}, loss {last['loss']:.4f} after "
        f"{counted(training.epoch, 'epoch')}; {path}"
    )
    return 0


def _document(training: Training, alarms: list[Alarm]) -> dict[str, Any]:
    from dataclasses import asdict

    from lowp.recipes import results

    return {
        **results.header("training", results.command_line()),
        "complete": training.finished,
        "settings": asdict(training.settings),
        "data": training.data.description,
        "history": training.history,
        "failure": training.failure,
        "alarms": [alarm.document() for alarm in alarms],
    }


def _default_path(recipe: str, named: dict[str, Any]) -> Path:
    """Return a file name made of recipe, precision and seed; a policy file gives its base name."""
    precision = re.sub(r"[^\w.+-]+", "-", Path(named.get("precision", "fp32")).name)
    return Path(f"{recipe}-{precision}-seed{named.get('seed', 0)}.pt")
