"""Products: `contract`, which chooses how one runs, and programs of casts and products."""

from lowp.kernels.products.contraction import (
    contract,
    contract_packed,
    is_native,
    is_torchs_own,
    ready_operand,
    sum_of_rows,
    torchs_own_device,
)

__all__ = [
    "contract",
    "contract_packed",
    "is_native",
    "is_torchs_own",
    "ready_operand",
    "sum_of_rows",
    "torchs_own_device",
]
