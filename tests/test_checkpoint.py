"""Checkpoints are whole, portable and harmless."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import subprocess
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import forked
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
    with pytest.raises(InvalidCheckpoint, match=r"a\.pt is damaged or not a torch file"):
        lowp.load(tmp_path / "a.pt", model=model)
    assert torch.equal(model.weight, before)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="there is no checkpoint"):
        lowp.load(tmp_path / "none.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "torch.pt")
    with pytest.raises(InvalidCheckpoint, match=r"not a checkpoint of lowp\.save: read its weights"):
        lowp.load(tmp_path / "torch.pt", model=_model())
    assert torch.equal(lowp.load(tmp_path / "torch.pt")["weight"], torch.ones(2))
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
        ("random", {"cuda": torch.zeros(0)}, "is damaged, and nothing was loaded: .* 'cuda' is not a list of states"),
        ("lowp_checkpoint", torch.ones(8, 8), "has version tensor.* and this lowp reads version 1"),
        ("random", 3, "is damaged, and nothing was loaded: these are not the states of random generators"),
        ("precision", {"steps": -1}, "does not fit precision, .* steps=-1: give a number of steps, 0 or more"),
        ("precision", {"skipped_steps": "a"}, "does not fit precision, .* skipped_steps='a'"),
        ("precision", {"seed": None}, "does not fit precision, .* seed=None: give a whole number"),
        ("precision", {"seed": -1}, "does not fit precision, .* seed=-1: give a whole number from 0"),
        ("model", {"weight": torch.full((2, 3), torch.nan)}, "does not fit model, .* weight has infinities or NaN"),
        ("precision", {"policy": 7}, "does not fit precision, .* must be TOML text, not int"),
        ("precision", {"random": None}, "does not fit precision, .* not the states of random generators"),
        ("precision", {"scaler": {"scale": 1.0}}, "does not fit precision, and nothing was loaded: .*missing: growth"),
        ("precision", 5, "does not fit precision, .* a precision's state must be a dictionary"),
    ],
)
def test_a_tampered_checkpoint_is_refused_and_changes_nothing(
    tmp_path: Path, entry: str, value: object, text: str
) -> None:
    path, precision, model = tmp_path / "a.pt", lowp.Precision("fp16"), _model()
    lowp.save(path, model=model, precision=precision)
    content = torch.load(path, weights_only=True)
    edits = isinstance(value, dict) and "torch" not in value
    content[entry] = {**content[entry], **value} if edits else value  # type: ignore[dict-item]
    torch.save({key: each for key, each in content.items() if each is not None}, path)
    model, precision = _model(1), lowp.Precision("fp16", seed=3)
    weight, states = model.weight.clone(), (torch.get_rng_state(), random.getstate())
    with pytest.raises(InvalidCheckpoint, match=text):
        lowp.load(path, model=model, precision=precision)
    assert torch.equal(model.weight, weight)
    assert (precision.seed, precision.steps) == (3, 0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize(
    "kind, entry", [("fp16", "exp_avg_sq"), ("bf16-storage", "master_weight"), ("fp16", "exp_avg")]
)
def test_state_of_an_optimizer_that_is_not_finite_is_refused(tmp_path: Path, kind: str, entry: str) -> None:
    lowp.save(tmp_path / "a.pt", **_training(kind, _adam))
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    content["optimizer"]["state"][1][entry][0] = torch.inf
    torch.save(content, tmp_path / "a.pt")
    parts = _training(kind, _adam, seed=1)
    before = _states(parts)
    with pytest.raises(InvalidCheckpoint, match=f"{entry} of parameter 1 has infinities or NaN, from which no run"):
        lowp.load(tmp_path / "a.pt", **parts)
    assert _states(parts) == before


def test_an_entry_that_a_part_misses_is_named(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    lowp.save(tmp_path / "a.pt", optimizer=optimizer)
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    del content["optimizer"]["param_groups"]
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(
        InvalidCheckpoint, match=r"nothing was loaded: an optimizer's state must have .*; missing: param_groups"
    ):
        lowp.load(tmp_path / "a.pt", optimizer=optimizer)


def _training(kind: str, optimizer: Callable[..., Any], seed: int = 0, **options: Any) -> dict[str, Any]:
    """Return the parts of a small training after three steps."""
    torch.manual_seed(seed)
    precision, model = lowp.Precision(kind, **options), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model, own = precision.prepare(model, optimizer(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(own, 2)
    for _ in range(3):
        with precision.autocast():
            loss = model(torch.randn(4, 4)).square().mean() / 1024  # no step is skipped
        precision.backward(loss)
        precision.step(own)
        own.zero_grad()
    return {"model": model, "optimizer": own, "precision": precision, "scheduler": scheduler}


def _states(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the parts, without random states, as text that is equal if every number is."""
    states = {name: part.state_dict() for name, part in parts.items()}
    states["precision"] = {**states["precision"], "random": None}
    return {name: repr(_plain(state)) for name, state in states.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def test_no_flipped_bit_is_loaded(tmp_path: Path) -> None:
    """Every flip is detected, or is in bytes without meaning: padding, dates, flags."""
    path, saved = tmp_path / "a.pt", _training("fp16-storage", _adam)
    lowp.save(path, **saved)
    whole, parts = path.read_bytes(), _training("fp16-storage", _adam, seed=1)
    before, wanted = _states(parts), _states(saved)
    generator, refused = random.Random(0), 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            lowp.load(path, **parts)
        except InvalidCheckpoint:
            refused += 1
            assert _states(parts) == before
        else:
            assert _states(parts) == wanted
            before = wanted
    assert refused > 30


def test_a_wrong_checksum_names_the_entry(tmp_path: Path) -> None:
    path, model = tmp_path / "a.pt", _model()
    lowp.save(path, model=model)
    data = bytearray(path.read_bytes())
    at = data.index(model.weight.detach().numpy().tobytes())
    data[at + 3] ^= 0x40  # the exponent of a weight: 2**128 times the weight
    path.write_bytes(data)
    with pytest.raises(
        InvalidCheckpoint, match=r"damaged or not a torch file: the checksum of its entry .*/data/\d+ is wrong"
    ):
        lowp.load(path, model=model)


def test_compressed_and_doubled_entries_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    lowp.save(path, model=nn.Linear(1000, 1000))
    small = tmp_path / "small.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(InvalidCheckpoint, match="an entry is compressed, which torch never writes"):
        lowp.load(small, model=nn.Linear(1000, 1000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python says that the name is there already
        with zipfile.ZipFile(path, "a") as target:
            target.writestr(target.namelist()[0], b"another")
    with pytest.raises(InvalidCheckpoint, match="two entries have one name"):
        lowp.load(path, model=nn.Linear(1000, 1000))


def test_checksums_are_written_though_torch_was_told_not_to(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        lowp.save(tmp_path / "a.pt", model=_model())
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    lowp.load(tmp_path / "a.pt", model=_model())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint of a whole training."""
    path = tmp_path_factory.mktemp("saved") / "a.pt"
    lowp.save(path, **_training("fp16-storage", _adam))
    return path.read_bytes()


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    """Another training, which edited checkpoints must not change."""
    return _training("fp16-storage", _adam, seed=1)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (
            ("optimizer", "state", 0, "exp_avg"),
            torch.zeros(2),
            "exp_avg of parameter 0 must be a floating-point tensor of shape .3, 4., not a tensor of",
        ),
        (
            ("optimizer", "param_groups", 0, "params"),
            [0, 1],
            "the saved optimizer has groups of 2 parameters, but this one has groups of 4: it belongs to another model",
        ),
        (
            ("kinds", "optimizer"),
            "SGD",
            "it was saved from SGD, but this optimizer is AdamW: load it into the same class",
        ),
        (("kinds",), 3, "its entry 'kinds' is a dictionary, not 3"),
        (("extra",), 3, "its entry 'extra' is a dictionary, not 3"),
        (("scheduler", "gamma"), None, "it has gamma=None: give a finite number"),
        (("model", "0.weight"), "x", "0.weight must be a tensor of float32, shape .3, 4., not str"),
        (
            ("precision", "loss_scale"),
            "1024",
            "was trained with loss_scale='1024' and this run has loss_scale='dynamic'",
        ),
        (("precision", "masters"), "none", "was trained with masters='none' and this run has masters='fp32'"),
        (("precision", "scaler", "scale"), -1.0, "the scale of the loaded state cannot be -1.0"),
    ],
)
def test_an_edited_entry_is_named_and_nothing_changes(
    tmp_path: Path, place: tuple[Any, ...], value: object, text: str, saved: bytes, parts: dict[str, Any]
) -> None:
    path, content = tmp_path / "a.pt", torch.load(io.BytesIO(saved), weights_only=True)
    entry = content
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    torch.save(content, path)
    before, drawn = _states(parts), torch.get_rng_state()
    with pytest.raises(InvalidCheckpoint, match=text):
        lowp.load(path, **parts)
    assert _states(parts) == before
    assert torch.equal(torch.get_rng_state(), drawn)


_VALUES = [None, -1, 2**70, 1.5, float("nan"), "x", b"x", [], [1], {}, {"a": 1}, True, (1, 2), {1: 2}, [[]]]
_TENSORS = [
    torch.zeros(0),
    torch.zeros(3),
    torch.zeros(8, 8),
    torch.ones((), dtype=torch.int64),
    torch.zeros(2).cfloat(),
]


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every place in a content of plain values, except the words of random generators."""
    yield at
    listed = range(len(value)) if isinstance(value, list) and len(value) < 50 else ()
    for key in value if isinstance(value, dict) else listed:
        yield from _places(value[key], (*at, key))


_TRAININGS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fp16-storage": _adam,
    "bf16-storage": lambda parameters: lowp.optim.AdamW(parameters, 1e-3),
    "flex16+5": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", _TRAININGS)
def test_whatever_is_edited_is_loaded_whole_or_refused_and_nothing_changes(tmp_path: Path, kind: str) -> None:
    path, parts = tmp_path / "a.pt", _training(kind, _TRAININGS[kind])
    lowp.save(path, **parts)
    whole, generator = torch.load(path, weights_only=True), random.Random(kind)
    places, refused = list(_places(whole))[1:], 0
    for _ in range(15):
        content, place = copy.deepcopy(whole), generator.choice(places)
        entry = content
        for key in place[:-1]:
            entry = entry[key]
        entry[place[-1]] = generator.choice(_VALUES + _TENSORS)
        torch.save(content, path)
        before = _states(parts)
        try:
            lowp.load(path, **parts)
        except InvalidCheckpoint:
            refused += 1
            assert _states(parts) == before, place
        else:  # a number in place of a number
            torch.save(whole, path)
            lowp.load(path, **parts)
    assert refused > 5


def test_a_policy_of_any_name_comes_back(tmp_path: Path) -> None:
    policy = lowp.Policy((lowp.Rule.of("linear", where='a"b\\c\n', input="bf16"),), name='"mine"\n\\')
    lowp.save(tmp_path / "a.pt", precision=lowp.Precision(policy))
    lowp.load(tmp_path / "a.pt", precision=lowp.Precision(policy))


@pytest.mark.parametrize("first", ["model", "precision"])
def test_shared_exponents_come_back_and_stay_whatever_the_order_of_the_parts(tmp_path: Path, first: str) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    path, saved = tmp_path / "a.pt", _training("flex16+5", sgd)
    lowp.save(path, **saved)
    parts = _training("flex16+5", sgd, seed=1)
    parts = {name: parts[name] for name in sorted(parts, key=lambda name: name != first)}
    lowp.load(path, **parts)
    assert _states({name: parts[name] for name in saved}) == _states(saved)
    content = torch.load(path, weights_only=True)
    content["optimizer"]["flex_weights"] = {"version": 9}
    torch.save(content, path)
    parts = _training("flex16+5", sgd, seed=1)
    before = _states(parts)
    with pytest.raises(
        InvalidCheckpoint, match="does not fit optimizer, and nothing was loaded: flex weights of version 9"
    ):
        lowp.load(path, **parts)
    assert _states(parts) == before
    content["optimizer"]["flex_weights"] = {"version": 1}
    content["precision"]["exponents"]["groups"][0]["state"]["history"] = torch.zeros(2, 16, dtype=torch.float64)
    torch.save(content, path)
    with pytest.raises(
        InvalidCheckpoint, match=r"the shared exponents of flex16\+5:autoflex in this checkpoint are incomplete"
    ):
        lowp.load(path, **parts)
    assert _states(parts) == before


@pytest.mark.parametrize("rng_state", [True, False])
def test_random_states_are_restored_only_where_asked_a_precision_s_too(tmp_path: Path, rng_state: bool) -> None:
    precision = lowp.Precision("bf16")
    lowp.save(tmp_path / "a.pt", precision=precision)
    saved = (torch.rand(()).item(), random.random(), float(np.random.rand()))
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    own = (torch.rand(()).item(), random.random(), float(np.random.rand()))
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    lowp.load(tmp_path / "a.pt", precision=precision, rng_state=rng_state)
    assert (torch.rand(()).item(), random.random(), float(np.random.rand())) == (saved if rng_state else own)


def test_an_optimizer_of_another_class_is_refused_and_of_the_same_name_is_not(tmp_path: Path) -> None:
    model = _model()
    lowp.save(tmp_path / "a.pt", optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        InvalidCheckpoint, match="it was saved from AdamW, but this optimizer is SGD: load it into the same class"
    ):
        lowp.load(tmp_path / "a.pt", optimizer=torch.optim.SGD(model.parameters(), 0.1))
    lowp.load(tmp_path / "a.pt", optimizer=lowp.MasterWeights(torch.optim.AdamW(model.parameters())))
    lowp.load(tmp_path / "a.pt", optimizer=lowp.optim.AdamW(_model().parameters()))


@pytest.mark.parametrize("name", ["random", "extra", "kinds", "lowp_checkpoint"])
def test_names_of_entries_of_its_own_are_refused_for_parts(tmp_path: Path, name: str) -> None:
    if name != "extra":
        with pytest.raises(InvalidInput, match=f"{name}= is a reserved entry of a checkpoint"):
            lowp.save(tmp_path / "a.pt", **{name: _model()})
    lowp.save(tmp_path / "a.pt", model=_model())
    with pytest.raises(InvalidInput, match=f"{name}= is a reserved entry of a checkpoint"):
        lowp.load(tmp_path / "a.pt", **{name: _model()})


class _Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize("value", [defaultdict(int, a=1), _Pair(1, 2), frozenset({1}), range(3), slice(1)])
def test_containers_that_only_unpickling_reads_are_refused_when_saving(tmp_path: Path, value: object) -> None:
    with pytest.raises(InvalidInput, match=r"checkpoint\['extra'\]\['x'\] is a .*, which only pickle could restore"):
        lowp.save(tmp_path / "a.pt", model=_model(), extra={"x": value})
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_read_back_is_refused_when_saving(tmp_path: Path) -> None:
    lowp.save(tmp_path / "a.pt", model=_model())
    before = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(InvalidInput, match=r"checkpoint\['extra'\]\['loss'\] is a numpy\.float64"):
        lowp.save(tmp_path / "a.pt", model=_model(), extra={"loss": np.float64(0.5)})
    with pytest.raises(InvalidInput, match="has no state_dict: pass it in extra="):
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
        with forked.start("-c", _WRITER, str(path)) as writer:
            assert [writer.stdout.readline() for _ in range(2)] == ["ready\n", "saved\n"]
            try:
                writer.wait(generator.uniform(0.0, 0.1))
            except subprocess.TimeoutExpired:
                writer.kill()
        model = nn.Linear(400, 400)
        version = lowp.load(path, model=model)["version"]
        assert (model.weight == version).all()
        assert (model.bias == version).all()
