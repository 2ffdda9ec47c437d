"""The strips of a profile's report: for each tensor how many numbers lie in each octave, in the order of the layers.

The script of the report draws them and counts what lies beyond the limits of the chosen format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowp.formats import FORMATS, FloatFormat
from lowp.numerics.record import Key, Octaves, Record

MAPS = {
    "gradients": ("Gradients of activations", "grad"),
    "weight_gradients": ("Gradients of weights", "weight_grad"),
    "activations": ("Activations", "output"),
    "weights": ("Weights", "weight"),
    "ratios": ("Updates beside their weights", "update"),
}
FORMATS_SHOWN = ("fp16", "bf16", "e5m2", "e4m3fn", "tf32", "fp32")
_SCALED = ("gradients", "weight_gradients")
_BIAS = 127
_MOST_ROWS = 160  # of a map; of a larger model a row is a block
_MOST_STEP_BYTES = 120_000
_SMALLEST, _LARGEST = -64, 40  # octaves that the axis may reach
_LARGEST_RATIO = 4  # of updates; a weight that is zero has larger ones
_SUMS = {"add": "sum", "sub": "difference", "mul": "product", "div": "quotient", "truediv": "quotient", "cat": "joined"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def raised(text: str) -> str:
    """Return the text with the exponents of powers of two raised: ``2^-16`` becomes ``2⁻¹⁶``."""
    return re.sub(r"\b2\^(-?\d+)(?!\d*\.\d)", lambda found: f"2{found[1].translate(_RAISED)}", text)


def scale_words(scale: float) -> str:
    """Return a loss scale as a power of two, or as a number where it is none."""
    power = math.log2(scale)
    return f"2^{power:.0f}" if power.is_integer() else f"{scale:.4g}"


@dataclass
class _Row:
    """A strip: the block that it belongs to, its label there, its numbers in all steps and in each of some."""

    block: str
    label: str
    all: Octaves
    maximum: float
    powers: dict[int, int] = field(default_factory=dict)
    steps: list[Octaves | None] = field(default_factory=list)
    other: Octaves | None = None

    def __add__(self, other: _Row) -> _Row:
        powers = {one: self.powers.get(one, 0) + other.powers.get(one, 0) for one in {**self.powers, **other.powers}}
        steps = [_sum(pair) for pair in zip(self.steps, other.steps, strict=True)]
        largest = max(self.maximum, other.maximum)
        others = _sum((self.other, other.other))
        return _Row(self.block, self.block, self.all + other.all, largest, powers, steps, others)

    def document(self) -> list[Any]:
        """Plain data for the script."""
        powers = [number for pair in sorted(self.powers.items()) for number in pair]
        steps = [0 if one is None else [one.first, _shades(one.counts)] for one in self.steps]
        other = 0 if self.other is None else [self.other.first, self.other.counts]
        row = [self.block, self.label, self.all.first, self.all.counts, self.maximum, powers, steps, other]
        while not row[-1]:
            row.pop()
        return row


def strips(record: Record, other: Record | None = None) -> dict[str, Any]:
    """Return the data of the script; `other` is a second run of the model, beside the first."""
    rows: dict[str, list[_Row]] = {name: [] for name in MAPS}
    steps = _shown_steps(record)
    for key in _in_order(record):
        row = _row(record, other, key, steps)
        name = next((name for name, (_, role) in MAPS.items() if key.role == role), None)
        op = record.ops.get((key.module, key.op))
        if name is None or row is None or (key.role == "grad" and op is not None and op.op_class == "wide"):
            continue  # gradients of losses are fp32 in every precision
        rows[name].append(row)
    left_out = {name: max(0, len(_fewer(found)) - _MOST_ROWS) for name, found in rows.items()}
    shown = {name: _fewer(found)[:_MOST_ROWS] for name, found in rows.items()}
    every = [row.all for found in shown.values() for row in found]
    lowest = min([one.first for one in every] + [-27])
    highest = max([one.first + len(one.counts) for one in every] + [18])
    return {
        "maps": {name: [row.document() for row in found] for name, found in shown.items()},
        "left_out": left_out,
        "axis": [max(lowest - 1, _SMALLEST), min(highest + 1, _LARGEST)],  # the first and the last binary place
        "steps": [_step(record, step) for step in steps],
        "formats": {name: _limits(name) for name in FORMATS_SHOWN},
        "scaled": _SCALED,
    }


def _limits(name: str) -> dict[str, Any]:
    format = FORMATS[name]
    assert isinstance(format, FloatFormat)
    return {
        "smallest": format.min_exponent - format.precision,
        "normal": format.min_exponent,
        "maximum": format.maximum,
        "precision": format.precision,
    }


# -- steps ------------------------------------------------------------------------------------------------------------
def _shown_steps(record: Record) -> list[int]:
    """Return the recorded steps among which one can choose: the first, the last and some between them."""
    recorded = sorted(record.part.octaves)
    tensors = sum(key.role not in ("input", "update") for key in record.tensors)
    most = max(2, min(12, _MOST_STEP_BYTES // (28 * tensors or 1)))
    if len(recorded) <= most:
        return recorded
    return sorted({recorded[round(place * (len(recorded) - 1) / (most - 1))] for place in range(most)})


def _step(record: Record, number: int) -> dict[str, Any]:
    seen = next((one for one in record.steps if one.step == number), None)
    words = [f"step {number}"]
    if seen is not None and seen.loss is not None and math.isfinite(seen.loss):
        words.append(f"loss {seen.loss:.4g}")
    if seen is not None and seen.scale:
        words.append(raised(f"loss scale {scale_words(seen.scale)}"))
    return {"step": number, "words": ", ".join(words)}


def _shades(counts: Iterable[int]) -> str:
    """Return counts to a factor of 2^(1/4), in a letter each: that of zero is ``#``."""
    return "".join(chr(35 + (1 + round(2 * math.log2(count)) if count else 0)) for count in counts)


