"""What is remembered within a training step: cast weights, the module path, running statistics of batch norms."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lowp.casts import Cast
from lowp.compat import private
from lowp.ops.casting import carried, functorch_is_active

__all__ = ["BatchNormJournal", "ModulePath", "WeightCasts"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

_foreach_copy_ = cast(Callable[[list[torch.Tensor], list[torch.Tensor]], None], private("torch._foreach_copy_"))


class BatchNormJournal:
    """Running statistics as they were when the step began, put back if the step is skipped, without a host sync.

    A forward that overflows writes infinities into the running statistics although its step is then skipped; the next
    evaluation is NaN. Call `settle(stepped)` once a step, after the optimizer: statistics of a step that stepped are
    kept, those of a skipped one are replaced by what `begin` saw. `settle` begins the next step, and so does loading a
    state dict into the model; call `begin` yourself after any other change from outside the training loop.

    Covers every module with running_mean and running_var (BatchNorm, SyncBatchNorm, InstanceNorm), on any device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            module for module in model.modules() if isinstance(getattr(module, "running_mean", None), torch.Tensor)
        ]
        self._saved: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        register: Callable[..., RemovableHandle] = model.register_load_state_dict_post_hook
        self._loading = register(lambda module, keys: self.begin())
        self.begin()

    def __len__(self) -> int:
        """Return how many modules are journalled."""
        return len(self._modules)

    def close(self) -> None:
        """Let go of the model; `settle` does nothing from now on."""
        self._loading.remove()
        self._modules = []
        self._saved = []

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the statistics as they are now."""
        self._saved = [(buffers, _flat(buffers)) for buffers in self._buffers()]

    @torch.no_grad()
    def settle(self, stepped: torch.Tensor) -> None:
        """Keep the statistics where `stepped` (a 0-dimensional bool tensor) is true, else restore them; begin anew.

        A handful of kernels a device and dtype, however many modules there are. A buffer that was replaced since
        `begin`, for instance by `model.to(...)`, is left as it is this once.
        """
        present = {id(buffer) for buffers in self._buffers() for buffer in buffers}
        for buffers, before in self._saved:
            kept = torch.where(stepped.to(before.device, non_blocking=True), _flat(buffers), before)
            pieces = torch.split(kept, [buffer.numel() for buffer in buffers])
            pairs = [pair for pair in zip(buffers, pieces, strict=True) if id(pair[0]) in present]
            if pairs:
                _foreach_copy_([buffer for buffer, _ in pairs], [piece.view_as(buffer) for buffer, piece in pairs])
        self.begin()

    def _buffers(self) -> list[list[torch.Tensor]]:
        """Return the statistics' tensors, those of one device and dtype together."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for module in self._modules:
            for name in _STATISTICS:
                buffer = getattr(module, name, None)
                if isinstance(buffer, torch.Tensor):
                    groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        return list(groups.values())


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


# -- cast weights -------------------------------------------------------------------------------------------------


class _Attached(torch.autograd.Function):
    """A cast weight that was computed before, made part of the graph: the gradient goes to the weight as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.to(ctx.dtype), None


class _Entry:
    """A weight's cast values, what the weight was when they were made, and the values as part of the graph."""

    __slots__ = ("attached", "memory", "reference", "value", "version")

    def __init__(self, weight: Tensor, value: Tensor, forget: Callable[[Any], None]) -> None:
        self.reference = weakref.ref(weight, forget)
        self.version, self.memory = weight._version, weight.data_ptr()
        self.value = value.detach()
        self.attached = value if value.requires_grad else None

    def is_of(self, weight: Tensor) -> bool:
        """Whether the weight is the one that was cast, and still holds the same numbers."""
        return self.reference() is weight and self.version == weight._version and self.memory == weight.data_ptr()


