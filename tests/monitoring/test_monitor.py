"""The monitor beside a training: its numbers are right, and it changes nothing."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput
from lowp.monitoring import Alarm, TrainingAlarm
from lowp.monitoring.log import JsonLines, Tail
from lowp.monitoring.look import Look


def weights(run: planted.Run) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in run.model.state_dict().items()}


@pytest.fixture
def run() -> Iterator[planted.Run]:
    run = planted.Run("plain")
    yield run
    if run.monitor is not None:
        run.monitor.close()


# -- numbers ----------------------------------------------------------------------------------------------------------
def test_numbers_of_a_record_are_those_of_the_step(run: planted.Run) -> None:
    records: list[dict[str, Any]] = []
    run.watch(sinks=records.append, max_overhead=None)
    run.step(0)
    norm = math.sqrt(sum(float(one.grad.square().sum()) for one in run.model.parameters()))
    run.train(1)
    first = records[0]
    assert first["step"] == 0 and first["gradient"] == pytest.approx(norm, rel=1e-5)
    assert set(first["groups"]) == {"model", "embed", "blocks.0", "blocks.1", "blocks.2", "batch", "head"}
    assert set(first["groups"]["head"]) == {"activation", "gradient", "update_to_weight", "lost"}
    assert first["groups"]["head"]["lost"] == 0


def test_updates_beside_weights_are_right_for_a_layer_that_is_read_whole() -> None:
    layer = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.125)
    records: list[dict[str, Any]] = []
    with lowp.Monitor(layer, optimizer, sinks=records.append):
        layer(torch.ones(4, 16)).square().mean().backward()
        before, gradient = layer.weight.detach().clone(), layer.weight.grad
        optimizer.step()
    assert gradient is not None
    expected = 0.125 * float(gradient.norm() / before.norm())
    assert records[0]["groups"]["model"]["update_to_weight"] == pytest.approx(expected, rel=1e-5)


def test_losses_of_every_step_are_seen_where_only_some_are_looked_at(run: planted.Run) -> None:
    run.watch(max_overhead=1e-9)
    seen: list[int] = []
    judge = run.monitor._judge.judge  # type: ignore[union-attr]
    run.monitor._judge.judge = lambda one: seen.extend(step for step, _ in one.losses) or judge(one)  # type: ignore
    run.train(30)
    assert seen == [0]  # of the first look, the only one that there is time for


def test_each_loss_is_seen_once(run: planted.Run) -> None:
    run.watch(max_overhead=1e-9)
    run.before = lambda step: setattr(run, "reduction", "sum" if step == 25 else "mean")
    seen: list[float] = []
    judge = run.monitor._judge.judge  # type: ignore[union-attr]
    run.monitor._judge.judge = lambda one: seen.extend(loss for _, loss in one.losses) or judge(one)  # type: ignore
    run.train(40)
    assert len(set(seen)) == len(seen) == 27 and max(seen) == seen[25]  # the latest look is that after the spike


def test_losses_of_steps_that_are_shorter_than_a_millisecond_are_heard_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    backward, heard = torch.autograd.backward, []
    with lowp.Monitor(layer, optimizer) as monitor:
        for step in range(5000):
            clock.now += 2e-4
            if torch.autograd.backward is not backward:
                heard.append(step)
            optimizer.zero_grad()
            (layer(torch.ones(1, 2)).square().sum() * (math.nan if step == 2500 else 1.0)).backward()
            optimizer.step()
        assert monitor.step == 5000
    assert 0.1 < len(heard) / 5000 < 0.3
    (alarm,) = [one for one in monitor.alarms if one.id == "N401"]
    assert alarm.layer == "the loss" and "a step has spread it to most weights" in alarm.text


def test_numbers_that_are_under_way_are_waited_for_in_every_step(
    run: planted.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, has_arrived, records = Look.read, False, list[dict[str, Any]]()
    monkeypatch.setattr(Look, "read", lambda look: read(look) if has_arrived else None)
    run.watch(max_overhead=1e-9, sinks=records.append)
    for step in range(4):
        run.step(step)
    has_arrived = True
    assert records == []
    run.step(4)
    assert [one["step"] for one in records] == [0]


def test_a_backward_pass_from_a_complex_number_goes_on_unseen(run: planted.Run) -> None:
    run.watch()
    for step in range(20):  # in looks and between them
        run.step(step)
        z = torch.ones((), dtype=torch.complex64, requires_grad=True)
        torch.autograd.backward(z * 2, torch.ones((), dtype=torch.complex64))
        assert z.grad == 2
    run.train(0)  # closes the monitor, which has not failed


def test_skipped_steps_call_for_a_look_where_there_is_no_time_for_others(run: planted.Run) -> None:
    planted.restless_scale(run)
    run.watch(max_overhead=1e-9)
    run.train(40)
    assert run.monitor is not None and [one.id for one in run.monitor.alarms] == ["N402"]


# -- nothing changes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["plain", "compiled"])
def test_a_training_has_the_same_bits_with_and_without_a_monitor(mode: str) -> None:
    ends = []
    for watched in (False, True):
        torch.compiler.reset()
        run = planted.Run(mode)
        run.model.blocks[0].act = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        if watched:
            run.watch(max_overhead=None)
        torch.manual_seed(1)
        run.train(6)
        ends.append(weights(run))
    assert all(torch.equal(one, other) for one, other in zip(ends[0].values(), ends[1].values(), strict=True))


def test_nothing_is_left_after_the_end(run: planted.Run) -> None:
    backward = torch.autograd.backward
    monitor = run.watch()
    assert torch.autograd.backward is not backward
    run.train(3)
    assert torch.autograd.backward is backward
    assert not run.optimizer._optimizer_step_post_hooks and not run.optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_hooks for module in run.model.modules())
    step = monitor.step
    run.step(3)
    assert monitor.step == step


def test_models_that_are_watched_can_be_copied_and_pickled(run: planted.Run) -> None:
    run.watch()
    run.step(0)
    for copied in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        assert torch.equal(copied.head.weight, run.model.head.weight)
        copied(torch.ones(2, planted.INPUTS))
    assert set(copied.state_dict()) == set(planted.Network().state_dict())
    run.train(1)


class Clock:
    """A clock on which a step takes 10 ms, and a look 2 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.looks: list[tuple[int, float]] = []  # their steps, and when they began
        send = Look.send

        def sent(look: Look) -> None:
            self.looks.append((look.step, self.now))
            self.now += 2e-3
            send(look)

        monkeypatch.setattr(Look, "send", sent)
        for module in ("monitor", "pace"):
            monkeypatch.setattr(f"lowp.monitoring.{module}.now", lambda: self.now)

    def train(self, run: planted.Run, steps: int) -> None:
        run.watch(max_overhead=0.02)
        for step in range(steps):
            self.now += 0.01
            run.step(step)


