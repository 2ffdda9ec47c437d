"""Shared parts of the detector recipes: their data's layout, the units of offsets, the optimizer and its schedule."""

from __future__ import annotations

from functools import partial

from lowp.recipes.recipe import Metric, Recipe, adam, step_decay

__all__ = ["VARIANCES", "detector"]

VARIANCES = (0.1, 0.2)  # the units of offsets to boxes, as in SSD's program and Fast R-CNN's second step

# Adam in place of the papers' SGD, which starts from pre-trained weights and needs many times the epochs without them.
detector = partial(
    Recipe,
    data="generated: figures on scikit-learn's photographs; --data DIR or ZIP: Pascal VOC's layout (VOC 2007, BCCD)",
    metric=Metric("mAP"),
    make_optimizer=adam,
    schedule=step_decay,
    clip=5.0,
    unit="images",
)
