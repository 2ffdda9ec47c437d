"""Convolutions of a served model, in one and two dimensions, in groups or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp.inference.modules import Int8, Served, Weight
from lowp.kernels.packed import byte_rows, few_rows
from lowp.kernels.packed.byte_products import PANEL
from lowp.kernels.packed.byte_rows import Bytes
from lowp.kernels.products import contract_packed

Pair = tuple[int, int]
Convolution = nn.Conv1d | nn.Conv2d


class Geometry(NamedTuple):
    """Where a convolution looks, in two dimensions; that of one dimension has a height of 1.

    `padding` is of zeros, on both sides alike; what is neither lies in `around` (left, right, top, bottom), whose
    `mode` is torch's.
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    around: tuple[int, ...]
    mode: str

    @staticmethod
    def of(module: Convolution) -> Geometry:
        """That of a layer of torch's."""
        around = tuple(module._reversed_padding_repeated_twice)
        padding = around[2::-2] if len(around) == 4 else around[:1]
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        if mode == "constant" and around[::2] == around[1::2]:
            around = ()
        else:
            padding = (0,) * len(padding)
        kernel, stride, dilation = (_pair(one, 1) for one in (module.kernel_size, module.stride, module.dilation))
        return Geometry(kernel, stride, _pair(padding, 0), dilation, module.groups, around, mode)

    @property
    def windows(self) -> dict[str, Pair]:
        """What `byte_rows.windows` takes."""
        return {"kernel": self.kernel, "stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    def image(self, x: Tensor) -> Tensor:
        """The input in fp32 [batch, channels, height, width], with what lies around it that is not plain zeros."""
        x = x.float()
        x = F.pad(x, self.around, self.mode) if self.around else x
        return x[:, :, None] if x.ndim == 3 else x

    def rows_of(self, x: Tensor) -> Tensor:
        """What the columns of `matrix_of` are multiplied with, of an input with a batch: a row for each result."""
        image = self.image(x)
        found = F.unfold(image, self.kernel, self.dilation, self.padding, self.stride)
        channels = found.reshape(image.shape[0], image.shape[1], -1, found.shape[2])
        return channels.permute(0, 3, 2, 1).flatten(2).flatten(0, 1)

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return torch's own convolution of x [batch, channels, height, width]."""
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def _pair(size: tuple[int, ...], lone: int) -> Pair:
    return (size[0], size[1]) if len(size) == 2 else (lone, size[0])


def matrix_of(module: Convolution) -> Tensor:
    """The weight as a matrix: a row an output channel, in the order kernel row, column, channel of the group."""
    weight = module.weight.detach()
    return (weight if weight.ndim == 4 else weight[:, :, None]).permute(0, 2, 3, 1).flatten(1)


class ServedConvolution(Served):
    """`nn.Conv1d` or `nn.Conv2d` with a packed weight, whose columns are as `matrix_of` has them."""

    dimensions: int
    geometry: Geometry

    def __init__(self, weight: Weight, module: Convolution) -> None:
        super().__init__(weight, module.bias, dimensions=len(module.kernel_size), geometry=Geometry.of(module))

    def dense(self, matrix: Tensor | None = None) -> Tensor:
        """The weight in fp32, or other rows of such a matrix, in torch's order: [out, channels of the group, ...]."""
        matrix = self.weight.values() if matrix is None else matrix
        return matrix.reshape(len(matrix), *self.geometry.kernel, -1).permute(0, 3, 1, 2)

    def computed(self, x: Tensor) -> Tensor:
        """Return the convolution of x [batch, channels, (height,) width], or of one without a batch, in x's dtype."""
        return self._on_image(x, self._convolved)

    def empty(self, x: Tensor) -> Tensor:
        size = (self.weight.n, self.weight.k // math.prod(self.geometry.kernel), *self.geometry.kernel)
        return self._on_image(x, lambda image: self.geometry.convolved(image, image.new_empty(size), None))

    def _on_image(self, x: Tensor, convolved: Callable[[Tensor], Tensor]) -> Tensor:
        single = x.ndim == self.dimensions + 1
        result = convolved(self.geometry.image(x[None] if single else x))
        result = (result[:, :, 0] if self.dimensions == 1 else result).to(x.dtype)
        return result[0] if single else result

    def _convolved(self, image: Tensor) -> Tensor:
        weight = self.weight
        if not isinstance(weight, Int8):
            return self._in_panels(image)
        if self.geometry.groups == 1 or weight.n // self.geometry.groups % PANEL == 0:
            return self._in_bytes(image, weight)
        return self._in_whole_numbers(image, weight)

    def _in_panels(self, image: Tensor) -> Tensor:
        """By torch's convolution of the values, of which those of some output channels at a time are in memory."""
        weight, bias = self.weight, self._bias()
        step = max(64, few_rows.PANEL // max(weight.k, 1) // 64 * 64)
        if weight.n <= step or self.geometry.groups > 1:
            return self.geometry.convolved(image, self.dense(), bias)
        results = []
        for first in range(0, weight.n, step):
            values = weight.values_of(first, min(step, weight.n - first))
            some = None if bias is None else bias[first : first + len(values)]
            results.append(self.geometry.convolved(image, self.dense(values), some))
        return torch.cat(results, 1)

    def _in_bytes(self, image: Tensor, weight: Int8) -> Tensor:
        """By lowp's products, group by group, with channels last."""
        shape = (image.shape[0], image.shape[2], image.shape[3], image.shape[1])
        lines = image.permute(0, 2, 3, 1).reshape(1, -1)
        flat = weight.bytes(lines)
        flat = flat._replace(payload=flat.payload[0, : lines.numel()])
        groups, bias = self.geometry.groups, self._bias()
        channels, count = shape[3] // groups, weight.n // groups
        results = []
        for group in range(groups):
            taken = (group * channels, channels)
            rows, high, wide = byte_rows.windows(flat, shape, self.geometry.windows, taken)
            panels = weight.panels() if groups == 1 else weight.part(group * count, count)
            some = None if bias is None else bias[group * count :][:count]
            results.append(contract_packed((rows, panels), some))
        result = results[0] if groups == 1 else torch.cat(results, 1)
        return result.reshape(shape[0], high, wide, weight.n).permute(0, 3, 1, 2)

    def _in_whole_numbers(self, image: Tensor, weight: Int8) -> Tensor:
        """By torch's convolution of the bytes as floating-point numbers, whose sums are exact: small groups."""
        found: Bytes = weight.bytes(image.reshape(1, -1))
        numbers = (found.payload[0, : image.numel()].float() - found.zero).reshape(image.shape)
        dtype = torch.float32 if weight.k * found.highest * 128 < 1 << 24 else torch.float64
        sums = self.geometry.convolved(numbers.to(dtype), self.dense(weight.codes().to(dtype)), None)
        scales = torch.tensor(found.scale, dtype=torch.float32, device="cpu") * weight.get_buffer("scales")[: weight.n]
        result, bias = sums.float() * scales[:, None, None], self._bias()
        return result if bias is None else result + bias[:, None, None]
