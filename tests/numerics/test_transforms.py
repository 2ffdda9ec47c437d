"""A profile of models that torch.func calls, of complex parameters, and of optimizers that get other parameters."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from numerics.small import network, train
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import lowp
from lowp.numerics.record import Key


def steps_by_vmap(model: nn.Module, optimizer: torch.optim.Optimizer, region: AbstractContextManager[object]) -> None:
    """Three steps on means of the gradients of single examples, as differentially private training takes them."""
    generator = torch.Generator().manual_seed(1)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    for _ in range(3):
        x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
        given = {name: one.detach() for name, one in model.named_parameters()}
        with region:
            gradients = vmap(grad(loss), in_dims=(None, 0, 0))(given, x, y)
        for name, one in model.named_parameters():
            one.grad = gradients[name].mean(0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("region", [nullcontext(), lowp.autocast("bf16")], ids=["plain", "bf16"])
def test_gradients_of_single_examples_are_computed_as_without_a_profile(region: AbstractContextManager[object]) -> None:
    found = []
    for watched in (True, False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profile = lowp.profile(model, optimizer, max_overhead=None)
        with profile if watched else nullcontext():
            steps_by_vmap(model, optimizer, region)
        if watched:
            tensors = profile.record.tensors
            assert profile.record.sampled == [0, 1, 2] and not profile.record.part.faults
            if isinstance(region, nullcontext):  # a region tells nothing of calls within a transform
                assert tensors[Key("0", "linear", "output", "forward")].count == 3 * 8 * 32, "all examples"
            for role, phase in (("weight", "step"), ("weight_grad", "backward"), ("update", "step")):
                assert tensors[Key("0", "weight", role, phase)].count == 3 * 32 * 16
        found.append([one.detach() for one in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_parameters_in_whose_place_others_stand_for_a_call_keep_their_names() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        for _ in range(3):
            given = {name: one * 1.0 for name, one in model.named_parameters()}
            optimizer.zero_grad()
            functional_call(model, given, (torch.randn(8, 16),)).square().mean().backward()
            optimizer.step()
    tensors = profile.record.tensors
    for role, phase in (("weight", "step"), ("weight_grad", "backward"), ("update", "step")):
        assert tensors[Key("0", "weight", role, phase)].count == 3 * 32 * 16
    assert tensors[Key("0", "linear", "grad", "backward")].count == 3 * 8 * 32


def test_an_optimizer_that_gets_other_parameters_is_looked_at_again() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        train(model, optimizer, 2)
        model.load_state_dict({name: one * 4.0 for name, one in model.state_dict().items()}, assign=True)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        before = model[0].weight.detach().abs().max()
        train(model, optimizer, 1)
    assert profile.record.sampled == [0, 1, 2]
    assert profile.record.tensors[Key("0", "weight", "weight", "step")].maximum == before


def test_complex_parameters_are_not_counted_by_their_real_parts() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.weight, n=8)

    torch.manual_seed(0)
    model = Spectral()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with warnings.catch_warnings(), lowp.profile(model, optimizer, max_overhead=None) as profile:
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    record = profile.record
    assert not any(key.module == "" and key.op == "weight" for key in record.tensors) and "weight" not in record.updates
    assert record.tensors[Key("linear", "weight", "update", "step")].count == 2 * 64
