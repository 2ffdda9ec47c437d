"""`lowp profile`: a recipe, a record, a script, two records; and errors for anything else."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import forked
import pytest

import lowp as package
from lowp.cli.profile import split
from lowp.numerics.record import Key, Record
from lowp.recipes.training import Settings, Training

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for step in range(5):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
    optimizer.step()
print("trained", sys.argv)
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lowp.recipes.profiling import profiled
    from lowp.recipes.training import Settings

    out = tmp_path_factory.mktemp("profile") / "digits.json"
    profiled(Settings("digits"), 5, None, out)
    return out


def test_a_record_is_told_in_a_screen(lowp: Callable[..., Any], digits: Path) -> None:
    result = lowp("profile", str(digits))
    assert result.code == 0
    assert "4 sampled steps · overhead" in result.out and "VERDICT  Train in fp16 with loss scale 2^" in result.out
    assert "Scale window 2^" in result.out and "tensors need no change" in result.out
    assert len(result.out.splitlines()) < 30


def test_the_views_of_a_record_are_written(lowp: Callable[..., Any], digits: Path, tmp_path: Path) -> None:
    views = {name: tmp_path / f"view.{name}" for name in ("html", "csv", "toml")}
    written = ("--html", str(views["html"]), "--csv", str(views["csv"]), "--policy", str(views["toml"]))
    assert lowp("profile", str(digits), *written).code == 0
    result = lowp("profile", str(digits), *written)  # they are its own, and are replaced
    assert result.code == 0 and str(views["toml"]) in result.out
    assert views["html"].read_text().startswith("<!doctype html>")
    assert f"lowp run --policy {views['toml']} train.py" in views["html"].read_text()
    rows = views["csv"].read_text().splitlines()
    assert rows[0].startswith("module,op,role,phase,count") and len(rows) == len(Record.load(digits).tensors) + 1
    assert package.Policy.load(views["toml"]).rules


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("out", "a profile of lowp"),
        ("html", "a report of lowp profile"),
        ("csv", "a table of lowp profile"),
        ("policy", "a policy of lowp"),
    ],
)
@pytest.mark.parametrize("content", [b"import torch\n", b"\xff\x00", b'[project]\nname = "mine"\n'])
def test_a_file_of_another_s_is_not_replaced(
    lowp: Callable[..., Any], digits: Path, tmp_path: Path, option: str, what: str, content: bytes
) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(content)
    recipe_or_record = "digits" if option == "out" else str(digits)
    result = lowp("profile", recipe_or_record, f"--{option}", str(mine))
    assert result.code == 2 and f"{mine} is not {what} and was not changed: give another name" in result.err
    assert mine.read_bytes() == content


def test_tensorboard_reads_a_histogram_a_tensor_and_the_losses(
    lowp: Callable[..., Any], digits: Path, tmp_path: Path
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert lowp("profile", str(digits), "--tensorboard", str(tmp_path / "board")).code == 0
    board = reader.EventAccumulator(str(tmp_path / "board"), {reader.SCALARS: 0, reader.HISTOGRAMS: 0}).Reload()
    record = Record.load(digits)
    seen = {f"{key.role}/{key.module or 'model'}/{key.op}": one for key, one in record.tensors.items() if one.nonzero}
    assert set(board.Tags()["histograms"]) == set(seen)
    assert set(board.Tags()["scalars"]) == {"loss", "largest_gradient"}
    losses = {one.step: one.loss for one in record.steps if one.loss is not None}
    assert {one.step: one.value for one in board.Scalars("loss")} == pytest.approx(losses)
    for tag, one in seen.items():
        (event,) = board.Histograms(tag)
        read = event.histogram_value
        assert event.step == max(record.sampled) and read.num == sum(read.bucket) == one.nonzero
        assert (read.min, read.max) == (one.lowest, one.highest + 1)
        assert list(read.bucket_limit) == list(range(one.lowest + 1, one.highest + 2))
        assert list(read.bucket) == one.octaves[one.lowest + 127 : one.highest + 128].tolist()


def test_without_tensorboard_what_is_missing_is_said(
    lowp: Callable[..., Any], digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = lowp("profile", str(digits), "--tensorboard", str(tmp_path / "board"))
    assert result.code == 2 and "pip install tensorboard" in result.err and not (tmp_path / "board").exists()


def test_a_recipe_is_profiled_verified_and_searched(lowp: Callable[..., Any], tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    out = tmp_path / "run.json"
    result = lowp(
        "profile",
        "digits",
        "--steps",
        "12",
        "--max-overhead",
        "none",
        "--out",
        str(out),
        "--bits",
        "8",
        "--verify-steps",
        "15",
        "--policy",
        str(policy),
    )
    assert result.code == 0, result.err
    whole = Training(Settings("digits")).epochs * Training(Settings("digits")).steps_per_epoch
    assert f"verified over 15 of the recipe's {whole} steps: " in result.out
    assert "cheapest policy: " in result.out and "error of the predictions: flushed in fp16" in result.out
    assert Record.load(out).complete and package.Policy.load(policy).name == "8-bit"


def test_a_script_is_profiled_with_its_own_arguments(
    lowp: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(command: list[str], env: Mapping[str, str], stdout: int | None) -> MagicMock:
        ran = forked.run(*command[1:], environment=env)
        print(ran.stdout, ran.stderr)
        return MagicMock(**{"wait.return_value": ran.returncode, "poll.return_value": ran.returncode})

    script, out = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(SCRIPT)
    monkeypatch.setattr("lowp.launch.profiling.subprocess", SimpleNamespace(Popen=start))
    result = lowp("profile", "--max-overhead", "none", "--out", str(out), str(script), "0.1", "--html")
    assert result.code == 0 and f"trained ['{script}', '0.1', '--html']" in result.out and "VERDICT" in result.out
    assert Record.load(out).sampled == [0, 1, 2, 4]


ENDED = """
import os, signal, sys, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(6, 4)).sum().backward()
    if step == 5 and sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "failed":
        raise ValueError("of the script's own")
    optimizer.step()
