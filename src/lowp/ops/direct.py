"""Contractions straight from their arguments: a call of the C++ library forward, one backward, one autograd Function.

They have the bits of `products.contract`, the definition, which runs all other calls: those that torch transforms or an
observer sees, on other devices, under casts that no program has, and all gradients of gradients. What depends on the
rule is decided once, what depends on shapes, strides and dtypes once for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import applied_at_once, real_tensors, remembered_by_identity
from lowp.formats import ScaledFormat
from lowp.kernels.casts.run import is_dense
from lowp.kernels.choose.dispatch import chosen
from lowp.kernels.choose.hardware import multiplies
from lowp.kernels.int16.integer import NotFinite
from lowp.kernels.int16.low_words import FEATURES
from lowp.kernels.products import multiplies_int8
from lowp.kernels.products.fp32_products import ones
from lowp.kernels.products.programs import (
    NOWHERE,
    CastStep,
    Memory,
    ProductStep,
    Program,
    Step,
    follows,
    is_reached,
    rounds,
    serves,
    strides_of,
)
from lowp.ops.bytes import is_int8
from lowp.ops.call import KeptCasts, QuickRegion, RoleCasts, accumulation
from lowp.ops.casting import (
    carrier_dtype,
    clips,
    depends_on_axis,
    end_of,
    native_dtype,
    own_dtype,
    result_dtype,
    shielded,
)
from lowp.ops.products import gradients
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Finish, Form, Linear
from lowp.policy import Rule

__all__ = ["Direct", "direct", "one_dtype"]

SMALL = 1024  # elements of a weight that is rounded anew at each use, in less time than a look for a kept cast
FormOf = Callable[[tuple[int, ...], tuple[int, ...]], Form]
_MOST = 4096  # calls that are known under a rule
_X, _WEIGHT, _BIAS, _OUT, _VALUE, _FACTOR = range(6)  # places in a forward program
_GRADIENT, _FIRST, _SECOND, _ONES, _MADE = range(5)  # in a backward program, whose own tensors begin at _MADE


class Direct:
    """How the contractions of a rule run: its casts, and what is known of its calls by shapes, strides and dtypes."""

    __slots__ = ("narrow", "prepared", "rule", "sums_bytes", "to_weight")

    def __init__(self, rule: Rule) -> None:
        self.rule, self.to_weight = rule, cast(Cast, rule.weight)
        self.narrow, self.sums_bytes = one_dtype(rule), is_int8(rule)
        self.prepared: dict[Hashable, Prepared | None] = {}

    def linear(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion
    ) -> Tensor | None:
        """Return F.linear(input, weight, bias=None) in a region, as a `Quick`."""
        if kwargs or not 2 <= len(args) <= 3:
            return None
        x, weight, bias = args if len(args) == 3 else (*args, None)
        if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))):
            return None
        if self.sums_bytes and not torch.is_grad_enabled() and weight.dim() == 2 and multiplies_int8(x, weight):
            return None
        return self.contract(None, Linear, x, weight, bias, region.weights)

    def contract(
        self,
        key: Hashable,
        form_of: FormOf,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: KeptCasts | None,
    ) -> Tensor | None:
        """Return the contraction of x and weight, plus bias; None, with nothing done, for what the definition runs.

        `key` tells the forms of these shapes apart, which `form_of` makes of the shapes. `kept`: the region's casts.
        """
        narrow = self.narrow
        if narrow is not None and chosen() is None and multiplies("cpu", narrow):
            return None  # to torch's own product
        if not serves(x, weight, bias):
            return None
        is_recorded = torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
        if is_recorded and narrow is not None:  # by torch's own nodes, which cost less than the ends of others
            x = x if x.dtype is narrow else x.to(narrow)
            if weight.dtype is not narrow:  # one for all uses, in which their gradients meet, as under torch.autocast
                is_kept = kept is not None and weight.requires_grad and weight.is_leaf
                weight = kept.narrowed(weight, self.to_weight) if is_kept else weight.to(narrow)  # type: ignore[union-attr]
        about = x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype
        whole = key, *about, bias if bias is None else (bias.shape, bias.dtype, bias.is_contiguous())
        prepared = self.prepared.get(whole, _UNKNOWN)
        if prepared is _UNKNOWN:
            with real_tensors():
                prepared = self._remember(whole, _prepared(self.rule, form_of, about, bias))
        if prepared is None:
            return None
        to, factor = prepared.weight.cast, None
        is_small = weight.numel() <= SMALL
        reads = is_small and not is_recorded and prepared.can_read
        keeps, sign = False, None
        if kept is not None and to is not None and prepared.keeps_weight and not (is_small and prepared.can_read):
            if weight.requires_grad and weight.is_leaf:
                factor, sign = kept.look(weight, to)
                keeps = factor is None
        given = [x, weight, bias, None, None, factor]
        try:
            if is_recorded:
                ends = [x, weight]
                if prepared.x.cast is not None and x.requires_grad and not (x.is_leaf and x.dtype is torch.float32):
                    ends[0] = end_of(x)
                if to is not None and weight.requires_grad and not (weight.is_leaf and weight.dtype is torch.float32):
                    ends[1] = end_of(weight)
                found = _apply(*ends, bias, prepared, given)
            else:
                found = prepared.run(given, reads)
        except NotFinite:
            return None
        if keeps:
            kept.keep(weight, to, sign, given[_FACTOR])  # type: ignore[union-attr, arg-type]
        return cast(Tensor, found)

    def _remember(self, key: Hashable, prepared: Prepared | None) -> Prepared | None:
        if len(self.prepared) >= _MOST:
            self.prepared.clear()
        self.prepared[key] = prepared
        return prepared


@remembered_by_identity
def direct(rule: Rule) -> Direct | None:
    """Return how contractions run straight under a rule; None for rules whose casts or sums no program has."""
    sums = accumulation(rule)
    if rule.is_empty or not (sums is None or sums.format == "fp32"):
        return None
    casts = [one for one in (rule.input, rule.weight, rule.grad, rule.output) if one is not None]
    if not all(rounds(one) and not clips(one) and own_dtype(one) is not torch.float64 for one in casts):
        return None
    if rule.output is not None and isinstance(rule.output.format, ScaledFormat):
        return None
    return Direct(rule)


def one_dtype(rule: Rule) -> torch.dtype | None:
    """Return the one 16-bit dtype to which a rule rounds a product; None for other rules."""
    casts = [rule.input, rule.weight, rule.output, rule.output if rule.grad is None else rule.grad]
    dtypes = {None if one is None else native_dtype(one) for one in casts}
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    one = dtypes.pop() if len(dtypes) == 1 else None
    return one if one in (torch.float16, torch.bfloat16) and sums_in_fp32 else None


_Empty = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # what torch.empty_strided makes a tensor of


class Read(NamedTuple):
    """How an operand is read: by a cast, or as it is; and the values that are multiplied.

    `copies`: the operand is made contiguous first. Groups with a shared scale run along `axis`.
    """

    cast: Cast | None
    empty: _Empty
    copies: bool = False
    axis: int = -1

    def has(self, saved: Tensor | None) -> bool:
        """Whether what was saved lies as the values did: hooks on saved tensors may have moved it."""
        return saved is None or (saved.stride() == self.empty[1] and saved.dtype is self.empty[2])


class Made(NamedTuple):
    """A tensor that a program writes, and what gives a product its final shape."""

    empty: _Empty
    finish: Finish | None = None

    @classmethod
    def of(cls, found: Matrices, dtype: torch.dtype) -> Made:
        """Return the result of a product."""
        return cls((found.shape, strides_of(found.shape), dtype), found.finish)


class Prepared:
    """Contractions of given shapes, strides and dtypes under a rule: operands, result, programs."""

    __slots__ = ("backs", "can_read", "form", "keeps_weight", "out", "programs", "rule", "shapes", "weight", "x")

    def __init__(self, rule: Rule, form: Form, x: Read, weight: Read, out: Made, about: tuple[Any, ...]) -> None:
        self.rule, self.form, self.x, self.weight, self.out = rule, form, x, weight, out
        self.shapes = (tuple(about[0]), about[2]), (tuple(about[3]), about[5])
        self.keeps_weight = weight.axis == -1 or not depends_on_axis(weight.cast)
        self.can_read = all(one.cast is None or _is_read(one.cast) for one in (x, weight))
        self.programs: dict[tuple[bool, bool], Program] = {}
        self.backs: dict[Hashable, Back | None] = {}

    def run(self, given: list[Tensor | None], reads: bool = False) -> Tensor:
        """Return the result of x, weight and bias; the values of casts that are not there are left in their places.

        `reads`: the products round what they read, and no values are kept. Raises NotFinite.
        """
        x, weight, bias, _, _, factor = given
        program = self.programs.get((factor is None, reads))
        if program is None:
            with real_tensors():
                program = self.programs[factor is None, reads] = self._program(factor is not None, reads)
        if self.x.copies:
            given[_X] = x.contiguous()  # type: ignore[union-attr]
        if self.weight.copies:
            given[_WEIGHT] = weight.contiguous()  # type: ignore[union-attr]
        if not reads:
            if self.x.cast is not None:
                shape, strides, dtype = self.x.empty
                given[_VALUE] = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
            if self.weight.cast is not None and factor is None:
                shape, strides, dtype = self.weight.empty
                given[_FACTOR] = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous()):
            given[_BIAS] = bias.float().contiguous()
        shape, strides, dtype = self.out.empty
        given[_OUT] = out = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        if not program(given):
            raise NotFinite
        return out if self.out.finish is None else self.out.finish(out)

    def _program(self, has_factor: bool, reads: bool) -> Program:
        steps: list[Step] = []
        operands = []
        places = ((_X, _VALUE), (_WEIGHT, _FACTOR))
        for (shape, dtype), read, (place, to) in zip(self.shapes, (self.x, self.weight), places, strict=True):
            memory = Memory(place, shape, read.empty[1], dtype)
            if reads:
                memory = memory._replace(cast=read.cast, keeps=True)
            elif read.cast is not None:
                if to == _VALUE or not has_factor:
                    steps.append(CastStep(memory, to, read.cast, read.empty[2], read.axis))
                memory = memory._replace(place=to, dtype=read.empty[2])
            operands.append(memory)
        found = _matrices(self.form, OUTPUT, *operands)
        assert found is not None  # as `_prepared` has seen
        dtype = self.out.empty[2]
        return Program(
            [*steps, ProductStep(found.left, found.right, _BIAS, _OUT, dtype, _of_result(self.rule.output, dtype))]
        )

    def back(self, gradient: Tensor, needs: tuple[bool, ...], bias_dtype: torch.dtype | None) -> Back | None:
        """Return how the gradients asked for follow from that of the result; None for what the definition runs."""
        key = gradient.stride(), gradient.dtype, needs, bias_dtype
        found: Back | None = self.backs.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            with real_tensors():
                found = self.backs[key] = _Builder(self, gradient, bias_dtype).back(needs)
        return found


def _is_read(to: Cast) -> bool:
    """Whether a product rounds by a cast what it reads."""
    return not isinstance(to.format, ScaledFormat) and not to.is_stochastic


class _Direct(torch.autograd.Function):
    """A contraction; saves the values that the gradients asked for need.

    `x` and `weight` are the operands themselves where these are multiplied as they are, and otherwise the ends to which
    their gradients go.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, prepared: Prepared, given: list[Any]
    ) -> Tensor:
        out = prepared.run(given)
        first, second, *_ = ctx.needs_input_grad
        value = x if prepared.x.cast is None else given[_VALUE]
        factor = weight if prepared.weight.cast is None else given[_FACTOR]
        ctx.save_for_backward(value if second else None, factor if first else None)
        ctx.prepared, ctx.bias_dtype = prepared, None if bias is None else bias.dtype
        ctx.edges = x if second and value is not x else None, weight if first and factor is not weight else None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(_gradients, gradient, ctx)


