"""What a monitor warns of: one row a kind, whose number `lowp explain` takes."""

from __future__ import annotations

import math
import statistics
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
_SPIKE = 4.0  # times the largest of the latest losses
_ENOUGH = 16  # losses that say what is usual
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
        ends = seen.rates.get(name, 1.0) <= 0.01 * history.rates.get(name, 0.0)  # of a schedule
        if share > _LOST and not ends and name not in seen.kept and seen.rates.get(name, 1.0):
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
        if gradients and not (history.reached or seen.half):
            yield Symptom("", 1.0, "all gradients of all layers are zero")
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
    for name, dtype in seen.dtypes.items():
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
        first = history.first_activation(path)
        if first and math.isfinite(size) and size > _LARGE and size > _GROWN * first:
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
    """
    norm = seen.gradient
    if seen.scale is None or seen.scale < 2 or not norm or not math.isfinite(norm):
        return
    history.scaled.append(norm * seen.scale)
    few = history.scaled
    if len(few) == few.maxlen and max(few) - min(few) < 1e-3 * max(few) and norm < 1e-2:
        yield Symptom(
            "the gradients", 1.0, f"their norm is {norm:.2g} in each step, {max(few):.3g} before it is unscaled"
        )


# -- loss -------------------------------------------------------------------------------------------------------------
def _not_finite(history: History, seen: Sight) -> Iterator[Symptom]:
    """Find the first origin of a loss that is not finite, or of weights or buffers."""
    bad = [step for step, loss in seen.losses if not math.isfinite(loss)]
    weights = _bad(seen, "weight")
    gradients = [] if seen.scale is not None else _bad(seen, "gradient")
    buffers, results = _bad(seen, "buffer"), _bad(seen, "activation")
    if not (bad or weights or gradients or buffers):
        history.saw_finite, history.origin = seen.step, ""
        return
    if history.origin:  # what follows is of the same
        yield Symptom(history.origin, 1.0, "")
        return
    since = f", and in step {history.saw_finite} all was finite" if history.saw_finite >= 0 else ""
    where = seen.suspects or results or buffers or weights or gradients
    if not seen.suspects and bad and bad[0] < seen.step and 2 * len(weights) > len(seen.numbers.get("weight", ())):
        where = []  # a step has spread it to all
        since += f", and by step {seen.step} a step has spread it to most weights" if since else ""
    history.origin = where[0] if where else "the loss"
    if buffers and not (results or bad or seen.suspects):
        yield Symptom(buffers[0], 1.0, f"this buffer is infinite or NaN{since}")
        return
    what = "the loss" if bad else "a weight" if weights else "a gradient"
    first = f"its {'values were' if seen.suspects or not results else 'result was'} the first that {what} comes from"
    text = f"{what} is infinite or NaN{since}"
    yield Symptom(history.origin, 1.0, f"{text}; {first}" if where else text)


def _spike(history: History, seen: Sight) -> Iterator[Symptom]:
    if len(history.losses) < _ENOUGH:
        return
    usual, most = statistics.median(history.losses), max(history.losses)
    for step, loss in seen.losses:
        if math.isfinite(loss) and most > 0 and loss > _SPIKE * most and loss > 2 * _SPIKE * usual:
            yield Symptom("the loss", loss / most, f"it was {loss:.3g} in step {step}, after {usual:.3g} usually")


def _undivided(history: History, seen: Sight) -> Iterator[Symptom]:
    if seen.backwards >= _ACCUMULATED and seen.adds_up:
        text = f"{seen.backwards} backward passes a step add up means that nothing divides by {seen.backwards}"
        yield Symptom("the loss", 1.0, text)


def _mismatch(history: History, seen: Sight) -> Iterator[Symptom]:
    for name, difference in seen.compared.items():
        if not difference <= _APART:
            yield Symptom(name, difference, f"the two differ by {difference:.2g} on average")


def _bad(seen: Sight, kind: str) -> list[str]:
    found = [name for name, value in seen.numbers.get(kind, {}).items() if not math.isfinite(value)]
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
    Check("N505", _mismatch, has_evidence=lambda seen: bool(seen.compared)),
)
