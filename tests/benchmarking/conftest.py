"""What keeps measurements the same on a machine that is busy."""

from __future__ import annotations

import math

import pytest

from lowp.benchmarking import timing


@pytest.fixture
def never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is so slow that only one is timed."""
    monkeypatch.setattr(timing, "_SLOW", math.inf)
