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
from lowp import kernels
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


WITHOUT = "the processor reports no AVX512-BF16, AMX-BF16 or Arm BF16"
AVX, AMX, ARM = ["AVX512-BF16"], ["AVX512-BF16", "AMX-BF16"], ["Arm BF16"]
SLOW = "without AMX Intel's bf16 products take twice the time of fp32's"


@pytest.mark.parametrize(
    ("instructions", "capability", "environment", "is_intel", "but"),
    [
        ([], "AVX512", {}, False, None),
        (AVX, "AVX512", {}, False, ""),
        (AVX, "AVX512_VNNI", {}, False, ""),
        (AMX, "AVX512", {}, False, ""),
        (AVX, "AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}, False, "torch is held to AVX2"),
        (AVX, "DEFAULT", {}, False, "torch is held to DEFAULT"),
        (AVX, "AVX512", {"ATEN_CPU_CAPABILITY": "default"}, False, ""),  # read by torch, which has reported more
        (AVX, "AVX512", {"ONEDNN_MAX_CPU_ISA": "avx2"}, False, "ONEDNN_MAX_CPU_ISA holds oneDNN to AVX2"),
        (AMX, "AVX512", {"DNNL_MAX_CPU_ISA": "AVX"}, False, "DNNL_MAX_CPU_ISA holds oneDNN to AVX"),
        (AVX, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, False, ""),
        (AMX, "AVX512", {}, True, ""),
        (AMX, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True, ""),
        (AMX, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True, f"is held from AMX, and {SLOW}"),
        (AVX, "AVX512", {}, True, SLOW),
        (ARM, "SVE256", {}, False, ""),
        (ARM, "DEFAULT", {}, False, ""),
        (ARM, "DEFAULT", {"ATEN_CPU_CAPABILITY": "Default"}, False, "torch is held to DEFAULT"),
        (ARM, "SVE256", {"ATEN_CPU_CAPABILITY": "sve256"}, False, ""),
    ],
    ids=str,
)
def test_what_the_processor_reports_and_torch_and_onednn_are_held_to_decides(
    instructions: list[str], capability: str, environment: dict[str, str], is_intel: bool, but: str | None
) -> None:
    found, words = hardware._decided(instructions, capability, environment, is_intel)
    has = f"the processor reports {' and '.join(instructions)}"
    assert (found, words) == (but == "", WITHOUT if but is None else f"{has}, but {but}" if but else has)


def test_a_torch_without_onednn_leaves_nothing_to_the_processor(
    reports_amx: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hardware.tiles_of_bytes() and hardware.products_of_bf16()[0]
    hardware.products_of_bf16.cache_clear(), hardware.tiles_of_bytes.cache_clear()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert hardware.products_of_bf16() == (False, "this torch was built without oneDNN")
    assert hardware.tiles_of_bytes() is False


def test_bytes_are_left_to_tiles_that_the_processor_reports_and_onednn_may_use(
    reports_amx: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reported, limit, expected in ((True, "", True), (False, "", False), (True, "AVX2", False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda reported=reported: {"amx_int8": reported})
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
        hardware.tiles_of_bytes.cache_clear()
        assert hardware.tiles_of_bytes() is expected


def test_whose_threads_compute_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if "cpu" not in kernels.available():
        pytest.skip("the C++ library was not built")
    told = {True: "the library's own", False: "torch's OpenMP threads; other: LOWP_THREADS=own in the environment"}
    for own, words in told.items():
        monkeypatch.setattr(cpu, "uses_own_threads", lambda own=own: own)
        assert choices()["threads"] == words


def test_fp16_is_multiplied_by_no_cpu_and_both_by_gpus() -> None:
    assert not hardware.multiplies("cpu", torch.float16) and not hardware.multiplies("xpu", torch.bfloat16)
    assert hardware.multiplies("cuda", torch.float16) and hardware.multiplies("cuda", torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("native", "torch's own, asked for; other: LOWP_USE=cpu in the environment, or with lowp.kernels.use('cpu')"),
        ("bitwise", "fp32 products of rounded operands, asked for, rounded once; other: LOWP_USE=native in the "),
        ("reference", "sums in fp64, asked for; other: with lowp.kernels.use('native')"),
    ],
)
def test_a_choice_that_was_asked_for_is_told_as_such(dtype: str, way: str, told: str) -> None:
    with kernels.use(way):
        found = choices()
        assert found[f"{dtype} products"].startswith(told)
        assert found["int16 products"].startswith("torch's fp64 products, which are exact; other: with lowp.kernels")
    if "cpu" in kernels.available():
        assert choices()["int16 products"].startswith("the C++ library; other: with lowp.kernels.use('bitwise')")
        assert choices()["casts"].startswith("the C++ library; other: ") and "C++ library" in choices()


@pytest.mark.skipif("cpu" not in kernels.available(), reason="needs the C++ library")
def test_the_instruction_set_is_told_with_why_and_what_else_there_is() -> None:
    *_, last = having = cpu.available()
    for asked, why in ((None, "the best this processor has"), (last, "asked for")):
        chosen = cpu.select(asked)
        assert choices()["C++ library"].startswith(f"{chosen}, {why}, of {', '.join(having)}; other: LOWP_CPU_ISA=")
    assert chosen == last


def test_without_the_library_its_absence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: None)
    told = choices()
    assert told["casts"].startswith("torch's integer operations (bitwise): the C++ library was not built; the bits")
    assert not {"C++ library", "threads"} & told.keys()