def test_looks_take_their_share_of_the_time_and_a_little_more_in_the_first_four_seconds(
    run: planted.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    clock.train(run, 400)
    a_look = 2e-3 + 8e-4  # and what the steps after it take longer
    for count, (_, seconds) in enumerate(clock.looks[1:], 1):
        assert a_look * count <= 0.02 * max(seconds, (4 * min(seconds, 4.0)) ** 0.5) + 1e-6  # but for the first
    taken = a_look * len(clock.looks)
    assert 0.014 * clock.now < taken < 0.02 * clock.now
    steps = [step for step, _ in clock.looks]
    assert steps[0] == 0 and steps[1] < 8 and sum(step < 50 for step in steps) >= 6


def test_the_step_after_a_loss_that_is_not_finite_is_looked_at_in_any_case(
    run: planted.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    run.before = lambda step: setattr(run, "scale_of_inputs", math.inf if step == 30 else 1.0)
    clock.train(run, 60)
    steps = [step for step, _ in clock.looks]
    assert 31 in steps and sum(step > 30 for step in steps) < 6


# -- alarms -----------------------------------------------------------------------------------------------------------
def spoiled(run: planted.Run, **given: Any) -> Iterator[None]:
    planted.cut_graph(run)
    run.watch(max_overhead=None, **given)
    for step in range(8):
        run.step(step)
        yield


def test_an_alarm_is_told_once_in_one_line(run: planted.Run, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in spoiled(run, on_alarm="warn"):
        pass
    assert capsys.readouterr().err == (
        "lowp monitor: step 2: blocks.1.norm (and 2 more): no gradient reaches its parameters, which the optimizer "
        "holds since step 0. Look for a detach(), no_grad() or dead activation behind it. (lowp explain N102)\n"
    )
    (alarm,) = run.monitor.alarms  # type: ignore[union-attr]
    assert alarm.others == ("blocks.1.up", "blocks.1.down") and alarm.since == 0 and alarm.step == 2


def test_alarms_wait_for_as_many_looks_as_patience_says(run: planted.Run) -> None:
    for _ in spoiled(run, patience=5):
        pass
    assert [alarm.step for alarm in run.alarms] == [4]


def test_an_alarm_can_end_the_training(run: planted.Run) -> None:
    with pytest.raises(TrainingAlarm, match=r"step 2: blocks\.1\.norm .*lowp explain N102") as caught:
        for _ in spoiled(run, on_alarm="raise"):
            pass
    assert caught.value.alarm.layer == "blocks.1.norm" and isinstance(caught.value, lowp.LowpError)


def test_an_alarm_is_told_again_if_it_gets_ten_times_worse(run: planted.Run) -> None:
    planted.growing(run)
    run.watch(max_overhead=None)
    alarms = run.train(60)
    values = [alarm.value for alarm in alarms if alarm.id == "N301" and alarm.layer == "blocks.1.down"]
    assert len(values) >= 2
    assert all(after >= 10 * before for before, after in pairwise(values))


def test_a_skipped_step_is_a_step(run: planted.Run) -> None:
    planted._fp16(run, init_scale=2.0**40)
    monitor = run.watch()
    run.train(30)
    assert monitor.step == 30


def test_steps_of_gradients_that_no_backward_pass_has_left_are_counted() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.Monitor(model, optimizer) as monitor:
        for _ in range(3):
            for one in model.parameters():
                one.grad = torch.ones_like(one)
            optimizer.step()
    assert monitor.step == 3


class Around(torch.optim.Optimizer):
    """An optimizer whose step is that of another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([one for group in inner.param_groups for one in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_a_step_of_an_optimizer_around_another_one_is_one_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    with lowp.Monitor(model) as monitor:
        for _ in range(6):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    assert monitor.step == 6


def test_a_monitor_goes_on_where_parameters_move_to_another_group() -> None:
    model, records = nn.Linear(4, 4), list[dict[str, Any]]()
    groups = [{"params": [one], "lr": rate} for one, rate in zip(model.parameters(), (0.1, 0.0), strict=True)]
    optimizer = torch.optim.SGD(groups)
    with lowp.Monitor(model, optimizer, sinks=records.append, max_overhead=None) as monitor:
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        assert monitor.failure is None
    assert len(records) == 4


# -- several models, ranks that are sharded ---------------------------------------------------------------------------
def test_a_step_of_several_models_has_one_step_of_each_optimizer() -> None:
    models = {name: nn.Linear(4, 4) for name in ("generator", "critic")}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
    records: list[dict[str, Any]] = []
    with lowp.Monitor(models, optimizers, sinks=records.append, max_overhead=None) as monitor:
        for _ in range(6):
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
    assert 5 <= monitor.step <= 7
    assert set(records[-1]["groups"]) == {"generator", "critic"}


def test_without_an_optimizer_all_that_step_the_model_are_watched() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    mine, others = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    with lowp.Monitor(model) as monitor:
        for _ in range(3):
            for one, optimizer in ((model, mine), (other, others)):
                one(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
    assert monitor.step == 3


# -- sinks ------------------------------------------------------------------------------------------------------------
def test_records_go_to_a_file_of_lines(run: planted.Run, tmp_path: Path) -> None:
    for _ in spoiled(run, sinks=tmp_path / "run.jsonl"):
        pass
    run.monitor.close()  # type: ignore[union-attr]
    header, *records, end = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert header["kind"] == "lowp monitor" and header["version"] == 1 and end == {"ended": 8}
    assert [record["step"] for record in records] == list(range(8))
    (alarm,) = [alarm for record in records for alarm in record["alarms"]]
    assert Alarm(**{**alarm, "others": tuple(alarm["others"])}) == run.alarms[0]


def test_a_file_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(InvalidInput, match=r"there is no file .*run\.jsonl: `lowp run --monitor=.* writes one"):
        Tail(path)
    written = JsonLines(path, {"model": "A"})
    tail = Tail(path)
    assert [one["model"] for one in tail.more()] == ["A"] and tail.more() == []
    written({"step": 1})
    with path.open("a") as file:
        file.write('{"step"')
    assert tail.more() == [{"step": 1}]
    with path.open("a") as file:
        file.write(': 2}\n[3]\n{"step\n{"step": 4}\n')  # a list, and the line of a process that was killed
    assert tail.more() == [{"step": 2}, {"step": 4}]
    written.close(5)
    assert tail.more() == [{"ended": 5}]
    tail.close()


def test_a_sink_that_fails_ends_the_monitor_and_not_the_training_even_after_an_alarm(
    run: planted.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def sink(record: dict[str, Any]) -> None:
        if record["step"] == 4:
            raise OSError("no space is left")

    for _ in spoiled(run, sinks=sink):
        pass
    assert [alarm.step for alarm in run.alarms] == [2] and run.monitor is not None
    assert run.monitor.failure == "OSError: no space is left" and run.monitor.step == 5
    assert capsys.readouterr().err == "lowp monitor: it has stopped watching, because of OSError: no space is left\n"


def test_a_file_of_another_kind_is_not_written_to(run: planted.Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(InvalidInput, match=r"notes\.txt is not a file of a lowp monitor and was not changed"):
        run.watch(sinks=str(path))
    assert path.read_text() == "mine\n"


def test_a_summary_writer_and_a_run_of_wandb_get_flat_names(run: planted.Run) -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: dict[tuple[str, int], float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen[name, step] = value

    class Wandb:
        def __init__(self) -> None:
            self.seen: dict[int, dict[str, float]] = {}

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.seen[step] = numbers

    writer, wandb = Writer(), Wandb()
    run.watch(sinks=[writer, wandb], max_overhead=None)
    run.train(2)
    assert {("lowp/loss", 0), ("lowp/blocks.1/update_to_weight", 1)} <= set(writer.seen)
    assert wandb.seen[1] == {name: value for (name, step), value in writer.seen.items() if step == 1}


def test_a_writer_of_tensorboard_is_a_sink(run: planted.Run, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        run.watch(sinks=writer, max_overhead=None)
        run.train(2)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [one.step for one in events.Scalars("lowp/head/gradient")] == [0, 1]


# -- the loss and its scale -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("limit", "first"), [(1e-3, True), (5e-4, True), (1.0, False), (0.25, False)])
def test_gradients_that_are_clipped_after_unscale_raise_no_alarm(run: planted.Run, limit: float, first: bool) -> None:
    planted._fp16(run)  # its scale stays the same in a few steps
    run.clip, run.unscales_first = limit, first
    run.watch(max_overhead=None)
    run.train(12)
    assert [alarm.id for alarm in run.alarms] == ([] if first else ["N208"])


def test_gradients_clipped_while_scaled_are_known_by_a_scale_that_moves(run: planted.Run) -> None:
    planted._fp16(run, init_scale=2.0**10, growth_interval=3)
    run.clip, run.unscales_first = 0.7071, False  # no round number
    run.watch(max_overhead=None)
    run.train(12)
    assert [alarm.id for alarm in run.alarms] == ["N208"]


def test_a_spike_is_told_at_the_latest_in_the_step_after_it_whenever_the_last_look_was(
    run: planted.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    run.before = lambda step: setattr(run, "reduction", "sum" if step == 25 else "mean")
    clock.train(run, 28)
    (alarm,) = run.alarms
    assert alarm.id == "N403" and alarm.step <= 26 and "in step 25" in alarm.text


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"on_alarm": "stop"}, InvalidInput, "on_alarm='stop' is not valid: give 'warn', 'raise' or a function"),
        ({"patience": 0}, InvalidInput, "patience=0 is not valid: give a number of looks, 1 or more"),
        ({"sinks": 3}, InvalidInput, "int is not a sink: give a path, a function of a dictionary, or an object with"),
        ({"max_overhead": "x"}, InvalidInput, "max_overhead='x' is not valid"),
    ],
)
def test_what_is_no_argument_is_refused(run: planted.Run, given: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        run.watch(**given)
    assert torch.autograd.backward.__name__ == "backward" and not hasattr(torch.autograd.backward, "__wrapped__")


def test_what_is_no_model_or_optimizer_is_refused(run: planted.Run) -> None:
    with pytest.raises(TypeError, match="a monitor needs a torch module, not str"):
        lowp.Monitor("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a monitor needs a torch optimizer, not float"):
        lowp.Monitor(run.model, [1e-3])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="rollout: shapes"):
        run.watch().compare("rollout", torch.ones(2), torch.ones(3))


# -- what is not finite -----------------------------------------------------------------------------------------------
def test_the_origin_of_a_nan_is_known_where_its_step_was_not_looked_at(run: planted.Run) -> None:
    monitor = run.watch(max_overhead=1e-9)
    planted.nan_in_a_layer(run)
    for step in range(14):
        if step == 12:  # the next one is looked at, when the NaN has spread to all weights
            monitor._look_at, monitor._pace.budget.share = 0, None
        run.step(step)
    monitor.close()
    (alarm,) = [one for one in run.alarms if one.id == "N401"]
    assert alarm.layer == "blocks.1.up.weight" and "the first that the loss comes from" in alarm.text


def test_a_nan_that_has_spread_before_it_was_seen_is_not_ascribed_to_a_layer(run: planted.Run) -> None:
    monitor = run.watch(max_overhead=1e-9)
    run.before = lambda step: setattr(run, "scale_of_inputs", math.inf if step == 10 else 1.0)
    for step in range(14):
        if step == 12:
            monitor._look_at, monitor._pace.budget.share = 0, None
        run.step(step)
    monitor.close()
    (alarm,) = [one for one in run.alarms if one.id == "N401"]
    assert alarm.layer == "the loss" and "has spread it to most weights" in alarm.text
