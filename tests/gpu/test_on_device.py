"""What a GPU is asked first by ``pytest -m gpu``; the same bodies run on the CPU in every run of the tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.int16.test_device import CASES, PRESETS, stepped
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat

ELEMENTS = [name for name, row in FORMATS.items() if isinstance(row, FloatFormat) and row.bits <= 32]


@pytest.mark.parametrize("way", ["", ":stochastic"])
def test_casts_have_the_definitions_bits(device: str, way: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2000) * 2.0 ** torch.randint(-40, 40, (2000,))
    for name in ELEMENTS:
        found = lowp.quantize(x.to(device), name + way, seed=3).cpu()
        with kernels.use("reference"):
            assert torch.equal(found.nan_to_num(), lowp.quantize(x, name + way, seed=3).nan_to_num()), name


SHARED = ["mxfp8", "mxfp6", "mxfp4", "nvfp4", "int8", "int4", "e4m3fn@fp32/row", "dfp16", "mxfp8:stochastic"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_a_dtype_and_under_shared_scales_have_the_definitions_bits(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(8, 64) * 2.0 ** torch.randint(-8, 8, (8, 64))).to(dtype)
    checked = 0
    for name in ["e4m3fn", "e5m2", "e4m3fn:stochastic", *SHARED]:
        try:
            found = lowp.quantize(x.to(device), name, seed=3)
        except InvalidInput:  # 16 bits do not hold every result
            assert dtype is not torch.float32
            continue
        kept = lowp.encode(x.to(device), name, seed=3)
        with kernels.use("reference"):
            expected, codes = lowp.quantize(x, name, seed=3), lowp.encode(x, name, seed=3)
        assert found.dtype is dtype and torch.equal(found.cpu(), expected), name
        if isinstance(codes, Tensor):
            assert torch.equal(kept.cpu().view(torch.uint8), codes.view(torch.uint8)), name
        else:
            payloads = (one.payload.cpu().view(torch.uint8) for one in (kept, codes))
            assert torch.equal(*payloads) and torch.equal(lowp.dequantize(kept).cpu(), lowp.dequantize(codes)), name
        checked += 1
    assert checked >= 7


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

    # torch's own steps fuse products and sums on a CPU: units in the last place of a weight
    assert torch.allclose(stepped(device), stepped("cpu"), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", CASES)
def test_products_of_integers_have_the_bits_of_a_cpu(device: str, case: str, preset: str) -> None:
    for found, expected in zip(stepped(case, preset, device), stepped(case, preset), strict=True):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("shape", [(16, 32), (3, 5, 32), (7, 20)])
def test_fp8_by_the_devices_own_product_is_near_the_emulated_one(device: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(shape[-1], 9).to(device), torch.randn(shape).to(device)

    def stepped() -> list[Tensor]:
        one = x.clone().requires_grad_()
        layer.zero_grad()
        with lowp.autocast("fp8"):
            result = layer(one)
        result.square().sum().backward()
        return [result.detach(), *(y.grad for y in (one, layer.weight, layer.bias) if y.grad is not None)]

    found = stepped()
    with kernels.use("bitwise"):
        expected = stepped()
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
