"""Plans of runs at their bounds: processes, pace and checkpoints, steps that are sampled, grids, rows and verdicts."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowp.errors import InvalidInput, Unavailable
from lowp.recipes import comparison, results, runs, serving
from lowp.recipes.comparison import GapVerdict, Study, Variant, judge, result_line
from lowp.recipes.recipe import Metric, TensorExamples
from lowp.recipes.runs import Job, Paced, RunKeeper
from lowp.recipes.sampling import Share, moments_of
from lowp.recipes.sweep import Grid, _effect
from lowp.recipes.training import Settings, Training, _invalid_entry, threads_of


@pytest.mark.parametrize(
    ("count", "settings", "cores", "processes"),
    [
        (5, Settings("digits", epochs=20, batch=32), 4, 1),  # 3,928 steps
        (5, Settings("digits", epochs=21, batch=32), 4, 4),
        (3, Settings("digits", epochs=99, batch=1), 4, 3),
        (3, Settings("digits", epochs=99, batch=1, device="meta"), 4, 1),
        (3, Settings("unet", epochs=99, batch=1), 4, 1),  # whose steps use several cores
        (1, Settings("digits", epochs=4), 4, 1),
        (4, Settings("digits"), 4, 4),  # epochs and a batch of 1
        (0, Settings("digits"), 4, 1),
    ],
)
def test_many_steps_of_one_thread_are_worth_processes(
    monkeypatch: pytest.MonkeyPatch, count: int, settings: Settings, cores: int, processes: int
) -> None:
    monkeypatch.setattr(runs, "available_cores", lambda: cores)
    data: Any = SimpleNamespace(training=range(1257))
    assert runs.processes_for([Job("a", settings)] * count, data) == processes
    for examples, found in ((999, 1), (1000, 4)):  # 4,000 steps are enough
        few: Any = SimpleNamespace(training=range(examples))
        assert runs.processes_for([Job("a", Settings("digits", epochs=1, batch=1))] * 4, few) == found


def test_progress_is_told_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    told: list[float] = []
    paced = Paced(lambda training: told.append(clock.now))
    for clock.now in (0.05, 0.125, 0.1875, 0.2265, 0.5, 0.5625):
        paced(None, None)  # type: ignore[arg-type]
    assert told == [0.125, 0.2265, 0.5]


def test_a_checkpoint_is_written_each_half_minute_and_before_long_evaluations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    saved: list[Any] = []
    training: Any = SimpleNamespace(
        step_of_epoch=3, epoch=1, epochs=4, save=lambda path, **more: saved.append((clock.now, path, more))
    )
    path = tmp_path / "folder" / "a.pt"
    keeper = RunKeeper(path, lambda: {"more": 1})
    assert keeper.at == "" and keeper.before_evaluation(training) and path.parent.is_dir()
    for clock.now in (30.0, 30.5, 60.5, 61.0):
        keeper.after_step(training)
    assert saved == [(now, path, {"more": 1}) for now in (0.0, 30.5, 61.0)] and keeper.at == "step 3 of epoch 2"
    for seconds, is_kept in ((0.49, False), (0.5, True)):
        keeper.evaluated(seconds)
        assert keeper.before_evaluation(training) is is_kept
    training.epoch = 4
    keeper.save(training)
    assert len(saved) == 5 and keeper.at == "step 3 of epoch 4"
    assert RunKeeper(path, keeps_beginning=False).before_evaluation(training) is False


def test_threads_are_set_for_a_while() -> None:
    before = torch.get_num_threads()
    with threads_of(before + 1) as count:
        assert count == torch.get_num_threads() == before + 1
    with threads_of(None) as count:
        assert count == torch.get_num_threads() == before


def test_steps_that_are_sampled_lie_in_the_middle_of_equal_parts() -> None:
    assert [moments_of(range(9), count) for count in (1, 2, 3, 9, 20)] == [
        *([4], [2, 6], [1, 4, 7], list(range(9)), list(range(9)))
    ]
    assert moments_of(range(10, 20), 2) == [12, 17] and moments_of(range(0), 3) == []
    share = Share()
    assert share.value == 0.0
    share.add(torch.tensor([True, True, False, True]), torch.tensor([True, False, True, True]))
    share += Share(1, 5)
    assert (share.lost, share.counted, share.value) == (3, 8, 0.375)


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("exponent=2..3,mantissa=1", ((2, 3), (1,), True)),
        (" Exponent = 8 , mantissa=22 .. 23,subnormals=no", ((8,), (22, 23), False)),
        ("mantissa=1,exponent=5,subnormals=yes", ((5,), (1,), True)),
    ],
)
def test_a_grid_has_the_widths_of_its_ranges(text: str, grid: Any) -> None:
    assert tuple(Grid.parse(text)) == grid
    names = {True: "e2m1", False: "e2m1ftz"}
    assert Grid.parse(text).name(2, 1) == names[grid[2]]


def test_an_effect_is_the_spread_of_the_means() -> None:
    assert _effect([(1.0, 3.0), (None, 4.0), (0.5, 0.5)]) == {"means": [2.0, 4.0, 0.5], "spread": 3.5}


# -- settings and what is saved ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs 0: give 1 or more"),
        ({"batch": 0}, "batch 0: give 1 or more"),
        ({"learning_rate": 0.0}, "learning rate 0.0: give a finite number above zero"),
        ({"learning_rate": math.inf}, "learning rate inf: give a finite"),
        ({"seed": -1}, "seed -1: give 0 to 2147483647"),
        ({"seed": 2**31}, "seed 2147483648: give 0 to 2147483647"),
        ({"device": "none"}, "device 'none' is not a device of torch"),
    ],
)
def test_settings_beyond_their_bounds_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Settings("digits", **changes).filled()


def test_settings_at_their_bounds_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Settings("digits", epochs=1, batch=1, learning_rate=1e-9, seed=2**31 - 1).filled()
    assert (found.size, found.epochs, found.batch, found.learning_rate) == ("cpu", 1, 1, 1e-9)
    usual = Settings("digits", size="full", seed=0).filled()
    assert (usual.size, usual.epochs, usual.batch, usual.learning_rate) == ("full", 40, 32, 0.1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for device in ("cuda", "cuda:1"):
        assert Settings("digits", device=device).filled().device == device
    with pytest.raises(Unavailable, match="device cuda:2: this machine has 2 CUDA devices"):
        Settings("digits", device="cuda:2").filled()


def saved(**changes: Any) -> dict[str, Any]:
    settings = vars(Settings("digits").filled())
    whole = {"settings": settings, "epoch": 1, "step_of_epoch": 0, "loss_sum": 0.5, "seconds": 0.0, "failure": None}
    return {**whole, "history": [{"loss": 1.0}, {"loss": 2}], **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"failure": "NaN", "epoch": 0, "history": []}, None),
        ({"history": [], "epoch": 3}, None),
        ({"settings": {**saved()["settings"], "learning_rate": 1}}, None),
        ({"settings": {**saved()["settings"], "epochs": True}}, "its setting epochs is True"),
        ({"settings": {**saved()["settings"], "epochs": 1.0}}, "its setting epochs is 1.0"),
        ({"settings": {"recipe": "digits"}}, "its settings are not those of a training"),
        ({"settings": []}, "its settings are not those of a training"),
        ({"epoch": -1}, "its epoch is -1"),
        ({"epoch": True}, "its epoch is True"),
        ({"step_of_epoch": 1.0}, "its step_of_epoch is 1.0"),
        ({"loss_sum": 1}, "its loss_sum is 1"),
        ({"failure": 3}, "its failure is 3"),
        ({"history": {}}, "its history is no list of numbers by name"),
        ({"history": [{"loss": "1"}, {}]}, "its history is no list of numbers by name"),
        ({"history": [{1: 1.0}, {}]}, "its history is no list of numbers by name"),
        ({"history": [{}]}, "its history has 1 entries after 1 epochs"),
        ({"history": [{}] * 3}, "its history has 3 entries after 1 epochs"),
    ],
)
def test_what_a_training_would_not_write_is_named(changes: dict[str, Any], words: str | None) -> None:
    assert _invalid_entry(saved(**changes)) == words


# -- rows and verdicts ------------------------------------------------------------------------------------------------
def run(seed: int, *accuracies: float, failure: str | None = None, **more: Any) -> dict[str, Any]:
    history = [{"accuracy": one, "loss": 1 - one, "epoch": place} for place, one in enumerate(accuracies)]
    return {"seed": seed, "history": history, "failure": failure, "skipped_steps": 0, "loss_scale": 1.0, **more}


def test_a_study_tells_of_its_runs_row_by_row(tmp_path: Path) -> None:
    rows = [Variant(name, Settings("digits", name, epochs=2).filled()) for name in ("fp32", "bf16", "fp16")]
    study = Study(rows, (0, 1), samples=3)
    study.folder = tmp_path
    names = [f"{name}, seed {seed}" for seed in (0, 1) for name in ("fp32", "bf16", "fp16")]
    jobs = study.jobs()
    assert [job.name for job in jobs] == names and {job.samples for job in jobs} == {3}
    assert [job.settings.seed for job in jobs] == [0, 0, 0, 1, 1, 1]
    assert jobs[1].kept == tmp_path / "bf16-seed-0.pt"
    study.runs = {
        ("fp32", 0): run(0, 0.1, 0.875, flushed_gradients=0.25),
        ("fp32", 1): run(1, 0.1, 0.75, flushed_gradients=None),
        ("bf16", 0): run(0, 0.1, 0.5, skipped_steps=2),
        ("fp16", 1): run(1, 0.1, failure="its loss was NaN"),
    }
    assert [job.name for job in study.jobs()] == ["fp16, seed 0", "bf16, seed 1"]
    document = study.document()
    assert (document["complete"], document["seeds"], document["samples"], document["baseline"]) == (
        *(False, [0, 1], 3, "fp32"),
    )
    assert document["recipe"]["validation_examples"] == 540 and "Counted at 3 steps" in document["methods"]["losses"]
    fp32, bf16, fp16 = document["variants"]
    assert fp32["verdict"] == {"verdict": "baseline", "gap": 0.0, "gap_in_deviations": 0.0, "p": None, "reason": ""}
    assert fp32["statistics"]["accuracy"]["mean"] == 0.8125 and fp32["statistics"]["loss"]["values"] == [0.125, 0.25]
    assert fp32["statistics"]["accuracy"]["deviation"] == pytest.approx(0.125 / 2**0.5)
    assert fp32["statistics"]["flushed_gradients"]["values"] == [0.25]
    assert bf16["statistics"]["skipped_steps"]["values"] == [2] and math.isnan(
        bf16["statistics"]["loss_scale"]["deviation"]
    )
    assert bf16["verdict"]["gap"] == 0.375
    assert fp16["verdict"]["verdict"] == "fails" and fp16["verdict"]["reason"].endswith("; its loss was NaN")
    del study.runs["fp32", 0]
    assert study.document()["variants"][1]["verdict"] is None
    lines = [result_line(study, "a", one) for one in study.runs.values()]
    assert lines == [
        "a: accuracy 75.00%, loss 0.2500",
        "a: accuracy 50.00%, loss 0.5000, 2 steps skipped",
        "a: failed: its loss was NaN",
    ]
    assert result_line(study, "a", run(0, 0.0, 1.0, skipped_steps=1)).endswith("loss 0.0000, 1 step skipped")
    with pytest.raises(InvalidInput, match="seeds 0: give 1 or more"):
        Study(rows, ())


@pytest.mark.parametrize(
    ("values", "start", "verdict", "reason"),
    [
        ([0.875, 0.9375], 0.1, "converges as fp32", "within one seed deviation"),
        ([0.8125, 0.875], 0.1, "undecided", "p = 0."),
        ([0.5, 0.5], 0.1, "fails", "learned 50%"),
        ([0.25, 0.25], 0.0, "fails", "learned 28%"),
    ],
)
def test_a_verdict_has_its_reason(values: list[float], start: float, verdict: str, reason: str) -> None:
    found = judge(values, [0.875, 0.9375], start, Metric("accuracy"), 1000, 0)
    assert (found.verdict, found.reason[: len(reason)]) == (verdict, reason)


def test_runs_that_came_to_nothing_are_counted() -> None:
    given = [0.9, 0.9], 0.1, Metric("accuracy"), 100
    assert judge([0.9, math.nan], *given, 1).reason == "1 of 2 runs came to nothing"
    assert judge([math.nan], *given, 3).reason == "3 of 3 runs came to nothing"
    nothing = judge([], *given, 0)
    assert isinstance(nothing, GapVerdict) and nothing.verdict == "fails" and math.isnan(nothing.gap)
    assert comparison.chance(0.0, 0.0, 2) == 1.0 and comparison.chance(0.1, 0.0, 2) == 0.0
    assert math.isnan(comparison.chance(0.1, 0.1, 1)) and math.isnan(comparison.chance(math.nan, 0.1, 2))


def test_a_training_counts_its_steps() -> None:
    examples = SimpleNamespace(training=range(25), validation=range(5))
    training = Training(Settings("digits", epochs=3, batch=10), data=examples)  # type: ignore[arg-type]
    assert (training.batch, training.steps_per_epoch, training.steps) == (10, 2, 6)
    training.epoch, training.step_of_epoch = 1, 1
    assert (training.done, training.progress, training.finished) == (3, 0.5, False)
    training.epoch = 3
    assert training.finished
    training.epoch, training.failure = 0, "NaN"
    assert training.finished
    small = Training(Settings("digits", epochs=3, batch=100), data=examples)  # type: ignore[arg-type]
    assert (small.batch, small.steps_per_epoch) == (25, 1)


def test_a_machine_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_cpu", lambda: "a processor")
    monkeypatch.setattr(results.platform, "system", lambda: "Linux")
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}[name])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: f"GPU {index}")
    for cores, told in ((1, "1 core"), (2, "2 cores")):
        monkeypatch.setattr(results, "available_cores", lambda cores=cores: cores)
        assert results.machine()["words"] == f"a processor, {told}, 4 GiB of memory, GPU 0, GPU 1, Linux"
    assert results.machine(False)["words"] == "a processor, 2 cores, 4 GiB of memory, Linux"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = results.machine()
    assert found["words"] == "a processor, 2 cores, 4 GiB of memory, no GPU, Linux" and found["cores"] == 2


def test_batches_to_calibrate_with_are_the_first_ones() -> None:
    examples = TensorExamples(torch.arange(25))
    for batch, count, rows in ((3, 8, [3] * 8), (3, 2, [3, 3]), (3, 9, [3] * 8 + [1]), (10, 8, [10, 10, 5])):
        found = serving._batches(examples, batch, torch.device("cpu"), count)
        assert [len(one) for (one,) in found] == rows
        assert torch.equal(torch.cat([one for (one,) in found]), torch.arange(sum(rows)))
    assert len(serving._batches(examples, 1, torch.device("cpu"))) == 8
    found = serving.Serving(Settings("digits"), ["int8", "int8", "bf16"])
    assert (found.formats, found.trainings) == (["fp32", "int8", "bf16"], 1)
    assert serving.Serving(Settings("digits"), ["int8", "bf16"], recover=True).trainings == 3


def test_a_file_has_the_settings_of_its_checkpoint_or_those_of_the_recipe_that_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "RECIPES", {name: serving.RECIPES[name] for name in ("mnist", "digits")})
    path = tmp_path / "run.pt"
    training = Training(Settings("digits", "fp16", epochs=3, batch=100, loss_scale="8"))
    training.save(path)
    state = training.model.state_dict()
    own = serving.settings_of(path, None, None, state)
    assert own == Settings("digits", "fp32", epochs=3, batch=100).filled()
    assert serving.settings_of(path, "digits", "full", state) == Settings("digits", size="full").filled()
    torch.save(state, tmp_path / "plain.pt")
    plain = tmp_path / "plain.pt"
    assert serving.settings_of(plain, None, "cpu", state) == Settings("digits", size="cpu").filled()
    for size, tensors, words in (("full", state, "the 4 tensors of no recipe, such as 0.weight"), (None, {}, "none")):
        with pytest.raises(InvalidInput, match=words):
            serving.settings_of(plain, None, size, tensors)


def test_a_serving_tells_the_epochs_of_every_training_and_stops_between_its_formats() -> None:
    settings, told = Settings("digits", epochs=2, batch=400), list[str]()
    study = serving.Serving(settings, ["int8"], recover=True)
    rows = list(study.run(told.append, lambda: False))
    assert told == ["fp32"] * 2 + ["int8"] * 2 and [row["format"] for row in rows] == ["fp32", "int8"]
    assert "trained" not in rows[0] and rows[1]["trained"].keys() == rows[1]["numbers"].keys()
    assert all(0 < row["seconds"] < 60 for row in rows) and study.document()["complete"]
    study = serving.Serving(settings, ["int8"])
    rows = list(study.run(told.append, lambda: len(study.rows) == 1))
    assert [row["format"] for row in rows] == ["fp32"] and not study.document()["complete"]