"""


@pytest.mark.parametrize(("how", "code"), [("killed", 137), ("failed", 1)])
def test_a_script_that_is_killed_leaves_its_steps_and_one_that_fails_its_exit_code(
    lowp: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int
) -> None:
    def start(command: list[str], env: Mapping[str, str], stdout: int | None) -> MagicMock:
        ran = forked.run(*command[1:], environment=env)
        print(ran.stderr)
        return MagicMock(**{"wait.return_value": ran.returncode, "poll.return_value": ran.returncode})

    script, out = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(ENDED)
    monkeypatch.setattr("lowp.launch.profiling.subprocess", SimpleNamespace(Popen=start))
    result = lowp("profile", "--max-overhead", "none", "--out", str(out), str(script), how)
    assert result.code == code
    if how == "killed":
        assert "ended by signal 9" in result.err and "the run did not end" in result.out
        assert Record.load(out).sampled == [0, 1, 2, 4]
    else:
        assert "of the script's own" in result.out and result.err.count("the profile is empty") == 1


@pytest.mark.parametrize(("text", "code"), [("import torch", 1), ("raise SystemExit(5)", 5)])
def test_a_script_in_which_no_optimizer_steps_is_a_failure_or_its_own(
    lowp: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    def start(command: list[str], env: Mapping[str, str], stdout: int | None) -> MagicMock:
        ran = forked.run(*command[1:], environment=env)
        return MagicMock(**{"wait.return_value": ran.returncode, "poll.return_value": ran.returncode})

    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr("lowp.launch.profiling.subprocess", SimpleNamespace(Popen=start))
    result = lowp("profile", "--out", str(tmp_path / "run.json"), str(tmp_path / "train.py"))
    assert (result.code, result.out) == (code, "") and not (tmp_path / "run.json").exists()
    told = "lowp profile: no step of a torch optimizer ran in the script: nothing was recorded"
    assert result.err.splitlines() == [told]


LONG = """
import time, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    print("a step", flush=True)
    time.sleep(0.01)
