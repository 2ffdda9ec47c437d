"""The training step of an MLP of width 2048 at batch 512 in fp32, dfp16 and flex16+5, interleaved in one run.

  python bench/flex.py                          width 2048, batch 512, all threads
  python bench/flex.py --width 512 --batch 128 --rounds 5 --threads 1
  python bench/flex.py --avx2                   all libraries limited to AVX2

A step is forward, loss, backward and the optimizer's update. The precisions take turns step by step, so that other load
of the machine affects them equally. Medians and quartiles are reported, and the ratio to fp32's median. The results are
written to bench/results/flex.json with a description of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from gemm import hold_to_avx2
from torch import nn

from lowp.precision import Precision
from lowp.recipes.results import header

PRECISIONS = ("fp32", "dfp16", "flex16+5")


class Step:
    """A model, its optimizer and its precision, and one prepared batch."""

    def __init__(self, precision: str, width: int, batch: int, layers: int) -> None:
        torch.manual_seed(0)
        hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*hidden, nn.Linear(width, 10))
        self.precision = Precision(precision)
        self.model, self.optimizer = self.precision.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        )
        self.x, self.y = torch.randn(batch, width), torch.randint(10, (batch,))

    def __call__(self) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        with self.precision.autocast():
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        self.precision.backward(loss)
        self.precision.step(self.optimizer)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--avx2", action="store_true", help="limit torch's libraries and lowp to AVX2")
    given = parser.parse_args()
    if given.avx2:
        hold_to_avx2()
    if given.threads:
        torch.set_num_threads(given.threads)
    steps = {name: Step(name, given.width, given.batch, given.layers) for name in PRECISIONS}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for _ in range(given.rounds):
        for name, step in steps.items():
            times[name].append(step())
    base = statistics.median(times["fp32"])
    rows = {}
    for name, taken in times.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        rows[name] = {"seconds": middle, "quartiles": [low, high], "of_fp32": middle / base}
        print(f"{name:<9} {1e3 * middle:8.1f} ms  ({1e3 * low:.1f} .. {1e3 * high:.1f})  {middle / base:.2f} of fp32")
    settings = {name: getattr(given, name) for name in ("width", "batch", "layers", "rounds")}
    document = {
        **header("bench-flex", "bench/flex.py"),
        **settings,
        "threads": torch.get_num_threads(),
        "held_to_avx2": given.avx2,
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
