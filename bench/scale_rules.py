"""Scales of MX blocks by each rule beside torchao's `to_mx`: every block maximum in bf16, and a sample in fp32.

Prints for each format, rule and dtype how many scales differ, and how many codes under equal scales. The last column
tells how many of these codes are under the smallest scale, 2**-127: torchao divides by 2**-126 there.

    python bench/scale_rules.py            # needs torchao: pip install '.[bench]'
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import lowp
from lowp.casts import ScalingSpec

ELEMENTS = {"mxfp8": "float8_e4m3fn", "mxfp8-e5m2": "float8_e5m2", "mxfp4": "float4_e2m1fn_x2"}
DTYPES = (torch.bfloat16, torch.float32)


def maxima(dtype: torch.dtype) -> Tensor:
    """Return all positive finite numbers of bf16, or of fp32 those at 1,024 places of each power of two, and after."""
    if dtype is torch.bfloat16:
        return torch.arange(0, 0x7F80).to(torch.int16).view(dtype)
    places = torch.arange(0, 1 << 23, 1 << 13)
    bits = (torch.arange(0, 255)[:, None] << 23) + torch.cat([places, places + 1])
    return bits.flatten().to(torch.int32).view(dtype)


def compare(format: str, rule: str, x: Tensor) -> tuple[int, int, int]:
    """Return how many blocks have another scale than torchao's, other codes, and such under the smallest scale."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    scales, codes = to_mx(x, getattr(torch, ELEMENTS[format]), 32, ScaleCalculationMode[rule.upper()])
    ours = lowp.encode(x, f"{format}:{rule}", packed=format == "mxfp4")
    differ = scales.view(torch.uint8).flatten() != ours.scale.flatten()
    others = (codes.view(torch.uint8).reshape(len(x), -1) != ours.payload.view(torch.uint8)).any(1) & ~differ
    return int(differ.sum()), int(others.sum()), int((others & (ours.scale.flatten() == 0)).sum())


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print(f"{'format':12}{'rule':8}{'dtype':10}{'blocks':>9}{'scales':>9}{'codes':>9}{'of these at 2^-127':>20}")
    for dtype in DTYPES:
        largest = maxima(dtype)
        x = torch.zeros(len(largest), 32, dtype=dtype)
        x[:, 0], x[:, 1], x[:, 2] = largest, -largest / 3, largest * 0.7
        for format in ELEMENTS:
            for rule in ScalingSpec.RULES:
                scales, codes, smallest = compare(format, rule, x)
                name = str(dtype).removeprefix("torch.")
                print(f"{format:12}{rule:8}{name:10}{len(x):9,}{scales:9,}{codes:9,}{smallest:20,}")


if __name__ == "__main__":
    main()
