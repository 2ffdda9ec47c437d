"""How an operand of an op is rounded: cast nodes of the autograd graph, and the dtype that carries the values.

Values of fp16, bf16, fp32 and fp64 are carried in their torch dtype, other formats in fp32. An operand of a contraction
is carried in the smallest torch dtype that holds the format, so that the tensors saved for backward may take 16 bits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lowp import kernels
from lowp.casts import Cast
from lowp.compat import (
    applied_at_once,
    constant_when_compiled,
    real_tensors,
    remembered,
    remembered_by_identity,
    with_tangents,
)
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, IntFormat, ScaledFormat
from lowp.kernels.casts.functions import quantize_operand
from lowp.kernels.numbers import native
from lowp.kernels.numbers.philox import draw_seed
from lowp.kernels.tracing import functorch_is_active

_Answer = TypeVar("_Answer")


def _constant(function: Callable[[Cast], _Answer]) -> Callable[[Cast], _Answer]:
    """Cache a function's results; torch.compile treats them as constants, without tracing the function."""
    return constant_when_compiled(remembered_by_identity(function))


native_dtype, own_dtype = _constant(native.native_dtype), _constant(native.own_dtype)


@_constant
def carrier_dtype(to: Cast) -> torch.dtype:
    """Return the dtype that carries an operand of a contraction: the smallest that holds every value of the format.

    bf16 for bf16, bf16-tpu, e4m3fn and e5m2, fp16 for fp16 and e5m7; fp32 for formats that fit neither and for formats
    with a shared scale.
    """
    format = to.format
    if (dtype := own_dtype(to)) is not None:
        return dtype
    if isinstance(format, FloatFormat):
        for name in ("bf16", "fp16"):
            if format.fits(cast(FloatFormat, FORMATS[name])):
                return native.DTYPES[name]
    return torch.float32


def result_dtype(to: Cast | None) -> torch.dtype:
    """Return the dtype in which an op writes under a rule's `output`: the format's own torch dtype, or fp32."""
    return torch.float32 if to is None else own_dtype(to) or torch.float32


def is_castable(*tensors: Tensor | None) -> bool:
    """Whether rules apply to these tensors: none is fp64, integer, boolean, complex or MKLDNN.

    Such tensors stay unchanged, as under torch.amp.
    """
    return all(
        t is None
        or (
            t.is_floating_point()
            and t.dtype is not torch.float64
            and (torch.compiler.is_compiling() or not t.is_mkldnn)
        )
        for t in tensors
    )


# -- cast nodes ---------------------------------------------------------------------------------------------------


