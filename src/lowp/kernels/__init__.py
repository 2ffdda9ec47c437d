"""Rounding, packing and looking at tensors: the public functions, and the one place that chooses an implementation.

`reference` is the definition (fp64, eager). `bitwise` is integer arithmetic in torch (any device, compiles). `native`
uses torch's dtypes for the few casts where they are exact. `cpu` is the C++ library. All give the same bits; see
kernels/README.md. Ordinary calls go straight to the implementation; calls that torch must see (torch.compile,
torch.func, fake tensors, subclasses) go through the operators of `custom_ops`, which come back here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowp import formats
from lowp.casts import Cast, parse
from lowp.compat import private
from lowp.errors import InvalidInput, Unavailable, UnknownName, unknown
from lowp.formats import Format, ScaledFormat
from lowp.kernels import arrays, bitwise, cpu, limits, native, packing, reference, run, scaled, straight_through
from lowp.kernels.floats import CARRIERS
from lowp.kernels.statistics import Statistics
from lowp.quantized import Quantized

__all__ = ["Statistics", "available", "decode", "dequantize", "encode", "quantize", "statistics", "use"]

IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference, "bitwise": bitwise, "native": native, "cpu": cpu}

_forced: ContextVar[str | None] = ContextVar("lowp.kernels.use", default=None)

_is_compiling = torch.compiler.is_compiling
_dispatch_modes: Any = private("torch._C._len_torch_dispatch_stack")
_transform: Any = private("torch._C._functorch.peek_interpreter_stack")
private("torch.autograd.forward_ad._current_level")  # read at every call, below; its absence is said here


# -- which implementation ---------------------------------------------------------------------------------------------
def available() -> tuple[str, ...]:
    """Return the names that `use` takes on this machine."""
    return tuple(name for name in IMPLEMENTATIONS if name != "cpu" or cpu.library() is not None)


def use(name: str) -> AbstractContextManager[None]:
    """Return a context in which every kernel is the named implementation: reference, bitwise, native or cpu.

    It holds for this thread (or asyncio task) and leaves what it found. Raises ValueError for an unknown name and
    Unavailable for one that this machine lacks; inside, a call that the implementation cannot do raises Unavailable.
    """
    if name not in IMPLEMENTATIONS:
        raise UnknownName(unknown("implementation", name, IMPLEMENTATIONS))
    if name not in available():
        raise Unavailable(f"the {name} kernels are not on this machine; {', '.join(available())} give the same bits")
    return _use(name)


@contextmanager
def _use(name: str) -> Iterator[None]:
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """Return the name that `use` holds here; None outside of it."""
    return _forced.get()


def implementation(device: torch.device, function: str = "quantize") -> ModuleType:
    """Return the module that does `function` for tensors on this device."""
    name = _forced.get()
    if name is None:
        return cpu if device.type == "cpu" and cpu.library() is not None else bitwise
    module = IMPLEMENTATIONS[name]
    if name == "cpu" and device.type != "cpu":
        raise Unavailable(f"the cpu kernels take tensors on the CPU, not on {device}: bitwise and reference take these")
    if not hasattr(module, function):
        having = [other for other in available() if hasattr(IMPLEMENTATIONS[other], function)]
        raise Unavailable(f"{name} has no {function}; {', '.join(having)} have it")
    return module


# -- the public functions ---------------------------------------------------------------------------------------------
def quantize(x: Any, cast: str | Cast | Format, *, scale: Any = None, seed: int | Tensor = 0, out: Any = None) -> Any:
    """Return the values that a cast makes of `x`, in x's own dtype; a format alone rounds to nearest even.

    x: torch tensor or NumPy array of float64, float32, float16 or bfloat16, of any shape and strides. `scale` is for
    formats with a shared scale whose scale is not current: one number a group, (scale, zero_point) if affine. `seed`
    (an int, or a 0-d int64 tensor) decides stochastic rounding, together with the logical index of the element.
    `out` takes the result and is returned; ``out=x`` is in place.

    NaN stays NaN, with its sign; the sign of a zero stays where the format has -0. Gradients pass through unchanged.
    Raises ValueError for an unknown cast, an `out` of another shape, dtype or device, and for a dtype that cannot hold
    every result (float16 for bf16); TypeError for what is no floating-point tensor.
    """
    if _is_compiling():
        return custom_ops.quantize(x, cast, scale, seed, out)
    # the shortest way for the most frequent call: microseconds count here
    if out is None and scale is None and type(seed) is int and type(x) is Tensor and x.is_cpu and _is_plain(x):
        plan = _plan(cast, x.dtype)
        if plan.scaling is None and _forced.get() is None and cpu.library() is not None and _is_contiguous(x):
            out = torch.empty_like(x)
            cpu.quantize(x, plan, seed, out)
            return out
    if not isinstance(x, Tensor):
        return _with_arrays(quantize, x, cast, scale=scale, seed=seed, out=out)
    plan = _plan(cast, x.dtype)
    seed = _check(x, seed)
    if out is None:
        if not _is_eager(x):
            return custom_ops.quantize(x, plan, scale, seed)
        kernel = straight_through.quantize if _is_differentiated(x) else run.quantize
        return kernel(implementation(x.device), x, plan, _scales(scale, plan, x), seed)
    _check_out(x, out)
    if not (_is_ours(x) and _is_ours(out)):
        return custom_ops.quantize(x, plan, scale, seed, out)
    run.quantize_into(implementation(x.device), x, plan, _scales(scale, plan, x), seed, out)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def encode(
    x: Any, cast: str | Cast | Format, *, scale: Any = None, seed: int | Tensor = 0, packed: bool = False
) -> Any:
    """Return the codes of the values that a cast makes of `x`; a `Quantized` for formats with a shared scale.

    Codes of float formats have the smallest unsigned dtype (uint8, uint16, uint32, uint64), those of integers are two's
    complement (int8, int16, int32). `packed` puts codes that fill no whole bytes side by side along the last dimension,
    the first in the lowest bits, each row filled up to a byte: `decode` with the row's length takes them apart.

    Raises ValueError for NaNs that the format has no code for, and says how many there are.
    """
    if not _is_compiling():
        if not isinstance(x, Tensor):
            return _with_arrays(encode, x, cast, scale=scale, seed=seed, packed=packed)
        cast = _cast(cast)
        if x.dtype not in CARRIERS:
            raise TypeError(_not_floating(x.dtype))
        seed = _check(x, seed)
        if cast.scaling is not None:
            return run.encode_scaled(
                implementation(x.device, "encode"), x.detach(), cast, _scales(scale, cast, x), seed, packed
            )
        _scales(scale, cast, x)
        if _is_eager(x):
            return run.encode(implementation(x.device, "encode"), x.detach(), cast, seed, packed)
    return custom_ops.encode(x, cast, seed, packed)


def decode(
    codes: Any,
    format: str | Format | Cast,
    *,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    length: int | None = None,
) -> Any:
    """Return the values of codes, exactly, in `dtype`. `packed` codes hold `length` to a row (default: all that fit).

    Raises ValueError if `dtype` cannot hold every value of the format, or for codes of another dtype than encode gives.
    """
    if not _is_compiling():
        if not isinstance(codes, Tensor):
            return _with_arrays(decode, codes, format, dtype=dtype, packed=packed, length=length)
        if length is not None and not packed:
            raise InvalidInput("length is that of a packed row: give packed=True, or leave it out")
        if dtype not in CARRIERS:
            raise TypeError(f"decode gives tensors of {_carriers()}, not of {dtype}")
        element = _element(format)
        if not packed and codes.dtype != scaled.code_dtype(element):
            expected = scaled.code_dtype(element)
            raise InvalidInput(f"codes of {element} are {expected}, as lowp.encode gives them, not {codes.dtype}")
        if not limits.holds_format(element, dtype):
            raise InvalidInput(f"{element}: {dtype} cannot hold every value: decode to torch.float32 or torch.float64")
        if _is_eager(codes):
            if packed:
                codes = packing.unpack(codes, element, length)
            return run.decode(implementation(codes.device, "decode"), codes, element, dtype)
    return custom_ops.decode(codes, format, dtype, packed, length)


def dequantize(q: Quantized) -> Tensor:
    """Return the values of what `lowp.encode` made under a format with a shared scale, in the dtype that it had."""
    if not isinstance(q, Quantized):
        raise TypeError(f"dequantize takes a Quantized, not {type(q).__name__}: plain codes go to lowp.decode")
    return run.dequantize(implementation(q.device, "decode"), q.detach())


def statistics(x: Any) -> Statistics:
    """Return exponent histogram, maximum, sum of squares, zeros, NaNs and infinities of a tensor or NumPy array.

    Takes the dtypes, shapes and strides that `quantize` takes, in one pass over the data.
    """
    if not _is_compiling():
        if not isinstance(x, Tensor):
            return _with_arrays(statistics, x)  # type: ignore[no-any-return]
        if x.dtype not in CARRIERS:
            raise TypeError(_not_floating(x.dtype))
        _check(x, 0)
        if _is_ours(x):
            return Statistics(*run.statistics(implementation(x.device, "statistics"), x), x.numel())
    return Statistics(*custom_ops.statistics(x), x.numel())


# -- what they check --------------------------------------------------------------------------------------------------
def _is_plain(x: Tensor) -> bool:
    """Whether torch has no business with this call: no gradient, no mode, no transform, no lazy negation."""
    return not _is_differentiated(x) and _is_quiet() and not x.is_neg()


def _is_differentiated(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _is_quiet() -> bool:
    """Whether no mode and no transform wants to see the call."""
    return _dispatch_modes() == 0 and _transform() is None and forward_ad._current_level < 0


def _is_contiguous(x: Tensor) -> bool:
    return x.layout is torch.strided and x.is_contiguous()  # other layouts raise at the question


def _is_transformed() -> bool:
    return not _is_compiling() and (_transform() is not None or forward_ad._current_level >= 0)


def _is_eager(x: Tensor) -> bool:
    """Whether the kernels may run on the tensor at once: it is an ordinary one, and nobody else wants to see it."""
    return type(x) in (Tensor, torch.nn.Parameter) and _is_quiet() and not x.is_meta


def _is_ours(x: Tensor) -> bool:
    return _is_eager(x) and not _is_differentiated(x)


@functools.lru_cache(maxsize=1024)
def _parse(cast: str | Cast | Format) -> Cast:
    return parse(cast)


def _cast(cast: str | Cast | Format) -> Cast:
    return cast if isinstance(cast, Cast) else _parse(cast) if isinstance(cast, str) else parse(cast)


@functools.lru_cache(maxsize=1024)
def _plan(cast: str | Cast | Format, dtype: torch.dtype) -> Cast:
    """Return the cast, parsed, after the checks that depend on the dtype alone."""
    parsed = _cast(cast)
    if dtype not in CARRIERS:
        raise TypeError(_not_floating(dtype))
    if not limits.holds(parsed, dtype):
        raise InvalidInput(scaled.cannot_hold(parsed, dtype))
    return parsed


def _carriers() -> str:
    return ", ".join(str(carrier).removeprefix("torch.") for carrier in CARRIERS)


def _not_floating(dtype: torch.dtype) -> str:
    return f"lowp rounds tensors of {_carriers()}, not {dtype}: convert first, for example with x.float()"


def _check(x: Tensor, seed: int | Tensor) -> int | Tensor:
    """Return the seed, an integer of NumPy as one of Python; refuse other seeds, and tensors without strides."""
    if x.layout is not torch.strided:
        raise TypeError(f"lowp takes strided tensors, not {x.layout}: give x.to_dense(), or its values")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.ndim != 0:
            raise TypeError(f"a seed is an int or a 0-d int64 tensor, not {seed.ndim}-d {seed.dtype}")
        return seed
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"a seed is an int or a 0-d int64 tensor, not {type(seed).__name__}")
    return seed.__index__()


def _scales(scale: Any, cast: Cast, x: Tensor) -> scaled.Scales | None:
    if scale is None:
        return None
    if cast.scaling is None:
        raise InvalidInput(
            f"{cast} has no shared scale, so scale= means nothing: name one, such as {cast.format.spelling}@fp32/tensor"
        )
    return scaled.given(scale, cast, x)


def _check_out(x: Tensor, out: Any) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"out is a tensor where x is one, not {type(out).__name__}")
    for name in ("shape", "dtype", "device"):
        wanted, found = getattr(x, name), getattr(out, name)
        if wanted != found:
            wanted, found = (tuple(v) if name == "shape" else v for v in (wanted, found))
            raise InvalidInput(f"out has {name} {found} and x {wanted}: give an out of x's shape, dtype and device")
    if torch.is_grad_enabled() and (out.requires_grad or x.requires_grad):
        if out.requires_grad and out.is_leaf:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: "
                "quantize it under torch.no_grad(), or without out="
            )
        raise RuntimeError(
            "quantize with out= has no gradient, but one of its tensors requires grad: "
            "leave out= away (the gradient then passes straight through), or call it under torch.no_grad()"
        )


def _element(format: str | Format | Cast) -> Any:
    found = format.format if isinstance(format, Cast) else formats.parse(format)
    if isinstance(found, ScaledFormat):
        raise InvalidInput(f"{found} needs its scales: give what lowp.encode returned to lowp.dequantize")
    return found


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
            raise TypeError(f"out is an array where x is one, not {type(out).__name__}")
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


from lowp.kernels import custom_ops  # noqa: E402  (it calls back into this module)
