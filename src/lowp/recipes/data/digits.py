"""The handwritten digits included in scikit-learn: 1797 images of 8x8."""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.errors import Unavailable

TRAINING = 1257  # 70 %
HELD_BACK = 540


def read_digits() -> tuple[Tensor, Tensor]:
    """Return grey values 0 to 16, fp32 [1797, 64], and labels int64 [1797], in a fixed random order.

    The first `TRAINING` are the training set. Raises Unavailable without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise Unavailable(
            "the digits are embedded in scikit-learn, which is not installed: pip install 'lowp[recipes]'"
        ) from None
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float()[order], torch.from_numpy(labels).long()[order]
