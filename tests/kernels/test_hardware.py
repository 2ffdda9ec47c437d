"""The choices for a processor that reports AMX, tested on any processor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.kernels import cpu
from lowp.kernels.choose import hardware
from lowp.kernels.choose.choices import choices


@pytest.fixture
def reports_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reported = {**torch.cpu.get_capabilities(), "avx512_bf16": True, "amx_bf16": True, "amx_int8": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: reported)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu, "asked", lambda: "")
    for name in hardware._LIMITS:
        monkeypatch.delenv(name, raising=False)
    found = hardware.products_of_bf16, hardware.tiles_of_bytes
    for one in found:
        one.cache_clear()
    yield
    for one in found:
        one.cache_clear()


def test_bf16_is_multiplied_by_the_processor(reports_amx: None) -> None:
    assert hardware.products_of_bf16() == (True, "the processor reports AVX512-BF16 and AMX-BF16")
    assert choices()["bf16 products"].startswith("torch's own, the processor reports AVX512-BF16 and AMX-BF16")
    layer, x = nn.Linear(40, 33), torch.randn(8, 40)
    with lowp.autocast("bf16"):
        found = layer(x)
    found.float().sum().backward()
    assert torch.allclose(found.float(), layer(x), atol=0.05) and layer.weight.grad is not None


def test_intels_avx512_alone_is_slower_than_fp32_and_fp16_is_emulated_with_the_reason(
    reports_amx: None, monkeypatch: pytest.MonkeyPatch, lowp: Callable[..., Any]
) -> None:
    reported = {"avx512_bf16": True, "avx512_fp16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: reported)
    for is_intel in (True, False):
        monkeypatch.setattr(hardware, "_is_intel", lambda is_intel=is_intel: is_intel)
        hardware.products_of_bf16.cache_clear()
        assert hardware.multiplies("cpu", torch.bfloat16) is not is_intel
        told = " ".join(lowp("--version", "--verbose").out.split())
        assert ("bf16 products: fp32 products of rounded operands, the processor reports AVX512-BF16, but" in told) is (
            is_intel
        )
        assert "fp16 products: fp32 products of rounded operands, the processor reports AVX512-FP16, with" in told
    reported.clear()
    assert "torch sums no fp16 products faster than fp32's" in choices()["fp16 products"]


def test_the_maker_of_the_processor_is_read_where_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "Path", lambda name: tmp_path / "absent")
    for told, expected in (("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", True), ("AuthenticAMD", False)):
        monkeypatch.setattr(hardware.platform, "processor", lambda told=told: told)
        assert hardware._is_intel() is expected
    (tmp_path / "absent").write_text("vendor_id\t: GenuineIntel\n")
    assert hardware._is_intel()


@pytest.mark.skipif(bool(set(hardware._LIMITS) & set(os.environ)), reason="oneDNN may be held to wrong sums")
def test_bytes_are_multiplied_by_the_processor_with_the_same_sums(
    reports_amx: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 33)), torch.randn(8, 40)
    found = lowp.quantize_model(model, "int8", [x])(x)
    monkeypatch.setattr("lowp.kernels.packed.byte_products.tiles_of_bytes", lambda: False)
    assert torch.equal(found, lowp.quantize_model(model, "int8", [x])(x))


@pytest.mark.parametrize(
    ("capability", "limit", "expected"),
    [
        ("AVX512", "", True),
        ("AVX512", "ALL", True),
        ("AVX512", "avx512_core_amx", True),
        ("AVX512", "AVX10_1_512", False),
        ("AVX512", "AVX512_CORE_BF16", False),
        ("AVX512", "AVX2", False),
        ("AVX2", "", False),
    ],
)
def test_tiles_are_used_where_torch_and_onednn_may(capability: str, limit: str, expected: bool) -> None:
    assert hardware._uses_tiles(capability, {"ONEDNN_MAX_CPU_ISA": limit}) is expected
    assert hardware._uses_tiles(capability, {"DNNL_MAX_CPU_ISA": limit}) is expected
