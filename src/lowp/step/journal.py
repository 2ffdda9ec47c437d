"""State within a training step: the running statistics of batch norms."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowp.compat import private

__all__ = ["BatchNormJournal"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

_foreach_copy_ = cast(Callable[[list[torch.Tensor], list[torch.Tensor]], None], private("torch._foreach_copy_"))
_preserve_versions = cast(
    Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[None]],
    private("torch.autograd._unsafe_preserve_version_counter"),
)


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
        register(model, _BeginOnLoad(self))
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


class _BeginOnLoad:
    """A model hook that calls `begin` of a journal.

    Copies and files of the model have in its place a function of Python that does nothing: they have no journal, and
    open without lowp.
    """

    def __init__(self, journal: BatchNormJournal) -> None:
        self._journal = weakref.ref(journal)

    def __call__(self, module: nn.Module, keys: Any) -> None:
        journal = self._journal()
        if journal is not None:
            journal.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])
