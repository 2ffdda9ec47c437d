"""Benchmarks: the measurements, interruption, and the written document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowp.benchmarking import benchmark, timing
from lowp.benchmarking.benchmark import Benchmark, BenchmarkPlan, estimate, published
from lowp.benchmarking.contenders import (
    Contender,
    TorchAmp,
    begin,
    contenders_of,
    products_of,
    products_under,
    step_of,
    tf32_of,
)
from lowp.benchmarking.memory import PARTS, Split
from lowp.benchmarking.operations import Operations
from lowp.benchmarking.timing import StepTimer, time_steps
from lowp.errors import UnknownName
from lowp.policy import Policy, Rule
from lowp.recipes import results
from lowp.recipes.training import Settings, load_data

TINY = Settings("digits", batch=64).filled()
DATA = load_data(TINY)
FP32, AMP_FP16, AMP_BF16, FP16, DFP16 = contenders_of(TINY, ["fp16", "dfp16"], torch_amp=True)
QUICK = BenchmarkPlan(precisions=["fp16"], torch_amp=False, seconds=0.02)


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch, never_slow: None) -> None:
    monkeypatch.setattr("lowp.benchmarking.largest_batch.process_growth", lambda *_: 1_000_000)


def stopping_after(count: int) -> Any:
    """Return a `stop` that returns true after `count` calls."""
    calls = iter(range(10**9))
    return lambda: next(calls) >= count


# -- who takes part ---------------------------------------------------------------------------------------------------
def test_fp32_comes_first_then_torch_amp_then_each_precision_once() -> None:
    rows = contenders_of(TINY, ["bf16", "fp32", "bf16 "], torch_amp=True)
    assert [row.label for row in rows] == ["fp32", "torch.amp fp16", "torch.amp bf16", "lowp bf16"]
    assert [row.label for row in contenders_of(TINY, ["bf16"], torch_amp=False)] == ["fp32", "lowp bf16"]
    with pytest.raises(UnknownName, match="unknown precision 'fp61'; did you mean"):
        contenders_of(TINY, ["fp61"], torch_amp=True)


def test_on_a_gpu_fp32_runs_with_tf32_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowp.recipes.training._check_device", lambda name: None)
    rows = contenders_of(Settings("digits", device="cuda"), ["fp16"], torch_amp=False)
    assert [(row.label, row.tf32) for row in rows] == [("fp32", False), ("fp32, TF32 on", True), ("lowp fp16", False)]
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    for row, expected in zip(rows, ("ieee", "tf32", "ieee"), strict=True):
        with tf32_of(row):
            assert matmul.fp32_precision == expected
    assert matmul.fp32_precision == before


def test_torch_amp_trains_as_pytorch_s_own_recipe_does() -> None:
    training = begin(AMP_FP16, DATA)
    assert isinstance(training.precision, TorchAmp) and training.precision.scale == 65536
    batch = DATA.training.batch(torch.arange(64))
    by_hand = begin(FP32, DATA)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        step_of(training, AMP_FP16, batch)
        by_hand.recipe.schedule(by_hand.optimizer, by_hand.progress)
        by_hand.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = by_hand.recipe.loss(by_hand.model, batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(by_hand.optimizer)
        scaler.update()
    pairs = zip(training.model.parameters(), by_hand.model.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert begin(AMP_BF16, DATA).precision.scale == 1


def test_the_format_of_a_contender_is_the_widest_of_its_operands() -> None:
    assert FP32.narrow is None and str(AMP_BF16.narrow) == "bf16" and str(DFP16.narrow) == "dfp16"
    assert DFP16.sums_integers and not FP16.sums_integers and not AMP_FP16.sums_integers
    fp8 = contenders_of(TINY, ["fp8"], torch_amp=False)[1]
    assert "e4m3fn" in str(fp8.narrow)  # e5m2 of the gradients has a bit less


# -- time -------------------------------------------------------------------------------------------------------------
def test_the_rows_take_turns_and_are_compared_turn_by_turn() -> None:
    base, other = StepTimer(FP32), StepTimer(FP16)
    base.rounds = [[1.0, 1.0, 9.0], [4.0, 4.0]]
    other.rounds = [[2.0, 2.0], [6.0], [100.0]]
    assert other.relative_to(base) == pytest.approx((2 + 1.5) / 2)
    assert base.relative_to(base) == 1
    assert other.step()["median"] == 4.0 and other.step()["steps"] == 4


@pytest.mark.usefixtures("never_slow")
def test_a_timer_times_steps_and_counts_data_and_operations() -> None:
    timers = time_steps([FP32, FP16], DATA, 0.05, lambda: False)
    for timer in timers:
        assert timer.failure is None and not timer.slow and len(timer.times) >= 3
        wall = timer.wall(19)
        assert wall is not None and wall["steps"] == len(timer.times)
        assert 0 < wall["data_seconds"] < wall["seconds"]
        assert wall["epoch_seconds"] == pytest.approx(19 * wall["seconds"] / wall["steps"])
        assert timer.training is None and timer.units == 64
    assert [timer.operations.share for timer in timers if timer.operations] == [0.0, 1.0]


@pytest.mark.parametrize("asked", ["steps_only", "counts"])
def test_operations_are_counted_only_where_both_they_and_the_loop_are_asked_for(asked: str) -> None:
    for timer in time_steps([FP32, FP16], DATA, 0.01, lambda: False, **{asked: asked == "steps_only"}):
        assert timer.failure is None and timer.operations is None
        assert (timer.wall(19) is None) == (asked == "steps_only")


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 1), (1.0, 1), (2.0, 2), (80.0, 4)])
def test_a_turn_has_an_eighth_of_the_seconds_and_half_a_second_at_most(
    seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, timer = [0.0], StepTimer(FP32, steps_only=True)
    timer.training = begin(FP32, DATA)
    monkeypatch.setattr(timing, "step_of", lambda *_: clock.__setitem__(0, clock[0] + 0.125))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    for _ in range(2):
        timer.turn(seconds)
    assert timer.rounds == [[0.125] * steps] * 2


def test_a_row_with_very_slow_steps_has_one_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def slow(training: Any, contender: Contender, batch: Any) -> Any:
        taken.append(contender.label)
        clock[0] += 50.0 if contender is AMP_FP16 else 0.01
        return step_of(training, contender, batch)

    clock = [0.0]
    monkeypatch.setattr(timing, "step_of", slow)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    base, amp = time_steps([FP32, AMP_FP16], DATA, 1.0, lambda: False)
    assert taken.count("torch.amp fp16") == 2 and amp.slow
    assert amp.step() == {"median": pytest.approx(50.0), "quartiles": None, "steps": 1, "only_one": True}
    assert amp.relative_to(base) == pytest.approx(5000) and amp.wall(1) is None
    assert amp.operations is not None and amp.operations.share == 1
    assert sum(base.times) >= 1.0


def test_a_first_step_that_is_slow_alone_is_a_start_and_no_slow_row(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter(range(10**9))

    def slow_at_first(training: Any, contender: Contender, batch: Any) -> Any:
        clock[0] += 100.0 if next(taken) == 0 else 0.1
        return step_of(training, contender, batch)

    clock = [0.0]
    monkeypatch.setattr(timing, "step_of", slow_at_first)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    (base,) = time_steps([FP32], DATA, 1.0, lambda: False)
    assert not base.slow and base.median == pytest.approx(0.1) and len(base.times) >= 10


def test_an_error_ends_one_row_and_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(training: Any, contender: Contender, batch: Any) -> Any:
        if contender is AMP_FP16:
            raise RuntimeError("\"gather\" not implemented for 'Half'\nsome more")
        return step_of(training, contender, batch)

    monkeypatch.setattr(timing, "step_of", failing)
    base, amp = time_steps([FP32, AMP_FP16], DATA, 0.02, lambda: False)
    assert amp.failure == "RuntimeError: \"gather\" not implemented for 'Half'" and not amp.times
    assert base.failure is None and base.times
    assert amp.relative_to(base) is None


@pytest.mark.parametrize("slow", ["base", "other"])
def test_a_slow_row_is_compared_by_the_medians_of_all_turns(slow: str) -> None:
    timers = {
        "base": StepTimer(FP32, rounds=[[1.0], [4.0], [4.0]]),
        "other": StepTimer(FP16, rounds=[[6.0], [2.0, 2.0]]),
    }
    timers[slow].slow = True
    assert timers["other"].relative_to(timers["base"]) == 0.5


@pytest.mark.parametrize(("taken", "slow"), [((3.0, 9.0), True), ((9.0, 3.0), True), ((2.9, 9.0), False)])
def test_a_row_is_slow_from_three_times_its_seconds(
    taken: tuple[float, float], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, steps = [0.0], iter(taken)
    monkeypatch.setattr(timing, "step_of", lambda *_: clock.__setitem__(0, clock[0] + next(steps)))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    timer = StepTimer(FP32, counts=False)
    timer.begin(DATA, 1.0)
    assert (timer.slow, timer.rounds) == ((True, [[taken[1]]]) if slow else (False, []))


@pytest.mark.usefixtures("never_slow")
def test_the_loop_takes_new_batches_that_are_the_same_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = [0.0], list[Any]()

    def step(training: Any, contender: Contender, batch: Any) -> None:
        seen.append(batch)
        clock[0] += 1.0

    def batch_of(indices: torch.Tensor, generator: Any) -> Any:
        clock[0] += 0.25
        return indices, generator.initial_seed()

    monkeypatch.setattr(timing, "step_of", step)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    taken = []
    for contender in (FP32, FP16):
        timer = StepTimer(contender)
        timer.training = begin(contender, DATA)
        monkeypatch.setattr(type(DATA.training), "batch", lambda self, *given: batch_of(*given))
        timer._walk(2)
        timer._walk(1)
        monkeypatch.undo()
        monkeypatch.setattr(timing, "step_of", step)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
        assert (timer.wall_steps, timer.data_seconds, timer.wall_seconds) == (3, 0.75, 3.75)
        taken.append([(seed, indices.tolist()) for indices, seed in seen])
        seen.clear()
    assert taken[0] == taken[1] and [seed for seed, _ in taken[0]] == [0, 1, 2]
    for _, indices in taken[0]:
        assert len(indices) == 64 and min(indices) >= 0 and 1000 < max(indices) < len(DATA.training)


# -- estimates and published figures ----------------------------------------------------------------------------------
def test_energy_and_area_come_from_the_published_table() -> None:
    memory = Split(10, dict.fromkeys(PARTS, 0), {"weights": 400, "activations": 100})
    wide = estimate(FP32, Operations(2_000_000, 0), memory)
    assert wide["arithmetic_joules"] == pytest.approx(1e6 * (3.7 + 0.9) * 1e-12) and wide["how"] == "table"
    assert wide["dram_bytes"] == 1000 and wide["dram_joules"] == pytest.approx(1000 * 160e-12)
    assert wide["unit_area_um2"] == 7700 + 4184 and wide["unit_area_relative_to_fp32"] == 1
    half = estimate(FP16, Operations(2_000_000, 1_500_000), None)  # three quarters in fp16, summed in fp32
    assert half["arithmetic_joules"] == pytest.approx((0.75e6 * (1.1 + 0.9) + 0.25e6 * 4.6) * 1e-12)
    assert "dram_joules" not in half
    integers = estimate(DFP16, Operations(2_000_000, 2_000_000), None)
    assert integers["how"] == "interpolated" and integers["arithmetic_joules"] < half["arithmetic_joules"]
    assert integers["unit_area_um2"] == pytest.approx(282 + (3495 - 282) * (256 - 64) / (1024 - 64) + 137)


def test_the_published_figures_are_those_of_the_guide() -> None:
    unet = published("unet")
    assert unet is not None and "June 2020" in unet["source"] and "PyTorch 1.6" in unet["source"]
    v100, t4 = unet["gpus"]
    assert v100["seconds"] == (505, 478) and t4["gigabytes"] == (4.26, 2.67)
    assert (v100["gpu"], t4["gpu"], t4["memory_ratio"]) == ("V100", "T4", 2.67 / 4.26)
    ratios = {
        name: [round(row["time_ratio"] - 1, 2) for row in (published(name) or {"gpus": ()})["gpus"]]
        for name in ("rossmann", "unet", "bert")
    }
    assert ratios == {"rossmann": [0.07, -0.01], "unet": [-0.05, -0.30], "bert": [-0.54, -0.63]}
    assert published("digits") is None


# -- the document -----------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("without_processes")
def test_the_document_has_every_number_and_how_it_was_measured(tmp_path: Path) -> None:
    whole = Benchmark([TINY], BenchmarkPlan(precisions=["fp16"], torch_amp=True, seconds=0.02, memory=1_000_000))
    said = list(whole.run())
    assert len(said) == whole.stages == 9 and said[0].startswith("digits: ") and said[0].endswith(" steps timed")
    results.write(tmp_path / "bench.json", whole.document())
    document = results.read(tmp_path / "bench.json", benchmark.KIND)
    assert document["complete"] and document["machine"]["words"] and document["tf32"].startswith("TF32:")
    assert set(document["methods"]) >= {"step", "wall", "memory", "parts", "reserved", "operations", "estimates"}
    (subject,) = document["recipes"]
    assert subject["recipe"]["units_per_step"] == 64 and subject["recipe"]["unit"] == "images"
    assert subject["threads"] == 1 and subject["published"] is None
    assert [row["label"] for row in subject["variants"]] == ["fp32", "torch.amp fp16", "torch.amp bf16", "lowp fp16"]
    for row in subject["variants"]:
        assert row["failure"] is None
        assert row["throughput"] == pytest.approx(64 / row["step"]["median"])
        assert row["memory"]["slack"] == 1_000_000 - row["memory"]["allocated"]
        assert sum(row["memory"]["parts"].values()) == row["memory"]["allocated"]
        assert row["operations"]["share"] == (0 if row["label"] == "fp32" else 1)
        assert row["estimates"]["dram_bytes"] == 2 * sum(row["memory"]["held"].values())
        found = row["largest_batch"]
        assert found["verified"] and found["peak"] <= 1_000_000 < found["measured"][str(found["too_large"])]


@pytest.mark.usefixtures("without_processes")
@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_is_stopped_keeps_what_is_done(count: int) -> None:
    stopped, said = Benchmark([TINY], QUICK), list[str]()
    for words in stopped.run(lambda: len(said) >= count):
        said.append(words)
    document = stopped.document()
    assert not document["complete"] and len(said) == max(1, count)
    json.dumps(document)
    rows = [row for subject in document["recipes"] for row in subject["variants"]]
    assert [row["step"]["steps"] > 0 for row in rows] == [True, True][: 2 * count]
    assert sum("memory" in row for row in rows) == max(0, count - 1)


def test_timing_that_is_stopped_keeps_the_turns_that_were_taken() -> None:
    base, other = time_steps([FP32, FP16], DATA, 1.6, stopping_after(6))
    assert (len(base.rounds), len(other.rounds)) == (1, 1) and not other.is_done(1.6)


@pytest.mark.usefixtures("without_processes")
def test_memory_of_a_row_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(training: Any, contender: Contender, batch: Any) -> Any:
        if contender.kind == "lowp":
            raise FloatingPointError("no scale is small enough")
        return step_of(training, contender, batch)

    monkeypatch.setattr(timing, "step_of", failing)
    broken = Benchmark([TINY], QUICK)
    list(broken.run())
    fp32, fp16 = broken.document()["recipes"][0]["variants"]
    assert fp16["failure"] == "FloatingPointError: no scale is small enough" and "memory" not in fp16
    assert "memory" in fp32 and broken.complete


# -- one recipe by hand -----------------------------------------------------------------------------------------------
def by_hand(seconds: float = 3.0, memory: int | None = None) -> benchmark.Subject:
    """A subject whose rows have taken 64 examples in 2 s and in 1 s."""
    plan = BenchmarkPlan(precisions=["fp16"], torch_amp=False, seconds=seconds, memory=memory)
    subject = benchmark.Subject(TINY, plan)
    for contender, rounds in zip(subject.contenders, ([[2.0, 2.0], [2.0]], [[1.0], [1.0, 1.0]]), strict=True):
        timer = StepTimer(contender, rounds=rounds, units=64)
        timer.wall_seconds, timer.data_seconds, timer.wall_steps = 8.0, 2.0, 4
        subject.timers[contender.label] = timer
    return subject


@pytest.mark.parametrize(("seconds", "most"), [(0.02, 20), (2.0, 20), (3.0, 30)])
def test_a_batch_that_would_take_too_long_is_not_measured(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, asked = by_hand(seconds), []

    def search(limit: int, measure: Any, start: int, stop: Any) -> str:
        asked.append((limit, start))
        return f"{stop(most * 16)}, {stop(most * 16 + 1)}"  # two steps of 2 s for 64

    monkeypatch.setattr(benchmark.largest_batch, "largest_batch", search)
    for stops, told in ((False, ""), (True, "interrupted")):
        subject._measure_largest(subject.contenders[0], 1234, lambda stops=stops: stops)
        long = f"two steps of batch {most * 16 + 1} would take about {most} s, and {most} s are allowed"
        assert subject.largest["fp32"] == f"{told}, {long}"
    assert asked == [(1234, 64)] * 2


def test_the_memory_of_a_batch_is_what_was_reserved_where_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(contender: Contender, data: Any, batch: int) -> Split:
        if batch > 4:
            raise RuntimeError("out of memory")
        return Split(100 * batch, {}, {}, 7 * batch if batch == 2 else None)

    monkeypatch.setattr(benchmark, "memory_of", measured)
    monkeypatch.setattr(
        benchmark.largest_batch, "largest_batch", lambda limit, measure, start, stop: [*map(measure, (1, 2, 5))]
    )
    subject = by_hand()
    subject._measure_largest(subject.contenders[0], 1234, lambda: False)
    assert subject.largest["fp32"] == [100, 14, None]


def test_a_row_has_the_numbers_of_its_timer_its_memory_and_its_operations() -> None:
    subject = by_hand()
    assert (subject.batch, subject.stages, by_hand(memory=10).stages, subject._limit()) == (64, 3, 5, 0)
    subject.timers["lowp fp16"].operations = Operations(200, 150)
    subject.memory["lowp fp16"] = Split(100, {"weights": 100}, {"weights": 80}, 130)
    subject.memory["fp32"] = Split(100, {"weights": 100}, {"weights": 80})
    fp32, fp16 = subject.document()["variants"]
    assert (fp32["throughput"], fp16["throughput"]) == (32.0, 64.0)
    assert fp16["step"] == {"median": 1.0, "quartiles": [1.0, 1.0], "steps": 3, "only_one": False, "relative": 0.5}
    epoch = len(DATA.training) // 64
    wall = {"steps": 4, "seconds": 8.0, "data_seconds": 2.0, "seconds_per_step": 2.0, "steps_per_epoch": epoch}
    assert fp16["wall"] == {**wall, "epoch_seconds": 2.0 * epoch}
    assert fp16["operations"] == {"total": 200, "in_16_bits": 150, "share": 0.75}
    assert fp16["memory"]["slack"] == 30 and fp32["memory"]["slack"] is None
    assert fp16["estimates"]["dram_bytes"] == 160 and "operations" not in fp32 and "largest_batch" not in fp32
    assert subject.document()["recipe"]["units_per_step"] == 64
    del subject.timers["fp32"].rounds[:]
    assert subject._row(subject.contenders[0], subject.timers["fp32"])["throughput"] is None


def test_a_timer_is_done_after_three_steps_and_its_seconds() -> None:
    timer = StepTimer(FP32)
    done = []
    for rounds in ([], [[1.0]], [[1.0, 1.0]], [[0.5, 0.5, 0.5]], [[1.0], [0.5, 0.5]], [[9.0, 9.0]]):
        timer.rounds = rounds
        done.append(timer.is_done(2.0))
    assert done == [False, False, False, False, True, False]
    timer.slow = True
    assert timer.is_done(2.0) and timing.slow_limit(2.0) == 6.0
    failed = StepTimer(FP32, failure="no")
    assert failed.is_done(2.0) and failed.median is None and failed.wall(3) is None
    assert StepTimer(FP32, rounds=[[1.0]]).step()["quartiles"] is None
    timer.guarded(lambda: (_ for _ in ()).throw(RuntimeError()))
    assert timer.failure == "RuntimeError: no text" and timer.training is None


@pytest.mark.parametrize(
    ("reserved", "slow", "found", "grown"), [(None, False, 7, 1), (5, False, 5, 0), (None, True, None, 0)]
)
def test_a_process_is_grown_only_where_nothing_tells_what_is_reserved_and_steps_are_fast(
    reserved: int | None, slow: bool, found: int | None, grown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(benchmark, "memory_of", lambda *_: Split(100, {}, {}, reserved))
    monkeypatch.setattr(benchmark.largest_batch, "process_growth", lambda *given: asked.append(given) or 7)
    subject = by_hand()
    subject.timers["fp32"].slow = slow

    def stop() -> bool:
        return False

    subject._measure_memory(subject.contenders[0], stop)
    assert subject.memory["fp32"] == Split(100, {}, {}, found)
    assert asked == [(subject.contenders[0], subject.data, 64, subject.threads, stop)] * grown


def test_on_a_gpu_the_largest_batch_is_searched_in_the_free_memory_or_in_the_one_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11, 99))
    for memory, limit in ((None, 11), (7, 7)):
        subject = by_hand(memory=memory)
        subject.settings = replace(subject.settings, device="cuda")
        assert subject._limit() == limit and subject.stages == 5


def test_a_benchmark_that_has_not_run_is_not_complete_and_has_the_settings_of_fp32() -> None:
    document = Benchmark([TINY], QUICK).document()
    assert not document["complete"] and document["recipes"] == [] and document["command"] is None
    assert by_hand().document()["settings"]["precision"] == "fp32"


def test_the_ways_of_products_are_named() -> None:
    rows = contenders_of(TINY, ["dfp16", "int8", "fp8"], torch_amp=True)
    names = ["fp32", "torch's fp16", "torch's bf16", "int16", "int8", "fp32 of rounded operands"]
    assert [products_of(row) for row in rows] == names


def test_the_products_of_a_policy_are_those_of_its_rule_for_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def own(x: torch.Tensor, dtype: torch.dtype) -> torch.device | None:
        asked.append((x.device.type, x.numel(), dtype))
        return x.device if dtype is torch.bfloat16 else None

    monkeypatch.setattr("lowp.benchmarking.contenders.torchs_own_device", own)
    integers = {"input": "int8", "weight": None, "accumulate": "int32"}
    rules: dict[str, dict[str, Any]] = {
        "fp32": {},
        "int16": integers,
        "int8": {**integers, "weight": "int8"},
    }
    for words, rule in rules.items():
        policy: Any = Policy((Rule.of("contraction", **rule),))
        assert products_under(policy, torch.device("cpu")) == words
    assert not asked
    for name, words in (("bf16", "torch's bf16"), ("fp16", "fp32 of rounded operands")):
        assert products_under(name, torch.device("meta")) == words
    assert asked == [("meta", 0, torch.bfloat16), ("meta", 0, torch.float16)]


def test_torch_amp_steps_every_optimizer_and_returns_what_the_last_one_does() -> None:
    amp = TorchAmp("bf16", torch.device("cpu"))
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    first, last = (torch.optim.SGD([weight], lr=0.5) for weight in weights)
    for weight in weights:
        weight.grad = torch.ones(1)
    last.step = lambda *_: "stepped"  # type: ignore[method-assign]
    assert amp.step(first, last) == "stepped" and amp.steps == 1
    assert weights[0].item() == 0.5
