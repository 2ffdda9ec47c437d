"""The runner of multi_head_attention_forward, which nn.MultiheadAttention makes as ONE call.

Its own body cannot run under a function mode (it would call itself forever), so its steps are repeated here:
projections, attention, projection, each under the rule, or the projections under that of linear layers. The
probabilities, if the caller requests them, are the softmax of scores rounded as outputs, computed in fp32 and rounded
like the scores.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.compat import constant_when_compiled, remembered_by_identity
from lowp.ops.attention import contracted, scaled_dot_product_attention
from lowp.ops.call import Call, rounding_once
from lowp.ops.contraction import added, linear, runner
from lowp.ops.fp32 import computed_in_fp32
from lowp.ops.signature import Mismatch, bound, check, require
from lowp.ops.softmax import Softmax
from lowp.policy import Rule


class _Arguments(NamedTuple):
    """The parameters of F.multi_head_attention_forward, in its order, with its defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim_to_check: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout_p: float
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    training: bool = True
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    use_separate_proj_weight: bool = False
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None
    static_k: Tensor | None = None
    static_v: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def with_projections(rule: Rule) -> Callable[[Call], Any]:
    """Return the runner whose projections have a rule of their own."""
    return runner(partial(_forward, projections=rule))


@runner
def multi_head_attention_forward(call: Call) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward: (time, batch, features) or unbatched (time, features) in, the same out."""
    return _forward(call)


def _forward(call: Call, projections: Rule | None = None) -> tuple[Tensor, Tensor | None]:
    optional = _Arguments._field_defaults
    given = _Arguments(*bound(call, *(name for name in _Arguments._fields if name not in optional), **optional))
    check(given.query, given.key, given.value, given.in_proj_weight, given.out_proj_weight)
    _validate(given)
    if given.query.dim() == 3:
        return _batched(call, given, projections)
    mask = None if given.key_padding_mask is None else given.key_padding_mask.unsqueeze(0)
    query = given.query.unsqueeze(1)  # one object where it was, as that decides how the projection is made
    key = query if given.key is given.query else given.key.unsqueeze(1)
    value = key if given.value is given.key else given.value.unsqueeze(1)
    single = given._replace(query=query, key=key, value=value, key_padding_mask=mask)
    result, weights = _batched(call, single, projections)
    return result.squeeze(1), None if weights is None else weights.squeeze(0)


def _validate(given: _Arguments) -> None:
    """Leave calls that the function refuses to the function, which raises the error."""
    query, key, value = given.query, given.key, given.value
    require(query.dim() in (2, 3) and key.dim() == value.dim() == query.dim() and key.shape[:-1] == value.shape[:-1])
    require(query.shape[-1] == given.embed_dim_to_check and query.shape[-1] % given.num_heads == 0)
    require(given.use_separate_proj_weight == (given.in_proj_weight is None) or not given.use_separate_proj_weight)
    require((given.bias_k is None) == (given.bias_v is None))
    require(not (given.is_causal and given.attn_mask is None))
    padding = given.key_padding_mask
    shape = (key.shape[1], key.shape[0]) if query.dim() == 3 else (key.shape[0],)
    require(padding is None or tuple(padding.shape) == shape)
    for mask in (padding, given.attn_mask):
        require(mask is None or mask.dtype is torch.bool or mask.is_floating_point())


def _batched(call: Call, given: _Arguments, rule: Rule | None) -> tuple[Tensor, Tensor | None]:
    query, key, value = _projected(call, given, rule)
    length, batch = query.shape[0], query.shape[1]
    heads, size = given.num_heads, query.shape[2] // given.num_heads
    mask, causal = _attention_mask(given)
    padding = _as_float(given.key_padding_mask)
    if given.bias_k is not None and given.bias_v is not None:
        require(given.static_k is None and given.static_v is None)
        key = torch.cat([key, given.bias_k.to(key.dtype).expand(1, batch, -1)])
        value = torch.cat([value, given.bias_v.to(value.dtype).expand(1, batch, -1)])
        mask, padding = _one_more(mask), _one_more(padding)
    query = query.reshape(length, batch, heads, size).permute(1, 2, 0, 3)
    key = _heads(key, given.static_k, batch, heads, size)
    value = _heads(value, given.static_v, batch, heads, size)
    if given.add_zero_attn:
        zero = key.new_zeros(batch, heads, 1, size)
        key, value = torch.cat([key, zero], 2), torch.cat([value, zero.to(value.dtype)], 2)
        mask, padding = _one_more(mask), _one_more(padding)
    mask = _merged(mask, padding, batch, heads)
    dropout = given.dropout_p if given.training else 0.0
    weights = None
    if given.need_weights:
        result, weights = _visible(call, query, key, value, mask, dropout)
        weights = weights.mean(1) if given.average_attn_weights else weights
    else:
        settings = {"attn_mask": mask, "dropout_p": dropout, "is_causal": causal and mask is None}
        result = scaled_dot_product_attention(call.inner(F.scaled_dot_product_attention, (query, key, value), settings))
    result = result.permute(2, 0, 1, 3).reshape(length, batch, heads * size)
    return linear(call.inner(F.linear, (result, given.out_proj_weight, given.out_proj_bias), rule=rule)), weights


def _projected(call: Call, given: _Arguments, rule: Rule | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value after their projections, in as few products as the inputs allow."""
    query, key, value = given.query, given.key, given.value
    packed, bias, size = given.in_proj_weight, given.in_proj_bias, query.shape[-1]

    def projected(x: Tensor, weight: Tensor | None, start: int, stop: int) -> Tensor:
        part = None if bias is None else bias[start * size : stop * size]
        result: Tensor = linear(call.inner(F.linear, (x, weight, part), rule=rule))
        return result

    weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
    if not given.use_separate_proj_weight:
        if packed is None:
            raise Mismatch
        if key is value and query is key:
            first, second, third = linear(call.inner(F.linear, (query, packed, bias), rule=rule)).chunk(3, -1)
            return first, second, third
        if key is value:
            second, third = projected(key, packed[size:], 1, 3).chunk(2, -1)
            return projected(query, packed[:size], 0, 1), second, third
        weights = packed[:size], packed[size : 2 * size], packed[2 * size :]
    inputs = zip((query, key, value), weights, strict=True)
    first, second, third = (projected(x, weight, place, place + 1) for place, (x, weight) in enumerate(inputs))
    return first, second, third


