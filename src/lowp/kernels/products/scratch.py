"""Memory for tensors that are needed only during one product: fp32 copies of 16-bit operands, and sums before rounding.

An fp32 product of 16-bit tensors needs an fp32 tensor for each operand and for its result. Their allocation can cost
more than the conversions that fill them: the C library returns blocks of megabytes to the system, which clears them
page by page at their next use. Here they are taken from blocks that a thread keeps: as many as are in use at once
(three or four), of up to 64 MiB each.

    with Scratch() as scratch:
        return torch.mm(scratch.wide(x), scratch.wide(y)).to(x.dtype)

Such tensors must not be used after the end of the context: not returned, not saved for backward, not given to hooks.
"""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

from lowp.compat import real_tensors
from lowp.kernels.tracing import is_quiet

LEAST = 1 << 15  # elements: the C library keeps smaller blocks for its next use
MOST = 1 << 24
HUGE_PAGE = 1 << 21  # bytes, on x86-64 and on most AArch64 systems


class _Blocks(threading.local):
    """The free blocks of a thread: the number of elements of each, and its memory."""

    def __init__(self) -> None:
        self.free: list[tuple[int, Tensor]] = []

    def take(self, elements: int) -> tuple[int, Tensor]:
        """Return the smallest block with enough elements; if none is large enough, replace the largest by a new one."""
        best = largest = -1
        for index, (count, _) in enumerate(self.free):
            if count >= elements and (best < 0 or count <= self.free[best][0]):  # of equal ones the most recently used
                best = index
            if largest < 0 or count > self.free[largest][0]:
                largest = index
        if best >= 0:
            return self.free.pop(best)
        if largest >= 0:
            del self.free[largest]
        block = _memory(elements)
        return block.numel(), block


def _memory(elements: int) -> Tensor:
    """Return memory for at least `elements` fp32 numbers, allocated outside all modes; in huge pages if available.

    A processor caches the addresses of a few thousand pages: with pages of 4 KiB they cover less than the operands of
    one product.
    """
    pages = (elements * 4 + HUGE_PAGE - 1) // HUGE_PAGE
    with real_tensors(), torch.inference_mode(False):
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(elements, dtype=torch.float32, device="cpu")
        region = mmap.mmap(-1, (pages + 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system without them
            region.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(region, dtype=torch.float32)  # keeps the mapping alive
        first = -whole.data_ptr() % HUGE_PAGE // 4
        return whole[first : first + pages * HUGE_PAGE // 4]


_blocks = _Blocks()


class Scratch:
    """Provides fp32 tensors within a ``with`` statement; very small and very large ones are ordinary tensors.

    All are ordinary tensors if torch records the computation: gradients, transforms, modes, compilers.
    """

    __slots__ = ("lends", "lent")

    def __enter__(self) -> Scratch:
        self.lent: list[tuple[int, Tensor]] = []
        self.lends = not torch.compiler.is_compiling() and not torch.is_grad_enabled() and is_quiet()
        return self

    def __exit__(self, *_: object) -> None:
        _blocks.free += self.lent

    def wide(self, x: Tensor) -> Tensor:
        """Return x in fp32, in the memory format of ``x.float()``; x itself if it is fp32."""
        if x.dtype is torch.float32:
            return x
        elements = x.numel()
        if not LEAST <= elements <= MOST or not self._serves(x):
            return x.float()
        self.lent.append(_blocks.take(elements))
        return self.lent[-1][1].as_strided(x.shape, x.stride()).copy_(x)

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        """Return a dense tensor of unknown values, as torch.empty_strided does."""
        elements = math.prod(shape)
        if not LEAST <= elements <= MOST or dtype is not torch.float32 or not self.lends:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        self.lent.append(_blocks.take(elements))
        return self.lent[-1][1].as_strided(shape, strides)

    def _serves(self, x: Tensor) -> bool:
        if not self.lends or type(x) is not Tensor or not x.is_cpu:
            return False
        return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
