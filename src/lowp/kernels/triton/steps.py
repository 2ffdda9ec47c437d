"""Steps and checks of many tensors in one launch, by tables of addresses."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from lowp.casts import Cast, parse
from lowp.formats import FORMATS, ScaledFormat
from lowp.kernels.triton.device import gradients, updates
from lowp.kernels.triton.launch import INTERPRETED_BLOCK, run
from lowp.kernels.triton.plans import DTYPES, CastPlan, exact, plan
from lowp.kernels.triton.scaled import LONGEST_BLOCK, ScaledCastPlan, planned

BLOCK, ROUNDS = 1024, 8
_ALIGNMENT = 16  # bytes of a thread's vector loads


class Way(NamedTuple):
    """The properties that determine the instructions of a step.

    `near` is for AdamW, the three after it for SGD.
    """

    dtype: str  # of the gradients
    rest: int  # bits of the remainder beside a bf16 weight; 0: none
    scaled: bool
    maximize: bool
    adamw: bool = False
    near: bool = False  # the average is computed from its old value, as torch's lerp does from the nearer end
    momentum: bool = False
    nesterov: bool = False
    decay: bool = False
    lion: bool = False
    rounds: bool = False  # the weight is rounded by a cast
    stored: str = "fp32"  # dtype of the weights
    moments: str = "fp32"  # or "bf16" or "codes"


class KeptPlan(NamedTuple):
    """How moments and weights are kept, as arguments of `step`: casts and codes with their numbers."""

    weight: CastPlan
    moments: ScaledCastPlan
    size: int  # numbers that share a scale
    kind: str  # "fp32", "bf16" or "codes"
    rounds: bool


def is_plain(kept: KeptPlan) -> bool:
    """Whether nothing is rounded but by a bf16 half and its remainder."""
    return kept.kind == "fp32" and not kept.rounds


def warps_for(kept: KeptPlan) -> int:
    """Return the warps of a program; random bits need registers, so that each warp gets fewer numbers."""
    return 4 if is_plain(kept) else 8


class Table(NamedTuple):
    """The addresses of the tensors of a step, and the chunk of each program."""

    addresses: Tensor  # int64 [tensors, columns]
    chunks: Tensor  # int32 [programs, 2]
    aligned: bool
    chunk: int
    block: int


# Tables on a device by their whole content, device and stream, so that one found is valid. A model's steps need few of
# them, as gradients that are allocated again return to earlier addresses.
_tables: OrderedDict[tuple[Any, ...], Table] = OrderedDict()
_chunks: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()  # by the numbers of elements: the same in every step
_MOST_TABLES = 64
_of_graphs: list[tuple[Any, ...]] = []  # what captured graphs read at every replay


def table(columns: Sequence[Sequence[Tensor]], *more: Sequence[int]) -> Table:
    """Return the table of tensors, given by column; tensors of a row have as many numbers as the first, and are dense.

    A row ends with their number, and with one of each of `more`.

    A new table is copied to their device, from pinned memory and without waiting, unless one with the same addresses
    and sizes exists. Tables used in the capture of a graph are kept for good.
    """
    lead, device = columns[0], columns[0][0].device
    counts = tuple([one.numel() for one in lead])
    addresses = [[one.data_ptr() for one in column] for column in columns]
    rows = tuple(zip(*addresses, counts, *more, strict=True))
    is_host = device.type == "cpu"
    block = min(INTERPRETED_BLOCK, max(16, 1 << (max(counts) - 1).bit_length())) if is_host else BLOCK
    # on another stream the copy may still be under way
    place = (device, None if is_host else torch.cuda.current_stream(device).cuda_stream)

    def made() -> Table:
        chunk = block if is_host else BLOCK * ROUNDS
        aligned = all(address % _ALIGNMENT == 0 for column in addresses for address in column)
        chunks = _kept(_chunks, (place, counts, chunk), lambda: _there(_pieces(counts, chunk), device))
        return Table(_there(torch.tensor(rows, dtype=torch.int64, device="cpu"), device), chunks, aligned, chunk, block)

    found: Table = _kept(_tables, (place, rows), made)
    return found


def _kept(known: OrderedDict[tuple[Any, ...], Any], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return what is known by a key, or made now; while a graph is captured what is made is the graph's alone."""
    is_host = key[0][1] is None
    if is_host:
        return make()
    found = known.pop(key, None)
    if found is not None:
        known[key] = found  # the most recently used last
    captures = torch.cuda.is_current_stream_capturing()
    if found is None:
        found = make()
        if not captures:
            known[key] = found
            if len(known) > _MOST_TABLES:
                known.popitem(last=False)
    if captures:
        _of_graphs.append((found,))
    return found


