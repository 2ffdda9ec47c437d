"""The guard of a training step: what follows once it is known whether a step counts.

Loss scales (`lowp.GradScaler`) and shared exponents stand on the same one. It puts running statistics back after a
skipped step, counts what was skipped, gives up when nothing helps, and tells once that a run without a loss scale is no
longer finite. Nothing in it waits for the device.
"""

from __future__ import annotations

import torch
from torch import nn

from lowp.kernels import hardware
from lowp.kernels.late import LateNumber
from lowp.session import BatchNormJournal

__all__ = ["StepGuard", "as_flag"]


def as_flag(stepped: torch.Tensor | bool | None) -> torch.Tensor:
    """Return whether a step stepped as a 0-dimensional bool tensor, made anew of what the host knows."""
    if isinstance(stepped, torch.Tensor):
        return stepped
    return torch.full((), bool(stepped), dtype=torch.bool, device="cpu")


class StepGuard:
    """What follows from a step that stepped and from one that was skipped; `patience` hopeless skips are too many.

    A skip is hopeless where nothing is left that could be made smaller: the loss scale is at its floor, or there is
    none. Where the host knows of it, it counts along (`count`). Where nothing is read, `too_many` looks at a copy of
    the device's own counter, begun `patience` steps before and long since arrived: it is late by up to twice that.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._stepped: torch.Tensor | bool | None = None
        self._skipped: torch.Tensor | None = None
        self._journals: list[BatchNormJournal] = []
        self._counted = 0
        self._steps = 0
        self._hopeless = LateNumber()
        self._bad: torch.Tensor | None = None
        self._found = LateNumber()
        self._told = False

    def protect(self, model: nn.Module) -> None:
        """Put a model's running statistics (BatchNorm) back whenever a step is skipped."""
        journal = BatchNormJournal(model)
        if len(journal):
            self._journals.append(journal)

    def settle(self, stepped: torch.Tensor | bool) -> None:
        """End a step: `stepped` is a 0-dimensional bool tensor, or what the host knows. Nothing is read of a device."""
        self._stepped = stepped
        known = bool(stepped) if isinstance(stepped, bool) or hardware.is_on_host(stepped) else None
        if known is not True:
            skipped = (~as_flag(stepped)).to(torch.int64)
            self._skipped = skipped if self._skipped is None else self._skipped.to(skipped.device) + skipped
        for journal in self._journals:
            journal.settle(as_flag(stepped))

    @property
    def stepped(self) -> torch.Tensor | None:
        """Whether the latest step stepped, a 0-dimensional bool tensor; None before the first."""
        return None if self._stepped is None else as_flag(self._stepped)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped. Waits for the device."""
        return 0 if self._skipped is None else int(self._skipped)

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped = torch.tensor(count, device="cpu")

    # -- giving up ------------------------------------------------------------------------------------------------
    def count(self, hopeless: bool) -> None:
        """Take note of one step that the host knows about: a hopeless skip, or anything better."""
        self._counted = self._counted + 1 if hopeless else 0

    def too_many(self, counter: torch.Tensor | None = None) -> bool:
        """Whether it is time to give up, asked once a step; `counter` is the device's of hopeless skips in a row."""
        self._steps += 1
        if self._counted >= self.patience:
            self._counted = 0
            return True
        if counter is None or self._steps % self.patience:
            return False
        late = self._hopeless.read() or 0
        self._hopeless.send(counter)
        return late >= self.patience

    # -- runs in which nothing is skipped -------------------------------------------------------------------------
    def turned_bad(self, bad: torch.Tensor | bool) -> bool:
        """Whether something was not finite by now, once; `bad` is this step's flag, a 0-dimensional tensor or a bool.

        On a CPU that is this step, on an accelerator a later one, when the flag has arrived.
        """
        if self._told:
            return False
        if isinstance(bad, bool) or hardware.is_on_host(bad):
            self._told = bool(bad)
        else:
            self._bad = bad if self._bad is None else self._bad | bad
            self._told = bool(self._found.read())
            if not self._found.is_under_way:
                self._found.send(self._bad)
        return self._told
