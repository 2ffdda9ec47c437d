"""`lowp convert --serve`: the layers of a recipe's model packed in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowp as library
from lowp.inference import load
from lowp.recipes.digits import DIGITS, make_model
from lowp.recipes.training import Settings, Training


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training(Settings("digits", epochs=1, batch=128))
    training.run()
    torch.save(training.model.state_dict(), "weights.pt")


def test_a_file_of_weights_becomes_a_file_of_packed_layers(lowp: Callable[..., Any]) -> None:
    found = lowp("convert", "weights.pt", "served.safetensors", "--serve", "nvfp4", "--rounding", "gptq")
    assert found.code == 0 and found.out.startswith("digits in nvfp4, rounded by gptq: ")
    model = make_model(DIGITS.size("cpu"))
    model.load_state_dict(library.load("weights.pt"))
    served, x = load(make_model(DIGITS.size("cpu")), "served.safetensors"), torch.rand(50, 64)
    nearest = library.quantize_model(model, "nvfp4")
    with torch.no_grad():
        wanted = model(x)
    assert (served(x) - wanted).norm() < 0.2 * wanted.norm() and not torch.equal(served(x), nearest(x))
    again = lowp("convert", "weights.pt", "served.safetensors", "--serve", "nvfp4", "--overwrite", "--json")
    document = json.loads(again.out)
    assert document["bytes_after"] < 0.2 * document["bytes_before"] and document["kept"] == {}
    assert torch.equal(load(make_model(DIGITS.size("cpu")), "served.safetensors")(x), nearest(x))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "no format: give --to FORMAT, or --serve FORMAT for the model of a recipe"),
        (("--to", "int8", "--rounding", "gptq"), "--rounding is for --serve, and --to converts tensors of any model"),
        (("--serve", "int8", "--keep", "0.*"), "--keep is for --to: omit it"),
        (("--serve", "int4", "--rounding", "gpqt"), "unknown rounding 'gpqt'"),
        (("--serve", "int9x"), "int9x"),
        (("--serve", "int8", "--recipe", "gpt"), "does not fit gpt"),
        (("--to", "int8", "--serve", "int8"), "not allowed with argument"),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(
    lowp: Callable[..., Any], arguments: tuple[str, ...], error: str
) -> None:
    found = lowp("convert", "weights.pt", "served.safetensors", *arguments)
    assert found.code != 0 and error in found.err and not Path("served.safetensors").exists()


def test_an_existing_file_stays(lowp: Callable[..., Any]) -> None:
    Path("served.safetensors").write_text("mine")
    found = lowp("convert", "weights.pt", "served.safetensors", "--serve", "int8")
    assert found.code != 0 and "already exists: give --overwrite" in found.err
    assert Path("served.safetensors").read_text() == "mine"
