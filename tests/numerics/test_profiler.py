"""The profiler records models in all the ways they can run, and does not change the training."""

from __future__ import annotations

import math
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import pytest
import torch
from numerics.small import network, train
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_versions import compiles_regions

import lowp
from lowp.errors import InvalidInput, Misuse
from lowp.numerics import schedule, watching
from lowp.numerics.models import Models
from lowp.numerics.profiler import Profiler
from lowp.numerics.record import Key, Record
from lowp.numerics.schedule import Budget, Schedule, is_sampled
from lowp.numerics.spectrum import Spectrum


def profiled(model: nn.Module, steps: int = 3, **options: object) -> Record:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with lowp.profile(model, optimizer, max_overhead=None, **options) as profile:  # type: ignore[arg-type]
        train(model, optimizer, steps)
    return profile.record


def test_a_model_in_plain_fp32_is_seen_in_every_role_and_phase() -> None:
    record = profiled(network())
    keys = set(record.tensors)
    assert {Key("0", "linear", role, "forward") for role in ("input", "output")} <= keys
    assert Key("0", "linear", "grad", "backward") in keys and Key("3", "linear", "grad", "backward") in keys
    for name in ("0", "2", "3"):
        assert Key(name, "weight", "weight", "step") in keys
        assert Key(name, "weight", "weight_grad", "backward") in keys
        assert Key(name, "weight", "update", "step") in keys
    assert record.ops["0", "linear"].parameters == {"weight": "0.weight", "bias": "0.bias"}
    assert record.ops["0", "linear"].line.startswith("small.py:")
    assert record.ops["0", "linear"].multiplications == 3 * 8 * 16 * 32
    assert record.sampled == [0, 1, 2] and record.steps[0].loss is not None


def test_the_spectra_are_those_of_the_tensors() -> None:
    model = network()
    model.requires_grad_(True)
    weight = model[0].weight.detach().clone()
    record = profiled(model, steps=1)
    assert np.array_equal(record.tensors[Key("0", "weight", "weight", "step")].bins, Spectrum.of(weight).bins)
    update = model[0].weight.detach() - weight
    assert np.array_equal(record.tensors[Key("0", "weight", "update", "step")].bins, Spectrum.of(update).bins)


def test_what_the_profiler_computes_itself_is_not_counted() -> None:
    expected = profiled(network())
    with lowp.kernels.use("bitwise"):  # by operations of torch, as on a GPU
        found = profiled(network())
    assert set(found.tensors) == set(expected.tensors)
    assert not {key for key in found.tensors if key.op in ("abs", "amax", "stack")}
    assert [one.largest_gradient for one in found.steps] == [one.largest_gradient for one in expected.steps]


