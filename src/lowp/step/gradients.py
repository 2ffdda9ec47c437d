"""The gradients of an optimizer: collected, grouped by device and dtype, unscaled, checked, and counted by exponent."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch

from lowp.compat import private
from lowp.errors import InvalidInput
from lowp.kernels.choose import hardware
from lowp.kernels.steps import updates

_unscale_and_check_ = cast(
    Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], None],
    private("torch._amp_foreach_non_finite_check_and_unscale_"),
)
_foreach_norm = cast(Callable[..., list[torch.Tensor]], private("torch._foreach_norm"))

# Number of elements in a sample of exponents, over all gradients. It measures a share of 1e-4 to within 20 %.
SAMPLE_ELEMENTS = 1 << 18


class Gradient(NamedTuple):
    """One gradient: the tensor with its values on this rank, and the position of its parameter in the optimizer."""

    values: torch.Tensor
    position: int  # counted over all parameters of all groups


Kinds: TypeAlias = "dict[tuple[torch.device, torch.dtype], list[Gradient]]"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups in order. Raises AssertionError, as torch does, for a non-tensor."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {type(parameter).__name__}")
    return parameters


def collect(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Gradient]:
    """Return the gradients that are present: of a sparse one its coalesced values, of a DTensor its local part.

    Complex gradients are viewed as real and imaginary parts, since torch's kernels unscale real numbers only. Raises
    InvalidInput for fp16 gradients if they are not allowed, before anything is changed.
    """
    present = [(place, p, p.grad) for place, p in enumerate(parameters_of(optimizer)) if p.grad is not None]
    if not allow_fp16 and any(gradient.dtype == torch.float16 for _, _, gradient in present):
        raise InvalidInput(
            "Attempting to unscale FP16 gradients. Unscaled, the small ones are flushed to zero: keep the parameters "
            "in fp32 and cast in autocast, or keep fp32 masters: lowp.MasterWeights(optimizer, storage='fp16')"
        )
    return [Gradient(_values(parameter, gradient), place) for place, parameter, gradient in present]


def _values(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if type(gradient) is torch.Tensor and gradient.dtype is torch.float32 and not gradient.is_sparse:
        return gradient  # as most
    values = _local_values(parameter, gradient)
    return torch.view_as_real(values) if values.is_complex() else values


def _local_values(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_sparse:
        # Values with the same index are added here, where an overflow of the sum is detected; the optimizer would not
        # detect it. fp16 values are added in fp32, so that the sum is rounded once.
        if gradient.dtype is torch.float16:
            parameter.grad = gradient = gradient.float().coalesce().half()
        elif not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
        return gradient._values()
    if gradient.is_conj():
        parameter.grad = gradient = gradient.resolve_conj()
    to_local = getattr(gradient, "to_local", None)
    return gradient if to_local is None else cast(torch.Tensor, to_local())


def plain_on_host(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the gradients if all are plain fp32 tensors on the CPU, which one call can look at or unscale; else [].

    Those of create_graph=True, which are part of a graph, are not plain.
    """
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = getattr(parameter, "grad", None)
                if gradient is None:
                    continue
                if type(gradient) is not torch.Tensor or gradient.dtype is not torch.float32 or gradient.is_sparse:
                    return []
                if gradient.requires_grad or not gradient.is_cpu:
                    return []
                found.append(gradient)
    return found if found and hardware.is_on_host(found[0]) else []


def widen_fp16(optimizer: torch.optim.Optimizer) -> None:
    """Replace fp16 gradients by the same values in fp32, so that unscaling flushes nothing to zero.

    For optimizers that keep masters. `grad_dtype = None` makes torch accept an fp32 gradient of an fp16 parameter.
    """
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None and parameter.grad.dtype == torch.float16:
            widened = parameter.grad.float()
            parameter.grad = None
            parameter.grad_dtype = None
            parameter.grad = widened


def not_finite(sizes: torch.Tensor) -> torch.Tensor:
    """Return which magnitudes are infinite or NaN: of a device half the launches of `~torch.isfinite(sizes)`."""
    return ~(sizes < math.inf)


def by_kind(gradients: Iterable[Gradient]) -> Kinds:
    """Group by device and dtype, as torch's multi-tensor kernels require."""
    groups: Kinds = defaultdict(list)
    for gradient in gradients:
        groups[gradient.values.device, gradient.values.dtype].append(gradient)
    return groups


