"""Shared parts of the detection recipes: the data's layout, the variances of offsets, the optimizer, the schedule."""

from __future__ import annotations

from functools import partial

from lowp.recipes.recipe import Metric, Recipe, adam, step_decay

VARIANCES = (0.1, 0.2)  # divisors of box offsets, as in SSD's program and in the second stage of Fast R-CNN

# The papers use SGD from pre-trained weights; without these it needs many times the epochs of Adam.
detector = partial(
    Recipe,
    data="generated: figures on scikit-learn's photographs; --data DIR or ZIP: Pascal VOC's layout (VOC 2007, BCCD)",
    metric=Metric("mAP"),
    classes=None,
    make_optimizer=adam,
    schedule=step_decay,
    clip=5.0,
    unit="images",
)
