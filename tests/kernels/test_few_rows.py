"""Few rows times weights in 16 bits: sums in fp64 in a fixed order, the same on every instruction set and in torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lowp
from lowp import kernels
from lowp.inference.modules import Stored
from lowp.kernels import cpu
from lowp.kernels.packed import few_rows

needs_library = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
LEVELS = (0, 1, -1)  # portable, AVX2, the best; as far as the processor has them
DTYPES = (torch.bfloat16, torch.float16)
# the shortest, one vector, less and more than one, a block of 512 and a piece; columns that are no pairs
SHAPES = [(1, 1, 1), (1, 5, 16), (2, 3, 37), (8, 2, 512), (9, 33, 530), (few_rows.FEW, 4, 1100), (0, 3, 8), (2, 0, 8)]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set_has_the_bits_of_the_definition(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, n, k = shape
    torch.manual_seed(k)
    # magnitudes far apart, so that sums in another order have other bits
    x = torch.randn(rows, k) * 2.0 ** torch.randint(-40, 40, (rows, k))
    weight = (torch.randn(n, k) * 2.0 ** torch.randint(-12, 12, (n, k))).to(dtype)
    for bias in (None, torch.randn(n)):
        with kernels.use("reference"):
            wanted = few_rows.multiply(x, weight, bias)
        for level in LEVELS:
            found = few_rows.multiply(x, weight, bias, level)
            assert found.dtype is torch.float32 and torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_is_a_sum_that_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 700), torch.randn(40, 700).to(dtype), torch.randn(40)
    columns = list(zip(weight.double(), bias.tolist(), strict=True))
    exact = [[math.fsum([*(row * column).tolist(), b]) for column, b in columns] for row in x.double()]
    found = few_rows.multiply(x, weight, bias)
    assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).float())


def test_extreme_numbers_are_as_in_fp32() -> None:
    weight = torch.tensor([[1.0, torch.inf, 2.0], [2.0**-133, 0.0, -1.0], [3.0, 0.0, torch.nan]]).bfloat16()
    x = torch.tensor([[3e38, 0.0, 0.0], [2.0**-149, 1.0, 1.0], [3e38, 1.0, 3e38]])
    found = few_rows.multiply(x, weight)
    wanted = x @ weight.float().t()
    assert torch.equal(found.nan_to_num(5.0), wanted.nan_to_num(5.0)) and torch.equal(found.isnan(), wanted.isnan())


@needs_library
@pytest.mark.parametrize("level", [*LEVELS, None])  # None: the definition
def test_every_nan_is_the_positive_one_whatever_the_processor_makes(level: int | None) -> None:
    x = torch.tensor([[math.inf, 0.0, 1.0], [1.0, math.inf, -math.inf], [-math.nan, 1.0, 1.0]])
    weight = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, -math.inf]]).bfloat16()
    with kernels.use("reference" if level is None else "cpu"):
        found = few_rows.multiply(x, weight, level=level)
    assert found.isnan().sum() == 7 and set(found.view(torch.int32)[found.isnan()].tolist()) == {0x7FC00000}


def test_many_rows_are_multiplied_in_fp32() -> None:
    x, weight = torch.randn(few_rows.FEW + 1, 70), torch.randn(5, 70).bfloat16()
    assert torch.equal(few_rows.multiply(x, weight), nn.functional.linear(x, weight.float()))


@needs_library
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_served_layer_reads_its_weights_as_they_are_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(37, 6)
    x = torch.randn(2, 37)
    served = lowp.quantize_model(layer, name)
    weight = layer.weight.detach().to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[name]))
    wanted = few_rows.multiply(x, weight, layer.bias)
    monkeypatch.setattr(Stored, "values", None)  # no fp32 weight is made
    assert torch.equal(served.weight.product(x, served.bias), wanted)
