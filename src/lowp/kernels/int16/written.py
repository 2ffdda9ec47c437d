"""Linear layers and convolutions of int16 with results written under given exponents: one C++ call, and one backward.

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
from lowp.kernels.int16.cpu_int16 import Seen, is_direct, mantissa_block, own_exponent, seen_of
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.integer_run import check_status, is_observed
from lowp.kernels.int16.mantissas import Mantissas, has_mantissas, int16_element

__all__ = [
    "LayerMantissas",
    "WrittenMantissas",
    "convolution",
    "convolution_gradients",
    "exponents_of",
    "gradients",
    "linear",
    "serves",
    "weight_of",
]

_NOT_FINITE, _UNFIT = 3, 4  # of the bias; of an operand, or kept mantissas that are not its own
Wanted = tuple[tuple[int, ...], int]  # the shape of a gradient, and the exponent under which it is written
_CONVERTED, _KEPT, _KNOWN = 0, 1, 2  # how the mantissas of x are found


class WrittenMantissas(NamedTuple):
    """A result: its values in fp32, its mantissas, their exponent, and what was seen of it."""

    values: Tensor
    payload: Tensor
    exponent: int
    seen: Seen


class LayerMantissas(NamedTuple):
    """What backward reads of a layer: the mantissas of x, and those of weight, with both exponents as two more."""

    first: Tensor
    second: Tensor


class _Sizes(NamedTuple):
    """What a call of the library is told of a layer: three numbers, and the shape of a convolution (None: linear)."""

    numbers: tuple[int, int, int]  # m, n and k of a linear layer; else the elements of x, weight and the result
    shape: ConvolutionShape | None = None


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
    x, weight, _ = tensors
    n, k = weight.shape
    made = _made((*x.shape[:-1], n))
    return _layer(tensors, casts, known, (output, exponent, *made), _Sizes((x.numel() // k, n, k)))


def convolution(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    casts: tuple[Cast, Cast],
    known: tuple[Mantissas, bool] | None,
    output: Cast,
    exponent: int,
    shape: ConvolutionShape,
) -> tuple[WrittenMantissas, LayerMantissas] | None:
    """Return the convolution of x by weight, and bias, as `linear` does. `shape` is that of x and weight, not empty."""
    x, weight, _ = tensors
    payload, result = _made(shape.output)
    sizes = _Sizes((x.numel(), weight.numel(), result.numel()), shape)
    return _layer(tensors, casts, known, (output, exponent, payload, result), sizes)


def _made(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return memory for the mantissas and the values of a result."""
    return torch.empty(shape, dtype=torch.int16, device="cpu"), torch.empty(shape, dtype=torch.float32, device="cpu")


def _layer(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    casts: tuple[Cast, Cast],
    known: tuple[Mantissas, bool] | None,
    output: tuple[Cast, int, Tensor, Tensor],
    sizes: _Sizes,
) -> tuple[WrittenMantissas, LayerMantissas] | None:
    x, weight, bias = tensors
    if is_observed() or not (is_direct(x, weight) if bias is None else is_direct(x, weight, bias)):
        return None
    if known is None:
        first, of_first, found_by = torch.empty(x.shape, dtype=torch.int16, device="cpu"), 0, _CONVERTED
    else:
        (first, of_first, _), is_kept = known
        found_by = _KEPT if is_kept else _KNOWN
    second = torch.empty(weight.numel() + 2, dtype=torch.int16, device="cpu")
    to, exponent, payload, result = output
    (to_x, *of_x), (to_weight, *of_weight) = own_exponent(casts[0]), own_exponent(casts[1])
    given = [*sizes.numbers, x, first, of_first, found_by, weight, second, bias, payload, result, exponent, _lowest(to)]
    given += [*of_x, *of_weight]
    counts, kernel, library = array("q", (0,) * 4), cpu.asked(), cpu.loaded()
    operands = kernel.encode() or None, to_x, to_weight, given
    rest = torch.get_num_threads(), counts
    if sizes.shape is None:
        status = library.lowp_linear_written_int16(*operands, *rest)
    else:
        status = library.lowp_convolution_written_int16(*operands, sizes.shape.numbers, *rest)
    if status in (_NOT_FINITE, _UNFIT):
        return None
    check_status(status, kernel)
    return WrittenMantissas(result, payload, exponent, seen_of(result.numel(), *counts)), LayerMantissas(first, second)


