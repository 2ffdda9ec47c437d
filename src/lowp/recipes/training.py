"""The training loop of all recipes, in any precision; it can be stopped and resumed at any step, bit for bit."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from lowp import checkpoint
from lowp.errors import InvalidInput, LowpError, Unavailable
from lowp.nested import mapped
from lowp.precision import Precision
from lowp.recipes import RECIPES, get
from lowp.recipes.recipe import Data, Recipe, Size

if TYPE_CHECKING:
    from lowp.recipes.runs import RunKeeper
    from lowp.recipes.sampling import Observer

# Errors of numbers or of memory: they end one run of a comparison, not the others.
STOPS = (LowpError, ArithmeticError, torch.OutOfMemoryError)

_KIND = "lowp train"
_OnStep = Callable[["Training", Tensor], None]
_WORDS: tuple[type, ...] = (str, type(None))


@dataclass(frozen=True)
class Settings:
    """The settings of a run, as plain values. Two runs with equal settings are bit-identical on one machine.

    None stands for the default of the recipe's size, or for `loss_scale` and `accumulate` that of the precision;
    `filled` replaces the former.
    """

    recipe: str
    precision: str = "fp32"
    size: str | None = None
    seed: int = 0
    epochs: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    loss_scale: str | None = None
    accumulate: str | None = None
    device: str = "cpu"
    data: str | None = None

    def filled(self) -> Settings:
        """Return settings with the recipe's defaults in place of None; raise InvalidInput if they cannot be run."""
        recipe = get(self.recipe)
        name = self.size or recipe.default_size
        size = recipe.size(name)
        missing = [one for one in ("epochs", "batch", "learning_rate") if getattr(self, one) is None]
        filled = replace(self, size=name, **{one: getattr(size, one) for one in missing})
        filled._check()
        return filled

    def make_precision(self) -> Precision:
        """Return a new precision with these settings; raise InvalidInput for unknown names, with similar ones."""
        return Precision(self.precision, loss_scale=self.loss_scale, accumulate=self.accumulate, seed=self.seed)

    def _check(self) -> None:
        for name, value in (("epochs", self.epochs), ("batch", self.batch)):
            if value is None or value < 1:
                raise InvalidInput(f"{name} {value}: give 1 or more")
        if self.learning_rate is None or not 0 < self.learning_rate < math.inf:
            raise InvalidInput(f"learning rate {self.learning_rate}: give a finite number above zero")
        if not 0 <= self.seed < 2**31:
            raise InvalidInput(f"seed {self.seed}: give 0 to {2**31 - 1}")
        self.make_precision()
        _check_device(self.device)


def _check_device(name: str) -> None:
    """Raise InvalidInput if torch does not know the device, and Unavailable if this machine does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput(f"device {name!r} is not a device of torch: give cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Unavailable(f"device {name}: this machine has {torch.cuda.device_count()} CUDA devices; cpu always works")


def load_data(settings: Settings) -> Data:
    """Return the recipe's data, read from `settings.data` if it is given."""
    recipe = get(settings.recipe)
    return recipe.load(recipe.size(settings.size), None if settings.data is None else Path(settings.data))


class _Stopped(Exception):
    """An evaluation was stopped."""


