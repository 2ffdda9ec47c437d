"""Rounding, packing and statistics of tensors, by the implementation that `dispatch` chooses.

`reference` is the definition (fp64, eager). `bitwise` is integer arithmetic in torch (any device, compiles). `native`
uses torch's dtypes for the few casts where they are exact. `cpu` is the C++ library. All give the same bits; see
kernels/README.md.
"""

from lowp.kernels.casts.functions import decode, dequantize, encode, quantize, statistics
from lowp.kernels.choose.dispatch import IMPLEMENTATIONS, available, use
from lowp.kernels.numbers.statistics import Statistics
from lowp.kernels.products import contract

__all__ = [
    "IMPLEMENTATIONS",
    "Statistics",
    "available",
    "contract",
    "decode",
    "dequantize",
    "encode",
    "quantize",
    "statistics",
    "use",
]
