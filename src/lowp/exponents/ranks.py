"""The agreement of ranks about shared exponents: which sites exist, by name, and what a step has seen at each site.

Ranks may run different ops (stochastic depth, a branch that only one rank takes, a NaN that changes the path of a
product) and reach sites in different order. So sites are identified by name: the agreed sites are one list, the same on
every rank, and one all-reduce per step has a column for each. A rank that did not write at a site contributes nothing.
New sites are announced with that all-reduce, gathered once, and appended in sorted order.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lowp import distributed
from lowp.casts import Cast
from lowp.errors import Misuse
from lowp.exponents.sites import SiteTable

Groups = Mapping[Cast, SiteTable]
Make = Callable[[Cast, torch.device], SiteTable]


class AgreedSites:
    """The sites that all ranks know, by cast. Every rank must make the same calls."""

    def __init__(self, groups: Groups | None = None) -> None:
        self._sites = {cast: sorted(group.names) for cast, group in (groups or {}).items()}
        self._digest = self._digested()

    def fault(self, found: bool, ranks: distributed.Group) -> bool:
        """Return whether any rank has found a fault. Raises Misuse, on all ranks, if their lists differ."""
        vector = torch.tensor([int(found), self._digest, -self._digest])
        distributed.agree_on_maximum_(vector, ranks)
        if int(vector[1]) != -int(vector[2]):
            raise Misuse(
                "the ranks remember different sites of shared exponents: a checkpoint was loaded on some ranks only; "
                "call Precision.load_state_dict (or lowp.load with precision=) on every rank, with the same checkpoint"
            )
        return bool(vector[0])

    def agree(self, groups: Groups, make: Make, ranks: distributed.Group) -> dict[Cast, Tensor]:
        """Return the observations of all ranks in this step, by cast, with columns as in `ExponentTable.columns`.

        `make` makes the table of a cast that only other ranks have used so far, on a device.
        """
        agreed: dict[Cast, list[Tensor]] = {}
        done: dict[Cast, int] = {}
        while True:
            todo = {cast: self._sites[cast][done.get(cast, 0) :] for cast in sorted(self._sites, key=str)}
            for cast, names in todo.items():
                done[cast] = done.get(cast, 0) + len(names)
            columns, has_new = self._reduced(groups, todo, ranks)
            for cast, part in columns.items():
                agreed.setdefault(cast, []).append(part)
            if not has_new:
                break
            self._announce(groups, make, ranks)
        return {cast: self._in_order(groups[cast], self._sites[cast], parts) for cast, parts in agreed.items()}

    def _reduced(
        self, groups: Groups, todo: Mapping[Cast, list[str]], ranks: distributed.Group
    ) -> tuple[dict[Cast, Tensor], bool]:
        """Return the maxima over ranks of the columns of some sites, and whether any rank has new sites."""
        parts = {cast: groups[cast].columns(names) for cast, names in todo.items() if names}
        flag = torch.tensor([float(any(self._new(groups).values()))], dtype=torch.float64)
        device = next((part.device for part in parts.values()), flag.device)
        whole = torch.cat([*(part.reshape(-1).to(device) for part in parts.values()), flag.to(device)])
        distributed.agree_on_maximum_(whole, ranks)
        pieces = torch.split(whole, [*(part.numel() for part in parts.values()), 1])
        found = {
            cast: piece.view_as(part).to(part.device)
            for (cast, part), piece in zip(parts.items(), pieces, strict=False)
        }
        return found, bool(pieces[-1])

    def _new(self, groups: Groups) -> dict[Cast, list[str]]:
        """Return the sites of this rank that are not agreed on."""
        new: dict[Cast, list[str]] = {}
        for cast, group in groups.items():
            agreed = self._sites.get(cast, [])
            if len(group.names) > len(agreed):
                known = set(agreed)
                new[cast] = [name for name in group.names if name not in known]
        return new

    def _announce(self, groups: Groups, make: Make, ranks: distributed.Group) -> None:
        """Send new sites to all ranks, and make an entry for each site of the others."""
        own = [(cast, groups[cast].device.type, names) for cast, names in self._new(groups).items()]
        union: dict[Cast, set[str]] = {}
        devices: dict[Cast, str] = {}
        for told in distributed.gather(own, ranks):
            for cast, device, names in told:
                union.setdefault(cast, set()).update(names)
                devices.setdefault(cast, device)
        for cast in sorted(union, key=str):
            group = groups[cast] if cast in groups else make(cast, distributed.own_device(devices[cast]))
            agreed = self._sites.setdefault(cast, [])
            for name in sorted(union[cast].difference(agreed)):
                group.index(name)
                agreed.append(name)
        self._digest = self._digested()

    def _digested(self) -> int:
        if not self._sites:
            return 0
        text = "\n".join(f"{cast}: {name}" for cast in sorted(self._sites, key=str) for name in self._sites[cast])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    @staticmethod
    def _in_order(group: SiteTable, names: list[str], parts: list[Tensor]) -> Tensor:
        """Return the columns of agreed sites in the order of this rank's entries."""
        agreed = torch.cat(parts, dim=1)
        own = torch.empty_like(agreed)
        own[:, group.order_of(names)] = agreed
        return own
