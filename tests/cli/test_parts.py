"""The parts of commands at their bounds: what is refused, what is counted, and what reaches the work."""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lowp import cli
from lowp.benchmarking.benchmark import BenchmarkPlan
from lowp.cli import bench, compare, figure, profile, recipes, run, serving, train, watch
from lowp.cli.explain import _element
from lowp.errors import InvalidInput
from lowp.launch.record import RunSettings
from lowp.numerics.policies import CheapestPolicy, HighLayers
from lowp.numerics.prediction import Window
from lowp.numerics.record import Key
from lowp.presets import PRESETS
from lowp.recipes.comparison import Study
from lowp.recipes.profiling import Verified
from lowp.report.terminal import plain_table

Lowp = Callable[..., Any]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def asked(options: Any, **given: Any) -> argparse.Namespace:
    """Return the arguments of a command, with defaults where they are not given."""
    defaults = {one.dest: False if one.kind is bool else one.default for one in options}
    return argparse.Namespace(**{**defaults, **given})


class Bar:
    """Stands in for a progress bar, and notes what it is told."""

    told: ClassVar[list[Any]] = []
    is_live = False

    def __init__(self, *given: Any) -> None:
        self.told.append(given)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.told.append("end")

    def advance(self, *given: Any) -> None:
        self.told.append(("advance", *given))

    def move(self, *given: Any, **named: Any) -> None:
        self.told.append(("move", *given, *named.values()))

    def move_part(self, *given: Any) -> None:
        self.told.append(("part", *given))

    def line(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr("lowp.report.terminal.Bar", Bar)
    monkeypatch.setattr(Bar, "told", [])
    return Bar.told


# -- profile ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("verify_steps", "steps", "found"),
    [
        *((None, None, 40), (None, 12, 12), (None, 40, 40), (None, 100, 40)),
        *(("all", 3, None), ("1", 9, 1), ("70", None, 70)),
    ],
)
def test_as_many_steps_are_verified_as_asked_for(
    verify_steps: str | None, steps: int | None, found: int | None
) -> None:
    assert profile._steps_to_verify(asked(profile.OPTIONS, verify_steps=verify_steps, steps=steps)) == found


@pytest.mark.parametrize("steps", ["0", "-1", "1.5", "", "x"])
def test_steps_to_verify_are_a_number(steps: str) -> None:
    with pytest.raises(InvalidInput, match=f"--verify-steps {re.escape(steps)}: give 1 or more, or all"):
        profile._steps_to_verify(asked(profile.OPTIONS, verify_steps=steps))


def test_numbers_of_a_profile_are_checked_before_any_work() -> None:
    for given in ({"bits": 2}, {"bits": 16}, {"least_signal": 0.1}, {"high": 1, "precision": "fp8"}, {}):
        profile._check(asked(profile.OPTIONS, **given))
    Path("file").write_text("")
    for given, words in (
        ({"bits": 1}, "--bits 1: give 2 to 16, the bits of an operand"),
        ({"bits": 17}, "--bits 17: give 2 to 16"),
        ({"least_signal": 0.0}, "--least-signal 0: give decibels above 0, such as 20"),
        ({"least_signal": float("inf")}, "--least-signal inf: give decibels"),
        ({"high": 2}, "--high 2 keeps layers of a precision in bf16: give --precision, too"),
        ({"tensorboard": Path("file")}, "--tensorboard file is a file: give a folder"),
    ):
        with pytest.raises(InvalidInput, match=words):
            profile._check(asked(profile.OPTIONS, **given))
    profile._check(asked(profile.OPTIONS, tensorboard=Path()))


@pytest.mark.parametrize(
    ("script", "given", "words"),
    [
        (
            ["a.py", "-x"],
            {"verify": True},
            "--verify trains a recipe: give a recipe instead of a.py, or compare .*a.py -x",
        ),
        (["run.json"], {"verify_steps": "3"}, "--verify-steps trains a recipe: give a recipe instead of run.json$"),
        (["-m", "a"], {"bits": 4}, "--bits trains a recipe: give a recipe instead of -m, or compare whole runs"),
        (["a.py"], {"seed": 1}, "--seed is for recipes, and a.py is none: options of the script come after its name"),
        (["run.json"], {"steps": 1}, "--steps is for recipes, and run.json is none$"),
    ],
)
def test_options_of_recipes_are_for_recipes(script: list[str], given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        profile._require_recipe(asked(profile.OPTIONS, script=script, **given))
    profile._require_recipe(asked(profile.OPTIONS, script=script))


@pytest.mark.parametrize(
    ("words", "own", "rest"),
    [
        ("--html a.html digits --steps 3", ["--html", "a.html", "--steps", "3"], ["digits"]),
        ("--json a.py --json", ["--json"], ["a.py", "--json"]),
        ("--json -m a --json", ["--json"], ["-m", "a", "--json"]),
        ("--diff a.json b.json --html=c", ["--diff", "a.json", "b.json", "--html=c"], []),
        ("--htlm a.html a.py", ["--htlm"], []),
        ("", [], []),
    ],
)
def test_arguments_after_a_script_are_its_own(words: str, own: list[str], rest: list[str]) -> None:
    assert profile.split(words.split()) == (own, rest)


def test_what_is_left_of_a_profile_is_said() -> None:
    assert profile._left(None) == "interrupted; nothing was saved: --out saves each recorded step"
    assert profile._left(Path("a.json")) == "interrupted; a.json has the recorded steps"


# -- explain ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "found"), [(None, None), ("1,1", (0, 0)), (" 4 , 2 ", (3, 1)), ("1,4", (0, 3))])
def test_elements_are_counted_from_one(text: str | None, found: Any) -> None:
    assert _element(text) == found


# -- train ------------------------------------------------------------------------------------------------------------
def trained(**given: Any) -> Any:
    metric, precision = SimpleNamespace(name="acc", share=True), SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))
    recipe = SimpleNamespace(name="toy", metric=metric)
    last = {"epoch": 2, "acc": 0.875, "loss": 0.123456, "training_loss": 0.5, "loss_scale": 1024.0, "skipped_steps": 3}
    common = {"recipe": recipe, "precision": precision, "epochs": 4, "epoch": 2, "history": [last], "failure": None}
    settings = SimpleNamespace(precision="fp16", seed=7)
    return SimpleNamespace(**{**common, "settings": settings, "steps_per_epoch": 8, "progress": 0.625, **given})


