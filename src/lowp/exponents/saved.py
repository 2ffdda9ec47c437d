"""Tables of shared exponents in a checkpoint: what is saved of them, and how they are read and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowp import casts
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.exponents.table import COUNTS, ExponentTable

_VERSION = 2


def state_of(tables: Mapping[Cast, ExponentTable]) -> dict[str, Any]:
    """Return the tables as plain values and tensors."""
    groups = [
        {
            "cast": str(cast),
            "sites": list(table.names),
            "state": {name: value.clone() for name, value in table.state._asdict().items()},
            "counts": {name: value.clone() for name, value in table.counts.items()},
            "before": table.before.clone(),
        }
        for cast, table in tables.items()
    ]
    return {"version": _VERSION, "groups": groups}


def tables_of(state: Mapping[str, Any], new: Callable[[Cast], ExponentTable]) -> dict[Cast, ExponentTable]:
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
        _fill(table, saved)
        tables[cast] = table
    return tables


def _fill(table: ExponentTable, saved: Mapping[str, Any]) -> None:
    """Give a new table the entries of a saved one."""
    device = table.before.device
    state = type(table.state)(*(_copied(saved["state"][name], device) for name in table.state._fields))
    counts = {name: _copied(saved["counts"][name], device) for name in COUNTS}
    table.restore(saved["sites"], state, counts, _copied(saved["before"], device))


def _copied(saved: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy on a device."""
    return saved.to(device, copy=True, memory_format=torch.contiguous_format)


def _check_whole(table: ExponentTable, saved: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless the saved entries have names, and tensors of this table's sizes and types."""
    names = saved.get("sites")
    parts: list[tuple[object, Mapping[str, Tensor]]] = [
        (saved.get("state"), table.state._asdict()),
        (saved.get("counts"), table.counts),
        ({"": saved.get("before")}, {"": table.before}),
    ]
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) != len(names)
        or not all(_are_alike(found, own, len(names)) for found, own in parts)
    ):
        raise InvalidInput(f"the shared exponents of {table.cast} in this checkpoint are incomplete")


def _are_alike(found: object, own: Mapping[str, Tensor], length: int) -> bool:
    """Whether `found` has tensors of `own`'s names, types and shapes, for `length` sites."""
    return (
        isinstance(found, Mapping)
        and set(found) == set(own)
        and all(isinstance(value, Tensor) for value in found.values())
        and all(found[name].dtype is own[name].dtype for name in own)
        and all(found[name].shape == (length, *own[name].shape[1:]) for name in own)
    )
