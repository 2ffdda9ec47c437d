"""Measure the fixed cost of calls and of small steps: `python bench/call.py`.

Three tables of this thread's processor time. Candidates take turns in each round, and the best round is reported.

* A call in a region: the tensors are so small (a batch of one, width 8) that its time is its fixed cost: Python, the
  dispatcher and autograd. Three rows show torch's own part of it: torch.autocast, an empty function mode, and one that
  runs linear layers by an empty autograd.Function.
* The additional time of an optimizer's step under a loss scale and a precision, for a model of 4 parameters.
* A step of the recipe `digits`: 64 to 128 to 10, batch 32.

The results are written to bench/results/call.json with a description of the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lowp
from lowp.recipes.results import header

PRECISIONS = ("fp16", "bf16", "bf16-tpu", "e5m7", "fp8", "mxfp8", "mxfp4", "nvfp4", "int8", "dfp16")
TRAINED = (*PRECISIONS, "flex16+5")  # only steps are timed: each op has a site there, once per step
Table = dict[str, dict[str, float]]


class EmptyMode(TorchFunctionMode):
    """A function mode that does nothing: the time torch takes to call a mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PlainLinear(torch.autograd.Function):
    """A linear layer of two matrices in fp32: the time torch takes to run a Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return gradient @ weight if ctx.needs_input_grad[0] else None, gradient.t() @ x, gradient.sum(0)


class EmptyFunction(TorchFunctionMode):
    """A function mode that runs linear layers by an autograd.Function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (PlainLinear.apply if func is F.linear else func)(*args, **(kwargs or {}))


def operations() -> dict[str, Callable[[], object]]:
    """Return the calls timed in each region: a product without and with its backward, and ops that no rule casts."""
    x, linear = torch.randn(1, 8), nn.Linear(8, 8)

    def no_grad() -> object:
        with torch.no_grad():
            return linear(x)

    def backward() -> object:
        linear.weight.grad = linear.bias.grad = None
        return linear(x).sum().backward()

    return {"linear": no_grad, "linear and its backward": backward, "relu": lambda: F.relu(x), "+": lambda: x + x}


def entering() -> dict[str, Callable[[], object]]:
    """Return the calls timed once: entering and leaving a region, and creating one."""
    region = lowp.autocast("fp16")

    def enter() -> None:
        with region:
            pass

    return {"enter and leave": enter, "make a region": lambda: lowp.autocast("fp16")}


def seconds(operation: Callable[[], object], count: int) -> float:
    """Return the time of one call in seconds, the mean over this many."""
    start = time.thread_time()
    for _ in range(count):
        operation()
    return (time.thread_time() - start) / count


def calls(rounds: int, count: int) -> Table:
    """Return microseconds by region and operation; torch.autocast is in bf16."""
    regions: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "none": nullcontext,
        "torch.autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "empty mode": EmptyMode,
        "empty Function": EmptyFunction,
        **{name: lambda name=name: lowp.autocast(name) for name in PRECISIONS},  # type: ignore[misc]
    }
    ops, once = operations(), entering()
    best = {name: dict.fromkeys(ops, math.inf) for name in regions} | {"fp16 region": dict.fromkeys(once, math.inf)}
    for _ in range(rounds):
        for region, make in regions.items():
            with make():
                for name, operation in ops.items():
                    best[region][name] = min(best[region][name], seconds(operation, count))
        for name, operation in once.items():
            best["fp16 region"][name] = min(best["fp16 region"][name], seconds(operation, count))
    return in_microseconds(best)


# -- steps --------------------------------------------------------------------------------------------------------