def test_an_epoch_is_a_line() -> None:
    training = trained()
    scale = "loss scale 1024, 3 skipped"
    assert train._epoch_line(training) == f"epoch 2/4  acc 87.5%  loss 0.1235  training loss 0.5000  {scale}"
    training.precision.scaler = torch.amp.GradScaler("cpu", enabled=False)
    training.history[-1]["epoch"] = 0
    assert train._epoch_line(training) == "epoch 0/4  acc 87.5%  loss 0.1235"


def test_the_end_of_a_training_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train._report(trained(), Path("a.pt")) == 0
    assert capsys.readouterr().out == "toy in fp16, seed 7: acc 87.5%, loss 0.1235 after 2 epochs; a.pt\n"
    assert train._report(trained(failure="its loss was NaN"), Path("a.pt")) == 2
    assert capsys.readouterr().err == "lowp: error: toy in fp16 failed: its loss was NaN\n"


@pytest.mark.parametrize(
    ("epoch", "epochs", "failure", "words"),
    [
        (2, 4, None, "a.pt holds a run that stopped after 2 of 4 epochs: give --resume to continue it"),
        (4, 4, None, "a.pt holds a finished run of 4 epochs: give --overwrite"),
        (1, None, None, "a.pt holds a finished run of 1 epoch: give"),
        (2, 4, "NaN", "a.pt holds a finished run of 2 epochs: give"),
    ],
)
def test_a_checkpoint_that_is_there_is_told_of(epoch: int, epochs: int | None, failure: str | None, words: str) -> None:
    assert train._holds(Path("a.pt"), {"epoch": epoch, "settings": {"epochs": epochs}, "failure": failure}).startswith(
        words
    )


@pytest.mark.parametrize(
    ("named", "path"),
    [
        ({}, "toy-fp32-seed0.pt"),
        ({"precision": "flex16+5", "seed": 3}, "toy-flex16+5-seed3.pt"),
        ({"precision": "a/my policy.toml"}, "toy-my-policy.toml-seed0.pt"),
        ({"precision": "e4m3fn:saturate:stochastic"}, "toy-e4m3fn-saturate-stochastic-seed0.pt"),
    ],
)
def test_a_checkpoint_is_named_after_its_run(named: dict[str, Any], path: str) -> None:
    assert train._default_path("toy", named) == Path(path)


