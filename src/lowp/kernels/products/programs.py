"""Programs: casts of operands and products of their values, run by one call of the C++ library.

A program is built once for tensors of given shapes, strides and dtypes. A product is a sum in fp32 in one order on
every processor, see `fp32_products`; its result, and an operand where it is packed, may be rounded.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import remembered_by_identity
from lowp.formats import FloatFormat, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.casts.cpu_groups import groups_along
from lowp.kernels.choose.dispatch import chosen
from lowp.kernels.cpu.abi import TYPE_NUMBERS, cast_address, sharing_address, step_blocks
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.kernels.numbers import scaled
from lowp.kernels.numbers.philox import draw_seeds
from lowp.kernels.packed.byte_products import MOST_DEPTH
from lowp.kernels.tracing import is_quiet, is_wrapped

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WAYS = (None, "cpu")  # what `chosen` answers where programs run
NOWHERE = -1  # the place of a tensor that is not there: the last of the addresses is a null pointer


class Memory(NamedTuple):
    """A tensor of a program: its place in the list of addresses, its shape, its strides in elements, and its dtype.

    `cast`: by which its numbers are rounded where a product reads them; `keeps`: infinities and NaN stay.
    """

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    cast: Cast | None = None
    keeps: bool = False


class CastStep(NamedTuple):
    """A step that writes the values of a cast of contiguous `source` to the place `to`, in `dtype`.

    Groups with a shared scale run along `axis`, with fp32 numbers on both sides. Infinities and NaN stay; under shared
    scales they end the program.
    """

    source: Memory
    to: int
    cast: Cast
    dtype: torch.dtype
    axis: int = -1


class ProductStep(NamedTuple):
    """A step that writes left [..., m, k] times right [..., k, n], plus bias [n] in fp32, to the place `to`.

    The result [..., m, n], contiguous, is rounded by `cast`, and written in `dtype`: to nearest even.
    """

    left: Memory
    right: Memory
    bias: int
    to: int
    dtype: torch.dtype
    cast: Cast | None = None


class CodesStep(NamedTuple):
    """A step that writes the rows of a matrix in fp32 as int8, contiguous, and their scales.

    The matrix is `source` as it lies; its columns are first multiplied by the numbers at the place `factor`, if there
    are any. Infinities and NaN end the program.
    """

    source: Memory
    factor: int
    codes: int
    scales: int
    cast: Cast


class BytesStep(NamedTuple):
    """A step that writes the product of codes left [m, k] and right [n, k], plus bias [n], in fp32 to the place `to`.

    An exact sum, rounded to fp32, times the scale of right's row (if there are any), times that of left's: each rounded
    once. `left` is contiguous.
    """

    left: Memory
    right: Memory
    bias: int
    to: int
    left_scales: int
    right_scales: int = NOWHERE


Step = CastStep | ProductStep | CodesStep | BytesStep
_ROUNDING, _PRODUCT, _CODES, _BYTES = range(4)  # StepKind of cpu/product.hpp


class Program:
    """Steps that one call of the library runs, one after the other."""

    __slots__ = ("_blocks", "_draws", "_places", "size")

    def __init__(self, steps: Sequence[Step]) -> None:
        self._blocks = step_blocks(len(steps))
        self.size = len(steps)
        places: list[int] = []
        draws: list[int] = []
        for index, (block, step) in enumerate(zip(self._blocks, steps, strict=True)):
            casts: tuple[Cast | None, ...]
            if isinstance(step, ProductStep):
                block.kind = _PRODUCT
                _describe_product(block.product, step)
                places += (step.left.place, step.right.place, step.bias, step.to, NOWHERE, NOWHERE)
                casts = step.left.cast, step.right.cast, step.cast
            elif isinstance(step, BytesStep):
                block.kind = _BYTES
                _describe_bytes(block.bytes, step)
                places += (step.left.place, step.right.place, step.bias, step.to, step.left_scales, step.right_scales)
                casts = ()
            elif isinstance(step, CodesStep):
                block.kind = _CODES
                shape, strides = step.source.shape, step.source.strides
                block.codes.sharing = sharing_address(step.cast)
                block.codes.rows, block.codes.columns, block.codes.line, block.codes.step = *shape, *strides
                places += (step.source.place, step.factor, NOWHERE, step.codes, step.scales, NOWHERE)
                casts = (step.cast,)
            else:
                block.kind = _ROUNDING
                _describe_rounding(block.rounding, step)
                places += (step.source.place, NOWHERE, NOWHERE, step.to, NOWHERE, NOWHERE)
                casts = (step.cast,)
            draws += [3 * index + at for at, one in enumerate(casts) if one is not None and one.is_stochastic]
        self._places, self._draws = tuple(places), tuple(draws)  # `_draws`: places of seeds, in the order of steps

    def __call__(self, tensors: Sequence[Tensor | None], seeds: array[int] | None = None) -> bool:
        """Run the steps on the tensors at their places; return whether they came to their end.

        They do not after an infinity or a NaN among numbers that share scales. `seeds`: three a step, unsigned; by
        default those of stochastic casts are drawn, in the order of the steps. Raises MemoryError.
        """
        addresses = []
        for one in tensors:  # a comprehension would be a function
            addresses.append(0 if one is None else one.data_ptr())
        addresses.append(0)
        memory = array("q", map(addresses.__getitem__, self._places))
        if seeds is None:
            seeds = _NO_SEEDS
            if self._draws:
                seeds = array("Q", bytes(24 * self.size))
                for place, seed in zip(self._draws, draw_seeds(len(self._draws)), strict=True):
                    seeds[place] = seed
        run: Any = cpu.loaded().lowp_program
        status = run.unguarded(  # `serves` has looked at the memory
            self._blocks, self.size, memory.buffer_info()[0], seeds.buffer_info()[0], torch.get_num_threads()
        )
        if status > 1:
            raise MemoryError(f"no memory for the panels of a product on {torch.get_num_threads()} threads")
        return not status


_NO_SEEDS = array("Q", [0] * 3 * 8)


def serves(*tensors: Tensor | None) -> bool:
    """Whether programs may read these: the library computes, and all are ordinary."""
    return chosen() in WAYS and is_here() and are_ordinary(*tensors)


def are_ordinary(*tensors: Tensor | None) -> bool:
    """Whether these are tensors with memory on a CPU, of up to 32 bits, unseen by torch. None counts as one.

    The one test of an ordinary tensor. An operand that a gradient is recorded for must be passed by an autograd
    Function.
    """
    if not is_quiet():
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in cpu.PLAIN or not x.is_cpu or x.dtype not in _DTYPES or x.layout is not torch.strided:
            return False
        if x.is_nested or x.is_neg() or is_wrapped(x):
            return False
        if x.data_ptr() == x.storage_offset() * x.element_size() and x.numel():  # as if freed: see `cpu.begin`
            return False
    return True


@functools.cache
def is_here() -> bool:
    """Whether the library is there, and the processor has its multiply-adds."""
    return cpu.library() is not None and cpu.has_multiply_add()


@remembered_by_identity
def rounds(cast: Cast) -> bool:
    """Whether a program has a step for a cast: of elements, or with scales that follow from its groups' maxima."""
    if isinstance(cast.format, ScaledFormat):
        return scaled.follow_largest(cast) and not has_mantissas(cast)
    return not isinstance(cast.format, FloatFormat) or cast.format.bits <= 32