"""


def test_a_script_that_is_interrupted_is_told_of_as_far_as_it_came(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LONG)
    arguments = ("--max-overhead", "none", "--out", "run.json", "train.py")
    environment = {**os.environ, "PYTHONPATH": forked.SOURCES}
    with forked.start("-m", "lowp", "profile", *arguments, cwd=tmp_path, environment=environment) as process:
        for _ in range(3):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        printed, said = process.stdout.read(), process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "VERDICT" in printed and "Traceback" not in said, said
    assert 0 in Record.load(tmp_path / "run.json").sampled


def test_a_recipe_that_is_interrupted_is_told_of_as_far_as_it_came(tmp_path: Path) -> None:
    arguments = ("digits", "--steps", "100000000", "--epochs", "1000000", "--max-overhead", "none", "--out", "run.json")
    environment = {**os.environ, "PYTHONPATH": forked.SOURCES}
    with forked.start("-m", "lowp", "profile", *arguments, cwd=tmp_path, environment=environment) as process:
        seen = tmp_path / "run.json"
        while not seen.exists() or seen.read_text().count("\n") < 3:  # a header and two steps
            assert process.returncode is None, process.stderr.read()
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        printed, said = process.stdout.read(), process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "VERDICT" in printed and "Traceback" not in said, said
    assert Record.load(seen).complete and 0 in Record.load(seen).sampled


def test_a_run_that_was_too_short_for_a_look_is_told_once(lowp: Callable[..., Any]) -> None:
    result = lowp("profile", "digits", "--steps", "1", "--max-overhead", "0.01%")
    assert result.code == 2 and not result.out and result.err.count("the profile is empty") == 1


RANKS = """
import os, torch
import torch.distributed as ranks
from torch import nn
file = "file://" + os.environ["MEETING"]
ranks.init_process_group("gloo", init_method=file, rank=int(os.environ["RANK"]), world_size=2)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
if os.environ.get("COMPILED"):
    model = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
ranks.destroy_process_group()
"""
BOTH = """
import os, subprocess, sys
here = [subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
sys.exit(max(one.wait() for one in here))
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["", "1"])
def test_the_ranks_of_a_script_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], compiled: str
) -> None:
    from lowp.cli import main

    (tmp_path / "both.py").write_text(BOTH)
    (tmp_path / "rank.py").write_text(RANKS)
    monkeypatch.setenv("MEETING", str(tmp_path / "meeting"))
    monkeypatch.setenv("COMPILED", compiled)
    out = tmp_path / "run.json"
    arguments = ["--max-overhead", "none", "--out", str(out), str(tmp_path / "both.py"), str(tmp_path / "rank.py")]
    assert main(["profile", *arguments]) == 0, capfd.readouterr().err
    record = Record.load(out)
    assert record.header["ranks"] == 2 and record.complete and not list(tmp_path.glob("run.process-*"))
    assert record.tensors[Key("", "linear", "input", "forward")].count == 2 * 3 * 6 * 4


