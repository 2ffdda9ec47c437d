"""The public functions: what is given is checked, and a verb of `verbs` is called.

Ordinary calls run it directly; calls that torch must see (torch.compile, torch.func, fake tensors, subclasses) by its
operator.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow
from lowp.compat import constant_when_compiled, remembered_by_identity
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, Format, ScaledFormat
from lowp.formats.checks import whole_number
from lowp.kernels import cpu, tracing
from lowp.kernels.casts import arrays, checks, cpu_groups, run, shards, verbs
from lowp.kernels.casts.verbs import DIRECT
from lowp.kernels.choose.dispatch import implementation, uses_library
from lowp.kernels.numbers import packing, scaled
from lowp.kernels.numbers.floats import CARRIERS
from lowp.kernels.numbers.statistics import Statistics
from lowp.kernels.tracing import is_compiling, is_eager
from lowp.quantized import Quantized

_PLAIN = (Tensor, torch.nn.Parameter)


def quantize(
    x: Any,
    cast: str | Cast | Format | torch.dtype,
    *,
    scale: Any = None,
    seed: int | Tensor = 0,
    offset: int = 0,
    out: Any = None,
) -> Any:
    """Round `x` to the values of a format, in the dtype of x; a format without a rounding means nearest even.

    x: torch tensor or NumPy array of float64, float32, float16 or bfloat16, of any shape and strides. `scale` is for
    formats with a shared scale whose scale is not current: one number a group, (scale, zero_point) if affine. `seed`
    (an int, or a 0-d int64 tensor) decides stochastic rounding, together with the logical (row-major) index of
    the element. If x is a piece of a larger tensor, `offset` is the index of its first element there: pieces along the
    first dimension then have the bits of the whole. The result is written to `out`, which is returned; ``out=x`` is in
    place.

    NaN stays NaN, with its sign; a zero keeps its sign if the format has -0. Gradients pass through unchanged.
    Raises ValueError for an unknown cast, an `out` of another shape, dtype or device, and for a dtype that cannot hold
    every result (float16 for bf16); TypeError if x is not a floating-point tensor.
    """
    if is_compiling():
        return verbs.quantized(x, cast, scale, seed, offset, out)
    if not isinstance(x, Tensor):
        return _with_arrays(quantize, x, cast, scale=scale, seed=seed, offset=offset, out=out)
    plan = checks.plan(cast, x.dtype)
    # the shortest way for the most frequent calls: microseconds count here
    if _goes_straight(x, scale, seed, offset):
        if out is None and plan.scaling is not None:
            return run.quantize(cpu, x, plan, None, seed)
        if out is None:
            out = torch.empty_like(x)
            cpu.quantize(x, plan, seed, out)
            return out
        if _takes(out, x):
            if plan.scaling is None:
                cpu.quantize(x, plan, seed, out)
            else:
                run.quantize_into(cpu, x, plan, None, seed, out)
            return _changed(out)
    seed, offset = checks.draw(x, seed, offset)
    if out is not None and not tracing.is_jit_tracing():
        checks.check_out(x, out)
    if not (is_eager(x) and (out is None or tracing.is_real(out))):
        return verbs.quantized(x, plan, scale, seed, offset, out)
    if out is None:
        apply = verbs.StraightThrough.apply if tracing.is_differentiated(x) else DIRECT.quantize
        return apply(x, plan, scale, None, seed, None, offset)
    DIRECT.quantize_out(x, plan, scale, None, seed, None, offset, out)
    return _changed(out)


def _changed(out: Tensor) -> Tensor:
    """Tell autograd that a tensor was written, and return it."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def quantize_operand(
    x: Tensor, cast: Cast, seed: int | Tensor, is_traced: bool, dtype: torch.dtype | None = None, axis: int = -1
) -> Tensor:
    """Return what `quantize` makes of x, but x itself where that is infinite or NaN: an operand of a training step.

    On a CPU the same pass, or one sum, tells whether there is any; an accelerator is not waited for, nor what torch
    traces. `dtype`: of the result, one that holds every value of the format; by default fp32, or x's fp64. `axis`: that
    along which groups with a shared scale run, -1 without any.
    """
    if not is_traced and type(seed) is int and x.dtype is torch.float32 and _goes_straight(x):
        if cast.scaling is None:
            out = torch.empty_like(x, dtype=dtype)
            cpu.quantize(x, cast, seed, out, True)
            return out
        if cpu_groups.is_one_pass(cast) and cpu_groups.quantize_finite(x, cast, seed, out := torch.empty_like(x), axis):
            return out if dtype is None else out.to(dtype)
    return _operand(x, cast, seed, is_traced, dtype, axis)


