"""Recipes converge in 16 bits as in fp32: at the end of training the metric is worse by at most the stated gap.

Each row trains a recipe from the same weights on the same batches, in fp32 and in each precision, with the learning
rates of fp32. `lowp compare` does the same for the CPU sizes with several seeds, and test_learning.py for a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from lowp.recipes import get
from lowp.recipes.data.images import LabelledImages, image_data
from lowp.recipes.recipe import Data, Size, one_cycle
from lowp.recipes.training import Settings, Training, load_data

PRECISIONS = ("fp16", "bf16", "flex16+5", "dfp16")


def digits_of(side: int, training: int = 1000, held: int = 400) -> Data:
    """Return scikit-learn's digits, real images of 8x8, enlarged and in three colours; learned in few steps."""
    digits = load_digits()
    images = torch.from_numpy(digits.images * 15.9375).to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
    images = images.repeat_interleave(side // 8, 2).repeat_interleave(side // 8, 3)
    labels = torch.from_numpy(digits.target).long()
    parts = (images[:training], labels[:training], images[training:][:held], labels[training:][:held])
    return image_data(LabelledImages(*parts, "digits"))


@dataclass(frozen=True)
class Row:
    """A small version of a recipe: `size` replaces fields of its CPU size, `options` some of its options.

    `gap`: how much worse than fp32's the final metric may be, in its own unit; 0.04 of a share is four points. `gain`:
    the least improvement of fp32 over the untrained model, without which the gap would be meaningless.
    """

    recipe: str
    gap: float
    gain: float
    size: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Data] | None = None


_SHORT_TEXT = {"layers": 2, "width": 48, "bytes": 60_000}
_FEW_TWEETS = {"layers": 2, "width": 64, "heads": 2, "drawn": 400}
ROWS = [
    Row("resnet-20", 0.04, 0.75, {"epochs": 6}, {"layers": 8, "width": 4}, lambda: digits_of(16)),
    Row("rossmann", 0.01, 0.25, {"epochs": 6, "batch": 256}, {"hidden": (50, 20), "drawn": (40, 200)}),
    Row("alexnet", 0.06, 0.75, {"epochs": 10, "batch": 25}, {}, lambda: digits_of(64)),
    Row("gpt", 0.02, 3.0, {"epochs": 2, "batch": 16}, _SHORT_TEXT),
    Row("bert", 0.06, 0.5, {"epochs": 4, "learning_rate": 1e-3}, _FEW_TWEETS),
    Row("unet", 0.05, 0.15, {"epochs": 8, "schedule": one_cycle}, {"widths": (4, 8, 16, 16), "images": (60, 20)}),
    Row("resnet-50", 0.06, 0.75, {"epochs": 4}, {"width": 8}, lambda: digits_of(32)),
    Row("resnet-110", 0.04, 0.75, {"epochs": 6}, {"layers": 14, "width": 4}, lambda: digits_of(16)),
]
BY_RECIPE = {row.recipe: row for row in ROWS}


def in_small(row: Row) -> Size:
    """Return the size of the row's recipe: what a CPU trains, made smaller."""
    small = replace(get(row.recipe).size("cpu"), **row.size)
    return replace(small, options={**small.options, **row.options})


def trained(row: Row, precision: str) -> list[dict[str, float]]:
    """Return the history of a whole run."""
    recipe, small = get(row.recipe), in_small(row)
    settings = Settings(
        row.recipe, precision, epochs=small.epochs, batch=small.batch, learning_rate=small.learning_rate
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowp.recipes.training.get", lambda name: replace(recipe, sizes={"cpu": small}))
        training = Training(settings, row.data() if row.data is not None else load_data(settings))
        assert training.run() and training.failure is None
    return training.history


@cache
def in_fp32(name: str) -> list[dict[str, float]]:
    """Return the fp32 run to which the precisions of a row are compared, trained once."""
    return trained(BY_RECIPE[name], "fp32")


@pytest.mark.parametrize("name", BY_RECIPE)
def test_a_row_fits_its_recipe(name: str) -> None:
    row = BY_RECIPE[name]
    assert in_small(row).epochs > 1
    if row.data is not None:
        images, labels = row.data().training.batch(torch.tensor([2, 1]))
        assert len(images) == len(labels) == 2


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", BY_RECIPE)
def test_a_recipe_ends_where_fp32_ends(name: str, precision: str) -> None:
    row, metric = BY_RECIPE[name], get(name).metric
    before, *_, baseline = (record[metric.name] for record in in_fp32(name))
    assert -metric.worse_by(baseline, than=before) > row.gain, f"fp32 did not learn: {in_fp32(name)}"
    value = trained(row, precision)[-1][metric.name]
    assert metric.worse_by(value, than=baseline) <= row.gap, f"{metric.name} {value:.4f}, in fp32 {baseline:.4f}"
