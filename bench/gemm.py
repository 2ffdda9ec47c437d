"""Time lowp's products beside torch's in fp32 and fp64: `python bench/gemm.py [--quick] [--avx2] [--json FILE]`.

All candidates of a row take turns within each round, so that other load of the machine affects them equally; the best
round counts. With one thread its processor time is measured, so that preemption does not count. Operands are normal and
quantised as in DFP-16 (exponent of the maximum - 14, shifted by 2 more for 14 bits), or uniform over all of int16, the
worst case: no chain can be proven safe and every product also needs its leading digits. The products of a linear layer
with sums in fp32 (`lowp.kernels.products.fp32_products`) read operands in fp32, bf16 and fp16 and write the same.

torch's libraries and lowp each use the best instructions they support on the machine, which can differ (MKL uses AVX2
on all AMD processors). `--avx2` limits all of them to AVX2.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.errors import Unavailable
from lowp.kernels.int16 import integer
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.products.programs import Memory, ProductStep, Program
from lowp.recipes.results import header

SIZES = (512, 1024, 2048)
CONVOLUTIONS = (
    (16, 64, 32),
    (16, 128, 16),
    (16, 256, 8),
)  # batch, channels in and out, height and width; 3x3, padding 1
LAYERS = [(n, n, n) for n in (256, 512, 1024, 2048)]
LAYERS += [(512, 1024, 1024), (2048, 256, 1024), (64, 1024, 1024)]  # rows, outputs, inputs
SMALL_SIZES, SMALL_CONVOLUTIONS, SMALL_LAYERS = (128,), ((2, 16, 8),), [(64, 64, 64)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

AVX2 = {
    "LOWP_CPU_ISA": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}


def hold_to_avx2() -> None:
    """Restart this process if necessary with the environment that libraries read when they are loaded."""
    if any(os.environ.get(name) != value for name, value in AVX2.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **AVX2})


def quantised(x: Tensor, shift: int = 0) -> Tensor:
    """Return x as mantissas of DFP-16."""
    exponent = math.frexp(x.abs().max().item())[1] - 1 - 14 + shift
    return (x.double() * 2.0**-exponent).round().clamp(-32767, 32767).to(torch.int16)


def full_range(*shape: int) -> Tensor:
    return torch.randint(-32768, 32768, shape).to(torch.int16)


def best_times(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the shortest time of each candidate in seconds; all take turns."""
    best = dict.fromkeys(candidates, math.inf)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for run in candidates.values():
        run()
    for _ in range(rounds):
        for name, run in candidates.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best


def matrix_row(n: int, rounds: int) -> dict[str, float]:
    """Return the times of n x n products."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    wide_a, wide_b = a.double(), b.double()
    a16, b16, a14, b14 = quantised(a), quantised(b), quantised(a, 2), quantised(b, 2)
    a_full, b_full = full_range(n, n), full_range(n, n)
    return best_times(
        {
            "sgemm": lambda: torch.mm(a, b),
            "dgemm": lambda: torch.mm(wide_a, wide_b),
            "chained, 14 bits": lambda: integer.multiply(a14, b14, exponent=-24, dtype=None),
            "chained, 16 bits": lambda: integer.multiply(a16, b16, exponent=-24, dtype=None),
            "exact, 16 bits": lambda: integer.multiply(a16, b16, exponent=-16),
            "exact, full range": lambda: integer.multiply(a_full, b_full, exponent=-22),
        },
        rounds,
    )


def layer_row(m: int, n: int, k: int, rounds: int) -> dict[str, float]:
    """Return the times of the three products of a linear layer by torch's sgemm and by lowp in each dtype."""
    x, weight, gradient = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    candidates: dict[str, Callable[[], object]] = {}
    for product in ("forward", "input gradient", "weight gradient"):
        for name, dtype in DTYPES.items():
            a, w, g = (one.to(dtype) for one in (x, weight, gradient))
            pairs = {"forward": (a, w.t()), "input gradient": (g, w), "weight gradient": (g.t(), a)}
            left, right = pairs[product]
            if name == "fp32":
                candidates[f"sgemm {product}"] = functools.partial(torch.mm, left, right)
            candidates[f"{name} {product}"] = rounded(left, right, dtype)
    return best_times(candidates, rounds)


