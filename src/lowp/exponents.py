"""Shared exponents that belong to places: which entry a tensor is written under, and what all entries remember.

A place is one tensor that one operation writes at one spot of the step, named in words: "output of 0 linear", "weight
gradient of layer1.0.conv1 conv2d", "update of fc.bias". All places of one cast are one vectorised state; the maxima of
a step's writes are observed together at its end, which is also when ranks agree on them. What is written outside of
training (no gradients recorded) has places of its own, so that an evaluation changes nothing of the training.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.3 and algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lowp import casts, distributed
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.formats import PowerOfTwo, ScaledFormat
from lowp.kernels.mantissas import current_exponent, has_mantissas, to_mantissas, values
from lowp.scaling import Autoflex, Reactive, Written

__all__ = ["Flush", "PlaceSite", "SharedExponents", "Summary", "class_of", "scaling_of"]

_VERSION = 1
CLASSES = ("weights", "activations", "activation gradients", "weight gradients", "updates", "optimizer state")
_CLASS_OF_ROLE = {
    "weight": "weights",
    "buffer": "activations",
    "update": "updates",
    "gradient": "weight gradients",
    "weight gradient": "weight gradients",
    "bias gradient": "weight gradients",
    "output": "activations",
}


def class_of(place: str) -> str:
    """The class of tensors that a place belongs to: weights, activations, updates ..."""
    role = place.partition(" of ")[0].rstrip(" 0123456789")
    if role in _CLASS_OF_ROLE:
        return _CLASS_OF_ROLE[role]
    return "activation gradients" if role.endswith("gradient") else "optimizer state"


def scaling_of(cast: Cast) -> Autoflex | Reactive:
    """The scaling that a cast describes; raises InvalidInput for one that no shared exponent of int16 can have."""
    spec, format = cast.scaling, cast.format
    if not has_mantissas(cast) or spec is None or spec.kind in ("current", "delayed"):
        raise InvalidInput(
            f"{cast}: exponents that belong to places are for int16 under one power of two, with the scaling autoflex, "
            "frozen, reactive or static(E), as in flex16+5:autoflex"
        )
    assert isinstance(format, ScaledFormat) and isinstance(format.scale, PowerOfTwo)
    low, high = format.scale.min_exponent, format.scale.max_exponent
    if spec.exponent is not None:
        low = high = spec.exponent
    moves = spec.kind in ("autoflex", "reactive")
    guess = Autoflex(16, spec.window, headroom=spec.headroom, start_headroom=spec.headroom, adapt=moves)
    guess = Autoflex(**{**guess.__dict__, "min_exponent": low, "max_exponent": high})
    return Reactive(guess=guess) if spec.kind == "reactive" else guess


class Seen(NamedTuple):
    """What one write saw: numbers on the CPU, 0-d tensors on an accelerator, in the order of `Written`."""

    mantissa: Any
    nonfinite: Any
    vanished: Any
    overflowed: Any
    crowded: Any
    elements: Any


class Flush(NamedTuple):
    """What a watcher is told of one step, by entry: exponents and predictions as they were at the writes."""

    places: list[str]
    written: Tensor  # bool[n]
    mantissa: Tensor  # int32[n], Γ
    exponent: Tensor  # int32[n], log2 κ
    predicted: Tensor | None  # fp64[n], χ; None of scalings that predict no maximum


@dataclass
class Summary:
    """Sums over writes; `raises_needed`: maxima that the exponent of the write before could not have held."""

    places: int = 0
    writes: int = 0
    saturated: int = 0
    moved: int = 0
    nonfinite: int = 0
    raises_needed: int = 0
    raises_in_time: int = 0
    measured: int = 0
    headroom_sum: float = 0.0

    @property
    def headroom_bits(self) -> float:
        """The mean of log2(32768 / Γ) over the writes that were not all zero."""
        return self.headroom_sum / self.measured if self.measured else math.nan


_COUNTS = ("raises_needed", "raises_in_time", "headroom_sum", "measured")


class _Group:
    """The entries of one cast, in training or outside of it."""

    def __init__(self, cast: Cast, device: torch.device) -> None:
        self.cast, self.scaling, self.device = cast, scaling_of(cast), device
        self.names: dict[str, int] = {}
        self.state: Any = self.scaling.init(device, 0)
        self.counts = {name: torch.zeros(0, dtype=torch.float64, device=device) for name in _COUNTS}
        self.before = torch.zeros(0, dtype=torch.int32, device=device)  # the exponent of the write before
        self.exponents: list[int] = []  # what `state` holds, for kernels that take numbers
        self.started: list[bool] = []
        self.pending: dict[int, Seen] = {}

    def index(self, place: str) -> int:
        """The entry of a place, made where there is none."""
        found = self.names.get(place)
        if found is None:
            found = self.names[place] = len(self.names)
            self.state = self.scaling.extend(self.state, 1)
            one = {name: torch.zeros(1, dtype=torch.float64, device=self.device) for name in _COUNTS}
            self.counts = {name: torch.cat((value, one[name])) for name, value in self.counts.items()}
            self.before = torch.cat((self.before, self.state.exponent[-1:]))
            self.exponents.append(int(self.scaling.init().exponent))
            self.started.append(False)
        return found

    # -- one write ------------------------------------------------------------------------------------------------
    def write(self, x: Tensor, index: int) -> Tensor:
        """Return x as values of the format under the entry's exponent, and note what was seen."""
        if not self.started[index]:
            self._start(x, index)
        return self._write_here(x, index) if x.device.type == "cpu" else self._write_there(x, index)

    def _start(self, x: Tensor, index: int) -> None:
        maximum = x.abs().amax() if x.numel() else x.new_zeros(())
        one = type(self.state)(*(part[index : index + 1] for part in self.state))
        begun = self.scaling.start(one, maximum.reshape(1).to(self.device))
        for part, new in zip(self.state, begun, strict=True):
            part[index : index + 1] = new
        self.before[index : index + 1] = begun.exponent
        if x.device.type == "cpu":
            self.exponents[index], self.started[index] = int(begun.exponent), bool(begun.started)

    def _write_here(self, x: Tensor, index: int) -> Tensor:
        exponent = self.exponents[index]
        payload, _, largest, saturated, nonfinite = to_mantissas(x, self.cast, exponent)
        crowded = 0
        if isinstance(self.scaling, Reactive):
            crowded = int((payload.abs() > self.scaling.limit // 2).sum())
        vanished = largest == 0 and nonfinite == 0 and bool(x.any())
        self._note(index, Seen(largest, nonfinite > 0, vanished, saturated, crowded, x.numel()))
        result = values(payload, exponent)
        return torch.where(x.isfinite(), result, math.nan) if nonfinite else result

    def _write_there(self, x: Tensor, index: int) -> Tensor:
        """The same without waiting for the device."""
        exponent, limit = self.state.exponent[index], self.scaling.limit
        scaled = torch.ldexp(x.double(), -exponent)
        finite = scaled.isfinite()
        rounded = torch.round(scaled)
        bounded = rounded.clamp(-limit - 1, limit)
        magnitude = torch.where(finite, bounded.abs(), 0.0)
        largest = magnitude.amax() if x.numel() else magnitude.new_zeros(())
        seen = Seen(
            largest,
            ~finite.all(),
            (largest == 0) & (finite & (x != 0)).any() & finite.all(),
            (finite & (bounded != rounded)).sum(),
            (magnitude > limit // 2).sum(),
            torch.full_like(largest, x.numel()),
        )
        self._note(index, seen)
        return torch.where(finite, torch.ldexp(bounded, exponent), math.nan).float()

    def _note(self, index: int, seen: Seen) -> None:
        earlier = self.pending.get(index)
        if earlier is not None:  # the step has not ended: under one exponent, the larger maximum counts
            pairs = list(zip(earlier, seen, strict=True))
            largest = [torch.maximum(a, b) if isinstance(a, Tensor) else max(a, b) for a, b in pairs[:1]]
            flags = [a | b for a, b in pairs[1:3]]
            seen = Seen(*largest, *flags, *(a + b for a, b in pairs[3:]))
        self.pending[index] = seen

    # -- the end of a step ----------------------------------------------------------------------------------------
    def flush(self, group: distributed.Group) -> Flush | None:
        """Observe what was written since the last time; with a `group`, what any of its ranks has written."""
        if not self.names or (not self.pending and group is None):
            return None
        seen = self._agreed(group) if group is not None and group.size() > 1 else self._observed()
        mask = seen.mask
        assert mask is not None
        self._count(seen, mask)
        predicted = None
        if isinstance(self.scaling, Autoflex):
            # κ in the prediction is that of the write before
            predicted = self.scaling.predicted_maximum(self.state._replace(exponent=self.before))
            predicted = torch.where(self.state.seen > 0, predicted, math.nan)
        flush = Flush(list(self.names), mask, seen.mantissa, self.state.exponent, predicted)
        self.before = torch.where(mask, self.state.exponent, self.before)
        self.state = self.scaling.observe(self.state, seen)
        self.pending.clear()
        self._learn()
        return flush

    def _observed(self) -> Written:
        indices = torch.tensor(list(self.pending), device=self.device)
        columns = list(zip(*self.pending.values(), strict=True))
        dtypes = (torch.int32, torch.bool, torch.bool, torch.int64, torch.int64, torch.int64)
        mask = torch.zeros(len(self.names), dtype=torch.bool, device=self.device)
        mask[indices] = True
        full = []
        for column, dtype in zip(columns, dtypes, strict=True):
            tensors = isinstance(column[0], Tensor)
            vector = torch.stack(column).to(dtype) if tensors else torch.tensor(column, dtype=dtype, device=self.device)
            full.append(torch.zeros(len(self.names), dtype=dtype, device=self.device).index_put((indices,), vector))
        mantissa, nonfinite, vanished, overflowed, crowded, elements = full
        return Written(mantissa, mask, nonfinite, vanished, overflowed, crowded, elements)

    def _agreed(self, group: distributed.Group) -> Written:
        """What all ranks have seen, by one all-reduce; also settles on the largest exponent that one has begun with."""
        if self.pending:
            own = self._observed()
        else:
            zeros = torch.zeros(len(self.names), dtype=torch.int64, device=self.device)
            flags = zeros.bool()
            own = Written(zeros.int(), flags, flags, flags, zeros, zeros, zeros)
        order = torch.tensor([self.names[name] for name in sorted(self.names)], device=self.device)
        exponent, minimum = self.state.exponent, -1000.0
        mask, nonfinite, vanished = own.mask, own.nonfinite, own.vanished
        assert mask is not None and nonfinite is not None and vanished is not None
        assert own.overflowed is not None and own.crowded is not None and own.elements is not None
        rows = [
            torch.where(mask, torch.ldexp(own.mantissa.double(), exponent), 0.0),
            torch.where(mask | self.state.started, exponent.double(), minimum),
            *(flag.double() for flag in (mask, nonfinite, mask & ~vanished, self.state.started)),
            *(count.double() for count in (own.overflowed, own.crowded, own.elements)),
        ]
        shared = torch.stack(rows)[:, order]
        shared[1] -= minimum  # maxima of what is zero or larger
        distributed.agree_on_maximum_(shared, group)
        back = torch.empty_like(shared)
        back[:, order] = shared
        agreed = (back[1] + minimum).to(torch.int32)
        exponent = torch.where(back[1] > 0, agreed, exponent)
        limit = self.scaling.limit
        mantissa = torch.ldexp(back[0], -exponent).round().clamp(max=limit + 1).to(torch.int32)
        self.state = self.state._replace(exponent=exponent, started=back[5] > 0)
        written, nonfinite = back[2] > 0, back[3] > 0
        vanished = written & (back[4] == 0)
        return Written(mantissa, written, nonfinite, vanished, *(back[row].to(torch.int64) for row in (6, 7, 8)))

    def _count(self, seen: Written, mask: Tensor) -> None:
        good = mask & (seen.mantissa > 0)
        if seen.nonfinite is not None:
            good = good & ~seen.nonfinite
        held = torch.ldexp(torch.full_like(self.counts["measured"], self.scaling.limit), self.before)
        saturated = seen.mantissa >= self.scaling.limit
        needed = good & (saturated | (torch.ldexp(seen.mantissa.double(), self.state.exponent) > held))
        free = torch.log2(32768.0 / seen.mantissa.double().clamp(min=1))
        self.counts["headroom_sum"] += torch.where(good, free, 0.0)
        self.counts["measured"] += good
        self.counts["raises_needed"] += needed
        self.counts["raises_in_time"] += needed & ~saturated

    def _learn(self) -> None:
        """Take the new exponents over for kernels that take numbers; an accelerator is asked only about beginners."""
        if self.device.type == "cpu":
            self.exponents = self.state.exponent.tolist()
            self.started = self.state.started.tolist()
        elif not all(self.started):
            self.started = self.state.started.tolist()


class SharedExponents:
    """The exponents of all places of a training run: `write` uses them, `flush` moves them, `summary` tells of them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Cast, bool], _Group] = {}
        self._roots: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._faults: list[str] = []
        self._watchers: list[Callable[[Flush], object]] = []
        self._listeners: list[Callable[[str, Tensor, int], object]] = []

    # -- writing --------------------------------------------------------------------------------------------------
    def write(self, x: Tensor, cast: Cast, place: str, *, training: bool = True, unless_exact: bool = False) -> Tensor:
        """Return x, fp32 or fp64, as values of the cast's format in fp32, rounded once under the place's exponent.

        Saturates what does not fit. NaN stands where x was infinite or NaN, and the place is among the `faults`.
        `unless_exact` gives x back where it is in the format, under whatever exponent, and notes nothing.
        """
        x = x.detach()
        if unless_exact and self._is_exact(x, cast):
            return x.float()
        key = (cast, training)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(cast, x.device)
        index = group.index(place)
        if index in group.pending and not (training and distributed.is_running()):
            self._flush(group, None)  # a second write at one place sees what the first one taught
        result = group.write(x, index)
        seen = group.pending[index].nonfinite
        if not isinstance(seen, Tensor) and seen and place not in self._faults:
            self._faults.append(place)
        for listener in self._listeners:
            listener(place, x, group.exponents[index])
        return result

    @staticmethod
    def _is_exact(x: Tensor, cast: Cast) -> bool:
        if x.device.type != "cpu":
            return False
        exponent = current_exponent(x, _current(cast))
        if exponent is None:
            return False
        payload, *_ = to_mantissas(x, cast, exponent)
        return torch.equal(values(payload, exponent).to(x.dtype), x)

    def site(self, cast: Cast, where: str) -> PlaceSite:
        """The site of one op at one spot of the step."""
        return PlaceSite(self, cast, where, torch.is_grad_enabled())

    def root(self, module: nn.Module | None) -> str:
        """What the places within a model begin with, so that two models of a step keep apart: '' within the first."""
        if module is None:
            return ""
        number = self._roots.setdefault(module, len(self._roots))
        return f"model {number + 1}: " if number else ""

    # -- steps ----------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """End a step: observe all writes of training, with all ranks if there are several, and predict anew."""
        for (_, training), group in sorted(self._groups.items(), key=lambda one: str(one[0])):
            self._flush(group, distributed.world() if training else None)
        self._faults = []

    def _flush(self, group: _Group, ranks: distributed.Group) -> None:
        done = group.flush(ranks)
        if done is not None:
            for watcher in self._watchers:
                watcher(done)

    def faults(self) -> list[str]:
        """The places where a value that was not finite has been written in this step, the first one first.

        Waits for an accelerator; a CPU knows.
        """
        found = list(self._faults)
        for (_, training), group in self._groups.items():
            names = list(group.names)
            for index, seen in group.pending.items():
                if training and isinstance(seen.nonfinite, Tensor) and bool(seen.nonfinite):
                    found.append(names[index])
        return found

    # -- what was seen --------------------------------------------------------------------------------------------
    def places(self) -> list[str]:
        """The places of training, in the order in which they were first written."""
        return [name for (_, training), group in self._groups.items() if training for name in group.names]

    def exponent(self, place: str) -> int:
        """The exponent of the next write at a place; raises InvalidInput for one that was never written."""
        for (_, training), group in self._groups.items():
            if training and place in group.names:
                return int(group.state.exponent[group.names[place]])
        raise InvalidInput(f"nothing was written at {place!r}; places are named as in {self.places()[:3]}")

    def summary(self, training: bool = True) -> dict[str, Summary]:
        """What was written so far, by class of tensors, and as ``all``; counts what `flush` has seen."""
        found = {"all": Summary(), **{name: Summary() for name in CLASSES}}
        for (_, trains), group in self._groups.items():
            if trains is training:
                self._add(found, group)
        return {name: one for name, one in found.items() if one.places or name == "all"}

    @staticmethod
    def _add(found: dict[str, Summary], group: _Group) -> None:
        state = group.state
        counted = {name: getattr(state, name).tolist() for name in ("writes", "saturated", "moved", "nonfinite")}
        counted |= {name: group.counts[name].tolist() for name in _COUNTS}
        for place, index in group.names.items():
            for one in (found["all"], found[class_of(place)]):
                one.places += 1
                for name, column in counted.items():
                    setattr(one, name, getattr(one, name) + type(getattr(one, name))(column[index]))

    def watch(self, callback: Callable[[Flush], object]) -> Callable[[], None]:
        """Call back with what each step has written, when it is flushed; return what ends that."""
        return _listed(self._watchers, callback)

    def listen(self, callback: Callable[[str, Tensor, int], object]) -> Callable[[], None]:
        """Call back at every write, with the place, what is written, not yet rounded, and the exponent; return the end.

        On an accelerator the exponent is the one that the place began with.
        """
        return _listed(self._listeners, callback)

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Everything that is remembered, as plain values and tensors. Take it between steps: it flushes nothing."""
        groups = [
            {
                "cast": str(cast),
                "training": training,
                "places": list(group.names),
                "state": {name: value.clone() for name, value in group.state._asdict().items()},
                "counts": {name: value.clone() for name, value in group.counts.items()},
                "before": group.before.clone(),
            }
            for (cast, training), group in self._groups.items()
        ]
        return {"version": _VERSION, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Go on from `state_dict`; raises InvalidInput, with nothing changed, for one of another kind."""
        if state.get("version") != _VERSION:
            raise InvalidInput(f"shared exponents of version {state.get('version')!r}: this lowp reads {_VERSION}")
        groups = {}
        for saved in state["groups"]:
            cast = casts.parse(saved["cast"])
            group = _Group(cast, torch.device(device))
            names, kept = list(saved["places"]), saved["state"]
            fields = type(group.state)._fields
            if set(kept) != set(fields) or any(len(value) != len(names) for value in kept.values()):
                raise InvalidInput(f"the shared exponents of {cast} in this checkpoint are not whole")
            group.names = {name: index for index, name in enumerate(names)}
            group.state = type(group.state)(*(kept[name].to(device, copy=True) for name in fields))
            group.counts = {name: saved["counts"][name].to(device, copy=True) for name in _COUNTS}
            group.before = saved["before"].to(device, copy=True)
            group.exponents, group.started = group.state.exponent.tolist(), group.state.started.tolist()
            groups[cast, bool(saved["training"])] = group
        self._groups, self._faults = groups, []


class PlaceSite:
    """One op at one spot of the step: writes each of its results under the place that its role makes."""

    def __init__(self, exponents: SharedExponents, cast: Cast, where: str, training: bool) -> None:
        self._exponents, self._cast, self._where, self._training = exponents, cast, where, training
        self._parts: Iterator[int] = iter(range(1 << 30))

    def write(self, x: Tensor, role: str, unless_exact: bool = False) -> Tensor:
        """Return x as values of the format; see `SharedExponents.write`."""
        place = f"{role} of {self._where}"
        return self._exponents.write(x, self._cast, place, training=self._training, unless_exact=unless_exact)

    def part(self) -> PlaceSite:
        """The site of the op's first product, its second, and so on."""
        number = next(self._parts)
        if number == 0:
            return self
        return PlaceSite(self._exponents, self._cast, f"{self._where}, product {number + 1}", self._training)


def _current(cast: Cast) -> Cast:
    """The same format under the exponent that the tensor's own maximum asks for."""
    return Cast(cast.format, cast.rounding, cast.overflow)


def _listed(callbacks: list[Any], callback: Any) -> Callable[[], None]:
    callbacks.append(callback)

    def end() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return end
