"""`lowp run --monitor`: a monitor of the models that an unmodified script trains, in the script's own process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.launch.waiting import Search

if TYPE_CHECKING:
    from torch import nn

    from lowp.launch.session import Session
    from lowp.monitoring import Monitor


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

        session = self._session

        class OfScript(Monitor):
            """A monitor that sees losses as the script does: without the scale of `lowp run`."""

            def losses_are_scaled(self) -> bool:
                return session.rests or not session.is_scaling

        path = session.settings.monitor
        return OfScript(module, sinks=[_own(Path(path), session.settings.directory)] if path else ())

    def add(self, module: nn.Module, args: Any) -> None:
        """Watch one more model."""
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
    try:
        os.close(os.open(Path(directory) / "monitor", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return path.with_name(f"{path.stem}.process-{os.getpid()}{path.suffix}")
    return path
