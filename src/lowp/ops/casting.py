"""How an operand is rounded on its way into an op: cast nodes of the autograd graph, and the dtype that carries them.

Values of fp16, bf16, fp32 and fp64 live in their torch dtype. Any other format is carried in fp32, except as operand of
a contraction, whose carrier is the smallest torch dtype that holds the format: what backward saves then takes 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lowp import kernels
from lowp.casts import Cast, Overflow, Rounding
from lowp.compat import (
    accelerator,
    constant_when_compiled,
    is_transformed,
    private,
    remembered_by_identity,
    with_tangents,
)
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, IntFormat, ScaledFormat
from lowp.kernels.functions import quantize_operand
from lowp.kernels.run import is_one_pass

__all__ = ["Operand", "carried", "carrier_dtype", "operand", "rounded", "shield", "without_autocast"]

_Answer = TypeVar("_Answer")
_PLAIN = (Tensor, torch.nn.Parameter)
_UP_TO_32 = (torch.float32, torch.float16, torch.bfloat16)
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_DisableAutocast = cast(Callable[[], AbstractContextManager[None]], private("torch._C._DisableAutocast"))
_DisableTorchFunction = cast(Callable[[], AbstractContextManager[None]], private("torch._C.DisableTorchFunction"))
_function_modes = cast(Callable[[], int], private("torch._C._len_torch_function_stack"))
_is_any_autocast_enabled = cast(Callable[[], bool], private("torch._C._is_any_autocast_enabled"))
is_jit_tracing = cast(Callable[[], bool], private("torch._C._is_tracing"))  # whether torch.jit.trace records what runs


def draw_seed(device: torch.device | str = "cpu") -> Tensor:
    """Return a fresh seed for stochastic rounding, drawn from torch's generator: `torch.manual_seed` repeats it.

    On a device it is drawn by the device's own, so that a captured CUDA graph draws another at each replay.
    """
    return torch.randint(2**62, (), device=device)


def _constant(function: Callable[[Cast], _Answer]) -> Callable[[Cast], _Answer]:
    """Remember a function's answers; torch.compile takes them as constants, without tracing how they are found."""
    return constant_when_compiled(remembered_by_identity(function))


@_constant
def native_dtype(to: Cast) -> torch.dtype | None:
    """Return the dtype whose conversion `Tensor.to` IS this cast (nearest-even, overflow to infinity), or None."""
    if to.rounding is Rounding.NEAREST_EVEN and to.overflow is Overflow.INFINITY:
        return _own_dtype(to)
    return None


@_constant
def carrier_dtype(to: Cast) -> torch.dtype:
    """Return the dtype that carries an operand of a contraction: the smallest that holds every value of the format.

    bf16 for bf16, bf16-tpu, e4m3fn and e5m2, fp16 for fp16 and e5m7; fp32 for what fits neither, and for formats with a
    shared scale.
    """
    format = to.format
    if (dtype := _own_dtype(to)) is not None:
        return dtype
    if isinstance(format, FloatFormat):
        for name in ("bf16", "fp16"):
            if format.fits(cast(FloatFormat, FORMATS[name])):
                return _DTYPES[name]
    return torch.float32


def result_dtype(to: Cast | None) -> torch.dtype:
    """Return the dtype of what an op writes under a rule's `output`: the format's own where it has one, or fp32."""
    return torch.float32 if to is None else _own_dtype(to) or torch.float32


@_constant
def _own_dtype(to: Cast) -> torch.dtype | None:
    return next((dtype for name, dtype in _DTYPES.items() if FORMATS[name] == to.format), None)


def is_castable(*tensors: Tensor | None) -> bool:
    """Whether rules apply to these tensors: none of them is fp64, integer, boolean, complex or MKLDNN's.

    Those stay as they are; under torch.amp the same tensors are left alone.
    """
    return all(
        t is None or (t.is_floating_point() and t.dtype is not torch.float64 and not _is_mkldnn(t)) for t in tensors
    )


