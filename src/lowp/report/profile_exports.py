"""Exports of a profile: a CSV file with one line per tensor, and histograms for TensorBoard."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from lowp import files
from lowp.errors import Unavailable
from lowp.numerics.prediction import effect
from lowp.numerics.record import Record

_COLUMNS = (
    "module",
    "op",
    "role",
    "phase",
    "count",
    "zeros",
    "nan",
    "inf",
    "maximum",
    "root_mean_square",
    "lowest",
    "highest",
)
_FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2")


def to_csv(record: Record, path: Path) -> None:
    """Write one line per tensor: counts, range, and the predicted effect of some formats."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    effects = [f"{effect_name}_{name}" for name in _FORMATS for effect_name in ("flushed", "overflow", "sqnr")]
    writer.writerow([*_COLUMNS, *effects])
    for key, tensor in record.tensors.items():
        row: list[Any] = [*key, *(getattr(tensor, name) for name in _COLUMNS[4:])]
        for name in _FORMATS:
            predicted = effect(tensor, name)
            row += [predicted.flushed, predicted.overflow, predicted.signal_to_noise]
        writer.writerow(["" if value is None else value for value in row])
    with files.replacing(path) as file:
        file.write(text.getvalue().encode())


def to_tensorboard(record: Record, folder: Path) -> None:
    """Write a histogram of exponents per tensor, and the loss; raise Unavailable without the package tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Unavailable("writing TensorBoard files needs the package tensorboard: pip install tensorboard") from None
    with SummaryWriter(str(folder)) as writer:
        for key, tensor in record.tensors.items():
            if not tensor.nonzero:
                continue
            # every octave from the first to the last: a bucket reaches from the previous limit to its own
            filled = np.flatnonzero(tensor.octaves)
            present = [
                (index - 127, int(tensor.octaves[index])) for index in range(int(filled[0]), int(filled[-1]) + 1)
            ]
            writer.add_histogram_raw(
                tag=f"{key.role}/{key.module or 'model'}/{key.op}",
                min=present[0][0],
                max=present[-1][0] + 1,
                num=sum(count for _, count in present),
                sum=sum(exponent * count for exponent, count in present),
                sum_squares=sum(exponent * exponent * count for exponent, count in present),
                bucket_limits=[exponent + 1 for exponent, _ in present],
                bucket_counts=[count for _, count in present],
                global_step=max(record.sampled, default=0),
            )
        for step in record.steps:
            for name in ("loss", "scale", "largest_gradient"):
                if getattr(step, name) is not None:
                    writer.add_scalar(name, getattr(step, name), step.step)
