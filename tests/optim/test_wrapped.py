"""What wrapped optimizers keep of their parameters: names, copies, states, and steps that a device skips."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput
from lowp.exponents import SharedExponents
from lowp.optim import FlexWeights, MasterWeights, shards
from lowp.optim.model_state import ParameterNames
from lowp.optim.preparing import MasterStorage, agree_on_masters
from lowp.optim.skipping import skipping
from lowp.optim.storage import Storage

IN_FLEX = lowp.Precision("flex16+5").policy.parameters


def flex(parameters: Any, kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> FlexWeights:
    assert IN_FLEX is not None
    return FlexWeights(kind(parameters, lr=0.1, **options), IN_FLEX, SharedExponents())


def stepped(optimizer: torch.optim.Optimizer, gradient: float = 1.0, skip: Tensor | None = None) -> list[Tensor]:
    """Step with a gradient, under a flag if one is given, and return the parameters."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for one in parameters:
        one.grad = torch.full_like(one, gradient)
    with nullcontext() if skip is None else skipping(optimizer, skip):
        optimizer.step()
    return [one.detach().clone() for one in parameters]


def test_an_optimizer_prints_its_storage_and_what_is_inside() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert repr(flex([weight])).startswith(f"FlexWeights({IN_FLEX}, SGD (")
    wrapped = MasterWeights(torch.optim.SGD([nn.Parameter(torch.ones(2))]), "fp16", kind="stochastic")
    assert repr(wrapped).startswith("MasterWeights(storage=fp16, kind=stochastic, SGD (")
    assert repr(MasterWeights(torch.optim.SGD([weight]), None)).startswith(
        "MasterWeights(storage=fp32, kind=fp32, SGD ("
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_under_shared_exponents_steps_as_the_one_that_it_was_made_of(copied: Callable[[Any], Any]) -> None:
    precision, model = lowp.Precision("flex16+5"), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    _, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    stepped(optimizer)
    others, other = copied((model, optimizer))
    for number in range(2):
        for one in (model, others):
            one[1].running_mean.fill_(1 / 3 + number)
        for mine, own in zip(stepped(optimizer), stepped(other), strict=True):
            assert torch.equal(mine, own)
        assert torch.equal(model[1].running_mean, others[1].running_mean)
        assert model[1].running_mean[0] != torch.tensor(1 / 3 + number)  # a buffer is written in the format, too
    assert [id(one) for one in others.parameters()] == [id(one) for one in other.param_groups[0]["params"]]


@pytest.mark.parametrize("version", [2, "1", None])
def test_a_state_under_shared_exponents_has_a_version(version: Any) -> None:
    optimizer, other = (flex([nn.Parameter(torch.ones(2))], momentum=0.9) for _ in range(2))
    stepped(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["flex_weights"] == {"version": 1, "cast": str(IN_FLEX)}
    for damaged in ({"version": version}, version):
        with pytest.raises(InvalidInput, match=r"flex weights of version .* cannot be read: this lowp reads version 1"):
            other.load_state_dict({**state, "flex_weights": damaged})
    assert not other.state
    other.load_state_dict(state)
    other.param_groups[0]["params"][0].data.copy_(optimizer.param_groups[0]["params"][0])
    assert torch.equal(*stepped(optimizer), *stepped(other))
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    other.load_state_dict(plain.state_dict())  # of torch's own, without shared exponents
    assert other.param_groups[0]["lr"] == 0.5


MAKERS: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
    "without state": lambda weight: torch.optim.SGD([weight], lr=0.1),
    "momentum": lambda weight: torch.optim.SGD([weight], lr=0.1, momentum=0.9),
    "own skips": lambda weight: torch.optim.AdamW([weight], lr=0.1, fused=True),
    "flex": lambda weight: flex([weight]),
    "flex with momentum": lambda weight: flex([weight], momentum=0.9),
    "flex, own skips": lambda weight: flex([weight], torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_under_a_flag_changes_a_weight_only_where_it_is_not_set(name: str) -> None:
    weight, same = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, other = MAKERS[name](weight), MAKERS[name](same)
    for gradient, is_skipped in ((1.0, True), (2.0, False), (torch.nan, True), (0.5, False)):
        before = weight.detach().clone()
        stepped(optimizer, gradient, torch.tensor(is_skipped))
        if not is_skipped:
            stepped(other, gradient)
        elif "momentum" != name:  # which goes on where torch's own cannot skip
            assert torch.equal(weight, before)
        assert weight.isfinite().all()
        if name != "momentum":
            assert torch.equal(weight, same)
    leftovers = {"found_inf", "grad_scale", "skip"} & vars(optimizer).keys()
    assert not leftovers


def test_names_are_those_of_the_optimizer_then_of_the_last_model_then_places() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    named = torch.optim.SGD(first.named_parameters("given"), lr=0.1)
    plain = torch.optim.SGD([first.weight, second.weight, second.bias], lr=0.1)
    names = ParameterNames()
    assert [names.of(one, plain) for one in plain.param_groups[0]["params"]] == [f"parameter {n}" for n in range(3)]
    names.add(nn.Sequential(first))
    names.add(first)
    assert (names.of(first.weight, named), names.of(first.weight, plain)) == ("given.weight", "weight")
    assert names.of(second.bias, plain) == "parameter 2"
    assert names.of(nn.Parameter(torch.ones(1)), plain) == ""


def test_a_model_that_is_let_go_gives_the_stored_format_again() -> None:
    model = nn.Linear(2, 2)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    attachment = optimizer.attach(model)
    assert model.state_dict()["weight"].dtype is torch.float32
    attachment.remove()
    assert model.state_dict()["weight"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "masters", "text"),
    [
        ("flex16+5", "fp32", "weights and updates have their own exponents and no masters: omit masters, or use dfp16"),
        ("fp16", "fp32", "but fp16 leaves the parameters in fp32: use fp16-storage, or a policy with parameters="),
        ("fp16", "split", "but fp16 leaves the parameters in fp32: use bf16-storage, or a policy with parameters="),
        ("fp8", "fp32", "but fp8 leaves the parameters in fp32: use fp16-storage or bf16-storage, or a policy with"),
        ("fp16-storage", "split", "masters=split needs parameters in bf16, but fp16-storage stores parameters in fp16"),
    ],
)
def test_masters_that_do_not_fit_the_storage_are_refused_with_what_does(
    precision: str, masters: str, text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        lowp.Precision(precision, masters=masters)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
@pytest.mark.parametrize("precision", ["bf16-storage", "flex16+5"])
def test_a_scripted_module_is_refused_in_precisions_that_store_its_parameters(precision: str) -> None:
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(InvalidInput, match="the parameters of a TorchScript module cannot be stored in"):
        lowp.Precision(precision).prepare_model(scripted)


def test_an_optimizer_of_another_model_is_refused() -> None:
    precision, other = lowp.Precision("bf16-storage"), nn.Linear(2, 2)
    model = precision.prepare_model(nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="none of the optimizer's parameters belongs to a prepared model: it would"):
        precision.prepare_optimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    both = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1)
    assert isinstance(precision.prepare_optimizer(both), MasterWeights)


def test_a_rank_alone_keeps_its_masters() -> None:
    weight = nn.Parameter(torch.tensor([1 + 2.0**-12]))
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=0.1), "bf16")
    agree_on_masters([optimizer])
    assert optimizer.master(weight) == 1 + 2.0**-12


