"""`lowp run --monitor` watches an unmodified script, which computes what it would without."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import forked
import pytest
from launch.test_scripts import SCRIPTS, TORCHRUN, python

WITH_CHILDREN = ("ddp.py", "compiled.py")


def watched(
    cwd: Path, name: str, *arguments: str, precision: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script under a monitor with a file and a report; return how it ended, and the lines of its alarms."""
    run = python if name in WITH_CHILDREN else forked.run
    command = ("-m", "lowp", "run", *precision, "--monitor=run.jsonl", "--report", "report.json", str(SCRIPTS / name))
    ran = run(*command, *arguments, cwd=cwd)
    assert ran.returncode == 0, ran.stderr
    return ran, [line for line in ran.stderr.splitlines() if line.startswith("lowp monitor")]


def records(cwd: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (cwd / "run.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("fault", "alarm"),
    [
        ("bf16", r"step 2: 1\.weight: 100% of the updates are rounded away in bfloat16 .* \(lowp explain N101\)"),
        ("autocast", r"step 2: \S+( \(and \d more\))?: \d+% of the fp16 gradient .* \(lowp explain N206\)"),
        ("compiled", r"step 0: 1\.bias: .* is infinite or NaN; .* \(lowp explain N401\)"),
    ],
)
def test_a_fault_of_a_script_is_named(fault: str, alarm: str, tmp_path: Path) -> None:
    ran, alarms = watched(tmp_path, "watched.py", fault)
    assert re.fullmatch(f"lowp monitor: {alarm}", alarms[0]), ran.stderr
    assert ran.stdout == forked.run(str(SCRIPTS / "watched.py"), fault, cwd=tmp_path).stdout
    header, *looks, end = records(tmp_path)
    assert header["kind"] == "lowp monitor" and end == {"ended": 10} and len(looks) >= 3
    told = json.loads((tmp_path / "report.json").read_text())["summary"]["alarms"]
    assert len(told) == len(alarms) and f"{len(alarms)} alarm" in ran.stderr


def test_several_models_of_a_script_are_watched(tmp_path: Path) -> None:
    _, alarms = watched(tmp_path, "gan.py")
    assert alarms == []
    groups = {name for record in records(tmp_path)[1:-1] for name in record["groups"]}  # type: ignore[attr-defined]
    assert {"0", "Sequential.0"} <= groups  # generator and critic


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cnn.py", "fp16"),
        ("own_scaler.py", "fp32"),
        pytest.param("transformer.py", "flex16+5", marks=pytest.mark.slow),
        pytest.param("compiled.py", "bf16", marks=pytest.mark.slow),
        pytest.param("ddp.py", "fp32", marks=pytest.mark.slow),
        pytest.param("ddp.py", "fp16", marks=pytest.mark.slow),
    ],
)
def test_a_healthy_script_raises_no_alarm_and_its_losses_are_written_unscaled(
    name: str, precision: str, tmp_path: Path
) -> None:
    ran, alarms = watched(tmp_path, name, precision=("--precision", precision))
    assert alarms == [], ran.stderr
    losses = [record["loss"] for record in records(tmp_path)[1:-1]]
    assert losses and all(isinstance(loss, float) and loss < 100 for loss in losses), losses


@pytest.mark.slow
@pytest.mark.parametrize(("port", "precision"), [("29574", "fp32"), ("29575", "fp16")])
def test_shards_of_a_launcher_are_watched(port: str, precision: str, tmp_path: Path) -> None:
    script = (*TORCHRUN, port, str(SCRIPTS / "fsdp2.py"), "1")
    ran = python("-m", "lowp", "run", "--precision", precision, "--monitor=run.jsonl", *script, cwd=tmp_path)
    assert ran.returncode == 0 and "lowp monitor" not in ran.stderr, ran.stderr
    header, *looks, end = records(tmp_path)
    assert header["model"] == "FSDPSequential" and end == {"ended": 20} and len(looks) > 1
    assert (tmp_path / "run.jsonl").exists() and not list(tmp_path.glob("run.process*"))


def test_a_script_without_an_optimizer_of_torch_is_told(tmp_path: Path) -> None:
    _, said = watched(tmp_path, "language_model.py")
    assert said == ["lowp monitor: no optimizer of torch.optim has stepped: nothing was watched"]


def test_runs_in_several_precisions_are_each_watched(tmp_path: Path) -> None:
    script = (str(SCRIPTS / "watched.py"), "bf16")
    ran = forked.run("-m", "lowp", "run", "--compare", "fp32", "--monitor", "--json", *script, cwd=tmp_path)
    (one,) = json.loads(ran.stdout)["runs"]
    assert one["last_line"].startswith("loss ")
    assert [note for note in one["notes"] if note.startswith("alarm: step 2: 1.weight: 100% of the updates")]


def test_a_file_that_stands_without_its_sign_or_is_anothers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    script = str(SCRIPTS / "watched.py")
    apart = forked.run("-m", "lowp", "run", "--monitor", "run.jsonl", script, cwd=tmp_path)
    assert apart.returncode == 2 and "a monitor's file stands behind '=', --monitor=run.jsonl" in apart.stderr
    mine = forked.run("-m", "lowp", "run", "--monitor=notes.txt", script, cwd=tmp_path)
    assert mine.returncode == 2 and "notes.txt is not a file of a lowp monitor and was not changed" in mine.stderr
    several = forked.run("-m", "lowp", "run", "--compare", "fp32,bf16", "--monitor=run.jsonl", script, cwd=tmp_path)
    assert several.returncode == 2 and "--monitor=FILE is for one run: with --compare" in several.stderr
