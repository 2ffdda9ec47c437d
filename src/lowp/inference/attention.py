"""Attention whose two products are of bytes, quantised as they come."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp import kernels
from lowp.inference.calibration import BITS, check_bits
from lowp.kernels.packed import byte_products
from lowp.kernels.packed.byte_rows import Activations
from lowp.kernels.products import contract_packed
from lowp.kernels.products.attention import probabilities
from lowp.kernels.tracing import is_eager

_LARGE = 1 << 21  # multiplications of a matrix from which the kernels of bytes take less time than one product of all
_EXACT = (1 << 24) // (256 * 128)  # products of bytes whose sum fp32 holds in any order


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    bits: int = BITS,
) -> Tensor:
    """Return softmax(query key^T * scale + mask) value, as `scaled_dot_product_attention`, with products of bytes.

    Left operands are quantised over their own range, right ones in int8 with a scale a row (a key, a feature of the
    values), each head and example on its own; the softmax is fp32. A boolean mask is true where attention may go.
    """
    highest = check_bits(bits)
    q, k, v = query.detach(), key.detach(), value.detach()
    if is_eager(query):
        return attended(q, k, v, mask, is_causal, scale, partial(by_kernels, highest))
    found: Tensor = torch.ops.lowp.attention_in_bytes(q, k, v, mask, is_causal, scale, highest)
    return found


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What `attention` returns, with left @ right^T by `product`."""
    factor = 1 / math.sqrt(query.shape[-1] or 1) if scale is None else scale
    scores = product(query, key) * factor
    return product(probabilities(scores, mask, is_causal), value.transpose(-1, -2)).to(query.dtype)


def by_kernels(highest: int, left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right^T in fp32, matrix by matrix, of bytes up to `highest`."""
    batch: torch.Size = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    count = batch.numel()
    rows = left.float().expand(*batch, *left.shape[-2:]).reshape(count, *left.shape[-2:])
    columns = right.float().expand(*batch, *right.shape[-2:]).reshape(count, *right.shape[-2:]).contiguous()
    if not rows.numel() or not columns.numel():
        return torch.zeros(*batch, left.shape[-2], right.shape[-2], dtype=torch.float32, device=left.device)
    codes = kernels.encode(columns, "int8")
    if rows.shape[1] * columns.numel() // count < _LARGE:
        return _together(highest, rows, codes.payload, codes.scale).reshape(*batch, left.shape[-2], right.shape[-2])
    found = []
    for one, payload, scales in zip(rows, codes.payload, codes.scale, strict=True):
        panels = byte_products.pack(payload, scales, highest)
        found.append(contract_packed((Activations(one, highest), panels)))
    return torch.stack(found).reshape(*batch, left.shape[-2], right.shape[-2])


def _together(highest: int, rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the same of all matrices at once, whose sums fp32 or fp64 holds exactly."""
    low, high = (one.double() for one in (rows.amin((1, 2)).clamp(max=0), rows.amax((1, 2)).clamp(min=0)))
    scale = ((high - low) / highest).float()  # as `byte_rows.range_of`
    scale = torch.where(
        low.isfinite() & high.isfinite() & scale.isfinite(), torch.where(scale == 0, 1, scale), torch.nan
    )
    zero = (-low / scale).round().clamp(0, highest).nan_to_num(0).float()[:, None, None]
    numbers = (rows / scale[:, None, None]).round().clamp(-zero, highest - zero)
    numbers = torch.where(numbers.isnan(), -zero, numbers)
    parts = [
        torch.bmm(numbers[..., at : at + _EXACT], codes[..., at : at + _EXACT].float().transpose(1, 2))
        for at in range(0, rows.shape[-1], _EXACT)
    ]
    sums = parts[0] if len(parts) == 1 else sum(one.double() for one in parts).float()  # type: ignore[union-attr]
    return sums * (scale[:, None] * scales)[:, None]


def projections(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of query, key, value and output."""
    biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
    weights = [*module.in_proj_weight.chunk(3), module.out_proj.weight]
    return list(zip(weights, [*biases, module.out_proj.bias], strict=True))


class ServedAttention(nn.Module):
    """`nn.MultiheadAttention` of one width with a layer for each projection, and attention in bytes."""

    in_proj_bias = None  # what tells nn.TransformerEncoderLayer not to take its fused kernel
    _qkv_same_embed_dim = False

    def __init__(self, layers: Sequence[nn.Module], old: nn.MultiheadAttention, bits: int, bytewise: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = layers
        self.embed_dim, self.num_heads, self.batch_first = old.embed_dim, old.num_heads, old.batch_first
        self.bits, self.bytewise = bits, bytewise

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the output and None: the attention's weights are not given. Masks are true where it may NOT go."""
        single = query.ndim == 2
        batch_first = self.batch_first or single
        given = [one[None] if single else one for one in (query, key, value)]
        given = given if batch_first else [one.transpose(0, 1) for one in given]
        q, k, v = (
            layer(one).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, one in zip((self.query, self.key, self.value), given, strict=True)
        )
        mask = _mask(attn_mask, key_padding_mask, self.num_heads)
        found = self.attended(q, k, v, mask) if self.bytewise else F.scaled_dot_product_attention(q, k, v, mask)
        out: Tensor = self.out(found.transpose(1, 2).flatten(-2))
        out = out[0] if single else out
        return (out if batch_first else out.transpose(0, 1)), None

    def attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention in bytes."""
        return attention(query, key, value, mask, bits=self.bits)


def _mask(attention_mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """Both masks as one that is added to the scores."""
    added = [one for one in (_added(attention_mask), _added(padding)) if one is not None]
    if attention_mask is not None and attention_mask.ndim == 3:
        added[0] = added[0].reshape(-1, heads, *added[0].shape[1:])
    if padding is not None:
        added[-1] = added[-1].reshape(-1, 1, 1, padding.shape[-1])
    return sum(added[1:], added[0]) if added else None


def _added(mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill(mask, -math.inf)