class WeightCasts:
    """The casts of leaf weights, each made once and kept until the weight changes.

    A weight changes when its version counter does, as all in-place operations under `torch.no_grad` make it do, when an
    optimizer that holds it steps (torch's fused ones leave the counter alone), or when its `.data` is replaced. Writing
    through ``weight.data`` in place elsewhere is not seen; call `forget` then. What was cast under `torch.no_grad`
    serves a later use with gradients, which reach the weight. Nothing is kept inside torch.compile, torch.func,
    inference mode, or for subclasses of torch.Tensor.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Cast], _Entry] = {}
        _all_casts.add(self)
        _watch_optimizers()

    def __len__(self) -> int:
        """Return how many casts are kept."""
        return len(self._entries)

    def __call__(self, weight: Tensor, to: Cast) -> Tensor:
        """Return the weight cast for a contraction, part of the graph where gradients are recorded."""
        if not weight.is_leaf or type(weight) not in (Tensor, nn.Parameter) or _is_traced():
            return carried(weight, to)
        key = (id(weight), to)
        entry = self._entries.get(key)
        if entry is None or not entry.is_of(weight):
            value = carried(weight, to)
            if value is not weight:
                self._entries[key] = _Entry(weight, value, self._forgetting(key))
            return value
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return entry.value
        if entry.attached is None:
            entry.attached = cast(Tensor, _Attached.apply(weight, entry.value))  # type: ignore[no-untyped-call]
        return entry.attached

    def tensors(self) -> list[Tensor]:
        """Return the cast values that are kept."""
        return [entry.value for entry in list(self._entries.values())]

    def detach(self) -> None:
        """Let go of the graph, which holds the weights; the values stay."""
        for entry in list(self._entries.values()):
            entry.attached = None

    def forget(self) -> None:
        """Let go of everything: the next use casts anew."""
        self._entries.clear()

    def forget_weights(self, identities: Container[int]) -> None:
        """Let go of the casts of some weights, given by `id`."""
        for key in [key for key in list(self._entries) if key[0] in identities]:
            self._entries.pop(key, None)

    def _forgetting(self, key: tuple[int, Cast]) -> Callable[[Any], None]:
        entries = self._entries
        return lambda _: (entries.pop(key, None), None)[1]


_all_casts: weakref.WeakSet[WeightCasts] = weakref.WeakSet()


@cache
def _watch_optimizers() -> None:
    """Let every optimizer's step tell all casts: torch's fused kernels do not count a weight's version up."""
    register_optimizer_step_post_hook(_forget_stepped)


def _forget_stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    kept = [casts for casts in list(_all_casts) if len(casts)]
    if kept:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for casts in kept:
            casts.forget_weights(stepped)


def _is_traced() -> bool:
    return torch.is_inference_mode_enabled() or functorch_is_active()


# -- where in the model -------------------------------------------------------------------------------------------


class ModulePath:
    """The path of the module that runs, relative to the outermost module that was called.

    Wrappers are transparent: below DataParallel, DistributedDataParallel and compiled modules paths are those of the
    model within. A module that the outermost one does not hold keeps the path of its caller.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._outermost: weakref.ReferenceType[nn.Module] | None = None

    @property
    def current(self) -> str:
        """The path, '' in the outermost module and outside any."""
        return self._stack[-1] if self._stack else ""

    @property
    def outermost(self) -> nn.Module | None:
        """The outermost module that was called, while one runs."""
        return self._outermost() if self._stack and self._outermost is not None else None

    def copy(self) -> ModulePath:
        """Return a path that stands where this one stands now and goes its own way."""
        other = ModulePath()
        other._stack, other._names, other._outermost = list(self._stack), self._names, self._outermost
        return other

    def enter(self, module: nn.Module) -> None:
        """Follow a call into a module."""
        if not self._stack and (self._outermost is None or self._outermost() is not module):
            self._outermost = weakref.ref(module)
            self._names = {id(one): name for name, one in _unwrapped(module).named_modules()}
        self._stack.append(self._names.get(id(module), self.current))

    def leave(self) -> None:
        """Follow a return; one too many is harmless, as when a region begins within a module."""
        if self._stack:
            self._stack.pop()


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model within DataParallel, DistributedDataParallel and compiled modules."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module
