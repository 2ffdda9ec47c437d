"""The byte, nibble and sign products: exact or in a fixed order, the same on every instruction set and in torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from levels import at_level
from torch import Tensor

import lowp
from lowp import casts, kernels
from lowp.errors import InvalidInput, Unavailable
from lowp.formats import ScaledFormat
from lowp.inference.modules import Nibble
from lowp.kernels import cpu
from lowp.kernels.numbers import scaled
from lowp.kernels.packed import byte_products, byte_rows, few_bits
from lowp.kernels.packed.byte_rows import Activations, Bytes, Range

needs_library = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
LEVELS = (0, 1, -1)  # portable, AVX2, the best; as far as the processor has them


def at_levels(call: Callable[[], Tensor]) -> Iterator[Tensor]:
    """Yield the results of a call under each of the levels."""
    for level in LEVELS:
        with at_level(level):
            yield call()


def _weights(kind: str, n: int, k: int) -> Tensor:
    if kind in ("largest", "least"):
        return torch.full((n, k), 127 if kind == "largest" else -128, dtype=torch.int8)
    if kind == "uniform":
        return torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return (torch.randn(n, k) * 35).clamp(-127, 127).to(torch.int8)


@needs_library
@pytest.mark.parametrize("highest", [127, 255])
@pytest.mark.parametrize("kind", ["normal", "uniform", "largest", "least"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 33, 70), (100, 16, 1100), (97, 17, 72)])
def test_sums_of_bytes_never_saturate(m: int, n: int, k: int, kind: str, highest: int) -> None:
    torch.manual_seed(m)
    weight, scales, bias = _weights(kind, n, k), torch.rand(n), torch.randn(n)
    panels = byte_products.pack(weight, scales, highest)
    assert torch.equal(byte_products.unpacked(panels), weight)
    for least in (0, highest):  # any bytes, and the largest alone
        payload = torch.zeros(m, -(-k // 8) * 8, dtype=torch.uint8)
        payload[:, :k] = torch.randint(least, highest + 1, (m, k))
        a = Bytes(payload, 0.37, 31, highest)
        sums = (payload[:, :k].double() - 31) @ weight.double().t()
        wanted = sums.float() * (torch.tensor(0.37) * scales) + bias
        for level in LEVELS:
            with at_level(level):
                assert torch.equal(byte_products.multiply(a, panels, bias), wanted)
        with kernels.use("reference"):
            assert torch.equal(byte_products.multiply(a, panels, bias), wanted)


@needs_library
@pytest.mark.parametrize("over", [127, 255, Range(0.02, 60, 127)])
def test_activations_become_bytes_and_are_multiplied_in_one_call_as_in_two(over: int | Range) -> None:
    torch.manual_seed(2)
    panels = byte_products.pack(_weights("normal", 33, 70), torch.rand(33), 255)
    x, bias = torch.randn(9, 70), torch.randn(33)
    for level in LEVELS:
        with at_level(level):
            given = byte_rows.own_range(x, over) if isinstance(over, int) else over
            wanted = byte_products.multiply(byte_rows.to_bytes(x, *given), panels, bias)
            assert torch.equal(byte_products.multiply(Activations(x, over), panels, bias), wanted)


@needs_library
@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="oneDNN held to less than VNNI sums bytes wrongly")
@pytest.mark.parametrize("highest", [127, 128, 255])
def test_torchs_own_product_of_bytes_gives_the_same_sums(highest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scales, bias = _weights("uniform", 33, 70), torch.rand(33), torch.randn(33)
    a = Bytes(torch.randint(0, highest + 1, (7, 72), dtype=torch.uint8), 0.37, 31, highest)
    found = []
    for reported in (False, True):  # as the processor's report would have it
        monkeypatch.setattr(byte_products, "multiplies_bytes", lambda reported=reported: reported)
        panels = byte_products.pack(weight, scales, highest)
        assert panels.memory.ndim == (2 if reported else 4)
        assert torch.equal(byte_products.unpacked(panels), weight)
        found.append(byte_products.multiply(a, panels, bias))
    assert torch.equal(*found)


@needs_library
def test_the_ways_are_the_widest_that_the_weights_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_products, "multiplies_bytes", lambda: False)
    weight = torch.zeros(16, 96, dtype=torch.int8)
    weight[3, 32:34] = 127  # two of one sign and a third: not four at once, unless 64 times them is taken off
    weight[3, 36] = 5
    weight[3, 64:66] = torch.tensor([127, -127])  # of two signs: no sum is larger than one of them
    assert byte_products.pack(weight, torch.ones(16), 127).ways.tolist() == [[0, 3, 0]]
    assert byte_products.pack(weight, torch.ones(16), 255).ways.tolist() == [[0, 2, 0]]
    weight[3, 37] = -128  # of which 64 times four would leave 16 bits
    assert byte_products.pack(weight, torch.ones(16), 127).ways.tolist() == [[0, 1, 0]]


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_activations_become_bytes_as_torch_rounds_them(level: int) -> None:
    x = torch.cat(
        [
            torch.randn(3, 45) * 5,
            torch.tensor([[0.5, 1.5, 2.5, -0.5, torch.inf, -torch.inf, torch.nan] * 6])[:, :45].expand(3, -1),
        ],
        1,
    )
    for scale, zero, highest in ((1.0, 3, 127), (0.1, 0, 255), (0.037, 64, 127)):
        with at_level(level):
            found = byte_rows.to_bytes(x, scale, zero, highest)
        with kernels.use("reference"):
            wanted = byte_rows.to_bytes(x, scale, zero, highest)
        assert torch.equal(found.payload, wanted.payload)
        assert bool((found.payload[:, x.shape[1] :] == zero).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("highest", [127, 255])
def test_activations_are_multiplied_as_the_bytes_that_they_become(level: int, highest: int) -> None:
    torch.manual_seed(0)
    panels = byte_products.pack(_weights("uniform", 33, 70), torch.rand(33), highest)
    ranges: tuple[int | Range, ...] = (highest, Range(0.037, 60, highest))
    given = torch.randn(9, 80)[:, 3:73]  # not side by side in memory
    zeros, positive = torch.zeros(2, 70), given.abs() + 1
    infinite = given.clone()
    infinite[4, 5] = torch.inf
    nan = given.clone()
    nan[8, 69] = torch.nan
    for x in (given, given.t().contiguous().t(), -positive, positive, zeros, given * 1e-44, infinite, nan, given[:0]):
        for over in ranges:
            with at_level(level):
                found, range_ = byte_products.multiply(Activations(x, over), panels), byte_rows.own_range(x, highest)
            with kernels.use("bitwise"):
                own = byte_rows.own_range(x, highest)
                wanted = byte_products.multiply(byte_rows.Activations(x, over), panels)
            assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
            assert str(range_) == str(own)  # NaN too


INTEGERS = [code - (code >> 3 << 4) for code in range(16)]
TABLES = {"i4": INTEGERS, "e2m1": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]}
TABLES |= {"e3m0": [0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64]}


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("name", TABLES)
def test_four_bit_products_are_those_of_their_definition(group: int, name: str) -> None:
    torch.manual_seed(0)
    levels, x, bias = TABLES[name], torch.randn(3, 200), torch.randn(21)
    codes, scales = torch.randint(0, 16, (21, 200)), torch.rand(21, -(-200 // group))
    codes[4], x[1, :64] = 15, -x[0].abs().max()  # the largest sums that there are
    codes[5] = 7
    x[2, 64:128] *= 1e-36  # fewer bits than below the leading one of a group
    x[2, 128:160] = 0
    packed = few_bits.pack_codes(codes, scales, levels, group)
    values = torch.tensor(levels).float()[codes] * scales.repeat_interleave(group, 1)[:, :200]
    assert torch.equal(few_bits.code_values(packed), values)
    found = few_bits.multiply_codes(x, packed, bias)
    assert all(torch.equal(one, found) for one in at_levels(lambda: few_bits.multiply_codes(x, packed, bias)))
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_codes(x, packed, bias), found)
    wanted = x.double() @ values.double().t() + bias
    error = (found.double() - wanted).abs() / (x.double().abs() @ values.double().abs().t() + bias.abs())
    assert float(error.max()) < 2**-18
    many = x.repeat(few_bits.FEW // 3 + 1, 1)
    assert torch.equal(few_bits.multiply_codes(many, packed, bias), torch.nn.functional.linear(many, values, bias))


@pytest.mark.parametrize("format", ["mxfp4", "e2m1@e4m3fn/16", "e2m1@e5m2/32", "e2m1@2^-40..20/32"])
def test_scales_in_bytes_are_read_as_the_numbers_that_they_are(format: str) -> None:
    torch.manual_seed(0)
    scaled_format = casts.parse(format).format
    assert isinstance(scaled_format, ScaledFormat)
    size, read = scaled_format.scope.size, few_bits.byte_scales(scaled_format, 0.75)
    assert read is not None
    codes, x = torch.randint(0, 16, (21, 200)), torch.randn(3, 200)
    scales = torch.randint(0, 50, (21, -(-200 // size)), dtype=torch.uint8)
    scales[0] = 0  # with e8m0 and fp32 a subnormal number
    numbers = scaled.read_scales(scales, scaled_format).float() * 0.75
    packed = few_bits.pack_codes(codes, scales, TABLES["e2m1"], size, read)
    plain = few_bits.pack_codes(codes, numbers, TABLES["e2m1"], size)
    assert packed.scales.nbytes * 4 == plain.scales.nbytes
    assert torch.equal(few_bits.code_values(packed), few_bits.code_values(plain))
    found = few_bits.multiply_codes(x, plain)
    assert all(torch.equal(one, found) for one in at_levels(lambda: few_bits.multiply_codes(x, packed, None)))
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_codes(x, packed), found)


@pytest.mark.parametrize("format", ["if4", "e2m1+i4s@e5m2@fp32/32", "e3m0finite+i4s@e4m3fn@fp32/16"])
def test_the_sign_of_a_scale_chooses_one_of_two_tables(format: str) -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(21, 200) * torch.exp(torch.randn(21, 1)), torch.randn(3, 200), torch.randn(21)
    weight[3], weight[4, :16] = 0, 1e-9  # scales of zero
    packed = Nibble(weight, casts.parse(format)).codes()
    assert packed.scales.dtype is torch.uint8 and 0.1 < (packed.scales >= 128).float().mean() < 0.9
    values = lowp.quantize(weight, format)
    assert torch.equal(few_bits.code_values(packed), values)
    assert torch.equal(few_bits.code_values(packed, 16, 5), values[16:])
    assert torch.equal(few_bits.code_values(packed, 16), values[16:])
    rows = torch.tensor([20, 4, 0, 17])
    assert torch.equal(few_bits.code_rows(packed, rows), values[rows])
    with kernels.use("reference"):
        assert torch.equal(few_bits.code_rows(packed, rows), values[rows])
    found = few_bits.multiply_codes(x, packed, bias)
    assert all(torch.equal(one, found) for one in at_levels(lambda: few_bits.multiply_codes(x, packed, bias)))
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_codes(x, packed, bias), found)
        assert torch.equal(few_bits.code_values(packed), values)
    error = (found - bias - x.double() @ values.double().t()).abs() / (x.double().abs() @ values.double().abs().t() + 1)
    assert float(error.max()) < 2**-18
    many = x.repeat(few_bits.FEW // 3 + 1, 1)
    assert torch.equal(few_bits.multiply_codes(many, packed, bias), torch.nn.functional.linear(many, values, bias))


IN_BYTES = ["e2m1@2^-40..20/row", "e2m1@2^-200..55/32", "nvfp4", "e2m1@e5m2/row", "e2m1@e8m0/32"]
NOT_IN_BYTES = ["int4", "flex16+5", "e2m1@e5m10/32", "e2m1@2^-200..56/32", "e2m1@e8m0/tensor"]
NOT_IN_BYTES += ["e2m1@e4m3fnuz/32", "e2m1@e3m2/32"]


@pytest.mark.parametrize("format", IN_BYTES + NOT_IN_BYTES)
def test_scales_that_are_no_bytes_of_blocks_or_rows_are_read_as_fp32(format: str) -> None:
    scaled_format = casts.parse(format).format
    assert isinstance(scaled_format, ScaledFormat)
    assert (few_bits.byte_scales(scaled_format, 1.0) is not None) is (format in IN_BYTES)


def test_four_bit_products_of_infinite_numbers_are_infinite() -> None:
    packed = few_bits.pack_codes(torch.full((16, 64), 3), torch.ones(16, 2), INTEGERS, 32)
    x = torch.ones(1, 64)
    x[0, 5] = torch.inf
    assert few_bits.multiply_codes(x, packed).tolist() == [[torch.inf] * 16]
    x[0, 6] = -torch.inf
    assert bool(few_bits.multiply_codes(x, packed).isnan().all())


def test_levels_are_whole_numbers_times_a_power_of_two() -> None:
    assert few_bits.whole_levels([0.0, 0.5, -1.5, 6.0]) == ([0, 1, -3, 12], 0.5)
    assert few_bits.whole_levels([2.0, 64.0]) == ([2, 64], 1.0)
    assert few_bits.whole_levels([0.5, 64.0]) is None


@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_signs_are_multiplied_by_counting_bits(length: int) -> None:
    torch.manual_seed(length)
    x, w = torch.randn(5, length), torch.randn(9, length)
    a, b = few_bits.signs(x), few_bits.signs(w)
    signs = torch.where(x < 0, -1.0, 1.0) @ torch.where(w < 0, -1.0, 1.0).t()
    wanted = signs * (a.scales[:, None] * b.scales)
    assert all(torch.equal(one, wanted) for one in at_levels(lambda: few_bits.multiply_signs(a, b)))
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_signs(a, b), wanted)
    bias = torch.arange(len(b.memory)).double()
    assert torch.equal(few_bits.multiply_signs(a, b, bias), wanted + bias.float())


@pytest.mark.parametrize("highest", [127, 255])
@pytest.mark.parametrize("levels", [[-1, 0, 1, 0], [1, -1]])
@pytest.mark.parametrize(("rows", "k"), [(1, 75), (4, 640), (20, 75)])
def test_bytes_by_codes_of_few_bits_are_exact(rows: int, k: int, levels: list[int], highest: int) -> None:
    torch.manual_seed(0)
    codes, scales, bias = torch.randint(0, 3 if len(levels) > 2 else 2, (19, k)), torch.rand(19, 1), torch.randn(19)
    packed = few_bits.pack_codes(codes, scales, levels, 0)
    assert packed.memory.numel() == 32 * packed.depth // (8 if len(levels) == 2 else 4)
    a = byte_rows.to_bytes(torch.randn(rows, k) * 40, 1.0, 31, highest)
    a.payload[0, :k] = highest  # the largest sums
    numbers = torch.tensor(levels).double()[codes]
    sums = (a.payload[:, :k].double() - 31) @ numbers.t()
    wanted = sums.float() * scales[:, 0] + bias
    assert all(torch.equal(one, wanted) for one in at_levels(lambda: few_bits.multiply_codes(a, packed, bias)))
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_codes(a, packed, bias), wanted)


@pytest.mark.parametrize(
    ("rows", "k", "highest", "level", "in_fp32"),
    [
        (17, 65793, 255, 1, True),  # sums to 2^24 - 1
        (17, 65794, 255, 1, False),
        (17, 1 << 17, 128, -1, True),  # to 2^24
        (17, (1 << 17) + 1, 128, -1, False),
        (17, 9399, 255, 7, True),
        (17, 9400, 255, 7, False),
        (16, 70, 255, 1, False),
        (16, 70, 128, 1, False),  # in two digits
    ],
)
def test_many_bytes_are_multiplied_in_fp32_where_every_sum_is_exact_there(
    rows: int, k: int, highest: int, level: int, in_fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = (torch.arange(k) % 5 % 2).expand(3, k)
    packed = few_bits.pack_codes(codes, torch.tensor([[1.0], [2.0], [4.0]]), [level, 0], 0)
    a = Bytes(torch.full((rows, byte_rows.up(k, 8)), highest, dtype=torch.uint8), 0.5, 0, highest)
    sums = torch.tensor([0.5, 1.0, 2.0]) * (highest * level * int((codes[0] == 0).sum()))
    called: list[int] = []
    multiplied = few_bits._multiplied

    def recorded(*given: Any) -> Tensor | None:
        called.append(1)
        return multiplied(*given)

    monkeypatch.setattr(few_bits, "_multiplied", recorded)
    assert torch.equal(few_bits.multiply_codes(a, packed), sums.expand(rows, 3))
    assert bool(called) is not in_fp32


@pytest.mark.parametrize(("rows", "in_whole_numbers"), [(16, True), (17, False)])
def test_few_rows_are_multiplied_in_whole_numbers_and_more_by_the_product_that_is_asked_for(
    rows: int, in_whole_numbers: bool
) -> None:
    packed = few_bits.pack_codes(torch.ones(5, 40, dtype=torch.int64), torch.ones(5, 1), INTEGERS, 64)
    asked: list[int] = []

    def linear_of(x: Tensor) -> few_bits.LinearProduct:
        asked.append(len(x))
        return few_bits.by_torch

    found = few_bits.multiply_codes(torch.ones(rows, 40), packed, None, linear_of)
    assert torch.equal(found, torch.full((rows, 5), 40.0)) and asked == ([] if in_whole_numbers else [rows])


def test_numbers_below_2_to_the_minus_100_are_whole_multiples_of_2_to_the_minus_118() -> None:
    packed = few_bits.pack_codes(torch.ones(2, 64, dtype=torch.int64), torch.ones(2, 2), INTEGERS, 32)
    x = torch.zeros(2, 64)
    x[0, :3] = torch.tensor([2.0**-101, 2.75 * 2.0**-118, 2.0**-119])  # a tie becomes even
    x[1, 40:42] = torch.tensor([2.0**-99, 2.0**-118])  # whose units are twice as large
    for found in at_levels(lambda: few_bits.multiply_codes(x, packed)):
        assert found.tolist() == [[2.0**-101 + 3 * 2.0**-118] * 2, [2.0**-99] * 2]
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_codes(x, packed), found)


def test_the_sign_of_a_zero_is_plus_one() -> None:
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0]])
    assert few_bits.sign_values(few_bits.signs(x)).tolist() == [[1.0, 1.0, 1.0, -1.0]]


def test_many_bytes_by_many_short_rows_have_a_scale_each_also_by_the_definition() -> None:
    packed = few_bits.pack_codes(torch.ones(80, 64, dtype=torch.int64), torch.arange(80.0).view(80, 1), [1, -1], 0)
    a = byte_rows.to_bytes(torch.ones(17, 64), 1.0, 0, 127)
    for way in kernels.available():
        with kernels.use(way):
            assert torch.equal(few_bits.multiply_codes(a, packed), (-64.0 * torch.arange(80.0)).expand(17, 80))


def test_activations_that_do_not_fit_codes_are_refused() -> None:
    rows = few_bits.pack_codes(torch.zeros(4, 24, dtype=torch.int64), torch.ones(4, 1), [1, -1], 0)
    with pytest.raises(InvalidInput, match="do not fit weights with a scale a row: give bytes"):
        few_bits.multiply_codes(torch.ones(1, 24), rows)
    with pytest.raises(InvalidInput, match="bytes of depth 16 do not fit codes of 24 inputs in groups of 0"):
        few_bits.multiply_codes(byte_rows.to_bytes(torch.ones(1, 16), 1.0, 0, 127), rows)
    with pytest.raises(InvalidInput, match="groups of 8: give 16, 32 or 64"):
        few_bits.pack_codes(torch.zeros(4, 24, dtype=torch.int64), torch.ones(4, 3), INTEGERS, 8)


@pytest.mark.parametrize("way", ["cpu", "reference"])
@pytest.mark.parametrize("row", [-1, 4, 17])
def test_a_row_that_is_not_there_is_refused(row: int, way: str) -> None:
    packed = few_bits.pack_codes(torch.zeros(4, 24, dtype=torch.int64), torch.ones(4, 1), INTEGERS, 32)
    with kernels.use(way), pytest.raises(IndexError, match="a row that is not there: give 0 to 3"):
        few_bits.code_rows(packed, torch.tensor([0, row]))


def test_windows_are_those_of_a_convolution() -> None:
    image = torch.randint(0, 128, (2, 9, 7, 3), dtype=torch.uint8)
    x = Bytes(image.flatten(), 1.0, 5, 127)
    geometry = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (2, 1)}
    found = byte_rows.windows(x, (2, 9, 7, 3), geometry)
    with kernels.use("reference"):
        wanted = byte_rows.windows(x, (2, 9, 7, 3), geometry)
    assert found[1:] == wanted[1:]
    assert torch.equal(found[0].payload, wanted[0].payload)


def test_operands_that_do_not_fit_are_refused() -> None:
    panels = byte_products.pack(torch.zeros(4, 24, dtype=torch.int8), torch.ones(4), 127)
    with pytest.raises(InvalidInput, match="bytes of depth 16 up to 127 do not fit weights of 24 inputs"):
        byte_products.multiply(byte_rows.to_bytes(torch.ones(1, 16), 1.0, 0, 127), panels)
    with pytest.raises(InvalidInput, match="up to 255 do not fit"):
        byte_products.multiply(byte_rows.to_bytes(torch.ones(1, 24), 1.0, 0, 255), panels)
    assert byte_products.pack(torch.zeros(1, 65793, dtype=torch.int8), torch.ones(1), 127).k == 65793
    with pytest.raises(Unavailable, match="a product over 65794 bytes may leave int32: 65793 is the most"):
        byte_products.pack(torch.zeros(1, 65794, dtype=torch.int8), torch.ones(1), 127)


def test_weights_packed_without_the_library_are_to_be_summed_in_any_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_products, "multiplies_bytes", lambda: False)
    monkeypatch.setattr(cpu, "library", lambda: None)
    panels = byte_products.pack(torch.zeros(17, 40, dtype=torch.int8), torch.ones(17), 127)
    assert panels.ways.tolist() == [[2, 2], [2, 2]] and panels.memory.shape == (2, 10, 16, 4)


def test_a_range_holds_zero_and_both_ends_in_the_bytes_that_there_are() -> None:
    wanted = {
        (0.0, 0.0): (1.0, 0),
        (1.0, 127.0): (1.0, 0),
        (-127.0, -3.0): (1.0, 127),
        (-27.0, 100.0): (1.0, 27),
        (-31.75, 31.75): (0.5, 64),  # a tie, to the even one
        (-1e-45, 1e-46): (1.0, 0),  # a scale of zero in fp32
    }
    for (low, high), (scale, zero) in wanted.items():
        assert byte_rows.range_of(low, high, 127) == Range(scale, zero, 127)
    infinite, largest = float("inf"), 3e38
    for low, high in (
        (-infinite, 1.0),
        (0.0, infinite),
        (float("nan"), 1.0),
        (0.0, float("nan")),
        (-infinite, infinite),
    ):
        assert str(byte_rows.range_of(low, high, 255)) == str(Range(float("nan"), 0, 255))
    assert str(byte_rows.range_of(-largest, largest, 1)) == str(Range(float("nan"), 0, 1))  # fp32 has no such scale
    for shape in ((0, 3), (3, 0)):
        assert byte_rows.own_range(torch.empty(shape), 255) == Range(1.0, 0, 255)


def test_formats_of_two_to_four_bits_with_whole_levels_are_read_as_codes() -> None:
    whole = [*range(8), *range(-8, 0)]
    levels = {
        **{name: (whole, 1.0) for name in ("i2", "i2s", "i3", "i4", "i4s")},
        **{"e2m1": ([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], 0.5)},
        **{"e1m2finite": ([*range(8), 0, *range(-1, -8, -1)], 0.5)},
        **{"e3m0finite": ([0, *(1 << n for n in range(7)), 0, *(-1 << n for n in range(7))], 0.25)},
        **dict.fromkeys(("i1", "i5", "ue2m2finite", "e2m2", "e2m3", "e2m1ieee", "e2m1fn")),
    }
    assert {name: few_bits.levels_of(casts.parse(name).element) for name in levels} == levels
    served = (
        "i4s@fp32/row",
        "i4s@fp32/tensor",
        "i4s@fp32/16",
        "i4s@fp32/48",
        "mxfp4",
        "nvfp4",
        "if4",
        "e2m1",
        "ternary",
    )
    left = ("i4s@fp32/24", "i4s@fp32/8", "int8-affine", "i4@fp32/row/affine", "i4s", "i5s@fp32/row", "fp16", "binary")
    assert [few_bits.is_read(casts.parse(name)) for name in (*served, *left)] == [True] * len(served) + [False] * len(
        left
    )


@pytest.mark.parametrize(
    ("most", "group", "kept"), [(63, 64, 64), (64, 64, 32), (127, 32, 32), (127, 64, 32), (64, 0, 0)]
)
def test_groups_whose_sums_might_leave_int32_are_halved(most: int, group: int, kept: int) -> None:
    scales = torch.arange(1.0, 33).view(16, 2) if group == 64 else torch.ones(16, 4 if group else 1)
    packed = few_bits.pack_codes(torch.ones(16, 128, dtype=torch.int64), scales, [0, most, 1, -1], group)
    assert (packed.group, packed.bits, packed.n, packed.k) == (kept, 2, 16, 128)
    wide = scales.repeat_interleave(128 // scales.shape[1], 1)
    assert torch.equal(few_bits.code_values(packed), most * wide)
    with pytest.raises(InvalidInput, match="scales for groups of 24: give 16, 32 or 64, or 0 for a scale a row"):
        few_bits.pack_codes(torch.ones(16, 48, dtype=torch.int64), torch.ones(16, 2), [0, 1], 24)


@pytest.mark.parametrize("n", [1, 7, 16, 21])
def test_a_bias_is_as_long_as_the_panels_that_are_added_to(n: int) -> None:
    x = torch.arange(n, dtype=torch.float64)
    padded = byte_products._padded(x, 24)
    assert padded is not None and padded.dtype is torch.float32
    assert padded.tolist() == [*range(n), *[0] * (24 - n)]
    whole = byte_products._padded(torch.arange(48.0)[::2], 24)
    assert whole is not None and whole.is_contiguous() and whole.tolist() == [*range(0, 48, 2)]
    assert byte_products._padded(None, 24) is None


def test_codes_are_whole_numbers_up_to_64_of_their_unit() -> None:
    assert few_bits.whole_levels([0.25, -16.0, 1.5]) == ([1, -64, 6], 0.25)
    assert few_bits.whole_levels([0.25, -16.25, 1.5]) is None and few_bits.whole_levels([64.0, 65.0]) is None
    assert few_bits.whole_levels([3.0, -64.0]) == ([3, -64], 1.0)
