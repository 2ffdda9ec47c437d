"""Observers receive every tensor of a step with role and phase, before its cast, without changing the training."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.ops.observing import Observation, everywhere, observe
from lowp.policy import Policy, Rule
from lowp.region import autocast

CONTRACTION = Policy((Rule.of("contraction", input="e4m3fn", weight="e4m3b11fnuz", grad="e5m2", output="bf16"),))


@pytest.fixture
def seen() -> Iterator[list[Observation]]:
    found: list[Observation] = []
    end = observe(found.append)
    yield found
    end()


def roles(seen: list[Observation]) -> list[tuple[str, str, str]]:
    return [(one.op, one.role, one.phase) for one in seen]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


FORWARD = [("linear", "input", "forward"), ("linear", "weight", "forward"), ("linear", "output", "forward")]
BACKWARD = [
    ("linear", "grad", "backward"),
    ("linear", "input gradient", "backward"),
    ("linear", "weight gradient", "backward"),
    ("linear", "bias gradient", "backward"),
]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8", "dfp16", "flex16+5"])
def test_every_rounding_of_a_linear_layer_is_told_with_its_role_and_phase(
    precision: str, seen: list[Observation]
) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with autocast(precision):
        y = nn.Linear(8, 4)(x)
    assert roles(seen) == FORWARD
    y.float().sum().backward()
    assert roles(seen) == FORWARD + BACKWARD


@pytest.mark.usefixtures("emulated")
def test_an_observation_holds_the_tensor_before_its_cast_and_the_cast(seen: list[Observation]) -> None:
    x, layer = torch.randn(3, 8, requires_grad=True), nn.Linear(8, 4)
    with autocast(CONTRACTION):
        y = layer(x)
    y.backward(torch.full_like(y, 0.3))
    told = {one.role: one for one in seen}
    assert {role: str(one.cast) for role, one in told.items() if "gradient" not in role} == {
        "input": "e4m3fn",
        "weight": "e4m3b11fnuz",
        "output": "bf16",
        "grad": "e5m2",
    }
    assert all(str(one.cast) == "bf16" for role, one in told.items() if role.endswith("gradient"))
    assert torch.equal(told["input"].tensor, x) and torch.equal(told["weight"].tensor, layer.weight)
    assert torch.equal(told["output"].tensor.bfloat16(), y) and not torch.equal(told["output"].tensor, y.float())
    assert torch.equal(told["grad"].tensor.float(), torch.full((3, 4), 0.3).bfloat16().float())
    assert not any(one.tensor.requires_grad for one in seen)


def test_a_parameter_is_a_weight_wherever_it_stands(seen: list[Observation]) -> None:
    weight, other, x = parameter(4, 4), parameter(4, 4), torch.randn(4, 4, requires_grad=True)
    with autocast(CONTRACTION):
        for first, second in ((weight, x), (x, weight), (weight, other), (x, x)):
            seen.clear()
            y = first @ second
            told = [(one.role, str(one.cast)) for one in seen[:2]]
            wanted = ["weight" if one is weight or one is other else "input" for one in (first, second)]
            if first is second:  # a product of two activations: its second operand has the rule's cast of weights
                wanted = ["input", "weight"]
            assert told == [(role, {"input": "e4m3fn", "weight": "e4m3b11fnuz"}[role]) for role in wanted]
            seen.clear()
            y.sum().backward()
            assert {one.role for one in seen} >= {f"{role} gradient" for role in wanted}


@pytest.mark.parametrize(
    "policy", ["bf16", "fp32", Policy((Rule.of("contraction", input="e4m3fn", accumulate="fp16/2"),))]
)
def test_query_key_and_value_of_attention_are_inputs(policy: str | Policy, seen: list[Observation]) -> None:
    query, key, value = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    with autocast(policy):
        F.scaled_dot_product_attention(query, key, value).float().sum().backward()
    assert {one.role for one in seen} == {"input", "output", "grad", "input gradient"}
    for one in (query, key, value):
        assert any(told.role == "input" and torch.equal(told.tensor, one) for told in seen) or policy not in (
            "bf16",
            "fp32",
        )


def test_the_key_of_visible_attention_is_an_input(seen: list[Observation]) -> None:
    model = nn.MultiheadAttention(4, 2)
    with autocast("bf16"):
        model(*[torch.randn(3, 1, 4)] * 3, need_weights=True)
    shapes = {tuple(one.tensor.shape) for one in seen if one.role == "weight"}
    assert shapes == {(12, 4), (4, 4)}


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norms": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)), (4, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (2, 2, 6, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True), (2, 3, 8)),
    "recurrent": (lambda: Last(nn.LSTM(4, 4)), (3, 2, 4)),
}


class Last(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)[0]
        return result


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "dfp16", "flex16+5"])
@pytest.mark.parametrize("name", MODELS)
def test_observing_changes_no_bit(name: str, precision: str) -> None:
    make, shape = MODELS[name]
    bits = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, x = make(), torch.randn(*shape, requires_grad=True)
        found: list[Observation] = []
        end = observe(found.append) if watched else None
        region = autocast(precision)
        for _ in range(2):
            with region:
                y = model(x)
            y.float().square().sum().backward()
        if end is not None:
            end()
            phases = {one.phase for one in found}
            assert phases == {"forward", "backward"}
            assert {"input", "weight", "output", "grad"} <= {one.role for one in found}
        bits.append([y, x.grad, *(one.grad for one in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*bits, strict=True))


def test_in_fp32_the_gradients_of_one_product_are_told_apart_from_those_of_others(seen: list[Observation]) -> None:
    x, layer = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 4)
    with autocast("fp32"):
        (layer(x).sum() + 2 * layer(x).sum()).backward()
    sums = sorted(float(one.tensor.sum()) for one in seen if one.op == "linear" and one.role == "grad")
    assert sums == [12.0, 24.0]
    weights = [one.tensor for one in seen if one.role == "weight gradient"]
    assert len(weights) == 2 and torch.allclose(weights[0] + weights[1], layer.weight.grad)  # type: ignore[arg-type]


def test_in_fp32_products_and_norms_alone_tell_the_gradients_of_their_operands(seen: list[Observation]) -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), parameter(4, 4)
    with autocast("fp32"):
        for y in (F.linear(x, weight), F.layer_norm(x, (4,)), x.exp()):
            y.sum().backward()
    told = [(one.op, one.role) for one in seen if one.role.endswith("gradient")]
    assert sorted(told) == [
        ("layer_norm", "input gradient"),
        ("linear", "input gradient"),
        ("linear", "weight gradient"),
    ]


def test_a_product_in_place_is_observed_and_still_writes_its_own_tensor(seen: list[Observation]) -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), parameter(4, 4)
    weight.data.mul_(8).round_()  # whose sums are exact in any order
    y = x * 2
    with autocast("fp32"):
        assert y.addmm_(x, weight) is y
    y.sum().backward()
    assert [one.role for one in seen if one.op == "addmm"][-2:] == ["output", "grad"]
    assert torch.allclose(x.grad, 2 + weight.detach().sum(1).expand(4, 4))  # type: ignore[arg-type]


def test_a_bias_and_running_statistics_have_no_role(seen: list[Observation]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    with autocast("fp32"):
        model(torch.randn(3, 4))
        torch.addmm(torch.randn(3), torch.randn(2, 4), torch.randn(4, 3))
    assert roles(seen) == [
        (op, role, "forward") for op in ("batch_norm", "linear", "addmm") for role in ("input", "weight", "output")
    ]


def test_a_step_tells_of_updates_weights_and_the_state_of_the_optimizer(seen: list[Observation]) -> None:
    precision = lowp.Precision("flex16+5")
    model = nn.Linear(4, 2)
    model, optimizer = precision.prepare(model, torch.optim.Adam(model.parameters()))
    seen.clear()
    with precision.autocast():
        loss = model(torch.randn(3, 4)).sum()
    precision.backward(loss)
    precision.step(optimizer)
    told = {(one.path, one.role) for one in seen if one.phase == "step"}
    wanted = {"update", "weight", "weight gradient", "optimizer state"}
    assert told == {(name, role) for name in ("weight", "bias") for role in wanted}


def test_masters_are_told_as_they_are_stored_in_few_bits(seen: list[Observation]) -> None:
    layer = nn.Linear(4, 2)
    optimizer = lowp.MasterWeights(torch.optim.SGD(layer.parameters(), lr=0.1), storage="bf16")
    layer(torch.randn(3, 4).bfloat16()).sum().backward()
    optimizer.step()
    told = [(one.path, one.role, one.phase, str(one.cast), one.tensor.dtype) for one in seen]
    assert told == [(f"parameter {index}", "weight", "step", "bf16", torch.float32) for index in (0, 1)]


@pytest.mark.parametrize("make", [lowp.optim.AdamW, lowp.optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize("how", ["given", "prepared", "attached", "number"])
def test_stored_weights_are_told_whole_and_by_name(seen: list[Observation], make: Any, how: str) -> None:
    model = nn.Linear(300, 300)  # more elements than a block of lowp's optimizers
    optimizer = make(model.named_parameters() if how == "given" else model.parameters(), lr=0.1)
    if how == "prepared":
        precision = lowp.Precision("bf16-storage", masters="split")
        model, optimizer = precision.prepare(model, optimizer)
    elif make is torch.optim.SGD:
        optimizer = lowp.MasterWeights(optimizer, storage="bf16")
    if how == "attached":
        optimizer.attach(model)
    optimizer = copy.deepcopy((model, optimizer))[1]
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = ["parameter 0", "parameter 1"] if how == "number" else ["weight", "bias"]
    assert [(one.path, one.role, one.phase) for one in seen] == [(name, "weight", "step") for name in names]
    masters = [optimizer.master(parameter) for parameter in optimizer.param_groups[0]["params"]]
    assert all(torch.equal(one.tensor, master) for one, master in zip(seen, masters, strict=True))


def test_an_observer_of_a_region_hears_of_that_region_alone_until_it_ends() -> None:
    region, other, found = autocast("bf16"), autocast("bf16"), list[Observation]()
    end = region.observe(found.append)
    x, layer = torch.randn(3, 4), nn.Linear(4, 4)
    with other:
        layer(x)
    assert not found
    with region:
        y = layer(x)
    count = len(found)
    end()
    y.sum().backward()
    assert count == len(found) == 3 and not everywhere


def test_sparse_tensors_and_integers_are_not_told(seen: list[Observation]) -> None:
    with autocast("bf16"):
        torch.sparse.mm(torch.eye(3).to_sparse(), torch.eye(3))
        F.embedding(torch.tensor([1]), torch.randn(3, 2))
    assert all(one.tensor.is_floating_point() and one.tensor.layout is torch.strided for one in seen)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "e5m7", "bf16-tpu", "int8", "dfp16", "flex16+5"])
def test_the_graph_of_a_product_holds_no_operand_as_it_was_given(precision: str) -> None:
    x, layer = torch.randn(3, 4) + 0.1, nn.Linear(4, 4)
    with autocast(precision):
        given = x * 1.0
        kept = weakref.ref(given)
        y = layer(given)
    del given
    assert kept() is None
    y.float().sum().backward()
