"""The ways of a planned call beside its runner: straight from its arguments, as it is, or by torch's own dispatcher.

Each way returns ELSEWHERE, with nothing done, for a call that it leaves to the next one.

Ops are handed over that torch.autocast's dispatcher runs as the rule says, on a device that computes in 16 bits itself.
The dispatcher casts the activations in C++, and torch's kernel and autograd node do the rest. torch's cache of cast
weights does not notice that a weight was written, so it stays empty: the dispatcher casts a weight at its first use in
an entry, and the region casts and keeps it from the second use on. Ops for which torch differs from the rule run with
lowp's own runner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from lowp.casts import Cast
from lowp.compat import accelerator, functorch_transforms
from lowp.kernels.choose.dispatch import chosen
from lowp.kernels.choose.hardware import multiplies
from lowp.kernels.products import torchs_own_device
from lowp.kernels.tracing import is_jit_tracing, is_transformed
from lowp.ops.casting import native_dtype
from lowp.ops.direct import one_dtype
from lowp.ops.generic import is_in_place
from lowp.ops.rows import Row
from lowp.ops.shields import DisableAutocast
from lowp.ops.torch_lists import devices_that_agree
from lowp.ops.trilinear import is_small
from lowp.policy import Rule

ELSEWHERE = object()
# A way of a call, given the engine, the plan, the function and its arguments: eager, and without observers.
Way = Callable[[Any, Any, Callable[..., Any], "tuple[Any, ...]", "dict[str, Any]"], Any]
_set_enabled = torch.set_autocast_enabled  # torch's original function: the replacement in `region.entries` costs more
_caches, _set_caches = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_LEFT_ALONE = (torch.float64, torch.complex32, torch.complex64, torch.complex128)
_ATTENTION = "multi_head_attention_forward"
_PLAIN = (Tensor, Parameter)
_OPERANDS = ("input", "weight")
_BATCHED = ("linear", "matmul")  # take operands of any dimensions
_FUSED = (_ATTENTION, "scaled_dot_product_attention")
_LITTLE = 1 << 14  # numbers: 64 KiB of fp32


@dataclass(frozen=True, slots=True)  # as a `Plan`
class HandOver:
    """An op, the devices on which torch's dispatcher does what the op's rule says, and the cast of its weights.

    `dtype` is the dtype of the region. `usual`: the devices of this machine on which calls of the op are handed over.
    """

    op: str
    devices: frozenset[str]
    dtype: torch.dtype
    weights: Cast | None
    usual: frozenset[str]

    @property
    def may_be_small(self) -> bool:
        """Whether calls that are not handed over may be many: small layers, on a machine without an accelerator."""
        return self.op == "linear" and self.usual == {"cpu"}


def hand_over(function: Callable[..., Any], row: Row, rule: Rule | None, dtype: torch.dtype) -> HandOver | None:
    """Return where an op may be handed over under a rule, in a region of this dtype; None if on no device."""
    if row.runner == "generic:refused" or is_in_place(function):  # torch.autocast does not cast written tensors
        return None
    devices = devices_that_agree(row.name, row.op_class)
    if not devices or not _agrees(row, rule, dtype):
        return None
    weights = rule.weight if row.is_contraction and rule is not None else None
    kinds = {accelerator(), *(() if row.name in _FUSED else ("cpu",))}
    return HandOver(
        row.name, devices, dtype, weights, frozenset(one for one in devices & kinds if multiplies(one, dtype))
    )


def _agrees(row: Row, rule: Rule | None, dtype: torch.dtype) -> bool:
    """Whether a rule asks for the same as torch's lists for an op."""
    if row.op_class == "promote":
        return rule is None or rule.is_empty
    if rule is None or rule.saved is not None:
        return False
    if row.is_contraction:
        return one_dtype(rule) is dtype
    others = rule.weight, rule.grad, rule.output, rule.accumulate
    reads_fp32 = rule.input is not None and native_dtype(rule.input) is torch.float32
    return row.op_class == "wide" and reads_fp32 and all(one is None for one in others)


