"""lowp train: printed lines, checkpoints, a real Ctrl-C and a real kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

COMMAND = ("-m", "lowp", "train", "digits", "--precision", "fp16")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stop_with(number: int, *arguments: str) -> tuple[int, str]:
    """Start a training, send a signal within its third epoch or a later one; return the exit code and stderr."""
    with forked.start(*COMMAND, *arguments) as process:
        seen = ""
        for line in process.stderr:
            seen += line
            if seen.count("epoch ") == 3:
                time.sleep(0.01)
                process.send_signal(number)
                break
        seen += process.stderr.read()
    assert process.returncode is not None
    return process.returncode, seen


def history(path: str) -> list[dict[str, float]]:
    records = json.loads(Path(path).read_text())["history"]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def weights(path: str) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["model"]
    return model


def same(one: str, other: str) -> bool:
    mine, theirs = weights(one), weights(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_line_an_epoch_and_a_checkpoint(lowp: Callable[..., Any]) -> None:
    result = lowp("train", "digits", "--precision", "bf16", "--epochs", "2", "--seed", "1", "--out", "run.json")
    assert result.code == 0
    assert "digits in bf16, seed 1: accuracy " in result.out and "digits-bf16-seed1.pt" in result.out
    assert "epoch 0/2  accuracy" in result.err and "epoch 2/2  accuracy" in result.err
    assert weights("digits-bf16-seed1.pt")["0.weight"].shape == (128, 64)
    document = json.loads(Path("run.json").read_text())
    assert document["complete"] and [record["epoch"] for record in document["history"]] == [0, 1, 2]
    assert document["settings"]["precision"] == "bf16" and document["machine"]["words"]


def test_ctrl_c_and_kill_9_and_on_to_the_same_bits(lowp: Callable[..., Any]) -> None:
    epochs = ("--epochs", "24", "--batch", "64")
    code, said = stop_with(signal.SIGINT, *epochs, "--checkpoint", "part.pt")
    assert code == 130, said
    assert (
        "part.pt" in said and "To continue: lowp train digits --checkpoint part.pt --resume" in said
    )  # between steps or in one
    code, said = stop_with(signal.SIGKILL, "--checkpoint", "part.pt", "--resume")
    assert code == -signal.SIGKILL and "continuing part.pt after" in said
    assert lowp("train", "digits", "--checkpoint", "part.pt", "--resume", "--out", "part.json").code == 0
    whole = ("train", "digits", "--precision", "fp16", *epochs, "--checkpoint", "whole.pt", "--out", "whole.json")
    assert lowp(*whole).code == 0
    assert same("part.pt", "whole.pt")
    assert history("part.json") == history("whole.json")


def test_ctrl_c_in_the_first_epoch_keeps_the_steps_so_far(lowp: Callable[..., Any]) -> None:
    command = ("digits", "--precision", "fp16", "--batch", "2", "--epochs", "1", "--checkpoint", "part.pt")
    with forked.start("-m", "lowp", "train", *command) as process:
        for line in process.stderr:
            if line.startswith("epoch 0/1"):
                time.sleep(0.05)
                process.send_signal(signal.SIGINT)
                break
        said = process.stderr.read()
    assert process.returncode == 130, said
    step = re.search(r"stopped after step (\d+) of 628 in epoch 1 of 1; the checkpoint is part\.pt", said)
    assert step is not None and 0 < int(step[1]) < 628, said
    assert lowp("train", "digits", "--checkpoint", "part.pt", "--resume", "--out", "part.json").code == 0
    assert lowp("train", *command[:-1], "whole.pt", "--out", "whole.json").code == 0
    assert same("part.pt", "whole.pt") and history("part.json") == history("whole.json")


def test_alarms_are_told_between_the_lines_of_the_epochs(lowp: Callable[..., Any]) -> None:
    result = lowp(
        "train", "digits-hard", "--precision", "fp16-naive", "--epochs", "1", "--monitor", "run.jsonl", "--json"
    )
    alarm, last = result.err.splitlines()[-2:]
    assert re.match(r"alarm: step 2: 0\.weight .* rounded away in float16 .* \(lowp explain N101\)", alarm)
    assert last.startswith("epoch 1/1") and last.endswith("  1 alarm")
    assert [one["id"] for one in json.loads(result.out)["alarms"]] == ["N101"]
    assert json.loads(Path("run.jsonl").read_text().splitlines()[0])["kind"] == "lowp monitor"


def test_progress_within_an_epoch_is_told_where_there_is_no_bar(
    lowp: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowp.cli.train._TOLD", 0.0)
    said = lowp("train", "digits", "--epochs", "1", "--batch", "300").err
    assert re.findall(r"^epoch 1/1: step (\d) of 4, loss \d\.\d{4}$", said, re.MULTILINE) == ["1", "2", "3", "4"]


def test_an_unfinished_run_is_not_overwritten_unless_asked(lowp: Callable[..., Any]) -> None:
    from lowp.recipes.training import Settings, Training

    Training(Settings("digits", "fp16", epochs=4)).save(Path("digits-fp16-seed0.pt"))
    before = Path("digits-fp16-seed0.pt").read_bytes()
    result = lowp("train", "digits", "--precision", "fp16", "--epochs", "1")
    assert (
        result.code == 2 and "holds a run that stopped after 0 of 4 epochs: give --resume to continue it" in result.err
    )
    assert Path("digits-fp16-seed0.pt").read_bytes() == before
    assert lowp("train", "digits", "--precision", "fp16", "--epochs", "1", "--overwrite").code == 0


def test_a_finished_run_has_nothing_left_to_do(lowp: Callable[..., Any]) -> None:
    assert lowp("train", "digits", "--epochs", "1").code == 0
    before = Path("digits-fp32-seed0.pt").read_bytes()
    result = lowp("train", "digits", "--resume")
    assert result.code == 0 and "after 1 epoch;" in result.out
    assert Path("digits-fp32-seed0.pt").read_bytes() == before


def test_a_finished_run_is_not_replaced_unless_asked(lowp: Callable[..., Any]) -> None:
    assert lowp("train", "digits", "--epochs", "1").code == 0
    before = Path("digits-fp32-seed0.pt").read_bytes()
    result = lowp("train", "digits", "--epochs", "1")
    assert result.code == 2 and "holds a finished run of 1 epoch: give --overwrite to replace it" in result.err
    assert Path("digits-fp32-seed0.pt").read_bytes() == before
    assert lowp("train", "digits", "--epochs", "1", "--overwrite").code == 0


def test_a_second_training_on_one_checkpoint_is_told_of_the_first(lowp: Callable[..., Any]) -> None:
    from lowp import files

    with files.sole_writer(Path("run.pt")):
        result = lowp("train", "digits", "--epochs", "1", "--checkpoint", "run.pt")
    assert result.code == 2 and f"run.pt is being written by another process ({os.getpid()}): wait" in result.err
    assert not list(Path().iterdir())


@pytest.mark.filterwarnings("ignore:step 1. numbers beyond the largest:UserWarning")
def test_a_run_that_its_exponents_cannot_follow_ends_in_one_line_that_names_the_weight(
    lowp: Callable[..., Any],
) -> None:
    result = lowp("train", "digits", "--precision", "flex16+5", "--lr", "1e30", "--epochs", "3")
    assert result.code == 2
    said = result.err.strip().splitlines()[-1]
    assert said.startswith("lowp: error: step 20: numbers beyond the largest of flex16+5 are cut off, first in the ")
    assert "weight of 0.weight, and weights for 20 steps in a row: look at the learning rate" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--out", "run.pt", "--checkpoint", "run.pt"), "--out and --checkpoint are both run.pt: give two files"),
        (("--out", "notes"), "notes is not a file of lowp's results and was not changed"),
        (("--out", "notes.json"), "notes.json is not a file of lowp's results and was not changed"),
        (("--out", "/dev/null"), "/dev/null is a device, a pipe or a socket and is not replaced"),
        (("--checkpoint", "/dev/null"), "/dev/null is a device, a pipe or a socket and is not replaced"),
        (("--checkpoint", "notes"), "notes is damaged or not a torch file"),
        (("--checkpoint", "notes", "--overwrite"), "notes is damaged or not a torch file"),
        (("--checkpoint", "model.pt", "--overwrite"), "model.pt is a torch file, but not a checkpoint of lowp.save"),
        (("--checkpoint", "own.pt", "--overwrite"), "own.pt is a checkpoint of lowp, but not of `lowp train`"),
    ],
)
def test_only_files_of_its_own_kind_are_overwritten(
    lowp: Callable[..., Any], arguments: tuple[str, ...], text: str
) -> None:
    from lowp import checkpoint

    for name in ("notes", "notes.json"):
        Path(name).write_text("mine")
    torch.save({"weight": torch.ones(1)}, "model.pt")
    checkpoint.save("own.pt", model=torch.nn.Linear(1, 1))
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    result = lowp("train", "digits", "--epochs", "1", *arguments)
    assert result.code == 2 and text in result.err, result.err
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_a_run_whose_weights_are_no_numbers_keeps_its_last_good_checkpoint(lowp: Callable[..., Any]) -> None:
    result = lowp("train", "digits", "--epochs", "3", "--lr", "1e30", "--checkpoint", "run.pt")
    assert result.code == 2 and "failed: its weights were no numbers after epoch 1" in result.err
    assert all(value.isfinite().all() for value in weights("run.pt").values())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("digts",), "unknown recipe 'digts'; did you mean digits?"),
        (("digits", "--precision", "fp61"), "unknown precision 'fp61'; did you mean"),
        (("digits", "--epochs", "0"), "epochs 0: give 1 or more"),
        (("digits", "--lr", "-1"), "learning rate -1.0: give a finite number above zero"),
        (("digits", "--size", "tiny"), "unknown size of digits 'tiny'; allowed: cpu, full"),
        (("digits", "--loss-scale", "big"), "loss scale 'big' is not valid"),
        (("digits", "--checkpoint", "no/run.pt"), "no/run.pt: there is no folder no: create it first"),
        (("digits", "--resume", "--checkpoint", "no.pt"), "there is no checkpoint no.pt"),
        (("digits", "--resume", "--overwrite"), "--resume continues a checkpoint and --overwrite replaces it"),
        (("digits", "--data", "here"), "digits does not take --data here"),
        (("digits", "--resume", "--checkpoint", "cut.pt"), "cut.pt is damaged or not a torch file"),
        (("digits", "--checkpoint", "cut.pt"), "cut.pt is damaged or not a torch file"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    lowp: Callable[..., Any], arguments: tuple[str, ...], text: str
) -> None:
    Path("cut.pt").write_bytes(b"PK\x03\x04 cut short")
    result = lowp("train", *arguments)
    assert result.code == 2 and text in result.err, result.err
    assert Path("cut.pt").read_bytes() == b"PK\x03\x04 cut short"
    assert [path.name for path in Path().iterdir()] == ["cut.pt"]
