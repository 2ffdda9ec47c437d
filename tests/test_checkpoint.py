"""Checkpoints are whole, portable and harmless."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import lowp
from lowp.checkpoint import InvalidCheckpoint
from lowp.errors import InvalidInput


def _model(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def test_a_checkpoint_opens_with_plain_torch(tmp_path: Path) -> None:
    model = _model()
    lowp.save(tmp_path / "a.pt", model=model, extra={"epoch": 3})
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(content["model"]["weight"], model.weight)
    assert content["extra"] == {"epoch": 3}


def test_everything_comes_back_with_the_random_states(tmp_path: Path) -> None:
    model, other = _model(0), _model(1)
    lowp.save(tmp_path / "a.pt", model=model, extra={"history": [0.5, 0.25]})
    drawn = (random.random(), np.random.rand(), torch.rand(()).item())
    extra = lowp.load(tmp_path / "a.pt", model=other)
    assert extra == {"history": [0.5, 0.25]}
    assert torch.equal(other.weight, model.weight)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == drawn


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


def test_a_hostile_file_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"lowp_checkpoint": 1, "model": _Bomb()}, "zip.pt")
    Path("plain.pt").write_bytes(pickle.dumps(_Bomb()))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(InvalidCheckpoint, match=r"was not opened|damaged"):
            lowp.load(name, model=_model())
    assert not Path("exploded").exists()


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_file_cut_short_is_refused_and_nothing_changes(tmp_path: Path, kept: float) -> None:
    model = _model()
    lowp.save(tmp_path / "a.pt", model=model)
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: int(len(data) * kept)])
    before = model.weight.clone()
    with pytest.raises(InvalidCheckpoint, match=r"a\.pt is damaged or no torch file"):
        lowp.load(tmp_path / "a.pt", model=model)
    assert torch.equal(model.weight, before)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="there is no checkpoint"):
        lowp.load(tmp_path / "none.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "torch.pt")
    with pytest.raises(InvalidCheckpoint, match=r"no checkpoint of lowp\.save: read it with torch\.load"):
        lowp.load(tmp_path / "torch.pt")
    torch.save({"lowp_checkpoint": 99}, tmp_path / "new.pt")
    with pytest.raises(InvalidCheckpoint, match="has version 99, and this lowp reads version 1"):
        lowp.load(tmp_path / "new.pt")
    lowp.save(tmp_path / "a.pt", model=_model())
    with pytest.raises(InvalidCheckpoint, match="holds model, but no optimizer"):
        lowp.load(tmp_path / "a.pt", model=_model(), optimizer=torch.optim.SGD(_model().parameters(), lr=1))


def test_a_part_that_does_not_fit_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    lowp.save(tmp_path / "a.pt", first=_model(0), second=nn.Linear(5, 5))
    first = _model(1)
    before = first.weight.clone()
    with pytest.raises(InvalidCheckpoint, match="does not fit second, and nothing was loaded"):
        lowp.load(tmp_path / "a.pt", first=first, second=nn.Linear(4, 4))
    assert torch.equal(first.weight, before)


@pytest.mark.parametrize(
    "entry, value, text",
    [
        ("random", None, "holds model, precision, but no random"),
        ("extra", None, "holds model, precision, but no extra"),
        ("random", {"torch": torch.zeros(3)}, "is damaged, and nothing was loaded: these are not the states of random"),
        ("random", 3, "is damaged, and nothing was loaded: these are not the states of random generators"),
        ("precision", {"steps": -1}, "does not fit precision, .* steps=-1: a number of steps is 0 or more"),
        ("precision", {"skipped_steps": "a"}, "does not fit precision, .* skipped_steps='a'"),
        ("precision", {"seed": None}, "does not fit precision, .* seed=None: a seed is a whole number"),
        ("precision", {"policy": 7}, "does not fit precision, .* is TOML text, not int"),
        ("precision", {"random": None}, "does not fit precision, .* not the states of random generators"),
        ("precision", {"scaler": {"scale": 1.0}}, "does not fit precision, and nothing was loaded: .*missing: growth"),
        ("precision", 5, "does not fit precision, .* a precision's state is a dictionary"),
    ],
)
def test_a_tampered_checkpoint_is_refused_and_changes_nothing(
    tmp_path: Path, entry: str, value: object, text: str
) -> None:
    path, precision, model = tmp_path / "a.pt", lowp.Precision("fp16"), _model()
    lowp.save(path, model=model, precision=precision)
    content = torch.load(path, weights_only=True)
    content[entry] = {**content[entry], **value} if entry == "precision" and isinstance(value, dict) else value
    torch.save({key: each for key, each in content.items() if each is not None}, path)
    model, precision = _model(1), lowp.Precision("fp16", seed=3)
    weight, states = model.weight.clone(), (torch.get_rng_state(), random.getstate())
    with pytest.raises(InvalidCheckpoint, match=text):
        lowp.load(path, model=model, precision=precision)
    assert torch.equal(model.weight, weight)
    assert (precision.seed, precision.steps) == (3, 0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_an_entry_that_a_part_misses_is_named(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    lowp.save(tmp_path / "a.pt", optimizer=optimizer)
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    del content["optimizer"]["param_groups"]
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(InvalidCheckpoint, match="nothing was loaded: its entry 'param_groups' is missing"):
        lowp.load(tmp_path / "a.pt", optimizer=optimizer)


class _Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize("value", [defaultdict(int, a=1), _Pair(1, 2), frozenset({1}), range(3), slice(1)])
def test_containers_that_only_unpickling_reads_are_refused_when_saving(tmp_path: Path, value: object) -> None:
    with pytest.raises(
        InvalidInput, match=r"checkpoint\['extra'\]\['x'\] is a .*, which only unpickling could read back"
    ):
        lowp.save(tmp_path / "a.pt", model=_model(), extra={"x": value})
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_read_back_is_refused_when_saving(tmp_path: Path) -> None:
    lowp.save(tmp_path / "a.pt", model=_model())
    before = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(InvalidInput, match=r"checkpoint\['extra'\]\['loss'\] is a numpy\.float64"):
        lowp.save(tmp_path / "a.pt", model=_model(), extra={"loss": np.float64(0.5)})
    with pytest.raises(InvalidInput, match="has no state_dict: give it in extra="):
        lowp.save(tmp_path / "a.pt", epoch=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="there is no folder"):
        lowp.save(tmp_path / "missing" / "a.pt", model=_model())
    assert (tmp_path / "a.pt").read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]


_WRITER = """
import sys, torch, lowp
from torch import nn
model = nn.Linear(400, 400)
print("ready", flush=True)
for version in range(10**9):
    nn.init.constant_(model.weight, float(version)); nn.init.constant_(model.bias, float(version))
    lowp.save(sys.argv[1], model=model, extra={"version": version})
    if version == 0: print("saved", flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    generator = random.Random(0)
    path = tmp_path / "a.pt"
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert [writer.stdout.readline() for _ in range(2)] == ["ready\n", "saved\n"]
            try:
                writer.wait(generator.uniform(0.0, 0.1))
            except subprocess.TimeoutExpired:
                writer.kill()
        model = nn.Linear(400, 400)
        version = lowp.load(path, model=model)["version"]
        assert (model.weight == version).all()
        assert (model.bias == version).all()
