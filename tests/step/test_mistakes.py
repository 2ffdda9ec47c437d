"""What a training loop has forgotten shows in its first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.region import rulebook

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Change = Callable[[nn.Module], Any]


def said(
    precision: lowp.Precision,
    change: Change | None = None,
    cast: bool = True,
    unscale: bool = False,
    model: nn.Module | None = None,
) -> list[str]:
    """Return the warnings of the first step of a loop that changes gradients between backward and step."""
    torch.manual_seed(0)
    model = model or nn.Linear(6, 3)
    optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            with precision.autocast() if cast else torch.enable_grad():
                loss = model(X).float().square().mean()
            precision.backward(loss)
            if unscale:
                precision.unscale_(optimizer)
            if change is not None:
                change(model)
            precision.step(optimizer)
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


CLIPS: dict[str, Change] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "by hand": lambda model: [one.grad.clamp_(-0.1, 0.1) for one in model.parameters()],
}


@pytest.mark.parametrize("way", CLIPS)
def test_clipping_of_gradients_that_are_still_scaled_is_reported_once(way: str) -> None:
    (text,) = said(lowp.Precision("fp16"), CLIPS[way])
    assert "while they were multiplied by the loss scale" in text
    assert text.endswith("call precision.unscale_(optimizer) before clipping")
    assert said(lowp.Precision("fp16"), CLIPS[way], unscale=True) == []
    assert said(lowp.Precision("bf16"), CLIPS[way]) == []


def test_changes_of_scaled_gradients_that_any_scale_allows_are_not_reported() -> None:
    def average(model: nn.Module) -> None:
        for one in model.parameters():
            assert one.grad is not None
            one.grad.div_(16).mul_(one.grad > 0)

    assert said(lowp.Precision("fp16"), average) == []


def test_an_overflow_in_the_first_step_leaves_clipping_to_be_seen_in_the_next() -> None:
    precision = lowp.Precision("fp16", loss_scale="dynamic(65536)")
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
    for factor, seen in ((1e30, []), (1.0, ["clipping"])):
        with precision.autocast():
            loss = model(X).float().square().mean() * factor
        optimizer.zero_grad()
        precision.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            precision.step(optimizer)
        assert [str(one.message).split()[-1] for one in caught] == seen


@pytest.mark.parametrize("name", ["bf16", "fp16", "flex16+5", "e5m7"])
def test_a_loop_that_never_enters_the_region_is_told_so_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rulebook, "traced", rulebook.Rulebook)  # nothing counts that another test has compiled
    (text,) = said(lowp.Precision(name), cast=False)
    assert text.startswith(f"nothing ran in {name} in the first step, because precision.autocast() was not entered")
    assert said(lowp.Precision(name)) == []
    assert said(lowp.Precision("fp32"), cast=False) == []


def test_a_region_in_which_no_op_has_a_rule_was_entered() -> None:
    precision, table = lowp.Precision("bf16"), nn.Embedding(4, 3)
    optimizer = precision.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))[1]
    with precision.autocast():
        loss = table(torch.arange(4)).square().mean()
    precision.backward(loss)
    precision.step(optimizer)


class Transposed(nn.Linear):
    """A layer whose weight is [inputs, outputs], as those of GPT-2 in transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight.t())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "quartet2", "mxfp8-rceil"])
def test_a_model_none_of_whose_layers_is_rounded_as_the_preset_says_is_told_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rulebook, "traced", rulebook.Rulebook)
    (text,) = said(lowp.Precision(name))  # a lone layer is the last one
    convolutions = ", conv*" if name.endswith("fp4") else ""
    assert text == (
        f"nothing was rounded to {name} in the first step: no call matched its rules for linear, addmm{convolutions}, "
        "and linear ran under its other rules. For other ops and modules edit the policy that `lowp policy show "
        f"{name} --toml` prints"
    )
    for layer in (nn.Linear(6, 16), Transposed(6, 16)):
        assert said(lowp.Precision(name), model=nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 3))) == []
