"""Ten planted faults, each of which is named; and a healthy run without a report."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import lowp
from lowp import recipes
from lowp.numerics import modes
from lowp.numerics.divergence import Fault, Guard, _first_cause, _growth, _hint, _judged
from lowp.numerics.models import Models
from lowp.numerics.modes import MODE, Paths, Seam, numbers_of, source_line
from lowp.numerics.replay import Event, Place, Trace, ranges_of, state_of
from lowp.numerics.tape import Slot, Tape, beside, calls_again, random_state, set_random_state


def test_ranges_of_inputs_are_those_of_their_finite_numbers() -> None:
    mixed = torch.tensor([0.0, -0.0, 2.0, -3.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
    complex, meta = torch.ones(1, 2, dtype=torch.complex64), torch.ones(3, device="meta")
    whole = {"shape": [2], "dtype": "int64", "smallest": 1.0, "largest": 1.0, "zeros": 0, "nan": 0, "inf": 0}
    assert ranges_of([mixed, torch.full((2,), math.nan), complex, meta, torch.ones(2, dtype=torch.int64)]) == [
        {"shape": [7], "dtype": "float64", "smallest": -3.0, "largest": 2.0, "zeros": 2, "nan": 1, "inf": 2},
        {"shape": [2], "dtype": "float32", "nan": 2, "inf": 0},
        {"shape": [1, 2], "dtype": "complex64"},
        {"shape": [3], "dtype": "float32"},
        whole,
    ]
    assert len(ranges_of([mixed] * 9)) == 6


def test_a_tape_holds_the_calls_of_one_step_and_of_no_more_than_sixteen_of_a_rollout() -> None:
    tape, model, x = Tape(Seam()), nn.Linear(2, 2), torch.ones(1, 2)

    def held() -> int:
        tape.begin(model, (x,), {})
        tape.open(model, loss := model(x))
        tape.end(loss) if len(kept) == 18 else tape.rest()
        return len(tape.calls)

    kept: list[int] = []
    while len(kept) < 20:
        kept.append(held())
    assert kept == [*range(1, 17), 1, 2, 3, 1]


class Model(nn.Module):
    """Two linear layers with a planted fault between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], path: str = "between") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.between = Between(between)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self.first(x)))
        return found


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def fault_of(
    model: nn.Module,
    batch: Tensor | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    rate: float = 0.01,
    steps: int = 4,
) -> dict[str, Any]:
    """Train a few steps, the last on `batch`, and return the single fault found."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    y = torch.randint(3, (5,), generator=torch.Generator().manual_seed(0))
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        for step in range(steps):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
            x = batch if batch is not None and step == steps - 1 else x
            optimizer.zero_grad()
            loss(model(x), y[: len(x)]).backward()
            optimizer.step()
    faults = profile.record.part.faults
    assert len(faults) == 1, faults
    return faults[0]


def assert_place(fault: dict[str, Any], op: str, module: str, code: str) -> None:
    """Compare a fault with its op, its module, and the line of this file that contains this code."""
    assert (fault["op"], fault["module"]) == (op, module)
    file, _, number = fault["line"].partition(":")
    assert file == "test_divergence.py" and code in linecache.getline(__file__, int(number)), fault["line"]


def zeros_once(x: Tensor) -> Tensor:
    return x * 0 if Counter.next() >= 3 else x


class Counter:
    """Counts the calls of planted functions: the fourth one is faulty."""

    calls = 0

    @classmethod
    def next(cls) -> int:
        cls.calls += 1
        return cls.calls - 1


@pytest.fixture(autouse=True)
def _from_the_start() -> None:
    Counter.calls = 0


def test_a_logarithm_of_zero_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fault = fault_of(Model(lambda x: torch.log(x.relu() + 1e-3 * (x.abs().amax() < 10))), torch.full((5, 8), -1e6))
    assert_place(fault, "log", "between", "torch.log(")
    assert fault["phase"] == "forward" and "clamp its input" in fault["hint"]
    assert fault["inputs"][0]["smallest"] == 0 and fault["step"] == 3
    assert len(fault["history"]) == 4 and fault["history"][0]["loss"] is not None
    assert "First: log" in capsys.readouterr().err


def test_an_overflow_of_fp16_is_named_with_its_layer() -> None:
    model = Model(lambda x: x)
    fault = fault_of(
        model, torch.full((5, 8), 3e6), lambda output, y: nn.functional.cross_entropy(output.half().float(), y)
    )
    assert_place(fault, "half", "", "output.half()")
    assert fault["operation"] == "_to_copy" and fault["phase"] == "forward" and fault["inf"] > 0
    assert "beyond the largest number" in fault["hint"]


def test_an_overflow_in_a_region_of_lowp_s_names_the_layer() -> None:
    model = Model(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        with lowp.autocast("fp16"):
            output = model(torch.full((5, 8), 6e4) * 30)
            loss = output.float().sum()
        loss.backward()
        optimizer.step()
    (fault,) = profile.record.part.faults
    assert_place(fault, "linear", "first", "self.first(x)")
    assert fault["inf"] > 0


def test_a_fault_before_a_batch_norm_is_named_though_no_step_was_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """The norm has written NaN into its statistics, which the graph holds: neither a cause nor to be written again."""
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    statistics, precision = model[1].running_mean, lowp.Precision("fp16")
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with lowp.profile(model, optimizer, precision=precision) as profile, precision.autocast():
        precision.backward(model(torch.randn(8, 8) * 1e6).pow(2).mean())
        precision.step(optimizer)
    fault = profile.record.part.faults[0]
    assert (fault["op"], fault["module"]) == ("linear", "0")
    assert model[1].running_mean is statistics and statistics.isfinite().all()
    assert "every step was skipped" in capsys.readouterr().err


def test_a_row_that_a_mask_hides_as_a_whole_is_named() -> None:
    def attend(x: Tensor) -> Tensor:
        hidden = torch.zeros(5, 8, dtype=torch.bool)
        hidden[:, 3:] = True
        if Counter.next() >= 3:
            hidden[2] = True
        return x.masked_fill(hidden, -math.inf).softmax(-1)

    fault = fault_of(Model(attend))
    assert_place(fault, "softmax", "between", ".softmax(-1)")
    assert "masked as a whole" in fault["hint"]


def test_a_division_by_the_sum_of_a_mask_is_named() -> None:
    def average(x: Tensor) -> Tensor:
        mask = torch.ones(5, 8) * (Counter.next() < 3)
        return x * mask / mask.sum(-1, keepdim=True)

    fault = fault_of(Model(average))
    assert_place(fault, "div", "between", "/ mask.sum(")
    assert "divisor" in fault["hint"]


def test_a_learning_rate_that_explodes_is_named() -> None:
    fault = fault_of(Model(lambda x: x), None, lambda output, y: (output**2).sum(), rate=10.0, steps=12)
    assert_place(fault, "linear", fault["module"], "self.last(self.between(self.first(x)))")
    assert fault["module"] in ("first", "last")
    assert fault["kind"] == "exploding" and "the learning rate is too large" in fault["hint"]


def test_bad_data_is_named_as_the_batch_s() -> None:
    batch = torch.randn(5, 8)
    batch[1, 2] = math.nan
    fault = fault_of(Model(lambda x: x), batch)
    assert fault["kind"] == "batch"
    told = "First: the batch (tensor 0 of the model's arguments): 1 NaN. Look at the data of this step."
    assert str(Fault(**fault)).endswith(told)


@pytest.mark.filterwarnings("ignore:std:UserWarning")
def test_a_normalisation_over_one_element_is_named() -> None:
    fault = fault_of(Model(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5)), torch.randn(1, 8))
    assert_place(fault, "std", "between", "x.std(0)")
    assert fault["nan"] > 0 and "one element" in fault["hint"]


def test_the_gradient_of_a_square_root_at_zero_is_named() -> None:
    fault = fault_of(Model(lambda x: (zeros_once(x) ** 2).sqrt()))
    assert_place(fault, "sqrt", "between", ".sqrt()")
    assert (fault["what"], fault["phase"]) == ("gradients", "backward") and "derivative at 0" in fault["hint"]


class Foreign(torch.autograd.Function):
    """Computes outside of torch, like bindings of other libraries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spoil: bool) -> Tensor:
        array = x.detach().numpy().copy()
        array[0] = math.nan if spoil else array[0]
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def test_a_function_of_the_user_s_own_is_named() -> None:
    fault = fault_of(Model(lambda x: Foreign.apply(x, Counter.next() >= 3)))  # type: ignore[no-untyped-call]
    assert_place(fault, "Foreign", "between", "Foreign.apply(")
    assert fault["nan"] > 0


