"""Inference of a recipe's model in several formats: the metrics, bytes, time and energy of each.

A model is trained in fp32 and quantized, and optionally also trained for each format.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from lowp import casts
from lowp.errors import InvalidInput
from lowp.inference import footprint, quantize_model, training_policy, unquantized
from lowp.precision import Precision
from lowp.recipes import results
from lowp.recipes.training import STOPS, Settings, Training, moved

_CALIBRATED_ON = 8  # batches
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
        costs = footprint(model, forward=lambda module: trained.recipe.loss(module, _batches(trained, 1)[0]))
        fp32_modules = {} if format == "fp32" else dict(unquantized(model))
        return {"format": format, "numbers": metrics, "seconds": seconds, **asdict(costs), "unquantized": fp32_modules}

    def _served(self, trained: Training, format: str) -> nn.Module:
        if format == "fp32":
            return trained.model.eval()
        batches = _batches(trained, _CALIBRATED_ON)
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


def _batches(trained: Training, count: int) -> list[Any]:
    examples = trained.data.training
    indices = torch.split(torch.arange(min(len(examples), count * trained.batch)), trained.batch)
    return [moved(examples.batch(part), trained.device) for part in indices]


def _evaluated(trained: Training, model: nn.Module) -> Mapping[str, float]:
    with torch.no_grad():
        return trained.recipe.evaluate(model.eval(), trained.validation_batches())
