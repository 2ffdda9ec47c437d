"""Inference of a recipe's model in several formats: the metrics, bytes, time and energy of each, and log-probabilities.

A model is trained in fp32 and quantized, and optionally also trained for each format.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp import casts, portable
from lowp.errors import InvalidInput, LowpError, counted
from lowp.inference import ServingMismatch, footprint, mismatch, quantize_model, training_policy, unquantized
from lowp.precision import Precision
from lowp.recipes import RECIPES, get, results
from lowp.recipes.recipe import Data, Examples, Recipe
from lowp.recipes.training import STOPS, Settings, Training, load_data, moved, read_extra

_BATCHES = 8  # of a calibration or a comparison
METHODS = {
    "bytes": "bytes of all parameters and buffers of the served model",
    "time": "best of three runs over the validation set, on the CPU, the metric's own work in it",
    "energy": "estimate for one batch: weights read once from DRAM, each multiply-add of a layer in the format that it "
    "runs in (Horowitz, ISSCC 2014)",
    "served": "the fp32 model, calibrated on a few batches of the training set where a format needs it",
    "trained": "trained from the start under lowp.inference.training_policy of the format, and served in it",
}


class Serving:
    """Trains a recipe once in fp32, and measures it quantized to every format; with `recover`, also trained for it.

    Raises InvalidInput for settings that do not train in fp32, and for formats that inference does not support.
    """

    def __init__(self, settings: Settings, formats: Sequence[str], recover: bool = False) -> None:
        if settings.precision != "fp32":
            raise InvalidInput(f"--inference needs a model that is trained in fp32, not in {settings.precision}")
        for format in formats:
            quantize_model(nn.Linear(1, 1), format)  # raises for an unsupported format, before any work
        self.settings, self.recover = settings.filled(), recover
        self.formats = list(dict.fromkeys(["fp32", *(str(casts.parse(format)) for format in formats)]))
        self.rows: list[dict[str, Any]] = []
        self._trained: Training | None = None

    @property
    def trainings(self) -> int:
        """The number of models to be trained."""
        return 1 + self.recover * (len(self.formats) - 1)

    def run(self, on_epoch: Callable[[str], None], stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield one row per format when it is measured, until `stop()` is true."""
        trained = Training(self.settings)
        if not trained.run(lambda training: on_epoch("fp32") if training.epoch else None, stop):
            return
        if trained.failure is not None:
            raise InvalidInput(f"{self.settings.recipe} in fp32 failed: {trained.failure}")
        self._trained = trained
        for format in self.formats:
            row = self._row(trained, format)
            if self.recover and format != "fp32":
                row["trained"] = self._recovered(format, on_epoch, stop)
            if stop():
                return
            self.rows.append(row)
            yield row

    def _row(self, trained: Training, format: str) -> dict[str, Any]:
        try:
            model = self._served(trained, format)
        except STOPS as error:
            return {"format": format, "failure": str(error)}
        seconds = math.inf
        for _ in range(3):
            begun = time.perf_counter()
            metrics = _evaluated(trained, model)
            seconds = min(seconds, time.perf_counter() - begun)
        costs = footprint(
            model,
            forward=lambda module: trained.recipe.loss(
                module, _batches(trained.data.training, trained.batch, trained.device, 1)[0]
            ),
        )
        fp32_modules = {} if format == "fp32" else dict(unquantized(model))
        return {"format": format, "numbers": metrics, "seconds": seconds, **asdict(costs), "unquantized": fp32_modules}

    def _served(self, trained: Training, format: str) -> nn.Module:
        if format == "fp32":
            return trained.model.eval()
        batches = _batches(trained.data.training, trained.batch, trained.device)
        return quantize_model(trained.model, format, batches, forward=trained.recipe.loss)

    def _recovered(self, format: str, on_epoch: Callable[[str], None], stop: Callable[[], bool]) -> dict[str, Any]:
        assert self._trained is not None
        precision = Precision(training_policy(format))
        training = Training(replace(self.settings), self._trained.data, precision)
        try:
            if not training.run(lambda training: on_epoch(format) if training.epoch else None, stop):
                return {}
            return dict(_evaluated(training, self._served(training, format)))
        except STOPS as error:
            return {"failure": str(error)}

    def document(self) -> dict[str, Any]:
        """Return everything that was measured, as plain values."""
        trained = self._trained
        assert trained is not None
        metric = trained.recipe.metric
        head = results.recipe_head(trained.recipe, trained.data, self.settings.size)
        head |= {"metric": metric.name, "metric_is_share": metric.share}
        return {
            **results.header("serving", results.command_line()),
            "complete": len(self.rows) == len(self.formats),
            "recipe": head,
            "settings": asdict(self.settings),
            "methods": METHODS,
            "rows": self.rows,
        }