def _is_mkldnn(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and x.is_mkldnn


# -- cast nodes ---------------------------------------------------------------------------------------------------


class _StraightThrough(torch.autograd.Function):
    """Round to a cast's values in the dtype asked for; gradients and tangents pass as they are (Bengio et al. 2013).

    Where a format clips, by a scale that is not the maximum's, what lies outside gets no gradient (Hubara et al. 2016,
    arXiv 1609.07061, equation 6).
    """

    @staticmethod
    def forward(x: Tensor, to: Cast, dtype: torch.dtype, seed: Tensor | int, axis: int) -> Tensor:
        return _quantized(x, to, seed, axis).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, to = inputs[:2]
        ctx.dtype, ctx.result_dtype = x.dtype, inputs[2]
        if (steps := _clipped_beyond(to)) is not None:
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
        x = x.movedim(in_dims[0], 0)
        axis = axis if axis < 0 else axis + 1
        if isinstance(to.format, ScaledFormat):  # each example has a scale of its own
            return torch.stack([_straight_through(one, to, dtype, seed, axis) for one in x]), 0
        return _straight_through(x, to, dtype, seed, axis), 0


def _inside(ctx: Any, gradient: Tensor) -> Tensor:
    """A gradient or tangent without what belongs to numbers that were clipped."""
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    return gradient.masked_fill(saved[0], 0.0) if saved else gradient


_straight_through = with_tangents(_StraightThrough)


@_constant
def _clipped_beyond(to: Cast) -> float | None:
    """How many times its value a number is that was clipped: beyond half a step above the largest value of a format.

    None for formats whose scale is that of the maximum, which clips nothing: all but ternary (steps of 1) and binary
    (of 2).
    """
    element = to.element
    if not isinstance(to.format, ScaledFormat) or not isinstance(element, IntFormat) or element.maximum != 1:
        return None
    return 1.5 if element.minimum == -1 and element.bits == 2 else 2.0 if element.bits == 1 else None


def _quantized(x: Tensor, to: Cast, seed: Tensor | int, axis: int) -> Tensor:
    """Return the values of a cast in fp32 (fp64 stays); groups of a shared scale run along `axis`.

    What is infinite or NaN stays so in every format: a training step that has met one must not go on as if it had not.
    """
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if is_irregular(x):
        return _with_values(x, to, seed)
    if axis != -1 and _has_groups(to):
        return _quantized(x.movedim(axis, -1).contiguous(), to, seed, -1).movedim(-1, axis)
    return quantize_operand(x, to, seed, functorch_is_active())


def is_irregular(x: Tensor) -> bool:
    """Whether a tensor's elements do not lie in one strided block: sparse, nested and MKLDNN tensors.

    torch.compile does not trace the question within a backward pass; there a tensor counts as strided.
    """
    return not torch.compiler.is_compiling() and (x.layout is not torch.strided or x.is_nested)


def _with_values(x: Tensor, to: Cast, seed: Tensor | int) -> Tensor:
    """Return a sparse or nested tensor whose values are rounded, apart from the graph; COO is coalesced first.

    Raises InvalidInput for a scale of each row or block, which the values of such a tensor do not lie in.
    """
    if _has_groups(to):
        raise InvalidInput(
            f"{to} rounds strided tensors, not one of layout {x.layout}: convert it with to_dense(), or exempt the op "
            "by a rule without casts"
        )
    if x.layout is torch.sparse_coo:
        x = x.coalesce()
        values = kernels.quantize(x.values(), to, seed=seed)
        return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)
    if x.is_nested:
        values = kernels.quantize(x.values(), to, seed=seed)
        return torch.nested.nested_tensor_from_jagged(values, cast(Any, x).offsets(), cast(Any, x).lengths())
    is_by_rows = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (x.crow_indices(), x.col_indices()) if is_by_rows else (x.ccol_indices(), x.row_indices())
    values = kernels.quantize(x.values(), to, seed=seed)
    return torch.sparse_compressed_tensor(*indices, values, x.shape, layout=x.layout, check_invariants=False)


@_constant
def is_only_rounding(to: Cast) -> bool:
    """Whether a cast is one pass that draws nothing, clips nothing, and is no conversion of torch's own."""
    if to.is_stochastic or native_dtype(to) is not None or _clipped_beyond(to) is not None:
        return False
    return is_one_pass(to)


def _has_groups(to: Cast) -> bool:
    return isinstance(to.format, ScaledFormat) and to.format.scope.kind != "tensor"


def depends_on_axis(to: Cast | None) -> bool:
    """Whether the values of a cast depend on which dimension is contracted: scales of rows, channels and blocks do."""
    return to is not None and _has_groups(to)


