"""What `lowp run` costs a script: the step of a network of small layers, without lowp and under it, run in turn.

  python bench/scripts.py [--rounds 5] [--precision fp32]

Prints the median step of each round and the ratio of the medians. In fp32 nothing is cast, so that the ratio is the
cost of the hooks alone: module calls, backward passes and optimizer steps.
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
layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(int(sys.argv[1]), 256)
times = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    times.append(time.perf_counter() - start)
print(json.dumps(sorted(times)[len(times) // 2]))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often both are run, in turn")
    parser.add_argument("--steps", type=int, default=150, help="steps of one run")
    parser.add_argument("--batch", type=int, default=160, help="examples of a step")
    parser.add_argument("--precision", default="fp32", help="what lowp runs the script in")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        arguments = [str(script), str(given.batch), str(given.steps)]
        without, under = [], []
        for _ in range(given.rounds):
            without.append(_median([sys.executable, *arguments]))
            under.append(_median([sys.executable, "-m", "lowp", "run", "--precision", given.precision, *arguments]))
            print(f"without lowp {1e3 * without[-1]:.2f} ms   {given.precision} {1e3 * under[-1]:.2f} ms")
    print(f"ratio of the medians {statistics.median(under) / statistics.median(without):.3f}")


def _median(command: list[str]) -> float:
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(ran.stdout))


if __name__ == "__main__":
    main()
