"""Casts as rows: what computes a verb on plain tensors, and its operator, for calls that torch must see.

An operator is opaque to compilers, which would delete a cast there and back: `torch.compile` sees one call and a fake
result, and the implementation is chosen when the call runs. A cast travels as text, a seed as an integer or, so that
nothing recompiles, as a 0-d int64 tensor. The gradient of a cast passes straight through (Bengio et al. 2013, arXiv
1308.3432).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import constant_when_compiled
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, Format, IntFormat
from lowp.kernels import tracing
from lowp.kernels.casts import checks, run, shards
from lowp.kernels.choose.dispatch import implementation
from lowp.kernels.numbers import groups, packing, scaled
from lowp.kernels.numbers.floats import home
from lowp.kernels.numbers.philox import Draw, Seed, signed
from lowp.quantized import Quantized

_SIGN = 1 << 63
# What a cast takes. A seed and an offset are SymInt, so that another one compiles nothing again.
_CAST = "Tensor x, str cast, Tensor? scale, Tensor? zero_point, SymInt seed, Tensor? seed_tensor, SymInt offset"
_PLAIN_CAST = _CAST.replace(" Tensor? scale, Tensor? zero_point,", "")


class Verb(NamedTuple):
    """A verb, whose functions take what the schema of its operator names.

    `run` computes it on plain tensors; it also takes a cast that is no text, any scale, and a tensor as seed. `fake`
    makes the results without their numbers. `is_joint`: whether a batch of torch.func.vmap, along the first dimension
    of the first argument, is computed as one tensor; otherwise its examples are, one by one.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    is_joint: Callable[..., bool] = lambda *_: False


def _choices(x: Tensor, cast: Cast, scale: Any, zero_point: Tensor | None, *draw: Any) -> tuple[Any, Seed]:
    """Return the scales that were given, checked, and what is drawn."""
    return checks.scales(scale if zero_point is None else (scale, zero_point), cast, x), _drawn(*draw)


def _drawn(seed: Any, seed_tensor: Tensor | None, offset: int) -> Seed:
    chosen = seed if seed_tensor is None else seed_tensor
    return Draw(chosen, offset) if offset else chosen


def _is_elementwise(x: Tensor, cast: str, *_: Any) -> bool:
    # index, seed and groups are those of each example, so that only this cast is the same for all together
    plan = checks.as_cast(cast)
    return plan.scaling is None and not plan.is_stochastic


# -- values -----------------------------------------------------------------------------------------------------------
def _quantize(x: Tensor, cast: str | Cast, *given: Any) -> Tensor:
    plan = checks.plan(cast, x.dtype)
    return run.quantize(implementation(x.device), x, plan, *_choices(x, plan, *given))


def _like(x: Tensor, cast: str, *_: Any) -> Tensor:
    checks.plan(cast, x.dtype)
    return torch.empty_like(x)


def _quantize_part(x: Tensor, cast: str, extremes: Tensor) -> Tensor:
    plan, module = checks.plan(cast, x.dtype), implementation(x.device)
    return shards.in_whole(lambda part, by: run.quantize(module, part, by, None, 0), x, extremes, plan)


def _quantize_out(x: Tensor, cast: str | Cast, *given: Any) -> None:
    plan = checks.plan(cast, x.dtype)
    run.quantize_into(implementation(x.device), x, plan, *_choices(x, plan, *given[:-1]), given[-1])


def _check_out(x: Tensor, cast: str, *given: Any) -> None:
    checks.plan(cast, x.dtype)
    checks.check_out(x, given[-1])


# -- codes ------------------------------------------------------------------------------------------------------------
def _encode(x: Tensor, cast: str | Cast, seed: Any, seed_tensor: Tensor | None, offset: int, packed: bool) -> Tensor:
    module = implementation(x.device, "encode")
    return run.encode(module, x, checks.as_cast(cast), _drawn(seed, seed_tensor, offset), packed)


def _fake_codes(x: Tensor, cast: str, *given: Any) -> Tensor:
    checks.check_dtype(x.dtype)
    return _codes_like(x, checks.as_cast(cast).element, given[-1])


