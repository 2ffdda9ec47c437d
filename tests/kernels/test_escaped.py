"""Tensors that outlived their torch.func transform: what they wrap after `grad`, torch's own error after `vmap`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowp

PRECISIONS = ["fp16", "bf16", "e5m7", "fp8", "dfp16", "flex16+5"]
ESCAPED = "escaped from inside a function being vmapped"
CALLS: dict[str, Callable[[Tensor], object]] = {
    "quantize": lambda x: lowp.quantize(x, "e5m7"),
    "stochastic": lambda x: lowp.quantize(x, "e5m7:stochastic", seed=3),
    "scaled": lambda x: lowp.quantize(x, "nvfp4"),
    "into another": lambda x: lowp.quantize(x, "e5m7", out=torch.empty(x.shape)),
    "scale": lambda x: lowp.quantize(torch.ones(6), "int8", scale=x),
    "decode": lambda x: lowp.decode(x, "e4m3fn"),
}
LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda x: x[0, 0].abs(),
    "decode": lambda x: x.to(torch.uint8),
}


def after_vmap(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return what a function makes of one example, which leaves `torch.func.vmap`."""
    kept: list[Tensor] = []

    def one(example: Tensor) -> Tensor:
        kept.append(function(example))
        return example * 1

    torch.func.vmap(one)(x)
    return kept[0]


def after_grad(x: Tensor) -> Tensor:
    """Return x as it was inside of `torch.func.grad`."""
    kept: list[Tensor] = []

    def loss(whole: Tensor) -> Tensor:
        kept.append(whole)
        return whole.sum()

    torch.func.grad(loss)(x)
    return kept[0]


@pytest.mark.parametrize("call", CALLS)
def test_after_vmap_a_cast_raises_what_torch_raises(call: str) -> None:
    kept = after_vmap(LEAVES.get(call, lambda x: x), torch.randn(3, 4, 16))
    with pytest.raises(RuntimeError, match=ESCAPED):
        kept.mul(2)
    with pytest.raises(RuntimeError, match=ESCAPED):
        CALLS[call](kept)


def test_after_vmap_a_cast_inside_of_another_transform_raises_it_too() -> None:
    kept = after_vmap(lambda x: x, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.func.grad(lambda x: (lowp.quantize(kept, "e5m7") + x).sum())(torch.randn(4))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_after_vmap_a_region_raises_it_for_both_operands(precision: str, requires_grad: bool) -> None:
    kept = after_vmap(lambda x: x, torch.randn(3, 5, 6, requires_grad=requires_grad))
    with lowp.autocast(precision):
        for operands in ((kept, torch.randn(5, 6)), (torch.randn(4, 6), kept)):
            with pytest.raises(RuntimeError, match=ESCAPED):
                F.linear(*operands)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_after_grad_a_weight_is_what_it_wraps(precision: str, is_recorded: bool) -> None:
    x, weight = torch.randn(4, 6), torch.randn(5, 6)
    kept = after_grad(weight)
    with torch.set_grad_enabled(is_recorded), lowp.autocast(precision):
        for _ in range(2):
            assert torch.equal(F.linear(x, kept), F.linear(x, weight))
            weight.mul_(2)  # no cast of it is kept


def test_after_grad_a_cast_is_that_of_what_it_wraps() -> None:
    x = torch.randn(4, 16)
    kept = after_grad(x)
    for text in ("e5m7", "e5m7:stochastic", "nvfp4", "int8"):
        assert torch.equal(lowp.quantize(kept, text, seed=3), lowp.quantize(x, text, seed=3))
    codes = lowp.encode(kept, "e5m7")
    assert isinstance(codes, Tensor) and torch.equal(codes, lowp.encode(x, "e5m7"))  # type: ignore[arg-type]
