"""The profiler's counts: the C++ library and torch give equal counts for any bits, dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lowp.kernels import cpu, use
from lowp.kernels.steps.spectra import SOME, count_tensor, count_updates, largest_of, peak_of, some_of

native = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")


def any_bits(count: int = 20_000) -> Tensor:
    """Return numbers of every kind: uniform bits, including zeros, subnormals, NaN and infinities."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    bits[:8] = torch.tensor([0, -(2**31), 1, 0x7F800000, -0x800000, 0x7FC00000, 0x7F7FFFFF, 0x7F800001])
    bits[100:1100] &= ~0xFFFF  # short significands
    return bits.to(torch.int32).view(torch.float32)


@native
@pytest.mark.parametrize("scale", [1.0, 2.0**17, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_library_and_torch_count_alike(dtype: torch.dtype, scale: float) -> None:
    x = any_bits().to(dtype)
    found = count_tensor(x, scale)
    with use("bitwise"):
        wanted = count_tensor(x, scale)
    assert np.array_equal(found.bins, wanted.bins) and np.array_equal(found.significant, wanted.significant)
    assert np.array_equal(found.powers, wanted.powers) and found.powers.any()
    # NaN: a division may keep another payload, and nothing else depends on it
    assert found[3:7] == wanted[3:7] and (scale != 1.0 or found.checksum == wanted.checksum)
    assert found.sum_squares == pytest.approx(wanted.sum_squares, rel=1e-12)


@native
def test_threads_and_layout_change_no_count() -> None:
    x = torch.randn(300, 700, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = count_tensor(x.t())
        torch.set_num_threads(1)
        one = count_tensor(x)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(one.bins, two.bins) and one.checksum == two.checksum
    assert one.bins.sum() == one.significant.sum() == x.numel() - one.zeros


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_an_empty_tensor_counts_nothing(name: str) -> None:
    if name == "cpu" and cpu.library() is None:
        pytest.skip("the C++ library was not built")
    with use(name):
        found = count_tensor(torch.empty(3, 0))
        joint, energy, none = count_updates(torch.empty(0), torch.empty(0), None)
    assert (
        not found.bins.any()
        and not found.significant.any()
        and not found.powers.any()
        and found[3:] == (0, 0, 0, 0.0, 0.0, 0)
    )
    assert not joint.any() and not energy.any() and none == 0


@native
def test_updates_are_counted_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, update, gradient = torch.randn(3, 70_000, generator=generator)
    weight[:1000], update[500:2000], gradient[::7] = 1.0, 0.0, 0.0
    weight[2000:2100], update[2100:2200], gradient[2:4] = 0.0, 2.0**-140, torch.tensor([torch.nan, -torch.inf])
    for slope in (gradient, None):
        found = count_updates(weight, update * 1e-4, slope)
        with use("bitwise"):
            wanted = count_updates(weight, update * 1e-4, slope)
        assert np.array_equal(found[0], wanted[0]) and found[2] == wanted[2]
        assert found[1] == pytest.approx(wanted[1], rel=1e-12)


@pytest.mark.parametrize("kind", ["cpu", "bitwise"])
def test_the_largest_of_several_tensors_is_found_whatever_they_are(kind: str) -> None:
    if kind == "cpu" and cpu.library() is None:
        pytest.skip("the C++ library was not built")
    with use(kind):
        several = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 7, 1024, 5000)]
        several += [torch.randn(30, 20).t(), torch.randn(9).double(), torch.randn(9).bfloat16(), torch.empty(0)]
        largest = max(float(one.abs().amax()) for one in several if one.numel())
        assert largest_of(several) == largest
        several[3][4321] = -7.0
        assert largest_of(several) == 7.0
        several[3][4999] = -torch.inf
        assert largest_of(several) == torch.inf
        several[3][4999] = torch.nan
        assert np.isnan(largest_of(several))
        assert largest_of([]) == largest_of([torch.empty(0)]) == 0.0


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_some_numbers_of_several_tensors_are_the_same_by_the_library_and_by_torch(dtype: torch.dtype) -> None:
    several = [any_bits()[:count].to(dtype) for count in (100, 0, 255, 256, 257, 512, 1023, 1024, 1025, 8192, 20_000)]
    found = some_of(several)
    with use("bitwise"):
        assert torch.equal(found.view(torch.int32), some_of(several).view(torch.int32))
    assert found.shape == (len(several), SOME) and not found[1].any()
    for one, taken in zip(several, found, strict=True):
        assert np.isin(taken.view(torch.int32).numpy(), one.float().view(torch.int32).numpy()).all() or not len(one)


@pytest.mark.parametrize("shape", [(8, 1), (64, 64), (512, 2), (1024, 768), (48, 3, 3, 64)])
def test_some_numbers_of_a_tensor_are_spread_over_rows_and_columns(shape: tuple[int, ...]) -> None:
    for dim, size in enumerate(shape):
        place = torch.arange(size).view([-1 if one == dim else 1 for one in range(len(shape))]).expand(shape).float()
        assert len(some_of([place.contiguous()]).unique()) >= min(size, SOME) / 2
        for one in (place.contiguous(), place.contiguous().transpose(0, 1)):
            assert peak_of(one) >= 0.7 * (size - 1)


def test_the_peak_of_a_tensor_is_its_largest_magnitude_or_nan() -> None:
    x = torch.linspace(-3, 2, 4096)
    assert peak_of(x) == peak_of(x.view(64, 64).t()) == peak_of(torch.tensor(-3.0)) == 3.0
    assert peak_of(x.half()) == 3.0 and peak_of(torch.tensor([1.0, -torch.inf])) == torch.inf
    for bad in (torch.tensor([1.0, torch.nan, 3.0]), torch.full((50_000,), torch.nan)):
        assert np.isnan(peak_of(bad))
    whole = torch.full((200, 200), 1e9)
    whole[:, ::2] = -0.5
    assert peak_of(whole[:, ::2]) == 0.5, "of a large tensor, too, its own numbers alone are looked at"


def test_other_dtypes_are_counted_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([1.0, -0.5, 0.0, 448.0])
    found = count_tensor(x.to(torch.float8_e4m3fn))
    assert (found.zeros, found.maximum, found.checksum) == (1, 448.0, count_tensor(x).checksum)
    small = count_tensor(torch.tensor([1e-60, 1e60, 2.0], dtype=torch.float64))
    assert (small.zeros, small.inf, small.maximum) == (1, 1, 2.0), "what fp32 makes of them"


@native
def test_updates_of_any_size_are_counted_alike() -> None:
    sizes = 2.0 ** torch.arange(-148.0, 127.0)
    for weight, update in ((sizes, sizes.flip(0)), (sizes, sizes * 2.0**-10), (torch.ones_like(sizes), sizes)):
        counts, energy, unchanged = count_updates(weight, update, update.flip(0))
        with use("bitwise"):
            by_torch = count_updates(weight, update, update.flip(0))
        assert np.array_equal(counts, by_torch[0]) and np.allclose(energy, by_torch[1], rtol=1e-6, equal_nan=True)
        assert unchanged == by_torch[2] and counts.sum() + unchanged == len(sizes)


# -- which way and which numbers --------------------------------------------------------------------------------------
def test_without_the_library_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "loaded", lambda: pytest.fail("the library was asked"))
    x = torch.tensor([1.0, -3.0])
    with use("bitwise"):
        assert count_tensor(x).maximum == largest_of([x]) == 3.0 and count_updates(x, x, None)[0].sum() == 2
        assert some_of([x])[0, :2].tolist() == [1.0, -3.0]


