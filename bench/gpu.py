"""Everything that a GPU is to be asked, in one call of under nine minutes: `python bench/gpu.py`.

    python bench/gpu.py [--out bench/results/gpu.json] [--minutes 8.5] [--parts kernels,bandwidth,bert]
    python bench/gpu.py --device cpu --size tiny        every line of it but CUDA's own, on any machine

The parts, in order: `build` (what is there, and what each kernel's first call takes), `kernels` (every cast against
the definition, bit for bit), `bandwidth` (each kernel beside torch.copy_), then the recipes `rossmann`, `unet` and
`bert` at full size: time a step, wall time, memory allocated and reserved, in fp32 (TF32 off and on), torch.amp and
lowp, one row after the other, each alone on the device. After each part, and each row of a recipe, the file is written
anew, so that a call that is cut off leaves what it has found. `goals` says which of the goals are met: nowhere slower
or larger than torch.amp in the same format, BERT 1.10 times as fast and 15 % smaller.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowp
from lowp import kernels
from lowp.benchmarking.contenders import STOPPED_BY, Contender, contenders_of
from lowp.benchmarking.memory import peaks_of
from lowp.benchmarking.timing import STEP_METHOD, WALL_METHOD, StepTimer, slow_limit, time_steps, wait
from lowp.errors import LowpError
from lowp.formats import FORMATS, FloatFormat
from lowp.kernels.choices import choices
from lowp.recipes import get, results
from lowp.recipes.recipe import Data
from lowp.recipes.training import Settings, load_data

KIND = "gpu"
RECIPES = ("rossmann", "unet", "bert")
PRECISIONS = ("fp16", "bf16", "fp8", "flex16+5")
NARROW = ("fp16", "bf16")  # what torch.amp has, too
FASTER, SMALLER = {"bert": 1.10}, {"bert": 0.85}  # of torch.amp; elsewhere 1
CASTS = ("", ":stochastic", ":toward-zero", ":nearest-away", ":saturate")
SCALED = ("mxfp8", "mxfp4", "nvfp4", "int8", "e4m3fn@fp32/row", "dfp16")
SHARES = {"kernels": 0.25, "rossmann": 0.15, "unet": 0.3, "bert": 1.0}  # of the time that is left when a part begins
ROWS_METHOD = (
    "the rows follow each other, each with the device to itself, where `lowp bench` has them take turns: `relative` is "
    "the median by that of fp32; memory is that of a step of a training of its own, from an empty cache"
)
_AHEAD = 16  # copies of what is timed, queued before it: about a millisecond on the fastest device
Part = Callable[["Run"], dict[str, Any]]


@dataclass
class Run:
    """What was asked for, and what was found so far."""

    device: torch.device
    size: str
    seconds: float
    ends: float  # by time.monotonic()
    save: Callable[[], None]  # writes what was found so far
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def is_tiny(self) -> bool:
        """Whether only the lines are to be run through."""
        return self.size == "tiny"

    def left(self) -> float:
        """Seconds that are left."""
        return self.ends - time.monotonic()


# -- what is there ----------------------------------------------------------------------------------------------------
def build(run: Run) -> dict[str, Any]:
    """Return the device, what was chosen for it, and the seconds of the first call of each kernel."""
    x = torch.randn(4096, device=run.device)
    first, errors = _first_calls(run, _candidates(x, torch.empty_like(x)))
    facts: dict[str, Any] = {"choices": choices(), "available": list(kernels.available(run.device.type))}
    if run.device.type == "cuda":
        properties = torch.cuda.get_device_properties(run.device)
        facts |= {
            **{"name": properties.name, "capability": [properties.major, properties.minor]},
            **{"memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count},
            **{"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},
        }
    return {**facts, "first_call_seconds": first, "errors": errors}


def _first_calls(run: Run, candidates: dict[str, Callable[[], object]]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of the first call of each that can be called, and the errors of the others."""
    first: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, call in candidates.items():
        started = time.perf_counter()
        try:
            call()
            wait(run.device)
        except Exception as error:  # whatever a compiler or a device raises: the others are to be called
            errors[name] = f"{type(error).__name__}: {error}"
            continue
        first[name] = time.perf_counter() - started
    return first, errors


