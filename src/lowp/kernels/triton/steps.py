"""Steps and checks of many tensors in one launch, by tables of addresses."""

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
_ALIGNMENT = 16  # bytes of a thread's vector loads


class Moves(NamedTuple):
    """The numbers of AdamW in fp32."""

    first: float  # 1 - beta1
    rest: float  # beta1
    beta2: float
    second: float  # 1 - beta2
    epsilon: float


class Momentum(NamedTuple):
    """The numbers of SGD in fp32."""

    momentum: float
    undamped: float  # 1 - dampening
    decay: float


class Way(NamedTuple):
    """The properties that determine the instructions of a step: `near` for AdamW, the last three for SGD."""

    adamw: bool
    dtype: str  # dtype of the gradients
    split: bool
    scaled: bool
    maximize: bool
    near: bool = False  # the average is computed from its old value, as torch's lerp does from the nearer end
    momentum: bool = False
    nesterov: bool = False
    decay: bool = False


class Table(NamedTuple):
    """The addresses of the tensors of a step, and the chunk of each program."""

    addresses: Tensor  # int64 [tensors, columns]
    chunks: Tensor  # int32 [programs, 2]
    aligned: bool
    chunk: int
    block: int


# Tables on a device by their whole content and device, so that a table found is valid. A model's steps need few of
# them, as gradients that are allocated again return to earlier addresses.
_tables: OrderedDict[tuple[Any, ...], Table] = OrderedDict()
_MOST_TABLES = 64
_of_graphs: list[tuple[Table, tuple[Tensor, ...]]] = []  # tables read by captured graphs at every replay


def table(columns: Sequence[Sequence[Tensor]]) -> Table:
    """Return the table of tensors, given by column; tensors of a row have equal sizes and are dense.

    A new table is copied to their device, from pinned memory and without waiting, unless one with the same addresses
    and sizes exists. Tables used in the capture of a graph are kept for good.
    """
    lead = columns[0]
    counts = [one.numel() for one in lead]
    rows = [
        (*(one.data_ptr() for one in row), count) for row, count in zip(zip(*columns, strict=True), counts, strict=True)
    ]
    if lead[0].is_cpu:
        block = min(INTERPRETED_BLOCK, max(16, 1 << (max(counts) - 1).bit_length()))
        return _made(rows, block, block, lead[0])[0]
    stream = torch.cuda.current_stream(lead[0].device).cuda_stream  # another one could read before the copy
    key = (lead[0].device, stream, *rows)
    found, captures = _tables.get(key), torch.cuda.is_current_stream_capturing()
    staged: tuple[Tensor, ...] = ()
    if found is None:
        found, staged = _made(rows, BLOCK, BLOCK * ROUNDS, lead[0])
    if captures:
        _of_graphs.append((found, staged))
        return found
    _tables.pop(key, None)
    _tables[key] = found  # the most recently used last
    if len(_tables) > _MOST_TABLES:
        _tables.popitem(last=False)
    return found


def _made(rows: Sequence[tuple[int, ...]], block: int, chunk: int, like: Tensor) -> tuple[Table, tuple[Tensor, ...]]:
    """Return a table on the device of `like`, and the host memory it is copied from."""
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
    """Step parameters; columns: weight, remainder (any tensor if not `split`), gradient and two moments."""
    way = Way(True, _dtype(columns), split, inverse is not None, maximize, near=moves.first < 0.5)
    _walk(columns, rates, inverse, skip, moves, way)


def sgd(
    columns: Sequence[Sequence[Tensor]], rates: Tensor, inverse: Tensor | None, skip: Tensor | None,
    numbers: Momentum, split: bool, maximize: bool, nesterov: bool,
) -> None:  # fmt: skip
    """Step parameters; columns: weight, remainder, gradient, momentum; the fifth column is not read."""
    way = Way(
        False, _dtype(columns), split, inverse is not None, maximize,
        momentum=numbers.momentum != 0, nesterov=nesterov, decay=numbers.decay != 0,
    )  # fmt: skip
    _walk(columns, rates, inverse, skip, numbers, way)


def _dtype(columns: Sequence[Sequence[Tensor]]) -> str:
    return DTYPES[columns[2][0].dtype]


def _walk(
    columns: Sequence[Sequence[Tensor]], rates: Tensor, inverse: Tensor | None, skip: Tensor | None,
    numbers: Moves | Momentum, way: Way,
) -> None:  # fmt: skip
    where = table([[integers(one) for one in column] for column in columns])
    never = rates.new_zeros(()) if skip is None else skip.reshape(()).to(rates.device, torch.float32)
    inverse = rates if inverse is None else inverse.reshape(()).to(rates.device)
    arguments = (where.addresses, where.chunks, rates, inverse, never, numbers, way)
    run(updates.step, (len(where.chunks),), *arguments, where.aligned, where.chunk, where.block)


def check(
    gradients: Sequence[Tensor], inverse: Tensor | None, found: Tensor, histogram: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Unscale gradients of one dtype in place; set `found` to 1 if an element is infinite or NaN.

    Return the sum of squares of the finite unscaled elements, fp64, 0-d, and the largest magnitude of each gradient
    before unscaling, fp32. Counts by exponent are added to `histogram`, int32 [256].
    """
    largest = torch.zeros(len(gradients), dtype=torch.int32, device=found.device)
    if not any(one.numel() for one in gradients):
        return torch.zeros((), dtype=torch.float64, device=found.device), largest.view(torch.float32)
    where = table([[integers(one) for one in gradients]])
    energies = torch.zeros(len(where.chunks), dtype=torch.float64, device=found.device)
    bins = largest if histogram is None else histogram  # not read
    scale = found if inverse is None else inverse
    flags = (DTYPES[gradients[0].dtype], inverse is not None, histogram is not None)
    arguments = (where.addresses, where.chunks, scale, found, energies, largest, bins, *flags)
    run(updates.check, (len(where.chunks),), *arguments, where.aligned, where.chunk, where.block)
    return energies.sum(), largest.view(torch.float32)
