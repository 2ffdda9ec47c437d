"""Gradients released in backward: each parameter is stepped as soon as its gradient is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.errors import InvalidInput, Misuse
from lowp.optim import AdamW


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def test_released_gradients_give_the_weights_of_a_step_after_backward() -> None:
    x = torch.randn(32, 8)
    found = []
    for releases in (False, True):
        model = _model()
        optimizer = AdamW(model.parameters(), storage=None, moments="int8", lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if releases:
            optimizer.release_gradients()
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert all((parameter.grad is None) is releases for parameter in model.parameters())
            optimizer.step()
            scheduler.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_only_one_gradient_is_held_at_a_time() -> None:
    model = _model()
    optimizer = AdamW(model.parameters(), moments="int8", masters="split-8")
    attached = optimizer.release_gradients()
    held = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(one.grad is not None for one in model.parameters()))
        )
    model(torch.randn(4, 8).bfloat16()).sum().backward()
    assert held == [0] * 6
    attached.remove()
    model(torch.randn(4, 8).bfloat16()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_loss_scale_and_released_gradients_exclude_each_other() -> None:
    model = _model()
    precision = lowp.Precision("fp16")
    optimizer = AdamW(model.parameters(), storage=None)
    optimizer.release_gradients()
    with pytest.raises(Misuse, match="leave release_gradients out, or train without a loss scale"):
        precision.prepare(model, optimizer)
    scaler, torch_s = lowp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    torch_s.scale(torch.ones(()))
    for call in (scaler.unscale_, scaler.step, torch_s.step):
        with pytest.raises(Misuse, match="a loss scale looks at all gradients before the first update"):
            call(optimizer)


def test_gradients_that_are_released_cannot_be_accumulated() -> None:
    model = _model()
    optimizer = AdamW(model.parameters(), storage=None)
    attached = optimizer.release_gradients()
    assert optimizer.release_gradients() is attached
    x = torch.randn(4, 8)
    for end in (optimizer.step, optimizer.zero_grad):
        model(x).sum().backward()
        end()
    model(x).sum().backward()
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(Misuse, match=r"twice before optimizer\.step\(\): .* gradients cannot be accumulated\. Call"):
        model(x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    attached.remove()
    for _ in range(2):
        model(x).sum().backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_shared_parameter_and_a_frozen_one_are_stepped_as_without_release() -> None:
    found = []
    for releases in (False, True):
        torch.manual_seed(0)
        embedding, frozen = nn.Embedding(6, 8), nn.Linear(8, 8).requires_grad_(False)
        optimizer: Any = AdamW([*embedding.parameters(), *frozen.parameters()], lr=1e-2, moments="fp8")
        if releases:
            optimizer.release_gradients()
        for _ in range(3):
            optimizer.zero_grad()
            hidden = frozen(embedding(torch.arange(4)))
            nn.functional.linear(hidden, embedding.weight).square().sum().backward()
            optimizer.step()
        found.append([optimizer.master(one) for one in (embedding.weight, frozen.weight)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_region_without_a_loss_scale_trains_with_released_gradients() -> None:
    x, losses = torch.randn(64, 8), []
    precision = lowp.Precision("bf16-storage")
    model = precision.prepare_model(_model())
    optimizer = precision.prepare_optimizer(AdamW(model.parameters(), lr=1e-2, moments="int8", masters="split-8"))
    optimizer.release_gradients()
    for _ in range(30):
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        precision.backward(loss)
        precision.step(optimizer)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_clipping_what_was_released_is_warned_of_once_and_by_the_name_of_who_does_it() -> None:
    model = _model()
    optimizer = AdamW(model.parameters(), storage=None)
    optimizer.release_gradients()

    def train_and_clip() -> None:
        model(torch.randn(4, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    said = r"^train_and_clip calls clip_grad_norm_, which limits nothing: .* Give release_gradients\(max_norm=1\.0\)"
    with pytest.warns(UserWarning, match=said) as caught:
        train_and_clip()
        train_and_clip()
    last_line = max(line for *_, line in train_and_clip.__code__.co_lines() if line is not None)
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, last_line)]


def test_each_released_gradient_is_limited_by_its_own_norm() -> None:
    x, found = torch.randn(32, 8), []
    for releases in (False, True):
        model = _model()
        optimizer = AdamW(model.parameters(), storage=None, lr=1e-2)
        if releases:
            optimizer.release_gradients(max_norm=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for parameter in model.parameters():
                nn.utils.clip_grad_norm_([parameter], 1e-3)
            optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for given in (0, -1.0, True, "1", float("nan")):
        with pytest.raises(InvalidInput, match=r"give a number above 0, such as 1\.0"):
            AdamW(_model().parameters(), storage=None).release_gradients(max_norm=given)  # type: ignore[arg-type]
