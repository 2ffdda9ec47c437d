"""What shared exponents and delayed scales have in common: sites with entries in tables, one table for each cast.

Ranks may run different ops (stochastic depth, a branch that only one rank takes, a NaN that changes the path of a
product) and reach sites in different order. So sites are identified by name: the agreed sites are one list, the same on
every rank, and one all-reduce per step has a column for each. A rank that did not write at a site contributes nothing.
New sites are announced with that all-reduce, gathered once, and appended in sorted order.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lowp import casts, distributed
from lowp.casts import Cast
from lowp.errors import InvalidInput, Misuse, brief
from lowp.exponents.sites import Passes
from lowp.kernels.choose import hardware

_VERSION = 2  # of a checkpoint
_Part = Tensor | dict[str, Tensor]
AnyTable = TypeVar("AnyTable", bound="SiteTable")


class SiteTable(ABC):
    """The entries of sites under one cast, on a device: `names` gives the entry of each, in their order."""

    def __init__(self, cast: Cast, device: torch.device) -> None:
        self.cast, self.device = cast, device
        self.names: dict[str, int] = {}
        self.state: Any = None  # of the scaling that `extend`s it
        self._ordered: tuple[list[str], Tensor] = [], torch.zeros(0, dtype=torch.int64, device=device)

    @property
    @abstractmethod
    def _parts(self) -> dict[str, _Part]:
        """What a checkpoint holds: tensors with a number or a row of each entry."""

    @abstractmethod
    def _hold(self, names: dict[str, int], parts: Mapping[str, Any]) -> None:
        """Take over entries with their `parts`."""

    @abstractmethod
    def _grow(self, site: str) -> None:
        """Make a new entry, which has got a name and the last place."""

    @abstractmethod
    def columns(self, sites: list[str]) -> Tensor:
        """Return this rank's observations at some sites, fp64[rows, n], for a maximum over ranks."""

    @abstractmethod
    def flush(self, agreed: Tensor | None = None) -> Any:
        """Observe what was met since the last flush, or what all ranks have met: `columns` of all entries."""

    def index(self, site: str) -> int:
        """Return the entry of a site; a new site gets a new entry."""
        found = self.names.get(site)
        if found is None:
            found = self.names[site] = len(self.names)
            self._grow(site)
        return found

    def order_of(self, sites: list[str]) -> Tensor:
        """Return where the entries of sites are, int64[n] on the table's device; sent there anew for other sites."""
        if self._ordered[0] != sites:
            self._ordered = list(sites), torch.tensor([self.names[site] for site in sites], device=self.device)
        return self._ordered[1]

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the table, as plain values and tensors."""
        parts = {name: _each(part, Tensor.clone) for name, part in self._parts.items()}
        return {"cast": str(self.cast), "sites": list(self.names), **parts}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `saved` has returned. Raises InvalidInput unless it has names, sizes and types as here."""
        names = saved.get("sites")
        if (
            not isinstance(names, list)
            or not all(isinstance(name, str) for name in names)
            or len(set(names)) != len(names)
            or not all(_are_alike(saved.get(name), own, len(names)) for name, own in self._parts.items())
        ):
            raise InvalidInput(f"the shared exponents of {self.cast} in this checkpoint are incomplete")
        copied = partial(Tensor.to, device=self.device, copy=True, memory_format=torch.contiguous_format)
        parts = {name: _each(saved[name], copied) for name in self._parts}
        self._hold({name: index for index, name in enumerate(names)}, parts)


