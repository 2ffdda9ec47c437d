"""One recipe, served in several formats: accuracy, bytes, time and energy of each, before and after training for it."""

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

__all__ = ["Serving"]

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
    """Train a recipe once in fp32 and serve it in every format; with `recover` also train it for each."""

    def __init__(self, settings: Settings, formats: Sequence[str], recover: bool = False) -> None:
        if settings.precision != "fp32":
            raise InvalidInput(f"--inference needs a model that is trained in fp32, not in {settings.precision}")
        for format in formats:
            quantize_model(nn.Linear(1, 1), format)  # raises for what cannot be served, before any work
        self.settings, self.recover = settings.filled(), recover
        self.formats = list(dict.fromkeys(["fp32", *(str(casts.parse(one)) for one in formats)]))
        self.rows: list[dict[str, Any]] = []
        self._trained: Training | None = None

    @property
    def trainings(self) -> int:
        """How many models are trained."""
        return 1 + self.recover * (len(self.formats) - 1)

    def run(self, on_epoch: Callable[[str], None], stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield one row per format when it is measured, until `stop()` is true."""
        trained = Training(self.settings)
        if not trained.run(lambda one: on_epoch("fp32") if one.epoch else None, stop):
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
        took = math.inf
        for _ in range(3):
            begun = time.perf_counter()
            numbers = _evaluated(trained, model)
            took = min(took, time.perf_counter() - begun)
        found = footprint(model, forward=lambda one: trained.recipe.loss(one, _batches(trained, 1)[0]))
        left = {} if format == "fp32" else dict(unquantized(model))
        return {"format": format, "numbers": numbers, "seconds": took, **asdict(found), "unquantized": left}

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
            if not training.run(lambda one: on_epoch(format) if one.epoch else None, stop):
                return {}
            return dict(_evaluated(training, self._served(training, format)))
        except STOPS as error:
            return {"failure": str(error)}

    def document(self) -> dict[str, Any]:
        """Everything that was measured, as plain values."""
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
    return [moved(examples.batch(one), trained.device) for one in indices]


def _evaluated(trained: Training, model: nn.Module) -> Mapping[str, float]:
    with torch.no_grad():
        return trained.recipe.evaluate(model.eval(), trained.validation_batches())
