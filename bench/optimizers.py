"""Measure optimizers: bytes a parameter, as they report them and by the process; time of a step; loss of short runs.

    python bench/optimizers.py [--peers FOLDER] [--threads 1] [--json FILE]
    python bench/optimizers.py --loss 200 [--recipe gpt] [--json FILE]

`reported`: parameters, masters, moments and gradients of 32 matrices of 2**22. `process`: the peak growth of the
resident memory of a process of its own with it, two steps in. `step`: processor time of the fastest of 15 steps of
2**22 numbers, all contenders in turn. bitsandbytes and torchao are timed if FOLDER has them (`pip install --no-deps
--target FOLDER bitsandbytes torchao`). `--loss`: the mean loss of the last 30 steps from three seeds, in bf16, on small
networks of the recipes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowp
from lowp.benchmarking.largest_batch import growth
from lowp.optim import AdamW, Lion
from lowp.recipes import get, results

# contender -> the optimizer of parameters, and whether gradients are released in backward
Make = Callable[[Any], torch.optim.Optimizer]
WAYS: dict[str, tuple[Make, bool]] = {
    "torch.optim.AdamW": (torch.optim.AdamW, False),
    "AdamW": (AdamW, False),
    'AdamW(moments="bf16")': (lambda given: AdamW(given, moments="bf16"), False),
    'AdamW(moments="int8")': (lambda given: AdamW(given, moments="int8"), False),
    'AdamW(moments="fp8")': (lambda given: AdamW(given, moments="fp8"), False),
    'AdamW(moments="int8", masters="split-8")': (lambda given: AdamW(given, moments="int8", masters="split-8"), False),
    "the same, gradients released": (lambda given: AdamW(given, moments="int8", masters="split-8"), True),
    'AdamW(moments="mxfp4:stochastic", masters="split-8")': (
        lambda given: AdamW(given, moments="mxfp4:stochastic", masters="split-8"),
        False,
    ),
    'Lion(moments="int8", masters="split-8")': (lambda given: Lion(given, moments="int8", masters="split-8"), False),
}
_PEERS = (("bitsandbytes.optim", "AdamW8bit"), ("torchao.optim", "AdamW8bit"), ("torchao.optim", "AdamWFp8"))
_PARTS, _WIDTH = 32, 2048
_SMALL = {
    "gpt": {"layers": 2, "heads": 4, "width": 64},
    "bert": {"layers": 2, "heads": 4, "width": 64, "drawn": 400},
    "resnet-20": {"layers": 8, "width": 8, "images": (600, 100)},
}
_RATES = {"gpt": 3e-3, "bert": 1e-3, "resnet-20": 2e-3}


def bytes_of(way: str) -> dict[str, float | None]:
    """Return the bytes a parameter, reported and by the process; must be called in a new process."""
    make, releases = WAYS[way]
    with growth() as grown:
        # several matrices, of which one gradient at a time is there where gradients are released
        dtype = torch.float32 if way.startswith("torch") else torch.bfloat16
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=dtype) for _ in range(_PARTS)))
        optimizer: Any = make(model.parameters())
        if releases:
            optimizer.release_gradients()
        x = torch.randn(4, _WIDTH, dtype=dtype)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            gradients = sum(0 if one.grad is None else one.grad.nbytes for one in model.parameters())
            optimizer.step()
        peak = grown()
    count = sum(one.numel() for one in model.parameters())
    if isinstance(optimizer, torch.optim.AdamW):
        reported = 12.0
    else:
        reported = sum(optimizer.memory().values()) / count
    return {"reported": reported + gradients / count, "process": None if peak is None else peak / count}


def bytes_by_way() -> dict[str, Any]:
    """Return and print what `bytes_of` measures of every contender."""
    found = {}
    print(f"{'bytes a parameter':56} {'reported':>8} {'process':>8}")
    for way in WAYS:
        command = [sys.executable, __file__, "--bytes-of", way]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[way] = row = json.loads(answer.splitlines()[-1])
        print(f"{way:56}" + "".join(f" {'-' if one is None else f'{one:.2f}':>8}" for one in row.values()), flush=True)
    return found


def times(folder: str | None) -> dict[str, float]:
    """Return and print the seconds of a step of every contender, all in turn."""
    makes = {name: make for name, (make, releases) in WAYS.items() if not releases}
    if folder is not None:
        sys.path.append(folder)
        for module, name in _PEERS:
            makes[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    taken, best = {}, dict.fromkeys(makes, float("inf"))
    for name, make in makes.items():
        weight = nn.Parameter(torch.randn(1 << 22))
        optimizer = make([weight])
        weight.grad = (1e-3 * torch.randn(weight.shape)).to(weight.dtype)
        optimizer.step()
        taken[name] = optimizer
    for _ in range(15):
        for name, optimizer in taken.items():
            start = time.process_time()
            optimizer.step()
            best[name] = min(best[name], time.process_time() - start)
    for name, seconds in best.items():
        print(f"{name:56} {1e3 * seconds:7.1f} ms", flush=True)
    return best


def loss_of(name: str, make: Make, storage: str, seed: int, steps: int) -> float:
    """Return the mean loss of the last 30 steps."""
    recipe = get(name)
    size = recipe.size()
    size = replace(size, batch=16, options={**size.options, **_SMALL[name]})
    torch.manual_seed(seed)
    data, model, precision = recipe.load(size, None).training, recipe.make_model(size), lowp.Precision(storage)
    groups = recipe.make_optimizer(model, _RATES[name]).param_groups
    kept = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
    for group in kept:
        group["lr"] = _RATES[name]
    model, optimizer = precision.prepare(model, make(kept))
    generator, found = torch.Generator().manual_seed(seed), list[float]()
    for _ in range(steps):
        batch = data.batch(torch.randint(len(data), (size.batch,), generator=generator), generator)
        optimizer.zero_grad()
        with precision.autocast():
            loss = recipe.loss(model, batch)
        precision.backward(loss)
        precision.step(optimizer)
        found.append(float(loss.detach()))
    return sum(found[-30:]) / len(found[-30:])


def losses(names: list[str], steps: int) -> dict[str, dict[str, list[float]]]:
    """Return and print the losses of short runs from three seeds, by recipe and contender."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for name in names:
        for way, (make, releases) in WAYS.items():
            if releases or way.startswith("Lion"):
                continue
            storage = "bf16" if way.startswith("torch") else "bf16-storage"
            found[name][way] = runs = [loss_of(name, make, storage, seed, steps) for seed in range(3)]
            print(f"{name:10}{way:56} {' '.join(f'{one:.4f}' for one in runs)}   {sum(runs) / 3:.4f}", flush=True)
    return found


def main() -> None:
    """Read the command line, print what is asked for and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="FOLDER", help="where bitsandbytes and torchao are installed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loss", type=int, metavar="STEPS", help="train for this many steps in place of measuring")
    parser.add_argument("--recipe", action="append", choices=sorted(_SMALL), help="which of the three; default: all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bytes-of", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.bytes_of:
        print(json.dumps(bytes_of(given.bytes_of)))
        return
    document: dict[str, Any] = {**results.header("bench-optimizers"), "threads": given.threads}
    if given.loss:
        document |= {"steps": given.loss, "losses": losses(given.recipe or sorted(_SMALL), given.loss)}
    else:
        document |= {"bytes": bytes_by_way(), "seconds": times(given.peers)}
    if given.json is not None:
        results.write(given.json, document)


if __name__ == "__main__":
    main()
