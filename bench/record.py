"""Record the figures of docs on this machine, and write the pages' tables and pictures from them.

    python bench/record.py [--only step,flex-avx2] [--beside zen4] [--list]

Takes a quarter of an hour on two idle cores. Every bench writes `bench/results/NAME.json` at its end, with a
description of the machine; NAME-avx2 is the same with all libraries limited to AVX2, NAME-1 with one thread, and
bench-NAME what `lowp bench` writes of a recipe. Other results are not changed. `--beside zen4` keeps the results of
another processor and writes NAME-zen4.json beside them. On a busy machine set OMP_WAIT_POLICY=PASSIVE, so that waiting
threads release their cores. `bench/exactness.py`, `bench/debuggers.py` and `bench/optimizers.py --peers`, which need
libraries that no extra installs, `bench/gpu_static.py`, which compiles for half an hour, and `bench/runs.py`, of runs
on data sets, have pages of their own, which they write or whose tests compare them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import tables

BENCH = Path(__file__).parent
RUNS: dict[str, list[str]] = {
    "call": ["call.py"],
    "step": ["step.py"],
    "step-1": ["step.py", "--threads", "1", "--formats", "bf16,fp16"],
    "step-avx2": ["step.py", "--avx2"],
    "step-1-avx2": ["step.py", "--avx2", "--threads", "1", "--formats", "bf16,fp16"],
    "flex": ["flex.py"],
    "flex-avx2": ["flex.py", "--avx2"],
    "gemm": ["gemm.py"],
    "gemm-avx2": ["gemm.py", "--avx2"],
    "kernels": ["kernels.py"],
    "inference": ["inference.py"],
    "inference-avx2": ["inference.py", "--avx2"],
    "memory": ["memory.py"],
    "exchange": ["exchange.py"],
    "optimizers-loss": ["optimizers.py", "--loss", "200"],
    "int16-memory": ["int16_memory.py"],
    "monitoring-faults": ["monitoring.py", "faults"],
    "monitoring-quiet": ["monitoring.py", "quiet"],
    "monitoring-cost": ["monitoring.py", "cost"],
    "bench-unet": ["-m", "lowp", "bench", "unet", "--seconds", "2"],
    "bench-bert": ["-m", "lowp", "bench", "bert", "--seconds", "2"],
}


def command_of(name: str, path: Path) -> list[str]:
    """Return the command that writes a result to a file; `lowp bench` leaves its picture in the folder of builds."""
    first, *options = RUNS[name]
    if first != "-m":
        return [sys.executable, str(BENCH / first), *options, "--json", str(path)]
    plot = BENCH.parent / "build" / f"{path.stem}.png"  # figures.py draws the page's, with the file's hash
    return [sys.executable, first, *options, "--plot", str(plot), "--out", str(path)]


def main() -> int:
    """Run the selected benches; return the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RUNS), help="comma-separated names of results (default: all)")
    parser.add_argument(
        "--beside",
        metavar="MACHINE",
        help="write NAME-MACHINE.json beside the results of another processor, for example --beside zen4",
    )
    parser.add_argument("--list", action="store_true", help="print each command instead of running it")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"no bench writes {', '.join(unknown)}: give some of {', '.join(RUNS)}")
    failed = 0
    for name in names:
        written = f"{name}-{given.beside}" if given.beside else name
        command = command_of(name, BENCH / "results" / f"{written}.json")
        print(" ".join(command), flush=True)
        if given.list:
            continue
        start = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        failed += done.returncode != 0
        print(f"  {'failed' if done.returncode else 'recorded'} after {time.monotonic() - start:.0f} s", flush=True)
    if not given.list:
        tables.main()
        subprocess.run([sys.executable, str(BENCH / "figures.py")], check=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
