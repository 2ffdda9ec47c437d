"""`lowp profile script.py` finds the models of a script: the duration of the search, and objects it must not touch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowp.errors import InvalidInput
from lowp.launch import profiling
from lowp.launch.waiting import MOST_MODELS, SEARCHED, Search, own_path, part_of
from lowp.numerics.profiler import Profiler
from lowp.numerics.record import Record


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[profiling._Waiting]:
    """Return the object that waits for models in a script's process, in this process."""
    monkeypatch.setattr(profiling.atexit, "register", lambda *given: None)
    wait = profiling._Waiting(tmp_path / "run.json", "900%", "script.py")
    wait.start()
    yield wait
    wait.handle.remove()
    if wait.watcher is not None:
        wait.watcher._stop()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def trained(count: int) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    models = [nn.Linear(3, 1 + place) for place in range(count)]
    return [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]


def profiler_of(waiting: profiling._Waiting) -> Profiler:
    assert isinstance(waiting.watcher, Profiler)
    return waiting.watcher


def test_a_model_that_comes_early_is_watched_and_one_that_comes_late_is_not(waiting: profiling._Waiting) -> None:
    first, early, late = trained(3)
    for step in range(SEARCHED + 4):
        take_step(*first)
        if step > 2:
            take_step(*early)
        if step > SEARCHED + 1:
            take_step(*late)
    assert list(profiler_of(waiting).models.roots.values()) == [first[0], early[0]]


def test_a_population_of_models_is_watched_in_part_and_that_is_said(
    waiting: profiling._Waiting, capsys: pytest.CaptureFixture[str]
) -> None:
    population = trained(MOST_MODELS + 3)
    for _ in range(3):
        for one in population:
            take_step(*one)
    watched = profiler_of(waiting).models.roots
    assert list(watched.values()) == [model for model, _ in population[:MOST_MODELS]]
    assert list(watched)[:2] == ["Linear", "Linear2"]
    assert capsys.readouterr().err.count("only the first 16 models are recorded") == 1


def test_a_part_that_replaces_another_is_no_model_of_its_own(waiting: profiling._Waiting) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    take_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[1] = nn.Linear(4, 2)
    take_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(profiler_of(waiting).models.roots.values()) == [model]
    assert profiler_of(waiting).models.owns(model[1])


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_module_is_compiled_as_often_as_without_a_profile(waiting: profiling._Waiting) -> None:
    torch.compiler.reset()
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    model, optimizer = torch.compile(inner, backend=backend), torch.optim.SGD(inner.parameters(), lr=0.1)
    for _ in range(12):
        take_step(model, optimizer)
    assert profiler_of(waiting).step == 12 and len(compiled) == 1


def test_a_script_is_profiled_as_a_file_or_a_module_and_one_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import sys, torch\nm = torch.nn.Linear(4, 1)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for _ in range(3):\n    m(torch.randn(2, 4)).sum().backward()\n    o.step()\nsys.exit(int(sys.argv[1]))\n"
    )
    for script, code in ((["train.py", "0"], 0), (["-m", "train", "3"], 3)):
        assert profiling.profile_script(script, "none", Path("run.json")) == (code, tmp_path / "run.json")
        record = Record.load("run.json")
        assert record.header["title"] == " ".join(script) and record.sampled == [0, 1, 2]
    with pytest.raises(InvalidInput, match=r"no\.py"):
        profiling.profile_script(["no.py"], "none", Path("other.json"))
    assert not Path("other.json").exists()


def test_the_processes_of_a_script_that_train_one_model_are_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import subprocess, sys, torch\nwidth, *others = map(int, sys.argv[1:])\nm = torch.nn.Linear(width, 1)\n"
        "o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for _ in range(2):\n    m(torch.randn(2, width)).sum().backward()\n    o.step()\n"
        "for other in others:\n    subprocess.run([sys.executable, 'train.py', str(other)], check=True)\n"
    )
    assert profiling.profile_script(["train.py", "4", "4", "5"], "none", Path("run.json"))[0] == 0
    (left,) = (one for one in tmp_path.iterdir() if one.name not in ("run.json", "train.py"))
    counts = [
        next(seen.count for key, seen in Record.load(file).tensors.items() if "weight" in key)
        for file in (Path("run.json"), left)
    ]
    assert counts == [4 * 2 * 2, 5 * 2]  # weights, steps, processes
    said = [one for one in capfd.readouterr().err.splitlines() if "another model" in one]
    assert said == [f"lowp profile: another process trained another model: {left}"]


