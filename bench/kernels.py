"""Time the casts beside torch.copy_ and the peers: `python bench/kernels.py [--quick] [--threads N] [--json FILE]`.

The inputs are 16 M normal fp32 numbers (`--elements`); results are written to a reused buffer, but codes of formats
with shared scales, and their values, to new memory, whose pages the system may have to clear. All candidates take
turns in every round, so that other load of the machine affects them equally; the best round of each counts. Bandwidth
counts the necessary reads and writes (8 bytes per element for fp32 to fp32). Peers that are not installed are
omitted; peers that take longer than a second run in fewer rounds. qtorch compiles its kernels when it is imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowp
from lowp.casts import parse
from lowp.kernels import cpu
from lowp.kernels.int16 import cpu_int16
from lowp.kernels.int16.mantissas import as_exponent
from lowp.recipes.results import header

NEAREST = ("fp16", "bf16", "bf16-tpu", "e4m3fn", "e4m3fn:saturate", "e5m2", "e4m3fnuz", "e8m0", "e3m2", "e2m1", "tf32")
NEAREST += ("e5m7", "e6m9", "i8", "i16")
OTHER_MODES = ("bf16-trunc", "fp16:nearest-away", "fp16:up", "e4m3fn:down")
STOCHASTIC = ("fp16:stochastic", "bf16:stochastic", "e4m3fn:stochastic", "e5m7:stochastic", "fp16:stochastic-8")
SHARED = ("mxfp8", "mxfp4", "nvfp4", "int8", "dfp16")
Candidates = dict[str, Callable[[], object]]


def ours(x: Tensor, out: Tensor) -> Candidates:
    """Return lowp's candidates by name."""
    candidates: Candidates = {}
    for text in (*NEAREST, *OTHER_MODES, *STOCHASTIC):
        candidates[f"lowp {text}"] = lambda text=text: lowp.quantize(x, text, seed=1, out=out)
    width = math.gcd(len(x), 1024)
    for text in SHARED:
        rows, to = x.view(-1, width), out.view(-1, width)
        candidates[f"lowp {text}"] = lambda text=text, rows=rows, to=to: lowp.quantize(rows, text, out=to)
        encoded = lowp.encode(rows, text)
        candidates[f"lowp encode {text}"] = lambda text=text, rows=rows: lowp.encode(rows, text)
        candidates[f"lowp decode {text}"] = lambda encoded=encoded: lowp.dequantize(encoded)
    codes, payload = torch.empty(len(x), dtype=torch.uint8), torch.empty(len(x), dtype=torch.int16)
    fp8, dfp16, own = parse("e4m3fn"), parse("dfp16"), out.clone()
    candidates["lowp fp16 in place"] = lambda: lowp.quantize(own, "fp16", out=own)
    candidates["lowp encode e4m3fn"] = lambda: cpu.encode(x, fp8, 0, codes)
    candidates["lowp decode e4m3fn"] = lambda: cpu.decode(codes, fp8.element, out)
    candidates["lowp int16 and maximum"] = lambda: cpu_int16.to_int16(x, dfp16, as_exponent(-12), payload)
    candidates["lowp statistics"] = lambda: lowp.statistics(x)
    return candidates


def peers(x: Tensor, out: Tensor) -> Candidates:
    """Return the candidates of the installed peers by name."""
    candidates: Candidates = {
        "torch .to(float16).to(float32)": lambda: out.copy_(x.to(torch.float16)),
        "torch .to(bfloat16).to(float32)": lambda: out.copy_(x.to(torch.bfloat16)),
        "torch .to(float8_e4m3fn).to(float32)": lambda: out.copy_(x.to(torch.float8_e4m3fn)),
    }
    array = x.numpy()
    if ml_dtypes := installed("ml_dtypes"):
        for name in ("bfloat16", "float8_e4m3fn"):
            dtype = getattr(ml_dtypes, name)
            candidates[f"ml_dtypes {name}"] = lambda dtype=dtype: array.astype(dtype).astype("float32")
    if gfloat := installed("gfloat"):
        table = importlib.import_module("gfloat.formats").format_info_ocp_e4m3
        candidates["gfloat e4m3fn"] = lambda: gfloat.round_ndarray(table, array)
    if quant := installed("qtorch.quant"):
        candidates["qtorch e4m3"] = lambda: quant.float_quantize(x, 4, 3, "nearest")
        candidates["qtorch e4m3 stochastic"] = lambda: quant.float_quantize(x, 4, 3, "stochastic")
    if elements := installed("mx.elemwise_ops"):
        candidates["microxcaling e4m3"] = lambda: elements.quantize_elemwise_op(
            x, {"bfloat": 16, "fp": 0, "round": "even"}
        )
    return candidates


