"""The byte, nibble and sign products: exact or in a fixed order, the same on every instruction set and in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowp import kernels
from lowp.errors import InvalidInput, Unavailable
from lowp.kernels import byte_products, cpu, few_bits
from lowp.kernels.byte_products import Bytes

needs_library = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
LEVELS = (0, 1, -1)  # portable, AVX2, the best; as far as the processor has them


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
            assert torch.equal(byte_products.multiply(a, panels, bias, level), wanted)
        with kernels.use("reference"):
            assert torch.equal(byte_products.multiply(a, panels, bias), wanted)


@needs_library
@pytest.mark.parametrize("highest", [127, 255])
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
        found = byte_products.to_bytes(x, scale, zero, highest, level)
        with kernels.use("reference"):
            wanted = byte_products.to_bytes(x, scale, zero, highest)
        assert torch.equal(found.payload, wanted.payload)
        assert bool((found.payload[:, x.shape[1] :] == zero).all())


@needs_library
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("by_table", [False, True])
def test_four_bit_products_are_the_same_on_every_instruction_set(group: int, by_table: bool) -> None:
    torch.manual_seed(0)
    codes, scales = torch.randint(0, 16, (21, 200)), torch.rand(21, -(-200 // group))
    table = torch.randn(16) if by_table else None
    packed = few_bits.pack_nibbles(codes, scales, group, table)
    values = (codes - (codes >> 3 << 4)).float() if table is None else table[codes]
    values = values * scales.repeat_interleave(group, 1)[:, :200]
    assert torch.equal(few_bits.nibble_values(packed), values)
    x, bias = torch.randn(3, 200), torch.randn(21)
    portable, *others, best = (few_bits.multiply_nibbles(x, packed, bias, level) for level in LEVELS)
    assert all(torch.equal(portable, one) for one in (*others, best))
    torch.testing.assert_close(best, torch.nn.functional.linear(x, values, bias), rtol=1e-4, atol=1e-4)
    wanted = torch.nn.functional.linear(x.repeat(4, 1), values, bias)
    assert torch.equal(few_bits.multiply_nibbles(x.repeat(4, 1), packed, bias), wanted)


@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_signs_are_multiplied_by_counting_bits(length: int) -> None:
    torch.manual_seed(length)
    x, w = torch.randn(5, length), torch.randn(9, length)
    a, b = few_bits.signs(x), few_bits.signs(w)
    signs = torch.where(x < 0, -1.0, 1.0) @ torch.where(w < 0, -1.0, 1.0).t()
    wanted = signs * (a.scales[:, None] * b.scales)
    for level in LEVELS:
        assert torch.equal(few_bits.multiply_signs(a, b, None, level), wanted)
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_signs(a, b), wanted)


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_ternary_rows_are_half_the_sum_of_two_rows_of_signs(rows: int) -> None:
    torch.manual_seed(0)
    numbers, scales, bias = torch.randint(-1, 2, (9, 75)), torch.rand(9), torch.randn(9)
    b = few_bits.trits(numbers, scales)
    assert b.memory.numel() * 64 == 2 * 9 * 128
    assert torch.equal(few_bits.sign_values(b), numbers.float())
    a = byte_products.to_bytes(torch.randn(rows, 75) * 40, 1.0, 31, 127)
    sums = (a.payload[:, :75].double() - 31) @ numbers.double().t()
    wanted = sums.float() * scales + bias
    assert torch.equal(few_bits.multiply_signs(a, b, bias), wanted)
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_signs(a, b, bias), wanted)


@pytest.mark.parametrize("highest", [127, 255])
def test_bytes_are_multiplied_by_signs_bit_by_bit(highest: int) -> None:
    torch.manual_seed(0)
    w, bias = torch.randn(9, 75), torch.randn(9)
    b, a = few_bits.signs(w), byte_products.to_bytes(torch.randn(4, 75) * 40, 1.0, 31, highest)
    sums = (a.payload[:, :75].double() - 31) @ torch.where(w < 0, -1.0, 1.0).double().t()
    wanted = sums.float() * b.scales + bias
    assert torch.equal(few_bits.multiply_signs(a, b, bias), wanted)
    many = a._replace(payload=a.payload.repeat(5, 1))  # in another way
    assert torch.equal(few_bits.multiply_signs(many, b, bias), wanted.repeat(5, 1))
    with kernels.use("reference"):
        assert torch.equal(few_bits.multiply_signs(a, b, bias), wanted)


def test_windows_are_those_of_a_convolution() -> None:
    image = torch.randint(0, 128, (2, 9, 7, 3), dtype=torch.uint8)
    x = Bytes(image.flatten(), 1.0, 5, 127)
    geometry = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (2, 1)}
    found = byte_products.windows(x, (2, 9, 7, 3), geometry)
    with kernels.use("reference"):
        wanted = byte_products.windows(x, (2, 9, 7, 3), geometry)
    assert found[1:] == wanted[1:]
    assert torch.equal(found[0].payload, wanted[0].payload)


def test_operands_that_do_not_fit_are_refused() -> None:
    panels = byte_products.pack(torch.zeros(4, 24, dtype=torch.int8), torch.ones(4), 127)
    with pytest.raises(InvalidInput, match="bytes of depth 16 up to 127 do not fit weights of 24 inputs"):
        byte_products.multiply(byte_products.to_bytes(torch.ones(1, 16), 1.0, 0, 127), panels)
    with pytest.raises(InvalidInput, match="up to 255 do not fit"):
        byte_products.multiply(byte_products.to_bytes(torch.ones(1, 24), 1.0, 0, 255), panels)
    with pytest.raises(Unavailable, match="may leave int32"):
        byte_products.pack(torch.zeros(1, 70_000, dtype=torch.int8), torch.ones(1), 127)
