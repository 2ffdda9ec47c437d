"""Few rows times weights in 16, 8 and 6 bits: sums in a fixed order, the same on every instruction set and in torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from levels import at_level
from torch import Tensor, nn

import lowp
from lowp import casts, kernels
from lowp.inference.modules import Stored
from lowp.kernels import cpu
from lowp.kernels.packed import few_rows
from lowp.kernels.products import fp32_products

needs_library = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3fn": torch.float8_e4m3fn}
LEVELS = (0, 1, -1)  # portable, AVX2, the best; as far as the processor has them
DTYPES = (torch.bfloat16, torch.float16)
FEWEST = {"FEW": few_rows.FEW, "FEW_OF_16_BITS": few_rows.FEW_OF_16_BITS}
# the shortest, one vector, less and more than one, a block of 512 and a piece; columns that are no pairs
MOST = 24
SHAPES = [
    (1, 1, 1),
    (1, 5, 16),
    (2, 3, 37),
    (1, 33, 8),
    (8, 2, 512),
    (9, 33, 530),
    (MOST, 4, 1100),
    (0, 3, 8),
    (2, 0, 8),
]


@pytest.fixture(autouse=True)
def _many_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "FEW", MOST)
    monkeypatch.setattr(few_rows, "FEW_OF_16_BITS", MOST)


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
            with at_level(level):
                found = few_rows.multiply(x, weight, bias)
            assert found.dtype is torch.float32 and torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_is_a_sum_that_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 700), torch.randn(40, 700).to(dtype), torch.randn(40)
    columns = list(zip(weight.double(), bias.tolist(), strict=True))
    exact = [[math.fsum([*(row * column).tolist(), b]) for column, b in columns] for row in x.double()]
    found = few_rows.multiply(x, weight, bias)
    assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).float())


@pytest.mark.parametrize("way", [way for way in kernels.available() if way in ("cpu", "reference")])
def test_extreme_numbers_are_as_in_fp32(way: str) -> None:
    weight = torch.tensor([[1.0, torch.inf, 2.0], [2.0**-133, 0.0, -1.0], [3.0, 0.0, torch.nan]]).bfloat16()
    x = torch.tensor([[3e38, 0.0, 0.0], [2.0**-149, 1.0, 1.0], [3e38, 1.0, 3e38], [0.0, -1.0, 0.0]])
    with kernels.use(way):
        found = few_rows.multiply(x, weight)
    wanted = x @ weight.float().t()
    assert torch.equal(found.nan_to_num(5.0), wanted.nan_to_num(5.0)) and torch.equal(found.isnan(), wanted.isnan())


@needs_library
@pytest.mark.parametrize("level", [*LEVELS, None])  # None: the definition
def test_every_nan_is_the_positive_one_whatever_the_processor_makes(level: int | None) -> None:
    x = torch.tensor([[math.inf, 0.0, 1.0], [1.0, math.inf, -math.inf], [-math.nan, 1.0, 1.0]])
    weight = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, -math.inf]]).bfloat16()
    with kernels.use("reference" if level is None else "cpu"), at_level(level):
        found = few_rows.multiply(x, weight)
    assert found.isnan().sum() == 7 and set(found.view(torch.int32)[found.isnan()].tolist()) == {0x7FC00000}


@needs_library
@pytest.mark.parametrize("k", [48, 53])  # read where they are; copied, with zeros behind them
@pytest.mark.parametrize("name", ["e4m3fn@fp32/row", "bf16"])
def test_rows_that_lie_apart_are_multiplied_as_those_side_by_side(name: str, k: int) -> None:
    rows = Stored(torch.randn(7, k), casts.parse(name)).rows()
    assert rows is not None
    several = rows._replace(
        memory=torch.stack([rows.memory] * 3), scales=None if rows.scales is None else torch.stack([rows.scales] * 3)
    )
    x = torch.randn(5, 3, k + 9)[:, :, 4 : 4 + k].transpose(0, 1)
    for level in LEVELS:
        with at_level(level):
            wanted = [few_rows.multiply(one.contiguous(), rows) for one in x]
            assert torch.equal(few_rows.multiply(x, several), torch.stack(wanted))
            turned = x[0].t().contiguous().t()
            assert torch.equal(few_rows.multiply(turned, rows), wanted[0])
    with kernels.use("reference"):
        assert torch.equal(few_rows.multiply(x, several), torch.stack(wanted))


def test_many_rows_are_multiplied_in_fp32() -> None:
    x, weight = torch.randn(MOST + 1, 70), torch.randn(5, 70).bfloat16()
    assert torch.equal(few_rows.multiply(x, weight), nn.functional.linear(x, weight.float()))


# codes of 8 and 6 bits, with and without NaN, integers, and every kind of scale that they are read under
CODED = ["e4m3fn", "e5m2", "e3m2", "mxfp8", "mxfp8-e5m2", "mxfp6", "mxint8", "e4m3fn@fp32/row", "e4m3fn@fp32/tensor"]
CODED += ["e4m3fn@fp32/48", "e4m3fn@e8m0/16x16", "e5m2@e4m3fn@fp32/16"]


def coded(name: str, n: int, k: int) -> tuple[few_rows.StoredRows, Tensor]:
    """A weight in a format, and its values by `quantize`."""
    weight = torch.randn(n, k) * torch.exp(torch.randn(n, 1))
    rows = Stored(weight, casts.parse(name)).rows()
    assert rows is not None
    return rows, lowp.quantize(weight, name)


@needs_library
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0]], ids=str)
def test_codes_have_the_bits_of_the_definition_and_the_values_of_the_format(
    shape: tuple[int, int, int], name: str
) -> None:
    rows, n, k = shape
    torch.manual_seed(k)
    weight, values = coded(name, n, k)
    x, bias = torch.randn(rows, k), torch.randn(n)
    assert torch.equal(few_rows.values(weight), values)
    with kernels.use("reference"):
        wanted = few_rows.multiply(x, weight, bias)
        assert torch.equal(few_rows.values(weight), values)
    for level in LEVELS:
        with at_level(level):
            assert torch.equal(few_rows.multiply(x, weight, bias), wanted)
    exact = x.double() @ values.double().t()
    most = 2.0**-24 * (k / few_rows.SUMS + 8) * (x.abs().double() @ values.abs().double().t()) + 1e-6
    assert bool(((wanted - bias - exact).abs() <= most).all())  # of a sum of fp32 in this order


@pytest.mark.parametrize("level", [*LEVELS, None])
def test_a_code_that_is_no_number_stays_one(level: int | None) -> None:
    if level is not None and cpu.library() is None:
        pytest.skip("the C++ library was not built")
    with kernels.use("reference" if level is None else "cpu"), at_level(level):
        for name, code in (("e4m3fn", 0x7F), ("e4m3fn", 0xFF), ("e5m2", 0xFD)):
            weight = few_rows.StoredRows(torch.tensor([[1, code]], dtype=torch.uint8), 2, casts.parse(name).element)
            assert few_rows.multiply(torch.ones(1, 2), weight).isnan().all()


@pytest.mark.parametrize("name", ["e4m3fnuz", "e5m2fnuz", "e3m4", "int8-affine", "e4m3fn@fp32/8", "e5m7"])
def test_formats_that_are_not_read_as_codes_are_multiplied_by_their_values(name: str) -> None:
    weight, x = torch.randn(7, 40), torch.randn(2, 40)
    stored = Stored(weight, casts.parse(name))
    assert stored.rows() is None
    assert torch.equal(stored.product(x, None), nn.functional.linear(x, lowp.quantize(weight, name)))


def test_many_rows_read_codes_in_panels_not_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "PANEL", 64 * 40)
    for name in ("mxfp8", "int4", "bf16"):
        layer, x = nn.Linear(40, 150), torch.randn(MOST + 1, 40)
        served = lowp.quantize_model(layer, name)
        wanted = nn.functional.linear(x, lowp.quantize(layer.weight.detach(), name).float(), layer.bias)
        asked: list[int] = []
        multiplied = nn.functional.linear

        def linear(*given: Any, into: list[int] = asked, call: Any = multiplied) -> Tensor:
            into.append(given[1].shape[0])
            return call(*given)  # type: ignore[no-any-return]

        with monkeypatch.context() as patch, kernels.use("bitwise"):
            patch.setattr(few_rows.F, "linear", linear)
            torch.testing.assert_close(served(x), wanted, rtol=1e-5, atol=1e-5)
        assert asked == [64, 64, 22]


@needs_library
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3fn", "mxfp8", "mxfp4", "int4"])
def test_many_rows_are_products_of_the_library_which_reads_16_bits_as_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu.has_multiply_add():
        pytest.skip("the processor has no fused multiply-add")
    layer, x = nn.Linear(40, 150), torch.randn(MOST + 1, 40)
    served = lowp.quantize_model(layer, name)
    values = lowp.quantize(layer.weight.detach(), name).float()
    monkeypatch.setattr(few_rows.F, "linear", lambda *given: pytest.fail("by torch"))
    if name in ("bf16", "fp16"):
        monkeypatch.setattr(few_rows, "values", None)  # no fp32 weight is made
    assert torch.equal(served(x), fp32_products.multiply(x, values.t(), layer.bias.detach()))


@needs_library
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3fn"])
def test_a_served_layer_reads_its_weights_as_they_are_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(37, 6)
    x = torch.randn(2, 37)
    served = lowp.quantize_model(layer, name)
    weight = lowp.quantize(layer.weight.detach(), name).to(DTYPE[name])
    wanted = few_rows.multiply(x, served.weight.rows(), layer.bias)
    assert torch.equal(served.weight.rows().memory, weight)
    monkeypatch.setattr(Stored, "values", None)  # no fp32 weight is made
    assert torch.equal(served.weight.product(x, served.bias), wanted)


@pytest.mark.parametrize("rows", [3, MOST, MOST + 1])
@pytest.mark.parametrize("name", ["bf16", "e4m3fn@fp32/16"])
def test_several_weights_are_multiplied_each_by_its_rows(name: str, rows: int) -> None:
    weights, x = torch.randn(3, 5, 32), torch.randn(3, rows, 32)
    several: list[few_rows.StoredRows] = []
    for one in weights:
        if name == "bf16":
            stored = few_rows.stored_rows(one.bfloat16(), 32)
        else:
            coded = kernels.encode(one, name)
            assert isinstance(coded, lowp.Quantized)
            stored = few_rows.stored_rows(coded.payload, 32, casts.parse(name), coded.scale)
        assert stored is not None
        several.append(stored)
    scales = (
        None if several[0].scales is None else torch.stack([one.scales for one in several if one.scales is not None])
    )
    together = several[0]._replace(memory=torch.stack([one.memory for one in several]), scales=scales)
    found = few_rows.multiply(x, together)
    for given, one, result in zip(x, several, found, strict=True):
        torch.testing.assert_close(result, given @ few_rows.values(one).t())


def test_a_scale_of_nan_makes_numbers_of_nan() -> None:
    coded = kernels.encode(torch.tensor([[1.0] * 32, [torch.nan] * 32]), "mxfp8")
    assert isinstance(coded, lowp.Quantized)
    stored = few_rows.stored_rows(coded.payload, 32, casts.parse("mxfp8"), coded.scale)
    assert stored is not None
    assert few_rows.scales_of(stored)[0].isfinite().all() and few_rows.scales_of(stored)[1].isnan().all()


@pytest.mark.parametrize(("name", "most"), [("bf16", 2), ("fp16", 2), ("e4m3fn", 8), ("mxfp6", 8), ("mxint8", 8)])
def test_weights_in_16_bits_have_fewer_rows_that_are_few_than_codes(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in FEWEST.items():
        monkeypatch.setattr(few_rows, constant, value)
    weight = Stored(torch.ones(5, 32), casts.parse(name)).rows()
    assert weight is not None
    asked: list[int] = []

    def linear_of(x: Tensor) -> few_rows.LinearProduct:
        asked.append(len(x))
        return few_rows.by_torch

    for rows in (1, most, most + 1):
        found = few_rows.multiply(torch.ones(rows, 32), weight, None, linear_of)
        assert torch.equal(found, torch.full((rows, 5), 32.0))
    assert asked == [most + 1]


@pytest.mark.parametrize("name", ["bf16", "e4m3fn"])
@pytest.mark.parametrize(("of_x", "of_weight"), [("cpu", "meta"), ("meta", "cpu"), ("meta", "meta")])
def test_what_is_on_an_accelerator_is_multiplied_there(name: str, of_x: str, of_weight: str) -> None:
    weight = Stored(torch.ones(5, 32), casts.parse(name)).rows()
    assert weight is not None
    weight = weight._replace(memory=weight.memory.to(of_weight))
    seen: list[tuple[str, str]] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((x.device.type, weight.device.type))
        return torch.zeros(1, 5)

    few_rows.multiply(torch.ones(1, 32, device=of_x), weight, None, lambda x: linear)
    assert seen == [(of_x, of_weight)]


@pytest.mark.parametrize("way", [way for way in kernels.available() if way in ("cpu", "reference")])
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "e4m3fn@fp32/16", "mxfp6"])
def test_rows_are_read_from_the_first_on_in_any_layout(name: str, way: str) -> None:
    weight, values = coded(name, 7, 64) if name != "bf16" else (None, torch.randn(7, 64).bfloat16().float())
    weight = few_rows.stored_rows(values.bfloat16(), 64) if weight is None else weight
    assert weight is not None
    turned = weight._replace(memory=weight.memory.t().contiguous().t())
    if weight.scales is not None:
        turned = turned._replace(scales=weight.scales.t().contiguous().t())
        weight = weight._replace(scales=turned.scales)
    x = torch.randn(2, 64)
    with kernels.use(way):
        for one in (weight, turned):
            assert torch.equal(few_rows.values(one), values)
            assert torch.equal(few_rows.values(one, 3), values[3:])
            assert torch.equal(few_rows.values(one, 3, 2), values[3:5])
            torch.testing.assert_close(few_rows.multiply(x, one), x @ values.t())


READ = ["e5m2", "e4m3fn", "e3m2", "e2m3", "i8", "i8s", "e4m3finite", "e5m0fn"]
NOT_READ = ["e6m1", "e7m0fn", "e7m0nuz", "e4m3", "e5m2fn", "e5m2finite", "e4m3fnuz", "ue5m3", "ue4m2fn", "e2m1", "i4"]
NOT_READ += ["i16", "e5m10", "e6m1finite"]


@pytest.mark.parametrize("name", READ + NOT_READ)
def test_formats_of_8_and_6_bits_that_fp16_has_are_read(name: str) -> None:
    assert few_rows.is_read.__wrapped__(casts.parse(name).element) is (name in READ)
