"""Runners of attention: scaled_dot_product_attention, and multi_head_attention_forward, which arrives as one call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowp.compat import gradients_of, remembered_by_identity
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.kernels.products import contract, is_native
from lowp.kernels.products.attention import Attended, attended, gradients, joined, probabilities, split, widened
from lowp.kernels.products.scratch import Scratch
from lowp.kernels.tracing import functorch_is_active
from lowp.ops.call import Call, RoleCasts
from lowp.ops.casting import Operand, carrier_dtype, native_dtype, operand, result_dtype, with_derivatives
from lowp.ops.contraction import matmul, runner
from lowp.ops.generic import finished
from lowp.ops.shields import shielded
from lowp.ops.signature import bound, check
from lowp.ops.trilinear import OUTPUT
from lowp.policy import Rule

if TYPE_CHECKING:  # the import loads torch's compiler, which takes seconds
    from torch.nn.attention.bias import CausalBias


@dataclass(frozen=True)
class Attention:
    """softmax(scale query key^T + mask) value as a form: the arguments besides the tensors. The bias is the mask."""

    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    def product(self, slot: int, *operands: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return torch's own attention of query, key and value."""
        query, key, value = operands
        return F.scaled_dot_product_attention(
            query, key, value, bias, self.dropout, self.causal, scale=self.scale, enable_gqa=self.grouped
        )


@runner
def scaled_dot_product_attention(call: Call) -> Tensor:
    """F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).

    Query, key and value have the role `input`. Scores and probabilities stay fp32; only the result is rounded. Backward
    keeps the three rounded operands. If torch has a fused kernel for the call, backward also keeps the result and the
    part that its rounding to 16 bits removed; otherwise it computes the attention again. Under a rule with a narrow
    accumulator the op runs as two contractions, the second with the probabilities as operand.
    """
    query, key, value, mask, dropout, causal, scale, grouped = bound(
        call, *"query key value".split(), attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    )
    check(query, key, value)
    if _is_causal_bias(mask):
        mask, causal = _of_bias(mask, bool(causal), query.device)
    settings = Attention(float(dropout), bool(causal), scale, bool(grouped))
    if call.rule.accumulate is not None and call.rule.accumulate.format != "fp32":
        return _in_two_contractions(call, settings, query, key, value, mask)
    return _attention(call, settings, query, key, value, mask)


def _is_causal_bias(mask: Tensor | None) -> TypeGuard[CausalBias]:
    """Whether a mask is a bias of torch.nn.attention.bias, which is imported only for masks of a class of their own."""
    if mask is None or type(mask) is Tensor:
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def _of_bias(bias: CausalBias, causal: bool, device: torch.device) -> tuple[Tensor | None, bool]:
    """Return the mask and causality that a bias of torch.nn.attention.bias stands for: it holds no numbers itself."""
    if causal:
        raise ValueError("CausalBias should not be used with causal=True")
    rows, columns = bias.seq_len_q, bias.seq_len_kv
    if rows == columns or bias.variant == type(bias.variant).UPPER_LEFT:
        return None, True
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows), False


def _attention(
    call: Call, settings: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    rule, casts, tensors = call.rule, call.casts.once, (query, key, value)
    if functorch_is_active():
        # gradients are rounded by the conversions of the graph, unless the rule leaves them wide
        dtype = _plain_carrier(rule)
        wide = [casts.cast(x, "input", dtype=dtype) for x in tensors]
        with _differentiable_kernel():
            result = contract(settings, OUTPUT, tuple(one.float() for one in wide), bias=mask)
        return finished(result, casts)
    values = [_carried(casts, x, "input") for x in tensors]
    if is_native(rule.output, *values):
        result = contract(settings, OUTPUT, tuple(values), None, rule.output, mask)
        casts.tell(result, "output")
        if casts.watch is not None:
            casts.watch.gradient(result, "grad", rule.grad)
        return result
    dtype = result_dtype(rule.output)
    operands = [operand(x, v, dtype) for x, v in zip(tensors, values, strict=True)]
    mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    attended: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        settings, casts, mask, *(one.edge for one in operands), *(one.value for one in operands)
    )
    return attended


def _carried(casts: RoleCasts, x: Tensor, role: str) -> Tensor:
    """Return x rounded by its role, itself if it is known to be so: attention reads it as it lies, without a copy."""
    cast = casts.of(role)
    if cast is None or casts.watch is not None or not has_mantissas(cast) or not payloads.is_kept(x, cast):
        return casts.carry(x, role)
    return x


def _differentiable_kernel() -> AbstractContextManager[Any]:
    """Return a context with the kernel that can be differentiated twice; the fused CPU one cannot and has no vmap."""
    return nullcontext() if torch.compiler.is_compiling() else sdpa_kernel(SDPBackend.MATH)


def _plain_carrier(rule: Rule) -> torch.dtype:
    if rule.input is not None and carrier_dtype(rule.input) is result_dtype(rule.output):
        return carrier_dtype(rule.input)
    return torch.float32


class _Attention(torch.autograd.Function):
    """Attention in fp32 on rounded operands. Saves the operands, and of the result what backward would recompute."""

    @staticmethod
    def forward(ctx: Any, settings: Attention, casts: RoleCasts, mask: Tensor | None, *operands: Any) -> Tensor:
        pairs = [Operand(*pair) for pair in zip(operands[:3], operands[3:], strict=True)]
        values = [one.plain for one in pairs]
        ctx.settings, ctx.casts = settings, casts
        ctx.edges = [None if one.value is None else one.edge for one in pairs]
        module, devices = _random_of(values[0].device)
        ctx.random = module.get_rng_state(*devices) if settings.dropout else None
        finish = partial(casts.cast, role="output")
        if _keeps_result(ctx, settings, casts):
            with Scratch() as scratch:
                found = attended(widened(values, scratch), mask, settings.causal, settings.scale)
                if found is not None:
                    result = finish(found.output)
                    rest = split(found.output, result, scratch)
                    ctx.save_for_backward(mask, *values, found.logarithms, result, rest)
                    return result
        ctx.save_for_backward(mask, *values)
        return contract(settings, OUTPUT, tuple(values), bias=mask, finish=finish)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return tuple(shielded(_graded, gradient, ctx, *ctx.saved_tensors))


