"""The use of memory in a training step: every allocation alive at the peak, by its content.

torch's profiler reports each allocation and when it was freed. Two snapshots, after the forward pass and after the
step, give the addresses of parameters, masters, gradients, optimizer state and cast weights. Activations are the
allocations of the forward pass that are alive at its end. The split is taken at the peak of forward and backward;
`update` is the additional memory of the optimizer's step, so that the parts sum to the peak of the whole step.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function

from lowp.benchmarking.contenders import Contender, TorchAmp, begin, step_of
from lowp.compat import private
from lowp.nested import tensors_of
from lowp.optim import MasterWeights
from lowp.optim.blockwise import BlockwiseOptimizer
from lowp.recipes.recipe import Data
from lowp.recipes.training import Training, moved
from lowp.region import autocast

# One row per part: its name in tables and its content, in the order of the bars of a picture from the bottom.
PARTS: dict[str, str] = {
    "weights": "parameters and buffers of the model",
    "masters": "fp32 masters, or their low words, of parameters that are stored in few bits",
    "gradients": "gradients of the parameters, those that exist at the peak",
    "optimizer": "the optimizer's state",
    "activations": "allocated in the forward pass and kept for backward",
    "casts": "parameters in 16 bits beside the fp32 ones, kept for backward",
    "temporaries": "alive at the peak, but none of these: workspaces, gradients of activations",
    "other": "alive before the step: the batch, the loss scale, shared exponents, what BatchNorm journals",
    "update": "additional memory of the optimizer's step beyond the peak of forward and backward",
}
METHODS = {
    "cpu": "memory: bytes allocated by torch's allocator at the peak of a step, counted from before "
    "the model was created, from torch's profiler; each allocation is counted by its content",
    "cuda": "memory: bytes allocated by torch's CUDA allocator at the peak of a step, counted from "
    "before the model was created (torch.cuda.max_memory_allocated); each is counted by its content; reserved: "
    "torch.cuda.max_memory_reserved of the same step, from an empty cache",
}

_FORWARD, _FORWARD_ENDS, _UPDATE, _END = (f"lowp: {name}" for name in ("forward", "forward ends", "update", "end"))
_WARM_UP = 12  # most steps until one is not skipped, so that there is optimizer state
_PATIENCE = 20.0  # seconds after which no further step is tried
_enable_record_function = cast(Callable[[bool], None], private("torch.autograd._enable_record_function"))
_DispatchMode = cast(type, private("torch.utils._python_dispatch.TorchDispatchMode"))


@dataclass(frozen=True)
class Split:
    """Bytes of a step: `parts` by PARTS sum to `allocated`; `held` has the persistent parts, alive at the peak or not.

    `reserved`: bytes reserved on the device, if known.
    """

    allocated: int
    parts: Mapping[str, int]
    held: Mapping[str, int]
    reserved: int | None = None


@dataclass
class _Marks:
    """The contents of storages, recorded at marks of a running step."""

    after_forward: dict[int, str] = field(default_factory=dict)
    after_step: dict[int, str] = field(default_factory=dict)


@dataclass
class _Allocation:
    address: int
    size: int
    begin: float
    end: float
    part: str = ""


def memory_of(contender: Contender, data: Data, batch: int) -> Split:
    """Measure a step of a batch of `batch` examples; the examples of a smaller set are repeated.

    One step is taken before, and more if it was skipped.
    """
    device = torch.device(contender.settings.device)
    taken = Taken(device)
    marks = _Marks()
    events = _profiled(lambda: _steps(contender, data, batch, marks, taken))
    return taken.corrected(_split(events, marks, device))


def _profiled(run: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the events of a memory profile of a function."""
    with tempfile.TemporaryDirectory() as folder:
        with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            _enable_record_function(False)
            try:
                run()
            finally:
                _enable_record_function(True)
        trace = Path(folder, "trace.json")
        with _silent():
            profiler.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return events