def gradients(
    gradient: Tensor | None,
    incoming: Mantissas,
    layer: LayerMantissas,
    wanted: Sequence[Wanted | None],
    output: Cast,
) -> list[WrittenMantissas | None] | None:
    """Return the gradients of x, weight and bias, each an exact sum rounded once under its exponent.

    `incoming`: the mantissas of the gradient of the result, contiguous as `gradient`, with which they are compared, or
    None if they are known to be its own. `wanted`: shapes and exponents of the three; None for one that is not needed.
    `layer` is of `linear`. None where they are not its own, and while products are observed.
    """
    k = layer.first.shape[-1]
    n = (layer.second.numel() - 2) // k
    return _gradients(gradient, incoming, layer, wanted, output, _Sizes((incoming.payload.numel() // n, n, k)))


def convolution_gradients(
    gradient: Tensor | None,
    incoming: Mantissas,
    layer: LayerMantissas,
    wanted: Sequence[Wanted | None],
    output: Cast,
    shape: ConvolutionShape,
) -> list[WrittenMantissas | None] | None:
    """Return the same of a `convolution`, of the same shape."""
    sizes = _Sizes((layer.first.numel(), layer.second.numel() - 2, incoming.payload.numel()), shape)
    return _gradients(gradient, incoming, layer, wanted, output, sizes)


def _gradients(
    gradient: Tensor | None,
    incoming: Mantissas,
    layer: LayerMantissas,
    wanted: Sequence[Wanted | None],
    output: Cast,
    sizes: _Sizes,
) -> list[WrittenMantissas | None] | None:
    if is_observed() or (gradient is not None and not is_direct(gradient)):
        return None
    first, second = layer.first.contiguous(), layer.second.contiguous()  # hooks may have laid them out otherwise
    given = [*sizes.numbers, _lowest(output), gradient, incoming.payload, incoming.exponent, first, second]
    made = [None if one is None else _made(one[0]) for one in wanted]
    for one, both in zip(wanted, made, strict=True):
        given += (0, 0, 0) if one is None or both is None else (both[0], both[1], one[1])
    counts, kernel, library = array("q", (0,) * 12), cpu.asked(), cpu.loaded()
    operands = kernel.encode() or None, mantissa_block(output), given
    rest = torch.get_num_threads(), counts
    if sizes.shape is None:
        status = library.lowp_linear_written_int16_gradients(*operands, *rest)
    else:
        geometry = sizes.shape.numbers
        status = library.lowp_convolution_written_int16_gradients(*operands, geometry, *rest)
    if status == _UNFIT:
        return None
    check_status(status, kernel)
    found: list[WrittenMantissas | None] = []
    for at, (one, both) in enumerate(zip(wanted, made, strict=True)):
        if one is None or both is None:
            found.append(None)
        else:
            seen = seen_of(both[0].numel(), *counts[4 * at : 4 * at + 4])
            found.append(WrittenMantissas(both[1], both[0], one[1], seen))
    return found


def exponents_of(layer: LayerMantissas) -> tuple[int, int]:
    """Return the exponents of x and weight."""
    first, second = layer.second[-2:].tolist()
    return first, second


def weight_of(layer: LayerMantissas, shape: Sequence[int]) -> Tensor:
    """Return the mantissas of weight, whose shape this is."""
    return layer.second[:-2].view(shape)


def _lowest(output: Cast) -> int:
    return -32767 if int16_element(output).symmetric else -32768