def test_the_state_by_parameter_has_what_is_kept_for_its_master_and_the_inner_optimizers() -> None:
    weight, frozen = nn.Parameter(torch.tensor([1.0, 1 / 3])), nn.Parameter(torch.ones(2))
    optimizer = MasterWeights(torch.optim.SGD([weight, frozen], lr=0.5, momentum=0.9), "bf16", seed=3)
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.step()
    state = optimizer.state[weight]
    assert torch.equal(state["master_weight"], torch.tensor([1.0, 1 / 3]) - 0.5)
    assert torch.equal(state["momentum_buffer"], torch.ones(2)) and state["momentum_buffer"].dtype is torch.float32
    assert (state["master_steps"], state["master_seed"]) == (1, 3)
    assert "momentum_buffer" not in optimizer.state[frozen]


@pytest.mark.parametrize("precision", ["bf16-storage", "flex16+5"])
def test_a_copy_of_a_precision_knows_the_copies_of_its_models(precision: str) -> None:
    made, model = lowp.Precision(precision), nn.Linear(2, 2)
    made.prepare_model(model)
    other, copied = copy.deepcopy((made, model))
    optimizer = other.prepare_optimizer(torch.optim.SGD(copied.parameters(), lr=0.1))
    assert isinstance(optimizer, FlexWeights if precision == "flex16+5" else MasterWeights)
    assert copied.state_dict()["weight"].dtype is torch.float32
    assert optimizer.holds(copied.weight) and not optimizer.holds(model.weight)


