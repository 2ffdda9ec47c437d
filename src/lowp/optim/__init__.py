"""Optimizers for parameters stored in few bits: master weights around any torch optimizer, SGD and AdamW."""

from __future__ import annotations

from lowp.optim.flex import FlexWeights
from lowp.optim.masters import MasterWeights
from lowp.optim.optimizers import SGD, AdamW
from lowp.optim.storage import join, split

__all__ = ["SGD", "AdamW", "FlexWeights", "MasterWeights", "join", "split"]
