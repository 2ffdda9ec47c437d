"""Random bits as a function of a seed and a position: Philox-4x32-10, in torch operations on any device.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". The words are those of Triton's
``tl.randint4x(seed, offset)``. A uint32 is held in an int64, so that 32 x 32 bit products fit (the sign bit is masked).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import Misuse

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Word = int | Tensor


class Draw(NamedTuple):
    """The random numbers of a part of a tensor: a seed, and the index of the part's first element."""

    seed: int | Tensor
    first: int


Seed = int | Tensor | Draw


def signed(word: int) -> int:
    """Return the low 64 bits as a two's complement number; int64 tensors multiply and add it with wrap-around."""
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word


def draw_seed(device: torch.device | str = "cpu") -> Tensor:
    """Return a new seed for stochastic rounding from torch's generator: `torch.manual_seed` repeats it.

    On a device the device's own generator draws it, so that a captured CUDA graph draws a new one at each replay.
    Raises Misuse under a vmap that allows no random numbers.
    """
    try:
        return torch.randint(2**62, (), device=device)
    except RuntimeError as error:
        if "randomness error mode" not in str(error):
            raise
        raise Misuse(
            "a cast rounds stochastically within torch.func.vmap, which was not told whether examples share what is "
            "drawn: give it randomness='different', or 'same'; or take a precision that rounds to nearest, such as fp8"
        ) from None


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


def words(x: Tensor, seed: Seed) -> Tensor:
    """Return the first word of every element of `x`, int64 in x's shape: word i % 4 of counter (i // 4, 0, 0).

    i is the logical, row-major index, independent of the strides.
    """
    seed, first = drawn(seed)
    count, skipped = x.numel(), first % 4
    counter = torch.arange((skipped + count + 3) // 4, dtype=torch.int64, device=x.device) + first // 4
    found = torch.stack(_blocks(counter, 0, seed), dim=1)
    return found.reshape(-1)[skipped : skipped + count].reshape(x.shape)


def tail_words(x: Tensor, seed: Seed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the 128 bits that follow the first word of every element: the block of counter (i, 1, 0), in x's shape."""
    seed, first = drawn(seed)
    index = torch.arange(x.numel(), dtype=torch.int64, device=x.device) + first
    one, two, three, four = _blocks(index, 1, seed)
    return one.reshape(x.shape), two.reshape(x.shape), three.reshape(x.shape), four.reshape(x.shape)


def drawn(seed: Seed) -> tuple[int | Tensor, int]:
    """Return a seed and the index of the first element."""
    return seed if isinstance(seed, Draw) else (seed, 0)


def _blocks(counter: Tensor, kind: int, seed: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the words of the counters (low half, high half, kind, 0)."""
    return block((counter & MASK, counter >> 32, torch.full_like(counter, kind), 0), seed)
