"""Recipes are rows of a table: each builds, with the stated number of parameters, data and schedule."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

from lowp.errors import InvalidInput, UnknownName
from lowp.recipes import RECIPES, get, recipe
from lowp.recipes.recipe import Metric, TensorExamples

CASES = [(name, size) for name in RECIPES for size in get(name).sizes]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_model_has_the_parameters_that_its_size_says(name: str, size: str) -> None:
    row = get(name).size(size)
    with torch.device("meta"):
        model = get(name).make_model(row)
    assert sum(parameter.numel() for parameter in model.parameters()) == row.parameters


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_found_by_its_own_name_and_has_its_default_size(name: str) -> None:
    assert get(name).name == name
    assert get(name).size() is get(name).sizes[get(name).default_size]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_given_to_another_process(name: str) -> None:
    copied = pickle.loads(pickle.dumps(get(name)))
    with torch.device("meta"):
        assert isinstance(copied.make_model(copied.size()), torch.nn.Module)


def test_an_unknown_recipe_or_size_lists_the_allowed_ones() -> None:
    with pytest.raises(UnknownName, match="unknown recipe 'digts'; did you mean digits"):
        get("digts")
    with pytest.raises(UnknownName, match="unknown size of digits 'tiny'; allowed: cpu, full"):
        get("digits").size("tiny")


def test_a_recipe_of_the_users_is_found_in_a_module_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_networks.py").write_text(
        "from dataclasses import replace\nfrom lowp.recipes import get\n"
        "MINE = replace(get('digits'), name='mine')\nOTHER = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert get("my_networks:MINE").name == "mine"
    with pytest.raises(InvalidInput, match=r"'my_networks:OTHER' is int, not a lowp\.recipes\.recipe\.Recipe"):
        get("my_networks:OTHER")
    with pytest.raises(InvalidInput, match=r"no attribute 'YOURS'\. Your own is spelled module:NAME, the module in"):
        get("my_networks:YOURS")
    with pytest.raises(InvalidInput, match="recipe 'my_netwroks:MINE': No module named 'my_netwroks'"):
        get("my_netwroks:MINE")


def test_the_digits_are_the_real_ones_and_held_back_examples_are_not_trained_on() -> None:
    data = get("digits").load(get("digits").size(), None)
    training, labels = data.training.batch(torch.arange(len(data.training)))
    validation, _ = data.validation.batch(torch.arange(len(data.validation)))
    assert (len(training), len(validation)) == (1257, 540)
    assert training.dtype == torch.float32 and training.min() == 0 and training.max() == 1
    assert sorted(labels.unique().tolist()) == list(range(10))
    assert len(torch.cat([training, validation]).unique(dim=0)) == 1797


def test_the_digits_take_no_path() -> None:
    with pytest.raises(InvalidInput, match=r"digits does not take --data .*somewhere"):
        get("digits").load(get("digits").size(), Path("somewhere"))


def test_a_batch_is_the_rows_asked_for() -> None:
    x, y = TensorExamples(torch.arange(5), torch.arange(5) * 10).batch(torch.tensor([3, 0]))
    assert x.tolist() == [3, 0] and y.tolist() == [30, 0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (recipe.constant, {0.0: 1.0, 0.5: 1.0, 0.99: 1.0}),
        (recipe.linear_decay, {0.0: 1.0, 0.25: 0.75, 0.99: 0.01}),
        (recipe.step_decay, {0.0: 1.0, 0.49: 1.0, 0.5: 0.1, 0.74: 0.1, 0.75: 0.01, 0.99: 0.01}),
        (recipe.one_cycle, {0.0: 0.04, 0.15: 0.52, 0.3: 1.0, 0.65: 0.500002, 1.0: 4e-6}),
    ],
)
def test_a_schedule_sets_a_share_of_the_first_learning_rate(schedule: recipe.Callable, expected: dict) -> None:  # type: ignore[type-arg]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    for progress, factor in expected.items():
        schedule(optimizer, progress)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * factor, rel=1e-6)


def test_a_metric_knows_which_way_is_worse() -> None:
    assert Metric("accuracy").worse_by(0.7, than=0.9) == pytest.approx(0.2)
    assert Metric("loss", higher_is_better=False, share=False).worse_by(0.7, than=0.9) == pytest.approx(-0.2)
    assert Metric("accuracy").resolution(540) == 1 / 540
    assert Metric("loss", share=False).resolution(540) == 0