def test_watching_changes_no_bit_of_the_training() -> None:
    ends = []
    for watched in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if watched:
            with lowp.profile(model, optimizer, max_overhead=None):
                train(model, optimizer, 5)
        else:
            train(model, optimizer, 5)
        ends.append([one.detach().clone() for one in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_steps_0_1_2_4_8_and_every_fiftieth_are_looked_at() -> None:
    assert [step for step in range(160) if is_sampled(step)] == [0, 1, 2, 4, 8, 16, 32, 50, 100, 150]


def test_gradients_are_recorded_without_the_loss_scale() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = lowp.GradScaler("cpu", init_scale=2.0**12)
    key = Key("0", "linear", "grad", "backward")
    plain = profiled(network(), steps=1).tensors[key]
    with lowp.profile(model, optimizer, scaler=scaler, max_overhead=None) as profile:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert np.array_equal(profile.record.tensors[key].bins, plain.bins)
    assert profile.record.steps[0].scale == 2.0**12


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_region_of_lowp_s_is_seen_with_operands_as_they_were_given(precision: str) -> None:
    model = network()
    chosen = lowp.Precision(precision)
    model, optimizer = chosen.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with lowp.profile(model, optimizer, precision=chosen, max_overhead=None) as profile:
        for _ in range(2):
            optimizer.zero_grad()
            with chosen.autocast():
                loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
            chosen.backward(loss)
            chosen.step(optimizer)
    seen = profile.record.ops["0", "linear"]
    assert seen.calls == 2
    assert (seen.dtypes["input"], seen.dtypes["output"]) == (precision, precision), "what they were cast to"
    assert profile.record.tensors[Key("0", "linear", "grad", "backward")].nonzero
    assert not any(key.op in ("quantize", "to") for key in profile.record.tensors)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = network(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_counted_once_and_its_gradients_too(reentrant: bool) -> None:
    plain, record = profiled(network(), steps=1), profiled(Checkpointed(reentrant), steps=1)
    assert record.ops["inner.0", "linear"].calls == 1
    for role, phase in (("input", "forward"), ("grad", "backward")):
        one = record.tensors[Key("inner.0", "linear", role, phase)]
        assert np.array_equal(one.bins, plain.tensors[Key("0", "linear", role, phase)].bins)


def test_a_compiled_model_is_seen_in_the_steps_that_are_looked_at() -> None:
    torch.compiler.reset()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    with lowp.profile(compiled, optimizer, max_overhead=None) as profile:
        train(compiled, optimizer, 4)
    assert profile.record.sampled == [0, 1, 2]
    assert profile.record.tensors[Key("0", "linear", "grad", "backward")].tensors == 3


def test_a_compiled_model_is_not_traced_with_the_profiler_s_hooks() -> None:
    def compiled(share: str | None) -> tuple[list[int], Record | None]:
        torch.compiler.reset()
        nodes: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
            nodes.append(len(graph.graph.nodes))
            return graph.forward

        inner = network()
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        model = torch.compile(inner, backend=backend)
        if share is None:
            train(model, optimizer, 4)
            return nodes, None
        with lowp.profile(model, optimizer, max_overhead=share) as profile:
            train(model, optimizer, 12)
        return nodes, profile.record

    plain, _ = compiled(None)
    watched, record = compiled("900%")
    assert watched == plain, "nodes of each graph"
    assert record is not None and len(record.sampled) > 1


class Dropped(nn.Module):
    """A model with dropout and other state that a repeated step might change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


@pytest.mark.parametrize("share", [None, "900%"])
@pytest.mark.parametrize("divergence", [False, True])
def test_looking_at_a_compiled_model_changes_no_number(share: str | None, divergence: bool) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        def run(*given: torch.Tensor) -> object:
            torch.rand(3)  # compiled code draws other random numbers than what was written
            return graph.forward(*given)

        return run

    def trained(watched: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, Record | None, list[int]]:
        torch.compiler.reset()
        model, stepped = Dropped(), [0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        last = model.get_parameter("body.3.bias")

        def count(parameter: torch.Tensor) -> None:
            stepped[0] += 1

        last.register_post_accumulate_grad_hook(count)
        compiled: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
        record = None
        if watched:
            with lowp.profile(compiled, optimizer, max_overhead=share, divergence=divergence) as profile:
                train(compiled, optimizer, 12)
            record = profile.record
        else:
            train(compiled, optimizer, 12)
        return model.state_dict(), torch.rand(1), record, stepped

    plain, random, _, stepped = trained(False)
    watched, after, record, stepped_again = trained(True)
    assert torch.equal(random, after) and stepped == stepped_again
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert record is not None and record.sampled
    looks = len(record.sampled)
    for key in (Key("body.0", "linear", "output", "forward"), Key("body.0", "linear", "grad", "backward")):
        assert record.tensors[key].tensors == looks and record.tensors[key].nonzero
    assert record.tensors[Key("body.0", "weight", "weight_grad", "backward")].tensors == looks
    assert record.updates["body.0.weight"].present


@compiles_regions
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_in_a_region_is_looked_at_beside_the_training_too() -> None:
    def trained(watched: bool) -> tuple[list[torch.Tensor], Record | None]:
        torch.compiler.reset()
        precision = lowp.Precision("fp16")
        inner = Dropped()
        model, optimizer = precision.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        compiled: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
        losses: list[torch.Tensor] = []

        def train_some() -> None:
            generator = torch.Generator().manual_seed(1)
            for _ in range(6):
                x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
                optimizer.zero_grad()
                with precision.autocast():
                    loss = nn.functional.cross_entropy(compiled(x), y)
                precision.backward(loss)
                precision.step(optimizer)
                losses.append(loss.detach())

        if not watched:
            train_some()
            return losses, None
        with lowp.profile(compiled, optimizer, precision=precision, max_overhead=None) as profile:
            train_some()
        return losses, profile.record

    plain, _ = trained(False)
    watched, record = trained(True)
    assert all(map(torch.equal, plain, watched))
    assert record is not None and record.sampled == [0, 1, 2, 4]
    gradient = record.tensors[Key("body.0", "linear", "grad", "backward")]
    assert gradient.tensors == 4 and gradient.maximum < 1.0, "without the passes that search the loss scale"
    assert record.ops["body.0", "linear"].dtypes["input"] == "fp16"


def test_a_compiled_step_that_cannot_run_again_is_looked_at_without_compilation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Once(Dropped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and x.device.type == "cpu" and _runs_again():
                raise RuntimeError("not again")
            return super().forward(x)

    def _runs_again() -> bool:
        return bool(profile and profile[0]._guard.is_replaying)

    profile: list[Profiler] = []
    torch.compiler.reset()
    model = Once()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    with lowp.profile(compiled, optimizer, max_overhead=None) as one:
        profile.append(one)
        train(compiled, optimizer, 12)
    told = capsys.readouterr().err
    assert told.count("cannot be run again beside the training (RuntimeError: not again)") == 1
    assert one.record.tensors[Key("body.0", "linear", "grad", "backward")].nonzero


def test_a_run_goes_on_through_nan() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None, divergence=False) as profile:
        train(model, optimizer, 2, lambda output, y: (output * float("nan")).sum())
    assert profile.record.tensors[Key("0", "weight", "weight_grad", "backward")].nan > 0


def test_what_runs_in_evaluation_is_not_counted() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        train(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            model(torch.randn(100, 16))
    assert profile.record.ops["0", "linear"].calls == 1


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def schedule(self, budget: Budget, divergence: bool = False) -> Schedule:
        """A schedule whose modules are the loss, the model, a linear layer, and one without parameters."""
        schedule = Schedule(Models(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), budget, divergence)
        schedule.start()
        return schedule

    def step(self, schedule: Schedule, seconds: float) -> list[str]:
        """A step of a second in which each module whose turn it is takes so many more; return them."""
        modules = schedule.modules
        self.now += 1.0 + seconds * len(modules)
        if modules:
            schedule._budget.spent(seconds * len(modules), True)
            schedule.end_look(modules, False)
        else:
            schedule.end(False)
        return modules


def test_the_budget_spreads_a_look_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen, budget = Clock(monkeypatch), [], Budget(0.03)
    schedule = clock.schedule(budget)
    for step in range(400):
        schedule.decide(step)
        seen += clock.step(schedule, 0.05)
        assert step < 50 or budget.overhead <= 0.03  # before, what a module costs was guessed
    counts = {name: seen.count(name) for name in ("", "0", "1")}
    assert min(counts.values()) > 5 and max(counts.values()) - min(counts.values()) <= 1
    assert schedule.account() == {"looks": pytest.approx(len(seen) / 3), "modules": 3, "modules_seen": 3}


def test_a_round_begins_when_it_is_due_and_no_module_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Clock(monkeypatch).schedule(Budget(0.03))
    assert schedule.turn(0, 0.0) == []
    names = schedule.turn(1, math.inf)
    assert sorted(names) == ["", "0", "1"]
    schedule.end_look(names, False)
    assert schedule.turn(3, math.inf) == names, "that of step 2, which nobody asked about"
    schedule.end_look(names, False)
    assert schedule.turn(5, math.inf) == names and schedule.turn(5, -0.1) == []


def test_a_first_look_that_takes_far_longer_than_was_guessed_does_not_stand_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    schedule = clock.schedule(Budget(None))
    guess = schedule.cost("1")
    schedule.turn(0, math.inf)
    schedule._budget.spent(1.0, True)
    schedule.end_look(["0"], False)
    assert schedule.cost("0") == 1.0 and schedule.cost("1") == guess


def test_what_a_look_costs_is_held_to_a_budget_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    looked_at = watching.looked_at

    def costly(*given: object, **named: object) -> object:
        clock[0] += 0.002
        return looked_at(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(watching, "looked_at", costly)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = model[0].register_forward_hook(lambda *given: clock.__setitem__(0, clock[0] + 0.1))
    with lowp.profile(model, optimizer, max_overhead="3%") as profile:
        train(model, optimizer, 300)
    hook.remove()
    sampling = profile.record.sampling
    assert 0.01 < sampling["overhead"] <= 0.03 and sampling["looks"] > 2
    assert profile.record.sampled and set(profile.record.tensors) == set(profiled(network()).tensors)


@pytest.mark.parametrize("beside", [False, True])
def test_an_evaluation_in_a_step_that_is_looked_at_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    clock, looks = Clock(monkeypatch), []
    schedule = clock.schedule(Budget(0.03))
    for step in range(60):
        clock.now += 1.0  # the training's
        if step % 10 == 9:
            clock.now += 0.3  # a look, of which a third is not measured
            schedule._budget.spent(0.2, True)
            clock.now += 100.0 * (step == 39)  # an evaluation
            looks.append(schedule.end_look([""], beside))
        else:
            schedule.end(False)
    assert looks == pytest.approx([0.3] * 6)
    assert schedule._budget.own == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("otherwise", "beside", "counted"), [(True, False, 0.7), (True, True, 0.4), (False, False, 0.4)]
)
def test_what_a_look_hides_is_counted_as_far_as_it_took_itself_unless_the_step_ran_otherwise(
    otherwise: bool, beside: bool, counted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowp.numerics.schedule.has_compiled", lambda: False)  # in the tests before
    clock = Clock(monkeypatch)
    schedule = clock.schedule(Budget(0.03))
    schedule.in_region = otherwise
    for _ in range(10):
        clock.now += 1.0
        schedule.end(False)
    clock.now += 1.7
    schedule._budget.spent(0.2, True)
    assert schedule.end_look(["0"], beside) == pytest.approx(counted) == schedule._budget.own


def test_a_step_that_must_not_run_again_is_not_and_nothing_is_said_of_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    schedule = clock.schedule(Budget(0.03))
    schedule.never_beside()
    for _ in range(5):
        schedule.failed("why")
    assert not schedule.beside and not schedule.modules and not capsys.readouterr().err
    other = clock.schedule(Budget(0.03))
    for _ in range(5):
        other.failed("why")
    assert capsys.readouterr().err.count("cannot be run again beside the training (why)") == 1


def test_guarding_rests_when_it_has_had_its_part_and_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    budget = Budget(0.03, started=0.0)
    now[0] += 10.0
    budget.spent(0.1, False)
    budget.pass_by(0.05)
    assert budget.may_guard(0.5), "0.1 s of half of what is left of 0.3 s"
    budget.spent(0.1, False)
    assert not budget.may_guard(0.5)
    now[0] = 30.0
    assert budget.may_guard(0.5) and budget.idle == 0.05
    budget.pass_by(1.0)
    assert not budget.may_guard(0.5)
    budget.spent(0.75, True)
    seconds = {"own_seconds": 2.0, "every_step_seconds": 1.25, "total_seconds": 30.0, "overhead": 2 / 28}
    assert budget.account() == pytest.approx({"max_overhead": 0.03, "allowance": 0.0, **seconds})
    assert Budget(None).may_guard(0.1)


@pytest.mark.parametrize(("spent", "steps"), [(0.31, 8), (0.9, 21), (100.0, 512)])
def test_nothing_is_decided_until_the_training_has_earned_what_waits(
    monkeypatch: pytest.MonkeyPatch, spent: float, steps: int
) -> None:
    clock, budget = Clock(monkeypatch), Budget(0.03)
    schedule = clock.schedule(budget)
    budget.spent(spent, True)
    clock.now = 10.0 + spent  # of 10 steps; a share of 30 s is 0.9 s
    schedule.decide(9)
    assert not schedule.is_busy and [schedule.rests(one) for one in (9, 7 + steps, 8 + steps)] == [True, True, False]


def test_steps_are_guarded_again_before_there_is_room_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budget = Clock(monkeypatch), Budget(0.03)
    schedule = clock.schedule(budget, divergence=True)
    budget.spent(0.1, False)
    budget.spent(0.9, True)
    clock.now = 11.0
    schedule.decide(9)
    # 0.3 of the budget until all modules were seen, and 0.8 of that where guarding has rested
    assert not schedule.is_busy and [schedule.rests(12), schedule.rests(17)] == [True, False]
    budget.spent(0.1, False)
    clock.now += 0.1
    schedule.decide(9)
    assert not schedule.rests(26) and schedule.rests(25), "0.2 s are a share of 0.24 of what 27.8 s earn"
    clock.now = 31.0
    schedule.decide(9)
    assert schedule.guards
    clock.now = 26.0  # of which 0.24 are too little to begin guarding, and 0.3 enough to go on
    schedule.decide(9)
    assert schedule.guards


def test_a_run_that_is_too_short_for_a_look_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead="0.01%") as profile:
        train(model, optimizer, 3)
    assert "3 steps took is less than recording one module takes. Give --max-overhead none" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="less than recording one module takes"):
        profile.record.require_content()


def test_by_default_a_training_of_milliseconds_is_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    looked_at = watching.looked_at

    def costly(*given: object, **named: object) -> object:
        clock[0] += 0.001
        return looked_at(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(watching, "looked_at", costly)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer) as profile:
        train(model, optimizer, 2000)
    sampling = profile.record.sampling
    assert sampling["modules_seen"] == sampling["modules"] and sampling["looks"] > 3
    assert set(profile.record.tensors) == set(profiled(network()).tensors)
    assert sampling["allowance"] == 0.25 and 0.0 < sampling["own_seconds"] < 0.3, "looks end once it is spent"


def test_an_allowance_is_room_until_the_share_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    budget = Budget(0.03, 0.25, started=0.0)
    assert budget.room == 0.25 and budget.may_guard(0.5)
    budget.spent(0.2, False)
    assert budget.room == pytest.approx(0.05) and not budget.may_guard(0.5)
    now[0] = 10.2
    assert budget.room == pytest.approx(0.1)


_BUDGETS = [("3%", 0.03), ("0.5%", 0.005), (0.1, 0.1), ("none", None), (None, None), ("auto", 0.03)]


@pytest.mark.parametrize(("text", "share"), _BUDGETS)
def test_a_budget_is_a_share_of_the_time(text: str | float | None, share: float | None) -> None:
    budget = Budget.parse(text)
    assert (budget.share, budget.allowance) == (share, 0.25 if text == "auto" else 0.0)


@pytest.mark.parametrize("text", ["0", "-3%", "much", "nan", ""])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="give a share of the time such as 3%"):
        Budget.parse(text)


def test_an_empty_run_is_an_error_that_says_what_to_do() -> None:
    model = network()
    with (
        pytest.raises(InvalidInput, match=r"no step of the model ran.*give that model and that optimizer"),
        lowp.profile(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        pass


def test_a_profile_is_entered_once() -> None:
    model = network()
    profile = lowp.profile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile:
        train(model, optimizer, 1)
    with pytest.raises(Misuse, match="create a new one"), profile:
        pass


class Pair(nn.Module):
    """A generator, or a discriminator, of two layers."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


def adversarial(generator: nn.Module, critic: nn.Module, rounds: int) -> None:
    first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, generator))
    for _ in range(rounds):
        fake = generator(torch.randn(6, 3))
        first.zero_grad()
        (critic(torch.randn(6, 4)).square().mean() - critic(fake.detach()).mean()).backward()
        first.step()
        second.zero_grad()
        critic(fake).mean().backward()
        second.step()


def test_two_models_of_one_training_are_in_one_record_by_name() -> None:
    generator, critic = Pair(3, 4), Pair(4, 1)
    with lowp.profile({"generator": generator, "critic": critic}, max_overhead=None) as profile:
        adversarial(generator, critic, 6)
    record = profile.record
    assert record.header["models"] == ["generator", "critic"]
    for name in ("generator", "critic"):
        for own, op, role, phase in (
            ("body.0", "linear", "input", "forward"),
            ("body.2", "linear", "grad", "backward"),
            ("body.0", "weight", "update", "step"),
        ):
            assert record.tensors[Key(f"{name}.{own}", op, role, phase)].nonzero, (name, own, role)
    assert record.sampled == [0, 1, 2, 4] and record.sampling["steps"] == 7, "a step is one of each optimizer"


def test_a_model_that_comes_later_gives_names_to_both(tmp_path: Path) -> None:
    generator, critic = Pair(3, 4), Pair(4, 1)
    profile = lowp.profile(generator, max_overhead=None, out=tmp_path / "run.json")
    with profile:
        train_alone(generator)
        profile.add(critic)
        adversarial(generator, critic, 4)
        killed = Record.load(tmp_path / "run.json")
    for record in (profile.record, killed):
        assert record.header["models"] == ["Pair", "Pair2"]
        assert Key("Pair.body.0", "weight", "update", "step") in record.tensors
        assert Key("Pair2.body.0", "weight", "update", "step") in record.tensors
        assert not any(key.module.startswith("body") for key in record.tensors)


def test_what_was_seen_of_a_step_before_a_model_came_has_the_names_it_gave() -> None:
    generator, critic = Pair(3, 4), Pair(4, 1)
    optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1)
    with lowp.profile(critic, max_overhead=None) as profile:
        critic(torch.randn(6, 4)).mean().backward()
        waits = critic(torch.randn(6, 4)).mean()
        profile.add(generator)
        (waits + critic(generator(torch.randn(6, 3))).mean()).backward()
        optimizer.step()
    assert {key.module.split(".")[0] for key in profile.record.tensors} == {"", "Pair", "Pair2"}


