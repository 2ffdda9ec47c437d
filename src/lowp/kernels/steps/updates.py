"""Steps of optimizers and checks of gradients as one kernel over many tensors, on devices that have it.

The functions in torch's operations are the definition: each operation is rounded to nearest, none are fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import Unavailable
from lowp.kernels import triton
from lowp.kernels.choose import dispatch
from lowp.kernels.tracing import is_eager
from lowp.scaling.loss_scale import inverse_of

GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)  # the dtypes of gradients that the kernels take


class AdamWNumbers(NamedTuple):
    """The numbers of AdamW that are constant over steps; the learning rate may be a tensor on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    maximize: bool


class SgdNumbers(NamedTuple):
    """The numbers of SGD that are constant over steps; the learning rate may be a tensor on the device."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class Columns(NamedTuple):
    """The tensors of a step, one of each per parameter: bf16 halves and int16 remainders, or only fp32 weights."""

    weights: Sequence[Tensor]
    remainders: Sequence[Tensor] | None
    gradients: Sequence[Tensor]
    moments: Sequence[Sequence[Tensor]]
    steps: Sequence[Tensor]  # 0-d fp32, the number of earlier steps


class CheckedGradients(NamedTuple):
    """Results of one pass over gradients, on their device, without synchronization."""

    squares: Tensor  # fp64, 0-d: of the finite elements
    largest: Tensor  # fp32 [gradients]: the largest magnitude of each before it was unscaled; inf or NaN if it has one
    histogram: Tensor | None  # int32 [256], by the exponent field of fp32, of finite nonzero elements


def has_kernels(device: torch.device) -> bool:
    """Whether steps on this device are one kernel: if its casts are Triton's, by default or by `use`."""
    return dispatch.implementation(device) is triton


def rates(steps: Tensor, numbers: AdamWNumbers | SgdNumbers) -> Tensor:
    """Return the factors of a step for each parameter, fp32 [parameters, 4] computed in fp64, from the earlier steps.

    AdamW: 1 - lr * weight decay, -lr / (1 - beta1**step), sqrt(1 - beta2**step). SGD: -lr, and the earlier steps.
    """
    before = steps.to(torch.float64)
    if isinstance(numbers.lr, Tensor):
        rate = numbers.lr.to(steps.device, torch.float64)
    else:  # filled on the device: a copy from the host waits, and cannot be captured in a graph
        rate = torch.full((), numbers.lr, dtype=torch.float64, device=steps.device)
    if isinstance(numbers, SgdNumbers):
        found: tuple[Tensor, ...] = (-rate.expand_as(before), before)
    else:
        taken = before + 1
        size = -rate / (1 - numbers.beta1**taken)
        found = ((1 - rate * numbers.weight_decay).expand_as(before), size, (1 - numbers.beta2**taken).sqrt())
    table = torch.zeros(len(before), 4, dtype=torch.float32, device=steps.device)
    table[:, : len(found)] = torch.stack(found, 1)
    return table


