"""A perceptron on handwritten digits: real data included in scikit-learn, and training steps of a millisecond.

`digits` is a two-layer perceptron with usual hyperparameters. `digits-hard` trains a deeper one with a small learning
rate, as in fine-tuning. Most of its updates are smaller than half an ulp of an fp16 weight: without fp32 master weights
they are rounded to zero, and the network hardly learns (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1).
"""

from pathlib import Path

from torch import nn

from lowp.errors import InvalidInput
from lowp.recipes.classification import classifier, perceptron_layers
from lowp.recipes.data.digits import HELD_BACK, TRAINING, read_digits
from lowp.recipes.recipe import Data, Size, TensorExamples, constant


def load(size: Size, path: Path | None) -> Data:
    """Return 8x8 images with grey values 0 to 1, and their digits, in a fixed split; raise InvalidInput for a path."""
    if path is not None:
        raise InvalidInput(f"digits does not take --data {path}: its images come with scikit-learn")
    images, labels = read_digits()
    images = images / 16
    return Data(
        TensorExamples(images[:TRAINING], labels[:TRAINING]),
        TensorExamples(images[TRAINING:], labels[TRAINING:]),
        f"scikit-learn's digits, {TRAINING} to train on and {HELD_BACK} held back",
    )


def make_model(size: Size) -> nn.Module:
    """Return a perceptron from 64 grey values to 10 digits, with the size's hidden layers."""
    return nn.Sequential(*perceptron_layers(64, size.options["hidden"], 10))


DIGITS = classifier(
    name="digits",
    summary="two-layer perceptron on handwritten digits",
    source="data: Alpaydin and Kaynak 1998, UCI Optical Recognition of Handwritten Digits, as in scikit-learn",
    data="embedded in scikit-learn (real, 1797 images of 8x8)",
    sizes={
        "cpu": Size(epochs=20, batch=32, learning_rate=0.1, parameters=9_610, options={"hidden": (128,)}),
        "full": Size(epochs=40, batch=32, learning_rate=0.1, parameters=76_810, options={"hidden": (1024,)}),
    },
    load=load,
    make_model=make_model,
    threads=1,
)

DIGITS_HARD = classifier(
    name="digits-hard",
    summary="the digits with a small learning rate, whose updates fp16 weights without masters lose",
    source="Micikevicius et al. 2018, arXiv 1710.03740, section 3.1; data as for digits",
    data=DIGITS.data,
    sizes={
        "cpu": Size(epochs=60, batch=32, learning_rate=4e-4, parameters=85_002, options={"hidden": (256, 256)}),
        "full": Size(epochs=120, batch=32, learning_rate=2e-4, parameters=301_066, options={"hidden": (512, 512)}),
    },
    load=load,
    make_model=make_model,
    schedule=constant,
    threads=1,
)
