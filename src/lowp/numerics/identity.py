"""The identity of a profile: the models by the names and shapes of their parameters, and their environment."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def fingerprint_of(*models: nn.Module) -> str:
    """Return a hash of the names and shapes of the models' parameters."""
    text = "|".join(";".join(f"{name}{tuple(one.shape)}" for name, one in model.named_parameters()) for model in models)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def header_of(models: Sequence[nn.Module], precision: Any) -> dict[str, Any]:
    """Return the header of a record, which describes the run: plain data."""
    from lowp import __version__

    parameters = list({id(one): one for model in models for one in model.parameters()}.values())
    preset = getattr(precision, "preset", None)
    return {
        "model": ", ".join(type(one).__name__ for one in models),
        "fingerprint": fingerprint_of(*models),
        "parameters": sum(one.numel() for one in parameters),
        "dtypes": sorted({str(one.dtype).removeprefix("torch.") for one in parameters}),
        "device": str(parameters[0].device) if parameters else "cpu",
        "precision": preset.name if preset is not None else "fp32",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "lowp": __version__,
        "torch": torch.__version__,
    }
