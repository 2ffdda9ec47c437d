"""fp8 by torch's scaled product, which chips from sm_89 on have, and whose numbers the CPU's gives here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.fake_cuda import fake_cuda
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.kernels.products import fp8_products
from lowp.ops import coded as layers
from lowp.ops import direct

FORWARD, BACKWARD = parse("e4m3fn@fp32/tensor"), parse("e5m2@fp32/tensor")


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "multiplies_fp8", lambda x: True)
    monkeypatch.setattr(direct, "chosen", lambda: "triton")  # as on a GPU


class Products(TorchDispatchMode):
    """Counts torch's scaled products."""

    count = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        self.count += "_scaled_mm" in str(func)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def _stepped(x: Tensor, layer: nn.Linear) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with lowp.autocast("fp8"):
        result = layer(x)
    result.square().sum().backward()
    found = [result.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("shape", [(16, 32), (3, 5, 32), (7, 20)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_those_of_the_long_way(
    shape: tuple[int, ...], bias: bool, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(shape[-1], 9, bias=bias), torch.randn(shape)
    expected = _stepped(x, layer)
    request.getfixturevalue("capable")
    with Products() as products:
        found = _stepped(x, layer)
    assert products.count == 3
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("first", "second", "products"),
    [
        ((16, 32), (32, 9), 3),
        ((3, 5, 32), (32, 9), 3),
        ((20,), (20, 9), 3),
        ((2, 5, 32), (2, 32, 9), 0),
        ((5, 32), (32,), 0),
    ],
)
def test_a_product_with_one_matrix_is_a_layer_and_one_of_batches_is_emulated(
    first: tuple[int, ...], second: tuple[int, ...], products: int, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(first), torch.randn(second)

    def stepped() -> list[Tensor]:
        one, other = a.clone().requires_grad_(), b.clone().requires_grad_()
        with lowp.autocast("fp8"):
            result = one @ other
        result.square().sum().backward()
        return [result.detach(), *(x.grad for x in (one, other) if x.grad is not None)]

    expected = stepped()
    request.getfixturevalue("capable")
    with Products() as counted:
        found = stepped()
    assert counted.count == products
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("cast", [FORWARD, BACKWARD])
def test_the_operands_have_the_casts_own_bits(cast: lowp.Cast) -> None:
    x = torch.randn(20, 30) * 100
    assert torch.equal(fp8_products.encoded(x, cast).values, lowp.quantize(x, cast))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_reaches_the_result(bad: float, capable: None) -> None:
    x = torch.randn(4, 16)
    x[1, 2] = bad
    with lowp.autocast("fp8"):
        result = F.linear(x, torch.randn(8, 16))
    assert not bool(result[1].isfinite().any()) and bool(result[0].isfinite().all())


def test_a_quarter_of_the_bytes_is_kept_for_backward(capable: None) -> None:
    sizes: list[int] = []
    layer, x = nn.Linear(64, 64), torch.randn(128, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.nbytes), t)[1], lambda t: t):
        with lowp.autocast("fp8"):
            layer(x)
    assert sum(sizes) == 128 * 64 + 64 * 64 + 2 * 4


def test_a_gradient_of_a_gradient_goes_the_long_way(capable: None) -> None:
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    with lowp.autocast("fp8"):
        result = F.linear(x, w)
    (first,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), w)
    assert bool(second.isfinite().all()) and bool(second.any())


@pytest.mark.parametrize(("capability", "multiplies"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_the_chip_decides(capability: tuple[int, int], multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_products, "capability", lambda device: capability)
    with fake_cuda():
        assert fp8_products.multiplies_fp8(torch.empty(2, device="cuda")) is multiplies
    assert not fp8_products.multiplies_fp8(torch.empty(2))


@pytest.mark.parametrize("to", [FORWARD, BACKWARD], ids=str)
@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_a_matrix_encoded_by_triton_is_that_of_the_long_way(to: Any, bad: float | None) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    torch.manual_seed(0)
    x = torch.randn(6, 20) * 3.0 ** torch.randn(6, 20)
    if bad is not None:
        x[2, 3] = bad
    with kernels.use("bitwise"):
        expected = fp8_products.encoded(x, to)
    with kernels.use("triton"):
        found = fp8_products.encoded(x, to)
    assert found.scale == expected.scale and found.numbers.dtype is expected.numbers.dtype
    assert torch.equal(found.values.nan_to_num(7.25), expected.values.nan_to_num(7.25))
    assert int(found.values.isnan().sum()) == (bad is not None)