_apply = applied_at_once(_Direct)


def _gradients(gradient: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    prepared, needs, values = ctx.prepared, ctx.needs_input_grad[:3], ctx.saved_tensors
    if not torch.is_grad_enabled() and serves(gradient, *values):
        are_these = prepared.x.has(values[0]) and prepared.weight.has(values[1])
        back = prepared.back(gradient, needs, ctx.bias_dtype) if are_these else None
        if back is not None and (found := back.run(gradient, values)) is not None:
            return *found, None, None
    casts = RoleCasts(prepared.rule, accumulation(prepared.rule))
    return *gradients(prepared.form, casts, needs, ctx.bias_dtype, gradient, values, ctx.edges), None, None


class Back(NamedTuple):
    """The gradients of a contraction as one program.

    `made`: the tensors that it writes, and axes that are moved to the end of copies of the gradient which it reads;
    `results`: the places of the gradients of x, the weight and the bias, and what gives
    them their shapes. `copies`: as in `Read`.
    """

    program: Program
    copies: bool
    made: tuple[Made | int, ...]
    results: tuple[tuple[int | None, Finish | None], ...]

    def run(self, gradient: Tensor, values: tuple[Tensor | None, ...]) -> list[Tensor | None] | None:
        """Return the gradients of both operands and of the bias; None where the definition has to say what they are."""
        if self.copies:
            gradient = gradient.contiguous()
        tensors: list[Tensor | None] = [gradient, *values, ones()]
        for one in self.made:
            if isinstance(one, int):
                tensors.append(gradient.movedim(one, -1).contiguous())
            else:
                shape, strides, dtype = one.empty
                tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device="cpu"))
        if not self.program(tensors):
            return None
        found: list[Tensor | None] = []
        for place, finish in self.results:
            result = None if place is None else tensors[place]
            found.append(result if result is None or finish is None else finish(result))
        return found


