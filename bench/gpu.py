"""Everything that a GPU is to be asked, in one call of under nine minutes: `python bench/gpu.py`.

    python bench/gpu.py [--out bench/results/gpu.json] [--minutes 8.5] [--parts kernels,bandwidth,bert]
    python bench/gpu.py --device cpu --size tiny        every line of it but CUDA's own, on any machine: a minute

The parts, in order: `build` (what is there, and what each kernel's first call takes), `kernels` (every cast and the
products against the definition, bit for bit), `bandwidth` (each kernel beside torch.copy_), `products` (int16 and fp8
beside torch's fp16), `turns` (a step of each recipe in every precision, in turns), then the recipes `rossmann`, `unet`
and `bert` at full size: time a step, wall time, memory allocated and reserved, in fp32 (TF32 off and on), torch.amp and
lowp, one row after the other, each with the device to itself.

Each part runs in a process of its own, and what it asks has a limit of its own: an error, a crash or a hang ends one
kernel or row, and another process does the rest. The file is written anew after each of them, so that a call that is
cut off leaves what it has found. `goals` says which of the goals are met: no cast differs from the definition; nowhere
slower or larger than torch.amp in the same format; BERT 1.10 times as fast and 15 % smaller.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
if importlib.util.find_spec("lowp") is None:  # not installed: it is taken from this checkout
    sys.path.append(str(HERE.parent / "src"))

import torch  # noqa: E402
from gpu_children import Result, Task, supervise, work  # noqa: E402
from gpu_parts import NARROW, PARTS, RECIPES, Run, failures, is_healthy  # noqa: E402

from lowp.benchmarking.timing import STEP_METHOD, WALL_METHOD, slow_limit  # noqa: E402
from lowp.recipes import results  # noqa: E402

KIND = "gpu"
FASTER, SMALLER = {"bert": 1.10}, {"bert": 0.85}  # of torch.amp; elsewhere 1
LAST_SECONDS = 10.0  # for the file and the goals
ROWS_METHOD = (
    "the rows follow each other, each with the device to itself, where `lowp bench` has them take turns: `relative` is "
    "the median by that of fp32; memory is that of a step of a training of its own, from an empty cache. All rows run "
    "eagerly, with the same optimizer, on CUDA torch's fused one, with torch's defaults for cuDNN, and but for the row "
    "that says so with TF32 off. Fewer examples are drawn than the recipe has; an epoch is counted with all of them"
)


# -- the goals --------------------------------------------------------------------------------------------------------
def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every goal with what was measured, and whether it is met: None where nothing was measured."""
    rows = [_casts(found["kernels"])] if "kernels" in found else []
    for name in RECIPES:
        variants = found.get(name, {}).get("variants", {})
        for precision in NARROW:
            ours, theirs = variants.get(f"lowp {precision}"), variants.get(f"torch.amp {precision}")
            if ours is None or theirs is None:
                continue
            for what, allowed in (
                ("seconds a step", 1 / FASTER.get(name, 1.0)),
                ("allocated", SMALLER.get(name, 1.0)),
                ("reserved", SMALLER.get(name, 1.0)),
            ):
                mine, other = _value(ours, what), _value(theirs, what)
                ratio = None if not mine or not other else mine / other
                met = None if ratio is None else ratio <= allowed
                goal = f"{name} {precision}: {what}, of torch.amp's"
                rows.append({"goal": goal, "at_most": allowed, "found": ratio, "met": met})
    return rows


def _casts(part: dict[str, Any]) -> dict[str, Any]:
    """Return the goal that all numbers of casts and products are right; not met where one could not be checked."""
    wrong = sum(part["wrong"].values())
    met = None if not part["checked"] and not part["errors"] else not wrong and not part["errors"]
    goal = "numbers of casts and products that differ from the definition's"
    return {"goal": goal, "at_most": 0, "found": wrong, "met": met}


def _value(row: dict[str, Any], what: str) -> float | None:
    value = row["step"]["median"] if what == "seconds a step" else row[what]
    return None if value is None else float(value)


def in_words(goal: dict[str, Any]) -> str:
    """Return a goal as it is printed."""
    verdict = {True: "met", False: "NOT MET", None: "not measured"}[goal["met"]]
    found = "" if goal["found"] is None else f": {goal['found']:.3g}"
    return f"{verdict:12} {goal['goal']}{found}, at most {goal['at_most']:.3g}"


