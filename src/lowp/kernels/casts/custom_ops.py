"""The kernels as operators of torch: opaque to compilers, which would delete a cast there and back, and differentiable.

`torch.compile` sees one call and a fake result; the call comes back to `lowp.kernels`, which chooses the implementation
when it runs. The gradient of a cast passes straight through (Bengio et al. 2013, arXiv 1308.3432). A cast travels as
text, a seed as an integer or, so that nothing recompiles, as a 0-d int64 tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import constant_when_compiled
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, Format, IntFormat
from lowp.kernels import tracing
from lowp.kernels.casts import checks, run, shards
from lowp.kernels.choose import dispatch
from lowp.kernels.numbers import packing, scaled
from lowp.kernels.numbers.floats import home
from lowp.kernels.numbers.philox import Draw, Seed, drawn
from lowp.kernels.numbers.scaled import Scales
from lowp.quantized import Quantized

_SIGN = 1 << 63


def quantize(
    x: Tensor, cast: str | Cast | Format | torch.dtype, scale: Any, seed: Seed, out: Tensor | None = None
) -> Tensor:
    """`lowp.quantize` as an operator."""
    if tracing.is_sharded(x):
        return _of_shards(x, cast, scale, seed, out)
    scale, zero_point = _tensors(scale, x)
    arguments = _unwrapped(x, _text(cast), scale, zero_point, *_seed(seed))
    if tracing.is_transformed():
        # every transform has a rule for copy_, and none for an operator that writes
        result = torch.ops.lowp.quantize(*arguments) if tracing.is_functionalized() else _apply(*arguments)
        return result if out is None else out.copy_(result)
    if out is not None:
        torch.ops.lowp.quantize_out(*arguments, out)
        return out
    found: Tensor = torch.ops.lowp.quantize(*arguments)
    return found


def _of_shards(
    x: Tensor, cast: str | Cast | Format | torch.dtype, scale: Any, seed: Seed, out: Tensor | None
) -> Tensor:
    """`lowp.quantize` of a DTensor."""
    own = _cast(cast) if scale is None else None
    x = shards.placed(x, own)
    ends = None if own is None else shards.extremes(x, own)
    if ends is None:
        found: Tensor = torch.ops.lowp.quantize(x, _text(cast), *_tensors(scale, x), *_seed(seed))
    else:
        found = torch.ops.lowp.quantize_part(x, _text(cast), ends)
    return found if out is None else out.copy_(found)


def encode(
    x: Tensor, cast: str | Cast | Format | torch.dtype, scale: Any, seed: Seed, packed: bool
) -> Tensor | Quantized:
    """`lowp.encode` as an operator."""
    x, draw = shards.whole(x), _seed(seed)
    if not _is_scaled(cast):
        result: Tensor = torch.ops.lowp.encode(x.detach(), _text(cast), *draw, packed)
        return result
    scale, zero_point = _tensors(scale, x)
    payload, kept, zero_points, outer = torch.ops.lowp.encode_scaled(
        x.detach(), _text(cast), scale, zero_point, *draw, packed
    )
    has_outer, is_affine, bits = _parts(cast)
    length = None
    if packed and x.ndim and bits not in (8, 16, 32, 64):
        length = x.shape[-1]
    return Quantized(
        payload, kept, _cast(cast), outer if has_outer else None, zero_points if is_affine else None, x.dtype, length
    )


def decode(
    codes: Tensor, format: str | Format | Cast | torch.dtype, dtype: torch.dtype, packed: bool, length: int | None
) -> Tensor:
    """`lowp.decode` as an operator."""
    result: Tensor = torch.ops.lowp.decode(tracing.unwrapped(shards.whole(codes)), _text(format), dtype, packed, length)
    return result


def dequantize(q: Quantized) -> Tensor:
    """`lowp.dequantize` as an operator."""
    tensors = [None if one is None else one.detach() for one in (q.payload, q.scale, q.outer, q.zero_point)]
    result: Tensor = torch.ops.lowp.decode_scaled(*tensors, q.cast.text, q.dtype, q.length)
    return result


def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three tensors of `Statistics` by an operator."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.lowp.statistics(shards.whole(x).detach())
    return result


@constant_when_compiled
def _text(cast: str | Cast | Format | torch.dtype) -> str:
    return cast if isinstance(cast, str) else str(cast)


@constant_when_compiled
def _is_scaled(cast: str | Cast | Format | torch.dtype) -> bool:
    return checks.as_cast(cast).scaling is not None


@constant_when_compiled
def _cast(cast: str | Cast | Format | torch.dtype) -> Cast:
    return checks.as_cast(cast)


@constant_when_compiled
def _parts(cast: str | Cast | Format | torch.dtype) -> tuple[bool, bool, int]:
    """Return whether a format has an outer scale, whether a zero point, and the bits of an element."""
    format = scaled.scaled_format(checks.as_cast(cast))
    return format.outer is not None, format.affine, format.element.bits


def _seed(seed: Seed) -> tuple[int, Tensor | None, int]:
    """Return a seed as a number or a tensor, and the index of the first element."""
    seed, first = drawn(seed)
    if isinstance(seed, Tensor):
        return 0, seed, first
    return ((seed + _SIGN) % (2 * _SIGN)) - _SIGN if not -_SIGN <= seed < _SIGN else seed, None, first


def _draw(seed: int, seed_tensor: Tensor | None, offset: int) -> Seed:
    chosen = seed if seed_tensor is None else seed_tensor
    return Draw(chosen, offset) if offset else chosen


def _tensors(scale: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    first, second = scale if isinstance(scale, tuple) else (scale, None)
    return _tensor(first, x), _tensor(second, x)


def _unwrapped(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments of an operator, with what they wrap for tensors that outlived their transform."""
    return tuple([tracing.unwrapped(one) if isinstance(one, Tensor) else one for one in arguments])


