"""torch.utils.swap_tensors, by which a model that is loaded or converted may exchange its parameters."""

from __future__ import annotations

from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from lowp.launch.session import Session

# Python's views of the hooks; torch leaves these dictionaries with the objects and moves only what calls them
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def install(session: Session) -> None:
    """Let tensors that the session refers to be exchanged as in plain torch."""
    if session.is_plain:
        return
    utils = cast(Any, torch.utils)
    original = utils.swap_tensors

    @wraps(original)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        with session.exchanging(t1, t2):
            original(t1, t2)
            if session.is_scaling:  # else the hooks are the script's
                _exchange_hooks(t1, t2)

    utils.swap_tensors = swap_tensors


def _exchange_hooks(one: Any, other: Any) -> None:
    """Let each tensor have the hooks of its content: torch does not call what is registered later on another's."""
    for name in _HOOKS:
        hooks, others = getattr(one, name, None), getattr(other, name, None)
        if hooks is not None or others is not None:
            setattr(one, name, others)
            setattr(other, name, hooks)
