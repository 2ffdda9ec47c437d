"""Number formats as data: one frozen row per format, from which every limit is derived. Imports no torch.

A new format is a new row of `FORMATS` (or a spelling such as ``e5m7`` given to `parse`): tables, limits, listings,
kernels and tests all follow from the row.

Sources: IEEE 754-2019 (binary16/32/64); OCP OFP8 1.0 (e4m3fn, e5m2); OCP MX 1.0 (e3m2, e2m3, e2m1, e8m0, blocks of 32);
Koester et al. 2017, arXiv 1711.02213 (flex16+5); Das et al. 2018, arXiv 1802.00930 (DFP-16).
"""

from lowp.formats.scaled import Format, PowerOfTwo, ScaledFormat, Scope
from lowp.formats.table import ALIASES, parse
from lowp.formats.types import FORMATS, FloatFormat, IntFormat, Specials

__all__ = [
    "ALIASES",
    "FORMATS",
    "FloatFormat",
    "Format",
    "IntFormat",
    "PowerOfTwo",
    "ScaledFormat",
    "Scope",
    "Specials",
    "parse",
]
