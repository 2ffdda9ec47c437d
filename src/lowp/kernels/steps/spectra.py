"""The profiler's counts of tensors in one read: by the C++ library on a CPU, by torch elsewhere.

`Spectrum` and `Updates` in lowp.numerics are made of these counts and document them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowp.compat import real_tensors
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.cpu.abi import TYPE_NUMBERS

PARTS = 32  # bins of an octave: one for each value of the five bits after the leading one
LONGEST = 24  # bits of a significand of fp32
ROWS = 96  # exponents of weights, and of updates
LOWEST_WEIGHT, LOWEST_UPDATE = -70, -80  # the exponents of the first row and column; smaller ones are counted there
SOME = 256  # numbers of a tensor that `some_of` takes
_FEW = 4 * SOME
_PIECE, _UNEVEN = 64, 0.9903  # numbers read together; a part of the whole that is no multiple of a row
_BINS = 256 * PARTS
_POWERS = _BINS + LONGEST + 1  # the position of the counts of powers of two in the library's output
_BIAS = 127
_CELLS = ROWS * ROWS * 3


class TensorCounts(NamedTuple):
    """Counts of the finite nonzero numbers: `bins` int64 [8192], `significant` int64 [25], `powers` int64 [256].

    Powers of two are also counted in `powers`, by exponent field. The other fields are of all numbers; `checksum` is
    the sum of the bits of the fp32 numbers, read as signed integers.
    """

    bins: NDArray[np.int64]
    significant: NDArray[np.int64]
    powers: NDArray[np.int64]
    zeros: int
    nan: int
    inf: int
    maximum: float
    sum_squares: float
    checksum: int


def count_tensor(x: Tensor, scale: float = 1.0) -> TensorCounts:
    """Count a floating-point tensor divided by `scale`, in fp32; with NaNs, infinities, or empty as well."""
    x = x.detach()
    x = (x if x.dtype in TYPE_NUMBERS else x.float()).contiguous()
    return _counted(x, scale) if x.is_cpu and uses_library() else _counted_by_torch(x.float().reshape(-1), scale)


def _counted(x: Tensor, scale: float) -> TensorCounts:
    counts = np.empty(_POWERS + 256 + 6, np.int64)  # SpectrumSeen of cpu/cast.hpp
    failed = cpu.loaded().lowp_spectrum(
        TYPE_NUMBERS[x.dtype], x, x.numel(), scale, torch.get_num_threads(), counts.ctypes
    )
    if failed:
        raise MemoryError(f"no memory for the partial sums of {x.numel()} elements")
    zeros, nan, inf, checksum = counts[-6:-2].tolist()
    maximum, squares = counts[-2:].view(np.float64).tolist()
    return TensorCounts(
        counts[:_BINS], counts[_BINS:_POWERS], counts[_POWERS:-6], zeros, nan, inf, maximum, squares, checksum
    )


def _counted_by_torch(flat: Tensor, scale: float) -> TensorCounts:
    flat = flat / scale if scale != 1.0 else flat
    bits = flat.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    finite, present = magnitude < 0x7F800000, magnitude != 0
    nan = magnitude > 0x7F800000
    kept = torch.where(finite & present, magnitude, 0x7F800000)  # the rest, which is not counted
    bins = torch.bincount(kept >> 18, minlength=_BINS)
    fraction = kept & 0x7FFFFF
    # the lowest set bit is a power of two, whose exponent is the number of trailing zeros of the significand
    lowest = (fraction & -fraction).float().view(torch.int32) >> 23
    needed = torch.where(fraction == 0, 1, LONGEST + _BIAS - lowest)
    significant = torch.bincount(torch.where(finite & present, needed, 0), minlength=LONGEST + 1)
    powers = torch.bincount(torch.where(finite & present & (fraction == 0), kept >> 23, 0), minlength=256)
    wide = torch.where(finite, flat, 0.0).double()
    few = torch.stack(((~present).sum(), nan.sum(), (~finite & ~nan).sum(), bits.sum(dtype=torch.int64)))
    largest = wide.abs().amax() if flat.numel() else wide.sum()
    maximum, squares = torch.stack((largest, (wide * wide).sum())).tolist()
    zeros, nans, inf, checksum = few.tolist()
    counted, lengths, exact = (one.cpu().numpy() for one in (bins, significant, powers))
    counted[255 * PARTS :] = 0
    lengths[0] = exact[0] = 0
    return TensorCounts(counted, lengths, exact, zeros, nans, inf, maximum, squares, checksum)


def numbers_at(flat: Tensor, places: Sequence[int], scale: float = 1.0) -> list[float]:
    """Return a few numbers of a flat tensor divided by `scale`, in fp32; on a CPU by NumPy, which is faster."""
    few = torch.from_numpy(flat.numpy()[places]) if flat.is_cpu and flat.dtype == torch.float32 else flat[places]
    found: list[float] = (few.float() / scale if scale != 1.0 else few.float()).tolist()
    return found


def sampled(x: Tensor, count: int) -> Tensor:
    """Return a copy of `count` numbers of a tensor, or of all if it has fewer, at places that depend only on its shape.

    The places are spread evenly, but not in steps of equal length, which would repeatedly hit the same channel.
    """
    x = x.detach()
    if x.numel() <= count:
        return x.reshape(-1).clone()
    places = torch.from_numpy(even_places(x.numel(), count))
    if x.is_contiguous():
        return x.view(-1)[places]
    return x[torch.unravel_index(places, x.shape)]


@lru_cache(maxsize=64)
def even_places(numel: int, count: int) -> NDArray[np.int64]:
    """Return `count` of the places 0 to `numel` - 1, int64 [count]; the first of them are as even as all."""
    golden = (math.sqrt(5) - 1) / 2
    return (np.arange(count) * golden % 1 * numel).astype(np.int64)


def some_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return some numbers of each of several tensors of one device, fp32 [tensors, 256], in one read.

    Their places depend only on how many a tensor has, and are spread over rows and columns; those of one with fewer
    than 256 repeat. An empty tensor gives zeros.
    """
    counts = [one.numel() for one in tensors]
    first = tensors[0]
    if first.is_cpu and uses_library() and all(one.dtype is first.dtype and one.is_contiguous() for one in tensors):
        taken = torch.empty((len(counts), SOME), dtype=first.dtype, device="cpu")
        places = _places_of(tuple(counts))
        cpu.loaded().lowp_take(taken.itemsize, list(tensors), *places, len(counts), SOME, taken)
        return taken.float()
    views = []
    for one, count in zip(tensors, counts, strict=True):
        flat = one.detach().reshape(-1)
        views.append(flat[: SOME * _step_of(count) : _step_of(count)] if count > _FEW else flat)
    return torch.cat([*views, first.new_zeros(1)])[_rows(tuple(counts), first.device)].float()


