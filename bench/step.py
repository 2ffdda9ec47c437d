"""What a training step in 16 bits costs on this CPU beside fp32 and torch.autocast, in one interleaved run.

    python bench/step.py [--rounds 9] [--json bench/results/step.json]

Three networks at sizes where the fp32 step takes 50 ms or more: an MLP of width 1024, a ResNet-style CNN and a small
transformer. A round makes one step of every kind, in turn; a ratio is the median over rounds of the ratio within a
round, so that a machine that slows down slows all alike. torch.autocast, which can be a hundred times slower, takes
part in the first rounds only.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut (He et al. 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        changes = inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.project(self.first_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        inner: Tensor = self.narrow(F.gelu(self.wide(self.second_norm(x))))
        return x + inner


def networks() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield name, network and input."""
    mlp = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    yield "mlp", mlp, torch.randn(512, 1024)
    body = [nn.Conv2d(3, 32, 3, 1, 1), Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2)]
    yield (
        "cnn",
        nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
        torch.randn(32, 3, 32, 32),
    )
    blocks = [Block(256, 4), Block(256, 4)]
    yield "transformer", nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256 * 64, 10)), torch.randn(16, 64, 256)


def stepper(network: nn.Module, x: Tensor) -> Callable[[Callable[[], AbstractContextManager[object]]], float]:
    """Return a function that makes one training step within a context and returns its seconds."""
    target = torch.randint(0, 10, (len(x),))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step(context: Callable[[], AbstractContextManager[object]]) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        with context():
            loss = F.cross_entropy(network(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.perf_counter() - start

    return step


def measured(network: nn.Module, x: Tensor, name: str, rounds: int, torch_rounds: int) -> dict[str, float]:
    """Return milliseconds of each kind of step and the ratios of lowp to fp32 and of torch.autocast to lowp."""
    step = stepper(network, x)

    def torch_autocast() -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=DTYPES[name])

    def ours() -> AbstractContextManager[object]:
        return lowp.autocast(name)

    for context in (ours, nullcontext):
        step(context)
        step(context)
    times: list[tuple[float, float, float]] = []
    for index in range(rounds):
        theirs = step(torch_autocast) if index < torch_rounds else float("nan")
        times.append((step(nullcontext), step(ours), theirs))
    with_torch = times[:torch_rounds]
    return {
        "fp32_ms": 1e3 * statistics.median(plain for plain, _, _ in times),
        "lowp_ms": 1e3 * statistics.median(mine for _, mine, _ in times),
        "torch_autocast_ms": 1e3 * statistics.median(theirs for _, _, theirs in with_torch),
        "lowp_over_fp32": statistics.median(mine / plain for plain, mine, _ in times),
        "torch_over_lowp": statistics.median(theirs / mine for _, mine, theirs in with_torch),
    }


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--torch-rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    results: dict[str, dict[str, dict[str, float]]] = {}
    heads = ("fp32 ms", "lowp ms", "ratio", "torch.autocast ms", "faster")
    print(f"{'network':12} {'format':6} " + " ".join(f"{head:>8}" for head in heads))
    for name, network, x in networks():
        for format in DTYPES:
            one = measured(network, x, format, given.rounds, given.torch_rounds)
            results.setdefault(name, {})[format] = {key: round(value, 3) for key, value in one.items()}
            print(
                f"{name:12} {format:6} {one['fp32_ms']:8.1f} {one['lowp_ms']:8.1f} {one['lowp_over_fp32']:8.2f} "
                f"{one['torch_autocast_ms']:17.1f} {one['torch_over_lowp']:7.1f}x"
            )
    if given.json is not None:
        machine = {
            "machine": f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}, {given.threads} threads",
            "torch": torch.__version__,
        }
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**machine, "rounds": given.rounds, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
