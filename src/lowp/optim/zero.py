"""torch's ZeroRedundancyOptimizer, which sends parameters between ranks in each rank's own dtype."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lowp.errors import InvalidInput


def is_zero(optimizer: object) -> bool:
    """Whether an optimizer is torch's ZeroRedundancyOptimizer, which distributes the parameters over the ranks."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def refuse_to_convert(storage: str) -> None:
    """Raise InvalidInput if a ZeroRedundancyOptimizer is constructing an optimizer that converts its parameters.

    Each rank would convert only its own share, and the ranks would then send each other tensors of different sizes.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    frame: Any = sys._getframe(1)
    for _ in range(12):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return
        if is_zero(frame.f_locals.get("self")):
            raise InvalidInput(
                f"ZeroRedundancyOptimizer gives each rank a share of the parameters, which this rank alone would "
                f"convert to {storage}: convert the whole model on every rank first, "
                "lowp.Precision('bf16-storage').prepare_model(model), or give storage=None"
            )
