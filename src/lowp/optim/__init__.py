"""Optimizers for parameters stored in few bits: master weights around any torch optimizer, SGD and AdamW."""

from __future__ import annotations

from lowp.optim.adamw import AdamW
from lowp.optim.flex import FlexWeights
from lowp.optim.masters import MasterWeights
from lowp.optim.sgd import SGD
from lowp.optim.split import join, split

__all__ = ["SGD", "AdamW", "FlexWeights", "MasterWeights", "join", "split"]
