"""Tables of shared exponents in a checkpoint: checks that the saved tables are complete, and copies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.exponents.table import ExponentTable

__all__ = ["check_whole", "copied"]


def copied(saved: Tensor, device: torch.device | str) -> Tensor:
    """Return a contiguous copy on a device."""
    return saved.to(device, copy=True, memory_format=torch.contiguous_format)


def check_whole(group: ExponentTable, saved: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless the saved entries have names, and tensors of this table's sizes and types."""
    names = saved.get("sites")
    parts: list[tuple[object, Mapping[str, Tensor]]] = [
        (saved.get("state"), group.state._asdict()),
        (saved.get("counts"), group.counts),
        ({"": saved.get("before")}, {"": group.before}),
    ]
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) != len(names)
        or not all(_are_alike(found, own, len(names)) for found, own in parts)
    ):
        raise InvalidInput(f"the shared exponents of {group.cast} in this checkpoint are incomplete")


def _are_alike(found: object, own: Mapping[str, Tensor], length: int) -> bool:
    """Whether `found` has tensors of `own`'s names, types and shapes, for `length` sites."""
    return (
        isinstance(found, Mapping)
        and set(found) == set(own)
        and all(isinstance(value, Tensor) for value in found.values())
        and all(found[name].dtype is own[name].dtype for name in own)
        and all(found[name].shape == (length, *own[name].shape[1:]) for name in own)
    )