def _steps(contender: Contender, data: Data, batch: int, marks: _Marks, taken: Taken) -> None:
    training = begin(contender, data)
    training.model.train()
    warm_up(training, contender, batch_of(training, batch))
    taken.begin()
    casts = _CastWatch(training) if isinstance(training.precision, TorchAmp) else None
    with casts or nullcontext():
        _marked_step(training, contender, batch_of(training, batch), marks, casts)
    marks.after_step = _persistent(training)
    _mark(_END)
    taken.end()


def warm_up(training: Training, contender: Contender, batch: Any) -> None:
    """Take steps until one is not skipped, so that the optimizer has state."""
    started = time.perf_counter()
    for _ in range(_WARM_UP):
        scale = training.precision.scale
        step_of(training, contender, batch)
        if training.precision.scale >= scale or time.perf_counter() - started > _PATIENCE:
            return


def _marked_step(training: Training, contender: Contender, batch: Any, marks: _Marks, casts: _CastWatch | None) -> None:
    """Take a step of the loop with marks in the profile."""
    precision = training.precision
    backward, step = precision.backward, precision.step

    def marked_backward(loss: Tensor, **options: Any) -> None:
        marks.after_forward = {**_persistent(training), **({} if casts is None else casts.found())}
        _mark(_FORWARD_ENDS)
        backward(loss, **options)

    def marked_step(*optimizers: torch.optim.Optimizer, **options: Any) -> Any:
        _mark(_UPDATE)
        return step(*optimizers, **options)

    _mark(_FORWARD)
    precision.backward, precision.step = marked_backward, marked_step  # type: ignore[method-assign]
    try:
        step_of(training, contender, batch)
    finally:
        del precision.backward, precision.step


def batch_of(training: Training, size: int) -> Any:
    """Return the first `size` examples as a batch on the device, repeated if there are fewer."""
    indices = torch.arange(size) % len(training.data.training)
    return moved(training.data.training.batch(indices), training.device)


def _mark(name: str) -> None:
    """Leave a mark in the profile, which otherwise records only memory: a step can have 100,000 ops."""
    _enable_record_function(True)
    with record_function(name):
        pass
    _enable_record_function(False)


