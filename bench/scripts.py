"""Measure the overhead of `lowp run`: steps of a network of small layers with and without it, in turns.

  python bench/scripts.py [--rounds 5] [--precision fp32] [--hooks]

Prints the median step of each round and the ratio of the medians. In fp32 nothing is cast, so that the ratio is the
cost of the hooks. `--hooks` measures only this cost in microseconds per step, also on a busy machine: the fastest of
many steps of a network of one small layer, with and without lowp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import json, sys, time
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
batch, steps, blocks, width = map(int, sys.argv[1:])
layers = [layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(batch, width)
times = []
for _ in range(steps):
    start = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    times.append(time.perf_counter() - start)
print(json.dumps([sorted(times)[len(times) // 2], min(times)]))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of both, in turns")
    parser.add_argument("--steps", type=int, default=150, help="steps of one run")
    parser.add_argument("--batch", type=int, default=160, help="batch size")
    parser.add_argument("--precision", default="fp32", help="precision of lowp run")
    parser.add_argument("--hooks", action="store_true", help="measure only the hooks, in microseconds per step")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        plain, lowp = [sys.executable], [sys.executable, "-m", "lowp", "run", "--precision", given.precision]
        if given.hooks:
            arguments = [str(script), "1", "3000", "1", "8"]
            fastest = [min(_times([*one, *arguments])[1] for _ in range(given.rounds)) for one in (plain, lowp)]
            print(f"hooks {1e6 * (fastest[1] - fastest[0]):.1f} us/step (of {1e6 * fastest[0]:.1f} us without lowp)")
            return
        arguments = [str(script), str(given.batch), str(given.steps), "12", "256"]
        without, under = [], []
        for _ in range(given.rounds):
            without.append(_times([*plain, *arguments])[0])
            under.append(_times([*lowp, *arguments])[0])
            print(f"without lowp {1e3 * without[-1]:.2f} ms   {given.precision} {1e3 * under[-1]:.2f} ms")
    print(f"ratio of the medians {statistics.median(under) / statistics.median(without):.3f}")


def _times(command: list[str]) -> tuple[float, float]:
    """Return the median and the fastest step of one run, in seconds."""
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    median, fastest = json.loads(ran.stdout)
    return median, fastest


if __name__ == "__main__":
    main()
