"""Optimizers for parameters stored in few bits: master weights around any of torch, SGD, AdamW, Lion and Muon."""

from lowp.optim.exponents import FlexWeights
from lowp.optim.masters import MasterWeights
from lowp.optim.optimizers import SGD, AdamW, Lion, Muon
from lowp.optim.storage import join, split

__all__ = ["SGD", "AdamW", "FlexWeights", "Lion", "MasterWeights", "Muon", "join", "split"]
