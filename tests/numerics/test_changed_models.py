"""A profile of models that the script copies, saves, exports, or gives other parts during the training."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numerics.small import network, train
from torch import nn

import lowp
from lowp.numerics.models import Cycle, Models, fingerprint_of
from lowp.numerics.record import Key
from lowp.numerics.windows import WatchedScale


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


# -- by hand ----------------------------------------------------------------------------------------------------------
def test_a_step_ends_when_each_optimizer_has_stepped_or_one_has_stepped_twice() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    cycle = Cycle(Models(model))
    first, second = sgd(model[0]), sgd(model[1])
    assert cycle.alone is None and not cycle.knows(first)
    assert [cycle.ends_with(first) for _ in range(3)] == [True] * 3
    assert cycle.alone is first and cycle.knows(first)
    assert cycle.ends_with(second) and cycle.alone is None  # one that is new ends a step
    turns = [first, second, first, second, second, first, first, first, second]
    assert [cycle.ends_with(one) for one in turns] == [False, True, False, True, False, True, False, True, False]
    cycle = Cycle(Models(model))
    ends = [cycle.ends_with(one) for one in [second, *[first] * 70]]
    assert ends[:6] == [True, True, False, True, False, True]  # each second step, until the other is forgotten
    assert ends[62:] == [False, True, True, True, True, True, True, True, True]
    assert cycle.parameters(first) == [("0.weight", model[0].weight), ("0.bias", model[0].bias)]
    assert cycle.trains(model) and cycle.trains(model[0]) and not cycle.trains(model[2])
    assert len(cycle.parameters(second)) == 2
    around, reordered = sgd(model[0]), torch.optim.SGD([model[0].bias, model[0].weight], lr=0.1)
    assert cycle.is_wrapper(around) and cycle.is_wrapper(around)
    assert (
        not cycle.is_wrapper(first) and not cycle.is_wrapper(reordered) and not cycle.is_wrapper(sgd(nn.Linear(1, 1)))
    )


class Scaled(nn.Linear):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("size", torch.ones(1))


def test_models_have_names_and_what_is_in_them_has_paths() -> None:
    one = nn.Sequential(Scaled(), nn.ReLU())
    models = Models(one)
    assert list(models.modules) == ["", "0", "1"] and models.roots == {"": one} and models.version == 1
    assert [name for name, _ in models.named_parameters()] == ["0.weight", "0.bias"]
    assert [name for name, _ in models.named_buffers()] == ["0.size"] and models.path_of("0") == "0"
    assert models.add(nn.Sequential(nn.Linear(1, 1, bias=False))) == "Sequential"
    assert models.add(nn.Sequential()) == "" and models.version == 3
    assert list(models.roots) == ["Sequential", "Sequential2", "Sequential3"]
    paths = ["Sequential", "Sequential.0", "Sequential.1", "Sequential2", "Sequential2.0", "Sequential3"]
    assert list(models.modules) == paths and models.paths[id(one[0])] == "Sequential.0"
    assert set(models.parameters.values()) == {"Sequential.0.weight", "Sequential.0.bias", "Sequential2.0.weight"}
    assert models.path_of("1") == "Sequential.1" and models.path_of("7") == "7"
    assert models.owns(one[0]) and not models.owns(nn.ReLU()) and next(iter(models)) is one
    assert not models.renew()
    one[1] = nn.Tanh()
    assert models.renew() is False and models.version == 4 and not models.renew()  # of the same paths
    one.append(nn.ReLU())
    assert models.renew() is True and "Sequential.2" in models.modules
    unnamed = Models(nn.Linear(1, 1))
    assert unnamed.add(nn.ReLU(), renames=False) == "" and list(unnamed.roots) == ["", "ReLU"]


def test_the_header_of_a_record_describes_its_models() -> None:
    models = Models({"a": nn.Linear(2, 3).half(), "b": Scaled()})
    header = models.header(SimpleNamespace(preset=SimpleNamespace(name="fp8")))
    assert (header["model"], header["parameters"], header["dtypes"]) == ("Linear, Scaled", 11, ["float16", "float32"])
    assert (header["device"], header["precision"], header["models"]) == ("cpu", "fp8", ["a", "b"])
    alone = Models(nn.ReLU()).header(None)
    assert (alone["parameters"], alone["device"], alone["precision"], "models" in alone) == (0, "cpu", "fp32", False)
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert Models(tied).header(None)["parameters"] == 4
    assert fingerprint_of(nn.Linear(2, 3)) == fingerprint_of(nn.Linear(2, 3)) != fingerprint_of(nn.Linear(3, 2))
    assert fingerprint_of(nn.Linear(2, 3)) == "4c0006741ddd7d24", "as in profiles that are kept"
    with pytest.raises(TypeError, match="a profile needs a torch module, not int"):
        Models(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a monitor needs a torch module, not int"):
        Models(3, in_place=True)  # type: ignore[arg-type]


def test_a_scale_that_is_lower_after_a_backward_pass_without_a_step_has_skipped_it() -> None:
    fed: list[torch.Tensor] = []
    scaler = SimpleNamespace(scale=8.0, is_enabled=lambda: True, add_exponents=fed.append)
    scaler.get_scale = lambda: scaler.scale
    watched = WatchedScale(scaler)
    assert watched.is_used and not watched.has_skipped() and watched.begin_backward() == 8.0
    assert not watched.has_skipped()
    for after, steps, skipped in ((4.0, False, True), (4.0, False, False), (2.0, True, False), (4.0, False, False)):
        watched.begin_backward()
        if steps:
            watched.stepped()
        scaler.scale = after
        assert watched.has_skipped() is skipped and not watched.has_skipped()
    counts = np.zeros(256, np.int64)
    counts[[0, 100, 252, 253, 255]] = [1, 2, 3, 4, 5]
    watched.feed(counts)
    found = {place: int(count) for place, count in enumerate(fed[0]) if count}
    assert found == {2: 1, 102: 2, 254: 3 + 4 + 5}
    scaler.scale = 2.0**-3
    watched.feed(counts)
    assert {place: int(count) for place, count in enumerate(fed[1]) if count} == {0: 1, 97: 2, 249: 3, 250: 4, 252: 5}
    for off in (None, SimpleNamespace(is_enabled=lambda: False)):
        unused = WatchedScale(off)
        assert not unused.is_used and unused.begin_backward() == 1.0 and not unused.has_skipped()
        unused.feed(counts)


def test_the_names_of_what_an_optimizer_steps_follow_those_of_the_models() -> None:
    model = nn.Linear(2, 2)
    models, optimizer = Models(model), sgd(model)
    cycle = Cycle(models)
    assert [name for name, _ in cycle.parameters(optimizer)] == ["weight", "bias"]
    models.add(nn.Linear(2, 2))
    assert [name for name, _ in cycle.parameters(optimizer)] == ["Linear.weight", "Linear.bias"]
    model.weight = nn.Parameter(torch.ones(2, 2))
    optimizer.param_groups[0]["params"] = [model.weight]
    assert cycle.parameters(optimizer) == [("Linear.weight", model.weight)]


def test_parameters_that_were_replaced_are_known_and_those_that_others_stand_for_keep_their_names() -> None:
    model = nn.Linear(2, 2)
    models, old, version = Models(model), model.weight, 1
    assert not models.renew() and models.version == version
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert models.renew() is False and models.version == version + 1
    assert {name: one for one, name in models.parameters.items()} == {
        "weight": id(model.weight),
        "bias": id(model.bias),
    }
    assert id(old) not in models.parameters

    def look(module: nn.Module, args: object) -> None:
        models.renew()
        seen.append(dict(models.parameters))

    seen: list[dict[int, str]] = []
    model.register_forward_pre_hook(look)
    known = dict(models.parameters)
    torch.func.functional_call(model, {"weight": torch.zeros(2, 2)}, (torch.ones(1, 2),))
    assert seen == [known] and models.version == version + 2
    model.extra = nn.Linear(1, 1)
    assert models.renew() is True and models.parameters[id(model.extra.bias)] == "extra.bias"


def test_one_model_needs_no_name_and_two_of_a_kind_get_numbers() -> None:
    models = Models({"generator": nn.Linear(2, 2)})
    assert list(models.roots) == [""] and set(models.parameters.values()) == {"weight", "bias"}
    assert models.add(nn.Linear(2, 2)) == "Linear" and list(models.roots) == ["Linear", "Linear2"]
    assert models.add(nn.Linear(2, 2)) == "" and list(models.roots) == ["Linear", "Linear2", "Linear3"]
    assert list(Models({"a": nn.ReLU(), "b": nn.ReLU()}).roots) == ["a", "b"]


def test_the_parameters_of_an_optimizer_are_looked_for_again_where_it_has_got_more() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    models, optimizer = Models(model), torch.optim.SGD(model[0].parameters(), lr=0.1)
    cycle = Cycle(models)
    first = cycle.parameters(optimizer)
    assert [name for name, _ in first] == ["0.weight"] and cycle.parameters(optimizer) is first
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert [name for name, _ in cycle.parameters(optimizer)] == ["0.weight", "1.weight"]
