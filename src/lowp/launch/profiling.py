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
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.errors import InvalidInput, LowpError
from lowp.launch.comparison import waited
from lowp.launch.settings import PRECISION

if TYPE_CHECKING:
    from torch import nn

    from lowp.numerics.profiler import Profiler

__all__ = ["PROFILE", "profile_script", "start"]

PROFILE = "LOWP_PROFILE"
_GRACE = 2.0  # seconds for an ended script to write its record; the data is in its file anyway
_SEARCHED = 64  # steps during which models are searched
_MOST_MODELS = 16


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
    if script[0] != "-m" and not os.path.exists(script[0]):
        raise InvalidInput(f"there is no script {script[0]!r} here ({os.getcwd()})")
    if list(script) == ["-m"]:
        raise InvalidInput("-m needs the name of a module: lowp profile -m package.train")
    path = Path(tempfile.gettempdir()) / f"lowp-profile-{secrets.token_hex(8)}.json" if out is None else out.resolve()
    for old in (path, *path.parent.glob(_part(path, "*").name)):
        old.unlink(missing_ok=True)  # every file left afterwards is from this run
    site = str(Path(__file__).resolve().parent / "site")
    paths = [site, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        PRECISION: "fp32",
        PROFILE: json.dumps({"out": str(path), "max_overhead": max_overhead, "title": " ".join(script)}),
        "PYTHONPATH": os.pathsep.join(one for one in paths if one),
    }
    sys.stdout.flush()
    code = _call([sys.executable, *script], environment, stop, stdout)
    if code < 0:
        print(f"lowp profile: the script was ended by signal {-code}; the results until then follow", file=sys.stderr)
    _merge(path)
    return code if code >= 0 else 128 - code, path  # as shells report a signal


def _call(command: Sequence[str], environment: Mapping[str, str], stop: Callable[[], bool], stdout: int | None) -> int:
    process = subprocess.Popen(command, env=environment, stdout=stdout)
    try:
        return waited(process, stop, _GRACE)
    finally:
        process.kill()
        process.wait()


def _part(path: Path, process: int | str) -> Path:
    """Return the file of a process that was not the first to train."""
    return path.with_name(f"{path.stem}.process-{process}{path.suffix}")


def _merge(path: Path) -> None:
    """Merge the records of other processes into the first one's, and remove their files.

    The files of processes that trained another model are kept and named on standard error.
    """
    from lowp.numerics.record import Record

    parts = sorted(path.parent.glob(_part(path, "*").name))
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


def _own_path(path: Path) -> Path:
    """Return the file of this process: the record itself for the first process that asks."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return _part(path, os.getpid())
    return path


def start() -> None:
    """Start in this process, right after the import of torch: wait for models that are trained."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    settings = json.loads(os.environ[PROFILE])
    # the hook below is a global hook and is meant to see calls of compiled modules
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
    wait = _Waiting(Path(settings["out"]), settings["max_overhead"], settings["title"])
    wait.handle = register_module_forward_pre_hook(wait)


class _Waiting:
    """A hook called before each module runs, until the models of a training are known.

    A model is a module that no watched model calls: either one that is trained, or one called beside such models
    without being trained, for example a teacher. Modules without parameters, such as losses, are not models.
    """

    def __init__(self, out: Path, max_overhead: str, title: str) -> None:
        self.out, self.max_overhead, self.title = out, max_overhead, title
        self.handle: Any = None
        self.profiler: Profiler | None = None
        self._refused: set[int] = set()

    def __call__(self, module: nn.Module, args: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return  # within a compiled module the code below would be guarded, and recompiled on changes
        profiler = self.profiler
        if profiler is not None:
            if profiler.step >= _SEARCHED:
                self.handle.remove()
            if profiler.step >= _SEARCHED or profiler.models.owns(module) or profiler.is_replaying:
                return
        if id(module) in self._refused or not self._is_model(module):
            return
        if profiler is not None and profiler.finds(module):  # a part of a model that was replaced
            return
        if profiler is not None and len(profiler.models.roots) >= _MOST_MODELS:
            self.handle.remove()
            print(f"lowp profile: only the first {_MOST_MODELS} models are recorded", file=sys.stderr)
            return
        try:
            if profiler is None:
                self._begin(module, args)
            else:
                profiler.add(module, args)
        except LowpError as error:
            self._refused.add(id(module))
            print(f"lowp profile: {type(module).__name__} is not recorded: {error}", file=sys.stderr)

    def _is_model(self, module: nn.Module) -> bool:
        import torch

        parameters = list(module.parameters())
        if module.training and torch.is_grad_enabled() and any(one.requires_grad for one in parameters):
            return True
        return bool(parameters) and self.profiler is not None and self.profiler.step > 0

    def _begin(self, module: nn.Module, args: Any) -> None:
        from lowp.numerics.profiler import Profiler

        profiler = Profiler(module, out=_own_path(self.out), max_overhead=self.max_overhead, title=self.title)
        self.profiler = profiler
        profiler.__enter__()
        profiler.begin_within(module, args)
        atexit.register(_end, profiler, os.getpid())


def _end(profiler: Profiler, process: int) -> None:
    if os.getpid() == process:
        profiler.end()
