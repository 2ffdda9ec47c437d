"""Residual networks: 20 and 110 layers for CIFAR-10, 50 and 101 for ImageNet.

ResNet-110 on CIFAR-10 is one of the networks of the Flexpoint paper (Köster et al. 2017, arXiv 1711.02213). In a 16-bit
precision the convolutions and the linear layer run in 16 bits; the statistics of batch normalisation are fp32.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from lowp.recipes.classification import classifier
from lowp.recipes.data.cifar import read_cifar10
from lowp.recipes.data.folders import read_folders
from lowp.recipes.data.images import image_data
from lowp.recipes.data.shapes import shape_images
from lowp.recipes.networks.resnet import cifar_resnet, imagenet_resnet
from lowp.recipes.recipe import Data, Size, one_cycle, sgd_with_momentum, step_decay

FIFTY, HUNDRED_AND_ONE = (3, 4, 6, 3), (3, 4, 23, 3)


# -- data -------------------------------------------------------------------------------------------------------------
def load_small(size: Size, path: Path | None) -> Data:
    """Return CIFAR-10 if a path is given, otherwise drawn images with ten kinds of figures.

    Training images are padded by 4, cropped at random and flipped at random.
    """
    if path is not None:
        return image_data(read_cifar10(path), padding=4)
    return image_data(shape_images(32, *size.options["images"]), padding=4)


def load_large(size: Size, path: Path | None) -> Data:
    """Return images in one folder per class if a path is given, otherwise drawn images with ten kinds of figures."""
    side = size.options["side"]
    if path is not None:
        return read_folders(path, side, size.options["classes"])
    return image_data(shape_images(side, *size.options["images"]), padding=side // 8)


# -- networks ---------------------------------------------------------------------------------------------------------
def make_small(size: Size) -> nn.Module:
    """Return a network for images of 32x32, with three stages."""
    return cifar_resnet(size.options["layers"], size.options["width"])


def make_large(size: Size) -> nn.Module:
    """Return a network for images of 224x224, with four stages of bottlenecks."""
    return imagenet_resnet(size.options["blocks"], size.options["width"], size.options["classes"])


# -- recipes ----------------------------------------------------------------------------------------------------------
_residual = partial(
    classifier,
    make_optimizer=partial(sgd_with_momentum, weight_decay=1e-4),  # as in the paper
    schedule=step_decay,
)
_small = partial(
    _residual,
    data="generated: ten figures drawn on scikit-learn's photographs, 32x32; --data DIR: CIFAR-10 (batches or npz)",
    load=load_small,
    make_model=make_small,
)
_large = partial(
    _residual,
    data="generated: ten figures drawn on scikit-learn's photographs; --data DIR: train/CLASS and val/CLASS (ImageNet)",
    load=load_large,
    make_model=make_large,
)

RESNET_20 = _small(
    name="resnet-20",
    summary="residual network of 20 layers for images of 32x32",
    source="He et al. 2016, arXiv 1512.03385, section 4.2",
    sizes={
        "cpu": Size(12, 50, 0.1, 68_050, {"layers": 20, "width": 8, "images": (2000, 500)}, one_cycle),
        "full": Size(164, 128, 0.1, 269_722, {"layers": 20, "width": 16, "images": (10_000, 2000)}),
    },
)

# 110 layers do not start to learn at a rate of 0.1 (section 4.2): the rate increases to it in one_cycle, instead of the
# paper's 400 steps at 0.01.
RESNET_110 = _small(
    name="resnet-110",
    summary="residual network of 110 layers for images of 32x32, as in the Flexpoint paper",
    source="He et al. 2016, arXiv 1512.03385, section 4.2; Köster et al. 2017, arXiv 1711.02213",
    sizes={
        "cpu": Size(12, 50, 0.1, 116_882, {"layers": 32, "width": 8, "images": (2000, 500)}),
        "full": Size(164, 128, 0.1, 1_727_962, {"layers": 110, "width": 16, "images": (10_000, 2000)}),
    },
    schedule=one_cycle,
)

_SMALL_BLOCKS = {"blocks": (1, 1, 1, 1), "width": 16, "classes": 10, "side": 64, "images": (2000, 500)}
_SMALLER_STEM = {**_SMALL_BLOCKS, "blocks": (1, 1, 3, 1)}
_FULL = {"width": 64, "classes": 1000, "side": 224, "images": (1000, 200)}

RESNET_50 = _large(
    name="resnet-50",
    summary="residual network of 50 layers for images of 224x224",
    source="He et al. 2016, arXiv 1512.03385, table 1",
    sizes={
        "cpu": Size(12, 50, 0.05, 511_514, _SMALL_BLOCKS, one_cycle),
        "full": Size(90, 256, 0.1, 25_557_032, {**_FULL, "blocks": FIFTY}),
    },
)

RESNET_101 = _large(
    name="resnet-101",
    summary="residual network of 101 layers for images of 224x224",
    source="He et al. 2016, arXiv 1512.03385, table 1",
    sizes={
        "cpu": Size(16, 50, 0.1, 652_314, _SMALLER_STEM, one_cycle),
        "full": Size(90, 256, 0.1, 44_549_160, {**_FULL, "blocks": HUNDRED_AND_ONE}),
    },
)
