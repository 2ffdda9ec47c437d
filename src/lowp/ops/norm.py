"""Runners of the norms: layer, RMS, group, batch and instance norm.

A norm reads its input in the rule's format, computes in fp32 and writes the rule's output; backward keeps the input as
it was read, in 16 bits where the format has 16. Its own scale and shift stay fp32, running statistics too. torch's
kernels for 16-bit inputs are used on a GPU: they compute in fp32, but layer, RMS and group norm's take scale and shift
in 16 bits alone. On CPUs batch and group norm's are, and of layer norm the forward: its backward sums the gradient of
the weight in 16 bits. `lowp.kernels.use` with another way than torch's has all of them made of fp32 ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.compat import constant_when_compiled, remembered_by_identity
from lowp.kernels.products import is_torchs_own
from lowp.ops.call import Call, Quick
from lowp.ops.casting import native_dtype
from lowp.ops.contraction import runner
from lowp.ops.fp32 import Computation, Tensors, computed_in_fp32, is_one_kernel
from lowp.ops.int16.saved import computed_and_rounded
from lowp.ops.signature import Empty, bound, check, is_ordinary, require
from lowp.policy import Rule


@dataclass(frozen=True)
class LayerNorm(Computation):
    """Normalised over the last dimensions (Ba et al. 2016, arXiv 1607.06450)."""

    shape: tuple[int, ...]
    eps: float
    narrows_parameters = True
    reads_16_bits = True

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, self.shape, weight, bias, self.eps)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        result, mean, rstd = torch.native_layer_norm(x, self.shape, weight, bias, self.eps)
        return result, (mean, rstd)

    def backward(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        x, *parameters = tensors
        found: Tensors = torch.ops.aten.native_layer_norm_backward(gradient, x, self.shape, *small, *parameters, wanted)
        return found


@dataclass(frozen=True)
class RmsNorm(Computation):
    """Divided by the root mean square over the last dimensions (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    shape: tuple[int, ...]
    eps: float | None
    narrows_parameters = True

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return F.rms_norm(x, self.shape, weight, eps)


@dataclass(frozen=True)
class GroupNorm(Computation):
    """Normalised over groups of channels (Wu and He 2018, arXiv 1803.08494)."""

    groups: int
    eps: float
    narrows_parameters = True
    is_exact_on_cpu = True

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(x, self.groups, weight, bias, self.eps)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        # torch's kernels read parameters, too, as if their numbers lay side by side
        x, (weight, bias) = x.contiguous(), (one if one is None else one.contiguous() for one in (weight, bias))
        result, mean, rstd = torch.native_group_norm(x, weight, bias, *self._sizes(x), self.groups, self.eps)
        return result, (mean, rstd)

    def backward(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        x, weight, _ = tensors
        weight = None if weight is None else weight.contiguous()
        found: Tensors = torch.ops.aten.native_group_norm_backward(
            gradient.contiguous(), x.contiguous(), *small, weight, *self._sizes(x), self.groups, wanted
        )
        return found

    @staticmethod
    def _sizes(x: Tensor) -> tuple[int, int, int]:
        return x.shape[0], x.shape[1], math.prod(x.shape[2:])


@dataclass(frozen=True)
class BatchNorm(Computation):
    """Normalised over the batch (Ioffe and Szegedy 2015, arXiv 1502.03167).

    Only the forward updates the running statistics; a recomputation leaves them unchanged.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float
    eps: float
    is_exact_on_cpu = True

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, weight, bias, self.training, self.momentum, self.eps)

    def again(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if not self.training:
            return self.plain(x, weight, bias)
        return F.batch_norm(x, None, None, weight, bias, True, self.momentum, self.eps)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        statistics = (self.running_mean, self.running_var)
        result, *saved = torch.native_batch_norm(x, weight, bias, *statistics, self.training, self.momentum, self.eps)
        if not self.training:  # the statistics used for the gradient may change before backward
            saved += [one.clone() for one in statistics if one is not None]
        return result, tuple(saved)

    def backward(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        (x, weight, _), (mean, rstd, *running) = tensors, small
        statistics = running if running else [None, None]
        found: Tensors = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, *statistics, mean, rstd, self.training, self.eps, wanted
        )
        return found


# -- runners ------------------------------------------------------------------------------------------------------


@runner
def layer_norm(call: Call) -> Tensor:
    """F.layer_norm and torch.layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5)."""
    x, shape, weight, bias, eps, _ = bound(
        call, "input", "normalized_shape", weight=None, bias=None, eps=1e-5, cudnn_enable=True
    )
    check(x, weight, bias)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    _check_normalized(x, shape, weight, bias)
    return _normed(call, LayerNorm(shape, eps), x, weight, bias)


@runner
def rms_norm(call: Call) -> Tensor:
    """F.rms_norm and torch.rms_norm(input, normalized_shape, weight=None, eps=None); eps None is fp32's 2^-23."""
    x, shape, weight, eps = bound(call, "input", "normalized_shape", weight=None, eps=None)
    check(x, weight)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    _check_normalized(x, shape, weight, None)
    return _normed(call, RmsNorm(shape, eps), x, weight, None)


@runner
def group_norm(call: Call) -> Tensor:
    """F.group_norm and torch.group_norm(input, num_groups, weight=None, bias=None, eps=1e-5)."""
    x, groups, weight, bias, eps, _ = bound(
        call, "input", "num_groups", weight=None, bias=None, eps=1e-5, cudnn_enabled=True
    )
    check(x, weight, bias)
    require(x.dim() >= 2 and groups >= 1 and x.shape[1] % groups == 0 and _fits_channels(x.shape[1], weight, bias))
    if x.numel() < max(groups, 1):
        raise Empty
    return _normed(call, GroupNorm(groups, eps), x, weight, bias)


@runner
def batch_norm(call: Call) -> Tensor:
    """F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps), and torch.batch_norm."""
    x, mean, var, weight, bias, training, momentum, eps = _arguments_of_batch_norm(call)
    check(x, weight, bias, mean, var)
    require(x.dim() >= 2 and _fits_channels(x.shape[1], weight, bias, mean, var))
    require((training or (mean is not None and var is not None)) and (mean is None) == (var is None))
    require(not training or x.numel() > x.shape[1])  # one value a channel has no variance: torch refuses
    if x.numel() == 0 and not training:  # torch's kernel for the gradients divides by the size of the batch
        raise Empty
    with _fp32_statistics(mean, var, training) as (wide_mean, wide_var):
        return _normed(call, BatchNorm(wide_mean, wide_var, training, momentum, eps), x, weight, bias)


def _arguments_of_batch_norm(call: Call) -> list[Any]:
    """Return them in the order of F.batch_norm; torch.batch_norm has (input, weight, bias, running_mean, ...)."""
    if getattr(call.func, "__module__", "") == F.__name__:
        named = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
        return bound(call, "input", "running_mean", "running_var", **named)
    x, weight, bias, mean, var, *settings, _ = bound(
        call, *"input weight bias running_mean running_var training momentum eps cudnn_enabled".split()
    )
    return [x, mean, var, weight, bias, *settings]


def quick_batch_norm(rule: Rule) -> Quick | None:
    """Return the fast path that leaves batch norm to torch's own kernel; see `Row.quick`. None for other rules.

    That kernel takes x in a 16-bit dtype and the others in fp32.
    """
    dtype = _read_by_torch(rule)
    if dtype is None:
        return None

    def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Any:
        if not args or (kwargs and kwargs.keys() & {"input", "out"}):
            return None
        x = args[0]
        if type(x) is not Tensor or x.dtype is not dtype or not is_torchs_own(x, BatchNorm.is_exact_on_cpu):
            return None
        for one in (*args[1:], *kwargs.values()) if kwargs else args[1:]:
            if isinstance(one, Tensor) and one.dtype is not torch.float32:
                return None
        return function(*args, **kwargs) if x.numel() else None

    return run


def quick_norm(rule: Rule) -> Quick | None:
    """Return the fast path of layer, RMS and group norm where torch's kernel takes 16 bits; see `Row.quick`."""
    dtype = _read_by_torch(rule)
    if dtype is None:
        return None

    def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Any:
        if not args or type(args[0]) is not Tensor or (kwargs and kwargs.keys() & {"input", "out"}):
            return None
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if not (is_torchs_own(tensors[0]) and is_ordinary(*tensors) and tensors[0].numel()):
            return None
        given = [one.to(dtype) if isinstance(one, Tensor) else one for one in args]
        named = {name: one.to(dtype) if isinstance(one, Tensor) else one for name, one in kwargs.items()}
        return function(*given, **named)

    return run


@constant_when_compiled
@remembered_by_identity
def _read_by_torch(rule: Rule) -> torch.dtype | None:
    """Return the 16-bit dtype that torch's own kernel reads and writes as a rule says; None for other rules."""
    read = None if rule.input is None or rule.weight is not None else native_dtype(rule.input)
    if read not in (torch.float16, torch.bfloat16) or rule.output is None or native_dtype(rule.output) is not read:
        return None
    return read if rule.grad is None or rule.grad == rule.output else None


@runner
def instance_norm(call: Call) -> Tensor:
    """F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats=True, momentum=0.1, eps=1e-5)."""
    optional = dict.fromkeys(("running_mean", "running_var", "weight", "bias"))
    x, mean, var, weight, bias, use_input, momentum, eps = bound(
        call, "input", **optional, use_input_stats=True, momentum=0.1, eps=1e-5
    )
    check(x, weight, bias, mean, var)
    require(x.dim() >= 2 and _fits_channels(x.shape[1], weight, bias, mean, var))
    require((use_input or mean is not None) and (mean is None) == (var is None))
    require(not use_input or math.prod(x.shape[2:]) > 1)
    if x.numel() == 0:
        raise Empty
    # batch norm with a separate channel for each instance; running statistics are the mean over instances
    count = x.shape[0]
    wide_mean, wide_var, *parameters = (
        None if one is None else one.float().repeat(count) for one in (mean, var, weight, bias)
    )
    flat = x.reshape(1, count * x.shape[1], *x.shape[2:])
    computation = BatchNorm(wide_mean, wide_var, use_input, momentum, eps)
    result = _normed(call, computation, flat, *parameters).reshape(x.shape)
    if use_input:
        for running, wide in ((mean, wide_mean), (var, wide_var)):
            if running is not None and wide is not None:
                running.copy_(wide.reshape(count, -1).mean(0))
    return result


@contextmanager
def _fp32_statistics(
    mean: Tensor | None, var: Tensor | None, training: bool
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Running statistics in fp32 during a call; statistics stored in 16 bits are written back."""
    wide_mean, wide_var = (None if one is None else one.float() for one in (mean, var))
    yield wide_mean, wide_var
    for stored, wide in ((mean, wide_mean), (var, wide_var)):
        if training and stored is not None and wide is not None and stored is not wide:
            stored.copy_(wide)


def _normed(call: Call, computation: Computation, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if call.writer is not None:
        wide = [None if one is None else one.float() for one in (x, weight, bias)]
        return computed_and_rounded(computation, call, wide)
    casts = call.casts
    x = casts.cast(x, "input")
    weight = None if weight is None else casts.carry(weight, "weight")
    if is_torchs_own(x) and is_one_kernel(computation, x, casts.rule):  # torch's kernels on a device take no others
        dtype = x.dtype if computation.narrows_parameters else torch.float32
        weight, bias = (one if one is None else one.to(dtype) for one in (weight, bias))
    return computed_in_fp32(computation, casts, x, weight, bias)


def _check_normalized(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> None:
    require(len(shape) >= 1 and x.dim() >= len(shape) and tuple(x.shape[x.dim() - len(shape) :]) == shape)
    require(all(one is None or tuple(one.shape) == shape for one in (weight, bias)))


def _fits_channels(channels: int, *parameters: Tensor | None) -> bool:
    return all(one is None or tuple(one.shape) == (channels,) for one in parameters)
