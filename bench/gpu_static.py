"""What GPUs could do with the Triton kernels at best, read off their machine code: a bound, and not a measurement.

    python bench/gpu_static.py [--chips A100,H100] [--kernels quantize] [--out bounds.json]

For every kernel the bytes an element moves, at the memory bandwidth of a chip's data sheet, give the least time. So do
the instructions an element takes, at the rate at which the chip issues them: each of a multiprocessor's four schedulers
one instruction of 32 threads a clock. And so do the instructions of a single unit: integers and logic, of which a
multiprocessor has half as many lanes as it issues; products of integers, likewise; fp32 with these; fp64; conversions;
shuffles, votes and reductions of a warp; shared memory, whose banks answer 32 words a clock.
The largest bounds the kernel. All instructions of the machine code are counted once, those of a loop as often as it is
walked, those of rare branches too, but for the branch that compares more than 32 random bits, which one draw in 2**32
takes (the question whether it is taken is counted), and the branch for rare numbers in kernels that share a scale and
in statistics; latencies, caches and launches are not.

For V100 the code of compute capability 7.5 is counted: the disassembler that comes with Triton does not read that of
7.0.

Sources. T4: NVIDIA T4 data sheet (320 GB/s), Turing whitepaper (40 SMs, 1.59 GHz). V100: NVIDIA V100 data sheet
(SXM2: 900 GB/s), Volta whitepaper (80 SMs, 1.53 GHz). A100: NVIDIA A100 data sheet (SXM 80 GB: 2039 GB/s), Ampere
whitepaper (108 SMs, 1.41 GHz). H100: NVIDIA H100 data sheet (SXM: 3350 GB/s), Hopper whitepaper (132 SMs; 67 TFLOP/s of
fp32 are 1.98 GHz). Lanes of units: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", in the
columns 7.x, 8.0 and 9.0: integer addition, comparison, minimum, maximum, shift and logic 64, integer product 64, fp32
64, 64 and 128, fp64 32 (2 for 7.5), 32 and 64, conversion from and to 64-bit types 16 (2 for 7.5), 16 and 16, shuffle
32, vote 64, warp reduction 16. Other conversions are counted at 16 on all chips. A packing conversion of two numbers
(F2FP) is counted as one, and HADD2, of which the table has two numbers an instruction, at the rate of fp32.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import triton

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import ahead
from ahead import Compiled, Configuration

LANES = 4 * 32  # threads' instructions that a multiprocessor issues a clock
HEADER = "The largest of the times an element (ps), from machine code and data sheets: a bound, not a measurement."


class Chip(NamedTuple):
    """A GPU as its data sheet has it."""

    name: str
    capability: int
    bandwidth: float  # bytes a second
    multiprocessors: int
    clock: float  # Hz
    lanes: dict[str, int]  # results a clock of a multiprocessor, by unit

    @property
    def issued(self) -> float:
        """Instructions of single threads a second."""
        return self.multiprocessors * LANES * self.clock


UNITS = {  # by the names of instructions; what is in none of them is bound by its issue
    "integer": (
        "LOP3|PLOP3|IADD3|VIADD|ISETP|SEL|SHF|IMNMX|VIMNMX3?|VIADDMNMX|PRMT|LEA|SGXT|BMSK|FSETP|FSEL|FMNMX|IABS|P2R|R2P"
    ),
    "integer products": "IMAD",
    "fp32": "FADD|FMUL|FFMA|IMAD|HADD2|HMUL2|HFMA2",
    "fp64": "DADD|DMUL|DFMA|DSETP",
    "fp64 conversion": r"F2F\.F64\S*|F2F\.\S*\.F64|I2F\.F64\S*|F2I\S*\.F64\S*",
    "conversion": "F2F|F2FP|F2I|I2F|I2FP|I2I|MUFU|POPC|FLO|BREV",
    "shuffle": "SHFL",
    "vote": "VOTE",
    "warp reduction": "REDUX",
    "shared memory": "LDS|STS|LDSM|STSM|ATOMS",
}
WORDS = re.compile(r"\b(?:LDS|STS)\.(?:U\.)?(64|128)\b|\b(?:LDSM|STSM)\.\S*?\b([124])\b")  # bits, or matrices of a word


def lanes(fp32: int, fp64: int, wide_conversion: int) -> dict[str, int]:
    """Return results a clock of a multiprocessor, by unit: those in which the chips differ are given."""
    found = {"integer": 64, "integer products": 64, "fp32": fp32, "fp64": fp64}
    found |= {"shuffle": 32, "vote": 64, "warp reduction": 16, "shared memory": 32}
    return {**found, "fp64 conversion": wide_conversion, "conversion": 16}


KINDS = {  # by the names of kernels
    "element-wise": ("quantize", "encode", "decode"),
    "shared scale": ("blocks", "rows", "parts", "tried"),
    "int16 under an exponent": ("convert", "write"),
    "reduction": ("statistics", "look", "look_again", "begin", "check"),
    "optimizer step": ("step",),
}

CHIPS = (
    Chip("T4", 75, 320e9, 40, 1.59e9, lanes(64, 2, 2)),
    Chip("V100", 75, 900e9, 80, 1.53e9, lanes(64, 32, 16)),
    Chip("A100", 80, 2039e9, 108, 1.41e9, lanes(64, 32, 16)),
    Chip("H100", 90, 3350e9, 132, 1.98e9, lanes(128, 64, 16)),
)


class Bound(NamedTuple):
    """A kernel on a chip: what an element costs it at least, in picoseconds."""

    kernel: str
    kind: str
    chip: str
    bytes: float
    instructions: float
    memory: float
    issue: float
    busiest: float  # of the unit that takes longest
    unit: str
    registers: int

    @property
    def is_memory_bound(self) -> bool:
        """Whether the memory takes longer than the issue of instructions, and than any unit."""
        return self.memory >= max(self.issue, self.busiest)

    @property
    def bound_by(self) -> str:
        """What takes longest."""
        if self.is_memory_bound:
            return "memory"
        return "issue" if self.issue >= self.busiest else self.unit


def bound(configuration: Configuration, chip: Chip) -> Bound:
    """Compile a kernel for a chip and count."""
    taken = compiled(configuration, chip.capability)
    share = configuration.warps * 32 / configuration.elements  # threads' instructions an element, of one in the code
    code = ahead.executed(taken, configuration.rounds)
    count = sum(times for _, times in code) * share
    memory, issue = configuration.bytes / chip.bandwidth * 1e12, count / chip.issued * 1e12
    clocks = {unit: of_unit(code, unit) * share / rate for unit, rate in chip.lanes.items()}
    unit = max(clocks, key=clocks.__getitem__)
    busiest = clocks[unit] / chip.multiprocessors / chip.clock * 1e12
    names = (configuration.name, kind(configuration), chip.name)
    return Bound(*names, configuration.bytes, count, memory, issue, busiest, unit, taken.registers)


def of_unit(code: list[tuple[str, int]], unit: str) -> int:
    """Return how many instructions of a program a unit carries out; of shared memory, how many words of a thread."""
    own = re.compile(rf"\s*(?:@!?U?P\w+\s+)?(?:{UNITS[unit]})\b")
    return sum(times * _words(text) for text, times in code if own.match(text))


def _words(text: str) -> int:
    """Return how many words of 32 bits an instruction moves from or to shared memory; 1 for all others."""
    found = WORDS.search(text)
    if not found:
        return 1
    return int(found[1]) // 32 if found[1] else int(found[2])


def kind(configuration: Configuration) -> str:
    """Return which of KINDS a kernel is."""
    own = configuration.kernel.fn.__name__
    return next(name for name, kernels in KINDS.items() if own in kernels)


def tally(bounds: list[Bound]) -> dict[str, dict[str, str]]:
    """Return by kind, and by chip, how many of the kernels are bound by memory, as "found of all"."""
    table: dict[str, dict[str, str]] = {}
    for name in (*KINDS, "all"):
        for chip in CHIPS:
            those = [one for one in bounds if one.chip == chip.name and name in (one.kind, "all")]
            if those:
                found = f"{sum(one.is_memory_bound for one in those)} of {len(those)}"
                table.setdefault(name, {})[chip.name] = found
    return table


_compiled: dict[tuple[str, int], Compiled] = {}  # chips of one capability share the code


def compiled(configuration: Configuration, capability: int) -> Compiled:
    """Compile a kernel without its rare branches, once."""
    key = (configuration.name, capability)
    if key not in _compiled:
        _compiled[key] = ahead.compiled(ahead.usual_path(configuration), capability)
    return _compiled[key]


def rounded(one: Bound) -> dict[str, object]:
    """Return a row as it is written."""
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in one._asdict().items()}


def main() -> None:
    """Print a table, and write it where it is asked for."""
    parser = argparse.ArgumentParser(description="bounds of the Triton kernels on GPUs, from their machine code")
    parser.add_argument("--chips", default=",".join(chip.name for chip in CHIPS))
    parser.add_argument("--kernels", default="", help="only those whose name this regular expression finds")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chips = [chip for chip in CHIPS if chip.name in asked.chips.split(",")]
    print(HEADER)
    print(
        f"{'kernel':58} {'chip':5} {'bytes':>6} {'instr.':>6} {'memory ps':>9} "
        f"{'issue ps':>8} {'unit ps':>8} {'reg':>4}  bound by"
    )
    found = []
    for configuration in ahead.configurations():
        if not re.search(asked.kernels, configuration.name):
            continue
        for chip in chips:
            one = bound(configuration, chip)
            found.append(one)
            print(
                f"{one.kernel:58.58} {one.chip:5} {one.bytes:6.1f} {one.instructions:6.1f} {one.memory:9.2f} "
                f"{one.issue:8.2f} {one.busiest:8.2f} {one.registers:4}  {one.bound_by}",
                flush=True,
            )
        if asked.out:  # after each kernel: a run that is cut off leaves what it has found
            write(asked.out, chips, found)
    print("bound by memory:")
    for name, row in tally(found).items():
        print(f"  {name:24}", "  ".join(f"{chip} {count:>10}" for chip, count in row.items()))


def write(path: Path, chips: list[Chip], found: list[Bound]) -> None:
    """Write what was found so far."""
    rows = [{**rounded(one), "bound_by": one.bound_by} for one in found]
    document = {"kind": "gpu-static", "what": HEADER, "triton": triton.__version__}
    document |= {"chips": [one._asdict() for one in chips], "bound_by_memory": tally(found)}
    path.write_text(json.dumps({**document, "bounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
