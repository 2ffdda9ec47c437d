"""A study trains the planned runs, reports the results, and continues after an interruption."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes import results, runs
from lowp.recipes.comparison import Study, variants_of
from lowp.recipes.sweep import Grid
from lowp.recipes.training import Settings, Training, load_data, threads_of

TINY = Settings("digits", epochs=2, batch=128)
DATA = load_data(TINY)


def quiet(name: str, epoch: float) -> None:
    """Ignore progress."""


def done(study: Study, processes: int = 1) -> dict[str, Any]:
    for _ in study.run(quiet, processes):
        pass
    return study.document()


def without_seconds(document: dict[str, Any]) -> list[Any]:
    rows = json.loads(json.dumps(document["variants"]))
    for row in rows:
        for run in row["runs"]:
            for record in run["history"]:
                del record["seconds"]
    return rows


def test_fp32_comes_first_and_once() -> None:
    assert [row.label for row in variants_of(TINY, ["bf16", "fp32", "bf16 "])] == ["fp32", "bf16"]


def test_each_precision_that_can_be_scaled_has_a_row_a_scale() -> None:
    rows = variants_of(TINY, ["fp16", "fp16-naive"], ["1", "dynamic"])
    assert [row.label for row in rows] == ["fp32", "fp16, scale 1", "fp16, scale dynamic", "fp16-naive"]
    assert [row.settings.loss_scale for row in rows] == [None, "1", "dynamic", None]


def test_a_comparison_says_what_its_runs_showed() -> None:
    study = Study(variants_of(TINY, ["bf16", "fp16"], ["8"]), range(2), samples=2)
    document = done(study)
    assert document["complete"] and document["baseline"] == "fp32"
    for row in document["variants"]:
        values = [run["history"][-1]["accuracy"] for run in row["runs"]]
        assert [run["seed"] for run in row["runs"]] == [0, 1]
        assert row["statistics"]["accuracy"]["values"] == values
        assert row["statistics"]["accuracy"]["mean"] == pytest.approx(sum(values) / 2)
        assert row["statistics"]["accuracy"]["deviation"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    baseline, bf16, fp16 = document["variants"]
    assert baseline["verdict"]["verdict"] == "baseline"
    assert baseline["statistics"]["flushed_gradients"]["mean"] == 0
    gap = baseline["statistics"]["accuracy"]["mean"] - bf16["statistics"]["accuracy"]["mean"]
    assert bf16["verdict"]["gap"] == pytest.approx(gap)
    assert fp16["statistics"]["loss_scale"]["values"] == [8.0, 8.0]
    for seed, why in ((0, "out of memory"), (1, "another")):
        study.runs["fp16, scale 8", seed] = {**study.runs["fp16, scale 8", seed], "failure": why}
    failed = study.document()["variants"][2]["verdict"]
    assert failed["verdict"] == "fails" and failed["reason"] == "2 of 2 runs came to nothing; out of memory"


def test_two_processes_train_the_same_bits_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    forked.begin()  # while Ctrl-C is not blocked: what is forked from the server would not hear it
    monkeypatch.setattr("lowp.recipes.runs.multiprocessing", SimpleNamespace(get_context=lambda _: forked.context()))
    rows = variants_of(TINY, ["fp16"])
    with threads_of(1):
        alone = done(Study(rows, [0], samples=2))
    study, told = Study(rows, [0], samples=2), list[tuple[Any, ...]]()
    for _ in study.run(lambda *epoch: told.append(epoch), 2):
        pass
    assert without_seconds(alone) == without_seconds(study.document())
    assert told  # of progress in the other processes


def test_a_run_that_ends_in_an_error_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Training.step

    def breaking(self: Training, *arguments: Any) -> torch.Tensor:
        if self.settings.precision == "bf16" and self.epoch == 1:
            raise FloatingPointError("no scale is small enough")
        return step(self, *arguments)

    monkeypatch.setattr(Training, "step", breaking)
    document = done(Study(variants_of(TINY, ["bf16", "bf16-tpu"]), [0, 1], samples=0))
    _, bf16, tpu = document["variants"]
    assert bf16["verdict"]["verdict"] == "fails"
    assert "2 of 2 runs came to nothing; FloatingPointError: no scale is small enough" in bf16["verdict"]["reason"]
    assert tpu["verdict"]["verdict"] != "fails" and len(tpu["runs"]) == 2


def test_a_study_that_was_stopped_goes_on_and_is_the_same_in_the_end(tmp_path: Path) -> None:
    rows, path = variants_of(TINY, ["bf16"]), tmp_path / "run.json"
    whole = done(Study(rows, [0, 1], samples=2))
    part = Study(rows, [0, 1], samples=2)
    asked = iter(range(100))
    names = [name for name, _ in part.run(quiet, 1, lambda: next(asked) >= 45)]
    assert names == ["fp32, seed 0", "bf16, seed 0"]
    results.write(path, part.document())
    assert not results.read(path, "comparison")["complete"]
    rest = Study(rows, [0, 1], samples=2)
    assert rest.resume(path) == 2 and len(rest.jobs()) == 2
    assert repr(without_seconds(done(rest))) == repr(without_seconds(whole))


def test_a_run_that_was_stopped_within_an_epoch_goes_on_there(tmp_path: Path) -> None:
    rows, folder = variants_of(TINY, ["bf16"]), tmp_path / "parts"
    whole = done(Study(rows, [0], samples=4))
    part, rest = Study(rows, [0], samples=4), Study(rows, [0], samples=4)
    part.folder = rest.folder = folder
    asked = iter(range(100))
    assert [name for name, _ in part.run(quiet, 1, lambda: next(asked) >= 13)] == []
    assert [one.name for one in folder.iterdir()] == ["fp32-seed-0.pt"]
    assert Training.resume(folder / "fp32-seed-0.pt").step_of_epoch > 0
    assert repr(without_seconds(done(rest))) == repr(without_seconds(whole))
    assert not list(folder.iterdir())


def test_progress_within_an_epoch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_PACE", 0.0)
    told: list[float] = []
    for _ in Study(variants_of(TINY, []), [0], samples=0).run(lambda name, epoch: told.append(epoch), 1):
        pass
    assert told == sorted(told) and len(set(told)) > 10 and 0 < told[1] < 1 and told[-1] == TINY.epochs


def test_runs_of_another_plan_are_not_taken_over(tmp_path: Path) -> None:
    results.write(tmp_path / "run.json", done(Study(variants_of(TINY, ["bf16"]), [0], samples=0)))
    other = Study(variants_of(Settings("digits", epochs=3), ["bf16"]), [0], samples=0)
    with pytest.raises(InvalidInput, match=r"contains runs that this command does not ask for \(fp32, seed 0\)"):
        other.resume(tmp_path / "run.json")
    assert not other.runs


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document.pop("variants"),
        lambda document: document["variants"][0].pop("label"),
        lambda document: document["variants"][0]["runs"].append(3),
        lambda document: document["variants"][0]["runs"][0].update(history=[{"epoch": 0, "loss": "low"}]),
        lambda document: document["variants"][0]["runs"][0].update(history=[7]),
        lambda document: document["variants"][0]["runs"][0].update(failure=7),
        lambda document: document["variants"][0]["runs"][0].pop("skipped_steps"),
        lambda document: document["variants"][0]["runs"][0].update(loss_scale="big"),
    ],
)
def test_results_that_were_edited_are_not_taken_over(edit: Callable[[Any], object], tmp_path: Path) -> None:
    study = Study(variants_of(TINY, []), [0], samples=0)
    run = {"settings": asdict(replace(study.variants[0].settings, seed=0)), "seed": 0, "failure": None}
    record = {"epoch": 0, "loss": 1.0, "accuracy": 0.5}
    study.runs["fp32", 0] = {**run, "history": [record, record], "loss_scale": None, "skipped_steps": 0, "steps": 1}
    document = study.document()
    results.write(tmp_path / "run.json", document)
    assert Study(variants_of(TINY, []), [0], samples=0).resume(tmp_path / "run.json") == 1
    edit(document)
    results.write(tmp_path / "run.json", document)
    other = Study(variants_of(TINY, []), [0], samples=0)
    with pytest.raises(
        InvalidInput, match=r"run\.json has been changed since lowp wrote it \(.*\): create it again, or give another"
    ):
        other.resume(tmp_path / "run.json")
    assert not other.runs


# -- sweeps -----------------------------------------------------------------------------------------------------------
def test_a_grid_is_read() -> None:
    assert Grid.parse("exponent=3..5,mantissa=2") == Grid((3, 4, 5), (2,), True)
    assert Grid.parse(" mantissa = 2 .. 3 , exponent=8,subnormals=no") == Grid((8,), (2, 3), False)
    assert Grid.parse("exponent=5,mantissa=7,subnormals=no").name(5, 7) == "e5m7ftz"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("exponent=9..2,mantissa=2..3", "exponent=9..2 has its larger end first; did you mean exponent=2..9"),
        ("exponent=2..9,mantissa=2..3", "a sweep takes 2 to 8 exponent bits"),
        ("exponent=1..3,mantissa=2", "a sweep takes 2 to 8 exponent bits"),
        ("exponent=2..8,mantissa=2..24", "a sweep takes at most 23 mantissa bits"),
        ("exponent=2..8,mantissa=2..999999999", "a sweep takes at most 23 mantissa bits"),
        ("exponent=2..8", "mantissa is missing; give both ranges, as in exponent=3..8,mantissa=2..10"),
        ("exponent=2..8,mantissa=x", "'mantissa=x' is not understood"),
        ("exponent=2,exponent=3,mantissa=2", "'exponent=3' is not understood"),
        ("exponent=8..9,mantissa=2", "a sweep takes 2 to 8 exponent bits"),
        ("exponent=3,mantissa=24", "a sweep takes at most 23 mantissa bits"),
        ("mantissa=3", "exponent is missing"),
        ("bits=2,mantissa=2", "'bits=2' is not understood"),
        ("exponent=3,mantissa=2,subnormals=maybe", "'subnormals=maybe' is not understood"),
        ("", "'' is not understood"),
    ],
)
def test_what_is_no_grid_is_named(text: str, error: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Grid.parse(text)
    assert error in str(raised.value)


# -- files ------------------------------------------------------------------------------------------------------------
def test_results_are_json_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    results.write(path, {**results.header("comparison"), "values": [1.5, math.nan, math.inf], 3: (1, None)})
    document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert document["values"] == [1.5, None, None] and document["3"] == [1, None]
    assert document["machine"]["words"] and document["versions"]["torch"] == torch.__version__
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_what_could_not_be_written_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no folder"):
        results.check_writable(tmp_path / "no" / "run.json")
    with pytest.raises(InvalidInput, match="is a folder: give a file in it"):
        results.check_writable(tmp_path)
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    (tmp_path / "photo.png").write_bytes(b"\x89PNG of a camera")
    (tmp_path / "mine.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    for name in ("mine.json", "photo.png", "mine.svg"):
        with pytest.raises(InvalidInput, match=r"is not a (file|picture) (of|made by) lowp.* and was not changed"):
            results.check_writable(tmp_path / name)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match="cannot be read as results"):
        results.read(deep, "comparison")
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "fixed").mkdir()
        (tmp_path / "fixed").chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(InvalidInput, match="cannot be written: Permission denied"):
            results.check_writable(tmp_path / "fixed" / "run.json")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "cannot be read as results"),
        ("[1]", "does not contain results of lowp"),
        ('{"lowp_results": 9, "kind": "comparison"}', "holds a comparison of version 9, not a comparison of version 1"),
        ('{"lowp_results": 1, "kind": "sweep"}', "holds a sweep of version 1, not a comparison"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InvalidInput, match=error):
        results.read(tmp_path / "run.json", "comparison")