class Small:
    """A model of 4 parameters, its optimizer, and gradients that are computed before the clock starts."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(1, 8)

    def loss(self) -> Tensor:
        self.optimizer.zero_grad()
        return self.model(self.x).sum()


def plain() -> Callable[[], float]:
    """Return a function that times only a step of the optimizer."""
    small = Small()

    def run() -> float:
        small.loss().backward()
        return timed(small.optimizer.step)

    return run


def scaled(kind: Callable[[], torch.amp.GradScaler]) -> Callable[[], float]:
    """Return a function that times `step` and `update` of a scaler."""
    small, scaler = Small(), kind()

    def step() -> None:
        scaler.step(small.optimizer)
        scaler.update()

    def run() -> float:
        scaler.scale(small.loss()).backward()  # type: ignore[no-untyped-call]
        return timed(step)

    return run


def precise(name: str) -> Callable[[], float]:
    """Return a function that times `Precision.step`."""
    small, precision = Small(), lowp.Precision(name)
    small.model, small.optimizer = precision.prepare(small.model, small.optimizer)

    def run() -> float:
        with precision.autocast():
            loss = small.loss()
        precision.backward(loss)
        return timed(lambda: precision.step(small.optimizer))

    return run


def digits(name: str) -> Callable[[], float]:
    """Return a function that times a whole step of the recipe `digits`: in fp32, torch.autocast, or a precision."""
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = torch.rand(32, 64), torch.randint(10, (32,))
    precision = None if name in ("fp32", "torch.autocast") else lowp.Precision(name)
    if precision is not None:
        model, optimizer = precision.prepare(model, optimizer)

    def torchs() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if name == "torch.autocast" else nullcontext():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def lowps() -> None:
        assert precision is not None
        with precision.autocast():
            loss = F.cross_entropy(model(x), y)
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()

    return lambda: timed(torchs if precision is None else lowps)


def timed(function: Callable[[], object]) -> float:
    """Return the time of a call in seconds."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


def steps(rounds: int, count: int) -> tuple[Table, Table]:
    """Return microseconds of the optimizer's steps and of the steps of digits; the median within a round."""
    optimizers = {"plain": plain(), "torch.amp.GradScaler": scaled(lambda: torch.amp.GradScaler("cpu"))}
    optimizers |= {"lowp.GradScaler": scaled(lambda: lowp.GradScaler("cpu"))}
    optimizers |= {f"Precision.step, {name}": precise(name) for name in ("fp16", "bf16", "fp8", "dfp16", "flex16+5")}
    networks = {name: digits(name) for name in ("fp32", "torch.autocast", *TRAINED)}
    best = [{name: {"step": math.inf} for name in table} for table in (optimizers, networks)]
    for _ in range(rounds):
        for table, found in zip((optimizers, networks), best, strict=True):
            for name, run in table.items():
                taken = sorted(run() for _ in range(count))
                found[name]["step"] = min(found[name]["step"], taken[count // 2])
    first, second = map(in_microseconds, best)
    return first, second


def in_microseconds(table: Table) -> Table:
    return {row: {name: round(1e6 * value, 1) for name, value in cells.items()} for row, cells in table.items()}


def main() -> None:
    """Measure, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=300, help="of an operation in a round, and five times its steps")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = calls(given.rounds, given.calls)
    base = rows["torch.autocast"]
    for region, row in rows.items():
        told = (
            f"{name} {value:.1f} us" + (f" ({value / base[name]:.2f}x)" if name in base else "")
            for name, value in row.items()
        )
        print(f"{region:<15} " + ", ".join(told))
    optimizers, networks = steps(given.rounds, given.calls // 5)
    for name, row in optimizers.items():
        print(f"{name:<22} {row['step']:.1f} us, {row['step'] - optimizers['plain']['step']:+.1f} of the plain step")
    for name, row in networks.items():
        print(f"digits, {name:<14} {row['step']:.1f} us, {row['step'] / networks['fp32']['step']:.2f} of fp32")
    document = {**header("bench-call", "bench/call.py"), "rounds": given.rounds, "microseconds": rows}
    document |= {"optimizer_steps": optimizers, "digits_steps": networks}
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
