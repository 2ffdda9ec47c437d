"""The counts of flushed gradients and of lost and small updates are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowp.recipes.recipe import Data, Metric, Recipe, Size, TensorExamples, constant
from lowp.recipes.sampling import Sampler
from lowp.recipes.seq2seq import drawn_dates, pair_data
from lowp.recipes.training import Settings, Training, load_data

SLOPES = torch.tensor([1.0, 2.0**-14, 2.0**-26, 0.0])  # the gradients; the third is nothing in fp16, the fourth in any


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def make_toy() -> Recipe:
    """Return four weights of 1 with gradients SLOPES; a step of SGD with rate 1/4 subtracts a quarter of these."""
    return Recipe(
        name="toy",
        summary="",
        source="",
        data="",
        sizes={"cpu": Size(1, 1, 0.25, 4)},
        metric=Metric("loss", higher_is_better=False, share=False),
        load=lambda size, path: Data(TensorExamples(torch.zeros(1)), TensorExamples(torch.zeros(1)), ""),
        make_model=lambda size: Weights(),
        loss=lambda model, batch: (model.weight.float() * SLOPES).sum(),
        evaluate=lambda model, batches: {"loss": 0.0},
        make_optimizer=lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate),
        schedule=constant,
    )


def sampled(precision: str, monkeypatch: pytest.MonkeyPatch, loss_scale: str | None = None) -> dict[str, float | None]:
    monkeypatch.setattr("lowp.recipes.training.get", lambda name: make_toy())
    training = Training(Settings("toy", precision, loss_scale=loss_scale))
    sampler = Sampler(training, 1)
    sampler.step((torch.zeros(1),))
    return sampler.shares()


def test_in_fp32_nothing_is_flushed_and_an_update_below_half_an_ulp_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2^-28 is below half an ulp of 1 - in fp32 (2^-25): one of three is lost; one of three is below 2^-24
    assert sampled("fp32", monkeypatch) == {
        "flushed_gradients": 0.0,
        "lost_updates": pytest.approx(1 / 3),
        "small_updates": pytest.approx(1 / 3),
    }


def test_in_naive_fp16_the_small_gradient_is_flushed_and_the_middle_update_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 1 - 2^-16 rounds to 1 in fp16: of two gradients left one does not move its weight; fp32 wants 2^-28 of the third
    assert sampled("fp16-naive", monkeypatch) == {
        "flushed_gradients": pytest.approx(1 / 3),
        "lost_updates": 0.5,
        "small_updates": pytest.approx(1 / 3),
    }


def test_masters_keep_what_fp16_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    # bf16 has all three gradients, and the fp32 masters lose no more than fp32 does
    shares = sampled("bf16-storage", monkeypatch)
    assert shares["flushed_gradients"] == 0.0 and shares["lost_updates"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("loss_scale", "lost"), [("8", 1 / 3), ("16", None)])
def test_a_skipped_step_has_no_lost_updates(
    loss_scale: str, lost: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SLOPES", SLOPES * (2.0**126 if lost is None else 1))  # times 16 it is infinite
    assert sampled("fp16", monkeypatch, loss_scale)["lost_updates"] == (lost and pytest.approx(lost))


def test_samples_are_spread_over_the_run() -> None:
    training = Training(Settings("digits", epochs=2, batch=128), load_data(Settings("digits")))
    sampler = Sampler(training, 4)
    assert sampler.steps == [2, 6, 11, 15]
    training.step_of_epoch = 6
    assert sampler.wants()
    training.step_of_epoch = 7
    assert not sampler.wants()


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [*(("digits", precision) for precision in ("fp32", "fp16", "bf16-storage", "fp16-naive")), ("seq2seq", "fp32")],
)
def test_looking_changes_no_bit_of_the_run(recipe: str, precision: str) -> None:
    """With SGD, and with Adam, which counts its steps."""
    data = pair_data(drawn_dates(40), 32, "drawn dates") if recipe == "seq2seq" else load_data(Settings(recipe))
    states: list[dict[str, Any]] = []
    for look in (False, True):
        training = Training(Settings(recipe, precision, epochs=1, batch=min(128, len(data.training) // 4)), data)
        sampler = Sampler(training, 5)
        training.run(sampler=sampler if look else None)
        states.append({**training.model.state_dict(), "draw": torch.rand(1)})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_first_step_of_adam_needs_no_state_of_its_masters() -> None:
    data = pair_data(drawn_dates(40), 32, "drawn dates")
    training = Training(Settings("seq2seq", "bf16-storage", epochs=1, batch=8), data)
    sampler = Sampler(training, 3)
    training.run(sampler=sampler)
    assert all(share is not None for share in sampler.shares().values())