class _StraightThrough(torch.autograd.Function):
    """Round to a cast's values in the given dtype; gradients and tangents pass unchanged (Bengio et al. 2013).

    If a format clips, because its scale is not that of the maximum, clipped elements get no gradient (Hubara et al.
    2016, arXiv 1609.07061, equation 6).
    """

    @staticmethod
    def forward(x: Tensor, to: Cast, dtype: torch.dtype, seed: Tensor | int, axis: int) -> Tensor:
        return _quantized(x, to, seed, axis).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, to = inputs[:2]
        ctx.dtype, ctx.result_dtype = x.dtype, inputs[2]
        steps = _clipped_beyond(to)
        ctx.clips = steps is not None
        if steps is not None:
            outside = x.detach().abs() > steps * output.detach().abs().to(x.dtype).masked_fill(output == 0, math.inf)
            ctx.save_for_backward(outside)
            ctx.save_for_forward(outside)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _inside(ctx, gradient).to(ctx.dtype), None, None, None, None

    @staticmethod
    def tangent(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _inside(ctx, tangent).to(ctx.result_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        x, to, dtype, seed, axis = arguments
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        seeds = [seed] * info.batch_size if in_dims[3] is None else seed.unbind()
        if isinstance(to.format, ScaledFormat) or to.is_stochastic:  # each example has its own scale or draws
            examples = zip(x, seeds, strict=True)
            return torch.stack([_straight_through(one, to, dtype, draws, axis) for one, draws in examples]), 0
        return _straight_through(x, to, dtype, seed, axis if axis < 0 else axis + 1), 0


def _inside(ctx: Any, gradient: Tensor) -> Tensor:
    """Return a gradient or tangent with zeros for clipped elements.

    Where nothing is saved nothing is asked for: a weight that a region has cast once may be in several backward passes.
    """
    return gradient.masked_fill(ctx.saved_tensors[0], 0.0) if ctx.clips else gradient


_straight_through = with_tangents(_StraightThrough)


@_constant
def _clipped_beyond(to: Cast) -> float | None:
    """Return the multiple of the largest value beyond which a number counts as clipped: half a step above that value.

    None for formats whose scale is that of the maximum, which clip nothing: all but ternary (steps of 1) and binary (of
    2).
    """
    element = to.element
    if not isinstance(to.format, ScaledFormat) or not isinstance(element, IntFormat) or element.maximum != 1:
        return None
    return 1.5 if element.minimum == -1 and element.bits == 2 else 2.0 if element.bits == 1 else None


def _quantized(x: Tensor, to: Cast, seed: Tensor | int, axis: int) -> Tensor:
    """Return the values of a cast in fp32 (fp64 stays); groups of a shared scale run along `axis`.

    Infinities and NaN stay in every format: a training step that has met one must not continue as if it had not.
    """
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if is_irregular(x):
        return _with_values(x, to, seed)
    return quantize_operand(x, to, seed, functorch_is_active(), axis=axis if depends_on_axis(to) else -1)


def is_irregular(x: Tensor) -> bool:
    """Whether a tensor's elements are not in one strided block: sparse, nested and MKLDNN tensors.

    torch.compile cannot trace this check within a backward pass; there a tensor counts as strided.
    """
    return not torch.compiler.is_compiling() and (x.layout is not torch.strided or x.is_nested)


def _with_values(x: Tensor, to: Cast, seed: Tensor | int) -> Tensor:
    """Return a sparse or nested tensor with rounded values, detached from the graph; COO is coalesced first.

    Raises InvalidInput for scales per row or block, since the values of such a tensor are not stored in rows or blocks.
    """
    if _has_groups(to):
        raise InvalidInput(
            f"{to} rounds strided tensors, not one of layout {x.layout}: convert it with to_dense(), or exempt the op "
            "by a rule without casts"
        )
    x = x.coalesce() if x.layout is torch.sparse_coo else x
    values = kernels.quantize(x.values(), to, seed=seed)
    if x.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)
    if x.is_nested:
        return torch.nested.nested_tensor_from_jagged(values, cast(Any, x).offsets(), cast(Any, x).lengths())
    is_by_rows = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (x.crow_indices(), x.col_indices()) if is_by_rows else (x.ccol_indices(), x.row_indices())
    return torch.sparse_compressed_tensor(*indices, values, x.shape, layout=x.layout, check_invariants=False)


def clips(to: Cast) -> bool:
    """Whether a cast clips, so that some elements get no gradient."""
    return _clipped_beyond(to) is not None


def _has_groups(to: Cast) -> bool:
    return isinstance(to.format, ScaledFormat) and to.format.scope.kind != "tensor"


def depends_on_axis(to: Cast | None) -> bool:
    """Whether the values of a cast depend on the contracted dimension, as with scales of rows, channels and blocks.

    In square tiles a tensor is cast as it lies, and all products read the same numbers.
    """
    return to is not None and _has_groups(to) and not cast(ScaledFormat, to.format).scope.is_square


def rounded(
    x: Tensor,
    to: Cast | None,
    seed: Callable[[], Tensor | int] = draw_seed,
    axis: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x rounded by a cast, in `dtype` (by default the dtype of results); part of the autograd graph.

    A tensor that is already in the format's dtype is returned itself; None rounds nothing.
    """
    if to is None:
        return x
    if (dtype_of_cast := native_dtype(to)) is not None:
        if x.dtype is torch.float32 and torch.compiler.is_compiling():
            # inductor removes a conversion there and back, and the rounding with it, but keeps an operator
            return cast(Tensor, _straight_through(x, to, dtype_of_cast, 0, axis))
        return x.to(dtype_of_cast)
    wanted = result_dtype(to) if dtype is None else dtype
    if x.dtype is own_dtype(to):
        return x
    if is_irregular(x) and x.layout is torch.strided:  # autograd cannot read the sizes of such a tensor
        return torch.nested.as_nested_tensor([rounded(one, to, seed, axis, dtype) for one in x.unbind()])
    drawn = seed_of(x, to, seed)
    if not (x.requires_grad and torch.is_grad_enabled()) and not functorch_is_active():
        return _quantized(x, to, drawn, axis).to(wanted)  # no graph, no node
    return cast(Tensor, _straight_through(x, to, wanted, drawn, axis))


def seed_of(x: Tensor, to: Cast, seed: Callable[[], Tensor | int]) -> Tensor | int:
    """Return the seed of a cast of x, 0 for one that draws nothing."""
    if not to.is_stochastic:
        return 0
    return draw_seed(x.device) if seed is draw_seed else seed()


def carried(x: Tensor, to: Cast | None, seed: Callable[[], Tensor | int] = draw_seed, axis: int = -1) -> Tensor:
    """Return x rounded by a cast in the dtype of a contraction's operand; part of the autograd graph."""
    return x if to is None else rounded(x, to, seed, axis, carrier_dtype(to))


class PassedOn(torch.autograd.Function):
    """A rounded tensor, with the gradient of the tensor that it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def passed_on(x: Tensor, value: Tensor) -> Tensor:
    """Return the values to which x was rounded, detached; part of the autograd graph."""
    return cast(Tensor, PassedOn.apply(x, value)) if x.requires_grad and torch.is_grad_enabled() else value  # type: ignore[no-untyped-call]


def with_derivatives(values: Sequence[Tensor | None], same: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients as a plain backward computes them, with the derivatives of the same ones in a graph."""
    pairs = zip(values, same, strict=True)
    return [one if one is None or other is None else passed_on(other, one) for one, other in pairs]


# -- operands -----------------------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """An operand of a product: its value and the destination of its gradient.

    `edge` alone: the tensor itself. With `value`: the rounded tensor in its carrier, detached from the graph, while
    `edge` is a tensor of the same shape without memory, through which the gradient passes in fp32. Otherwise autograd
    would round the gradient to the carrier's dtype, which no rule requests.

    `raw`: the tensor before its cast, detached, which backward reads in place of the value.
    """

    edge: Tensor
    value: Tensor | None = None
    scale: Tensor | None = None  # of the rows, where products sum integers of 8 bits
    raw: Tensor | None = None

    @property
    def plain(self) -> Tensor:
        """The rounded tensor alone, possibly without a path for its gradient."""
        return self.edge if self.value is None else self.value

    @property
    def connected(self) -> Tensor:
        """The rounded tensor in fp32, attached to the graph through the edge (whose elements are zero)."""
        return self.edge.float() if self.value is None else self.value.float() + self.edge


class _Edge(torch.autograd.Function):
    """A tensor of x's shape without storage, in the dtype of its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, dense: bool) -> Tensor:
        if dense:  # forward-mode derivatives are stored in the tensor's own memory
            return x.new_zeros(x.shape, dtype=dtype)
        return x.new_zeros((1,) * x.dim(), dtype=dtype).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype, ctx.result_dtype = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.to(ctx.dtype), None, None

    @staticmethod
    def tangent(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.to(ctx.result_dtype)


_edge = with_tangents(_Edge)


def edge(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of x's shape without storage, zeros in a dtype, through which a gradient reaches x."""
    with torch.enable_grad():
        return cast(Tensor, _edge(x, dtype, functorch_is_active()))


class _End(torch.autograd.Function):
    """An `_Edge` in fp32 outside transforms, in fewer functions; torch converts its gradient to the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _zero(x.device).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


end = applied_at_once(_End)


@remembered
def _zero(device: torch.device) -> Tensor:
    with real_tensors():
        return torch.zeros((), device=device)


def end_of(x: Tensor) -> Tensor:
    """Return the destination of an operand's fp32 gradient: the operand, or an edge if the operand would stay alive."""
    if not (x.requires_grad and torch.is_grad_enabled()) or (x.is_leaf and x.dtype is torch.float32):
        return x
    return cast(Tensor, _edge(x, torch.float32, True) if functorch_is_active() else end(x))


def operand(x: Tensor, value: Tensor, gradient_dtype: torch.dtype) -> Operand:
    """Return x, whose rounded `value` is known, as operand of a product whose gradients have `gradient_dtype`."""
    if value is x or value.dtype in (x.dtype, gradient_dtype):
        return Operand(value)
    if not (x.requires_grad and torch.is_grad_enabled()) and not functorch_is_active():
        return Operand(value)
    return Operand(_edge(x, gradient_dtype, functorch_is_active()), value.detach())
