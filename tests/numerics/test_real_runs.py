"""Predictions from an fp32 step against the same step of real networks in fp16 and bf16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lowp
from lowp.numerics.advice import _gradients
from lowp.numerics.prediction import effect, lost_updates
from lowp.numerics.record import Key, Record
from lowp.recipes.training import Settings, Training, load_data

RECIPES = ["digits", pytest.param("gpt", marks=pytest.mark.slow), pytest.param("unet", marks=pytest.mark.slow)]
RECIPES.append(pytest.param("ssd", marks=pytest.mark.slow))


class Once:
    """Takes the first step of a recipe, always on the same weights and batch."""

    def __init__(self, recipe: str) -> None:
        self.settings = Settings(recipe).filled()
        self.data = load_data(self.settings)
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}

    def _keep(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.gradients[parameter] = parameter.grad.clone()

    def training(self, precision: str, loss_scale: str | None = None) -> Training:
        settings = Settings(self.settings.recipe, precision, loss_scale=loss_scale)
        return Training(settings, self.data)

    def step(self, training: Training) -> Any:
        training.model.train()
        batch = self.data.training.batch(torch.arange(training.batch), torch.Generator().manual_seed(0))
        return training.step(batch)

    def profiled(self) -> tuple[Record, Training]:
        training = self.training("fp32")
        for parameter in training.model.parameters():  # a recipe may clip them afterwards
            parameter.register_post_accumulate_grad_hook(self._keep)
        with lowp.profile(training.model, training.optimizer, max_overhead=None) as profile:
            self.step(training)
        return profile.record, training


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp16_overflows_at_the_loss_scale_where_that_was_predicted(recipe: str) -> None:
    once = Once(recipe)
    record, _ = once.profiled()
    largest = max(seen.maximum for _, seen in _gradients(record))
    highest = math.floor(math.log2(65504 / largest))
    overflown = {}
    for power in (highest - 1, highest + 2):
        training = once.training("fp16", str(2.0**power))
        once.step(training)
        overflown[power - highest] = training.precision.skipped_steps
    assert overflown == {-1: 0, 2: 1}, highest


@pytest.mark.parametrize("recipe", RECIPES)
def test_flushed_gradients_and_lost_updates_are_those_of_the_real_tensors(recipe: str) -> None:
    once = Once(recipe)
    before = once.training("fp32").model.state_dict()
    record, training = once.profiled()
    sums = {"flushed": [0.0, 0.0, 0], "lost": [0.0, 0.0, 0]}
    for name, parameter in training.model.named_parameters():
        module, _, own = name.rpartition(".")
        gradient = once.gradients.get(parameter)
        if gradient is None or name not in record.updates:
            continue
        seen = record.tensors[Key(module, own, "weight_grad", "backward")]
        _add(sums["flushed"], effect(seen, "fp16").flushed, (lowp.quantize(gradient, "fp16") == 0), gradient != 0)
        weight = before[name]
        update = parameter.detach() - weight
        stored = lowp.quantize(weight, "bf16")
        weights = record.tensors[Key(module, own, "weight", "step")]
        lost = lost_updates(record.updates[name], weights, "bf16")
        _add(sums["lost"], lost, lowp.quantize(stored + update, "bf16") == stored, update != 0)
    for what, (predicted, real, count) in sums.items():
        assert predicted / count == pytest.approx(real / count, abs=1e-4 + 5 / count), what


def _add(sums: list[Any], share: float, some: torch.Tensor, among: torch.Tensor) -> None:
    count = int(among.sum())
    sums[0], sums[1], sums[2] = sums[0] + share * count, sums[1] + int((some & among).sum()), sums[2] + count
