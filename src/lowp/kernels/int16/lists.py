"""Several tensors of int16 at once: one call of the C++ library for all parameters of a step.

Each function does to every tensor what its namesake for one does (`mantissas`, `writes`), with the same bits. The
tensors are those that `cpu_int16.is_direct` accepts; exponents are of -100 to 100.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import cpu
from lowp.kernels.int16.cpu_int16 import Rows, Seen, mantissa_block, seen_of
from lowp.kernels.int16.mantissas import Mantissas, int16_element

__all__ = ["Compared", "OpenSteps", "are_int16", "exact_mantissas", "write_", "write_steps"]

_APART = 32  # elements: each payload of a block begins at a multiple of 64 bytes


def are_int16(tensors: Sequence[tuple[Tensor, Mantissas, Rows]]) -> list[bool]:
    """Whether every element of each tensor is its mantissa * 2**exponent; the two lie alike."""
    given, found = [], array("q", (0,) * len(tensors))
    for x, (payload, exponent, _), lie in tensors:
        given += [x, payload, *lie, exponent]
    numbers = given, len(tensors), torch.get_num_threads(), found
    cpu.loaded().lowp_same_int16_list(*numbers)
    return [one == 0 for one in found]


class Compared:
    """fp32 tensors and their kept mantissas, contiguous and alike: one call compares them all, as often as asked."""

    def __init__(self, kept: Sequence[tuple[Tensor, Mantissas]]) -> None:
        self._kept = kept
        self._addresses = [cpu.address(x) for x, _ in kept]
        self._given = []
        for x, (payload, exponent, _) in kept:
            self._given += [x, payload, 1, x.numel(), x.numel(), exponent]

    def are_same(self) -> bool:
        """Whether every element of each tensor is its mantissa * 2**exponent."""
        found = array("q", (0,) * len(self._kept))
        numbers = self._given, len(self._kept), torch.get_num_threads(), found
        cpu.loaded().lowp_same_int16_list(*numbers)
        return not any(found)

    def are_still(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, where they were, and `are_same`."""
        if len(tensors) != len(self._kept):
            return False
        for x, (known, _), address in zip(tensors, self._kept, self._addresses, strict=True):
            if x is not known or x.data_ptr() != address:
                return False
        return self.are_same()


class OpenSteps:
    """Weights in the format before a step, as mantissas, of which update and sum are written when it was taken.

    The weights are those that `cpu_int16.is_direct` accepts; `exponents` are those under which they were written.
    """

    def __init__(self, weights: Sequence[Tensor], exponents: Sequence[int]) -> None:
        self.weights, self.exponents = weights, exponents
        self._sizes = [one.numel() for one in weights]
        self._begins = [0]
        for size in self._sizes:
            self._begins.append(self._begins[-1] + -(-size // _APART) * _APART)
        self._payload = torch.empty(self._begins[-1], dtype=torch.int16, device="cpu")
        self._addresses = [cpu.address(one) for one in weights]
        self._parts = [
            self._payload[begin : begin + size] for begin, size in zip(self._begins, self._sizes, strict=False)
        ]
        self._largest = self._read()

    def _read(self) -> array[int]:
        given, found = [], array("q", (0,) * len(self.weights))
        for weight, part, size, exponent in zip(self.weights, self._parts, self._sizes, self.exponents, strict=True):
            given += [weight, part, size, exponent]
        numbers = given, len(self.weights), torch.get_num_threads(), found
        cpu.loaded().lowp_exact_int16_list(*numbers)
        return found

    def fits(self, limit: int) -> list[bool]:
        """Whether each weight has mantissas under its exponent, of at most `limit`."""
        return [0 <= one <= limit for one in self._largest]

    @property
    def mantissas(self) -> list[Mantissas]:
        """The mantissas of each weight before the step."""
        rows = zip(self.weights, self._parts, self._sizes, self.exponents, self._largest, strict=True)
        return [
            Mantissas(part.view(one.shape), exponent, Seen(most, False, False, 0, 0, size))
            for one, part, size, exponent, most in rows
        ]

    def write(self, exponents: Sequence[tuple[int, int]], cast: Cast) -> list[tuple[Seen, Seen]] | None:
        """Write the steps as `write_steps` does; None, with nothing done, where a weight was moved."""
        if [one.data_ptr() for one in self.weights] != self._addresses:
            return None
        given, counts = [], array("q", (0,) * (8 * len(self.weights)))
        rows = zip(self.weights, self._parts, self._sizes, self.exponents, exponents, strict=True)
        for weight, part, size, exponent, both in rows:
            given += [weight, part, size, exponent, *both]
        _run_steps(self.weights, given, counts, cast)
        return _seen_of_steps(self._sizes, counts)


def exact_mantissas(tensors: Sequence[Tensor], exponents: Sequence[int]) -> list[Mantissas | None]:
    """Return each tensor as mantissas that represent every bit of it; None if there are none under its exponent."""
    given, found = [], array("q", (0,) * len(tensors))
    payloads = [torch.empty(x.shape, dtype=torch.int16, device="cpu") for x in tensors]
    for x, payload, exponent in zip(tensors, payloads, exponents, strict=True):
        given += [x, payload, x.numel(), exponent]
    numbers = given, len(tensors), torch.get_num_threads(), found
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
    given, counts = [], array("q", (0,) * (8 * len(weights)))
    for weight, (payload, exponent, _), both in zip(weights, old, exponents, strict=True):
        given += [weight, payload, weight.numel(), exponent, *both]
    _run_steps(weights, given, counts, cast)
    return _seen_of_steps([weight.numel() for weight in weights], counts)


def _run_steps(weights: Sequence[Tensor], given: list[Any], counts: array[int], cast: Cast) -> None:
    lowest = -32767 if int16_element(cast).symmetric else -32768
    numbers = given, len(weights), lowest, torch.get_num_threads(), counts
    cpu.loaded().lowp_step_int16_list(*numbers)
    torch.autograd.graph.increment_version(weights)


def _seen_of_steps(sizes: Sequence[int], counts: array[int]) -> list[tuple[Seen, Seen]]:
    return [
        (seen_of(size, *counts[at : at + 4]), seen_of(size, *counts[at + 4 : at + 8]))
        for at, size in zip(range(0, len(counts), 8), sizes, strict=True)
    ]


def write_(tensors: Sequence[Tensor], cast: Cast, exponents: Sequence[int]) -> list[Seen]:
    """Round the finite elements of tensors in place to values of the format; return the statistics of each."""
    given, counts = [], array("q", (0,) * (4 * len(tensors)))
    for x, exponent in zip(tensors, exponents, strict=True):
        given += [x, x.numel(), exponent]
    numbers = given, len(tensors), torch.get_num_threads(), counts
    cpu.loaded().lowp_write_int16_list(mantissa_block(cast), *numbers)
    torch.autograd.graph.increment_version(tensors)
    return [seen_of(x.numel(), *counts[at : at + 4]) for at, x in zip(range(0, len(counts), 4), tensors, strict=True)]
