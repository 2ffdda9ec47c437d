"""Try the monitor: planted faults, trainings in which nothing is wrong, and what it costs.

  python bench/monitoring.py faults [--modes plain,compiled,ddp]
  python bench/monitoring.py quiet [--recipes digits,gpt] [--precisions fp32,bf16] [--seconds 20]
  python bench/monitoring.py cost [--recipes digits,unet] [--pairs 9] [--seconds 1]

`faults` prints which of the faults in tests/planted.py are named, by which finding, and how many steps after they
began. `quiet` trains recipes and prints the alarms, of which there should be none. `cost` compares trainings with and
without a monitor, in turns, by the processor time of one thread, in which other programs do not count. `--json` also
writes the results, as `bench/record.py` does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lowp
from lowp.recipes import RECIPES, results
from lowp.recipes.training import Settings, Training, load_data, threads_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import planted

RANKS = 2
LEAST_STEPS = 24  # of a training in which nothing is wrong
PRECISIONS = "fp32,bf16,fp16,dfp16,flex16+5"
Named = dict[str, str]  # by fault, how it was named
Result = dict[str, Any]


# -- planted faults ---------------------------------------------------------------------------------------------------
def faults(given: argparse.Namespace) -> tuple[bool, Result]:
    """Print a table of the faults; whether at least 19 are named in each mode, and how each is."""
    modes = given.modes.split(",")
    found = {mode: _in_ranks() if mode == "ddp" else _named(mode) for mode in modes}
    print(f"{'planted fault':<56}" + "".join(f"{mode:<16}" for mode in modes))
    for fault in planted.FAULTS:
        print(f"{fault.name:<56}" + "".join(f"{found[mode].get(fault.name, ''):<16}" for mode in modes).rstrip())
    counts = {mode: sum(text != "NOT NAMED" for text in of.values()) for mode, of in found.items()}
    print(", ".join(f"{mode}: {count} of {len(found[mode])} named within {planted.WITHIN} steps"
                    for mode, count in counts.items()))  # fmt: skip
    return all(count >= 19 for count in counts.values()), found


def _named(mode: str) -> Named:
    found: Named = {}
    with contextlib.redirect_stderr(io.StringIO()):
        for fault, alarms in planted.tried(mode):
            alarm = fault.named(alarms)
            after = "" if alarm is None else f"{alarm.id} after {max(alarm.step - fault.begin, 0)}"
            found[fault.name] = after or "NOT NAMED"
    return found


def _in_ranks() -> Named:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,), RANKS)
        found: Named = torch.load(f"{folder}/named.pt")
        return found


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = _named("ddp")
    if rank == 0:
        torch.save(found, f"{folder}/named.pt")
    torch.distributed.destroy_process_group()


# -- trainings in which nothing is wrong ------------------------------------------------------------------------------
def quiet(given: argparse.Namespace) -> tuple[bool, Result]:
    """Print the alarms of trainings, every step of which is looked at; whether there were none, and their numbers."""
    total = runs = 0
    found: Result = {}
    for name, precision in itertools.product(given.recipes.split(","), given.precisions.split(",")):
        alarms, steps, losses = _alarms(name, precision, given.seconds)
        total, runs = total + len(alarms), runs + 1
        found.setdefault(name, {})[precision] = {"steps": steps, "alarms": alarms}
        print(f"{name:<12} {precision:<9} {steps:>5} steps  loss {losses[0]:.3f} to {losses[1]:.3f}  "
              f"{len(alarms)} alarms", flush=True)  # fmt: skip
        for alarm in alarms:
            print(f"    {alarm}", flush=True)
    print(f"{total} alarms in {runs} trainings")
    return not total, found


def _alarms(name: str, precision: str, seconds: float) -> tuple[list[str], int, tuple[float, float]]:
    training = Training(Settings(name, precision))
    alarms: list[str] = []
    losses: list[float] = []
    with threads_of(training.recipe.threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = lowp.Monitor(
            training.model,
            training.optimizer,
            precision=training.precision,
            max_overhead=None,
            on_alarm=lambda alarm: alarms.append(str(alarm)),
            sinks=lambda record: losses.append(record.get("loss") or float("nan")),
        )
        with monitor:
            training.history.append({"loss": 0.0, "epoch": 0})  # no evaluation of the model before training
            ends = time.perf_counter() + seconds
            training.run(stop=lambda: time.perf_counter() > ends and monitor.step >= LEAST_STEPS)
    assert monitor.failure is None, monitor.failure
    few = max(len(losses) // 10, 1)
    return alarms, monitor.step, (statistics.mean(losses[:few]), statistics.mean(losses[-few:]))


# -- cost -------------------------------------------------------------------------------------------------------------
def cost(given: argparse.Namespace) -> tuple[bool, Result]:
    """Print the share of the time that a monitor takes; whether it is at most 2 %, and the shares."""
    torch.set_num_threads(1)
    found: Result = {}
    print("recipe       ms a step   processor time (quartiles)   wall clock   as measured by itself   looks")
    for name in given.recipes.split(","):
        settings, data = Settings(name), load_data(Settings(name))
        _trained(Training(settings, data), 5)
        a_step = _trained(Training(settings, data), 5).processor / 5
        steps = max(int(given.seconds / a_step), 5)
        plain = [_trained(Training(settings, data), steps)]
        watched = []
        for _ in range(given.pairs):
            watched.append(_trained(Training(settings, data), steps, lowp.Monitor))
            plain.append(_trained(Training(settings, data), steps))
        added = [2 * one.processor / (a.processor + b.processor) - 1
                 for one, (a, b) in zip(watched, itertools.pairwise(plain), strict=True)]  # fmt: skip
        wall = [2 * one.wall / (a.wall + b.wall) - 1
                for one, (a, b) in zip(watched, itertools.pairwise(plain), strict=True)]  # fmt: skip
        low, middle, high = statistics.quantiles(added, n=4) if len(added) > 1 else added * 3
        found[name] = {
            "ms": round(1e3 * min(one.processor for one in plain) / steps, 3), "steps": steps, "runs": given.pairs,
            "added": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)],
            "added_wall": round(statistics.median(wall), 4),
            "own": round(statistics.median(one.own for one in watched), 4), "looks": watched[0].looks,
        }  # fmt: skip
        one = found[name]
        print(f"{name:<12} {one['ms']:>9.2f}   {middle:+.1%} ({low:+.1%} to {high:+.1%})     "
              f"{one['added_wall']:+.1%}        {one['own']:.1%}                    {one['looks']} of {steps}",
              flush=True)  # fmt: skip
    return all(one["added"] <= 0.02 for one in found.values()), found


class Trained(NamedTuple):
    """What a training took, in seconds; a monitor's overhead as it says, and its looks."""

    processor: float
    wall: float
    own: float
    looks: int