def follows(shape: tuple[int, ...], cast: Cast, axis: int) -> bool:
    """Whether a step casts a tensor along an axis as it lies."""
    return not isinstance(cast.format, ScaledFormat) or groups_along(torch.Size(shape), cast, axis) is not None


def _describe_rounding(block: Any, step: CastStep) -> None:
    source, cast = step.source, step.cast
    block.type, block.out_type, block.count = (
        TYPE_NUMBERS[source.dtype],
        TYPE_NUMBERS[step.dtype],
        math.prod(source.shape),
    )
    if not isinstance(cast.format, ScaledFormat):
        block.cast = cast_address(cast)
        return
    layout = groups_along(torch.Size(source.shape), cast, step.axis)
    assert layout is not None and source.dtype is step.dtype is torch.float32
    block.sharing = sharing_address(cast)
    _, block.row, block.group, block.inner = layout


def _describe_product(block: Any, step: ProductStep) -> None:
    """Describe a product. At most two leading dimensions may have more than one matrix."""
    rows, columns = step.left.shape, step.right.shape
    block.rows, block.columns, block.depth = rows[-2], columns[-1], rows[-1]
    leading = [index for index, size in enumerate(rows[:-2]) if size != 1]
    if rows[:-2] != columns[:-2] or rows[-1] != columns[-2] or len(leading) > 2:
        raise ValueError(f"no product of {rows} and {columns}")
    block.batch[:] = _pair([rows[index] for index in leading], 1)
    _describe_operand(block.left, step.left, leading, -2, -1)
    _describe_operand(block.right, step.right, leading, -1, -2)
    out = strides_of((*rows[:-1], columns[-1]))
    block.out_batch[:], block.out_line = _pair([out[index] for index in leading], 0), out[-2]
    block.cast, block.type = cast_address(step.cast), TYPE_NUMBERS[step.dtype]


def _describe_bytes(block: Any, step: BytesStep) -> None:
    block.rows, block.depth = step.left.shape
    block.columns, (block.line, block.step) = step.right.shape[0], step.right.strides
    if step.right.shape[1] != block.depth or block.depth > MOST_DEPTH:
        raise ValueError(f"no product of codes {step.left.shape} and {step.right.shape}")


def _describe_operand(block: Any, about: Memory, leading: list[int], line: int, step: int) -> None:
    """Describe an operand whose lines run along dimension `step`. The random words of a number go by its place."""
    block.batch[:] = _pair([about.strides[index] for index in leading], 0)
    block.line, block.step = about.strides[line], 1 if about.shape[step] == 1 else about.strides[step]
    block.cast, block.type = cast_address(about.cast), TYPE_NUMBERS[about.dtype]
    block.keeps = about.keeps


def is_reached(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the library reads a matrix as it lies: with neighbours in memory along its rows or its columns."""
    return 1 in strides[-2:] or 1 in shape[-2:]


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    found = [1] if shape else []
    for size in reversed(shape[1:]):
        found.append(found[-1] * max(size, 1))
    return tuple(reversed(found))


def _pair(numbers: list[int], other: int) -> list[int]:
    return [other] * (2 - len(numbers)) + numbers