def _graded(gradient: Tensor, ctx: Any, mask: Tensor | None, *saved: Tensor) -> list[Tensor | None]:
    """Return the gradients of what `_Attention` was given."""
    values, kept = saved[:3], saved[3:]
    with Scratch() as scratch:
        gradient = _carried(ctx.casts, gradient, "grad")
        with torch.no_grad():
            if kept:
                logarithms, result, rest = kept
                known, settings = Attended(joined(result, rest, scratch), logarithms), ctx.settings
                (wide,) = widened([gradient], scratch)
                three = gradients(wide, widened(values, scratch), known, mask, settings.causal, settings.scale)
                wanted = [index for index in (3, 4, 5) if ctx.needs_input_grad[index]]
                found: Sequence[Tensor | None] = [three[index - 3] for index in wanted]
            else:
                wanted, found = _recomputed(ctx, gradient.float(), mask, values)
        if torch.is_grad_enabled():
            found = with_derivatives(found, _recomputed(ctx, gradient.float(), mask, values)[1])
        graded: list[Tensor | None] = [None] * 9
        for index, one in zip(wanted, found, strict=True):
            graded[index] = ctx.casts.cast(one, "input gradient") if index > 2 else one
        return graded


def _keeps_result(ctx: Any, settings: Attention, casts: RoleCasts) -> bool:
    """Whether backward may read the result: a gradient is required, and saving the result needs no extra tensor.

    A result rounded to fewer than 16 bits would have to be saved in fp32 beside the returned one.
    """
    _, _, of_mask, *of_operands = ctx.needs_input_grad[:6]
    if settings.dropout or settings.grouped or of_mask or not any(of_operands):
        return False
    to = casts.rule.output
    return to is None or result_dtype(to) is not torch.float32 or native_dtype(to) is torch.float32


def _recomputed(
    ctx: Any, gradient: Tensor, mask: Tensor | None, values: Sequence[Tensor]
) -> tuple[list[int], Sequence[Tensor]]:
    """Return the argument indices of the required gradients, and the gradients, by computing the attention again."""
    graph = torch.is_grad_enabled()
    if graph:  # connected to the operands' graph, so that the gradient can be differentiated again
        pairs = zip(ctx.edges, values, strict=True)
        inputs = [(Operand(x) if edge is None else Operand(edge, x)).connected for edge, x in pairs]
    else:
        inputs = [x.float().requires_grad_() for x in values]
        mask = mask.detach().requires_grad_() if mask is not None and ctx.needs_input_grad[2] else mask
    kernel = _differentiable_kernel() if graph else nullcontext()
    random = nullcontext() if ctx.random is None else _drawn_from(ctx.random, gradient.device)
    with torch.enable_grad(), kernel, random:
        result = contract(ctx.settings, OUTPUT, tuple(inputs), bias=mask)
    candidates = dict(zip((2, 3, 4, 5), (mask, *inputs), strict=True))
    wanted = [index for index in candidates if ctx.needs_input_grad[index]]
    chosen = [cast(Tensor, candidates[index]) for index in wanted]
    return wanted, gradients_of(result, chosen, gradient, create_graph=graph)


def _random_of(device: torch.device) -> tuple[Any, list[torch.device]]:
    """Return the module with the random generator of a device, and the device, if it is none of the host."""
    return (torch.random, []) if device.type == "cpu" else (getattr(torch, device.type), [device])


@contextmanager
def _drawn_from(state: Tensor, device: torch.device) -> Iterator[None]:
    """Draw from a state of the random generator, which goes on from its own afterwards (for dropout)."""
    module, devices = _random_of(device)
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        module.set_rng_state(state, *devices)
        yield


def _in_two_contractions(
    call: Call, settings: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Compute scores, softmax in fp32, and the product with the values; both contractions run under the rule."""
    if settings.grouped:
        key, value = (x.repeat_interleave(query.shape[-3] // (x.shape[-3] or 1), -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1] or 1) if settings.scale is None else settings.scale
    of_scores, of_values = (_of_scores, _of_values) if torch.compiler.is_compiling() else _kept
    scores = contracted(call, of_scores(call.rule), query, key.transpose(-2, -1)).float() * scale
    weights = probabilities(scores, mask, settings.causal)
    if settings.dropout:
        weights = torch.dropout(weights, settings.dropout, True)
    return contracted(call, of_values(call.rule), weights, value)


def _of_scores(rule: Rule) -> Rule:
    """Return the rule of the product that makes scores, in fp32."""
    return Rule(input=rule.input, weight=rule.input, grad=rule.grad, accumulate=rule.accumulate)


def _of_values(rule: Rule) -> Rule:
    """Return the rule of the product with the values."""
    return Rule(**{**vars(_of_scores(rule)), "output": rule.output})


# What is known of rules goes by identity. Compilers see how a rule is made: they follow no method of a constant.
_kept = remembered_by_identity(_of_scores), remembered_by_identity(_of_values)


def contracted(call: Call, rule: Rule, first: Tensor, second: Tensor) -> Tensor:
    """Return first @ second, both with the role `input`, under a rule, as part of the call."""
    pair = call.inner(torch.matmul, (first, second), None, "matmul", rule, ("input", "input"))
    result: Tensor = matmul(pair)
    return result