# -- the kernels against the definition -------------------------------------------------------------------------------
def check_kernels(run: Run) -> dict[str, Any]:
    """Return how many numbers every cast gets wrong on the device, compared with the definition on the CPU."""
    x, wrong, errors = _numbers(run), {}, {}
    ends = time.monotonic() + SHARES["kernels"] * run.left()
    checks = _checks(run)
    for name, check in checks.items():
        if time.monotonic() > ends:
            break
        try:
            found = check(x.to(run.device)).cpu()
            with kernels.use("reference"):
                expected = check(x)
        except Exception as error:  # whatever a compiler or a device raises: the others are to be checked
            errors[name] = f"{type(error).__name__}: {error}"
            continue
        wrong[name] = int((_bits(found) != _bits(expected)).sum())
    return {
        "numbers": x.numel(),
        "checked": len(wrong),
        "not_reached": list(checks)[len(wrong) + len(errors) :],
        "wrong": {name: count for name, count in wrong.items() if count},
        "errors": errors,
    }


def _checks(run: Run) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what is checked, by name; every kind first: kernels compile in their first call, and time may be short."""
    checks: dict[str, Callable[[Tensor], Tensor]] = {"statistics": lambda y: lowp.statistics(y).exponent_histogram}
    checks |= {f"quantize {name}": (lambda y, name=name: lowp.quantize(y, name)) for name in SCALED}
    for name in _coded(run):
        checks[f"encode {name}"] = lambda y, name=name: lowp.encode(y, name).view(torch.uint8)
        checks[f"decode {name}"] = lambda y, name=name: lowp.decode(lowp.encode(y, name), name)
    return checks | {f"quantize {text}": (lambda y, text=text: lowp.quantize(y, text, seed=3)) for text in _casts(run)}


def _casts(run: Run) -> list[str]:
    """Return the casts that are checked, as text: every format in every way that it has."""
    names = [name for name, row in FORMATS.items() if isinstance(row, FloatFormat) and row.bits <= 32]
    found = []
    for way in CASTS:
        for name in names[:: 4 if run.is_tiny else 1]:
            try:
                found.append(str(lowp.casts.parse(name + way)))
            except LowpError:  # no such way in this format
                continue
    return list(dict.fromkeys(found))


def _coded(run: Run) -> list[str]:
    """Return the formats of which every number has a code."""
    rows = [row for row in FORMATS.values() if isinstance(row, FloatFormat) and row.bits <= 16]
    return [row.name for row in rows if row.has_nan and row.signed][:: 4 if run.is_tiny else 1]


def _numbers(run: Run) -> Tensor:
    """Return numbers of every magnitude, all patterns of the high 16 bits of fp32 among them, in rows of 256."""
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    patterns = patterns[::64] if run.is_tiny else torch.cat([patterns, patterns | 0x8000, patterns | 0x7FFF])
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(len(patterns), generator=generator)
    return torch.cat([patterns.view(torch.float32), spread]).view(-1, 256)


def _bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32) if x.dtype is torch.float32 else x


# -- the kernels beside a copy ----------------------------------------------------------------------------------------
def bandwidth(run: Run) -> dict[str, Any]:
    """Return seconds and bytes a second of each kernel and of torch.copy_, the median of calls that take turns.

    What cannot be called at all is left out: `build` tells its error.
    """
    x = torch.randn(1 << (12 if run.is_tiny else 26), device=run.device)
    out, rounds = torch.empty_like(x), 2 if run.is_tiny else 12
    candidates = {"torch.copy_": lambda: out.copy_(x), **_candidates(x, out)}
    times: dict[str, list[float]] = {name: [] for name in _first_calls(run, candidates)[0]}
    for turn in range(rounds + 2):
        for name in times:
            taken = _seconds(run.device, candidates[name], lambda: out.copy_(x))
            times[name] += [taken] if turn >= 2 else []
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    rates = {name: 8 * x.numel() / seconds for name, seconds in medians.items()}
    return {
        "elements": x.numel(),
        "method": "8 bytes an element (fp32 read and written), whatever the kernel writes; median of calls in turns",
        "seconds": medians,
        "bytes_per_second": rates,
        "of_copy": {name: rate / rates["torch.copy_"] for name, rate in rates.items()},
    }


def _candidates(x: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    codes = lowp.encode(x.cpu(), "e4m3fn").to(x.device)
    table: dict[str, Callable[[], object]] = {
        text: lambda text=text: lowp.quantize(x, text, seed=1, out=out)
        for text in ("fp16", "bf16", "e4m3fn", "e5m2", "e5m7", "bf16:stochastic", "e4m3fn:stochastic")
    }
    table["encode e4m3fn"] = lambda: lowp.encode(x, "e4m3fn")
    table["decode e4m3fn"] = lambda: lowp.decode(codes, "e4m3fn")
    table["statistics"] = lambda: lowp.statistics(x)
    table["mxfp8"] = lambda: lowp.quantize(x, "mxfp8")
    table["nvfp4"] = lambda: lowp.quantize(x, "nvfp4")
    table["mxfp8 codes"] = lambda: lowp.encode(x, "mxfp8")
    table["int8 rows"] = lambda: lowp.quantize(x.view(-1, 256), "int8")
    return table


def _seconds(device: torch.device, call: Callable[[], object], busy: Callable[[], object]) -> float:
    """Return the seconds of a call: on CUDA by its own events, without the way from Python to the device.

    `busy` is queued before, so that the device is at work until all of the call is in its queue: the first event would
    be met at once by a device that is idle, and the time of Python be counted.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_AHEAD):
        busy()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


