"""What went wrong at the sites of a step: values that are not finite, and values beyond the largest of the format."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.exponents.device_table import DeviceTable
from lowp.exponents.sites import is_result
from lowp.exponents.table import ExponentTable

__all__ = ["cut_off_sites", "faulty_sites", "nonfinite_flags", "warn_of_cut_off"]


def nonfinite_flags(tables: Iterable[ExponentTable]) -> dict[str, Tensor]:
    """Return whether what was written in this step was not finite, by site, for the sites of devices; reads nothing."""
    flags: dict[str, Tensor] = {}
    for table in tables:
        if isinstance(table, DeviceTable):
            names = list(table.names)
            flags |= {names[index]: flag for index, flag in table.flags.items()}
    return flags


def faulty_sites(noted: Sequence[str], flags: dict[str, Tensor]) -> list[str]:
    """Return the sites noted on the host and those whose flag is set; [] if all of them are results.

    Waits for an accelerator, once, if there are flags.
    """
    found = list(noted)
    if flags:
        found += [name for name, is_bad in zip(flags, torch.stack([*flags.values()]).tolist(), strict=True) if is_bad]
    return [] if all(is_result(site) for site in found) else found


def cut_off_sites(tables: Iterable[ExponentTable], most: bool = False) -> list[str]:
    """Return the sites of a CPU where numbers were cut off in this step that no exponent of the format can hold.

    With `most`, the results of which most numbers were cut off, as exponents predicted from earlier steps hold less.
    """
    found = []
    for table in tables:
        if cut_off := table.cut_most() if most else table.cut_off():
            names = list(table.names)
            found += [names[index] for index in sorted(cut_off)]
    return [site for site in found if is_result(site)] if most else found


def warn_of_cut_off(cast: Cast, site: str) -> None:
    """Warn that numbers were cut off at a site."""
    warnings.warn(
        f"numbers beyond the largest of {cast.format} are cut off, first in the {site}. If this "
        "continues, look at the learning rate and at the scale of inputs and loss",
        UserWarning,
        stacklevel=3,
    )