def train_alone(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 3)).square().mean().backward()
        optimizer.step()


def test_a_fault_between_two_models_is_named() -> None:
    generator, critic = Pair(3, 4), Pair(4, 1)
    optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1)
    with lowp.profile({"generator": generator, "critic": critic}, max_overhead=None) as profile:
        for step in range(3):
            optimizer.zero_grad()
            fake = generator(torch.randn(6, 3)).sigmoid()
            torch.log(critic(fake * (step < 2)).relu() * (step < 2) + (step < 2)).mean().backward()
            optimizer.step()
    (fault,) = profile.record.part.faults
    assert (fault["op"], fault["step"], fault["phase"]) == ("log", 2, "forward")
    assert fault["line"].startswith("test_profiler.py:")


def test_a_healthy_step_keeps_no_tensor_alive() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[bool] = []
    with lowp.profile(model, optimizer, max_overhead=None):
        for _ in range(4):
            x = torch.randn(8, 16)
            output = model(x)
            loss = (output * 2).square().mean()
            kept = [weakref.ref(output), weakref.ref(loss)]
            loss.backward()
            del output, loss
            alive.append(any(one() is not None for one in kept))
            optimizer.step()
    assert not any(alive)


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="a torch module, not int"):
        lowp.profile(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a torch optimizer, not str"):
        lowp.profile(network(), "SGD")  # type: ignore[arg-type]


def test_a_model_that_is_compiled_in_place_is_refused_in_words() -> None:
    model = network()
    model.compile(backend="eager")
    with pytest.raises(InvalidInput, match=r"compiled in place.*give what that returns"):
        lowp.profile(model)


KILLED = """
import os, sys, torch, lowp
sys.path.insert(0, {tests!r})
from numerics.small import network, train
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with lowp.profile(model, optimizer, max_overhead=None, out={out!r}):
    train(model, optimizer, 5)
    os._exit(9)
"""


def test_a_run_that_is_killed_leaves_the_steps_it_had_written(tmp_path: Path, repository: Path) -> None:
    out = tmp_path / "run.json"
    script = KILLED.format(tests=str(repository / "tests"), out=str(out))
    assert forked.run("-c", script).returncode == 9
    record = Record.load(out)
    assert record.sampled == [0, 1, 2, 4] and not record.complete
    whole = out.read_bytes()
    out.write_bytes(whole[:-100])  # killed while it wrote
    assert Record.load(out).sampled == [0, 1, 2]


# -- the schedule by hand ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("own", "hidden"), [(0.04, 0.12), (0.1, 0.1), (0.25, 0.0)])
def test_what_guarding_hides_is_how_much_longer_steps_take_and_at_most_thrice_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, own: float, hidden: float
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    budget = schedule.Budget(0.03)
    plan = schedule.Schedule(Models(nn.Linear(2, 2)), budget, True)
    plan.start()
    for _ in range(20):
        clock.now += 0.1
        plan.end(False)
    assert budget.own == 0.0
    for step in range(1, 41):
        clock.now += 0.3
        budget.spent(own, False)
        plan.end(True)
        known = max(step - 19, 0)  # from the twentieth on
        assert budget.guarding == budget.own == pytest.approx(step * own + known * hidden)


def test_a_step_that_cannot_run_again_is_told_of_at_its_third_failure_alone(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for never in (False, True):
        plan = schedule.Schedule(Models(nn.Linear(2, 2)), schedule.Budget(0.03), False)
        if never:
            plan.modules, plan.beside = ["a"], True
            plan.never_beside()
            assert (plan.modules, plan.beside) == ([], False)
        for _ in range(5):
            plan.failed("why")
            told.append(capsys.readouterr().err)
    text = (
        "lowp profile: a compiled step cannot be run again beside the training (why): steps that are recorded run "
        "without torch.compile, and draw other random numbers\n"
    )
    assert told == ["", "", text, *[""] * 7]
    plan = schedule.Schedule(Models(nn.Linear(2, 2)), schedule.Budget(0.03), False)
    for _ in range(3):
        plan.failed()
    assert "beside the training: steps" in capsys.readouterr().err


def test_neighbours_are_looked_at_apart_and_what_a_look_costs_is_guessed_by_the_parameters() -> None:
    assert schedule._spread(list("abcdefg")) == list("afcebgd")  # by the part behind the point of 0.618 i
    cost = schedule._guessed_cost
    assert cost(nn.Linear(2, 3)) == pytest.approx(12 * 5e-5 + 12 * 9 * 3e-9 + 2e-3)
    assert cost(nn.LayerNorm(1000)) == pytest.approx(12 * 5e-5 + 12 * 2000 * 3e-9)
    assert cost(nn.ReLU()) == 3e-4 and cost(nn.Sequential(nn.Linear(2, 3))) == 3e-4


def test_a_look_goes_on_where_the_one_before_had_no_room() -> None:
    plan = schedule.Schedule(Models(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), schedule.Budget(None), False)
    plan.start()
    assert plan.account() == {"looks": 0.0, "modules": 3, "modules_seen": 0}
    first = plan.turn(0, math.inf)
    assert first == ["", "1", "0"]  # none is measured, but there is no limit
    plan._note(first[:2], 0.04)
    assert plan.account() == {"looks": pytest.approx(2 / 3), "modules": 3, "modules_seen": 2}
    shares = [1.5 * 3e-4, 1.5 * (6e-4 + 12 * 6 * 3e-9 + 2e-3)]  # guesses, half as much again
    assert [plan.cost(one) for one in first[:2]] == pytest.approx([0.04 * one / sum(shares) for one in shares])
    room = plan.cost("0")
    assert room == pytest.approx(shares[1]) and plan.turn(3, room) == ["0"] and plan.turn(3, room * 0.999) == []
    plan._note(["0"], 0.01)
    assert plan.account() == {"looks": 1.0, "modules": 3, "modules_seen": 3} and plan.cost("0") == 0.01
    assert plan.turn(3, 0.0401) == [
        "",
        "1",
    ]  # as a round was to begin in step 2, which the one before was in the way of
    plan._note(first, 0.05)
    assert plan.turn(3, math.inf) == []  # no step in which one begins
    assert plan.turn(9, 0.045) == ["", "1"]  # in step 8, which nobody asked about
    assert plan.turn(9, plan.cost("") * 0.5) == []
    plan.rename(goes_on=True)
    assert plan.modules == ["", "0", "1"] and plan.rounds == 0 and plan.is_whole and plan.is_busy
    plan.rename(goes_on=False)
    assert plan.modules == [] and not plan.is_busy


def planned(share: float | None, **options: bool) -> schedule.Schedule:
    plan = schedule.Schedule(Models(nn.Linear(2, 2)), schedule.Budget(share), options.get("divergence", False))
    plan.start()
    return plan


def test_what_a_step_costs_is_measured_and_what_it_hides_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "has_compiled", lambda: False)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    for compiled, beside, hides in ((False, False, 0.25), (True, False, 2.0), (True, True, 0.25)):
        plan = planned(0.03)
        budget, plan.in_region = plan._budget, compiled
        assert budget.started == clock.now
        clock.now += 1.0
        plan.spent_since(clock.now - 0.125, True)
        assert budget.own == 0.125 + schedule.HOOK and budget.guarding == 0.0
        plan.end(False)
        before = budget.own
        clock.now += 0.5
        plan.pass_by(clock.now - 0.25)
        assert budget.idle == 0.25 + schedule.HOOK and budget.own == before + budget.idle
        assert list(plan._idle) == pytest.approx([0.875, 0.25], abs=1e-5)
        budget.own = plan._own_before = 0.0
        plan._begun = clock.now
        budget.spent(0.25, True)
        clock.now += 0.5625 + 2.0 + 0.25  # the median of other steps, what is hidden, what was measured
        plan.turn(0, math.inf)
        assert plan.end_look([""], beside) == pytest.approx(0.25 + hides, abs=1e-4)
        assert budget.own == pytest.approx(0.25 + hides, abs=1e-4) and plan._own_before == budget.own
        assert budget.guarding == 0.0
        assert plan.cost("") == pytest.approx(0.25 + hides, abs=1e-4)


def test_the_next_step_to_decide_on_is_when_there_will_be_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "has_compiled", lambda: False)
    plan = planned(0.1, divergence=True)
    budget = plan._budget
    budget.clock, budget.started, budget.own = lambda: 10.0, 0.0, 0.0
    assert [plan._next(step, 0.5) for step in (0, 1, 2, 3, 49, 50)] == [1, 2, 4, 4, 50, 100]
    plan._waiting = [""]
    plan._costs[""] = 2.0
    plan._measured.add("")
    budget.guarding = 1.5
    # 2 s at a tenth of the time are earned after 20 s of training, in 10 s more: as many steps as there were
    assert plan._next(19, 0.5) == 39
    budget.guarding = 0.5
    budget.idle = 0.5  # guarding may take 0.5 / 0.5 + 0.5 = 1.5 s, which are earned after 15 s
    assert plan._next(19, 0.5) == 29
    assert plan._next(3, 0.5) == 3 + schedule._SHORTEST_REST
    assert plan._next(9999, 0.5) == 9999 + schedule._LONGEST_REST
    plan._divergence = False
    assert plan._next(19, 0.5) == 39
    plan._wakes = 30
    assert [plan.rests(step) for step in (28, 29)] == [True, False]


