"""What `lowp watch` shows: the numbers of a monitor as sparklines, a row for each group of layers, and its alarms."""

import itertools
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lowp.errors import counted
from lowp.monitoring.alarms import Alarm, alarm_of
from lowp.report import can_show
from lowp.report.palette import GRADES

_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_KEPT = 240  # points of a curve
_NUMBER = 9  # characters of a number and the space before it
_NARROWEST, _WIDEST = 6, 24  # characters of a sparkline in the table
_NAME = 22
_ALARMS = 6
_LATE = 10.0  # seconds after which it is told how old the latest look is
# columns of the table: what they show, their headings, whether sizes are compared by their logarithms
_COLUMNS = (
    ("gradient", "gradient", True),
    ("update_to_weight", "update / weight", True),
    ("activation", "activation", True),
    ("lost", "updates lost", False),
)


def sparkline(values: Sequence[float], width: int, logarithmic: bool, bars: str = _BARS) -> str:
    """Return a curve in characters, at most one for each value; empty places stand for numbers that are not finite."""
    if logarithmic:
        values = [math.log10(value) if value > 0 else math.nan for value in values]
    count = min(width, len(values))
    ends = [place * len(values) // count for place in range(count + 1)] if count else []
    columns = [_mean(values[first:last]) for first, last in itertools.pairwise(ends)]
    known = [value for value in columns if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    places = [(value - low) / span * (len(bars) - 1) if span else len(bars) / 2 for value in columns]
    shown = zip(columns, places, strict=True)
    return "".join(bars[round(place)] if math.isfinite(value) else " " for value, place in shown)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


class Curve:
    """The values of one number over a run, halved in resolution whenever there are too many."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.latest = math.nan
        self._each, self._waiting = 1, list[float]()

    def add(self, value: float | None) -> None:
        """Add a value; None is one that was not finite."""
        self.latest = math.nan if value is None else float(value)
        self._waiting.append(self.latest)
        if len(self._waiting) >= self._each:
            self.values.append(_mean(self._waiting))
            self._waiting.clear()
        if len(self.values) > _KEPT:
            self.values = [_mean(self.values[place : place + 2]) for place in range(0, len(self.values), 2)]
            self._each *= 2


class Board:
    """The state of a run, from the records of its monitor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begin({})

    def _begin(self, header: Mapping[str, Any]) -> None:
        self.header = header
        self.step = -1
        self.ended: int | None = None
        self.alarms: list[Alarm] = []
        self.numbers = {name: Curve() for name in ("loss", "scale", "gradient")}
        self.skipped = 0
        self.groups: dict[str, dict[str, Curve]] = {}
        self._times: list[tuple[int, float]] = []
        self._arrived = time.monotonic()

    def take(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take in records; a header begins anew, as a resumed run does in the same file."""
        for record in records:
            if "kind" in record:
                self._begin(record)
            elif "ended" in record:
                self.ended = record["ended"]
            elif "step" in record:
                self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        self.step, self._arrived = record["step"], time.monotonic()
        self._times = [*self._times[-31:], (record["step"], record.get("time", 0.0))]
        for name, curve in self.numbers.items():
            if name in record:
                curve.add(record[name])
        self.skipped += record.get("skipped", 0)
        for group, meanings in record.get("groups", {}).items():
            curves = self.groups.setdefault(group, {})
            for meaning, value in meanings.items():
                curves.setdefault(meaning, Curve()).add(value)
        for alarm in record.get("alarms", ()):
            self.alarms.append(alarm_of(alarm))

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended without a word; only known of one on this machine."""
        process = self.header.get("process")
        if self.ended is not None or os.name != "posix" or self.header.get("host") != platform.node() or not process:
            return False
        try:
            os.kill(process, 0)
        except OSError as error:  # another one: a process of another user
            return isinstance(error, ProcessLookupError)
        return False

    @property
    def rate(self) -> float | None:
        """Steps a second, of late."""
        if len(self._times) < 2:
            return None
        (first, begun), (last, now) = self._times[0], self._times[-1]
        return (last - first) / (now - begun) if now > begun else None

    def document(self) -> dict[str, Any]:
        """Return the latest numbers and all alarms, as plain data."""
        return {
            "kind": "lowp watch",
            "file": self.name,
            "model": self.header.get("model"),
            "step": self.step,
            "steps_per_second": self.rate,
            "ended": self.ended is not None,
            **{name: curve.latest for name, curve in self.numbers.items() if curve.values},
            "skipped": self.skipped,
            "groups": {
                group: {meaning: curve.latest for meaning, curve in of.items()} for group, of in self.groups.items()
            },
            "alarms": [alarm.document() for alarm in self.alarms],
        }

    # -- shown --------------------------------------------------------------------------------------------------------
    def shown(self, console: Console, is_whole: bool = False) -> Group:
        """Return what is shown on a console, no higher than it, or with every group if `is_whole`."""
        bars = _BARS if can_show(_BARS, console.encoding) else _PLAIN_BARS
        rows = 10_000 if is_whole else max(console.height - 8 - min(2 * len(self.alarms), 2 * _ALARMS), 3)
        return Group(self._heading(console), *self._lines(console.width, bars), self._table(console, rows, bars),
                     *self._alarm_lines(is_whole))  # fmt: skip

    def _heading(self, console: Console) -> Text:
        parts = [str(self.header.get("model", "")), f"step {self.step:,}" if self.step >= 0 else "no look yet"]
        if self.rate is not None:
            parts.append(f"{self.rate:.3g} steps/s")
        age = time.monotonic() - self._arrived
        if self.ended is not None:
            parts.append(f"ended after {counted(self.ended, 'step')}")
        elif self.is_gone:
            parts.append("its process has gone")
        elif age > _LATE:
            parts.append(f"latest look {age:.0f} s ago")
        count = len(self.alarms)
        parts.append(f"{count} alarm{'s' * (count != 1)}" if count else "no alarm")
        return Text.assemble((self.name, "bold"), "  ", ", ".join(filter(None, parts)), no_wrap=True)

    def _lines(self, width: int, bars: str) -> list[Text]:
        lines = []
        for name, curve in self.numbers.items():
            if curve.values:
                after = f"{curve.latest:.4g}" + (f", {self.skipped} skipped" if name == "scale" else "")
                label = "all gradients" if name == "gradient" else "loss scale" if name == "scale" else name
                room = max(min(width - 16 - len(after), 80), _NARROWEST)
                lines.append(Text(f"{label:<14}{sparkline(curve.values, room, name != 'loss', bars)} {after}"))
        return lines

    def _table(self, console: Console, rows: int, bars: str) -> Table:
        name_width = min(max([8, *map(len, self.groups)]), _NAME)
        columns = list(_COLUMNS)
        while (room := self._room(console.width - name_width, columns)) < _NARROWEST and len(columns) > 1:
            columns.pop(max(len(columns) - 2, 1))  # the share of lost updates is narrow
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("group", no_wrap=True, min_width=8, max_width=name_width, overflow="ellipsis")
        for _, heading, _ in columns:
            table.add_column(heading, no_wrap=True)
        layers = [layer for alarm in self.alarms for layer in (alarm.layer, *alarm.others)]
        alarmed = {group for group in self.groups if any(f"{layer}.".startswith(f"{group}.") for layer in layers)}
        shown = self._chosen(alarmed, rows)
        for group in shown:
            curves = self.groups[group]
            cells = [
                _cell(curves.get(meaning), max(min(room, _WIDEST), 1), logarithmic, bars)
                for meaning, _, logarithmic in columns
            ]  # fmt: skip
            table.add_row(Text(group, style=f"bold {GRADES['loses'].terminal}" if group in alarmed else ""), *cells)
        if len(shown) < len(self.groups):
            table.add_row(Text(f"{len(self.groups) - len(shown)} more", style="dim"))
        return table

    def _room(self, width: int, columns: Sequence[tuple[str, str, bool]]) -> int:
        """Return how many characters each sparkline may have."""
        curves = sum(logarithmic for _, _, logarithmic in columns)
        return (width - _NUMBER - 5) // max(curves, 1) - _NUMBER - 2

    def _chosen(self, alarmed: set[str], rows: int) -> list[str]:
        """Return the groups that there is room for, in their order: those with alarms, then the first."""
        if len(self.groups) <= rows:
            return list(self.groups)
        first = [*(one for one in self.groups if one in alarmed), *(one for one in self.groups if one not in alarmed)]
        kept = set(first[: max(rows - 1, 1)])
        return [group for group in self.groups if group in kept]

    def _alarm_lines(self, is_whole: bool) -> list[Text]:
        shown = self.alarms if is_whole else self.alarms[-_ALARMS:]
        lines = [Text.assemble((f"{alarm.id} ", f"bold {GRADES['loses'].terminal}"), str(alarm)) for alarm in shown]
        if len(shown) < len(self.alarms):
            lines.insert(0, Text(counted(len(self.alarms) - len(shown), "earlier alarm"), style="dim"))
        return [Text(""), *lines] if lines else []


def _cell(curve: Curve | None, room: int, logarithmic: bool, bars: str) -> str:
    if curve is None:
        return ""
    value = "inf/NaN" if math.isnan(curve.latest) else f"{curve.latest:.3g}"
    if not logarithmic:  # a share: the number alone says it
        return f"{curve.latest:.0%}" if math.isfinite(curve.latest) else value
    return f"{sparkline(curve.values, room, logarithmic, bars):<{room}} {value}"
