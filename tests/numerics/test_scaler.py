"""Gradients that torch's scaler silently loses are kept by a scale from a profile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import lowp

SMALL = 2.0**-36  # the loss is so small, as one of a probability or of a mean over many elements is


def trained(scaler: Any, steps: int = 60) -> float:
    """Fit a line in fp16 with a very small loss; return the model's final distance from it."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = x @ torch.randn(8, 1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-30)
    for _ in range(steps):
        optimizer.zero_grad()
        with lowp.autocast("fp16"):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y) * SMALL
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x), y))


def profile_of_the_same() -> Any:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = x @ torch.randn(8, 1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-30)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        (nn.functional.mse_loss(model(x), y) * SMALL).backward()
        optimizer.step()
    return profile


def test_torch_s_scale_loses_small_gradients_silently_and_one_from_a_profile_does_not() -> None:
    torch_s = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    lost = trained(torch_s)
    assert torch_s.get_scale() == 2.0**10, "no step was skipped, nothing was said"
    scaler = profile_of_the_same().grad_scaler("cpu")
    kept = trained(scaler)
    assert scaler.get_scale() >= 2.0**30
    assert lost > 1.0 and kept < 0.1, (lost, kept)


def test_where_modules_were_left_out_the_scaler_begins_as_torch_s_or_below() -> None:
    profile = profile_of_the_same()
    assert profile.grad_scaler("cpu").get_scale() > 2.0**16
    profile.models.modules["left out"] = nn.Linear(1, 1)
    profile.schedule.take_turns()
    profile.budget.share = 0.03
    assert profile.record.is_partial and profile.grad_scaler("cpu").get_scale() == 2.0**16


def test_the_gradients_of_activations_move_a_scale_that_follows_underflow() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for watched in (False, True):
        scaler = lowp.GradScaler("cpu", init_scale=1.0, target_underflow=1e-3, sample_interval=1)
        with lowp.profile(model, optimizer, scaler=scaler if watched else None, max_overhead=None):
            # each activation has a gradient of 2^-27, which fp16 flushes; that of the weight is their sum
            loss = (model(torch.ones(4096, 8)) * 2.0**-27).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == 1.0 < scales[1]
