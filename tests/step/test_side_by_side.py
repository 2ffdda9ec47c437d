"""Every weight and scale beside torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step.cases import INF, NAN, batches, loss_of, make_model
from torch import nn

from lowp.kernels.choose import hardware
from lowp.step import GradScaler, gradients

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "fused Adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


def random_training(scaler_kind: Callable[..., torch.amp.GradScaler], kind: str, seed: int) -> list[Any]:
    """Return scale, growth tracker and parameters after each of 20 steps with overflows, clipping and manual scales."""
    choose = random.Random(seed)
    model = make_model(seed)
    optimizer = KINDS[kind](model.parameters())
    scaler = scaler_kind(
        "cpu",
        init_scale=2.0 ** choose.randint(0, 20),
        growth_interval=choose.randint(1, 4),
        growth_factor=choose.choice([2.0, 1.3]),
        backoff_factor=choose.choice([0.5, 0.3]),
    )
    trace: list[Any] = []
    for batch in batches(20):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if choose.random() < 0.2:
            model[choose.randint(0, 1)].weight.grad[0, 0] = choose.choice([INF, NAN])
        if choose.random() < 0.5:
            scaler.unscale_(optimizer)
            if choose.random() < 0.5:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update(choose.choice([8.0, 1024.0]) if choose.random() < 0.1 else None)
        parameters = [parameter.detach().tolist() for parameter in model.parameters()]
        trace.append((scaler.get_scale(), scaler._get_growth_tracker(), parameters))
    return trace


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_and_scale_equals_torchs_to_the_bit(kind: str) -> None:
    for seed in range(8):
        assert random_training(GradScaler, kind, seed) == random_training(torch.amp.GradScaler, kind, seed)


@pytest.mark.parametrize("value", [-5.0, float("-inf")])
def test_negative_gradients_count_by_their_magnitude(value: float) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=1.0)
    scaler.scale(weight.sum())
    weight.grad = torch.tensor([-2.0, value, float("-inf")])
    scaler.step(optimizer)
    assert not scaler.stepped
    assert scaler.nonfinite is not None
    assert scaler.nonfinite.kind == "inf"
    assert scaler.nonfinite.maximum == (5.0 if value == -5.0 else 2.0)
    sizes = gradients.largest(gradients.by_kind([gradients.Gradient(torch.tensor([-7.0, 3.0]), 0)]), 1, weight.device)
    assert sizes.tolist() == [7.0]


@pytest.mark.parametrize(
    "options", [{}, {"hysteresis": 2, "ceiling": 4096.0}, {"target_underflow": 1e-3}, {"dynamic": False}]
)
def test_the_host_decides_as_a_device_does(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[object]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=512.0, growth_interval=3, **options)
        scaler.watch(model)
        seen: list[object] = []
        for number in range(30):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 3)).square().mean()).backward()
            if number % 7 in (2, 3):
                model[0].weight.grad.view(-1)[number % 9] = (INF, NAN)[number % 2]
            if number % 5 == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            stepped = bool(scaler.stepped)
            scaler.update()
            seen += [stepped, scaler.state_dict(), str(scaler.nonfinite), scaler.guard.skipped_steps]
        return [*seen, *(one.tolist() for one in model.state_dict().values())]

    here = run()
    monkeypatch.setattr(hardware, "is_on_host", lambda x: False)
    assert here == run()
