"""The parts of a step at their bounds: guards, records, searches, arguments and flags, each by itself."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from typing import Any

import pytest
import torch
from step.cases import INF, NAN, make_model, one_parameter, started
from torch import nn

import lowp
from lowp.errors import InvalidInput
from lowp.kernels.choose import hardware
from lowp.kernels.steps import updates
from lowp.scaling import AdaptiveLossScale, DynamicLossScale, StaticLossScale
from lowp.step import GradScaler, NonFinite, StepGuard, Trained, as_flag, gradients, mistakes, searching, unscaled
from lowp.step.checking import _bounded_inverse
from lowp.step.provenance import Names, Provenance, all_finite
from lowp.step.state import Options

CPU = torch.device("cpu")


def flag(value: bool) -> torch.Tensor:
    return torch.tensor(value)


# -- the guard --------------------------------------------------------------------------------------------------------
def test_a_flag_is_made_of_what_is_known() -> None:
    known = flag(True)
    assert as_flag(known) is known
    for given, value in ((True, True), (False, False), (None, False)):
        made = as_flag(given)
        assert (made.item(), made.dtype, made.dim()) == (value, torch.bool, 0)


@pytest.mark.parametrize(
    ("patience", "counts", "answers"),
    [
        (3, (1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0), {6, 9}),  # read at each third step, of three steps before
        (3, (1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3), {9, 12}),
        (3, (3, 3, 0, 3, 3, 2, 3, 3, 0, 3, 3, 2), set[int]()),
        (2, (1, 2, 3, 1, 3, 0, 3, 0), {4}),
    ],
)
def test_a_count_of_a_device_is_read_each_few_steps(patience: int, counts: tuple[int, ...], answers: set[int]) -> None:
    guard = StepGuard(patience)
    assert {step for step, count in enumerate(counts, 1) if guard.too_many(torch.tensor(count))} == answers


@pytest.mark.usefixtures("as_on_a_device")
def test_steps_that_a_device_skips_are_told_of_once_when_that_has_arrived() -> None:
    guard = StepGuard(patience=3)
    told = []
    for stepped in (True, False, False, True, True, False, True, True):
        guard.settle(flag(stepped))
        told.append(guard.newly_skipped())
    assert told == [0, 0, 1, 1, 0, 0, 1, 0] and guard.skipped_steps == 3
    guard.skipped_steps = 7
    assert guard.skipped_steps == 7
    assert [guard.newly_skipped() for _ in range(3)] == [0, 0, 0]
    guard.settle(flag(False))
    assert [guard.newly_skipped() for _ in range(3)] == [0, 1, 0] and guard.skipped_steps == 8


def test_a_run_turns_bad_once(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = StepGuard(patience=3)
    assert [guard.turned_bad(bad) for bad in (False, flag(False), flag(True), True)] == [False, False, True, False]
    monkeypatch.setattr(hardware, "is_on_host", lambda x: False)
    guard = StepGuard(patience=3)
    answers = [guard.turned_bad(flag(bad)) for bad in (False, True, False, False, True)]
    assert answers == [False, False, True, False, False]


# -- records of what was not finite -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            NonFinite("a.b", "inf", 3, 1024.0, None),
            "inf first in the gradient of a.b, step 3, no gradient was finite, loss scale 1,024",
        ),
        (
            NonFinite("", "inf or nan", 4, 2.0, 1234.5, (), True),
            "inf or nan on another rank, step 4, largest finite gradient 1,234.5 (2,469 scaled), loss scale 2",
        ),
        (
            NonFinite("a", "nan", 0, 0.5, 4.0, ("b", "c"), False),
            "nan first in the gradient of a, and in 2 more (next: b), step 0, largest finite gradient 4 (2 scaled), "
            "loss scale 0.5; the loss itself was not finite",
        ),
    ],
)
def test_what_was_not_finite_is_told_in_a_line(found: NonFinite, words: str) -> None:
    assert str(found) == words


def sgd(*sizes: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(size)) for size in sizes], lr=1.0)


def test_the_latest_skipped_step_of_any_optimizer_is_read() -> None:
    records, one, other = Provenance(), sgd(1, 2, 3), sgd(1)

    def latch(sizes: list[float], step: float, loss: float = -1.0, found: float = 1.0, by: Any = one) -> None:
        records.latch(by, torch.tensor(sizes), torch.tensor(found), torch.tensor([step, 8.0, loss]))

    assert records.last() is None
    latch([0.5, INF, 0.25], 0.0, found=0.0)
    assert records.last() is None
    names = [f"param_groups[0]['params'][{place}], shape ({place + 1},)" for place in range(3)]
    latch([0.5, INF, NAN], 4.0)
    assert records.last() == NonFinite(names[2], "nan", 4, 8.0, 0.5, (names[1],), None)
    latch([0.5, 0.75, 0.0], 5.0, loss=1.0)
    assert records.last() == NonFinite("", "inf or nan", 5, 8.0, 0.75, (), True)
    latch([0.0, NAN, INF], 6.0, loss=0.0)
    assert records.last() == NonFinite(names[2], "inf", 6, 8.0, None, (names[1],), False)
    records.sharpen(one, 5, 2.5)
    records.sharpen(other, 6, 3.5)
    found = records.last()
    assert found is not None and found.maximum is None
    records.sharpen(one, 6, 2.5)
    latch([INF], 5.0, by=other)
    found = records.last()
    assert found is not None and (found.step, found.maximum, found.others) == (6, 2.5, (names[1],))
    one.add_param_group({"params": [nn.Parameter(torch.ones(1))]})  # of which this step knew nothing
    assert records.last() == found
    latch([INF], 7.0, by=other)
    found = records.last()
    assert found is not None and (found.step, found.maximum, found.others) == (7, None, ())
    del other
    latch([INF], 6.0, found=0.0)
    found = records.last()
    assert found is not None and found.step == 6


def test_names_are_those_of_the_model_and_the_order_is_that_of_its_modules() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    inner[2].weight = inner[0].weight
    inner[1].bias.requires_grad_(False)
    model = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": inner})})
    names, optimizer = Names(), torch.optim.SGD(inner.parameters(), lr=1.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    foreign = [f"param_groups[{group}]['params'][0], shape {shape}" for group, shape in ((0, (2, 2)), (1, (4,)))]
    assert names.of(optimizer)[0] == foreign[0] and names.backward_order(optimizer) == [5, 4, 3, 2, 1, 0]
    assert not names.has(inner[0].weight)
    names.watch(model)
    assert names.of(optimizer) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias", foreign[1]]
    assert names.backward_order(optimizer) == [5, 4, 2, 3, 0, 1]
    assert names.has(inner[0].weight) and names.has(inner[1].bias) and not names.has(nn.Parameter(torch.ones(1)))
    names.learned()  # no backward has run
    inner[1](torch.ones(1, 2)).sum().backward()
    names.learned()
    inner(torch.ones(1, 2)).sum().backward()  # of which nothing is learned any more
    assert names.backward_order(optimizer) == [2, 3, 5, 4, 0, 1]
    del model, inner
    names.watch(nn.Linear(1, 1))
    assert len(names._places) == 2


def test_losses_are_finite_if_all_are() -> None:
    like = torch.ones((), dtype=torch.float64)
    one, bad = torch.tensor(1.0), torch.tensor(-INF)
    cases: list[tuple[list[torch.Tensor], float]] = [([], -1.0), ([one], 1.0), ([bad], 0.0), ([one, bad, one], 0.0)]
    cases += [([one, torch.ones(1)], 1.0), ([torch.tensor([NAN])], 0.0), ([torch.tensor(complex(0, INF)), one], 0.0)]
    for losses, finite in cases:
        found = all_finite(losses, like)
        assert (found.item(), found.dtype, found.dim()) == (finite, torch.float64, 0)


# -- the first scale --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [0, 1, 4, 5, 21])
def test_the_smallest_power_that_fits_is_found_in_few_tries(most: int) -> None:
    for fits in range(most + 2):
        tried: list[int] = []

        def outcome(power: int, fits: int = fits, tried: list[int] = tried) -> int:
            tried.append(power)
            return searching._FITS if power >= fits else searching._OVERFLOWS

        assert searching._smallest(outcome, most) == (fits if fits <= most else None)
        assert len(tried) <= 8 and len(set(tried)) == len(tried) and max(tried) <= most
    for failing in (0, 4, 2):
        outcomes = {failing: searching._FAILS, 8: searching._FITS, 4: searching._FITS, **{failing: searching._FAILS}}
        assert searching._smallest(lambda power, of=outcomes: of.get(power, searching._OVERFLOWS), 8) is None


def test_the_worst_of_all_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, Any]] = []

    def agree(value: torch.Tensor, group: Any) -> None:
        asked.append((value.item(), group))
        value.clamp_(min=1.0)

    monkeypatch.setattr("lowp.distributed.agree_on_maximum_", agree)
    monkeypatch.setattr("lowp.distributed.world", lambda: "all")
    assert [searching._worst_of_ranks(one, CPU) for one in range(3)] == [0, 1, 2] and asked == []
    monkeypatch.setattr("lowp.distributed.has_other_ranks", lambda: True)
    assert [searching._worst_of_ranks(one, CPU) for one in range(3)] == [1, 1, 2]
    assert asked == [(float(one), "all") for one in range(3)]


def test_powers_reach_down_to_the_floor() -> None:
    found = [searching._powers_between(floor, 16.0) for floor in (16.0, 8.1, 8.0, 7.9, 1.0, 0.9, 20.0)]
    assert found == [0, 0, 1, 1, 4, 4, 0]


def test_gradients_of_any_layout_are_finite_or_not() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (2,), check_invariants=True)
    assert searching._all_finite([]) and searching._all_finite([None, torch.ones(2)])
    assert not searching._all_finite([None, torch.ones(2), torch.tensor(NAN)])
    assert not searching._all_finite([sparse]), "values of one place are added"
    assert not searching._all_finite([torch.tensor([INF, 1.0]), torch.ones(1)])


def test_each_node_of_a_graph_is_met_once() -> None:
    x = torch.ones((), requires_grad=True)
    y = x * x
    nodes = list(searching.nodes_of([y + y, torch.ones(())]))
    assert sorted(type(one).__name__ for one in nodes) == ["AccumulateGrad", "AddBackward0", "MulBackward0"]


# -- arguments of a scaler --------------------------------------------------------------------------------------------
def test_arguments_are_read_in_both_spellings_of_torch() -> None:
    five = {"init_scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "enabled": False}
    assert Options.read(("cpu", *five.values()), {}) == Options("cpu", **five)
    assert Options.read(tuple(five.values()), {"patience": 3}) == Options(**five, patience=3)
    assert Options.read((), {}) == Options(None, 65536.0, 2.0, 0.5, 2000, True, None, True)
    with pytest.raises(TypeError, match=r"at most 5 positional arguments here \(init_scale, .*, enabled\), not 6"):
        Options.read((*five.values(), 1), {})
    with pytest.raises(TypeError, match="at most 6 positional"):
        Options.read((True, *five.values(), 1), {})  # no number
    kinds = {one.name: one.kind.name for one in inspect.signature(GradScaler).parameters.values()}
    by_place = {"device", *five}
    assert {name for name, kind in kinds.items() if kind == "POSITIONAL_OR_KEYWORD"} == by_place
    assert {kind for name, kind in kinds.items() if name not in by_place} == {"KEYWORD_ONLY"}
    assert {"loss_scale", "patience", "process_group"} < kinds.keys()


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({"loss_scale": lowp.loss_scale.LossScale.parse("none")}, StaticLossScale(1.0)),
        ({"loss_scale": 2, "floor": 1.0, "ceiling": 4.0}, StaticLossScale(2.0, floor=1.0, ceiling=4.0)),
        ({"loss_scale": "static", "floor": 1.0}, StaticLossScale(65536.0, floor=1.0)),
        ({"dynamic": False, "ceiling": 2.0**20}, StaticLossScale(65536.0, ceiling=2.0**20)),
        (
            {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "hysteresis": 2, "floor": 1.0},
            DynamicLossScale(growth_factor=3.0, backoff_factor=0.25, growth_interval=7, hysteresis=2, floor=1.0),
        ),
        ({"target_underflow": 0.5, "ceiling": 2.0**20}, AdaptiveLossScale(target_underflow=0.5, ceiling=2.0**20)),
    ],
)
def test_bounds_and_moves_reach_the_scale(options: dict[str, Any], scaling: Any) -> None:
    assert Options(**options).scaling() == scaling


def test_steps_between_samples_are_numbers_of_steps() -> None:
    adaptive = AdaptiveLossScale()
    assert [Options().interval_of(one) for one in (DynamicLossScale(), adaptive)] == [100, 10]
    assert [Options(sample_interval=count).interval_of(adaptive) for count in (0, 1, 5)] == [0, 1, 5]
    assert Options(patience=1).interval_of(adaptive) == 10
    bad: tuple[dict[str, Any], ...] = (
        *({"sample_interval": -1}, {"sample_interval": True}, {"sample_interval": 1.5}),
        *({"patience": 0}, {"patience": True}, {"patience": 2.0}),
    )
    for options in bad:
        with pytest.raises(InvalidInput, match="are numbers of steps: allowed are 0"):
            Options(**options).interval_of(adaptive)
    with pytest.raises(InvalidInput, match="loss_scale cannot be True"):
        Options(loss_scale=True).scaling()


def test_states_at_the_bounds_are_loaded_and_others_are_not() -> None:
    state = started().state_dict()
    for change in (
        *({"growth_factor": 2.0**32}, {"backoff_factor": 2.0**-32}, {"_growth_tracker": 2**31 - 1}),
        *({"lowp": {"steps": 2**31 - 1}}, {"lowp": {"overflows": 0}}),
    ):
        scaler = started()
        scaler.load_state_dict({**state, **change})
        assert {**scaler.state_dict(), **scaler.state_dict()["lowp"]}.items() >= {
            **change.get("lowp", change)  # type: ignore[call-overload]
        }.items()
    for change in (
        *({"growth_factor": 2.0**32 * 1.01}, {"backoff_factor": 2.0**-32 * 0.99}, {"_growth_tracker": 2**31}),
        *({"lowp": {"steps": True}}, {"lowp": {"stuck": 2**31}}, {"lowp": {"stuck": 1.0}}),
    ):
        with pytest.raises(InvalidInput, match="the loaded state has "):
            started().load_state_dict({**state, **change})


@pytest.mark.parametrize(("given", "kept"), [("auto", "auto"), (None, None), (object(), "auto")])
def test_a_copy_of_a_scaler_agrees_with_those_that_can_be_named(given: Any, kept: Any) -> None:
    scaler = GradScaler("cpu", patience=3, init_scale=8.0)
    scaler._process_group = given
    state = scaler.__getstate__()
    assert state["_process_group"] is kept and state["_patience"] == 3 and state["_init_scale"] == 8.0
    other = GradScaler.__new__(GradScaler)
    other.__setstate__(state)
    assert other._guard.patience == 3 and other.get_scale() == 8.0


# -- gradients --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("scale", "inverse"), [(4.0, 0.25), (0.0, 2.0**126), (2.0**-126, 2.0**126)])
def test_the_inverse_of_a_scale_is_finite(shape: tuple[int, ...], scale: float, inverse: float) -> None:
    found = _bounded_inverse(torch.full(shape, scale))
    assert (found.shape, found.dtype) == (shape, torch.float32) and found.tolist() == torch.full(
        shape, inverse
    ).tolist()


@pytest.mark.parametrize(("place", "known"), [(63, False), (64, True)])
def test_the_first_64_losses_of_a_step_are_checked(place: int, known: bool) -> None:
    scaler = started()
    scaler.abandon()
    losses = [torch.tensor(NAN if at == place else 1.0) for at in range(70)]
    scaler.scale([losses[0], [torch.full((2,), NAN), *losses[1:]]])
    scaler.step(optimizer := one_parameter([INF]))
    assert not scaler.stepped_for(optimizer)
    assert scaler.nonfinite is not None and scaler.nonfinite.loss_finite is known


@pytest.mark.parametrize(("interval", "used"), [(1, True), (3, False)])
def test_counts_of_a_step_that_is_sampled_and_those_that_are_told_move_a_scale(interval: int, used: bool) -> None:
    scaler = started(target_underflow=0.1, sample_interval=interval)
    for step in range(2):
        counts = torch.zeros(256, dtype=torch.int64)
        counts[100 + step] = 5
        if step == 0:
            scaler.add_exponents(counts)
            scaler.add_exponents(counts)
        scaler.step(one_parameter([1.0, 2.0]))
        found = scaler._exponents_of_all(CPU)
        nonzero = {} if found is None else {at: int(count) for at, count in enumerate(found) if count}
        assert nonzero == ({100: 10, 127: 1, 128: 1} if step == 0 else {127: 1, 128: 1} if used else {})
        scaler.update()
    scaler.add_exponents(counts)  # also of a step that is not sampled
    found = scaler._exponents_of_all(CPU)
    assert found is not None and int(found[101]) == 5 and int(found.sum()) == 5
    scaler._agreed_with = (None,)  # type: ignore[assignment]
    assert used or scaler._exponents_of_all(CPU) is None  # ranks may count different steps
    other = started(sample_interval=1)
    other.step(one_parameter([1.0]))
    assert other._exponents_of_all(CPU) is None  # nothing moves by them


def test_gradients_that_are_checked_alone_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float16):
        scaler, optimizer = started(init_scale=4.0), one_parameter([8.0, INF], dtype=dtype)
        (gradient,) = (one.grad for one in optimizer.param_groups[0]["params"])
        for check in (scaler._check_inf_per_device, scaler.check_):
            check(optimizer)
            (found,) = scaler._found_inf_per_device(optimizer).values()
            assert found.item() == 1.0 and gradient.tolist() == [8.0, INF]
        gradient[1] = 1.0
        for flag_before in (1.0, 0.0):
            scaler.check_(optimizer, torch.tensor(flag_before))
            (found,) = scaler._found_inf_per_device(optimizer).values()
            assert found.item() == flag_before


def test_gradients_of_a_device_are_measured_by_its_kernel_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values, sizes = [torch.ones(2, 3, device="meta"), torch.ones(4, device="meta")], torch.tensor([7.0, 8.0])
    for can_check in (True, False):
        monkeypatch.setattr(updates, "can_check", lambda found, can=can_check: found is values and can)
        monkeypatch.setattr(updates, "check", lambda found, flag: updates.CheckedGradients(sizes, None))
        found = gradients._magnitudes(values)
        assert found is sizes if can_check else (found.device.type, found.shape) == ("meta", (2,))


# -- steps without a scale --------------------------------------------------------------------------------------------
def test_numbers_whose_sum_overflows_are_finite() -> None:
    values = [torch.full((4,), 3e38), torch.tensor([1.0, NAN]), torch.zeros(0), torch.tensor([INF, -INF])]
    assert unscaled._nonfinite(values) == [False, True, False, True]


@pytest.mark.usefixtures("as_on_a_device")
def test_a_device_says_of_each_tensor_whether_it_is_finite() -> None:
    values = [torch.full((4,), 3e38), torch.tensor([1.0, NAN]), torch.zeros(0), torch.tensor([INF, -INF]).double()]
    found = unscaled._nonfinite(values)
    assert isinstance(found, torch.Tensor) and found.tolist() == [False, True, False, True]


def test_the_smallest_gradient_tells_of_the_others() -> None:
    optimizer = sgd(3, 2, 4)
    assert unscaled._smallest_gradient_is_bad([optimizer]) is None
    first, second, third = optimizer.param_groups[0]["params"]
    third.grad = torch.tensor([NAN] * 4).to_sparse()
    assert unscaled._smallest_gradient_is_bad([optimizer]) is None
    first.grad, second.grad = torch.full((3,), NAN), torch.ones(2)
    found = [unscaled._smallest_gradient_is_bad([optimizer])]
    second.grad = torch.tensor([1.0, INF])
    found.append(unscaled._smallest_gradient_is_bad([optimizer]))
    assert [bool(one) for one in found if one is not None] == [False, True]


def test_faults_are_those_of_gradients_and_weights_and_not_of_results_alone() -> None:
    yes, no = flag(True), flag(False)
    assert unscaled._faulty(
        {"gradient of a": True, "gradient of b": no, "gradient of c": yes, "weight of d": False}
    ) == [*("gradient of a", "gradient of c")]
    result = next(one for one in ("output of a", "result of a", "input of a") if unscaled.is_result(one))
    assert unscaled._faulty({result: True}) == unscaled._faulty({result: yes}) == unscaled._faulty({}) == []
    assert unscaled._faulty({result: yes, "gradient of a": yes}) == [result, "gradient of a"]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    ("losses", "bad"),
    [
        ([torch.tensor(1.0)], False),
        ([torch.tensor(-INF)], True),
        ([torch.tensor([1.0, NAN])], True),
        ([torch.tensor([[1.0]]), torch.tensor([2.0, 3.0])], False),
        ([torch.tensor(complex(0, INF))], True),
        ([torch.tensor(NAN), torch.tensor(1.0)], True),
        ([torch.tensor(1.0), torch.tensor(NAN)], True),
    ],
)
def test_a_loss_that_is_not_finite_is_seen(
    losses: list[torch.Tensor], bad: bool, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "is_on_host", lambda x: on_host)
    steps = unscaled.UnscaledSteps("bf16", None, False)
    for loss in losses:
        steps.saw(loss)
    assert steps._bad_loss is not None and bool(steps._bad_loss) is bad


def test_a_step_is_skipped_where_another_rank_has_met_an_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, steps = one_parameter([1.0]), unscaled.UnscaledSteps("bf16", None, False)
    agreed: list[Any] = []

    def agree(value: torch.Tensor, group: Any) -> None:
        agreed.append((value.item(), group))
        value.fill_(1.0 if group == "second" else value.item())

    assert steps.skips([optimizer], 1) is False
    monkeypatch.setattr("lowp.distributed.has_other_ranks", lambda: True)
    monkeypatch.setattr("lowp.distributed.agree_on_maximum_", agree)
    for groups, skips in (([], False), (["first"], False), (["first", "second"], True)):
        monkeypatch.setattr("lowp.distributed.mesh_groups", lambda found, groups=groups: list(found) and groups)
        agreed.clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert steps.skips([optimizer], 7) is skips
        assert agreed == [(0.0, group) for group in groups]
        words = "an infinity or a NaN, on another rank: bf16 has no loss scale, and step 7 was skipped"
        assert [str(one.message) for one in told] == [words] * skips
    assert steps.faults == [] and steps.guard.skipped_steps == 1


def test_a_device_decides_by_its_own_flags_where_each_optimizer_can_undo() -> None:
    steps, plain = unscaled.UnscaledSteps("flex16+5", None, False), one_parameter([1.0])
    assert steps._flags_there([plain], {}) == {}
    steps.exponents = object()  # type: ignore[assignment]
    yes = flag(True)
    assert steps._flags_there([], {}) is None and steps._flags_there([plain], {"gradient of a": yes}) is None
    assert steps._flags_there([plain], {"gradient of a": True}) is None
    assert steps._flags_there([], {"gradient of a": True, "weight of b": yes}) == {"weight of b": yes}


def test_a_copy_of_what_is_trained_knows_the_models_and_no_optimizer() -> None:
    model = make_model()
    trained = Trained(lowp.presets.PRESETS["bf16"], None)
    assert trained.add(model) is True and trained.add(model) is False
    trained.check([torch.optim.SGD(model.parameters(), lr=1.0)], True)
    assert len(trained._known) == 1
    other = copy.copy(trained)
    assert other.models() == [model] and other._known == {} and len(trained._known) == 1


def test_optimizers_wait_for_scalers_that_have_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "_waiting", {})
    enabled, disabled = GradScaler("cpu"), GradScaler("cpu", enabled=False)
    for scaler in (enabled, disabled):
        mistakes.expect_step(scaler)
    assert [reference() for reference in mistakes._waiting.values()] == [enabled]
    mistakes.step_comes(disabled)
    assert list(mistakes._waiting) == [id(enabled)]
    mistakes.step_comes(enabled)
    assert not mistakes._waiting
    mistakes.expect_step(gone := GradScaler("cpu"))
    del gone
    gc.collect()
    mistakes._refuse_scaled(one_parameter([1.0]), (), {})  # forgets what is gone
    assert not mistakes._waiting
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    mistakes.expect_step(enabled)
    assert not mistakes._waiting


def test_what_a_step_reads_is_named() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    names = Names()
    names.watch(model)

    def name(key: str, place: int) -> str:
        return unscaled._name(unscaled._Read(weakref.ref(optimizer), key, place), names)

    assert unscaled._name("gradient of x", names) == "gradient of x"
    assert [name("gradient", place) for place in (0, 3, 4)] == [
        *("gradient of 0.weight", "gradient of 1.bias", "gradient of a parameter")
    ]
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first] = optimizer.state.pop(first)  # the entries are in another order than the parameters
    assert [name("exp_avg", place) for place in (0, 3, 4)] == [
        *("exp_avg of 0.bias", "exp_avg of 0.weight", "exp_avg of a parameter")
    ]
    read = unscaled._Read(weakref.ref(optimizer), "gradient", 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)  # in the place of what is gone now
    assert unscaled._name(read, names) == "gradient of a parameter"


def test_state_that_was_written_is_told_by_its_versions() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    assert unscaled._versions([optimizer]) == ([], [])
    optimizer.step()
    (entry,) = optimizer.state.values()
    kept = [entry["exp_avg"], entry["exp_avg_sq"]]  # the step, a single number, is none
    known = unscaled._versions([optimizer])
    assert known == ([id(one) for one in kept], [one._version for one in kept])
    entry["exp_avg"].add_(1)
    assert unscaled._versions([optimizer]) == (known[0], [known[1][0] + 1, known[1][1]])
    with torch.inference_mode():
        entry["exp_avg_sq"] = torch.ones(2)
    identities, versions = unscaled._versions([optimizer])
    assert identities == [id(entry["exp_avg"]), id(entry["exp_avg_sq"])] and versions == [known[1][0] + 1, -1]


def test_warnings_point_at_the_line_that_steps() -> None:
    def told(name: str, gradient: float, **options: Any) -> list[warnings.WarningMessage]:
        precision, model = lowp.Precision(name, **options), make_model()
        optimizer: Any = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
        with precision.autocast():
            loss = model(torch.ones(2, 8)).float().square().mean()
        precision.backward(loss)
        for one in model.parameters():
            assert one.grad is not None
            one.grad.fill_(gradient)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            precision.step(optimizer)
        return caught

    lines, begin = inspect.getsourcelines(test_warnings_point_at_the_line_that_steps)
    (line,) = (at for at, text in enumerate(lines, begin) if text.strip() == "precision.step(optimizer)")
    for name, gradient, words in (
        (
            "bf16",
            NAN,
            "an infinity or a NaN, first in the gradient of 1.weight: bf16 has no loss scale, and step 1 was",
        ),
        ("flex16+5", NAN, "an infinity or a NaN, first in the"),
        ("flex16+5", 1e30, "step 1: numbers beyond the largest of flex16+5 are cut off, first in the"),
        ("fp16", 1e-30, "between precision.backward and precision.step gradients were reduced from a norm of "),
    ):
        (one,) = told(name, gradient)
        assert str(one.message).startswith(words)
        assert (one.filename, one.lineno) == (__file__, line), name