def test_a_fault_inside_a_checkpointed_block_is_named() -> None:
    block = Between(lambda x: torch.exp(x * (1 if x.abs().amax() < 100 else 1e3)))
    model = Model(lambda x: checkpoint(block, x, use_reentrant=False))
    fault = fault_of(model, torch.full((5, 8), 1e4))
    assert_place(fault, "exp", "between", "torch.exp(")
    assert fault["phase"] == "forward"


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_fault_inside_a_compiled_module_is_named() -> None:
    model = Model(lambda x: torch.exp(x))
    model.between = torch.compile(model.between, backend="eager")  # type: ignore[assignment]
    fault = fault_of(model, torch.full((5, 8), 1e5))
    assert_place(fault, "exp", "between", "torch.exp(")


def graph_of(weights: Tensor) -> Tensor:
    """Return a ring with as many nodes, as a sparse matrix with these weights as entries."""
    nodes = torch.arange(len(weights))
    return torch.sparse_coo_tensor(torch.stack((nodes, nodes.roll(1))), weights, (len(weights),) * 2, is_coalesced=True)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_fault_is_followed_through_sparse_tensors(layout: torch.layout) -> None:
    def mixed(x: Tensor) -> Tensor:
        weights = zeros_once(x.detach()).abs().sum(1).log()  # the fault
        graph = graph_of(weights).to_sparse(layout=layout)
        other = graph_of(torch.full_like(weights, math.inf)).to_sparse(layout=layout)  # no part of the loss
        del other
        return torch.sparse.mm(graph, x)

    assert_place(fault_of(Model(mixed)), "log", "between", "the fault")


