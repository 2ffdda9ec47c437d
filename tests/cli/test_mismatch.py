"""`lowp compare --mismatch`: a file of weights, or a recipe that is trained."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowp.recipes import RECIPES, get
from lowp.recipes.training import Settings, Training


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained() -> Training:
    training = Training(Settings("digits", epochs=1, batch=128))
    training.run()
    training.save(Path("run.pt"))
    torch.save(training.model.state_dict(), "weights.pt")
    return training


def test_a_checkpoint_is_compared_in_each_format(lowp: Callable[..., Any], trained: Training) -> None:
    found = lowp("compare", "run.pt", "--mismatch", "bf16,fp16,int8,fp8")
    assert found.code == 0 and found.out.startswith("digits: served, beside training in fp32\n")
    rows = [line.split() for line in found.out.splitlines() if line.split()[:1] and line.split()[0] in ("bf16", "int8")]
    assert [row[0] for row in rows] == ["bf16", "int8"]
    assert float(rows[0][1]) < float(rows[1][1]) and rows[0][6] in ("0", "2")
    assert "540 predictions of the validation set" in found.out


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
def test_the_recipe_of_a_file_is_found_by_its_tensors(lowp: Callable[..., Any], trained: Training) -> None:
    assert lowp("convert", "run.pt", "model.safetensors", "--to", "fp32").code == 0
    command = ("compare", "model.safetensors", "--mismatch", "int8", "--json", "--out", "out.json")
    document = json.loads(lowp(*command).out)
    (row,) = document["rows"]
    assert document["recipe"]["name"] == "digits" and document["settings"]["size"] == "cpu"
    assert row["mean"] > 0 and row["layers"][0]["kl"] > 0
    assert json.loads(Path("out.json").read_text())["rows"] == [row]


def test_a_recipe_is_trained_first(lowp: Callable[..., Any]) -> None:
    command = ("compare", "digits", "--epochs", "1", "--precision", "bf16", "--mismatch", "fp16", "--json")
    found = lowp(*command)
    assert "digits is trained in bf16, 1 epoch" in found.err
    assert json.loads(found.out)["training"] == "bf16"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("rossmann", "--mismatch", "int8"), "rossmann does not predict one class"),
        (("run.pt", "--mismatch", "int8", "--recipe", "mnist"), "run.pt does not fit mnist, size cpu"),
        (("other.pt", "--mismatch", "int8"), "other.pt has the 1 tensor of no recipe, such as mine: name the recipe"),
        (("none.safetensors", "--mismatch", "int8"), "none.safetensors"),
        (("run.pt", "--mismatch", "int8", "--epochs", "3"), "run.pt is trained: omit --epochs and --lr"),
        (("digits", "--mismatch", "int8", "--sweep", "exponent=3..8"), "omit --sweep"),
        (("digits", "--recipe", "mnist"), "--recipe names the recipe of a file for --mismatch"),
        (("digits", "--mismatch", "fp17"), "unknown precision 'fp17'"),
    ],
)
def test_what_cannot_be_compared_is_named(
    arguments: tuple[str, ...],
    error: str,
    lowp: Callable[..., Any],
    trained: Training,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lowp.recipes.serving.RECIPES", {name: RECIPES[name] for name in ("digits", "rossmann")})
    torch.save({"mine": torch.ones(3)}, "other.pt")
    found = lowp("compare", *arguments)
    assert found.code == 2 and error in found.err and found.err.count("\n") == 1


def test_recipes_say_along_which_dimension_their_classes_lie() -> None:
    without = {name for name in RECIPES if get(name).classes is None}
    assert without == {"rossmann", "ssd", "faster-rcnn"}
