"""From tensors and casts to the kernels' arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels.philox import Seed, drawn
from lowp.kernels.triton.device import casts
from lowp.kernels.triton.launch import launch
from lowp.kernels.triton.plans import DTYPES, plan

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 2048


def quantize(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> None:
    """Write the values that `cast` makes of `x` into `out`, which may be `x`."""
    count = x.numel()
    if count == 0:
        return
    form, numbers = plan(cast, x.dtype)
    source = x if x.is_contiguous() else x.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(source)
    key, first = _key(x, seed, form.random_bits > 0)
    skipped = first % 4
    launch(
        casts.quantize,
        x,
        count + skipped,
        BLOCK,
        integers(source),
        integers(target),
        key,
        count,
        skipped,
        first - skipped,
        numbers,
        DTYPES[x.dtype],
        form,
        (count + skipped) % 16 != 0,
    )
    if target is not out:
        out.copy_(target)


def integers(x: Tensor) -> Tensor:
    """Return a tensor's memory as integers of its width."""
    return x.detach().view(INTEGERS[x.dtype.itemsize])


def _key(x: Tensor, seed: Seed, draws: bool) -> tuple[Tensor, int]:
    """Return the seed as a tensor where x is, and the logical index of x's first element."""
    if not draws:
        return integers(x), 0  # not looked at
    seed, first = drawn(seed)
    if isinstance(seed, Tensor):
        return seed.to(x.device), first
    seed &= (1 << 64) - 1
    return torch.full((), seed - (1 << 64) if seed >> 63 else seed, dtype=torch.int64, device=x.device), first
