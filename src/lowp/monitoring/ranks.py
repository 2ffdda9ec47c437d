"""Whether the ranks of DistributedDataParallel hold the same weights, told by their store: no rank waits for others."""

import json
import sys
from itertools import count
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lowp import distributed
from lowp.compat import rendezvous_store, unwrapped
from lowp.monitoring.look import Look
from lowp.numerics.models import Models
from lowp.numerics.schedule import is_sampled

_monitors = count()  # every rank makes its monitors in the same order


class RankCheck:
    """Compares some numbers of every weight over the ranks in steps 0, 1, 2, 4 … 32 and every fiftieth."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._rank, self._name = distributed.rank(), f"lowp/monitor/{next(_monitors)}"
        self._looks: list[Look] = []
        self._mine: dict[int, dict[str, float]] = {}  # by step, until every rank has told its own
        self._store: Any = rendezvous_store() if distributed.has_other_ranks() else None

    @property
    def is_used(self) -> bool:
        """Whether there are other ranks."""
        return self._store is not None

    def is_due(self, step: int) -> bool:
        """Whether the weights are read after a step."""
        return self.is_used and is_sampled(step)

    def next_after(self, step: int) -> int:
        """The next step, this one included, after which they are read."""
        return next(filter(is_sampled, count(step))) if self.is_used else sys.maxsize

    def step(self, step: int) -> None:
        """Read the weights after a step that is due."""
        roots = ((one, getattr(one, "_orig_mod", one)) for one in self._models.roots.values())  # of compiled ones
        wrapped = [one for one, inner in roots if isinstance(inner, DistributedDataParallel)]
        named = [
            (self._models.parameters[id(one)], one)
            for root in wrapped
            for one in unwrapped(root).parameters()
            if one.is_floating_point() and id(one) in self._models.parameters
        ]
        if named:
            look = Look(step, False)
            look.weights_of(named)
            look.send()
            self._looks.append(look)

    def collect(self) -> dict[str, tuple[int, float]]:
        """Tell the other ranks what has arrived. On rank 0, return the parameters in which a rank differs, and it."""
        while self._looks and (numbers := self._looks[0].read()) is not None:
            step = self._looks.pop(0).step
            if self._rank:
                self._store.set(f"{self._name}/{step}/{self._rank}", json.dumps(numbers["sum"]))
            else:
                self._mine[step] = numbers["sum"]
        found: dict[str, tuple[int, float]] = {}
        for step in list(self._mine):
            keys = [f"{self._name}/{step}/{rank}" for rank in range(1, distributed.world().size())]  # type: ignore[union-attr]
            if not self._store.check(keys):
                continue
            mine = self._mine.pop(step)
            for rank, key in enumerate(keys, 1):
                theirs = json.loads(self._store.get(key))
                self._store.delete_key(key)
                for name, value in mine.items():
                    if theirs.get(name, value) != value and name not in found and value == value:
                        found[name] = (rank, abs(theirs[name] - value))
        return found
