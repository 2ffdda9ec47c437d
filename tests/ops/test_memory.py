"""What a whole network keeps for backward: half of what fp32 keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp


class Block(nn.Module):
    """Every class of op that keeps activations: norms, products, attention, softmax, an activation."""

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


def kept(precision: str | None) -> dict[torch.dtype, int]:
    """Return the bytes of activations that a forward keeps, by dtype; parameters and what is small are left out."""
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
