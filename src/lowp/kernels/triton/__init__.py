"""Triton kernels for GPUs, with the same bits as every other implementation; on a CPU they run in Triton's interpreter.

triton is imported when a kernel is first used.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.numbers.philox import Draw, Seed

__all__ = [
    "DEVICES",
    "decode",
    "decode_packed",
    "encode",
    "encode_groups",
    "encode_packed",
    "is_installed",
    "quantize",
    "quantize_groups",
    "signs",
    "statistics",
]

DEVICES = ("cuda",)  # also the device type of ROCm's GPUs


@functools.cache
def is_installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def quantize(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> None:
    """Write the values that `cast` makes of `x` into `out`, which may be `x`; see `lowp.quantize`."""
    from lowp.kernels.triton import calls

    calls.quantize(x, cast, seed, out)


def encode(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> int:
    """Write the codes of the values into `out`; return the number of NaNs without a code, whose codes are any."""
    from lowp.kernels.triton import calls

    return calls.encode(x, cast, seed, out)


def decode(codes: Tensor, format: FloatFormat | IntFormat, out: Tensor) -> None:
    """Write the value of every code into `out`, exactly."""
    from lowp.kernels.triton import calls

    calls.decode(codes, format, out)


def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the exponent histogram, maximum, sum of squares, zeros, NaNs and infinities; see `lowp.statistics`."""
    from lowp.kernels.triton import calls

    return calls.statistics(x)


def signs(size: int, seed: Tensor | int, device: torch.device) -> Tensor:
    """Return the signs of a Hadamard transform of `size` numbers, a power of two from 4 on."""
    from lowp.kernels.triton import calls

    return calls.signs(size, seed, device)


def quantize_groups(x: Tensor, cast: Cast, seed: Seed, keeps: bool = False) -> Tensor | None:
    """Return the values of a cast with scales computed in the same launch; None if no kernel supports it.

    With `keeps` infinities and NaNs of x stay as they are.
    """
    from lowp.kernels.triton import scaled

    return scaled.quantize_groups(x, cast, seed, keeps)


def encode_groups(
    x: Tensor, cast: Cast, seed: Seed, packed: bool, spoils: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, int] | None:
    """Return codes, stored scales, the outer scale, and the number of NaNs without a code; None if unsupported.

    `packed`: codes packed as by `packing.pack`. `spoils`: an infinity has the code of NaN.
    """
    from lowp.kernels.triton import scaled

    return scaled.encode_groups(x, cast, seed, packed, spoils)


def encode_packed(x: Tensor, cast: Cast, seed: Seed) -> tuple[Tensor, int] | None:
    """Return codes of 4 bits packed as by `packing.pack`, and the number of NaNs without a code.

    None if the codes have other widths or a row does not fill whole bytes.
    """
    if not _fills_bytes(cast.element, x.shape) or (isinstance(seed, Draw) and seed.first % 2):
        return None
    from lowp.kernels.triton import calls

    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8, device=x.device)
    return out, calls.encode(x, cast, seed, out, packed=True)


def decode_packed(packed: Tensor, format: FloatFormat | IntFormat, out: Tensor) -> bool:
    """Write the values of packed codes into `out`; return False if a row does not fill whole bytes."""
    if not _fills_bytes(format, out.shape) or packed.shape != (*out.shape[:-1], out.shape[-1] // 2):
        return False
    from lowp.kernels.triton import calls

    calls.decode(packed, format, out, packed=True)
    return True


def _fills_bytes(format: FloatFormat | IntFormat, shape: torch.Size) -> bool:
    """Whether codes have 4 bits and rows fill whole bytes."""
    return format.bits == 4 and len(shape) > 0 and shape[-1] % 2 == 0