@native
@pytest.mark.parametrize("instructions", cpu.available() if cpu.library() is not None else ())
def test_numbers_of_fp64_are_counted_as_fp32_has_them(instructions: str) -> None:
    x = any_bits(3000).double() * (1 + torch.rand(3000, generator=torch.Generator().manual_seed(1)).double())
    x[10:20] = torch.tensor([1e-60, 1e60, -1e300, 1e-46, 2.0**-150 * 1.01]).double().repeat(2)
    cpu.select(instructions)
    try:
        found, wanted = count_tensor(x, 3.0), count_tensor(x.float(), 3.0)
    finally:
        cpu.select(None)
    assert all(map(np.array_equal, found[:3], wanted[:3])) and found[3:7] == wanted[3:7]


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_numbers_between_others_are_counted_alone(name: str) -> None:
    if name == "cpu" and cpu.library() is None:
        pytest.skip("the C++ library was not built")
    x = torch.tensor([[1.0, 100.0], [-2.0, torch.nan], [0.0, 100.0]])
    with use(name):
        found = count_tensor(x[:, 0])
        assert found[3:8] == (1, 0, 0, 2.0, 5.0) and found.bins.sum() == 2
        assert some_of([x[:, 0]])[0].unique().tolist() == [-2.0, 0.0, 1.0]
        assert torch.equal(some_of([x.nan_to_num().t()]), some_of([x.nan_to_num().t().contiguous()]))


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_some_numbers_of_a_tensor_are_multiples_of_a_step_without_a_common_divisor(name: str) -> None:
    if name == "cpu" and cpu.library() is None:
        pytest.skip("the C++ library was not built")
    steps = {1: 0, 2: 1, 8: 5, 100: 61, 256: 157, 1000: 617, 1024: 633, 1025: 4, 1026: 1, 2048: 7, 200_000: 781}
    several = [torch.arange(float(count)) for count in steps]
    with use(name):
        found = some_of(several)
        mixed = some_of([several[3], several[4].half(), several[5].bfloat16().double()])
    for taken, (count, step) in zip(found, steps.items(), strict=True):
        assert torch.equal(taken, (torch.arange(SOME) * step % count).float()), count
    assert torch.equal(mixed[0], found[3]) and torch.equal(mixed[1], found[4])
    assert torch.equal(mixed[2], found[5].bfloat16().float())


