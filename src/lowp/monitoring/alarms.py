"""Alarms: told once of each layer and kind, and again only if it gets worse."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lowp.errors import LowpError
from lowp.monitoring.rules import RULES, Check
from lowp.monitoring.seen import History, Sight
from lowp.numerics.findings import FINDINGS

_WORSE = 10.0  # times the number that was told
_MORE = 2.0  # times the layers


@dataclass(frozen=True)
class Alarm:
    """One alarm. `others` are further layers of which the same holds; `lowp explain` describes `id`."""

    id: str
    layer: str
    text: str
    since: int
    step: int
    change: str
    value: float
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        also = f" (and {len(self.others)} more)" if self.others else ""
        since = f" since step {self.since}" if self.since != self.step else ""
        return f"step {self.step}: {self.layer}{also}: {self.text}{since}. {self.change} (lowp explain {self.id})"

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "others": list(self.others)}


def alarm_of(document: Mapping[str, Any]) -> Alarm:
    """Return the alarm that `Alarm.document` gave."""
    return Alarm(**{**document, "others": tuple(document["others"])})


class TrainingAlarm(LowpError, RuntimeError):
    """A monitor's alarm, raised with on_alarm="raise"; `alarm` is the alarm."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(str(alarm))
        self.alarm = alarm


@dataclass
class _Known:
    """How often in a row a sign was found of a layer, since when, and how bad it was when it was told."""

    since: int
    looks: int = 0
    told: float | None = None


class Alarms:
    """Judges each look by the rules."""

    def __init__(self, patience: int) -> None:
        self.patience, self.history = patience, History()
        self.suspects = False  # whether the latest look has found what further ones must confirm
        self._known: dict[str, dict[str, _Known]] = {rule.id: {} for rule in RULES}

    def judge(self, seen: Sight) -> list[Alarm]:
        """Return the alarms of a look: at most one of each kind, which names the layer that is worst off."""
        self.suspects = False
        found = [alarm for rule in RULES if (alarm := self._judge(rule, seen)) is not None]
        self.history.add(seen)
        return found

    def _judge(self, rule: Check, seen: Sight) -> Alarm | None:
        known = self._known[rule.id]
        signs = {sign.layer: sign for sign in rule.find(self.history, seen)}
        if not (signs or known):
            return None
        patience = self.patience if rule.patience is None else rule.patience
        if rule.has_evidence(seen):
            for layer in known.keys() - signs.keys():
                known[layer].looks = 0
        ripe, worse = [], False
        told = sum(one.told is not None for one in known.values())
        for layer, sign in signs.items():
            one = known.setdefault(layer, _Known(seen.step))
            if not one.looks:
                one.since = seen.step
            one.looks += 1
            if one.looks < patience:
                self.suspects = self.suspects or one.told is None
                continue
            if one.told is None:
                ripe.append(sign)
            elif sign.value >= _WORSE * one.told:
                ripe.append(sign)
                worse = True
        if not ripe or (not worse and len(ripe) < (_MORE - 1) * told):
            return None
        for sign in ripe:
            known[sign.layer].told = sign.value
        worst = max(ripe, key=lambda sign: sign.value)
        others = tuple(sign.layer for sign in ripe if sign is not worst)
        layer, since = worst.layer or "the model", known[worst.layer].since
        return Alarm(rule.id, layer, worst.text, since, seen.step, FINDINGS[rule.id].advice, worst.value, others)
