"""Training for a picture of shared exponents is the recipe's own, including its schedule."""

from __future__ import annotations

from typing import Any

import pytest

from lowp.recipes.recording.flex import record_autoflex
from lowp.recipes.recording.runs import Onlooker
from lowp.recipes.training import Settings, Training


def test_the_learning_rate_follows_the_schedule_over_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step, rates = Training.step, []

    def watched(self: Training, *arguments: Any) -> Any:
        result = step(self, *arguments)
        rates.append(self.optimizer.param_groups[0]["lr"])
        return result

    monkeypatch.setattr(Training, "step", watched)
    reported: list[tuple[str, int]] = []
    settings = Settings("digits", "flex16+5", batch=314).filled()  # 4 steps an epoch
    record_autoflex(settings, 10, onlooker=Onlooker(on_progress=lambda name, done: reported.append((name, done))))
    assert rates == pytest.approx([0.1 * (1 - number / 12) for number in range(10)])
    assert reported == [("digits", number) for number in range(1, 11)]
