"""GradScaler: torch's interface, a loss scale that cannot die, and a name for what overflowed."""

from __future__ import annotations

from lowp.grad_scaler.provenance import NonFinite, NonFiniteGradients
from lowp.grad_scaler.scaler import GradScaler

__all__ = ["GradScaler", "NonFinite", "NonFiniteGradients"]
