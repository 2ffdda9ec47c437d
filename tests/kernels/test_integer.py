"""The integer products against int64 arithmetic, the definition in torch, and torch's own convolutions in fp64."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import int16_operands
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from int16_operands import CONVOLUTIONS, Fill, convolution_shape, int64_product, normal, random_int16
from torch import Tensor

from lowp import kernels as lowp_kernels
from lowp.errors import InvalidInput, Unavailable
from lowp.kernels import cpu
from lowp.kernels.int16 import integer, integer_reference, integer_run
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.integer_run import PRODUCTS, Bias, NotFinite


def one_hot(*shape: int) -> Tensor:
    x = torch.zeros(shape, dtype=torch.int16)
    x.flatten()[:: max(1, x.numel() // 7)] = -32768
    return x


# The deviations lead through every way to sum a block: one chain, several chains, some chunks by digits, all by digits.
FILLS: dict[str, Fill] = {
    **int16_operands.FILLS,
    "one-hot": one_hot,
    "largest rests": lambda *shape: torch.randint(-64, 64, shape).mul(512).add(torch.randint(2, shape) * 511).short(),
    **{f"normal {deviation}": normal(deviation) for deviation in (100.0, 2500.0, 4000.0, 6500.0, 9000.0)},
    "chains as large as int32": lambda *shape: torch.full(shape, 11585, dtype=torch.int16),  # 16 * 11585**2 < 2**31
}
DEPTHS = (1, 2, 7, 255, 256, 257, 511, 513, 769, 1300, 4099, 65535)


def kernels() -> list[str]:
    """Return the kernels of this machine besides the reference."""
    one = torch.ones(1, 1, dtype=torch.int16)
    found = []
    for name in integer.KERNELS[:-1]:
        try:
            integer.multiply(one, one, kernel=name)
        except Unavailable:
            continue
        found.append(name)
    return found


KERNELS = kernels()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def same(left: tuple[object, ...], right: tuple[object, ...]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


def test_the_library_serves_the_integer_kernels() -> None:
    if cpu.library() is None:
        assert KERNELS == []
    else:
        assert KERNELS[-1] == "portable"


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_exact_sums_equal_int64(fill: str, depth: int) -> None:
    torch.manual_seed(depth)
    a, b = FILLS[fill](7, depth), FILLS[fill](depth, 19)
    expected = int64_product(a, b)
    for kernel in (*KERNELS, "reference"):
        result = integer.multiply(a, b, dtype=torch.int64, kernel=kernel)
        assert torch.equal(result.values, expected), kernel
        assert result.largest_sum == expected.abs().max()


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", (7, 288, 769))
def test_every_way_to_sum_is_rounded_once_to_int16(fill: str, depth: int) -> None:
    torch.manual_seed(depth)
    a, b = FILLS[fill](13, depth), FILLS[fill](depth, 35)
    largest = int(int64_product(a, b).abs().max())
    fitting = 14 - max(largest, 1).bit_length()
    bias = torch.randn(35) * 2.0**12
    for exponent in (fitting, fitting + 3):  # the second saturates
        for added in (None, Bias(bias), Bias(bias, 3)):
            given = {"exponent": exponent, "bias": added, "symmetric": added is None}
            expected = integer.multiply(a, b, kernel="reference", **given)
            for kernel in KERNELS:
                found = integer.multiply(a, b, kernel=kernel, **given)
                assert same(found[:3], expected[:3]), (kernel, exponent)
                assert added is not None or found.largest_sum == largest


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_chained_has_the_bits_of_its_definition(fill: str, depth: int) -> None:
    torch.manual_seed(depth)
    a, b = FILLS[fill](7, depth), FILLS[fill](depth, 19)
    expected = torch.zeros(7, 19)
    for start in range(0, depth, 256):
        expected += int64_product(a[:, start : start + 256], b[start : start + 256]).double().float()
    expected *= 2.0**-31
    for kernel in (*KERNELS, "reference"):
        result = integer.multiply(a, b, exponent=-31, kernel=kernel, dtype=None)
        assert torch.equal(result.values, expected), kernel
        assert result.largest == expected.abs().max()


@pytest.mark.parametrize("depth", (32, 96, 128, 160, 256, 288, 512, 777))
def test_sums_are_exact_where_all_that_digits_leave_out_adds_up(depth: int) -> None:
    low, high = torch.tensor([-32768, -32256, 32256]), torch.tensor([-31745, 31743, 32767])
    for rows, columns in ((low, low), (high, high), (low, high)):
        a = rows.short()[:, None].repeat(1, depth)
        b = columns.short().repeat(depth, 1)
        a[:, : depth // 2], b[depth // 3 :] = a[:1, : depth // 2], b[depth // 3 :, :1]
        expected = int64_product(a, b)
        for kernel in KERNELS:
            assert torch.equal(integer.multiply(a, b, dtype=torch.int64, kernel=kernel).values, expected), kernel


def test_the_kernels_in_use_are_those_of_the_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(4000)(5, 300), normal(4000)(300, 7)
    expected = integer.multiply(a, b, exponent=-18)
    for name in ("reference", "bitwise"):
        with lowp_kernels.use(name), monkeypatch.context() as patch:
            for name in ("library", "loaded"):
                patch.setattr(cpu, name, lambda: pytest.fail("the library was asked"))
            assert same(integer.multiply(a, b, exponent=-18), expected)
    with lowp_kernels.use("native"), pytest.raises(Unavailable, match="cpu, bitwise and reference have them"):
        integer.multiply(a, b)
    with lowp_kernels.use("reference"):
        for kernel in KERNELS:
            assert same(integer.multiply(a, b, exponent=-18, kernel=kernel), expected)


@pytest.mark.parametrize("symmetric", (False, True))
@pytest.mark.parametrize("exponent", (0, -1, -15, -22, -31, -62, -900, 3, 40, 900))
def test_int16_is_rounded_once_to_nearest_even_and_saturated(exponent: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    a, b = random_int16(13, 300), random_int16(300, 37)
    a[0], a[1, 3:], b[:, :4] = 0, 0, torch.tensor([1, 2, 3, -6])
    expected = (int64_product(a, b).double() * 2.0**exponent).round()
    lowest = -32767 if symmetric else -32768
    for kernel in (*KERNELS, "reference"):
        result = integer.multiply(a, b, exponent=exponent, symmetric=symmetric, kernel=kernel)
        clamped = expected.clamp(lowest, 32767)
        assert torch.equal(result.values, clamped.to(torch.int16)), kernel
        assert result.saturated == (clamped != expected).sum()
        assert result.largest_mantissa == clamped.abs().max()


def test_ties_go_to_even_in_both_signs() -> None:
    a = torch.tensor([[1], [-1]], dtype=torch.int16)
    b = torch.arange(0, 32, dtype=torch.int16).reshape(1, 32)
    expected = torch.tensor([round(n / 2) for n in range(32)])
    for kernel in (*KERNELS, "reference"):
        values = integer.multiply(a, b, exponent=-1, kernel=kernel).values
        assert values[0].tolist() == expected.tolist()
        assert values[1].tolist() == (-expected).tolist()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_floats_are_the_sum_rounded_once(dtype: torch.dtype) -> None:
    a, b = random_int16(5, 1000), random_int16(1000, 33)
    for exponent in (-30, 0, 17, -170):
        expected = (int64_product(a, b).double() * 2.0**exponent).to(dtype)
        for kernel in (*KERNELS, "reference"):
            assert torch.equal(integer.multiply(a, b, exponent=exponent, dtype=dtype, kernel=kernel).values, expected)


def test_a_depth_beyond_what_fp64_holds_in_passing_is_exact() -> None:
    depth = (1 << 21) + 3
    a, b = torch.full((1, depth), -32768, dtype=torch.int16), torch.full((depth, 1), -32768, dtype=torch.int16)
    b[0] = 1
    total = (depth - 1) * 2**30 - 32768
    for kernel in KERNELS or ["reference"]:
        assert integer.multiply(a, b, dtype=torch.int64, kernel=kernel).values.item() == total
        fp32 = integer.multiply(a, b, dtype=torch.float32, kernel=kernel).values
        assert fp32.item() == torch.tensor(total).float()
        assert integer.multiply(a, b, exponent=-38, kernel=kernel).values.item() == round(total / 2**38)


@settings(max_examples=60)
@given(
    sizes=st.tuples(*(st.integers(0, 40),) * 3),
    transposes=st.tuples(st.booleans(), st.booleans()),
    fill=st.sampled_from(sorted(FILLS)),
    exponent=st.integers(-40, 5),
)
def test_any_shape_and_layout_gives_the_bits_of_the_reference(
    sizes: tuple[int, int, int], transposes: tuple[bool, bool], fill: str, exponent: int
) -> None:
    m, k, n = sizes
    a = FILLS[fill](k, m).mT if transposes[0] else FILLS[fill](m, k)
    b = FILLS[fill](n, k).mT if transposes[1] else FILLS[fill](k, n)
    for kernel in KERNELS:
        for dtype in (torch.int16, None):
            found, expected = (
                integer.multiply(a, b, dtype=dtype, kernel=one, exponent=exponent) for one in (kernel, "reference")
            )
            assert same(found, expected)


def test_batches_and_strided_views_are_read_as_they_lie() -> None:
    a, b = random_int16(2, 1, 9, 33).expand(2, 3, 9, 33), random_int16(3, 33, 20).expand(2, 3, 33, 20)
    expected = int64_product(a, b)
    assert torch.equal(integer.multiply(a, b, dtype=torch.int64).values, expected)
    assert torch.equal(integer.multiply(a[..., :, ::2], b[..., ::2, :], dtype=torch.int64).values,
                       int64_product(a[..., ::2], b[..., ::2, :]))  # fmt: skip
    inner = random_int16(9, 50, 33).permute(1, 2, 0)
    left = a[0, :1].expand(len(inner), 9, 33)
    assert torch.equal(integer.multiply(left, inner, dtype=torch.int64).values, int64_product(left, inner))
    row, column = random_int16(40, 3)[:, :1].mT, random_int16(40, 5)[:, 2:3]
    assert torch.equal(integer.multiply(row, column, dtype=torch.int64).values, int64_product(row, column))


def test_two_threads_give_the_bits_of_one(two_threads: None) -> None:
    a, b = normal(4000)(150, 700), normal(4000)(700, 600)
    shape = ConvolutionShape.of((3, 20, 12, 12), (24, 20, 3, 3), 1, 1)
    x, w = random_int16(*shape.input), random_int16(*shape.weight)

    def run() -> list[tuple[object, ...]]:
        return [
            integer.multiply(a, b, exponent=-18),
            integer.multiply(a, b, dtype=None),
            integer.convolve("forward", x, w, shape, dtype=None),
        ]

    two = run()
    torch.set_num_threads(1)
    assert all(same(left, right) for left, right in zip(two, run(), strict=True))


def _child(queue: multiprocessing.SimpleQueue[bool], a: Tensor, expected: bytes) -> None:
    # Compared as bytes: an operation of torch with OpenMP threads would wait for those that fork has left behind.
    queue.put(integer.multiply(a, a, dtype=torch.int64).values.numpy().tobytes() == expected)


def test_a_forked_child_multiplies_too(two_threads: None) -> None:
    a = random_int16(200, 200)
    for _ in KERNELS[:1]:  # torch's own products, which serve without the library, do not survive fork
        expected = integer.multiply(a, a, dtype=torch.int64).values.numpy().tobytes()
        context = multiprocessing.get_context("fork")
        queue: multiprocessing.SimpleQueue[bool] = context.SimpleQueue()
        child = context.Process(target=_child, args=(queue, a, expected))
        child.start()
        assert queue.get()
        child.join()


CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


# groups of one channel: strided, with more results than channels, with taps far apart, and with no tap for some pixels
OF_ONE_CHANNEL = (
    (4, 4, 3, 1, 1, 1, 4),
    (4, 8, 3, 2, 1, 1, 4),
    (3, 3, 2, 3, 2, 2, 3),
    (2, 2, 3, 1, 1, 3, 2),
    (2, 2, 1, 3, 0, 1, 2),
)


@pytest.mark.parametrize("case", (*CONVOLUTIONS, (12, 9, 3, 1, 1, 1, 1), *OF_ONE_CHANNEL), ids=str)
@pytest.mark.parametrize("dims", CONVOLVE)
def test_convolutions_equal_torch_in_fp64(dims: int, case: tuple[int, ...]) -> None:
    shape = convolution_shape(dims, case)
    x, w, g = random_int16(*shape.input), random_int16(*shape.weight), random_int16(*shape.output)
    wide_x, wide_w = x.double().requires_grad_(), w.double().requires_grad_()
    y = CONVOLVE[dims](wide_x, wide_w, None, *case[3:])
    y.backward(g.double())
    for product, a, b, expected in (
        ("forward", x, w, y.detach()),
        ("input_gradient", g, w, wide_x.grad),
        ("weight_gradient", x, g, wide_w.grad),
    ):
        chained = integer.convolve(product, a, b, shape, exponent=-30, kernel="reference", dtype=None)
        for kernel in (*KERNELS, "reference"):
            exact = integer.convolve(product, a, b, shape, dtype=torch.int64, kernel=kernel)
            assert expected is not None
            assert torch.equal(exact.values, expected.to(torch.int64)), (product, kernel)
            assert same(integer.convolve(product, a, b, shape, exponent=-30, kernel=kernel, dtype=None), chained)
        bias = None if product == "weight_gradient" else Bias(torch.randn(shape.of_operand(PRODUCTS[product][2])[1]), 9)
        for to in (torch.int16, torch.float32, torch.float64) if shape.groups > 1 else ():
            how = {"exponent": -20, "dtype": to, "bias": bias if to is torch.int16 else None}
            written = integer.convolve(product, a, b, shape, kernel="reference", **how)
            assert all(same(integer.convolve(product, a, b, shape, kernel=one, **how), written) for one in KERNELS), to
    narrow = integer.convolve("forward", x, w, shape, exponent=-20)
    rounded = (y.detach() * 2.0**-20).round()
    assert torch.equal(narrow.values, rounded.clamp(-32768, 32767).to(torch.int16))
    assert narrow.saturated == (rounded != narrow.values).sum()


# input, weight, stride, groups: without packing, or (the last two) just not
SMALL_GROUPS = (
    ((3, 6, 11, 13), (6, 1, 3, 3), 1, 6),
    ((3, 5, 12, 150), (10, 1, 3, 5), 2, 5),
    ((2, 8, 17, 9), (8, 4, 2, 2), 1, 2),
    ((5, 4, 300), (4, 2, 129), 1, 2),
    ((2, 10, 9, 9), (10, 5, 3, 3), 1, 2),
)


@pytest.mark.parametrize("case", SMALL_GROUPS, ids=str)
def test_small_groups_have_the_bits_of_the_reference(
    case: tuple[tuple[int, ...], tuple[int, ...], int, int], two_threads: None
) -> None:
    sizes, weight, stride, groups = case
    shape = ConvolutionShape.of(sizes, weight, stride, 1, 1, groups)
    x, w, g = random_int16(*shape.input), random_int16(*shape.weight), random_int16(*shape.output)
    exponents = ((torch.int16, -19), (torch.float32, -40), (torch.float64, 3), (torch.int64, 0))
    for product, a, b in (("forward", x, w), ("input_gradient", g, w), ("weight_gradient", x, g)):
        chained = integer.convolve(product, a, b, shape, exponent=-30, kernel="reference", dtype=None)
        exact = {
            dtype: integer.convolve(product, a, b, shape, exponent=exponent, dtype=dtype, kernel="reference")
            for dtype, exponent in exponents
        }
        for kernel in KERNELS:
            assert same(integer.convolve(product, a, b, shape, exponent=-30, kernel=kernel, dtype=None), chained)
            for dtype, exponent in exponents:
                found = integer.convolve(product, a, b, shape, exponent=exponent, dtype=dtype, kernel=kernel)
                assert same(found, exact[dtype]), (product, kernel, dtype)


# input, weight, stride, groups: by panels, with 32 columns and with a few; without packing, a channel a group
BIASED = (
    ((2, 6, 9, 33), (14, 6, 3, 3), 1, 1),
    ((3, 8, 8, 4), (6, 4, 2, 2), 2, 2),
    ((2, 5, 12, 15), (10, 1, 3, 5), 2, 5),
)


@pytest.mark.parametrize("case", BIASED, ids=str)
def test_a_bias_is_added_before_the_one_rounding(case: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> None:
    sizes, weight, stride, groups = case
    shape = ConvolutionShape.of(sizes, weight, stride, 1, 1, groups)
    a, b = normal(3000)(*shape.output), normal(3000)(*shape.weight)
    bias = torch.randn(sizes[1]) * 2.0**-3  # about as large as the product's largest, 2**-31 a unit
    bias[0] = 0.5
    wide = integer.convolve("input_gradient", a, b, shape, exponent=-31, dtype=torch.float64).values
    rounded = ((wide + bias.double()[:, None, None]) * 2.0**16).round()
    expected = rounded.clamp(-32767, 32767)
    assert int((rounded != expected).sum()) > 0  # some saturate
    chained = integer.convolve("input_gradient", a, b, shape, exponent=-31, dtype=None).values + bias[:, None, None]
    for kernel in (*KERNELS, "reference"):
        given = {"exponent": -15, "symmetric": True, "bias": Bias(bias, 16), "kernel": kernel}
        found = integer.convolve("input_gradient", a, b, shape, **given)
        assert torch.equal(found.values, expected.to(torch.int16)), kernel
        assert found[1:3] == (int((rounded != expected).sum()), 32767)
        assert found.largest_sum == math.ceil(float((wide + bias.double()[:, None, None]).abs().max()) * 2**31)
        given = {"exponent": -31, "bias": Bias(bias), "kernel": kernel}
        assert torch.equal(integer.convolve("input_gradient", a, b, shape, **given, dtype=None).values, chained)


@pytest.mark.parametrize("sizes", ((40, 130, 70), (13, 300, 32), (1, 5, 3)))
def test_a_bias_of_a_matrix_belongs_to_its_columns(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b, bias = normal(2000)(m, k), normal(2000)(k, n), torch.randn(n) * 2.0**24
    wide = integer.multiply(a, b, dtype=torch.float64).values + bias.double()
    for kernel in (*KERNELS, "reference"):
        found = integer.multiply(a, b, exponent=-12, bias=Bias(bias, -12), kernel=kernel)
        assert torch.equal(found.values, (wide * 2.0**-12).round().clamp(-32768, 32767).to(torch.int16)), kernel
        chained = integer.multiply(a, b, bias=Bias(bias), kernel=kernel, dtype=None)
        assert torch.equal(chained.values, integer.multiply(a, b, kernel="reference", dtype=None).values + bias), kernel
        assert chained.largest == float(chained.values.abs().max())
        with pytest.raises(NotFinite, match="the bias is infinite or NaN"):
            integer.multiply(a, b, exponent=-12, bias=Bias(bias / 0, -12), kernel=kernel)


def test_a_bias_far_beyond_the_sums_is_told_as_the_largest_that_is_noted() -> None:
    a, bias = torch.ones(3, 4, dtype=torch.int16), torch.tensor([2.0**40, -(2.0**80), 1.0])
    for kernel in (*KERNELS, "reference"):
        found = integer.multiply(a, a.mT, bias=Bias(bias), kernel=kernel)
        assert found.largest_sum == 1 << 62 and found.values.tolist() == [[32767, -32768, 5]] * 3, kernel
        lower = integer.multiply(a, a.mT, bias=Bias(bias.clamp(-(2.0**61))), kernel=kernel)
        assert lower.largest_sum == 1 << 61 and torch.equal(lower.values, found.values), kernel


def test_one_chain_that_only_the_norms_of_chunks_prove_safe_is_the_whole_sum() -> None:
    large, small = torch.full((12, 128), 16384, dtype=torch.int16), torch.full((12, 128), 3, dtype=torch.int16)
    a, b = torch.cat([large, small], 1), torch.cat([small, large], 1)
    for kernel in KERNELS:
        before = torch.full((12, 256), 8000, dtype=torch.int16)  # several chains, which leave their sums behind
        integer.multiply(before, before.mT, kernel=kernel, exponent=-24)
        found = integer.multiply(a, b.mT, kernel=kernel, exponent=-10)
        assert found.largest_sum == 256 * 3 * 16384, kernel
        assert torch.equal(found.values, torch.full((12, 12), 256 * 3 * 16, dtype=torch.int16)), kernel


@pytest.mark.parametrize("largest", (3, 1000, 32767))
def test_the_norms_of_windows_are_bounded_by_their_largest_element(largest: int) -> None:
    torch.manual_seed(largest)
    shape = ConvolutionShape.of((2, 5, 12, 12), (3, 5, 3, 3), padding=1)
    x = torch.full(shape.input, largest, dtype=torch.int16)
    x[:, :, ::5] = -largest - 1
    gradient = torch.full(shape.output, -32768, dtype=torch.int16)
    expected = integer.convolve("weight_gradient", x, gradient, shape, dtype=torch.int64, kernel="reference")
    for kernel in KERNELS:
        found = integer.convolve("weight_gradient", x, gradient, shape, dtype=torch.int64, kernel=kernel)
        assert same(found, expected), kernel


@pytest.mark.parametrize("with_bias", (False, True))
def test_pixels_between_the_windows_are_zero_or_the_bias(with_bias: bool) -> None:
    shape = ConvolutionShape.of((3, 4, 9, 34), (14, 4, 2, 1), stride=(3, 2))
    gradient, weight = random_int16(*shape.output), random_int16(*shape.weight)
    bias = Bias(torch.arange(4.0) - 0.5, 3) if with_bias else None
    between = torch.ones(shape.input[2:], dtype=torch.bool)
    between[torch.arange(9) % 3 < 2] = torch.arange(34) % 2 == 1
    given = {"exponent": -18, "bias": bias}
    expected = integer.convolve("input_gradient", gradient, weight, shape, kernel="reference", **given)
    standing = torch.tensor([-4, 4, 12, 20] if with_bias else [0] * 4, dtype=torch.int16)
    assert torch.equal(expected.values[:, :, between], standing[:, None].expand(3, 4, int(between.sum())))
    for kernel in KERNELS:
        found = integer.convolve("input_gradient", gradient, weight, shape, kernel=kernel, **given)
        assert same(found[:3], expected[:3]), kernel


def test_pixels_that_no_window_reaches_have_no_gradient() -> None:
    shape = ConvolutionShape.of((1, 2, 6), (2, 2, 1), stride=3)
    grad, weight = random_int16(*shape.output), random_int16(*shape.weight)
    for kernel in (*KERNELS, "reference"):
        gradient = integer.convolve("input_gradient", grad, weight, shape, dtype=torch.int64, kernel=kernel)
        assert not gradient.values[..., [1, 2, 4, 5]].any()


def test_empty_operands_give_zeros_or_nothing() -> None:
    shape = ConvolutionShape.of((0, 2, 5), (3, 2, 3))
    empty = random_int16(*shape.input)
    for kernel in (*KERNELS, "reference"):
        zeros = integer.multiply(random_int16(3, 0), random_int16(0, 4), kernel=kernel)
        assert same(zeros, (torch.zeros(3, 4, dtype=torch.int16), 0, 0, 0, 0.0))
        rows = integer.multiply(random_int16(0, 5), random_int16(5, 4), kernel=kernel, dtype=None)
        assert rows.values.shape == (0, 4)
        batch = integer.multiply(random_int16(0, 2, 5), random_int16(0, 5, 4), kernel=kernel, dtype=None)
        assert batch.values.shape == (0, 2, 4)
        output = random_int16(*shape.output)
        gradient = integer.convolve("weight_gradient", empty, output, shape, kernel=kernel)
        assert same(gradient, (torch.zeros(3, 2, 3, dtype=torch.int16), 0, 0, 0, 0.0))
        apart = ConvolutionShape.of((0, 2, 6), (2, 2, 1), stride=3)  # pixels without a window are filled with zeros
        ends = random_int16(*apart.output), random_int16(*apart.weight)
        assert integer.convolve("input_gradient", *ends, apart, kernel=kernel).values.shape == (0, 2, 6)


def test_a_convolution_without_results_has_gradients_of_zeros() -> None:
    for sizes, weight in (((2, 3, 2, 5), (4, 3, 3, 2)), ((2, 3, 5, 2), (4, 3, 2, 3)), ((1, 2, 3), (2, 2, 4))):
        shape = ConvolutionShape.of(sizes, weight)
        assert 0 in shape.output
        ends = random_int16(*shape.output), random_int16(*weight)
        for kernel in (*KERNELS, "reference"):
            for dtype in (torch.int64, None):
                of_input = integer.convolve("input_gradient", *ends, shape, dtype=dtype, kernel=kernel).values
                assert of_input.shape == sizes and not of_input.any(), kernel
            forward = integer.convolve("forward", random_int16(*sizes), ends[1], shape, kernel=kernel).values
            assert forward.shape == shape.output, kernel
            ends_of_weight = random_int16(*sizes), ends[0]
            of_weight = integer.convolve("weight_gradient", *ends_of_weight, shape, kernel=kernel).values
            assert of_weight.shape == weight and not of_weight.any(), kernel


def test_an_exponent_can_be_a_tensor() -> None:
    a = random_int16(4, 4)
    assert same(
        integer.multiply(a, a, exponent=torch.tensor(-9), dtype=None), integer.multiply(a, a, exponent=-9, dtype=None)
    )


X = torch.ones(2, 3, dtype=torch.int16)
MISTAKES: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: integer.multiply(X.float(), X), r"a is torch.float32 on cpu; the integer kernels take torch.int16"),
    (lambda: integer.multiply(X, X), r"the depths differ: 3 in a \(2, 3\), 2 in b \(2, 3\)"),
    (lambda: integer.multiply(X[0], X), r"a matrix has two dimensions or more"),
    (lambda: integer.multiply(X.expand(2, 2, 3), X.mT.expand(3, 3, 2)), r"\(2,\) of a and \(3,\) of b differ"),
    (lambda: integer.multiply(X, X.mT, dtype=torch.int32), r"cannot be torch.int32; allowed: torch.int16"),
    (lambda: integer.multiply(X, X.mT, exponent=-901), r"exponent -901; allowed: -900 to 900"),
    (lambda: integer.multiply(X, X.mT, exponent=1, dtype=torch.int64), r"exponent must be 0, not 1; use float64"),
    (
        lambda: integer.multiply(X, X.mT, bias=Bias(torch.ones(3)), dtype=None),
        r"a bias of shape \(3,\); this product takes 2",
    ),
    (lambda: integer.multiply(X, X.mT, dtype=torch.float64, bias=Bias(torch.ones(2))), r"not to torch.float64"),
    (lambda: integer.multiply(X, X.mT, kernel="avx3"), r"unknown integer kernel 'avx3'; did you mean avx2"),
    (lambda: integer.multiply(X[:1, :1].expand(1, 2**32 + 1), X[:1, :1].expand(2**32 + 1, 1)), r"sum in parts"),
    (
        lambda: integer.convolve("backward", X, X, ConvolutionShape.of((1, 1, 3), (1, 1, 1))),
        r"unknown product",
    ),
    (
        lambda: integer.convolve("forward", X, X, ConvolutionShape.of((1, 1, 3), (1, 1, 1))),
        r"the input has shape \(2, 3\); this convolution takes \(1, 1, 3\)",
    ),
    (lambda: ConvolutionShape.of((1, 4, 3), (2, 4, 1), groups=2), r"4 channels into 2 with 2 groups"),
    (lambda: ConvolutionShape.of((1, 4, 3), (2, 4, 5)), r"a kernel of \(5,\) does not fit an input of \(3,\)"),
    (lambda: ConvolutionShape.of((1, 4, 3), (2, 4, 1), stride=0), r"stride \(0,\); allowed: 1 integers of at least 1"),
    (lambda: ConvolutionShape.of((1, 4), (2, 4)), r"must have 1 to 3 spatial dimensions"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_a_mistake_is_named(mistake: tuple[Callable[[], object], str]) -> None:
    with pytest.raises(InvalidInput, match=mistake[1]):
        mistake[0]()


def test_a_kernel_that_the_processor_lacks_is_refused() -> None:
    for kernel in set(integer.KERNELS[:-1]) - set(KERNELS):
        with pytest.raises(Unavailable, match=kernel):
            integer.multiply(X, X.mT, kernel=kernel)


def test_without_the_library_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(4000)(20, 600), normal(4000)(600, 30)
    expected = [integer.multiply(a, b, exponent=-20), integer.multiply(a, b, dtype=None)]
    if cpu.library() is not None:
        cpu.select(None)  # an instruction set that is asked for is none without the library
    monkeypatch.setattr(cpu, "library", lambda: None)
    found = [integer.multiply(a, b, exponent=-20), integer.multiply(a, b, dtype=None)]
    assert all(same(x, y) for x, y in zip(expected, found, strict=True))
    with pytest.raises(Unavailable, match="reference runs without it"):
        integer.multiply(a, b, kernel="portable")


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_convolution_lies_in_memory_alike_in_every_kernel(product: str) -> None:
    shape = ConvolutionShape.of((2, 4, 6, 7), (6, 2, 3, 2), stride=(2, 3), padding=(1, 0), groups=2)
    sizes = {"forward": (shape.input, shape.weight), "input_gradient": (shape.output, shape.weight)}
    a, b = (random_int16(*size) for size in sizes.get(product, (shape.input, shape.output)))
    for dtype in (torch.int16, None):
        for kernel in (*kernels(), "reference"):
            found = integer.convolve(product, a, b, shape, exponent=-20, dtype=dtype, kernel=kernel)
            assert found.values.is_contiguous()


def test_the_depth_of_a_convolutions_products_is_that_of_their_sums_with_padding_to_pairs() -> None:
    shape = ConvolutionShape.of((2, 6, 5, 6), (4, 3, 3, 2), groups=2)
    assert shape.output == (2, 4, 3, 5)
    found = [shape.depth(product) for product in ("forward", "input_gradient", "weight_gradient")]
    assert found == [3 * 2 * 4, 3 * 2 * 2, 2 * 16]


@pytest.mark.parametrize("exponent", [-20, 3])
def test_products_of_which_nothing_is_read_are_the_same_sums(monkeypatch: pytest.MonkeyPatch, exponent: int) -> None:
    left, right = (random_int16(*one) for one in ((2, 5, 600), (2, 600, 3)))
    under = torch.tensor(exponent, dtype=torch.int32)
    dims, case = 2, CONVOLUTIONS[0]
    shape = convolution_shape(dims, case)
    x, w = (random_int16(*shape.of_operand(name)) for name in PRODUCTS["forward"][:2])
    dtypes = (None, torch.float32, torch.float64)
    wanted = [integer.matmul(left, right, under, one) for one in dtypes]
    convolved = [integer.convolution("forward", (x, w), shape, under, one) for one in dtypes]
    monkeypatch.setattr(integer, "answers_at_once", lambda _: False)  # as on a device
    for name in ("by_triton", "sums_by_triton"):
        monkeypatch.setattr(integer_run, name, lambda *_: pytest.fail("a kernel of another device was asked"))
    found = [integer.matmul(left, right, under, one) for one in dtypes]
    assert all(map(torch.equal, found, wanted)) and [one.dtype for one in found] == [one.dtype for one in wanted]
    for one, other in zip(dtypes, convolved, strict=True):
        assert torch.equal(integer.convolution("forward", (x, w), shape, under, one), other)
    sums = integer.matmul(left, right, under, torch.int64)
    assert sums.dtype is torch.int64 and torch.equal(sums, int64_product(left, right)), "which are not scaled"
    monkeypatch.setattr(integer, "widest_float", lambda _: torch.float32)
    monkeypatch.setattr(integer_reference, "times", lambda *_: pytest.fail("there is no fp64"))
    narrow = integer.matmul(left, right, under, torch.float32)
    assert torch.equal(narrow, (sums.float() * 2.0**exponent))


def test_products_of_a_device_with_tritons_kernels_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = random_int16(2, 5, 600), random_int16(2, 600, 3)
    shape = convolution_shape(2, CONVOLUTIONS[0])
    x, w = (random_int16(*shape.of_operand(name)) for name in PRODUCTS["forward"][:2])
    under, dtypes = torch.tensor(-20, dtype=torch.int32), (None, torch.float32, torch.float64)
    wanted = [integer.matmul(left, right, under, one) for one in dtypes]
    convolved = [integer.convolution("forward", (x, w), shape, under, one) for one in dtypes]
    sums = integer.matmul(left, right, torch.zeros((), dtype=torch.int32), torch.int64)
    asked: list[tuple[torch.dtype, bool]] = []

    def by_triton(
        left: Tensor, right: Tensor, scale: Tensor, dtype: torch.dtype, chained: bool
    ) -> tuple[Tensor, Tensor]:
        asked.append((dtype, chained))
        found = integer_reference.matmul(left, right, chained)
        values = (found.double() * scale).float() if chained else integer_reference.times(found, scale, dtype)
        return values, torch.zeros(2, dtype=torch.int64)

    monkeypatch.setattr(integer, "answers_at_once", lambda _: False)
    monkeypatch.setattr(integer, "chosen_kernel", lambda _: "triton")
    monkeypatch.setattr(integer_run, "by_triton", by_triton)
    found = [integer.matmul(left, right, under, one) for one in dtypes]
    assert all(map(torch.equal, found, wanted)) and torch.equal(integer.matmul(left, right, under, torch.int64), sums)
    assert asked == [(torch.float32, True), (torch.float32, False), (torch.float64, False), (torch.int64, False)]
    asked.clear()
    found = [integer.convolution("forward", (x, w), shape, under, one) for one in dtypes]
    assert all(map(torch.equal, found, convolved))
    assert asked == [(torch.float32, True), (torch.int64, False), (torch.int64, False)]


@pytest.mark.parametrize("depth", [1024, 1025, 2049])
def test_a_device_sums_products_of_digits_that_fp32_holds(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    left = torch.full((1, depth), -32768, dtype=torch.int16)
    left[0, -1] = 256
    expected = int64_product(left, left.mT)
    monkeypatch.setattr(integer_reference, "answers_at_once", lambda _: False)
    assert torch.equal(integer_reference.matmul(left, left.mT, False), expected)


@pytest.mark.parametrize(
    ("capability", "kernel"), [((7, 5), "reference"), ((8, 0), "triton"), ((8, 6), "triton"), ((9, 0), "triton")]
)
def test_a_gpu_has_tritons_kernel_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernel: str
) -> None:
    monkeypatch.setattr(integer, "capability", lambda _: capability)
    for is_installed in (True, False):
        monkeypatch.setattr(integer.triton, "is_installed", lambda is_installed=is_installed: is_installed)
        assert integer._on_device(torch.device("cuda")) == (kernel if is_installed else "reference")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_sum_is_rounded_once_to_a_subnormal_number_too(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    left, right = torch.tensor([[16384, 16384, 1025]]).short(), torch.tensor([[16384], [16384], [1]]).short()
    under = torch.tensor(-160, dtype=torch.int32)  # a last place above 2**11, between two of which 2**29 + 1025 lies
    monkeypatch.setattr(integer, "answers_at_once", lambda _: at_once)
    assert integer.matmul(left, right, under, torch.float32).item() == ((1 << 18) + 1) * 2.0**-149
    assert integer.matmul(left, right, under, torch.float64).item() == ((1 << 29) + 1025) * 2.0**-160


def test_kernels_of_the_processor_and_the_definition_ask_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    a, shape = torch.arange(24).view(2, 3, 4).short(), ConvolutionShape.of((1, 2, 5), (3, 2, 2))
    x, w = random_int16(*shape.input), random_int16(*shape.weight)
    bias = Bias(torch.tensor([1.0, -2.0, 3.0]))
    expected = integer.multiply(a, a.mT, bias=bias, kernel="reference")
    sums = (a.long() @ a.mT.long()).double() + bias.numbers.double()
    assert torch.equal(expected.values, sums.clamp(-32768, 32767).short()), "of each column in every matrix"
    convolved = integer.convolve("forward", x, w, shape, bias=bias, kernel="reference")
    with monkeypatch.context() as patch:
        for name in ("by_triton", "sums_by_triton"):
            patch.setattr(integer_run, name, lambda *_: pytest.fail("Triton was asked"))
        for kernel in (*KERNELS, "reference"):
            assert same(integer.multiply(a, a.mT, bias=bias, kernel=kernel), expected)
            assert same(integer.convolve("forward", x, w, shape, bias=bias, kernel=kernel), convolved)
            for dtype in (None, torch.int64, torch.int16):
                integer.multiply(a, a.mT, dtype=dtype, kernel=kernel)
                integer.convolve("forward", x, w, shape, dtype=dtype, kernel=kernel)
    asked: list[bool] = []
    definition = integer_reference.matmul

    def by_sums(left: Tensor, right: Tensor, chained: bool) -> Tensor:
        asked.append(chained)
        return definition(left, right, chained)

    monkeypatch.setattr(integer_run, "sums_by_triton", by_sums)
    monkeypatch.setattr(integer_reference, "matmul", lambda *_: pytest.fail("the definition was asked"))
    assert same(integer.multiply(a, a.mT, bias=bias, kernel="triton"), expected) and asked == [False]
    assert same(integer.convolve("forward", x, w, shape, bias=bias, kernel="triton"), convolved) and len(asked) == 2


def test_the_kernel_of_a_device_is_no_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    here, far = torch.ones(1), torch.ones(1, device="meta")
    monkeypatch.setattr(integer, "_on_device", lambda _: "its own")
    monkeypatch.setattr(integer, "KERNELS", (*integer.KERNELS, "its own"))
    assert integer.chosen_kernel(here) == cpu.asked() and integer.chosen_kernel(here, "avx2") == "avx2"
    for kernel in ("reference", "triton"):
        assert integer.chosen_kernel(far, kernel) == integer.chosen_kernel(here, kernel) == kernel
    for kernel in ("avx2", "portable", None):
        with pytest.raises(Unavailable, match="has no integer products on meta; triton and reference have them"):
            integer.chosen_kernel(far, kernel)
    monkeypatch.setattr(integer, "_ANYWHERE", ("reference", "triton", "its own"))
    assert integer.chosen_kernel(far) == "its own"
    monkeypatch.setattr(integer, "forced", lambda: "cpu")
    assert integer.chosen_kernel(here) == cpu.asked() and integer.chosen_kernel(here, "reference") == "reference"
    with pytest.raises(Unavailable, match="cpu has no integer products on meta"):
        integer.chosen_kernel(far)


def test_bounds_of_depth_and_sizes_are_the_largest_that_are_taken() -> None:
    integer._check_depth(1 << 32)
    with pytest.raises(InvalidInput, match="a depth of 4294967297 could overflow int64; allowed: up to 4294967296"):
        integer._check_depth((1 << 32) + 1)
    for one, other in ((X.float(), X.float().mT), (X.int(), X.int().mT), (X, X.mT.float())):
        with pytest.raises(InvalidInput, match=r"the integer kernels take torch\.int16"):
            integer.multiply(one, other)
    for sizes, weight in (((1, 4, 3), (2, 4, 0)), ((1, 4, 3, 3), (2, 4, 1, 0)), ((1, 4, 3, 3), (2, 4, 0, 1))):
        with pytest.raises(InvalidInput, match="does not fit an input"):
            ConvolutionShape.of(sizes, weight)
    grouped = ConvolutionShape.of((1, 6, 4), (8, 3, 2), groups=2)
    assert grouped.depth("forward") == 2 * 4 and grouped.depth("input_gradient") == 2 * 4
    single = random_int16(2, 3, 0)
    for kernel in (*KERNELS, "reference"):
        for dtype in (torch.int16, torch.float32, torch.int64, None):
            found = integer.multiply(single.mT, random_int16(2, 3, 4), dtype=dtype, kernel=kernel)
            assert found.values.shape == (2, 0, 4) and found[1:] == (0, 0, 0, 0.0)
        inner = random_int16(4, 5, 3).permute(2, 0, 1)  # whose matrices have no neighbours
        assert torch.equal(integer.multiply(inner, inner.mT, dtype=torch.int64, kernel=kernel).values,
                           int64_product(inner, inner.mT))  # fmt: skip


def test_a_convolution_knows_how_many_products_it_sums_and_does() -> None:
    shape = ConvolutionShape.of((5, 12, 9, 8), (6, 4, 3, 2), 1, 0, 1, 3)
    assert shape.output == (5, 6, 7, 7) and shape.operations == 2 * 5 * 7 * 7 * (6 * 4 * 3 * 2)
    assert shape.depth("forward") == 3 * 2 * 4 and shape.depth("input_gradient") == 3 * 2 * 2
    assert shape.depth("weight_gradient") == 5 * (7 * 7 + 1), "of an even number of places"


def test_products_of_which_nothing_is_read_are_told_to_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    @contextmanager
    def observer(operations: int) -> Iterator[None]:
        seen.append(operations)
        yield

    monkeypatch.setattr("lowp.kernels.int16.integer_run.observers", [observer])
    under = torch.tensor(0, dtype=torch.int32)
    for at_once in (True, False):
        monkeypatch.setattr(integer, "answers_at_once", lambda _, at_once=at_once: at_once)
        integer.matmul(random_int16(2, 5, 6), random_int16(2, 6, 3), under, None)
    assert seen == [2 * 2 * 5 * 6 * 3] * 2
