"""Training on devices without fp64, such as Apple's GPUs: regions, loss scales and optimizers.

Run on CPU tensors under a mode that refuses fp64, and ops without a kernel there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.metal import WithoutFp64, has_kernel
from step.cases import INF
from torch import Tensor, nn

import lowp
from lowp import compat
from lowp.kernels.choose import dispatch, hardware
from lowp.kernels.numbers import bitwise, floats, scaled
from lowp.ops import direct
from lowp.presets import PRESETS


@pytest.fixture(autouse=True)
def _as_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tensors of the CPU be as far away as a device's, which has no fp64."""
    for module in (compat, bitwise, floats, scaled):
        monkeypatch.setattr(module, "has_fp64", lambda device: False)
    monkeypatch.setattr(dispatch, "is_on_host", lambda x: False)
    monkeypatch.setattr(hardware, "is_on_host", lambda x: False)
    monkeypatch.setattr(direct, "chosen", lambda: "triton")
    with lowp.kernels.use("bitwise"):
        yield


class Words(nn.Module):
    """An embedding, a layer of a transformer, a convolution over places, and scores of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.over = nn.Sequential(nn.Conv1d(16, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.BatchNorm1d(8))
        self.scores = nn.Linear(8, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Scores [N, 2] of words [N, length]."""
        known = self.layer(self.embed(words)).transpose(1, 2)
        scores: Tensor = self.scores(self.over(known).softmax(1).mean(2))
        return scores


@pytest.mark.skipif(
    not has_kernel("native_group_norm_backward"), reason="group norms have no gradient there before torch 2.13"
)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_transformer_takes_steps_in_every_preset(preset: str) -> None:
    torch.manual_seed(0)
    precision = lowp.Precision(preset)
    model = Words()
    model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    words, labels = torch.randint(0, 20, (3, 7)), torch.arange(3) % 2
    with WithoutFp64() as seen:
        for _ in range(2):
            optimizer.zero_grad()
            with precision.autocast():
                loss = F.cross_entropy(model(words), labels)
            precision.backward(loss)
            precision.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            precision.step(optimizer)
    assert (bool(loss.isfinite()) or preset == "fp16-naive") and len(seen.seen) > 20


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "torch's AdamW": lambda p: torch.optim.AdamW(p),
    "torch's AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "torch's SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW, split": lambda p: lowp.optim.AdamW(p),
    "AdamW, fp32 masters": lambda p: lowp.optim.AdamW(p, split=False),
    "AdamW, stochastic": lambda p: lowp.optim.AdamW(p, split=False, masters="stochastic", moments="bf16"),
    "AdamW, fp32": lambda p: lowp.optim.AdamW(p, storage=None),
    "SGD, split": lambda p: lowp.optim.SGD(p, lr=0.1, momentum=0.9),
    "MasterWeights, bf16": lambda p: lowp.MasterWeights(torch.optim.AdamW(p), "bf16"),
    "MasterWeights, fp16": lambda p: lowp.MasterWeights(torch.optim.AdamW(p), "fp16"),
    "MasterWeights, e4m3fn": lambda p: lowp.MasterWeights(torch.optim.AdamW(p, lr=0.3), "e4m3fn"),
    "MasterWeights, stochastic": lambda p: lowp.MasterWeights(torch.optim.AdamW(p), kind="stochastic"),
    "MasterWeights, split": lambda p: lowp.MasterWeights(torch.optim.AdamW(p), "bf16", kind="split"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_skips_and_steps_again_under_a_loss_scale(name: str) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (6,))]
    optimizer, scaler = OPTIMIZERS[name](parameters), lowp.GradScaler("cpu", init_scale=1024.0)
    before, stepped = [one.detach().clone() for one in parameters], list[bool]()
    for number in range(3):
        with WithoutFp64():
            scaler.scale(torch.ones(()))
            for one in parameters:
                one.grad = torch.randn(one.shape).to(one.dtype) * 1024
            if number == 1:
                parameters[0].grad[1, 2] = INF  # type: ignore[index]
            if number:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        stepped.append(bool(scaler.stepped))
    assert stepped == [True, False, True] and scaler.get_scale() == 512.0
    assert scaler.nonfinite is not None and scaler.nonfinite.kind == "inf"
    for one, start in zip(parameters, before, strict=True):
        assert bool(one.isfinite().all()) and not torch.equal(one, start.to(one.dtype))


@pytest.mark.parametrize("options", [{"hysteresis": 2}, {"target_underflow": 1e-3}, {"dynamic": False}])
def test_every_way_of_a_loss_scale_is_decided_there(options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = lowp.GradScaler("cpu", init_scale=512.0, growth_interval=2, **options)
    for number in range(6):
        with WithoutFp64():
            weight.grad = None
            scaler.scale((weight * torch.randn(64)).sum()).backward()
            if number == 4:
                weight.grad[3] = INF  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
    assert bool(weight.isfinite().all()) and scaler.guard.skipped_steps == 1


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e5m2", "e5m7", "bf16-tpu", "e4m3fn:stochastic"])
def test_the_public_casts_are_made_there(name: str) -> None:
    x = torch.randn(40)
    with WithoutFp64():
        found, codes = lowp.quantize(x, name, seed=1), lowp.encode(x, name, seed=1)
        back, seen = lowp.decode(codes, lowp.casts.parse(name).format), lowp.statistics(x)
    with lowp.kernels.use("reference"):
        assert torch.equal(found, lowp.quantize(x, name, seed=1)) and torch.equal(back, found)
        assert torch.equal(seen.exponent_histogram, lowp.statistics(x).exponent_histogram)
