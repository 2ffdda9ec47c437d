"""`lowp profile script.py`: watches the models that an unmodified script trains, in the script's own processes.

Each training process writes its own record, so that no process group, which may have ended, is needed. The command
merges the records when all processes have ended.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.launch.comparison import waited
from lowp.launch.record import PRECISION, check_script, started_with
from lowp.launch.waiting import Search, own_path, part_of

if TYPE_CHECKING:
    from torch import nn

    from lowp.numerics.profiler import Profiler

PROFILE = "LOWP_PROFILE"
_GRACE = 2.0  # seconds for an ended script to write its record; the data is in its file anyway


def profile_script(
    script: Sequence[str],
    max_overhead: str,
    out: Path | None,
    stop: Callable[[], bool] = lambda: False,
    stdout: int | None = None,
) -> tuple[int, Path]:
    """Run a script as Python would, under the profiler; return its exit code and the path of the merged record.

    The script prints to the file descriptor `stdout`, by default to that of this process. When `stop()` becomes true,
    the script is ended and the record has the data so far. Raises InvalidInput if the script does not exist.
    """
    check_script(script, "lowp profile -m package.train")
    path = Path(tempfile.gettempdir()) / f"lowp-profile-{secrets.token_hex(8)}.json" if out is None else out.resolve()
    for old in (path, *path.parent.glob(part_of(path, "*").name)):
        old.unlink(missing_ok=True)  # every file left afterwards is from this run
    settings = {"out": str(path), "max_overhead": max_overhead, "title": " ".join(script)}
    environment = started_with({PRECISION: "fp32", PROFILE: json.dumps(settings)})
    sys.stdout.flush()
    process = subprocess.Popen([sys.executable, *script], env=environment, stdout=stdout)
    code = waited(process, stop, _GRACE)
    if code < 0:
        print(f"lowp profile: the script was ended by signal {-code}; the results until then follow", file=sys.stderr)
    _merge(path)
    return code if code >= 0 else 128 - code, path  # as shells report a signal


def _merge(path: Path) -> None:
    """Merge the records of other processes into the first one's, and remove their files.

    The files of processes that trained another model are kept and named on standard error.
    """
    from lowp.numerics.record import Record

    parts = sorted(path.parent.glob(part_of(path, "*").name))
    if not parts:
        return
    record = Record.load(path)
    for one in parts:
        other = Record.load(one)
        if other.header.get("fingerprint") != record.header.get("fingerprint"):
            print(f"lowp profile: another process trained another model: {one}", file=sys.stderr)
        elif not other.is_empty:
            record = record.merge(other)
            one.unlink()
    record.save(path)


def start() -> None:
    """Start in this process, right after the import of torch: wait for models that are trained."""
    settings = json.loads(os.environ[PROFILE])
    _Waiting(Path(settings["out"]), settings["max_overhead"], settings["title"]).start()


class _Waiting(Search):
    """Starts the profiler at the first model, and adds the others."""

    command, takes_untrained = "lowp profile", True

    def __init__(self, out: Path, max_overhead: str, title: str) -> None:
        super().__init__()
        self.out, self.max_overhead, self.title = out, max_overhead, title

    def begin(self, module: nn.Module, args: Any) -> Profiler:
        """Start the profiler within a call of the first model."""
        from lowp.numerics.profiler import Profiler

        profiler = Profiler(module, out=own_path(self.out, self.out), max_overhead=self.max_overhead, title=self.title)
        profiler.__enter__()
        profiler.begin_within(module, args)
        atexit.register(_end, profiler, os.getpid())
        return profiler

    def add(self, module: nn.Module, args: Any) -> None:
        self.watcher.add(module, args)

    def skips(self, module: nn.Module) -> bool:
        """Whether a step is being run again."""
        return bool(self.watcher.is_replaying)


def _end(profiler: Profiler, process: int) -> None:
    if os.getpid() == process:
        profiler.end()
