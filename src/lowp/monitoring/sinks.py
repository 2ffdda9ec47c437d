"""Where the numbers of a monitor go: a JSONL file, TensorBoard, a run of W&B, or any function of a dictionary."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowp.errors import InvalidInput
from lowp.monitoring.alarms import Alarm
from lowp.monitoring.log import JsonLines
from lowp.monitoring.seen import Sight, group_of
from lowp.numerics.models import Models

_MEANINGS = {"activation": "activation", "gradient": "gradient", "ratio": "update_to_weight", "lost": "lost"}

# a path, a function of one record, or an object with `add_scalar` or `log`
Sink = Any


def record_of(seen: Sight, alarms: Sequence[Alarm], seconds: float) -> dict[str, Any]:
    """Return one look as plain data.

    step, time (seconds since the beginning), loss, gradient (the norm of all), scale and skipped if the loss is scaled;
    groups: by layer group the largest `activation`, the norm of its `gradient`, the median `update_to_weight` and the
    largest share `lost` by rounding; alarms: of this look. Numbers that are infinite or NaN are None.
    """
    groups: dict[str, dict[str, list[float]]] = {}
    numbers = seen.numbers
    weights = numbers.get("weight", {})
    ratios = {name: update / weights[name] for name, update in numbers.get("update", {}).items() if weights[name]}
    kinds = {**numbers, "ratio": ratios}
    for kind, meaning in _MEANINGS.items():
        for name, value in kinds.get(kind, {}).items():
            path = name if kind == "activation" else name.rpartition(".")[0]
            groups.setdefault(group_of(path) or "model", {}).setdefault(meaning, []).append(value)
    found: dict[str, Any] = {"step": seen.step, "time": round(seconds, 3)}
    for name, number in (("loss", seen.loss), ("gradient", seen.gradient), ("scale", seen.scale)):
        if number is not None:
            found[name] = _finite(number)
    if seen.scale is not None:
        found["skipped"] = seen.skipped
    found["groups"] = {
        group: {meaning: _finite(_summary(meaning, values)) for meaning, values in of.items()}
        for group, of in groups.items()
    }
    found["alarms"] = [alarm.document() for alarm in alarms]
    return found


def _summary(meaning: str, values: list[float]) -> float:
    if meaning == "gradient":
        return math.sqrt(sum(value * value for value in values))
    if meaning == "update_to_weight":
        return sorted(values)[len(values) // 2]
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by flat names, such as ``lowp/blocks.0/gradient``."""
    for name in ("loss", "gradient", "scale", "skipped"):
        if record.get(name) is not None:
            yield f"lowp/{name}", record[name]
    for group, of in record["groups"].items():
        for meaning, value in of.items():
            if value is not None:
                yield f"lowp/{group}/{meaning}", value
    yield "lowp/alarms", len(record["alarms"])


def sinks_of(given: Sequence[Sink] | Sink, models: Models, precision: Any) -> list[Callable[[dict[str, Any]], object]]:
    """Return functions of a record for the sinks that a user gives; raises InvalidInput for anything else."""
    single = isinstance(given, (str, Path)) or not isinstance(given, (list, tuple))
    return [_sink(one, models, precision) for one in ([given] if single else given)]


def _sink(one: Sink, models: Models, precision: Any) -> Callable[[dict[str, Any]], object]:
    if isinstance(one, (str, Path)):
        return JsonLines(Path(one), models.header(precision))
    if callable(getattr(one, "add_scalar", None)):
        return lambda record: [one.add_scalar(name, value, record["step"]) for name, value in scalars(record)]
    if callable(getattr(one, "log", None)):
        return lambda record: one.log(dict(scalars(record)), step=record["step"])
    if callable(one):
        return one  # type: ignore[no-any-return]
    raise InvalidInput(
        f"{type(one).__name__} is not a sink: give a path, a function of a dictionary, or an object with add_scalar or "
        "log"
    )