def test_gradients_of_a_sparse_embedding_are_looked_at() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.last = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(zeros_once(self.table(x[:, 0].abs().long())).sqrt())  # the fault
            return found

    model = Looked()
    with torch.no_grad():
        model.table.weight.abs_()
    assert_place(fault_of(model), "sqrt", "", "the fault")


def test_a_step_that_cannot_be_run_again_is_told_and_the_training_goes_on() -> None:
    def once(x: Tensor) -> Tensor:
        if (call := Counter.next()) > 3:
            raise RuntimeError("no more data")
        return x * (math.nan if call == 3 else 1.0)

    fault = fault_of(Model(once))
    assert fault["kind"] == "unknown" and "cannot be run again: RuntimeError: no more data" in fault["hint"]


def test_a_fault_in_a_module_whose_result_has_no_gradient_is_named() -> None:
    fault = fault_of(Model(lambda x: zeros_once(x.detach()).abs().log()))  # without a graph
    assert_place(fault, "log", "between", "# without a graph")


def test_a_backward_pass_within_the_model_runs_again_too() -> None:
    def moved(x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        place.square().sum().backward()
        assert place.grad is not None
        return zeros_once(place.grad * 0 + x).abs().log()  # the fault

    assert_place(fault_of(Model(moved)), "log", "between", "the fault")


def test_a_step_that_is_finite_when_it_runs_again_is_told_as_such() -> None:
    fault = fault_of(Model(lambda x: x * (math.nan if Counter.next() == 3 else 1.0)))
    assert fault["kind"] == "unknown" and "the step was finite: something outside of the model's call" in fault["hint"]


_BUDGET = "to stay in the budget: --max-overhead none watches each."


def guarded(model: nn.Module, *, unguarded: int = 0, targets: float = 0.0, taped: bool = True) -> tuple[Guard, Tensor]:
    """Return a guard that has seen one call of a model, and a loss."""
    guard = Guard(Models(model), Seam())
    guard.unguarded = unguarded
    x, aim = torch.ones(2, 3), torch.full((2, 2), targets)
    guard.tape.begin(model, (x,), {})
    guard.tape.open(model, output := model(x))
    loss = (output - aim).square().mean()
    if not taped:
        guard.tape.end(loss)
        guard.tape.loss = None
    return guard, loss


@pytest.mark.parametrize(
    ("spoilt", "unguarded", "op", "ends"),
    [
        ("weight", 7, "parameter weight", f" 7 steps were not watched, {_BUDGET}"),
        ("weight", 0, "parameter weight", "not finite before the step: an earlier step wrote it."),
        ("targets", 7, "the batch (tensor 0 beside the model)", "Look at the data of this step."),
    ],
)
def test_a_weight_that_was_not_finite_before_is_told_with_the_steps_that_nobody_watched(
    spoilt: str, unguarded: int, op: str, ends: str
) -> None:
    model = nn.Linear(3, 2)
    if spoilt == "weight":
        with torch.no_grad():
            model.weight[0, 0] = math.nan
    guard, loss = guarded(model, unguarded=unguarded, targets=math.nan if spoilt == "targets" else 0.0)
    seen = guard.current(0)
    seen.loss = float(loss.detach())
    fault = guard.saw_loss(loss, seen, 1.0)
    assert fault is not None and fault.op == op and fault.hint.endswith(ends), fault
    assert guard.saw_loss(loss, seen, 1.0) is None, "once a run"


@pytest.mark.parametrize(("gradient", "found"), [(1e30, False), (math.inf, True), (math.nan, True)])
def test_gradients_are_faulty_where_one_is_infinite_or_nan(gradient: float, found: bool) -> None:
    model = nn.Linear(3, 2)
    guard, _ = guarded(model, taped=False)
    parameters, seen = list(model.parameters()), guard.current(0)
    assert guard.before_step(parameters, seen, 1.0) is None and seen.largest_gradient is None
    model.bias.grad = torch.tensor([gradient, -1.0])
    fault = guard.before_step(parameters, seen, 1.0)
    assert (fault is not None) is found and str(seen.largest_gradient) == str(float(torch.tensor(gradient)))
    if fault is not None:
        assert "the step was finite" in fault.hint, "its loss was not computed of the model"


def test_a_step_that_a_healthy_scaler_skips_is_no_fault() -> None:
    model = Model(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = lowp.GradScaler("cpu", init_scale=2.0**20)
    with lowp.profile(model, optimizer, scaler=scaler, max_overhead=None) as profile:
        for step in range(4):
            optimizer.zero_grad()
            with lowp.autocast("fp16"):
                loss = nn.functional.cross_entropy(model(torch.randn(5, 8) * 30), torch.randint(3, (5,)))
            scaler.scale(loss).backward()
            if step == 1:
                model.first.weight.grad[0, 0] = math.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
    record = profile.record
    assert not record.part.faults
    assert any(one.skipped for one in record.steps)


def test_the_replay_leaves_model_gradients_and_random_numbers_as_they_were() -> None:
    draws = []
    for watched in (True, False):
        model = Model(lambda x: torch.log(x.relu()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with lowp.profile(model, optimizer, max_overhead=None, divergence=watched):
            torch.manual_seed(5)
            nn.functional.cross_entropy(model(torch.randn(5, 8)), torch.randint(3, (5,))).backward()
            optimizer.step()
        draws.append((torch.rand(1), model.first.weight.grad))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1].isnan(), draws[1][1].isnan())  # type: ignore[union-attr]


def depth() -> int:
    return len(_get_current_function_mode_stack())


def test_after_backward_no_mode_is_in_force_that_clipping_would_pay_for() -> None:
    backward, model = Tensor.backward, nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        for step in range(4):
            loss = model(torch.ones(3, 4)).square().mean()
            in_forward = depth()
            loss.backward()
            in_clipping = depth()
            optimizer.step()
            assert in_clipping == 0 or step in (0, 1, 2), "a step that is looked at has a mode of its own"
            assert in_forward > 0
    assert Tensor.backward is backward and depth() == 0
    assert profile.record.sampling["unguarded"] == 0


def test_a_fault_in_a_second_loss_of_a_step_is_named() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        for step in range(6):
            model(torch.ones(3, 4)).square().mean().backward()
            output = model(torch.ones(3, 4))
            (output * 0.0 if step == 5 else output.exp()).log().sum().backward()
            optimizer.step()
    (fault,) = profile.record.part.faults
    assert (fault["step"], fault["op"]) == (5, "log")


def test_a_backward_that_someone_else_replaced_meanwhile_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(loss: Tensor, *given: Any, **named: Any) -> None:
        replaced(loss, *given, **named)

    before, model = Tensor.backward, nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None):
        replaced = Tensor.backward
        monkeypatch.setattr(Tensor, "backward", theirs)
        model(torch.ones(3, 4)).mean().backward()
        optimizer.step()
    assert Tensor.backward is theirs
    model(torch.ones(3, 4)).mean().backward()
    monkeypatch.setattr(Tensor, "backward", before)


# -- events made by hand ----------------------------------------------------------------------------------------------
def event(order: int = 0, operation: str = "mul", op: str = "mul", **given: Any) -> Event:
    """An operation that makes an infinity of infinities, of two operations in front of it, one of them a mask."""
    kept: dict[str, Any] = {"phase": "forward", "nan": 0, "inf": 1, "inputs": [], "finite_inputs": False, **given}
    kept.setdefault("parents", [])
    return Event(order, operation, Place(op, "", ""), **kept)


def test_the_first_cause_is_the_first_operation_that_made_something_of_what_was_in_order() -> None:
    mask = event(1, fills=True)
    first = event(2, finite_inputs=True)
    passing = event(3, parents=[mask])
    assert _first_cause(event(9, parents=[passing, first])) is first
    last = event(9, parents=[passing])
    assert _first_cause(last) is last, "where nothing made anything"
    for given, is_cause in (
        ({"nan": 1}, True),  # of infinities that are in order
        ({"nan": 1, "nan_inputs": True}, False),
        ({"nan": 1, "parents": [mask, passing]}, False),
        ({"phase": "given"}, True),
        ({"parents": []}, True),
        ({"nan": 1, "fills": True}, False),
    ):
        one = event(5, **{"parents": [mask], **given})
        assert (_first_cause(event(9, parents=[one, passing])) is one) is is_cause, given


def test_a_fault_is_judged_by_what_was_given_by_growth_and_by_the_operation() -> None:
    judged = {
        ("the batch (tensor 0)", "given"): ("batch", "Look at the data of this step."),
        ("parameter 0.weight", "given"): (
            "weights",
            "The parameter 0.weight was not finite before the step: an earlier step wrote it.",
        ),
        ("buffer mean", "given"): (
            "weights",
            "The buffer mean was not finite before the step: an earlier step wrote it.",
        ),
        ("a tensor", "given"): ("operation", ""),
        ("parameter", "forward"): ("operation", ""),
    }
    for (operation, phase), told in judged.items():
        assert _judged(event(operation=operation, phase=phase), None) == told
    for growth, kind in ((999.9, "operation"), (1000.0, "exploding"), (math.nan, "exploding"), (0.0, "operation")):
        assert _judged(event(), growth)[0] == kind
    assert _judged(event(), 1234.5)[1].startswith("The largest weight is 1.23e+03 times what it was")


def test_a_hint_tells_the_ranges_of_inputs_and_what_to_do() -> None:
    ranges = [{"dtype": "float32", "smallest": -1.0, "largest": 2.5}, {"dtype": "float32"}]
    told = _hint(event(operation="log", op="log", inputs=ranges))
    assert told.startswith("Its inputs: -1 .. 2.5. The logarithm of 0")
    assert _hint(event(inputs=[*ranges, {"dtype": "float16", "smallest": 0.0, "largest": 1.0}], inf=0)) == (
        "Its inputs: -1 .. 2.5; 0 .. 1."
    )
    beyond = "That is beyond the largest number of the format"
    for operation, dtype, inf, is_beyond in (
        ("_to_copy", "float32", 1, True),
        ("quantize", "float32", 1, True),
        ("mul", "float16", 1, True),
        ("mul", "float32", 1, False),
        ("_to_copy", "float16", 0, False),
        ("exp", "float16", 1, False),
    ):
        assert (beyond in _hint(event(operation=operation, inputs=[{"dtype": dtype}], inf=inf))) is is_beyond
    for op, phase, is_told in (("sqrt", "backward", True), ("sqrt", "forward", False), ("exp", "backward", False)):
        assert ("The derivative at 0 is infinite" in _hint(event(op=op, phase=phase))) is is_told


def test_growth_is_that_of_the_largest_weight() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -8.0], [0.5, 0.0]]))
        model.bias.zero_()
    assert _growth(Models(model), 2.0) == 4.0
    assert _growth(Models(model), None) is None and _growth(Models(model), 0.0) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "step 3: the loss is not finite. First: log (log, forward) in a, t.py:2: 1 NaN and 2 infinite. Clamp."),
        (
            {"what": "gradients", "inf": 0},
            "step 3: the gradients are not finite. First: log (log, forward) in a, t.py:2: 1 NaN. Clamp.",
        ),
        (
            {"module": "", "line": "", "nan": 0},
            "step 3: the loss is not finite. First: log (log, forward) outside of any submodule: 2 infinite. Clamp.",
        ),
        ({"kind": "weights"}, "step 3: the loss is not finite. First: log: 1 NaN and 2 infinite. Clamp."),
        ({"kind": "unknown"}, "step 3: the loss is not finite. Clamp."),
    ],
)
def test_a_fault_is_a_sentence(change: dict[str, Any], text: str) -> None:
    place = {"operation": "log", "op": "log", "module": "a", "line": "t.py:2", "phase": "forward", "hint": "Clamp."}
    assert str(Fault(**{"step": 3, "what": "loss", "kind": "operation", **place, "nan": 1, "inf": 2, **change})) == text


