"""Shared exponents of the sites of a training step: every tensor is int16 under its own power of two."""

from lowp.exponents.delayed import DelayedScales, SiteScales
from lowp.exponents.learning import Flush
from lowp.exponents.scalings import is_flexpoint, scaling_of
from lowp.exponents.shared import SharedExponents, Summary
from lowp.exponents.sites import CLASSES, Spots, Tell, Trail, class_of, is_result
from lowp.exponents.steps import StepWriter
from lowp.exponents.table import ExponentTable, largest
from lowp.exponents.writer import SiteWriter

__all__ = [
    "CLASSES",
    "DelayedScales",
    "ExponentTable",
    "Flush",
    "SharedExponents",
    "SiteScales",
    "SiteWriter",
    "Spots",
    "StepWriter",
    "Summary",
    "Tell",
    "Trail",
    "class_of",
    "is_flexpoint",
    "is_result",
    "largest",
    "scaling_of",
]
