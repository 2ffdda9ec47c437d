"""Classes of the tensors that places hold: weights, activations, gradients, updates, and the sums over each class."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lowp.kernels import words

__all__ = ["CLASSES", "Summary", "class_of", "features_axis", "is_of_optimizer", "is_result"]

CLASSES = ("weights", "activations", "activation gradients", "weight gradients", "updates", "optimizer state")
_CLASS_OF_ROLE = {
    "weight": "weights",
    "buffer": "activations",
    "update": "updates",
    "gradient": "weight gradients",
    "weight gradient": "weight gradients",
    "bias gradient": "weight gradients",
    "output": "activations",
}


def class_of(place: str) -> str:
    """The class of tensors that a place belongs to: weights, activations, updates ..."""
    role = place.partition(" of ")[0].rstrip(" 0123456789")
    if role in _CLASS_OF_ROLE:
        return _CLASS_OF_ROLE[role]
    return "activation gradients" if role.endswith("gradient") else "optimizer state"


def is_of_optimizer(place: str) -> bool:
    """Whether a moment is written, which divides or is divided: one of many features always takes both words."""
    return class_of(place) == "optimizer state"


def features_axis(place: str, x: Tensor) -> int | None:
    """The axis along which a gradient or a tensor of the optimizer has enough features that one word may lose some.

    Of parameters the first; of activations the longest but the first, which is that of examples.
    """
    if x.dim() == 0 or max(x.shape) < words.FEATURES:
        return None
    kind = class_of(place)
    if kind in ("weight gradients", "optimizer state"):
        axis = 0
    elif kind == "activation gradients" and x.dim() > 1:
        axis = max(range(1, x.dim()), key=lambda one: x.shape[one])
    else:
        return None
    return axis if x.shape[axis] >= words.FEATURES else None


def is_result(place: str) -> bool:
    """Whether a place is one of results of the forward pass."""
    return place.startswith("output of ")


@dataclass
class Summary:
    """Sums over writes; `raises_needed`: maxima that the exponent of the write before could not have held."""

    places: int = 0
    writes: int = 0
    saturated: int = 0
    moved: int = 0
    nonfinite: int = 0
    raises_needed: int = 0
    raises_in_time: int = 0
    measured: int = 0
    headroom_sum: float = 0.0

    @property
    def headroom_bits(self) -> float:
        """The mean of log2(32768 / Γ) over the writes that were not all zero."""
        return self.headroom_sum / self.measured if self.measured else math.nan