# -- rows -------------------------------------------------------------------------------------------------------------
def _row(record: Record, other: Record | None, key: Key, steps: list[int]) -> _Row | None:
    """Return the strip of a tensor; None for one without numbers."""
    label = _label(record, key)
    if key.role == "update":
        found, beside = (_ratios(run, key.path) for run in (record, other))
        return None if found is None else _Row(block_of(key.module), label, found, 0.0, {}, [], beside)
    seen = record.tensors[key]
    if not seen.nonzero:
        return None
    second = None if other is None or key not in other.tensors else Octaves.of(other.tensors[key])
    powers = {int(place) - _BIAS: int(seen.powers[place]) for place in np.flatnonzero(seen.powers)}
    by_step = [record.part.octaves.get(step, {}).get(key) for step in steps]
    return _Row(block_of(key.module), label, Octaves.of(seen), seen.maximum, powers, by_step, second)


def _ratios(record: Record | None, parameter: str) -> Octaves | None:
    """Return how many updates are which power of two of their weight; None without one."""
    if record is None or parameter not in record.updates:
        return None
    found: dict[int, int] = {}
    for ratio, count in record.updates[parameter].ratios().items():
        found[min(-ratio, _LARGEST_RATIO)] = found.get(min(-ratio, _LARGEST_RATIO), 0) + count
    if not found:
        return None
    return Octaves(min(found), tuple(found.get(one, 0) for one in range(min(found), max(found) + 1)))


def _sum(parts: Iterable[Octaves | None]) -> Octaves | None:
    first, second = parts
    return second if first is None else first if second is None else first + second


def _fewer(rows: list[_Row]) -> list[_Row]:
    """Return the rows, or one row a block where there are too many."""
    if len(rows) <= _MOST_ROWS:
        return rows
    blocks: dict[str, _Row] = {}
    for row in rows:
        name = row.block or row.label
        blocks[name] = blocks[name] + row if name in blocks else row
    return list(blocks.values())


def block_of(path: str) -> str:
    """Return the block of a module: its path to the first number, such as layer1; otherwise what contains it."""
    parts = path.split(".")
    last = len(parts) - 1
    numbers = (place for place, part in enumerate(parts) if part.isdigit() or (place < last and part[-1:].isdigit()))
    number = next(numbers, last - 1)
    return ".".join(parts[: number + 1]) or path


def _label(record: Record, key: Key) -> str:
    """Return the name of a tensor within its block: a parameter's, or a module and op; a sum has a line of code."""
    block = block_of(key.module)
    inside = key.module.removeprefix(block).lstrip(".")
    if key.phase == "step" or key.role == "weight_grad":
        return f"{inside}.{key.op}".lstrip(".")
    op = record.ops.get((key.module, key.op))
    name = key.op.replace("scaled_dot_product_attention", "attention").replace("_", " ")
    name = f"{_SUMS[key.op]} ({key.op})" if key.op in _SUMS else name
    if op is not None and op.op_class != "contraction" and key.op in _SUMS and op.line:
        name += f", {op.line}"
    return " · ".join(filter(None, (inside, name)))


def _in_order(record: Record) -> list[Key]:
    """Return the tensors in the order in which their ops first ran, blocks together; modules without an op are last.

    Outside of modules an op is a block.
    """
    ops = {op: place for place, op in enumerate(record.ops)}
    modules: dict[str, int] = {}
    blocks: dict[str, int] = {}
    for place, (module, _) in enumerate(record.ops):
        modules.setdefault(module, place)
        blocks.setdefault(block_of(module), place)

    def place_of(key: Key) -> tuple[int, int]:
        own = ops.get((key.module, key.op), modules.get(key.module, len(ops)))
        return (blocks.get(block_of(key.module), len(ops)) if key.module else own), own

    return sorted(record.tensors, key=place_of)
