"""Preparation of the public functions' tensors for an implementation: layout, aliasing, shared scales.

Each function receives the implementation to run. Tensors are plain: no gradients, no modes. Shared scales are computed
in fp64, on the CPU for devices without fp64.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, IntFormat, ScaledFormat
from lowp.kernels import cpu, tracing, triton
from lowp.kernels.casts import cpu_groups
from lowp.kernels.choose.dispatch import implementation
from lowp.kernels.numbers import groups, packing, scaled
from lowp.kernels.numbers.floats import home, narrow, widen
from lowp.kernels.numbers.philox import Seed
from lowp.kernels.numbers.scaled import Scales
from lowp.quantized import Quantized

# the implementations with functions of whole formats with shared scales, and what has them
_OF_GROUPS: dict[ModuleType, Any] = {cpu: cpu_groups, triton: triton}


def quantize(module: ModuleType, x: Tensor, cast: Cast, scales: Scales | None, seed: Seed) -> Tensor:
    """Return `x` rounded by `cast`, with x's strides if x is dense."""
    x = _readable(x)
    if cast.scaling is not None:
        values = _quantize_scaled(module, x.to(home(x.device)), cast, scales, seed).to(x.device)
        return values if x.is_contiguous() else torch.empty_like(x).copy_(values)
    out = torch.empty_like(x)
    if x.is_contiguous() or module is not cpu:
        module.quantize(x, cast, seed, out)
    elif not cast.is_stochastic and x.stride() == out.stride() and is_dense(x.shape, x.stride()):
        # element-wise: the order does not matter, so that elements are taken in memory order
        module.quantize(x.as_strided((x.numel(),), (1,)), cast, seed, out.as_strided((x.numel(),), (1,)))
    else:
        contiguous = x.contiguous()
        module.quantize(contiguous, cast, seed, contiguous)
        out.copy_(contiguous)
    return out


def quantize_into(module: ModuleType, x: Tensor, cast: Cast, scales: Scales | None, seed: Seed, out: Tensor) -> None:
    """Write the values into `out`, which may be `x`, overlap it, or have other strides."""
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise InvalidInput("out is expanded: several of its elements share one number in memory; give out.contiguous()")
    cpu.begin(out)
    same = out is x or (out.data_ptr() == x.data_ptr() and out.stride() == x.stride())
    direct = x.is_contiguous() and out.is_contiguous() and not out.is_neg() and (same or not _overlap(x, out))
    if direct and cast.scaling is None:
        module.quantize(_readable(x), cast, seed, out)
    elif direct and module is cpu and scales is None and x.dtype.itemsize > 2:  # 16 bits may be refused
        if cpu_groups.quantize_groups(_readable(x), cast, seed, out) is None:
            out.copy_(quantize(module, x, cast, scales, seed))
    else:
        out.copy_(quantize(module, x, cast, scales, seed))


def encode(module: ModuleType, x: Tensor, cast: Cast, seed: Seed, packed: bool) -> Tensor:
    """Return the codes; raise ValueError for NaNs without a code."""
    fused = getattr(module, "encode_packed", None) if packed else None
    if fused is not None and (made := fused(_readable(x).contiguous(), cast, seed)) is not None:
        refuse_nans(made[1], x, cast.element)
        found: Tensor = made[0]
        return found
    codes = torch.empty(x.shape, dtype=packing.code_dtype(cast.element), device=x.device)
    refuse_nans(module.encode(_readable(x).contiguous(), cast, seed, codes), x, cast.element)
    return packing.pack(codes, cast.element) if packed else codes


def refuse_nans(nans: int, x: Tensor, element: FloatFormat | IntFormat) -> None:
    """Raise InvalidInput where a tensor has NaNs that its elements have no code for."""
    if nans:
        raise InvalidInput(
            f"{nans} of {x.numel()} numbers are NaN, which {element} has no code for: "
            "replace them first (torch.nan_to_num), or choose a format with NaN"
        )


def decode(module: ModuleType, codes: Tensor, format: FloatFormat | IntFormat, dtype: torch.dtype) -> Tensor:
    """Return the values of codes in `dtype`."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    module.decode(_readable(codes).contiguous(), format, out)
    return out


def decode_packed(
    module: ModuleType, packed: Tensor, format: FloatFormat | IntFormat, dtype: torch.dtype, length: int | None
) -> Tensor:
    """Return the values of codes packed in rows of bytes, `length` codes per row, in `dtype`."""
    fused = getattr(module, "decode_packed", None)
    if fused is not None and not packing.fills_bytes(format):
        count = packing.length_of(packed, format, length)
        out = torch.empty(*packed.shape[:-1], count, dtype=dtype, device=packed.device)
        if fused(_readable(packed).contiguous(), format, out):
            return out
    return decode(module, packing.unpack(packed, format, length), format, dtype)


def statistics(module: ModuleType, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three tensors of `Statistics`."""
    x = _readable(x)
    if not x.is_contiguous():
        # the order matters only to the last bit of the sum
        x = x.as_strided((x.numel(),), (1,)) if is_dense(x.shape, x.stride()) else x.contiguous()
    histogram, maximum, squares, zeros, nan, infinite = module.statistics(x)
    if isinstance(maximum, Tensor):
        return histogram, torch.stack((maximum, squares)), torch.stack((zeros, nan, infinite))
    extremes = torch.tensor((maximum, squares), dtype=torch.float64, device=x.device)
    return histogram.to(x.device), extremes, torch.tensor((zeros, nan, infinite), device=x.device)


