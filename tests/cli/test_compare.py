"""lowp compare and lowp recipes: tables, files, sweeps, a real Ctrl-C."""

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

from lowp.cli import serving

QUICK = ("--epochs", "2", "--batch", "128", "--timing", "0.05", "--jobs", "1")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # for the processes that a test starts, where lowp is not installed
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([forked.SOURCES, os.environ.get("PYTHONPATH", "")]))


def test_the_main_job_prints_its_tables_and_writes_json_and_a_picture(lowp: Callable[..., Any]) -> None:
    result = lowp("compare", "digits", "--precision", "fp16,bf16", "--seeds", "2", *QUICK, "--out", "run.json")
    assert result.code == 0, result.err
    assert "fp32 is trained too, as what the others are compared with" in result.err
    assert result.err.count("seed 0: accuracy") == 3 and "6/6  " in result.err
    for words in (
        "accuracy",
        "deviations",
        "time a step",
        "skipped",
        "flushed",
        "updates",
        "verdict: 'converges as fp32'",
    ):
        assert words in result.out
    rows = [line.split()[0] for line in result.out.splitlines() if line.startswith(("fp32 ", "fp16 ", "bf16 "))]
    assert rows == ["fp32", "fp16", "bf16"] * 2
    document = json.loads(Path("run.json").read_text())
    assert document["complete"] and document["seeds"] == [0, 1] and document["recipe"]["name"] == "digits"
    assert all(row["step_seconds"] > 0 and row["peak_memory_bytes"] > 0 for row in document["variants"])
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


def test_loss_scales_are_swept_for_fp16_unless_told_otherwise(lowp: Callable[..., Any]) -> None:
    arguments = ("--loss-scale", "1,256,dynamic", "--seeds", "1", "--plot", "scales.svg", "--epochs", "2")
    result = lowp("compare", "digits", *arguments, "--timing", "0", "--jobs", "1")
    assert result.code == 0, result.err
    document = json.loads(Path("compare-digits.json").read_text())
    assert [row["label"] for row in document["variants"]] == [
        "fp32",
        *(f"fp16, scale {s}" for s in (1, 256, "dynamic")),
    ]
    scales = [row["statistics"]["loss_scale"]["mean"] for row in document["variants"]]
    assert scales[:3] == [1, 1, 256] and 256 < scales[3] <= 65536
    flushed = [row["statistics"]["flushed_gradients"]["mean"] for row in document["variants"]]
    assert flushed[0] == 0 and flushed[1] > flushed[2] >= flushed[3]
    assert Path("scales.svg").read_text().startswith("<?xml")


