"""What `gpu.py` checks and times of the kernels, by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lowp
from lowp.casts import parse
from lowp.errors import LowpError
from lowp.exponents.table import ExponentTable
from lowp.formats import FORMATS, FloatFormat
from lowp.kernels.choose.dispatch import forced
from lowp.kernels.int16 import mantissas
from lowp.kernels.int16.entries import write_unread
from lowp.kernels.steps import updates
from lowp.step import gradients

CASTS = ("", ":stochastic", ":toward-zero", ":nearest-away", ":saturate")
SCALED = ("mxfp8", "mxfp4", "nvfp4", "int8", "e4m3fn@fp32/row", "dfp16")
FLEX = parse("flex16+5")
_SITES, _STEPS = 40, 20  # of predicted exponents
_AHEAD = 16  # copies of what is timed, queued before it: about a millisecond on the fastest device


# -- against the definition -------------------------------------------------------------------------------------------
def checks(is_tiny: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what is checked, by name; every kind first: kernels compile in their first call, and time may be short."""
    found: dict[str, Callable[[Tensor], Tensor]] = {"statistics": lambda y: lowp.statistics(y).exponent_histogram}
    found["check of gradients"] = _checked_gradients
    found["predicted exponents"] = _predicted
    found |= {f"quantize {name}": (lambda y, name=name: lowp.quantize(y, name)) for name in SCALED}
    rows = [row for row in FORMATS.values() if isinstance(row, FloatFormat) and row.bits <= 32]
    for row in [row for row in rows if row.bits <= 16 and row.has_nan and row.signed][:: 4 if is_tiny else 1]:
        found[f"encode {row.name}"] = lambda y, name=row.name: lowp.encode(y, name).view(torch.uint8)
        found[f"decode {row.name}"] = lambda y, name=row.name: lowp.decode(lowp.encode(y, name), name)
    for way in CASTS:
        for row in rows[:: 4 if is_tiny else 1]:
            try:
                text = str(lowp.casts.parse(row.name + way))
            except LowpError:  # no such way in this format
                continue
            found[f"quantize {text}"] = lambda y, text=text: lowp.quantize(y, text, seed=3)
    return found


def numbers(is_tiny: bool) -> Tensor:
    """Return numbers of every magnitude, all patterns of the high 16 bits of fp32 among them, in rows of 256."""
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    patterns = patterns[::64] if is_tiny else torch.cat([patterns, patterns | 0x8000, patterns | 0x7FFF])
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(len(patterns), generator=generator)
    return torch.cat([patterns.view(torch.float32), spread]).view(-1, 256)


def _checked_gradients(y: Tensor) -> Tensor:
    """Return gradients divided by 8, their exponents, the largest magnitude, and whether any is not finite, as bits."""
    gradient = y.clone()
    inverse = torch.full((), 0.125, dtype=torch.float32, device=y.device)
    found_inf = torch.zeros((), dtype=torch.float32, device=y.device)
    if forced() != "reference" and updates.can_check([gradient]):
        seen = updates.check([gradient], found_inf, inverse, histogram=True)
        assert seen.histogram is not None
        histogram, largest = seen.histogram, seen.largest
    else:
        known = y[y.isfinite() & (y != 0)].view(torch.int32) >> 23 & 255
        histogram, largest = torch.bincount(known, minlength=256), y.abs().amax()
        gradient, found_inf = y * inverse, (~y.isfinite().all()).float()
    parts = [bits(one.reshape(-1)).int() for one in (gradient, histogram, largest, found_inf)]
    return torch.cat(parts)


def _predicted(y: Tensor) -> Tensor:
    """Return the table of shared exponents after some steps, as bytes; maxima of writes, below 8, are low bits of y."""
    table = ExponentTable(parse("flex16+5:autoflex"), y.device)
    maxima = y.reshape(-1)[-_STEPS * _SITES :].view(torch.int32).view(_STEPS, _SITES) & 0x7FFF
    bad, small = maxima % 16 == 3, maxima % 16 == 5  # not finite; all of it rounded to zero
    for site in range(_SITES):
        table.index(f"output of {site} linear")
    for step in range(_STEPS):
        mantissas = (maxima[step] >> (table.state.exponent + 12).clamp(0, 15)) * ~small[step]
        flags = bad[step] * ((1 << 8) + 1) + small[step] * (1 << 16)
        nothing = torch.zeros_like(flags)
        rows = torch.stack([mantissas, nothing, nothing, nothing, nothing, nothing + 8, flags, nothing], 1)
        for site, row in enumerate(rows):
            table.note(site, row)
        table.flush()
    parts = [*table.state, table.before, *(table.counts[name] for name in ("raises_needed", "measured"))]
    return torch.cat([one.reshape(-1).contiguous().view(torch.int8).int() for one in parts])


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32) if x.dtype is torch.float32 else x


