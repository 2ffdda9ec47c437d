"""The kernels as operators of torch: opaque to compilers, which would delete a cast there and back, and differentiable.

`torch.compile` sees one call and a fake result; the call comes back to `lowp.kernels`, which chooses the implementation
when it runs. The gradient of a cast passes straight through (Bengio et al. 2013, arXiv 1308.3432). A cast travels as
text, a seed as an integer or, so that nothing recompiles, as a 0-d int64 tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowp import kernels
from lowp.casts import Cast
from lowp.compat import constant_when_compiled
from lowp.errors import InvalidInput
from lowp.formats import Format
from lowp.kernels import limits, packing, run, scaled
from lowp.kernels.floats import CARRIERS
from lowp.kernels.scaled import Scales

Seed = int | Tensor
_SIGN = 1 << 63


def quantize(x: Tensor, cast: str | Cast | Format, scale: Any, seed: Seed, out: Tensor | None = None) -> Tensor:
    """Do `lowp.quantize` by an operator."""
    scale, zero_point = _tensors(scale, x)
    number, tensor = _seed(seed)
    if out is not None:
        torch.ops.lowp.quantize_out(x, _text(cast), scale, zero_point, number, tensor, out)
        return out
    if kernels._is_transformed():
        return _apply(x, _text(cast), scale, zero_point, number, tensor)
    result: Tensor = torch.ops.lowp.quantize(x, _text(cast), scale, zero_point, number, tensor)
    return result


def encode(x: Tensor, cast: str | Cast | Format, seed: Seed, packed: bool) -> Tensor:
    """Do `lowp.encode` by an operator."""
    number, tensor = _seed(seed)
    result: Tensor = torch.ops.lowp.encode(x.detach(), _text(cast), number, tensor, packed)
    return result


def decode(codes: Tensor, format: str | Format | Cast, dtype: torch.dtype, packed: bool, length: int | None) -> Tensor:
    """Do `lowp.decode` by an operator."""
    result: Tensor = torch.ops.lowp.decode(codes, _text(format), dtype, packed, length)
    return result


def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three tensors of `Statistics` by an operator."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.lowp.statistics(x.detach())
    return result


@constant_when_compiled
def _text(cast: str | Cast | Format) -> str:
    return cast if isinstance(cast, str) else str(cast)


def _seed(seed: Seed) -> tuple[int, Tensor | None]:
    if isinstance(seed, Tensor):
        return 0, seed
    return ((seed + _SIGN) % (2 * _SIGN)) - _SIGN if not -_SIGN <= seed < _SIGN else seed, None


def _tensors(scale: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    first, second = scale if isinstance(scale, tuple) else (scale, None)
    return _tensor(first, x), _tensor(second, x)


def _tensor(scale: Any, x: Tensor) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.tensor(scale, dtype=torch.float64, device=x.device)


def _scales(scale: Tensor | None, zero_point: Tensor | None, cast: Cast, x: Tensor) -> Scales | None:
    given = scale if zero_point is None else (scale, zero_point)
    return kernels._scales(given, cast, x)


# -- operators --------------------------------------------------------------------------------------------------------
@torch.library.custom_op("lowp::quantize", mutates_args=())
def _quantize(
    x: Tensor, cast: str, scale: Tensor | None, zero_point: Tensor | None, seed: int, seed_tensor: Tensor | None
) -> Tensor:
    plan = kernels._plan(cast, x.dtype)
    module = kernels.implementation(x.device)
    chosen = seed if seed_tensor is None else seed_tensor
    return run.quantize(module, x, plan, _scales(scale, zero_point, plan, x), chosen)


@_quantize.register_fake
def _(
    x: Tensor, cast: str, scale: Tensor | None, zero_point: Tensor | None, seed: int, seed_tensor: Tensor | None
) -> Tensor:
    kernels._plan(cast, x.dtype)
    return torch.empty_like(x)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradient, None, None, None, None, None


_quantize.register_autograd(_backward)


class _StraightThrough(torch.autograd.Function):
    """The operator for torch.func, whose transforms do not see through an operator's own gradient."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return torch.ops.lowp.quantize(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: the gradient does not depend on the numbers."""

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(context, gradient)

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *others: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, dimensions: Any, *arguments: Any) -> tuple[Tensor, int]:
        return _batched(_apply, info.batch_size, dimensions, arguments)


