"""The file of a profile in progress: one line per step, each written completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp import files
from lowp.numerics.record import KIND, VERSION, Part


class Journal:
    """A file that gets one line per step, so that the steps of a killed run are kept."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = files.check_target(path)
        self._file = self.path.open("w", encoding="utf-8")
        self._write({"kind": KIND, "version": VERSION, "lines": True, "complete": False, **header})

    def add(self, part: Part) -> None:
        """Write the data of one step."""
        self._write(part.document())

    def add_models(self, header: Mapping[str, Any], first: str) -> None:
        """Write that there is one more model; `first` is what the first one is called from now on, '' if as before."""
        self._write({"models": dict(header), "first": first})

    def close(self) -> None:
        """Leave the file as it is."""
        self._file.close()

    def _write(self, document: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(document, separators=(",", ":")) + "\n")
        self._file.flush()
