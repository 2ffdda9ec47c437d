"""Master weights around torch's optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput
from lowp.kernels.steps.updates import signed
from lowp.optim import SGD, MasterWeights
from lowp.optim.preparing import _checksum
from lowp.optim.shards import sharing
from lowp.optim.skipping import begin_momentum, skips_on_device, starts_momentum, steps_by_itself
from lowp.optim.state_dicts import check_saved
from lowp.optim.storage import seed_of

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adam_fused": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3))


def _gradients(model: nn.Module, step: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(dtype)
        parameter.grad = gradient.to(parameter.dtype)


COMPILED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    kind: lambda params, kind=kind: MasterWeights(OPTIMIZERS["adamw"](params), kind=kind, seed=1)
    for kind in ("fp32", "split", "stochastic", "none")
} | {"lowp's own": lambda params: SGD(params, lr=0.1, momentum=0.9, storage="bf16", split=True)}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in ("split", "none"))) for k in COMPILED]
)
def test_a_step_that_is_compiled_is_the_step(kind: str) -> None:
    plain, compiled = _model(), _model()
    optimizers = COMPILED[kind](plain.parameters()), COMPILED[kind](compiled.parameters())
    step = torch.compile(optimizers[1].step, backend="eager")
    for number in range(3):
        for model in (plain, compiled):
            _gradients(model, number, torch.float32)
        optimizers[0].step()
        step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), compiled.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["fp32", "split"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_follow_the_optimizer_on_fp32_parameters_bit_for_bit(name: str, kind: str) -> None:
    plain, stored = _model(), _model()
    reference = OPTIMIZERS[name](plain.parameters())
    optimizer = MasterWeights(OPTIMIZERS[name](stored.parameters()), "bf16", kind=kind)
    for step in range(5):
        _gradients(plain, step, torch.bfloat16)
        _gradients(stored, step, torch.bfloat16)
        reference.step()
        optimizer.step()
    for expected, parameter in zip(plain.parameters(), stored.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(optimizer.master(parameter), expected)
        assert torch.allclose(parameter.float(), expected, rtol=2**-8, atol=0)


def test_the_stall_of_pure_bf16_at_a_small_learning_rate_is_cured() -> None:
    moved = {}
    for kind in ("none", "fp32", "split", "stochastic"):
        weight = nn.Parameter(torch.ones(4096))
        optimizer = MasterWeights(torch.optim.SGD([weight], lr=1e-5), "bf16", kind=kind)
        for _ in range(400):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[kind] = 1.0 - float(optimizer.master(weight).mean())
    assert moved["none"] == 0.0
    # fp32 itself rounds each step of 1e-5 to 168 of its ulps, which is 1.0014e-5
    assert moved["fp32"] == moved["split"] == pytest.approx(4e-3, rel=2e-3)
    # a stochastic step moves by 2**-8 (the ulp below 1) with probability p = 1e-5 * 2**8; the mean of 4096 weights
    # after 400 steps then deviates by sqrt(400 * p / 4096) * 2**-8 = 6.2e-5
    assert moved["stochastic"] == pytest.approx(4e-3, abs=5 * 6.2e-5)


def test_a_storage_that_is_stochastic_by_itself_draws_anew_each_step() -> None:
    weight = nn.Parameter(torch.ones(4096))
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1e-3), "e5m2:stochastic", kind="none")
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert abs(weight.mean().item() - 0.8) < 0.01


def test_stochastic_rounding_depends_on_seed_and_step_alone() -> None:
    def run(seed: int) -> torch.Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 999))
        optimizer = MasterWeights(torch.optim.SGD([weight], lr=1e-3), "bf16", kind="stochastic", seed=seed)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().clone()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_the_models_state_dict_is_fp32_in_and_out(kind: str) -> None:
    source = _model(3)
    expected = copy.deepcopy(source.state_dict())
    model = _model(4)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), "bf16", kind=kind)
    optimizer.attach(model)
    model.load_state_dict(expected)
    state = model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert next(model.parameters()).dtype == torch.bfloat16
    _model(5).load_state_dict(state)  # opens in a plain model


@pytest.mark.parametrize("into", ["fp32", "split"])
@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_a_checkpoint_of_one_kind_continues_in_the_other_bit_for_bit(kind: str, into: str) -> None:
    def build(which: str) -> tuple[nn.Module, MasterWeights]:
        model = _model()
        return model, MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-2), "bf16", kind=which)

    first, optimizer = build(kind)
    for step in range(3):
        _gradients(first, step, torch.bfloat16)
        optimizer.step()
    second, resumed = build(into)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, one in ((first, optimizer), (second, resumed)):
        _gradients(model, 7, torch.bfloat16)
        one.step()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(optimizer.master(a), resumed.master(b))


def test_another_models_checkpoint_is_refused_and_changes_nothing() -> None:
    model = _model()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    other = MasterWeights(torch.optim.SGD([nn.Parameter(torch.ones(3))] * 1 + list(_model().parameters())[1:], lr=0.1))
    before = [optimizer.master(parameter).clone() for parameter in model.parameters()]
    with pytest.raises(InvalidInput, match="belongs to another model"):
        optimizer.load_state_dict(other.state_dict())
    assert all(
        torch.equal(optimizer.master(parameter), value)
        for parameter, value in zip(model.parameters(), before, strict=True)
    )


def test_fp16_gradients_are_unscaled_without_flushing() -> None:
    import lowp

    weight = nn.Parameter(torch.ones(8))
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0), "fp16")
    scaler = lowp.GradScaler("cpu", init_scale=2.0**14)
    scaler.scale((weight.float() * 2.0**-26).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.float().tolist() == [2.0**-26] * 8  # below fp16's smallest number
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.master(weight).tolist() == [torch.tensor(1.0).sub(2.0**-26).item()] * 8


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_skip_a_step_by_themselves_where_their_optimizer_does(name: str) -> None:
    inner = OPTIMIZERS[name]([nn.Parameter(torch.ones(2))])
    found = [steps_by_itself(one) for one in (inner, MasterWeights(inner))]
    assert found == [name == "adam_fused"] * 2


class Foreign(torch.optim.Adagrad):
    """An optimizer of a user."""


@pytest.mark.parametrize(
    ("make", "at_first", "then"),
    [
        (lambda params: torch.optim.SGD(params, momentum=0.9), True, True),
        (lambda params: torch.optim.SGD(params, momentum=0.9, dampening=0.1), False, True),
        (OPTIMIZERS["adam_fused"], True, True),
        (OPTIMIZERS["adamw"], False, True),
        (OPTIMIZERS["adagrad"], True, True),  # which has its state from the beginning
        (Foreign, False, False),
    ],
    ids=["sgd", "dampened sgd", "fused", "adamw", "adagrad", "foreign"],
)
def test_a_device_can_skip_a_step_of_torchs_optimizers_that_begins_nothing(
    make: Callable[..., torch.optim.Optimizer], at_first: bool, then: bool
) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = make([weight])
    assert skips_on_device(optimizer, [weight]) is at_first
    optimizer.step()
    assert skips_on_device(optimizer, [weight]) is then


def test_schedulers_closures_and_clipping_work() -> None:
    weight = nn.Parameter(torch.full((4,), 3.0))
    optimizer = MasterWeights(torch.optim.LBFGS([weight], lr=0.5, max_iter=5), "bf16")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight.float() ** 2).sum()
        loss.backward()
        return loss

    first = float(optimizer.step(closure).detach())
    scheduler.step()
    assert first == 36.0
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert float(closure().detach()) < 1.0
    torch.nn.utils.clip_grad_norm_([weight], 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_checksum_by_which_ranks_compare_weights_tells_every_bit_and_its_place(dtype: torch.dtype) -> None:
    x = torch.ones(10_000, dtype=dtype)
    changed, moved = x.clone(), x.clone()
    changed.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])[-1] ^= 1
    moved[:-1], moved[-1] = changed[1:], x[0]
    sums = {_checksum([one]) for one in (x, changed, moved)} | {_checksum([x, changed]), _checksum([changed, x])}
    assert len(sums) == 5


def test_the_seed_of_a_step_on_a_device_stays_there_and_is_that_of_the_host() -> None:
    on_host = seed_of(7, torch.tensor(3.0), 2, 1)
    assert type(on_host) is int and on_host == seed_of(7, 3, 2, 1)
    on_device = seed_of(7, torch.empty((), device="meta"), 2, 1)
    assert isinstance(on_device, torch.Tensor) and on_device.is_meta and on_device.dtype is torch.int64


def test_a_seed_of_one_tensor_alone_is_that_of_its_first_number() -> None:
    assert seed_of(7, 3, 2) == seed_of(7, 3, 2, 0) != seed_of(7, 3, 2, 1)


@pytest.mark.parametrize("seed", [True, 1.0, "1", None, -1, 2**64])
def test_a_seed_that_is_no_whole_number_of_64_bits_is_refused(seed: Any) -> None:
    with pytest.raises(InvalidInput, match=r"seed=.*: give a whole number from 0 to 2\*\*64 - 1, such as 0"):
        MasterWeights(torch.optim.SGD([nn.Parameter(torch.ones(2))]), seed=seed)
    for fit in (0, 2**64 - 1):
        MasterWeights(torch.optim.SGD([nn.Parameter(torch.ones(2))]), seed=fit)


@pytest.mark.parametrize("kind", ["fp32", "stochastic"])
def test_parameters_in_one_memory_are_refused_only_where_storing_them_would_separate_them(kind: str) -> None:
    flat = torch.ones(6)
    for dtype, is_apart in ((torch.float32, True), (torch.bfloat16, False)):
        memory = flat.to(dtype)
        parameters = [nn.Parameter(memory), nn.Parameter(memory[2:4])]
        told = pytest.raises(
            InvalidInput, match=r"of shape \(2,\) shares memory with another one, which storing them in"
        )
        with told if is_apart else nullcontext():
            MasterWeights(torch.optim.SGD(parameters), "bf16", kind=kind)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.999), 0.9, "xy", (0.9, "x"), (0.9, float("nan")), None])
def test_a_state_of_an_optimizer_has_two_finite_betas(betas: object) -> None:
    optimizer = torch.optim.AdamW(_model().parameters())
    state, present = optimizer.state_dict(), optimizer.state_dict()
    state["param_groups"][0]["betas"] = betas
    with pytest.raises(InvalidInput, match=r"has betas=.*: 2 finite numbers must be given"):
        check_saved(optimizer, state, "AdamW", present)


@pytest.mark.parametrize(("beta", "is_fit"), [(0.0, True), (0.999, True), (1.0, False), (-0.1, False)])
def test_a_state_of_an_optimizer_has_betas_from_0_to_below_1(beta: float, is_fit: bool) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["betas"] = (beta, 0.5)
    state = optimizer.state_dict()
    with nullcontext() if is_fit else pytest.raises(InvalidInput, match="each must be at least 0 and below 1"):
        check_saved(optimizer, state, "AdamW", state)


def test_tensors_share_memory_where_elements_of_theirs_are_the_same() -> None:
    whole = torch.arange(6.0)
    first, other, last = whole[:3], whole[3:], whole[2:4]
    assert sharing([first, other, first, torch.arange(6.0)]) is None
    assert sharing([first, last]) is sharing([other, first, last]) is last
    assert sharing([whole[::2], whole[1::2]]) is None


def test_what_cannot_have_masters_is_named() -> None:
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with pytest.raises(InvalidInput, match="split masters consist of bf16"):
        MasterWeights(inner, "fp16", kind="split")
    with pytest.raises(InvalidInput, match="unknown kind of master weights 'spilt'; did you mean split"):
        MasterWeights(inner, "bf16", kind="spilt")
    with pytest.raises(InvalidInput, match="give a float format"):
        MasterWeights(inner, "int8")
    with pytest.raises(TypeError, match="wraps a torch optimizer"):
        MasterWeights([weight])  # type: ignore[arg-type]
    wrapped = MasterWeights(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(InvalidInput, match="already has master weights"):
        MasterWeights(wrapped)


def test_a_format_that_torch_does_not_have_is_stored_by_value() -> None:
    weight = nn.Parameter(torch.linspace(-2, 2, 101))
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1e-3), "e4m3fn")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight.detach(), weight.detach().to(torch.float8_e4m3fn).float())
    assert torch.equal(optimizer.master(weight), torch.linspace(-2, 2, 101) - 1e-3)


@pytest.mark.parametrize(
    "change, text",
    [
        (
            {"master_weight": torch.ones(2)},
            "master_weight of parameter 1 must be a .* tensor .* belongs to another model",
        ),
        ({"master_weight": "x"}, "master_weight of parameter 1 must be a floating-point tensor .* not str"),
        ({"master_steps": 1.5}, "master_steps of parameter 1 must be a whole number .* not 1.5"),
        ({"master_seed": "x"}, "master_seed of parameter 1 must be a whole number .* not 'x'"),
    ],
)
def test_damaged_masters_are_refused_and_change_nothing(change: dict[str, object], text: str) -> None:
    model = _model()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = copy.deepcopy(model.state_dict())
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    state["state"][0]["master_weight"] += 1
    state["state"][1] |= change
    with pytest.raises(InvalidInput, match=text):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_models_state_with_a_nan_under_either_name_of_a_tied_weight_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    present = model.state_dict()
    for name in ("0.weight", "1.weight"):
        with pytest.raises(InvalidInput, match=f"^{name} has infinities or NaN, from which no run can go on"):
            check_saved(model, present | {name: torch.full((3, 3), torch.nan)}, None, present)


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_both_names_of_a_tied_weight_give_its_master_and_take_it(has_optimizer: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    before, optimizer = model[0].weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=0.1)
    precision = lowp.Precision("bf16-storage")
    precision.prepare(model, optimizer) if has_optimizer else precision.prepare_model(model)
    state = model.state_dict()
    assert torch.equal(state["0.weight"], before) and torch.equal(state["1.weight"], before)
    assert {one.dtype for one in state.values()} == {torch.float32} and model[1].weight is model[0].weight
    between = torch.full((3, 3), 1 + 2.0**-12)  # which bf16 does not hold
    model.load_state_dict({**state, "0.weight": between, "1.weight": between})
    state = model.state_dict()
    assert torch.equal(state["0.weight"], between) and torch.equal(state["1.weight"], between)
    assert torch.equal(model[0].weight.float(), torch.ones(3, 3))


@pytest.mark.parametrize("make", [lambda p: MasterWeights(torch.optim.SGD(p, lr=0.1)), lambda p: SGD(p, lr=0.1)])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_master_is_that_of_a_parameter_of_the_optimizer(
    make: Callable[..., torch.optim.Optimizer], stepped: bool
) -> None:
    mine, other = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    optimizer = make([mine])
    if stepped:
        mine.grad = torch.zeros_like(mine)
        optimizer.step()
    assert optimizer.master(mine).dtype == torch.float32  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"a tensor of shape \(3, 4\) is not a parameter of this optimizer"):
        optimizer.master(other)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [lambda p: MasterWeights(torch.optim.SGD(p, lr=0.1)), lambda p: SGD(p, lr=0.1)])
def test_hooks_of_state_dicts_fire(make: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer, seen = make(list(_model().parameters())), list[object]()
    optimizer.register_state_dict_pre_hook(lambda one: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda one, state: {**state, "note": 7})
    optimizer.register_load_state_dict_pre_hook(lambda one, state: seen.append(state["note"]))
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append("after loading"))
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    assert seen == ["before saving", 7, "after loading"]


def test_equal_tensors_are_rounded_independently() -> None:
    twins = [nn.Parameter(torch.ones(1000)) for _ in range(2)]
    optimizer = MasterWeights(torch.optim.SGD(twins, lr=1e-3), kind="stochastic")
    for twin in twins:
        twin.grad = torch.ones_like(twin)
    optimizer.step()
    assert not torch.equal(twins[0], twins[1])


@pytest.mark.parametrize("word", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (3 << 64) + (1 << 63)])
def test_the_words_of_a_seed_are_taken_modulo_the_int64_of_a_device(word: int) -> None:
    found = signed(word)
    assert -(1 << 63) <= found < 1 << 63 and (found - word) % (1 << 64) == 0


def test_momentum_begins_at_minus_zero_where_there_is_a_gradient() -> None:
    with_one, without = weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    with_one.grad = torch.ones(3)
    assert not begin_momentum(optimizer)
    begun = optimizer.state[with_one]["momentum_buffer"]
    assert not begun.any() and bool(begun.signbit().all()) and without not in optimizer.state


@pytest.mark.parametrize(
    ("x", "begins"), [(torch.ones(2), True), (torch.eye(2).to_sparse(), False), (torch.ones(2) * 1j, False)]
)
def test_momentum_begins_for_dense_real_gradients_alone(x: torch.Tensor, begins: bool) -> None:
    weight = nn.Parameter(torch.ones(x.shape, dtype=x.dtype))
    weight.grad = x
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    assert starts_momentum(optimizer) is begin_momentum(optimizer) is not begins
    assert (weight in optimizer.state) is begins


@pytest.mark.parametrize(("x", "kind"), [(torch.eye(2).to_sparse(), "sparse"), (torch.ones(2).long(), "torch.int64")])
def test_parameters_that_have_no_masters_are_refused(x: torch.Tensor, kind: str) -> None:
    weight = nn.Parameter(x, requires_grad=x.is_floating_point())
    with pytest.raises(InvalidInput, match=f"a {kind} parameter cannot have fp32 masters: omit it"):
        MasterWeights(torch.optim.SGD([weight], lr=0.1))


class Filtered(nn.Module):
    """A linear layer whose results are filtered by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.filter = nn.Linear(8, 8), nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.fft.irfft(torch.fft.rfft(self.layer(x).float()) * self.filter, n=8)
        return result


