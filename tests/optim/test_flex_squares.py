"""Means of squares under shared exponents, written together: the bits and observations of one after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.exponents import StepWriter
from lowp.kernels.choose.dispatch import uses_library
from lowp.optim import FlexWeights

SHAPES = [(3, 5), (16,), (), (0, 4), (1,), (7, 9, 2), (1024, 2), (200, 100), (64, 20), (90, 90), (33,)]
SPECIAL = [math.nan, math.inf, 0.0, -0.0, 1e-45, 1e-30, 3e38, -1.0]


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def kept(batched: bool, monkeypatch: pytest.MonkeyPatch, spoil: bool) -> tuple[list[Any], int]:
    """What the optimizer keeps after each step, as integers, and what is known of sites; the tensors taken together."""
    taken = 0
    write = StepWriter.end

    def counted(self: StepWriter, tensors: Any, sites: Any, squares: Any) -> tuple[Any, list[int]]:
        nonlocal taken
        moved, rest = write(self, tensors if batched else (), sites if batched else (), squares)
        rest = rest if batched else list(range(len(tensors)))
        taken += len(tensors) - len(rest)
        return moved, rest

    generator = torch.Generator().manual_seed(3)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES])
    numbers = lowp.Precision("flex16+5")
    model, optimizer = numbers.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True))
    assert isinstance(optimizer, FlexWeights) and numbers.exponents is not None
    found: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(StepWriter, "end", counted)
        for step in range(5):
            for one in model.parameters():
                one.grad = torch.randn(one.shape, generator=generator) * 2.0 ** (step - 12)
            states = [state for state in optimizer.state.values() if "exp_avg_sq" in state]
            if step == 2 and states:  # not contiguous, and small elements next to large ones
                states[0]["exp_avg_sq"] = torch.rand(5, 3, generator=generator).t()
                states[5]["exp_avg_sq"].view(-1)[:40] = 2.0 ** -torch.arange(40.0)
            if step == 3 and spoil:
                for state in (states[5], states[8]):
                    state["exp_avg_sq"].view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
            optimizer.step()
            found.append(list(numbers.exponents.faults()))
            numbers.exponents.flush()
            for state in optimizer.state.values():
                found += [bits(value) for value in state.values() if isinstance(value, Tensor)]
            found += [bits(one.detach()) for one in model.parameters()]
            found += [(site, numbers.exponents.exponent(site)) for site in numbers.exponents.sites()]
            found.append(str(numbers.exponents.summary()))
    return found, taken


@pytest.mark.filterwarnings("ignore:.*numbers beyond the largest")
@pytest.mark.parametrize("spoil", [False, True], ids=["finite", "special values"])
def test_squares_written_together_have_the_bits_of_one_after_the_other(
    spoil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, taken = kept(True, monkeypatch, spoil)
    one_by_one, _ = kept(False, monkeypatch, spoil)
    assert taken > 100 or not uses_library()
    assert len(at_once) == len(one_by_one)
    for one, other in zip(at_once, one_by_one, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    if spoil:
        assert any(isinstance(one, list) and one for one in at_once)
