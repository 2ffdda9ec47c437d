"""Residual networks, for images of 32x32 (20 to 110 layers) and of 224x224 (50 and 101 layers).

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2016, arXiv 1512.03385: section 4.2 with shortcuts
without parameters (option A), and table 1 with bottlenecks and projections (option B). The stride of a bottleneck
is in its 3x3 convolution, as in most implementations since; the number of parameters is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["ResNet", "cifar_resnet", "imagenet_resnet"]


class ResNet(nn.Module):
    """A stem, blocks, global average pooling and one linear layer: float images [N, 3, H, W] to scores."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], features: int, classes: int) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # He et al. 2015, arXiv 1502.01852: preserves the size of gradients
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [N, classes]."""
        scores: Tensor = self.classify(self.mean(self.blocks(self.stem(images))).flatten(1))
        return scores


class _Basic(nn.Module):
    """Two 3x3 convolutions; if the map shrinks, the shortcut takes every second place and pads with zero channels."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(before, after, 3, stride), nn.ReLU(), _convolution(after, after, 3))
        self.stride, self.empty = stride, after - before
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.empty:
            shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.empty))
        output: Tensor = self.activation(self.body(x) + shortcut)
        return output


class _Bottleneck(nn.Module):
    """1x1 to a quarter of the channels, 3x3, 1x1 back; the shortcut is projected if the shape changes."""

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        after = 4 * inner
        self.body = nn.Sequential(
            _convolution(before, inner, 1),
            nn.ReLU(),
            _convolution(inner, inner, 3, stride),
            nn.ReLU(),
            _convolution(inner, after, 1),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(before, after, 1, stride)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return output


def cifar_resnet(layers: int, width: int = 16, classes: int = 10) -> ResNet:
    """Return the network for 32x32 with 6n + 2 `layers`; the paper's width is 16. Raise ValueError for other depths."""
    each, rest = divmod(layers - 2, 6)
    if rest or each < 1:
        raise ValueError(f"{layers} layers: give 6n + 2, such as 20, 56 or 110")
    blocks, before = [], width
    for stage in range(3):
        after = width << stage
        for place in range(each):
            blocks.append(_Basic(before, after, stride=2 if stage and not place else 1))
            before = after
    return ResNet(nn.Sequential(_convolution(3, width, 3), nn.ReLU()), blocks, before, classes)


def imagenet_resnet(blocks_of: Sequence[int], width: int = 64, classes: int = 1000) -> ResNet:
    """Return the network for 224x224 with bottlenecks: (3, 4, 6, 3) blocks are 50 layers, (3, 4, 23, 3) are 101."""
    blocks, before = [], width
    for stage, number in enumerate(blocks_of):
        inner = width << stage
        for place in range(number):
            blocks.append(_Bottleneck(before, inner, stride=2 if stage and not place else 1))
            before = 4 * inner
    stem = nn.Sequential(_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    return ResNet(stem, blocks, before, classes)


def _convolution(before: int, after: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(after)
    )