@pytest.mark.parametrize("is_live", [False, True])
def test_progress_within_an_epoch_is_told_from_time_to_time(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, is_live: bool
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(Bar, "is_live", is_live)
    training, pause = trained(), 0.1 if is_live else 30.0
    progress = train._Progress(Bar(), training)  # type: ignore[arg-type]
    assert told == [(), ("move", 2.5)]
    for step, share in ((1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (8, 2.5)):
        clock.now, training.step_of_epoch = 100.0 + 1.001 * pause * share, step
        progress(training, torch.tensor(step / 8))
    line = ["epoch 3/4: step {} of 8, loss {}"]
    steps = {2: "0.2500", 4: "0.5000"}
    shown: list[Any] = []
    for step, loss in {**steps, 8: "1.0000"}.items():
        shown.append(("move", 2 + step / 8, f"toy: step {step} of 8, loss {loss}"))
        shown += [line[0].format(step, loss)] * (step in steps and not is_live)
    assert told[2:] == shown


# -- compare ----------------------------------------------------------------------------------------------------------
def study(precision: str = "bf16", **given: Any) -> Study:
    return compare._study(asked(compare.OPTIONS, recipe="digits", precision=precision, **given))


def test_a_comparison_has_as_many_runs_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert [len(study().seeds), len(study(seeds=2).seeds)] == [3, 2]
    assert capsys.readouterr().err == "fp32 is trained too, as what the others are compared with\n" * 2
    assert [one.label for one in study("bf16,fp32").variants] == ["fp32", "bf16"] and capsys.readouterr().err == ""
    assert [one.label for one in compare._study(asked(compare.OPTIONS, recipe="digits")).variants] == [
        *compare.DEFAULT.split(",")
    ]
    whole = study().settings.epochs or 0
    for epochs, half in ((None, whole // 2), (7, 7), (1, 1)):
        grid = study(None, sweep="exponent=5,mantissa=2..3", epochs=epochs)  # type: ignore[arg-type]
        assert (grid.settings.epochs, len(grid.seeds), len(grid.variants)) == (half, 1, 3)
    scaled = study(None, sweep="exponent=5,mantissa=2", loss_scale="8", seeds=2)  # type: ignore[arg-type]
    assert len(scaled.seeds) == 2 and scaled.variants[-1].settings.loss_scale == "8"


def test_an_interrupted_comparison_says_what_is_kept() -> None:
    kept = Path("begun")
    kept.write_text("")
    jobs = [SimpleNamespace(kept=one) for one in (kept, Path("none"), None)]
    some: Any = SimpleNamespace(runs=[1, 2], jobs=lambda: jobs, folder=Path("parts"))
    end = "To continue, repeat the command with --resume"
    assert compare._interrupted(some, Path("a.json")) == (
        f"interrupted; 2 of 5 runs are in a.json, and 1 begun in parts. {end}"
    )
    kept.unlink()
    assert compare._interrupted(some, Path("a.json")) == f"interrupted; 2 of 5 runs are in a.json. {end}"


@pytest.mark.parametrize(("count", "names"), [(12, ", ".join(f"v{place}" for place in range(12))), (13, "13 formats")])
def test_the_work_of_a_comparison_is_announced(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, count: int, names: str
) -> None:
    written: list[Any] = []
    monkeypatch.setattr("lowp.recipes.results.write", lambda out, document: written.append((out, document)))
    monkeypatch.setattr("lowp.recipes.comparison.result_line", lambda study, name, result: f"{name} {result}")
    some: Any = SimpleNamespace(
        jobs=lambda: [1, 2, 3],
        settings=SimpleNamespace(epochs=5),
        variants=[SimpleNamespace(label=f"v{place}") for place in range(count)],
        seeds=range(1),
        recipe=SimpleNamespace(name="toy"),
        data=SimpleNamespace(description="ten numbers"),
        document=lambda: "document",
        run=lambda moved, processes, stop: [("a", "good"), ("b", "bad")],
    )
    compare._train(some, Path("a.json"), None, None)  # type: ignore[arg-type]
    assert told == [
        *(("toy", 15, "epochs"), f"toy: {names}; 1 seed, 5 epochs; ten numbers", "1/3  a good", "2/3  b bad", "end")
    ]
    assert written == [(Path("a.json"), "document")] * 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mismatch": "int8", "sweep": "x"}, "omit --sweep"),
        ({"mismatch": "int8", "loss_scale": "8"}, "omit --loss-scale"),
        ({"inference": "int8", "precision": "fp16"}, "omit --precision and --sweep"),
        ({"inference": "int8", "sweep": "x"}, "omit --precision and --sweep"),
        ({"inference": "int8", "loss_scale": "8"}, "omit --precision and --sweep"),
        ({"recover": True}, "--recover trains for the formats of --inference: give --inference too"),
        ({"of_recipe": "digits"}, "--recipe names the recipe of a file"),
        ({"timing": 3600.0}, "--timing 3600: give seconds"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        compare._check(asked(compare.OPTIONS, recipe="digits", **given))


def test_what_goes_together_is_not_refused() -> None:
    goes: tuple[dict[str, Any], ...] = (
        *({}, {"timing": 0.0}, {"timing": 3599.0}, {"mismatch": "int8"}, {"inference": "int8", "recover": True}),
        {"sweep": "exponent=5,mantissa=2"},
    )
    for given in goes:
        compare._check(asked(compare.OPTIONS, recipe="digits", **given))


# -- figure -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "given", "bar", "options"),
    [
        ("autoflex", {}, ("figure-autoflex", 400, "steps"), {"steps": 400, "layer": None}),
        ("flex-window", {"steps": 3, "layer": "2"}, ("figure-flex-window", 3, "steps"), {"steps": 3, "layer": "2"}),
        ("updates", {"recipe": "digits", "epochs": 3}, ("figure-updates", 3, "epochs"), {}),
        ("gradients", {"epochs": 3}, ("figure-gradients", 6, "epochs"), {}),
        ("stall", {"epochs": 2}, ("figure-stall", 8, "epochs"), {"layer": None}),
        ("curves", {"epochs": 2}, ("comparison", 18, "epochs"), {"precisions": ["fp16", "flex16+5"], "seeds": 3}),
        (
            *("curves", {"epochs": 2, "precisions": "bf16", "seeds": 2}, ("comparison", 8, "epochs")),
            {"precisions": ["bf16"], "seeds": 2},
        ),
        ("cost", {"formats": "fp16,e5m7"}, ("figure-cost", 0, "steps"), {"formats": ["fp16", "e5m7"]}),
    ],
)
def test_a_figure_is_recorded_with_what_was_asked(
    told: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    given: dict[str, Any],
    bar: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    found: list[dict[str, Any]] = []

    def record(**given: Any) -> dict[str, Any]:
        found.append(given)
        return {"of": name}

    monkeypatch.setattr(figure, "_function", lambda module, name: record)
    assert figure._record(figure.FIGURES[name], given, lambda: False) == {"of": name}  # type: ignore[arg-type]
    assert told == [bar, "end"]
    settings = found[0].pop("settings", None)
    assert found[0].pop("onlooker") and found[0] == options
    assert (settings is None) == (name == "cost") and (
        settings is None or settings.recipe == given.get("recipe", settings.recipe)
    )


# -- run --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "precision", "settings"),
    [
        ({}, "bf16", {}),
        ({"monitor": ""}, "fp32", {"monitor": ""}),
        ({"precision": "fp16", "monitor": "a.jsonl"}, "fp16", {"monitor": "a.jsonl"}),
        ({"precision": "e5m7", "loss_scale": "8", "strict": True}, "e5m7", {"loss_scale": "8", "strict": True}),
        ({"override": True, "report": Path("a.json")}, "bf16", {"override": True, "report": "a.json"}),
    ],
)
def test_a_script_is_run_as_asked(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], precision: str, settings: dict[str, Any]
) -> None:
    Path("train.py").write_text("")
    started: list[Any] = []

    class Started(Exception):
        pass

    def started_with(environment: dict[str, str]) -> Any:
        started.append(environment)
        raise Started

    monkeypatch.setattr("lowp.launch.record.started_with", started_with)
    with pytest.raises(Started):
        run.run(asked(run.OPTIONS, script=["train.py"], **given))
    monkeypatch.setattr("os.environ", started[0])
    found = RunSettings.from_environment()
    assert found is not None and found.precision == precision
    names = ("loss_scale", "strict", "override", "report", "monitor")
    told = {name: getattr(found, name) for name in names}
    usual = {"loss_scale": "", "strict": False, "override": False, "report": "", "monitor": None}
    for name in ("report", "monitor"):
        if settings.get(name):
            settings = {**settings, name: str(Path(settings[name]).resolve())}
    assert told == {**usual, **settings}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([], "the script is missing"),
        (["--"], "the script is missing"),
        (["--precison=fp16", "a.py"], "'--precison' is not an option of lowp run: .*; did you mean --precision"),
        (["-x"], "'-x' is not an option of lowp run"),
        (["bf16", "fp32", "a.py"], "lowp run --compare fp32,bf16 train.py, and one as in lowp run --precision bf16"),
        (["bf16"], "'bf16' is a precision and not a script: .*--compare fp32,bf16 train.py"),
        (["a.jsonl", "a.py"], "'a.jsonl' is not a script: a monitor's file stands behind '=', --monitor=a.jsonl"),
    ],
)
def test_what_is_no_script_is_refused(script: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        run._command(script)


def test_a_script_is_started_by_this_python() -> None:
    Path("train.py").write_text("")
    assert (
        run._command(["--", "train.py", "-x"]) == run._command(["train.py", "-x"]) == [sys.executable, "train.py", "-x"]
    )
    assert run._command(["-m", "json.tool"]) == [sys.executable, "-m", "json.tool"]
    Path("bf16").write_text("")
    assert run._command(["bf16"]) == [sys.executable, "bf16"]  # a script of that name
    assert run._precisions(["bf16", "fp8", "a.py", "fp16"]) == ["bf16", "fp8"] and run._precisions(["fp8"]) == ["fp8"]


# -- recipes, serving -------------------------------------------------------------------------------------------------
def test_a_recipe_is_told_in_lines_with_its_sizes() -> None:
    sizes = {
        "cpu": SimpleNamespace(
            parameters=1234, epochs=1, batch=8, learning_rate=0.001, options={"layers": 2, "a": "b"}
        ),
        "full": SimpleNamespace(parameters=10**6, epochs=20, batch=64, learning_rate=0.1, options={}),
    }
    words = {"summary": "a toy", "data": "ten numbers", "source": "nowhere", "default_size": "full"}
    recipe: Any = SimpleNamespace(name="toy", sizes=sizes, metric=SimpleNamespace(name="accuracy"), **words)
    assert recipes._full(recipe, 70).splitlines() == [
        "toy: a toy",
        "  data    ten numbers",
        "  source  nowhere",
        "  cpu     1,234 parameters, 1 epoch, batch 8, learning rate 0.001,",
        "          layers 2, a b",
        "  full    1,000,000 parameters, 20 epochs, batch 64, learning rate",
        "          0.1, the default",
        "  judged by accuracy",
    ]
    document = recipes._document(recipe)
    assert document["metric"] == "accuracy" and document["sizes"]["cpu"] == vars(sizes["cpu"])


def test_names_of_files_are_told_from_recipes() -> None:
    Path("mine").write_text("")
    Path("digits").write_text("")
    names = ["digits", "mine", "none", "none.pt", "none.safetensors", "none.txt"]
    assert [serving.is_file(name) for name in names] == [False, True, False, True, True, False]


MISMATCH = """\
toy: served, beside training in bf16
               mean     largest   mean   largest    argmax
served in   |Δ log p|   |Δ log p|      KL        KL   changed   most by (KL, alone)
"""


def test_a_mismatch_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"format": "int8", "failure": None, "mean": 0.0123, "largest": 0.5, "kl": 1e-5, "largest_kl": 0.25}
    row |= {"layers": [{"layer": "0", "kl": 0.02}, {"layer": "2", "kl": 0.013}], "changed": 0.0123, "tokens": 1234}
    rows = [{**row, "kept": {"head": "too small"}}, {"format": "fp8", "failure": "no layer", "tokens": 5}]
    serving._print_mismatch({"recipe": {"name": "toy"}, "training": "bf16", "rows": rows})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "toy: served, beside training in bf16"
    assert "int8 0.012 0.5 1e-05 0.25 1.23% 0 (0.02), 2 (0.01)" in lines and "fp8 - - - - -" in lines
    assert lines[-2:] == ["int8: head stays as it was: too small", "fp8: no layer"]
    assert any(line.startswith("1,234 predictions of the validation set") for line in lines)


# -- watch ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("every", "is_allowed"), [(0.0, False), (0.01, True), (3600.0, True), (3601.0, False)])
def test_a_pause_between_looks_is_up_to_an_hour(
    every: float, is_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_shown", lambda *given: 7)
    monkeypatch.setattr("lowp.monitoring.log.Tail", lambda path: SimpleNamespace(close=lambda: None))
    arguments = asked(watch.OPTIONS, file=Path("a.jsonl"), every=every)
    if is_allowed:
        assert watch.run(arguments) == 7
        return
    with pytest.raises(InvalidInput, match=f"--every {every:g}: give seconds, more than 0"):
        watch.run(arguments)


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("ends_by", "code"), [("ended", 0), ("gone", 0), ("interrupt", 130)])
def test_a_board_is_shown_until_its_run_ends(monkeypatch: pytest.MonkeyPatch, ends_by: str, code: int) -> None:
    board: Any = SimpleNamespace(ended=None, is_gone=False, taken=[])

    def take(records: str) -> None:
        board.taken.append(records)
        if len(board.taken) == 3 and ends_by == "interrupt":
            raise KeyboardInterrupt
        board.ended = 0 if len(board.taken) == 3 and ends_by == "ended" else None
        board.is_gone = len(board.taken) == 3

    board.take, board.shown = take, lambda screen, is_whole=False: f"board {len(board.taken)} {is_whole}"
    pauses: list[float] = []
    monkeypatch.setattr(watch.time, "sleep", pauses.append)
    monkeypatch.setattr(sys, "stdout", Terminal())
    tail: Any = SimpleNamespace(more=lambda: "records")
    assert watch._shown(tail, board, asked(watch.OPTIONS, every=0.25)) == code
    assert board.taken == ["records"] * 3 and pauses == [0.25] * 2
    shown = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "board 2 False" in shown and ("board 3 False" in shown) == (ends_by != "interrupt")


# -- the command itself -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [ValueError, OSError, InvalidInput, KeyError, TypeError])
@pytest.mark.parametrize("module", ["lowp.anything", "lowp", "lowpass", "others"])
def test_errors_of_lowp_s_own_code_are_about_the_input(kind: type[Exception], module: str) -> None:
    with pytest.raises(kind) as caught:
        exec("raise kind('no')", {"kind": kind, "__name__": module})
    is_own = kind is ValueError and module.partition(".")[0] == "lowp"
    assert cli._is_about_input(caught.value) is (is_own or kind in (OSError, InvalidInput))


def test_an_error_on_a_terminal_is_coloured_and_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    cli.print_error("[b]one two three four five six seven")
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert shown == "lowp: \x1b[1;31merror:\x1b[0m [b]one two three four five \nsix seven\n"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        *(("--seed 3", ""), ("--see 3", ""), ("--seed=3", ""), ("-1e-5", ""), ("-", ""), ("--", ""), ("-inf", "")),
        *(("-.5", ""), ("x -- --seeds", ""), ("--seeds", "--seeds"), ("-s", "-s"), ("--x=1", "--x"), ("-h", "")),
    ],
)
def test_unknown_options_are_found_before_their_values(words: str, refused: str) -> None:
    parser = cli.Parser(prog="lowp it")
    parser.add_argument("--seed")
    if not refused:
        parser.check_options(words.split())
        return
    with pytest.raises(cli.UnknownName, match=f"unknown option of lowp it '{refused}'"):
        parser.check_options(words.split())
    parser.check_options([f"{refused} in words"])