def unscale_and_check_(values: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply by `inverse` in place; set `found_inf` to 1 if a value was infinite or NaN before. One pass."""
    _unscale_and_check_(values, found_inf, inverse)


class Checked(NamedTuple):
    """The results of one pass over all gradients, on the device of the scale."""

    sizes: torch.Tensor  # as returned by `largest`
    exponents: torch.Tensor | None  # as returned by `exponent_histogram`, but over every value


def checked_by_kernel(
    kinds: Kinds, count: int, inverse: torch.Tensor, unscale: bool, exponents: bool
) -> Checked | None:
    """Return the results of `largest` and `exponent_histogram`, and unscale in the same pass if asked.

    One launch per device and dtype. None if gradients lie on a device without such a kernel, or have gaps in memory.
    """
    groups = [[each.values.detach() for each in group] for group in kinds.values()]
    if not all(updates.can_check(values) for values in groups):
        return None
    device = inverse.device
    sizes = torch.zeros(count, dtype=torch.float32, device=device)
    counts = torch.zeros(256, dtype=torch.int64, device=device)
    for group, values in zip(kinds.values(), groups, strict=True):
        there = values[0].device
        found = updates.check(
            values,
            torch.zeros((), dtype=torch.float32, device=there),
            inverse.to(there) if unscale else None,
            exponents,
        )
        if len(group) == count:  # all of them, in order
            sizes = found.largest.to(device, non_blocking=True)
        else:
            places = torch.tensor([each.position for each in group], device="cpu")
            sizes[_on(device, places)] = found.largest.to(device, non_blocking=True)
        if found.histogram is not None:
            counts += found.histogram.to(device, non_blocking=True)
    return Checked(sizes, counts if exponents else None)


def _on(device: torch.device, places: torch.Tensor) -> torch.Tensor:
    return places if device.type == "cpu" else places.pin_memory().to(device, non_blocking=True)


def largest(kinds: Kinds, count: int, device: torch.device) -> torch.Tensor:
    """Return the largest magnitude of each gradient by position: [count] on `device`, 0 where there is none.

    inf or NaN if the gradient holds one; fp64 if any gradient is fp64, otherwise fp32. A complex number counts as its
    larger part. One read-only pass over the gradients.
    """
    wide = torch.float64 if any(kind is torch.float64 for _, kind in kinds) else torch.float32
    found: dict[int, torch.Tensor] = {}
    for group in kinds.values():
        filled = [each for each in group if each.values.numel()]
        if not filled:
            continue
        sizes = _magnitudes([each.values.detach() for each in filled]).to(device, wide, non_blocking=True)
        if len(filled) == count:  # all of them in one group, hence in order
            return sizes
        found |= zip((each.position for each in filled), sizes.unbind(), strict=True)
    nothing = torch.zeros((), dtype=wide, device=device)
    return torch.stack([found.get(place, nothing) for place in range(count)]) if count else nothing.new_zeros(0)


def _magnitudes(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each tensor of one dtype; on a device in one launch, where it has the kernel.

    On a CPU from the range, which torch vectorises: its inf-norm there takes 25 times as long.
    """
    device = values[0].device
    if device.type == "cpu":
        low, high = zip(*(torch.aminmax(value) for value in values), strict=True)
        return torch.maximum(torch.stack(high), -torch.stack(low))
    if updates.can_check(values):
        return updates.check(values, torch.zeros((), dtype=torch.float32, device=device)).largest
    return torch.stack(_foreach_norm(values, math.inf))


def largest_finite(kinds: Kinds) -> float:
    """Return the largest finite magnitude among all values, 0 if there is none. Waits for the device."""
    found = 0.0
    for group in kinds.values():
        sizes = [each.values.detach().abs() for each in group if each.values.numel()]
        if sizes:
            finite = [torch.nan_to_num(size, nan=0.0, posinf=0.0).amax() for size in sizes]
            found = max(found, *torch.stack(finite).tolist())
    return found


def exponent_histogram(kinds: Kinds, device: torch.device) -> torch.Tensor:
    """Count the finite nonzero values by their biased fp32 exponent: int64[256] on `device`; large sets are sampled.

    The sample is every n-th element with n odd, so that rows of even length are not sampled in one column only. fp32
    subnormals count in field 0.
    """
    counts = torch.zeros(256, dtype=torch.int64, device=device)
    values = [gradient.values.detach() for group in kinds.values() for gradient in group]
    stride = max(sum(each.numel() for each in values) // SAMPLE_ELEMENTS, 1) | 1
    for each in values:
        counts += _exponents(each.reshape(-1)[::stride]).to(device, non_blocking=True)
    return counts


def _exponents(sample: torch.Tensor) -> torch.Tensor:
    # lowp.statistics would read its sums on a CPU, and a step with a fused optimizer must read nothing.
    bits = sample.float().contiguous().view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).reshape(-1)
    field = (magnitude >> 23).long()
    counts = torch.zeros(256, dtype=torch.int64, device=sample.device)
    return counts.scatter_add_(0, field, ((magnitude != 0) & (field != 255)).long())
