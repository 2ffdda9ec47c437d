"""New processes that need not load torch: forked from a server that has imported it and done nothing else.

    with forked.start("-m", "lowp", "train", "digits", cwd=tmp_path) as process:
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130

Arguments are those of Python: `-c CODE`, `-m MODULE` or a script. Use `subprocess` instead for processes that must
start like a user's, with nothing imported and the environment read by the interpreter.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn, cast

_PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "torch.multiprocessing", "lowp", "lowp.cli"]
_PRELOADED += ["lowp.recipes.comparison", "lowp.benchmarking.largest_batch", "sklearn.datasets"]

# Process groups outlive their models: a DistributedDataParallel that is the last to hold one waits with the GIL for
# gloo's threads, and these wait for the GIL to forget the context of the latest backward (torch 2.13).
_groups: list[object] = []

# the folder of the lowp that is tested, for the PYTHONPATH of new processes: src, or the copy of a mutant
SOURCES = str(Path(cast(str, cast(ModuleSpec, find_spec("lowp")).origin)).parents[1])
PATIENCE = 300.0  # seconds after which a process that hangs is killed, and its test fails


class Forked:
    """A running process, with the part of subprocess.Popen that the tests use."""

    def __init__(self, arguments: tuple[str, ...], cwd: Path | None, environment: Mapping[str, str] | None) -> None:
        forking = context()
        readers, writers = zip(*(forking.Pipe(duplex=False) for _ in range(2)), strict=True)
        folder, variables = str(cwd or Path.cwd()), dict(os.environ if environment is None else environment)
        self._process = forking.Process(target=_become, args=(*writers, arguments, folder, variables))
        self._process.start()
        self._alarm = threading.Timer(PATIENCE, self._process.kill)
        self._alarm.daemon = True
        self._alarm.start()
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = (_file(reader) for reader in readers)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._code if hasattr(self, "_code") else self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; raise subprocess.TimeoutExpired if that takes longer."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.kill()
        self._process.join()
        self._alarm.cancel()
        self._code = self._process.exitcode
        self._process.close()
        self.stdout.close()
        self.stderr.close()


def start(*arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> Forked:
    """Start `python ARGUMENTS` as the leader of a new session; use it as a context, which waits for its end."""
    return Forked(arguments, cwd, environment)


def run(
    *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end; return its exit code and output."""
    said: list[str] = []
    with start(*arguments, cwd=cwd, environment=environment) as process:
        reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
        reader.start()
        printed = process.stdout.read()
        reader.join()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, printed, said[0])


def begin() -> None:
    """Start the server unless it runs, also for lowp's own processes, which would start one with fewer imports."""
    context()
    forkserver.ensure_running()


def ranks(work: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call `work(rank, *arguments)` in new processes; an exception in one of them is raised here.

    Ranks that wait for one another are killed after `PATIENCE`, and the error shows where each of them was.
    """
    from torch.multiprocessing import ProcessExitedException, start_processes

    context()
    with tempfile.TemporaryDirectory() as folder:
        running = start_processes(_watched, (work, arguments, folder), count, join=False, start_method="forkserver")
        end = time.monotonic() + PATIENCE + 10
        try:
            while not running.join(max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    for process in running.processes:
                        process.kill()
                    raise TimeoutError(f"{count} ranks did not end in {PATIENCE:g} s")
        except (ProcessExitedException, TimeoutError) as error:
            stacks = [file.read_text() for file in sorted(Path(folder).iterdir())]
            raise AssertionError("\n".join([str(error), *stacks])) from error


def context() -> Any:
    """Return the context of multiprocessing whose processes are forked from the server."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(_PRELOADED)
    return forking


def _file(reader: Connection) -> IO[str]:
    file = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
    reader.close()
    return file


# -- in the other process ---------------------------------------------------------------------------------------------
def _become(
    out: Connection, error: Connection, arguments: tuple[str, ...], folder: str, environment: Mapping[str, str]
) -> None:
    gc.freeze()  # what the server has loaded is not searched again
    os.setsid()
    os.dup2(out.fileno(), 1)
    os.dup2(error.fileno(), 2)
    out.close()
    error.close()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever started the tests ignores it
    os.execve = _as_another  # type: ignore[assignment]
    _main(arguments, environment)


def _watched(rank: int, work: Callable[..., None], arguments: tuple[Any, ...], folder: str) -> None:
    from torch import distributed

    begin = distributed.init_process_group

    def begin_and_keep(*given: Any, **named: Any) -> None:
        begin(*given, **named)
        _groups.append(distributed.group.WORLD)

    distributed.init_process_group = begin_and_keep
    with (Path(folder) / f"rank {rank}.txt").open("w") as stacks:
        stacks.write(f"rank {rank}\n")
        stacks.flush()
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later(PATIENCE, file=stacks)
        work(rank, *arguments)
        faulthandler.cancel_dump_traceback_later()


def _main(arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Run lowp's sitecustomize, and then these arguments as Python does."""
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("LOWP_PRECISION"):
        from lowp.launch import boot

        boot.start()
    kind, *rest = arguments
    sys.argv = list(arguments)
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def _as_another(path: str, command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Act as the Python process by which `lowp run` would replace this one."""
    _main(tuple(command[1:]), environment)
    raise SystemExit(0)