class _Builder:
    """Builds the program of a contraction's gradients, in the order in which the definition casts and multiplies."""

    def __init__(self, prepared: Prepared, gradient: Tensor, bias_dtype: torch.dtype | None) -> None:
        self.prepared, self.bias_dtype = prepared, bias_dtype
        shape, strides, dtype = tuple(gradient.shape), gradient.stride(), gradient.dtype
        to = prepared.rule.grad
        self.cast = None if to is None or own_dtype(to) is dtype else to
        whole = strides_of(shape)
        self.copies = strides != whole and (self.cast is not None or len(shape) != 2 or not is_reached(shape, strides))
        self.gradient = Memory(_GRADIENT, shape, whole if self.copies else strides, dtype)
        self.steps: list[Step] = []
        self.made: list[Made | int] = []
        self.incoming: dict[int, Memory] = {}

    def back(self, needs: tuple[bool, ...]) -> Back | None:
        """Return the gradients asked for; None if they are no products of matrices as they lie, or no step casts."""
        prepared, cast = self.prepared, self.cast
        if cast is not None and isinstance(cast.format, ScaledFormat):
            loses = cast.format.scope.kind == "tensor" and self.gradient.shape[-1:] >= (FEATURES,)  # of many some
            if loses or self.gradient.dtype is not torch.float32:
                return None
        results: list[tuple[int | None, Finish | None]] = [(None, None)] * 3
        for slot, place, read in ((FIRST, _SECOND, prepared.weight), (SECOND, _FIRST, prepared.x)):
            if not needs[slot]:
                continue
            value = Memory(place, *read.empty)
            incoming = self._incoming(prepared.form.contracted[slot][1])
            found = _matrices(prepared.form, slot, value, incoming)
            if found is None:
                return None
            results[slot] = self._product(found, prepared.shapes[slot][1])
        if needs[2]:
            found = _rows(self._incoming(-1))
            if found is None or self.bias_dtype is None:
                return None
            results[2] = self._product(found, self.bias_dtype)
        return Back(Program(self.steps), self.copies, tuple(self.made), tuple(results))

    def _incoming(self, axis: int) -> Memory:
        """Return the gradient as an operand; scales of rows and blocks follow the contracted dimension."""
        if self.cast is None:
            return self.gradient
        axis = axis if depends_on_axis(self.cast) else -1
        if axis not in self.incoming:
            shape, dtype = self.gradient.shape, carrier_dtype(self.cast)
            source, along, strides = self.gradient, axis, strides_of(shape)
            if not follows(shape, self.cast, axis):
                order = [index for index in range(len(shape)) if index != axis] + [axis]
                turned = tuple(shape[index] for index in order)
                source = Memory(self._make(axis), turned, strides_of(turned), self.gradient.dtype)
                lying = dict(zip(order, source.strides, strict=True))
                strides, along = tuple(lying[index] for index in range(len(shape))), -1
            to = self._make(Made((shape, strides, dtype)))
            self.steps.append(CastStep(source, to, self.cast, dtype, along))
            self.incoming[axis] = Memory(to, shape, strides, dtype)
        return self.incoming[axis]

    def _make(self, one: Made | int) -> int:
        """Return the place of one more tensor."""
        self.made.append(one)
        return _MADE + len(self.made) - 1

    def _product(self, found: Matrices, dtype: torch.dtype) -> tuple[int, Finish | None]:
        to = self._make(Made.of(found, dtype))
        written = _of_result(self.prepared.rule.output, dtype)
        self.steps.append(ProductStep(found.left, found.right, NOWHERE, to, dtype, written))
        return to, found.finish


