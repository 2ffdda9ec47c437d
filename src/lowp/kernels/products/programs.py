"""Programs: casts of operands and products of their values, run by one call of the C++ library.

A program is built once for tensors of given shapes, strides and dtypes. A product is a sum in fp32 in one order on
every processor, see `fp32_products`; its result, and an operand where it is packed, may be rounded.
"""

import functools
import math
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import remembered_by_identity
from lowp.formats import FloatFormat, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.casts.cpu_groups import groups_along, is_one_pass
from lowp.kernels.choose.dispatch import chosen
from lowp.kernels.cpu.abi import TYPE_NUMBERS, cast_address, sharing_address, step_blocks, steps_block
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.kernels.packed.byte_products import MOST_DEPTH
from lowp.kernels.tracing import is_quiet

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


Places = tuple[int, int, int, int, int, int]
Drawn = tuple[bool, ...]


class CastStep(NamedTuple):
    """A step that writes the values of a cast of contiguous `source` to the place `to`, in `dtype`.

    Groups with a shared scale run along `axis`, and are written in fp32. Infinities and NaN stay; under shared scales
    they end the program. `entry`: the place of the scale and of what was met, fp64[3], of a cast under a delayed scale.
    """

    source: Memory
    to: int
    cast: Cast
    dtype: torch.dtype
    axis: int = -1
    entry: int = NOWHERE

    def describe(self, block: Any) -> tuple[Places, Drawn]:
        """Fill a step's block; return the places of its tensors, and which of its seeds are drawn."""
        source, cast = self.source, self.cast
        block.kind, rounding = _ROUNDING, block.rounding
        rounding.type, rounding.out_type = TYPE_NUMBERS[source.dtype], TYPE_NUMBERS[self.dtype]
        rounding.count = math.prod(source.shape)
        if isinstance(cast.format, ScaledFormat):
            layout = groups_along(torch.Size(source.shape), cast, self.axis)
            assert layout is not None and self.dtype is torch.float32
            rounding.sharing = sharing_address(cast)
            _, rounding.row, rounding.group, rounding.inner, rounding.across = layout
        else:
            rounding.cast = cast_address(cast)
        return (source.place, self.entry, NOWHERE, self.to, NOWHERE, NOWHERE), (cast.is_stochastic,)


class SignsStep(NamedTuple):
    """A step that draws the signs of a rotation of blocks of `size` numbers, to the place `to`."""

    size: int
    to: int

    def describe(self, block: Any) -> tuple[Places, Drawn]:
        block.kind, block.rotation.size = _SIGNS, self.size
        return (NOWHERE, NOWHERE, NOWHERE, self.to, NOWHERE, NOWHERE), (True,)


class RotationStep(NamedTuple):
    """A step that writes contiguous `source` in fp32 to the place `to`, with blocks along `axis` rotated by signs.

    See `hadamard.rotate`. What is not finite in a rotated block ends the program.
    """

    source: Memory
    signs: int
    to: int
    size: int
    axis: int

    def describe(self, block: Any) -> tuple[Places, Drawn]:
        source, shape = self.source, self.source.shape
        axis, block.kind, rotation = self.axis % len(shape), _ROTATION, block.rotation
        rotation.type, rotation.size, rotation.count = TYPE_NUMBERS[source.dtype], self.size, math.prod(shape)
        rotation.length, rotation.inner = shape[axis], math.prod(shape[axis + 1 :])
        return (source.place, self.signs, NOWHERE, self.to, NOWHERE, NOWHERE), ()


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

    def describe(self, block: Any) -> tuple[Places, Drawn]:
        """As `CastStep.describe`. At most two leading dimensions may have more than one matrix."""
        block.kind, plan = _PRODUCT, block.product
        rows, columns = self.left.shape, self.right.shape
        plan.rows, plan.columns, plan.depth = rows[-2], columns[-1], rows[-1]
        leading = [index for index, size in enumerate(rows[:-2]) if size != 1]
        if rows[:-2] != columns[:-2] or rows[-1] != columns[-2] or len(leading) > 2:
            raise ValueError(f"no product of {rows} and {columns}")
        plan.batch[:] = _pair([rows[index] for index in leading], 1)
        _describe_operand(plan.left, self.left, leading, -2, -1)
        _describe_operand(plan.right, self.right, leading, -1, -2)
        out = strides_of((*rows[:-1], columns[-1]))
        plan.out_batch[:], plan.out_line = _pair([out[index] for index in leading], 0), out[-2]
        plan.cast, plan.type = cast_address(self.cast), TYPE_NUMBERS[self.dtype]
        places = self.left.place, self.right.place, self.bias, self.to, NOWHERE, NOWHERE
        casts = self.left.cast, self.right.cast, self.cast
        return places, tuple(one is not None and one.is_stochastic for one in casts)


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

    def describe(self, block: Any) -> tuple[Places, Drawn]:
        block.kind, codes = _CODES, block.codes
        codes.sharing = sharing_address(self.cast)
        codes.rows, codes.columns, codes.line, codes.step = *self.source.shape, *self.source.strides
        return (self.source.place, self.factor, NOWHERE, self.codes, self.scales, NOWHERE), (self.cast.is_stochastic,)


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

    def describe(self, block: Any) -> tuple[Places, Drawn]:
        block.kind, plan, depth = _BYTES, block.bytes, self.left.shape[1]
        if self.right.shape[1] != depth or depth > MOST_DEPTH:
            raise ValueError(f"no product of codes {self.left.shape} and {self.right.shape}")
        plan.rows, plan.columns, plan.depth = self.left.shape[0], self.right.shape[0], depth
        plan.line, plan.step = self.right.strides
        return (self.left.place, self.right.place, self.bias, self.to, self.left_scales, self.right_scales), ()


