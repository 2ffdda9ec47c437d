"""The two photographs included in scikit-learn: real texture without a download."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from lowp.compat import real_tensors
from lowp.errors import Unavailable


@functools.lru_cache(maxsize=1)
def photographs() -> tuple[Tensor, Tensor]:
    """Return a Chinese temple and a flower, uint8 [3, 427, 640] each.

    They are china.jpg and flower.jpg of sklearn.datasets (CC BY). Raises Unavailable without scikit-learn or Pillow.
    """
    try:
        from sklearn.datasets import load_sample_images

        images = load_sample_images().images
    except ImportError:
        raise Unavailable(
            "the photographs are embedded in scikit-learn and read by Pillow, and one of them is not installed: "
            "pip install 'lowp[recipes]'"
        ) from None
    with real_tensors():
        temple, flower = (torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in images)
    return temple, flower
