"""Products of fp8 numbers under one scale per tensor, by torch's own product: for chips with fp8 (from sm_89)."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import private
from lowp.formats import FORMATS, ScaledFormat
from lowp.kernels import triton
from lowp.kernels.casts.run import encode_scaled
from lowp.kernels.choose.dispatch import capability, forced, implementation

_scaled_mm = cast(Callable[..., Tensor], private("torch._scaled_mm"))
_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7E}
_FIRST_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)
_MULTIPLE = 16  # torch's product takes rows and columns of so many bytes


class Fp8Matrix(NamedTuple):
    """A matrix of fp8 numbers and their common fp32 scale: value = number * scale."""

    numbers: Tensor
    scale: Tensor

    @property
    def values(self) -> Tensor:
        """The values in fp32, as the cast gives them."""
        return self.numbers.float() * self.scale


def is_eight_bits(to: Cast | None) -> bool:
    """Whether a cast is to e4m3fn or e5m2 under the fp32 scale of a tensor's own maximum, to nearest."""
    if to is None or not isinstance(to.format, ScaledFormat) or to.scaling is None or to.is_stochastic:
        return False
    format = to.format
    plain = format.scope.kind == "tensor" and format.scale == FORMATS["fp32"] and format.outer is None
    return plain and to.scaling.kind == "current" and any(format.element == FORMATS[name] for name in _DTYPES)


def multiplies_fp8(x: Tensor) -> bool:
    """Whether the device of x multiplies fp8 numbers, and no other implementation is forced."""
    return x.is_cuda and forced() is None and capability(x.device) >= _FIRST_CAPABILITY


def encoded(x: Tensor, to: Cast) -> Fp8Matrix:
    """Return x under a cast; infinities and NaN become NaN."""
    module, x = implementation(x.device, "encode"), x.detach()
    dtype = next(dtype for name, dtype in _DTYPES.items() if to.element == FORMATS[name])
    if module is triton and (found := triton.encode_groups(x.contiguous(), to, 0, False, spoils=True)) is not None:
        return Fp8Matrix(found[0].view(dtype), found[1])
    payload, scale, *_ = encode_scaled(module, x, to, None, 0, False)
    codes = torch.where(x.isfinite(), payload, _NAN[dtype])
    return Fp8Matrix(codes.view(dtype), scale)


def multiplied(left: Fp8Matrix, right: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Return left [m, k] times the transpose of right [n, k], plus bias [n], in fp32: summed in fp32, then scaled."""
    rows, columns = (_filled(one.numbers) for one in (left, right))
    result = _scaled_mm(
        rows, columns.t(), scale_a=left.scale, scale_b=right.scale, out_dtype=torch.float32, use_fast_accum=False
    )
    result = result[: left.numbers.shape[0], : right.numbers.shape[0]]
    return result if bias is None else result + bias


def _filled(matrix: Tensor) -> Tensor:
    """Return a contiguous matrix whose sides are filled up with zeros to what torch's product takes."""
    missing = [-size % _MULTIPLE for size in matrix.shape]
    if not any(missing):
        return matrix.contiguous()
    codes: Any = torch.nn.functional.pad(matrix.view(torch.uint8), (0, missing[1], 0, missing[0]))
    return cast(Tensor, codes.view(matrix.dtype))
