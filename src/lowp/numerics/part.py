"""A part of a record: counts of some steps of a run, by module, op, role and phase. Parts can be added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.kernels.steps.spectra import ROWS, count_tensor, numbers_at
from lowp.nested import mapped
from lowp.numerics.blocks import BlockLayout, Blocks, blocks_of
from lowp.numerics.modes import numbers_of, untransformed
from lowp.numerics.spectrum import Spectrum, Updates

ROLES = ("input", "weight", "output", "grad", "weight_grad", "update")
PHASES = ("forward", "backward", "step")


class Key(NamedTuple):
    """Which tensors were counted together.

    `op` is the op's name, or of a parameter its own (weight, bias). Roles: an op's `input`, `weight` and `output` of
    the forward phase, the `grad` that arrives at its output in the backward phase, and of a parameter the `weight`
    before a step, its `weight_grad` and its applied `update`.
    """

    module: str
    op: str
    role: str
    phase: str

    @property
    def path(self) -> str:
        """The module and the op; for a parameter its name."""
        return f"{self.module}.{self.op}" if self.module else self.op

    def of_model(self, name: str) -> Key:
        """The same with a model's name before the path."""
        return self._replace(module=f"{name}.{self.module}" if self.module else name)

    def __str__(self) -> str:
        return f"{self.module or 'the model'} {self.op} {self.role}"


@dataclass
class OpSeen:
    """An op at a module: its class, how often it ran, where the user's code called it, which parameters it read.

    `parameters` are names by role. Of several that the op reads in one role, in one call or in several, all but the
    first have a number behind it: ``weight``, ``weight 2``.
    """

    op_class: str
    calls: int = 0
    line: str = ""
    operands: str = "input"
    parameters: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    multiplications: int = 0

    def read(self, role: str, name: str) -> None:
        """Note a parameter that the op has read in a role."""
        if name in self.named(role):
            return
        number, free = 1, role
        while free in self.parameters:
            number += 1
            free = f"{role} {number}"
        self.parameters[free] = name

    def named(self, role: str) -> list[str]:
        """Return the parameters that the op reads in a role."""
        return [name for one, name in self.parameters.items() if one.partition(" ")[0] == role]


