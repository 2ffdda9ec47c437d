"""`contract` chooses the implementation of products: one forced there is used everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from fp32_defined import defined
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import Unavailable
from lowp.kernels import cpu
from lowp.ops.trilinear import OUTPUT, Linear
from lowp.policy import Policy, Rule
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


@pytest.mark.usefixtures("emulated")
@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize("output", ["fp16", "bf16", None])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, True), (False, True, False)])
def test_a_linear_layer_and_its_gradients_are_products_by_the_definition(
    output: str | None, wanted: tuple[bool, bool, bool]
) -> None:
    generator = torch.Generator().manual_seed(0)
    operands, result = (torch.bfloat16, torch.bfloat16) if output == "bf16" else (torch.float16, torch.float32)
    result = torch.float16 if output == "fp16" else result
    name = "bf16" if output == "bf16" else "fp16"
    policy = Policy((Rule.of("contraction", input=name, weight=name, grad=name, output=output),))
    for shape, n in (((1, 8), 8), ((5, 7), 3), ((2, 16, 12), 10), ((4, 1), 1), ((0, 2), 3), ((3, 0), 2), ((7,), 3)):
        x, weight, gradient, bias = (
            torch.randn(s, generator=generator).to(operands).float()
            for s in (shape, (n, shape[-1]), (*shape[:-1], n), (n,))
        )
        for one, needs in zip((x, weight, bias), wanted, strict=True):
            one.requires_grad_(needs)
        with lowp.autocast(policy):
            found = F.linear(x, weight, bias)
        rows, flat = x.detach().reshape(math.prod(shape[:-1]), shape[-1]), gradient.reshape(math.prod(shape[:-1]), n)
        assert torch.equal(found, defined(rows, weight.detach().t(), bias.detach()).to(result).reshape(gradient.shape))
        expected = (
            defined(flat, weight.detach()).to(result).reshape(shape),
            defined(flat.t(), rows).to(result),
            defined(torch.ones(1, len(flat)), flat)[0].to(result),
        )
        needed = [one for one, needs in zip((x, weight, bias), wanted, strict=True) if needs]
        right = [one.float() for one, needs in zip(expected, wanted, strict=True) if needs]
        for incoming in (gradient, gradient.mT.contiguous().mT if gradient.dim() > 1 else gradient):
            results = torch.autograd.grad(found, needed, incoming.to(result), retain_graph=True)
            assert all(torch.equal(one, other) for one, other in zip(results, right, strict=True))


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_products_of_batches_sum_in_the_order_of_the_definition() -> None:
    x, y = torch.randn(2, 3, 9, 400), torch.randn(2, 3, 400, 5)
    with lowp.autocast("fp16"):
        found = torch.einsum("abij,abjk->abik", x, y), x @ y, torch.einsum("abij,abjk->ak", x, y)
        turned = x.transpose(1, 2).contiguous().transpose(1, 2) @ y
    expected = defined(x.half(), y.half()).half()
    assert all(torch.equal(one, expected) for one in (*found[:2], turned))
    assert torch.allclose(found[2].float(), expected.float().sum((1, 2)), rtol=1e-2, atol=0.5)
