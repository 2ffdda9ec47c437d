"""A profile of models that the script copies, saves, exports, or gives other parts during the training."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from numerics.small import network, train
from torch import nn

import lowp
from lowp.numerics.models import Models
from lowp.numerics.record import Key


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def test_copies_and_pickles_of_a_watched_model_have_no_profiler(tmp_path: object) -> None:
    model = network()
    with lowp.profile(model, out=f"{tmp_path}/run.json", max_overhead=None) as profile:
        train(model, sgd(model), 2)
        assert hooks_of(model)
        loss = model(torch.randn(4, 8, 16)).sum()  # in a step that is watched, every module has hooks
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        file = io.BytesIO()
        torch.save(model, file)
        loss.backward()
        steps, states = profile.step, [copy.deepcopy(one.state_dict()) for one in copies]
        for one in copies:
            hooks = [hook for module in one.modules() for hook in hooks_of(module)]
            assert hooks and not any("lowp" in type(getattr(hook, "__self__", hook)).__module__ for hook in hooks)
            one(torch.randn(4, 8, 16)).sum().backward()
    assert steps == 2 and b"lowp" not in pickle.dumps(copies[0]) and b"lowp" not in file.getvalue()
    for one, state in zip(copies, states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


def test_parts_that_replace_others_are_recorded_by_their_paths() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = sgd(model)
    with lowp.profile(model, max_overhead=None) as profile:
        train(model, optimizer, 2)
        model[2] = nn.Sequential(nn.Linear(32, 8), nn.Tanh())
        optimizer.add_param_group({"params": model[2].parameters()})
        train(model, optimizer, 2)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        train(model, sgd(model), 1)
    tensors = profile.record.tensors
    assert profile.record.sampled == [0, 1, 2, 4]
    assert Key("2", "linear", "output", "forward") in tensors
    assert {Key("2.0", "linear", "output", "forward"), Key("2.1", "tanh", "output", "forward")} <= tensors.keys()
    assert {Key(name, "weight", "update", "step") for name in ("0", "2", "2.0")} <= tensors.keys()
    first, inner = (tensors[Key(name, "weight", "update", "step")] for name in ("0", "2.0"))
    assert (first.count, inner.count) == (4 * 32 * 16, 2 * 32 * 8)


def test_models_are_looked_through_again_once_a_part_has_changed_and_tell_of_new_paths() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    models = Models(model)
    version = models.version
    assert not models.renew() and models.version == version
    model[1] = nn.Tanh()  # in the place of another
    assert not models.renew() and models.version == version + 1 and models.modules["1"] is model[1]
    model.append(nn.Linear(2, 2))
    assert models.renew() and models.parameters[id(model[2].weight)] == "2.weight"
    assert not models.renew() and models.version == version + 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recorded", [torch.export.export, torch.jit.trace])
def test_a_model_in_training_can_be_exported(recorded: Callable[..., object]) -> None:
    model = network()
    with lowp.profile(model, max_overhead=None) as profile:
        train(model, sgd(model), 1)
        recorded(model, (torch.randn(4, 8, 16),))
        train(model, sgd(model), 1)
    assert profile.record.sampled == [0, 1]
