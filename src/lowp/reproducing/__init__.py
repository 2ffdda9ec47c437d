"""Training whose bits depend neither on the processor's instructions nor on the number of threads."""

from __future__ import annotations

from lowp.reproducing.mode import Reproducible, reproducible

__all__ = ["Reproducible", "reproducible"]
