"""Records: written and read back, merged over ranks, and refused if this version cannot read them."""

from __future__ import annotations

import json
import math
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from numerics.small import network, recorded
from torch import nn

import lowp
from lowp import distributed
from lowp.errors import InvalidInput
from lowp.numerics.blocks import blocks_of
from lowp.numerics.models import fingerprint_of
from lowp.numerics.part import failure, looked_at, parameter_key
from lowp.numerics.record import (
    Key,
    Octaves,
    OpSeen,
    Part,
    Print,
    Record,
    Recording,
    StepSeen,
    difference,
    merged_over_ranks,
    ulps,
)
from lowp.numerics.spectrum import Spectrum


@pytest.fixture(scope="module")
def record() -> Record:
    return recorded(2)


def test_a_record_comes_back_as_it_was(record: Record, tmp_path: Path) -> None:
    record.save(tmp_path / "run.json")
    again = Record.load(tmp_path / "run.json")
    assert again.document() == record.document()
    assert json.loads((tmp_path / "run.json").read_text())["version"] == 4


def test_two_records_of_one_model_merge(record: Record) -> None:
    both = record.merge(record)
    key = Key("0", "linear", "input", "forward")
    assert np.array_equal(both.tensors[key].bins, 2 * record.tensors[key].bins)
    assert both.header["ranks"] == 2 and both.sampled == record.sampled
    ended, killed = record, Record(record.header, record.part, complete=False)
    for one, other in ((ended, ended), (ended, killed), (killed, ended), (killed, killed)):
        assert one.merge(other).complete is (one is other is ended)
    output = key._replace(role="output")
    once, twice = (run.part.octaves[0][output] for run in (record, both))
    assert twice.first == once.first and twice.counts == tuple(2 * count for count in once.counts)


def test_the_octaves_of_steps_add_up_to_those_of_the_run(record: Record) -> None:
    assert list(record.part.octaves) == record.sampled
    for key, seen in record.tensors.items():
        if key.role == "input" or not seen.nonzero:
            continue
        steps = [one[key] for one in record.part.octaves.values() if key in one]
        assert reduce(lambda one, other: one + other, steps) == Octaves.of(seen)


def test_a_tensor_of_zeros_has_no_octaves() -> None:
    assert Octaves.of(Spectrum.of(torch.zeros(3))) == Octaves(-127, ())


def test_octaves_of_different_places_are_added_where_they_are() -> None:
    assert Octaves(-3, (1, 2)) + Octaves(0, (5,)) == Octaves(-3, (1, 2, 0, 5))


def test_octaves_of_a_tensor_that_is_not_there_are_refused(record: Record, tmp_path: Path) -> None:
    document = record.document()
    document["octaves"]["0"] = [[10_000, 0, 1]]
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="an entry of it is missing or is not what a profile has there"):
        Record.load(tmp_path / "run.json")


def test_a_second_model_renames_the_octaves_too(record: Record) -> None:
    part = Part.read(record.part.document()).renamed("first")
    assert {key.module.split(".")[0] for one in part.octaves.values() for key in one} == {"first"}


def test_blocks_are_merged_and_renamed_and_may_be_missing(record: Record) -> None:
    both, blocks = record.merge(record), record.part.blocks
    assert blocks and all(np.array_equal(both.part.blocks[one].counts, 2 * blocks[one].counts) for one in blocks)
    part = Part.read(record.part.document()).renamed("first")
    assert {key.module.split(".")[0] for key, _ in part.blocks} == {"first"}
    document = record.part.document()
    del document["blocks"]
    assert not Part.read(document).blocks