class Training:
    """A training run of a recipe: the model, its optimizer, its precision, and the progress of the run.

    The seed determines the initial weights (drawn on the CPU, before the precision changes them), the order of the
    batches and their augmentation, alike in every precision and on every device. An incomplete last batch is dropped.

    `history`: a dictionary per epoch; entry 0 is that of the model before training. `failure`: the reason why the run
    ended early (weights that are infinite or NaN), or None. `precision` replaces the one in the settings.
    """

    def __init__(self, settings: Settings, data: Data | None = None, precision: Precision | None = None) -> None:
        self.settings = settings = settings.filled()
        assert settings.batch is not None and settings.epochs is not None and settings.learning_rate is not None
        self.recipe: Recipe = get(settings.recipe)
        self.size: Size = self.recipe.size(settings.size)
        self.data = load_data(settings) if data is None else data
        self.device = torch.device(settings.device)
        random.seed(settings.seed)
        np.random.seed(settings.seed)
        torch.manual_seed(settings.seed)
        model = self.recipe.make_model(self.size).to(self.device)
        optimizer = self.recipe.make_optimizer(model, settings.learning_rate)
        self.precision = settings.make_precision() if precision is None else precision
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.model, self.optimizer = self.precision.prepare(model, optimizer)
        self.batch: int = min(settings.batch, len(self.data.training))
        self.epochs: int = settings.epochs
        self.steps_per_epoch: int = len(self.data.training) // self.batch
        self.epoch: int = 0
        self.step_of_epoch: int = 0
        self.history: list[dict[str, float]] = []
        self.failure: str | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._seconds = 0.0
        self._stops: Callable[[], bool] | None = None  # asked between the batches of an evaluation that may be stopped

    # -- a step -------------------------------------------------------------------------------------------------------
    def step(self, batch: Any) -> Tensor:
        """Take a training step, and return the loss without synchronising with the device."""
        self.set_rate(self.optimizer)
        self.optimizer.zero_grad()
        with self.precision.autocast():
            loss = self.recipe.loss(self.model, batch)
        self.precision.backward(loss)
        if self.recipe.clip is not None:
            self.precision.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.precision.step(self.optimizer)
        return loss.detach()

    def set_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the learning rate of the next step."""
        (self.size.schedule or self.recipe.schedule)(optimizer, self.progress)

    @property
    def progress(self) -> float:
        """The completed share of the training, 0 to 1."""
        return self.done / self.steps

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    @property
    def done(self) -> int:
        """The number of steps taken."""
        return self.epoch * self.steps_per_epoch + self.step_of_epoch

    @property
    def finished(self) -> bool:
        """Whether the run has taken all its steps or has failed."""
        return self.epoch >= self.epochs or self.failure is not None

    # -- the loop -----------------------------------------------------------------------------------------------------
    def run(
        self,
        on_epoch: Callable[[Training], None] = lambda training: None,
        stop: Callable[[], bool] = lambda: False,
        sampler: Observer | None = None,
        keeper: RunKeeper | None = None,
        on_step: _OnStep = lambda training, loss: None,
    ) -> bool:
        """Train to the end and return True; return False as soon as `stop()`, called before each step, is true.

        Another call continues at the step where it stopped. `on_epoch` is called after each epoch, and once before
        training; `on_step` after each step, with its loss on the device. `sampler` takes the steps that it wants.
        `keeper` writes checkpoints within an epoch and where it stops, also in a long evaluation.
        """
        if not self.history:
            if not self._evaluated(stop, keeper):
                return False
            on_epoch(self)
        while not self.finished:
            started = time.perf_counter()
            with warnings.catch_warnings():  # `failure` and the skipped steps of `history` report the same
                warnings.filterwarnings("ignore", "step .* is infinite or NaN|.* has no loss scale")
                complete = self._run_epoch(stop, sampler, keeper, on_step)
            self._seconds += time.perf_counter() - started
            if not complete and keeper is not None:
                keeper.save(self)
            if not complete or not self._evaluated(stop, keeper):
                return False
            on_epoch(self)
        return True

    def take(self, is_enough: Callable[[int], bool]) -> list[float]:
        """Train until `is_enough(steps)`, asked after each step and before, without evaluations; return each loss."""
        losses: list[Tensor] = []
        enough = is_enough(0)

        def on_step(training: Training, loss: Tensor) -> None:
            nonlocal enough
            losses.append(loss)
            enough = is_enough(len(losses))

        while self.epoch < self.epochs and self._run_epoch(lambda: enough, None, None, on_step):
            self.epoch, self.step_of_epoch = self.epoch + 1, 0
        return [float(loss) for loss in losses]

    def _evaluated(self, stop: Callable[[], bool], keeper: RunKeeper | None) -> bool:
        """End the epoch with an evaluation; return False if it was stopped, and nothing has changed."""
        self._stops = stop if keeper is not None and keeper.before_evaluation(self) else None
        before, begun = (self.epoch, self.step_of_epoch), time.perf_counter()
        if self.history:
            self.epoch, self.step_of_epoch = self.epoch + 1, 0
        try:
            self._finish_epoch()
        except _Stopped:
            self.epoch, self.step_of_epoch = before
            return False
        finally:
            self._stops = None
        if keeper is not None:
            keeper.evaluated(time.perf_counter() - begun)
        return True

    def _run_epoch(
        self, stop: Callable[[], bool], sampler: Observer | None, keeper: RunKeeper | None, on_step: _OnStep
    ) -> bool:
        """Train from `step_of_epoch` to the end of the epoch; return False if it was stopped before."""
        self.model.train()
        order = torch.randperm(len(self.data.training), generator=self._generator(0))
        while self.step_of_epoch < self.steps_per_epoch:
            if stop():
                return False
            start = self.step_of_epoch * self.batch
            batch = self.data.training.batch(order[start : start + self.batch], self._generator(self.step_of_epoch + 1))
            step = sampler.step if sampler is not None and sampler.wants() else self.step
            loss = step(moved(batch, self.device))
            self._loss_sum += loss
            self.step_of_epoch += 1
            on_step(self, loss)
            if keeper is not None:
                keeper.after_step(self)
        return True

    def _generator(self, use: int) -> torch.Generator:
        """Return the generator for the order of this epoch (use 0) or for the augmentation of its step `use` - 1."""
        seed = (self.settings.seed * 1_000_003 + self.epoch) * 1_000_003 + use
        return torch.Generator().manual_seed(seed % 2**63)

    def _finish_epoch(self) -> None:
        record = {
            "epoch": self.epoch,
            "training_loss": float(self._loss_sum) / self.steps_per_epoch if self.epoch else math.nan,
            **self.evaluate(),
            "loss_scale": self.precision.scale,
            "skipped_steps": self.precision.skipped_steps,
            "seconds": self._seconds,
        }
        self.history.append(record)
        self._loss_sum.zero_()
        self._seconds = 0.0
        is_finite = math.isfinite(record["loss"]) or all(bool(one.isfinite().all()) for one in self.model.parameters())
        if not is_finite:
            self.failure = f"its weights were no numbers after epoch {self.epoch}"

    def evaluate(self) -> dict[str, float]:
        """Return the recipe's metrics on the validation set, in this precision."""
        self.model.eval()
        with torch.no_grad(), self.precision.autocast():
            return self.recipe.evaluate(self.model, self.validation_batches())

    def validation_batches(self) -> Iterator[Any]:
        """Yield the validation set in batches, in order, on the training's device."""
        examples = self.data.validation
        for indices in torch.split(torch.arange(len(examples)), self.batch):
            if self._stops is not None and self._stops():
                raise _Stopped
            yield moved(examples.batch(indices), self.device)

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def save(self, path: Path, **more: Any) -> None:
        """Write a checkpoint from which `resume` continues, and `more` beside; the file is replaced atomically."""
        extra = {
            "kind": _KIND,
            "settings": asdict(self.settings),
            "epoch": self.epoch,
            "step_of_epoch": self.step_of_epoch,
            "loss_sum": float(self._loss_sum),
            "seconds": self._seconds,
            "history": self.history,
            "failure": self.failure,
            **more,
        }
        checkpoint.save(path, model=self.model, optimizer=self.optimizer, precision=self.precision, extra=extra)

    @classmethod
    def resume(cls, path: Path, given: dict[str, Any] | None = None, data: Data | None = None) -> Training:
        """Return the run of a checkpoint; it continues bit for bit.

        `given`: settings of the command line, which must agree with those of the checkpoint. A user's own recipe
        (module:NAME) must be among them, since no module is imported because a file names it. Raises InvalidInput if
        settings differ, and InvalidCheckpoint for a file that is damaged or not written by `lowp train`.
        """
        extra = read_extra(path)
        settings = Settings(**extra["settings"])
        if settings.recipe not in RECIPES and (given or {}).get("recipe") != settings.recipe:
            raise InvalidInput(
                f"{path} was trained with the recipe {settings.recipe!r}, which is not one of lowp's; a module is not "
                f"imported because a file names it. If you trust it, run: lowp train {settings.recipe} --resume"
            )
        for name, value in (given or {}).items():
            if value is not None and value != getattr(settings, name):
                words = name.replace("_", " ")
                raise InvalidInput(
                    f"{path} was trained with {words} {getattr(settings, name)}, but {words} {value} was given: "
                    "omit it to continue, or give another --checkpoint to start a new run"
                )
        training = cls(settings, data)
        parts: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
        checkpoint.load(path, map_location=training.device, **parts, precision=training.precision)
        training.epoch, training.step_of_epoch = extra["epoch"], extra["step_of_epoch"]
        training.history, training.failure = extra["history"], extra["failure"]
        training._loss_sum.fill_(extra["loss_sum"])
        training._seconds = extra["seconds"]
        return training


