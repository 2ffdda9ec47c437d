"""GradScaler: torch's interface, with a bounded loss scale and a report of which gradient overflowed."""

from __future__ import annotations

from lowp.step.provenance import NonFinite, NonFiniteGradients
from lowp.step.scaler import GradScaler

__all__ = ["GradScaler", "NonFinite", "NonFiniteGradients"]
