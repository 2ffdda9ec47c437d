"""Tables of sites in a checkpoint, of shared exponents and of delayed scales: what is saved, and how it is read."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowp import casts
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.exponents.sites import SiteTable

_VERSION = 2
_Part = Tensor | dict[str, Tensor]
_AnyTable = TypeVar("_AnyTable", bound=SiteTable)


def state_of(tables: Mapping[Cast, SiteTable]) -> dict[str, Any]:
    """Return the tables as plain values and tensors."""
    groups = [
        {
            "cast": str(cast),
            "sites": list(table.names),
            **{name: _each(part, Tensor.clone) for name, part in table.parts.items()},
        }
        for cast, table in tables.items()
    ]
    return {"version": _VERSION, "groups": groups}


def tables_of(state: Mapping[str, Any], new: Callable[[Cast], _AnyTable]) -> dict[Cast, _AnyTable]:
    """Return the tables of `state_of`, each in a table that `new` has made for its cast, on the device of that table.

    Raises InvalidInput for any other state.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("groups", []), list):
        raise InvalidInput(
            f"the state of shared exponents must be a dictionary with groups, not {type(state).__name__}"
        )
    if state.get("version") != _VERSION:
        raise InvalidInput(
            f"shared exponents of version {state.get('version')!r} cannot be read: this lowp reads {_VERSION}"
        )
    tables = {}
    for saved in state["groups"]:
        if not isinstance(saved, Mapping) or not isinstance(saved.get("cast"), str):
            raise InvalidInput("the shared exponents in this checkpoint are incomplete: a group without its cast")
        cast = casts.parse(saved["cast"])
        table = new(cast)
        _check_whole(table, saved)
        parts = {name: _each(saved[name], partial(_copied, device=table.device)) for name in table.parts}
        table.restore(saved["sites"], **parts)
        tables[cast] = table
    return tables


def _each(part: _Part, function: Callable[[Tensor], Tensor]) -> _Part:
    """Return a part of a table with a function of each of its tensors."""
    return function(part) if isinstance(part, Tensor) else {name: function(one) for name, one in part.items()}


def _copied(saved: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy on a device."""
    return saved.to(device, copy=True, memory_format=torch.contiguous_format)


def _check_whole(table: SiteTable, saved: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless the saved entries have names, and tensors of this table's sizes and types."""
    names = saved.get("sites")
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) != len(names)
        or not all(_are_alike(saved.get(name), own, len(names)) for name, own in table.parts.items())
    ):
        raise InvalidInput(f"the shared exponents of {table.cast} in this checkpoint are incomplete")


def _are_alike(found: object, own: _Part, length: int) -> bool:
    """Whether `found` has tensors of `own`'s names, types and shapes, for `length` sites."""
    if isinstance(own, Tensor):
        return isinstance(found, Tensor) and found.dtype is own.dtype and found.shape == (length, *own.shape[1:])
    return (
        isinstance(found, Mapping)
        and set(found) == set(own)
        and all(_are_alike(found[name], own[name], length) for name in own)
    )
