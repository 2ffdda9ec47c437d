"""Many tensors in one launch: tables of addresses, and the steps and checks that walk them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.kernels.triton.calls import integers
from lowp.kernels.triton.device import updates
from lowp.kernels.triton.launch import INTERPRETED_BLOCK, run
from lowp.kernels.triton.plans import DTYPES

BLOCK, ROUNDS = 1024, 8
_ALIGNMENT = 16  # bytes that a vector of a thread is read in


class Moves(NamedTuple):
    """AdamW's numbers, each in fp32."""

    first: float  # 1 - beta1
    rest: float  # beta1
    beta2: float
    second: float  # 1 - beta2
    epsilon: float


class Momentum(NamedTuple):
    """SGD's numbers, each in fp32."""

    momentum: float
    undamped: float  # 1 - dampening
    decay: float


class Table(NamedTuple):
    """Where the tensors of a step lie, and which program takes which piece of them."""

    addresses: Tensor  # int64 [tensors, columns]
    chunks: Tensor  # int32 [programs, 2]
    aligned: bool
    chunk: int
    block: int


# What lies on a device, by all that it says and where it is read: a table that is found says what is asked for. Of a
# model's steps there are few; gradients that are allocated anew come by turns to lie where they lay before.
_tables: OrderedDict[tuple[Any, ...], Table] = OrderedDict()
_MOST_TABLES = 64
_of_graphs: list[tuple[Table, tuple[Tensor, ...]]] = []  # what captured graphs read as often as they are replayed


def table(columns: Sequence[Sequence[Tensor]]) -> Table:
    """Return the table of tensors, given by column; those of a row have the same elements, which lie without gaps.

    It is copied to their device when there is none with these very addresses and sizes, from pinned memory: nothing
    waits. What a graph is captured with is kept for good.
    """
    lead = columns[0]
    counts = [one.numel() for one in lead]
    rows = [
        (*(one.data_ptr() for one in row), count) for row, count in zip(zip(*columns, strict=True), counts, strict=True)
    ]
    if lead[0].is_cpu:
        block = min(INTERPRETED_BLOCK, max(16, 1 << (max(counts) - 1).bit_length()))
        return _made(rows, block, block, lead[0])[0]
    stream = torch.cuda.current_stream(lead[0].device).cuda_stream  # another one might read before it is copied
    key = (lead[0].device, stream, *rows)
    found, captures = _tables.get(key), torch.cuda.is_current_stream_capturing()
    staged: tuple[Tensor, ...] = ()
    if found is None:
        found, staged = _made(rows, BLOCK, BLOCK * ROUNDS, lead[0])
    if captures:
        _of_graphs.append((found, staged))
        return found
    _tables.pop(key, None)
    _tables[key] = found  # behind those that were asked for before
    if len(_tables) > _MOST_TABLES:
        _tables.popitem(last=False)
    return found


def _made(rows: Sequence[tuple[int, ...]], block: int, chunk: int, like: Tensor) -> tuple[Table, tuple[Tensor, ...]]:
    """Return a table where `like` lies, and the host's memory that it is copied from."""
    aligned = all(address % _ALIGNMENT == 0 for row in rows for address in row[:-1])
    pieces = [(place, part) for place, row in enumerate(rows) for part in range(-(-row[-1] // chunk))]
    addresses = torch.tensor(rows, dtype=torch.int64, device="cpu")
    chunks = torch.tensor(pieces, dtype=torch.int32, device="cpu").reshape(-1, 2)
    if like.is_cpu:
        return Table(addresses, chunks, aligned, chunk, block), ()
    staged = (addresses.pin_memory(), chunks.pin_memory())
    there = [one.to(like.device, non_blocking=True) for one in staged]
    return Table(there[0], there[1], aligned, chunk, block), staged


def adamw(
    columns: Sequence[Sequence[Tensor]], rates: Tensor, inverse: Tensor | None, skip: Tensor | None, moves: Moves,
    split: bool, maximize: bool,
) -> None:  # fmt: skip
    """Step parameters: weight, remainder (any tensor where not `split`), gradient and two moments by column."""
    where = table([[integers(one) for one in column] for column in columns])
    near = moves.first < 0.5  # as torch's lerp: from the nearer end
    dtype = DTYPES[columns[2][0].dtype]
    flags = (dtype, split, inverse is not None, maximize, near, where.aligned, where.chunk, where.block)
    _walk(updates.adamw, where, rates, inverse, skip, moves, flags)


def sgd(
    columns: Sequence[Sequence[Tensor]], rates: Tensor, inverse: Tensor | None, skip: Tensor | None,
    numbers: Momentum, split: bool, maximize: bool, nesterov: bool,
) -> None:  # fmt: skip
    """Step parameters: weight, remainder, gradient, momentum by column; the fifth column is not looked at."""
    where = table([[integers(one) for one in column] for column in columns])
    dtype = DTYPES[columns[2][0].dtype]
    flags: tuple[Any, ...] = (dtype, split, inverse is not None, maximize, numbers.momentum != 0, nesterov)
    flags += (numbers.decay != 0, where.aligned, where.chunk, where.block)
    _walk(updates.sgd, where, rates, inverse, skip, numbers, flags)


def _walk(
    kernel: Any, where: Table, rates: Tensor, inverse: Tensor | None, skip: Tensor | None, numbers: Any, flags: Any
) -> None:
    never = rates.new_zeros(()) if skip is None else skip.reshape(()).to(rates.device, torch.float32)
    inverse = rates if inverse is None else inverse.reshape(()).to(rates.device)
    run(kernel, (len(where.chunks),), where.addresses, where.chunks, rates, inverse, never, numbers, *flags)


def check(
    gradients: Sequence[Tensor], inverse: Tensor | None, found: Tensor, histogram: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Unscale gradients of one dtype in place, set `found` to 1 for what is not finite.

    Return the sum of squares of the finite numbers, unscaled, fp64 and 0-d, and the largest magnitude of each gradient
    before, fp32. `histogram`, int32 [256], is added to.
    """
    largest = torch.zeros(len(gradients), dtype=torch.int32, device=found.device)
    if not any(one.numel() for one in gradients):
        return torch.zeros((), dtype=torch.float64, device=found.device), largest.view(torch.float32)
    where = table([[integers(one) for one in gradients]])
    energies = torch.zeros(len(where.chunks), dtype=torch.float64, device=found.device)
    bins = largest if histogram is None else histogram  # not looked at
    scale = found if inverse is None else inverse
    flags = (DTYPES[gradients[0].dtype], inverse is not None, histogram is not None)
    arguments = (where.addresses, where.chunks, scale, found, energies, largest, bins, *flags)
    run(updates.check, (len(where.chunks),), *arguments, where.aligned, where.chunk, where.block)
    return energies.sum(), largest.view(torch.float32)
