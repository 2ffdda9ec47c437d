"""Casts of weights within one entry of a region. A cast is reused while nothing else can have written the weight.

Casts are dropped when the entry is left, as torch.autocast drops its own: a region that is entered once per forward
pass casts every weight once per pass. Within an entry a weight may be used several times (an unrolled recurrent cell,
tied weights, a decoding loop, micro-batches in one ``with``). Its cast is reused only if the weight provably holds the
same values. A version counter alone does not prove that: writes through ``.data``, NumPy and DLPack, FSDP's all-gather
and torch's fused optimizers leave it unchanged. A cast is reused if

* the tensor, its version and its memory are the same;
* the memory is torch's own and belongs to this tensor alone: no view, NumPy array or other process shares it;
* since the entry began nothing has exposed the memory (`HANDS_OUT`), no optimizer has stepped, and no backward pass
  has run, whose hooks may write any tensor.

Two kinds of writes are not noticed: through a raw address taken before the entry, and through ``.data`` in another
thread. Call `forget_all` after such a write.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowp.casts import Cast
from lowp.compat import applied_at_once, once, private, real_tensors
from lowp.kernels.tracing import functorch_is_active, is_jit_tracing
from lowp.ops.casting import PassedOn, carried, native_dtype

_storage_holders = cast(Callable[[int], int], private("torch._C._storage_Use_Count"))
_fix_weakref = cast(Callable[[Tensor], None], private("torch.Tensor._fix_weakref"))
_tensor_holders = cast(Callable[[Tensor], int], private("torch.Tensor._use_count"))

# Functions that expose a tensor's memory to code that can write it without incrementing the tensor's version.
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

# Functions that run hooks, which no region sees: a hook of a backward pass, such as an optimizer's, may write any
# weight.
RUNS_HOOKS: frozenset[Any] = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))

WRITES_UNSEEN = HANDS_OUT | RUNS_HOOKS  # after these a weight may be written without a trace


_attach = applied_at_once(PassedOn)  # no cast is kept where torch.func transforms


# Identifies the contents of a weight: its version, its address, and `_writes`, which counts events that may have
# changed any weight. A tuple, since one is made at every use.
_Sign = tuple[int, int, int]


_ONE_NAME = sys.getrefcount(SimpleNamespace(name=object()).name) + 1  # references to an object that one attribute holds
_PRUNE_AT = 1024
_SMALL = 1 << 16  # elements, whose cast to 16 bits takes as long as a look for a kept one
_PLAIN = (Tensor, nn.Parameter)


class _Entry:
    """The cast values of a weight, the weight's sign when they were computed, and the values attached to the graph."""

    __slots__ = ("_value", "attached", "sign", "to", "weight")

    def __init__(self, weight: Tensor, to: Cast, value: Tensor, sign: _Sign) -> None:
        self.weight, self.to = weight, to  # no weak reference: torch.utils.swap_tensors refuses tensors that have one
        self.sign = sign
        self._value: Tensor | None = None if value.requires_grad else value
        self.attached: Tensor | None = value if value.requires_grad else None

    @property
    def value(self) -> Tensor:
        """The values, detached from the graph."""
        if self._value is None:
            assert self.attached is not None
            self._value = self.attached.detach()
        return self._value

    def in_graph(self) -> Tensor:
        """Return the values attached to the graph, so that gradients reach the weight."""
        if self.attached is None:
            self.attached = cast(Tensor, _attach(self.weight, self.value))
        return self.attached


def _are_alone(entries: list[_Entry]) -> bool:
    """Whether only these entries still hold their weight."""
    weight = entries[0].weight
    names = sys.getrefcount(weight) - 1  # without the local name
    return names == _ONE_NAME - 1 + len(entries) and _tensor_holders(weight) == 1