def test_running_statistics_that_are_in_the_format_keep_their_values() -> None:
    precision, model = lowp.Precision("flex16+5"), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    _, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        model[1].running_mean.fill_(1 / 3)
        stepped(optimizer)
        assert precision.exponents is not None
        precision.exponents.flush()
        assert model[1].running_mean[0] != torch.tensor(1 / 3), number
    few = torch.tensor([3.0, -5.0, 0.0]) * 2.0**-25  # under an exponent of their own
    model[1].running_mean.copy_(few)
    stepped(optimizer)
    assert torch.equal(model[1].running_mean, few)


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_values_that_are_loaded_before_there_is_an_optimizer_become_its_masters(masters: str) -> None:
    precision, model, values = (
        lowp.Precision("bf16-storage", masters=masters),
        nn.Linear(2, 2),
        torch.full((2, 2), 1 / 3),
    )
    precision.prepare_model(model)
    model.load_state_dict({"weight": values, "bias": torch.zeros(2)})
    assert torch.equal(model.weight, values.bfloat16()) and torch.equal(model.state_dict()["weight"], values)
    optimizer: Any = precision.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(optimizer.master(model.weight), values)


def test_values_that_no_optimizer_will_claim_are_dropped_of_one_model_alone() -> None:
    storage, models = MasterStorage(Storage.parse("bf16", "fp32"), 0), [nn.Linear(2, 2) for _ in range(2)]
    for model in models:
        nn.init.constant_(model.weight, 1 / 3)
        storage.model(model)
        assert torch.equal(model.state_dict()["weight"], torch.full((2, 2), 1 / 3))
    storage.release(models[0])
    rounded, kept = (model.state_dict()["weight"] for model in models)
    assert torch.equal(rounded, torch.full((2, 2), 1 / 3).bfloat16().float())
    assert torch.equal(kept, torch.full((2, 2), 1 / 3))


def test_an_optimizer_of_a_flat_parameter_whose_views_are_the_weights_is_refused() -> None:
    flat, model = nn.Parameter(torch.zeros(6)), nn.Linear(3, 2, bias=False)
    model.weight.data = flat.data.view(2, 3)
    storage = MasterStorage(Storage.parse("bf16", "fp32"), 0)
    with pytest.raises(InvalidInput, match=r"shape \(6,\) shares memory .* instead of a flat one"):
        storage.admit(torch.optim.SGD([flat]), model)
    storage.admit(torch.optim.SGD(model.parameters()), model)


def test_a_wrapper_holds_parameters_only_where_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.zeros(2))
    searched: list[set[int]] = []

    def found(wanted: set[int]) -> str:
        searched.append(wanted)
        return "DDP"

    monkeypatch.setattr(shards, "_find_holder", found)
    assert shards.holder_of([weight]) is None and not searched
    monkeypatch.setattr(lowp.distributed, "is_running", lambda: True)
    assert shards.holder_of([weight]) == "DDP" and searched == [{id(weight)}] * 2
