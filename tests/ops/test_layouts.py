"""Operands are their numbers, however these lie: with gaps, in a window, transposed, negated by a view, or expanded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import layouts
from torch import Tensor

import lowp

OPS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(5, 3, 33), (17, 33), (17,)]),
    "matmul": (torch.matmul, [(3, 9, 33), (3, 33, 10)]),
    "baddbmm": (torch.baddbmm, [(3, 9, 10), (3, 9, 33), (3, 33, 10)]),
    "mv": (torch.mv, [(9, 33), (33,)]),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), [(3, 9, 32), (3, 7, 32)]),
    "bilinear": (F.bilinear, [(4, 5), (4, 6), (3, 5, 6)]),
    "conv1d": (F.conv1d, [(2, 6, 19), (8, 6, 3)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 6, 9, 11), (8, 6, 3, 3), (8,)]),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2, stride=2), [(2, 6, 9, 11), (8, 3, 3, 3)]),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 6, 5, 7), (6, 4, 3, 3)]),
    "conv3d": (F.conv3d, [(1, 3, 5, 6, 5), (4, 3, 2, 2, 2)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (40,), w, b), [(6, 7, 40), (40,), (40,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (40,), w), [(6, 7, 40), (40,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 6, 5, 4), (6,), (6,)]),
    "softmax": (lambda x: F.softmax(x, -1), [(5, 6, 33)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 10, 16)] * 3),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(9) % 7), [(9, 7)]),
    "relu": (F.relu, [(5, 6, 3, 3)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [(2, 5, 8, 8)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [(2, 5, 8, 8)]),
    "sum of two": (torch.add, [(4, 5, 6), (4, 5, 6)]),
    "embedding": (lambda w: F.embedding(torch.arange(12) % 7, w), [(7, 20)]),
}


def found(
    name: str, precision: str, operands: list[Tensor], lie: Callable[[Tensor], Tensor] = Tensor.clone
) -> list[Tensor]:
    """Return the result of an op in a region, and the gradients of its operands from one that lies as told."""
    given = [one.detach().requires_grad_() for one in operands]
    with lowp.autocast(precision):
        result = OPS[name][0](*given)
    arriving = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, given, lie(arriving))]


def check(name: str, precision: str, seen: list[Tensor], wanted: list[Tensor], what: str) -> None:
    # torch sums in another order where numbers lie otherwise: in convolutions, norms and attention
    slack = 2 * torch.finfo(wanted[0].dtype).eps + 1e-4
    for one, other in zip(seen, wanted, strict=True):
        largest = float(other.abs().amax())
        torch.testing.assert_close(one, other, rtol=0, atol=slack * largest, msg=lambda text: f"{name}, {what}: {text}")


@pytest.mark.parametrize("precision", ["dfp16", "flex16+5", "mxfp8", "fp16"])
@pytest.mark.parametrize("name", OPS)
def test_operands_and_gradients_are_read_as_they_lie(name: str, precision: str) -> None:
    operands = [torch.randn(shape) for shape in OPS[name][1]]
    wanted = found(name, precision, operands)
    for place, one in enumerate(operands):
        for layout, lying in layouts(one):
            given = [*operands[:place], lying, *operands[place + 1 :]]
            check(name, precision, found(name, precision, given), wanted, f"operand {place} {layout}")
        first = one[:1].expand(one.shape)
        dense, expanded = ([*operands[:place], lying, *operands[place + 1 :]] for lying in (first.clone(), first))
        check(
            name,
            precision,
            found(name, precision, expanded),
            found(name, precision, dense),
            f"operand {place} expanded",
        )
    for layout in dict(layouts(wanted[0])) if wanted[0].dim() else ():
        seen = found(name, precision, operands, lambda x, layout=layout: dict(layouts(x))[layout])  # type: ignore[misc]
        check(name, precision, seen, wanted, f"gradient {layout}")
