"""Steps of optimizers and checks of gradients as one kernel over many tensors: Triton's on a device, C++ on a CPU.

The functions in torch's operations are the definition: each operation is rounded to nearest, none are fused.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import widest_float
from lowp.errors import Unavailable
from lowp.formats import ScaledFormat
from lowp.kernels import cpu, triton
from lowp.kernels.choose import dispatch
from lowp.kernels.cpu.abi import TYPE_NUMBERS, rule_block
from lowp.kernels.tracing import is_eager, is_real
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


class LionNumbers(NamedTuple):
    """The numbers of Lion that are constant over steps; the learning rate may be a tensor on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool


Numbers = AdamWNumbers | SgdNumbers | LionNumbers


class Columns(NamedTuple):
    """The tensors of a step, one of each per parameter: bf16 halves and remainders, or only weights."""

    weights: Sequence[Tensor]
    remainders: Sequence[Tensor] | None
    gradients: Sequence[Tensor]
    moments: Sequence[Sequence[Tensor]]
    steps: Sequence[Tensor]  # 0-d fp32, the number of earlier steps
    scales: Sequence[Sequence[Tensor]] = ()  # of moments in codes
    seeds: Sequence[int] = ()  # for Triton, of a step 0: it adds what the step makes of it
    places: Sequence[int] = ()  # of the first number in the whole of a parameter


class Kept(NamedTuple):
    """How kernels read and write what a step changes."""

    weight: Cast | None  # by which the fp32 weight is rounded
    moments: Cast
    roots: Sequence[bool]  # of which moments codes keep the square root


class CheckedGradients(NamedTuple):
    """Results of one pass over gradients, on their device, without synchronization."""

    squares: Tensor  # fp64, 0-d: of the finite elements
    largest: Tensor  # fp32 [gradients]: the largest magnitude of each before it was unscaled; inf or NaN if it has one
    histogram: Tensor | None  # int32 [256], by the exponent field of fp32, of finite nonzero elements


def has_kernels(device: torch.device) -> bool:
    """Whether steps on this device are one kernel: if its casts are Triton's, by default or by `use`."""
    return dispatch.implementation(device) is triton


def fits_library(tensor: Tensor, moments: Cast) -> bool:
    """Whether the C++ library steps a parameter of this memory, with moments in this format."""
    is_short = not isinstance(moments.format, ScaledFormat) or moments.format.scope.size <= _MOST_SHARE
    return is_short and is_real(tensor) and tensor.is_cpu and tensor.data_ptr() % tensor.element_size() == 0


def rates(steps: Tensor, numbers: Numbers) -> Tensor:
    """Return the factors of a step for each parameter, fp32 [parameters, 4] from the earlier steps.

    They are computed in fp64, on devices without it in fp32.

    AdamW: 1 - lr * weight decay, -lr / (1 - beta1**step), sqrt(1 - beta2**step). SGD: -lr, and the earlier steps.
    Lion: 1 - lr * weight decay, -lr.
    """
    dtype = widest_float(steps.device)
    before = steps.to(dtype)
    if isinstance(numbers.lr, Tensor):
        rate = numbers.lr.to(steps.device, dtype)
    else:  # filled on the device: a copy from the host waits, and cannot be captured in a graph
        rate = torch.full((), numbers.lr, dtype=dtype, device=steps.device)
    if isinstance(numbers, SgdNumbers):
        found: tuple[Tensor, ...] = (-rate.expand_as(before), before)
    elif isinstance(numbers, LionNumbers):
        found = ((1 - rate * numbers.weight_decay).expand_as(before), -rate.expand_as(before))
    else:
        taken = before + 1
        size = -rate / (1 - numbers.beta1**taken)
        found = ((1 - rate * numbers.weight_decay).expand_as(before), size, (1 - numbers.beta2**taken).sqrt())
    table = torch.zeros(len(before), 4, dtype=torch.float32, device=steps.device)
    table[:, : len(found)] = torch.stack(found, 1)
    return table