def adamw(columns: Columns, numbers: AdamWNumbers, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Step AdamW on parameters whose gradients have one dtype; a step with `found_inf` above zero changes nothing.

    Source: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2. Gradients are divided by `grad_scale`.
    """
    from lowp.kernels.triton import steps

    moves = steps.Moves(1 - numbers.beta1, numbers.beta1, numbers.beta2, 1 - numbers.beta2, numbers.epsilon)
    table = rates(torch.stack(list(columns.steps)), numbers)
    steps.adamw(
        _by_column(columns), table, _inverse(grad_scale), found_inf, moves, _is_split(columns), numbers.maximize
    )


def sgd(columns: Columns, numbers: SgdNumbers, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Step SGD, like `adamw`; the first momentum is the gradient."""
    from lowp.kernels.triton import steps

    momentum = steps.Momentum(numbers.momentum, 1 - numbers.dampening, numbers.weight_decay)
    table = rates(torch.stack(list(columns.steps)), numbers)
    skip, inverse = found_inf, _inverse(grad_scale)
    flags = (_is_split(columns), numbers.maximize, numbers.nesterov)
    steps.sgd(_by_column(columns), table, inverse, skip, momentum, *flags)


def check(
    gradients: Sequence[Tensor], found_inf: Tensor, inverse: Tensor | None = None, histogram: bool = False
) -> CheckedGradients:
    """Multiply gradients of one dtype by `inverse` in place, set `found_inf` to 1 for infinities or NaNs, and count.

    Takes one pass, without waiting for the device. Raises Unavailable if the device has no such kernel.
    """
    from lowp.kernels.triton import steps

    if not has_kernels(found_inf.device):
        raise Unavailable(f"no kernel checks gradients on {found_inf.device}: lowp.kernels.use('triton') has one")
    bins = torch.zeros(256, dtype=torch.int32, device=found_inf.device) if histogram else None
    squares, largest = steps.check(gradients, inverse, found_inf, bins)
    return CheckedGradients(squares, largest, bins)


def can_check(gradients: Sequence[Tensor]) -> bool:
    """Whether `check` supports these gradients: on a device with kernels, of one of its dtypes, dense."""
    return bool(gradients) and has_kernels(gradients[0].device) and all(map(_is_checked, gradients))


def _is_checked(gradient: Tensor) -> bool:
    if gradient.dtype not in GRADIENTS or gradient.is_sparse or not is_eager(gradient):
        return False
    if gradient.is_contiguous():
        return True
    format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(gradient.dim())
    return format is not None and gradient.is_contiguous(memory_format=format)


def _is_split(columns: Columns) -> bool:
    return columns.remainders is not None


def _by_column(columns: Columns) -> list[Sequence[Tensor]]:
    """Return five columns; missing ones are replaced by the weights and not read."""
    rests = columns.weights if columns.remainders is None else columns.remainders
    moments = [*columns.moments, *[columns.weights] * (2 - len(columns.moments))]
    return [columns.weights, rests, columns.gradients, *moments]


def _inverse(grad_scale: Tensor | None) -> Tensor | None:
    return None if grad_scale is None else inverse_of(grad_scale)


# -- the definition ---------------------------------------------------------------------------------------------------
def adamw_block(
    weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor, rate: Tensor, numbers: AdamWNumbers
) -> None:
    """Update an fp32 weight and its moments in place; `rate` is the parameter's row of `rates`."""
    first, second = 1 - numbers.beta1, 1 - numbers.beta2
    gradient = -gradient if numbers.maximize else gradient
    weight.mul_(rate[0])
    if first < 0.5:
        average.add_((gradient - average).mul_(first))
    else:
        average.copy_(gradient - (gradient - average).mul_(numbers.beta1))
    square.mul_(numbers.beta2).add_(gradient.mul(second).mul_(gradient))
    root = square.double().sqrt().float()  # rounded to nearest, unlike torch's fp32 root on a CPU
    divisor = root.div_(rate[2]).add_(numbers.epsilon)
    weight.add_(average.mul(rate[1]).div_(divisor))


def sgd_block(weight: Tensor, gradient: Tensor, buffer: Tensor | None, rate: Tensor, numbers: SgdNumbers) -> None:
    """Update an fp32 weight and its momentum in place; `rate` is the parameter's row of `rates`."""
    gradient = -gradient if numbers.maximize else gradient
    if numbers.weight_decay:
        gradient = gradient + weight.mul(numbers.weight_decay)
    if buffer is not None:
        moved = buffer.mul(numbers.momentum).add_(gradient.mul(1 - numbers.dampening))
        buffer.copy_(torch.where(rate[1] > 0, moved, gradient))
        gradient = gradient + buffer.mul(numbers.momentum) if numbers.nesterov else buffer
    weight.add_(gradient.mul(rate[0]))
