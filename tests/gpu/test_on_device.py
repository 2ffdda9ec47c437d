"""What a GPU is asked first by ``pytest -m gpu``; the same bodies run on the CPU in every run of the tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowp
from lowp import kernels
from lowp.formats import FORMATS, FloatFormat


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Return the device that a body runs on."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return name


ELEMENTS = [name for name, row in FORMATS.items() if isinstance(row, FloatFormat) and row.bits <= 32]


@pytest.mark.parametrize("way", ["", ":stochastic"])
def test_casts_have_the_definitions_bits(device: str, way: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2000) * 2.0 ** torch.randint(-40, 40, (2000,))
    for name in ELEMENTS:
        found = lowp.quantize(x.to(device), name + way, seed=3).cpu()
        with kernels.use("reference"):
            assert torch.equal(found.nan_to_num(), lowp.quantize(x, name + way, seed=3).nan_to_num()), name


def test_codes_and_statistics_are_those_of_the_definition(device: str) -> None:
    x = torch.randn(1000)
    codes = lowp.encode(x.to(device), "e4m3fn")
    assert torch.equal(codes.cpu(), lowp.encode(x, "e4m3fn"))
    assert torch.equal(lowp.decode(codes, "e4m3fn").cpu(), lowp.quantize(x, "e4m3fn"))
    assert torch.equal(lowp.statistics(x.to(device)).exponent_histogram.cpu(), lowp.statistics(x).exponent_histogram)


@pytest.mark.parametrize("preset", ["fp32", "fp16", "bf16", "bf16-storage", "fp8", "flex16+5"])
def test_a_network_learns(device: str, preset: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    precision = lowp.Precision(preset)
    model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with precision.autocast():
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
        precision.backward(loss)
        precision.step(optimizer)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("make", [lowp.optim.AdamW, lowp.optim.SGD])
def test_an_optimizer_of_lowps_takes_the_steps_that_it_takes_on_a_cpu(device: str, make: Any) -> None:
    def stepped(where: str) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(300, 300).to(where)
        optimizer = make(layer.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            layer.weight.grad = torch.randn(300, 300, generator=generator).to(where, layer.weight.dtype)
            optimizer.step()
        return optimizer.master(layer.weight).cpu()  # type: ignore[no-any-return]

    assert torch.allclose(stepped(device), stepped("cpu"), rtol=1e-6, atol=1e-9)