def test_an_observer_is_let_in_and_out_once() -> None:
    seam, seen = Seam(), list[Any]()
    assert [seam.let(seen.append, sees) for sees in (False, True, True, False, False)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    paths = Paths(Models(nn.Linear(1, 1)))
    for stack, current, around in (([], "", ""), (["a"], "a", ""), (["a", "b"], "b", "a"), (["a", "b", "c"], "c", "b")):
        paths.clear()
        paths._stack.extend(stack)
        assert (paths.current, paths.around) == (current, around)


def test_a_tape_numbers_what_a_step_computes_and_keeps_what_it_was_given() -> None:
    tape, model, other, x = Tape(Seam()), nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2)
    tape.begin(model, (x,), {"scale": x})
    tape.begin(other, (x,), {})  # within the call of the model
    tape.open(other, other(x))
    assert tape.calls == [] and tape.models == []
    first, second = model(x), model(x)
    tape.open(model, (first, second))
    loss = second + x
    tape.begin(other, (loss, [first]), {})
    tape.open(other, third := other(loss))
    assert [call.results for call in tape.calls] == [[0, 1], [2], [3]] and tape.models == [model, other]
    assert tape.calls[0].args[0] is x and tape.calls[0].kwargs["scale"] is x
    assert tape.calls[1].args[0] == Slot(1) and tape.calls[1].args[1] is x
    assert tape.calls[2].args == (Slot(2), [Slot(0)])
    assert [call.random is None for call in tape.calls] == [False, True, False]
    for loss_of_step, number in ((third, 3), (first, 0)):
        tape.end(loss_of_step)
        assert tape.loss == number
    tape.end(x)
    assert tape.loss is None, "which the step was given"
    tape.begin(model, (loss,), {})  # the next step
    tape.open(model, model(x))
    assert [call.results for call in tape.calls] == [[0]] and tape.calls[0].args[0] is loss and tape.loss is None
    tape.forget()
    assert tape.calls == [] and tape.models == []