def fits_triton(weight: Cast | None, moments: Cast, place: int | Tensor) -> bool:
    """Whether Triton steps parameters whose weights a cast rounds, if any, with moments in this format.

    `place`: that of a rank's first number in the whole, if numbers are drawn.
    """
    from lowp.kernels.triton import steps

    return isinstance(place, int) and place % steps.BLOCK == 0 and steps.kept(weight, moments) is not None


def step(columns: Columns, numbers: Numbers, kept: Kept, grad_scale: Tensor | None, skip: Tensor | None) -> None:
    """Step parameters whose gradients have one dtype, by Triton; where `skip` is above zero nothing changes.

    Gradients are divided by `grad_scale`. SGD's first momentum is the gradient.
    """
    from lowp.kernels.triton import plans, steps

    before = torch.stack(list(columns.steps))
    table, inverse = rates(before, numbers), _inverse(grad_scale)
    rest = 0 if columns.remainders is None else 8 * columns.remainders[0].element_size()
    own, form = _numbers_of(numbers), {AdamWNumbers: steps.Moves, LionNumbers: steps.SignMoves}
    moves = form.get(type(numbers), steps.Momentum)(*own)
    way = steps.Way(
        adamw=isinstance(numbers, AdamWNumbers),
        lion=isinstance(numbers, LionNumbers),
        dtype=plans.DTYPES[columns.gradients[0].dtype],
        rest=rest,
        scaled=inverse is not None,
        maximize=numbers.maximize,
        near=isinstance(numbers, AdamWNumbers) and own[0] < 0.5,
        momentum=isinstance(numbers, SgdNumbers) and numbers.momentum != 0,
        nesterov=isinstance(numbers, SgdNumbers) and numbers.nesterov,
        decay=isinstance(numbers, SgdNumbers) and numbers.weight_decay != 0,
        stored=plans.DTYPES[columns.weights[0].dtype] if rest == 0 else "bf16",
    )
    rests = columns.weights if columns.remainders is None else columns.remainders
    moments = [*columns.moments, *[columns.weights] * (2 - len(columns.moments))]  # not read
    if not way.lion and kept.weight is None and rest != 8 and str(kept.moments) == "fp32":
        return steps.step([columns.weights, rests, columns.gradients, *moments], table, inverse, skip, moves, way)
    found = steps.kept(kept.weight, kept.moments)
    assert found is not None  # `fits_triton`
    table[:, 3] = before
    way = way._replace(rounds=found.rounds, moments=found.kind)
    scales = [*columns.scales, *[columns.weights] * (2 - len(columns.scales))]
    each = [columns.weights, rests, columns.gradients, moments[0], scales[0], moments[1], scales[1]]
    drawn = list(zip(map(_signed, columns.seeds), columns.places, strict=True))
    steps.step_kept(each, drawn, table, inverse, skip, moves, way, found)


# RuleKind and RuleFlag of cpu/cast.hpp
_KINDS = {AdamWNumbers: 0, SgdNumbers: 1, LionNumbers: 2}
_NEAR, _NESTEROV, _MOVES, _DECAYS = 1, 2, 4, 8
_MOST_SHARE = 1024  # numbers under one scale: kBlock


