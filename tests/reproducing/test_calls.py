"""Every definition beside torch's operator: all arguments that it takes, special numbers, other dtypes and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowp
from lowp.kernels import cpu

pytestmark = pytest.mark.skipif(
    cpu.library() is None or not cpu.has_multiply_add(), reason="needs the C++ library and fused multiply-adds"
)
BAD = torch.tensor([[math.nan, 1.0, 2.0], [-math.inf, 0.5, 1.0], [-math.inf, -math.inf, -math.inf], [math.inf, 1.0, 0]])
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
TARGETS = torch.tensor([0, 3, -100, 8, 1, 2, 3, 4, 5])


def _sums(x: Tensor) -> Iterator[Tensor]:
    whole = (x * 10).long()
    yield from (x.sum(), x.sum(-1), x.sum((0, -1), True), x.sum(1, dtype=torch.float64), x.double().sum(1))
    yield from (whole.sum(), (x > 0).sum(0), whole.sum(1, dtype=torch.float32), whole.sum(0, dtype=torch.int32))
    yield from (x[:0].sum(0), x[0, 0, 0].sum(), x[0, 0, 0].sum(0), x[:, :0].sum(), x.half().sum(0))
    yield from (x.mean(), x.mean((0, 2), True), x.mean(1, dtype=torch.float64), x.bfloat16().mean(0), x[:0].mean(0))
    yield from (x.var(), x.var(1, correction=0), x.var((0, 2), keepdim=True), x.std(), x.std(-1, correction=3))
    yield from (*torch.var_mean(x, 1, correction=2), *torch.var_mean(x.half(), (0, 1), keepdim=True))
    yield from (x.double().var(0), x.half().std(0, keepdim=True), x.std((0, 1), correction=0))


def _norms(x: Tensor) -> Iterator[Tensor]:
    for p in (0, 1, 2, 3, 0.5, math.inf, -math.inf):
        yield from (torch.linalg.vector_norm(x.relu(), p), torch.linalg.vector_norm(x, p, (0, -1), True))
        yield torch.linalg.vector_norm(x.detach().half(), p, 1, dtype=torch.float32)
    yield from (
        x.norm(dim=1),
        x.norm(1, (0, 1), keepdim=True),
        x.norm(math.inf),
        x.logsumexp(1),
        BAD.logsumexp(1, True),
    )
    yield from (x.half().logsumexp(0), x.double().logsumexp(-1))


def _softmaxes(x: Tensor) -> Iterator[Tensor]:
    for one in (x, x * 300, x.double(), x.bfloat16(), BAD, x[0, 0], x[:0]):
        yield from (one.softmax(0), one.softmax(-1), one.log_softmax(0), one.log_softmax(-1))
    yield from (x.softmax(1, dtype=torch.float64), x.log_softmax(1, dtype=torch.float64))


def _losses(x: Tensor) -> Iterator[Tensor]:
    weight = x.detach().flatten()[:10].abs()
    for reduction in ("none", "mean", "sum"):
        yield from (
            F.nll_loss(x[:, :, 0], TARGETS.abs() % 10, reduction=reduction),
            F.nll_loss(x[:, :, 0], TARGETS, weight, reduction=reduction),
            F.nll_loss(x[:, :, 0], TARGETS.where(TARGETS != -100, 3), ignore_index=3, reduction=reduction),
            F.nll_loss(x[0, :, 0], TARGETS[0], weight, reduction=reduction),
            F.nll_loss(x[:, :, None], (TARGETS.abs() % 10)[:, None, None].expand(9, 1, 4), weight, reduction=reduction),
            F.nll_loss(x[:, :, 0].bfloat16(), TARGETS, reduction=reduction),
            F.mse_loss(x, x.flip(0), reduction=reduction),
            F.smooth_l1_loss(x, x.flip(0), reduction=reduction, beta=0.5),
            F.huber_loss(x, x.flip(0), reduction=reduction, delta=0.3),
        )


def _arithmetic(x: Tensor) -> Iterator[Tensor]:
    y, z = x.flip(0), x.flip(1) + 1
    for factor in (1, 2, 0.3, -1.0):
        yield from (torch.add(x, y, alpha=factor), torch.sub(x, y, alpha=factor), torch.rsub(x, y, alpha=factor))
        yield from (torch.addcmul(x, y, z, value=factor), torch.addcdiv(x, y, z, value=factor))
    yield from (torch.rsub(x, 2), torch.sub(x, 3, alpha=2), torch.add(x, 3, alpha=2), torch.lerp(x, y, z))
    whole = torch.arange(-3.0, 4.0)
    for power in (0, 1, 2, 3, 4, 5, -1, -2, 0.5, -0.5, 2.5, -1.5):
        yield from (whole**power, x**power, whole.double() ** power, BAD**power, power**whole)
    yield from ((-2.0) ** whole, whole[:, None] ** whole, x[:, 0].abs() ** whole[3:], whole.int() ** 2, 1.0**BAD)


def _functions(x: Tensor) -> Iterator[Tensor]:
    far = x * 1e5
    for one in (x, x.double() * 3, x.half(), x * 60, far):
        yield from (F.gelu(one), F.gelu(one, approximate="tanh"), F.silu(one))
    for one in (x, x.double() * 3, x.half(), BAD, x * 60):
        yield from (
            F.softplus(one),
            F.softplus(one, 3.0, 5.0),
            one.exp2(),
            one.abs().log2(),
            one.abs().log10(),
            one.tanh(),
            one.erf(),
        )
        yield from (one.exp(), one.expm1(), one.log(), one.log1p(), one.sigmoid(), one.sqrt(), one.sin(), one.cos())
    yield from (
        F.gelu(x * 1e30),
        far.sin(),
        far.cos(),
        far.double().sin(),
        (x * 10).long().exp(),
        (x * 10).long().sigmoid(),
    )


def _products(x: Tensor) -> Iterator[Tensor]:
    a, b, c = x[0], x[1].t(), x[2, :, :1] + torch.zeros(10, 10)
    for beta, alpha in ((1, 1), (0.5, 1), (1, 3), (0, 2), (-1.0, 0.25)):
        given = {"beta": beta, "alpha": alpha}
        bias = c if beta else c * math.nan
        yield from (torch.addmm(bias, a, b, **given), torch.addmv(bias[0], a, b[:, 0], **given))
        yield from (torch.baddbmm(bias, x, x.transpose(1, 2), **given), torch.addmm(bias[0], a, b, **given))
        yield torch.addbmm(bias, x, x.transpose(1, 2), **given)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield from (a.to(dtype) @ b.to(dtype), a.to(dtype) @ b[:, 0].to(dtype), a[0].to(dtype) @ b[:, 0].to(dtype))
        yield x.to(dtype) @ x.to(dtype).transpose(1, 2)


def _convolutions(x: Tensor) -> Iterator[Tensor]:
    image, weight, bias = x.reshape(2, 6, 5, 6), x.flatten()[:216].reshape(6, 6, 2, 3), x.flatten()[:6]
    for more in ({}, {"stride": 2}, {"padding": (1, 2)}, {"dilation": 2}, {"stride": (2, 1), "padding": 1}):
        yield from (F.conv2d(image, weight, **more), F.conv2d(image, weight, bias, **more))  # type: ignore[arg-type]
        yield F.conv_transpose2d(image, weight, bias, **more)  # type: ignore[arg-type]
    yield from (F.conv2d(image[0], weight, bias), F.conv2d(image, weight[:, :2], bias, groups=3))
    yield from (F.conv_transpose2d(image[0], weight[:, :2], bias, 2, groups=3, output_padding=1),)
    yield from (F.conv1d(image[:, :, 0], weight[:, :, 0], bias), F.conv1d(image[0, :, 0], weight[:, :, 0], bias))


def _normalisations(x: Tensor) -> Iterator[Tensor]:
    by, to = x.flatten()[:10], x.flatten()[10:20]
    yield from (F.layer_norm(x, (4,)), F.layer_norm(x, (10, 4), x[0]), F.layer_norm(x.half(), (4,), by[:4].half()))
    yield from (
        F.rms_norm(x, (4,)),
        F.rms_norm(x, (4,), by[:4], 0.1),
        F.rms_norm(x, (9, 10, 4)),
        F.rms_norm(x, (10, 4)),
    )
    yield from (F.group_norm(x, 5), F.group_norm(x[..., None], 2, by, to, 0.1), F.group_norm(x[:, :, 0], 1, by, to))
    for momentum in (0.1, 0.5):
        mean, variance = torch.zeros(10), torch.ones(10)
        yield from (F.batch_norm(x, mean, variance, by, to, True, momentum), mean, variance)
        yield from (F.batch_norm(x, mean, variance, by, to, eps=0.1), F.batch_norm(x[..., 0], mean, variance))
    yield from (
        F.batch_norm(x[..., 0], None, None, training=True),
        F.batch_norm(x[..., None], None, None, by, to, True),
    )


def _attentions(x: Tensor) -> Iterator[Tensor]:
    q, k, v = (one.reshape(3, 2, 10, 6) for one in (x, x.flip(0), x.flip(1)))
    mask = torch.zeros(10, 10)
    mask[:, 7:] = -math.inf
    yield from (F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, scale=0.7))
    yield from (F.scaled_dot_product_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    yield F.scaled_dot_product_attention(q, k, v, mask > -1)


def _stored(x: Tensor) -> Iterator[Tensor]:
    out = torch.empty(0)
    yield from (x.clone().exp_(), x.clone().abs_().sqrt_(), x.clone().add_(x, alpha=2), torch.exp(x, out=out), out)
    yield from (x.clone().addcmul_(x, x, value=2), x.clone().pow_(3), torch.sum(x, 0, out=torch.empty(0)), x.cumsum(1))
    index = torch.tensor([0, 0, 2])
    yield from (x.index_add(0, index, x[:3]), x.scatter_add(0, index[:, None, None].expand(3, 10, 4), x[:3]))
    yield from torch._foreach_exp([x, x[0]])
    yield from torch._foreach_addcmul([x, x[0]], [x, x[0]], [x, x[0]], value=3.0)


CALLED: list[Callable[[Tensor], Iterator[Tensor]]] = [
    *(_sums, _norms, _softmaxes, _losses, _arithmetic, _functions, _products, _convolutions, _normalisations),
    *(_attentions, _stored),
]


@pytest.mark.parametrize("called", CALLED, ids=lambda one: one.__name__.strip("_"))
def test_definitions_are_torch_s_operators_for_every_argument(called: Callable[[Tensor], Iterator[Tensor]]) -> None:
    x, threads = torch.rand(9, 10, 4, generator=torch.Generator().manual_seed(3)) - 0.4, torch.get_num_threads()
    wanted = list(called(x))
    with lowp.reproducible() as mode:
        found = list(called(x))
    assert not mode.unpromised and torch.get_num_threads() == threads
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape, place
        close = CLOSE.get(one.dtype, 1e-5)
        assert torch.allclose(one, other, rtol=close, atol=2e-6 + close / 10, equal_nan=True), place


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")  # torch's
@pytest.mark.parametrize("correction", [1, 2, 3, 4])
def test_a_variance_of_no_more_numbers_than_are_taken_off_is_infinite_or_nan(correction: int) -> None:
    x = torch.tensor([1.0, 4.0, 4.0])
    wanted = [one.var(0, correction=correction) for one in (x, x[:2], x[:1])]
    with lowp.reproducible():
        found = [one.var(0, correction=correction) for one in (x, x[:2], x[:1])]
    assert torch.equal(torch.stack(found).nan_to_num(-1), torch.stack(wanted).nan_to_num(-1))


def _gradients(called: Callable[[Tensor], Iterator[Tensor]], x: Tensor) -> list[tuple[torch.dtype, Tensor | None]]:
    """The gradient of x for a weighted sum of each result that has one, with the result's dtype."""
    found = []
    for one in called(x.requires_grad_()):
        if one.requires_grad:
            weight = (torch.arange(one.numel(), dtype=one.dtype) / 100 - 1).reshape(one.shape)
            found.append((one.dtype, *torch.autograd.grad(one, x, weight, retain_graph=True, allow_unused=True)))
    return found


@pytest.mark.parametrize("called", CALLED[:-1], ids=lambda one: one.__name__.strip("_"))
def test_gradients_of_definitions_are_torch_s_for_every_argument(called: Callable[[Tensor], Iterator[Tensor]]) -> None:
    x = torch.rand(9, 10, 4, generator=torch.Generator().manual_seed(3)) - 0.4
    wanted = _gradients(called, x)
    with lowp.reproducible() as mode:
        found = _gradients(called, x)
    assert not mode.unpromised
    for place, ((dtype, one), (_, other)) in enumerate(zip(found, wanted, strict=True)):
        close = 10 * CLOSE.get(dtype, 1e-5)
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=close, atol=close, equal_nan=True), place  # type: ignore
