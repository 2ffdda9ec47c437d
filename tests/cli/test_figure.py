"""`lowp figure`: pictures from a real run, and their numbers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lowp.cli.figure import FIGURES
from lowp.errors import InvalidInput
from lowp.recipes.training import Settings, Training

Lowp = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def drawn_again(lowp: Lowp, name: str, first: str) -> bool:
    """Whether a picture drawn from the recorded numbers equals the first; for an SVG, has as many paths."""
    again = f"again{Path(first).suffix}"
    told = lowp("figure", name, "--from", str(Path(first).with_suffix(".json")), "--out", again).out
    one, other = (Path(name).read_bytes() for name in (first, again))
    same = one.count(b"<path") == other.count(b"<path") if first.endswith(".svg") else one == other
    return told == f"written: {again}\n" and same


def test_autoflex_draws_three_tensors_step_by_step_and_again_from_its_file(lowp: Lowp, folder: Path) -> None:
    result = lowp("figure", "autoflex", "--steps", "30", "--out", "a.svg")
    assert (result.code, result.out) == (0, "written: a.json, a.svg\n")
    assert (folder / "a.svg").read_text().count("<path") > 20 and drawn_again(lowp, "autoflex", "a.svg")
    document = json.loads((folder / "a.json").read_text())
    assert document["kind"] == "figure-autoflex" and document["layer"] == "0"
    assert {name: one["site"] for name, one in document["series"].items()} == {
        "weights": "weight of 0.weight",
        "activations": "output of 0 linear",
        "updates": "update of 0.weight",
    }
    for series in document["series"].values():
        assert len(series["step"]) >= 30
        assert all(0 < mantissa <= 32768 for mantissa in series["mantissa"])
        assert all(-31 <= exponent <= 0 for exponent in series["exponent"])
        # after the first writes the prediction is above what is written, nearly always
        known = [row for row in zip(series["predicted"], series["mantissa"], series["exponent"], strict=True) if row[0]]
        assert sum(chi >= mantissa * 2.0**exponent for chi, mantissa, exponent in known) > 0.9 * len(known)


def test_flex_window_draws_histograms_of_two_moments_and_again_from_its_file(lowp: Lowp, folder: Path) -> None:
    result = lowp("figure", "flex-window", "--steps", "20", "--layer", "2", "--out", "w.png")
    assert (result.code, result.out) == (0, "written: w.json, w.png\n")
    assert (folder / "w.png").read_bytes().startswith(b"\x89PNG") and drawn_again(lowp, "flex-window", "w.png")
    document = json.loads((folder / "w.json").read_text())
    for window in document["windows"].values():
        for moment in ("first", "last"):
            found = window[moment]
            assert sum(found["counts"]) == found["elements"] - found["zeros"] > 0
            assert 0 <= found["below_unit"] < 0.2 and 0 <= found["below_maximum"] < 0.2
            assert found["exponents"][0] <= found["exponents"][1]
    assert document["windows"]["weights"]["first"]["elements"] == 2 * 128 * 10


def test_the_figures_are_listed_with_what_they_train(lowp: Lowp) -> None:
    out = lowp("figure", "--list").out
    rows = {row["figure"]: row["training"] for row in json.loads(lowp("figure", "--list", "--json").out)}
    assert list(rows) == list(FIGURES) and all(f"\n{name} " in out for name in FIGURES)
    assert rows["updates"] == "resnet-20 in fp32" and rows["curves"] == "digits in fp32,fp16,flex16+5"
    assert rows["cost"] == "none" and "digits in fp32,fp16,flex16+5" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("autoflx",), "unknown figure 'autoflx'; did you mean autoflex?"),
        (("autoflex", "--steps", "0"), "--steps 0: give 1 or more"),
        (("autoflex", "--precision", "bf16"), "bf16 has no predicted shared exponents: use flex16+5"),
        (("autoflex", "--steps", "1", "--layer", "7"), "unknown layer '7'; allowed: 0, 2"),
        (("autoflex", "--out", "a.bmp"), "unknown kind of picture '.bmp'"),
    ],
)
def test_what_cannot_be_drawn_is_said(lowp: Lowp, folder: Path, arguments: tuple[str, ...], text: str) -> None:
    result = lowp("figure", *arguments)
    assert (result.code, result.out) == (2, "") and text in result.err
    assert list(folder.iterdir()) == []


TINY = {
    "updates": ("--recipe", "digits", "--epochs", "2"),
    "gradients": ("--epochs", "1"),
    "activation-gradients": ("--recipe", "digits", "--epochs", "1"),
    "loss-scaling": ("--recipe", "digits", "--epochs", "1", "--scale", "dynamic"),
    "stall": ("--epochs", "1", "--layer", "2"),
    "curves": ("--epochs", "2", "--seeds", "1", "--precision", "bf16"),
    "cost": ("--formats", "fp32, bf16, e5m7"),
}


def test_every_figure_of_words_is_tried_here() -> None:
    drawn = {name: import_module(f"lowp.report.figures.{figure.module}") for name, figure in FIGURES.items()}
    with_words = {name for name, module in drawn.items() if hasattr(module, f"{name.replace('-', '_')}_words")}
    assert set(TINY) == with_words == set(FIGURES) - {"autoflex", "flex-window"}


RECORDED: dict[str, tuple[Path, str]] = {}


@pytest.fixture
def recorded(
    lowp: Lowp, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[Path, str]]:
    """Return a function that enters the folder of a figure, recorded once for all tests, and returns its output."""

    def go(name: str) -> tuple[Path, str]:
        if name not in RECORDED:
            folder = tmp_path_factory.mktemp(name)
            monkeypatch.chdir(folder)
            result = lowp("figure", name, *TINY[name], "--out", "first.png")
            assert result.code == 0, result.err
            RECORDED[name] = folder, result.out
        monkeypatch.chdir(RECORDED[name][0])
        return RECORDED[name]

    return go


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * ("gradients" in one or one == "stall")) for one in TINY]
)
def test_a_figure_is_recorded_told_and_drawn_again_from_its_file(
    lowp: Lowp, recorded: Callable[[str], tuple[Path, str]], name: str
) -> None:
    folder, told = recorded(name)
    *words, last = told.splitlines()
    assert words and last == "written: first.json, first.png"
    document = json.loads((folder / "first.json").read_text())
    assert document["kind"] == FIGURES[name].kind and document["command"]
    numbers = (folder / "first.json").read_bytes()
    again = lowp("figure", name, "--from", "first.json", "--out", "again.png")
    assert (again.code, again.out.splitlines()) == (0, [*words, "written: again.png"])
    assert (folder / "again.png").read_bytes() == (folder / "first.png").read_bytes()
    assert (folder / "first.json").read_bytes() == numbers
    assert {path.name for path in folder.iterdir()} == {"first.json", "first.png", "again.png"}


def test_curves_are_drawn_from_a_comparison(lowp: Lowp, folder: Path) -> None:
    arguments = ("--precision", "bf16", "--seeds", "2", "--epochs", "1", "--timing", "0", "--jobs", "1")
    assert lowp("compare", "digits", *arguments).code == 0
    result = lowp("figure", "curves", "--from", "compare-digits.json", "--out", "c.svg")
    assert result.code == 0, result.err
    document = json.loads((folder / "compare-digits.json").read_text())
    for line, row in zip(result.out.splitlines()[:2], document["variants"], strict=True):
        errors = [100 * (1 - run["history"][-1]["accuracy"]) for run in row["runs"]]
        assert line.startswith(f"{row['label']}: top-1 error {sum(errors) / 2:.3g}% ({min(errors):.3g} to ")
    assert (folder / "c.svg").read_text().startswith("<?xml")


def test_the_numbers_are_those_of_the_run_that_was_asked_for(recorded: Callable[[str], tuple[Path, str]]) -> None:
    document = json.loads((recorded("loss-scaling")[0] / "first.json").read_text())
    assert (document["recipe"], document["epochs"], document["scale"]) == ("digits", 1, "dynamic")
    assert (
        document["scales"] == [[0, document["last_scale"]]]
        and document["before"]["below"] >= document["after"]["below"]
    )
    curves = json.loads((recorded("curves")[0] / "first.json").read_text())
    assert [row["label"] for row in curves["variants"]] == ["fp32", "bf16"]
    assert all(0 < run["history"][-1]["top5"] <= 1 for row in curves["variants"] for run in row["runs"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "the name of a figure is missing; allowed: autoflex, flex-window, updates"),
        (
            ("updates", "--steps", "4"),
            "updates does not take --steps; allowed: --size, --seed, --data, --recipe, ",
        ),
        (("cost", "--recipe", "digits"), "cost does not take --recipe; allowed: --formats, --from, --out"),
        (("curves", "--seed", "1"), "curves does not take --seed; allowed: "),
        (("curves", "--seeds", "0"), "--seeds 0: give 1 or more"),
        (("cost", "--formats", "fp32,fp61"), "unknown format 'fp61'"),
        (("cost", "--formats", ","), "--formats is empty: give formats, such as fp32,bf16,e4m3fn,int8"),
        (("loss-scaling", "--scale", "1"), "--scale 1 has no effect: give a number such as 256, or dynamic"),
        (("loss-scaling", "--scale", "big"), "loss scale 'big' is not valid"),
        (("stall", "--precision", "bf16"), "bf16 does not store its parameters in a float format of few bits: use"),
        (("stall", "--layer", "relu"), "unknown layer 'relu'; allowed: 0, 2, 4"),
        (("updates", "--from", "none.json"), "there is no file none.json"),
        (("updates", "--from", "cost.json"), ": lowp figure cost --from cost.json draws it"),
        (("curves", "--from", "cost.json"), "holds a figure-cost of version 1, not a comparison of version 1"),
        (
            ("cost", "--from", "broken.json"),
            "has been changed since lowp wrote it (KeyError: 'formats'): create it again",
        ),
        (("cost", "--from", "text.json"), "text.json cannot be read as results of lowp"),
        (("cost", "--from", "cost.json", "--formats", "fp32"), "--formats is for recording: omit one of them"),
    ],
)
def test_what_cannot_be_recorded_or_drawn_again_is_said(
    lowp: Lowp, folder: Path, arguments: tuple[str, ...], text: str
) -> None:
    (folder / "cost.json").write_text('{"lowp_results": 1, "kind": "figure-cost", "formats": []}')
    (folder / "broken.json").write_text('{"lowp_results": 1, "kind": "figure-cost"}')
    (folder / "text.json").write_text("does not contain results")
    result = lowp("figure", *arguments, "--out", "new.png")
    assert (result.code, result.out) == (2, "") and text in result.err, result.err
    assert len(list(folder.iterdir())) == 3


def test_another_recipe_is_trained_for_its_own_number_of_epochs(
    lowp: Lowp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = []

    def record(settings: Settings, onlooker: object) -> None:
        epochs.append(settings.epochs)
        raise InvalidInput("enough is known")

    monkeypatch.setattr("lowp.recipes.recording.gradients.record_loss_scaling", record)
    for more in ((), ("--recipe", "digits"), ("--recipe", "digits", "--epochs", "2")):
        assert "enough is known" in lowp("figure", "loss-scaling", *more).err
    assert epochs == [6, Settings(recipe="digits").filled().epochs, 2] and epochs[0] != epochs[1]


@pytest.mark.parametrize("name", [name for name in TINY if name != "cost"])
def test_ctrl_c_leaves_nothing(lowp: Lowp, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Training.step, []

    def interrupted(self: Training, *arguments: Any) -> Any:
        steps.append(self)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    monkeypatch.setattr(Training, "step", interrupted)
    result = lowp("figure", name, *TINY[name])
    assert (result.code, result.out) == (130, "") and "Traceback" not in result.err
    assert len(steps) == 3 and list(folder.iterdir()) == []


def test_without_matplotlib_the_numbers_are_written_and_nothing_is_drawn_again(
    lowp: Lowp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowp.report.plots.can_plot", lambda: False)
    result = lowp("figure", "cost")
    assert result.code == 0 and result.out.endswith(
        "written: figure-cost.json; no picture: matplotlib is not installed: pip install 'lowp[plot]'\n"
    )
    refused = lowp("figure", "cost", "--from", "figure-cost.json")
    assert refused.code == 2 and "matplotlib is not installed" in refused.err