def rounded(
    x: Tensor,
    to: Cast | None,
    seed: Callable[[], Tensor | int] = draw_seed,
    axis: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x rounded by a cast, in `dtype` (by default as results are carried); part of the autograd graph.

    A tensor that is in the format's dtype already is returned as it is; None rounds nothing.
    """
    if to is None:
        return x
    if (native := native_dtype(to)) is not None:
        if x.dtype is torch.float32 and torch.compiler.is_compiling():
            # inductor deletes a conversion there and back, and the rounding with it; an operator it leaves alone
            return cast(Tensor, _straight_through(x, to, native, 0, axis))
        return x.to(native)
    wanted = result_dtype(to) if dtype is None else dtype
    if x.dtype is _own_dtype(to):
        return x
    if is_irregular(x) and x.layout is torch.strided:  # autograd cannot ask such a tensor for its sizes
        return torch.nested.as_nested_tensor([rounded(one, to, seed, axis, dtype) for one in x.unbind()])
    drawn: Tensor | int = 0
    if to.rounding.is_stochastic:
        drawn = draw_seed(x.device) if seed is draw_seed else seed()
    if not (x.requires_grad and torch.is_grad_enabled()) and not functorch_is_active():
        return _quantized(x, to, drawn, axis).to(wanted)  # what has no graph needs no node
    return cast(Tensor, _straight_through(x, to, wanted, drawn, axis))


def carried(x: Tensor, to: Cast | None, seed: Callable[[], Tensor | int] = draw_seed, axis: int = -1) -> Tensor:
    """Return x rounded by a cast in the dtype that carries an operand of a contraction; part of the autograd graph."""
    return x if to is None else rounded(x, to, seed, axis, carrier_dtype(to))


# -- operands -----------------------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """An operand of a product: its value, and where its gradient goes.

    `edge` alone: the tensor itself. With `value`: the rounded tensor in its carrier, apart from the graph, while `edge`
    is a tensor of the same shape and no memory through which the gradient passes in fp32. Autograd would otherwise
    round the gradient to the carrier's dtype, which no rule asked for.
    """

    edge: Tensor
    value: Tensor | None = None

    @property
    def plain(self) -> Tensor:
        """The rounded tensor alone; its gradient may go nowhere."""
        return self.edge if self.value is None else self.value

    @property
    def connected(self) -> Tensor:
        """The rounded tensor in fp32 as part of the graph, its gradient going to the edge (whose elements are zero)."""
        return self.edge.float() if self.value is None else self.value.float() + self.edge


class _Edge(torch.autograd.Function):
    """A tensor of x's shape without storage, in the dtype its gradient shall have."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, dense: bool) -> Tensor:
        if dense:  # forward-mode derivatives are kept in the memory of the tensor itself
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


def end_of(x: Tensor) -> Tensor:
    """Return where an operand's gradient in fp32 goes: itself, or an edge where that would keep its memory alive."""
    if not (x.requires_grad and torch.is_grad_enabled()) or (x.is_leaf and x.dtype is torch.float32):
        return x
    return cast(Tensor, _edge(x, torch.float32, functorch_is_active()))


def operand(x: Tensor, value: Tensor, gradient_dtype: torch.dtype) -> Operand:
    """Return x, whose rounded `value` is known, as operand of a product whose gradients have `gradient_dtype`."""
    if value is x or value.dtype in (x.dtype, gradient_dtype):
        return Operand(value)
    if not (x.requires_grad and torch.is_grad_enabled()) and not functorch_is_active():
        return Operand(value)
    return Operand(_edge(x, gradient_dtype, functorch_is_active()), value.detach())


def functorch_is_active() -> bool:
    """Whether torch.func (vmap, grad, jvp), forward-mode autograd or torch.compile follows what runs now."""
    return torch.compiler.is_compiling() or is_transformed()


def is_plain(*tensors: Any) -> bool:
    """Whether rules apply to tensors, and they are no more than their numbers: no subclass, in one strided block."""
    for x in tensors:
        if type(x) not in _PLAIN or x.dtype not in _UP_TO_32 or x.layout is not torch.strided or x.is_nested:
            return False
    return True


# -- shields ------------------------------------------------------------------------------------------------------


def shield() -> AbstractContextManager[object]:
    """Keep function modes and torch.autocast away from what runs inside: a backward may be called within a region."""
    return without_autocast() if torch.compiler.is_compiling() else _Shield()


def shielded(function: Callable[[Tensor, Any], _Answer], gradient: Tensor, ctx: Any) -> _Answer:
    """Return what a backward function returns within `shield`, entered only where something could come in between."""
    if not torch.compiler.is_compiling() and type(gradient) is Tensor:
        if not (_function_modes() or _is_any_autocast_enabled()):
            return function(gradient, ctx)
    with shield():
        return function(gradient, ctx)


def without_autocast() -> AbstractContextManager[object]:
    """Switch torch.autocast off where torch.compile traces, on the CPU and on the accelerator that is here."""
    kind = accelerator()
    return torch.autocast("cpu", enabled=False) if kind is None else _without_autocast(kind)


@contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast(kind, enabled=False):
        yield


class _Shield:
    """Both contexts in one: an ExitStack takes several times as long."""

    __slots__ = ("autocast", "functions")

    def __enter__(self) -> None:
        self.functions, self.autocast = _DisableTorchFunction(), _DisableAutocast()
        self.functions.__enter__()
        self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.autocast.__exit__(*error)
        self.functions.__exit__(*error)