def test_paragraphs_of_help_are_filled_and_examples_stay() -> None:
    parser = cli.Parser(
        prog="it", description=f"{'word ' * 30}\n\n  lowp it\n  lowp that\n\nend", formatter_class=cli._Help
    )
    lines = cli._Help("it", width=200)._fill_text(parser.description or "", 200, "").splitlines()
    assert lines == [" ".join(["word"] * 20), " ".join(["word"] * 10), "", "  lowp it", "  lowp that", "", "end"]


def test_the_last_words_of_a_help_are_the_codes(lowp: Lowp) -> None:
    lines = lowp("--help").out.splitlines()
    assert lines[-1].startswith("A script that `run` or `profile` has run") and lines[-2] == ""
    assert [line.split()[0] for line in lines[-8:-2]] == ["0", "1", "2", "130", "141", "143"]


# -- what a profile is computed into ----------------------------------------------------------------------------------
@dataclass
class Effects:
    """What a precision does to a tensor, as far as a command reads it."""

    overflows: bool


@pytest.mark.parametrize(
    ("precision", "window", "scale"),
    [
        ("fp16", Window(-4, 35), 2.0**32),
        ("bf16", Window(-4, 35), 1.0),
        ("fp16", Window(-126, 127), 1.0),
        ("bf16", Window(-126, 127), 1.0),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("high", "policy"), [(None, None), (2, None), (2, "a.toml"), (None, "a.toml")])
def test_a_precision_is_predicted_at_its_scale_and_written_where_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    precision: str,
    window: Window,
    scale: float,
    as_json: bool,
    high: int | None,
    policy: str | None,
) -> None:
    preset, key = PRESETS[precision], Key("a", "linear", "input", "forward")
    effects = {key: Effects(True), key._replace(module="b"): Effects(False), key._replace(module="c"): Effects(True)}
    changes = {f"w{place}": size for place, size in enumerate((0.1, 0.5, 0.2, 0.4, 0.3, 0.6))}
    product = SimpleNamespace(flushed=0.5, error=0.25)
    policies: dict[str, Any] = {
        "effects": lambda record, policy, at: effects if (policy, at) == (preset.policy, scale) else {},
        "products": lambda record, policy, at: {("a", "linear"): {"forward": product}} if at == scale else {},
        "sensitivities": lambda record, policy: changes,
        "high_layers": lambda record, policy, count: HighLayers(preset.policy, {"a": 0.5}, ("a", str(count))),
        "worst": lambda found: list(found.items())[:1],
    }
    for name, function in policies.items():
        monkeypatch.setattr(f"lowp.numerics.policies.{name}", function)
    shown: list[Any] = []
    monkeypatch.setattr("lowp.report.profile.print_precision", lambda console, *given: shown.append(given))
    arguments = asked(
        profile.OPTIONS, precision=precision, high=high, json=as_json, policy=None if policy is None else Path(policy)
    )
    document = profile._precision("record", window, arguments)  # type: ignore[arg-type]
    largest = {"w5": 0.6, "w1": 0.5, "w3": 0.4, "w4": 0.3, "w2": 0.2}
    assert document == {
        **{"precision": precision, "rounded": 3, "overflow": 2, "loss_change": largest},
        "worst": [{**key._asdict(), "overflows": True}],
        "products": [{"module": "a", "op": "linear", "product": "forward", "flushed": 0.5, "error": 0.25}],
        "high": {"kept": ["a", str(high)], "shares": {"a": 0.5}, "policy": preset.policy.to_toml()},
    }
    assert list(document["loss_change"]) == list(largest)
    assert len(shown) == (not as_json) and all(given[0] == precision and given[3] == largest for given in shown)
    is_written = high is not None and policy is not None
    assert [one.name for one in Path().iterdir()] == ["a.toml"] * is_written
    assert not is_written or Path("a.toml").read_text() == preset.policy.to_toml()
    is_printed = high is not None and policy is None and not as_json
    assert capsys.readouterr().out == preset.policy.to_toml() * is_printed


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize(
    ("code", "content", "ends", "says"),
    [
        (0, "full", 0, ""),
        (5, "full", 5, ""),
        (0, "empty", 2, "lowp profile: why"),
        (5, "empty", 5, "lowp profile: why"),
        (0, "none", 1, "lowp profile: no step of a torch optimizer ran in the script: nothing was recorded"),
        (5, "none", 5, "lowp profile: no step of a torch optimizer ran"),
    ],
)
@pytest.mark.parametrize("out", [None, Path("mine.json")])
def test_a_profiled_script_ends_with_its_code_and_its_record(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    received: bool,
    code: int,
    content: str,
    ends: int,
    says: str,
    out: Path | None,
) -> None:
    path = out or Path("temporary.json")
    asked_for: list[Any] = []

    def profiled(script: list[str], overhead: str, target: Path | None, stop: Any, stdout: int | None) -> Any:
        asked_for.append((script, overhead, target, stdout))
        stop.received = 15 if received else None
        if content != "none":
            path.write_text("")
        return code, path

    monkeypatch.setattr("lowp.launch.profiling.profile_script", profiled)
    record = SimpleNamespace(is_empty=content == "empty", why_empty="why")
    monkeypatch.setattr("lowp.numerics.record.Record.load", lambda path: record)
    monkeypatch.setattr(profile, "_report", lambda record, arguments, command: {"next": command})
    for as_json in (False, True):
        arguments = asked(profile.OPTIONS, script=["a b.py", "-x"], json=as_json, out=out, max_overhead="5%")
        found = profile._script(arguments)
        command = {"next": "lowp run --policy policy.toml 'a b.py' -x"} if content == "full" else {}
        assert found == (128 + 15 if received else ends, command)
        assert asked_for.pop() == (["a b.py", "-x"], "5%", out, 2 if as_json else None)
        assert capsys.readouterr().err.startswith(says) and path.exists() == (out is not None and content != "none")


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({}, "--policy policy.toml, which writes the policy, then lowp it policy.toml"),
        ({"policy": Path("b.toml")}, "lowp it b.toml"),
    ],
)
def test_what_is_computed_from_a_record_is_written_where_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: dict[str, Any], command: str
) -> None:
    record: Any = SimpleNamespace(header={"title": "toy", "parameters": 7}, tensors=[1, 2, 3], sampled=[0, 1])
    advice = SimpleNamespace(policy=PRESETS["fp16"].policy, window="window", document=lambda: {"quiet": 5})
    monkeypatch.setattr("lowp.numerics.advice.advise", lambda found: advice if found is record else None)
    told: list[Any] = []
    monkeypatch.setattr("lowp.report.profile.print_profile", lambda console, *given: told.append(given))
    monkeypatch.setattr("lowp.report.profile_html.page", lambda *given, command: f"page of {command}")
    for name in ("to_csv", "to_tensorboard"):
        monkeypatch.setattr(f"lowp.report.profile.{name}", lambda record, path, name=name: told.append((name, path)))
    monkeypatch.setattr(profile, "_precision", lambda record, window, arguments: window)
    usual = {"title": "toy", "parameters": 7, "tensors": 3, "steps": 2, "quiet": 5}
    assert profile._report(record, asked(profile.OPTIONS, **given), "lowp it policy.toml") == usual
    assert told == [(record, advice, command)]
    more = {"html": Path("a.html"), "csv": Path("a.csv"), "tensorboard": Path("board"), "precision": "fp8"}
    for as_json in (False, True):
        told.clear()
        found = profile._report(record, asked(profile.OPTIONS, json=as_json, **more, **given), "lowp it policy.toml")
        assert found == {**usual, "precision": "window"}
        assert told[not as_json :] == [("to_csv", Path("a.csv")), ("to_tensorboard", Path("board"))]
        assert Path("a.html").read_text() == "page of lowp it " + ("b.toml" if given else "policy.toml")
        streams = capsys.readouterr()
        assert (streams.err if as_json else streams.out) == "report: a.html\n"
        assert (streams.out if as_json else streams.err) == ""
    assert not given or Path("b.toml").read_text() == PRESETS["fp16"].policy.to_toml()


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("holds", [True, False])
def test_a_policy_is_verified_and_searched_as_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool, bits: int | None, holds: bool
) -> None:
    recommended, cheap = PRESETS["fp16"].policy, PRESETS["fp8"].policy
    monkeypatch.setattr("lowp.numerics.advice.advise", lambda record: SimpleNamespace(policy=recommended))

    def cheapest(record: Any, bits: int, cost: str, least: float) -> CheapestPolicy:
        assert (bits, cost, least) == (8, "bytes", 20.0)
        return CheapestPolicy(cheap, {"a": "int8"}, 0.25, "bytes")

    def verified(settings: Any, policy: Any, steps: int | None) -> Verified:
        assert (settings, policy, steps) == ("settings", cheap if bits else recommended, 3)
        return Verified(3, 9, (1.0, 1.0 if holds else math.inf), 2.0, 0, {})

    monkeypatch.setattr("lowp.numerics.policies.cheapest", cheapest)
    monkeypatch.setattr("lowp.recipes.profiling.verified", verified)
    document: dict[str, Any] = {}
    given = asked(profile.OPTIONS, bits=bits, cost="bytes", json=as_json, verify_steps="3", policy=Path("a.toml"))
    assert profile._verified("settings", None, given, document) == (not holds)  # type: ignore[arg-type]
    assert document["verified"]["holds"] is holds and document["verified"]["steps"] == 3
    assert document.get("cheapest") == ({"layers": {"a": "int8"}, "share": 0.25, "of": "bytes"} if bits else None)
    assert Path("a.toml").exists() == (bits is not None) and (not bits or Path("a.toml").read_text() == cheap.to_toml())
    out = capsys.readouterr().out
    assert ("cheapest policy" in out, "verified over 3 of the recipe's 9 steps" in out) == (
        bits is not None and not as_json,
        not as_json,
    )


