"""Steps of optimizers and checks of gradients as one kernel over many tensors: Triton's on a device, C++ on a CPU."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import Unavailable
from lowp.formats import ScaledFormat
from lowp.kernels import cpu, triton
from lowp.kernels.choose import dispatch
from lowp.kernels.cpu.abi import TYPE_NUMBERS, rule_block
from lowp.kernels.numbers import packing
from lowp.kernels.numbers.philox import signed
from lowp.kernels.steps.rules import StepRule
from lowp.kernels.tracing import is_eager, is_quiet, is_real
from lowp.scaling.loss_scale import inverse_of

GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)  # the dtypes of gradients that the kernels take


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

    largest: Tensor  # fp32 [gradients]: the largest magnitude of each before it was unscaled; inf or NaN if it has one
    histogram: Tensor | None  # int32 [256], by the exponent field of fp32, of finite nonzero elements


def has_kernels(device: torch.device) -> bool:
    """Whether steps on this device are one kernel: if its casts are Triton's, by default or by `use`."""
    return dispatch.implementation(device) is triton


def fits_library(tensors: Sequence[Tensor], moments: Cast) -> bool:
    """Whether the C++ library steps a parameter with this weight and gradient, and moments in this format."""
    if not (dispatch.uses_library() and is_quiet()):
        return False
    format = moments.format
    is_kept = not isinstance(format, ScaledFormat) or (
        format.scope.size <= _MOST_SHARE and (format.bits < 8 or packing.fills_bytes(format.element))
    )
    lie = (one.is_cpu and not one.is_neg() and not one.data_ptr() % one.element_size() for one in tensors)
    return is_kept and all(map(is_real, tensors)) and all(lie)


def fits_triton(weight: Cast | None, moments: Cast, place: int | Tensor) -> bool:
    """Whether Triton steps parameters whose weights a cast rounds, if any, with moments in this format.

    `place`: that of a rank's first number in the whole, if numbers are drawn.
    """
    from lowp.kernels.triton import steps

    return isinstance(place, int) and place % steps.BLOCK == 0 and steps.kept(weight, moments) is not None


def step(columns: Columns, rule: StepRule, kept: Kept, grad_scale: Tensor | None, skip: Tensor | None) -> None:
    """Step parameters whose gradients have one dtype, by Triton; where `skip` is above zero nothing changes.

    Gradients are divided by `grad_scale`.
    """
    from lowp.kernels.triton import plans, steps

    before = torch.stack(list(columns.steps))
    factors, inverse = rule.table(before), None if grad_scale is None else inverse_of(grad_scale)
    rest = 0 if columns.remainders is None else 8 * columns.remainders[0].element_size()
    found = steps.kept(kept.weight, kept.moments)
    assert found is not None  # `fits_triton`
    way = steps.Way(
        dtype=plans.DTYPES[columns.gradients[0].dtype],
        rest=rest,
        scaled=inverse is not None,
        maximize=rule.maximize,
        rounds=found.rounds,
        stored=plans.DTYPES[columns.weights[0].dtype] if rest == 0 else "bf16",
        moments=found.kind,
    )._replace(**rule.flags())
    if not steps.is_plain(found):
        factors[:, 3] = before
    rests = columns.weights if columns.remainders is None else columns.remainders
    each = [columns.weights, rests, columns.gradients]
    for kind in (columns.moments, columns.scales)[: 2 if found.kind == "codes" else 1]:
        each += [*kind, *[columns.weights] * (2 - len(kind))]  # which are not read
    drawn = list(zip(map(signed, columns.seeds), columns.places, strict=True))
    steps.step(each, drawn, factors, inverse, skip, rule.numbers(), way, found)


_FLAGS = {"near": 1, "nesterov": 2, "momentum": 4, "decay": 8}  # RuleFlag of cpu/cast.hpp
_MOST_SHARE = 1024  # numbers under one scale: kBlock


def step_on_cpu(columns: Columns, rule: StepRule, kept: Kept, grad_scale: Tensor | None, share: int) -> None:
    """Step parameters whose gradients have one dtype, by the C++ library; weights and moments in any of its formats.

    `share` numbers of a parameter draw by one seed, which is made of the parameter's.
    """
    flags = sum(_FLAGS.get(name, 0) for name, is_set in rule.flags().items() if is_set)
    rest = 0 if columns.remainders is None else columns.remainders[0].element_size()
    types = TYPE_NUMBERS[columns.weights[0].dtype], TYPE_NUMBERS[columns.gradients[0].dtype]
    moments = [(kept.moments, of_roots) for of_roots in kept.roots]
    block = rule_block((rule.kind, rest, *types, flags), kept.weight, moments, rule.numbers())
    rows: list[int | Tensor | None] = []
    for place, weight in enumerate(columns.weights):
        rows += [weight, None if columns.remainders is None else columns.remainders[place], columns.gradients[place]]
        for slot in range(2):
            rows.append(columns.moments[slot][place] if slot < len(columns.moments) else None)
            rows.append(columns.scales[slot][place] if slot < len(columns.scales) else None)
        rows += [weight.numel(), columns.places[place], signed(columns.seeds[place])]
    factors = rule.table(torch.stack(list(columns.steps)))
    scale = (1.0 if grad_scale is None else float(inverse_of(grad_scale))) * (-1 if rule.maximize else 1)
    cpu.loaded().lowp_step_list(block, rows, len(columns.weights), share, factors, scale, torch.get_num_threads())


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
    return CheckedGradients(steps.check(gradients, inverse, found_inf, bins), bins)


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
