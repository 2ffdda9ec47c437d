"""What is known of contractions of given shapes, strides and dtypes under a rule: their operands, and programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import real_tensors
from lowp.formats import ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.int16.integer_run import NotFinite
from lowp.kernels.products.programs import NOWHERE, CastStep, Memory, Program, Step
from lowp.ops.backward import Back, Builder, Found
from lowp.ops.call import KeptCasts
from lowp.ops.casting import depends_on_axis, rounded
from lowp.ops.matrices import (
    BIAS,
    FACTOR,
    OUT,
    VALUE,
    WEIGHT,
    WEIGHT_ENTRY,
    X_ENTRY,
    Empty,
    Known,
    Made,
    Read,
    X,
    entry_of,
    matrices,
    owned_place,
)
from lowp.ops.trilinear import OUTPUT, Form
from lowp.policy import Rule

LOOKS = 32  # calls for gradients, of which one looks for features that are lost
SMALL = 1024  # elements of a weight that is rounded anew at each use, in less time than a look for a kept cast

_AND_CODES = *cpu.FLOATS, torch.int8
# the tensors of a call at their places, their addresses, a region's casts
Given = tuple[Found, list[int], "KeptCasts | None"]


class ForwardProgram(NamedTuple):
    """A forward program, and the tensors made for it, at their places. `copies`: as in `Read`, and of a bias."""

    program: Program
    made: Sequence[tuple[int, Empty]]
    copies: Sequence[int]


class Prepared(Known):
    """Contractions of given shapes, strides and dtypes under a rule: operands, result, programs of matrices.

    `is_apart`: what follows a product before its rounding is no part of the program: a factor, or a bias that is no
    number a column.
    """

    __slots__ = ("asked", "backs", "forwards", "is_apart", "is_small", "keeps_weight", "out", "rounds", "saved")
    _computed: Callable[[Found], Tensor]  # the result, of those whose programs only round

    def __init__(
        self, rule: Rule, form: Form, x: Read, weight: Read, out: Made, about: tuple[Any, ...], is_apart: bool = False
    ) -> None:
        super().__init__(rule, form, x, weight, about)
        self.out, self.is_apart = out, is_apart
        self.saved = x.saved[1:], weight.saved[1:]  # how that lies which backward reads
        self.rounds = [one.cast is not None and one.raw is None for one in (x, weight)]  # what backward reads
        self.is_small = math.prod(about[3]) <= SMALL
        to = weight.cast
        may_keep = weight.axis == -1 or not (to is None or depends_on_axis(to))
        self.keeps_weight = to is not None and not to.is_delayed and may_keep
        if self.is_small and to is not None and not to.is_stochastic:
            self.keeps_weight = False
        self.forwards: dict[tuple[bool, bool, bool], ForwardProgram] = {}
        self.backs: dict[Hashable, Back | None] = {}
        self.asked = 0  # for gradients that may lose features

    def run(self, given: Given, saves_value: bool, saves_factor: bool) -> Tensor:
        """Return the result; the values of casts that are saved are left in their places. Raises NotFinite."""
        saves_value, saves_factor = saves_value and self.x.raw is None, saves_factor and self.weight.raw is None
        (tensors, memory, kept), keeps = given, False
        if self.keeps_weight and kept is not None and (weight := tensors[WEIGHT]).requires_grad and weight.is_leaf:
            factor, sign = kept.look(weight, cast(Cast, self.weight.cast))
            if factor is None:
                keeps = saves_factor = True
            else:
                tensors[FACTOR], memory[FACTOR] = factor, factor.data_ptr()
        key = saves_value, saves_factor, tensors[FACTOR] is None
        program, made, copies = self.forwards.get(key) or self._forward(key, tensors[BIAS])
        for place in copies:
            one = tensors[place]
            tensors[place] = one = one.contiguous() if place != BIAS else one.float().contiguous()
            memory[place] = one.data_ptr()
        for place, (shape, strides, dtype) in made:
            tensors[place] = one = torch.empty_strided(shape, strides, dtype=dtype, device=cpu.HOST)
            memory[place] = one.data_ptr()
        if not program.run(memory):
            raise NotFinite
        if keeps:
            kept.keep(weight, cast(Cast, self.weight.cast), sign, tensors[FACTOR])  # type: ignore[union-attr]
        out, finish = tensors[OUT], self.out.finish
        if out is None:
            return self._computed(tensors)
        out = out if finish is None else finish(out)
        if not self.is_apart:
            return out
        bias = tensors[BIAS]
        return rounded(out if bias is None else self.form.with_bias(out, bias.float()), self.rule.output)

    def _forward(self, key: tuple[bool, bool, bool], bias: Tensor | None) -> ForwardProgram:
        """Return the program of calls that save the same; the operands that no program reads as they lie are copied."""
        with real_tensors():
            copies = [place for place, one in ((X, self.x), (WEIGHT, self.weight)) if one.copies]
            if bias is not None and not self.is_apart and not (bias.dtype is torch.float32 and bias.is_contiguous()):
                copies.append(BIAS)
            forward = self.forwards[key] = self._programmed(*key)._replace(copies=copies)
        return forward

    def _programmed(self, saves_value: bool, saves_factor: bool, makes_factor: bool) -> ForwardProgram:
        steps, made, owned = list[Step](), [(OUT, self.out.empty)], list[int]()
        operands = self._operands((saves_value, saves_factor, makes_factor), steps, made, owned)
        found = matrices(self.form, OUTPUT, *operands)
        assert found is not None  # as `prepare` has seen
        bias, output = (NOWHERE, None) if self.is_apart else (BIAS, self.rule.output)
        steps += found.steps(bias, OUT, self.out.empty[2], output, owned)
        return ForwardProgram(Program(steps, owned), made, ())

    def _operands(
        self, key: tuple[bool, bool, bool], steps: list[Step], made: list[tuple[int, Empty]], owned: list[int]
    ) -> list[Memory]:
        """Return both operands as products read them, after the steps that cast them; values are made, or owned."""
        (saves_value, saves_factor, makes_factor), operands = key, []
        for (shape, dtype), read, place, to, is_saved, entry in (
            (self.shapes[0], self.x, X, VALUE, saves_value, X_ENTRY),
            (self.shapes[1], self.weight, WEIGHT, FACTOR, saves_factor, WEIGHT_ENTRY),
        ):
            memory = Memory(place, shape, read.empty[1], dtype)
            if read.cast is not None and to == FACTOR and not makes_factor:
                memory = memory._replace(place=to, dtype=read.empty[2])
            elif read.cast is not None and self.is_small and not is_saved and is_read(read.cast):
                memory = memory._replace(cast=read.cast, keeps=True)  # rounded again in each panel
            elif read.cast is not None:
                if is_saved:
                    made.append((to, read.empty))
                else:
                    to = owned_place(owned, shape, read.empty[2])
                steps.append(CastStep(memory, to, read.cast, read.empty[2], read.axis, entry_of(read.cast, entry)))
                memory = memory._replace(place=to, dtype=read.empty[2])
            operands.append(memory)
        return operands

    def gradients(
        self,
        gradient: Tensor,
        values: Sequence[Tensor | None],
        needs: tuple[bool, ...],
        bias_dtype: torch.dtype | None,
        entry: Tensor | None,
    ) -> Found | None:
        """Return the gradients asked for, of x, the weight and the bias; None for what the definition runs.

        `entry`: of the scale of the gradient, if that is delayed.
        """
        memory = cpu.addresses((gradient, *values), _AND_CODES if self.has_scales else cpu.FLOATS)
        if memory is None:
            return None
        for saved, lies in zip(values, self.saved, strict=False):
            if saved is not None and (saved.stride(), saved.dtype) != lies:
                return None  # hooks on saved tensors have moved it
        key = gradient.stride(), gradient.dtype, needs
        found = self.backs.get(key, UNKNOWN)
        if found is UNKNOWN:
            with real_tensors():
                found = self.backs[key] = self._back(gradient, needs, bias_dtype)
        if found is None or (found.may_lose and self._is_looked_at()):
            return None
        if entry is not None:
            values, memory = (*values, entry), [*memory, entry.data_ptr()]
        return found.run(gradient, values, memory)  # type: ignore[no-any-return]

    def _is_looked_at(self) -> bool:
        """Whether the definition runs, which tells of features that a gradient loses: at first, and then at times."""
        self.asked += 1
        return self.asked % LOOKS == 1

    def _back(self, gradient: Tensor, needs: tuple[bool, ...], bias_dtype: torch.dtype | None) -> Back | None:
        return Builder(self, gradient, bias_dtype, keeps=self.is_apart and needs[2]).back(needs)


UNKNOWN: Any = object()


def is_read(to: Cast) -> bool:
    """Whether a product rounds by a cast what it reads."""
    return not isinstance(to.format, ScaledFormat) and not to.is_stochastic