def test_a_sweep_draws_its_grid(lowp: Callable[..., Any]) -> None:
    arguments = ("--sweep", "exponent=3..5,mantissa=2..3", "--epochs", "3", "--jobs", "1")
    result = lowp("compare", "digits", *arguments)
    assert result.code == 0, result.err
    cells = {
        line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line.startswith(("e3", "e4", "e5"))
    }
    assert float(cells["e3"][0].rstrip("%")) < 30 and float(cells["e5"][0].rstrip("%")) > 90
    assert "exponent bits matter more than mantissa bits here" in result.out.replace("\n", " ")
    assert Path("sweep-digits.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(Path("sweep-digits.json").read_text())
    assert len(document["variants"]) == 7
    grid = document["grid"]
    assert max(grid["values"][0]) < 0.3 and min(grid["values"][2]) > 0.9
    means = [sum(line) / 2 for line in grid["values"]]
    assert grid["effect_of_exponent"]["spread"] == pytest.approx(max(means) - min(means))
    assert grid["effect_of_exponent"]["spread"] > 0.5 > 0.1 > grid["effect_of_mantissa"]["spread"]


def test_half_the_epochs_are_swept(lowp: Callable[..., Any]) -> None:
    result = lowp("compare", "digits", "--sweep", "exponent=8,mantissa=7", "--batch", "600")
    assert result.code == 0 and "1 seed, 10 epochs" in result.err


# Its processes are forked off one that has torch, instead of loading it anew.
FORKING = """
import multiprocessing, os, signal, sys
from lowp.cli import main

def begin():  # as a new program does: what was ignored stays ignored, nothing else is handled yet
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

os.register_at_fork(after_in_child=begin)
found = multiprocessing.get_context
multiprocessing.get_context = lambda _: found("fork")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("start", [("-c", FORKING), pytest.param(("-m", "lowp"), marks=pytest.mark.slow)])
def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(lowp: Callable[..., Any], start: tuple[str, str]) -> None:
    arguments = ["compare", "digits", "--precision", "fp16,e4m3fn", "--epochs", "8", "--timing", "0"]
    with forked.start(*start, *arguments, "--jobs", "2") as process:
        seen = ""
        for line in process.stderr:
            seen += line
            if line.startswith("1/9"):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
                break
        seen += process.stderr.read()
    assert process.returncode == 130, seen
    assert "Traceback" not in seen and "runs are in compare-digits.json" in seen
    document = json.loads(Path("compare-digits.json").read_text())
    done = sum(len(row["runs"]) for row in document["variants"])
    assert 1 <= done < 9 and not document["complete"]
    refused = lowp(*arguments)
    assert refused.code == 2 and "give --resume to continue it, or another --out" in refused.err
    other = lowp(*arguments, "--epochs", "3", "--resume")
    assert other.code == 2 and "runs that this command does not ask for" in other.err
    assert json.loads(Path("compare-digits.json").read_text()) == document


def test_without_matplotlib_the_json_is_written_and_it_says_so(
    lowp: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest)
    )
    result = lowp("compare", "digits", "--precision", "bf16", "--seeds", "1", *QUICK, "--timing", "0")
    assert result.code == 0
    assert "no picture: matplotlib is not installed: pip install 'lowp[plot]'" in result.out
    assert Path("compare-digits.json").exists() and not Path("compare-digits.png").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("digts",), "unknown recipe 'digts'; did you mean digits?"),
        (("train.py",), "compare whole runs of a script by lowp run --compare fp32,bf16 train.py"),
        (("digits", "--precision", "fp16,fp61"), "unknown precision 'fp61'; did you mean"),
        (("digits", "--seeds", "0"), "--seeds 0: give 1 or more"),
        (("digits", "--jobs", "0"), "--jobs 0: give 1 or more"),
        (("digits", "--timing", "-1"), "--timing -1: give seconds, 0 or more, below 3600"),
        (("digits", "--timing", "3600"), "--timing 3600: give seconds, 0 or more, below 3600"),
        (("digits", "--timing", "nan"), "--timing nan: give seconds, 0 or more, below 3600"),
        (("digits", "--loss-scale", "8,zero"), "loss scale 'zero' is not valid"),
        (("digits", "--sweep", "exponent=9..2,mantissa=2"), "exponent=9..2 has its larger end first"),
        (("digits", "--sweep", "exponent=3,mantissa=2", "--precision", "fp16"), "omit --precision"),
        (("digits", "--sweep", "exponent=3,mantissa=2", "--loss-scale", "1,8"), "a sweep takes a single loss scale"),
        (("digits", "--out", "no/run.json"), "no/run.json: there is no folder no"),
        (("digits", "--out", "run.txt"), "give a name that ends in .json"),
        (("digits", "--out", "mine.json"), "mine.json is not a file of lowp's results and was not changed"),
        (("digits", "--plot", "run.gif"), "unknown kind of picture '.gif'; allowed: .png, .svg, .pdf"),
        (("digits", "--plot", "no/run.png"), "there is no folder no"),
        (("digits", "--resume", "--out", "new.json"), "there is no file new.json"),
        (("digits", "--accumulate", "fp8/2"), "unknown accumulator 'fp8'"),
    ],
)
def test_bad_input_is_named_before_anything_is_trained(
    lowp: Callable[..., Any], arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowp.recipes.training.Training.run", lambda *_: pytest.fail("trained"))
    Path("mine.json").write_text('{"mine": 1}')
    result = lowp("compare", *arguments)
    assert result.code == 2 and text in result.err, result.err
    assert [path.name for path in Path().iterdir()] == ["mine.json"]


def test_the_recipes_are_listed(lowp: Callable[..., Any]) -> None:
    from lowp.recipes import RECIPES

    listed = lowp("recipes").out
    assert all(f"\n{name} " in listed for name in RECIPES) and "9,610" in listed
    one = lowp("recipes", "digits")
    assert one.code == 0 and "embedded in scikit-learn" in one.out and "64" not in one.out.split("source")[0].split()
    assert all(line.startswith(" ") for line in lowp("recipes", "gpt").out.splitlines()[1:])  # long lines are indented
    assert "unknown recipe 'digit'; did you mean digits" in lowp("recipes", "digit").err


SERVED = """\
toy: served in other formats
                                  trained
format   accuracy       to fp32     in it           bytes           time         energy
───────────────────────────────────────────────────────────────────────────────────────
fp32        97.5%    0.0 points         -   4 KiB (1.00x)   2 ms (1.00x)   8 µJ (1.00x)
int8        95.0%   -2.5 points     97.0%   1 KiB (0.25x)   1 ms (0.50x)   2 µJ (0.25x)
nvfp4      failed             -         -               -              -              -

int8: head stays as it was: too small.
nvfp4: no layer.
time: of a batch.
a machine.
"""


def test_formats_of_serving_are_shown_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"format": "fp32", "numbers": {"accuracy": 0.975}, "bytes": 4096, "seconds": 2e-3, "energy": 8e6},
        {"format": "int8", "numbers": {"accuracy": 0.95}, "bytes": 1024, "seconds": 1e-3, "energy": 2e6},
        {"format": "nvfp4", "failure": "no layer"},
    ]
    rows[1].update(unquantized={"head": "too small"}, trained={"accuracy": 0.97})
    recipe = {"name": "toy", "metric": "accuracy", "metric_is_share": True}
    document = {"recipe": recipe, "rows": rows, "methods": {"time": "of a batch"}, "machine": {"words": "a machine"}}
    serving._print(document)
    assert capsys.readouterr().out == SERVED
    del rows[1]["trained"]
    serving._print(document)
    assert "trained" not in capsys.readouterr().out