def encode_scaled(
    module: ModuleType, x: Tensor, cast: Cast, scales: Scales | None, seed: Seed, packed: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return codes, scales, zero points and outer scale, as in `Quantized`. A 0-d tensor is not packed.

    Raises ValueError for NaNs that neither codes nor scales can represent.
    """
    packed = packed and x.ndim > 0
    device = x.device
    x, format = _readable(x).to(home(device)), scaled.scaled_format(cast)
    fused = _OF_GROUPS.get(module) if scales is None else None
    if fused is not None and (made := fused.encode_groups(x.contiguous(), cast, seed, packed)) is not None:
        payload, kept, outer, nans = made
        refuse_nans(nans, x, format.element)
        return payload, kept, None, outer
    is_given, scales = scales is not None, scaled.choose(x, cast) if scales is None else scales
    payload = _payload(module, x, cast, scales, seed, packed).to(device)
    if cast.is_corrected and not is_given:
        scales = scaled.corrected(x, cast, scales, scaled.elements(widen(x), cast, scales, module.quantize, seed), seed)
    zero_point = None if scales.zero_point is None else scales.zero_point.to(device, torch.int32)
    outer = None if scales.outer is None else narrow(scales.outer, torch.float32).to(device)
    return payload, scaled.stored_scales(scales.scale, format).to(device), zero_point, outer


def _payload(module: ModuleType, x: Tensor, cast: Cast, scales: Scales, seed: Seed, packed: bool) -> Tensor:
    """Return the codes of the elements; 0 in a group whose scale is NaN."""
    format, wide = scaled.scaled_format(cast), widen(x)
    by = scaled.divisor(scales, format)
    if module is cpu and format.other is None and scales.zero_point is None and bool((by.isfinite() & (by > 0)).all()):
        return encode(module, wide / groups.spread(by, x.shape, format.scope), cast.element_cast, seed, packed)
    element = scaled.elements(wide, cast, scales, module.quantize, seed)
    poisoned = groups.spread(scales.scale, x.shape, format.scope).isnan()
    element = torch.where(poisoned, 0.0, element)
    if format.other is None:
        return encode(module, element, Cast(format.element), 0, packed)
    is_other = scaled.takes_other(scales, x.shape, format)
    codes = encode(module, torch.where(is_other, 0.0, element), Cast(format.element), 0, False)
    whole = torch.where(is_other, element, 0.0).to(torch.int8).view(torch.uint8) & ((1 << format.bits) - 1)
    codes = torch.where(is_other, whole, codes)
    return packing.pack(codes, format.element) if packed else codes


def dequantize(module: ModuleType, q: Quantized) -> Tensor:
    """Return the values of a Quantized."""
    format = q.cast.format
    assert isinstance(format, ScaledFormat)
    if (there := home(q.device)) != q.device:
        return dequantize(module, q.to(there)).to(q.device)
    if module is cpu and (found := cpu_groups.decode_groups(q)) is not None:
        return found
    decoded = decode if q.length is None else partial(decode_packed, length=q.length)
    element = decoded(module, q.payload, format.element, torch.float64)
    zero_point = None if q.zero_point is None else q.zero_point.to(torch.float64)
    outer = None if q.outer is None else widen(q.outer)
    scales = Scales(scaled.read_scales(q.scale, format), zero_point, outer)
    if format.other is not None:
        codes = q.payload if q.length is None else packing.unpack(q.payload, format.element, q.length)
        sign = 1 << (format.bits - 1)
        whole = (codes.to(torch.int64) ^ sign) - sign
        element = torch.where(scaled.takes_other(scales, q.shape, format), whole.to(torch.float64), element)
    return scaled.values(element, q.cast, scales, q.dtype)


def _quantize_scaled(module: ModuleType, x: Tensor, cast: Cast, scales: Scales | None, seed: Seed) -> Tensor:
    x = x.contiguous()
    fused = _OF_GROUPS.get(module) if scales is None else None
    if fused is not None and (found := fused.quantize_groups(x, cast, seed)) is not None:
        return found  # type: ignore[no-any-return]
    if scales is None:
        scales = scaled.choose(x, cast)
        if cast.is_corrected:
            element = scaled.elements(widen(x), cast, scales, module.quantize, seed)
            return scaled.values(element, cast, scaled.corrected(x, cast, scales, element, seed), x.dtype)
    if module is cpu and x.numel() and scaled.scaled_format(cast).other is None:
        by = scaled.divisor(scales, scaled.scaled_format(cast)).expand(scales.scale.shape).contiguous()
        return cpu_groups.quantize_scaled(x, cast, by, seed, scales.zero_point)
    return scaled.values(scaled.elements(widen(x), cast, scales, module.quantize, seed), cast, scales, x.dtype)


def quantize_on_device(x: Tensor, cast: Cast, seed: Seed) -> Tensor | None:
    """Return x rounded under scales of its own, infinities and NaN as they are, by a kernel; None where none has it."""
    module = implementation(x.device)
    if module is not triton or cast.scaling is None or not (tracing.is_plain(x) and tracing.is_real(x)):
        return None
    values = triton.quantize_groups(_readable(x.detach()).contiguous(), cast, seed, keeps=True)
    return values if values is None or x.is_contiguous() else torch.empty_like(x).copy_(values)


def _readable(x: Tensor) -> Tensor:
    """Return the tensor with its numbers in memory: lazy negations resolved, and autograd's zero tensors filled."""
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    cpu.begin(x)
    return x.resolve_neg()


def _overlap(x: Tensor, out: Tensor) -> bool:
    """Whether two tensors may share memory, also with different storages (two views of one NumPy array)."""
    if x.device != out.device or not x.numel():
        return False
    (first, end), (other, other_end) = _addresses(x), _addresses(out)
    return first < other_end and other < end


def _addresses(x: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a nonempty tensor, and that after its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = x.data_ptr()
    return first, first + (reach + 1) * x.element_size()


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements of a tensor fill their memory without gaps or overlap."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
