"""Random bits as a function of a seed and a position: Philox-4x32-10, in torch operations on any device.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". The words are those of Triton's
``tl.randint4x(seed, offset)``. A uint32 lives in an int64, so that 32 x 32 bit products fit (their sign bit is masked).
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Word = int | Tensor


def block(counter: tuple[Tensor, Word, Word, Word], seed: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words (int64 tensors) of a counter of four 32-bit words and a 64-bit seed."""
    c0: Word
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK) ^ c1 ^ k0,
            product1 & MASK,
            ((product0 >> 32) & MASK) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3  # type: ignore[return-value]


def words(x: Tensor, seed: int | Tensor) -> Tensor:
    """Return the first word of every element of `x`, int64 in x's shape: word i % 4 of counter (i // 4, 0, 0).

    i is the logical, row-major index, whatever the strides.
    """
    count = x.numel()
    counter = torch.arange((count + 3) // 4, dtype=torch.int64, device=x.device)
    found = torch.stack(_blocks(counter, 0, seed), dim=-1)
    return found.reshape(-1)[:count].reshape(x.shape)


def tail_words(x: Tensor, seed: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the 128 bits that follow the first word of every element: the block of counter (i, 1, 0), in x's shape."""
    index = torch.arange(x.numel(), dtype=torch.int64, device=x.device)
    first, second, third, fourth = _blocks(index, 1, seed)
    return first.reshape(x.shape), second.reshape(x.shape), third.reshape(x.shape), fourth.reshape(x.shape)


def _blocks(counter: Tensor, kind: int, seed: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the words of the counters (low half, high half, kind, 0)."""
    return block((counter & MASK, counter >> 32, torch.full_like(counter, kind), 0), seed)
