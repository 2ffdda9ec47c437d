"""Optimizers that are not torch's, as a precision steps one of torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import lowp


class Other(torch.optim.Optimizer):
    """Parameters that another optimizer trains; a precision that steps this one calls `take` unless it skips."""

    def __init__(self, parameters: Iterable[torch.Tensor], take: Callable[[], Any]) -> None:
        super().__init__(list(parameters), {})
        self._take = take

    def step(self, closure: None = None) -> Any:  # type: ignore[override]
        """Let the other optimizer step."""
        return self._take()


def made(precision: Any, library: str) -> lowp.Precision:
    """Return a Precision for a library whose optimizers know no masters; raises InvalidInput if it would need some."""
    found = precision if isinstance(precision, lowp.Precision) else lowp.Precision(precision)
    if found.policy.parameters is not None:
        raise lowp.InvalidInput(
            f"{found.preset.name} stores parameters in {found.policy.parameters}, and optimizers of {library} know "
            "neither masters nor exponents: take a precision with fp32 parameters, such as fp16, bf16, fp8 or dfp16; "
            f"flex16+5 runs under lowp run --precision flex16+5"
        )
    return found


def widened(value: Any) -> Any:
    """Return a value with its tensors in 16 bits, in dictionaries, lists and tuples too, in fp32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        changed = {key: widened(one) for key, one in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (list, tuple)):
        changes = [widened(one) for one in value]
        return type(value)(*changes) if hasattr(value, "_fields") else type(value)(changes)
    return value
