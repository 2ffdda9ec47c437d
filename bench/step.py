"""Measure a training step in every format on this CPU beside fp32 and torch.autocast, in one interleaved run.

    python bench/step.py [--avx2] [--formats bf16,fp16] [--rounds 7] [--json bench/results/step.json]

Three networks at sizes where the fp32 step takes 50 ms or more: an MLP of width 1024, a ResNet-style CNN and a small
transformer. A round takes one step of every kind in turn; a ratio is the median over rounds of the ratio within a
round, so that a machine that slows down affects all equally. No kind follows itself, whose memory it would find in the
caches. On processors that do not multiply its format, torch.autocast can be a hundred times slower and takes part only
in the first rounds. `products` is the implementation of lowp's products, and the lines below the table explain it.
`converted_mb`: MB read and written by the conversions between dtypes in a step. `--avx2` limits all libraries to AVX2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp.benchmarking.contenders import products_under
from lowp.kernels.choose.choices import choices
from lowp.kernels.choose.hardware import multiplies
from lowp.recipes.results import header, write

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("bf16", "fp16", "e5m7", "fp8", "dfp16", "flex16+5", "mxfp8", "mxfp4", "nvfp4", "int8")
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "LOWP_CPU_ISA": "avx2",
}


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
    """Attention and an MLP, each after a layer norm."""

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
    """Yield names, networks and inputs."""
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
    """Return a function that takes one training step within a context and returns its time in seconds.

    With one thread its processor time is measured, so that preemption does not count.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    target = torch.randint(0, 10, (len(x),))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step(context: Callable[[], AbstractContextManager[object]]) -> float:
        start = clock()
        optimizer.zero_grad()
        with context():
            loss = F.cross_entropy(network(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return clock() - start

    return step


class Conversions(TorchDispatchMode):
    """Counts the bytes that conversions between floating-point dtypes read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if result.dtype is not source.dtype and result.is_floating_point():
                self.bytes += result.numel() * (result.element_size() + source.element_size())
        return result


def measured(network: nn.Module, x: Tensor, name: str, rounds: int, torch_rounds: int) -> dict[str, float | str | None]:
    """Return milliseconds of each kind of step, lowp's ratios to fp32 and to torch.autocast, and its products.

    None for torch.autocast if it does not support the format.
    """
    step, dtype = stepper(network, x), DTYPES.get(name)
    torch_rounds = 0 if dtype is None else rounds if multiplies("cpu", dtype) else min(torch_rounds, rounds)
    precision = lowp.Precision(name)

    def torch_autocast() -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=dtype)

    def ours() -> AbstractContextManager[object]:
        return precision.autocast()

    for context in (ours, nullcontext, *([torch_autocast] if torch_rounds == rounds else [])):
        step(context)
        step(context)
    times: list[tuple[float, float, float]] = []
    for index in range(rounds):
        kinds: list[Callable[[], AbstractContextManager[object]]] = [nullcontext, ours]
        kinds += [torch_autocast] if index < torch_rounds else []
        # of three each begins a round in turn, so that none follows itself: the caches are as the last step left them
        first = index % 3 if len(kinds) == 3 else 0
        taken = {kind: step(kind) for kind in (*kinds[first:], *kinds[:first])}
        times.append((taken[nullcontext], taken[ours], taken.get(torch_autocast, float("nan"))))
    with_torch = times[:torch_rounds]
    with Conversions() as conversions:
        step(ours)
    return {
        "fp32_ms": 1e3 * statistics.median(plain for plain, _, _ in times),
        "lowp_ms": 1e3 * statistics.median(mine for _, mine, _ in times),
        "torch_autocast_ms": 1e3 * statistics.median(theirs for _, _, theirs in with_torch) if with_torch else None,
        "lowp_over_fp32": statistics.median(mine / plain for plain, mine, _ in times),
        "torch_over_fp32": statistics.median(theirs / plain for plain, _, theirs in with_torch) if with_torch else None,
        "lowp_over_torch": statistics.median(mine / theirs for _, mine, theirs in with_torch) if with_torch else None,
        "converted_mb": conversions.bytes / 1e6,
        "products": products_under(name, x.device),
    }


def rounded(value: float | str | None) -> float | str | None:
    """Return a number rounded to three places."""
    return round(value, 3) if isinstance(value, float) else value


def line(name: str, format: str, one: dict[str, float | str | None]) -> str:
    """Return a line of the table."""
    keys = ("fp32_ms", "lowp_ms", "torch_autocast_ms", "lowp_over_fp32", "torch_over_fp32", "lowp_over_torch")
    cells = ["-" if (value := one[key]) is None else f"{value:.{1 if '_ms' in key else 2}f}" for key in keys]
    return f"{name:12} {format:9}" + "".join(f"{cell:>12}" for cell in cells) + f"  {one['products']}"


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch-rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.avx2 and any(os.environ.get(name) != value for name, value in AVX2.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **AVX2})  # the libraries read it once
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    results: dict[str, dict[str, dict[str, float | str | None]]] = {}
    heads = ("fp32 ms", "lowp ms", "torch ms", "lowp/fp32", "torch/fp32", "lowp/torch")
    print(f"{'network':12} {'format':9}" + "".join(f"{head:>12}" for head in heads) + "  products")
    for name, network, x in networks():
        for format in given.formats.split(","):
            one = measured(network, x, format, given.rounds, given.torch_rounds)
            results.setdefault(name, {})[format] = {key: rounded(value) for key, value in one.items()}
            print(line(name, format, one), flush=True)
    told = choices()
    why = {subject: told[subject] for subject in ("bf16 products", "fp16 products", "int16 products")}
    print("\n".join(f"{subject}: {words}" for subject, words in why.items()))
    if given.json is not None:
        measured_by = {"threads": given.threads, "rounds": given.rounds, "held_to_avx2": given.avx2}
        write(given.json, {**header("bench-step", "bench/step.py"), **measured_by, "why": why, "results": results})


if __name__ == "__main__":
    main()
