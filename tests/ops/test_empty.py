"""Operands without elements: every layer gives the result of fp32, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowp.region import autocast

PRECISIONS = ("fp16", "bf16", "bf16-tpu", "e5m7", "fp8", "mxfp8", "dfp16", "flex16+5", "torch-2.13-cpu")
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "batch norm in evaluation": (lambda: nn.BatchNorm1d(4).eval(), (0, 4)),
    "batch norm of images in evaluation": (lambda: nn.BatchNorm2d(4).eval(), (0, 4, 3, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (0, 4)),
    "instance norm": (lambda: nn.InstanceNorm1d(4), (0, 4, 3)),
    "layer norm": (lambda: nn.LayerNorm(4), (0, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (0, 4, 3)),
    "attention of no examples": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (0, 3, 4)),
    "attention of no time": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (2, 0, 4)),
    "linear of no examples": (lambda: nn.Linear(3, 4), (0, 3)),
    "linear of no inputs": (lambda: nn.Linear(0, 3), (2, 0)),
    "linear of no outputs": (lambda: nn.Linear(3, 0), (2, 3)),
    "linear of nothing": (lambda: nn.Linear(0, 3), (0, 0)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (0, 3, 8, 8)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3), (0, 3, 8, 8)),
    "LSTM": (lambda: nn.LSTM(4, 3, batch_first=True), (0, 5, 4)),
    "GRU cell": (lambda: nn.GRUCell(4, 3), (0, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (0, 3, 4)),
    "softmax": (lambda: nn.Softmax(-1), (3, 0)),
}


def shapes(make: Callable[[], Any], shape: tuple[int, ...], region: Any) -> tuple[Any, ...]:
    """Return the shapes of the result and the input's gradient, and the sums of the parameters' gradients."""
    layer, x = make(), torch.randn(shape, requires_grad=True)
    with region:
        y = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
        while isinstance(y, tuple):
            y = y[0]
        assert isinstance(y, Tensor)
        y.float().sum().backward()
    assert x.grad is not None
    gradients = [None if one.grad is None else (one.grad.shape, one.grad.sum().item()) for one in layer.parameters()]
    return y.shape, x.grad.shape, gradients


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_no_elements_gives_what_it_gives_in_fp32(name: str, precision: str) -> None:
    make, shape = LAYERS[name]
    assert shapes(make, shape, autocast(precision)) == shapes(make, shape, nullcontext())