def test_where_two_runs_part_is_told(lowp: Callable[..., Any], digits: Path, tmp_path: Path) -> None:
    assert lowp("profile", "--diff", str(digits), str(digits)).code == 0
    other = json.loads(digits.read_text())
    other["prints"]["1"][3][4] = "0"
    (tmp_path / "other.json").write_text(json.dumps(other))
    page = tmp_path / "both.html"
    result = lowp("profile", "--diff", str(digits), str(tmp_path / "other.json"), "--html", str(page))
    assert result.code == 1 and "the runs part at step 1" in result.out and str(page) in result.out
    assert "Two runs" in page.read_text() and "The runs part at step 1" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "nothing to profile"),
        (("no-recipe",), "unknown recipe"),
        (("none.json",), "there is no profile none.json"),
        (("none.py",), "there is no script 'none.py'"),
        (("digits", "--max-overhead", "much"), "give a share of the time"),
        (("digits", "--steps", "0"), "--steps 0: give 1 or more"),
        (("digits", "--bits", "99"), "give 2 to 16, the bits of an operand"),
        (("digits", "--verify-steps", "few"), "--verify-steps few: give 1 or more, or all for the whole recipe"),
        (("digits", "--verify-steps", "0"), "--verify-steps 0: give 1 or more"),
        (("--verify", "train.py", "--lr", "1"), "lowp run --compare fp32,policy.toml train.py --lr 1"),
        (("digits", "--out", "/"), "is a folder"),
        (("digits", "--tensorboard", __file__), "is a file: give a folder, which is created if necessary"),
    ],
)
def test_what_cannot_be_profiled_is_said_in_a_line(
    lowp: Callable[..., Any], arguments: tuple[str, ...], told: str
) -> None:
    result = lowp("profile", *arguments)
    assert result.code == 2 and told in result.err and len(result.err.splitlines()) == 1


def test_a_record_cannot_be_verified(lowp: Callable[..., Any], digits: Path) -> None:
    assert "--verify trains a recipe" in lowp("profile", str(digits), "--verify").err
    assert "--verify-steps trains a recipe" in lowp("profile", str(digits), "--verify-steps", "all").err


def test_arguments_behind_a_script_are_the_script_s() -> None:
    assert split(["--out", "a.json", "train.py", "--html", "x"]) == (["--out", "a.json"], ["train.py", "--html", "x"])
    assert split(["digits", "--steps", "5"]) == (["--steps", "5"], ["digits"])
    assert split(["--max-overhead=5%", "-m", "package.train", "--lr", "1"])[1] == ["-m", "package.train", "--lr", "1"]
    assert split(["--diff", "a", "b"]) == (["--diff", "a", "b"], [])
    assert split(["--max-overhed", "3%", "train.py"]) == (["--max-overhed"], []), "refused by its name alone"


def test_a_finding_is_explained(lowp: Callable[..., Any]) -> None:
    assert "updates are lost" in lowp("explain", "N101").out
    assert "unknown finding 'N999'" in lowp("explain", "N999").err


def test_what_a_precision_would_do_is_told(lowp: Callable[..., Any], digits: Path) -> None:
    told = lowp("profile", str(digits), "--precision", "e2m1").out
    assert "tensors are rounded" in told and "those that lose most:" in told and "0 linear" in told
    moved = told.partition("predicted change of the loss")[2]
    assert {"0.weight", "2.weight"} <= set(moved.replace(",", "").split()) and "inf" not in moved
    assert "did you mean bf16" in lowp("profile", str(digits), "--precision", "bf61").err


def test_layers_of_a_precision_stay_high(lowp: Callable[..., Any], digits: Path, tmp_path: Path) -> None:
    told = lowp("profile", str(digits), "--precision", "mxfp4:nearest-even").out
    assert "products: the share flushed, the mean square error" in told and "weight gradient" in told
    assert " of the layers' predicted changes of the loss, squared, " in told and "[[rule]]" not in told
    shown = lowp("profile", str(digits), "--precision", "mxfp4:nearest-even", "--high", "1").out
    policy = tmp_path / "high.toml"
    lowp("profile", str(digits), "--precision", "mxfp4:nearest-even", "--high", "1", "--policy", str(policy))
    assert shown.endswith(policy.read_text()) and "1 rules" not in lowp("policy", "check", str(policy)).err
    document = json.loads(
        lowp("profile", str(digits), "--precision", "mxfp4:nearest-even", "--high", "1", "--json").out
    )
    high = document["precision"]["high"]
    assert high["policy"] == policy.read_text() and high["kept"] == [next(iter(high["shares"]))]
    names = {(one["module"], one["product"]) for one in document["precision"]["products"]}
    assert ("0", "forward") in names and ("2", "weight_gradient") in names
    without = lowp("profile", str(digits), "--high", "1")
    assert without.code == 2 and "--high 1 keeps layers of a precision in bf16: give --precision, too" in without.err
