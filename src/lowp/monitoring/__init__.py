"""The monitor of a running training: `lowp.Monitor`.

`monitor` decides which steps are looked at and is called in them; `look` takes the numbers of one step on their
devices, `state` what the host knows; `rules` are the rows of what is warned of, judged by `alarms`; `sinks` write the
numbers, and `live` shows them in a terminal.
"""

from __future__ import annotations

from lowp.monitoring.alarms import Alarm, TrainingAlarm
from lowp.monitoring.monitor import Monitor

__all__ = ["Alarm", "Monitor", "TrainingAlarm"]
