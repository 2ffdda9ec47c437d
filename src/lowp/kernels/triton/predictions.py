"""Autoflex on a device: what the writes of a step do to a table, in one launch."""

from __future__ import annotations

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
    """What was seen of the entries that were written, a row each: see `lowp.kernels.int16.cpu_int16.Seen`."""

    places: Tensor  # int32
    mantissa: Tensor  # int32
    nonfinite: Tensor  # bool
    vanished: Tensor  # bool
    written: Tensor | None  # bool; None where all of them count


def observe(scaling: Autoflex, columns: Sequence[Tensor], seen: Writes) -> None:
    """Update a table in place by writes at different entries; nothing is read on the host.

    `columns` are those of `lowp.kernels.int16.predictions.observe`; all have a row per entry.
    """
    count = len(seen.places)
    width = 1 << (scaling.window - 1).bit_length()
    block = block_for(seen.places, count, BLOCK)
    flags = [one.view(torch.int8) for one in (seen.nonfinite, seen.vanished)]
    flags.append(flags[0] if seen.written is None else seen.written.view(torch.int8))
    table = [one.view(torch.int8) if one.dtype is torch.bool else one for one in columns]
    form = Exponents(scaling.headroom, scaling.warm_headroom, scaling.min_exponent, scaling.max_exponent)
    run(
        predictions.observe, (-(-count // block),), seen.places, seen.mantissa, *flags, *table, count, scaling.limit,
        scaling.bits - 2, form, float(scaling.beta), float(scaling.gamma), seen.written is not None, scaling.adapt,
        scaling.window, width, width.bit_length() - 1, block,
    )  # fmt: skip
