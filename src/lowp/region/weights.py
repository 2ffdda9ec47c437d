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

Two writes stay unseen: through a raw address that was taken before the entry, and through ``.data`` in another thread.
`forget_all` is for those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef

from lowp.casts import Cast
from lowp.compat import applied_at_once, private, real_tensors
from lowp.kernels.functions import quantize_operand
from lowp.kernels.products import NARROW, has_launches
from lowp.ops.casting import carried, functorch_is_active, is_irregular, is_jit_tracing, native_dtype, shield

__all__ = ["HANDS_OUT", "RUNS_HOOKS", "WeightCasts", "forget_all"]

_storage_holders = cast(Callable[[int], int], private("torch._C._storage_Use_Count"))
_foreach_copy = cast(Callable[[list[Tensor], list[Tensor]], None], private("torch._foreach_copy_"))
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


_attach = applied_at_once(_Attached)  # nothing is kept where torch.func transforms


class _Together(torch.autograd.Function):
    """Several fp32 weights cast in one launch, and their gradients in one launch on the way back."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _copied(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [one for one in gradients if one is not None]
        with shield():
            is_graph = torch.is_grad_enabled()  # of a gradient of a gradient
            wide = iter([one.float() for one in found] if is_graph else _copied(found, torch.float32))
        return None, *(None if one is None else next(wide) for one in gradients)


def _copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return tensors in another dtype, converted in one launch."""
    copies = [torch.empty_like(one, dtype=dtype) for one in tensors]
    _foreach_copy(copies, list(tensors))
    return tuple(copies)


# What tells that a weight still holds the numbers it held: its version, its address, and `_writes`, which counts what
# may have changed any weight. A tuple, since one is made at every use.
_Sign = tuple[int, int, int]


_ONE_NAME = sys.getrefcount(SimpleNamespace(name=object()).name) + 1  # of what one attribute holds
_PRUNE_AT = 1024
_SMALL = 1024  # elements
_PLAIN = (Tensor, nn.Parameter)


class _Entry:
    """A weight's cast values, what the weight was when they were made, and the values as part of the graph."""

    __slots__ = ("attached", "sign", "to", "value", "weight")

    def __init__(self, weight: Tensor, to: Cast, value: Tensor, sign: _Sign) -> None:
        self.weight, self.to = weight, to  # no weak reference: torch swaps no tensor that has one
        self.sign = sign
        self.value = value.detach() if value.requires_grad else value
        self.attached = value if value.requires_grad else None

    def in_graph(self) -> Tensor:
        """Return the values as part of the graph: their gradient reaches the weight."""
        if self.attached is None:
            self.attached = cast(Tensor, _attach(self.weight, self.value))
        return self.attached


def _are_alone(entries: list[_Entry]) -> bool:
    """Whether nobody but these entries of one weight holds it any more."""
    weight = entries[0].weight
    names = sys.getrefcount(weight) - 1  # without the one here
    return names == _ONE_NAME - 1 + len(entries) and _tensor_holders(weight) == 1