def _heads(x: Tensor, static: Tensor | None, batch: int, heads: int, size: int) -> Tensor:
    """Return (batch, heads, time, size) of a projection, or of the tensor that the caller gave instead."""
    if static is not None:
        return static.reshape(batch, heads, static.shape[-2], size)
    return x.reshape(x.shape[0], batch, heads, size).permute(1, 2, 0, 3)


def _attention_mask(given: _Arguments) -> tuple[Tensor | None, bool]:
    """Return the mask in fp32 with the batch and head dimensions (or None), and whether the causal hint replaces it."""
    if given.is_causal and given.key_padding_mask is None and not given.need_weights:
        return None, True
    mask = _as_float(given.attn_mask)
    if mask is not None and mask.dim() == 3:
        mask = mask.reshape(mask.shape[0] // given.num_heads, given.num_heads, *mask.shape[1:])
    return mask, False


def _as_float(mask: Tensor | None) -> Tensor | None:
    """Return a mask as the tensor added to the scores: a boolean mask becomes -infinity where it is true."""
    if mask is None or mask.is_floating_point():
        return None if mask is None else mask.float()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(mask, -math.inf)


def _one_more(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else F.pad(mask, (0, 1))


def _merged(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int) -> Tensor | None:
    if padding is None:
        return mask
    wide = padding.reshape(batch, 1, 1, padding.shape[-1]).expand(-1, heads, -1, -1)
    return wide if mask is None else mask + wide


@constant_when_compiled
@remembered_by_identity
def _of_inputs(rule: Rule) -> Rule:
    """Return the rule of products of two inputs."""
    return replace(rounding_once(rule), weight=rule.input)


def _visible(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return the attention and its probabilities, (batch, heads, time, source)."""
    rule = _of_inputs(call.rule)
    batch, heads, length, size = query.shape
    flat = [x.reshape(batch * heads, x.shape[2], size) for x in (query, key, value)]
    scaled = flat[0] * math.sqrt(1 / size)
    if mask is None:
        scores = contracted(call, rule, scaled, flat[1].transpose(1, 2))
    else:
        source = flat[1].shape[1]
        added_mask = mask.expand(batch, heads, length, source).reshape(batch * heads, length, source)
        arguments = (added_mask, scaled, flat[1].transpose(1, 2))
        scores = added(call.inner(torch.baddbmm, arguments, None, "baddbmm", rule, ("input", "input")))
    weights = computed_in_fp32(Softmax(-1, False), call.casts, scores)
    if dropout > 0:
        weights = F.dropout(weights, dropout)
    result = contracted(call, rule, weights, flat[2])
    return result.reshape(batch, heads, length, size), weights.reshape(batch, heads, length, flat[1].shape[1])