@contextmanager
def _silent() -> Iterator[None]:
    """Discard what C++ writes to stderr: torch's profiler reports its start and stop there."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# -- contents of storages ---------------------------------------------------------------------------------------------
def _persistent(training: Training) -> dict[int, str]:
    """Return the storages of a training by address, with their content."""
    model, optimizer = training.model, training.optimizer
    parameters = list(model.parameters())
    region = training.precision.autocast()
    masters = optimizer.master_weights() if isinstance(optimizer, (MasterWeights, BlockwiseOptimizer)) else []
    groups: list[tuple[str, object]] = [
        ("weights", [*parameters, *model.buffers()]),
        ("gradients", [one.grad for one in parameters]),
        ("masters", masters),
        ("optimizer", dict(optimizer.state)),
        ("casts", region.cast_weights() if isinstance(region, autocast) else None),
    ]
    found: dict[int, str] = {}
    for part, holder in groups:
        for tensor in tensors_of(holder):
            if tensor.layout is torch.strided and tensor.untyped_storage().nbytes():
                found.setdefault(tensor.untyped_storage().data_ptr(), part)
    return found


class _CastWatch(_DispatchMode):  # type: ignore[misc, valid-type]
    """Records the 16-bit copies of parameters made by torch.autocast, whose cache cannot be read."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._parameters = {one.untyped_storage().data_ptr() for one in training.model.parameters()}
        self._copies: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, and note a copy of a parameter."""
        result = func(*args, **(kwargs or {}))
        is_copy = func.name() == "aten::_to_copy" and result.element_size() == 2
        if is_copy and args[0].untyped_storage().data_ptr() in self._parameters:
            storage = result.untyped_storage()
            self._copies[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return result

    def found(self) -> dict[int, str]:
        """Return the copies that are alive."""
        return {address: "casts" for address, copy in self._copies.items() if not copy.expired()}  # type: ignore[no-untyped-call]


# -- the profile ------------------------------------------------------------------------------------------------------
def _split(events: list[dict[str, Any]], marks: _Marks, device: torch.device) -> Split:
    """Return the parts at the peak, from the events of a profile."""
    moments = {event["name"]: event["ts"] for event in events if event.get("name") in _MARKS}
    forward, forward_ends, update, end = (moments[name] for name in _MARKS)
    allocations = list(_allocations(events, _DEVICE_TYPES[device.type]))
    for one in allocations:
        one.part = _part_of(one, marks, forward, forward_ends, end)
    peak, moment = _highest(allocations, forward, update)
    whole, _ = _highest(allocations, forward, end)
    parts = dict.fromkeys(PARTS, 0)
    held = dict.fromkeys(_HELD, 0)
    for one in allocations:
        if one.begin <= moment < one.end:
            parts[one.part] += one.size
        if one.part in held:
            held[one.part] += one.size
    parts["update"] = max(0, whole - peak)
    return Split(max(peak, whole), parts, held)


_MARKS = (_FORWARD, _FORWARD_ENDS, _UPDATE, _END)
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as c10::DeviceType numbers them
_HELD = ("weights", "masters", "gradients", "optimizer", "activations", "casts")


def _allocations(events: list[dict[str, Any]], device_type: int) -> Iterator[_Allocation]:
    """Yield the allocations on a type of device, with the times of allocation and of release."""
    alive: dict[int, _Allocation] = {}
    moves = [event for event in events if event.get("name") == "[memory]"]
    for move in sorted(moves, key=lambda move: cast(float, move["ts"])):
        event = move["args"]
        if event["Device Type"] != device_type:
            continue
        address, size = event["Addr"], event["Bytes"]
        if size > 0:
            alive[address] = _Allocation(address, size, move["ts"], math.inf)
        elif (freed := alive.pop(address, None)) is not None:  # otherwise it was allocated before the profile
            freed.end = move["ts"]
            yield freed
    yield from alive.values()


def _part_of(one: _Allocation, marks: _Marks, forward: float, forward_ends: float, end: float) -> str:
    for moment, kept in ((forward_ends, marks.after_forward), (end, marks.after_step)):
        if one.begin <= moment < one.end and one.address in kept:
            return kept[one.address]
    if one.begin < forward:
        return "other"
    return "activations" if one.begin <= forward_ends < one.end else "temporaries"


def _highest(allocations: Iterable[_Allocation], first: float, last: float) -> tuple[int, float]:
    """Return the peak of bytes alive between two times, and the first time of the peak."""
    changes = (((max(one.begin, first), one.size), (max(one.end, first), -one.size)) for one in allocations)
    alive = peak = 0
    moment = first
    for when, size in sorted(chain.from_iterable(changes)):  # at one time what is freed comes first
        if when > last:
            break
        alive += size
        if alive > peak:
            peak, moment = alive, when
    return peak, moment


class Taken:
    """The peaks of a step from the device's allocator, beside the profile: on CUDA allocated and reserved bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else None
        self.allocated = self.reserved = 0
        if self.device is not None:
            gc.collect()
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)

    def begin(self) -> None:
        """Reset the peaks."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def end(self) -> None:
        """Record the peaks."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)
            self.allocated = int(torch.cuda.max_memory_allocated(self.device)) - self.before[0]
            self.reserved = int(torch.cuda.max_memory_reserved(self.device)) - self.before[1]

    def corrected(self, split: Split) -> Split:
        """Return the split with these peaks; memory that the profile did not record is `other`."""
        if self.device is None:
            return split
        parts = {**split.parts, "other": split.parts["other"] + self.allocated - split.allocated}
        return replace(split, allocated=self.allocated, parts=parts, reserved=self.reserved)
