"""The first difference of two runs: the first step and tensor whose bits differ, and by how much."""

import math
import struct
from dataclasses import dataclass
from typing import Any

from lowp.errors import InvalidInput
from lowp.numerics.record import Key, Print, Record


@dataclass(frozen=True)
class Difference:
    """The first tensor in which two runs differ. `ulp` is the largest distance among the recorded numbers."""

    step: int
    key: Key
    ulp: int
    first: tuple[float, ...]
    second: tuple[float, ...]
    equal_before: int

    def __str__(self) -> str:
        where = "the recorded numbers agree, others differ" if self.ulp == 0 else f"by up to {self.ulp} ulp of fp32"
        return (
            f"the runs part at step {self.step} in {self.key} ({self.key.phase}), {where}; "
            f"{self.equal_before} tensors before it are equal to the bit"
        )

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return {"step": self.step, **self.key._asdict(), "ulp": self.ulp, "equal_before": self.equal_before}


def difference(first: Record, second: Record) -> Difference | None:
    """The first difference of two runs of one model, in the order in which tensors were made; None where all is equal.

    Raises InvalidInput where the models differ, or no step was looked at in both.
    """
    second.check_model(str(first.header.get("fingerprint")))
    steps = sorted(set(first.part.prints) & set(second.part.prints))
    if not any(_pairs(first.part.prints[step], second.part.prints[step]) for step in steps):
        raise InvalidInput(
            "no tensor was recorded in the same step of both runs: profile both with --max-overhead none"
        )
    equal = 0
    for step in steps:
        for one, other in _pairs(first.part.prints[step], second.part.prints[step]):
            if one.key != other.key:
                return Difference(step, one.key, 0, one.numbers, other.numbers, equal)
            if not _equal(one, other):
                return Difference(step, one.key, _distance(one, other), one.numbers, other.numbers, equal)
            equal += 1
    return None


def _pairs(one: list[Print], other: list[Print]) -> list[tuple[Print, Print]]:
    """The tensors of a step in both runs, in order: of those that a budget let both runs look at."""
    modules = {each.key.module for each in one} & {each.key.module for each in other}
    kept = ([each for each in prints if each.key.module in modules] for prints in (one, other))
    return list(zip(*kept, strict=False))


def _equal(one: Print, other: Print) -> bool:
    same = all(ulps(a, b) == 0 for a, b in zip(one.numbers, other.numbers, strict=False))
    return one.checksum == other.checksum and len(one.numbers) == len(other.numbers) and same


def _distance(one: Print, other: Print) -> int:
    return max((ulps(a, b) for a, b in zip(one.numbers, other.numbers, strict=False)), default=0)


def ulps(a: float, b: float) -> int:
    """Return the distance of two numbers in steps of fp32; 2^32 if exactly one of them is NaN."""
    if math.isnan(a) or math.isnan(b):
        return 0 if math.isnan(a) and math.isnan(b) else 1 << 32
    return abs(_place(a) - _place(b))


def _place(x: float) -> int:
    """Return the position of a number in the order of all fp32 numbers."""
    bits: int = struct.unpack("<i", struct.pack("<f", x))[0]
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)