@pytest.mark.parametrize("name", ["bf16-storage", "fp16-storage"])
def test_complex_parameters_are_stepped_as_they_are_and_resume_and_are_skipped_with_the_others(name: str) -> None:
    def step(precision: lowp.Precision, model: nn.Module, optimizer: Any, factor: float = 1.0) -> Tensor:
        optimizer.zero_grad()
        with precision.autocast():
            loss = model(torch.ones(2, 8)).square().mean() * factor
        precision.backward(loss)
        precision.step(optimizer)
        return model.get_parameter("filter").detach().clone()

    def made() -> tuple[lowp.Precision, nn.Module, Any]:
        precision, model = lowp.Precision(name), Filtered()
        return precision, *precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    run, again = made(), made()
    seen = [step(*run) for _ in range(3)]
    assert seen[0].dtype is torch.complex64 and len({str(one) for one in seen}) == 3
    for one, other in zip(again[1:], run[1:], strict=True):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    again[0].load_state_dict(run[0].state_dict())
    assert torch.equal(step(*run), step(*again))
    if name == "fp16-storage":
        assert torch.equal(step(*run, math.inf), step(*again, math.nan)) and run[0].skipped_steps == 1
        assert torch.equal(run[1].get_parameter("filter"), again[1].get_parameter("filter"))
