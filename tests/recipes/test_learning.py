"""Every recipe learns in fp32 and in 16 bits, on one batch of its own data: its gradient is fp32's, and the loss falls.

The order of sums depends on the processor, which may let a recipe diverge that is close to it. Therefore the effect of
16 bits is tested on the gradient, with the same weights, batch and random draws, and the learning rates leave a margin.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lowp.precision import Precision
from lowp.recipes import get
from lowp.recipes.recipe import Data, Recipe, Size

# Recipe: options that make the CPU size small, examples a batch, learning rate, steps, and what is left of the loss.
LEARNING: dict[str, tuple[dict[str, Any], int, float, int, float]] = {
    "mnist": ({}, 50, 0.1, 12, 0.5),
    "unet": ({"widths": (4, 8, 8, 8), "images": (4, 4)}, 4, 0.01, 20, 0.85),
    "rossmann": ({"drawn": (20, 200)}, 256, 0.01, 40, 0.6),
    "gpt": ({"layers": 2, "width": 32, "bytes": 20_000}, 8, 0.01, 30, 0.7),
    "words": ({"vocabulary": 300, "width": 8, "hidden": 8, "drawn": (400, 50)}, 32, 0.02, 30, 0.9),
    "bert": ({"layers": 1, "width": 32, "heads": 2, "drawn": 40}, 16, 0.003, 25, 0.75),
    "seq2seq": ({"width": 32, "drawn": 40}, 16, 0.02, 30, 0.7),
    "ssd": ({"images": (4, 2)}, 4, 0.001, 20, 0.7),
    "faster-rcnn": ({"images": (4, 2)}, 4, 0.001, 8, 0.7),
    "resnet-20": ({"layers": 8, "images": (16, 8)}, 16, 0.1, 12, 0.65),
    "vit": ({"layers": 2, "width": 32, "images": (16, 8)}, 16, 0.003, 20, 0.8),
    "resnet-110": ({"layers": 8, "images": (16, 8)}, 16, 0.1, 12, 0.65),
    "resnet-50": ({"images": (8, 8), "width": 8}, 8, 0.02, 12, 0.5),
    "resnet-101": ({"images": (8, 8), "width": 8}, 8, 0.02, 12, 0.5),
    "alexnet": ({"images": (8, 8)}, 8, 0.005, 24, 0.6),
}
# How far a gradient may lie from fp32's, as a share of its length: two to ten times what seeds show. Differences grow
# with every BatchNorm over a batch of 8, of which the deep networks have 53 and 104.
DISTANCE = {"fp16": 0.1, "bf16": 0.3}
DEEP = {"resnet-50": 2.5, "resnet-101": 3.0}
# The gradient says the most; that steps are taken along it is seen in one of the precisions.
PRECISIONS = [pytest.param("fp32", marks=pytest.mark.slow), "fp16", pytest.param("bf16", marks=pytest.mark.slow)]


def small(name: str) -> tuple[Recipe, Size]:
    """Return the recipe, and a size smaller than its CPU size."""
    recipe = get(name)
    options, batch, rate, _, _ = LEARNING[name]
    size = recipe.size("cpu")
    return recipe, replace(size, options={**size.options, **options}, batch=batch, learning_rate=rate)


@cache
def data_of(name: str) -> Data:
    recipe, size = small(name)
    return recipe.load(size, None)


class Run:
    """A recipe's model and optimizer in a precision, and their batch."""

    def __init__(self, name: str, precision: str, seed: int = 0) -> None:
        self.recipe, size = small(name)
        torch.manual_seed(seed)
        model = self.recipe.make_model(size).train()
        # A scale that a few steps do not have to find first.
        self.precision = Precision(precision, loss_scale="256" if precision == "fp16" else None)
        self.model, self.optimizer = self.precision.prepare(
            model, self.recipe.make_optimizer(model, size.learning_rate)
        )
        self.batch = data_of(name).training.batch(torch.arange(size.batch))

    def backward(self) -> float:
        """Put unscaled gradients into the parameters; return the loss."""
        self.optimizer.zero_grad()
        with self.precision.autocast():
            loss = self.recipe.loss(self.model, self.batch)
        self.precision.backward(loss)
        self.precision.unscale_(self.optimizer)
        return float(loss.detach())

    def step(self) -> float:
        loss = self.backward()
        if self.recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.precision.step(self.optimizer)
        return loss

    def gradient(self) -> Tensor:
        """Return the gradient of the first step as one tensor; the random draws are the same in each precision."""
        torch.manual_seed(1)
        self.backward()
        return torch.cat([one.grad.flatten().double() for one in self.model.parameters() if one.grad is not None])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LEARNING)
def test_the_gradient_of_a_batch_is_that_of_fp32(name: str, seed: int) -> None:
    wanted = Run(name, "fp32", seed).gradient()
    for precision, allowed in DISTANCE.items():
        apart = float((Run(name, precision, seed).gradient() - wanted).norm() / wanted.norm())
        assert apart < allowed * DEEP.get(name, 1), f"{precision}: {apart:.3f} of its length apart"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in ("faster-rcnn", "ssd", "unet"))) for one in LEARNING]
)
def test_the_loss_of_one_batch_falls(name: str, precision: str) -> None:
    steps, left = LEARNING[name][3:]
    steps = steps if precision == "fp32" else max(2, steps // 2)
    left = left if precision == "fp32" else 1 - (1 - left) / 4
    run = Run(name, precision)
    losses = [run.step() for _ in range(steps)]
    assert min(losses[-2:]) < left * losses[0], losses


@pytest.mark.parametrize("name", LEARNING)
def test_the_evaluation_gives_finite_numbers_with_the_metric_among_them(name: str) -> None:
    recipe, size = small(name)
    data = data_of(name)
    model = recipe.make_model(size).eval()
    with torch.no_grad():
        numbers = recipe.evaluate(model, [data.validation.batch(torch.arange(len(data.validation)))])
    assert {"loss", recipe.metric.name} <= set(numbers)
    assert all(torch.tensor(value).isfinite() for value in numbers.values()), numbers
    assert not recipe.metric.share or 0 <= numbers[recipe.metric.name] <= 1
