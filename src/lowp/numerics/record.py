"""The record of a profiled run: what was seen, by module, op, role and phase. JSON, mergeable, and never half trusted.

A finished record is one JSON document. A run that was given a file writes a line a step that it looked at, and puts the
document in the file's place at its end: what a killed run leaves is read as well, and says that it is not complete.
"""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

from lowp import distributed, files
from lowp.errors import InvalidInput, brief
from lowp.numerics.part import PHASES, ROLES, Key, Octaves, OpSeen, Part, Print, StepSeen
from lowp.numerics.spectrum import Spectrum, Updates

__all__ = ["KIND", "PHASES", "ROLES", "VERSION", "Key", "Octaves", "OpSeen", "Part", "Print", "Record", "StepSeen"]

KIND, VERSION = "lowp profile", 4
lacks = files.lacking("a profile of lowp", b'{"kind":"lowp profile",')  # of a file that may be replaced


@dataclass
class Record:
    """A profiled run. `header` describes the run, `sampling` what was recorded and the time that it took."""

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
        """Whether modules were left out because of the budget, or possibly because the run was killed."""
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
        if not steps and self.part.faults:
            return (
                "the profile has a fault and no step: every step was skipped, since its gradients were infinite or "
                "NaN. Mend the fault, then profile again"
            )
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
        part = deepcopy(self.part)
        part.add(deepcopy(other.part))
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
        files.write(Path(path), text)

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a record, also the incomplete one of a killed run; raises InvalidInput for any other file."""
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


def _foreign(first: str) -> str:
    if first.lstrip().startswith("{") and f'"{KIND}"' in first[:200]:
        return "the profile is cut: its end is missing. Profile again, or take the file from where it was copied"
    return "that is no profile: give a file that lowp profile or profile.save has written"


def _check_head(head: Any) -> None:
    if not isinstance(head, dict) or head.get("kind") != KIND:
        kind = head.get("kind") if isinstance(head, dict) else None
        description = f"it calls itself {kind!r}" if kind else "it does not say so"
        raise InvalidInput(
            f"this is not a profile ({description}): give a file written by lowp profile or profile.save"
        )
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


# -- a record that grows -----------------------------------------------------------------------------------------------
class Recording:
    """The header and the parts of a record that grows.

    With `out` each part is also a line of that file at once, so that the steps of a killed run are kept.
    """

    def __init__(self, header: dict[str, Any], out: Path | None) -> None:
        self.header, self.part = header, Part()
        self.path: Path | None = None  # the file, once it has been begun
        self._out = out
        self._file: TextIO | None = None

    def begin(self, max_overhead: float | None) -> None:
        """Create the file, if there is to be one."""
        if self._out is not None:
            self.path = files.check_target(self._out, lacks)
            self._file = self.path.open("w", encoding="utf-8")
            head = {"kind": KIND, "version": VERSION, "lines": True, "complete": False}
            self._write({**head, **self.header, "max_overhead": max_overhead})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # the disk is full
                self._file.close()
            self._file = None

    def describe(self, header: dict[str, Any], renamed: str) -> None:
        """Take a new header, after a model was added; `renamed` is the new name of the first model, or ''."""
        if renamed:
            self.part = self.part.renamed(renamed)
        self.header = {**header, "started": self.header["started"]}
        self._write({"models": self.header, "first": renamed})

    def add(self, part: Part) -> None:
        """Add what was counted in some steps."""
        self.part.add(part)
        if self._file is not None:
            self._write(part.document())

    def add_scale(self, seen: StepSeen) -> None:
        """Add a step that was not recorded, if its loss scale differs from that of the step before."""
        before = self.part.steps[-1] if self.part.steps else None
        if seen.scale is not None and (before is None or before.scale != seen.scale):
            self.part.add(Part(steps=[replace(seen)]))

    def _write(self, document: Mapping[str, Any]) -> None:
        """Write a line; where the disk is full, warn and go on without the file, which does not end a training."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(document, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self.close()
            warnings.warn(f"{self.path} cannot be written: {error.strerror}; steps are kept in memory", stacklevel=2)


def merged_over_ranks(record: Record) -> Record | None:
    """Return the record of all ranks on the first of them, None on the others; every rank must call this."""
    if not distributed.has_other_ranks():
        return record
    others = distributed.gather((record.header["fingerprint"], record.part.document()), distributed.world())
    if distributed.rank():
        return None
    for fingerprint, document in others[1:]:
        record = record.merge(Record({"fingerprint": fingerprint}, Part.read(document)))
    return record


# -- the first difference of two runs ----------------------------------------------------------------------------------
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
            apart = max((ulps(a, b) for a, b in zip(one.numbers, other.numbers, strict=False)), default=0)
            if apart or one.checksum != other.checksum or len(one.numbers) != len(other.numbers):
                return Difference(step, one.key, apart, one.numbers, other.numbers, equal)
            equal += 1
    return None


def _pairs(one: list[Print], other: list[Print]) -> list[tuple[Print, Print]]:
    """The tensors of a step in both runs, in order: of those that a budget let both runs look at."""
    modules = {each.key.module for each in one} & {each.key.module for each in other}
    kept = ([each for each in prints if each.key.module in modules] for prints in (one, other))
    return list(zip(*kept, strict=False))


def ulps(a: float, b: float) -> int:
    """Return the distance of two numbers in steps of fp32; 2^32 if exactly one of them is NaN."""
    if math.isnan(a) or math.isnan(b):
        return 0 if math.isnan(a) and math.isnan(b) else 1 << 32
    return abs(_place(a) - _place(b))


def _place(x: float) -> int:
    """Return the position of a number in the order of all fp32 numbers."""
    bits: int = struct.unpack("<i", struct.pack("<f", x))[0]
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)