@pytest.mark.parametrize(
    ("received", "is_empty", "given", "code"),
    [
        (False, False, {}, 0),
        (False, True, {}, 2),
        (True, True, {}, 143),
        (True, False, {"verify": True}, 143),
        (False, False, {"verify": True}, 7),
        (False, False, {"verify_steps": "3"}, 7),
        (False, False, {"bits": 8}, 7),
    ],
)
def test_a_profiled_recipe_ends_with_a_code(
    told: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    received: bool,
    is_empty: bool,
    given: dict[str, Any],
    code: int,
) -> None:
    def profiled(settings: Any, steps: int, overhead: str, out: Any, stop: Any, moved: Any) -> Any:
        assert (settings.recipe, settings.seed, steps, overhead, out) == ("digits", 5, 9, "auto", None)
        stop.received = 15 if received else None
        moved(4, 12)
        return SimpleNamespace(is_empty=is_empty)

    monkeypatch.setattr("lowp.recipes.profiling.profiled", profiled)
    monkeypatch.setattr(profile, "_report", lambda record, arguments, command: {"next": command})
    monkeypatch.setattr(profile, "_verified", lambda *given: 7)
    found = profile._recipe("digits", asked(profile.OPTIONS, steps=9, seed=5, **given))
    assert found == (code, {} if is_empty else {"next": "lowp compare digits --precision policy.toml"})
    assert told == [("profiling digits", 9, "steps"), ("move", 4, 12), "end"]