def _batches(examples: Examples, batch: int, device: torch.device, count: int = _BATCHES) -> list[Any]:
    indices = torch.split(torch.arange(min(len(examples), count * batch)), batch)
    return [moved(examples.batch(part), device) for part in indices]


def served_as(settings: Settings, model: nn.Module, format: str, rounding: str) -> nn.Module:
    """Return a recipe's model as it is served, calibrated on batches of the training set."""
    batches = _batches(load_data(settings).training, settings.batch or 1, torch.device("cpu"))
    return quantize_model(model, format, batches, rounding=rounding, forward=_result_of(get(settings.recipe)))


def _evaluated(trained: Training, model: nn.Module) -> Mapping[str, float]:
    with torch.no_grad():
        return trained.recipe.evaluate(model.eval(), trained.validation_batches())


# -- log-probabilities -------------------------------------------------------------------------------------------------
State = Mapping[str, Tensor]


def check(recipe: Recipe) -> None:
    """Raise InvalidInput for a recipe whose model predicts no classes."""
    if recipe.classes is None:
        able = [name for name in RECIPES if get(name).classes is not None]
        raise InvalidInput(
            f"{recipe.name} does not predict one class, whose log-probabilities --mismatch compares; recipes that do: "
            f"{', '.join(able)}"
        )


def settings_of(path: Path, recipe: str | None, size: str | None, state: State) -> Settings:
    """Return the settings of a file's model: those in a checkpoint of `lowp train`, given ones, or by its tensors.

    Raises InvalidInput if no recipe has tensors of these names and shapes.
    """
    if recipe is not None:
        return Settings(recipe, size=size).filled()
    try:
        extra = read_extra(path)
    except LowpError:
        extra = None
    if extra is not None and extra["settings"]["recipe"] in RECIPES:
        return replace(Settings(**extra["settings"]), precision="fp32", loss_scale=None)
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in RECIPES:
        found = get(name)
        for one in found.sizes if size is None else [size]:
            if one in found.sizes and _shapes(found, one) == wanted:
                return Settings(name, size=one).filled()
    raise InvalidInput(
        f"{path} has the {counted(len(wanted), 'tensor')} of no recipe, such as {next(iter(wanted), 'none')}: "
        "name the recipe by --recipe NAME, your own as module:NAME; lowp.mismatch and lowp.quantize_model take any "
        "model"
    )


def _shapes(recipe: Recipe, size: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        try:
            model = recipe.make_model(recipe.size(size))
        except (LowpError, ImportError):  # it needs a package that is not installed
            return {}
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_model(path: Path, recipe: str | None, size: str | None) -> tuple[Settings, nn.Module]:
    """Return the settings and the model of a file of weights; raises InvalidInput where they do not fit."""
    state = portable.load(path, dtype=torch.float32)
    settings = settings_of(path, recipe, size, state)
    found = get(settings.recipe)
    model = found.make_model(found.size(settings.size))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InvalidInput(f"{path} does not fit {found.name}, size {settings.size}: {error}") from None
    return settings, model


def compared(
    settings: Settings, model: nn.Module, formats: list[str], training: str, data: Data | None = None
) -> tuple[ServingMismatch, Data]:
    """Compare on the first batches of the validation set; return the data, too."""
    recipe = get(settings.recipe)
    check(recipe)
    data = load_data(settings) if data is None else data
    device = torch.device(settings.device)
    batches = _batches(data.validation, settings.batch or 1, device)
    assert recipe.classes is not None
    forward = _result_of(recipe)
    return mismatch(model.to(device), batches, formats, training=training, forward=forward, dim=recipe.classes), data


def _result_of(recipe: Recipe) -> Callable[[nn.Module, Any], Any]:
    """Return a function that gives what a model returns when the recipe computes its loss."""

    def forward(model: nn.Module, batch: Any) -> Any:
        results: list[Any] = []
        handle = model.register_forward_hook(lambda module, given, result: results.append(result))
        try:
            recipe.loss(model, batch)
        finally:
            handle.remove()
        return results[-1] if results else None

    return forward
