"""The cheapest policy whose operands keep enough of their signal: a format for each layer, by prediction."""

from __future__ import annotations

from dataclasses import dataclass

from lowp import formats, presets
from lowp.cost import cost
from lowp.errors import InvalidInput
from lowp.formats import Format
from lowp.numerics.advice import modules_of_contractions
from lowp.numerics.prediction import effect
from lowp.numerics.record import Record
from lowp.policy import Policy, Rule

CANDIDATES = ("e2m1", "e3m2", "e2m3", "e4m3fn", "e5m2", "e3m4", "i4s", "i8s", "e4m6", "e5m7", "e5m10", "e8m7")
_OF_GRADIENTS = 8.0  # dB by which gradients may keep less: they are averaged over the batch


@dataclass(frozen=True)
class CheapestPolicy:
    """A policy, its formats by layer, and its cost as a share of fp32's."""

    policy: Policy
    layers: dict[str, str]
    share: float
    what: str

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for name in self.layers.values():
            counts[name] = counts.get(name, 0) + 1
        shares = ", ".join(f"{name} for {count}" for name, count in sorted(counts.items()))
        return f"cheapest policy: {shares} of {len(self.layers)} layers; {self.what} {100 * self.share:.1f} % of fp32's"


def cheapest(record: Record, bits: int, what: str = "area", least_signal: float = 20.0) -> CheapestPolicy:
    """For each layer the cheapest format of `bits` bits or fewer whose operands keep `least_signal` dB, or bf16.

    `what` is the multiplier's area (the square of the significand) or the bytes of an operand. Each tensor has one
    scale of its own. Raises InvalidInput for an empty record or unknown cost.
    """
    record.require_content()
    if what not in ("area", "bytes"):
        raise InvalidInput(f"the cost must be area or bytes, not {what!r}")
    choices = [formats.parse(f"{name}@fp32/tensor") for name in CANDIDATES if formats.parse(name).bits <= bits]
    choices.sort(key=lambda format: _cost(format, what))
    layers, spent, whole = {}, 0.0, 0.0
    rules = []
    for module, keys in modules_of_contractions(record).items():
        chosen: Format = formats.parse("bf16")
        for format in choices:
            if all(
                effect(record.tensors[key], format).signal_to_noise
                >= least_signal - (_OF_GRADIENTS if key.role == "grad" else 0.0)
                for key in keys
            ):
                chosen = format
                break
        layers[module] = str(chosen)
        work = sum(seen.multiplications or 1 for (path, _), seen in record.ops.items() if path == module)
        spent, whole = spent + work * _cost(chosen, what), whole + work
        if path := record.within(module):
            name = str(chosen)
            rules.append(Rule.of("contraction", where=path, input=name, weight=name, grad=name))
    base = presets.PRESETS["bf16"].policy
    policy = Policy((*rules, *base.rules), None, base.table, f"{bits}-bit")
    return CheapestPolicy(policy, layers, spent / whole if whole else 1.0, what)


def _cost(format: Format, what: str) -> float:
    """A share of fp32's."""
    return cost(format).relative_multiplier_area if what == "area" else format.bytes / 4
