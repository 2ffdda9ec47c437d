"""A linear layer or a convolution of int16 mantissas: one call of the C++ library forward, and one backward.

They compute what `mantissas.current_mantissas`, `integer`'s products, `mantissas.values` and `mantissas.sums` do, bit
for bit, with the same observations. Results are DFP-16's chains in fp32, or exact sums, each written under the exponent
of its entry in a table, which the library reads there. Mantissas that were kept of a tensor are compared with it in the
same call, before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import cpu
from lowp.kernels.cpu.abi import layer_block
from lowp.kernels.int16.cpu_int16 import is_direct, mantissa_block, own_bounds
from lowp.kernels.int16.integer import LARGEST_DEPTH
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.integer_run import PRODUCTS, check_status, observers
from lowp.kernels.int16.mantissas import Mantissas, has_mantissas, readable

_NOT_FINITE, _UNFIT = (
    3,
    4,
)  # of the bias; of an operand, or kept mantissas that are not its own, or an entry's beginning
_KEPT, _KNOWN = 1, 2  # how mantissas are found
_NONE: tuple[Tensor | None, Tensor | None, int] = None, None, 0  # those of a tensor that is converted

Target = tuple[object, int]  # a table, as the library is given it, and an entry; of chains None, and any
Known = tuple[Mantissas, bool]  # mantissas, and whether they are only kept, and have to be compared with their tensor


class LayerResult(NamedTuple):
    """A result: its values in fp32, and of a written one its mantissas and their exponent."""

    values: Tensor
    payload: Tensor | None
    exponent: Tensor | None


def serves(to: Cast | None) -> bool:
    """Whether a cast rounds operands as a layer does: to int16 under the exponent of their maximum, to nearest."""
    if to is None or not has_mantissas(to) or to.is_stochastic:
        return False
    return to.scaling is None or to.scaling.exponent is None


class LayerPlan:
    """The plan of a layer: what is the same for all calls with tensors of these shapes.

    `casts` are those of x, weight and the gradient of the result; `output` that of results which are written.
    """

    def __init__(
        self, first: Sequence[int], second: Sequence[int], shape: ConvolutionShape | None, casts: Sequence[Cast],
        output: Cast | None,
    ) -> None:  # fmt: skip
        self.result = (*first[:-1], second[0]) if shape is None else shape.output
        self.shapes = tuple(first), tuple(second), (second[0],)
        self.is_written = output is not None
        x, weight, y = math.prod(first), math.prod(second), math.prod(self.result)
        sizes = (x // first[-1], second[0], first[-1]) if shape is None else (x, weight, y)
        own, rounding = [own_bounds(cast) for cast in casts], None if output is None else mantissa_block(output)
        geometry = None if shape is None else shape.numbers
        self._block = layer_block(own, rounding, geometry, sizes)

    @staticmethod
    def is_possible(first: Sequence[int], second: Sequence[int], shape: ConvolutionShape | None) -> bool:
        """Whether there is a plan of layers of these shapes."""
        if 0 in (*first, *second) or (shape is not None and 0 in shape.output):
            return False
        return shape is None or max(map(shape.depth, PRODUCTS)) <= LARGEST_DEPTH

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, known: Known | None, target: Target, keeps: bool
    ) -> tuple[LayerResult, Tensor | None, Tensor | None, Tensor] | None:
        """Return the result, and if `keeps` what `backward` reads: the mantissas of x and weight, and the exponents.

        The tensors are those that `is_direct` accepts. `known`: the mantissas of x; None to make them. No graph is
        recorded. None where it is left to others: operands and biases that are not finite, mantissas that are not those
        of x, a first write at an entry, and while products are observed.
        """
        if observers:
            return None
        second = payload = None
        first, of_first, found_by = _NONE if known is None else (*known[0], _KEPT if known[1] else _KNOWN)
        if keeps:
            first = x.new_empty(self.shapes[0], dtype=torch.int16) if first is None else first
            second = weight.new_empty(self.shapes[1], dtype=torch.int16)
        exponents = torch.empty(3 if self.is_written else 2, dtype=torch.int32, device="cpu")
        y = torch.empty(self.result, dtype=torch.float32, device="cpu")
        if self.is_written:
            payload = torch.empty(self.result, dtype=torch.int16, device="cpu")
        table, entry = target
        given = [entry, payload, y, x, first, of_first, found_by, weight, second, bias]
        kernel = cpu.asked()
        call = kernel.encode() or None, self._block, table, given, torch.get_num_threads(), exponents
        status = cpu.loaded().lowp_layer_forward(*call)
        if status in (_NOT_FINITE, _UNFIT):
            return None
        if status:
            check_status(status, kernel)
        return LayerResult(y, payload, exponents[2] if self.is_written else None), first, second, exponents

    def backward(
        self,
        gradient: Tensor,
        known: Known | None,
        saved: Sequence[Tensor],
        table: object,
        entries: Sequence[int | None],
    ) -> list[LayerResult | None] | None:
        """Return the gradients of x, weight and bias, from what `forward` has kept; None for one without an entry.

        `known`: the mantissas of the gradient of the result; None to make them, from one of any layout. Chains have no
        table, and any entry. None where they are left to others, as in `forward`.
        """
        is_read = known is None or known[1]
        if observers or (is_read and not is_direct(gradient)):
            if known is not None or observers or not is_direct(gradient := readable(gradient)):
                return None
        own, exponent, found_by = _NONE if known is None else (*known[0], _KEPT if known[1] else _KNOWN)
        first, second, exponents = map(Tensor.contiguous, saved)  # hooks may have laid them out otherwise
        given = [gradient if is_read else None, own, exponent, found_by, first, second, exponents]
        made: list[tuple[Tensor, Tensor | None] | None] = []
        for entry, shape in zip(entries, self.shapes, strict=True):
            if entry is None:
                made.append(None)
                given += (0, 0, 0)
                continue
            values, payload = torch.empty(shape, dtype=torch.float32, device="cpu"), None
            if self.is_written:
                payload = torch.empty(shape, dtype=torch.int16, device="cpu")
            made.append((values, payload))
            given += (entry, payload, values)
        told, kernel = torch.empty(3, dtype=torch.int32, device="cpu"), cpu.asked()
        call = kernel.encode() or None, self._block, table, given, torch.get_num_threads(), told
        status = cpu.loaded().lowp_layer_backward(*call)
        if status == _UNFIT:
            return None
        if status:
            check_status(status, kernel)
        under = told.unbind() if self.is_written else (None, None, None)
        found: list[LayerResult | None] = []
        for one, exponent in zip(made, under, strict=True):
            found.append(None if one is None else LayerResult(*one, exponent))
        return found
