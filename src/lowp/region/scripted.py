"""TorchScript modules: a function mode does not see their ops, so a region's policy does not apply to them.

The TorchScript interpreter supports torch.autocast only. If contractions write fp16 or bf16, it casts by torch's own
lists; any other format would be ignored silently. Code without such modules pays nothing.
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
    """Note the calls of TorchScript modules in regions that cannot round their ops, and warn once per policy."""

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
    """Whether the module's graph contains lowp's casts, because it was traced within a region."""
    known = _rounding.get(module)
    if known is None:
        known = _rounding[module] = "lowp::" in str(module.inlined_graph)
    return known