def _of_result(output: Cast | None, dtype: torch.dtype) -> Cast | None:
    """Return the cast of a result; None where writing it in `dtype` is the cast."""
    return None if output is None or native_dtype(output) is dtype else output


class Matrices(NamedTuple):
    """A product of matrices as they lie: its operands, the shape in which it is written, and what shapes it then."""

    left: Memory
    right: Memory
    shape: tuple[int, ...]
    finish: Finish | None


def _matrices(form: Form, slot: int, left: Memory, right: Memory) -> Matrices | None:
    """Return the product for a slot of a form; None if an operand would have to be copied."""
    bases = [torch.empty_strided(one.shape, one.strides, device="meta") for one in (left, right)]
    rows, columns, finish = form.matrices(slot, bases[0], bases[1], batches=2)
    first, second = (_seen((left, right), bases, view) for view in (rows, columns))  # in any order
    if first is None or second is None or sum(size != 1 for size in rows.shape[:-2]) > 2:
        return None
    written = torch.empty(*rows.shape[:-1], columns.shape[-1], device="meta")
    shaped = finish(written)
    if shaped.is_contiguous():
        return Matrices(first, second, tuple(shaped.shape), None)
    return Matrices(first, second, tuple(written.shape), finish)


def _rows(incoming: Memory) -> Matrices | None:
    """Return the sum of a gradient along all dimensions but the last, as a product with ones."""
    base = torch.empty_strided(incoming.shape, incoming.strides, device="meta")
    rows = _seen((incoming,), [base], base.reshape(-1, incoming.shape[-1]))
    if rows is None:
        return None
    ones = Memory(_ONES, (1, rows.shape[0]), (0, 0), torch.float32)
    return Matrices(ones, rows, rows.shape[1:], None)


