"""Measure the memory of a training step in fp32, torch.autocast and lowp: saved for backward, peak, and process.

    python bench/memory.py [--json bench/results/memory.json] [--network mlp --way "lowp bf16"]

The networks are those of `bench/step.py`. Each is trained in each way in a new process. `saved`: the bytes of the
tensors that autograd saves in the forward pass, without parameters. `peak`: the peak of torch's allocator in a third
step, including the model and its gradients. `process`: the growth of the process's resident memory from before the
model was created to its peak, including memory that lowp keeps for its next use. `emulated`: as on a processor without
bf16 products (LOWP_USE=cpu).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from step import networks, stepper
from torch import Tensor, nn

import lowp
from lowp.benchmarking import memory
from lowp.benchmarking.largest_batch import growth
from lowp.recipes import results

# way -> the precision of the step, and the argument of lowp.kernels.use
WAYS: dict[str, tuple[str, str | None]] = {
    "fp32": ("fp32", None),
    "torch.autocast bf16": ("torch bf16", None),
    "lowp bf16": ("bf16", None),
    "lowp bf16, emulated": ("bf16", "cpu"),
    "lowp fp16": ("fp16", None),
}
_DTYPES = {"torch bf16": torch.bfloat16}
Context = Callable[[], AbstractContextManager[object]]


def context_of(way: str) -> Context:
    """Return a function that returns the context of a way."""
    name, _ = WAYS[way]
    if name == "fp32":
        return nullcontext
    if name in _DTYPES:
        return lambda: torch.autocast("cpu", dtype=_DTYPES[name])
    precision = lowp.Precision(name)
    return lambda: precision.autocast()


def made(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network and its input, without creating the others."""
    torch.manual_seed(0)
    return next((network, x) for found, network, x in networks() if found == name)


def saved_bytes(network: nn.Module, x: Tensor, context: Context) -> int:
    """Return the bytes that a forward pass saves for backward, without parameters, each storage once."""
    held = {one.untyped_storage().data_ptr() for one in network.parameters()}
    found: dict[int, int] = {}

    def pack(one: Tensor) -> Tensor:
        storage = one.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one), context():
        result = network(x)
    del result
    return sum(found.values())


def peak_of(begin: Callable[[], Callable[[], object]]) -> int:
    """Return the peak of CPU memory in bytes in a third step; `begin` creates the model and returns the step."""

    def three_steps() -> None:
        step = begin()
        step()
        step()
        memory._mark(memory._FORWARD)
        step()
        memory._mark(memory._END)

    events = memory._profiled(three_steps)
    names = (memory._FORWARD, memory._END)
    first, last = (next(event["ts"] for event in events if event.get("name") == name) for name in names)
    peak, _ = memory._highest(list(memory._allocations(events, memory._DEVICE_TYPES["cpu"])), first, last)
    return peak


def measured(name: str, way: str) -> dict[str, int | None]:
    """Return the bytes of a network in one way; must be called in a new process."""
    context = context_of(way)
    with growth() as grown:
        network, x = made(name)
        step = stepper(network, x)
        for _ in range(3):
            step(context)
        process = grown()
    del network, step

    def begin() -> Callable[[], object]:
        again = stepper(*made(name))
        return lambda: again(context)

    return {"saved": saved_bytes(*made(name), context), "peak": peak_of(begin), "process": process}


def main() -> None:
    """Measure every network in every way, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--network", help="measure only this network, in the process of this command, and print JSON")
    parser.add_argument("--way", choices=WAYS)
    given = parser.parse_args()
    if given.network:
        print(json.dumps(measured(given.network, given.way)))
        return
    document: dict[str, Any] = {**results.header("bench-memory"), "threads": torch.get_num_threads(), "results": {}}
    print(f"{'network':12} {'way':20}" + "".join(f"{head:>12}" for head in ("saved MiB", "peak MiB", "process MiB")))
    for name in ("mlp", "cnn", "transformer"):
        for way, (_, use) in WAYS.items():
            environment = {**os.environ, **({"LOWP_USE": use} if use else {})}
            command = [sys.executable, __file__, "--network", name, "--way", way]
            answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            row = json.loads(answer.splitlines()[-1])
            document["results"].setdefault(name, {})[way] = row
            cells = ["-" if value is None else f"{value / 2**20:.1f}" for value in row.values()]
            print(f"{name:12} {way:20}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    if given.json is not None:
        results.write(given.json, document)


if __name__ == "__main__":
    main()
