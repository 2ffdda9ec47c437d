"""Looks of a monitor as its file has them."""

from __future__ import annotations

from typing import Any

from lowp.monitoring import Alarm

ALARM = Alarm("N101", "blocks.1.norm", "100% of the updates are rounded away in bfloat16", 0, 2, "Keep fp32.", 1.0)


def record(step: int, groups: int = 2, **more: Any) -> dict[str, Any]:
    one = {"activation": 2.0, "gradient": 10.0**-step, "update_to_weight": 1e-3, "lost": 0.5}
    names = [f"blocks.{group}" for group in range(groups)]
    alarms = [ALARM.document()] if step == 2 else []
    return {
        "step": step,
        "time": step / 4,
        "loss": 2.0**-step,
        "gradient": 1.0,
        "scale": 512.0,
        "skipped": 0,
        "groups": dict.fromkeys(names, one),
        "alarms": alarms,
        **more,
    }