class Sites(ABC, Generic[AnyTable]):
    """The sites of a training run: a table for each cast, on which all ranks agree at the end of a step.

    Every rank must make the same calls. `apart`: whether the runs of a step have spots of their own, see `Passes`.
    """

    def __init__(self, apart: bool = True) -> None:
        self._tables: dict[Cast, AnyTable] = {}
        self.passes = Passes(apart)
        self._agree_on({})

    @abstractmethod
    def _new(self, cast: Cast, device: torch.device) -> AnyTable:
        """Return a table without entries."""

    def _table(self, cast: Cast, device: torch.device) -> AnyTable:
        for table in self._tables.values():  # one or two
            if table.cast is cast and table.device == device:
                return table
        if not hardware.has_numbers(device):  # a model that is called for its shapes writes no numbers
            return self._new(cast, device)
        found = self._tables.get(cast)
        if found is None:
            found = self._tables[cast] = self._new(cast, device)
        return found

    # -- steps ----------------------------------------------------------------------------------------------------
    def flush(self) -> Any:
        """End a step: observe what was met in it, on all ranks, and predict what is to come. Each rank must call it."""
        self.passes.end_step()
        self._flush(self._agreed() if distributed.has_other_ranks() else MappingProxyType({}))

    def _flush(self, agreed: Mapping[Cast, Tensor]) -> None:
        for cast, table in self._tables.items():
            table.flush(agreed.get(cast))

    # -- ranks ----------------------------------------------------------------------------------------------------
    def any_rank(self, is_faulty: bool) -> bool:
        """Return whether any rank found its step faulty. Every rank must call this before it ends its step.

        Raises Misuse, on all ranks, if they do not have the same sites.
        """
        if not distributed.has_other_ranks():
            return is_faulty
        vector = torch.tensor([int(is_faulty), self._digest, -self._digest])
        distributed.agree_on_maximum_(vector, distributed.world())
        if int(vector[1]) != -int(vector[2]):
            raise Misuse(
                "the ranks remember different sites of shared exponents: a checkpoint was loaded on some ranks only; "
                "call Precision.load_state_dict (or lowp.load with precision=) on every rank, with the same checkpoint"
            )
        return bool(vector[0])

    def _agree_on(self, sites: dict[Cast, list[str]]) -> None:
        self._shared, self._digest = sites, 0
        if sites:
            text = "\n".join(f"{cast}: {name}" for cast in sorted(sites, key=str) for name in sites[cast])
            self._digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def _agreed(self) -> dict[Cast, Tensor]:
        """Return the observations of all ranks in this step, by cast, in the order of this rank's entries."""
        found: dict[Cast, list[Tensor]] = {}
        done: dict[Cast, int] = {}
        while True:
            todo = {cast: self._shared[cast][done.get(cast, 0) :] for cast in sorted(self._shared, key=str)}
            for cast, names in todo.items():
                done[cast] = done.get(cast, 0) + len(names)
            columns, has_new = self._reduced({cast: names for cast, names in todo.items() if names})
            for cast, part in columns.items():
                found.setdefault(cast, []).append(part)
            if not has_new:
                break
            self._announce()
        agreed = {}
        for cast, parts in found.items():
            whole = torch.cat(parts, dim=1)
            agreed[cast] = torch.empty_like(whole)
            agreed[cast][:, self._tables[cast].order_of(self._shared[cast])] = whole
        return agreed

    def _reduced(self, todo: Mapping[Cast, list[str]]) -> tuple[dict[Cast, Tensor], bool]:
        """Return the maxima over ranks of the columns of some sites, and whether any rank has new sites."""
        parts = {cast: self._tables[cast].columns(names) for cast, names in todo.items()}
        flag = torch.tensor([float(any(self._unshared().values()))], dtype=torch.float64)
        device = next((part.device for part in parts.values()), flag.device)
        whole = torch.cat([*(part.reshape(-1).to(device) for part in parts.values()), flag.to(device)])
        distributed.agree_on_maximum_(whole, distributed.world())
        pieces = torch.split(whole, [*(part.numel() for part in parts.values()), 1])
        found = {
            cast: piece.view_as(part).to(part.device)
            for (cast, part), piece in zip(parts.items(), pieces, strict=False)
        }
        return found, bool(pieces[-1])

    def _unshared(self) -> dict[Cast, list[str]]:
        """Return the sites of this rank that are not agreed on."""
        new: dict[Cast, list[str]] = {}
        for cast, table in self._tables.items():
            shared = self._shared.get(cast, [])
            if len(table.names) > len(shared):
                known = set(shared)
                new[cast] = [name for name in table.names if name not in known]
        return new

    def _announce(self) -> None:
        """Send new sites to all ranks, and make an entry for each site of the others."""
        own = [(cast, self._tables[cast].device.type, names) for cast, names in self._unshared().items()]
        union: dict[Cast, set[str]] = {}
        devices: dict[Cast, str] = {}
        for told in distributed.gather(own, distributed.world()):
            for cast, device, names in told:
                union.setdefault(cast, set()).update(names)
                devices.setdefault(cast, device)
        for cast in sorted(union, key=str):  # one of them may have been used by other ranks only
            table = self._tables.get(cast) or self._table(cast, distributed.own_device(devices[cast]))
            shared = self._shared.setdefault(cast, [])
            for name in sorted(union[cast].difference(shared)):
                table.index(name)
                shared.append(name)
        self._agree_on(self._shared)

    # -- what is known --------------------------------------------------------------------------------------------
    def sites(self) -> list[str]:
        """Return the sites, in the order of their first use."""
        return [name for table in self._tables.values() for name in table.names]

    def _found(self, site: str, what: str) -> tuple[AnyTable, int]:
        """Return the table and the entry of a site. Raises InvalidInput for one that was never used."""
        for table in self._tables.values():
            if site in table.names:
                return table, table.names[site]
        raise InvalidInput(f"nothing {what} at the site {site!r}; sites have names such as {self.sites()[:3]}")

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values and tensors. Call it between steps: it flushes nothing."""
        return {"version": _VERSION, "groups": [table.saved() for table in self._tables.values()]}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Continue from `state_dict`. Raises InvalidInput, with nothing changed, for any other state."""
        if isinstance(state, Mapping) and state.get("version") != _VERSION:
            raise InvalidInput(
                f"shared exponents of version {brief(state.get('version'))} cannot be read: this lowp reads {_VERSION}"
            )
        if not isinstance(state, Mapping) or not isinstance(state.get("groups"), list):
            raise InvalidInput(
                f"the state of shared exponents must be a dictionary with a list of groups, not {brief(state)}"
            )
        tables: dict[Cast, AnyTable] = {}
        for saved in state["groups"]:
            if not isinstance(saved, Mapping) or not isinstance(saved.get("cast"), str):
                raise InvalidInput("the shared exponents in this checkpoint are incomplete: a group without its cast")
            cast = casts.parse(saved["cast"])
            tables[cast] = self._new(cast, torch.device(device))
            tables[cast].restore(saved)
        self._tables = tables
        self._agree_on({cast: sorted(table.names) for cast, table in tables.items()})


def _each(part: _Part, function: Callable[[Tensor], Tensor]) -> _Part:
    """Return a part of a table with a function of each of its tensors."""
    return function(part) if isinstance(part, Tensor) else {name: function(one) for name, one in part.items()}


def _are_alike(found: object, own: _Part, length: int) -> bool:
    """Whether `found` has tensors of `own`'s names, types and shapes, for `length` sites."""
    if isinstance(own, Tensor):
        return isinstance(found, Tensor) and found.dtype is own.dtype and found.shape == (length, *own.shape[1:])
    return (
        isinstance(found, Mapping)
        and set(found) == set(own)
        and all(_are_alike(found[name], own[name], length) for name in own)
    )