class WeightCasts:
    """The casts of leaf weights in one entry of a region, in one thread.

    A cast made under `torch.no_grad` can be reused with gradients, which then reach the weight. No cast is kept inside
    torch.compile, torch.func or inference mode, or for subclasses of torch.Tensor.
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[_Entry]] = {}  # by id of the weight; the entries keep the weight alive
        self._handed_out: set[int] = set()
        self._used: set[int] = set()  # ids of weights whose first cast was left to torch.autocast
        self._made: list[weakref.ReferenceType[Tensor]] = []
        self._prune_at = _PRUNE_AT
        _watch_optimizers()

    def __len__(self) -> int:
        """Return the number of casts kept for reuse."""
        return sum(map(len, self._entries.values()))

    def __call__(self, weight: Tensor, to: Cast) -> Tensor:
        """Return the weight cast for a contraction, attached to the graph if gradients are recorded."""
        if torch.is_inference_mode_enabled() or functorch_is_active():
            return carried(weight, to)
        if not weight.is_leaf or type(weight) not in _PLAIN or weight.layout is not torch.strided or weight.is_nested:
            return carried(weight, to)
        sign = self._sign(weight)
        known = self._known(weight, to, sign)
        return self.keep(weight, to, sign, carried(weight, to)) if known is None else known

    def look(self, weight: Tensor, to: Cast) -> tuple[Tensor | None, _Sign | None]:
        """Return the values of a plain leaf's cast, detached from the graph, if they can be reused; and its sign."""
        if torch.is_inference_mode_enabled():
            return None, None
        sign = self._sign(weight)
        for entry in self._entries.get(id(weight), ()):
            if (entry.sign, entry.to) == (sign, to):
                return entry.value, sign
        return None, sign

    def _known(self, weight: Tensor, to: Cast, sign: _Sign | None) -> Tensor | None:
        """Return a cast that can be reused, attached to the graph if gradients are recorded; None if there is none."""
        for entry in self._entries.get(id(weight), ()):
            if (entry.sign, entry.to) == (sign, to):
                if is_jit_tracing():  # the cast would become a constant of the trace, even if the weight changes
                    return None
                return entry.in_graph() if weight.requires_grad and torch.is_grad_enabled() else entry.value
        return None

    def keep(self, weight: Tensor, to: Cast, sign: _Sign | None, value: Tensor) -> Tensor:
        """Keep and return the values of a weight's cast, if its sign tells whether it is written."""
        held = self._entries.pop(id(weight), None)
        others = [] if held is None else [entry for entry in held if entry.to != to]
        if value is not weight:
            self._made.append(weakref.ref(value))
            if sign is not None:
                others.append(_Entry(weight, to, value, sign))
        if others:
            self._entries[id(weight)] = others
            if len(self._entries) >= self._prune_at:
                self._prune()
        return value

    def _prune(self) -> None:
        """Drop weights that nothing else uses. Runs whenever the number of weights has doubled since the last time."""
        self._entries = {key: held for key, held in self._entries.items() if not _are_alone(held)}
        self._made = [reference for reference in self._made if reference() is not None]
        self._prune_at = max(_PRUNE_AT, 2 * len(self._entries))

    def _sign(self, weight: Tensor) -> _Sign | None:
        """Return the sign that a later use compares; None if other code may write the weight unnoticed."""
        one_holder, one_name = _one_holder()
        try:
            if sys.getrefcount(weight.untyped_storage()) != one_name:  # before a local name refers to it
                return None
        except NotImplementedError:  # a tensor that outlived its torch.func transform has no storage
            return None
        storage = weight.untyped_storage()
        if _storage_holders(storage._cdata) != one_holder or not storage.resizable():
            return None
        if self._handed_out and storage.data_ptr() in self._handed_out:
            return None
        if weight.is_cpu and storage.is_shared():
            return None
        return weight._version, weight.data_ptr(), _writes[0]

    def cast_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], to: Cast
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with those weights cast that `again` names; torch.autocast casts the others.

        Weights are the leaves that require a gradient.
        """
        given, dtype = (*args, *kwargs.values()) if kwargs else args, native_dtype(to)
        found = [x for x in given if isinstance(x, Tensor) and x.requires_grad and x.is_leaf and x.dtype is not dtype]
        casts = {id(x): self(x, to) for x in self.again(found)}
        if not casts:
            return args, kwargs
        return (
            tuple([casts.get(id(x), x) for x in args]),
            {name: casts.get(id(x), x) for name, x in kwargs.items()} if kwargs else kwargs,
        )

    def again(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights that this entry casts and keeps: those used before. Their uses are noted.

        The first cast of each weight is left to torch.autocast, and so are small weights without gradients: most
        weights are used once per entry, and torch.autocast takes no time in Python.
        """
        used = self._used
        found = [x for x in weights if id(x) in used and (x.numel() > _SMALL or torch.is_grad_enabled())]
        used.update(map(id, weights))
        return found

    def note(self, function: Any, args: tuple[Any, ...]) -> None:
        """Note a call of one of `WRITES_UNSEEN`."""
        if function in RUNS_HOOKS:
            self.forget()
        elif args:
            self.hand_out(args[0])

    def hand_out(self, x: Any) -> None:
        """Note that a tensor's memory is exposed to code that can write it unnoticed. Its casts are not reused."""
        if isinstance(x, Tensor) and x.layout is torch.strided:
            try:
                self._handed_out.add(x.untyped_storage().data_ptr())
            except (RuntimeError, ValueError):  # without memory: torch.func's wrappers, parameters of lazy modules
                return

    def tensors(self) -> list[Tensor]:
        """Return the cast values that are alive, held by this object or by a graph that backward needs."""
        found = [value for reference in self._made if (value := reference()) is not None]
        for value in found:  # as torch's TensorWeakRef does, which takes longer to make
            _fix_weakref(value)
        return found

    def forget(self) -> None:
        """Drop all casts: the next use casts anew."""
        self._entries.clear()
        self._used.clear()
        if len(self._made) >= _PRUNE_AT:
            self._made = [reference for reference in self._made if reference() is not None]


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors share a tensor's memory, and the number of Python references to its storage object.

    The argument is the tensor, not the storage, because torch.compile keeps references to the arguments of functions
    that it has inspected. The storage gets no local name because, up to Python 3.11, a debugger or profiler
    (sys.settrace, sys.setprofile) keeps references to the locals of the functions that it inspects.
    """
    return _storage_holders(tensor.untyped_storage()._cdata), sys.getrefcount(tensor.untyped_storage())


@cache
def _one_holder() -> tuple[int, int]:
    """Return the result of `_holders` for a tensor that shares its memory with no other tensor."""
    with real_tensors():
        return _holders(torch.empty(1, device="cpu"))


_writes = [0]  # in all threads: the number of optimizer steps and of calls of `forget_all`


def forget_all() -> None:
    """Make every region in every thread cast its weights anew at their next use."""
    _writes[0] += 1


@once
def _watch_optimizers() -> None:
    """Count the steps of all optimizers, because torch's fused kernels do not increment a weight's version."""
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: forget_all())