class WeightCasts:
    """The casts of leaf weights in one entry of a region, in one thread.

    What was cast under `torch.no_grad` serves a later use with gradients, which reach the weight. Nothing is kept
    inside torch.compile, torch.func, inference mode, or for subclasses of torch.Tensor.
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[_Entry]] = {}  # by the identity of the weight, which they hold
        self._handed_out: set[int] = set()
        self._used: set[int] = set()  # the identities of weights whose first cast was left to torch.autocast
        self._made: list[TensorWeakRef] = []
        self._prune_at = _PRUNE_AT
        _watch_optimizers()

    def __len__(self) -> int:
        """Return how many casts can serve again."""
        return sum(map(len, self._entries.values()))

    def __call__(self, weight: Tensor, to: Cast) -> Tensor:
        """Return the weight cast for a contraction, part of the graph where gradients are recorded."""
        if _is_traced() or not _can_serve(weight):
            return carried(weight, to)
        sign, held = self._sign(weight), self._entries.get(id(weight))
        known = None if held is None else self._known(weight, to, sign)
        return self._remember(weight, to, sign, carried(weight, to)) if known is None else known

    def narrowed(self, weight: Tensor, to: Cast) -> Tensor:
        """Return a plain leaf in the 16-bit dtype that is its cast, where nothing is traced; see `__call__`.

        Without gradients a small one is cast anew: that takes less time than to find out whether it was written.
        """
        held, narrow = self._entries.get(id(weight)), NARROW[cast(torch.dtype, native_dtype(to))]
        if held is None and weight.numel() <= _SMALL and not torch.is_grad_enabled():
            return narrow(weight)
        if torch.is_inference_mode_enabled():
            return narrow(weight)
        sign = self._sign(weight)
        known = None if held is None else self._known(weight, to, sign)
        return self._remember(weight, to, sign, narrow(weight)) if known is None else known

    def rounded(self, weight: Tensor, to: Cast, dtype: torch.dtype) -> Tensor:
        """Return the values of a plain leaf's cast in a dtype that holds them, apart from the graph, likewise."""
        if torch.is_inference_mode_enabled():
            return quantize_operand(weight, to, 0, False).to(dtype)
        sign = self._sign(weight)
        for entry in self._entries.get(id(weight), ()):
            if entry.sign == sign and (entry.to is to or entry.to == to) and not is_jit_tracing():
                return entry.value
        value = quantize_operand(weight.detach(), to, 0, False)
        return self._remember(weight, to, sign, value if dtype is torch.float32 else value.to(dtype))

    def together(self, weights: Sequence[Tensor], to: Cast) -> list[Tensor]:
        """Return several weights cast likewise; those that have to be cast anew, in one launch."""
        is_traced = _is_traced()
        signs = [None if is_traced or not _can_serve(weight) else self._sign(weight) for weight in weights]
        found = [self._known(weight, to, sign) for weight, sign in zip(weights, signs, strict=True)]
        missing = {id(weight): weight for weight, one in zip(weights, found, strict=True) if one is None}
        if not missing:
            return cast("list[Tensor]", found)
        dtype = native_dtype(to)
        if len(missing) < 2 or dtype is None or not _go_together(list(missing.values()), dtype):
            return [self(weight, to) if one is None else one for weight, one in zip(weights, found, strict=True)]
        values = dict(zip(missing, cast(Any, _Together).apply(dtype, *missing.values()), strict=True))
        for weight, sign in zip(weights, signs, strict=True):
            if id(weight) in values and not is_traced and _can_serve(weight):
                self._remember(weight, to, sign, values[id(weight)])
        return [values[id(weight)] if one is None else one for weight, one in zip(weights, found, strict=True)]

    def _known(self, weight: Tensor, to: Cast, sign: _Sign | None) -> Tensor | None:
        """Return a cast that can serve again, part of the graph; None where there is none."""
        for entry in self._entries.get(id(weight), ()):
            if entry.sign == sign and (entry.to is to or entry.to == to):
                if is_jit_tracing():  # it would be a constant of the trace, whatever the weight becomes
                    return None
                return entry.in_graph() if weight.requires_grad and torch.is_grad_enabled() else entry.value
        return None

    def _remember(self, weight: Tensor, to: Cast, sign: _Sign | None, value: Tensor) -> Tensor:
        held = self._entries.pop(id(weight), None)
        others = [] if held is None else [entry for entry in held if entry.to != to]
        if value is not weight:
            self._made.append(TensorWeakRef(value))
            if sign is not None:
                others.append(_Entry(weight, to, value, sign))
        if others:
            self._entries[id(weight)] = others
            if len(self._entries) >= self._prune_at:
                self._prune()
        return value

    def _prune(self) -> None:
        """Let go of weights that are no longer used, each time that there are twice as many as were left then."""
        self._entries = {key: held for key, held in self._entries.items() if not _are_alone(held)}
        self._made = [reference for reference in self._made if reference() is not None]
        self._prune_at = max(_PRUNE_AT, 2 * len(self._entries))

    def _sign(self, weight: Tensor) -> _Sign | None:
        """Return what a later use compares; None where others may write the weight unseen."""
        one_holder, one_name = _one_holder()
        if sys.getrefcount(weight.untyped_storage()) != one_name:  # before it has a name here, see `_holders`
            return None
        storage = weight.untyped_storage()
        if _storage_holders(storage._cdata) != one_holder:
            return None
        memory = storage.data_ptr()
        if not storage.resizable() or memory in self._handed_out or (weight.is_cpu and storage.is_shared()):
            return None
        return weight._version, weight.data_ptr(), _writes[0]

    def cast_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], to: Cast
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with its weights cast: the leaves among them that want a gradient.

        Where a launch costs nothing the first cast of a weight is left to torch.autocast, as are small ones without
        gradients: most are used once an entry, and torch's own takes no time in Python.
        """
        given, dtype = (*args, *kwargs.values()) if kwargs else args, native_dtype(to)
        found = [x for x in given if isinstance(x, Tensor) and x.requires_grad and x.is_leaf and x.dtype is not dtype]
        if not found:
            return args, kwargs
        if has_launches(found[0]):
            values = self.together(found, to)
        else:
            again = [x for x in found if id(x) in self._used]
            self._used.update(map(id, found))
            found = [x for x in again if x.numel() > _SMALL or torch.is_grad_enabled()]
            if not found:
                return args, kwargs
            values = [self(x, to) for x in found]
        casts = dict(zip(map(id, found), values, strict=True))
        return (
            tuple([casts.get(id(x), x) for x in args]),
            {name: casts.get(id(x), x) for name, x in kwargs.items()} if kwargs else kwargs,
        )

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
        self._used.clear()
        if len(self._made) >= _PRUNE_AT:
            self._made = [reference for reference in self._made if reference() is not None]


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors hold a tensor's memory, and how many names in Python its storage object has.

    It takes the tensor, not the storage: torch.compile holds the arguments of functions that it has looked at. Nor is
    the storage named here: up to Python 3.11 a debugger or a profiler (sys.settrace, sys.setprofile) holds the locals
    of the functions that it looks at.
    """
    return _storage_holders(tensor.untyped_storage()._cdata), sys.getrefcount(tensor.untyped_storage())


@cache
def _one_holder() -> tuple[int, int]:
    """Return what `_holders` says of the memory of a tensor that shares it with nobody."""
    with real_tensors():
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


def _can_serve(weight: Tensor) -> bool:
    """Whether a cast of this tensor may be kept, outside of what is traced."""
    return weight.is_leaf and type(weight) in _PLAIN and weight.layout is torch.strided and not weight.is_nested


def _go_together(weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether one launch can cast all of these from fp32."""
    one_kind = {(type(weight), weight.dtype, weight.device) for weight in weights}
    is_narrow = dtype in (torch.float16, torch.bfloat16)
    if len(one_kind) > 1 or weights[0].dtype is not torch.float32 or not is_narrow or functorch_is_active():
        return False
    return not any(is_irregular(weight) for weight in weights)
