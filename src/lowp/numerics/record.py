"""The record of a profiled run: what was seen, by module, op, role and phase. JSON, mergeable, and never half trusted.

A finished record is one JSON document. A run that was given a file writes a line a step that it looked at, and puts the
document in the file's place at its end: what a killed run leaves is read as well, and says that it is not complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowp import files
from lowp.errors import InvalidInput, brief
from lowp.kernels.spectra import ROWS
from lowp.numerics.spectrum import Spectrum
from lowp.numerics.updates import Updates

__all__ = ["KIND", "PHASES", "ROLES", "VERSION", "Key", "OpSeen", "Part", "Print", "Record", "StepSeen"]

KIND, VERSION = "lowp profile", 4
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
        """The module and the op; of a parameter its name."""
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
        """The parameters that the op reads in a role."""
        return [name for one, name in self.parameters.items() if one.partition(" ")[0] == role]


@dataclass
class StepSeen:
    """One step of the run: None is what was not looked at. `largest_gradient` is unscaled."""

    step: int
    loss: float | None = None
    scale: float | None = None
    skipped: bool = False
    largest_gradient: float | None = None
    sampled: bool = False


class Print(NamedTuple):
    """What tells a tensor of one step from any other: the sum of its bits, and some of its numbers."""

    key: Key
    checksum: int
    numbers: tuple[float, ...]


@dataclass
class Part:
    """What one step added to a record, or all steps: the mergeable half of it.

    `slopes` are of activations: fp64 [96], the squares of the gradients of the numbers with exponent
    `LOWEST_WEIGHT` + i (the first row: smaller ones, and zeros), estimated from a few numbers of each tensor.
    """

    tensors: dict[Key, Spectrum] = field(default_factory=dict)
    updates: dict[str, Updates] = field(default_factory=dict)
    ops: dict[tuple[str, str], OpSeen] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)
    prints: dict[int, list[Print]] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    slopes: dict[Key, NDArray[np.float64]] = field(default_factory=dict)

    def add(self, other: Part) -> None:
        """Take in what another part has seen."""
        _add_up(self.tensors, other.tensors)
        _add_up(self.updates, other.updates)
        _add_up(self.slopes, other.slopes)
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
        return Part(
            {key.of_model(model): seen for key, seen in self.tensors.items()},
            {path(name): seen for name, seen in self.updates.items()},
            {(path(module), op): seen for (module, op), seen in self.ops.items()},
            self.steps,
            {
                step: [one._replace(key=one.key.of_model(model)) for one in prints]
                for step, prints in self.prints.items()
            },
            self.faults,
            {key.of_model(model): slope for key, slope in self.slopes.items()},
        )

    # -- JSON -------------------------------------------------------------------------------------------------------
    def document(self) -> dict[str, Any]:
        """Plain data, which `read` takes back."""
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
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Part:
        """The part that `document` wrote; raises InvalidInput for anything else."""
        try:
            part = cls()
            for one in document["tensors"]:
                part.tensors[_key(one["module"], one["op"], one["role"], one["phase"])] = Spectrum.read(one)
            for one in document["updates"]:
                part.updates[str(one["parameter"])] = Updates.read(one)
            for one in document["ops"]:
                own = {name.name: one[name.name] for name in fields(OpSeen)}
                part.ops[str(one["module"]), str(one["op"])] = OpSeen(**own)
            part.steps = [StepSeen(**one) for one in document["steps"]]
            part.prints = {
                int(step): [
                    Print(_key(*one[:4]), int(one[4]), tuple(float(number) for number in one[5])) for one in prints
                ]
                for step, prints in document["prints"].items()
            }
            part.faults = [dict(one) for one in document["faults"]]
            for one in document["slopes"]:
                part.slopes[_key(one["module"], one["op"], one["role"], one["phase"])] = _slope(one["energy"])
            return part
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"an entry of it is missing or is not what a profile has there: {error!r}") from None


@dataclass
class Record:
    """A profiled run. `header` is what it was of; `sampling` how it was looked at and what that cost."""

    header: dict[str, Any]
    part: Part = field(default_factory=Part)
    sampling: dict[str, Any] = field(default_factory=dict)
    complete: bool = True

    @property
    def tensors(self) -> dict[Key, Spectrum]:
        """The spectra, by what they are of."""
        return self.part.tensors

    @property
    def updates(self) -> dict[str, Updates]:
        """The applied updates, by parameter."""
        return self.part.updates

    @property
    def ops(self) -> dict[tuple[str, str], OpSeen]:
        """The ops, by module path and name, in the order in which they first ran."""
        return self.part.ops

    @property
    def steps(self) -> list[StepSeen]:
        """The steps that something was noted of."""
        return self.part.steps

    @property
    def sampled(self) -> list[int]:
        """The steps that were looked at."""
        return [one.step for one in self.steps if one.sampled]

    def within(self, module: str) -> str:
        """The path of a module within its model, as rules of policies name it."""
        for name in self.header.get("models", ()):
            if module == name or module.startswith(f"{name}."):
                return module[len(name) + 1 :]
        return module

    @property
    def is_partial(self) -> bool:
        """Whether a budget left modules out, or a run that was killed does not tell."""
        share, modules = self.sampling.get("max_overhead"), self.sampling.get("modules")
        return share is not None and (modules is None or self.sampling.get("modules_seen", 0) < modules)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was seen."""
        return not self.part.tensors

    def require_content(self) -> Record:
        """The record; raises InvalidInput where it has seen no step."""
        if self.is_empty:
            raise InvalidInput(self.why_empty)
        return self

    @property
    def why_empty(self) -> str:
        """Why nothing was seen, and what to do."""
        steps, share = self.sampling.get("steps"), self.sampling.get("max_overhead")
        if steps and share is not None:
            seconds = float(self.sampling.get("total_seconds") or 0.0)
            return (
                f"the profile is empty: {100 * share:g} % of the {seconds:.2g} s that {steps} steps took is less than "
                "recording one module takes. Give --max-overhead none (max_overhead=None) to record whole steps, or "
                "train longer"
            )
        return (
            "the profile is empty: no step of the model ran while it was recorded. Call the model and its "
            "optimizer's step() within the block, and give that model and that optimizer"
        )

    def check_model(self, fingerprint: str) -> None:
        """Raise InvalidInput where the record is of a model with other parameters."""
        own = self.header.get("fingerprint")
        if own != fingerprint:
            raise InvalidInput(
                "the profile is of a model with other parameters (their names or shapes have changed since): "
                "profile the model again"
            )

    def merge(self, other: Record) -> Record:
        """One record of both runs, such as two ranks of one training; InvalidInput where the models differ."""
        other.check_model(str(self.header.get("fingerprint")))
        part = Part()
        part.add(Part.read(self.part.document()))
        part.add(Part.read(other.part.document()))
        header = {**self.header, "ranks": self.header.get("ranks", 1) + other.header.get("ranks", 1)}
        return Record(header, part, dict(self.sampling), self.complete and other.complete)

    # -- files ------------------------------------------------------------------------------------------------------
    def document(self) -> dict[str, Any]:
        """The whole record as plain data."""
        return {
            "kind": KIND,
            "version": VERSION,
            "complete": self.complete,
            **self.header,
            "sampling": self.sampling,
            **self.part.document(),
        }

    def save(self, path: str | Path) -> None:
        """Write the record as JSON, whole or not at all."""
        text = json.dumps(self.document(), allow_nan=True, separators=(",", ":"))
        with files.replacing(Path(path)) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a record, or what a killed run has left of one; raises InvalidInput for any other file."""
        path = Path(path)
        if path.is_dir():
            raise InvalidInput(f"{path} is a folder: give the file of a profile")
        if not path.is_file():
            raise InvalidInput(f"there is no profile {path}: create one with lowp profile RECIPE --out {path}")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidInput(f"{path} is not a profile: it is not text") from None
        try:
            return cls._read(text, path)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from None

    @classmethod
    def _read(cls, text: str, path: Path) -> Record:
        first, _, rest = text.partition("\n")
        try:
            head = json.loads(first)
        except (ValueError, RecursionError):
            raise InvalidInput(_foreign(first)) from None
        _check_head(head)
        if not head.get("lines"):
            return cls(_header(head), Part.read(head), _sampling(head), bool(head.get("complete")))
        part, header = Part(), _header(head)
        for line in _whole_lines(rest):
            if "models" in line:
                header = _header(line["models"])
                part = part.renamed(str(line["first"])) if line["first"] else part
            else:
                part.add(Part.read(line))
        return cls(header, part, {"max_overhead": head.get("max_overhead")}, False)


def _add_up(mine: dict[Any, Any], theirs: Mapping[Any, Any]) -> None:
    for name, seen in theirs.items():
        mine[name] = mine[name] + seen if name in mine else seen


def _fill(mine: StepSeen, other: StepSeen) -> None:
    """Take from another rank, or from later in the step, what was not known."""
    mine.loss = other.loss if mine.loss is None else mine.loss
    mine.scale = other.scale if mine.scale is None else mine.scale
    mine.largest_gradient = other.largest_gradient if mine.largest_gradient is None else mine.largest_gradient
    mine.skipped, mine.sampled = mine.skipped or other.skipped, mine.sampled or other.sampled


def _key(module: Any, op: Any, role: Any, phase: Any) -> Key:
    if role not in ROLES or phase not in PHASES:
        raise InvalidInput(f"it counts a role {role!r} in a phase {phase!r}, which no profile has")
    return Key(str(module), str(op), role, phase)


def _slope(energy: Any) -> NDArray[np.float64]:
    slope = np.asarray(energy, np.float64)
    if slope.shape != (ROWS,) or not (slope >= 0).all():
        raise InvalidInput("it contains invalid slopes of activations: they are no sums of squares")
    return slope


def _foreign(first: str) -> str:
    if first.lstrip().startswith("{") and f'"{KIND}"' in first[:200]:
        return "the profile is cut: its end is missing. Profile again, or take the file from where it was copied"
    return "that is no profile: give a file that lowp profile or profile.save has written"


def _check_head(head: Any) -> None:
    if not isinstance(head, dict) or head.get("kind") != KIND:
        kind = head.get("kind") if isinstance(head, dict) else None
        told = f"it calls itself {kind!r}" if kind else "it does not say so"
        raise InvalidInput(f"this is not a profile ({told}): give a file written by lowp profile or profile.save")
    if head.get("version") != VERSION:
        raise InvalidInput(
            f"the profile has version {head.get('version')!r} and this lowp reads version {VERSION}: "
            "profile again, or read it with the lowp that wrote it"
        )


_NOT_HEADER = ("kind", "version", "complete", "lines", "sampling", *(one.name for one in fields(Part)))


def _header(head: Mapping[str, Any]) -> dict[str, Any]:
    header = {name: value for name, value in head.items() if name not in _NOT_HEADER}
    for name in ("models", "dtypes"):
        names = header.get(name, [])
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise InvalidInput(f"its {name} are {brief(names)}, but must be a list of names")
    if not isinstance(header.get("parameters", 0), int):
        raise InvalidInput(f"it has {brief(header['parameters'])} parameters, but must have a number of them")
    return header


def _sampling(head: Mapping[str, Any]) -> dict[str, Any]:
    found = head.get("sampling") or {}
    if not isinstance(found, dict) or not all(one is None or isinstance(one, (int, float)) for one in found.values()):
        raise InvalidInput(f"its sampling is {brief(found)}, but must be numbers by name")
    return dict(found)


def _whole_lines(text: str) -> Iterator[Mapping[str, Any]]:
    """The lines that were written to their end: the last one may be cut where the run was killed."""
    lines = text.split("\n")
    for place, line in enumerate(lines):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError:
            if place == len(lines) - 1:
                return
            raise InvalidInput(f"line {place + 2} of the profile is damaged") from None