def _seen(memories: tuple[Memory, ...], bases: list[Tensor], view: Tensor) -> Memory | None:
    """Return the operand of which this is a view, as that lies; None for a copy, and what the library does not read."""
    shape, strides = tuple(view.shape), view.stride()
    for memory, base in zip(memories, bases, strict=True):
        if view.untyped_storage()._cdata == base.untyped_storage()._cdata:
            is_read = is_reached(shape, strides) and not view.storage_offset()
            return memory._replace(shape=shape, strides=strides) if is_read else None
    return None


def _prepared(rule: Rule, form_of: FormOf, about: tuple[Any, ...], bias: Tensor | None) -> Prepared | None:
    """Return what is known of a call; None for one that the definition runs."""
    shape, other = tuple(about[0]), tuple(about[3])
    if form_of is Linear and not (shape and 1 <= len(other) <= 2 and shape[-1] == other[-1]):
        return None  # torch raises its own error
    form = form_of(shape, other)
    is_plain = form.are_matrices and getattr(form, "scale", 1) == 1 and 0 not in (*about[0], *about[3])
    if not is_plain or (bias is not None and form.numbers_a_column(bias) is None):
        return None
    axes = form.contracted[OUTPUT]
    x, weight = (
        _read(rule.input, shape, about[1], about[2], axes[0]),
        _read(rule.weight, other, about[4], about[5], axes[1]),
    )
    if x is None or weight is None:
        return None
    found = _matrices(form, OUTPUT, Memory(_X, *x.empty), Memory(_WEIGHT, *weight.empty))
    return None if found is None else Prepared(rule, form, x, weight, Made.of(found, result_dtype(rule.output)), about)


def _read(
    to: Cast | None, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, axis: int
) -> Read | None:
    """Return how an operand is read; None where no program does it."""
    if to is None or own_dtype(to) is dtype:
        return Read(None, (shape, strides, dtype))
    is_shared = isinstance(to.format, ScaledFormat)
    if is_shared and not (dtype is torch.float32 and follows(shape, to, axis)):
        return None
    whole = strides_of(shape)
    if not is_shared and not to.is_stochastic and is_dense(shape, strides):
        return Read(to, (shape, strides, carrier_dtype(to)))
    return Read(to, (shape, whole, carrier_dtype(to)), strides != whole, axis)


_UNKNOWN: Any = object()
