"""Steps of a recipe in several precisions, which take turns on one device: each part's time on the host, and the whole.

Where launches are what takes time a step is as long as its Python and its launches. All rows meet the same host.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

from lowp.benchmarking.contenders import Contender, begin, tf32_of
from lowp.benchmarking.memory import batch_of
from lowp.benchmarking.timing import wait
from lowp.recipes.recipe import Data
from lowp.recipes.training import Training

PARTS = ("forward", "backward", "step", "whole")
METHOD = "medians of steps that take turns: seconds on the host of each part; `whole`: until the device has ended"


def in_turns(rows: list[Contender], data: Data, warm: int, rounds: int) -> dict[str, Any]:
    """Return the median seconds of the PARTS of a step of each row, by labels, and the errors of rows that failed."""
    made: dict[str, tuple[Training, Any]] = {}
    times: dict[str, list[list[float]]] = {one.label: [] for one in rows}
    failed: dict[str, str] = {}
    for turn in range(warm + rounds):
        for one in rows:
            if one.label in failed:
                continue
            try:
                if one.label not in made:
                    training = begin(one, data)
                    training.model.train()
                    made[one.label] = training, batch_of(training, training.batch)
                with tf32_of(one):
                    seconds = _parts_of_a_step(*made[one.label])
            except Exception as error:  # whatever it is, the other rows are measured
                failed[one.label] = f"{type(error).__name__}: {error}"
                continue
            times[one.label] += [seconds] if turn >= warm else []
    taken = {label: list(zip(*each, strict=True)) for label, each in times.items() if each}
    found = {label: dict(zip(PARTS, map(statistics.median, each), strict=True)) for label, each in taken.items()}
    return {"rows": found, "failed": failed}


def _parts_of_a_step(training: Training, batch: Any) -> list[float]:
    moments = [time.perf_counter()]
    training.optimizer.zero_grad()
    with training.precision.autocast():
        loss = training.recipe.loss(training.model, batch)
    moments.append(time.perf_counter())
    training.precision.backward(loss)
    moments.append(time.perf_counter())
    training.precision.step(training.optimizer)
    moments.append(time.perf_counter())
    wait(training.device)
    whole = time.perf_counter() - moments[0]
    return [*(after - before for before, after in itertools.pairwise(moments)), whole]
