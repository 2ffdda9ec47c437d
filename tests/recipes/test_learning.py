"""Every recipe learns in fp32 and in 16 bits: on one batch of its own data the loss falls by a stated share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lowp.precision import Precision
from lowp.recipes import get
from lowp.recipes.recipe import Recipe, Size

# Recipe: options that make the CPU size small, examples a batch, learning rate, steps, and what is left of the loss.
LEARNING: dict[str, tuple[dict[str, Any], int, float, int, float]] = {
    "mnist": ({}, 50, 0.1, 12, 0.5),
    "unet": ({"widths": (4, 8, 8, 8), "images": (4, 4)}, 4, 0.01, 30, 0.7),
    "rossmann": ({"drawn": (20, 200)}, 256, 0.01, 40, 0.6),
    "gpt": ({"layers": 2, "width": 32, "bytes": 20_000}, 8, 0.01, 30, 0.7),
    "bert": ({"layers": 1, "width": 32, "heads": 2, "drawn": 40}, 16, 0.003, 25, 0.75),
    "seq2seq": ({"width": 32, "drawn": 40}, 16, 0.02, 30, 0.7),
    "ssd": ({"images": (4, 2)}, 4, 0.001, 20, 0.7),
    "faster-rcnn": ({"images": (4, 2)}, 4, 0.001, 20, 0.7),
    "resnet-20": ({"layers": 8, "images": (16, 8)}, 16, 0.1, 12, 0.65),
    "resnet-110": ({"layers": 8, "images": (16, 8)}, 16, 0.1, 12, 0.65),
    "resnet-50": ({"images": (8, 8), "width": 8}, 8, 0.02, 12, 0.5),
    "resnet-101": ({"images": (8, 8), "width": 8}, 8, 0.02, 12, 0.5),
    "alexnet": ({"images": (8, 8)}, 8, 0.02, 40, 0.6),
}
PRECISIONS = ("fp32", "fp16", "bf16")


def small(name: str) -> tuple[Recipe, Size]:
    """The recipe, and its CPU size made smaller still."""
    recipe = get(name)
    options, batch, rate, _, _ = LEARNING[name]
    size = recipe.size("cpu")
    return recipe, replace(size, options={**size.options, **options}, batch=batch, learning_rate=rate)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LEARNING)
def test_the_loss_of_one_batch_falls(name: str, precision: str) -> None:
    recipe, size = small(name)
    steps, left = LEARNING[name][3:]
    steps = steps if precision == "fp32" else max(2, steps // 2)
    left = left if precision == "fp32" else 1 - (1 - left) / 4
    torch.manual_seed(0)
    data = recipe.load(size, None)
    model = recipe.make_model(size)
    optimizer = recipe.make_optimizer(model, size.learning_rate)
    # A scale that a few steps do not have to find first.
    chosen = Precision(precision, loss_scale="256" if precision == "fp16" else None)
    model, optimizer = chosen.prepare(model, optimizer)
    batch = data.training.batch(torch.arange(size.batch))
    model.train()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with chosen.autocast():
            loss = recipe.loss(model, batch)
        chosen.backward(loss)
        if recipe.clip is not None:
            chosen.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        chosen.step(optimizer)
        losses.append(float(loss.detach()))
    assert min(losses[-2:]) < left * losses[0], losses


@pytest.mark.parametrize("name", LEARNING)
def test_the_evaluation_gives_finite_numbers_with_the_metric_among_them(name: str) -> None:
    recipe, size = small(name)
    data = recipe.load(size, None)
    model = recipe.make_model(size).eval()
    with torch.no_grad():
        numbers = recipe.evaluate(model, [data.validation.batch(torch.arange(len(data.validation)))])
    assert {"loss", recipe.metric.name} <= set(numbers)
    assert all(torch.tensor(value).isfinite() for value in numbers.values()), numbers
    assert not recipe.metric.share or 0 <= numbers[recipe.metric.name] <= 1
