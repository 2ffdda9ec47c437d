"""Measure the growth of a process for an int16 product, or a layer and its gradients: `int16_memory.py [--json FILE]`.

Each path runs in its own process, whose resident memory is read before and at its peak (VmHWM of /proc/self/status, on
Linux). Memory packed by the C++ library and temporaries of torch are thus included; threads are started before. The
table also has the sizes of the result and of one operand as int16, the size of a packed operand, and the growth divided
by the sum of both: 1.00 for a path that allocates nothing else.

The linear layer has 1024 inputs and outputs at batch 1024, the convolution 64 channels and 3x3 kernels on 16 images of
32x32; both have a bias. Gradients of a layer are those of all its three inputs, after three steps, including the
operand saved for them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from gemm import quantised
from torch import Tensor, nn

import lowp
from lowp.kernels.int16 import integer
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.recipes.results import header

MIB = 1 << 20
Path_ = tuple[Callable[[], object], int, int]  # function, bytes of its result, bytes of one operand as int16
LAYERS = {
    "linear": (lambda: nn.Linear(1024, 1024), (1024, 1024)),
    "convolution": (lambda: nn.Conv2d(64, 64, 3, padding=1), (16, 64, 32, 32)),
}
# glibc returns blocks of at least this size to the system at once, and does not reuse freed memory for them
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def matrices(exact: bool) -> Path_:
    """Return a product of 1024 x 1024 matrices."""
    a, b = quantised(torch.randn(1024, 1024), 2), quantised(torch.randn(1024, 1024), 2)
    run = (lambda: integer.multiply(a, b, exponent=-16)) if exact else (lambda: integer.multiply(a, b, dtype=None))
    return run, 1024 * 1024 * (2 if exact else 4), a.nbytes


def images(product: str, exact: bool) -> Path_:
    """Return one of the products of a convolution."""
    shape = ConvolutionShape.of((16, 64, 32, 32), (64, 64, 3, 3), 1, 1)
    x, w, g = (quantised(torch.randn(size), 2) for size in (shape.input, shape.weight, shape.output))
    a, b = {"forward": (x, w), "input_gradient": (g, w), "weight_gradient": (x, g)}[product]
    result = w if product == "weight_gradient" else x
    if exact:
        return lambda: integer.convolve(product, a, b, shape, exponent=-16), result.nbytes, x.nbytes
    return lambda: integer.convolve(product, a, b, shape, dtype=None), 2 * result.nbytes, x.nbytes


def layer(name: str, precision: str, backward: bool) -> Path_:
    """Return a layer within a region, or its gradients."""
    make, size = LAYERS[name]
    torch.manual_seed(0)
    module = make()
    numbers = lowp.Precision(precision) if precision != "fp32" else None
    context: Callable[[], AbstractContextManager[object]] = nullcontext if numbers is None else numbers.autocast
    x = torch.randn(size, requires_grad=True)
    inputs = (x, module.weight, module.bias)

    def forward() -> Tensor:
        with context():
            result: Tensor = module(x)
        return result

    grad = torch.randn_like(forward())
    for _ in range(3):
        torch.autograd.grad(forward(), inputs, grad)
    if not backward:
        return forward, grad.nbytes, x.numel() * 2
    y = forward()
    return lambda: torch.autograd.grad(y, inputs, grad), sum(one.nbytes for one in inputs), x.numel() * 2


def paths() -> dict[str, Callable[[], Path_]]:
    """Return the paths by name."""
    found: dict[str, Callable[[], Path_]] = {}
    for exact in (False, True):
        kind = "exact" if exact else "chained"
        found[f"{kind} matrix product"] = lambda exact=exact: matrices(exact)
        for product in integer.PRODUCTS:
            found[f"{kind} convolution, {product.replace('_', ' ')}"] = lambda p=product, e=exact: images(p, e)
    for name in LAYERS:
        for precision in ("fp32", "dfp16", "flex16+5"):
            for way in ("forward", "backward"):
                found[f"{name} in {precision}, {way}"] = lambda n=name, p=precision, w=way: layer(n, p, w == "backward")
    return found


def kibibytes(key: str) -> int:
    """Return a value of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def measure(sending: Connection, name: str, threads: int) -> None:
    """Send the growth in bytes, and the sizes, of a path; only its operands exist before."""
    make = paths()[name]
    torch.set_num_threads(threads)
    integer.multiply(*(quantised(torch.randn(200, 200)) for _ in range(2)))
    torch.randn(1 << 17).relu()
    run, result, operand = make()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before = kibibytes("VmRSS")
    kept = run()
    sending.send((1024 * (kibibytes("VmHWM") - before), result, operand))
    del kept


def grown(name: str, threads: int) -> tuple[int, int, int]:
    """Return the measurement of a new process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lowp", "torch"])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(sending, name, threads))
    process.start()
    sending.close()
    found: tuple[int, int, int] = receiving.recv()
    process.join()
    return found


def main() -> None:
    """Print a line per path, with one thread and with two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", default="", help="only paths whose names contain this text")
    given = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    rows = {}
    print(f"{'MiB':46}{'result':>8}{'operand':>9}{'1 thread':>10}{'2 threads':>11}{'of both':>9}")
    for name in paths():
        if given.only not in name:
            continue
        one, result, operand = grown(name, 1)
        two, _, _ = grown(name, 2)
        sizes = [round(size / MIB, 2) for size in (result, operand, one, two)]
        rows[name] = dict(zip(("result", "operand", "growth_1", "growth_2"), sizes, strict=True))
        cells = f"{sizes[0]:8.1f}{sizes[1]:9.1f}{sizes[2]:10.1f}{sizes[3]:11.1f}"
        print(f"{name:46}{cells}{max(one, two) / (result + operand):9.2f}", flush=True)
    if given.json:
        document = {**header("bench-int16-memory", "bench/int16_memory.py"), "unit": "MiB", "rows": rows}
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