def test_a_step_runs_again_beside_the_training_without_a_trace() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x, tape, models = torch.randn(8, 4), Tape(Seam()), Models(model)
    tape.begin(model, (x,), {})
    output = model(x)
    tape.open(model, output)
    tape.end(loss := output.sum())
    loss.backward()
    norm: Any = model[1]
    kept = [
        (one, one.clone())
        for one in (norm.running_mean, norm.num_batches_tracked, *(p.grad for p in model.parameters()))
    ]
    state, lines = torch.get_rng_state(), list[str]()
    with beside(tape, models):
        assert all(parameter.grad is None for parameter in model.parameters())
        assert norm.running_mean is not kept[0][0]
        again = calls_again(tape, lines.append)
        assert again is not None and torch.equal(again, loss)
        again.backward()
        assert [torch.equal(p.grad, before) for p, (_, before) in zip(model.parameters(), kept[2:], strict=True)] == [
            True
        ] * 4
    assert lines[0] == lines[-1] == "" and len(lines) == 3
    assert torch.equal(torch.get_rng_state(), state)
    now = (norm.running_mean, norm.num_batches_tracked, *(p.grad for p in model.parameters()))
    assert all(one is held and torch.equal(one, before) for one, (held, before) in zip(now, kept, strict=True))
    tape.loss = None
    with beside(tape, models):
        assert calls_again(tape) is None


