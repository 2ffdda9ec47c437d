"""What a profiler has recorded so far, and the file to which it is written step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowp import distributed
from lowp.numerics.divergence import Fault
from lowp.numerics.journal import Journal
from lowp.numerics.part import Part, StepSeen
from lowp.numerics.record import Record


class Recording:
    """The header and the parts of a record that grows; with `out` each part is also written to that file at once."""

    def __init__(self, header: dict[str, Any], out: Path | None) -> None:
        self.header, self.part = header, Part()
        self._out = out
        self._journal: Journal | None = None

    @property
    def path(self) -> Path | None:
        """The file, once it has been begun."""
        return None if self._journal is None else self._journal.path

    def begin(self, max_overhead: float | None) -> None:
        """Create the file, if there is to be one."""
        if self._out is not None:
            self._journal = Journal(self._out, {**self.header, "max_overhead": max_overhead})

    def close(self) -> None:
        """Close the file."""
        if self._journal is not None:
            self._journal.close()

    def describe(self, header: dict[str, Any], renamed: str) -> None:
        """Take a new header, after a model was added; `renamed` is the new name of the first model, or ''."""
        if renamed:
            self.part = self.part.renamed(renamed)
        self.header = {**header, "started": self.header["started"]}
        if self._journal is not None:
            self._journal.add_models(self.header, renamed)

    def add(self, part: Part) -> None:
        """Add what was counted in some steps."""
        self.part.add(part)
        if self._journal is not None:
            self._journal.add(part)

    def add_fault(self, fault: Fault | None) -> None:
        """Add where a loss or a gradient was not finite, if it was."""
        if fault is not None:
            self.part.faults.append(fault.document())
            if self._journal is not None:
                self._journal.add(Part(faults=[fault.document()]))

    def add_scale(self, seen: StepSeen) -> None:
        """Add a step that was not recorded, if its loss scale differs from that of the step before."""
        before = self.part.steps[-1] if self.part.steps else None
        if seen.scale is not None and (before is None or before.scale != seen.scale):
            self.part.add(Part(steps=[StepSeen(**vars(seen))]))


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