def test_blocks_that_no_tensor_has_are_refused(record: Record) -> None:
    document = record.part.document()
    for place, layout, counts in ((10_000, "1/16", [-290]), (0, "along", [-290]), (0, "1/16", [3, "x"])):
        with pytest.raises(InvalidInput, match="an entry of it is missing or is not what a profile has there"):
            Part.read({**document, "blocks": [[place, layout, *counts]]})
    with pytest.raises(InvalidInput, match="it contains invalid blocks"):
        Part.read({**document, "blocks": [[0, "1/16", 3]]})


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_has_the_record_of_all(rank: int, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    assert merged_over_ranks(record) is record
    monkeypatch.setattr(distributed, "has_other_ranks", lambda: True)
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(distributed, "world", lambda: None)
    monkeypatch.setattr(distributed, "gather", lambda value, world: [value] * 3)
    merged = merged_over_ranks(record)
    if rank:
        assert merged is None
    else:
        assert merged is not None and merged.header["ranks"] == 3
        key = Key("0", "linear", "input", "forward")
        assert merged.tensors[key].count == 3 * record.tensors[key].count


def test_a_loss_that_is_not_finite_and_a_time_that_is_not_known_are_read_back(record: Record, tmp_path: Path) -> None:
    steps = [StepSeen(0, loss=math.inf), StepSeen(1, loss=math.nan)]
    Record(record.header, Part(steps=steps), {"max_overhead": None, "steps": 2}).save(tmp_path / "run.json")
    again = Record.load(tmp_path / "run.json")
    assert [str(one.loss) for one in again.steps] == ["inf", "nan"]
    assert again.sampling == {"max_overhead": None, "steps": 2}


def test_records_of_different_models_do_not_merge(record: Record) -> None:
    other = Record({**record.header, "fingerprint": "another"}, record.part)
    with pytest.raises(InvalidInput, match="a model with other parameters"):
        record.merge(other)


def test_a_model_that_has_changed_since_is_noticed(record: Record) -> None:
    record.check_model(fingerprint_of(network()))
    with pytest.raises(InvalidInput, match=r"have changed since.*profile the model again"):
        record.check_model(fingerprint_of(nn.Linear(16, 32)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not json at all", "is no profile"),
        ('{"kind": "training", "version": 4}', "it calls itself 'training'"),
        ("[1, 2]", "it does not say so"),
        ('{"kind": "lowp profile", "version": 99}', "has version 99 and this lowp reads version 4"),
        ('{"kind": "lowp profile", "version": 4, "tensors": [{"module"', "is cut"),
        ('{"kind": "lowp profile", "version": 4}', "an entry of it is missing"),
        ('{"kind": "lowp profile", "version": 4, "lines": true}\n{"broken\n{}\n', "line 2 of the profile is damaged"),
        ("", "is no profile"),
        ('{"kind": ', "is no profile"),
        ('"lowp profile"}', "is no profile"),
        ("{" + " " * 185 + '"lowp profile"', "is cut"),
        ("{" + " " * 186 + '"lowp profile"', "is no profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_words(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=told):
        Record.load(file)


def test_a_file_that_is_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="it is not text"):
        Record.load(tmp_path / "run.json")
    with pytest.raises(InvalidInput, match="there is no profile"):
        Record.load(tmp_path / "none.json")


def test_a_role_that_no_profile_has_is_refused(record: Record, tmp_path: Path) -> None:
    document = record.document()
    document["tensors"][0]["role"] = "colour"
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="a role 'colour'"):
        Record.load(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("sampling", [1], r"its sampling is \[1\], but must be numbers by name"),
        ("sampling", {"modules": "many"}, "its sampling is .*, but must be numbers by name"),
        ("models", 3, "its models are 3, but must be a list of names"),
        ("dtypes", [3], r"its dtypes are \[3\], but must be a list of names"),
        ("parameters", "all", "it has 'all' parameters, but must have a number of them"),
        ("steps", "x", "an entry of it is missing or is not what a profile has there"),
    ],
)
def test_an_entry_that_no_profile_has_is_refused_when_it_is_read(
    record: Record, tmp_path: Path, name: str, value: object, told: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**record.document(), name: value}))
    with pytest.raises(InvalidInput, match=told):
        Record.load(tmp_path / "run.json")


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a folder: give the file of a profile"):
        Record.load(tmp_path)


@pytest.mark.parametrize(
    ("module", "path"),
    [("critic", ""), ("critic.0.up", "0.up"), ("generator.head", "head"), ("critics.0", "critics.0"), ("loss", "loss")],
)
def test_a_policy_names_a_module_by_its_path_within_its_model(module: str, path: str) -> None:
    assert Record({"models": ["generator", "critic"]}).within(module) == path
    assert Record({}).within(module) == module


