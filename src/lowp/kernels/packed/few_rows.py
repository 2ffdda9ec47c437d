"""Few rows of fp32 times weights that are stored in fp16 or bf16, as a language model's next token has them.

Such a product reads every weight once and does two operations with it: it takes what the memory takes, which is half
for 16 bits. The weights are read as they are stored, and every number of the result is a sum in fp64 that is rounded
once. A product of fp32 and 16 bits is exact there, and the order of the sum is fixed: of the products, every 16th is
added up one after the other, then these sums in halves (the first 8 and the last 8, and so on), then the bias. So the
bits are the same with every instruction set, with any number of threads, and without the C++ library.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.packed.byte_rows import up

SUMS = 16  # partial ones, as in cpu/rows.hpp
FEW = 24  # with more rows the weights are converted to fp32, once, for a product of torch's


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, level: int | None = None) -> Tensor:
    """Return x @ weight.T (+ bias) in fp32, of x fp32 [rows, k] and a contiguous weight [n, k] in fp16 or bf16.

    More rows, and those on an accelerator, are a product of torch's in fp32. `level` forces an instruction set, by its
    place in `cpu.INSTRUCTION_SETS`.
    """
    rows, k = x.shape
    if rows > FEW or not weight.is_contiguous() or not (x.is_cpu and weight.is_cpu):
        return F.linear(x, weight.float(), bias)
    wide = F.pad(x.detach().double(), (0, up(k, SUMS) - k)).contiguous()
    bias = None if bias is None else bias.detach().float().contiguous()
    if not uses_library():
        return _defined(wide, weight, bias)
    out = torch.empty(rows, weight.shape[0], dtype=torch.float32, device="cpu")
    cpu.loaded().lowp_rows_multiply(
        cpu.level(level),
        wide,
        rows,
        wide.shape[1],
        weight,
        int(weight.dtype is torch.float16),
        weight.shape[0],
        k,
        bias,
        out,
        torch.get_num_threads(),
    )
    return out


def _defined(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sums in their order, in operations of torch; x in fp64, filled up with zeros."""
    factors = F.pad(weight.double(), (0, x.shape[1] - weight.shape[1]))
    total = torch.zeros(x.shape[0], weight.shape[0], SUMS, dtype=torch.float64, device="cpu")
    for i in range(0, x.shape[1], SUMS):
        total += x[:, None, i : i + SUMS] * factors[:, i : i + SUMS]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    found = (total[..., 0] if bias is None else total[..., 0] + bias.double()).float()
    return found.nan_to_num_(math.nan, math.inf, -math.inf)  # one NaN, of the positive sign
