"""Autoflex on a device: what the writes of a step do to a table, in one launch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.kernels.triton.device import predictions
from lowp.kernels.triton.launch import block_for, run
from lowp.scaling import Autoflex

BLOCK = 8  # entries of a program: a step has some hundred of them, and each a window


class Exponents(NamedTuple):
    """The numbers of a scaling by which an exponent follows from a maximum."""

    headroom: int
    warm_headroom: int
    lowest: int
    highest: int


class Writes(NamedTuple):
    """The entries that were written, and what was seen, by entry."""

    places: Tensor  # int32
    written: Tensor | None  # bool, of each of them; None where all of them count
    rows: Tensor  # int64, of all entries: see `lowp.kernels.int16.entries`
    is_result: Tensor  # bool
    faulty: Tensor  # bool


def observe(scaling: Autoflex, columns: Sequence[Tensor], seen: Writes) -> None:
    """Update a table in place by writes at different entries, and forget them; nothing is read on the host.

    `columns`: those of `AutoflexState` in order, the exponent of the previous write, and the counts raises_needed,
    raises_in_time, headroom_sum and measured; all have a number per entry.
    """
    count = len(seen.places)
    width = 1 << (scaling.window - 1).bit_length()
    block = block_for(seen.places, count, BLOCK)
    results, faulty = seen.is_result.view(torch.int8), seen.faulty.view(torch.int8)
    written = results if seen.written is None else seen.written.view(torch.int8)  # not looked at then
    table = [one.view(torch.int8) if one.dtype is torch.bool else one for one in columns]
    form = Exponents(scaling.headroom, scaling.warm_headroom, scaling.min_exponent, scaling.max_exponent)
    run(
        predictions.observe, (-(-count // block),), seen.places, written, seen.rows, results, faulty, *table, count,
        scaling.limit, scaling.bits - 2, form, float(scaling.beta), float(scaling.gamma), seen.written is not None,
        scaling.adapt, scaling.window, width, width.bit_length() - 1, block,
    )  # fmt: skip