def test_a_full_disk_ends_the_file_of_a_profile_and_not_the_training(record: Record, tmp_path: Path) -> None:
    resource, path = pytest.importorskip("resource"), tmp_path / "run.json"
    kept, limits = Recording(dict(record.header), path), resource.getrlimit(resource.RLIMIT_FSIZE)
    kept.begin(None)
    begun = path.read_bytes()
    assert json.loads(begun)["complete"] is False
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(begun) + 100, limits[1]))
    try:
        with pytest.warns(UserWarning, match=r"run\.json cannot be written: File too large; steps are kept in memory"):
            kept.add(record.part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept.add_scale(StepSeen(7, scale=8.0))
    kept.add(Part(steps=[StepSeen(9)]))
    kept.close()
    assert path.read_bytes().startswith(begun) and len(path.read_bytes()) <= len(begun) + 100
    assert kept.part.tensors.keys() == record.tensors.keys() and [one.step for one in kept.part.steps][-2:] == [7, 9]
    assert Record.load(path).complete is False


def test_a_full_disk_at_the_end_of_a_profile_leaves_it_in_memory_and_what_follows_runs(tmp_path: Path) -> None:
    resource, path, model = pytest.importorskip("resource"), tmp_path / "run.json", nn.Linear(4, 2)
    limits, optimizer = resource.getrlimit(resource.RLIMIT_FSIZE), torch.optim.SGD(model.parameters(), 0.1)
    try:
        with pytest.warns(UserWarning, match=r"run\.json was not written, .* the profile is in memory") as told:
            with lowp.profile(model, optimizer, out=path, max_overhead=None) as profile:
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told[0].filename == __file__, "the line that the profile ends at"
    profile.save(tmp_path / "elsewhere.json")
    assert Record.load(tmp_path / "elsewhere.json").tensors.keys() == profile.record.tensors.keys() != set()


# -- by hand ----------------------------------------------------------------------------------------------------------
def test_an_empty_profile_says_why_it_is_empty() -> None:
    def said(**sampling: float) -> str:
        with pytest.raises(InvalidInput) as caught:
            Record({}, sampling=sampling).require_content()
        return str(caught.value)

    least = "2.5 % of the 1.2 s that 7 steps took is less than recording one module takes. Give --max-overhead none"
    assert f"the profile is empty: {least}" in said(steps=7, max_overhead=0.025, total_seconds=1.23)
    assert "2.5 % of the 0 s that 7 steps took" in said(steps=7, max_overhead=0.025)
    nothing = "the profile is empty: no step of the model ran while it was recorded"
    assert said().startswith(nothing) and said(steps=7).startswith(nothing) and said(max_overhead=1.0) == said()
    skipped = Record({}, Part(faults=[{"step": 1}]))
    assert skipped.why_empty.startswith("the profile has a fault and no step: every step was skipped")
    skipped.sampling["steps"] = 3
    assert skipped.why_empty.startswith(nothing)


def test_modules_were_left_out_where_fewer_were_seen_than_there_are() -> None:
    def partial(**sampling: float | None) -> bool:
        return Record({}, sampling=dict(sampling)).is_partial

    assert partial(max_overhead=0.1, modules=3, modules_seen=2) and partial(max_overhead=0.1, modules=1)
    assert not partial(max_overhead=0.1, modules=3, modules_seen=3) and partial(max_overhead=0.1)
    assert not partial(max_overhead=None, modules=3, modules_seen=0) and not partial(modules=3)


def test_what_was_not_known_of_a_step_is_taken_from_elsewhere() -> None:
    mine = Part(steps=[StepSeen(4, loss=1.0), StepSeen(2, scale=8.0, largest_gradient=0.5)], faults=[{"step": 1}])
    other = StepSeen(4, 2.0, 16.0, True, 0.25, True)
    mine.add(Part(steps=[other, StepSeen(3)], faults=[{"step": 1}, {"step": 2}]))
    assert mine.steps == [
        StepSeen(2, scale=8.0, largest_gradient=0.5),
        StepSeen(3),
        StepSeen(4, 1.0, 16.0, True, 0.25, True),
    ]
    assert mine.faults == [{"step": 1}, {"step": 2}]
    infinite = float("inf")
    steps = [StepSeen(0), StepSeen(0, loss=1.0), StepSeen(0, loss=infinite), StepSeen(0, largest_gradient=infinite)]
    assert [one.is_finite for one in steps] == [True, True, False, False]


def test_parameters_that_an_op_reads_in_one_role_are_numbered() -> None:
    seen = OpSeen("contraction")
    for role, name in (("weight", "a"), ("weight", "b"), ("bias", "c"), ("weight", "a"), ("weight", "d")):
        seen.read(role, name)
    assert seen.parameters == {"weight": "a", "weight 2": "b", "bias": "c", "weight 3": "d"}
    assert seen.named("weight") == ["a", "b", "d"] and seen.named("input") == []


def test_two_runs_part_where_the_first_tensor_differs() -> None:
    first, second, third = (Key(module, "linear", "output", "forward") for module in ("a", "b", "c"))

    def run(**steps: list[Print]) -> Record:
        return Record({"fingerprint": "x"}, Part(prints={int(name[1:]): prints for name, prints in steps.items()}))

    base = [Print(first, 1, (1.0, -2.0)), Print(second, 2, (0.5, 0.0)), Print(third, 3, (3.0,))]
    same = run(s0=base, s2=base)
    assert difference(same, run(s0=base, s2=base)) is None
    step = float(np.nextafter(np.float32(0.5), np.float32(1)))
    found = difference(same, run(s0=base, s2=[base[0], Print(second, 9, (step, 2.0**-148)), base[2]]))
    assert str(found) == (
        "the runs part at step 2 in b linear output (forward), by up to 2 ulp of fp32; 4 tensors before it are equal "
        "to the bit"
    )
    found = difference(same, run(s0=[Print(first, 8, (1.0, -2.0)), *base[1:]]))
    assert found is not None and (found.ulp, found.step, found.equal_before) == (0, 0, 0)
    assert "the recorded numbers agree, others differ" in str(found)
    assert found.document() == {"step": 0, **first._asdict(), "ulp": 0, "equal_before": 0}
    found = difference(same, run(s0=[Print(first, 1, (1.0,)), *base[1:]]))
    assert found is not None and found.key == first
    found = difference(same, run(s0=[base[0], base[2], base[1]]))
    assert found is not None and (found.key, found.ulp, found.equal_before) == (second, 0, 1)
    assert difference(same, run(s0=base[1:])) is None  # what a budget left out
    with pytest.raises(InvalidInput, match="no tensor was recorded in the same step of both runs"):
        difference(same, run(s1=base))
    empty = run(s0=[Print(first, 1, ())])
    assert difference(empty, empty) is None
    nan = float("nan")
    pairs = [(1.0, 1.0), (0.0, -0.0), (2.0**-149, -(2.0**-149)), (nan, nan), (nan, 1.0), (1.0, nan)]
    assert [ulps(*pair) for pair in pairs] == [0, 0, 2, 0, 1 << 32, 1 << 32]


def test_a_scale_that_moves_is_kept_of_steps_that_are_not_recorded() -> None:
    recording = Recording({"started": "now"}, None)
    for step, scale in enumerate((None, 8.0, 8.0, 4.0, None, 4.0)):
        recording.add_scale(StepSeen(step, scale=scale))
    assert [(one.step, one.scale) for one in recording.part.steps] == [(1, 8.0), (3, 4.0)]


def test_parts_of_two_ranks_are_added_entry_by_entry() -> None:
    key, other = Key("a", "linear", "input", "forward"), Key("", "weight", "weight", "step")
    assert [str(key), str(other), key.path, other.path] == [
        "a linear input",
        "the model weight weight",
        "a.linear",
        "weight",
    ]
    assert [one.of_model("m").module for one in (key, other)] == ["m.a", "m"]
    one, two = Part(), Part()
    ones, twos = Spectrum.of(torch.ones(3)), Spectrum.of(torch.full((2,), 2.0))
    one.tensors, two.tensors = {key: ones}, {key: twos, other: ones}
    one.slopes, two.slopes = {key: np.full(96, 1.0)}, {key: np.full(96, 0.5)}
    one.octaves, two.octaves = {0: {key: Octaves.of(ones)}}, {0: {key: Octaves.of(twos)}, 4: {other: Octaves.of(ones)}}
    one.ops["a", "linear"] = OpSeen("contraction", 2, "", "input weight", {"weight": "a.w"}, {"input": "float32"}, 10)
    two.ops["a", "linear"] = OpSeen("contraction", 3, "t.py:1", "input", {"weight": "a.w", "weight 2": "a.v"}, {}, 20)
    two.ops["b", "gelu"] = OpSeen("pointwise", 1, "t.py:2", "input", {}, {"output": "bfloat16"}, 0)
    one.steps, two.steps = [StepSeen(4, 1.0), StepSeen(0, 2.0)], [StepSeen(2), StepSeen(4, 3.0, 8.0, True, 5.0, True)]
    one.prints, two.prints = {0: [Print(key, 1, ())]}, {0: [Print(key, 2, ())], 4: [Print(other, 3, (1.0,))]}
    one.faults, two.faults = [{"step": 1}], [{"step": 1}, {"step": 2}]
    one.add(two)
    assert one.tensors[key].document() == (ones + twos).document() and one.tensors[other] is ones
    assert one.slopes[key].tolist() == [1.5] * 96
    assert one.octaves == {0: {key: Octaves(0, (3, 2))}, 4: {other: Octaves(0, (3,))}}
    roles = {"weight": "a.w", "weight 2": "a.v"}
    assert one.ops["a", "linear"] == OpSeen("contraction", 5, "t.py:1", "input weight", roles, {"input": "float32"}, 30)
    assert one.ops["b", "gelu"] == two.ops["b", "gelu"]
    assert one.steps == [StepSeen(0, 2.0), StepSeen(2), StepSeen(4, 1.0, 8.0, True, 5.0, True)]
    assert one.prints == {0: [Print(key, 1, ())], 4: [Print(other, 3, (1.0,))]}
    assert one.faults == [{"step": 1}, {"step": 2}]
    again = Part.read(json.loads(json.dumps(one.document())))
    assert again.document() == one.document() and again.prints == one.prints and again.octaves == one.octaves
    assert (again.ops, again.steps, again.faults) == (one.ops, one.steps, one.faults)
    named = one.renamed("m")
    assert set(named.ops) == {("m.a", "linear"), ("m.b", "gelu")} and set(named.tensors) == {
        key.of_model("m"),
        other.of_model("m"),
    }
    assert named.ops["m.a", "linear"].parameters == {"weight": "m.a.w", "weight 2": "m.a.v"}
    for loss, largest, finite in (
        (None, None, True),
        (1.0, math.inf, False),
        (math.nan, None, False),
        (1.0, 2.0, True),
    ):
        assert StepSeen(0, loss, largest_gradient=largest).is_finite is finite
    texts = [failure({"step": 3, "what": what}) for what in ("loss", "gradients")]
    assert texts == ["step 3: the loss was not finite", "step 3: the gradients were not finite"]


def test_a_look_tells_a_tensor_by_its_bits_and_by_numbers_from_its_first_to_its_last() -> None:
    key = Key("a", "linear", "output", "forward")
    x = torch.arange(1.0, 11.0)
    seen, same, other = looked_at(key, x), looked_at(key, x.clone()), looked_at(key, x.flip(0) + 1)
    assert seen.print == same.print and seen.print.checksum != other.print.checksum
    assert seen.print.key == key and seen.print.numbers == (1.0, 4.0, 7.0, 10.0)
    halved = looked_at(key, x, 2.0)
    assert halved.print.numbers == (0.5, 2.0, 3.5, 5.0)
    assert halved.spectrum.document() == Spectrum.of(x / 2).document()
    assert looked_at(key, torch.tensor([3.0])).print.numbers == (3.0,) * 4
    empty = looked_at(key, torch.empty(0))
    assert empty.print.numbers == () and empty.spectrum.nonzero == 0
    read = key._replace(role="input")
    assert looked_at(read, torch.ones(64, 64)).blocks
    assert not looked_at(read, torch.full((64, 64), math.inf)).blocks
    assert parameter_key("a.b.weight", "update", "step") == Key("a.b", "weight", "update", "step")
    assert parameter_key("weight", "update", "step") == Key("", "weight", "update", "step")


def test_blocks_of_a_scaled_gradient_are_those_of_the_tensor_as_it_is() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    found = looked_at(Key("0", "linear", "grad", "backward"), x, 2.0**12).blocks
    plain = blocks_of(x, "grad", "linear", float(x.abs().max()))
    assert found.keys() == plain.keys() and all(np.array_equal(found[key].counts, plain[key].counts) for key in plain)
