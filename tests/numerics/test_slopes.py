"""Slopes of activations: the predicted change of the loss if one of them is rounded, from a run in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp import presets
from lowp.kernels.steps.spectra import sampled, slope_of
from lowp.numerics.policies import sensitivities
from lowp.numerics.record import Key, Record

HIDDEN = Key("0", "linear", "output", "forward")
READ = Key("2", "linear", "input", "forward")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 8))


def loss_of(model: Callable[[Tensor], Tensor], seed: int, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the loss on one batch, with `change` applied to the output of the first layer."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 16, generator=generator), torch.randint(8, (64,), generator=generator)
    if change is None:
        return nn.functional.cross_entropy(model(x), y)
    assert isinstance(model, nn.Sequential)
    return nn.functional.cross_entropy(model[2](model[1](change(model[0](x)))), y)


def recorded(model: Any, steps: int = 1, run: Callable[[Tensor], Tensor] | None = None) -> Record:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(run or model, step).backward()
            optimizer.step()
    return profile.record


def test_a_slope_is_the_squares_of_the_gradients_by_the_exponent_of_their_numbers() -> None:
    x = torch.tensor([0.0, 1.0, -1.5, 0.25, float("nan"), 2.0**-100])
    gradient = torch.tensor([1.0, 2.0, 4.0, 8.0, 1.0, float("inf")])
    found = slope_of(x, gradient, scale=2.0)
    expected = {0: 0.25, 70: 1.0 + 4.0, 68: 16.0, 95: 0.25}
    assert {int(row): float(found[row]) for row in np.flatnonzero(found)} == expected


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.transpose(1, 2), lambda x: x[:, ::2]])
def test_the_numbers_that_are_kept_are_at_the_same_places_whatever_the_memory_is_like(view: Any) -> None:
    x = view(torch.arange(12 * 32 * 40.0).reshape(12, 32, 40))
    found = sampled(x, 500)
    assert torch.equal(found, sampled(x.contiguous(), 500)) and len(found) == 500
    assert torch.equal(sampled(x[0, :2, :3], 500), x[0, :2, :3].reshape(-1))
    for size in (2, 4, 8):  # each channel is met as often as the others, whatever their number
        met = torch.bincount(sampled(torch.arange(size).repeat(4096 // size), 500).long(), minlength=size)
        assert met.min() > 0.8 * 500 / size


@pytest.mark.parametrize("name", ["bf16", "e4m3fn", "e5m2", "i8s@fp32/tensor"])
def test_the_loss_moves_as_far_as_predicted_where_one_activation_alone_is_rounded(name: str) -> None:
    model, steps = network(), 60
    policy = lowp.Policy((lowp.Rule.of("linear", where="0", output=name),))
    predicted = sensitivities(recorded(model, 9), policy)[str(HIDDEN)]
    with torch.no_grad():
        moved = [
            float(loss_of(model, seed, lambda x: lowp.quantize(x, name)).double() - loss_of(model, seed).double())
            for seed in range(steps)
        ]
    assert predicted == pytest.approx(float(np.sqrt(np.mean(np.square(moved)))), rel=0.5)


def test_slopes_are_without_the_loss_scale_and_the_same_where_a_checkpoint_computes_again() -> None:
    plain = recorded(network()).part.slopes
    model = network()
    again = recorded(model, run=lambda x: checkpoint(model, x, use_reentrant=False)).part.slopes
    assert plain.keys() == again.keys() and {HIDDEN, READ} <= set(plain)
    for key in plain:
        assert np.allclose(plain[key], again[key])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = lowp.GradScaler("cpu", init_scale=2.0**12)
    with lowp.profile(model, optimizer, scaler=scaler, max_overhead=None) as profile:
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
    for key in plain:
        assert np.allclose(plain[key], profile.record.part.slopes[key])


@pytest.mark.parametrize("precision", ["fp16", "flex16+5", "nvfp4"])
def test_in_a_region_activations_have_the_slopes_that_they_have_without(precision: str) -> None:
    plain = recorded(network(), 2).part.slopes
    model, policy = network(), presets.PRESETS[precision].policy

    def run(x: Tensor) -> Tensor:
        with lowp.autocast(policy):
            y: Tensor = model(x)
            return y

    found = recorded(model, 2, run).part.slopes
    assert {HIDDEN, READ} <= found.keys() == plain.keys()
    for key in plain:
        assert found[key].sum() == pytest.approx(plain[key].sum(), rel=0.2)


def test_in_a_region_what_ran_without_gradients_too_has_no_slope_and_nor_has_what_attention_reads() -> None:
    model, region = network(), lowp.autocast(presets.PRESETS["bf16"].policy)

    def run(x: Tensor) -> Tensor:
        with region:
            y = model(x)
            with torch.no_grad():
                model(torch.zeros_like(x))
            return nn.functional.scaled_dot_product_attention(*[y.view(4, 16, 8)] * 3).view(64, 8)

    found = recorded(model, run=run).part.slopes
    assert {str(key) for key in found} == {str(Key("", "scaled_dot_product_attention", "output", "forward"))}


def test_slopes_are_saved_merged_and_named_after_their_model(tmp_path: Path) -> None:
    record = recorded(network(), 2)
    record.save(tmp_path / "run.json")
    again = Record.load(tmp_path / "run.json")
    assert again.document() == record.document()
    assert np.allclose(record.merge(again).part.slopes[HIDDEN], 2 * record.part.slopes[HIDDEN])
    named = record.part.renamed("model").slopes
    assert Key("model.0", "linear", "output", "forward") in named and len(named) == len(record.part.slopes)
    document = json.loads((tmp_path / "run.json").read_text())
    document["slopes"][0]["energy"][0] = -1.0
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(lowp.InvalidInput, match="invalid slopes of activations"):
        Record.load(tmp_path / "run.json")


def test_what_a_policy_rounds_has_a_sensitivity() -> None:
    record = recorded(network())
    fp8 = sensitivities(record, presets.PRESETS["fp8"].policy)
    assert set(fp8) == {"0.weight", "2.weight", str(READ)}, "no gradient arrives at the input of the model"
    half = sensitivities(record, presets.PRESETS["fp16"].policy)
    assert {str(HIDDEN), "2 linear output"} < set(half) and half[str(READ)] < fp8[str(READ)]