def test_a_guard_begins_with_nothing_and_remembers_twenty_steps() -> None:
    fault = Fault(3, "loss", "unknown")
    assert fault.document() == {
        **{"step": 3, "what": "loss", "kind": "unknown", "operation": "", "op": "", "module": "", "line": ""},
        **{"phase": "", "nan": 0, "inf": 0, "inputs": [], "scale": None, "hint": "", "history": []},
    }
    guard = Guard(Models(nn.Linear(1, 1)), Seam())
    assert (guard.unguarded, guard.is_replaying, len(guard.history)) == (0, False, 0)
    seen = [guard.current(step) for step in (0, 0, *range(1, 25))]
    assert seen[0] is seen[1] and [one.step for one in guard.history] == list(range(5, 25))
    with guard.replaying():
        assert guard.is_replaying
    assert not guard.is_replaying
    for loss, is_fault in ((None, False), (1e30, False)):
        seen[-1].loss = loss
        assert (guard.saw_loss(torch.ones(1), seen[-1], 1.0) is not None) is is_fault
    seen[-1].loss = math.inf
    found = guard.saw_loss(torch.ones(1), seen[-1], 8.0)
    assert found is not None and (found.kind, found.step, found.scale) == ("unknown", 24, 8.0)
    assert found.hint == "The step cannot be run again: the model was not called in it."
    assert guard.saw_loss(torch.ones(1), seen[-1], 8.0) is None, "once a run"
    parameter = nn.Parameter(torch.ones(2))
    watching = Guard(Models(nn.Linear(1, 1)), Seam())
    assert watching.before_step([parameter], seen[0], 1.0) is None and seen[0].largest_gradient is None
    parameter.grad = torch.tensor([-3.0, 2.0])
    assert watching.before_step([parameter], seen[0], 1.0) is None and seen[0].largest_gradient == 3.0
    parameter.grad = torch.tensor([math.nan, 2.0])
    fault_of_gradients = watching.before_step([parameter], seen[0], 1.0)
    assert fault_of_gradients is not None and fault_of_gradients.what == "gradients"
    assert Guard(Models(nn.Linear(1, 1)), Seam(), diagnoses=False).before_step([parameter], seen[0], 1.0) is None


def traced(*given: tuple[str, Tensor]) -> Trace:
    trace = Trace(Paths(Models(nn.Linear(1, 1))))
    for what, tensor in given:
        trace.give(tensor, what)
    return trace


def test_what_is_not_finite_of_a_tensor_is_counted() -> None:
    nan, inf = math.nan, math.inf
    assert state_of(torch.tensor([nan, inf, -inf, 1.0])) == (1, 2)
    assert state_of(torch.tensor([complex(nan, inf), complex(inf, 0), 1j])) == (1, 1)
    for empty in (torch.tensor([1]), torch.empty(0), torch.empty(2, device="meta"), torch.tensor([True])):
        assert state_of(empty) == (0, 0)


