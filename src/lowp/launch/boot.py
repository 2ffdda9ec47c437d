"""The first code of lowp in a process of `lowp run`: it waits until the script imports torch.

``lowp-launch.pth`` beside the installed package, or ``site/sitecustomize.py``, calls it when Python starts, in every
process whose environment names a precision. A process that never imports torch pays only for this module. The process
that leads a run, for instance a launcher, reports at its end on the processes that it has started.
"""

import atexit
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_started = False


def start() -> None:
    """Install lowp's patches after torch has been imported; once per process."""
    global _started
    if _started:
        return
    _started = True
    _lead()
    when_imported("torch", _install)


def _lead() -> None:
    """Let the leader of a run report on the others at its end, unless it imports torch, whose session then reports.

    The modules for the report are imported here: importing them after Ctrl-C has ended the script would change the exit
    code.
    """
    run = os.environ.get("LOWP_RUN", "")
    if f'"leader": {os.getpid()},' not in run:
        return
    from lowp.launch.record import RunSettings, gathered, tell_of_run

    settings = RunSettings.from_environment()
    if settings is None:
        return

    def tell(settings: RunSettings) -> None:
        if settings.leader == os.getpid() and "torch" not in sys.modules and gathered(settings.directory):
            tell_of_run([], settings)

    atexit.register(tell, settings)


def _install() -> None:
    if os.environ.get("LOWP_PROFILE"):
        from lowp.launch import profiling

        profiling.start()
        return
    from lowp.launch import session

    session.start()


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call a function after a module has been executed, now if it has been."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Waiting(name, then))


class _Waiting(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and calls a function after it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        for finder in sys.meta_path if spec is None else ():
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._then)
        return spec


class _Then(importlib.abc.Loader):
    """Loads a module with its own loader, then calls a function."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()
