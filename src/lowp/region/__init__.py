"""lowp.autocast: a region of code whose ops run by a policy's rules, or by torch's lists in torch's own spelling."""

from __future__ import annotations

from lowp.ops.observing import Observation
from lowp.region.context import autocast
from lowp.region.report import Report
from lowp.region.steps import at_rest

__all__ = ["Observation", "Report", "at_rest", "autocast"]
