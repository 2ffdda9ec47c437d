"""What a region costs an op, whatever its size: `python bench/call.py`.

The tensors are so small (a batch of one, 8 wide) that the time of a call is its fixed cost: Python, the dispatcher and
autograd. Candidates take turns round by round; told is the best round, in microseconds of this thread's processor time.
The result goes to bench/results/call.json with the machine in words.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lowp
from lowp.recipes.results import header

PRECISIONS = ("fp16", "bf16", "bf16-tpu", "fp8", "dfp16")
CALLS = 500


def operations() -> dict[str, Callable[[], object]]:
    """Return what is timed in each region: a product without and with its backward, and ops that no rule casts."""
    x, linear = torch.randn(1, 8), nn.Linear(8, 8)

    def no_grad() -> object:
        with torch.no_grad():
            return linear(x)

    def backward() -> object:
        linear.weight.grad = linear.bias.grad = None
        return linear(x).sum().backward()

    return {"linear": no_grad, "linear and its backward": backward, "relu": lambda: F.relu(x), "+": lambda: x + x}


def entering() -> dict[str, Callable[[], object]]:
    """Return what is timed once: a region that is entered and left again, and one that is made."""
    region = lowp.autocast("fp16")

    def enter() -> None:
        with region:
            pass

    return {"enter and leave": enter, "make a region": lambda: lowp.autocast("fp16")}


def seconds(operation: Callable[[], object]) -> float:
    """Return the seconds of one call, the mean over many."""
    start = time.thread_time()
    for _ in range(CALLS):
        operation()
    return (time.thread_time() - start) / CALLS


def measured(rounds: int) -> dict[str, dict[str, float]]:
    """Return microseconds by region and operation; torch.autocast is in torch's own bf16."""
    regions: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "none": nullcontext,
        "torch.autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        **{name: lambda name=name: lowp.autocast(name) for name in PRECISIONS},  # type: ignore[misc]
    }
    ops, once = operations(), entering()
    best = {name: dict.fromkeys(ops, math.inf) for name in regions} | {"fp16 region": dict.fromkeys(once, math.inf)}
    for _ in range(rounds):
        for region, make in regions.items():
            with make():
                for name, operation in ops.items():
                    best[region][name] = min(best[region][name], seconds(operation))
        for name, operation in once.items():
            best["fp16 region"][name] = min(best["fp16 region"][name], seconds(operation))
    return {region: {name: round(1e6 * value, 1) for name, value in row.items()} for region, row in best.items()}


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "call.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = measured(given.rounds)
    for region, row in rows.items():
        print(f"{region:<15} " + ", ".join(f"{name} {value:.1f} us" for name, value in row.items()))
    document = {**header("bench-call", "bench/call.py"), "rounds": given.rounds, "microseconds": rows}
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
