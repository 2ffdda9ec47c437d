"""The monitor of a running training: `lowp.Monitor`.

`monitor` decides which steps are looked at and is called in them; `look` takes the numbers of one step on their
devices, `state` what the host knows; `rules` are the rows of what is warned of, judged by `alarms`; `sinks` write the
numbers, `log` a file of them, which `lowp watch` reads. Monitor is loaded when first used: a log is read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowp.monitoring.alarms import Alarm, TrainingAlarm

if TYPE_CHECKING:
    from lowp.monitoring.monitor import Monitor

__all__ = ["Alarm", "Monitor", "TrainingAlarm"]


def __getattr__(name: str) -> object:
    if name != "Monitor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lowp.monitoring.monitor import Monitor

    return Monitor
