"""`lowp.load`: loads a checkpoint of a run into its parts, or a file of weights as a plain state_dict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lowp import checkpoint
from lowp.checkpoint import Stateful
from lowp.errors import InvalidInput, brief
from lowp.kernels.numbers.floats import CARRIERS
from lowp.portable.sources import open_source, read_torch


def load(
    path: str | Path,
    *,
    rng_state: bool = True,
    map_location: Any = None,
    dtype: torch.dtype | None = None,
    **parts: Stateful,
) -> dict[str, Any]:
    """Load a checkpoint of `lowp.save` into `parts` and return its `extra`, or a file of weights as a state_dict.

    With parts (model=, optimizer= …), and for a checkpoint without `dtype`, loading succeeds as a whole or changes
    nothing: every checksum is verified, every part must be in the file and of the class that was saved, and if one part
    rejects its state the others are restored. `rng_state=False` does not restore the random generators.

    Without parts, files that `lowp convert` wrote, safetensors files (single, or given by the index or folder of their
    shards) and torch files return their tensors by name: floating-point tensors in `dtype` (default: float32),
    regardless of the format in which they are stored, others unchanged. With `dtype` a checkpoint of `lowp.save`
    returns the tensors of its model.

    Raises InvalidCheckpoint for a file that is missing, cut short, changed in any bit that a checksum covers, hostile,
    or made for another model or optimizer; nothing in a file is ever executed.
    """
    if dtype is not None and dtype not in CARRIERS:
        raise InvalidInput(f"weights can be read as {', '.join(map(str, CARRIERS))}, not as {brief(dtype)}")
    if parts or (dtype is None and _is_of_a_run(Path(path))):
        if dtype is not None:
            raise InvalidInput(f"dtype={dtype} is for weights without parts: {', '.join(parts)} decide what they hold")
        return checkpoint.load(path, rng_state=rng_state, map_location=map_location, **parts)
    state: dict[str, Any] = {}
    with open_source(path) as source:
        for name in source.names():
            tensor = source.tensor(name)
            wanted = (dtype or torch.float32) if tensor.is_floating_point() else tensor.dtype
            state[name] = tensor.to(device=map_location, dtype=wanted, copy=True)
    return state


def _is_of_a_run(path: Path) -> bool:
    """Whether a file is from `lowp.save`, or cannot contain weights; its reader then reports the error."""
    if os.path.isdir(path) or path.suffix in (".safetensors", ".json"):
        return False
    if not os.path.isfile(path):
        return True
    content = read_torch(path)
    return isinstance(content, dict) and checkpoint.KEY in content
