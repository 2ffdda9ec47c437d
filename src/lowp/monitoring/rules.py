"""What a monitor warns of: one row a kind, whose number `lowp explain` takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowp.monitoring.seen import History, Sight

_LOST = 0.95  # of the numbers of a weight
_TOO_LARGE = 0.35  # an update beside its weight
_SHRUNK = 1 / 16
_STILL = 0.75  # of the numbers of an average
_GROWN = 32.0
_LARGE = 4096.0  # an activation of which growth is told
_HALF = 65504.0
_FLUSHED = 0.5
_MANY = 0.1  # of the steps
_ENOUGH = 16  # steps of which skipped ones are counted
_IN_A_ROW = 4  # looks in which clipped gradients have the same norm
_SATURATED = 0.5
_APART = 0.02  # of log-probabilities, in nats
_ACCUMULATED = 4  # backward passes


class Symptom(NamedTuple):
    """What a rule has found: the layer, how bad it is (larger is worse), and what is said of it."""

    layer: str
    value: float
    text: str


class Check(NamedTuple):
    """A kind of alarm: its finding, how it is recognised, in how many looks in a row (None: the monitor's patience)."""

    id: str
    find: Callable[[History, Sight], Iterator[Symptom]]
    patience: int | None = None
    has_evidence: Callable[[Sight], bool] = lambda seen: True


def _has(kind: str) -> Callable[[Sight], bool]:
    return lambda seen: kind in seen.numbers


# -- weights and updates ----------------------------------------------------------------------------------------------
def _lost(history: History, seen: Sight) -> Iterator[Symptom]:
    """Find weights whose numbers had a gradient and a learning rate, and did not move."""
    for name, share in seen.numbers.get("lost", {}).items():
        if share <= _LOST:
            continue
        ends = seen.rates.get(name, 1.0) <= 0.01 * history.rates.get(name, 0.0)  # of a schedule
        if not ends and seen.rates.get(name, 1.0) and not seen.is_kept(name):
            yield Symptom(name, share, f"{share:.0%} of the updates are rounded away in {seen.dtypes.get(name, 'it')}")


def _too_large(history: History, seen: Sight) -> Iterator[Symptom]:
    weights = seen.numbers.get("weight", {})
    for name, update in seen.numbers.get("update", {}).items():
        if name in seen.matrices and weights[name] and _TOO_LARGE < (ratio := update / weights[name]) < math.inf:
            yield Symptom(name, ratio, f"an update is {ratio:.2g} times as large as the weight")


def _shrinks(history: History, seen: Sight) -> Iterator[Symptom]:
    for name, size in seen.numbers.get("weight", {}).items():
        first = history.weights.get(name, 0.0)
        if name in seen.matrices and first and size < _SHRUNK * first:
            yield Symptom(name, first / max(size, 1e-30), f"its weights have shrunk from {first:.2g} to {size:.2g}")


def _unreached(history: History, seen: Sight) -> Iterator[Symptom]:
    """Find modules none of whose parameters has a gradient, while others have."""
    gradients = seen.numbers.get("gradient", {})
    if not any(gradients.values()):
        if gradients and not (history.has_learned or seen.half):
            yield Symptom("", 1.0, "all gradients of all layers are zero")
        return
    if not seen.missing and all(gradients.values()):
        return
    reached = {_module(name) for name, norm in gradients.items() if norm}
    zero = {_module(name) for name, norm in gradients.items() if norm == 0 and name in seen.matrices}
    for path in dict.fromkeys(_module(name) for name in seen.missing):
        if path not in reached and path not in zero:
            yield Symptom(path, 1.0, "no gradient reaches its parameters, which the optimizer holds")
    for path in sorted(zero - reached):
        yield Symptom(path, 1.0, "all its gradients are zero")


def _frozen(history: History, seen: Sight) -> Iterator[Symptom]:
    """Find parameters that have had gradients, and are no longer trained."""
    for name in seen.left:
        yield Symptom(name, 1.0, "it was trained, and no optimizer holds it any more")


def _dtypes(history: History, seen: Sight) -> Iterator[Symptom]:
    for name, dtype in seen.dtypes.items() if seen.dtypes is not history.dtypes else ():
        if (before := history.dtypes.get(name, dtype)) != dtype:
            yield Symptom(name, 1.0, f"it was {before} and is {dtype} now")


def _average(history: History, seen: Sight) -> Iterator[Symptom]:
    for name, share in seen.averages.items():
        if share > _STILL and any(seen.numbers.get("update", {}).values()):
            yield Symptom(name, share, f"{share:.0%} of its numbers have not moved, while the trained ones did")


def _ranks(history: History, seen: Sight) -> Iterator[Symptom]:
    for name, (rank, difference) in seen.apart.items():
        yield Symptom(name, 1.0, f"rank {rank} has other weights than rank 0: their sums differ by {difference:.2g}")


# -- 16 bits ----------------------------------------------------------------------------------------------------------
def _unscaled(history: History, seen: Sight) -> Iterator[Symptom]:
    if seen.scale is not None:
        return
    for path, share in seen.numbers.get("flushed", {}).items():
        if share > _FLUSHED:
            text = f"{share:.0%} of the fp16 gradient of its result are below 2^-14, without a scale"
            yield Symptom(path, share, text)
    gradients = seen.numbers.get("gradient", {})
    if seen.half and gradients and not any(gradients.values()):
        yield Symptom(seen.half[-1], 1.0, "behind its result in fp16 all gradients are zero, without a scale")


def _beyond(history: History, seen: Sight) -> Iterator[Symptom]:
    for path in seen.half:
        size = seen.numbers.get("activation", {}).get(path, 0.0)
        if not size <= _HALF / 2:
            end = f"reaches {size:.3g}" if math.isfinite(size) else "is beyond"
            yield Symptom(path, 1.0, f"its result in fp16 {end}; fp16 ends at 65504")


def _grows(history: History, seen: Sight) -> Iterator[Symptom]:
    for path, size in seen.numbers.get("activation", {}).items():
        if not _LARGE < size < math.inf:
            continue
        if (first := history.first_activation(path)) and size > _GROWN * first:
            yield Symptom(path, size / first, f"its result has grown from {first:.3g} to {size:.3g}")


def _dead(history: History, seen: Sight) -> Iterator[Symptom]:
    for path, size in seen.numbers.get("activation", {}).items():
        if size == 0:
            yield Symptom(path, 1.0, "100% of its results are zero")


def _saturates(history: History, seen: Sight) -> Iterator[Symptom]:
    for site, share in seen.saturated.items():
        if share > _SATURATED:
            yield Symptom(site, share, f"numbers were cut off in {share:.0%} of its writes under a shared exponent")


def _skips(history: History, seen: Sight) -> Iterator[Symptom]:
    if seen.scale is None:
        return
    history.skipped.append((seen.skipped, seen.steps))
    skipped, steps = (sum(column) for column in zip(*history.skipped, strict=True))
    if steps >= _ENOUGH and skipped > _MANY * steps and skipped > _ENOUGH / 2:
        yield Symptom("the loss scale", skipped, f"{skipped} of {steps} steps were skipped; it is {seen.scale:.3g} now")


def _forgotten_scale(history: History, seen: Sight) -> Iterator[Symptom]:
    if seen.scale is None:
        return
    if seen.resumed and seen.is_fresh_scale:
        yield Symptom(
            "the loss scale",
            1.0,
            f"it starts anew at {seen.scale:.3g}, while the optimizer goes on from its step {seen.resumed}",
        )
    elif seen.jump is not None:
        yield Symptom("the loss scale", 1.0, f"it jumped from {seen.jump[0]:.3g} to {seen.jump[1]:.3g}")


def _clipped_scaled(history: History, seen: Sight) -> Iterator[Symptom]:
    """Find a norm of all gradients that is the same in each step once it is multiplied by the scale: they were clipped
    while they were scaled.

    While the scale stays, that is so of gradients that are clipped rightly, too. A limit is a round number then.
    """
    norm = seen.gradient
    if seen.scale is None or seen.scale < 2 or not norm or not math.isfinite(norm):
        return
    history.scaled.append((norm, seen.scale))
    limits, scales = [one * scale for one, scale in history.scaled], [scale for _, scale in history.scaled]
    limit = max(limits)
    if len(limits) < _IN_A_ROW or limit - min(limits) > 1e-3 * limit or norm >= 1e-2:
        return
    if max(scales) > min(scales) or (_is_round(limit) and not _is_round(norm)):
        yield Symptom("the gradients", 1.0, f"their norm is {norm:.2g} in each step, {limit:.3g} before it is unscaled")


def _is_round(number: float) -> bool:
    """Whether a number has at most two digits, as those have that people choose."""
    return abs(float(f"{number:.1e}") / number - 1) < 1e-4


# -- loss -------------------------------------------------------------------------------------------------------------
def _not_finite(history: History, seen: Sight) -> Iterator[Symptom]:
    """Find the first origin of a loss that is not finite, or of weights or buffers."""
    found = _Bad.of(seen)
    if not found.any:
        history.saw_finite, history.origin = seen.step, ""
        return
    if history.origin:  # what follows is of the same
        yield Symptom(history.origin, 1.0, "")
        return
    since = f", and in step {history.saw_finite} all was finite" if history.saw_finite >= 0 else ""
    where = [] if found.has_spread else seen.suspects or found.names
    if found.has_spread:
        since += f", and by step {seen.step} a step has spread it to most weights" if since else ""
    history.origin = where[0] if where else "the loss"
    if found.buffers and not (found.results or found.loss or seen.suspects):
        yield Symptom(found.buffers[0], 1.0, f"this buffer is infinite or NaN{since}")
        return
    what, first = found.what, "its result was" if found.results and not seen.suspects else "its values were"
    text = f"{what} is infinite or NaN{since}"
    yield Symptom(history.origin, 1.0, f"{text}; {first} the first that {what} comes from" if where else text)


class _Bad(NamedTuple):
    """What is infinite or NaN: whether the loss is, and names; `has_spread`: a step has spread it to most weights."""

    loss: bool
    weights: list[str]
    gradients: list[str]
    buffers: list[str]
    results: list[str]
    has_spread: bool

    @property
    def any(self) -> bool:
        return bool(self.loss or self.weights or self.gradients or self.buffers)

    @property
    def names(self) -> list[str]:
        """Those nearest to the origin."""
        return self.results or self.buffers or self.weights or self.gradients

    @property
    def what(self) -> str:
        return "the loss" if self.loss else "a weight" if self.weights else "a gradient"

    @classmethod
    def of(cls, seen: Sight) -> _Bad:
        bad = [step for step, loss in seen.losses if not math.isfinite(loss)]
        weights = _bad(seen, "weight")
        gradients = _bad(seen, "gradient") if seen.scale is None else []  # of a scaled loss they may be
        has_spread = bool(bad) and not seen.suspects and 2 * len(weights) > len(seen.numbers.get("weight", ()))
        return cls(bool(bad), weights, gradients, _bad(seen, "buffer"), _bad(seen, "activation"), has_spread)


def _spike(history: History, seen: Sight) -> Iterator[Symptom]:
    for step, loss, largest, usual in seen.spikes:
        yield Symptom("the loss", loss / largest, f"it was {loss:.3g} in step {step}, after {usual:.3g} usually")


def _undivided(history: History, seen: Sight) -> Iterator[Symptom]:
    if seen.backwards >= _ACCUMULATED and seen.adds_up:
        text = f"{seen.backwards} backward passes a step add up means that nothing divides by {seen.backwards}"
        yield Symptom("the loss", 1.0, text)


def _mismatch(history: History, seen: Sight) -> Iterator[Symptom]:
    for name, difference in seen.compared.items():
        if not difference <= _APART:
            yield Symptom(name, difference, f"the two differ by {difference:.2g} on average")


def _bad(seen: Sight, kind: str) -> list[str]:
    numbers = seen.numbers.get(kind, {})
    if math.isfinite(sum(numbers.values())):
        return []
    found = [name for name, value in numbers.items() if not math.isfinite(value)]
    return [name or "the model" for name in found]


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


RULES = (
    Check("N401", _not_finite, 1),
    Check("N101", _lost, has_evidence=_has("lost")),
    Check("N102", _unreached, has_evidence=_has("gradient")),
    Check("N103", _too_large, has_evidence=_has("update")),
    Check("N104", _shrinks, has_evidence=_has("weight")),
    Check("N205", _beyond, has_evidence=_has("activation")),
    Check("N206", _unscaled, has_evidence=_has("activation")),
    Check("N207", _forgotten_scale, 1),
    Check("N208", _clipped_scaled, 1),
    Check("N301", _grows, has_evidence=_has("activation")),
    Check("N302", _dead, has_evidence=_has("activation")),
    Check("N303", _saturates),
    Check("N402", _skips, 1),
    Check("N403", _spike, 1),
    Check("N404", _undivided),
    Check("N501", _dtypes, 1),
    Check("N502", _frozen, 1),
    Check("N503", _ranks, 1),
    Check("N504", _average, 1, has_evidence=lambda seen: bool(seen.averages)),
    Check("N505", _mismatch, 1, has_evidence=lambda seen: bool(seen.compared)),
)
