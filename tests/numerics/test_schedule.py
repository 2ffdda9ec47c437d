"""What profiling may take, whose turn it is, and the loss scale of what is watched, all by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lowp.errors import InvalidInput
from lowp.numerics import schedule, windows
from lowp.numerics.models import Models
from lowp.numerics.prediction import Window
from lowp.numerics.record import Key, OpSeen, Part, Record
from lowp.numerics.schedule import Budget, Schedule
from lowp.numerics.spectrum import Spectrum
from lowp.numerics.windows import WatchedScale, initial_scale, window_of


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "has_compiled", lambda: False)


def budget(share: float | None = 0.1, total: float = 11.0, **spent: float) -> Budget:
    """A budget whose training has begun at 100 s."""
    return Budget(share, clock=lambda: 100.0 + total, started=100.0, **spent)


def test_a_budget_is_a_share_of_the_time_of_the_training_alone() -> None:
    found = budget(own=1.0, guarding=0.25, idle=0.5)
    assert (found.total, found.training, found.overhead) == (11.0, 10.0, 0.1)
    assert found.room == pytest.approx(0.0) and budget(own=0.5).room == pytest.approx(0.1 * 10.5 - 0.5)
    assert budget(None).room == math.inf and budget(own=0.5, allowance=3.0).room == 2.5
    assert found.account() == {
        **{"max_overhead": 0.1, "allowance": 0.0, "overhead": 0.1, "own_seconds": 1.0},
        **{"every_step_seconds": 0.75, "total_seconds": 11.0},
    }
    assert [found.may_guard(part) for part in (0.4, 0.5, 0.6)] == [False, True, True]  # of 1.0 s without 0.5 s
    assert budget(None, guarding=9.0).may_guard(0.0)
    assert budget(own=20.0).training == 1e-9
    found.spent(0.5, True)
    found.spent(0.125, False)
    found.pass_by(2.0)
    assert (found.own, found.guarding, found.idle) == (3.625, 0.375, 2.5)
    found.clock = lambda: 103.0
    found.end()
    found.clock = lambda: 109.0
    assert found.total == 3.0


def test_a_budget_is_at_most_ten_times_the_training() -> None:
    texts = {"1000%": 10.0, "10": 10.0, "0.5 %": None, "1e-9": 1e-9, "auto": 0.03, None: None, "NONE ": None}
    for text, share in texts.items():
        if text == "0.5 %":
            assert Budget.parse(text).share == 0.005
        else:
            assert Budget.parse(text).share == share, text
    assert [Budget.parse(text).allowance for text in ("auto", "3%", "none")] == [0.25, 0.0, 0.0]
    for text in ("1001%", "10.1", "0", "0%", "-1", "nan", "x"):
        with pytest.raises(InvalidInput, match="give a share of the time such as 3% or"):
            Budget.parse(text)


def by_hand(of: Budget, divergence: bool = False) -> Schedule:
    """A schedule of three modules that are known to take 1, 2 and 3 s."""
    found = Schedule(Models(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), of, divergence)
    found.take_turns()
    assert set(found._costs) == {"", "0", "1"}
    found._costs = {"": 1.0, "0": 2.0, "1": 3.0}
    found._measured = {"", "0", "1"}
    found._waiting = ["0", "1"]
    return found


@pytest.mark.parametrize(
    ("spent", "divergence", "step", "wakes"),
    [
        ({"own": 1.0}, False, 9, 9 + 20),  # 3 s are earned by a training of 30 s, three times the present one
        ({"own": 1.0}, False, 10, 10 + 22),
        ({"own": 3.0, "total": 53.0}, False, 9, 9 + 8),
        ({"own": 1.0}, False, 999, 999 + 512),
        ({"own": 1.0, "guarding": 0.75, "idle": 0.5}, True, 9, 9 + 10),  # twice 0.75 s and 0.5 s
        ({"own": 1.0, "guarding": 2.0, "idle": 0.5}, True, 9, 9 + 20),
        ({"share": None}, False, 9, 16),
        ({"share": None}, False, 51, 100),
    ],
)
def test_the_next_step_to_decide_on_is_that_by_which_a_look_or_a_guard_is_earned(
    spent: dict[str, float], divergence: bool, step: int, wakes: int
) -> None:
    assert by_hand(budget(**spent), divergence)._next(step, 0.5) == wakes


def test_where_nobody_waits_the_next_round_is_waited_for() -> None:
    found = by_hand(budget(own=1.0))
    found._waiting = []
    assert [found._next(step, 0.5) for step in (0, 2, 4, 8, 16, 50, 99)] == [1, 4, 8, 16, 32, 100, 100]
    found._wakes = 9
    assert [found.rests(step) for step in (6, 7, 8, 9)] == [True, True, False, False]


def test_a_look_is_at_as_many_modules_as_there_is_room_for() -> None:
    found = by_hand(budget())
    assert found.account() == {"looks": 1 / 3, "modules": 3, "modules_seen": 3}
    rooms = {1.9: [], 2.0: ["0"], 4.9: ["0"], 5.0: ["0", "1"], math.inf: ["0", "1"]}
    assert {room: found.turn(3, room) for room in rooms} == rooms
    found._measured = set()  # of guesses one and a half times as much, and one at a time
    rooms = {2.9: [], 3.0: ["0"], 99.0: ["0"], math.inf: ["0", "1"]}
    assert {room: found.turn(3, room) for room in rooms} == rooms
    assert (found.cost("0"), found._whole) == (3.0, 9.0)
    found._measured = {"0", "1"}
    found._note(["0", "1"], 10.0)
    assert found._costs == {"": 1.0, "0": 4.0, "1": 6.0} and (found.rounds, found._waiting) == (1, [])
    assert found.account() == {"looks": 1.0, "modules": 3, "modules_seen": 2}
    assert sorted(found.turn(3, math.inf)) == ["", "0", "1"], "a round was due while the one before went on"
    found._note([""], 0.5)
    assert found._costs[""] == 0.5 and len(found._waiting) == 2 and found.rounds == 1
    found._costs["0"] = found._costs["1"] = 0.0
    found._note(["0", "1"], 3.0)
    assert (found._costs["0"], found._costs["1"], found.rounds) == (1.5, 1.5, 2)
    assert found.turn(3, math.inf) == [] and sorted(found.turn(4, math.inf)) == ["", "0", "1"]


def test_what_a_step_hid_is_the_difference_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: clock[0])
    found = by_hand(budget())
    found._begun = 0.0
    for seconds in (1.0, 2.0, 9.0):
        clock[0] += seconds
        found.end(False)
    assert list(found._idle) == [1.0, 2.0, 9.0] and found._budget.own == 0.0
    clock[0] += 4.0
    found._budget.spent(0.5, True)
    assert found.end_look(["0", "1"], False) == 1.0  # as much as was measured of it, though 1.5 s are hidden
    assert found._budget.own == 1.0 and (found._costs["0"], found._costs["1"]) == (0.4, 0.6)
    clock[0] += 4.0
    found._budget.spent(3.0, True)
    found._waiting = ["0"]
    assert found.end_look(["0"], False) == 3.25  # the median of 3.5 and 1.0 s is a quarter longer than 2 s
    found._guarded_steps = 19
    found._idle.clear()
    found._idle.extend([1.0] * 20)
    clock[0] += 3.0
    found._budget.spent(0.5, False)
    before = found._budget.own
    found.end(True)
    assert found._hidden_by_guard == 1.5 and found._budget.own == before + 1.5
    clock[0] += 3.0
    found._budget.spent(0.25, False)
    found.end(True)
    assert found._budget.own == before + 1.5 + 0.25 + 0.75, "at most three times what was measured"


# -- the loss scale of a watched training -----------------------------------------------------------------------------
class Scaler:
    """A scaler whose scale and state are set by hand, and which keeps what it is fed with."""

    def __init__(self, scale: float) -> None:
        self.scale, self.enabled, self.fed = scale, True, list[dict[int, int]]()

    def is_enabled(self) -> bool:
        return self.enabled

    def get_scale(self) -> float:
        return self.scale

    def add_exponents(self, counts: torch.Tensor) -> None:
        assert counts.shape == (256,)
        self.fed.append({place: int(counts[place]) for place in counts.nonzero().flatten().tolist()})


def test_a_step_was_skipped_where_it_was_not_taken_and_the_scale_is_lower() -> None:
    scaler = Scaler(8.0)
    seen = WatchedScale(scaler)
    assert seen.is_used and seen.value() == seen.begin_backward() == 8.0
    for scale, skipped in ((8.0, False), (16.0, False), (4.0, True)):
        scaler.scale = 8.0
        seen.begin_backward()
        scaler.scale = scale
        assert (seen.has_skipped(), seen.has_skipped()) == (skipped, False)
    scaler.scale = 8.0
    seen.begin_backward()
    seen.stepped()
    scaler.scale = 4.0
    assert not seen.has_skipped()
    scaler.enabled = False
    assert seen.value() == 1.0 and seen.is_used
    for none in (WatchedScale(None), WatchedScale(scaler)):
        assert (none.is_used, none.value(), none.begin_backward(), none.has_skipped()) == (False, 1.0, 1.0, False)


def test_a_scaler_is_fed_with_gradients_at_its_scale() -> None:
    scaler = Scaler(8.0)
    counts = np.zeros(256, np.int64)
    counts[[0, 100, 252, 254, 255]] = 1, 2, 4, 8, 16
    WatchedScale(scaler).feed(counts)
    scaler.scale = 2.0**-120
    WatchedScale(scaler).feed(counts)
    assert scaler.fed == [{3: 1, 103: 2, 254: 28}, {0: 3, 132: 4, 134: 8, 135: 16}]
    WatchedScale(None).feed(counts)
    WatchedScale(torch.amp.GradScaler("cpu")).feed(counts)


def gradients(**of: list[float]) -> Record:
    """A record of linear layers, by name with the gradients that arrive there."""
    part = Part()
    for name, values in of.items():
        part.ops[name, "linear"] = OpSeen("contraction")
        part.tensors[Key(name, "linear", "grad", "backward")] = Spectrum.of(torch.tensor(values))
    return Record({}, part, {"max_overhead": None})


def test_the_window_is_that_of_most_modules_and_begins_where_least_is_flushed() -> None:
    # 65504 is between 2^15 and 2^16; 2^-25 and less becomes zero
    assert window_of(gradients(a=[1.0], b=[2.0**-10])) == (Window(-14, 15), {})
    assert window_of(gradients(a=[2.0], b=[2.0**-10], c=[2.0**30])) == (
        Window(-14, 14),
        {"c": "fits 2^-54 to 2^-15"},
    )
    apart = [2.0**30, 2.0**-30]
    assert window_of(gradients(a=[1.0], b=apart)) == (Window(-24, 15), {"b": "fits under no scale"})
    assert window_of(gradients(b=apart)) == (Window(1, 0), {"b": "fits under no scale"})
    few = [2.0**-10] * 96 + [2.0**-20] * 4  # of which one in 25 may be flushed, and one in a thousand better is not
    assert window_of(gradients(a=few))[0] == Window(-4, 25)
    assert window_of(gradients(a=[*few, 1.0]))[0] == Window(-4, 15)
    assert window_of(gradients(a=[*few, 2.0**12]))[0] == Window(-4, 3)
    assert window_of(gradients(a=[*few, 2.0**18]))[0] == Window(-6, -3), "three powers of two are left"
    assert window_of(gradients(a=[0.0])) == (Window(-126, 127), {})
    assert window_of(gradients(a=[65504.0] * 9 + [2.0**-24])) == (Window(0, 0), {}), "one scale"
    both = gradients(a=[1.0])
    both.part.ops["a", "linear"].parameters["weight"] = "a.weight"
    both.part.ops["n", "layer_norm"] = OpSeen("norm", parameters={"weight": "n.weight"})
    both.part.ops["l", "mse_loss"] = OpSeen("wide")
    for module, op, role, value in (("a", "weight", "weight_grad", 2.0), ("n", "weight", "weight_grad", 2.0**9)):
        both.part.tensors[Key(module, op, role, "backward")] = Spectrum.of(torch.tensor([value]))
    both.part.tensors[Key("l", "mse_loss", "grad", "backward")] = Spectrum.of(torch.tensor([2.0**9]))
    assert window_of(both) == (Window(-24, 14), {}), "of what is in 16 bits"
    with pytest.raises(InvalidInput, match="no gradient was recorded"):
        initial_scale(gradients(a=[0.0]))
    record = gradients(a=[2.0**-10])
    assert initial_scale(record) == 2.0**22
    record.sampling.update(max_overhead=0.1)
    assert initial_scale(record) == 2.0**16
    assert initial_scale(Record({}, gradients(a=[1.0]).part, {"max_overhead": 0.1})) == 2.0**12


def test_the_noise_of_a_bias_is_a_rounding_of_what_it_sums_up() -> None:
    record = gradients(a=[1.0, -2.0, 4.0, 0.0], b=[1.0])
    for name in ("a", "b"):
        record.part.ops[name, "linear"].parameters.update(weight=f"{name}.weight", bias=f"{name}.bias")
    record.part.tensors[Key("a", "bias", "weight_grad", "backward")] = Spectrum.of(torch.tensor([2.0**-40, 7.0]))
    assert windows._noise_of_biases(record) == {"a.bias": 2.0**-12 * math.sqrt(21 / 2)}


@pytest.mark.parametrize(
    ("op_class", "roles", "found"),
    [
        ("contraction", ["weight", "bias"], ["the bias"]),
        ("norm", ["weight", "bias"], []),
        ("contraction", ["bias"], []),
        ("contraction", ["weight", "weight 2", "bias"], []),
        ("contraction", ["weight", "weight 2"], []),
        ("contraction", ["scale", "bias"], []),
    ],
)
def test_a_bias_is_added_to_a_product_beside_one_weight(op_class: str, roles: list[str], found: list[str]) -> None:
    assert windows._biases(OpSeen(op_class, parameters={role: f"the {role}" for role in roles})) == found
