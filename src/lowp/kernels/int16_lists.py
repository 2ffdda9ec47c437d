"""Several tensors of int16 at once: one call of the C++ library for all parameters of a step.

Each function does to every tensor what its namesake for one does (`mantissas`, `writes`), with the same bits. The
tensors are those that `cpu_int16.is_direct` accepts; exponents are of -100 to 100.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import cpu
from lowp.kernels.cpu_int16 import Rows, Seen, mantissa_block, seen_of
from lowp.kernels.mantissas import Mantissas, int16_element

__all__ = ["are_int16", "exact_mantissas", "write_", "write_steps"]


def are_int16(tensors: Sequence[tuple[Tensor, Mantissas, Rows]]) -> list[bool]:
    """Whether every element of each tensor is its mantissa * 2**exponent; the two lie alike."""
    given, found = array("q"), array("q", (0,) * len(tensors))
    for x, (payload, exponent, _), lie in tensors:
        given.extend((cpu.address(x), cpu.address(payload), *lie, exponent))
    numbers = given.buffer_info()[0], len(tensors), torch.get_num_threads(), found.buffer_info()[0]
    cpu.loaded().lowp_same_int16_list(*numbers)
    return [one == 0 for one in found]


def exact_mantissas(tensors: Sequence[Tensor], exponents: Sequence[int]) -> list[Mantissas | None]:
    """Return each tensor as mantissas that represent every bit of it; None if there are none under its exponent."""
    given, found = array("q"), array("q", (0,) * len(tensors))
    payloads = [torch.empty(x.shape, dtype=torch.int16, device="cpu") for x in tensors]
    for x, payload, exponent in zip(tensors, payloads, exponents, strict=True):
        given.extend((cpu.address(x), cpu.address(payload), x.numel(), exponent))
    numbers = given.buffer_info()[0], len(tensors), torch.get_num_threads(), found.buffer_info()[0]
    cpu.loaded().lowp_exact_int16_list(*numbers)
    return [
        None if largest < 0 else Mantissas(payload, exponent, Seen(largest, False, False, 0, 0, payload.numel()))
        for payload, exponent, largest in zip(payloads, exponents, found, strict=True)
    ]


def write_steps(
    weights: Sequence[Tensor], old: Sequence[Mantissas], exponents: Sequence[tuple[int, int]], cast: Cast
) -> list[tuple[Seen, Seen]]:
    """Write what a step has changed of each weight since it had mantissas, and the weight as the sum, in place.

    The mantissas take the new ones; `exponents` are those of update and weight. Returns what was seen of both.
    """
    given, counts = array("q"), array("q", (0,) * (8 * len(weights)))
    for weight, (payload, exponent, _), (of_update, of_weight) in zip(weights, old, exponents, strict=True):
        given.extend((cpu.address(weight), cpu.address(payload), weight.numel(), exponent, of_update, of_weight))
    lowest = -32767 if int16_element(cast).symmetric else -32768
    numbers = given.buffer_info()[0], len(weights), lowest, torch.get_num_threads(), counts.buffer_info()[0]
    cpu.loaded().lowp_step_int16_list(*numbers)
    torch.autograd.graph.increment_version(weights)
    return [
        (seen_of(weight.numel(), *counts[at : at + 4]), seen_of(weight.numel(), *counts[at + 4 : at + 8]))
        for at, weight in zip(range(0, len(counts), 8), weights, strict=True)
    ]


def write_(tensors: Sequence[Tensor], cast: Cast, exponents: Sequence[int]) -> list[Seen]:
    """Round the finite elements of tensors in place to values of the format; return the statistics of each."""
    given, counts = array("q"), array("q", (0,) * (4 * len(tensors)))
    for x, exponent in zip(tensors, exponents, strict=True):
        given.extend((cpu.address(x), x.numel(), exponent))
    numbers = given.buffer_info()[0], len(tensors), torch.get_num_threads(), counts.buffer_info()[0]
    cpu.loaded().lowp_write_int16_list(mantissa_block(cast), *numbers)
    torch.autograd.graph.increment_version(tensors)
    return [seen_of(x.numel(), *counts[at : at + 4]) for at, x in zip(range(0, len(counts), 4), tensors, strict=True)]
