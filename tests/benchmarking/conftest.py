"""Fixtures that make measurements independent of the machine's load."""

from __future__ import annotations

import math

import pytest

from lowp.benchmarking import timing


@pytest.fixture
def never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat no step as so slow that only one is timed."""
    monkeypatch.setattr(timing, "_SLOW", math.inf)
