"""Sums of products that are not carried in fp32: the running sum is rounded to fp16 or bf16 after every block.

This is the definition, made of torch's ops, and it is as fast as it needs to be to show what such a unit loses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.errors import Unavailable
from lowp.ops.forms import Form
from lowp.policy import Accumulation

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def accumulated(form: Form, slot: int, left: Tensor, right: Tensor, accumulation: Accumulation) -> Tensor:
    """Return a product in fp32 whose sum was carried in fp16 or bf16.

    The contracted dimension is walked in its order in blocks of n products; each block is summed in fp32, then
    sum = round(sum + block), nearest-even. Where several dimensions are contracted, the last runs fastest.
    """
    if accumulation.format not in _DTYPES:
        raise Unavailable(
            f"accumulate={accumulation} needs integer elements under a shared scale, such as dfp16; "
            "these operands are floating-point: take fp32, fp16/n or bf16/n"
        )
    rows, columns, finish = form.matrices(slot, left, right)
    dtype = _DTYPES[accumulation.format]
    running = rows.new_zeros(*rows.shape[:-1], columns.shape[-1])
    for start in range(0, rows.shape[-1], accumulation.block):
        stop = start + accumulation.block
        block = rows[..., start:stop] @ columns[..., start:stop, :]
        running = (running + block).to(dtype).float()
    return finish(running)
