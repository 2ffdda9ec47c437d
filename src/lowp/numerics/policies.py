"""The effect of a whole policy on a profiled model, and the cheapest policy that keeps enough of its signal."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lowp import formats, presets
from lowp.casts import Cast
from lowp.cost import cost
from lowp.errors import InvalidInput
from lowp.formats import Format
from lowp.numerics.advice import modules_of_contractions
from lowp.numerics.prediction import Effect, effect, sensitivity
from lowp.numerics.record import Key, OpSeen, Record
from lowp.policy import Operands, Policy, Rule


def effects(record: Record, policy: Policy, loss_scale: float = 1.0) -> dict[Key, Effect]:
    """Return the effect of the policy by tensor; tensors that no rule rounds are left out.

    Of several casts by which products read one tensor, the one that leaves least of its signal counts. A gradient of a
    weight is an output of its product. Raises InvalidInput for an empty record.
    """
    record.require_content()
    found: dict[Key, Effect] = {}
    for (module, op), seen in record.ops.items():
        rule = policy.match(op, seen.op_class, module)
        for key, cast in () if rule is None else _casts(module, op, seen, rule):
            if key in record.tensors and cast is not None:
                scale = loss_scale if key.phase == "backward" else 1.0
                one = effect(record.tensors[key], cast, scale)
                found[key] = min(found.get(key, one), one, key=lambda one: one.signal_to_noise)
    return found


def _casts(module: str, op: str, seen: OpSeen, rule: Rule) -> Iterator[tuple[Key, Cast | None]]:
    products = [one or Operands() for one in (rule.input_gradient, rule.weight_gradient)]
    inputs = rule.input, rule.saved, *(one.input for one in products)
    weights = rule.weight, *(one.weight for one in products)
    for role, casts in (("input", inputs), ("weight", weights), ("output", (rule.output,))):
        for cast in casts:
            yield Key(module, op, role, "forward"), cast
    for product in products:
        yield Key(module, op, "grad", "backward"), product.grad or rule.grad or rule.output
    for role, name in seen.parameters.items():
        path, _, own = name.rpartition(".")
        if role.partition(" ")[0] == "weight":
            for cast in weights:
                yield Key(path, own, "weight", "step"), cast
        if seen.op_class == "contraction":
            yield Key(path, own, "weight_grad", "backward"), rule.output


def sensitivities(record: Record, policy: Policy) -> dict[str, float]:
    """By tensor of a product that the policy rounds: how far that alone is predicted to move the loss.

    Weights are named by their parameter, outputs and inputs by module, op and role. The gradient of an input is that of
    all who read it: it tells of the tensor rounded once and for all.
    """
    found: dict[str, float] = {}
    for (module, op), seen in record.ops.items():
        rule = policy.match(op, seen.op_class, module)
        if rule is None:
            continue
        for name in seen.named("weight"):
            path, _, own = name.rpartition(".")
            weights = record.tensors.get(Key(path, own, "weight", "step"))
            if rule.weight is not None and name in record.updates and weights is not None:
                found[name] = sensitivity(record.updates[name], rule.weight, weights)
        for role, cast in (("input", rule.input), ("output", rule.output)):
            key = Key(module, op, role, "forward")
            if cast is not None and key in record.part.slopes and key in record.tensors:
                found[str(key)] = sensitivity(record.part.slopes[key], cast, record.tensors[key])
    return found


def worst(found: dict[Key, Effect], count: int = 5) -> list[tuple[Key, Effect]]:
    """Return the tensors that suffer most: first those that overflow, then those that keep least of their signal."""

    def order(pair: tuple[Key, Effect]) -> tuple[float, float]:
        ratio = pair[1].signal_to_noise
        return -pair[1].overflow, ratio if math.isfinite(ratio) else math.inf

    return sorted(found.items(), key=order)[:count]


# -- the cheapest policy -----------------------------------------------------------------------------------------------
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