def _codes_like(x: Tensor, element: FloatFormat | IntFormat, packed: bool) -> Tensor:
    if not packed or packing.fills_bytes(element):
        return x.new_empty(x.shape, dtype=packing.code_dtype(element))
    length = x.shape[-1] if x.ndim else 1
    return x.new_empty((*x.shape[:-1], (length * element.bits + 7) // 8), dtype=torch.uint8)


def _encodes_rows(x: Tensor, cast: str, *given: Any) -> bool:
    # numbers that stand alone are packed alone
    return _is_elementwise(x, cast) and (x.ndim > 1 or not given[-1])


def encode_scaled(x: Tensor, cast: str | Cast, *given: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return codes, scales, zero points and outer scale, as in `Quantized`."""
    plan, module = checks.as_cast(cast), implementation(x.device, "encode")
    return run.encode_scaled(module, x, plan, *_choices(x, plan, *given[:-1]), given[-1])


def _encode_scaled(x: Tensor, cast: str | Cast, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    payload, kept, *others = encode_scaled(x, cast, *given)
    zero_point, outer = (x.new_empty(0) if one is None else one for one in others)  # an operator returns tensors
    return payload, kept, zero_point, outer


def _fake_scaled_codes(x: Tensor, cast: str, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    checks.check_dtype(x.dtype)
    format = scaled.scaled_format(checks.as_cast(cast))
    shape = groups.group_shape(x.shape, format.scope)
    return (
        _codes_like(x, format.element, given[-1] and x.ndim > 0),
        x.new_empty(shape, dtype=scaled.stored_scale_dtype(format)),
        x.new_empty(shape, dtype=torch.int32) if format.affine else x.new_empty(0),
        x.new_empty((), dtype=torch.float32) if format.outer is not None else x.new_empty(0),
    )


def _decode(
    codes: Tensor, format: str | Format | Cast | torch.dtype, dtype: torch.dtype, packed: bool, length: int | None
) -> Tensor:
    module, element = implementation(codes.device, "decode"), checks.as_cast(format).element
    if packed:
        return run.decode_packed(module, codes, element, dtype, length)
    return run.decode(module, codes, element, dtype)


def _fake_values(codes: Tensor, format: str, dtype: torch.dtype, packed: bool, length: int | None) -> Tensor:
    element = checks.as_cast(format).element
    if not checks.holds_format(element, dtype):
        raise InvalidInput(scaled.cannot_hold(Cast(element), dtype))
    if not packed:
        return codes.new_empty(codes.shape, dtype=dtype)
    length = packing.length_of(codes, element, length)
    return codes.new_empty((*codes.shape[:-1], length) if codes.ndim else (), dtype=dtype)


def _decode_scaled(
    payload: Tensor, scale: Tensor, outer: Tensor | None, zero_point: Tensor | None, cast: str, *others: Any
) -> Tensor:
    encoded = Quantized(payload, scale, checks.as_cast(cast), outer, zero_point, *others)
    return run.dequantize(implementation(payload.device, "decode"), encoded)


def _fake_scaled_values(payload: Tensor, *given: Any) -> Tensor:
    *_, dtype, length = given
    return payload.new_empty(payload.shape if length is None else (*payload.shape[:-1], length), dtype=dtype)


# -- statistics -------------------------------------------------------------------------------------------------------
def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return run.statistics(implementation(x.device, "statistics"), x)


def _fake_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    checks.check_dtype(x.dtype)
    sizes = (256, torch.int64), (2, torch.float64), (3, torch.int64)
    first, second, third = (x.new_empty(size, dtype=dtype) for size, dtype in sizes)
    return first, second, third


_CODES = "Tensor codes, str format, ScalarType dtype, bool packed, SymInt? length"
_PARTS = "Tensor payload, Tensor scale, Tensor? outer, Tensor? zero_point, str cast, ScalarType dtype, SymInt? length"
VERBS = {
    "quantize": Verb(f"({_CAST}) -> Tensor", _quantize, _like, _is_elementwise),
    "quantize_out": Verb(f"({_CAST}, Tensor(a!) out) -> ()", _quantize_out, _check_out),
    "quantize_part": Verb("(Tensor x, str cast, Tensor extremes) -> Tensor", _quantize_part, _like),
    "encode": Verb(f"({_PLAIN_CAST}, bool packed) -> Tensor", _encode, _fake_codes, _encodes_rows),
    "encode_scaled": Verb(
        f"({_CAST}, bool packed) -> (Tensor, Tensor, Tensor, Tensor)", _encode_scaled, _fake_scaled_codes
    ),
    "decode": Verb(f"({_CODES}) -> Tensor", _decode, _fake_values, lambda codes, *_: codes.ndim > 1),
    "decode_scaled": Verb(f"({_PARTS}) -> Tensor", _decode_scaled, _fake_scaled_values),
    "statistics": Verb("(Tensor x) -> (Tensor, Tensor, Tensor)", _statistics, _fake_statistics),
}
# the verbs on plain tensors, called as the operators are: DIRECT.encode(...) and torch.ops.lowp.encode(...)
DIRECT = SimpleNamespace(**{name: verb.run for name, verb in VERBS.items()})


def _of_batch(verb: Verb, call: Callable[..., Any], info: Any, dimensions: Any, arguments: Any) -> tuple[Any, Any]:
    """Return the results of a batch, and along which dimension its examples lie in them."""
    first, *others = arguments
    if all(one is None for one in dimensions[1:]) and verb.is_joint(*arguments):
        return call(first.movedim(dimensions[0], 0), *others), 0
    results = []
    for index in range(info.batch_size):
        pairs = zip(arguments, dimensions, strict=True)
        results.append(call(*(value if at is None else value.select(at, index) for value, at in pairs)))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def _register(name: str, verb: Verb) -> None:
    out = ("out",) if "(a!) out" in verb.schema else ()
    operator = torch.library.custom_op(f"lowp::{name}", verb.run, mutates_args=out, schema=verb.schema)
    operator.register_fake(verb.fake)
    if not out:
        operator.register_vmap(lambda info, at, *arguments: _of_batch(verb, operator, info, at, arguments))
    if name in ("quantize", "quantize_part"):
        others = verb.schema.count(",")
        operator.register_autograd(lambda context, gradient: (gradient, *[None] * others))


for _name, _verb in VERBS.items():
    _register(_name, _verb)


class StraightThrough(torch.autograd.Function):
    """A cast where torch only follows gradients: no operator is called, and no compiler loaded for one."""

    @staticmethod
    def forward(context: Any, *arguments: Any) -> Tensor:
        return _quantize(*arguments)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, None, None, None, None, None


class _Transformed(torch.autograd.Function):
    """The operator for torch.func, whose transforms do not see through an operator's own gradient."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        # within a transform `quantized` cannot tell a tensor of an ended one from its own; here no transform is left
        return torch.ops.lowp.quantize(*_unwrapped(*arguments))  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Save nothing: the gradient does not depend on the values."""

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return StraightThrough.backward(context, gradient)

    @staticmethod
    def jvp(context: Any, tangent: Tensor, *others: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, dimensions: Any, *arguments: Any) -> tuple[Any, Any]:
        return _of_batch(VERBS["quantize"], _Transformed.apply, info, dimensions, arguments)


def _unwrapped(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments of an operator, with what they wrap for tensors that outlived their transform."""
    return tuple([tracing.unwrapped(one) if isinstance(one, Tensor) else one for one in arguments])


# -- as operators -----------------------------------------------------------------------------------------------------
def arguments(
    x: Tensor, cast: str | Cast | Format | torch.dtype, scale: Any, seed: int | Tensor, offset: int
) -> tuple[Any, ...]:
    """Return what an operator takes behind x for a cast."""
    first, second = scale if isinstance(scale, tuple) else (scale, None)
    if isinstance(seed, Tensor):
        return text(cast), _tensor(first, x), _tensor(second, x), 0, seed, offset
    if not -_SIGN <= seed < _SIGN:
        seed = signed(seed)
    return text(cast), _tensor(first, x), _tensor(second, x), seed, None, offset


def _tensor(scale: Any, x: Tensor) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float64, device=home(x.device))


@constant_when_compiled
def text(cast: str | Cast | Format | torch.dtype) -> str:
    """Return the cast as an operator takes it."""
    return cast if isinstance(cast, str) else str(cast)


@constant_when_compiled
def as_cast(cast: str | Cast | Format | torch.dtype) -> Cast:
    """Return the cast, also where a compiler traces the call."""
    return checks.as_cast(cast)


@constant_when_compiled
def is_scaled(cast: str | Cast | Format | torch.dtype) -> bool:
    """Whether codes have scales."""
    return checks.as_cast(cast).scaling is not None


@constant_when_compiled
def parts(cast: str | Cast | Format | torch.dtype) -> tuple[bool, bool, bool]:
    """Return whether a format with scales has zero points, an outer scale, and elements of whole bytes."""
    format = scaled.scaled_format(checks.as_cast(cast))
    return format.affine, format.outer is not None, packing.fills_bytes(format.element)


def quantized(
    x: Tensor, cast: str | Cast | Format | torch.dtype, scale: Any, seed: int | Tensor, offset: int, out: Any
) -> Any:
    """`lowp.quantize` by an operator; the cast of a DTensor is one of its shards."""
    if tracing.is_sharded(x):
        own = as_cast(cast) if scale is None else None
        x = shards.placed(x, own)
        ends = None if own is None else shards.extremes(x, own)
        given = arguments(x, cast, scale, seed, offset)
        found = torch.ops.lowp.quantize(x, *given) if ends is None else torch.ops.lowp.quantize_part(x, given[0], ends)
        return found if out is None else out.copy_(found)
    given = _unwrapped(x, *arguments(x, cast, scale, seed, offset))
    if tracing.is_transformed():
        # every transform has a rule for copy_, and none for an operator that writes
        apply: Any = torch.ops.lowp.quantize if tracing.is_functionalized() else _Transformed.apply
        return apply(*given) if out is None else out.copy_(apply(*given))
    if out is None:
        return torch.ops.lowp.quantize(*given)
    torch.ops.lowp.quantize_out(*given, out)
    return out
