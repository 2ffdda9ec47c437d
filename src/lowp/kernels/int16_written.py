"""Linear layers of int16 with results written under given exponents: one call of the C++ library, and one backward.

They compute what `mantissas.current_mantissas`, `integer.matmul_exact`, `mantissas.values` and
`mantissas.mantissas_and_values` do, bit for bit, with the same observations. Mantissas that were kept of a tensor are
compared with it in the same call, before they are used.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import cpu
from lowp.kernels.cpu_int16 import Seen, is_direct, mantissa_block, own_exponent, seen_of
from lowp.kernels.int16_linear import Sizes
from lowp.kernels.integer_run import check_status, is_observed
from lowp.kernels.mantissas import Mantissas, has_mantissas, int16_element

__all__ = ["LayerMantissas", "WrittenMantissas", "exponents_of", "gradients", "linear", "serves", "weight_of"]

_NOT_FINITE, _UNFIT = 3, 4  # of the bias; of an operand, or kept mantissas that are not its own
_CONVERTED, _KEPT, _KNOWN = 0, 1, 2  # how the mantissas of x are found


class WrittenMantissas(NamedTuple):
    """A result: its values in fp32, its mantissas, their exponent, and what was seen of it."""

    values: Tensor
    payload: Tensor
    exponent: int
    seen: Seen


class LayerMantissas(NamedTuple):
    """What backward reads of a layer: the mantissas of x, and those of weight, [n k + 2], with both exponents."""

    first: Tensor
    second: Tensor


def serves(to: Cast) -> bool:
    """Whether a cast rounds operands as this does: to int16 under the exponent of their maximum, to nearest."""
    if not has_mantissas(to) or to.is_stochastic:
        return False
    return to.scaling is None or (to.scaling.exponent is None and to.scaling.headroom == 0)


def linear(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    casts: tuple[Cast, Cast],
    known: tuple[Mantissas, bool] | None,
    output: Cast,
    exponent: int,
) -> tuple[WrittenMantissas, LayerMantissas] | None:
    """Return x[..., k] @ weight[n, k].t() + bias[n], the exact sum rounded once under an exponent; records no graph.

    `tensors`: x, weight and bias, not empty. `known`: the mantissas of x, and whether they are only kept and have to be
    compared with it; None to make them, under the exponent of its maximum. `output` is the format of the result. None
    where it is left to others: operands and biases that are not finite, other dtypes and layouts, mantissas that are
    not those of x, and while products are observed.
    """
    x, weight, bias = tensors
    if is_observed() or not (is_direct(x, weight) if bias is None else is_direct(x, weight, bias)):
        return None
    n, k = weight.shape
    if known is None:
        first, of_first, found_by = torch.empty(x.shape, dtype=torch.int16, device="cpu"), 0, _CONVERTED
    else:
        (first, of_first, _), is_kept = known
        found_by = _KEPT if is_kept else _KNOWN
    second = torch.empty(n * k + 2, dtype=torch.int16, device="cpu")
    shape = (*x.shape[:-1], n)
    payload = torch.empty(shape, dtype=torch.int16, device="cpu")
    result = torch.empty(shape, dtype=torch.float32, device="cpu")
    (to_x, *of_x), (to_weight, *of_weight) = own_exponent(casts[0]), own_exponent(casts[1])
    given = array("q", (x.numel() // k, n, k, x.data_ptr() or cpu.address(x), first.data_ptr(), of_first, found_by))
    given.extend((weight.data_ptr() or cpu.address(weight), second.data_ptr()))
    given.append(0 if bias is None else bias.data_ptr() or cpu.address(bias))
    given.extend((payload.data_ptr(), result.data_ptr(), exponent, _lowest(output), *of_x, *of_weight))
    counts, kernel = array("q", (0,) * 4), cpu.asked()
    addresses = given.buffer_info()[0], torch.get_num_threads(), counts.buffer_info()[0]
    status = cpu.loaded().lowp_linear_written_int16(kernel.encode() or None, to_x, to_weight, *addresses)
    if status in (_NOT_FINITE, _UNFIT):
        return None
    check_status(status, kernel)
    return WrittenMantissas(result, payload, exponent, seen_of(result.numel(), *counts)), LayerMantissas(first, second)


def gradients(
    gradient: Tensor | None,
    incoming: Mantissas,
    layer: LayerMantissas,
    shapes: Sequence[tuple[int, ...] | None],
    exponents: Sequence[int],
    output: Cast,
) -> list[WrittenMantissas | None] | None:
    """Return the gradients of x, weight and bias, each an exact sum rounded once under its exponent.

    `incoming`: the mantissas of the gradient of the result, contiguous as `gradient`, with which they are compared, or
    None if they are known to be its own. `shapes`: those of x, weight and bias; None for a gradient that is not needed.
    `layer` is of `linear`. None where they are not its own, and while products are observed.
    """
    if is_observed() or (gradient is not None and not is_direct(gradient)):
        return None
    m, n, k = _sizes(incoming.payload, layer)
    first, second = layer.first.contiguous(), layer.second.contiguous()  # hooks may have laid them out otherwise
    address = 0 if gradient is None else gradient.data_ptr() or cpu.address(gradient)
    given = array("q", (m, n, k, _lowest(output), address, incoming.payload.data_ptr(), incoming.exponent))
    given.extend((first.data_ptr(), second.data_ptr()))
    made: list[tuple[Tensor, Tensor] | None] = []
    for shape, exponent in zip(shapes, exponents, strict=True):
        if shape is None:
            made.append(None)
            given.extend((0, 0, 0))
            continue
        payload = torch.empty(shape, dtype=torch.int16, device="cpu")
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        made.append((payload, values))
        given.extend((payload.data_ptr(), values.data_ptr(), exponent))
    counts, kernel = array("q", (0,) * 12), cpu.asked()
    addresses = given.buffer_info()[0], torch.get_num_threads(), counts.buffer_info()[0]
    status = cpu.loaded().lowp_linear_written_int16_gradients(
        kernel.encode() or None, mantissa_block(output), *addresses
    )
    if status == _UNFIT:
        return None
    check_status(status, kernel)
    return [
        None
        if one is None
        else WrittenMantissas(one[1], one[0], exponents[i], seen_of(one[0].numel(), *counts[4 * i : 4 * i + 4]))
        for i, one in enumerate(made)
    ]


def exponents_of(layer: LayerMantissas) -> tuple[int, int]:
    """Return the exponents of x and weight."""
    first, second = layer.second[-2:].tolist()
    return first, second


def weight_of(layer: LayerMantissas) -> Tensor:
    """Return the mantissas of weight, [n, k]."""
    return layer.second[:-2].view(-1, layer.first.shape[-1])


def _sizes(payload: Tensor, layer: LayerMantissas) -> Sizes:
    k = layer.first.shape[-1]
    n = (layer.second.numel() - 2) // k
    return Sizes(payload.numel() // n, n, k)


def _lowest(output: Cast) -> int:
    return -32767 if int16_element(output).symmetric else -32768