# -- bench, policy ----------------------------------------------------------------------------------------------------
def test_what_is_measured_is_what_was_asked_for() -> None:
    plan = bench._plan(asked(bench.OPTIONS))
    assert plan == BenchmarkPlan(bench.DEFAULT.split(","), True, 3.0, None, None)
    given = {"precision": "e5m7", "no_torch_amp": True, "seconds": 3599.0, "threads": 2, "memory": "2GB"}
    assert bench._plan(asked(bench.OPTIONS, **given)) == BenchmarkPlan(["e5m7"], False, 3599.0, 2, 2 * 10**9)
    for seconds in (0.0, 3600.0):
        with pytest.raises(InvalidInput, match=f"--seconds {seconds:g}: give seconds above 0, such as 3"):
            bench._plan(asked(bench.OPTIONS, seconds=seconds))
    settings = bench._settings(asked(bench.OPTIONS, batch=7, data="d", device="cpu"), ["digits"])
    assert [(one.recipe, one.batch, one.data, one.device) for one in settings] == [("digits", 7, "d", "cpu")]
    with pytest.raises(InvalidInput, match="--data d is for one recipe, not for digits, gpt: run them one at a time"):
        bench._settings(asked(bench.OPTIONS, data="d"), ["digits", "gpt"])
    for device in ("mps", "xpu:1", "meta"):
        with pytest.raises(InvalidInput, match=f"--device {device}: memory can be measured on cpu and cuda only"):
            bench._settings(asked(bench.OPTIONS, device=device), ["digits"])


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ('[[rule]]\nops = ["linear"]\ninput = "fp16"\n', "a.toml: 1 rule, every op is known to table lowp-1"),
        (
            '[[rule]]\nops = ["linear"]\ninput = "fp16"\n[[rule]]\noutput = "bf16"\n',
            "a.toml: 2 rules, every op is known to table lowp-1",
        ),
        (
            '[[rule]]\nwhere = "a"\noutput = "bf16"\n[[rule]]\nops = ["linear"]\ninput = "fp16"\n',
            "a.toml: 2 rules, every op is known to table lowp-1",
        ),
        (
            '[[rule]]\nops = ["add"]\ninput = "fp16"\n[[rule]]\noutput = "bf16"\n'
            + 2 * '[[rule]]\nops = ["linear"]\ninput = "fp16"\n',
            "a.toml: 4 rules; rule 3 is never reached: a rule before it matches every op everywhere",
        ),
    ],
)
def test_a_policy_file_is_summed_up(lowp: Lowp, rules: str, words: str) -> None:
    Path("a.toml").write_text(rules)
    assert lowp("policy", "check", "a.toml") == (0, f"{words}\n", "")
    assert json.loads(lowp("policy", "check", "a.toml", "--json").out) == {"file": "a.toml", "checked": words}


