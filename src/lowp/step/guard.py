"""The guard of a training step: acts once it is known whether a step counts.

Loss scales (`lowp.GradScaler`), shared exponents and steps without a scale use the same guard. It restores running
statistics after a skipped step, counts skipped steps, gives up when nothing helps, and reports once that a run is no
longer finite. Nothing in it waits for the device, except reading `skipped_steps`.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowp.compat import private
from lowp.hooks import Uncopied
from lowp.kernels.choose import hardware
from lowp.kernels.int16.late import LateNumber

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

_foreach_copy_ = cast(Callable[[list[torch.Tensor], list[torch.Tensor]], None], private("torch._foreach_copy_"))
_preserve_versions = cast(
    Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[None]],
    private("torch.autograd._unsafe_preserve_version_counter"),
)


def as_flag(stepped: torch.Tensor | bool | None) -> torch.Tensor:
    """Return whether a step stepped as a 0-dimensional bool tensor, made anew of what the host knows."""
    if isinstance(stepped, torch.Tensor):
        return stepped
    return torch.full((), bool(stepped), dtype=torch.bool, device="cpu")


class StepGuard:
    """Acts on steps that were taken and steps that were skipped; gives up after `patience` hopeless skips.

    A skip is hopeless if nothing is left to reduce: the loss scale is at its floor, or there is none. If the host knows
    of the skip, it counts (`count`). Otherwise `too_many` reads a copy of the device's counter that was started
    `patience` steps earlier and has arrived since; the answer is late by up to twice `patience` steps.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._stepped: torch.Tensor | bool | None = None
        self._skipped: torch.Tensor | None = None
        self._told_skipped, self._late_skipped = 0, LateNumber()
        self._journals: list[BatchNormJournal] = []
        self._counted = 0
        self._steps = 0
        self._hopeless = LateNumber()
        self._bad: torch.Tensor | None = None
        self._told_bad, self._late_bad = False, LateNumber()

    def protect(self, model: nn.Module) -> None:
        """Restore a model's running statistics (BatchNorm) whenever a step is skipped."""
        journal = BatchNormJournal(model)
        if len(journal):
            self._journals.append(journal)

    def settle(self, stepped: torch.Tensor | bool) -> None:
        """End a step: `stepped` is a 0-dimensional bool tensor, or what the host knows. Nothing is read of a device."""
        self._stepped = stepped
        known = bool(stepped) if isinstance(stepped, bool) or hardware.is_on_host(stepped) else None
        if known is not True:
            skipped = ~as_flag(stepped)
            before = torch.zeros_like(skipped, dtype=torch.int64) if self._skipped is None else self._skipped
            self._skipped = before.to(skipped.device).add_(skipped)  # in place: a captured graph continues to count
            self._told_skipped += known is False
        for journal in self._journals:
            journal.settle(as_flag(stepped))

    @property
    def stepped(self) -> torch.Tensor | None:
        """Whether the latest step stepped, a 0-dimensional bool tensor; None before the first."""
        return None if self._stepped is None else as_flag(self._stepped)

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps. Waits for the device."""
        return 0 if self._skipped is None else int(self._skipped)

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped, self._told_skipped = torch.tensor(count, device="cpu"), count

    def newly_skipped(self) -> int:
        """Return how many steps the device has skipped that were not told of yet, as far as that has arrived."""
        count = self._late_skipped.read() or 0
        if self._skipped is not None and not self._late_skipped.is_under_way:
            self._late_skipped.send(self._skipped)
        new, self._told_skipped = max(count - self._told_skipped, 0), max(count, self._told_skipped)
        return new

    # -- giving up ------------------------------------------------------------------------------------------------
    def count(self, hopeless: bool) -> None:
        """Note one step whose result the host knows: a hopeless skip, or not."""
        self._counted = self._counted + 1 if hopeless else 0

    def too_many(self, counter: torch.Tensor | None = None) -> bool:
        """Whether to give up; called once per step. `counter` is the device's count of consecutive hopeless skips."""
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
        """Return True once if any step so far was not finite. `bad`: the flag of this step, 0-dimensional or a bool.

        On a CPU the answer is for this step; on an accelerator it comes at a later step, when the flag has arrived.
        """
        if self._told_bad:
            return False
        if isinstance(bad, bool) or hardware.is_on_host(bad):
            self._told_bad = bool(bad)
        else:
            self._bad = bad if self._bad is None else self._bad | bad
            self._told_bad = bool(self._late_bad.read())
            if not self._late_bad.is_under_way:
                self._late_bad.send(self._bad)
        return self._told_bad


class BatchNormJournal:
    """Saves the running statistics when a step begins and restores them if the step is skipped, without a host sync.

    A forward that overflows writes infinities into the running statistics even if its step is then skipped; the next
    evaluation would be NaN. Call `settle(stepped)` once per step, after the optimizer: the statistics of a step that
    was taken are kept, those of a skipped step are replaced by the ones saved by `begin`. `settle` and loading a state
    dict into the model begin the next step; call `begin` after any other change from outside the training loop.

    Covers every module with running_mean and running_var (BatchNorm, SyncBatchNorm, InstanceNorm), on any device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            module for module in model.modules() if isinstance(getattr(module, "running_mean", None), torch.Tensor)
        ]
        self._saved: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        # torch's own method, which TorchScript modules hide but still support
        register: Callable[..., RemovableHandle] = nn.Module.register_load_state_dict_post_hook
        register(model, Uncopied(partial(_begin_on_load, weakref.ref(self))))
        self.begin()

    def __len__(self) -> int:
        """Return the number of modules covered."""
        return len(self._modules)

    @torch.no_grad()
    def begin(self) -> None:
        """Save the present statistics."""
        self._saved = [(buffers, _flat(buffers)) for buffers in self._buffers()]

    @torch.no_grad()
    def settle(self, stepped: torch.Tensor) -> None:
        """Keep the statistics if `stepped` (a 0-dimensional bool tensor) is true, else restore them; then save again.

        Runs a few kernels per device and dtype, however many modules there are. A buffer that was replaced since
        `begin`, for instance by `model.to(...)`, is left unchanged this time.
        """
        present = {id(buffer) for buffers in self._buffers() for buffer in buffers}
        for buffers, before in self._saved:
            kept = torch.where(stepped.to(before.device, non_blocking=True), _flat(buffers), before)
            pieces = torch.split(kept, [buffer.numel() for buffer in buffers])
            pairs = [pair for pair in zip(buffers, pieces, strict=True) if id(pair[0]) in present]
            if pairs:
                self._write([buffer for buffer, _ in pairs], [piece.view_as(buffer) for buffer, piece in pairs])
            before.copy_(kept)  # in place: a captured graph goes on from what it has left
        if present != {id(buffer) for buffers, _ in self._saved for buffer in buffers}:
            self.begin()

    @staticmethod
    def _write(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Write statistics as batch norm itself does, without incrementing their versions.

        A graph whose backward is still to come, such as a generator's through its discriminator, has saved the
        statistics but does not read them again. With a new version autograd would refuse that backward.
        """
        with _preserve_versions(tuple(buffers)):
            _foreach_copy_(buffers, values)

    def _buffers(self) -> list[list[torch.Tensor]]:
        """Return the statistics tensors, grouped by device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for module in self._modules:
            for name in _STATISTICS:
                buffer = getattr(module, name, None)
                if isinstance(buffer, torch.Tensor):
                    groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        return list(groups.values())


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


def _begin_on_load(journal: weakref.ref[BatchNormJournal], module: nn.Module, keys: Any) -> None:
    if (found := journal()) is not None:
        found.begin()
