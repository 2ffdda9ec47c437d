"""Residual networks: 20 and 110 layers for CIFAR-10, 50 and 101 for ImageNet.

ResNet-110 on CIFAR-10 is one of the networks of the Flexpoint paper (Köster et al. 2017, arXiv 1711.02213). In a 16-bit
precision the convolutions and the linear layer run in 16 bits; the statistics of batch normalisation are fp32.

They are for images of 32x32 (20 to 110 layers) and of 224x224 (50 and 101 layers): He, Zhang, Ren, Sun, "Deep Residual
Learning for Image Recognition", 2016, arXiv 1512.03385: section 4.2, with shortcuts without parameters (option A), and
table 1, with bottlenecks and projections (option B). The stride of a bottleneck is in its 3x3 convolution, as in
torchvision; the number of parameters is the same as with the stride in the first one.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from lowp.recipes.classification import DRAWN_LARGE, DRAWN_SMALL, classifier, load_large, load_small
from lowp.recipes.recipe import Size, built, one_cycle, sgd_with_momentum, step_decay


# -- the network -------------------------------------------------------------------------------------------------------
class ResNet(nn.Module):
    """A residual network, from float images [N, 3, H, W] to scores [N, classes].

    It has a stem, blocks whose last one has `features` output channels, global average pooling and one linear layer.
    """

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], features: int, classes: int) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # He et al. 2015, arXiv 1502.01852: preserves the variance of gradients
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [N, classes]."""
        scores: Tensor = self.classify(self.mean(self.blocks(self.stem(images))).flatten(1))
        return scores


class _Basic(nn.Module):
    """A block of two 3x3 convolutions; the shortcut is subsampled by `stride` and padded with channels of zeros."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(in_channels, out_channels, 3, stride), nn.ReLU(), _convolution(out_channels, out_channels, 3)
        )
        self.stride, self.zero_channels = stride, out_channels - in_channels
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.zero_channels:
            shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.zero_channels))
        output: Tensor = self.activation(self.body(x) + shortcut)
        return output


class _Bottleneck(nn.Module):
    """A block of 1x1, 3x3 and 1x1 convolutions with `width`, `width` and 4 `width` output channels.

    The shortcut is a 1x1 convolution if the shape changes.
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        self.body = nn.Sequential(
            _convolution(in_channels, width, 1),
            nn.ReLU(),
            _convolution(width, width, 3, stride),
            nn.ReLU(),
            _convolution(width, out_channels, 1),
        )
        same = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(in_channels, out_channels, 1, stride)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return output


def cifar_resnet(layers: int, width: int = 16, classes: int = 10) -> ResNet:
    """Return the network for images of 32x32 with 6n + 2 `layers`; the paper's width is 16.

    Raises ValueError for other numbers of layers.
    """
    stage_blocks, remainder = divmod(layers - 2, 6)
    if remainder or stage_blocks < 1:
        raise ValueError(f"{layers} layers: give 6n + 2, such as 20, 56 or 110")
    blocks, in_channels = [], width
    for stage in range(3):
        out_channels = width << stage
        for index in range(stage_blocks):
            blocks.append(_Basic(in_channels, out_channels, stride=2 if stage and not index else 1))
            in_channels = out_channels
    return ResNet(nn.Sequential(_convolution(3, width, 3), nn.ReLU()), blocks, in_channels, classes)


def imagenet_resnet(stage_blocks: Sequence[int], width: int = 64, classes: int = 1000) -> ResNet:
    """Return the network for images of 224x224 with bottlenecks.

    `stage_blocks`: the number of blocks of each stage; (3, 4, 6, 3) has 50 layers, (3, 4, 23, 3) has 101.
    """
    blocks, in_channels = [], width
    for stage, count in enumerate(stage_blocks):
        stage_width = width << stage
        for index in range(count):
            blocks.append(_Bottleneck(in_channels, stage_width, stride=2 if stage and not index else 1))
            in_channels = 4 * stage_width
    stem = nn.Sequential(_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    return ResNet(stem, blocks, in_channels, classes)


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    )


# -- the recipe --------------------------------------------------------------------------------------------------------
FIFTY, HUNDRED_AND_ONE = (3, 4, 6, 3), (3, 4, 23, 3)

_residual = partial(
    classifier,
    make_optimizer=partial(sgd_with_momentum, weight_decay=1e-4),  # as in the paper
    schedule=step_decay,
)
_small = partial(
    _residual, data=DRAWN_SMALL, load=partial(load_small, padding=4), make_model=built(cifar_resnet, "layers", "width")
)
_large = partial(
    _residual, data=DRAWN_LARGE, load=load_large, make_model=built(imagenet_resnet, "blocks", "width", "classes")
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