def test_a_trace_tells_masks_and_what_was_given_from_faults() -> None:
    nan, inf = math.nan, math.inf
    mask, both, one = torch.tensor([0.0, -inf]), torch.tensor([inf, -inf]), torch.tensor(inf)
    bad, mixed, good = torch.tensor([nan, 1.0]), torch.tensor([nan, -inf]), torch.ones(2)
    trace = traced(
        ("mask", mask), ("both", both), ("one", one), ("bad", bad), ("mixed", mixed), ("good", good), ("again", mask)
    )
    found = [(one.operation, one.order, one.phase, one.nan, one.inf, one.fills) for one in trace.events]
    assert found == [
        *[("mask", 0, "given", 0, 1, True), ("both", 1, "given", 0, 2, False), ("one", 2, "given", 0, 1, True)],
        *[("bad", 3, "given", 1, 0, False), ("mixed", 4, "given", 1, 1, False)],
    ]
    assert all(one.is_outside for one in trace.events)
    assert trace.event_of(mask[:1]) is trace.events[0] and trace.event_of(good) is None

    def ran(operation: str, given: list[Tensor], *results: Tensor) -> Any:
        before = len(trace.events)
        trace.ran(operation, [(one, state_of(one)) for one in given], list(results))
        return trace.events[-1] if len(trace.events) > before else None

    assert ran("add", [good, good], good + 1) is None and ran("view", [mask], mask) is None
    added = ran("add", [mask, good], hidden := good + mask, good)
    assert (added.order, added.nan, added.inf, added.fills, added.phase) == (5, 0, 1, False, "forward")
    assert (added.finite_inputs, added.nan_inputs, added.parents) == (False, False, [trace.events[0]])
    assert added.place == Place("add", "", "") and not added.is_outside
    assert [one["shape"] for one in added.inputs] == [[2], [2]]
    filled = ran("masked_fill", [good, one], torch.tensor([1.0, inf]))
    assert filled.fills and filled.parents == [trace.events[2]]
    assert not ran("masked_fill", [good, both], both.clone()).fills, "of what is no mask"
    assert ran("full", [], torch.full((2,), inf)).fills and not ran("log", [good], torch.full((2,), inf)).fills
    assert not ran("full", [], torch.full((2,), nan)).fills
    product = ran("mul", [bad, hidden], result := bad * hidden, both.clone())
    assert (product.nan, product.inf, product.nan_inputs, product.finite_inputs) == (1, 3, True, False)
    assert product.parents == [trace.events[3], added]
    assert product.ancestors() == [trace.events[0], trace.events[3], added, product]
    assert ran("view", [good], mask, torch.full((2,), inf)) is not None
    assert ran("mul", [both], both) is not None, "in place"
    product.read(0, product)
    assert len(product.parents) == 2 and product.nan_inputs
    trace.came_in(good)
    known = len(trace.events)
    trace.came_in(result)
    assert len(trace.events) == known
    trace.came_in(foreign := torch.tensor([nan, 2.0]))
    assert len(trace.events) == known + 1 and trace.events[-1] is trace.event_of(foreign)
    outside = trace.events[-1]
    assert outside.operation == outside.place.op == "a tensor made outside of torch's operations"
    assert outside.place.line.startswith("test_divergence.py:") and outside.phase == "given"


def test_a_tape_knows_in_which_region_or_under_which_autocast_of_torch_s_its_step_ran() -> None:
    model, x, tape = nn.Linear(2, 2), torch.ones(1, 2), Tape(Seam())
    tape.begin(model, (x,), {})
    assert tape.region is None and tape.autocast == []
    tape.forget()
    tape = Tape(Seam())
    with torch.autocast("cpu", dtype=torch.float16):
        tape.begin(model, (x,), {})
    assert tape.region is None and [(one[0], one[2]) for one in tape.autocast] == [("cpu", torch.float16)]
    tape = Tape(Seam())
    with lowp.autocast(lowp.Precision("bf16").policy):
        tape.begin(model, (x,), {})
    assert tape.region is not None and tape.autocast == []
    tape = Tape(Seam())
    with lowp.autocast("fp32"), torch.autocast("cpu", dtype=torch.float16):
        tape.begin(model, (x,), {})
    assert tape.region is None and len(tape.autocast) == 1, "a region without rules"


def test_the_random_state_is_that_of_every_generator_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["first", "second"])
    for used in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda used=used: used)
        states = random_state()
        first = torch.rand(1)
        assert len(states) == (3 if used else 1)
        set_random_state(states)
        assert torch.equal(torch.rand(1), first)
    assert given == [["first", "second"]]