def read_extra(path: Path) -> dict[str, Any]:
    """Return what `Training.save` wrote beside the states; raise InvalidCheckpoint for other files."""
    extra = checkpoint.read(path).get("extra")
    if not isinstance(extra, dict) or extra.get("kind") != _KIND:
        raise checkpoint.InvalidCheckpoint(f"{path} is a checkpoint of lowp, but not of `lowp train`: use lowp.load")
    if invalid := _invalid_entry(extra):
        raise checkpoint.InvalidCheckpoint(f"{path} is a checkpoint of `lowp train` that has been edited: {invalid}")
    return extra


def _invalid_entry(extra: dict[str, Any]) -> str | None:
    """Return a description of the first entry that `Training.save` would not write; None if there is none."""
    settings, history = extra.get("settings"), extra.get("history")
    names = get_type_hints(Settings)
    if not isinstance(settings, dict) or set(settings) != set(names):
        return "its settings are not those of a training"
    for name, kind in names.items():
        value = settings[name]
        if isinstance(value, bool) or not (isinstance(value, kind) or (type(value) is int and name == "learning_rate")):
            return f"its setting {name} is {value!r}"
    kinds = {"epoch": (int,), "step_of_epoch": (int,), "loss_sum": (float,), "seconds": (float,), "failure": _WORDS}
    for name, allowed in kinds.items():
        value = extra.get(name)
        if type(value) not in allowed or (type(value) is int and value < 0):
            return f"its {name} is {value!r}"
    if not isinstance(history, list) or not all(_is_record(record) for record in history):
        return "its history is no list of numbers by name"
    if history and len(history) != extra["epoch"] + 1:
        return f"its history has {len(history)} entries after {extra['epoch']} epochs"
    return None


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and all(
        isinstance(name, str) and isinstance(value, (int, float)) for name, value in record.items()
    )


@contextmanager
def threads_of(count: int | None) -> Iterator[int]:
    """Set torch's number of CPU threads to `count` for a while, or leave it for None; yield the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors, in any nesting of tuples, lists and dictionaries, on a device."""
    return mapped(lambda x: x.to(device, non_blocking=True), batch)
