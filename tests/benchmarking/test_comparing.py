"""The rows of a comparison are timed in turns and their memory is measured, on the same steps as a benchmark's."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowp.benchmarking import timing
from lowp.benchmarking.contenders import contenders_of
from lowp.benchmarking.timing import measure, others_busy, peak_memory
from lowp.recipes.comparison import Study, Variant, variants_of
from lowp.recipes.training import Settings, load_data

TINY = Settings("digits", epochs=2, batch=128)
DATA = load_data(TINY)


@pytest.mark.usefixtures("never_slow")
def test_a_step_is_timed_and_one_that_cannot_be_taken_is_not() -> None:
    unable = Variant("unable", replace(TINY, precision="fp16-naive", loss_scale="8"))  # nothing can be unscaled
    study = Study([*variants_of(TINY, ["bf16"]), unable], [0], samples=0)
    measure(study, seconds=0.05)
    fp32, bf16, broken = study.document()["variants"]
    for row in (fp32, bf16):
        low, high = row["step_seconds_quartiles"]
        assert 0 < low <= row["step_seconds"] <= high
        assert row["step_relative"] > 0 and row["steps_timed"] >= 3 and row["threads"] == 1
        assert row["peak_memory_bytes"] > 0
    assert fp32["step_relative"] == 1
    for name in ("step_seconds", "step_relative", "steps_timed", "peak_memory_bytes"):
        assert broken[name] is None


def test_how_it_was_measured_is_said_where_it_was() -> None:
    study = Study(variants_of(TINY, []), [0], samples=0)
    assert set(study.document()["methods"]) == {"verdict", "losses"}
    measure(study, seconds=0.01)
    methods = study.document()["methods"]
    assert methods["time"].startswith("time per step: forward, loss") and "take turns" in methods["time"]
    assert methods["memory"].startswith("memory: bytes allocated by torch's allocator")


def test_peak_memory_counts_what_a_step_keeps() -> None:
    small, large = (
        peak_memory(contenders_of(Settings("digits", batch=batch), [], torch_amp=False)[0], DATA)
        for batch in (128, 256)
    )
    # weights, gradients and momentum of 9,610 fp32 numbers, the batch, and the hidden layer before and after its ReLU
    least = 3 * 4 * 9_610 + 4 * 128 * 64 + 2 * 4 * 128 * 128
    assert small is not None and least < small < 2 * least
    assert large is not None and large - small >= 4 * 128 * (64 + 2 * 128)


def test_what_other_processes_do_is_a_number_of_cores_or_not_known() -> None:
    with others_busy() as cores:
        sum(range(1000))
        found = cores()
    assert found is None or (found >= 0 and math.isfinite(found))


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="as Linux tells the time of its processors")
def test_the_time_of_other_processes_is_that_of_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, seconds = os.sysconf("SC_CLK_TCK"), iter((0.0, 10.0))
    stats = iter(f"cpu {user} 0 {30 * ticks} 9999 9 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n" for user in (0, 15 * ticks))
    monkeypatch.setattr(Path, "read_text", lambda path: next(stats))
    monkeypatch.setattr(timing, "_own_seconds", lambda: 0.0)
    with monkeypatch.context() as clock:
        clock.setattr(timing.time, "perf_counter", lambda: next(seconds))
        with others_busy() as cores:
            assert cores() == 1.5


def test_how_busy_others_are_is_the_time_of_the_machine_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]  # user nice system idle iowait irq softirq steal …
    clock = {"now": 5.0, "own": 1.0, "ticks": 1}

    def read_text() -> str:
        return f"cpu  {' '.join(str(one * clock['ticks']) for one in fields)}\ncpu0 7 7 7 7 7 7 7 7\n"

    monkeypatch.setattr(timing, "Path", lambda name: SimpleNamespace(read_text=read_text))
    monkeypatch.setattr(timing.os, "sysconf", lambda name: 10)
    monkeypatch.setattr(timing.os, "times", lambda: (clock["own"], 0.5, 0.25, 0.125, 99.0))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock["now"]))
    busy = (1 + 2 + 4 + 32 + 64 + 128) / 10
    with others_busy() as cores:
        clock.update(now=9.0, ticks=2, own=3.0)
        assert cores() == pytest.approx((busy - 2.0) / 4)
        clock["own"] = 1000.0
        assert cores() == 0.0
        monkeypatch.setattr(timing, "Path", lambda name: SimpleNamespace(read_text=lambda: ""))
        assert cores() is None
    with others_busy() as cores:
        assert cores() is None
