"""The states of all random number generators that a training run draws from, as plain values for a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators (CPU and every CUDA device), as plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words_of_numpy = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), words_of_numpy, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put the generators back to what `random_states` gave; CUDA's only where there are as many devices as then."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
