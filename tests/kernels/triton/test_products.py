"""int16 products of int8 digits, in Triton's interpreter, are exact for all operands."""

from __future__ import annotations

from functools import partial

import int16_operands
import pytest
import torch
from gpu.fake_cuda import fake_cuda
from int16_operands import CONVOLUTIONS, Fill, convolution_shape, int64_product, normal, random_int16

from lowp import kernels
from lowp.errors import InvalidInput, Unavailable
from lowp.kernels.int16 import integer

pytest.importorskip("triton", reason="triton is not installed")


FILLS: dict[str, Fill] = {**int16_operands.FILLS, "normal": normal(4000.0)}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", (1, 257, 4099))
def test_exact_sums_equal_int64(fill: str, depth: int) -> None:
    torch.manual_seed(depth)
    a, b = FILLS[fill](7, depth), FILLS[fill](depth, 19)
    expected = int64_product(a, b)
    result = integer.multiply(a, b, dtype=torch.int64, kernel="triton")
    assert torch.equal(result.values, expected)
    assert result.largest_sum == expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", (32767, 32768, 32769, 65535, 100_000))
def test_exact_sums_equal_int64_at_the_depths_where_int32_ends(fill: str, depth: int) -> None:
    a, b = FILLS[fill](3, depth), FILLS[fill](depth, 5)
    expected = int64_product(a, b)
    assert torch.equal(integer.multiply(a, b, dtype=torch.int64, kernel="triton").values, expected)
    for dtype, exponent in ((torch.int16, -32), (torch.float32, -7), (torch.float64, 3)):
        wanted = integer.multiply(a, b, dtype=dtype, exponent=exponent, kernel="reference")
        found = integer.multiply(a, b, dtype=dtype, exponent=exponent, kernel="triton")
        assert torch.equal(found.values, wanted.values) and found[1:] == wanted[1:]


