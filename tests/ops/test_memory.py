"""Memory saved by a whole network for backward: half of fp32's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp import kernels


class Block(nn.Module):
    """A network with every class of op that saves activations: norms, products, attention, softmax, an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.GroupNorm(4, width), nn.BatchNorm1d(width)])
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x) if isinstance(norm, nn.LayerNorm) else norm(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = torch.relu(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return torch.softmax(x, -1) @ x.transpose(1, 2)


class Attention(nn.Module):
    """A block of a transformer with unfused attention: LayerNorm, softmax, GELU, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
        x = x + F.dropout(self.out((weights @ v).transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norms[1](x)))), 0.1)


def mlp() -> nn.Module:
    return nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(128, 128), nn.ReLU())], nn.Linear(128, 10))


def pooled() -> nn.Module:
    def stage(inputs: int, outputs: int, in_place: bool) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(in_place), nn.MaxPool2d(2)]

    return nn.Sequential(*stage(3, 16, True), *stage(16, 32, False), nn.Flatten(), nn.Linear(32 * 8 * 8, 10))


# network, shape of its input, and the largest shares of fp32's activations in flex16+5 and in dfp16
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, float]] = {
    "mlp": (mlp, (1024, 128), 0.55, 0.55),
    "convolutions": (pooled, (16, 3, 32, 32), 0.55, 0.5),
    "transformer": (lambda: nn.Sequential(Attention(64), Attention(64)), (8, 64, 64), 0.6, 0.8),
}


def activations(network: nn.Module, x: Tensor, region: AbstractContextManager[object]) -> int:
    """Return the bytes that a forward pass saves besides the parameters: activations, its input, cast weights."""
    held = {id(parameter) for parameter in network.parameters()}
    storages: dict[int, int] = {}

    def pack(one: Tensor) -> Tensor:
        if id(one) not in held:
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one), region:
        result = network(x)
    assert result.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_int16_training_keeps_little_more_than_half_of_fp32s_activations(name: str) -> None:
    torch.manual_seed(0)
    make, shape, share, operands = NETWORKS[name]
    network, x = make(), torch.randn(shape)
    plain = activations(network, x, nullcontext())
    assert activations(network, x, lowp.autocast("flex16+5")) <= share * plain
    assert activations(network, x, lowp.autocast("dfp16")) <= operands * plain


@pytest.mark.parametrize(
    ("precision", "share"), [("e5m7", 1.0), ("fp8", 1.1), ("mxfp8", 1.1), ("int8", 1.1), ("mxfp4", 0.7)]
)
def test_convolutions_keep_no_rounded_values_beside_an_input_that_another_op_keeps(
    precision: str, share: float
) -> None:
    torch.manual_seed(0)
    parts = [part for _ in range(3) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    network, x = nn.Sequential(*parts), torch.randn(16, 8, 16, 16)
    plain = activations(network, x, nullcontext())
    assert activations(network, x, lowp.Precision(precision).autocast()) <= share * plain


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_linear_layers_under_shared_scales_keep_their_inputs_alone(precision: str) -> None:
    torch.manual_seed(0)
    network, x = mlp(), torch.randn(1024, 128)
    plain = activations(network, x, nullcontext())
    assert activations(network, x, lowp.Precision(precision).autocast()) <= 1.1 * plain


# Emulated, a softmax that is written out keeps its input beside its result, which is rounded too much for its gradient.
@pytest.mark.parametrize(
    ("name", "use"),
    [
        (name, use)
        for use in ("native", "bitwise")
        for name in (*NETWORKS, "block")
        if (name, use) != ("transformer", "bitwise")
    ],
)
def test_bf16_keeps_no_byte_more_for_backward_than_torch_autocast(name: str, use: str) -> None:
    torch.manual_seed(0)
    make, shape, *_ = NETWORKS.get(name, (lambda: Block(64), (8, 128, 64)))
    network, x = make(), torch.randn(shape)
    theirs = activations(network, x, torch.autocast("cpu", dtype=torch.bfloat16))
    with kernels.use(use):
        assert activations(network, x, lowp.autocast("bf16")) <= theirs


def kept(precision: str | None) -> dict[torch.dtype, int]:
    """Return the bytes of activations that a forward pass saves, by dtype, without parameters and small tensors."""
    torch.manual_seed(0)
    block, x = Block(64), torch.randn(8, 128, 64, requires_grad=True)
    storages: dict[int, tuple[torch.dtype, int]] = {}

    def pack(one: Tensor) -> Tensor:
        if one.numel() >= x.numel():
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = (one.dtype, storage.nbytes())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        if precision is None:
            result = block(x)
        else:
            with lowp.autocast(precision):
                result = block(x)
    assert result.requires_grad
    total: dict[torch.dtype, int] = {}
    for dtype, size in storages.values():
        total[dtype] = total.get(dtype, 0) + size
    return total


@pytest.mark.parametrize("precision", ["fp16", "bf16", "bf16-trunc"])
def test_activations_take_half_the_memory_of_fp32(precision: str) -> None:
    found, plain = kept(precision), kept(None)
    assert torch.float32 not in found
    assert sum(found.values()) <= 0.55 * plain[torch.float32]
