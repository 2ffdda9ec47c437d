"""What GPUs could do with the Triton kernels at best, read off their machine code: a bound, and not a measurement.

    python bench/gpu_static.py [--chips A100,H100] [--kernels quantize] [--out bounds.json]

For every kernel the bytes an element moves, at the memory bandwidth of a chip's data sheet, give the least time; so do
the instructions an element takes, at the rate at which the chip issues them: each of a multiprocessor's four schedulers
one instruction of 32 threads a clock. The larger of the two bounds the kernel. All instructions of the machine code are
counted once, those of rare branches too, but for the branch that compares more than 32 random bits, which one draw in
2**32 takes; latencies, caches, launches and the rates of single units (integers, fp64) are not.

For V100 the code of compute capability 7.5 is counted: the disassembler that comes with Triton does not read that of
7.0. In kernels that share a scale and in statistics the branch for rare numbers is left out, too.

Sources. T4: NVIDIA T4 data sheet (320 GB/s), Turing whitepaper (40 SMs, 1.59 GHz). V100: NVIDIA V100 data sheet
(SXM2: 900 GB/s), Volta whitepaper (80 SMs, 1.53 GHz). A100: NVIDIA A100 data sheet (SXM 80 GB: 2039 GB/s), Ampere
whitepaper (108 SMs, 1.41 GHz). H100: NVIDIA H100 data sheet (SXM: 3350 GB/s), Hopper whitepaper (132 SMs; 67 TFLOP/s of
fp32 are 1.98 GHz).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import NamedTuple

import triton

from lowp.kernels.triton import ahead
from lowp.kernels.triton.ahead import Compiled, Configuration

LANES = 4 * 32  # threads' instructions that a multiprocessor issues a clock
HEADER = "The larger of both times an element, from machine code and data sheets: a bound, not a measurement."


class Chip(NamedTuple):
    """A GPU as its data sheet has it."""

    name: str
    capability: int
    bandwidth: float  # bytes a second
    multiprocessors: int
    clock: float  # Hz

    @property
    def issued(self) -> float:
        """Instructions of single threads a second."""
        return self.multiprocessors * LANES * self.clock


CHIPS = (
    Chip("T4", 75, 320e9, 40, 1.59e9),
    Chip("V100", 75, 900e9, 80, 1.53e9),
    Chip("A100", 80, 2039e9, 108, 1.41e9),
    Chip("H100", 90, 3350e9, 132, 1.98e9),
)


class Bound(NamedTuple):
    """A kernel on a chip: what an element costs it at least, in picoseconds."""

    kernel: str
    chip: str
    bytes: float
    instructions: float
    memory: float
    issue: float
    registers: int

    @property
    def is_memory_bound(self) -> bool:
        """Whether the memory takes longer than the issue of instructions."""
        return self.memory >= self.issue


def bound(configuration: Configuration, chip: Chip) -> Bound:
    """Compile a kernel for a chip and count."""
    taken: Compiled = ahead.compiled(ahead.usual_path(configuration), chip.capability)
    count = ahead.instructions(taken) * configuration.warps * 32 / configuration.elements
    memory, issue = configuration.bytes / chip.bandwidth * 1e12, count / chip.issued * 1e12
    return Bound(configuration.name, chip.name, configuration.bytes, count, memory, issue, taken.registers)


def main() -> None:
    """Print a table, and write it where it is asked for."""
    parser = argparse.ArgumentParser(description="bounds of the Triton kernels on GPUs, from their machine code")
    parser.add_argument("--chips", default=",".join(chip.name for chip in CHIPS))
    parser.add_argument("--kernels", default="", help="only those whose name this regular expression finds")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chips = [chip for chip in CHIPS if chip.name in asked.chips.split(",")]
    print(HEADER)
    print(f"{'kernel':58} {'chip':5} {'bytes':>6} {'instr.':>6} {'memory ps':>9} {'issue ps':>8} {'reg':>4}  bound by")
    found = []
    for configuration in ahead.configurations():
        if not re.search(asked.kernels, configuration.name):
            continue
        for chip in chips:
            one = bound(configuration, chip)
            found.append(one)
            by = "memory" if one.is_memory_bound else "instructions"
            print(
                f"{one.kernel:58.58} {one.chip:5} {one.bytes:6.1f} {one.instructions:6.1f} {one.memory:9.2f} "
                f"{one.issue:8.2f} {one.registers:4}  {by}",
                flush=True,
            )
    if asked.out:
        rows = [{**one._asdict(), "is_memory_bound": one.is_memory_bound} for one in found]
        document = {"kind": "gpu-static", "what": HEADER, "triton": triton.__version__}
        document |= {"chips": [one._asdict() for one in chips]}
        asked.out.write_text(json.dumps({**document, "bounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
