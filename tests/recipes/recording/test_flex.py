"""Pictures of shared exponents: the training is the recipe's own, and numbers are counted before they are rounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lowp.errors import InvalidInput
from lowp.numerics.spectrum import Spectrum
from lowp.recipes.recording import flex
from lowp.recipes.recording.flex import record_autoflex
from lowp.recipes.recording.runs import Onlooker, below
from lowp.recipes.sampling import Share
from lowp.recipes.training import Settings, Training


def test_the_learning_rate_follows_the_schedule_over_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step, rates = Training.step, []

    def watched(self: Training, *arguments: Any) -> Any:
        result = step(self, *arguments)
        rates.append(self.optimizer.param_groups[0]["lr"])
        return result

    monkeypatch.setattr(Training, "step", watched)
    reported: list[tuple[str, int]] = []
    settings = Settings("digits", "flex16+5", batch=314).filled()  # 4 steps an epoch
    record_autoflex(settings, 10, onlooker=Onlooker(on_progress=lambda name, done: reported.append((name, done))))
    assert rates == pytest.approx([0.1 * (1 - number / 12) for number in range(10)])
    assert reported == [("digits", number) for number in range(1, 11)]


def test_numbers_are_counted_by_octave_and_as_the_exponents_and_the_largest_of_them_lose_them() -> None:
    numbers = [0.0, -(2.0**-70), 2.0**-49, -1.5 * 2.0**-48, 2.0**-47, 2.0**-30, 2.0**-7, 2.0**-1, -1.0, 1.5]
    numbers += [2.0**15, 1.5 * 2.0**15, -(2.0**16), 2.0**20]
    written = flex._Written()
    for exponent in (-5, -7):
        written.add(Spectrum.of(torch.tensor(numbers)), exponent)
    found = written.document()
    counts = {-70: 1, -49: 1, -48: 1, -47: 1, -30: 1, -7: 1, -1: 1, 0: 2, 15: 2, 16: 1, 20: 1}
    assert {found["lowest"] + place: count / 2 for place, count in enumerate(found["counts"]) if count} == counts
    assert (found["elements"], found["zeros"]) == (28, 2)
    assert found["below_maximum"] == 9 / 13  # those below 2^5
    assert found["below_unit"] == (6 + 5) / 26  # those below half of 2^-5 and of 2^-7
    assert found["exponents"] == [-7, -5]


def test_shares_of_one_or_two_numbers_are_of_all_of_them() -> None:
    assert below(Spectrum.of(torch.tensor([2.0**-30])), -24) == 1.0 and below(Spectrum(), -24) == 0.0
    assert (Share(1, 1).value, Share(1, 2).value, Share().value) == (1.0, 0.5, 0.0)
    written = flex._Written()
    written.add(Spectrum.of(torch.tensor([2.0**-30])), 0)
    assert written.document()["below_unit"] == 1.0
    for factor, share in ((1.0, 0.0), (0.75, 0.5)):
        written = flex._Written()
        written.add(Spectrum.of(torch.tensor([1.0, factor * 2.0**-15])), 0)
        assert written.document()["below_maximum"] == share


def test_a_layer_that_is_drawn_is_the_named_one_or_the_first_with_an_output() -> None:
    sites = [
        "update of d.weight",
        "weight of a.weight",
        "update of a.bias",
        "update of a.weight",
        "output of ab linear",
    ]
    sites += ["output of a linear", "output of b conv2d", "weight of b.weight", "update of b.weight"]
    exponents = cast(Any, SimpleNamespace(sites=lambda: sites))
    first = ("a", ("weight of a.weight", "output of a linear", "update of a.weight"))
    assert flex._sites(exponents, None) == flex._sites(exponents, "a") == first
    assert flex._sites(exponents, "b") == ("b", ("weight of b.weight", "output of b conv2d", "update of b.weight"))
    with pytest.raises(InvalidInput, match=r"unknown layer 'd'.* a, b"):
        flex._sites(exponents, "d")
    sites.clear()
    with pytest.raises(InvalidInput, match="unknown layer None"):
        flex._sites(exponents, None)


def test_windows_are_of_the_first_and_the_last_tenth_of_the_steps() -> None:
    settings = Settings("digits", "flex16+5", batch=314).filled()
    for steps, tenth in ((5, 1), (20, 2)):
        document = flex.record_flex_window(settings, steps)
        assert (document["steps"], document["layer"]) == (steps, "0")
        sizes = {"weights": 128 * 64, "activations": 314 * 128, "updates": 128 * 64}
        sites = {"weights": "weight of 0.weight", "activations": "output of 0 linear", "updates": "update of 0.weight"}
        assert {name: window["site"] for name, window in document["windows"].items()} == sites
        for name, window in document["windows"].items():
            for moment in ("first", "last"):
                assert window[moment]["elements"] == tenth * sizes[name], (name, moment)
    with pytest.raises(InvalidInput, match="bf16 has no predicted shared exponents"):
        flex.record_flex_window(Settings("digits", "bf16").filled(), 3)


def test_a_recorder_of_shared_exponents_stops_and_has_whole_epochs() -> None:
    settings = Settings("digits", "flex16+5", batch=314).filled()  # 4 steps an epoch
    asked: list[int] = []
    document = record_autoflex(settings, 8, onlooker=Onlooker(stop=lambda: (asked.append(1), len(asked) > 3)[1]))
    assert document["steps"] == 3 and all(one["step"] == [0, 1, 2] for one in document["series"].values())
    training = Training(settings)
    for steps, epochs in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        flex._train(training, steps, Onlooker(stop=lambda: True))
        assert training.epochs == epochs