@dataclass
class StepSeen:
    """One step of the run. None marks values that were not looked at. `largest_gradient` is unscaled."""

    step: int
    loss: float | None = None
    scale: float | None = None
    skipped: bool = False
    largest_gradient: float | None = None
    sampled: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the largest gradient were finite, as far as they are known."""
        return all(math.isfinite(one) for one in (self.loss, self.largest_gradient) if one is not None)


def failure(fault: Mapping[str, Any]) -> str:
    """Return what a fault of a record says, such as ``step 3: the loss was not finite``."""
    return f"step {fault['step']}: the {fault['what']} {'was' if fault['what'] == 'loss' else 'were'} not finite"


class Print(NamedTuple):
    """What tells a tensor of one step from any other: the sum of its bits, and some of its numbers."""

    key: Key
    checksum: int
    numbers: tuple[float, ...]


class Octaves(NamedTuple):
    """How many numbers of a tensor a step had in each octave, from the octave 2^first on."""

    first: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, seen: Spectrum) -> Octaves:
        """Those of a spectrum; none where all is zero."""
        present = np.flatnonzero(seen.octaves)
        first, last = (int(present[0]), int(present[-1])) if len(present) else (0, -1)
        return cls(first - 127, tuple(seen.octaves[first : last + 1].tolist()))

    def __add__(self, other: Octaves) -> Octaves:  # type: ignore[override]
        first = min(self.first, other.first)
        counts = np.zeros(max(one.first + len(one.counts) for one in (self, other)) - first, np.int64)
        for one in (self, other):
            counts[one.first - first : one.first - first + len(one.counts)] += one.counts
        return Octaves(first, tuple(counts.tolist()))


@dataclass
class Part:
    """What one step added to a record, or all steps: the mergeable half of it.

    `slopes` are of activations: fp64 [96], the squares of the gradients of the numbers with exponent
    `LOWEST_WEIGHT` + i (the first row: smaller ones, and zeros), estimated from a few numbers of each tensor.
    `octaves` are the sizes of numbers by step, of which `tensors` has the sum. `blocks` are of operands of products.
    """

    tensors: dict[Key, Spectrum] = field(default_factory=dict)
    updates: dict[str, Updates] = field(default_factory=dict)
    ops: dict[tuple[str, str], OpSeen] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)
    prints: dict[int, list[Print]] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    slopes: dict[Key, NDArray[np.float64]] = field(default_factory=dict)
    octaves: dict[int, dict[Key, Octaves]] = field(default_factory=dict)
    blocks: dict[tuple[Key, BlockLayout], Blocks] = field(default_factory=dict)

    def add(self, other: Part) -> None:
        """Add another part."""
        add_up(self.tensors, other.tensors)
        add_up(self.updates, other.updates)
        add_up(self.slopes, other.slopes)
        add_up(self.blocks, other.blocks)
        for step, octaves in other.octaves.items():
            add_up(self.octaves.setdefault(step, {}), octaves)
        for place, seen in other.ops.items():
            mine = self.ops.setdefault(place, OpSeen(seen.op_class, 0, seen.line, seen.operands))
            mine.calls += seen.calls
            mine.multiplications += seen.multiplications
            mine.line = mine.line or seen.line
            for role, name in seen.parameters.items():
                mine.read(role.partition(" ")[0], name)
            mine.dtypes.update(seen.dtypes)
        known = {one.step: one for one in self.steps}
        for one in other.steps:
            if one.step in known:
                _fill(known[one.step], one)
            else:
                self.steps.append(one)
        self.steps.sort(key=lambda one: one.step)
        for step, prints in other.prints.items():
            self.prints.setdefault(step, prints)
        self.faults.extend(fault for fault in other.faults if fault not in self.faults)

    def renamed(self, model: str) -> Part:
        """The same with the model's name before each path: from when on there is more than one model."""

        def path(own: str) -> str:
            return f"{model}.{own}" if own else model

        for seen in self.ops.values():
            seen.parameters = {role: path(name) for role, name in seen.parameters.items()}
        keyed = ("tensors", "prints", "slopes", "octaves", "blocks")
        return replace(
            self,
            updates={path(name): seen for name, seen in self.updates.items()},
            ops={(path(module), op): seen for (module, op), seen in self.ops.items()},
            **{name: of_model(getattr(self, name), model) for name in keyed},
        )

    # -- JSON -------------------------------------------------------------------------------------------------------
    def document(self) -> dict[str, Any]:
        """Plain data, which `read` takes back; `octaves` and `blocks` name a tensor by its place in `tensors`."""
        places = {key: place for place, key in enumerate(self.tensors)}
        return {
            "tensors": [{**key._asdict(), **seen.document()} for key, seen in self.tensors.items()],
            "updates": [{"parameter": name, **seen.document()} for name, seen in self.updates.items()],
            "ops": [{"module": module, "op": op, **asdict(seen)} for (module, op), seen in self.ops.items()],
            "steps": [asdict(one) for one in self.steps],
            "prints": {
                str(step): [[*one.key, str(one.checksum), list(one.numbers)] for one in prints]
                for step, prints in self.prints.items()
            },
            "faults": self.faults,
            "slopes": [{**key._asdict(), "energy": slope.tolist()} for key, slope in self.slopes.items()],
            "octaves": {
                str(step): [[places[key], seen.first, *seen.counts] for key, seen in one.items() if key in places]
                for step, one in self.octaves.items()
            },
            "blocks": [
                [places[key], str(layout), *seen.document()]
                for (key, layout), seen in self.blocks.items()
                if key in places
            ],
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Part:
        """Return the part that `document` wrote. Raises InvalidInput for anything else."""
        try:
            part = cls()
            for one in document["tensors"]:
                part.tensors[_key(one)] = Spectrum.read(one)
            for one in document["updates"]:
                part.updates[str(one["parameter"])] = Updates.read(one)
            for one in document["ops"]:
                part.ops[str(one["module"]), str(one["op"])] = OpSeen(**{name: one[name] for name in _OF_OPS})
            part.steps = [StepSeen(**one) for one in document["steps"]]
            part.prints = {
                int(step): [
                    Print(_key(dict(zip(Key._fields, one, strict=False))), int(one[4]), tuple(map(float, one[5])))
                    for one in prints
                ]
                for step, prints in document["prints"].items()
            }
            part.faults = [dict(one) for one in document["faults"]]
            for one in document["slopes"]:
                part.slopes[_key(one)] = _slope(one["energy"])
            keys = list(part.tensors)
            part.octaves = {
                int(step): {keys[int(one[0])]: Octaves(int(one[1]), tuple(map(int, one[2:]))) for one in tensors}
                for step, tensors in document.get("octaves", {}).items()  # a record of an earlier lowp has none
            }
            for place, layout, *counts in document.get("blocks", []):
                part.blocks[keys[int(place)], BlockLayout.parse(layout)] = Blocks.read(counts)
            return part
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"an entry of it is missing or is not what a profile has there: {error!r}") from None