def test_a_policy_as_data_has_its_ops_where_asked(lowp: Lowp) -> None:
    without, ops = (json.loads(lowp("policy", "show", "fp16", "--json", *more).out) for more in ((), ("--ops",)))
    assert ops.pop("ops")["linear"] == "contraction" and ops == without and "ops" not in without
    assert without["loss_scale"] == str(PRESETS["fp16"].loss_scale) and without["masters"] == "none"
    shown = lowp("policy", "show", "e5m7").out.splitlines()
    assert not any(line.startswith("source:") for line in shown) and shown[-1].startswith("loss scale ")
    listed = {row["policy"]: row["what"] for row in json.loads(lowp("policy", "list", "--json").out)}
    assert listed["torch-2.13-cuda"] == "torch.autocast's own lists, fp16" and listed["fp8"] == PRESETS["fp8"].summary
    assert "Any format is a policy, too" in lowp("policy", "list").out
    for arguments, words in (
        (("fp16",), "`lowp policy show fp16` shows it"),
        (("a.toml",), "`lowp policy show a.toml` shows it"),
        (("shwo",), "did you mean show?"),
        (("show", "torch-2.13-cup"), "; or torch-2.13-cpu"),
    ):
        result = lowp("policy", *arguments)
        assert result.code == 2 and words in result.err
    assert "shows it" not in lowp("policy", "shwo").err


