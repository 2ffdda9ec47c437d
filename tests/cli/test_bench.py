"""lowp bench: tables, files, a picture, a real Ctrl-C, and errors about bad input."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest

Lowp = Callable[..., Any]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowp.benchmarking.largest_batch.process_growth", lambda *_: None)


@pytest.mark.usefixtures("without_processes")
def test_the_tables_name_every_row_and_the_files_are_written(lowp: Lowp) -> None:
    result = lowp(
        "bench", "digits", "--precision", "fp16", "--seconds", "0.05", "--memory", "1MB", "--batch", "64", "--notes"
    )
    assert result.code == 0, result.err
    assert result.out.endswith("written: bench-digits.json, bench-digits.png\n")
    assert "digits: memory of lowp fp16" in result.err
    rows = [
        line.split("  ")[0].strip() for line in result.out.splitlines() if line.startswith(("fp32", "torch", "lowp "))
    ]
    assert rows == ["fp32", "torch.amp fp16", "torch.amp bf16", "lowp fp16"] * 3  # times, largest batch, estimates
    for words in (
        "weights",
        "allocated",
        "slack",
        "ESTIMATES",
        "Horowitz",
        "TF32:",
        "largest batch that fits into 977 KiB",
    ):
        assert words in result.out
    document = json.loads(Path("bench-digits.json").read_text())
    assert document["kind"] == "benchmark" and document["complete"] and document["plan"]["memory"] == 10**6
    assert document["recipes"][0]["settings"]["batch"] == 64
    memory = [row["memory"] for row in document["recipes"][0]["variants"]]
    assert all(one["reserved"] is None or one["slack"] == one["reserved"] - one["allocated"] for one in memory)
    assert Path("bench-digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("without_processes")
def test_several_recipes_stand_beside_what_was_published(lowp: Lowp) -> None:
    options = ("--precision", "bf16", "--no-torch-amp", "--seconds", "0.02", "--plot", "two.svg", "--threads", "1")
    result = lowp("bench", "rossmann", "digits", *options)
    assert result.code == 0 and result.out.endswith("written: bench.json, two.svg\n")
    assert "10m10 → 10m55" in result.out and "1.07x" in result.out
    assert "A. Bilogur" in result.out and "\n torch.amp fp16" not in result.out
    assert "published, not measured here: whole trainings in torch.amp" in Path("two.svg").read_text()
    names = [subject["recipe"]["name"] for subject in json.loads(Path("bench.json").read_text())["recipes"]]
    assert names == ["rossmann", "digits"]


@pytest.mark.usefixtures("without_processes")
def test_without_matplotlib_the_json_is_written_and_it_says_so(lowp: Lowp, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest)
    )
    result = lowp("bench", "digits", "--precision", "fp32", "--no-torch-amp", "--seconds", "0.02")
    assert result.code == 0 and "no picture: matplotlib is not installed" in result.out
    assert [path.name for path in Path().iterdir()] == ["bench-digits.json"]


def test_ctrl_c_keeps_what_was_measured() -> None:
    arguments = ["digits", "--no-torch-amp", "--precision", "fp16,bf16,dfp16", "--seconds", "0.1"]
    with forked.start("-m", "lowp", "bench", *arguments) as process:
        seen = ""
        for line in process.stderr:
            seen += line
            if line.startswith("digits: memory of fp32"):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
                break
        seen += process.stderr.read()
        printed = process.stdout.read()
    assert process.returncode == 130, seen
    assert "Traceback" not in seen and "interrupted; what was measured is in bench-digits.json" in seen
    document = json.loads(Path("bench-digits.json").read_text())
    rows = document["recipes"][0]["variants"]
    assert not document["complete"] and len(rows) == 4 and "memory" in rows[0] and "memory" not in rows[3]
    assert not printed or "lowp dfp16" in printed  # nothing where the machine took longer to end than it is given
    assert not Path("bench-digits.png").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("digts",), "unknown recipe 'digts'; did you mean digits?"),
        (("digits", "rosman"), "unknown recipe 'rosman'; did you mean rossmann?"),
        (("digits", "--precision", "fp16,fp61"), "unknown precision 'fp61'; did you mean"),
        (("digits", "--memory", "2 gigs"), "--memory '2 gigs' is not a size: give a number and a unit, such as 2GB"),
        (("digits", "--memory", "0GB"), "--memory '0GB' is not possible: give at least one byte"),
        (("digits", "--seconds", "0"), "--seconds 0: give seconds above 0, such as 3"),
        (("digits", "--threads", "0"), "--threads 0: give 1 or more"),
        (("digits", "--batch", "0"), "batch 0: give 1 or more"),
        (("digits", "--size", "ful"), "unknown size of digits 'ful'; did you mean full?"),
        (("digits", "--device", "gpu"), "device 'gpu' is not a device of torch: give cpu, cuda or cuda:1"),
        (("digits", "--device", "mps"), "--device mps: memory can be measured on cpu and cuda only: give one of these"),
        (("digits", "--device", "cuda:99"), "device cuda:99: this machine has"),
        (
            ("digits", "unet", "--data", "here"),
            "--data here is for one recipe, not for digits, unet: run them",
        ),
        (("digits", "--out", "no/run.json"), "no/run.json: there is no folder no"),
        (("digits", "--out", "run.txt"), "give a name that ends in .json"),
        (("digits", "--out", "mine.json"), "mine.json is not a file of lowp's results and was not changed"),
        (("digits", "--plot", "run.gif"), "unknown kind of picture '.gif'; allowed: .png, .svg, .pdf"),
    ],
)
def test_bad_input_is_named_before_anything_is_measured(
    lowp: Lowp, arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowp.benchmarking.benchmark.time_steps", lambda *_: pytest.fail("measured"))
    Path("mine.json").write_text('{"mine": 1}')
    result = lowp("bench", *arguments)
    assert result.code == 2 and text in result.err, result.err
    assert [path.name for path in Path().iterdir()] == ["mine.json"]