def of_model(value: Any, model: str) -> Any:
    """The same with a model's name before the path of each key in dictionaries, lists and tuples."""
    if isinstance(value, dict):
        return {of_model(key, model): of_model(one, model) for key, one in value.items()}
    return mapped(lambda key: key.of_model(model), value, Key)


def add_up(mine: dict[Any, Any], theirs: Mapping[Any, Any]) -> None:
    """Add to each entry what another has under its name; new names are taken over."""
    for name, seen in theirs.items():
        mine[name] = mine[name] + seen if name in mine else seen


def _fill(mine: StepSeen, other: StepSeen) -> None:
    """Take from another rank, or from later in the step, what was not known."""
    mine.loss = other.loss if mine.loss is None else mine.loss
    mine.scale = other.scale if mine.scale is None else mine.scale
    mine.largest_gradient = other.largest_gradient if mine.largest_gradient is None else mine.largest_gradient
    mine.skipped, mine.sampled = mine.skipped or other.skipped, mine.sampled or other.sampled


_OF_OPS = [one.name for one in fields(OpSeen)]


def _key(entry: Mapping[str, Any]) -> Key:
    key = Key(*(str(entry[name]) for name in Key._fields))
    if key.role not in ROLES or key.phase not in PHASES:
        raise InvalidInput(f"it counts a role {key.role!r} in a phase {key.phase!r}, which no profile has")
    return key


def _slope(energy: Any) -> NDArray[np.float64]:
    slope = np.asarray(energy, np.float64)
    if slope.shape != (ROWS,) or not (slope >= 0).all():
        raise InvalidInput("it contains invalid slopes of activations: they are no sums of squares")
    return slope


# -- one look at a tensor ----------------------------------------------------------------------------------------------
_PROBES = 4  # numbers of a print


def parameter_key(name: str, role: str, phase: str) -> Key:
    """The key of a parameter: its module, and its own name in place of an op's."""
    module, _, own = name.rpartition(".")
    return Key(module, own, role, phase)


class CountedTensor(NamedTuple):
    """What one look at a tensor told."""

    spectrum: Spectrum
    print: Print
    blocks: dict[BlockLayout, Blocks]


def looked_at(key: Key, tensor: Tensor, scale: float = 1.0) -> CountedTensor:
    """Count a tensor divided by `scale`, and take its print: the sum of its bits, and a few numbers."""
    with untransformed(tensor) as whole:
        x = numbers_of(whole.detach())
        flat = x.reshape(-1)
        counts, last = count_tensor(flat, scale), flat.numel() - 1
        numbers: list[float] = []
        if last >= 0:
            numbers = numbers_at(flat, [last * place // (_PROBES - 1) for place in range(_PROBES)], scale)
        seen = Spectrum.from_counts(counts, last + 1)
        blocks = blocks_of(x, key.role, key.op, seen.maximum * scale) if not seen.nonfinite else {}
    return CountedTensor(seen, Print(key, counts.checksum, tuple(numbers)), blocks)