def installed(name: str) -> Any:
    """Return a peer's module, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # compilation of a peer may fail with any exception
        print(f"omitted: {name} ({type(error).__name__})")
        return None


def best_times(candidates: Candidates, rounds: int) -> dict[str, float]:
    """Return the shortest time of each candidate in seconds; all take turns."""
    # With one thread its processor time is measured, so that preemption does not count.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = {}
    for name, run in candidates.items():  # the first run warms up
        start = clock()
        run()
        best[name] = math.inf if (took := clock() - start) < 1 else took
    for turn in range(rounds):
        for name, run in candidates.items():
            if best[name] > 1 and math.isfinite(best[name]) and turn:
                continue
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best


def small_calls(count: int = 1000) -> dict[str, float]:
    """Return the microseconds of an eager call on a small tensor through the public functions."""
    x = torch.randn(count)
    out = torch.empty_like(x)
    calls: Candidates = {
        "quantize e4m3fn": lambda: lowp.quantize(x, "e4m3fn"),
        "quantize e4m3fn, out": lambda: lowp.quantize(x, "e4m3fn", out=out),
        "quantize mxfp8, out": lambda: lowp.quantize(x, "mxfp8", out=out),
        "encode mxfp8": lambda: lowp.encode(x, "mxfp8"),
        "quantize e4m3fn stochastic": lambda: lowp.quantize(x, "e4m3fn:stochastic", seed=1),
        "encode e4m3fn": lambda: lowp.encode(x, "e4m3fn"),
        "statistics": lambda: lowp.statistics(x),
        "torch .to(float16).to(float32)": lambda: x.to(torch.float16).to(torch.float32),
    }
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(10):
                call()
            times.append((time.perf_counter() - start) / 10)
        found[name] = min(times) * 1e6
    return found


def bytes_of(name: str) -> int:
    """Return the bytes read and written per element."""
    if "int16" in name or name.endswith("code dfp16"):
        return 6
    if "encode" in name or "decode" in name:
        return 5
    return 4 if name == "lowp statistics" else 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 15, no peers")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    x = torch.randn(arguments.elements, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    candidates: Candidates = {"torch.copy_": lambda: out.copy_(x), **ours(x, out)}
    if not arguments.quick:
        candidates |= peers(x, out)
    best = best_times(candidates, 3 if arguments.quick else 15)
    copy = best["torch.copy_"]
    document = {**header("bench-kernels", "bench/kernels.py"), "kernels": cpu.select(None)}
    print(f"{document['machine']['words']}; {arguments.threads} threads, {arguments.elements:,} elements")
    rows = {}
    for name, seconds in best.items():
        row = {
            "milliseconds": round(seconds * 1e3, 2),
            "gigabytes_per_second": round(arguments.elements * bytes_of(name) / seconds / 1e9, 2),
            "percent_of_copy": round(100 * copy / seconds, 1),
            "nanoseconds_an_element_a_thread": round(seconds * arguments.threads / arguments.elements * 1e9, 3),
        }
        rows[name] = row
        print(
            f"{name:38}{row['milliseconds']:10.2f} ms{row['gigabytes_per_second']:8.2f} GB/s"
            f"{row['percent_of_copy']:8.1f} % of copy_{row['nanoseconds_an_element_a_thread']:9.3f} ns/element/thread"
        )
    small = {name: round(microseconds, 2) for name, microseconds in small_calls().items()}
    for name, microseconds in small.items():
        print(f"{name + ', 1,000 elements':54}{microseconds:8.2f} us")
    if arguments.json:
        document |= {
            "threads": arguments.threads,
            "elements": arguments.elements,
            "rows": rows,
            "microseconds_1000_elements": small,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
