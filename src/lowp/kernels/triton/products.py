"""Exact and chained products of int16 matrices, split along the depth so that sums of digits fit int32."""

import torch
from torch import Tensor

from lowp.kernels.int16.integer_reference import times, to_int16, to_odd
from lowp.kernels.triton.device import products
from lowp.kernels.triton.launch import run

DEPTH = 1 << 15  # depth of one launch; beyond it a sum of products of digits may overflow int32
TILE = (128, 64, 64, 8)  # rows, columns, depth and warps per program
CHAINED_TILE = (64, 32, 64, 8)  # a chained product has sums in fp32 besides the exact ones
_KINDS = {torch.int64: "int64", torch.float64: "fp64", torch.float32: "fp32", torch.int16: "int16"}


def matmul(
    left: Tensor, right: Tensor, scale: Tensor, dtype: torch.dtype, chained: bool, lowest: int
) -> tuple[Tensor, Tensor]:
    """Return [batch, m, k] @ [batch, k, n] times `scale`, and counts, on the device without synchronization.

    scale: fp64, 0-d, a power of two. An int16 result is rounded to nearest even and saturated at `lowest` and 32767.
    Counts, int64 [3]: saturated elements, the largest |mantissa|, the largest |sum|; zeros for a chained product.
    """
    batch, m, depth = left.shape
    n = right.shape[2]
    result = torch.zeros(batch, m, n, dtype=dtype, device=left.device)
    seen = torch.zeros(3, dtype=torch.int64, device=left.device)
    if not result.numel() or not depth:
        return result, seen
    if depth > DEPTH and not chained:
        return _in_pieces(left, right, scale, dtype, lowest)
    rows, columns, inner, warps = _tile(left, m, n, depth, chained)
    grid = (-(-m // rows) * -(-n // columns) * batch,)
    kind = "chained" if chained else _KINDS[dtype]
    strides = (left.stride(0), left.stride(1), left.stride(2), right.stride(0), right.stride(1), right.stride(2))
    arguments = (left, right, result, seen, scale, m, n, depth, *strides, kind, lowest, rows, columns, inner)
    run(products.matmul, grid, *arguments, warps=warps)
    return result, seen


def _tile(left: Tensor, m: int, n: int, depth: int, chained: bool) -> tuple[int, int, int, int]:
    if not left.is_cpu:
        return CHAINED_TILE if chained else TILE
    size = (min(64, max(16, 1 << (one - 1).bit_length())) for one in (m, n))
    return (*size, min(256, max(16, 1 << (depth - 1).bit_length())), 4)  # type: ignore[return-value]


def _in_pieces(left: Tensor, right: Tensor, scale: Tensor, dtype: torch.dtype, lowest: int) -> tuple[Tensor, Tensor]:
    """Sum the parts of the depth in int64, and round once."""
    total = torch.zeros(left.shape[0], left.shape[1], right.shape[2], dtype=torch.int64, device=left.device)
    for start in range(0, left.shape[2], DEPTH):
        piece = slice(start, start + DEPTH)
        total += matmul(left[:, :, piece], right[:, piece], scale, torch.int64, False, lowest)[0]
    seen = torch.zeros(3, dtype=torch.int64, device=left.device)
    seen[2] = total.abs().max()
    if dtype is not torch.int16:
        return times(total, scale, dtype), seen
    values, seen[:2] = to_int16(to_odd(total, torch.float64) * scale, lowest)
    return values, seen
