"""Estimates of the energy and area of a step on hardware with arithmetic units of its formats, from a published table.

These are not measurements and do not depend on the machine that ran the step. Operations and bytes are those counted
in the step.
"""

from __future__ import annotations

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
