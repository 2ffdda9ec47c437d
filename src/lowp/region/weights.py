"""The casts of weights within one entry of a region, each made once for as long as nobody else can have written them.

A cast is dropped when its entry is left, as torch.autocast drops its own: a region that is entered once a forward pass
casts every weight once a pass. Within an entry a weight may be used again (an unrolled recurrent cell, tied weights, a
decoding loop, micro-batches in one ``with``), and its cast serves again only where the weight is known to hold the
numbers that were cast. A version counter alone does not show that: writes through ``.data``, NumPy and DLPack, FSDP's
all-gather and torch's fused optimizers leave it as it is. A cast serves again where

* the tensor, its version and its memory are those that were cast;
* the memory is torch's own and the tensor alone holds it: no view, no NumPy array, no other process shares it;
* since the entry began nothing has handed the memory out (`HANDS_OUT`), no optimizer has stepped, and no backward pass
  has run, whose hooks may write what they like.

One write stays unseen: through a raw address that was taken before the entry. `forget_all` is for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef

from lowp.casts import Cast
from lowp.compat import private
from lowp.ops.casting import carried, functorch_is_active, is_irregular

__all__ = ["HANDS_OUT", "RUNS_HOOKS", "WeightCasts", "forget_all"]

_storage_holders = cast(Callable[[int], int], private("torch._C._storage_Use_Count"))
_tensor_holders = cast(Callable[[Tensor], int], private("torch.Tensor._use_count"))

# What gives a tensor's memory to something that can write it without counting the tensor's version up.
HANDS_OUT: frozenset[Any] = frozenset(
    (
        cast(Any, Tensor.data).__get__,
        Tensor.detach,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.storage,
        Tensor.untyped_storage,
        Tensor.set_,
        Tensor.resize_,
        Tensor.share_memory_,
    )
)

# What runs code that no region sees: a hook of a backward pass may write any weight, as optimizers within one do.
RUNS_HOOKS: frozenset[Any] = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))


class _Attached(torch.autograd.Function):
    """A cast weight that was computed before, made part of the graph: the gradient goes to the weight as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.to(ctx.dtype), None


class _Sign(NamedTuple):
    """What tells that a weight still holds the numbers it held; `writes` counts what may have changed any weight."""

    version: int
    memory: int
    writes: int


_ONE_NAME = sys.getrefcount(SimpleNamespace(name=object()).name) + 1  # of what one attribute holds
_PRUNE_AT = 1024


class _Entry:
    """A weight's cast values, what the weight was when they were made, and the values as part of the graph."""

    __slots__ = ("attached", "sign", "value", "weight")

    def __init__(self, weight: Tensor, value: Tensor, sign: _Sign) -> None:
        self.weight = weight  # no weak reference: torch swaps no tensor that has one
        self.sign = sign
        self.value = value.detach()
        self.attached = value if value.requires_grad else None

    @property
    def is_alone(self) -> bool:
        """Whether nobody but this entry holds the weight any more."""
        return sys.getrefcount(self.weight) == _ONE_NAME and _tensor_holders(self.weight) == 1


class WeightCasts:
    """The casts of leaf weights in one entry of a region, in one thread.

    What was cast under `torch.no_grad` serves a later use with gradients, which reach the weight. Nothing is kept
    inside torch.compile, torch.func, inference mode, or for subclasses of torch.Tensor.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Cast], _Entry] = {}
        self._handed_out: set[int] = set()
        self._made: list[TensorWeakRef] = []
        self._prune_at = _PRUNE_AT
        _watch_optimizers()

    def __len__(self) -> int:
        """Return how many casts can serve again."""
        return len(self._entries)

    def __call__(self, weight: Tensor, to: Cast) -> Tensor:
        """Return the weight cast for a contraction, part of the graph where gradients are recorded."""
        if not weight.is_leaf or type(weight) not in (Tensor, nn.Parameter) or is_irregular(weight) or _is_traced():
            return carried(weight, to)
        key, sign = (id(weight), to), self._sign(weight)
        entry = self._entries.get(key)
        if entry is None or sign is None or entry.sign != sign:
            return self._anew(key, weight, to, sign)
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return entry.value
        if entry.attached is None:
            entry.attached = cast(Tensor, _Attached.apply(weight, entry.value))  # type: ignore[no-untyped-call]
        return entry.attached

    def _anew(self, key: tuple[int, Cast], weight: Tensor, to: Cast, sign: _Sign | None) -> Tensor:
        value = carried(weight, to)
        if value is not weight:
            self._made.append(TensorWeakRef(value))
        if value is weight or sign is None:
            self._entries.pop(key, None)
        else:
            self._entries[key] = _Entry(weight, value, sign)
            self._prune()
        return value

    def _prune(self) -> None:
        """Let go of weights that are no longer used, each time that there are twice as many as were left then."""
        if len(self._entries) >= self._prune_at:
            self._entries = {key: entry for key, entry in self._entries.items() if not entry.is_alone}
            self._made = [reference for reference in self._made if reference() is not None]
            self._prune_at = max(_PRUNE_AT, 2 * len(self._entries))

    def _sign(self, weight: Tensor) -> _Sign | None:
        """Return what a later use compares; None where others may write the weight unseen."""
        is_alone = _holders(weight) == _one_holder()
        storage = weight.untyped_storage()
        if not is_alone or not storage.resizable() or storage.data_ptr() in self._handed_out:
            return None
        if weight.is_cpu and storage.is_shared():
            return None
        return _Sign(weight._version, weight.data_ptr(), _writes[0])

    def hand_out(self, x: Any) -> None:
        """Note that a tensor's memory is given to something that can write it unseen: casts of it serve no more."""
        if isinstance(x, Tensor) and x.layout is torch.strided:
            try:
                self._handed_out.add(x.untyped_storage().data_ptr())
            except RuntimeError:  # a wrapper without memory, as of torch.func
                return

    def tensors(self) -> list[Tensor]:
        """Return the cast values that are alive, whether this holds them or a graph that backward needs."""
        found = (reference() for reference in self._made)
        return [value for value in found if value is not None]

    def forget(self) -> None:
        """Let go of everything: the next use casts anew."""
        self._entries.clear()
        self._made = [reference for reference in self._made if reference() is not None]


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors hold a tensor's memory, and how many names in Python its storage object has.

    It takes the tensor, not the storage: torch.compile holds the arguments of functions that it has looked at.
    """
    storage = tensor.untyped_storage()
    return _storage_holders(storage._cdata), sys.getrefcount(storage)


@cache
def _one_holder() -> tuple[int, int]:
    """Return what `_holders` says of the memory of a tensor that shares it with nobody."""
    return _holders(torch.empty(1, device="cpu"))


_writes = [0]  # in all threads: optimizers' steps, and what `forget_all` was called for


def forget_all() -> None:
    """Let every region in every thread cast its weights anew at their next use."""
    _writes[0] += 1


@cache
def _watch_optimizers() -> None:
    """Count the steps of all optimizers: torch's fused kernels do not count a weight's version up."""
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: forget_all())


def _is_traced() -> bool:
    return torch.is_inference_mode_enabled() or functorch_is_active()
