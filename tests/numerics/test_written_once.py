"""A profiled step of a compiled model runs twice, and what it writes beside the model is written once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from numerics.small import network
from torch import Tensor
from torch.nn import functional as F

import lowp

KEEPS: dict[str, Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]] = {  # what a step does beside its model
    "an average": lambda kept, out, loss: (kept["mean"].mul_(0.5).add_(loss.detach(), alpha=0.5), loss)[1],
    "a view of a history": lambda kept, out, loss: (kept["history"][kept["step"].long()].copy_(loss.detach()), loss)[1],
    "an operator": lambda kept, out, loss: (operator.iadd(kept["mean"], loss.detach()), loss)[1],
    "a result that is written into": lambda kept, out, loss: (
        torch.add(kept["mean"], loss.detach(), out=kept["mean"]),
        loss,
    )[1],
    "a loss of several parts": lambda kept, out, loss: torch.zeros(()).add_(loss).add_(out.square().mean()),
    "a loss that begins before": lambda kept, out, loss: kept["begun"].add_(loss),
    "a sum that gradients pass": lambda kept, out, loss: (
        (kept["bias"] * 2).add_(loss).add_((out * kept["bias"]).mean())
    ),
    "a head of its own": lambda kept, out, loss: F.linear(out, kept["head"]).square().mean() + kept["norm"] * loss,
    "the average itself": lambda kept, out, loss: loss + kept["mean"].lerp_(loss.detach(), 0.25),
}


@pytest.mark.parametrize("what", KEEPS)
def test_what_a_step_writes_beside_its_model_is_written_once(what: str) -> None:
    def trained(watched: bool) -> list[Tensor]:
        torch.compiler.reset()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="eager")
        kept = {"mean": torch.zeros(()), "history": torch.zeros(8)}
        kept |= {"head": torch.ones(2, 4, requires_grad=True), "bias": torch.ones((), requires_grad=True)}
        losses = []
        with lowp.profile(compiled, optimizer, max_overhead=None) if watched else nullcontext():
            for step in range(4):
                optimizer.zero_grad()
                kept |= {"begun": torch.zeros(()), "step": torch.tensor(step), "norm": kept["bias"].square()}
                out = compiled(torch.randn(8, 16, generator=torch.Generator().manual_seed(step)))
                loss = KEEPS[what](kept, out, out.abs().mean())
                loss.backward()
                losses.append(loss.detach().clone())
                optimizer.step()
        gradients = [kept[name].grad for name in ("head", "bias")]
        kept_gradients = [torch.zeros(()) if one is None else one for one in gradients]
        return [*losses, kept["mean"], kept["history"], *kept_gradients, *model.parameters()]

    for plain, seen in zip(trained(False), trained(True), strict=True):
        assert torch.equal(plain, seen)


def test_a_step_that_turned_nan_is_run_again_without_writing_beside_the_model() -> None:
    torch.compiler.reset()
    model, mean, made = network(), torch.zeros(()), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        for step in range(4):
            optimizer.zero_grad()
            out = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step)))
            mean.add_(1.0)
            fresh = torch.nn.Linear(4, 1)  # whose weights are drawn in the step
            made.append(fresh.weight.detach().clone())
            loss = fresh(out).abs().mean() * (torch.nan if step == 2 else 1.0)
            loss.backward()
            assert torch.equal(fresh.weight, made[-1])
            optimizer.step()
    assert mean == 4 and profile.record.part.faults[0]["step"] == 2
