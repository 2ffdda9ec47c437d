"""The states of all random number generators of a training run, as plain values for a checkpoint."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lowp.errors import InvalidInput


def rng_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators (CPU and every CUDA device), as plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words_of_numpy = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), words_of_numpy, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def check_rng_states(states: Any) -> None:
    """Raise InvalidInput unless `restore_rng_states` can take these states; changes no generator."""
    try:
        if not isinstance(states, Mapping) or states["numpy"][1].dtype is not torch.int64:
            raise TypeError("the entries are of other types")
        python, numpy = _of_python(states), _of_numpy(states)
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(states["torch"].cpu())
        cuda = states["cuda"]
        if not isinstance(cuda, (list, tuple)) or not all(getattr(one, "dtype", None) is torch.uint8 for one in cuda):
            raise TypeError("the entry 'cuda' is not a list of states")
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise InvalidInput(
            f"these are not the states of random generators that rng_states() gives ({type(error).__name__}: "
            f"{error}): load without them (rng_state=False), or another checkpoint"
        ) from None


def restore_rng_states(states: Mapping[str, Any]) -> None:
    """Restore the generators to the result of `rng_states`; CUDA's only if the number of devices is the same.

    Raises InvalidInput for anything else, before any generator is changed.
    """
    check_rng_states(states)
    random.setstate(_of_python(states))
    np.random.set_state(_of_numpy(states))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])


def _of_python(states: Mapping[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = states["python"]
    return version, tuple(words), gauss


def _of_numpy(states: Mapping[str, Any]) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = states["numpy"]
    return kind, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached
