"""Which elements of a tensor pass: kept eight to a byte, and used on gradients, in one pass over each."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.compat import real_tensors
from lowp.kernels import cpu
from lowp.kernels.int16.cpu_int16 import memory_of

_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1 it has byte i at bit i of the last byte
with real_tensors():
    _BYTES = torch.tensor([[byte >> i & 1 for i in range(8)] for byte in range(256)], dtype=torch.int8, device="cpu")
    _WORDS = _BYTES.view(torch.int64).flatten()


class Mask(NamedTuple):
    """A bit for each element of a tensor without gaps, as its memory lies: bit i % 8 of byte i / 8; uint8."""

    bits: Tensor
    shape: torch.Size
    stride: tuple[int, ...]


def packed(mask: Tensor) -> Mask:
    """Return a tensor of bool without gaps, which is used up, as a mask."""
    flat = mask.as_strided((mask.numel(),), (1,))
    if rest := -flat.numel() % 8:
        flat = F.pad(flat, (0, rest))
    bits = flat.view(torch.int64).mul_(_GATHER).view(torch.uint8)[7::8].contiguous()
    return Mask(bits, mask.shape, mask.stride())


def unpacked(mask: Mask) -> Tensor:
    """Return a mask as int8, 0 and 1, of which torch makes other numbers faster than of bool."""
    return _WORDS.index_select(0, mask.bits.int()).view(torch.int8).as_strided(mask.shape, mask.stride)


def nonzero(x: Tensor) -> Mask:
    """Return where x, of fp32 on a CPU, is not zero; NaN is not."""
    if not _serves(x):
        return packed(x.bool())
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
    cpu.loaded().lowp_pack_nonzero(x, bits, x.numel(), torch.get_num_threads())
    return Mask(bits, x.shape, x.stride())


def passed(x: Tensor, mask: Mask) -> Tensor:
    """Return x, of fp32 on a CPU and of the mask's shape, where its bits are set, and 0 elsewhere.

    What passes, NaN included, keeps its bits.
    """
    if x.stride() != mask.stride or not _serves(x):
        # a selection by masked_fill or where takes many times as long
        return unpacked(mask).to(torch.int32).mul_(x.view(torch.int32)).view(torch.float32)
    result = torch.empty_like(x)
    cpu.loaded().lowp_pass_bits(x, mask.bits, result, x.numel(), torch.get_num_threads())
    return result


def passed_where_positive(x: Tensor, chosen: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return x, of fp32 on a CPU, where int16 of its shape are positive, and 0 elsewhere; NaN passes too.

    And its `own` mantissas there, if it has some that lie as x.
    """
    if x.stride() != chosen.stride() or not _serves(x):
        return torch.ops.aten.threshold_backward(x, chosen, 0), None
    result = torch.empty_like(x)
    own = own if own is not None and own.stride() == x.stride() else None
    mantissas = None if own is None else torch.empty_like(own)
    cpu.loaded().lowp_pass_positive(x, chosen, result, own, mantissas, x.numel(), torch.get_num_threads())
    return result, mantissas


def _serves(x: Tensor) -> bool:
    """Whether the C++ library reads a tensor, whose elements lie side by side in an order that torch has for images."""
    if x.dim() in (4, 5) and not x.is_contiguous():
        x = x.movedim(1, -1)
    return memory_of(x) is not None
