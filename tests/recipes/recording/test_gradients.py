"""Gradients and updates in the documents follow the chain rule and the optimizer's formula."""

from __future__ import annotations

import pytest
import torch
from recipes.recording import toy

from lowp.numerics.spectrum import Spectrum
from lowp.recipes.recording.gradients import record_gradients, record_updates
from lowp.recipes.recording.runs import Onlooker, histogram, median
from lowp.recipes.training import Settings, Training


@pytest.fixture(autouse=True)
def only_the_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch)


def weights_of(model: torch.nn.Sequential) -> torch.Tensor:
    return torch.cat([model[0].weight.detach().flatten(), model[2].weight.detach().flatten()])


def octaves_between(change: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return how many octaves the power of two of an update is above that of its weight."""
    return torch.frexp(change)[1] - torch.frexp(weight)[1]


def test_updates_are_the_rate_times_the_gradients() -> None:
    document = record_updates(Settings("toy", epochs=3).filled())
    model = toy.initial()
    for moment in ("first", "middle", "last"):
        found = document["moments"][moment]
        gradient, weight = toy.flat(toy.gradients(model)[1]), weights_of(model)
        change = -toy.RATE * gradient
        expected = Spectrum.of(gradient)
        assert found["gradients"] == {**histogram(expected), "median": pytest.approx(median(expected))}
        ratio, moving = octaves_between(change, weight), change != 0
        assert found["below"] == {
            "bf16": toy.share(ratio < -8, moving),
            "fp16": toy.share(ratio < -11, moving),
        }
        for format, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            stored = weight.to(dtype)
            assert found["lost"][format] == toy.share((stored.double() + change).to(dtype) == stored, moving)
        assert found["learning_rates"] == [toy.RATE, toy.RATE]
        toy.step(model)
    assert [document["moments"][moment]["epoch"] for moment in document["moments"]] == [1, 2, 3]
    assert document["weights"] == 32


def test_a_run_of_two_epochs_has_no_middle_and_one_of_one_epoch_no_end() -> None:
    assert list(record_updates(Settings("toy", epochs=2).filled())["moments"]) == ["first", "last"]
    one = record_updates(Settings("toy", epochs=1).filled())["moments"]
    assert list(one) == ["first"] and one["first"]["steps_sampled"] == [0]


def test_a_naive_run_is_measured_against_fp32_on_its_own_weights() -> None:
    document = record_gradients(Settings("toy", "fp16-naive", epochs=1).filled())
    baseline = Training(Settings("toy", "fp32", epochs=1).filled())
    baseline.run(lambda training: None, lambda: False)
    assert document["fp32"] == baseline.history[-1][document["metric"]["name"]]
    model = toy.initial().half().float()  # the weights as the run stores them
    there = toy.flat(toy.gradients(model)[1])
    present = there != 0
    assert document["gradients"]["below"] == toy.share(there.abs() < 2**-24, present) > 0
    assert document["gradients"]["zero"] == toy.share(there.half() == 0, present) > 0
    # in the run each product is rounded to fp16, as the outputs' gradients are before it
    outputs, _ = toy.gradients(model)
    with torch.no_grad():
        hidden = (toy.X @ model[0].weight.T + model[0].bias).clamp(min=0)
    first = (outputs["0"].half().double().T @ toy.X.half().double()).half()
    last = (outputs["2"].half().double().T @ hidden.half().double()).half()
    own = torch.cat([first.flatten(), last.flatten()])
    assert document["flushed"] == toy.share(own == 0, present)
    weight, change = weights_of(model), -toy.RATE * there.double()
    moving = change != 0
    assert document["updates"]["below"] == toy.share(change.abs() < 2**-24, moving) > 0
    assert document["below"]["fp16"] == toy.share(octaves_between(change, weight) < -11, moving)
    unmoved = (weight - toy.RATE * own.double()).half() == weight.half()
    assert document["unmoved"] == toy.share(unmoved, own != 0) > 0


def test_the_metric_of_fp32_is_that_after_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings("toy", "fp16-naive", epochs=2).filled()
    name = Training(settings).recipe.metric.name
    monkeypatch.setattr(Training, "evaluate", lambda training: {"loss": 1.0, name: training.epoch / 4})
    assert record_gradients(settings)["fp32"] == 1 / 2


def test_the_middle_of_six_epochs_is_the_fourth() -> None:
    moments = record_updates(Settings("toy", epochs=6).filled())["moments"]
    assert {name: (one["epoch"], one["steps_sampled"]) for name, one in moments.items()} == {
        "first": (1, [0]),
        "middle": (4, [3]),
        "last": (6, [5]),
    }


def test_a_run_that_is_stopped_at_once_has_counted_nothing() -> None:
    document = record_updates(Settings("toy", epochs=3).filled(), Onlooker(lambda: True))
    assert all(one["steps_sampled"] == [] and one["learning_rates"] is None for one in document["moments"].values())