def _apply(*arguments: Any) -> Tensor:
    return _StraightThrough.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def _batched(apply: Any, size: int, dimensions: Any, arguments: Any) -> tuple[Tensor, int]:
    # Logical index, seed and groups are those of each example, so the examples are cast one by one; only a plain
    # deterministic cast is the same for all together.
    plan = kernels._plan(arguments[1], arguments[0].dtype)
    if plan.scaling is None and not plan.is_stochastic and all(other is None for other in dimensions[1:]):
        return apply(*arguments), dimensions[0]
    examples = []
    for index in range(size):
        chosen = [
            value.select(dimension, index) if dimension is not None else value
            for value, dimension in zip(arguments, dimensions, strict=True)
        ]
        examples.append(apply(*chosen))
    return torch.stack(examples), 0


@_quantize.register_vmap
def _(info: Any, dimensions: Any, *arguments: Any) -> tuple[Tensor, int]:
    return _batched(_quantize, info.batch_size, dimensions, arguments)


@torch.library.custom_op("lowp::quantize_out", mutates_args=("out",))
def _quantize_out(
    x: Tensor,
    cast: str,
    scale: Tensor | None,
    zero_point: Tensor | None,
    seed: int,
    seed_tensor: Tensor | None,
    out: Tensor,
) -> None:
    plan = kernels._plan(cast, x.dtype)
    module = kernels.implementation(x.device)
    chosen = seed if seed_tensor is None else seed_tensor
    run.quantize_into(module, x, plan, _scales(scale, zero_point, plan, x), chosen, out)


@_quantize_out.register_fake
def _(
    x: Tensor,
    cast: str,
    scale: Tensor | None,
    zero_point: Tensor | None,
    seed: int,
    seed_tensor: Tensor | None,
    out: Tensor,
) -> None:
    kernels._plan(cast, x.dtype)
    kernels._check_out(x, out)


@torch.library.custom_op("lowp::encode", mutates_args=())
def _encode(x: Tensor, cast: str, seed: int, seed_tensor: Tensor | None, packed: bool) -> Tensor:
    module = kernels.implementation(x.device, "encode")
    return run.encode(module, x, _element_cast(cast), seed if seed_tensor is None else seed_tensor, packed)


@_encode.register_fake
def _(x: Tensor, cast: str, seed: int, seed_tensor: Tensor | None, packed: bool) -> Tensor:
    if x.dtype not in CARRIERS:
        raise TypeError(kernels._not_floating(x.dtype))
    bits = _element_cast(cast).element.bits
    if not packed or bits in (8, 16, 32, 64):
        return x.new_empty(x.shape, dtype=scaled.code_dtype(_element_cast(cast).element))
    length = x.shape[-1] if x.ndim else 1
    return x.new_empty((*x.shape[:-1], (length * bits + 7) // 8), dtype=torch.uint8)


def _element_cast(text: str) -> Cast:
    cast = kernels._cast(text)
    if cast.scaling is not None:
        raise InvalidInput(f"{cast}: inside torch.compile encode takes formats without a shared scale")
    return cast


@torch.library.custom_op("lowp::decode", mutates_args=())
def _decode(codes: Tensor, format: str, dtype: torch.dtype, packed: bool, length: int | None) -> Tensor:
    module = kernels.implementation(codes.device, "decode")
    element = kernels._cast(format).element
    return run.decode(module, packing.unpack(codes, element, length) if packed else codes, element, dtype)


@_decode.register_fake
def _(codes: Tensor, format: str, dtype: torch.dtype, packed: bool, length: int | None) -> Tensor:
    element = kernels._cast(format).element
    if not limits.holds_format(element, dtype):
        raise InvalidInput(scaled.cannot_hold(Cast(element), dtype))
    if not packed or element.bits in (8, 16, 32, 64):
        return codes.new_empty(codes.shape, dtype=dtype)
    fitting = codes.shape[-1] * 8 // element.bits
    return codes.new_empty((*codes.shape[:-1], fitting if length is None else length), dtype=dtype)


@torch.library.custom_op("lowp::statistics", mutates_args=())
def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return run.statistics(kernels.implementation(x.device, "statistics"), x)


@_statistics.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if x.dtype not in CARRIERS:
        raise TypeError(kernels._not_floating(x.dtype))
    return (
        x.new_empty(256, dtype=torch.int64),
        x.new_empty(2, dtype=torch.float64),
        x.new_empty(3, dtype=torch.int64),
    )
