"""Hand-over: ops that torch.autocast's dispatcher runs as the rule says, on a device that computes in 16 bits itself.

For these ops the dispatcher casts the activations in C++, and torch's kernel and autograd node do the rest. torch's
cache of cast weights does not notice that a weight was written, so it stays empty. On a CPU the dispatcher casts a
weight at its first use in an entry, and the region casts and keeps it from the second use on. On an accelerator the
region casts all weights of a call in one launch. Ops for which torch differs from the rule, and all observed ops, run
with lowp's own runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lowp.casts import Cast
from lowp.compat import accelerator
from lowp.kernels.choose.dispatch import chosen
from lowp.kernels.choose.hardware import multiplies
from lowp.kernels.products import torchs_own_device
from lowp.ops.casting import native_dtype
from lowp.ops.direct import one_dtype
from lowp.ops.generic import is_in_place
from lowp.ops.table import Row
from lowp.ops.torch_lists import devices_that_agree
from lowp.policy import Rule
from lowp.region.weights import WeightCasts

__all__ = ["ELSEWHERE", "HandOver", "device_of", "hand_over", "handed_over", "on_host"]

ELSEWHERE = object()  # the result of `on_host` for a call that it leaves to others
_caches, _set_caches = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_LEFT_ALONE = (torch.float64, torch.complex32, torch.complex64, torch.complex128)
_ATTENTION = "multi_head_attention_forward"
_FUSED = (_ATTENTION, "scaled_dot_product_attention")
_OPTIONAL_ARGUMENTS = 13  # of multi_head_attention_forward: from here on, need_weights among them


class HandOver(NamedTuple):
    """An op, the devices on which torch's dispatcher does what the op's rule says, and the cast of its weights.

    `dtype` is the dtype of the region. `is_usual`: the CPU multiplies it itself, so that most calls are handed over,
    unless the op is handed over on accelerators alone and there is none.
    """

    op: str
    devices: frozenset[str]
    dtype: torch.dtype
    weights: Cast | None
    is_usual: bool
    is_on_host: bool = False  # usual on the CPU, and a single product


def hand_over(function: Callable[..., Any], row: Row, rule: Rule | None, dtype: torch.dtype) -> HandOver | None:
    """Return where an op may be handed over under a rule, in a region of this dtype; None if on no device."""
    if row.runner == "generic:refused" or is_in_place(function):  # torch.autocast does not cast written tensors
        return None
    devices = devices_that_agree(row.name, row.op_class)
    if not devices or not _agrees(row, rule, dtype):
        return None
    weights = rule.weight if row.is_contraction and rule is not None else None
    is_usual = multiplies("cpu", dtype) and ("cpu" in devices or accelerator() is not None)
    is_on_host = is_usual and "cpu" in devices and row.name not in _FUSED
    return HandOver(row.name, devices, dtype, weights, is_usual, is_on_host)


def _agrees(row: Row, rule: Rule | None, dtype: torch.dtype) -> bool:
    """Whether a rule asks for the same as torch's lists for an op."""
    if row.op_class == "promote":
        return rule is None or rule.is_empty
    if rule is None:
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
    return None if way.op == _ATTENTION and _returns_probabilities(args, kwargs) else device


def _returns_probabilities(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether multi_head_attention_forward computes the probabilities by a softmax that torch.autocast runs in fp32."""
    return len(args) > _OPTIONAL_ARGUMENTS or bool(kwargs.get("need_weights", True))


def on_host(
    way: HandOver, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], weights: WeightCasts
) -> Any:
    """Do what `device_of` and `handed_over` do, in fewer functions, for a usual call on a CPU.

    Between large tensors a CPU has little Python code left in its caches, and each function takes microseconds. Returns
    ELSEWHERE, with nothing done, for a call with an `out`, tensors in lists, other tensors than plain ones on the CPU,
    or a weight whose cast this entry keeps.
    """
    if not way.is_on_host or chosen() is not None or (kwargs and "out" in kwargs):
        return ELSEWHERE
    narrow, fp32, strided, has_tensors, leaves = way.dtype, torch.float32, torch.strided, False, []
    for x in (*args, *kwargs.values()) if kwargs else args:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            dtype = x.dtype
            if not x.is_cpu or x.layout is not strided or x.is_nested or (dtype is not fp32 and dtype in _LEFT_ALONE):
                return ELSEWHERE
            has_tensors = True
            if x.requires_grad and dtype is not narrow and x.is_leaf:
                leaves.append(x)
        elif isinstance(x, (Tensor, list, tuple)) and not (kind is tuple and x and type(x[0]) is int):
            return ELSEWHERE
    if not has_tensors or (leaves and way.weights is not None and not weights.are_left(leaves)):
        return ELSEWHERE
    caches = _caches()  # as `_without_cache`
    try:
        _set_caches(False)
        return function(*args, **kwargs)
    finally:
        _set_caches(caches)


def handed_over(
    way: HandOver, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], weights: WeightCasts
) -> Any:
    """Run a call under torch.autocast, with the weight casts that this entry keeps."""
    if way.weights is not None:
        args, kwargs = weights.cast_arguments(args, kwargs, way.weights)
    return _without_cache(function, args, kwargs)


def _without_cache(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call with torch.autocast's cache of weights off: the cache does not notice writes to a weight."""
    caches = _caches()
    _set_caches(False)
    try:
        return function(*args, **kwargs)
    finally:
        _set_caches(caches)