def rounded(left: Tensor, right: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """Return a call of the product whose result is rounded to a dtype: a program of one step, in fresh memory."""
    operands = [Memory(place, tuple(x.shape), x.stride(), x.dtype) for place, x in enumerate((left, right))]
    program = Program([ProductStep(operands[0], operands[1], 2, 3, dtype)])
    return lambda: program([left, right, None, torch.empty(left.shape[0], right.shape[1], dtype=dtype)])


def convolution_row(batch: int, channels: int, side: int, rounds: int) -> dict[str, float]:
    """Return the times of the three products of a 3x3 convolution in fp32 and chained."""
    x, g = torch.randn(batch, channels, side, side), torch.randn(batch, channels, side, side)
    w = torch.randn(channels, channels, 3, 3)
    x14, g14, w14 = quantised(x, 2), quantised(g, 2), quantised(w, 2)
    shape = ConvolutionShape.of(tuple(x.shape), tuple(w.shape), 1, 1)

    def backward(mask: list[bool]) -> object:
        return torch.ops.aten.convolution_backward(g, x, w, [0], (1, 1), (1, 1), (1, 1), False, (0, 0), 1, mask)

    def chained(product: str, a: Tensor, b: Tensor) -> Callable[[], object]:
        return lambda: integer.convolve(product, a, b, shape, exponent=-24, dtype=None)

    return best_times(
        {
            "fp32 forward": lambda: F.conv2d(x, w, None, 1, 1),
            "chained forward": chained("forward", x14, w14),
            "fp32 input gradient": lambda: backward([True, False, False]),
            "chained input gradient": chained("input_gradient", g14, w14),
            "fp32 weight gradient": lambda: backward([False, True, False]),
            "chained weight gradient": chained("weight_gradient", x14, g14),
        },
        rounds,
    )


def report(title: str, times: dict[str, float], multiplications: float, base: Callable[[str], str]) -> dict[str, Any]:
    """Print one row and return it: billions of multiplications per second, and speed relative to `base` of the name."""
    row = {
        name: {
            "gmac_per_second": round(multiplications / seconds / 1e9, 2),
            "relative": round(times[base(name)] / seconds, 3),
        }
        for name, seconds in times.items()
    }
    print(title)
    for name, figures in row.items():
        print(f"  {name:26} {figures['gmac_per_second']:7.1f} G/s  {figures['relative']:5.2f}")
    return row


def kernel() -> str:
    """Return the name of the micro-kernel in use."""
    one = full_range(1, 1)
    for name in filter(None, (os.environ.get("LOWP_CPU_ISA"), *integer.KERNELS)):
        with contextlib.suppress(Unavailable):
            integer.multiply(one, one, kernel=name)
            return name
    raise AssertionError("reference runs everywhere")


def main() -> None:
    """Run all rows with one thread and with two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only a small size of each kind")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--avx2", action="store_true", help="limit torch's libraries and lowp to AVX2")
    options = parser.parse_args()
    if options.avx2:
        hold_to_avx2()
    torch.manual_seed(0)
    sizes, convolutions = (SMALL_SIZES, SMALL_CONVOLUTIONS) if options.quick else (SIZES, CONVOLUTIONS)
    layers = SMALL_LAYERS if options.quick else LAYERS
    results: dict[str, Any] = {
        **header("bench-gemm", "bench/gemm.py"),
        "held_to_avx2": options.avx2,
        "kernel": kernel(),
        "rows": {},
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for n in sizes:
            title = f"{n} x {n} x {n}, threads: {threads}"
            results["rows"][title] = report(title, matrix_row(n, 15 if n < 2048 else 6), n**3, lambda name: "sgemm")
        for m, n, k in layers:
            title = f"linear layer, {m} rows, {k} to {n}, threads: {threads}"
            rounds = max(5, min(400, int(1e10 / (m * n * k))))
            times = layer_row(m, n, k, rounds)
            results["rows"][title] = report(title, times, m * n * k, lambda name: "sgemm " + name.partition(" ")[2])
        for batch, channels, side in convolutions:
            title = f"3x3 convolution, batch {batch}, {channels} channels, {side} x {side}, threads: {threads}"
            work = batch * channels * channels * 9 * side * side
            times = convolution_row(batch, channels, side, 12)
            results["rows"][title] = report(title, times, work, lambda name: "fp32 " + name.partition(" ")[2])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
