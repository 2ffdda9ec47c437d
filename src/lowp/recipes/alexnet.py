"""AlexNet: the first deep network for ImageNet, and one of the networks of the Flexpoint paper (Köster et al. 2017).

Most of its parameters are in its large linear layers; its gradients are small, so loss scaling matters in fp16.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from lowp.recipes.classification import classifier
from lowp.recipes.data.folders import read_folders
from lowp.recipes.data.images import image_data
from lowp.recipes.data.shapes import shape_images
from lowp.recipes.networks.alexnet import AlexNet
from lowp.recipes.recipe import Data, Size, one_cycle, sgd_with_momentum, step_decay


def load(size: Size, path: Path | None) -> Data:
    """Return images in one folder per class if a path is given, otherwise drawn images with ten kinds of figures."""
    side = size.options["side"]
    if path is not None:
        return read_folders(path, side, size.options["classes"])
    return image_data(shape_images(side, *size.options["images"]), padding=side // 8)


def make_model(size: Size) -> nn.Module:
    """Return an AlexNet with the size's share of the published widths."""
    return AlexNet(size.options["side"], size.options["share"], size.options["classes"], size.options["dropout"])


# With an eighth of the width, the linear layers have 32 input features, too few for a dropout of a half.
_SMALL = {"side": 64, "share": 0.125, "classes": 10, "dropout": 0.1, "images": (2000, 500)}
_FULL = {"side": 224, "share": 1.0, "classes": 1000, "dropout": 0.5, "images": (1000, 200)}

ALEXNET = classifier(
    name="alexnet",
    summary="five convolutions and three linear layers, as in the Flexpoint paper",
    source="Krizhevsky, Sutskever, Hinton 2012; Köster et al. 2017, arXiv 1711.02213",
    data="generated: ten figures drawn on scikit-learn's photographs; --data DIR: train/CLASS and val/CLASS (ImageNet)",
    sizes={
        "cpu": Size(30, 50, 0.02, 325_114, _SMALL, one_cycle),
        "full": Size(90, 128, 0.01, 60_965_224, _FULL),
    },
    load=load,
    make_model=make_model,
    make_optimizer=partial(sgd_with_momentum, weight_decay=5e-4),  # as in the paper
    schedule=step_decay,
)
