"""A scaler's state is exchanged with torch's, and incomplete states are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step.cases import INF, NAN, make_model, one_parameter, started

from lowp.step import GradScaler


@pytest.mark.parametrize("lazily", [True, False])
def test_state_goes_between_lowp_and_torch(lazily: bool) -> None:
    arguments = {"init_scale": 3.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2}
    kinds: list[Callable[..., torch.amp.GradScaler]] = [GradScaler, torch.amp.GradScaler]
    for source in kinds:
        for target in kinds:
            saved = source("cpu", **arguments)
            loaded = target("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
            loaded._init_growth_tracker = 7
            if lazily:
                loaded.scale(torch.ones(1))
            loaded.load_state_dict(saved.state_dict())
            assert (loaded.get_scale(), loaded.get_growth_factor()) == (3.0, 4.0)
            assert (loaded.get_backoff_factor(), loaded.get_growth_interval()) == (0.5, 2)
            assert loaded._init_growth_tracker == 0 and loaded._get_growth_tracker() == 0


def test_a_resumed_scaler_goes_on_as_the_one_that_was_saved() -> None:
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=3, hysteresis=2)
    resumed = None
    gradients = [1.0, INF, 1.0, 1.0, INF, 1.0, 1.0, 1.0, INF]
    for number, gradient in enumerate(gradients):
        if number == 4:
            resumed = GradScaler("cpu", hysteresis=2)
            resumed.load_state_dict(copy.deepcopy(scaler.state_dict()))
        for each in (scaler, resumed):
            if each is not None:
                each.scale(torch.ones(()))
                each.step(one_parameter([gradient]))
                each.update()
    assert resumed is not None and resumed.state_dict() == scaler.state_dict()
    assert scaler.state_dict()["lowp"] == {"steps": 9, "overflows": 1, "stuck": 0}


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"scale": 0.0}, ValueError, "the scale of the loaded state cannot be 0.0: allowed is a finite number"),
        ({"scale": NAN}, ValueError, "cannot be nan"),
        ({"scale": INF}, ValueError, "cannot be inf"),
        ({"scale": "65536"}, ValueError, "cannot be '65536'"),
        ({"growth_factor": 0.5}, AssertionError, "growth factor must be > 1.0"),
        ({"backoff_factor": 1.5}, AssertionError, "backoff factor must be < 1.0"),
        ({"growth_factor": 2.0**70}, ValueError, "has growth_factor=1.1805916207174113e+21, by which one step moves"),
        ({"backoff_factor": 1e-300}, ValueError, "has backoff_factor=1e-300, by which one step moves the scale beyond"),
        ({"growth_interval": "often"}, ValueError, "growth_interval must be a number of steps"),
        ({"_growth_tracker": -1}, ValueError, "_growth_tracker=-1"),
        ({"lowp": [1]}, ValueError, "entry 'lowp' of the loaded state must be a dictionary of counters"),
        ({"lowp": {"steps": "x"}}, ValueError, "steps='x'"),
        ({"scale": None, "growth_factor": None}, KeyError, "missing: scale, growth_factor"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    scaler = started(init_scale=8.0, growth_factor=3.0)
    before = scaler.state_dict()
    state = {**GradScaler("cpu").state_dict(), **change}
    with pytest.raises(kind) as caught:
        scaler.load_state_dict({name: value for name, value in state.items() if value is not None})
    assert text in str(caught.value) and scaler.state_dict() == before


def test_extreme_factors_that_a_scaler_has_itself_are_loaded() -> None:
    scaler = started(growth_factor=2.0**70)
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.get_growth_factor() == 2.0**70


def test_an_empty_state_and_no_dictionary_are_refused() -> None:
    with pytest.raises(RuntimeError, match="source state dict is empty, possibly because it was saved from a disabled"):
        GradScaler("cpu").load_state_dict({})
    with pytest.raises(ValueError, match="the state of a scaler must be a dictionary"):
        GradScaler("cpu").load_state_dict([1.0])  # type: ignore[arg-type]


def test_it_is_pickled_and_copied_between_steps_only() -> None:
    scaler = started(init_scale=4.0, growth_interval=5)
    scaler.watch(make_model())
    scaler.unscale_(one_parameter([1.0]))
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration, or at the end"):
        pickle.dumps(scaler)
    scaler.update()
    for other in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert other.state_dict() == scaler.state_dict() and other._scale is None
