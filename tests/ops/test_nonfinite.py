"""Infinities and NaNs: intended ones pass, and none is silently converted to a number."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp.exponents import is_result
from lowp.precision import Precision

TIME, WIDTH = 6, 8
LATER = torch.triu(torch.ones(TIME, TIME, dtype=torch.bool), 1)
MASK = torch.zeros(TIME, TIME).masked_fill(LATER, -math.inf)
FORMATS = ("fp16", "bf16", "e5m7", "e4m3fn", "e5m2", "dfp16", "mxfp8", "int8", "flex16+5")

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda q, k: torch.softmax((q @ k.mT).masked_fill(LATER, -math.inf), -1),
    "where": lambda q, k: torch.softmax(torch.where(LATER, torch.tensor(-math.inf), q @ k.mT), -1),
    "a sum": lambda q, k: torch.softmax(q @ k.mT + MASK, -1),
    "a sum in place": lambda q, k: torch.softmax((q @ k.mT).mul(1.0).add_(MASK), -1),
    "a difference": lambda q, k: torch.softmax(q @ k.mT - (-MASK), -1),
    "a logarithm": lambda q, k: torch.softmax(q @ k.mT + (~LATER).float().log(), -1),
    "baddbmm": lambda q, k: torch.softmax(torch.baddbmm(MASK.expand(2, TIME, TIME), q, k.mT, alpha=0.5), -1),
    "log_softmax": lambda q, k: F.log_softmax(q @ k.mT + MASK, -1).exp(),
    "logsumexp": lambda q, k: torch.logsumexp(q @ k.mT + MASK, -1),
    "amax": lambda q, k: (q @ k.mT + MASK).amax(-1),
    "attention, numbers": lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=MASK),
    "attention, booleans": lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=~LATER),
    "attention, causal": lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
}


def operands() -> tuple[Tensor, Tensor]:
    made = (torch.randn(2, TIME, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    query, key = (x.requires_grad_() for x in made)
    return query, key


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("spelling", SCORES)
def test_a_mask_of_infinities_passes_in_every_spelling(spelling: str, precision: str) -> None:
    (q, k), region = operands(), lowp.autocast(precision)
    with region:
        result = SCORES[spelling](q, k)
    result.float().square().sum().backward()
    expected = SCORES[spelling](*operands())
    assert q.grad is not None and k.grad is not None
    assert all(bool(x.isfinite().all()) for x in (result, q.grad, k.grad))
    assert float((result - expected).detach().abs().max()) < 0.3 * float(expected.detach().abs().max())
    assert region.exponents is None or all(map(is_result, region.exponents.faults()))


@pytest.mark.parametrize("precision", FORMATS)
def test_modules_of_attention_take_masks_of_infinities(precision: str) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
    x = torch.randn(2, TIME, WIDTH, requires_grad=True)
    with lowp.autocast(precision):
        plain = attention(x, x, x, attn_mask=MASK, need_weights=False)[0]
        told, weights = attention(x, x, x, attn_mask=MASK)
        square = nn.Transformer.generate_square_subsequent_mask(TIME)
        total = plain.sum() + told.square().sum() + layer(x, src_mask=square).square().sum()
    total.backward()
    assert x.grad is not None and bool(x.grad.isfinite().all()) and bool((weights[:, LATER] == 0).all())


def test_an_exponent_is_learnt_from_what_is_finite_beside_infinities() -> None:
    region, scores = lowp.autocast("flex16+5"), torch.randn(TIME, TIME, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        with region:
            result = scores.requires_grad_() + MASK
        assert region.exponents is not None
        region.exponents.flush()
    assert torch.equal(result.isinf(), LATER)
    assert float((result - scores - MASK).detach().nan_to_num(0.0).abs().max()) <= 2.0**-13


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("where", ["input", "weight"])
def test_what_is_not_finite_reaches_the_result(precision: str, where: str, value: float) -> None:
    x, w = torch.randn(5, 8), torch.randn(3, 8)
    (x if where == "input" else w)[1, 2] = value
    with lowp.autocast(precision):
        result = F.linear(x, w.requires_grad_())
    hit = result[1] if where == "input" else result[:, 1]
    assert not bool(hit.isfinite().any())


@pytest.mark.parametrize("precision", ["e4m3fn", "dfp16", "mxfp8", "int8", "e5m7"])
def test_a_gradient_that_is_not_finite_reaches_the_weight(precision: str) -> None:
    x, w = torch.randn(5, 8), torch.randn(3, 8).requires_grad_()
    with lowp.autocast(precision):
        result = F.linear(x, w)
    gradient = torch.ones_like(result)
    gradient[2, 1] = math.inf
    result.backward(gradient)
    assert w.grad is not None and not bool(w.grad[1].isfinite().any()) and bool(w.grad[0].isfinite().all())


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("by", ["a hook", "a function of one's own", "an accumulated gradient"])
def test_flex_skips_a_step_whose_weight_gradient_is_not_finite(by: str, value: float) -> None:
    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return spoiled(gradient)

    def spoiled(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[1, 1] = value
        return gradient

    torch.manual_seed(0)
    model, precision = nn.Linear(8, 3), Precision("flex16+5")
    prepared, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if by == "a hook":
        model.weight.register_hook(spoiled)
    before = model.weight.detach().clone()
    with precision.autocast():
        if by == "a function of one's own":
            result = F.linear(torch.ones(4, 8), Spoiled.apply(model.weight))
        else:
            result = prepared(torch.ones(4, 8))
    precision.backward(result.square().mean())
    if by == "an accumulated gradient":
        assert model.weight.grad is not None
        model.weight.grad[1, 1] = value
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        precision.step(optimizer)
    assert not bool(precision.stepped) and precision.faults == ["gradient of weight"]
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_of_shared_exponents_computes_the_same_bits_again(reentrant: bool, nested: bool) -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    seen: list[Tensor] = []

    def inner(x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, weight)) * x

    def body(x: Tensor) -> Tensor:
        h = checkpoint(inner, x, use_reentrant=reentrant) if nested else inner(x)
        h = F.gelu(h) * 3.0
        seen.append(h.detach())
        return F.layer_norm(h, (8,))

    region = lowp.autocast("flex16+5")
    for step in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with region:
            first = checkpoint(body, x * 1.0, use_reentrant=reentrant)
            second = body(first)
            second.sum().backward()
        forward, _, again = seen
        assert torch.equal(forward, again)
        seen.clear()
        assert region.exponents is not None
        region.exponents.flush()