# -- beside a copy ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Buffers:
    """What is timed reads and writes these: fp32 numbers, and codes of e4m3fn."""

    x: Tensor
    out: Tensor
    codes: Tensor
    one: Tensor  # fp32, 0-d
    flag: Tensor  # fp32, 0-d
    exponents: Tensor  # int32 [1]
    steps: dict[str, Callable[[], object]]  # of optimizers, by name

    def step(self, name: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> object:
        """Take a step of an optimizer of one parameter, made in the first call, with a gradient of its own dtype."""
        if name not in self.steps:
            parameter = nn.Parameter(self.x.clone())
            self.steps[name] = make([parameter]).step
            parameter.grad = self.x.to(parameter.dtype)
        return self.steps[name]()


@dataclass(frozen=True)
class Candidate:
    """A call that is timed, and the bytes an element that it has to read and write."""

    call: Callable[[Buffers], object]
    bytes: float


CANDIDATES: dict[str, Candidate] = {
    **{
        text: Candidate(lambda b, text=text: lowp.quantize(b.x, text, seed=1, out=b.out), 8)
        for text in ("fp16", "bf16", "e4m3fn", "e5m2", "e5m7", "bf16:stochastic", "e4m3fn:stochastic")
    },
    "encode e4m3fn": Candidate(lambda b: lowp.encode(b.x, "e4m3fn"), 5),
    "decode e4m3fn": Candidate(lambda b: lowp.decode(b.codes, "e4m3fn"), 5),
    "statistics": Candidate(lambda b: lowp.statistics(b.x), 4),
    # what an exponent of its own costs: the numbers are read for the exponent, and again
    "int16": Candidate(lambda b: mantissas.current_mantissas(b.x, FLEX), 4 + 4 + 2),
    "int16, looked at": Candidate(lambda b: mantissas.exact(b.x, FLEX), 4 + 4),
    "int16, written": Candidate(lambda b: write_unread(b.x, FLEX, b.exponents, 0).values, 8),
    "check of gradients": Candidate(lambda b: check_of_gradients(b, False), 8),
    "check of gradients with exponents": Candidate(lambda b: check_of_gradients(b, True), 8),
    "mxfp8": Candidate(lambda b: lowp.quantize(b.x, "mxfp8"), 8),
    "nvfp4": Candidate(lambda b: lowp.quantize(b.x, "nvfp4"), 8),
    "mxfp8 codes": Candidate(lambda b: lowp.encode(b.x, "mxfp8"), 5 + 1 / 32),
    "int8 rows": Candidate(lambda b: lowp.quantize(b.x.view(-1, 256), "int8"), 8),
    # parameters, gradients and two moments are read, all but the gradients written
    "AdamW, torch's fused": Candidate(
        lambda b: b.step("torch", lambda p: torch.optim.AdamW(p, fused=True)), 4 * (4 + 3)
    ),
    "AdamW, split": Candidate(lambda b: b.step("split", lambda p: lowp.optim.AdamW(p)), 2 + 2 * 4 + 2 * 2 * 4),
    "SGD, split": Candidate(lambda b: b.step("sgd", lambda p: lowp.optim.SGD(p, lr=0.1, momentum=0.9)), 2 + 4 * 4),
}


def buffers(device: torch.device, count: int) -> Buffers:
    """Return what is read and written, of so many elements, a multiple of 4096."""
    x = torch.randn(count, device=device)
    codes = lowp.encode(x[:4096].cpu(), "e4m3fn")
    repeated = codes.view(torch.uint8).to(device).repeat(count // 4096).view(codes.dtype)
    one, flag = torch.ones((), device=device), torch.zeros((), device=device)
    exponents = torch.full((1,), -12, dtype=torch.int32, device=device)  # normal numbers are below 2**3
    return Buffers(x, torch.zeros_like(x), repeated, one, flag, exponents, {})


def check_of_gradients(held: Buffers, histogram: bool) -> object:
    """Unscale and check `out` in place, as a loss scale does: by the device's kernel, or by torch where it has none."""
    if updates.can_check([held.out]):
        return updates.check([held.out], held.flag, held.one, histogram)
    return gradients.unscale_and_check_([held.out], held.flag, held.one)


def seconds_of(device: torch.device, call: Callable[[], object], busy: Callable[[], object]) -> float:
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
