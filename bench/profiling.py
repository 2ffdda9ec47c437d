"""Measure the overhead of the profiler: its own figure, and one from training with and without it in turns.

  python bench/profiling.py digits --steps 400
  python bench/profiling.py unet --steps 40 --max-overhead none --guard

The processor time of one thread is compared, so that other programs matter little. `--guard` measures a training in
which nothing is recorded and every step is guarded against NaN, in time and in peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from typing import Any

import torch

from lowp.numerics.profiler import Profiler
from lowp.recipes.training import Settings, Training


def once(name: str, steps: int, share: str | None, guard: bool) -> tuple[float, Profiler | None]:
    """Train and return the processor time, and the profiler if a share is given."""
    training = Training(Settings(name))
    profiler = None
    if share is not None:
        profiler = Profiler(training.model, training.optimizer, precision=training.precision, max_overhead=share)
        if guard:
            profiler.schedule.looks = False
        profiler.__enter__()
    started = time.process_time()
    training.take(lambda taken: taken >= steps)
    seconds = time.process_time() - started
    if profiler is not None:
        profiler._stop()
    return seconds, profiler


def main() -> None:
    """Measure and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-overhead", default="3%")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--guard", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    share = "none" if given.guard else given.max_overhead
    once(given.recipe, min(given.steps, 10), None, False)
    peak: list[int] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    once(given.recipe, min(given.steps, 10), share, given.guard)
    peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    outside, own, plain = [], [], []
    record: dict[str, Any] = {}
    for _ in range(given.pairs):
        before, _none = once(given.recipe, given.steps, None, False)
        watched, profiler = once(given.recipe, given.steps, share, given.guard)
        after, _none = once(given.recipe, given.steps, None, False)
        assert profiler is not None
        outside.append(2 * watched / (before + after) - 1)
        own.append(profiler.budget.overhead)
        plain.append(min(before, after))
        record = profiler.record.sampling
    told = {
        "recipe": given.recipe,
        "steps": given.steps,
        "ms a step": round(1e3 * min(plain) / given.steps, 3),
        "own %": round(100 * statistics.median(own), 2),
        "outside %": round(100 * statistics.median(outside), 2),
        "outside, each": [round(100 * one, 1) for one in outside],
        "every step %": round(
            100 * record["every_step_seconds"] / (record["total_seconds"] - record["own_seconds"]), 2
        ),
        "rounds": round(record["looks"], 2),
        "modules": f"{record['modules_seen']} of {record['modules']}",
        "unguarded": record["unguarded"],
        "peak KiB more": peak[1] - peak[0],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