def _trained(training: Training, steps: int, monitor: Callable[..., lowp.Monitor] | None = None) -> Trained:
    """Train without evaluations."""
    looks: list[int] = []
    watch = monitor and monitor(
        training.model, training.optimizer, precision=training.precision, sinks=lambda record: looks.append(1)
    )
    training.history.append({"loss": 0.0, "epoch": 0})  # no evaluation of the model before training
    taken = 0
    started, wall = time.process_time(), time.perf_counter()
    while taken < steps:
        before = training.step_of_epoch
        ends = before + steps - taken
        is_whole = training._run_epoch(lambda ends=ends: training.step_of_epoch >= ends, None)  # type: ignore[misc]
        taken += training.step_of_epoch - before
        if is_whole:
            training.step_of_epoch = 0
            training.epoch = (training.epoch + 1) % training.epochs
    if watch is not None:
        watch.close()
    seconds, wall = time.process_time() - started, time.perf_counter() - wall
    return Trained(seconds, wall, 0.0 if watch is None else watch.overhead, len(looks))


def main() -> None:
    """Run one of the three; exit with 1 if what should hold does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "quiet", "cost"))
    parser.add_argument("--modes", default=",".join(planted.MODES))
    parser.add_argument("--recipes", help="default: all for quiet, digits and unet for cost")
    parser.add_argument("--precisions", default=PRECISIONS)
    parser.add_argument("--seconds", type=float, help="of one training (default: 5, of cost 1)")
    parser.add_argument("--pairs", type=int, default=9, help="of trainings with and without a monitor")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.seconds = given.seconds or (1.0 if given.what == "cost" else 5.0)
    given.recipes = given.recipes or ("digits,unet" if given.what == "cost" else ",".join(RECIPES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holds, found = {"faults": faults, "quiet": quiet, "cost": cost}[given.what](given)
    if given.json is not None:
        results.write(given.json, {**results.header(f"monitoring-{given.what}"), "results": found})
    raise SystemExit(not holds)


if __name__ == "__main__":
    main()
