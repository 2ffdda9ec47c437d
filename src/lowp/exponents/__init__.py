"""Shared exponents that belong to places of a training step: all tensors in int16, each under its own power of two."""

from __future__ import annotations

from lowp.exponents.entries import Flush, scaling_of
from lowp.exponents.places import PlaceSite, Spots, Trail
from lowp.exponents.shared import CLASSES, SharedExponents, Summary, class_of

__all__ = [
    "CLASSES",
    "Flush",
    "PlaceSite",
    "SharedExponents",
    "Spots",
    "Summary",
    "Trail",
    "class_of",
    "scaling_of",
]
