"""Devices without fp64, such as Apple's GPUs: the bitwise kernels ask nothing of them but fp32 and integers.

Run on CPU tensors under a mode that refuses fp64, against the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.metal import WithoutFp64
from torch import Tensor, nn

import lowp
from lowp import compat
from lowp.casts import Cast, Overflow, Rounding
from lowp.errors import Unavailable
from lowp.formats import FORMATS, FloatFormat, IntFormat
from lowp.kernels.casts import run
from lowp.kernels.choose import dispatch
from lowp.kernels.numbers import bitwise, floats, packing


@pytest.fixture(autouse=True)
def _no_fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bitwise, "has_fp64", lambda device: False)
    monkeypatch.setattr(compat, "has_fp64", lambda device: False)
    yield


@pytest.mark.parametrize("preset", ["fp16", "bf16-storage", "fp8", "e5m7", "dfp16", "flex16+5"])
def test_steps_of_a_region_are_taken_without_fp64(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "is_on_host", lambda x: False)  # exponents stay on a device
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.LayerNorm(8)
    )
    precision = lowp.Precision(preset)
    model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    with lowp.kernels.use("bitwise"), WithoutFp64():
        for _ in range(2):
            optimizer.zero_grad()
            with precision.autocast():
                loss = F.cross_entropy(model(torch.randn(5, 1, 8, 8)), torch.randint(0, 8, (5,)))
            precision.backward(loss)
            precision.step(optimizer)
    assert bool(loss.isfinite())


def _fits_fp32(element: FloatFormat | IntFormat) -> bool:
    return not bitwise._needs_fp64(Cast(element))


ELEMENTS = [f for f in FORMATS.values() if isinstance(f, (FloatFormat, IntFormat)) and _fits_fp32(f)]
ELEMENTS += [IntFormat("int8", 8), IntFormat("int16", 16, symmetric=True)]


def _numbers() -> Tensor:
    torch.manual_seed(0)
    edges = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, 1e-45, -3e-39, 3.4e38, 448.0, 464.0, 65520.0])
    spread = torch.randn(500) * 2.0 ** torch.randint(-140, 120, (500,))
    return torch.cat([edges, torch.randn(200), spread])


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("rounding", Rounding)
def test_every_cast_has_the_definitions_bits(element: FloatFormat | IntFormat, rounding: Rounding) -> None:
    bits = 8 if rounding in (Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C) else None  # these need a number of them
    cast = Cast(element, rounding, Overflow.SATURATE, random_bits=bits)
    x = _numbers()
    with WithoutFp64():
        found = run.quantize(bitwise, x, cast, None, 7)
    with lowp.kernels.use("reference"):
        assert torch.equal(found.view(torch.int32), lowp.quantize(x, cast, seed=7).view(torch.int32))


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_codes_are_made_and_read_without_fp64(element: FloatFormat | IntFormat) -> None:
    x = _numbers()
    cast = Cast(element)
    if isinstance(element, FloatFormat) and not element.signed:
        x = x.abs()
    with WithoutFp64():
        codes = run.encode(bitwise, x, cast, 0, False) if _has_codes(element, x) else None
        every = _every_code(element)
        values = run.decode(bitwise, every, element, torch.float32)
    with lowp.kernels.use("reference"):
        if codes is not None:
            assert torch.equal(codes.view(torch.uint8), lowp.encode(x, cast).view(torch.uint8))
        expected = lowp.decode(every, element)
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))


def _has_codes(element: FloatFormat | IntFormat, x: Tensor) -> bool:
    return isinstance(element, IntFormat) or element.has_nan or not bool(x.isinf().any())


def _every_code(element: FloatFormat | IntFormat) -> Tensor:
    dtype = packing.code_dtype(element)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    if element.bits <= 16:
        codes = torch.arange(0, 1 << element.bits, 1 if element.bits <= 12 else 11)
    else:
        codes = torch.randint(0, 1 << element.bits, (4096,))
    if isinstance(element, IntFormat):
        codes = codes + element.minimum
        codes = codes[codes <= element.maximum]
    return codes.to(signed).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_statistics_are_taken_in_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(1000).to(dtype)
    x[:3] = torch.tensor([0.0, torch.inf, torch.nan])
    with WithoutFp64():
        histogram, extremes, counts = run.statistics(bitwise, x)
    expected = lowp.statistics(x)
    assert torch.equal(histogram, expected.exponent_histogram) and counts.tolist() == [1, 1, 1]
    assert extremes.tolist() == pytest.approx([expected.maximum, expected.sum_squares], rel=1e-5)


def test_shared_scales_are_computed_on_the_cpu_for_a_device_without_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run, "home", lambda device: (asked.append(device.type), torch.device("cpu"))[1])
    x = torch.randn(4, 64)
    found = run.quantize(bitwise, x, lowp.casts.parse("mxfp8"), None, 0)
    assert asked == ["cpu"] and torch.equal(found, lowp.quantize(x, "mxfp8"))


def test_a_device_that_does_not_exist_here_has_no_fp64_and_its_numbers_go_to_the_cpu() -> None:
    assert floats.home(torch.device("mps")) == torch.device("cpu") or torch.backends.mps.is_available()
    assert floats.home(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_sums_under_shared_exponents_are_refused_in_words_where_there_is_no_fp64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(floats, "has_fp64", lambda device: False)
    with pytest.raises(Unavailable, match="under shared exponents needs fp64 for its exact sums, which cpu"):
        with lowp.autocast("flex16+5"):  # what is infinite is no integer on a CPU
            torch.full((2, 3), torch.inf) @ torch.ones(3, 2)
