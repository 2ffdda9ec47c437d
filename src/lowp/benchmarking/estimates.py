"""Estimates of the energy and area of a step, from a published table, and published measurements of torch.amp on GPUs.

The estimates are not measurements and do not depend on the machine that ran the step. Operations and bytes are those
counted in the step.
"""

from dataclasses import asdict, dataclass
from typing import Any

from lowp import cost
from lowp.benchmarking.contenders import Contender
from lowp.benchmarking.memory import Split
from lowp.benchmarking.operations import Operations
from lowp.cost import Estimate
from lowp.formats import FORMATS, Format, IntFormat

METHOD = (
    f"energy and area are ESTIMATES, not measurements, from {cost.SOURCE}: multiply-adds of a step, each a "
    "multiplication in the format and an addition in fp32 (of integers in int32), in picojoules; and each byte of "
    "weights, masters, gradients, optimizer state, activations and casts written to DRAM and read back once a step, "
    f"{cost.READ_ENERGY['DRAM']:g} pJ for 32 bits; area of one multiplier with its adder; ~ marks values between "
    "the rows of that table"
)
_INT32 = IntFormat("int32", 32, False)
_DRAM_PER_BYTE = cost.READ_ENERGY["DRAM"] / 4


def estimate(contender: Contender, operations: Operations, memory: Split | None) -> dict[str, Any]:
    """Return joules per step of arithmetic and of DRAM traffic, and the area of a multiply-add unit in µm²."""
    wide = FORMATS["tf32" if contender.tf32 else "fp32"]
    narrow = contender.narrow or wide
    pairs = (
        (operations.narrow, _multiply_add(narrow, contender.sums_integers)),
        (operations.total - operations.narrow, _multiply_add(wide, False)),
    )
    picojoules = sum(count / 2 * energy.value for count, (energy, _) in pairs)
    area, fp32_area = _multiply_add(narrow, contender.sums_integers)[1], _multiply_add(FORMATS["fp32"], False)[1]
    result: dict[str, Any] = {
        "format": str(narrow),
        "arithmetic_joules": picojoules * 1e-12,
        "how": "table" if all(energy.how == "table" for count, (energy, _) in pairs if count) else "interpolated",
        "unit_area_um2": area.value,
        "unit_area_relative_to_fp32": area.value / fp32_area.value,
        "unit_area_how": area.how,
    }
    if memory is not None:
        result["dram_bytes"] = 2 * sum(memory.held.values())
        result["dram_joules"] = result["dram_bytes"] * _DRAM_PER_BYTE * 1e-12
    return result


def _multiply_add(format: Format, sums_integers: bool) -> tuple[Estimate, Estimate]:
    """Return energy and area of a multiplication in a format and an addition in the width of its sums."""
    one, sums = cost.cost(format), cost.cost(_INT32 if sums_integers else FORMATS["fp32"])
    return _together(one.multiply_energy, sums.add_energy), _together(one.multiply_area, sums.add_area)


def _together(first: Estimate, second: Estimate) -> Estimate:
    how = next((one.how for one in (first, second) if one.how != "table"), "table")
    return Estimate(first.value + second.value, first.unit, how)


SOURCE = (
    "A. Bilogur's guide to mixed precision training, June 2020 (PyTorch 1.6 nightly; whole trainings, fp32 and "
    "torch.amp fp16; memory as reserved)"
)


@dataclass(frozen=True)
class PublishedRun:
    """One network on one GPU: seconds of a whole training and gigabytes of memory, in fp32 and under torch.amp."""

    gpu: str
    seconds: tuple[float, float]
    gigabytes: tuple[float, float]

    @property
    def time_ratio(self) -> float:
        """The ratio of the time under torch.amp to that in fp32."""
        return self.seconds[1] / self.seconds[0]

    @property
    def memory_ratio(self) -> float:
        """The ratio of the memory under torch.amp to that in fp32."""
        return self.gigabytes[1] / self.gigabytes[0]


def _time(minutes: int, seconds: int) -> float:
    return 60.0 * minutes + seconds


_ROWS: dict[str, tuple[PublishedRun, ...]] = {
    "rossmann": (
        PublishedRun("V100", (_time(10, 10), _time(10, 55)), (1.19, 1.19)),
        PublishedRun("T4", (_time(8, 43), _time(8, 39)), (0.932, 0.936)),
    ),
    "unet": (
        PublishedRun("V100", (_time(8, 25), _time(7, 58)), (4.33, 3.71)),
        PublishedRun("T4", (_time(13, 7), _time(9, 14)), (4.26, 2.67)),
    ),
    "bert": (
        PublishedRun("V100", (_time(17, 38), _time(8, 10)), (9.62, 8.76)),
        PublishedRun("T4", (_time(55, 17), _time(20, 27)), (9.35, 8.49)),
    ),
}


def published(recipe: str) -> dict[str, Any] | None:
    """Return the published figures of a recipe as plain values with their source; None for other recipes."""
    if recipe not in _ROWS:
        return None
    rows = [{**asdict(row), "time_ratio": row.time_ratio, "memory_ratio": row.memory_ratio} for row in _ROWS[recipe]]
    return {"source": SOURCE, "size": "full", "gpus": rows}