def test_some_numbers_are_the_same_in_inference_and_where_gradients_are_recorded() -> None:
    x = torch.arange(777.0)
    with use("bitwise"):
        with torch.inference_mode():
            first = some_of([x])
        assert torch.equal(some_of([x.requires_grad_()]), first) and torch.equal(some_of([x * 2]), 2 * first)


def test_a_large_tensor_is_looked_at_in_pieces_of_neighbours() -> None:
    for count, place, is_met in (
        *((8192, 100, True), (8192, 8191, True), (8193, 1, True), (8193, 63, True), (8193, 64, False)),
        *((8193, 125, False), (8193, 126, True), (8193, 189, True), (8193, 63 * 126 + 63, True), (8193, 8002, False)),
        *((12_288, 100, False), (100_000, 63 * 1547 + 63, True), (100_000, 1546, False), (100_000, 1547, True)),
    ):
        x = torch.zeros(count)
        for number in (5.0, -5.0):
            x[place] = number
            assert peak_of(x) == (5.0 if is_met else 0.0), (count, place)
    far = torch.empty(7, device="meta")
    found = peak_of(far)
    assert isinstance(found, Tensor) and found.is_meta and found.shape == ()


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_the_largest_number_is_exact_in_fp64_too(name: str) -> None:
    if name == "cpu" and cpu.library() is None:
        pytest.skip("the C++ library was not built")
    wide, small = torch.tensor([-1.0 - 2.0**-40, 0.5], dtype=torch.float64), torch.tensor([1.0, -1.0])
    with use(name):
        for tensors in ([wide], [small, wide], [wide, small], [wide.t(), small.half()]):
            assert largest_of(tensors) == 1 + 2.0**-40
        assert largest_of([small.half(), small.bfloat16() * 3]) == 3.0
        assert np.isnan(largest_of([small * torch.nan, wide])) and np.isnan(largest_of([small, wide * torch.nan]))


def test_the_numbers_of_a_tensor_that_are_looked_at_are_spread_by_the_golden_ratio() -> None:
    from lowp.kernels.steps.spectra import even_places

    places = even_places(1000, 5).tolist()
    assert places == [0, 618, 236, 854, 472]
