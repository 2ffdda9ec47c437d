"""The random words that the C++ library draws, for comparison with what is published of them."""

from __future__ import annotations

from ctypes import c_uint32

import torch
from torch import Tensor

from lowp.kernels import cpu


def random_words(seed: int, counter: int, counters: int) -> Tensor:
    """The Philox-4x32-10 words of the counters (counter, 0, 0) onwards: int64 [counters, 4]."""
    words = torch.zeros(counters, 4, dtype=torch.int32, device="cpu")
    cpu.loaded().lowp_random_words(seed, counter, counters, words)
    return words.to(torch.int64) & 0xFFFFFFFF


def random_block(seed: int, counter: tuple[int, ...]) -> list[int]:
    """The four Philox-4x32-10 words of one counter."""
    words = (c_uint32 * 4)()
    cpu.loaded().lowp_random_block(seed, (c_uint32 * 4)(*counter), words)
    return list(words)
