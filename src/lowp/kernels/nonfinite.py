"""Infinities and NaNs on their way through casts to formats that have none."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kept(x: Tensor, rounded: Tensor, is_traced: bool) -> Tensor:
    """Return what a cast made of x, but x itself where that is infinite or NaN.

    On a CPU one sum tells whether there is any; an accelerator is not waited for, nor what torch traces.
    """
    # a sum that overflows means a second look, no more
    if not is_traced and x.is_cpu and not x.is_meta and math.isfinite(float(x.detach().sum())):
        return rounded
    return torch.where(x.isfinite(), rounded, x)