# -- the recipes ------------------------------------------------------------------------------------------------------
def recipe(name: str) -> Part:
    """Return the part that trains a recipe in every precision, one after the other: no row holds another's memory."""

    def measure(run: Run) -> dict[str, Any]:
        settings = Settings(name, size=None if run.is_tiny else "full", device=str(run.device))
        settings = Settings(**{**vars(settings), "batch": 2 if run.is_tiny else None}).filled()
        ends = time.monotonic() + SHARES[name] * run.left()
        started = time.perf_counter()
        data = load_data(settings)
        loaded, rows = time.perf_counter() - started, contenders_of(settings, PRECISIONS, torch_amp=True)
        assert settings.batch is not None
        variants: dict[str, Any] = {}
        part = {**results.recipe_head(get(name), data, settings.size), "batch": settings.batch}
        run.found[name] = part | {"data_seconds": loaded, "variants": variants}
        for place, one in enumerate(rows):
            turn_ends = time.monotonic() + (ends - time.monotonic()) / (len(rows) - place)
            row = variants[one.label] = _guarded(one, data, settings.batch, run, turn_ends)
            first, own = variants[rows[0].label]["step"]["median"], row["step"]["median"]
            row["step"]["relative"] = own / first if own and first else None
            run.save()
        found: dict[str, Any] = run.found[name]
        return found

    return measure


def _guarded(contender: Contender, data: Data, batch: int, run: Run, ends: float) -> dict[str, Any]:
    """Do `_alone`; whatever ends a row, a compiler's error or a slip of the pen, leaves the other rows."""
    try:
        return _alone(contender, data, batch, run, ends)
    except Exception as error:
        timer = StepTimer(contender, failure=f"{type(error).__name__}: {error}")
        told = traceback.format_exc()
    _free(run.device)
    return {**_row(timer, (None, None), data, batch), "traceback": told}


def _alone(contender: Contender, data: Data, batch: int, run: Run, ends: float) -> dict[str, Any]:
    """Return what one row takes, with nothing else on the device, until a moment by time.monotonic()."""
    timer = StepTimer(contender)
    if time.monotonic() < ends:
        (timer,) = time_steps([contender], data, run.seconds, lambda: time.monotonic() > ends)
    else:
        timer.failure = "no time was left"
    _free(run.device)
    row = _row(timer, _peaks(timer, data, batch), data, batch)
    _free(run.device)
    return row


