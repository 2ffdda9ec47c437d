"""A weight whose updates are below half an ulp stalls in bf16, but not with masters or stochastic rounding."""

from __future__ import annotations

import pytest
from recipes.recording import toy

from lowp.errors import InvalidInput
from lowp.recipes.recording.stall import record_stall
from lowp.recipes.training import Settings, Training


@pytest.fixture(autouse=True)
def only_the_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch)


def test_pure_bf16_stalls_and_the_others_go_on() -> None:
    rate = 2.0**-14  # of updates of at most 2^-13, where most weights have ulps of 2^-9 and more
    document = record_stall(Settings("toy", "bf16-storage", epochs=40, learning_rate=rate).filled(), "2")
    rows = {row["label"]: row for row in document["variants"]}
    assert list(rows) == ["fp32", "bf16 + fp32 masters", "bf16, stochastic", "bf16, to nearest"]
    assert rows["bf16, to nearest"]["never"] > 0.8 > rows["bf16, stochastic"]["never"]
    assert rows["fp32"]["never"] == 0 and rows["bf16 + fp32 masters"]["never"] < 0.1
    means = {label: sum(row["moving"]) / 40 for label, row in rows.items()}
    assert means["bf16, to nearest"] < 0.1 < means["bf16, stochastic"] + 0.1 < means["fp32"]
    assert all(row["step"] == list(range(40)) for row in rows.values())
    training = Training(Settings("toy", epochs=40, learning_rate=rate).filled())
    training.run()
    last, index = training.model.state_dict()["2.weight"], tuple(document["index"])
    distances = (last - toy.initial().state_dict()["2.weight"]).abs()
    assert distances[index] == distances[distances > 0].median() and document["ways"][0][-1] == last[index]
    assert document["way_steps"] == list(range(41))


def test_the_first_step_in_fp32_is_that_of_the_formula() -> None:
    rate = 2.0**-10
    document = record_stall(Settings("toy", "bf16-storage", learning_rate=rate).filled())
    model = toy.initial()
    gradients = toy.gradients(model)[1]
    weights = {name: weight.detach() for name, weight in model.named_parameters() if name in gradients}
    moved = {name: weight - rate * gradients[name] for name, weight in weights.items()}
    first = document["variants"][0]
    assert first["moving"] == [toy.share(toy.flat(moved) != toy.flat(weights), toy.flat(gradients) != 0)]
    assert document["parameter"] == "0.weight"
    index = tuple(document["index"])
    assert document["ways"][0] == [float(weights["0.weight"][index]), float(moved["0.weight"][index])]
    assert document["way_steps"] == [0, 1]
    distances = (moved["0.weight"] - weights["0.weight"]).abs()
    assert distances[index] == distances[distances > 0].median()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "flex16+5"])
def test_a_precision_that_stores_no_float_in_few_bits_is_refused(precision: str) -> None:
    with pytest.raises(InvalidInput, match="use bf16-storage or fp16-storage"):
        record_stall(Settings("toy", precision).filled())


def test_fp16_stalls_too_and_nothing_is_scaled() -> None:
    document = record_stall(Settings("toy", "fp16-storage", epochs=30, learning_rate=2.0**-17).filled())
    assert document["format"] == "fp16"
    assert document["variants"][-1]["label"] == "fp16, to nearest" and document["variants"][-1]["never"] > 0.8
    assert all(one["loss_scale"] == 1 for row in document["variants"] for one in row["history"])


def test_an_unknown_layer_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="unknown layer '1'; allowed: 0, 2"):
        record_stall(Settings("toy", "bf16-storage").filled(), "1")
