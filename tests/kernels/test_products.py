"""`contract` chooses the implementation of products: one forced there is used everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import Unavailable
from lowp.kernels import cpu
from lowp.kernels.products import gradients_of_matrices, gradients_sixteen_bits
from lowp.ops.trilinear import OUTPUT, Linear
from lowp.precision import Precision


def _step(precision: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 3))
    made = Precision(precision)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        with made.autocast():
            loss = F.cross_entropy(model(torch.randn(5, 2, 6, 6)), torch.tensor([0, 1, 2, 0, 1]))
        made.backward(loss)
        made.step(optimizer)
        found.append(loss.detach())
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


@contextmanager
def _without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the C++ library exists, and make every call of it an error."""

    class Refusing:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} of the C++ library was called")

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "loaded", Refusing)
        patch.setattr(cpu, "library", Refusing)
        yield


@pytest.mark.parametrize("precision", ["dfp16", "flex16+5"])
@pytest.mark.parametrize("way", ["reference", "bitwise"])
def test_int16_training_is_forced_away_from_the_library_with_the_same_bits(
    precision: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _step(precision)
    with _without_library(monkeypatch), kernels.use(way):
        found = _step(precision)
    # torch's own fp32 functions between the contractions, and the exact sums, are the same
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "e5m7", "e4m3fn"])
def test_the_definition_sums_in_fp64(precision: str) -> None:
    cast = parse(precision)
    x, w = (lowp.quantize(torch.randn(7, 300), cast) for _ in range(2))
    exact = x.double() @ w.double().t()
    form = Linear((7, 300), (7, 300))
    with kernels.use("reference"):
        found = kernels.contract(form, OUTPUT, (x, w))
    assert torch.equal(found, exact.float())
    assert torch.allclose(kernels.contract(form, OUTPUT, (x, w)), found, rtol=1e-5, atol=1e-4)


def test_torchs_own_product_is_taken_on_a_cpu_where_it_is_asked_for() -> None:
    x, w = torch.randn(4, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    form, cast = Linear((4, 64), (5, 64)), parse("bf16")
    with kernels.use("native"):
        found = kernels.contract(form, OUTPUT, (x, w), output=cast)
    assert found.dtype is torch.bfloat16 and torch.equal(found, F.linear(x, w))


def test_a_way_that_there_is_none_of_is_refused() -> None:
    x = torch.randn(4, 8)
    with kernels.use("native"), pytest.raises(Unavailable, match="native has no integer products"):
        with lowp.autocast("dfp16"):
            F.linear(x, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, True), (False, True, False)])
def test_gradients_of_small_matrices_have_the_bits_of_those_by_a_form(
    dtype: torch.dtype, wanted: tuple[bool, bool, bool]
) -> None:
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 8, 8), (5, 3, 7), (32, 10, 128), (4, 1, 1), (0, 3, 2)):
        x, weight, gradient = (torch.randn(s, generator=generator).to(dtype) for s in ((m, k), (n, k), (m, n)))
        operands = x if wanted[1] else None, weight if wanted[0] else None
        for incoming in (gradient, gradient.t().contiguous().t(), torch.ones((), dtype=dtype).expand(m, n)):
            with kernels.use("bitwise"):  # products in fp32
                found = gradients_of_matrices((x.shape, weight.shape), operands, incoming, wanted[2])
                expected = gradients_sixteen_bits(Linear(x.shape, weight.shape), operands, incoming, wanted[2])
            assert found is not None
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.dtype is other.dtype and torch.equal(one, other))  # type: ignore[union-attr]


def test_gradients_of_other_products_need_a_form() -> None:
    x, weight, gradient = torch.ones(2, 3, 4).half(), torch.ones(5, 4).half(), torch.ones(2, 3, 5).half()
    assert gradients_of_matrices((x.shape, weight.shape), (x, weight), gradient, True) is None
    flat = x.view(6, 4)
    given = (flat.shape, weight.shape), (flat, weight), gradient.view(6, 5), True
    for way in ("native", "reference"):
        with kernels.use(way):
            assert gradients_of_matrices(*given) is None
    with kernels.use("bitwise"):
        assert gradients_of_matrices(*given) is not None