def _operand(
    x: Tensor, cast: Cast, seed: int | Tensor, is_traced: bool, dtype: torch.dtype | None, axis: int
) -> Tensor:
    """Do what `quantize_operand` does where the C++ library does not do it in one pass."""
    if axis != -1:
        moved = quantize_operand(x.movedim(axis, -1).contiguous(), cast, seed, is_traced, dtype).movedim(-1, axis)
        # in x's strides, by which torch chooses its kernels (torch.compile cannot follow a test of them in a Function)
        return torch.empty_like(x, dtype=moved.dtype).copy_(moved)
    kept = None if is_traced else run.quantize_on_device(x, cast, seed)
    if kept is not None:
        return kept if dtype is None else kept.to(dtype)
    rounded: Tensor = quantize(x, cast, seed=seed)
    rounded = rounded if dtype is None else rounded.to(dtype)
    if keeps_infinities(cast):
        return rounded
    # a sum that overflows means a second look, no more
    if not is_traced and type(x) in _PLAIN and x.is_cpu and not x.is_meta and math.isfinite(float(x.detach().sum())):
        return rounded
    return torch.where(x.isfinite(), rounded, x if dtype is None else x.to(dtype))


def quantize_measured(x: Tensor, cast: Cast, scale: Tensor, seed: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 x rounded under one scale for all of it, infinities and NaN as they are, and its largest magnitude.

    The latter is fp32 and 0-d, and infinite or NaN if x is not finite. On a CPU in one pass; no device is waited for.
    """
    if type(seed) is int and _goes_straight(x) and x.numel():
        largest, is_finite = cpu_groups.quantize_measured(x, cast, float(scale), seed, out := torch.empty_like(x))
        if is_finite:
            return out, torch.tensor(largest, device="cpu")
        return torch.where(x.isfinite(), out, x), torch.tensor(math.inf, device="cpu")
    rounded = quantize(x, cast, scale=scale, seed=seed)
    return torch.where(x.isfinite(), rounded, x), x.abs().amax() if x.numel() else x.new_zeros(())


def remember_maxima(rows: Tensor, state: Sequence[Tensor], cast: Cast) -> bool:
    """Observe the maxima of a step in place and choose the next scales, as `DelayedTable` has them, in one call.

    False, with nothing done, but on a CPU with the C++ library and for scales in fp32.
    """
    format, scaling = cast.format, cast.scaling
    is_plain = isinstance(format, ScaledFormat) and format.scale == scaled.FP32 and format.outer is None
    if not is_plain or scaling is None or not (rows.is_cpu and uses_library() and is_eager(rows)):
        return False
    history, known, largest, *counts = state
    factor, highest = 2.0**scaling.headroom, scaled.aim(cast)
    given = len(rows), history, history.shape[1], known, largest, *counts, factor, highest
    cpu.loaded().lowp_remember_maxima(rows, *given)
    return True


@constant_when_compiled
@remembered_by_identity
def keeps_infinities(cast: Cast) -> bool:
    """Whether infinities and NaN are themselves under the cast."""
    return isinstance(cast.format, FloatFormat) and cast.format.has_infinity and cast.overflow is not Overflow.SATURATE


def encode(
    x: Any,
    cast: str | Cast | Format | torch.dtype,
    *,
    scale: Any = None,
    seed: int | Tensor = 0,
    offset: int = 0,
    packed: bool = False,
) -> Any:
    """Round `x` and return the codes of the values; for formats with a shared scale a `Quantized`.

    Codes of float formats have the smallest unsigned dtype (uint8, uint16, uint32, uint64), those of integers are two's
    complement (int8, int16, int32). `packed` stores codes of less than 8 bits without gaps along the last dimension,
    the first in the lowest bits, with each row padded to whole bytes: `decode` needs a row's length to unpack them.
    `scale`, `seed` and `offset` are those of `quantize`.

    Raises ValueError for NaNs that the format has no code for, and says how many there are.
    """
    is_direct = False
    if not is_compiling():
        if not isinstance(x, Tensor):
            return _with_arrays(encode, x, cast, scale=scale, seed=seed, offset=offset, packed=packed)
        cast = checks.as_cast(cast)
        checks.check_dtype(x.dtype)
        checks.check_packed(packed)
        if cast.scaling is None and not packed and _goes_straight(x, scale, seed, offset):  # as in quantize
            codes = torch.empty_like(x, dtype=packing.code_dtype(cast.element))
            if nans := cpu.encode(x, cast, seed, codes):
                run.refuse_nans(nans, x, cast.element)
            return codes
        seed, offset = checks.draw(x, seed, offset)
        is_direct = is_eager(x)
    call: Any = DIRECT if is_direct else torch.ops.lowp
    if is_direct:
        given: tuple[Any, ...] = (cast, scale, None, seed, None, offset)
    else:
        x = shards.whole(x)
        given = verbs.arguments(x, cast, scale, seed, offset)
    if not verbs.is_scaled(cast):
        checks.scales(scale, verbs.as_cast(cast), x)  # refuses any
        return call.encode(x.detach(), given[0], *given[3:], packed)
    zero_point: Tensor | None
    outer: Tensor | None
    is_affine, has_outer, is_whole = verbs.parts(cast)
    if is_direct:
        payload, kept, zero_point, outer = verbs.encode_scaled(x.detach(), *given, packed)
    else:
        payload, kept, zero_point, outer = call.encode_scaled(x.detach(), *given, packed)
        outer, zero_point = outer if has_outer else None, zero_point if is_affine else None
    length = x.shape[-1] if packed and x.ndim and not is_whole else None
    return Quantized(payload, kept, verbs.as_cast(cast), outer, zero_point, x.dtype, length)


def decode(
    codes: Any,
    format: str | Format | Cast | torch.dtype,
    *,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    length: int | None = None,
) -> Any:
    """Return the values of codes, exactly, in `dtype`. `packed` codes hold `length` to a row (default: all that fit).

    Raises ValueError if `dtype` cannot hold every value of the format, or if the dtype of the codes is not that of
    `encode`.
    """
    if not is_compiling():
        if not isinstance(codes, Tensor):
            return _with_arrays(decode, codes, format, dtype=dtype, packed=packed, length=length)
        checks.check_packed(packed)
        if length is not None and not packed:
            raise InvalidInput("length is the length of a packed row: give packed=True, or omit it")
        if length is not None:
            length = whole_number("length, how many codes a row holds", length)
        if dtype not in CARRIERS:
            raise TypeError(f"decode gives tensors of {checks.carriers()}, not of {dtype}")
        element = checks.element(format)
        expected = packing.code_dtype(element)
        if codes.dtype != expected and not (packed and codes.dtype == torch.uint8):
            raise InvalidInput(f"codes of {element} are {expected}, as lowp.encode gives them, not {codes.dtype}")
        if not checks.holds_format(element, dtype):
            raise InvalidInput(f"{element}: {dtype} cannot hold every value: decode to torch.float32 or torch.float64")
        if is_eager(codes):
            return DIRECT.decode(codes, format, dtype, packed, length)
    codes = tracing.unwrapped(shards.whole(codes))
    return torch.ops.lowp.decode(codes, verbs.text(format), dtype, packed, length)


def dequantize(q: Quantized) -> Tensor:
    """Return the values of a `Quantized` from `lowp.encode`, in the dtype of the encoded tensor."""
    if not isinstance(q, Quantized):
        raise TypeError(f"dequantize takes a Quantized, not {type(q).__name__}: plain codes go to lowp.decode")
    if not is_compiling() and is_eager(q.payload):
        return run.dequantize(implementation(q.device, "decode"), q.detach())
    tensors = [None if one is None else one.detach() for one in (q.payload, q.scale, q.outer, q.zero_point)]
    return torch.ops.lowp.decode_scaled(*tensors, q.cast.text, q.dtype, q.length)  # type: ignore[no-any-return]


def statistics(x: Any) -> Statistics:
    """Return exponent histogram, maximum, sum of squares, zeros, NaNs and infinities of a tensor or NumPy array.

    Takes the dtypes, shapes and strides that `quantize` takes, in one pass over the data.
    """
    if not is_compiling():
        if not isinstance(x, Tensor):
            return _with_arrays(statistics, x)  # type: ignore[no-any-return]
        checks.check_dtype(x.dtype)
        checks.check_seed(x, 0)
        if is_eager(x):
            return _counted(x, DIRECT.statistics(x.detach()))
    return _counted(x, torch.ops.lowp.statistics(shards.whole(x).detach()))


def _counted(x: Tensor, found: tuple[Tensor, Tensor, Tensor]) -> Statistics:
    return Statistics(*found, x.numel())


def _goes_straight(x: Tensor, scale: Any = None, seed: Any = 0, offset: Any = 0) -> bool:
    """Whether the C++ library can read the tensor in place, torch need not see the call, and nothing is unusual."""
    if scale is not None or type(seed) is not int or type(offset) is not int or offset or type(x) not in _PLAIN:
        return False
    if not (x.is_cpu and uses_library() and tracing.is_plain(x)):
        return False
    try:
        return x.layout is torch.strided and not x.is_nested and x.is_contiguous() and x.data_ptr() != 0
    except RuntimeError:  # what outlived its torch.func transform: a wrapper without storage, which torch opens
        return False


def _takes(out: Any, x: Tensor) -> bool:
    """Whether the C++ library can write into `out`, where x `_goes_straight`: it is x, or lies in other memory."""
    if out is x:
        return True
    if not isinstance(out, Tensor) or out.dtype is not x.dtype or out.shape != x.shape:
        return False
    return _goes_straight(out) and abs(out.data_ptr() - x.data_ptr()) >= x.nbytes


def _with_arrays(function: Any, x: Any, *arguments: Any, **named: Any) -> Any:
    """Call a function that takes tensors with what NumPy arrays hold, and return arrays."""
    if not arrays.is_array(x):
        raise TypeError(
            f"lowp takes torch tensors and NumPy arrays, not {type(x).__name__}: torch.tensor(...) or numpy.array(...) "
            "makes one of numbers"
        )
    array = arrays.to_array(x)
    out = named.get("out")
    if out is not None:
        if not arrays.is_array(out):
            raise TypeError(f"out must be an array if x is one, not {type(out).__name__}")
        named["out"] = arrays.to_tensor(out, writing=True)
    if arrays.is_array(named.get("scale")):
        named["scale"] = arrays.to_tensor(arrays.to_array(named["scale"]))
    dtype = named.get("dtype", array.dtype)
    if "dtype" in named:
        named["dtype"] = arrays.to_dtype(dtype)
    result = function(arrays.to_tensor(array), *arguments, **named)
    if out is not None:
        return out
    return arrays.to_numpy(result, dtype) if isinstance(result, Tensor) else result
