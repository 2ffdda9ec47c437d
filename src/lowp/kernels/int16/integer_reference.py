"""The integer products in plain torch: the definition of their bits, used if the C++ library is missing.

Sums are exact because every partial sum is an integer below 2^53 in fp64, or 2^24 in fp32, in any order of additions. A
convolution is converted to the matrix product whose depth order `lowp.kernels.int16.integer` defines.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.kernels.choose.dispatch import answers_at_once
from lowp.kernels.int16 import mantissas
from lowp.kernels.int16.low_words import LOW_BITS
from lowp.kernels.numbers.floats import moved_to_odd

BLOCK = 256
_EXACT_DEPTH = 1 << 22  # times 2^30 stays below 2^53
_DEPTH = 1024  # the longest sum of products of digits that fp32 holds
# the products of a convolution, in the order of the C++ library: their operands, and what they give
PRODUCTS = {
    "forward": ("input", "weight", "gradient"),
    "input_gradient": ("gradient", "weight", "input"),
    "weight_gradient": ("input", "gradient", "weight"),
}

Triple = tuple[int, int, int]
Multiply = Callable[[Tensor, Tensor, bool], Tensor]  # as `matmul`


@dataclass(frozen=True)
class ConvolutionShape:
    """The sizes of a convolution with 1 to 3 spatial dimensions; made by `of`."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        input: tuple[int, ...],
        weight: tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ) -> ConvolutionShape:
        """Return the shape for an input [n, c, *size] and a weight [o, c / groups, *kernel], like torch's own.

        Raises InvalidInput if they do not fit each other or the result would have a negative size.
        """
        dims = len(input) - 2
        if not 1 <= dims <= 3 or len(weight) != len(input):
            raise InvalidInput(
                f"input {tuple(input)} and weight {tuple(weight)}; "
                "both must have 1 to 3 spatial dimensions after two others"
            )
        steps, pads, gaps = (
            (value,) * dims if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation)
        )
        for name, values, least in (("stride", steps, 1), ("padding", pads, 0), ("dilation", gaps, 1)):
            if len(values) != dims or any(value < least for value in values):
                raise InvalidInput(f"{name} {values}; allowed: {dims} integers of at least {least}")
        if groups < 1 or input[1] != weight[1] * groups or weight[0] % groups:
            raise InvalidInput(
                f"{input[1]} channels into {weight[0]} with {groups} groups and a weight of {weight[1]} channels; "
                "channels must be groups times the weight's, and the outputs divisible by groups"
            )
        sizes = tuple(
            (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, gap in zip(input[2:], weight[2:], steps, pads, gaps, strict=True)
        )
        if any(kernel < 1 for kernel in weight[2:]) or any(size < 0 for size in sizes):
            raise InvalidInput(
                f"a kernel of {tuple(weight[2:])} does not fit an input of {tuple(input[2:])} padded by {pads}"
            )
        return cls(tuple(input), tuple(weight), (input[0], weight[0], *sizes), steps, pads, gaps, groups)

    def of_operand(self, name: str) -> tuple[int, ...]:
        """Return the shape of the input, the weight, or the gradient of the output."""
        return self.output if name == "gradient" else self.input if name == "input" else self.weight

    def _three(self, values: tuple[int, ...], missing: int) -> Triple:
        first, second, third = (missing,) * (3 - len(values)) + values
        return first, second, third

    def three_dimensional(self) -> ConvolutionShape:
        """Return the same convolution with three spatial dimensions, those that were missing of size 1."""
        return ConvolutionShape(
            self.input[:2] + self._three(self.input[2:], 1),
            self.weight[:2] + self._three(self.weight[2:], 1),
            self.output[:2] + self._three(self.output[2:], 1),
            self._three(self.stride, 1),
            self._three(self.padding, 0),
            self._three(self.dilation, 1),
            self.groups,
        )

    @cached_property
    def numbers(self) -> array[int]:
        """The 22 numbers that the C function takes. Not to be changed."""
        full = self.three_dimensional()
        first = self.input[0], self.input[1], self.weight[0], self.groups
        sizes = (*full.input[2:], *full.output[2:], *full.weight[2:])
        return array("q", (*first, *sizes, *full.stride, *full.padding, *full.dilation))

    @property
    def operations(self) -> int:
        """The multiplications and additions of each product: each output place meets each weight of its group once."""
        return 2 * self.output[0] * math.prod(self.output[2:]) * math.prod(self.weight)

    def depth(self, product: str) -> int:
        """Return how many products one element of the named result sums, padding included, at most."""
        if product == "weight_gradient":
            return self.input[0] * _even(math.prod(self.output[2:]))
        channels = self.input[1] if product == "forward" else self.weight[0]
        return math.prod(self.weight[2:]) * _even(channels // self.groups)


def matmul(left: Tensor, right: Tensor, chained: bool) -> Tensor:
    """Return the sums of [..., m, k] @ [..., k, n]: exact in int64, or chained in fp32 (not yet scaled).

    By torch's products in fp64 on a CPU, and elsewhere in fp32 of `digits`: GPUs have little fp64 or none.
    """
    step, multiply = (_EXACT_DEPTH, _in_fp64) if answers_at_once(left) else (_DEPTH, digits)
    step = BLOCK if chained else step
    shape = (*left.shape[:-1], right.shape[-1])
    total = torch.zeros(shape, dtype=torch.float32 if chained else torch.int64, device=left.device)
    for start in range(0, left.shape[-1], step):
        total += multiply(left[..., start : start + step], right[..., start : start + step, :]).to(total.dtype)
    return total


def _in_fp64(left: Tensor, right: Tensor) -> Tensor:
    return left.double() @ right.double()


def digits(left: Tensor, right: Tensor) -> Tensor:
    """Return the sums of a depth of up to 1024 in int64, by products in fp32 of digits to the base 256:

    x = 256 h + l + 128, with h = x >> 8 and l = (x & 255) - 128, both in -128 .. 127

    Every sum of 1024 products of digits is an integer of at most 2^24, which fp32 represents; TF32 and bf16 represent
    the digits.
    """
    high_a, high_b = ((x >> 8).to(torch.float32) for x in (left, right))
    low_a, low_b = (((x & 255) - 128).to(torch.float32) for x in (left, right))
    high, low = (high_a @ high_b).to(torch.int64), (low_a @ low_b).to(torch.int64)
    middle = (high_a @ low_b).to(torch.int64) + (low_a @ high_b).to(torch.int64)
    sums = left.sum(-1, keepdim=True, dtype=torch.int64) + right.sum(-2, keepdim=True, dtype=torch.int64)
    return 65536 * high + 256 * middle + low + 128 * sums - 16384 * left.shape[-1]


def times(total: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int64 sums times a power of two, fp64 and 0-d, rounded once to fp32 or fp64; as they are in int64."""
    if dtype is torch.int64:
        return total
    # where fp64 does not hold a sum, it is rounded to odd there first
    return ((total.double() if dtype is torch.float64 else to_odd(total, torch.float64)) * scale).to(dtype)


def to_int16(values: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """Return values of fp64 as int16, rounded to nearest even and saturated at `lowest` and 32767, and two counts.

    Counts, int64 [2]: saturated elements, and the largest |mantissa|. Sums that are `to_odd` in fp64 are rounded once.
    """
    rounded = values.round()
    mantissas = rounded.clamp(lowest, 32767)
    largest = mantissas.abs().amax() if values.numel() else mantissas.sum()
    return mantissas.to(torch.int16), torch.stack(((mantissas != rounded).sum(), largest.to(torch.int64)))


def to_odd(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return integers of at most 2**62 in fp32 or fp64, rounded to odd: what the dtype does not hold sets its last bit.

    So that rounding a number of two bits less is rounding the sum.
    """
    near = sums.to(dtype)
    return moved_to_odd(near, sums - near.to(torch.int64))


_GUARD = 8  # bits below the unit of a sum in which a bias is added


def summed_to_odd(sums: list[Tensor], exponents: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """Return sums of integers, each times 2**its exponent, and bias, added exactly and rounded to odd, in fp32.

    Without fp64. `sums`: int64, below 2**54; the exponents of the second and later ones are the first's less
    `LOW_BITS`, or `NOTHING`.
    """
    total, exponent = sums[0], exponents[0]
    for sum, low in zip(sums[1:], exponents[1:], strict=True):
        exponent = exponent - LOW_BITS
        total = total * (1 << LOW_BITS) + torch.where(low == exponent, sum, 0)
    if bias is None:
        return mantissas.times(to_odd(total, torch.float32), exponent)
    exponent = exponent - _GUARD
    units = mantissas.times(bias, -exponent)
    whole = units.floor()
    is_small = whole.abs() < 2.0**60
    inside = torch.where(is_small, whole, 0.0).to(torch.int64)
    exact = total * (1 << _GUARD) + (inside | (whole != units).to(torch.int64))
    found = mantissas.times(to_odd(exact, torch.float32), exponent)
    beside = found + bias  # of a large one, which is a multiple of its own last place
    grown = beside - bias
    error = (bias - (beside - grown)) + (found - grown)  # exact (Knuth's TwoSum)
    return torch.where(is_small, found, moved_to_odd(beside, error))


# -- convolution ------------------------------------------------------------------------------------------------------
def convolution(
    product: str, a: Tensor, b: Tensor, shape: ConvolutionShape, chained: bool, multiply: Multiply = matmul
) -> Tensor:
    """Return the sums of one of the three products, as `matmul` does; `multiply` computes them of the windows."""
    first, second, made = PRODUCTS[product]
    full = shape.three_dimensional()
    compute = {"forward": _forward, "input_gradient": _input_gradient, "weight_gradient": _weight_gradient}[product]
    left, right = a.reshape(full.of_operand(first)), b.reshape(full.of_operand(second))
    return compute(left, right, full, chained, multiply).reshape(shape.of_operand(made)).contiguous()


def _even(count: int) -> int:
    return (count + 1) // 2 * 2


def _split(x: Tensor, dim: int, *sizes: int) -> Tensor:
    """Return x with `dim` split into `sizes`; one of them may be -1, also where x is empty."""
    known = math.prod(size for size in sizes if size != -1)
    whole = [x.shape[dim] // known if size == -1 else size for size in sizes]
    return x.reshape(*x.shape[:dim], *whole, *x.shape[dim + 1 :])


def _pad_even(x: Tensor, dim: int) -> Tensor:
    """Append a zero along `dim` where its size is odd."""
    return torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim) if x.shape[dim] % 2 else x


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Split the second dimension into [groups, channels padded to even]."""
    return _pad_even(_split(x, 1, groups, x.shape[1] // groups), 2)


def _windows(x: Tensor, shape: ConvolutionShape) -> Tensor:
    """Return the windows of x as [groups, taps, channels, n, *out]."""
    grouped = _by_group(F.pad(x, [pad for pad in reversed(shape.padding) for _ in range(2)]), shape.groups)
    taps = []
    for tap in itertools.product(*map(range, shape.weight[2:])):
        view = grouped
        for dim in range(3):
            start, step, count = tap[dim] * shape.dilation[dim], shape.stride[dim], shape.output[2 + dim]
            view = view.narrow(3 + dim, start, max(0, (count - 1) * step + 1))[
                (slice(None),) * (3 + dim) + (slice(None, None, step),)
            ]
        taps.append(view)
    return torch.stack(taps).permute(2, 0, 3, 1, 4, 5, 6)


def _forward(x: Tensor, w: Tensor, shape: ConvolutionShape, chained: bool, multiply: Multiply) -> Tensor:
    windows = _windows(x, shape)
    weights = _pad_even(_split(w, 0, shape.groups, -1).flatten(3), 2).transpose(2, 3).flatten(2)
    sums = multiply(weights, windows.flatten(1, 2).flatten(2), chained)  # [groups, out channels, n * pixels]
    return _split(sums, 2, shape.output[0], math.prod(shape.output[2:])).permute(2, 0, 1, 3).flatten(1, 2)


def _reach(shape: ConvolutionShape, dim: int, residue: int) -> list[tuple[int, int]]:
    """Return the (tap, shift) with residue + padding - tap * dilation = shift * stride."""
    step = shape.stride[dim]
    distances = [
        (tap, residue + shape.padding[dim] - tap * shape.dilation[dim]) for tap in range(shape.weight[2 + dim])
    ]
    return [(tap, distance // step) for tap, distance in distances if distance % step == 0]


def _shifted(x: Tensor, dim: int, shift: int, count: int) -> Tensor:
    """Return x[shift : shift + count] along `dim`, zeros where that is outside."""
    index = torch.arange(shift, shift + count, device=x.device)
    inside = (index >= 0) & (index < x.shape[dim])
    if x.shape[dim] == 0:
        return x.new_zeros((*x.shape[:dim], count, *x.shape[dim + 1 :]))
    picked = x.index_select(dim, index.clamp(0, x.shape[dim] - 1))
    return picked * inside.to(x.dtype).reshape([-1 if d == dim else 1 for d in range(x.dim())])


def _input_gradient(grad: Tensor, w: Tensor, shape: ConvolutionShape, chained: bool, multiply: Multiply) -> Tensor:
    grouped = _by_group(grad, shape.groups)
    weights = _pad_even(_split(w, 0, shape.groups, -1), 1)  # [groups, out channels, channels, *kernel]
    result = torch.zeros(shape.input, dtype=torch.float32 if chained else torch.int64, device=w.device)
    for residue in itertools.product(*(range(min(s, n)) for s, n in zip(shape.stride, shape.input[2:], strict=True))):
        place = (slice(None), slice(None), *(slice(r, None, s) for r, s in zip(residue, shape.stride, strict=True)))
        counts = result[place].shape[2:]
        left, right = [], []
        for reached in itertools.product(*(_reach(shape, dim, residue[dim]) for dim in range(3))):
            view = grouped
            for dim in range(3):
                view = _shifted(view, 3 + dim, reached[dim][1], counts[dim])
            right.append(view)
            left.append(weights[:, :, :, reached[0][0], reached[1][0], reached[2][0]])
        if not left:
            continue
        rows = torch.stack(left, 1).permute(0, 3, 1, 2).flatten(2)  # [groups, channels, taps * out channels]
        columns = torch.stack(right).permute(2, 0, 3, 1, 4, 5, 6).flatten(1, 2).flatten(2)
        sums = _split(multiply(rows, columns, chained), 2, shape.input[0], *counts)
        result[place] = sums.transpose(1, 2).transpose(0, 1).flatten(1, 2)
    return result


def _weight_gradient(x: Tensor, grad: Tensor, shape: ConvolutionShape, chained: bool, multiply: Multiply) -> Tensor:
    groups, channels = shape.groups, shape.weight[1]
    windows = _pad_even(_windows(x, shape).flatten(4), 4).flatten(3)  # [groups, taps, channels, n * pixels]
    grads = _pad_even(_split(grad, 1, groups, -1).flatten(3), 3).permute(1, 2, 0, 3).flatten(2)
    sums = multiply(grads, windows.flatten(1, 2).transpose(1, 2), chained)
    by_tap = _split(sums, 2, math.prod(shape.weight[2:]), -1)[..., :channels]
    return by_tap.transpose(2, 3).reshape(shape.weight)
