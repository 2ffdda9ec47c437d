"""What a profile leaves behind, where it may begin and be joined, and what it does when steps or files fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numerics.small import network, train
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import lowp
from lowp import presets
from lowp.errors import InvalidInput
from lowp.numerics.profiler import Profiler
from lowp.numerics.record import Record


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)


def hooks_of(*models: nn.Module) -> list[int]:
    return [len(hooks) for one in models for hooks in (one._forward_pre_hooks, one._forward_hooks)]


def test_a_profile_hooks_each_model_once_and_leaves_none() -> None:
    model, other = network(), nn.Linear(4, 4)
    optimizer: Any = sgd(model)
    steps = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    with lowp.profile(model, optimizer, max_overhead=None, title="a title") as profile:
        train(model, optimizer, 1)
        assert hooks_of(model, other) == [1, 1, 0, 0]
        profile.add(other)
        assert hooks_of(model, other) == [1, 1, 1, 1] and [*map(len, steps)] == [1, 1]
        assert not profile.record.complete
    assert hooks_of(model, other) == [0] * 4 and [*map(len, steps)] == [0, 0]
    assert profile.record.complete and profile.record.header["title"] == "a title"
    other_header = lowp.profile(model).record.header
    assert other_header["title"] == other_header["model"] == "Sequential"


@pytest.mark.parametrize(("divergence", "unguarded"), [(True, 0), (False, 3)])
def test_steps_that_were_not_guarded_are_counted(divergence: bool, unguarded: int) -> None:
    model = network()
    optimizer = sgd(model)
    with lowp.profile(model, optimizer, max_overhead=None, divergence=divergence) as profile:
        train(model, optimizer, 3)
    assert (profile.record.sampling["steps"], profile.record.sampling["unguarded"]) == (3, unguarded)


@pytest.mark.parametrize(("steps", "complete"), [(1, True), (0, False)])
def test_a_training_that_raises_leaves_the_record_of_what_it_saw(steps: int, complete: bool, tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with (
        pytest.raises(ZeroDivisionError),
        lowp.profile(model, optimizer, max_overhead=None, out=tmp_path / "run.json") as profile,
    ):
        train(model, optimizer, steps)
        raise ZeroDivisionError
    assert Record.load(tmp_path / "run.json").complete is complete
    profile.save(tmp_path / "again.json")
    assert Record.load(tmp_path / "again.json").complete


def test_a_run_without_a_step_is_written_where_it_has_a_file_and_refused(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(InvalidInput, match="no step of the model ran"), lowp.profile(model, out=tmp_path / "run.json"):
        pass
    assert Record.load(tmp_path / "run.json").complete


def test_a_profile_that_is_ended_by_hand_is_written_if_it_has_a_file(tmp_path: Path) -> None:
    for out in (None, tmp_path / "run.json"):
        model = network()
        profile = lowp.profile(model, out=out).__enter__()
        profile.end()
        assert hooks_of(model) == [0, 0] and profile.record.complete
    assert Record.load(tmp_path / "run.json").complete


class Late(nn.Module):
    """A model whose first call does something before it computes; then it may fail."""

    def __init__(self, begin: Callable[[nn.Module, Any], object], end: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        self.inner, self.begin, self.end = nn.Linear(3, 2), begin, end

    def forward(self, x: Tensor) -> Tensor:
        self.begin(self, (x,))
        self.begin = lambda model, args: None
        return self.end(self.inner(x))


def test_a_call_that_runs_already_is_looked_at_where_the_profile_begins_within_it() -> None:
    def begin(model: nn.Module, args: Any) -> None:
        profile.__enter__()
        profile.begin_within(model, args)

    model = Late(begin)
    optimizer = sgd(model)
    profile: Profiler = lowp.profile(model, optimizer, max_overhead=None)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    profile.__exit__(None, None, None)
    assert profile.record.sampled == [0] and profile.record.ops["inner", "linear"].calls == 1


@pytest.mark.parametrize("running", [True, False])
def test_a_model_that_joins_is_looked_at_and_runs_again_where_it_is_not_finite(running: bool) -> None:
    first, model = nn.Linear(3, 3), Late(lambda model, args: None, lambda y: torch.log(y * 0 - 1))
    optimizer = sgd(first, model)
    with lowp.profile(first, max_overhead=None) as profile:

        def join(module: nn.Module, args: Any) -> None:
            if module is model and len(profile.models.roots) == 1:
                profile.add(module, args)

        if not running:
            profile.add(model)
        handle = register_module_forward_pre_hook(join)
        model(first(torch.ones(2, 3))).sum().backward()
        handle.remove()
        optimizer.step()
    (fault,) = profile.record.part.faults
    assert (fault["op"], fault["module"], fault["step"]) == ("log", "Late", 0)
    if running:
        assert [profile.record.ops[name, "linear"].calls for name in ("Linear", "Late.inner")] == [1, 1]


@pytest.mark.parametrize("whole", [True, False])
def test_a_look_at_everything_goes_on_when_a_model_joins_and_one_at_a_part_is_dropped(whole: bool) -> None:
    model = network()
    with lowp.profile(model, max_overhead=None) as profile:
        if not whole:
            profile.schedule.modules = ["0"]
        model(torch.ones(2, 16)).sum().backward()
        assert profile._watch is not None
        profile.add(nn.Linear(2, 2))
        assert (profile._watch is not None) is whole
        names = ["", "Sequential", *(f"Sequential.{place}" for place in range(4)), "Linear"]
        assert profile.schedule.modules == (names if whole else [])
        sgd(model).step()


def test_a_region_is_observed_from_the_step_after_that_in_which_it_was_met() -> None:
    model = network()
    optimizer = sgd(model)
    with lowp.profile(model, optimizer, max_overhead="1000%") as profile:
        for _ in range(9):
            with lowp.autocast(presets.PRESETS["bf16"].policy):
                loss = model(torch.ones(2, 16)).sum()
            loss.backward()
            optimizer.step()
    assert profile.record.sampled and min(profile.record.sampled) > 0
    assert profile.record.ops["0", "linear"].dtypes["input"] == "bf16"


def test_a_call_that_raises_does_not_hide_the_one_that_follows() -> None:
    model = Late(lambda model, args: 1 / 0, lambda y: torch.log(y * 0 - 1))
    optimizer = sgd(model)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(7, 3))
        model.begin = lambda model, args: None
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert [(one["op"], one["inputs"][0]["shape"]) for one in profile.record.part.faults] == [("log", [2, 2])]


def test_hooks_of_the_user_s_run_again_on_what_they_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    model = Late(lambda model, args: None, torch.log)
    with torch.no_grad():
        model.inner.weight.fill_(-1.0)
    model.inner.bias.requires_grad_(False).zero_()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    optimizer = sgd(model)
    with lowp.profile(model, optimizer, max_overhead=None):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert "First: log" in (told := capsys.readouterr().err) and "Its inputs: -6 .. -6." in told


def test_why_a_step_cannot_run_again_is_said_in_two_hundred_characters(capsys: pytest.CaptureFixture[str]) -> None:
    profile = lowp.profile(network(), max_overhead=None)

    def look_again(tape: object, gradient: object) -> None:
        assert profile.is_replaying is True
        raise ValueError("x" * 300 + "\na second line")

    with profile:
        called: list[str] = []
        watch: Any = SimpleNamespace(beside=True, look_again=look_again)
        watch.pause, watch.follow = lambda: called.append("pause"), lambda: called.append("follow")
        profile._watch, profile.schedule._failures = watch, 2
        profile._after_backward(None)
        assert called == ["pause", "follow"] and profile.is_replaying is False
        profile._watch, profile.step = None, 1
    assert f"(ValueError: {'x' * 188})" in capsys.readouterr().err


def test_calls_that_build_no_graph_or_are_evaluation_are_of_no_step() -> None:
    model, x = network(), torch.ones(2, 16)
    optimizer = sgd(model)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        train(model, optimizer, 1)
        with torch.no_grad():
            model(x)
        model.eval()(x)
        model.train()
        assert not profile._guard.tape.calls
        train(model, optimizer, 1)
        model.append(nn.Linear(4, 4))
        model(x)
        assert "4" in profile.schedule._costs, "a part that is new has its turn at once"
    assert profile.record.ops["0", "linear"].calls == 2, "the last step has not ended"


def test_the_time_of_looks_is_not_that_of_guarding() -> None:
    model = network()
    optimizer = sgd(model)
    with lowp.profile(model, optimizer, max_overhead=None, divergence=False) as profile:
        model(torch.ones(2, 16)).sum().backward()
        assert not profile._guard.tape.calls and profile._guard.tape._waiting is None
        optimizer.step()
        train(model, optimizer, 1)
        assert profile._alone is None, "the next step is looked at"
    budget = profile.budget
    assert budget.guarding == 0.0 < budget.own < budget.total and budget.idle == 0.0
    assert all(one.loss is not None and one.largest_gradient is None for one in profile.record.steps)


def test_steps_that_are_guarded_alone_are_noted_and_their_time_is_that_of_guarding() -> None:
    model = network()
    optimizer = sgd(model)
    profile = lowp.profile(model, optimizer, max_overhead=None)
    profile.schedule.looks = False
    with profile:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).square().sum().backward()
            assert len(profile._guard.tape.calls) > 1 and profile._guard.unguarded == 0
            optimizer.step()
            assert not profile._guard.tape.calls
    budget, history = profile.budget, profile._guard.history
    assert 0.0 < budget.guarding == budget.own < budget.total
    assert [one.step for one in history] == [0, 1, 2]
    assert all(one.loss and one.largest_gradient for one in history) and not any(one.sampled for one in history)


def test_steps_for_which_there_is_no_room_are_passed_by() -> None:
    model = network()
    optimizer = sgd(model)
    with lowp.profile(model, optimizer, max_overhead=1e-9, divergence=False) as profile:
        train(model, optimizer, 12)
        assert profile._alone is optimizer and hooks_of(model) == [0, 0]
    assert profile.step == 12 and profile.budget.idle > 0 and not profile._guard.history


@pytest.mark.parametrize("looks", [True, False])
def test_a_loss_is_told_without_its_scale_and_scales_where_they_change(looks: bool) -> None:
    model, x = network(), torch.ones(2, 16)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    profile = lowp.profile(model, optimizer, scaler=scaler, max_overhead=None)
    profile.schedule.looks = looks
    losses = []
    with profile:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            losses.append(float(loss.detach()))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    steps = profile.record.steps
    assert [one.loss for one in profile._guard.history] == pytest.approx(losses, rel=1e-6)
    expected = {0: 2.0**10, 1: 2.0**10, 2: 2.0**11} if looks else {0: 2.0**10, 2: 2.0**11}
    assert {one.step: one.scale for one in steps} == expected


@pytest.mark.parametrize(("precision", "beside"), [("flex16+5", False), ("bf16", True)])
def test_a_step_whose_tensors_move_shared_exponents_does_not_run_again(precision: str, beside: bool) -> None:
    model = network()
    with lowp.profile(model, max_overhead=None) as profile:
        profile.schedule.beside = True
        with lowp.Precision(precision).autocast():
            profile._begin_watch(model)
        assert profile._watch is not None and profile.schedule.beside is profile._watch.beside is beside
        profile.step = 1


@pytest.mark.parametrize(("share", "observes"), [("auto", False), (None, True)])
def test_regions_are_observed_from_the_first_step_on_where_whole_steps_are_looked_at(
    share: str | None, observes: bool
) -> None:
    with lowp.profile(network(), max_overhead=share) as profile:
        assert profile.schedule.modules and profile._observes is observes
        profile._drop_watch()
        assert profile._observes is False
        profile.step = 1
