"""Modules of TorchScript, whose ops no function mode sees: a region's policy is not carried out in them.

The interpreter knows torch.autocast alone: where contractions write fp16 or bf16 it casts by its own lists; every other
format would be passed over in silence. Who uses none of these modules pays nothing.
"""

from __future__ import annotations

import warnings
import weakref
from functools import cache
from typing import Any

import torch
from torch import nn

from lowp.region.entries import current

__all__ = ["install"]

_told: set[str] = set()
_rounding: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


@cache
def install() -> None:
    """Note the calls of these modules in a region that cannot round what they compute, and warn once of each policy."""

    def __call__(self: torch.jit.ScriptModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _note(self)
        return nn.Module.__call__(self, *args, **kwargs)

    torch.jit.ScriptModule.__call__ = __call__  # type: ignore[method-assign]


def _note(module: torch.jit.ScriptModule) -> None:
    entry = current()
    engine = None if entry is None else entry.engine
    if engine is None or not engine.active or not engine.rulebook.policy.rules:
        return
    if engine.dtype is not torch.float32 or not torch.is_autocast_enabled("cpu") or _rounds_by_itself(module):
        return
    name = module.original_name
    engine.rulebook.missed_script(name)
    policy = engine.rulebook.policy.name or "unnamed"
    if policy not in _told:
        _told.add(policy)
        warnings.warn(
            f"nothing that module {name} computes is rounded as policy {policy} says: TorchScript runs it, whose ops "
            "no region sees. Call the module itself, without torch.jit.script or torch.jit.trace, or compile it with "
            "torch.compile",
            UserWarning,
            stacklevel=3,
        )


def _rounds_by_itself(module: torch.jit.ScriptModule) -> bool:
    """Whether casts are in its graph: it was traced within a region."""
    known = _rounding.get(module)
    if known is None:
        known = _rounding[module] = "lowp::" in str(module.inlined_graph)
    return known