def peak_of(x: Tensor) -> float | Tensor:
    """Return the largest magnitude of a tensor with numbers, NaN if one is; of a large one that of 64 x 64 numbers.

    These begin at places that are spread over rows and columns. A tensor of a device gives a 0-d one.
    """
    if x.numel() > 2 * _PIECE * _PIECE:
        step = int(x.numel() / _PIECE * _UNEVEN)
        x = x.contiguous().as_strided((_PIECE, _PIECE), (step, 1))
    low, high = torch.aminmax(x)
    if not x.is_cpu:
        return torch.maximum(high, low.neg())
    largest, other = high.item(), -low.item()
    return other if other > largest else largest


@lru_cache(maxsize=4096)
def _step_of(count: int) -> int:
    """The places of `some_of` are multiples of this, counted round the end of a tensor that has few numbers."""
    step = max(count // SOME if count > _FEW else round(0.618 * count), 1)
    while math.gcd(step, count) > 1:
        step -= 1
    return step


@lru_cache(maxsize=32)
def _places_of(counts: tuple[int, ...]) -> tuple[array[int], array[int]]:
    return array("q", counts), array("q", map(_step_of, counts))


@lru_cache(maxsize=32)
def _rows(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the numbers of `some_of` lie in what is read of tensors with so many numbers: int64 [tensors, 256]."""
    read = [SOME if count > _FEW else count for count in counts]
    every, begin, rows = np.arange(SOME), 0, []
    for count, present in zip(counts, read, strict=True):
        places = every if count > _FEW else every * _step_of(count) % count if count else every * 0 + sum(read)
        rows.append(places + (begin if count else 0))
        begin += present
    with real_tensors():
        return torch.from_numpy(np.stack(rows)).to(device)


def slope_of(x: Tensor, gradient: Tensor, scale: float = 1.0) -> NDArray[np.float64]:
    """Return the sums of squares of gradients divided by `scale`, by the exponent of their number: fp64 [96].

    Infinite and NaN gradients are not counted.
    """
    numbers, slopes = (one.float().cpu().numpy() for one in (x, gradient))
    rows = ((numbers.view(np.int32) >> 23) & 0xFF) - (_BIAS + LOWEST_WEIGHT)
    squares = np.square(np.nan_to_num(slopes, posinf=0.0, neginf=0.0).astype(np.float64) / scale)
    return np.bincount(np.clip(rows, 0, ROWS - 1), squares, ROWS).astype(np.float64)


def largest_of(tensors: Sequence[Tensor]) -> float:
    """Return the largest |x| of dense tensors, 0 without elements; infinite or NaN if an element is."""
    plain = [one for one in tensors if one.dtype is torch.float32 and one.is_cpu and one.is_contiguous()]
    plain = plain if uses_library() else []
    most = 0.0
    if plain:
        counts = array("q", [one.numel() for one in plain])
        most = cpu.loaded().lowp_largest(plain, counts, len(plain), torch.get_num_threads())
    if len(plain) < len(tensors):
        known = set(map(id, plain))
        rest = [one.detach().abs().amax() for one in tensors if one.numel() and id(one) not in known]
        wide = torch.float64 if any(one.dtype is torch.float64 for one in rest) else torch.float32
        most = max(most, float(torch.stack([one.to(wide) for one in rest]).amax()), key=_rank) if rest else most
    return most


def _rank(x: float) -> float:
    return math.inf if math.isnan(x) else x


def count_updates(
    weight: Tensor, update: Tensor, gradient: Tensor | None
) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """Return joint counts [96, 96, 3] of a step of weights, squares of gradients by row [96], and unchanged weights."""
    weight, update = (one.detach().float().reshape(-1) for one in (weight, update))
    slope = None if gradient is None else gradient.detach().float().reshape(-1)
    if not (weight.is_cpu and uses_library()):
        return _updates_by_torch(weight, update, slope)
    counts, energy = np.empty(_CELLS + 1, np.int64), np.empty(ROWS)
    cpu.loaded().lowp_updates(
        weight, update, slope, weight.numel(), torch.get_num_threads(), counts.ctypes, energy.ctypes
    )
    return counts[:-1].reshape(ROWS, ROWS, 3), energy, int(counts[-1])


def _updates_by_torch(
    weight: Tensor, update: Tensor, slope: Tensor | None
) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    bits, moved = weight.view(torch.int32), update.view(torch.int32)
    row = (((bits >> 23) & 0xFF) - (_BIAS + LOWEST_WEIGHT)).clamp(0, ROWS - 1)
    column = (((moved >> 23) & 0xFF) - (_BIAS + LOWEST_UPDATE)).clamp(0, ROWS - 1)
    shrinks = (bits ^ moved) < 0  # the signs differ
    kind = torch.where(shrinks & (weight != 0), torch.where(bits & 0x7FFFFF == 0, 2, 1), 0)
    present = (moved & 0x7FFFFFFF) != 0
    cell = torch.where(present, (row * ROWS + column) * 3 + kind, _CELLS)
    joint = torch.bincount(cell, minlength=_CELLS + 1).cpu().numpy()[:-1].reshape(ROWS, ROWS, 3)
    if slope is None:
        return joint, np.zeros(ROWS), 0
    slope = torch.where(slope.isfinite(), slope, 0.0)
    energy = torch.bincount(row, slope.double() ** 2, minlength=ROWS).cpu().numpy()
    return joint, energy, int(((slope != 0) & ~present).sum())
