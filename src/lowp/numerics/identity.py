"""What a profile is of: the model by the names and shapes of its parameters, and what it ran with."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from torch import nn

__all__ = ["fingerprint_of", "header_of"]


def fingerprint_of(model: nn.Module) -> str:
    """What tells a model with other parameters: a hash of their names and shapes."""
    text = ";".join(f"{name}{tuple(one.shape)}" for name, one in model.named_parameters())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def header_of(model: nn.Module, precision: Any) -> dict[str, Any]:
    """What a record says of the run: plain data."""
    from lowp import __version__

    parameters = list(model.parameters())
    preset = getattr(precision, "preset", None)
    return {
        "model": type(model).__name__,
        "fingerprint": fingerprint_of(model),
        "parameters": sum(one.numel() for one in parameters),
        "dtypes": sorted({str(one.dtype).removeprefix("torch.") for one in parameters}),
        "device": str(parameters[0].device) if parameters else "cpu",
        "precision": preset.name if preset is not None else "fp32",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "lowp": __version__,
        "torch": torch.__version__,
    }
