"""Trains small networks under `lowp.reproducible`, and prints a hash of each run as JSON: `training.py RUN...`.

A run is NETWORK/PRECISION/THREADS. The hash is of the losses, and of all parameters and buffers at the end.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp


class Block(nn.Module):
    """Causal attention of two heads, and a layer of GELU, each after a norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(self.first(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.second(x)))), 0.1, self.training)


class Words(nn.Module):
    """A language model of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(31, 24), nn.Parameter(torch.randn(11, 24) * 0.1)
        self.block, self.head = Block(24), nn.Linear(24, 31)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.words(x) + self.places))
        return logits.flatten(0, 1)


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    # 210 features: more than a block of the depth
    model = nn.Sequential(nn.Linear(210, 37), nn.Tanh(), nn.Linear(37, 19), nn.SiLU(), nn.Linear(19, 5))
    return model, torch.randn(33, 210), torch.arange(33) % 5


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, stride=2, groups=4),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 5),
    )
    return model, torch.randn(7, 3, 11, 13), torch.arange(7) % 5


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    return Words(), torch.randint(31, (3, 11)), torch.randint(31, (33,))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
}
PRECISIONS = ("bf16", "fp16", "e4m3fn", "fp8", "mxfp8", "mxfp4", "nvfp4", "e5m7", "dfp16", "fp32")


def trained(network: str, name: str) -> str:
    """Return the hash of a run: three steps of AdamW with clipped gradients."""
    torch.manual_seed(7)
    model, x, target = NETWORKS[network]()
    precision = lowp.Precision(name, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = precision.prepare(model, optimizer)
    found = hashlib.sha256()
    for _ in range(3):
        optimizer.zero_grad()
        with precision.autocast():
            loss = F.cross_entropy(model(x), target)
        precision.backward(loss)
        precision.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        precision.step(optimizer)
        found.update(loss.detach().float().numpy().tobytes())
    for one in model.state_dict().values():
        found.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    found = {}
    with warnings.catch_warnings(), lowp.reproducible():
        warnings.simplefilter("error")  # of an operator without a definition
        for one in sys.argv[1:]:
            network, name, threads = one.split("/")
            torch.set_num_threads(int(threads))
            found[one] = trained(network, name)
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "hashes": found}))


if __name__ == "__main__":
    main()