def step_on_cpu(columns: Columns, numbers: Numbers, kept: Kept, grad_scale: Tensor | None, share: int) -> None:
    """Step parameters whose gradients have one dtype, by the C++ library; weights and moments in any of its formats.

    `share` numbers of a parameter draw by one seed, which is made of the parameter's.
    """
    own, flags = _numbers_of(numbers), 0
    if isinstance(numbers, AdamWNumbers):
        flags = _NEAR * (own[0] < 0.5)
    elif isinstance(numbers, SgdNumbers):
        flags = _NESTEROV * numbers.nesterov + _MOVES * bool(columns.moments) + _DECAYS * bool(numbers.weight_decay)
    rest = 0 if columns.remainders is None else columns.remainders[0].element_size()
    types = TYPE_NUMBERS[columns.weights[0].dtype], TYPE_NUMBERS[columns.gradients[0].dtype]
    moments = [(kept.moments, of_roots) for of_roots in kept.roots]
    block = rule_block((_KINDS[type(numbers)], rest, *types, flags), kept.weight, moments, own)
    rows: list[int | Tensor | None] = []
    for place, weight in enumerate(columns.weights):
        rows += [weight, None if columns.remainders is None else columns.remainders[place], columns.gradients[place]]
        for slot in range(2):
            rows.append(columns.moments[slot][place] if slot < len(columns.moments) else None)
            rows.append(columns.scales[slot][place] if slot < len(columns.scales) else None)
        rows += [weight.numel(), columns.places[place], _signed(columns.seeds[place])]
    table = rates(torch.stack(list(columns.steps)), numbers)
    scale = (1.0 if grad_scale is None else float(inverse_of(grad_scale))) * (-1 if numbers.maximize else 1)
    cpu.loaded().lowp_step_list(block, rows, len(columns.weights), share, table, scale, torch.get_num_threads())


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


def _numbers_of(numbers: Numbers) -> tuple[float, ...]:
    """Return the numbers of a rule that its kernels read, without rates."""
    if isinstance(numbers, AdamWNumbers):
        return 1 - numbers.beta1, numbers.beta1, numbers.beta2, 1 - numbers.beta2, numbers.epsilon
    if isinstance(numbers, LionNumbers):
        return numbers.beta1, 1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2
    return numbers.momentum, 1 - numbers.dampening, numbers.weight_decay


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed


def _inverse(grad_scale: Tensor | None) -> Tensor | None:
    return None if grad_scale is None else inverse_of(grad_scale)


# -- the definition ---------------------------------------------------------------------------------------------------
def block(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], rate: Tensor, numbers: Numbers) -> None:
    """Update an fp32 weight and its moments in place; `rate` is the parameter's row of `rates`.

    Sources: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2; Chen et al. 2023, arXiv 2302.06675, program 1.
    """
    gradient = -gradient if numbers.maximize else gradient
    if isinstance(numbers, AdamWNumbers):
        _adamw(weight, gradient, moments[0], moments[1], rate, numbers)
    elif isinstance(numbers, SgdNumbers):
        _sgd(weight, gradient, moments[0] if moments else None, rate, numbers)
    else:
        average = moments[0]
        toward = average.mul(numbers.beta1).add_(gradient.mul(1 - numbers.beta1))
        average.mul_(numbers.beta2).add_(gradient.mul(1 - numbers.beta2))
        signs = torch.where(toward.isnan(), toward, toward.sign())  # torch's sign of NaN is 0
        weight.mul_(rate[0]).add_(signs.mul_(rate[1]))


def _adamw(
    weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor, rate: Tensor, numbers: AdamWNumbers
) -> None:
    first, second = 1 - numbers.beta1, 1 - numbers.beta2
    weight.mul_(rate[0])
    if first < 0.5:
        average.add_((gradient - average).mul_(first))
    else:
        average.copy_(gradient - (gradient - average).mul_(numbers.beta1))
    square.mul_(numbers.beta2).add_(gradient.mul(second).mul_(gradient))
    wide = square.to(widest_float(square.device))  # rounded to nearest, unlike torch's fp32 root on a CPU
    root = wide.sqrt().to(torch.float32, copy=True)
    divisor = root.div_(rate[2]).add_(numbers.epsilon)
    weight.add_(average.mul(rate[1]).div_(divisor))


def _sgd(weight: Tensor, gradient: Tensor, buffer: Tensor | None, rate: Tensor, numbers: SgdNumbers) -> None:
    if numbers.weight_decay:
        gradient = gradient + weight.mul(numbers.weight_decay)
    if buffer is not None:
        moved = buffer.mul(numbers.momentum).add_(gradient.mul(1 - numbers.dampening))
        buffer.copy_(torch.where(rate[1] > 0, moved, gradient))
        gradient = gradient + buffer.mul(numbers.momentum) if numbers.nesterov else buffer
    weight.add_(gradient.mul(rate[0]))