@pytest.mark.parametrize("depth", (300, 301, 700))
def test_a_depth_that_one_launch_does_not_sum_is_summed_in_parts(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowp.kernels.triton.products.DEPTH", 300)
    a, b = random_int16(3, depth), random_int16(depth, 5)
    expected = int64_product(a, b)
    found = integer.multiply(a, b, dtype=torch.int64, kernel="triton")
    assert torch.equal(found.values, expected) and found.largest_sum == expected.abs().max()
    for dtype, exponent in ((torch.int16, -18), (torch.float32, -7), (torch.float64, 3)):
        wanted = integer.multiply(a, b, dtype=dtype, exponent=exponent, kernel="reference")
        made = integer.multiply(a, b, dtype=dtype, exponent=exponent, kernel="triton")
        assert torch.equal(made.values, wanted.values) and made[1:] == wanted[1:]
    chained = integer.multiply(a, b, dtype=None, kernel="triton")
    assert torch.equal(chained.values, integer.multiply(a, b, dtype=None, kernel="reference").values)


@pytest.mark.parametrize("exponent", (0, -15, -31, -900, 3, 900))
def test_int16_is_rounded_once_to_nearest_even_saturated_and_looked_at(exponent: int) -> None:
    torch.manual_seed(0)
    a, b = random_int16(13, 300), random_int16(300, 37)
    a[0], a[1, 3:], b[:, :4] = 0, 0, torch.tensor([1, 2, 3, -6])
    for symmetric in (False, True):
        wanted = integer.multiply(a, b, exponent=exponent, symmetric=symmetric, kernel="reference")
        found = integer.multiply(a, b, exponent=exponent, symmetric=symmetric, kernel="triton")
        assert torch.equal(found.values, wanted.values) and found[1:] == wanted[1:]


def test_ties_go_to_even_in_both_signs() -> None:
    a = torch.tensor([[1], [-1]], dtype=torch.int16)
    b = torch.arange(0, 32, dtype=torch.int16).reshape(1, 32)
    expected = torch.tensor([round(n / 2) for n in range(32)])
    values = integer.multiply(a, b, exponent=-1, kernel="triton").values
    assert values[0].tolist() == expected.tolist() and values[1].tolist() == (-expected).tolist()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_floats_are_the_sum_rounded_once(dtype: torch.dtype) -> None:
    a, b = random_int16(5, 1000), random_int16(1000, 33)
    for exponent in (-30, -170):
        expected = (int64_product(a, b).double() * 2.0**exponent).to(dtype)
        found = integer.multiply(a, b, exponent=exponent, dtype=dtype, kernel="triton")
        assert torch.equal(found.values, expected)


def test_chained_has_the_bits_of_its_definition() -> None:
    a, b = normal(4000.0)(7, 777), random_int16(777, 19)
    wanted = integer.multiply(a, b, exponent=-31, kernel="reference", dtype=None)
    found = integer.multiply(a, b, exponent=-31, kernel="triton", dtype=None)
    assert torch.equal(found.values, wanted.values) and found.largest == wanted.largest


def test_a_bias_has_the_bits_of_its_definition() -> None:
    a, b, numbers = random_int16(5, 40), random_int16(40, 9), torch.randn(9) * 2.0**8
    for dtype in (torch.int16, None):
        given = {"exponent": -20, "dtype": dtype, "bias": integer.Bias(numbers)}
        found, expected = (integer.multiply(a, b, kernel=kernel, **given) for kernel in ("triton", "reference"))
        assert torch.equal(found.values, expected.values) and found[1:] == expected[1:]


def test_batches_views_and_empty_operands_are_taken_as_they_lie() -> None:
    a, b = random_int16(2, 40, 5).mT, random_int16(1, 30, 40).expand(2, 30, 40).mT
    expected = int64_product(a, b)
    with kernels.use("triton"):
        found = integer.multiply(a, b, dtype=torch.int64)
        assert integer.multiply(a[..., :0], b[:, :0]).values.sum() == 0
    assert torch.equal(found.values, expected)


PLACES = [(1, CONVOLUTIONS[1]), (2, CONVOLUTIONS[2]), (1, CONVOLUTIONS[3]), (1, CONVOLUTIONS[4])]


def check_convolution(dims: int, case: tuple[int, ...], dtypes: tuple[tuple[torch.dtype, int], ...]) -> None:
    shape = convolution_shape(dims, case)
    x, w, g = random_int16(*shape.input), random_int16(*shape.weight), random_int16(*shape.output)
    for product, a, b in (("forward", x, w), ("input_gradient", g, w), ("weight_gradient", x, g)):
        calls = [partial(integer.convolve, product, a, b, shape, exponent=-30, dtype=None)]
        calls += [
            partial(integer.convolve, product, a, b, shape, exponent=exponent, dtype=dtype)
            for dtype, exponent in dtypes
        ]
        for call in calls:
            found, wanted = call(kernel="triton"), call(kernel="reference")
            assert torch.equal(found.values, wanted.values) and found[1:] == wanted[1:], product


@pytest.mark.parametrize(("dims", "case"), PLACES, ids=str)
def test_convolutions_are_products_of_windows_to_the_bit(dims: int, case: tuple[int, ...]) -> None:
    check_convolution(dims, case, ((torch.int16, -20),))


@pytest.mark.slow
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("dims", (1, 2, 3))
def test_convolutions_of_every_kind_and_dtype(dims: int, case: tuple[int, ...]) -> None:
    check_convolution(dims, case, ((torch.int16, -20), (torch.float32, -40), (torch.float64, 3), (torch.int64, 0)))


@pytest.mark.parametrize("form", ["linear", "convolution"])
def test_contract_takes_the_triton_product_where_it_is_the_kernel(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.int16.mantissas import Mantissas, as_exponent
    from lowp.kernels.products import contract
    from lowp.kernels.triton import products
    from lowp.ops.convolution import Convolution
    from lowp.ops.trilinear import OUTPUT, Linear
    from lowp.policy import Accumulation

    launches: list[int] = []
    real = products.matmul
    monkeypatch.setattr(products, "matmul", lambda *given: launches.append(1) or real(*given))
    shapes = ((5, 6), (4, 6)) if form == "linear" else ((2, 3, 5), (4, 3, 2))
    made = Linear(*shapes) if form == "linear" else Convolution(*shapes, (1,), (0,), (1,), False, (0,), 1)
    operands = tuple(Mantissas(random_int16(*shape), as_exponent(-10)) for shape in shapes)
    found, wanted = [], []
    for way, results in (("triton", found), ("reference", wanted)):
        with kernels.use(way):
            for words in ("exact", "int32"):
                results.append(contract(made, OUTPUT, operands, Accumulation(words)))  # type: ignore[arg-type]
            results.append(made.mantissas(OUTPUT, *operands, as_exponent(-2), True, None).values)  # type: ignore[union-attr]
    assert len(launches) == 3
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("chip", "kernel"), [((7, 5), "reference"), ((8, 0), "triton"), ((9, 0), "triton")])
def test_the_compute_capability_chooses_the_kernel_of_a_gpu(
    chip: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integer, "capability", lambda device: chip)
    with fake_cuda():
        there = torch.empty(2, 2, dtype=torch.int16, device="cuda")
        assert integer.chosen_kernel(there) == kernel
        with pytest.raises(Unavailable, match="avx2 has no integer products on cuda"):
            integer.multiply(there, there, kernel="avx2")
        monkeypatch.setattr(integer, "forced", lambda: "cpu")
        with pytest.raises(Unavailable, match="cpu has no integer products on cuda"):
            integer.multiply(there, there)
        with pytest.raises(InvalidInput, match="a is on cuda:0 and b on cpu: move one"):
            integer.multiply(there, random_int16(2, 2))


@pytest.mark.parametrize(("m", "n"), [(64, 100), (100, 64), (100, 99), (65, 129), (63, 127), (1, 66)])
def test_tiles_of_every_row_column_and_batch_are_written(m: int, n: int) -> None:
    a, b = random_int16(2, m, 20), random_int16(2, 20, n)
    found = integer.multiply(a, b, dtype=torch.int64, kernel="triton")
    assert torch.equal(found.values, int64_product(a, b))
    chained = integer.multiply(a, b, dtype=None, kernel="triton").values
    assert torch.equal(chained, integer.multiply(a, b, dtype=None, kernel="reference").values)


@pytest.mark.parametrize("depth", [5, 12])
def test_what_a_product_counts(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.triton import products

    monkeypatch.setattr(products, "DEPTH", 8)
    a, b = torch.full((1, 2, depth), 200, dtype=torch.int16), torch.full((1, depth, 3), -100, dtype=torch.int16)
    a[0, 1] = -3
    total = 20000 * depth
    for scale, dtype, seen in (
        *((1.0, torch.int16, [3, 32768, total]), (0.125, torch.int16, [0, total // 8, total])),
        *((1.0, torch.int64, [0, 0, total]), (2.0, torch.float32, [0, 0, total])),
    ):
        there = torch.tensor(scale, dtype=torch.float64)
        values, counts = products.matmul(a, b, there, dtype, False, -32768)
        wanted = int64_product(a, b).double() * (1.0 if dtype is torch.int64 else scale)
        assert counts.tolist() == seen and values.dtype is dtype
        assert torch.equal(values.double(), wanted.round().clamp(-32768, 32767) if dtype is torch.int16 else wanted)
    values, counts = products.matmul(a, b, torch.tensor(1.0, dtype=torch.float64), torch.float32, True, -32768)
    assert counts.tolist() == [0, 0, 0] and torch.equal(values.double(), int64_product(a, b).double())
    for dtype in (torch.float32, torch.float64):
        assert products.matmul(a, b, torch.tensor(torch.nan, dtype=torch.float64), dtype, False, 0)[0].isnan().all()
    if depth <= products.DEPTH:  # a scale of zero needs no sum
        values, counts = products.matmul(a, b, torch.tensor(0.0, dtype=torch.float64), torch.int16, False, -32768)
        assert counts.tolist() == [0, 0, 0] and not values.any()


def test_tiles_of_products() -> None:
    from lowp.kernels.triton import products

    assert (products.DEPTH, products.TILE, products.CHAINED_TILE) == (32768, (128, 64, 64, 8), (64, 32, 64, 8))
    device, cpu = torch.empty(0, device="meta"), torch.empty(0)
    assert products._tile(device, 500, 500, 500, False) == products.TILE
    assert products._tile(device, 1, 1, 1, True) == products.CHAINED_TILE
    for sizes, tile in (
        *(((1, 16, 16), (16, 16, 16, 4)), ((17, 32, 17), (32, 32, 32, 4)), ((33, 64, 128), (64, 64, 128, 4))),
        *(((65, 1000, 129), (64, 64, 256, 4)), ((15, 18, 1000), (16, 32, 256, 4)), ((31, 63, 65), (32, 64, 128, 4))),
    ):
        assert products._tile(cpu, *sizes, False) == products._tile(cpu, *sizes, True) == tile


def test_products_of_nothing_start_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.triton import products

    monkeypatch.setattr(products, "run", None)
    one = torch.tensor(1.0, dtype=torch.float64)
    for m, depth, n in ((2, 0, 3), (0, 4, 3), (2, 4, 0)):
        a, b = torch.ones(1, m, depth, dtype=torch.int16), torch.ones(1, depth, n, dtype=torch.int16)
        for chained in (False, True):
            values, counts = products.matmul(a, b, one, torch.float32, chained, -32768)
            assert values.shape == (1, m, n) and not values.any() and counts.tolist() == [0, 0, 0]
