"""Convolutions of integers run from their arguments alone: the bits of the general path, which does all other calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.region import handover
from lowp.region.engine import Engine


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 8, (3, 1), stride=2, dilation=(1, 2), groups=2),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.ConvTranspose2d(6, 6, 3, stride=2, output_padding=1, groups=3),
        nn.Flatten(2),
        nn.Conv1d(6, 4, 5, padding=2),
        nn.Unflatten(1, (2, 2, 1)),
        nn.Conv3d(2, 3, (2, 1, 3)),
    )


def trained(precision: str, steps: int = 3) -> list[Any]:
    """Outputs, gradients, those of a gradient's norm, an evaluation, and the exponents of all sites, of some steps."""
    model, numbers, found = layers(), lowp.Precision(precision), []
    x = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(steps):
        with numbers.autocast():
            y = model(x)
        inputs = [x, *model.parameters()]
        gradients = torch.autograd.grad(y, inputs, y.detach() + 1, create_graph=True)
        twice = torch.autograd.grad(sum(one.square().sum() for one in gradients), inputs, allow_unused=True)
        with numbers.autocast(), torch.no_grad():
            found += [y, *gradients, *(one for one in twice if one is not None), model(x)]
        if numbers.exponents is not None:
            numbers.exponents.flush()
            found.append({site: numbers.exponents.exponent(site) for site in numbers.exponents.sites()})
    return found


def are_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("precision", ["dfp16", "flex16+5"])
def test_they_have_the_bits_and_the_sites_of_the_general_path(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    general: list[str] = []
    run = Engine._run
    monkeypatch.setattr(
        Engine, "_run", lambda self, plan, *given: general.append(plan.row.name) or run(self, plan, *given)
    )
    quick = trained(precision)
    assert not [name for name in general if name.startswith("conv")]
    monkeypatch.setattr(handover, "functorch_transforms", lambda: True)  # no fast path is taken
    slow = trained(precision)
    assert {"conv1d", "conv2d", "conv3d", "conv_transpose2d"} <= set(general)
    assert len(quick) == len(slow) and all(map(are_same, quick, slow))


X, W, B, V = torch.randn(2, 4, 6, 5), torch.randn(6, 4, 3, 3), torch.randn(6), torch.randn(4, 4, 3, 3)
OTHERS: dict[str, Callable[[], Tensor]] = {
    "by name": lambda: F.conv2d(X, W, bias=B),
    "numbers for tuples": lambda: torch.conv2d(X, W, B, 1, 1, 1, 1),
    "padding by a word": lambda: torch.conv2d(X, W, B, (1, 1), "same", (1, 1), 1),
    "transposed, seven arguments": lambda: torch.conv_transpose2d(X, V, None, (2, 2), (0, 0), (1, 1), 1),
    "the general function": lambda: torch.convolution(X, W, B, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
    "one picture": lambda: torch.conv2d(X[0], W, B, (1, 1), (1, 1), (1, 1), 1),
    "no pictures": lambda: torch.conv2d(X[:0], W, B, (1, 1), (1, 1), (1, 1), 1),
    "fp64": lambda: torch.conv2d(X.double(), W.double(), B.double(), (1, 1), (1, 1), (1, 1), 1),
    "infinity": lambda: torch.conv2d(X.clone().fill_(math.inf), W, B, (1, 1), (0, 0), (1, 1), 1),
    "infinite bias": lambda: torch.conv2d(X, W, B / 0, (1, 1), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("precision", ["dfp16", "flex16+5"])
@pytest.mark.parametrize("call", OTHERS)
def test_other_calls_have_the_same_result(call: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for is_quick in (True, False):
        if not is_quick:
            monkeypatch.setattr(handover, "functorch_transforms", lambda: True)  # no fast path is taken
        with lowp.Precision(precision).autocast():
            torch.conv2d(
                X, W, B, (1, 1), (0, 0), (1, 1), 1
            )  # fp64 alone would have the region warn that it rounds nothing
            results.append(OTHERS[call]().nan_to_num(7))
    assert torch.equal(*results)


IMPOSSIBLE: dict[str, Callable[[], Tensor]] = {
    "channels": lambda: torch.conv2d(X, W[:, :3], B, (1, 1), (0, 0), (1, 1), 1),
    "bias": lambda: torch.conv2d(X, W, B[:2], (1, 1), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("wrong", IMPOSSIBLE)
def test_impossible_ones_raise_torchs_error(wrong: str) -> None:
    with lowp.autocast("dfp16"), pytest.raises(RuntimeError, match=wrong):
        IMPOSSIBLE[wrong]()


@pytest.mark.skipif(not uses_library(), reason="without the library the product itself computes them")
def test_the_sizes_of_a_layer_are_computed_in_its_first_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trained("flex16+5", steps=1)
    asked: list[str] = []
    monkeypatch.setattr(ConvolutionShape, "of", lambda *given: asked.append("of"))
    monkeypatch.setattr(ConvolutionShape, "three_dimensional", lambda self: asked.append("three_dimensional"))
    trained("flex16+5", steps=2)
    assert not asked
