"""`python bench/gpu.py` on a CPU and at small size: what a GPU would run first must not fail on a slip of the pen."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def gpu(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module of its own; the folder of tests for GPUs has its name."""
    specification = importlib.util.spec_from_file_location("bench_gpu", repository / "bench" / "gpu.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "bench_gpu", module)  # where its dataclass looks for itself
    specification.loader.exec_module(module)
    return module


def _ran(gpu: ModuleType, path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = gpu.main(["--device", "cpu", "--size", "tiny", "--seconds", "0.01", "--out", str(path), *options])
    return code, json.loads(path.read_text())


def test_the_kernels_are_checked_and_timed(gpu: ModuleType, tmp_path: Path) -> None:
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "build,kernels,bandwidth")
    kernels, timed = document["parts"]["kernels"], document["parts"]["bandwidth"]
    assert code == 0 and not document["failures"] and document["is_gpu"] is False
    assert kernels["checked"] > 20 and not kernels["wrong"] and not kernels["errors"] and not kernels["not_reached"]
    assert timed["of_copy"]["torch.copy_"] == 1 and timed["of_copy"].keys() > {"fp16", "statistics", "mxfp8"}
    assert document["parts"]["build"]["first_call_seconds"].keys() == timed["of_copy"].keys() - {"torch.copy_"}


def test_a_recipe_is_trained_in_every_precision(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PRECISIONS", ("bf16",))
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "rossmann")
    variants = document["parts"]["rossmann"]["variants"]
    assert code == 0 and list(variants) == ["fp32", "torch.amp fp16", "torch.amp bf16", "lowp bf16"]
    assert all(row["failure"] is None and row["step"]["median"] > 0 and row["allocated"] for row in variants.values())
    assert {row["goal"]: row["met"] for row in document["goals"]}.keys() == {
        f"rossmann bf16: {what}, of torch.amp's" for what in ("seconds a step", "allocated", "reserved")
    }


def test_rows_are_alone_and_one_that_fails_or_has_no_time_leaves_the_others(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[str] = []
    real = gpu.time_steps

    def timed(contenders: Any, *rest: Any) -> Any:
        assert len(contenders) == 1
        alive.append(contenders[0].label)
        timers = real(contenders, *rest)
        if contenders[0].label == "torch.amp bf16":
            timers[0].failure = "OutOfMemoryError: 40 GiB"
        assert all(timer.training is None and timer.batch is None for timer in timers)
        return timers

    monkeypatch.setattr(gpu, "PRECISIONS", ("bf16",))
    monkeypatch.setattr(gpu, "time_steps", timed)
    _, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "rossmann")
    variants = document["parts"]["rossmann"]["variants"]
    assert alive == list(variants) == ["fp32", "torch.amp fp16", "torch.amp bf16", "lowp bf16"]
    assert variants["torch.amp bf16"]["allocated"] is None and variants["lowp bf16"]["allocated"]
    assert variants["fp32"]["step"]["relative"] == 1

    monkeypatch.setitem(gpu.SHARES, "rossmann", 0.0)
    _, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "rossmann")
    rows = document["parts"]["rossmann"]["variants"].values()
    assert {row["failure"] for row in rows} == {"no time was left"} and all(row["allocated"] is None for row in rows)


