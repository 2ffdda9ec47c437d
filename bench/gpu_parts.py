"""What `gpu.py` asks of a device, part by part, each as a list of items that are done one after the other.

`build`: what is there, and the first call of each kernel, which compiles it. `kernels`: casts, codes, statistics and
products against the definition, bit for bit. `bandwidth`: kernels and optimizer steps beside torch.copy_. `products`:
products of int16 and fp8 beside torch's of fp16. `turns`: steps of the recipes in every precision, which take turns. A
recipe is a part, too: its items are the data and a row a precision, each with the device to itself.
"""

from __future__ import annotations

import gc
import math
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_recipes
import torch
from gpu_kernels import CANDIDATES, Buffers, bits, buffers, checks, numbers, seconds_of
from gpu_products import BASE, PRODUCTS, Operands, operands, product_checks, products, tf32_of
from gpu_turns import METHOD as TURNS_METHOD
from gpu_turns import in_turns

from lowp import kernels
from lowp.benchmarking.contenders import Contender, begin, contenders_of, step_of
from lowp.benchmarking.memory import Taken, batch_of, memory_of, warm_up
from lowp.benchmarking.timing import StepTimer, time_steps, wait
from lowp.errors import Unavailable
from lowp.kernels.choose.choices import choices
from lowp.recipes import get, results
from lowp.recipes.recipe import Data
from lowp.recipes.training import Settings

RECIPES = {name: f"gpu_recipes:{name.upper()}" for name in gpu_recipes.EXAMPLES}
NARROW = ("fp16", "bf16")  # what torch.amp has, too
PRECISIONS = (*NARROW, "fp8", "flex16+5")
ITEM_SECONDS = 60.0  # of everything but the rows of recipes
MORE_SECONDS = 30.0  # for a row to end by itself when its time is up
_ROUNDS = 12
TAKING_TURNS = (*PRECISIONS, "int8", "mxfp8", "nvfp4")

Result = dict[str, Any]
Results = dict[str, Result]


@dataclass
class Run:
    """What was asked for. `folder` is for what the processes of a part share; `kept` holds what its items share."""

    device: torch.device
    size: str
    seconds: float
    ends: float  # of the part, by time.monotonic()
    folder: Path
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def is_tiny(self) -> bool:
        """Whether only the lines are to be run through."""
        return self.size == "tiny"

    def left(self) -> float:
        """Seconds that are left of the part."""
        return self.ends - time.monotonic()


def _same_limit(run: Run, item: str, places: int) -> float:
    return ITEM_SECONDS


@dataclass(frozen=True)
class Part:
    """A list of items, how each is measured, and what is written of their results.

    `measure(run, item, places)` measures one, with so many items to do; `limit(run, item, places)` are the seconds
    after which its process is ended. `share` is that of the time that is left when the part begins; `first` the item
    without which no other can be done.
    """

    items: Callable[[Run], list[str]]
    measure: Callable[[Run, str, int], Result]
    merged: Callable[[Results], dict[str, Any]]
    share: float
    first: str | None = None
    limit: Callable[[Run, str, int], float] = _same_limit


def failures(results_of: Results) -> dict[str, str]:
    """Return what failed, with the error's words."""
    return {name: one["failure"] for name, one in results_of.items() if one["failure"] is not None}


def is_healthy(device: torch.device) -> bool:
    """Whether the device still answers this process."""
    try:
        return float(torch.ones(8, device=device).sum()) == 8
    except Exception:  # whatever it is, another process has to go on
        return False


# -- what is there ----------------------------------------------------------------------------------------------------
def _build(run: Run, item: str, places: int) -> Result:
    if item == "device":
        return _facts(run)
    started = time.perf_counter()
    CANDIDATES[item].call(_buffers(run, 4096))
    wait(run.device)
    return {"first_call_seconds": time.perf_counter() - started}