def _tensor(scale: Any, x: Tensor) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float64, device=home(x.device))


# -- operators --------------------------------------------------------------------------------------------------------
# What operators that cast take: `x`, the cast, and what `_choices` reads.
# A seed and an offset are SymInt, so that another one compiles nothing again.
_CAST = "Tensor x, str cast, Tensor? scale, Tensor? zero_point, SymInt seed, Tensor? seed_tensor, SymInt offset"


def _choices(
    x: Tensor,
    cast: Cast,
    scale: Tensor | None,
    zero_point: Tensor | None,
    seed: int,
    seed_tensor: Tensor | None,
    offset: int,
) -> tuple[Scales | None, Seed]:
    """Return the scales that were given, and the seed with the index of the first element."""
    given = scale if zero_point is None else (scale, zero_point)
    return checks.scales(given, cast, x), _draw(seed, seed_tensor, offset)


@torch.library.custom_op("lowp::quantize", mutates_args=(), schema=f"({_CAST}) -> Tensor")
def _quantize(x: Tensor, cast: str, *given: Any) -> Tensor:
    plan = checks.plan(cast, x.dtype)
    return run.quantize(dispatch.implementation(x.device), x, plan, *_choices(x, plan, *given))


@_quantize.register_fake
def _(x: Tensor, cast: str, *given: Any) -> Tensor:
    checks.plan(cast, x.dtype)
    return torch.empty_like(x)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradient, None, None, None, None, None, None


_quantize.register_autograd(_backward)


@torch.library.custom_op("lowp::quantize_part", mutates_args=())
def _quantize_part(x: Tensor, cast: str, extremes: Tensor) -> Tensor:
    plan, module = checks.plan(cast, x.dtype), dispatch.implementation(x.device)
    return shards.in_whole(lambda part, by: run.quantize(module, part, by, None, 0), x, extremes, plan)


@_quantize_part.register_fake
def _(x: Tensor, cast: str, extremes: Tensor) -> Tensor:
    return torch.empty_like(x)


_quantize_part.register_autograd(lambda context, gradient: (gradient, None, None))


class _StraightThrough(torch.autograd.Function):
    """The operator for torch.func, whose transforms do not see through an operator's own gradient."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        # within a transform `quantize` cannot tell a tensor of an ended one from its own; here no transform is left
        return torch.ops.lowp.quantize(*_unwrapped(*arguments))  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Save nothing: the gradient does not depend on the values."""

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
    plan = checks.as_cast(arguments[1])
    if _is_elementwise(plan) and all(other is None for other in dimensions[1:]):
        return apply(*arguments), dimensions[0]
    return torch.stack(list(_examples(apply, size, dimensions, arguments))), 0


def _is_elementwise(plan: Cast) -> bool:
    return plan.scaling is None and not plan.is_stochastic


def _examples(apply: Any, size: int, dimensions: Any, arguments: Any) -> Iterator[Any]:
    """Yield the result of each example of a batch, whose dimension is given for each argument that has one."""
    for index in range(size):
        yield apply(
            *(
                value.select(dimension, index) if dimension is not None else value
                for value, dimension in zip(arguments, dimensions, strict=True)
            )
        )