def test_a_step_is_looked_at_and_guarded_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "has_compiled", lambda: False)
    plan = planned(0.1, divergence=True)
    budget = plan._budget
    budget.clock, budget.started = lambda: 100.0, 0.0
    plan.decide(0)
    assert (plan.modules, plan.guards, plan.beside, plan.is_busy) == ([""], True, False, True)
    for rounds, guards, limit in ((0, True, 0.3), (0, False, 0.24), (1, True, 0.5), (1, False, 0.4)):
        for factor in (0.999, 1.001):
            plan.rounds, plan.guards, budget.own = rounds, guards, 0.0
            budget.guarding = limit * 10.0 * factor
            plan.decide(1)
            assert plan.guards is (factor < 1)
    plan.looks, plan.guards, budget.guarding = False, False, 10.0
    plan.decide(5)
    assert not plan.is_busy and plan.rests(5) and plan._wakes > 6
    plan.looks, plan.in_region, plan._waiting = True, True, [""]
    plan._costs[""] = 10.0
    plan._measured.add("")
    for own, modules in ((0.0, [""]), (1e-9, []), (9.9999, [])):  # whatever is seen, all of it is paid for
        budget.own, budget.guarding = own, 0.0
        plan.decide(6)
        assert plan.modules == modules


def test_a_model_that_is_never_trained_is_seen_beside_the_others_and_evaluation_of_one_that_is_not() -> None:
    student, teacher = nn.Linear(3, 2), nn.Linear(3, 2).eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with lowp.profile({"student": student, "teacher": teacher}, optimizer, max_overhead=None) as profile:
        for _ in range(3):
            x = torch.randn(4, 3)
            with torch.no_grad():
                student.eval()(x)
                aim = teacher(x)
            (student.train()(x) - aim).square().mean().backward()
            optimizer.step()
    calls = {module: seen.calls for (module, op), seen in profile.record.ops.items() if op == "linear"}
    assert calls == {"student": 3, "teacher": 2}, "in the first step it is not known yet which is trained"


