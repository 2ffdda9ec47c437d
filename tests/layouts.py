"""How the numbers of a tensor may lie in memory: apart, in the middle of others, in another order, or negated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FAR = 1e4  # what lies between the numbers, and would be seen


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers of x as they may lie in memory."""
    yield "gaps", torch.stack((x, torch.full_like(x, FAR)), -1)[..., 0]
    window = torch.full([size + 3 for size in x.shape], FAR)[tuple(slice(1, 1 + size) for size in x.shape)]
    yield "window", window.copy_(x)
    yield "last to first", x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    yield "negated", torch._neg_view(-x)
    yield "behind others", torch.cat((torch.full((1,), FAR), x.flatten(), torch.full((3,), FAR)))[1:-3].view(x.shape)
