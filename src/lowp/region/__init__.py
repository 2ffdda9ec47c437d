"""lowp.autocast: a region of code in which a policy's rules, or torch's own lists, decide how ops run."""

from lowp.ops.observing import Observation
from lowp.region.context import autocast
from lowp.region.following import at_rest
from lowp.region.rulebook import Report

__all__ = ["Observation", "Report", "at_rest", "autocast"]
