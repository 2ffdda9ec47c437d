"""Comparisons that only emulators support: fixed point, block floating point, and rates of stochastic rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from exactness_cases import bits_of, cases, differ
from exactness_peers import qtorch_functions
from torch import Tensor

from lowp import shims
from lowp.formats import FloatFormat, parse

WL, FL, SAMPLES = 8, 4, 1 << 20


def functions(peers: list[str]) -> dict[str, Any]:
    """Return the modules with qtorch's three functions, by name."""
    return {"lowp.shims": shims, **({"qtorch": qtorch_functions()} if "qtorch" in peers else {})}


def integers(peers: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for fixed point and one for block floating point, for each library."""
    format = parse("e4m3")
    assert isinstance(format, FloatFormat)
    x = cases(format, torch.float32)
    whole = x[x.isfinite()]
    # blocks of two: 64, which determines the exponent, and a smaller number
    small = whole[whole.abs() < 64]
    pairs = torch.stack([torch.full_like(small, 64.0), small], 1)
    fixed = [_multiple(v, Fraction(1, 1 << FL), -(1 << (WL - 1)), (1 << (WL - 1)) - 1) for v in x.tolist()]
    block = [_multiple(v, Fraction(1), 1 - (1 << (WL - 1)), (1 << (WL - 1)) - 1) for v in small.tolist()]
    for name, module in functions(peers).items():
        found = module.fixed_point_quantize(x, WL, FL, rounding="nearest")
        yield _row(name, f"fixed point, wl {WL}, fl {FL}", x, found, fixed)
        found = module.block_quantize(pairs, WL, 0, "nearest")[:, 1].contiguous()
        yield _row(name, f"block, wl {WL}, maximum 64", small, found, block)


def _multiple(value: float, unit: Fraction, lowest: int, highest: int) -> float:
    if math.isnan(value):
        return value
    if math.isinf(value):
        return float((highest if value > 0 else lowest) * unit)
    return float(min(max(round(Fraction(value) / unit), lowest), highest) * unit) + 0.0


def _row(name: str, format: str, x: Tensor, found: Tensor, results: list[float]) -> dict[str, Any]:
    # +0 and -0 count as one here: two's complement has one zero
    wrong = differ(torch.where(found == 0, torch.zeros_like(found), found), results)
    kinds: dict[str, int] = {}
    for value, result in zip(x[wrong].tolist(), torch.tensor(results)[wrong].tolist(), strict=True):
        kind = "NaN" if math.isnan(value) else "tie" if abs(value - result) * 2 in (1.0, 1 / (1 << FL)) else "other"
        kinds[kind] = kinds.get(kind, 0) + 1
    row: dict[str, Any] = {"peer": name, "format": format, "rounding": "nearest-even", "overflow": "saturate"}
    row |= {"dtype": "float32", "cases": len(x), "wrong": kinds}
    if wrong.any():
        first = int(wrong.nonzero()[0])
        row["example"] = example(x[first], found[first], results[first])
    return row


def example(x: Tensor, found: Tensor, result: float) -> dict[str, str]:
    """Return one mismatch: the input with its bits, the result, and the right result."""
    return {"input": f"{x.item()!r}", "bits": bits_of(x), "found": f"{found.item()!r}", "right": f"{result!r}"}


def stochastic(peers: list[str]) -> list[dict[str, Any]]:
    """Return measured and expected rates of rounding away from zero, over `SAMPLES` roundings each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [row for name, module in functions(peers).items() for row in _stochastic(name, module)]


def _stochastic(name: str, module: Any) -> Iterator[dict[str, Any]]:
    tries: list[tuple[str, Callable[[Tensor], Tensor], float, float, float]] = [
        ("float exp 5, man 2", lambda x: module.float_quantize(x, 5, 2), 1.0625, 1.0, 1.25),
        ("float exp 4, man 3, subnormal", lambda x: module.float_quantize(x, 4, 3), 2.0**-12, 0.0, 2.0**-9),
        ("float exp 4, man 10, subnormal", lambda x: module.float_quantize(x, 4, 10), 2.0**-31, 0.0, 2.0**-16),
        ("fixed wl 8, fl 4", lambda x: module.fixed_point_quantize(x, 8, 4), 1 + 1 / 64, 1.0, 1 + 1 / 16),
        ("fixed wl 32, fl 0", lambda x: module.fixed_point_quantize(x, 32, 0), 2.0**22 + 0.5, 2.0**22, 2.0**22 + 1),
    ]
    for what, function, value, low, high in tries:
        found = function(torch.full((SAMPLES,), value))
        expected = (Fraction(value) - Fraction(low)) / (Fraction(high) - Fraction(low))
        p = float(expected)
        measured = (found == high).double().mean().item()
        error = (measured - p) / math.sqrt(p * (1 - p) / SAMPLES)
        outside = int(((found != low) & (found != high)).sum())
        yield {
            **{"peer": name, "number": what, "input": value, "expected": p, "measured": measured},
            **{"standard_errors": round(error, 1), "neither": outside},
        }
