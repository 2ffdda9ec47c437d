"""Detectors and a translator learn in fp16 as in fp32, but not if gradients are below fp16's range.

A loss scale below 1 stands for a loss that is smaller by that factor, with all gradients carried in fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from lowp.recipes.data.detection import draw_boxes
from lowp.recipes.recipe import Data
from lowp.recipes.seq2seq import drawn_dates, pair_data
from lowp.recipes.training import Settings, Training, threads_of

# Recipe: few examples, epochs and batch.
FEW: dict[str, tuple[Callable[[], Data], int, int]] = {
    "ssd": (lambda: draw_boxes(96, 10, 8, 2), 12, 4),
    "faster-rcnn": (lambda: draw_boxes(96, 10, 8, 2), 4, 4),
    "seq2seq": (lambda: pair_data(drawn_dates(60), 32, "drawn dates"), 8, 18),
}
# the detectors take long; test_learning.py tries a few of their steps
RECIPES = [pytest.param(recipe, marks=[pytest.mark.slow] * (recipe != "seq2seq")) for recipe in FEW]
TINY = str(2.0**-20)  # a scale at which nearly all gradients are below fp16, in all of them
AS_FP32 = 0.05  # how much more of its first loss a run may have left than fp32
LOST = 0.1  # how much more it has left, at least, where gradients are below fp16


@cache
def left(recipe: str, precision: str, loss_scale: str | None = None) -> float:
    """Return the training loss of the last epoch divided by that of the first."""
    data, epochs, batch = FEW[recipe]
    with threads_of(1):
        training = Training(Settings(recipe, precision, epochs=epochs, batch=batch, loss_scale=loss_scale), data())
        training.run()
    assert training.failure is None
    losses = [record["training_loss"] for record in training.history[1:]]
    return losses[-1] / losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp16_learns_as_fp32_with_a_loss_scale_and_here_without(recipe: str) -> None:
    exact = left(recipe, "fp32")
    assert exact < 0.8
    for scale in ("dynamic(1024)", "none"):
        assert left(recipe, "fp16", scale) < exact + AS_FP32


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp16_does_not_learn_where_gradients_are_below_it(recipe: str) -> None:
    assert left(recipe, "fp16", TINY) > left(recipe, "fp32") + LOST


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16_learns_where_gradients_are_below_fp16(recipe: str) -> None:
    """It has fp32's exponents, and needs no scale."""
    assert left(recipe, "bf16", TINY) < left(recipe, "fp32") + AS_FP32