def test_a_step_runs_again_on_what_it_was_given_without_gradients_for_others_than_its_models() -> None:
    got: list[tuple[Tensor, ...]] = []

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, places: Tensor, frozen: Tensor) -> Tensor:
            got.append((x, places, frozen))
            return x[places] + frozen

    def loss_of(output: Tensor, weight: Tensor, own: Tensor, target: Tensor) -> Tensor:
        got.append((weight, own, target))
        return (output * weight * own * target).sum()

    tape, model = Tape(Seam()), Taking()
    x, places, frozen, weight = torch.ones(2, requires_grad=True), torch.tensor([1]), torch.ones(1), torch.ones(1)
    target = torch.ones(1)
    weight.requires_grad_()
    tape.begin(model, (x, places), {"frozen": frozen})
    tape.open(model, output := model(x, places, frozen=frozen))
    tape._saw(loss_of, (output, weight, model.own, target), {}, loss := loss_of(output, weight, model.own, target))
    tape.end(loss)
    got.clear()
    again = calls_again(tape)
    assert again is not None and again.requires_grad and float(again.detach()) == 2.0
    (first, second, third), (end, own, read) = got
    assert first is not x and first.is_leaf and first.requires_grad and torch.equal(first, x)
    assert second is places and third is not frozen and not third.requires_grad
    assert end is not weight and end.is_leaf and end.requires_grad and end.data_ptr() == weight.data_ptr()
    assert own is model.own and read is target


@pytest.mark.parametrize(("training", "cleaned"), [(True, {"running_mean", "running_var"}), (False, set())])
def test_of_a_norm_in_training_alone_the_statistics_begin_finite(training: bool, cleaned: set[str]) -> None:
    model = nn.BatchNorm1d(2).train(training)
    model.register_buffer("mask", torch.ones(2))
    buffers = dict(model.named_buffers())
    for name in ("running_mean", "running_var", "mask"):
        buffers[name].fill_(math.nan)
    with beside(Tape(Seam()), Models(model)):
        inside = dict(model.named_buffers())
        assert all(inside[name] is not one for name, one in buffers.items())
        assert {name for name, one in inside.items() if not one.isnan().any()} == {*cleaned, "num_batches_tracked"}
    assert all(one is buffers[name] for name, one in model.named_buffers()) and buffers["running_mean"].isnan().all()


class Around(TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_seam_lies_below_the_modes_that_came_later_and_counts_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = [5.0], list[str]()
    monkeypatch.setattr("lowp.numerics.modes.time.perf_counter", lambda: clock[0])

    def observe(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        clock[0] += 1.0
        seen.append(func.__name__)

    def stack() -> list[str]:
        known = {id(one): name for name, one in (("seam", seam), ("below", below), ("above", above))}
        return [known[id(one)] for one in _get_current_function_mode_stack()]

    seam, below, above = Seam(), Around(), Around()
    with below:
        assert seam.let(observe, True) and not seam.let(observe, True) and stack() == ["seam", "below"]
        assert seam.let(observe, False) and not seam.let(observe, False) and stack() == ["below"]
        seam.begin()
        with above:
            seam.let(observe, True)
            assert stack() == ["below", "seam", "above"]
            torch.add(torch.ones(1), 1)
            with seam.resting():
                assert stack() == ["below", "above"]
                torch.sub(torch.ones(1), 1)
            assert stack() == ["below", "seam", "above"]
            seam.let(observe, False)
            assert stack() == ["below", "above"]
    assert seen == ["ones", "add"] and seam.take_seconds() == pytest.approx(2 + 2 * MODE, rel=1e-12)
    assert seam.take_seconds() == 0.0


def test_the_numbers_of_a_tensor_of_another_class_are_those_that_it_has_here() -> None:
    class Sharded(Tensor):
        def to_local(self) -> Tensor:
            return torch.ones(1)

    class Other(Tensor):
        pass

    x = torch.zeros(2)
    other, parameter = x.as_subclass(Other), nn.Parameter(x)
    assert numbers_of(x) is x and numbers_of(parameter) is parameter and numbers_of(other) is other
    assert numbers_of(x.as_subclass(Sharded)).tolist() == [1.0]
    if torch.backends.mkldnn.is_available():
        assert numbers_of(x.to_mkldnn()).shape == (0,), "torch shows none"


def test_a_line_is_the_nearest_of_the_user_s_own_files() -> None:
    here: dict[str, Any] = {"source_line": source_line}
    exec(compile("line = source_line()", "<string>", "exec"), here)
    file, _, number = here["line"].partition(":")
    assert file == "test_divergence.py" and "exec(compile(" in linecache.getline(__file__, int(number))
    file, _, number = source_line().partition(":")
    assert file == "test_divergence.py" and "= source_line().partition" in linecache.getline(__file__, int(number))
    assert [modes._is_library(str(one.__file__)) for one in (torch, lowp, modes, recipes)] == [True, True, True, False]
