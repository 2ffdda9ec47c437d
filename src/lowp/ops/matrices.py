"""Products of matrices as the operands of contractions lie, as steps of programs; and the places that programs use."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow
from lowp.kernels.products.programs import NOWHERE, CastStep, Memory, ProductStep, Step, is_reached, own, strides_of
from lowp.ops.casting import native_dtype
from lowp.ops.trilinear import Finish, Form
from lowp.policy import Rule

# places in a forward program
X, WEIGHT, BIAS, OUT, VALUE, FACTOR, VALUE_SCALES, FACTOR_SCALES, X_ENTRY, WEIGHT_ENTRY = range(10)
# in a backward program, whose own tensors follow: what was saved of x and of the weight, and scales of codes, or the
# entry of a delayed scale
GRADIENT, ONES, FIRST_VALUE, SECOND_VALUE, FIRST_SCALES, SECOND_SCALES = range(6)
GRADIENT_ENTRY = FIRST_SCALES

Empty = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # what torch.empty_strided makes a tensor of


def owned_place(sizes: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the place of numbers that only a program reads, which has memory of these sizes."""
    sizes.append(math.prod(shape) * dtype.itemsize)
    return own(len(sizes) - 1)


def entry_of(to: Cast, place: int) -> int:
    """Return the place of the entry of a cast's scale, if it is delayed."""
    return place if to.is_delayed else NOWHERE


class Matrices(NamedTuple):
    """A product of matrices as they lie: its operands, the shape in which it is written, and what shapes it then."""

    left: Memory
    right: Memory
    shape: tuple[int, ...]
    finish: Finish | None

    def is_redrawn(self, output: Cast | None) -> bool:
        """Whether a stochastic cast of the result would draw by other places than those of its final shape."""
        return self.finish is not None and output is not None and output.is_stochastic

    def steps(self, bias: int, to: int, dtype: torch.dtype, output: Cast | None, owned: list[int]) -> list[Step]:
        """Return the steps that write the product, rounded by `output`, in a dtype.

        No cast is needed where writing in the dtype is the cast. One that makes something else of infinities is a step
        of its own, in which they stay.
        """
        if output is not None and native_dtype(output) is dtype:
            output = None
        if output is None or output.overflow is Overflow.INFINITY:
            return [ProductStep(self.left, self.right, bias, to, dtype, output)]
        shape = (*self.left.shape[:-1], self.right.shape[-1])
        sums = Memory(owned_place(owned, shape, torch.float32), shape, strides_of(shape), torch.float32)
        product = ProductStep(self.left, self.right, bias, sums.place, torch.float32, None)
        return [product, CastStep(sums, to, output, dtype)]


def matrices(form: Form, slot: int, left: Memory, right: Memory) -> Matrices | None:
    """Return the product for a slot of a form; None if an operand would have to be copied."""
    bases = [torch.empty_strided(one.shape, one.strides, device="meta") for one in (left, right)]
    rows, columns, finish = form.matrices(slot, bases[0], bases[1], batches=2)
    first, second = (_seen((left, right), bases, view) for view in (rows, columns))  # in any order
    if first is None or second is None:
        return None
    written = torch.empty(*rows.shape[:-1], columns.shape[-1], device="meta")
    shaped = finish(written)
    if shaped.is_contiguous() and getattr(form, "scale", 1) == 1:
        return Matrices(first, second, tuple(shaped.shape), None)
    return Matrices(first, second, tuple(written.shape), finish)


def rows_of(incoming: Memory) -> Matrices | None:
    """Return the sum of a gradient along all dimensions but the last, as a product with ones."""
    base = torch.empty_strided(incoming.shape, incoming.strides, device="meta")
    rows = _seen((incoming,), [base], base.reshape(-1, incoming.shape[-1]))
    if rows is None:
        return None
    ones = Memory(ONES, (1, rows.shape[0]), (0, 0), torch.float32)
    return Matrices(ones, rows, rows.shape[1:], None)


def _seen(memories: tuple[Memory, ...], bases: list[Tensor], view: Tensor) -> Memory | None:
    """Return the operand of which this is a view, as that lies; None for a copy, and what the library does not read."""
    shape, strides = tuple(view.shape), view.stride()
    for memory, base in zip(memories, bases, strict=True):
        if view.untyped_storage()._cdata == base.untyped_storage()._cdata:
            is_read = is_reached(shape, strides) and not view.storage_offset()
            return memory._replace(shape=shape, strides=strides) if is_read else None
    return None


# -- operands and results as programs read and write them ---------------------------------------------------------


class Read(NamedTuple):
    """How an operand is read: by a cast, or as it is; and the values that are multiplied.

    `copies`: the operand is made contiguous first. Groups with a shared scale run along `axis`. `raw`: the operand as
    it comes, if backward reads that and rounds it anew, by the same cast if `repeats`; otherwise it reads the values.
    """

    cast: Cast | None
    empty: Empty
    copies: bool = False
    axis: int = -1
    raw: Empty | None = None
    repeats: bool = False

    @property
    def saved(self) -> Empty:
        """What backward reads."""
        return self.empty if self.raw is None else self.raw


class Made(NamedTuple):
    """A tensor that a program writes, and what gives a product its final shape."""

    empty: Empty
    finish: Finish | None = None

    @classmethod
    def of(cls, found: Matrices, dtype: torch.dtype) -> Made:
        """Return the result of a product."""
        return cls((found.shape, strides_of(found.shape), dtype), found.finish)


class Known:
    """A contraction of given shapes, strides and dtypes under a rule, and how its operands are read."""

    __slots__ = ("form", "rule", "shapes", "weight", "x")
    has_scales = False  # whether values are codes, under scales

    def __init__(self, rule: Rule, form: Form, x: Read, weight: Read, about: tuple[Any, ...]) -> None:
        self.rule, self.form, self.x, self.weight = rule, form, x, weight
        self.shapes = (tuple(about[0]), about[2]), (tuple(about[3]), about[5])
