"""The models of an unmodified script, found while it runs, for `lowp profile`, and `lowp run --monitor` of them."""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.errors import LowpError

if TYPE_CHECKING:
    from torch import nn

    from lowp.launch.session import Session
    from lowp.monitoring import Monitor
    from lowp.numerics.profiler import Profiler

SEARCHED = 64  # steps during which models are searched
MOST_MODELS = 16


class Search(ABC):
    """A hook called before each module runs, until the models of a training are known.

    A model is a module that no watched model calls: either one that is trained, or, if `takes_untrained`, one called
    beside such models without being trained, for example a teacher. Modules without parameters, such as losses, are
    not models. `begin` and `add` start to watch one.
    """

    command = "lowp"
    takes_untrained = False

    def __init__(self) -> None:
        self.watcher: Any = None  # a profiler or a monitor, from the first model on
        self.handle: Any = None
        self._refused: set[int] = set()

    def start(self) -> None:
        """Search from now on, in every module that is called."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        # the hook is a global hook and is meant to see calls of compiled modules
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        self.handle = register_module_forward_pre_hook(self)

    @abstractmethod
    def begin(self, module: nn.Module, args: Any) -> Profiler | Monitor:
        """Watch the first model, whose call with these arguments begins."""

    @abstractmethod
    def add(self, module: nn.Module, args: Any) -> None:
        """Watch one more model."""

    def skips(self, module: nn.Module) -> bool:
        """Whether a module that is called is not to be asked about."""
        return False

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look at a module that is called."""
        import torch

        if torch.compiler.is_compiling():
            return  # within a compiled module the code below would be guarded, and recompiled on changes
        watcher = self.watcher
        if watcher is not None:
            if watcher.step >= SEARCHED:
                self.handle.remove()
            if watcher.step >= SEARCHED or watcher.models.owns(module) or self.skips(module):
                return
        if id(module) in self._refused or not self._is_model(module):
            return
        if watcher is not None and self._replaces_a_part(module):
            return
        if watcher is not None and len(watcher.models.roots) >= MOST_MODELS:
            self.handle.remove()
            print(f"{self.command}: only the first {MOST_MODELS} models are recorded", file=sys.stderr)
            return
        try:
            if watcher is None:
                self.watcher = self.begin(module, args)
            else:
                self.add(module, args)
        except LowpError as error:
            self._refused.add(id(module))
            print(f"{self.command}: {type(module).__name__} is not recorded: {error}", file=sys.stderr)

    def _replaces_a_part(self, module: nn.Module) -> bool:
        """Whether a module is a part that a model has got since it was looked through."""
        models = self.watcher.models
        return any(module is part for model in models for part in model.modules())

    def _is_model(self, module: nn.Module) -> bool:
        import torch

        parameters = list(module.parameters())
        if module.training and torch.is_grad_enabled() and any(one.requires_grad for one in parameters):
            return True
        return self.takes_untrained and bool(parameters) and self.watcher is not None and self.watcher.step > 0


def part_of(path: Path, process: int | str) -> Path:
    """Return the file of a process that was not the first to train."""
    return path.with_name(f"{path.stem}.process-{process}{path.suffix}")


def own_path(path: Path, claim: Path) -> Path:
    """Return the file of this process: `path` for the first one that makes the file `claim`."""
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return part_of(path, os.getpid())
    return path


# -- a monitor of them -------------------------------------------------------------------------------------------------
def install(session: Session) -> None:
    """Watch from the first call of a model that is trained, if the settings say so."""
    if session.settings.monitor is not None:
        session.watching = MonitorSearch(session)
        session.watching.start()


class MonitorSearch(Search):
    """Starts the monitor at the first model, and adds the others."""

    command = "lowp monitor"

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def begin(self, module: nn.Module, args: Any) -> Monitor:
        """Make the monitor within a call of the first model."""
        from lowp.monitoring import Monitor

        session, path = self._session, self._session.settings.monitor
        monitor = Monitor(module, sinks=[_own(Path(path), session.settings.directory)] if path else ())
        # it sees losses as the script does: without the scale of `lowp run`
        monitor.losses_are_scaled = lambda: session.rests or not session.is_scaling
        return monitor

    def add(self, module: nn.Module, args: Any) -> None:
        self.watcher.add(module)

    def end(self) -> None:
        """Judge what is under way, stop watching, and note the alarms in the record of the process."""
        if self.handle is not None:
            self.handle.remove()
        monitor, self.watcher = self.watcher, None
        if monitor is None:
            return
        monitor.close()
        self._session.record.alarms = [alarm.document() for alarm in monitor.alarms]
        if not monitor.step:
            print("lowp monitor: no optimizer of torch.optim has stepped: nothing was watched", file=sys.stderr)


def _own(path: Path, directory: str) -> Path:
    """Return the file for the first process of a run that asks, and others beside it for further ones."""
    from lowp import distributed

    if not directory or distributed.rank():  # further ranks write none
        return path
    os.makedirs(directory, mode=0o700, exist_ok=True)
    return own_path(path, Path(directory) / "monitor")