def _pieces(counts: Sequence[int], chunk: int) -> Tensor:
    """Return the chunk of each program, int32 [programs, 2]: the places of its tensor, and of the chunk in it."""
    parts = numpy.array([-(-count // chunk) for count in counts])
    tensors = numpy.repeat(numpy.arange(len(counts)), parts)
    first = numpy.repeat(parts.cumsum() - parts, parts)
    return torch.from_numpy(numpy.stack((tensors, numpy.arange(len(tensors)) - first), 1).astype(numpy.int32))


def _there(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, from pinned memory and without waiting."""
    if device.type == "cpu":
        return host
    staged = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _of_graphs.append((staged,))
    return staged.to(device, non_blocking=True)


def step(
    columns: Sequence[Sequence[Tensor]], drawn: Sequence[tuple[int, int]], rates: Tensor, inverse: Tensor | None,
    skip: Tensor | None, numbers: tuple[float, ...], way: Way, kept: KeptPlan,
) -> None:  # fmt: skip
    """Step parameters; columns: weight, remainder, gradient, two moments, and the scales of moments in codes.

    `drawn`: of each parameter its seed before any step, a signed word, and the place of its first number in the whole,
    a multiple of `BLOCK`. The fourth of `rates` are the earlier steps, if numbers are drawn.
    """
    where = table(columns, *zip(*drawn, strict=True))
    form, numbers_of = kept.moments.form, (kept.weight.numbers, kept.moments.numbers, kept.moments.codes)
    compiled = (kept.weight.form, exact(kept.weight.form), form, exact(form), kept.moments.layout, kept.moments.sharing)
    arguments = (where.addresses, where.chunks, rates, *_flags(rates, inverse, skip), numbers, *numbers_of)
    most = BLOCK if any(place for _, place in drawn) else updates.SHARE.value  # a tile is in one share
    block = where.block if is_plain(kept) else max(min(where.block, most), kept.size)
    more = (*arguments, kept.moments.shared, way, *compiled, kept.size, where.aligned, where.chunk, block)
    run(updates.step, (len(where.chunks),), *more, warps=warps_for(kept))


def _flags(rates: Tensor, inverse: Tensor | None, skip: Tensor | None) -> tuple[Tensor, Tensor]:
    never = rates.new_zeros(()) if skip is None else skip.reshape(()).to(rates.device, torch.float32)
    return rates if inverse is None else inverse.reshape(()).to(rates.device), never


@functools.lru_cache(maxsize=64)
def kept(weight: Cast | None, moments: Cast) -> KeptPlan | None:
    """Return how weights rounded by a cast, if any, and moments are kept; None if no kernel does it.

    Moments are in fp32, bf16, or codes of 4 or 8 bits in blocks whose scale is a power of two.
    """
    nearest = Cast(FORMATS["fp32"])
    rounding = plan(nearest if weight is None else weight, torch.float32)
    if isinstance(moments.format, ScaledFormat):
        found, size, bits = planned(moments, torch.float32, True), moments.format.scope.size, moments.format.bits
        is_known = found is not None and found.sharing.power and found.sharing.direct and bits in (4, 8)
        if found is None or not is_known or not 1 < size <= LONGEST_BLOCK:
            return None
        found = found._replace(layout=found.layout._replace(packed=bits == 4))
        return KeptPlan(rounding, found, size, "codes", weight is not None)
    like = planned(parse("mxfp8"), torch.float32, True)  # of which nothing but form and numbers is read
    assert like is not None
    form, numbers = plan(moments, torch.float32)
    return KeptPlan(rounding, like._replace(form=form, numbers=numbers), 32, str(moments.format), weight is not None)


def check(given: Sequence[Tensor], inverse: Tensor | None, found: Tensor, histogram: Tensor | None) -> Tensor:
    """Unscale gradients of one dtype in place; set `found` to 1 if an element is infinite or NaN.

    Return the largest magnitude of each gradient before unscaling, fp32. Counts by exponent are added to `histogram`,
    int32 [256].
    """
    largest = torch.zeros(len(given), dtype=torch.int32, device=found.device)
    if not any(one.numel() for one in given):
        return largest.view(torch.float32)
    where = table([given])
    bins = largest if histogram is None else histogram  # not read
    scale = found if inverse is None else inverse
    flags = (DTYPES[given[0].dtype], inverse is not None, histogram is not None)
    arguments = (where.addresses, where.chunks, scale, found, largest, bins, *flags)
    run(gradients.check, (len(where.chunks),), *arguments, where.aligned, where.chunk, where.block)
    return largest.view(torch.float32)
