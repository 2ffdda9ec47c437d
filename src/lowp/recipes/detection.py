"""Shared parts of the detection recipes: the data's layout, the variances of offsets, optimizer, schedule and backbone.

The backbone are the convolutions of VGG-16; without normalisation, gradients differ widely in size. Simonyan and
Zisserman, "Very Deep Convolutional Networks", 2015, arXiv 1409.1556, table 1, column D.
"""

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn

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


WIDTHS = (64, 128, 256, 512, 512)


def by_anchor(x: Tensor, values: int) -> Tensor:
    """Reshape a map [N, anchors per position * values, H, W] to [N, anchors, values]."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1, values)


# -- the backbone ------------------------------------------------------------------------------------------------------
def stage(in_channels: int, out_channels: int, layers: int) -> nn.Sequential:
    """Return `layers` 3x3 convolutions with ReLU that keep the size of the feature map."""
    parts: list[nn.Module] = []
    for index in range(layers):
        parts += [nn.Conv2d(out_channels if index else in_channels, out_channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*parts)


def initialise(modules: Iterable[nn.Module]) -> None:
    """Initialise weights to preserve the variance of activations through ReLUs (arXiv 1502.01852), and biases to 0."""
    for module in modules:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
