"""Casts that torch's own dtypes do, bit for bit as `reference` does: few, and only where that is proven.

fp32 to fp16 and bf16 in nearest-even, and the format of the carrier itself. Not here: e4m3fn (torch changed its
overflow between versions), fp64 to 16 bits (torch rounds twice, through fp32), fp64 to fp32 (flush-to-zero changes it).
"""

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding
from lowp.errors import Unavailable
from lowp.formats import FORMATS
from lowp.kernels.numbers.floats import narrow, sign_and_magnitude, with_sign
from lowp.kernels.numbers.philox import Seed

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def quantize(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> None:
    """Write the values that `cast` makes of `x` into `out`, which may be `x`; raise Unavailable for others."""
    through = native_dtype(cast)
    if through is None or (x.dtype, through) not in _EXACT:
        known = "fp16 and bf16 from torch.float32, and a dtype's own format, to nearest-even with overflow to infinity"
        raise Unavailable(f"native does not have {cast} from {x.dtype}, only {known}; bitwise and reference have it")
    if through == x.dtype:
        out.copy_(narrow(x, x.dtype))
        return
    negative, _ = sign_and_magnitude(x)
    _, magnitude = sign_and_magnitude(narrow(x.to(through).to(x.dtype), x.dtype))
    out.copy_(with_sign(magnitude, negative, x.dtype))  # torch forgets the sign of a NaN in bf16


_EXACT = {(dtype, dtype) for dtype in (torch.float32, torch.float64)} | {
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
}


def native_dtype(cast: Cast) -> torch.dtype | None:
    """Return the dtype whose conversion `Tensor.to` IS this cast (nearest-even, overflow to infinity), or None."""
    is_exact = cast.rounding is Rounding.NEAREST_EVEN and cast.overflow is Overflow.INFINITY
    return own_dtype(cast) if is_exact else None


def own_dtype(cast: Cast) -> torch.dtype | None:
    """Return the dtype that has a cast's format, whatever its rounding; None for formats that torch has not."""
    return next((dtype for name, dtype in DTYPES.items() if FORMATS[name] == cast.format), None)