# -- the parts, in processes of their own -----------------------------------------------------------------------------
@dataclass
class Document:
    """What is written, and where to: the results of all items so far, merged part by part."""

    path: Path
    head: dict[str, Any]
    given_up: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    found: dict[str, dict[str, Result]] = field(default_factory=dict)

    def parts(self) -> dict[str, Any]:
        """Return what was found of each part."""
        return {name: PARTS[name].merged(items) for name, items in self.found.items() if items}

    def failures(self) -> dict[str, str]:
        """Return what failed: parts, and items of parts."""
        told = {f"{part}, {item}": why for part, items in self.found.items() for item, why in failures(items).items()}
        return {**self.given_up, **told}

    def take(self, part: str, item: str, result: Result) -> None:
        """Take the result of an item, and write the file."""
        self.found.setdefault(part, {})[item] = result
        if result["failure"] is not None:
            print(f"{part}, {item}: {result['failure']}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the file anew."""
        parts = self.parts()
        head = dict(self.head)
        head["machine"] = parts.get("build", {}).pop("machine", head["machine"])
        told = {"seconds": self.seconds, "failures": self.failures(), "parts": parts, "goals": goals(parts)}
        results.write(self.path, {**head, **told})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, write it after each item, and return 0 if nothing failed."""
    options = _options(arguments)
    if options.child is not None:
        return child(options)
    ends = STARTED if options.minutes == 0 else time.monotonic() + 60 * options.minutes - LAST_SECONDS
    results.check_writable(options.out)
    document = Document(options.out, _head(options))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.parts:
            _measure(name, options, document, Path(folder), ends)
            if name == "build" and PARTS[name].first in failures(document.found.get(name, {})):
                break
    for goal in goals(document.parts()):
        print(in_words(goal))
    return 1 if document.failures() else 0


def _head(options: argparse.Namespace) -> dict[str, Any]:
    methods = {"step": STEP_METHOD.format(slow=slow_limit(options.seconds)), "wall": WALL_METHOD, "rows": ROWS_METHOD}
    return {
        **results.header(KIND, "python bench/gpu.py", has_gpus=False),  # no CUDA in this process: it may hang
        "device": options.device,
        "is_gpu": torch.device(options.device).type == "cuda",
        "size": options.size,
        "methods": methods,
    }


def _measure(name: str, options: argparse.Namespace, document: Document, folder: Path, ends: float) -> None:
    """Run a part in processes of its own, and note how long it took, and why it ended, if before its end."""
    began = time.monotonic()
    given = ["--child", name, "--folder", str(folder), "--device", options.device, "--size", options.size]
    command = [*COMMAND, *given, "--seconds", str(options.seconds)]
    place = folder / name
    place.mkdir()
    until = began + PARTS[name].share * (ends - began)
    document.found[name] = {}
    ended = supervise(command, place, until, lambda item, result: document.take(name, item, result))
    if ended is not None:
        document.given_up[name] = ended
    document.seconds[name] = time.monotonic() - began
    document.write()
    print(f"{name}: {document.seconds[name]:.1f} s {ended or ''}", flush=True)


COMMAND = [sys.executable, str(HERE / "gpu.py")]


def child(options: argparse.Namespace) -> int:
    """Do the items of one part that are not done, and return the exit code."""
    device = torch.device(options.device)
    run = Run(device, options.size, options.seconds, STARTED + options.left, options.folder)
    part = PARTS[options.child]
    task = Task(
        part.items(run),
        lambda item, places: part.measure(run, item, places),
        lambda item, places: part.limit(run, item, places),
        lambda: is_healthy(device),
        [part.first] if part.first else [],
    )
    return work(task, options.report, options.done, run.left)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1; cpu to try the lines")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--seconds", type=float, help="for the timed steps of each row (1.5; of tiny 0.1)")
    parser.add_argument("--minutes", type=float, default=8.5, help="when the call ends at the latest (8.5)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu.json"))
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    for name, kind in {"folder": Path, "report": Path, "left": float, "done": json.loads}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or (0.1 if options.size == "tiny" else 1.5)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"unknown parts {', '.join(unknown)}: give some of {', '.join(PARTS)}")
    if torch.device(options.device).type == "cuda" and not torch.backends.cuda.is_built():
        parser.error("this torch is built without CUDA: --device cpu --size tiny runs the lines that need none")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no child is left behind
    raise SystemExit(main())