def _free(device: torch.device) -> None:
    """Hand back to the device what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _peaks(timer: StepTimer, data: Data, batch: int) -> tuple[int | None, int | None]:
    """Return the bytes that a step allocates and reserves; None of a row that cannot take one."""
    if timer.failure is not None or timer.median is None:
        return None, None
    try:
        return peaks_of(timer.contender, data, batch)
    except STOPPED_BY as error:
        timer.failure = f"{type(error).__name__}: {error}"
        return None, None


def _row(timer: StepTimer, peaks: tuple[int | None, int | None], data: Data, batch: int) -> dict[str, Any]:
    contender: Contender = timer.contender
    what = {"kind": contender.kind, "precision": contender.settings.precision, "tf32": contender.tf32}
    times = {"failure": timer.failure, "step": timer.step(), "wall": timer.wall(len(data.training) // batch)}
    return {**what, **times, "allocated": peaks[0], "reserved": peaks[1]}


# -- the goals --------------------------------------------------------------------------------------------------------
def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every goal with what was measured: time and memory of lowp beside torch.amp in the same format."""
    rows = []
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


def _value(row: dict[str, Any], what: str) -> float | None:
    value = row["step"]["median"] if what == "seconds a step" else row[what]
    return None if value is None else float(value)


# -- the command ------------------------------------------------------------------------------------------------------
PARTS: dict[str, Part] = {
    "build": build,
    "kernels": check_kernels,
    "bandwidth": bandwidth,
    **{name: recipe(name) for name in RECIPES},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, write it after each part, and return 0 if no part failed."""
    options = _options(arguments)
    path, started = Path(options.out), time.monotonic()
    results.check_writable(path)
    document: dict[str, Any] = {}
    ends = started + 60 * options.minutes

    def save() -> None:
        results.write(path, document | {"goals": goals(run.found)})

    run = Run(torch.device(options.device), options.size, options.seconds, ends, save)
    document |= {
        **results.header(KIND, "python bench/gpu.py"),
        "device": str(run.device),
        "is_gpu": run.device.type == "cuda",
        "size": run.size,
        "methods": {"step": STEP_METHOD.format(slow=slow_limit(run.seconds)), "wall": WALL_METHOD, "rows": ROWS_METHOD},
        "seconds": {},
        "failures": {},
        "tracebacks": {},
        "parts": run.found,
    }
    for name in options.parts:
        _measure(name, run, document)
        run.save()
        print(f"{name}: {document['seconds'].get(name, 0):.1f} s {document['failures'].get(name, '')}", flush=True)
    for row in goals(run.found):
        if row["found"] is not None:
            print(f"{row['goal']}: {row['found']:.2f}, at most {row['at_most']:.2f}")
    return 1 if document["failures"] else 0


def _measure(name: str, run: Run, document: dict[str, Any]) -> None:
    """Run a part, if there is time, and note how long it took, or why it ended."""
    if run.left() <= 0:
        document["failures"][name] = "no time was left"
        return
    began = time.monotonic()
    try:
        run.found[name] = PARTS[name](run)
    except Exception as error:  # whatever it is: the other parts are to be measured
        document["failures"][name] = f"{type(error).__name__}: {error}"
        document["tracebacks"][name] = traceback.format_exc()
    document["seconds"][name] = time.monotonic() - began


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1; cpu to try the lines")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--seconds", type=float, default=1.5, help="for the timed steps of each row (1.5)")
    parser.add_argument("--minutes", type=float, default=8.5, help="when the last part ends at the latest (8.5)")
    parser.add_argument("--out", default="bench/results/gpu.json")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"unknown parts {', '.join(unknown)}: give some of {', '.join(PARTS)}")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: --device cpu --size tiny runs the lines that need none")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