class Noted(Search):
    """Notes the modules that it would watch; a module of one feature it refuses."""

    command = "mine"

    def __init__(self, takes_untrained: bool = False) -> None:
        super().__init__()
        self.takes_untrained = takes_untrained
        self.begun: list[nn.Module] = []
        self.added: list[nn.Module] = []
        self.skipped: list[nn.Module] = []
        self.handle = SimpleNamespace(remove=lambda: self.removed.append(self.watcher.step))
        self.removed: list[int] = []

    def begin(self, module: nn.Module, args: Any) -> Any:
        if getattr(module, "in_features", 0) == 1:
            raise InvalidInput("of one feature")
        self.begun.append(module)
        models = SimpleNamespace(roots={}, owns=lambda one: one in self.begun + self.added)
        return SimpleNamespace(step=0, models=models)

    def add(self, module: nn.Module, args: Any) -> None:
        self.added.append(module)

    def skips(self, module: nn.Module) -> bool:
        return module in self.skipped

    def _replaces_a_part(self, module: nn.Module) -> bool:
        return False


def test_modules_with_parameters_that_a_pass_trains_are_models_and_others_beside_them_if_asked_for() -> None:
    search, frozen, asleep = Noted(), nn.Linear(3, 1).requires_grad_(False), nn.Linear(3, 1).eval()
    partly = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
    for takes_untrained in (False, True):
        search = Noted(takes_untrained)
        with torch.no_grad():
            search(nn.Linear(3, 1), ())
        for module in (frozen, asleep, nn.ReLU(), nn.Sequential()):
            search(module, ())
        assert search.watcher is None and not search.begun
        search(partly, ())
        assert search.begun == [partly]
        search(frozen, ())
        search(partly, ())  # is watched
        assert not search.added  # before the first step an untrained one may be trained yet
        search.watcher.step = 1
        for module in (frozen, asleep, nn.ReLU()):
            search(module, ())
        assert search.added == [frozen, asleep] * takes_untrained


def test_models_are_looked_for_until_the_last_step_and_the_last_model(capsys: pytest.CaptureFixture[str]) -> None:
    search, models = Noted(), [nn.Linear(3, 1) for _ in range(4)]
    search(models[0], ())
    for step, model in ((SEARCHED - 1, models[1]), (SEARCHED, models[2])):
        search.watcher.step = step
        search(model, ())
    assert (search.added, search.removed, SEARCHED, MOST_MODELS) == ([models[1]], [64], 64, 16)
    search.watcher.step, search.skipped = 1, [models[2]]
    search(models[2], ())
    assert search.added == [models[1]]
    search.watcher.models.roots = dict.fromkeys(range(MOST_MODELS - 1))
    search(models[3], ())
    assert search.added == [models[1], models[3]] and capsys.readouterr().err == ""
    search.watcher.models.roots = dict.fromkeys(range(MOST_MODELS))
    search(nn.Linear(3, 1), ())
    assert len(search.added) == 2 and search.removed == [64, 1]
    assert capsys.readouterr().err == "mine: only the first 16 models are recorded\n"


def test_a_model_that_is_refused_is_named_once_and_the_next_is_watched(capsys: pytest.CaptureFixture[str]) -> None:
    search, refused, model = Noted(), nn.Linear(1, 1), nn.Linear(3, 1)
    for module in (refused, refused, model):
        search(module, ())
    assert search.begun == [model]
    assert capsys.readouterr().err == "mine: Linear is not recorded: of one feature\n"


def test_the_first_process_has_the_file_and_others_files_of_their_own(tmp_path: Path) -> None:
    path, claim = tmp_path / "run.json", tmp_path / "claim"
    assert own_path(path, claim) == path and claim.exists()
    assert own_path(path, claim) == tmp_path / f"run.process-{os.getpid()}.json"
    assert part_of(Path("a/b.c.txt"), 5) == Path("a/b.c.process-5.txt")
