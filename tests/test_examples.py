"""The scripts of examples/ run as their users run them, are short, and learn what they are to learn."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
from pathlib import Path

import forked
import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
# what a script prints last, and in it the share that it is to reach
PRINTS = {
    "accelerate_loop": r"accuracy (\S+), loss scale \d+",
    "accumulate_and_clip": r"accuracy (\S+), norm of the last gradient \S+, loss scale \d+",
    "ddp": r"2 ranks, weights in torch\.bfloat16, accuracy (\S+)",
    "fsdp2": r"2 ranks, 2882 of 5699 weights on the first, accuracy (\S+)",
    "lightning_fit": r"accuracy (\S+) in flex16\+5",
    "loop": r"accuracy (\S+), loss scale \d+, 0 steps skipped",
    "own_format": r"mine: accuracy (\S+), loss scale \d+",
    "script": r"accuracy (\S+)",
    "serve_int8": r"0\.27 of fp32's size, (\S+) of the answers are fp32's",
    "trainer": r"accuracy (\S+), loss scale \d+",
}
RANKED = ("ddp", "fsdp2")
NEEDS = {"accelerate_loop": "accelerate", "lightning_fit": "lightning", "trainer": "accelerate"}


def check(name: str, printed: str) -> None:
    line = printed.strip().splitlines()[-1]
    found = re.fullmatch(PRINTS[name], line)
    assert found and float(found[1]) > 0.95, f"{name} prints {line!r}"


def test_the_examples_are_short_and_each_has_its_row() -> None:
    assert [script.stem for script in SCRIPTS] == sorted(PRINTS)
    rows = (FOLDER / "README.md").read_text()
    for script in SCRIPTS:
        text = script.read_text()
        most = 40 if "lowp.integrations" in text else 60
        assert len(text.splitlines()) < most and f"({script.name})" in rows, script.name
        assert f"examples/{script.name}" in text, "how it is started"


@pytest.mark.parametrize("name", sorted(set(PRINTS) - set(RANKED)))
def test_an_example_runs_and_learns(name: str, tmp_path: Path) -> None:
    if name in NEEDS and not importlib.util.find_spec(NEEDS[name]):
        pytest.skip(f"pip install {NEEDS[name]}")
    ran = forked.run(str(FOLDER / f"{name}.py"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    check(name, ran.stdout)


def test_the_script_that_knows_nothing_of_lowp_trains_in_a_precision(tmp_path: Path) -> None:
    ran = forked.run("-m", "lowp", "run", "--precision", "bf16", str(FOLDER / "script.py"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    check("script", ran.stdout)
    assert "lowp run: bf16, 48 optimizer steps, 0 skipped" in ran.stderr


def rank(number: int, folder: str, count: int) -> None:
    """Act as a process that torchrun has started, for one script after the other."""
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    begin = torch.distributed.init_process_group
    for place, (name, options) in enumerate((("ddp", []), ("ddp", ["--resume"]), ("fsdp2", []))):
        store = torch.distributed.FileStore(f"{folder}/store {place}", count)
        torch.distributed.init_process_group = lambda backend, store=store: begin(
            backend, store=store, rank=number, world_size=count
        )
        sys.argv = [name, *options]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        Path(f"{folder}/{place} {number}.txt").write_text(out.getvalue())


def test_examples_for_many_ranks_run_learn_and_resume(tmp_path: Path) -> None:
    forked.ranks(rank, (str(tmp_path), 2), 2)
    said = [(tmp_path / f"{place} 0.txt").read_text() for place in range(3)]
    assert [(tmp_path / f"{place} 1.txt").read_text() for place in range(3)] == ["", "", ""]
    for name, text in zip(("ddp", "ddp", "fsdp2"), said, strict=True):
        check(name, text)
    assert said[0] == said[1]  # resumed after the last epoch


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKED)
def test_examples_for_many_ranks_run_under_torchrun(name: str, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ran = forked.run(*launcher, str(FOLDER / f"{name}.py"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    check(name, ran.stdout)