def device_of(way: HandOver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the device type whose torch.autocast runs this call; None if lowp's own runner does.

    All tensors must be strided and of at most 32 bits, on a device where torch's own arithmetic is used.
    """
    device, is_compiling = None, torch.compiler.is_compiling()
    for given in (*args, *kwargs.values()) if kwargs else args:
        for x in given if isinstance(given, (list, tuple)) else (given,):
            if not isinstance(x, Tensor):
                continue
            if device is None:
                device = torchs_own_device(x, way.dtype, way.op in _FUSED)
                if device not in way.devices:
                    return None
            if x.dtype in _LEFT_ALONE or not (is_compiling or (x.layout is torch.strided and not x.is_nested)):
                return None
    if kwargs and kwargs.get("out") is not None:
        return None
    return None if way.op == _ATTENTION and _may_return_probabilities(kwargs) else device


def _may_return_probabilities(kwargs: dict[str, Any]) -> bool:
    """Whether multi_head_attention_forward may compute them, by a softmax that torch.autocast runs in fp32."""
    return bool(kwargs.get("need_weights", True))


def quickly(engine: Any, plan: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call by the fast path of its plan, where the arguments alone decide how it runs."""
    if engine.is_strict or functorch_transforms() or forward_ad._current_level >= 0:  # `is_transformed`, in no function
        return ELSEWHERE
    if plan.looks and is_jit_tracing():
        return ELSEWHERE
    if engine.is_on_host:  # on a machine without other devices this is `DisableAutocast`, with less overhead
        try:
            _set_enabled("cpu", False)
            result = plan.quick(func, args, kwargs, engine)
        finally:
            _set_enabled("cpu", True)
    else:
        with DisableAutocast():
            result = plan.quick(func, args, kwargs, engine)
    return ELSEWHERE if result is None else result


def as_it_is(engine: Any, plan: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call unchanged, shielded from torch.autocast."""
    if engine.is_strict:
        return ELSEWHERE
    try:
        if not engine.is_on_host:
            with DisableAutocast():
                return func(*args, **kwargs)
        try:  # as `quickly`
            _set_enabled("cpu", False)
            return func(*args, **kwargs)
        finally:
            _set_enabled("cpu", True)
    except RuntimeError as error:
        with DisableAutocast():
            return engine.without_kernel(error, func, args, kwargs)


def while_small(engine: Any, plan: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call unchanged whose runner would keep less memory for backward, where that is little."""
    is_small = len(args) > 0 and type(args[0]) is Tensor and args[0].numel() < _LITTLE
    return as_it_is(engine, plan, func, args, kwargs) if is_small else ELSEWHERE


def as_usual(engine: Any, plan: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what `handed_over` does, in fewer functions, for a usual call.

    Between large tensors a CPU has little Python code left in its caches, and a GPU often waits for Python: each
    function takes microseconds. Not for a call with an `out`, tensors in lists, other tensors than plain ones on one
    device, or a weight whose cast this entry keeps.
    """
    way = plan.way
    if (
        engine.is_strict
        or chosen() is not None
        or "out" in kwargs
        or (way.op in _BATCHED and _is_lowps(way.op, args, kwargs))
        or (way.op == _ATTENTION and _may_return_probabilities(kwargs))
    ):
        return ELSEWHERE
    leaves = _leaves_of_plain(args, kwargs, way)
    if leaves is None or (leaves and way.weights is not None and engine.weights.again(leaves)):
        return ELSEWHERE
    return _under_autocast(engine, func, args, kwargs)


def _is_lowps(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether lowp's runner takes less time: where torch multiplies many matrices each by a copy of one, and if small.

    See `lowp.ops.trilinear`. What torch transforms or traces is torch's.
    """
    if kwargs:
        args = tuple(args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(_OPERANDS))
    if len(args) < 2 or type(args[0]) not in _PLAIN or type(args[1]) not in _PLAIN:
        return False
    if op == "linear" and args[0].is_cpu and chosen() is None and not (is_transformed() or is_jit_tracing()):
        if is_small(args[0].numel(), args[1].numel()):
            return True
    if args[0].dim() + args[1].dim() < 5:
        return False
    many, one = args[:2] if args[0].dim() > 2 else args[1::-1]
    is_one_product = torch.is_grad_enabled() and one.requires_grad
    return one.dim() <= 2 and not is_one_product and (many is args[1] or not many.is_contiguous())


def _leaves_of_plain(args: tuple[Any, ...], kwargs: dict[str, Any], way: HandOver) -> list[Tensor] | None:
    """Return the leaves to be cast among plain tensors on a usual device; None if there are no tensors, or others."""
    fp32, strided, narrow, device, leaves = torch.float32, torch.strided, way.dtype, None, []
    for x in (*args, *kwargs.values()) if kwargs else args:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            dtype = x.dtype
            if device is None:
                device = "cpu" if x.is_cpu else x.device.type
                if device not in way.usual:
                    return None
            if x.layout is not strided or x.is_nested or (dtype is not fp32 and dtype in _LEFT_ALONE):
                return None
            if x.requires_grad and dtype is not narrow and x.is_leaf:
                leaves.append(x)
        elif isinstance(x, (Tensor, list, tuple)) and not _is_shape(x):
            return None
    return None if device is None else leaves


def _is_shape(x: Any) -> bool:
    return type(x) is tuple and len(x) > 0 and type(x[0]) is int


def handed_over(engine: Any, plan: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call under torch.autocast, which is switched on around the region, with the weight casts it keeps."""
    way = plan.way
    if device_of(way, args, kwargs) is None or (way.op in _BATCHED and _is_lowps(way.op, args, kwargs)):
        return ELSEWHERE
    before, engine.running = engine.running, (plan.row.name, plan.rule is not None)
    try:
        if way.weights is not None:
            args, kwargs = engine.weights.cast_arguments(args, kwargs, way.weights)
        return _under_autocast(engine, func, args, kwargs)
    finally:
        engine.running = before


def _under_autocast(engine: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call with torch.autocast's cache of weights off: the cache does not notice writes to a weight."""
    caches = _caches()
    try:
        _set_caches(False)
        return func(*args, **kwargs)
    except RuntimeError as error:
        with DisableAutocast():
            return engine.without_kernel(error, func, args, kwargs)
    finally:
        _set_caches(caches)