def _stacked(results: Iterator[tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    stacks = tuple(torch.stack(column) for column in zip(*results, strict=True))
    return stacks, (0,) * len(stacks)


@_quantize.register_vmap
def _(info: Any, dimensions: Any, *arguments: Any) -> tuple[Tensor, int]:
    return _batched(_quantize, info.batch_size, dimensions, arguments)


@torch.library.custom_op("lowp::quantize_out", mutates_args=("out",), schema=f"({_CAST}, Tensor(a!) out) -> ()")
def _quantize_out(x: Tensor, cast: str, *given: Any) -> None:
    *chosen, out = given
    plan = checks.plan(cast, x.dtype)
    run.quantize_into(dispatch.implementation(x.device), x, plan, *_choices(x, plan, *chosen), out)


@_quantize_out.register_fake
def _(x: Tensor, cast: str, *given: Any) -> None:
    checks.plan(cast, x.dtype)
    checks.check_out(x, given[-1])


@torch.library.custom_op("lowp::encode", mutates_args=())
def _encode(x: Tensor, cast: str, seed: int, seed_tensor: Tensor | None, offset: int, packed: bool) -> Tensor:
    module = dispatch.implementation(x.device, "encode")
    return run.encode(module, x, checks.as_cast(cast), _draw(seed, seed_tensor, offset), packed)


@_encode.register_fake
def _(x: Tensor, cast: str, seed: int, seed_tensor: Tensor | None, offset: int, packed: bool) -> Tensor:
    checks.check_dtype(x.dtype)
    return _fake_codes(x, checks.as_cast(cast).element, packed)


@_encode.register_vmap
def _(info: Any, dimensions: Any, x: Tensor, cast: str, *others: Any) -> tuple[Tensor, int]:
    is_row = x.ndim > 1 or not others[-1]  # numbers that stand alone are packed alone
    if _is_elementwise(checks.as_cast(cast)) and is_row and all(other is None for other in dimensions[1:]):
        return _encode(x.movedim(dimensions[0], 0), cast, *others), 0
    return torch.stack(list(_examples(_encode, info.batch_size, dimensions, (x, cast, *others)))), 0


@torch.library.custom_op(
    "lowp::encode_scaled", mutates_args=(), schema=f"({_CAST}, bool packed) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _encode_scaled(x: Tensor, cast: str, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *chosen, packed = given
    plan = checks.as_cast(cast)
    module = dispatch.implementation(x.device, "encode")
    found = run.encode_scaled(module, x, plan, *_choices(x, plan, *chosen), packed)
    nothing = x.new_empty(0)
    return (
        found.payload,
        found.scale,
        nothing if found.zero_point is None else found.zero_point,
        x.new_empty(0) if found.outer is None else found.outer,
    )


@_encode_scaled.register_fake
def _(x: Tensor, cast: str, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    checks.check_dtype(x.dtype)
    format = scaled.scaled_format(checks.as_cast(cast))
    groups = scaled.group_shape(x.shape, format.scope)
    zero_points = x.new_empty(groups, dtype=torch.int32) if format.affine else x.new_empty(0)
    outer = x.new_empty((), dtype=torch.float32) if format.outer is not None else x.new_empty(0)
    payload = _fake_codes(x, format.element, given[-1] and x.ndim > 0)
    return payload, x.new_empty(groups, dtype=scaled.stored_scale_dtype(format)), zero_points, outer


@_encode_scaled.register_vmap
def _(info: Any, dimensions: Any, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return _stacked(_examples(_encode_scaled, info.batch_size, dimensions, arguments))


def _fake_codes(x: Tensor, element: FloatFormat | IntFormat, packed: bool) -> Tensor:
    bits = element.bits
    if not packed or bits in (8, 16, 32, 64):
        return x.new_empty(x.shape, dtype=scaled.code_dtype(element))
    length = x.shape[-1] if x.ndim else 1
    return x.new_empty((*x.shape[:-1], (length * bits + 7) // 8), dtype=torch.uint8)


@torch.library.custom_op("lowp::decode", mutates_args=())
def _decode(codes: Tensor, format: str, dtype: torch.dtype, packed: bool, length: int | None) -> Tensor:
    module = dispatch.implementation(codes.device, "decode")
    element = checks.as_cast(format).element
    if packed:
        return run.decode_packed(module, codes, element, dtype, length)
    return run.decode(module, codes, element, dtype)


@_decode.register_fake
def _(codes: Tensor, format: str, dtype: torch.dtype, packed: bool, length: int | None) -> Tensor:
    element = checks.as_cast(format).element
    if not checks.holds_format(element, dtype):
        raise InvalidInput(scaled.cannot_hold(Cast(element), dtype))
    if not packed:
        return codes.new_empty(codes.shape, dtype=dtype)
    length = packing.length_of(codes, element, length)
    return codes.new_empty((*codes.shape[:-1], length) if codes.ndim else (), dtype=dtype)


@torch.library.custom_op("lowp::decode_scaled", mutates_args=())
def _decode_scaled(
    payload: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    zero_point: Tensor | None,
    cast: str,
    dtype: torch.dtype,
    length: int | None,
) -> Tensor:
    encoded = Quantized(payload, scale, checks.as_cast(cast), outer, zero_point, dtype, length)
    return run.dequantize(dispatch.implementation(payload.device, "decode"), encoded)


@_decode_scaled.register_fake
def _(payload: Tensor, *others: Any) -> Tensor:
    *_, dtype, length = others
    return payload.new_empty(payload.shape if length is None else (*payload.shape[:-1], length), dtype=dtype)


@_decode_scaled.register_vmap
def _(info: Any, dimensions: Any, *arguments: Any) -> tuple[Tensor, int]:
    return torch.stack(list(_examples(_decode_scaled, info.batch_size, dimensions, arguments))), 0


@torch.library.custom_op("lowp::statistics", mutates_args=())
def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return run.statistics(dispatch.implementation(x.device, "statistics"), x)


@_statistics.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    checks.check_dtype(x.dtype)
    return (
        x.new_empty(256, dtype=torch.int64),
        x.new_empty(2, dtype=torch.float64),
        x.new_empty(3, dtype=torch.int64),
    )


@_statistics.register_vmap
def _(info: Any, dimensions: Any, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return _stacked(_examples(_statistics, info.batch_size, dimensions, arguments))
