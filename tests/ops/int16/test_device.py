"""On a device int16 regions multiply integers whose exponents stay there, with the bits of a CPU.

Shown on CPU tensors, by Triton's interpreter and by products of digits in torch, which any device has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from gpu.fake_cuda import fake_cuda
from gpu.metal import WithoutFp64
from gpu.test_no_host_reads import HostReads
from torch import Tensor

import lowp
from lowp import compat, kernels
from lowp.kernels.choose import dispatch
from lowp.kernels.int16 import integer_reference
from lowp.kernels.int16.integer_run import observed

Function = Callable[..., Tensor]

CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((3, 5, 20), (9, 20), (9,))),
    "matmul": (torch.matmul, ((2, 5, 33), (33, 4))),
    "bmm": (torch.bmm, ((2, 5, 33), (2, 33, 4))),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), ((5, 8), (8, 3), (5, 3))),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, 2, 1, groups=2), ((2, 4, 5, 5), (6, 2, 3, 3), (6,))),
    "transposed": (lambda x, w: F.conv_transpose1d(x, w, None, 2, output_padding=1), ((2, 3, 4), (3, 2, 3))),
    "second word": (F.linear, ((4, 8), (1030, 8))),
}
PRESETS = ("dfp16", "flex16+5")


@contextmanager
def on_a_device(way: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let integers of the CPU be as far away as a device's: multiplied by Triton's kernel, or as digits in torch."""
    if way == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        with kernels.use("triton"):
            yield
        return
    with patch.context() as patched:
        patched.setattr(dispatch, "is_on_host", lambda x: False)
        yield


def operands(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def stepped(case: str, preset: str, device: str = "cpu") -> list[Tensor]:
    """Return the output of a case under a preset on a device, and the gradients."""
    function, shapes = CASES[case]
    tensors = [one.detach().to(device).requires_grad_() for one in operands(shapes)]
    with lowp.autocast(preset):
        result = function(*tensors)
    gradient = torch.rand(result.shape, generator=torch.Generator().manual_seed(1)) / 3000
    if case == "second word":  # one class of many has nearly all of the gradient
        gradient[:, :4] += torch.eye(4)
    result.backward(gradient.to(device))
    return [result.detach(), *(one.grad for one in tensors if one.grad is not None)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["torch", "triton"])
def test_a_contraction_and_its_gradients_have_the_bits_of_a_cpu(
    case: str, preset: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, products = stepped(case, preset), list[int]()

    @contextmanager
    def noted(operations: int) -> Iterator[None]:
        products.append(operations)
        yield

    with on_a_device(way, monkeypatch), observed(noted):
        found = stepped(case, preset)
    assert len(products) == (5 if case == "second word" else 3)
    assert len(found) == len(expected) == 1 + len(CASES[case][1])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_read_by_the_host(case: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device("torch", monkeypatch), HostReads("cpu"):
        stepped(case, preset)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", CASES)
def test_on_cuda_all_of_it_lies_there(case: str, preset: str) -> None:
    function, shapes = CASES[case]
    with fake_cuda(), HostReads() as seen, lowp.autocast(preset):
        result = function(*(torch.empty(shape, device="cuda").requires_grad_() for shape in shapes))
    assert result.is_cuda and result.dtype is torch.float32 and not seen.sent


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", CASES)
def test_without_fp64_the_bits_are_the_same(case: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stepped(case, preset)
    monkeypatch.setattr(compat, "has_fp64", lambda device: False)
    with on_a_device("torch", monkeypatch), WithoutFp64():
        found = stepped(case, preset)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_sum_rounded_to_odd_is_written_as_the_sum_is() -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.randint(-(1 << 50), 1 << 50, (4096,), generator=generator) >> torch.randint(0, 50, (4096,))
    bias = torch.randn(4096, generator=generator) * 2.0**6
    exponent = torch.full((), -30, dtype=torch.int32)
    for added in (None, bias):
        found = integer_reference.summed_to_odd([sums], [exponent], added)
        exact = sums.double() * 2.0**-30 + (0 if added is None else added.double())
        for places in (0, 4, 9):
            largest = 2.0 ** (20 - places)  # 21 bits and fewer
            same = (found * 2.0**places).round() == (exact * 2.0**places).round()
            assert bool(same[exact.abs() < largest].all())


def test_a_bias_that_is_not_finite_or_far_larger_reaches_the_sum() -> None:
    sums, exponent = torch.tensor([5, -3, 1]), torch.full((), -40, dtype=torch.int32)
    bias = torch.tensor([torch.inf, 2.0**40, torch.nan])
    found = integer_reference.summed_to_odd([sums], [exponent], bias)
    assert found[:2].tolist() == [torch.inf, 2.0**40 - 2.0**16] and bool(found[2].isnan()), "to odd: one place below"


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_told_by_the_exponent_and_makes_the_results_so(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(((4, 8), (3, 8)))
    with torch.no_grad():
        x[1, 2] = bad
    with on_a_device("torch", monkeypatch):
        with HostReads("cpu"), lowp.autocast("dfp16"):
            result = F.linear(x, w)
        result.sum().backward()
    assert result.isnan().all() and w.grad is not None and w.grad.isnan().all()
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("depth", [0, 1, 255, 257, 1024, 1025, 3000])
@pytest.mark.parametrize("chained", [False, True])
def test_products_of_digits_are_exact(depth: int, chained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (torch.full(shape, -32768, dtype=torch.int16) for shape in ((3, depth), (depth, 2)))
    a[1] = torch.randint(-32768, 32768, (depth,)).to(torch.int16)
    b[:, 1] = 32767
    expected = integer_reference.matmul(a, b, chained)
    with on_a_device("torch", monkeypatch), WithoutFp64():
        assert torch.equal(integer_reference.matmul(a, b, chained), expected)