def test_words_are_printed_as_they_are(
    lowp: Lowp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    long = "[bold]a[/bold] " + "b" * 99
    monkeypatch.setattr(recipes, "_full", lambda recipe, width: f"{long} {width}")
    assert lowp("recipes", "digits").out == f"{long} 60\n"
    monkeypatch.setattr("lowp.report.tables.comparison_tables", lambda document: [])
    monkeypatch.setattr("lowp.report.tables.notes", lambda document, width: f"[bold]notes {width}")
    compare._print({"kind": "comparison"})
    assert capsys.readouterr().out == "[bold]notes 60\n"
    monkeypatch.setattr("lowp.report.tables.heat_map", lambda document: plain_table("map", ["a"]))
    monkeypatch.setattr("lowp.report.tables.sweep_words", lambda document, width: f"[bold]words {width}")
    compare._print({"kind": "sweep"})
    assert capsys.readouterr().out.splitlines()[-1] == "[bold]words 60"
    monkeypatch.setattr("lowp.report.benchmark.benchmark_tables", lambda document: [])
    monkeypatch.setattr("lowp.report.benchmark.benchmark_notes", lambda document, *given: f"[bold]{given}")
    for methods in (True, False):
        bench._print({}, methods)
        assert capsys.readouterr().out == f"[bold]({methods}, 60)\n"
    rows = [{"format": "[bold]int8", "failure": "[b]no"}]
    document = {"recipe": {"name": "toy", "metric": "a", "metric_is_share": True}, "rows": rows, "methods": {}}
    serving._print({**document, "machine": {"words": "[b]it"}})
    assert capsys.readouterr().out.endswith("\n[bold]int8: [b]no.\n[b]it.\n")