def _facts(run: Run) -> Result:
    if run.device.type == "cuda" and not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device here: --device cpu --size tiny runs the lines that need none")
    facts: Result = {"choices": choices(), "available": list(kernels.available(run.device.type))}
    facts["machine"] = results.machine()
    if run.device.type == "cuda":
        properties = torch.cuda.get_device_properties(run.device)
        facts |= {
            **{"name": properties.name, "capability": [properties.major, properties.minor]},
            **{"memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count},
            **{"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},
        }
        if "triton" not in facts["available"]:
            raise Unavailable("triton is not installed, and lowp's kernels for CUDA are written in it")
    if not is_healthy(run.device):
        raise Unavailable(f"{run.device} does not add eight numbers")
    return facts


def _merged_build(found: Results) -> dict[str, Any]:
    first = {name: one["first_call_seconds"] for name, one in found.items() if "first_call_seconds" in one}
    return {**found.get("device", {}), "first_call_seconds": first, "errors": failures(found)}


# -- the kernels against the definition -------------------------------------------------------------------------------
def _check(run: Run, item: str, places: int) -> Result:
    """Return how many numbers a cast gets wrong on the device, compared with the definition on the CPU."""
    if "numbers" not in run.kept:
        run.kept["numbers"] = numbers(run.is_tiny)
    x, check = run.kept["numbers"], _checks(run)[item]
    found = check(x.to(run.device)).cpu()
    with kernels.use("reference"):
        expected = check(x)
    return {"numbers": x.numel(), "wrong": int((bits(found) != bits(expected)).sum())}


def _checks(run: Run) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {**product_checks(run.device), **checks(run.is_tiny)}


def _merged_checks(found: Results) -> dict[str, Any]:
    checked = {name: one["wrong"] for name, one in found.items() if one["failure"] is None}
    return {
        "numbers": max((one["numbers"] for one in found.values() if "numbers" in one), default=0),
        "checked": len(checked),
        "wrong": {name: count for name, count in checked.items() if count},
        "errors": failures(found),
    }


# -- the kernels beside a copy ----------------------------------------------------------------------------------------
def _buffers(run: Run, count: int) -> Buffers:
    if "buffers" not in run.kept:
        run.kept["buffers"] = buffers(run.device, count)
    kept: Buffers = run.kept["buffers"]
    return kept


def _bandwidth(run: Run, item: str, places: int) -> Result:
    """Return the median seconds of a call and of torch.copy_, which take turns."""
    held = _buffers(run, 1 << (12 if run.is_tiny else 26))
    own, copied = _in_turns(run, lambda: CANDIDATES[item].call(held), lambda: held.out.copy_(held.x))
    held.steps.clear()
    return {"seconds": own, "copy_seconds": copied, "bytes": CANDIDATES[item].bytes, "elements": held.x.numel()}


def _in_turns(run: Run, call: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Return the median seconds of two calls that take turns; the device is kept at work by the second."""
    times: tuple[list[float], list[float]] = ([], [])
    call()
    for turn in range(4 if run.is_tiny else 2 + _ROUNDS):
        for taken, one in zip(times, (call, other), strict=True):
            seconds = seconds_of(run.device, one, other)
            taken += [seconds] if turn >= 2 else []
    own, others = map(statistics.median, times)
    return own, others


def _merged_bandwidth(found: Results) -> dict[str, Any]:
    timed = {name: one for name, one in found.items() if one["failure"] is None}
    return {
        "method": "bytes an element that are read and written at the least, by the time; `of_copy` beside 8 bytes an "
        "element of torch.copy_ in the same turns; medians",
        "kernels": {
            name: {
                **{key: one[key] for key in ("seconds", "copy_seconds", "bytes", "elements")},
                "bytes_per_second": one["bytes"] * one["elements"] / one["seconds"],
                "of_copy": one["bytes"] / 8 * one["copy_seconds"] / one["seconds"],
            }
            for name, one in timed.items()
        },
        "errors": failures(found),
    }


# -- products beside torch's ------------------------------------------------------------------------------------------
def _product(run: Run, item: str, places: int) -> Result:
    """Return the median seconds of a product and of torch's fp16 product of the same shape, which take turns."""
    name, shape = products(run.device, run.is_tiny)[item]
    if run.kept.get("shape") != shape:
        run.kept |= {"shape": shape, "operands": operands(run.device, *shape)}
    held: Operands = run.kept["operands"]

    def call() -> object:
        with tf32_of(run.device, name):
            return PRODUCTS[name](held)

    own, others = _in_turns(run, call, lambda: PRODUCTS[BASE](held))
    return {"seconds": own, "fp16_seconds": others, "shape": list(shape)}


def _merged_products(found: Results) -> dict[str, Any]:
    timed = {name: one for name, one in found.items() if one["failure"] is None}
    return {
        "method": "x [rows, depth] times the transpose of w [columns, depth], of normal random numbers; shape: rows, "
        "depth, columns; `of_fp16` is the time by that of torch's fp16 product in the same turns; medians",
        "products": {
            name: {
                **{key: one[key] for key in ("seconds", "fp16_seconds", "shape")},
                "multiplications_per_second": math.prod(one["shape"]) / one["seconds"],
                "of_fp16": one["seconds"] / one["fp16_seconds"],
            }
            for name, one in timed.items()
        },
        "errors": failures(found),
    }


# -- steps that take turns --------------------------------------------------------------------------------------------
def _turns(run: Run, item: str, places: int) -> Result:
    rows = contenders_of(_settings(run, item), TAKING_TURNS, torch_amp=True)
    return in_turns(rows, _data(run, item), *((1, 2) if run.is_tiny else (4, _ROUNDS)))


def _merged_turns(found: Results) -> dict[str, Any]:
    kept = {name: {key: one[key] for key in ("rows", "failed")} for name, one in found.items() if "rows" in one}
    return {"method": TURNS_METHOD, "recipes": kept, "errors": failures(found)}


# -- the recipes ------------------------------------------------------------------------------------------------------
def recipe(name: str, share: float) -> Part:
    """Return the part that trains a recipe in every precision, one after the other: no row holds another's memory."""

    def items(run: Run) -> list[str]:
        return ["data", *rows(run, name)]

    def measure(run: Run, item: str, places: int) -> Result:
        data = _data(run, name)
        if item != "data":
            ends = time.monotonic() + run.left() / places
            return _alone(rows(run, name)[item], data, run, ends, gpu_recipes.EXAMPLES[name])
        settings = _settings(run, name)
        head = results.recipe_head(get(settings.recipe), data, settings.size)
        return {**head, "batch": settings.batch, "data_seconds": run.kept["data seconds"]}

    def limit(run: Run, item: str, places: int) -> float:
        return ITEM_SECONDS if item == "data" else max(run.left(), 0) / places + MORE_SECONDS

    return Part(items, measure, _merged_rows, share, "data", limit)


def _settings(run: Run, name: str) -> Settings:
    return Settings(RECIPES[name], size=run.size, device=str(run.device)).filled()


def rows(run: Run, name: str) -> dict[str, Contender]:
    """Return the rows by their labels; lowp's follow those of torch.amp in the same format, which they are held to."""
    found = contenders_of(_settings(run, name), PRECISIONS, torch_amp=True)
    order = list(dict.fromkeys(one.settings.precision for one in found))
    found.sort(key=lambda one: order.index(one.settings.precision))
    return {one.label: one for one in found}


def _data(run: Run, name: str) -> Data:
    """Return the data of a recipe, which the first process of the part makes."""
    path = run.folder / f"{name}.pickle"
    if run.kept.get("data of") != name:
        run.kept["data of"] = name
        started = time.perf_counter()
        if path.exists():
            run.kept["data"] = pickle.loads(path.read_bytes())
        else:
            settings = _settings(run, name)
            made = get(settings.recipe).load(get(settings.recipe).size(settings.size), None)
            written = path.with_suffix(".new")
            written.write_bytes(pickle.dumps(made))
            written.replace(path)
            run.kept["data"] = made
        run.kept["data seconds"] = time.perf_counter() - started
    data: Data = run.kept["data"]
    return data


def _alone(contender: Contender, data: Data, run: Run, ends: float, epoch: int) -> Result:
    """Return what one row takes, with nothing else on the device, until a moment by time.monotonic()."""
    batch = contender.settings.batch
    assert batch is not None
    (timer,) = time_steps([contender], data, run.seconds, lambda: time.monotonic() > ends, counts=False)
    _free(run.device)
    row = _row(timer, epoch // batch)
    if timer.failure is None and timer.median is not None:
        try:
            row["allocated"], row["reserved"] = peaks_of(contender, data, batch)
        except Exception as error:  # whatever it is, the times are kept
            row["failure"] = f"memory: {type(error).__name__}: {error}"
    _free(run.device)
    return row


def peaks_of(contender: Contender, data: Data, batch: int) -> tuple[int, int | None]:
    """Return the peaks of a step in allocated and reserved bytes, from the device's allocator, without a split.

    Reserved is None if the device does not report it.
    """
    taken = Taken(torch.device(contender.settings.device))
    if taken.device is None:
        split = memory_of(contender, data, batch)
        return split.allocated, split.reserved
    training = begin(contender, data)
    training.model.train()
    examples = batch_of(training, batch)
    warm_up(training, contender, examples)
    taken.begin()
    step_of(training, contender, examples)
    taken.end()
    return taken.allocated, taken.reserved


def _free(device: torch.device) -> None:
    """Hand back to the device what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _row(timer: StepTimer, steps_per_epoch: int) -> dict[str, Any]:
    contender: Contender = timer.contender
    failure = timer.failure if timer.failure or timer.median is not None else "no time was left for a step"
    what = {"kind": contender.kind, "precision": contender.settings.precision, "tf32": contender.tf32}
    return {**what, "failure": failure, **_NOTHING, "step": timer.step(), "wall": timer.wall(steps_per_epoch)}


_NOTHING = {"step": {"median": None}, "wall": None, "allocated": None, "reserved": None}


def _merged_rows(found: Results) -> dict[str, Any]:
    variants = {name: {**_NOTHING, **one, "step": {**one.get("step", _NOTHING["step"])}} for name, one in found.items()}
    head = variants.pop("data", {})
    first = variants.get("fp32", _NOTHING)["step"]["median"]
    for row in variants.values():
        own = row["step"]["median"]
        row["step"]["relative"] = own / first if own and first else None
    return {**{key: value for key, value in head.items() if key not in _NOTHING}, "variants": variants}


PARTS: dict[str, Part] = {
    "build": Part(lambda run: ["device", *CANDIDATES], _build, _merged_build, share=0.3, first="device"),
    "kernels": Part(lambda run: list(_checks(run)), _check, _merged_checks, share=0.25),
    "bandwidth": Part(lambda run: list(CANDIDATES), _bandwidth, _merged_bandwidth, share=0.1),
    "products": Part(lambda run: list(products(run.device, run.is_tiny)), _product, _merged_products, share=0.1),
    "turns": Part(lambda run: list(RECIPES), _turns, _merged_turns, share=0.3),
    "rossmann": recipe("rossmann", share=0.2),
    "unet": recipe("unet", share=0.35),
    "bert": recipe("bert", share=1.0),
}
