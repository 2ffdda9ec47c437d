"""The costs of formats in silicon: published energies and areas, and estimates interpolated between them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lowp.cost import SOURCE, cost
from lowp.errors import InvalidInput
from lowp.formats import IntFormat, ScaledFormat, parse
from lowp.recipes import results
from lowp.recipes.recording.runs import NOBODY, Onlooker


def record_cost(formats: Sequence[str], onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Return energy and area of multiplication and addition, and the energy of a read, of each format.

    Raises InvalidInput without formats, and UnknownName for an unknown one.
    """
    if not formats:
        raise InvalidInput("--formats is empty: give formats, such as fp32,bf16,e4m3fn,int8")
    return {
        **results.header("figure-cost", results.command_line()),
        "source": SOURCE,
        "formats": [_row(name) for name in dict.fromkeys(formats)],
    }


def _row(name: str) -> dict[str, Any]:
    format = parse(name)
    costs, element = cost(format), format.element if isinstance(format, ScaledFormat) else format
    return {
        "name": name,
        "significand_bits": costs.significand_bits,
        "is_integer": isinstance(element, IntFormat),
        "energy": {"multiply": asdict(costs.multiply_energy), "add": asdict(costs.add_energy)},
        "read": {memory: asdict(energy) for memory, energy in costs.read_energy.items()},
        "area": {"multiply": asdict(costs.multiply_area), "add": asdict(costs.add_area)},
    }
