"""The file of a monitor: a line of JSON for its beginning, one for each look, and one for its end. No torch."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp import files
from lowp.errors import InvalidInput

KIND, VERSION = "lowp monitor", 1


class JsonLines:
    """A file that is written line by line, each as a whole. A file of an earlier monitor is continued."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._file = check_log(path).open("a", encoding="utf-8")
        self({"kind": KIND, "version": VERSION, "process": os.getpid(), "host": platform.node(), **header})

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Write a line."""
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self, steps: int) -> None:
        """Write that the run has ended after so many steps, and close the file."""
        self({"ended": steps})
        self._file.close()


def check_log(path: Path) -> Path:
    """Return the path to write to; raise InvalidInput if that would change a file that is not a monitor's."""
    return files.check_target(path, lambda target: "" if _is_own(target) else "a file of a lowp monitor")


def _is_own(path: Path) -> bool:
    return files.json_object(path, first_line=True).get("kind") == KIND


class Tail:
    """Reads such a file while it is written. Raises InvalidInput for one that is missing or not a monitor's."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise InvalidInput(
                f"there is no file {path}: `lowp run --monitor={path} train.py` writes one, and "
                f"lowp.Monitor(..., sinks={path.name!r})"
            )
        if not path.is_file() or not _is_own(path):
            raise InvalidInput(f"{path} is not a file of a lowp monitor: see lowp run --monitor=FILE.jsonl")
        self._file = path.open("rb")
        self._part = b""

    def more(self) -> list[dict[str, Any]]:
        """Return the records that were written since; a line that is being written is left for the next time."""
        *lines, self._part = (self._part + self._file.read()).split(b"\n")
        found = []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # of a process that was killed while it wrote
                continue
            if isinstance(record, dict):
                found.append(record)
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()
