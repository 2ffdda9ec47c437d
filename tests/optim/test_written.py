"""Stored parameters that the script writes itself, between steps: clipped, pruned, initialized again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.optim import SGD, AdamW, MasterWeights

MAKERS: dict[str, Callable[[Any], Any]] = {
    **{
        kind: lambda parameters, kind=kind: MasterWeights(torch.optim.SGD(parameters, lr=2.0**-12), "bf16", kind=kind)
        for kind in ("fp32", "split", "stochastic", "none")
    },
    "in fp16": lambda parameters: MasterWeights(torch.optim.SGD(parameters, lr=2.0**-12), "fp16"),
    "in e5m7": lambda parameters: MasterWeights(torch.optim.SGD(parameters, lr=2.0**-12), "e5m7"),
    "drawn": lambda parameters: MasterWeights(torch.optim.SGD(parameters, lr=2.0**-12), "e5m7:stochastic"),
    "own SGD": lambda parameters: SGD(parameters, lr=2.0**-12, storage="bf16", split=False),
    "own split SGD": lambda parameters: SGD(parameters, lr=2.0**-12, storage="bf16", split=True),
    "own AdamW": lambda parameters: AdamW(parameters, lr=2.0**-12, weight_decay=0.0, split=False),
    "own split AdamW": lambda parameters: AdamW(parameters, lr=2.0**-12, weight_decay=0.0),
}
WAYS: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "in place": lambda parameter, value: parameter.copy_(value),
    "in its data": lambda parameter, value: parameter.data.copy_(value),
    "as new data": lambda parameter, value: setattr(parameter, "data", value.to(parameter.dtype)),
}


def _trained(make: Callable[[Any], Any]) -> tuple[nn.Parameter, Any]:
    weight = nn.Parameter(torch.linspace(-1.5, 1.5, 64).view(2, 32))
    optimizer = make([weight])
    for _ in range(3):
        _step(weight, optimizer)
    return weight, optimizer


def _step(weight: nn.Parameter, optimizer: Any) -> None:
    weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAKERS)
def test_the_next_step_starts_from_what_was_written(name: str, way: str) -> None:
    weight, optimizer = _trained(MAKERS[name])
    kept = optimizer.master(weight)[1].clone()
    written = weight.detach().clone()
    written[0] = torch.tensor([0.0, -0.0, 0.25, -0.75]).repeat(8)
    with torch.no_grad():
        WAYS[way](weight, written)
    # a split master keeps its old remainder: half an ulp of a power of two, or of 0 a number below 2**-133
    half_an_ulp = 2.0**-8 * written[0].float().abs() + 2.0**-133
    assert ((optimizer.master(weight)[0] - written[0].float()).abs() <= half_an_ulp).all()
    assert torch.equal(optimizer.master(weight)[1], kept), "a row that nobody wrote has lost its master"
    _step(weight, optimizer)
    # SGD moves by 2**-12, AdamW by at most that; the weight is then rounded, stochastically by up to an ulp
    assert ((weight[0].float() - written[0].float()).abs() <= 2.0**-12 + 3 * half_an_ulp).all()


@pytest.mark.parametrize("name", ["fp32", "in fp16", "in e5m7", "own SGD"])
def test_what_is_exchanged_and_put_back_keeps_its_masters(name: str) -> None:
    weight, optimizer = _trained(MAKERS[name])
    before, stored = optimizer.master(weight).clone(), weight.detach().clone()
    with torch.no_grad():
        weight.fill_(3.0)  # a moving average, for an evaluation and a checkpoint of it
        assert (optimizer.master(weight) == 3.0).all()
        assert (optimizer.state_dict()["state"][0]["master_weight"] == 3.0).all()
        weight.copy_(stored)
    assert torch.equal(optimizer.master(weight), before)


def test_the_largest_norm_of_an_embedding_holds_in_the_masters() -> None:
    precision = lowp.Precision("bf16-storage")
    embedding = nn.Embedding(8, 16, max_norm=1.0)
    embedding, optimizer = precision.prepare(embedding, torch.optim.SGD(embedding.parameters(), lr=2.0**-12))
    for _ in range(2):
        with precision.autocast():
            loss = embedding(torch.arange(8)).float().square().mean()
        precision.backward(loss)
        precision.step(optimizer)
    # renormalized in bf16, whose ulp below 1 is 2**-8
    assert (embedding.state_dict()["weight"].norm(dim=1) <= 1 + 2.0**-7).all()