@pytest.mark.parametrize("name", ["bert", pytest.param("unet", marks=pytest.mark.slow)])
def test_the_larger_recipes_are_trained_too(
    name: str, gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gpu.contenders_of  # torch's own 16-bit products take many times as long on a CPU
    monkeypatch.setattr(gpu, "contenders_of", lambda settings, names, torch_amp: real(settings, ("bf16",), False))
    monkeypatch.setattr(gpu, "peaks_of", lambda contender, data, batch: (1000, 2000))
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", name)
    part = document["parts"][name]
    assert code == 0 and list(part["variants"]) == ["fp32", "lowp bf16"] and part["batch"] == 2
    for row in part["variants"].values():
        assert row["failure"] is None and row["step"]["median"] > 0
        assert (row["allocated"], row["reserved"]) == (1000, 2000)


def test_the_goals_are_those_of_torch_amp_and_more_for_bert(gpu: ModuleType) -> None:
    def row(seconds: float, size: int) -> dict[str, Any]:
        return {"step": {"median": seconds}, "allocated": size, "reserved": None}

    found = {
        name: {"variants": {"torch.amp fp16": row(1.0, 100), "lowp fp16": row(0.95, 90)}} for name in ("unet", "bert")
    }
    met = {each["goal"]: each["met"] for each in gpu.goals(found)}
    assert met["unet fp16: seconds a step, of torch.amp's"] and met["unet fp16: allocated, of torch.amp's"]
    assert met["bert fp16: seconds a step, of torch.amp's"] is False  # 1.05 times as fast, and 1.10 is asked for
    assert met["bert fp16: allocated, of torch.amp's"] is False and met["bert fp16: reserved, of torch.amp's"] is None


class CompilationFailed(Exception):
    """As Triton's errors, of no kind that Python or torch has."""


def test_a_part_that_fails_is_told_and_the_others_are_kept(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Any) -> dict[str, Any]:
        assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["build"]  # written before
        raise CompilationFailed("no code for this device")

    monkeypatch.setitem(gpu.PARTS, "kernels", fails)
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "build,kernels,bandwidth")
    assert "in fails" in document["tracebacks"]["kernels"]
    assert (
        code == 1 and document["failures"].keys() == {"kernels"} and document["parts"].keys() == {"build", "bandwidth"}
    )


def test_a_row_that_ends_in_any_error_leaves_the_others(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gpu.time_steps

    def timed(contenders: Any, *rest: Any) -> Any:
        if contenders[0].label == "torch.amp bf16":
            raise CompilationFailed("no code for this device")
        return real(contenders, *rest)

    monkeypatch.setattr(gpu, "PRECISIONS", ("bf16",))
    monkeypatch.setattr(gpu, "time_steps", timed)
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "rossmann")
    variants = document["parts"]["rossmann"]["variants"]
    assert code == 0 and list(variants) == ["fp32", "torch.amp fp16", "torch.amp bf16", "lowp bf16"]
    failed = variants["torch.amp bf16"]
    assert failed["failure"] == "CompilationFailed: no code for this device" and "in timed" in failed["traceback"]
    assert failed["allocated"] is None and failed["step"]["median"] is None and variants["lowp bf16"]["allocated"]


def test_what_is_timed_on_cuda_finds_the_device_at_work(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    queue: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            queue.append("event")

        def synchronize(self) -> None:
            queue.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    found = gpu._seconds(torch.device("cuda"), lambda: queue.append("call"), lambda: queue.append("busy"))
    assert found == 0.002 and queue == ["busy"] * gpu._AHEAD + ["event", "call", "event", "wait"]


def test_a_call_that_is_cut_off_leaves_the_rows_that_were_done(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gpu._alone

    def alone(contender: Any, *rest: Any) -> Any:
        if contender.label == "torch.amp bf16":
            raise KeyboardInterrupt
        return real(contender, *rest)

    monkeypatch.setattr(gpu, "_alone", alone)
    with pytest.raises(KeyboardInterrupt):
        _ran(gpu, tmp_path / "gpu.json", "--parts", "build,rossmann,bert")
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(parts) == ["build", "rossmann"] and list(parts["rossmann"]["variants"]) == ["fp32", "torch.amp fp16"]
    assert parts["rossmann"]["variants"]["torch.amp fp16"]["step"]["relative"] > 0


def test_a_kernel_that_does_not_run_is_told_and_the_others_are_timed(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise CompilationFailed("no code for this device")

    monkeypatch.setattr(gpu.lowp, "statistics", fails)
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "build,bandwidth")
    assert code == 0 and document["parts"]["build"]["errors"] == {
        "statistics": "CompilationFailed: no code for this device"
    }
    assert {"statistics", "mxfp8"} - document["parts"]["bandwidth"]["of_copy"].keys() == {"statistics"}


def test_no_part_begins_when_the_time_is_up(gpu: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--size", "tiny", "--minutes", "0", "--out", str(path)]) == 1
    assert set(json.loads(path.read_text())["failures"].values()) == {"no time was left"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--device cpu --size tiny" in capsys.readouterr().err
