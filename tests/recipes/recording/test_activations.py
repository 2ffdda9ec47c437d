"""Gradients of activations in the documents follow the chain rule, and a loss scale multiplies them."""

from __future__ import annotations

import math

import pytest
import torch
from recipes.recording import toy

from lowp.errors import InvalidInput
from lowp.numerics.spectrum import Spectrum
from lowp.recipes.recording.gradients import record_activation_gradients, record_loss_scaling
from lowp.recipes.recording.runs import in_fp16
from lowp.recipes.training import Settings


@pytest.fixture(autouse=True)
def only_the_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch)


def gradients() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return those of the toy, and of the product that its loss adds up."""
    outputs, weights = toy.gradients(toy.initial())
    return {**outputs, "product": torch.ones(1, 3)}, weights


def counted(*tensors: torch.Tensor) -> dict[str, object]:
    return in_fp16(sum(map(Spectrum.of, tensors), Spectrum()))


def test_every_output_of_every_module_is_counted_beside_the_weights() -> None:
    document = record_activation_gradients(Settings("toy").filled())
    outputs, weights = gradients()
    assert document["activations"] == counted(*outputs.values())
    assert document["weights"] == counted(*weights.values())
    present = toy.flat(outputs) != 0
    assert document["activations"]["below"] == toy.share(toy.flat(outputs).abs() < 2**-24, present)
    assert document["activations"]["histogram"]["zeros"] == int((~present).sum())
    for layer in document["layers"]:
        name = layer["name"]
        assert layer["activations"] == counted(outputs[name])["histogram"]["median"]  # type: ignore[index]
        assert layer["weights"] == counted(weights[f"{name}.weight"])["histogram"]["median"]  # type: ignore[index]
    assert [layer["name"] for layer in document["layers"]] == ["0", "2"]


@pytest.mark.parametrize("scale", ["256", "1000", "0.5"])
def test_a_static_scale_multiplies_every_gradient(scale: str) -> None:
    document = record_loss_scaling(Settings("toy", "fp16", loss_scale=scale).filled())
    outputs, _ = gradients()
    assert document["before"] == counted(*outputs.values())
    assert document["after"] == counted(*(one * float(scale) for one in outputs.values()))
    assert document["scales"] == [(0, float(scale))] and document["last_scale"] == float(scale)


def test_the_room_is_the_number_of_doublings_before_overflow() -> None:
    document = record_loss_scaling(Settings("toy", "fp16", loss_scale="256").filled())
    outputs, weights = gradients()
    largest = max(float(one.abs().max()) for one in (*outputs.values(), *weights.values()))
    room = document["room"]
    assert 256 * largest * 2**room <= 65504 < 256 * largest * 2 ** (room + 1)
    assert room == math.floor(math.log2(65504 / 256 / largest))


def test_a_dynamic_scale_is_the_one_that_the_run_had() -> None:
    document = record_loss_scaling(Settings("toy", "fp16", epochs=4, loss_scale="dynamic(1048576)").filled())
    assert document["scales"][:2] == [(0, 2.0**20), (1, 2.0**19)] and document["last_scale"] < 2.0**19
    assert document["skipped_steps"] > 0
    # the first step overflowed: the gradients of 1 times 2^20 are infinite in fp16
    assert document["before"]["infinite"] == 0 < document["after"]["infinite"]


@pytest.mark.parametrize("scale", ["1", "none", None])
def test_a_scale_of_one_is_refused(scale: str | None) -> None:
    with pytest.raises(InvalidInput, match=r"--scale .* has no effect: give a number such as 256, or dynamic"):
        record_loss_scaling(Settings("toy", "fp16", loss_scale=scale).filled())
