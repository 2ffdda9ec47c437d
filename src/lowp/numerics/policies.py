"""The effect of a whole policy on a profiled model, and the cheapest policy that keeps enough of its signal."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from lowp import casts, formats, presets
from lowp.casts import Cast
from lowp.cost import cost
from lowp.errors import InvalidInput
from lowp.formats import Format
from lowp.numerics.advice import modules_of_contractions
from lowp.numerics.blocks import BlockLayout, layout_of
from lowp.numerics.part import parameter_key
from lowp.numerics.prediction import Effect, effect, sensitivity
from lowp.numerics.record import Key, Record
from lowp.policy import Operands, Policy, Rule


class Reading(NamedTuple):
    """A tensor that a product reads, or that an op writes, under a cast: in which product, in which layout."""

    key: Key
    cast: Cast
    product: str = ""
    layout: BlockLayout | None = None

    def effect(self, record: Record, loss_scale: float = 1.0) -> Effect:
        """What the cast does to the tensor."""
        scale = loss_scale if self.key.phase == "backward" else 1.0
        blocks = None if self.layout is None else record.part.blocks.get((self.key, self.layout))
        return effect(record.tensors[self.key], self.cast, scale, blocks)


def effects(record: Record, policy: Policy, loss_scale: float = 1.0) -> dict[Key, Effect]:
    """Return the effect of the policy by tensor; tensors that no rule rounds are left out.

    Of several casts by which products read one tensor, the one that leaves least of its signal counts. A gradient of a
    weight is an output of its product. Raises InvalidInput for an empty record.
    """
    record.require_content()
    found: dict[Key, Effect] = {}
    for place in record.ops:
        for one in readings(record, policy, *place):
            seen = one.effect(record, loss_scale)
            found[one.key] = min(found.get(one.key, seen), seen, key=lambda one: one.signal_to_noise)
    return found


def readings(record: Record, policy: Policy, module: str, op: str) -> Iterator[Reading]:
    """The recorded tensors of an op that the policy rounds, once for each product and cast."""
    seen = record.ops[module, op]
    rule = policy.match(op, seen.op_class, module)
    for product, role, cast, hadamard in () if rule is None else _casts(rule):
        if cast is None:
            continue
        keys = [Key(module, op, role, "backward" if role == "grad" else "forward")]
        if role == "weight":
            keys += [parameter_key(name, "weight", "step") for name in seen.named(role)]
        elif role == "output" and seen.op_class == "contraction":
            keys += [parameter_key(name, "weight_grad", "backward") for name in seen.parameters.values()]
        layout = layout_of(op, product, role, cast.format, hadamard)
        yield from (Reading(key, cast, product, layout) for key in keys if key in record.tensors)


def _casts(rule: Rule) -> Iterator[tuple[str, str, Cast | None, int]]:
    """By product, role of what it reads or writes, the cast, and how many numbers are rotated before it.

    What backward reads of the forward pass is as forward has rounded it, where no cast is named for the product.
    """
    yield "forward", "input", rule.input, 0
    yield "forward", "weight", rule.weight, 0
    yield "saved", "input", rule.saved, 0
    yield "", "output", rule.output, 0
    for product, other in (("input_gradient", "weight"), ("weight_gradient", "input")):
        own: Operands = getattr(rule, product) or Operands()
        if own.other is not None:
            yield product, other, own.other, own.hadamard
        yield product, "grad", own.grad or rule.grad or rule.output, own.hadamard


_READ = {"forward": ("input", "weight"), "input_gradient": ("grad", "weight"), "weight_gradient": ("grad", "input")}


# the casts of which an operand of a product has the first that is given
_AS = {
    "forward": ("forward",),
    "input_gradient": ("input_gradient", "forward"),
    "weight_gradient": ("weight_gradient", "saved", "forward"),
}


class Product(NamedTuple):
    """The effects on the operands of a product."""

    operands: list[Effect]

    @property
    def flushed(self) -> float:
        """The share of an operand that becomes zero, of the one that loses more."""
        return max(one.flushed for one in self.operands)

    @property
    def error(self) -> float:
        """The mean square error that rounding adds to the product, as a share of its mean square, to first order."""
        return sum(one.error for one in self.operands)


def products(record: Record, policy: Policy, loss_scale: float = 1.0) -> dict[tuple[str, str], dict[str, Product]]:
    """By module and op of a product, what the policy does to the operands of each of its three products.

    Backward reads of the forward pass what that has rounded, but for operands that have a cast there.
    """
    found: dict[tuple[str, str], dict[str, Product]] = {}
    for place, seen in record.ops.items():
        if seen.op_class != "contraction":
            continue
        found_by = {
            (one.product, one.key.role): one.effect(record, loss_scale) for one in readings(record, policy, *place)
        }
        for product, roles in _READ.items():
            given = (
                next((found_by[one, role] for one in _AS[product] if (one, role) in found_by), None) for role in roles
            )
            if operands := [one for one in given if one is not None]:
                found.setdefault(place, {})[product] = Product(operands)
    return found


def sensitivities(record: Record, policy: Policy) -> dict[str, float]:
    """By tensor of a product that the policy rounds: how far that alone is predicted to move the loss.

    Weights are named by their parameter, outputs and inputs by module, op and role. The gradient of an input is that of
    all who read it: it tells of the tensor rounded once and for all.
    """
    return {name: change for place in record.ops for name, change in _changes(record, policy, *place)}


def _changes(record: Record, policy: Policy, module: str, op: str) -> Iterator[tuple[str, float]]:
    """Of an op the names of the tensors that forward rounds, and how far each alone moves the loss."""
    for one in readings(record, policy, module, op):
        key, spectrum, is_weight = one.key, record.tensors[one.key], one.key.phase == "step"
        updates = record.updates.get(key.path) if is_weight else None
        slope = updates.gradient_energy if updates is not None else record.part.slopes.get(key)
        if one.product not in ("forward", "") or slope is None:  # others move gradients
            continue
        if (key, one.layout) in record.part.blocks and spectrum.tensors:
            mean_square = spectrum.sum_squares / max(spectrum.count, 1)
            change = math.sqrt(one.effect(record).error * mean_square * slope.sum() / spectrum.tensors)
        else:
            change = sensitivity(slope, one.cast, spectrum)
        yield key.path if is_weight else str(key), change


def worst(found: Mapping[Key, Effect], count: int = 5) -> list[tuple[Key, Effect]]:
    """Return the tensors that suffer most: first those that overflow, then those that keep least of their signal."""

    def order(pair: tuple[Key, Effect]) -> tuple[float, float]:
        ratio = pair[1].signal_to_noise
        return -pair[1].overflow, ratio if math.isfinite(ratio) else math.inf

    return sorted(found.items(), key=order)[:count]


# -- the layers that stay high -----------------------------------------------------------------------------------------
_HALF, _MOST_HIGH = 0.5, 0.25  # of the change of the loss, what they hold; of all layers, how many they are at most


@dataclass(frozen=True)
class HighLayers:
    """A policy with some layers in bf16, and by layer its share of the predicted change of the loss, largest first.

    The change of a layer is that of its weights, inputs and outputs, as far as they are known, rounded alone: error
    times sensitivity, added as squares.
    """

    policy: Policy
    shares: dict[str, float]
    kept: tuple[str, ...]


def high_layers(record: Record, policy: Policy, count: int | None = None) -> HighLayers:
    """Keep `count` layers of a policy in bf16, or the fewest that hold half of the predicted change of the loss.

    None stay there if those would be more than a quarter of the layers: then no layer stands out. Raises InvalidInput
    for an empty record.
    """
    record.require_content()
    bf16 = casts.parse("bf16")
    changes: dict[str, float] = {}
    for (module, op), seen in record.ops.items():
        few = any(one.cast.element.bits < bf16.element.bits for one in readings(record, policy, module, op))
        if seen.op_class == "contraction" and few:
            changes[module] = changes.get(module, 0.0) + sum(x * x for _, x in _changes(record, policy, module, op))
    whole = sum(changes.values())
    order = sorted(changes, key=lambda module: -changes[module])
    shares = {module: changes[module] / whole if whole else 0.0 for module in order}
    if count is None:
        held = list(accumulate(shares.values()))
        count = next((place for place, share in enumerate(held, 1) if share >= _HALF), len(order))
        count = 0 if count > max(_MOST_HIGH * len(order), 1) else count
    kept = tuple(order[:count])
    rules = (Rule.of("contraction", where=record.within(one), **dict.fromkeys(_ROLES, "bf16")) for one in kept)
    return HighLayers(replace(policy.before(*rules), name=policy.name), shares, kept)


_ROLES = ("input", "weight", "grad", "output")


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
    return cost(format).relative_multiplier_area if what == "area" else format.bytes / 4
