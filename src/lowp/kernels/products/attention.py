"""Fused attention in fp32 on a CPU, with separate forward and backward, so that backward recomputes nothing.

torch's fused kernel returns the output and, for each row of scores, the logarithm of the sum of their exponentials. Its
backward reads both, and query, key and value. It uses the output for one number per row, the product with the gradient,
from which nearly equal numbers are subtracted; an output rounded to 16 bits would be too coarse (Qiu and Yao 2025,
arXiv 2510.04212). So `split` also keeps the part removed by the rounding, in bf16, which restores 16 bits or more of
every number in backward.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lowp.compat import private
from lowp.kernels.choose.dispatch import forced
from lowp.kernels.products.scratch import Scratch
from lowp.kernels.tracing import is_compiling

_NARROW = (torch.float16, torch.bfloat16)
_choice = cast(Callable[..., int], private("torch._fused_sdp_choice"))
_kernel = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
_forward = cast(Callable[..., "tuple[Tensor, Tensor]"], cast(Any, private(_kernel)).default)
_backward = cast(Callable[..., "tuple[Tensor, ...]"], cast(Any, private(f"{_kernel}_backward")).default)


class Attended(NamedTuple):
    """Attention of fp32 tensors, and the logarithms of the sums of its exponentials [..., rows], both in fp32."""

    output: Tensor
    logarithms: Tensor


def attended(
    operands: Sequence[Tensor], mask: Tensor | None, causal: bool = False, scale: float | None = None
) -> Attended | None:
    """Return the attention of query, key and value in fp32; None if torch would not use its fused CPU kernel."""
    query, key, value = operands
    if is_compiling() or not query.is_cpu or query.dtype is not torch.float32 or forced() == "reference":
        return None
    if query.dim() != 4:  # from torch 2.15 on the fused kernel is chosen for other shapes too, which it does not take
        return None
    if not (query.numel() and key.numel()):  # torch's backward kernel divides by the number of heads
        return None
    if _choice(query, key, value, mask, 0.0, causal, scale=scale) != SDPBackend.FLASH_ATTENTION.value:
        return None
    return Attended(*_forward(query, key, value, 0.0, causal, attn_mask=_added(mask), scale=scale))


def gradients(
    gradient: Tensor,
    operands: Sequence[Tensor],
    found: Attended,
    mask: Tensor | None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value from the gradient of the output; all in fp32."""
    return _backward(gradient, *operands, *found, 0.0, causal, attn_mask=_added(mask), scale=scale)


def probabilities(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return the softmax of scores where attention may go; masks are added, or True where it may.

    As in torch's attention, a row that a mask hides as a whole is all zeros.
    """
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if mask is None:
        return torch.softmax(scores, -1)
    hides = ~mask if mask.dtype is torch.bool else mask == -torch.inf
    scores = scores.masked_fill(hides, -torch.inf) if mask.dtype is torch.bool else scores + mask
    is_hidden = hides.all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(is_hidden, 0.0), -1).masked_fill(is_hidden, 0.0)


def _added(mask: Tensor | None) -> Tensor | None:
    """Return a mask as the tensor added to the scores: minus infinity where a boolean mask is False."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)


def split(wide: Tensor, rounded: Tensor, scratch: Scratch) -> Tensor | None:
    """Return in bf16 what rounding removed from the fp32 numbers `wide`, overwriting them; None without rounding."""
    return None if rounded is wide else wide.sub_(*widened([rounded], scratch)).bfloat16()


def joined(rounded: Tensor, rest: Tensor | None, scratch: Scratch) -> Tensor:
    """Return the numbers before rounding, in fp32, to 2^-17 of their size or better."""
    if rest is None:
        return rounded
    high, low = widened([rounded], scratch) + widened([rest], scratch)
    return high.add_(low)


def widened(tensors: Sequence[Tensor], scratch: Scratch) -> list[Tensor]:
    """Return tensors in fp32, in memory that the scratch provides.

    Tensors that together fill a block of memory, as after a fused projection, are converted at once.
    """
    first = tensors[0]
    storage = first.untyped_storage()
    same = all(x.dtype is first.dtype and x.untyped_storage().data_ptr() == storage.data_ptr() for x in tensors)
    if not same or first.dtype not in _NARROW or sum(x.nbytes for x in tensors) != storage.nbytes():
        return [scratch.wide(x) for x in tensors]
    whole = scratch.wide(first.as_strided((storage.nbytes() // first.element_size(),), (1,), 0))
    begin = whole.storage_offset()  # memory of a scratch may begin within its storage
    return [whole.as_strided(x.shape, x.stride(), begin + x.storage_offset()) for x in tensors]
