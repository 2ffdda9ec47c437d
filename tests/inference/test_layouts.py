"""Quantized models read activations as they lie."""

from __future__ import annotations

import pytest
import torch
from layouts import layouts
from torch import nn

from lowp.inference import attention, quantize_model

FORMATS = ("int8", "int4", "mxfp4", "nvfp4", "if4", "ternary", "binary", "mxfp8", "e4m3fn", "e2m3", "bf16", "dfp16")
MODELS = {
    "few rows": (lambda: nn.Linear(64, 32), (3, 64)),
    "many rows": (lambda: nn.Linear(64, 32), (70, 64)),
    "rows in batches": (lambda: nn.Linear(64, 32), (2, 5, 64)),
    "images": (lambda: nn.Conv2d(16, 8, 3), (2, 16, 6, 6)),
    "images in groups": (lambda: nn.Conv2d(16, 8, 3, groups=2, padding=1), (2, 16, 6, 6)),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_activations_are_read_as_they_lie(kind: str, format: str) -> None:
    make, shape = MODELS[kind]
    model, x = quantize_model(nn.Sequential(make()), format), torch.randn(shape)
    with torch.no_grad():
        wanted = model(x)
        for layout, lying in layouts(x):
            seen = model(lying)
            torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()), msg=layout)


def test_attention_of_bytes_reads_its_operands_as_they_lie() -> None:
    operands = [torch.randn(2, 3, 10, 16) for _ in range(3)]
    wanted = attention(*operands)
    for place, one in enumerate(operands):
        for layout, lying in layouts(one):
            seen = attention(*operands[:place], lying, *operands[place + 1 :])
            torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-5, msg=f"{layout} {place}")
