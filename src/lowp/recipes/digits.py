"""Handwritten digits with a perceptron: real data that is embedded in scikit-learn, and a step of a millisecond.

`digits` is the two-layer perceptron as anybody would train it. `digits-hard` trains a deeper one with a small learning
rate, as in fine-tuning, where most updates are smaller than half an ulp of an fp16 weight: without fp32 master weights
they are rounded away, and the network hardly moves (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import nn

from lowp.errors import InvalidInput, Unavailable
from lowp.recipes.classification import evaluate, loss
from lowp.recipes.recipe import Data, Metric, Recipe, Size, TensorExamples, constant, linear_decay

TRAINING_EXAMPLES = 1257  # 70 %; the other 540 are for validation


def load(size: Size, path: Path | None) -> Data:
    """8x8 images with grey values 0 to 1, and their digits; always the same examples are held back."""
    if path is not None:
        raise InvalidInput(f"digits takes no --data {path}: its images are embedded in scikit-learn")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise Unavailable(
            "the digits are embedded in scikit-learn, which is not installed: pip install 'lowp[recipes]'"
        ) from None
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(images).float()[order] / 16
    y = torch.from_numpy(labels).long()[order]
    return Data(
        TensorExamples(x[:TRAINING_EXAMPLES], y[:TRAINING_EXAMPLES]),
        TensorExamples(x[TRAINING_EXAMPLES:], y[TRAINING_EXAMPLES:]),
        f"scikit-learn's digits, {TRAINING_EXAMPLES} to train on and {len(y) - TRAINING_EXAMPLES} held back",
    )


def make_model(size: Size) -> nn.Module:
    """64 grey values, hidden layers with ReLU, 10 digits; torch's own initialisation."""
    widths = [64, *size.options["hidden"]]
    hidden = [part for fan in itertools.pairwise(widths) for part in (nn.Linear(*fan), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 10))


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Plain SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)


DIGITS = Recipe(
    name="digits",
    summary="two-layer perceptron on handwritten digits",
    source="data: Alpaydin and Kaynak 1998, UCI Optical Recognition of Handwritten Digits, as in scikit-learn",
    data="embedded in scikit-learn (real, 1797 images of 8x8)",
    sizes={
        "cpu": Size(epochs=20, batch=32, learning_rate=0.1, parameters=9_610, options={"hidden": (128,)}),
        "full": Size(epochs=40, batch=32, learning_rate=0.1, parameters=76_810, options={"hidden": (1024,)}),
    },
    metric=Metric("accuracy"),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=make_optimizer,
    schedule=linear_decay,
    threads=1,
    unit="images",
)

DIGITS_HARD = Recipe(
    name="digits-hard",
    summary="the digits with a small learning rate, which fp16 weights without masters swallow",
    source="Micikevicius et al. 2018, arXiv 1710.03740, section 3.1; data as for digits",
    data=DIGITS.data,
    sizes={
        "cpu": Size(epochs=60, batch=32, learning_rate=4e-4, parameters=85_002, options={"hidden": (256, 256)}),
        "full": Size(epochs=120, batch=32, learning_rate=2e-4, parameters=301_066, options={"hidden": (512, 512)}),
    },
    metric=DIGITS.metric,
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=make_optimizer,
    schedule=constant,
    threads=1,
    unit="images",
)
