"""Many tensors in one launch: tables of addresses, and the steps and checks that walk them."""

from __future__ import annotations

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


def table(columns: Sequence[Sequence[Tensor]]) -> Table:
    """Return the table of tensors, given by column; those of a row have the same elements, and are contiguous.

    On a device it is copied without waiting: from pinned memory.
    """
    lead = columns[0]
    counts = [one.numel() for one in lead]
    block = BLOCK if not lead[0].is_cpu else min(INTERPRETED_BLOCK, max(16, 1 << (max(counts) - 1).bit_length()))
    chunk = block if lead[0].is_cpu else BLOCK * ROUNDS
    rows = [[one.data_ptr() for one in row] for row in zip(*columns, strict=True)]
    aligned = all(address % _ALIGNMENT == 0 for row in rows for address in row)
    rows = [[*row, count] for row, count in zip(rows, counts, strict=True)]
    pieces = [(place, part) for place, count in enumerate(counts) for part in range(-(-count // chunk))]
    return Table(
        _there(torch.tensor(rows, dtype=torch.int64, device="cpu"), lead[0]),
        _there(torch.tensor(pieces, dtype=torch.int32, device="cpu").reshape(-1, 2), lead[0]),
        aligned,
        chunk,
        block,
    )


def _there(values: Tensor, like: Tensor) -> Tensor:
    return values if like.is_cpu else values.pin_memory().to(like.device, non_blocking=True)


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


def check(gradients: Sequence[Tensor], inverse: Tensor | None, found: Tensor, histogram: Tensor | None) -> Tensor:
    """Unscale gradients of one dtype in place, set `found` to 1 for what is not finite; return the sum of squares.

    `histogram`, int32 [256], is added to. The sum, fp64 and 0-d, is of the finite numbers, unscaled.
    """
    filled = [one for one in gradients if one.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=found.device)
    where = table([[integers(one) for one in filled]])
    energies = torch.zeros(len(where.chunks), dtype=torch.float64, device=found.device)
    bins = torch.zeros(256, dtype=torch.int32, device=found.device) if histogram is None else histogram
    scale = found if inverse is None else inverse
    flags = (DTYPES[filled[0].dtype], inverse is not None, histogram is not None)
    arguments = (where.addresses, where.chunks, scale, found, energies, bins, *flags)
    run(updates.check, (len(where.chunks),), *arguments, where.aligned, where.chunk, where.block)
    return energies.sum()