Step = CastStep | SignsStep | RotationStep | ProductStep | CodesStep | BytesStep
_ROUNDING, _PRODUCT, _CODES, _BYTES, _SIGNS, _ROTATION = range(6)  # StepKind of cpu/product.hpp


class Program:
    """Steps that one call of the library runs, one after the other.

    Places from zero on are those of tensors, `own(0)` and so on those of the program's own memory, for what only its
    steps read: `owned` numbers of bytes.
    """

    __slots__ = ("_address", "_blocks", "_draws", "_run")

    def __init__(self, steps: Sequence[Step], owned: Sequence[int] = ()) -> None:
        run: Any = cpu.loaded().lowp_program
        self._run = run.unguarded  # `serves` has looked at the memory
        starts = [0, *accumulate(-(-size // _LINE) * _LINE for size in owned)]
        blocks, draws = step_blocks(len(steps)), list[int]()
        for index, (block, step) in enumerate(zip(blocks, steps, strict=True)):
            places, drawn = step.describe(block)
            block.places[:] = [at if at >= NOWHERE else own(starts[own(at)]) for at in places]
            for at, is_drawn in enumerate(drawn):
                block.seeds[at] = len(draws) if is_drawn else NOWHERE
                draws += [3 * index + at] if is_drawn else []
        self._draws = tuple(draws)  # places of seeds, in the order of steps
        self._blocks, self._address = steps_block(blocks, starts[-1])

    def __call__(self, tensors: Sequence[Tensor | None], seeds: Sequence[int] | None = None) -> bool:
        """Run the steps on the tensors at their places, see `run`."""
        return self.run([0 if one is None else one.data_ptr() for one in tensors], seeds)

    def run(self, memory: Sequence[int], seeds: Sequence[int] | None = None) -> bool:
        """Run the steps on tensors at these addresses, by place; return whether they came to their end.

        They do not after an infinity or a NaN among numbers that share scales. `seeds`: three a step, unsigned; by
        default those of stochastic casts are drawn, in the order of the steps. Raises MemoryError.
        """
        words = None
        if self._draws:
            if seeds is None:  # as by `draw_seed`, one after the other
                drawn = array("Q", torch.randint(2**62, (len(self._draws),), device="cpu").tolist())
            else:
                drawn = array("Q", [seeds[at] for at in self._draws])
            words = drawn.buffer_info()[0]
        status: int = self._run(self._address, _PACKED[len(memory)](*memory), words, torch.get_num_threads())
        if status > 1:
            raise MemoryError(f"no memory for the panels of a product on {torch.get_num_threads()} threads")
        return not status


_PACKED = [struct.Struct(f"{count}q").pack for count in range(64)]  # numbers as bytes, in less time than an array takes
_LINE = 64  # bytes: the program's own tensors begin at lines of the cache


def own(index: int) -> int:
    """Return the place of a part of a program's own memory, or which part a place is."""
    return NOWHERE - 1 - index


def serves(*tensors: Tensor | None) -> bool:
    """Whether programs may read these: the library computes, and all are ordinary."""
    return chosen() in WAYS and is_here() and is_quiet() and cpu.addresses(tensors) is not None


@functools.cache
def is_here() -> bool:
    """Whether the library is there, and the processor has its multiply-adds."""
    return cpu.library() is not None and cpu.has_multiply_add()


@remembered_by_identity
def rounds(cast: Cast) -> bool:
    """Whether a program has a step for a cast: of elements, or with scales that the library finds or is given."""
    if isinstance(cast.format, ScaledFormat):
        return (cast.is_delayed or is_one_pass(cast)) and not has_mantissas(cast)
    return not isinstance(cast.format, FloatFormat) or cast.format.bits <= 32


def follows(shape: tuple[int, ...], cast: Cast, axis: int) -> bool:
    """Whether a step casts a tensor along an axis as it lies."""
    return not isinstance(cast.format, ScaledFormat) or groups_along(torch.Size(shape), cast, axis) is not None


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