@pytest.mark.parametrize("by_name", [False, True])
def test_a_compiled_step_runs_again_with_the_gradient_that_its_loss_was_given(by_name: bool) -> None:
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        model, gradient = network(), torch.tensor(3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called = torch.compile(model, backend="eager") if compiled else model
        with lowp.profile(called, optimizer, max_overhead=None) as profile:  # type: ignore[arg-type]
            loss = called(torch.linspace(-1, 1, 128).reshape(8, 16)).square().sum()
            loss.backward(gradient=gradient) if by_name else loss.backward(gradient)
            optimizer.step()
        found.append(profile.record.tensors[Key("3", "linear", "grad", "backward")].document())
    assert found[0] == found[1]


def test_a_compiled_step_runs_again_beside_the_training_where_it_is_the_only_model_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "has_compiled", lambda: False)
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")

    def decided(*given: Any, failures: int = 0) -> schedule.Schedule:
        models = Models(given[0])
        plan = schedule.Schedule(models, schedule.Budget(None), False)
        plan.start()
        assert plan._is_compiled is (given[0] is compiled)
        for one in given[1:]:
            models.add(one)
        plan.take_turns()
        for _ in range(failures):
            plan.failed()
        plan.decide(0)
        return plan

    alone = decided(compiled)
    assert alone._runs_otherwise and alone.beside and alone.guards, "what it was given is needed"
    assert decided(compiled, failures=2).beside and not decided(compiled, failures=3).beside
    plain = decided(nn.Linear(2, 2))
    assert not plain.beside and not plain.guards and plain.is_busy
    both = decided(nn.Linear(2, 2), compiled)
    assert both._is_compiled and not both.beside and len(both.modules) == len(both._costs)
    alone.never_beside()
    alone.decide(1)
    assert alone.modules and not alone.beside
