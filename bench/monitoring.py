"""Try the monitor: planted faults, trainings in which nothing is wrong, and what it costs.

  python bench/monitoring.py faults [--modes plain,compiled,ddp]
  python bench/monitoring.py quiet [--recipes digits,gpt] [--precisions fp32,bf16] [--seconds 20]
  python bench/monitoring.py cost [--recipes digits,unet] [--precisions fp32] [--seconds 8]

`faults` prints which of the faults in tests/planted.py are named, by which finding, and how many steps after they
began. `quiet` trains recipes and prints the alarms, of which there should be none. `cost` compares the steps of a
training with and without its monitor, in turns, by the processor time of the thread. `--json` also writes the results,
as `bench/record.py` does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lowp
from lowp.recipes import RECIPES, results
from lowp.recipes.training import Settings, Training, threads_of

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
_AFTER = 5  # steps after a look which it makes longer, as caches are cold


class Clock:
    """The processor time of this thread but for the turns of a training in which its monitor is away."""

    def __init__(self) -> None:
        self.away = 0.0
        for module in ("monitor", "pace", "places"):
            vars(importlib.import_module(f"lowp.monitoring.{module}"))["now"] = self

    def __call__(self) -> float:
        return time.thread_time() - self.away

    @contextlib.contextmanager
    def without(self, monitor: lowp.Monitor, training: Training) -> Iterator[None]:
        """Take the monitor off the training."""
        started, wrapper = time.thread_time(), torch.autograd.backward
        hooks = training.optimizer._optimizer_step_post_hooks
        kept = dict(hooks)
        hooks.clear()
        torch.autograd.backward = getattr(wrapper, "__wrapped__", wrapper)
        yield
        torch.autograd.backward = wrapper
        hooks.update(kept)
        self.away += time.thread_time() - started


def cost(given: argparse.Namespace) -> tuple[bool, Result]:
    """Print the share of the time that a monitor takes; whether it is at most 2 %, and the shares.

    One training is watched and is not, in turns of a few milliseconds. Other programs make some steps slower, so that
    a usual step is the lower quartile of its kind, and a look what the steps about it have in the median more.
    """
    torch.set_num_threads(1)
    clock, found = Clock(), {}
    print("recipe       ms a step   added   by steps without looks   by looks        as measured by itself")
    for name, precision in itertools.product(given.recipes.split(","), given.precisions.split(",")):
        key = name if precision == "fp32" else f"{name} in {precision}"
        found[key] = one = _cost(Training(Settings(name, precision)), clock, given.seconds)
        print(f"{name:<6} {precision:<5} {one['ms']:>9.2f}   {one['added']:+.1%}   {one['idle']:+.1%}            "
              f"        {one['looking']:+.1%} ({one['looks']:>2})      {one['own']:.1%} of {one['steps']} steps",
              flush=True)  # fmt: skip
    return all(one["added"] <= 0.02 for one in found.values()), found


def _cost(training: Training, clock: Clock, seconds: float) -> Result:
    batches = [training.data.training.batch(torch.arange(training.batch) + place * training.batch,
                                            training._generator(place + 1)) for place in range(2)]  # fmt: skip

    def steps(count: int) -> list[float]:
        taken = []
        for place in range(count):
            started = time.thread_time()
            training.step(batches[place % 2])
            taken.append(time.thread_time() - started)
        return taken

    a_turn = max(int(0.01 / statistics.median(steps(20))), 2)
    looked: list[int] = []
    monitor = lowp.Monitor(training.model, training.optimizer, precision=training.precision,
                           sinks=lambda record: looked.append(record["step"]))  # fmt: skip
    watched: list[float] = []
    alone: list[float] = []
    while sum(watched) < seconds:
        watched += steps(a_turn)
        while monitor._look is not None:
            watched += steps(1)
        with clock.without(monitor, training):
            alone += steps(a_turn)[1:]
    monitor.close()
    usual, base = (statistics.quantiles(one, n=4)[0] for one in (watched, alone))
    middle, inner = statistics.median(watched), [step for step in looked if 0 < step < len(watched) - _AFTER]
    a_look = sum(statistics.median(watched[step + place] for step in inner) - middle for place in range(-1, _AFTER))
    looking = a_look * len(looked) / len(watched)
    return {
        "ms": round(1e3 * base, 3), "steps": len(watched), "looks": len(looked), "idle": round(usual / base - 1, 4),
        "looking": round(looking / base, 4), "added": round((usual + looking) / base - 1, 4),
        "own": round(monitor.overhead, 4),
    }  # fmt: skip


def main() -> None:
    """Run one of the three; exit with 1 if what should hold does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "quiet", "cost"))
    parser.add_argument("--modes", default=",".join(planted.MODES))
    parser.add_argument("--recipes", help="default: all for quiet, digits and unet for cost")
    parser.add_argument("--precisions", help=f"default: fp32 for cost, {PRECISIONS} for quiet")
    parser.add_argument("--seconds", type=float, help="of one training (default: 5, of cost 8)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.seconds = given.seconds or (8.0 if given.what == "cost" else 5.0)
    given.precisions = given.precisions or ("fp32" if given.what == "cost" else PRECISIONS)
    given.recipes = given.recipes or ("digits,unet" if given.what == "cost" else ",".join(RECIPES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holds, found = {"faults": faults, "quiet": quiet, "cost": cost}[given.what](given)
    if given.json is not None:
        results.write(given.json, {**results.header(f"monitoring-{given.what}"), "results": found})
    raise SystemExit(not holds)


if __name__ == "__main__":
    main()
