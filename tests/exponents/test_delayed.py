"""Scales from earlier steps in a training: what they are, when they move, and what they survive."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.exponents import DelayedScales
from lowp.exponents.delayed import DelayedTable
from lowp.kernels import cpu
from lowp.kernels.casts.functions import quantize_measured
from lowp.kernels.choose import hardware
from lowp.ops.direct import Direct
from lowp.policy import Operands, Policy, Rule

CAST = parse("e4m3fn@fp32/tensor:delayed(window=4)")
DELAYED = "e4m3fn@fp32/tensor:delayed(window=2)"


def policy(**more: Any) -> Policy:
    return Policy((Rule.of("contraction", input=DELAYED, weight=DELAYED, grad="e5m2@fp32/tensor:delayed", **more),))


class Net(nn.Module):
    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.checkpointed = nn.Linear(6, 16), nn.Linear(16, 3), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            return self._whole(x)
        found: Tensor = checkpoint(self._whole, x, use_reentrant=self.checkpointed)
        return found

    def _whole(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Run:
    """A training whose data follow from the number of the step."""

    def __init__(self, precision: Any = "fp8-delayed", model: nn.Module | None = None) -> None:
        self.precision = lowp.Precision(precision)
        model = Net() if model is None else model
        self.model, self.optimizer = self.precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.losses: list[float] = []
        self.has_checkpoints = False

    @property
    def scales(self) -> DelayedScales:
        assert self.precision.scales is not None
        return self.precision.scales

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.precision.steps))
        x.requires_grad_(self.has_checkpoints)
        return x * (1 + self.precision.steps % 3), x[:, :3].argmax(1)

    def step(self, by: float = 1.0) -> None:
        x, labels = self.batch()
        self.optimizer.zero_grad()
        with self.precision.autocast():
            loss = F.cross_entropy(self.model(x * by), labels)
        self.precision.backward(loss)
        self.precision.step(self.optimizer)
        self.losses.append(loss.item())

    def state(self) -> dict[str, Tensor]:
        return {**self.model.state_dict(), **{site: self.scales.scale(site) for site in self.scales.sites()}}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("implementation", sorted({"cpu", "bitwise"} & set(kernels.available())))
@pytest.mark.parametrize("cast", ["e4m3fn@fp32/tensor:delayed", "dfp16:delayed", "e5m2@e8m0/tensor:delayed:stochastic"])
def test_a_measured_cast_has_the_bits_of_the_definition_and_tells_the_maximum(cast: str, implementation: str) -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).reshape(100, 500)
    x[3, 4] = -7.5
    with kernels.use(implementation):
        found, largest = quantize_measured(x, parse(cast), torch.tensor(2.0**-7), 5)
        assert torch.equal(found, kernels.quantize(x, cast, scale=2.0**-7, seed=5)) and float(largest) == 7.5
        x[1, 2], x[5, 6] = torch.inf, torch.nan
        spoiled, largest = quantize_measured(x, parse(cast), torch.tensor(2.0**-7), 5)
    assert spoiled[1, 2] == torch.inf and spoiled[5, 6].isnan() and not largest.isfinite()
    finite = x.isfinite()
    assert torch.equal(spoiled[finite], found[finite])


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("unit", [1.0, 2.0**-10])
def test_a_site_takes_its_own_maximum_first_and_then_that_of_earlier_steps(
    unit: float, is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "is_on_host", lambda device: is_host)
    scales, x = DelayedScales(), unit * torch.tensor([1.0, -3.0, 0.3])
    current = lowp.quantize(x, CAST.current)
    assert torch.equal(scales.rounded(x, CAST, "input of a"), current)
    assert torch.equal(scales.rounded(2 * x, CAST, "input of a"), 2 * current)  # of the same step: nothing is known
    scales.flush()
    scale = scales.scale("input of a")
    assert scale == unit * torch.tensor(6.0 / 448)
    assert torch.equal(scales.rounded(x, CAST, "input of a"), lowp.quantize(x, CAST, scale=float(scale)))
    assert scales.rounded(10 * x, CAST, "input of a")[1] == -448 * scale.float()  # saturated, until the next step
    scales.flush()
    assert scales.scale("input of a") == unit * torch.tensor(30.0 / 448)
    counted = scales.state_dict()["groups"][0]["state"]
    steps, beyond = counted["writes"], counted["saturated"]
    assert (steps.tolist(), beyond.tolist()) == ([2], [1])


def test_outside_of_training_a_site_keeps_its_scale_and_a_new_one_takes_the_tensors_own() -> None:
    scales, x = DelayedScales(), torch.tensor([1.0, -3.0, 0.3])
    scales.rounded(x, CAST, "input of a")
    scales.flush()
    known = scales.rounded(10 * x, CAST, "input of a", training=False)
    assert torch.equal(known, lowp.quantize(10 * x, CAST, scale=float(scales.scale("input of a"))))
    assert torch.equal(scales.rounded(10 * x, CAST, "input of b", training=False), lowp.quantize(10 * x, CAST.current))
    scales.flush()
    assert scales.sites() == ["input of a"] and scales.scale("input of a") == torch.tensor(3.0 / 448)


@pytest.mark.parametrize("seed", [{}, {"seed": 5}], ids=str)
def test_a_stochastic_cast_draws_what_quantize_draws(seed: dict[str, int]) -> None:
    x, cast = torch.linspace(-3, 3, 500), parse("e5m2@e8m0/tensor:delayed:stochastic")
    found = DelayedScales().rounded(x, cast, "input of a", **seed)
    assert torch.equal(found, lowp.quantize(x, cast.current, **seed))


def test_zeros_say_nothing_about_a_scale() -> None:
    scales, x = DelayedScales(), torch.tensor([1e-5, 3e-6])
    assert torch.equal(scales.rounded(torch.zeros(2), CAST, "input of a"), torch.zeros(2))
    scales.flush()
    assert torch.equal(scales.rounded(x, CAST, "input of a"), lowp.quantize(x, CAST.current))


def test_an_empty_tensor_is_cast() -> None:
    scales = DelayedScales()
    assert scales.rounded(torch.zeros(0, 4), CAST, "input of a").shape == (0, 4)
    assert scales.sites() == ["input of a"]


def test_an_entry_is_of_a_host_where_a_scale_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    x, site = torch.tensor([0.25, -0.5]), "input of a"
    for is_host in (True, False):
        monkeypatch.setattr(hardware, "is_on_host", lambda device, is_host=is_host: is_host)
        scales = DelayedScales()
        assert scales.entry(CAST, site, True) is None
        scales.rounded(x, CAST, site)
        scales.rounded(0 * x, CAST, "input of zeros")
        assert scales.entry(CAST, site, True) is None
        scales.flush()
        found = [scales.entry(CAST, one, True) for one in (site, "input of zeros", "input of b")]
        assert [one is None for one in found] == [not is_host, True, True]
        if is_host:
            again, copied = scales.entry(CAST, site, True), scales.entry(CAST, site, False)
            assert again is found[0] and copied is not again and again is not None and torch.equal(copied, again)
            assert again[0] == scales.scale(site) and again[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["of another class", "without numbers"])
def test_a_tensor_without_numbers_of_its_own_has_no_site(kind: str) -> None:
    scales, x = DelayedScales(), torch.tensor([0.25, -0.3])
    given = x.as_subclass(type("Own", (Tensor,), {})) if kind == "of another class" else x.to("meta")
    found = scales.rounded(given, CAST, "input of a")
    assert scales.sites() == [] and found.device == given.device
    assert kind == "without numbers" or torch.equal(found, lowp.quantize(x, CAST.current))


def test_the_step_of_an_optimizer_ends_a_step_of_scales() -> None:
    scales, x = DelayedScales(), torch.tensor([0.25, -0.5])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    scales.rounded(x, CAST, "input of a")
    assert scales.scale("input of a") == 1
    optimizer.step()
    scales.rounded(8 * x, CAST, "input of a")
    assert scales.scale("input of a") == torch.tensor(0.5 / 448)
    scales.flush()
    assert scales.scale("input of a") == torch.tensor(4.0 / 448)
    writes = scales.state_dict()["groups"][0]["state"]["writes"]
    assert writes.tolist() == [2]


def test_an_unknown_site_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="nothing was cast at the site 'grad of x'; sites have names such as"):
        DelayedScales().scale("grad of x")


def test_each_operand_of_each_layer_has_a_site_and_the_first_step_is_that_of_current_scaling() -> None:
    run, current = Run(), Run("fp8")
    run.step()
    current.step()
    assert same(run.model.state_dict(), current.model.state_dict())
    operands = [f"{role} of {layer} linear" for layer in ("first", "last") for role in ("input", "weight", "grad")]
    assert sorted(run.scales.sites()) == sorted(operands)
    run.step()
    current.step()
    assert not same(run.model.state_dict(), current.model.state_dict())


def test_an_evaluation_of_many_batches_in_one_region_casts_each_as_in_training() -> None:
    run = Run()
    for _ in range(3):
        run.step()
    x = 0.1 * run.batch()[0]
    with torch.no_grad(), run.precision.autocast():
        first, again, other = run.model(x), run.model(x), run.model(2 * x)
    with torch.no_grad(), run.precision.autocast():
        assert torch.equal(run.model(x), first) and torch.equal(again, first) and not torch.equal(other, first)
    with torch.no_grad(), lowp.autocast("fp8"):
        assert not torch.equal(run.model(x), first)  # under its own maxima
    assert len(run.scales.sites()) == 6


def test_a_run_after_one_that_ctrl_c_has_ended_is_cast_as_the_first() -> None:
    def stop(module: nn.Module, arguments: object) -> None:
        raise KeyboardInterrupt

    run = Run()
    for _ in range(3):
        run.step()
    x = 0.1 * run.batch()[0]
    with torch.no_grad(), run.precision.autocast():
        expected = run.model(x)
    with torch.no_grad(), run.precision.autocast():
        hook = run.model.last.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            run.model(x)
        hook.remove()
        assert torch.equal(run.model(x), expected)


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, (2, 1)), nn.Flatten()
        )


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.filterwarnings("ignore:an infinity or a NaN")
@pytest.mark.parametrize("grad", ["e5m2@fp32/tensor:delayed", "e5m2@fp32/tensor:delayed:stochastic", "fp16"])
@pytest.mark.parametrize("model", [Net, Convolutions])
def test_calls_straight_from_their_arguments_have_the_bits_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module], grad: str
) -> None:
    rule = Rule.of("contraction", input=DELAYED, weight=DELAYED, grad=grad)
    runs, found = [Run(Policy((rule,)), model()) for _ in range(2)], list[bool]()
    own = Direct.contract

    def contract(*given: Any) -> Tensor | None:
        result = own(*given)
        found.append(result is not None)
        return result

    for step in range(5):
        for run, way in zip(runs, (contract, lambda *given: None), strict=True):
            with monkeypatch.context() as patch:
                patch.setattr(Direct, "contract", way)
                torch.manual_seed(step)
                run.step(float("inf") if step == 3 else 1.0)  # skipped, and a step that is remembered
    assert same(runs[0].state(), runs[1].state())
    for one, other in zip(*(run.scales.state_dict()["groups"] for run in runs), strict=True):
        assert one["sites"] == other["sites"] and same(one["state"], other["state"])
    assert found == [step not in (0, 3) for step in range(5) for _ in range(2)]


def test_it_learns_as_current_scaling_does() -> None:
    runs = [Run("fp8-delayed"), Run("fp8")]
    for run in runs:
        for _ in range(40):
            run.step()
    delayed, current = (sum(run.losses[-10:]) / 10 for run in runs)
    assert delayed < 0.9 * runs[0].losses[0] and abs(delayed - current) < 0.05 * current


@pytest.mark.parametrize("precision", ["fp8-delayed", policy(accumulate="fp16/16")])
def test_a_run_that_is_resumed_goes_on_to_the_bit(precision: Any) -> None:
    run = Run(precision)
    for _ in range(3):
        run.step()
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.precision.state_dict()))
    other = Run(precision)
    for part, state in zip((other.model, other.optimizer, other.precision), saved, strict=True):
        part.load_state_dict(state)
    for one in (run, other):
        for _ in range(3):
            one.step()
    assert same(run.state(), other.state()) and run.losses[3:] == other.losses


def test_a_copy_of_a_precision_goes_on_by_itself() -> None:
    run = Run()
    run.step()
    twin = copy.deepcopy(run)
    run.step(by=100)
    twin.step()
    assert not same(run.state(), twin.state()) and run.scales.sites() == twin.scales.sites()


def test_a_checkpoint_without_scales_or_with_broken_ones_is_refused() -> None:
    run = Run()
    run.step()
    state = run.precision.state_dict()
    without = {name: value for name, value in state.items() if name != "scales"}
    with pytest.raises(InvalidInput, match="a precision's state has no scales, which fp8-delayed needs"):
        run.precision.load_state_dict(without)
    state["scales"]["groups"][0]["state"]["history"] = torch.zeros(1)
    with pytest.raises(InvalidInput, match=r"delayed\(window=1024\) in this checkpoint are incomplete"):
        run.precision.load_state_dict(state)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again_have_the_same_scales(reentrant: bool) -> None:
    plain, again = Run(policy()), Run(policy(), Net(reentrant))
    plain.has_checkpoints = again.has_checkpoints = True  # a reentrant one needs an input with a gradient
    for _ in range(4):
        plain.step()
        again.step()
    assert same(plain.state(), again.state()) and plain.losses == again.losses


def test_an_evaluation_uses_the_scales_of_training_and_changes_nothing() -> None:
    run, other = Run(), Run()
    for _ in range(3):
        run.step()
        other.step()
        with torch.no_grad(), run.precision.autocast():
            run.model(1000 * torch.ones(2, 6))
    assert same(run.state(), other.state())
    found: list[Tensor] = []
    first = run.model.first
    assert isinstance(first, nn.Linear)
    first.register_forward_hook(lambda module, x, y: found.append(y))
    with torch.no_grad(), run.precision.autocast():
        run.model(torch.full((1, 6), 1000.0))
    most = 448 * run.scales.scale("input of first linear").float()
    weight = lowp.quantize(first.weight, CAST, scale=float(run.scales.scale("weight of first linear")))
    torch.testing.assert_close(found[0], F.linear(most.expand(1, 6), weight, first.bias))


def test_a_skipped_step_keeps_what_was_finite_in_mind() -> None:
    run = Run()
    run.step()
    before = run.scales.scale("input of first linear")
    weights = copy.deepcopy(run.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.step(by=torch.inf)
    assert same(run.model.state_dict(), weights) and run.precision.skipped_steps == 1
    assert run.scales.scale("input of first linear") == before
    run.step()
    assert run.precision.skipped_steps == 1 and all(value.isfinite().all() for value in run.state().values())


@pytest.mark.parametrize("together", [False, True])
def test_batches_of_one_step_in_any_number_and_size_share_the_scale_of_module_and_role(together: bool) -> None:
    run, x = Run(), torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    for rows in (32, 32, 5):  # four batches of eight, and one of five at last
        run.optimizer.zero_grad()
        parts, losses = x[:rows].split(8), list[Tensor]()
        for among in [parts] if together else [(part,) for part in parts]:
            with run.precision.autocast():
                losses += [F.cross_entropy(run.model(part), part[:, :3].argmax(1)) for part in among]
        run.precision.backward(torch.stack(losses).mean())
        run.precision.step(run.optimizer)
    assert run.scales.scale("input of first linear").float() == x.abs().max() / 448
    assert sorted(run.scales.sites()) == sorted(
        f"{role} of {layer} linear" for role in ("input", "weight", "grad") for layer in ("first", "last")
    )
    assert all(one["state"]["writes"].unique().tolist() == [3] for one in run.scales.state_dict()["groups"])


class Twice(Net):
    def _whole(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(100 * self.first(x)[:, :6])))


@pytest.mark.parametrize("checkpointed", [None, True, False])
def test_a_module_that_runs_twice_in_one_forward_has_a_count_which_each_batch_begins_anew(
    checkpointed: bool | None,
) -> None:
    run = Run(model=Twice(checkpointed))
    for _ in range(2):
        x, labels = run.batch()
        run.optimizer.zero_grad()
        with run.precision.autocast():
            loss = sum(F.cross_entropy(run.model(part.requires_grad_()), labels[:4]) for part in x.split(4))
        run.precision.backward(loss)
        run.precision.step(run.optimizer)
    layers = ("first", "first", "last")
    assert sorted(run.scales.sites()) == sorted(
        f"{role} of {layer} linear{' #2' if again == 1 else ''}"
        for role in ("input", "weight", "grad")
        for again, layer in enumerate(layers)
    )
    assert run.scales.scale("input of first linear #2") > 10 * run.scales.scale("input of first linear")


def test_functions_beside_modules_keep_their_scales_in_an_evaluation() -> None:
    run, x = Run(), torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    small, large = torch.eye(6).requires_grad_(), (100 * torch.eye(3)).requires_grad_()

    def whole() -> Tensor:
        return F.linear(100 * run.model(F.linear(0.01 * x, small)), large)

    for _ in range(2):
        with run.precision.autocast():
            loss = whole().square().mean()
        run.precision.backward(loss)
        run.precision.step(run.optimizer)
    before = copy.deepcopy(run.scales.state_dict())
    with torch.no_grad(), run.precision.autocast():
        found = whole()
    with run.precision.autocast():
        assert torch.equal(found, whole())
    assert {"input of linear", "input of linear #2"} <= set(run.scales.sites())
    for one, other in zip(before["groups"], run.scales.state_dict()["groups"], strict=True):
        assert one["sites"] == other["sites"] and same(one["state"], other["state"])


def test_a_region_alone_follows_the_steps_of_optimizers() -> None:
    run, model = Run(policy()), Net()
    optimizer, region = torch.optim.SGD(model.parameters(), lr=0.1), lowp.autocast(policy())
    for _ in range(4):
        x, labels = run.batch()
        run.step()
        optimizer.zero_grad()
        with region:
            loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
    assert same(run.model.state_dict(), model.state_dict())


def test_products_of_the_backward_pass_have_sites_for_their_own_casts() -> None:
    own = Operands.parse(f"input={DELAYED} grad={DELAYED} hadamard=4")
    run = Run(policy(weight_gradient=own))
    for _ in range(3):
        run.step()
    assert {"input of the weight gradient of last linear", "grad of the weight gradient of last linear"} <= set(
        run.scales.sites()
    )
    assert all(value.isfinite().all() for value in run.state().values())


def test_a_product_of_two_activations_and_a_convolution_have_sites() -> None:
    region = lowp.autocast(policy())
    x, weight = torch.randn(2, 3, 4, 4, requires_grad=True), nn.Parameter(torch.randn(5, 3, 3, 3))
    with region:
        (F.conv2d(x, weight).sum() + (x @ x).sum() + torch.einsum("bchw,bchv,bchv->w", x, x, x).sum()).backward()
    assert region.scales is not None
    sites = region.scales.sites()
    assert {f"{role} of {op}" for role in ("input", "weight", "grad") for op in ("conv2d", "matmul")} <= set(sites)
    assert "input of einsum, product 2" in sites


def test_attention_and_recurrent_layers_take_their_own_maxima() -> None:
    x, gru = torch.randn(2, 5, 8, requires_grad=True), nn.GRU(8, 4, batch_first=True)
    found = []
    for rules in (policy(), Policy(tuple(rule.current for rule in policy().rules))):
        with lowp.autocast(rules) as region:
            found.append(F.scaled_dot_product_attention(x, x, x).sum() + gru(x)[0].sum())
        assert region.scales is None or not region.scales.sites()
    assert torch.equal(*found)


def test_gradients_of_gradients_have_scales_of_their_own() -> None:
    x, weight = torch.randn(4, 6, requires_grad=True), nn.Parameter(torch.randn(3, 6))
    found = []
    for rules in (policy(), Policy(tuple(rule.current for rule in policy().rules))):
        with lowp.autocast(rules):
            y = F.linear(x, weight).pow(2).sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            found.append(torch.autograd.grad(gradient.pow(2).sum(), weight)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_transforms_take_each_tensors_own_maximum(transform: Any) -> None:
    x, weight = torch.randn(4, 6), torch.randn(3, 6)
    found = []
    for rules in (policy(), Policy(tuple(rule.current for rule in policy().rules))):
        with lowp.autocast(rules):
            found.append(transform(lambda one: F.linear(one, weight).sum())(x))
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, of a Function
def test_compiled_code_takes_each_tensors_own_maximum() -> None:
    found = []
    for precision in ("fp8-delayed", "fp8"):
        torch._dynamo.reset()
        model = Net()
        compiled = torch.compile(model, backend="aot_eager")
        with lowp.autocast(precision):
            loss = compiled(torch.arange(12.0).reshape(2, 6)).square().sum()
        loss.backward()
        found.append((loss.detach(), model.first.weight.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize("spelled", ["e4m3fn@fp32/tensor:delayed(window=3,headroom=2)", "e5m2@fp32/tensor:delayed"])
def test_maxima_are_remembered_in_one_call_as_by_definition(spelled: str) -> None:
    tables = [DelayedTable(parse(spelled), torch.device("cpu")) for _ in range(2)]
    torch.manual_seed(0)
    for table in tables:
        for name in range(60):
            table.index(str(name))
    for _ in range(8):
        met = torch.randn(60).abs() * 2.0 ** torch.randint(-160, 128, (60,))
        met[:3] = torch.tensor([torch.inf, torch.nan, 0.0])[torch.randperm(3)]
        for table, way in zip(tables, ("cpu", "reference"), strict=True):
            table.rows[:, 1], table.rows[:, 2] = met, (torch.arange(60) % 5 > 0).double()
            with kernels.use(way):
                table.flush()
        one, other = tables
        assert torch.equal(one.rows, other.rows) and one.knows == other.knows
        assert all(map(torch.equal, one.state, other.state))
    assert all(int(count.sum()) for count in tables[0].state[3:]) and 0 < sum(tables[0].knows) <= 60
