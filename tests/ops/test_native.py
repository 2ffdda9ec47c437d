"""The processor's own bf16 products equal the emulation except for the order of summation.

They are chosen by what the processor reports. The tests are skipped on processors without such products, where torch's
bf16 kernels are a different path.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp import kernels
from lowp.compat import accelerator
from lowp.kernels.choose import hardware
from lowp.ops import trilinear
from lowp.region import handover
from lowp.region.entries import current_engine

has_own = hardware.products_of_bf16()[0]
own = pytest.mark.skipif(not has_own, reason="the processor multiplies no bf16, or is held to instructions that do not")
_ROUNDING, _FP32, _SMALLEST = 2.0**-8, 2.0**-24, 2.0**-126

_Product = Callable[..., Tensor]
PRODUCTS: dict[str, tuple[_Product, list[tuple[int, ...]], int]] = {  # function, shapes, longest sum of the three
    "linear": (F.linear, [(5, 7), (3, 7), (3,)], 7),
    "linear of one row": (F.linear, [(64,), (32, 64), (32,)], 64),
    "linear large": (F.linear, [(70, 200), (90, 200), (90,)], 200),
    "linear of batches": (F.linear, [(2, 9, 33), (17, 33)], 33),
    "matmul": (torch.matmul, [(3, 20, 40), (3, 40, 30)], 40),
    "matmul repeated": (torch.matmul, [(3, 20, 40), (40, 30)], 60),
    "matrix by vector": (torch.mv, [(40, 70), (70,)], 70),
    "addmm": (torch.addmm, [(30,), (20, 40), (40, 30)], 40),
    "baddbmm": (torch.baddbmm, [(4, 5, 6), (4, 5, 70), (4, 70, 6)], 70),
    "conv1d": (F.conv1d, [(2, 3, 20), (4, 3, 5), (4,)], 40),
    "conv2d": (F.conv2d, [(3, 8, 9, 9), (16, 8, 3, 3), (16,)], 147),
    "conv2d strided": (lambda *t: F.conv2d(*t, stride=2, padding=1), [(2, 4, 9, 9), (6, 4, 3, 3)], 54),
    "conv2d of groups": (lambda *t: F.conv2d(*t, groups=4), [(2, 8, 9, 9), (8, 2, 3, 3), (8,)], 98),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 8, 5, 5), (8, 6, 3, 3), (6,)], 98),
}


def _drawn(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return tensors whose elements bf16 represents, so that only the products are rounded."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]


def _run(function: _Product, tensors: list[Tensor], region: Any) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in tensors]
    with region:
        y = function(*leaves)
    incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, incoming)]


@own
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_and_its_gradients_differ_from_the_emulation_by_the_order_of_summation(name: str) -> None:
    function, shapes, length = PRODUCTS[name]
    tensors = _drawn(shapes)
    found = _run(function, tensors, lowp.autocast("bf16"))
    with kernels.use("bitwise"):
        emulated = _run(function, tensors, lowp.autocast("bf16"))
    # what can be lost is bounded by the sum of the products' magnitudes (Higham 2002, equation 3.5): it grows no
    # longer than any of the sums
    magnitudes = _magnitudes(function, tensors, found[0])
    for one, other, magnitude in zip(found, emulated, magnitudes, strict=True):
        assert one.dtype is other.dtype
        lost = 2 * (length + 2) * _FP32 * magnitude
        apart = (one.double() - other.double()).abs()
        # two sums that lie apart by `lost` may be rounded to neighbours, which are one more ulp apart
        assert bool((apart <= torch.where(lost > 0, 2 * _ROUNDING * other.double().abs() + lost, 0.0)).all())
        # and to other values only where a midpoint lies between them
        assert (one != other).float().mean() <= 0.05


def _magnitudes(function: _Product, tensors: list[Tensor], output: Tensor) -> list[Tensor]:
    leaves = [one.double().abs().requires_grad_() for one in tensors]
    y = function(*leaves)
    incoming = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().double().abs()
    return [y, *torch.autograd.grad(y, leaves, incoming)]


@own
def test_what_lies_below_the_normal_numbers_is_at_most_taken_for_zero() -> None:
    tiny, large = torch.full((64, 64), 2.0**-130), torch.full((64, 64), 2.0**20)
    with lowp.autocast("bf16"):
        found = F.linear(tiny, large)
        below = F.linear(torch.full((64, 64), 2.0**-70), torch.full((64, 64), 2.0**-62))  # sums of 2^-126
    exact = 64 * 2.0**-110
    assert bool(((found == 0) | (found == exact)).all())
    assert bool((below.float() <= 64 * _SMALLEST).all())
    with kernels.use("bitwise"), lowp.autocast("bf16"):
        assert bool((F.linear(tiny, large) == exact).all())


@own
@pytest.mark.parametrize("precision", ["bf16-tpu", "fp16", "e5m7", "bf16-trunc"])
def test_casts_of_another_arithmetic_are_not_handed_over(precision: str) -> None:
    x, w = _drawn([(64, 64), (64, 64)])
    with lowp.autocast(precision):
        found = F.linear(x, w)
    with kernels.use("bitwise"), lowp.autocast(precision):
        assert torch.equal(F.linear(x, w), found)


@own
def test_the_way_can_be_forced_either_way() -> None:
    x, w = _drawn([(64, 300), (64, 300)])
    with lowp.autocast("bf16"):
        found = F.linear(x, w)
    assert torch.equal(found, F.linear(x.bfloat16(), w.bfloat16()))
    with kernels.use("cpu" if "cpu" in kernels.available() else "bitwise"), lowp.autocast("bf16"):
        assert torch.equal(F.linear(x, w), F.linear(x, w).float().bfloat16())
        emulated = F.linear(x, w)
    assert torch.equal(emulated, (x @ w.t()).bfloat16())
    with kernels.use("native"), lowp.autocast("fp16"):
        assert torch.equal(F.linear(x, w), F.linear(x.half(), w.half()))


@own
def test_attention_keeps_its_probabilities_in_fp32() -> None:
    query, key, value = (one.bfloat16() for one in _drawn([(2, 2, 40, 16)] * 3))
    with lowp.autocast("bf16"):
        found = F.scaled_dot_product_attention(query, key, value)
    wide = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    assert torch.equal(found, wide.bfloat16())


@own
def test_a_network_of_norms_and_products_trains_as_the_emulation_does() -> None:
    def gradients() -> Iterator[Tensor]:
        torch.manual_seed(0)
        body = (
            nn.Conv2d(2, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.GroupNorm(2, 8),
            nn.Flatten(),
            nn.LayerNorm(128),
        )
        model = nn.Sequential(*body, nn.Linear(128, 3))
        with lowp.autocast("bf16"):
            loss = F.cross_entropy(model(torch.randn(16, 2, 6, 6)), torch.arange(16) % 3)
        loss.backward()
        return (one.grad for one in model.parameters() if one.grad is not None)

    found = list(gradients())
    with kernels.use("bitwise"):
        emulated = list(gradients())
    for one, other in zip(found, emulated, strict=True):
        assert (one - other).norm() <= 2.0**-6 * other.norm() + 1e-6


# -- what decides -------------------------------------------------------------------------------------------------

_ENCODER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
_NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "layers": (nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)), (4, 16)),
    "large": (nn.Linear(256, 256), (256, 256)),
    "convolutions": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 3, 3)), (2, 3, 8, 8)),
    "attention": (_ENCODER, (2, 5, 16)),
    "recurrent": (nn.LSTM(8, 8), (3, 2, 8)),
}
_MULTIPLYING = re.compile("mm|mv|dot|matmul|linear|bilinear|conv|attention|einsum|lstm")


def _fp16_products(run: Callable[[], object]) -> set[str]:
    """Return the products that torch itself computes of fp16 operands."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return {e.name() for e in events if "c10::Half" in e.dtypes() and _MULTIPLYING.search(e.name())}


@pytest.mark.parametrize("kind", ["fp32 in a region", "fp16 in a region", "served", *PRODUCTS])
def test_no_product_of_fp16_is_left_to_torch_on_a_cpu(kind: str) -> None:
    def run() -> None:
        if kind in PRODUCTS:
            _run(PRODUCTS[kind][0], _drawn(PRODUCTS[kind][1]), lowp.autocast("fp16"))
            return
        for network, shape in _NETWORKS.values():
            network, x = copy.deepcopy(network), torch.randn(shape)
            if kind == "served":
                lowp.quantize_model(network.eval(), "fp16", [x])(x)
                continue
            if kind.startswith("fp16"):
                network, x = network.half(), x.half()
            with lowp.autocast("fp16"):
                y = network(x)
            (y[0] if isinstance(y, tuple) else y).float().sum().backward()

    x = torch.ones(2, 2, dtype=torch.float16)
    assert "aten::mm" in _fp16_products(lambda: x @ x)
    assert _fp16_products(run) == set()


@own
@pytest.mark.parametrize(
    "name", ["linear", "linear of batches", "matmul", "addmm", "conv1d", "conv2d", "conv_transpose2d"]
)
def test_the_short_way_to_torch_autocast_gives_the_bits_of_the_long_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, shapes, _ = PRODUCTS[name]
    monkeypatch.setattr(trilinear, "FEW", (0, 0))
    tensors, taken = _drawn(shapes), []
    look = handover._leaves_of_plain
    monkeypatch.setattr(handover, "_leaves_of_plain", lambda *given: taken.append(look(*given)) or taken[-1])
    short_way = _run(function, tensors, lowp.autocast("bf16"))
    assert any(one is not None for one in taken)
    monkeypatch.setattr(handover, "_leaves_of_plain", lambda *given: None)
    long_way = _run(function, tensors, lowp.autocast("bf16"))
    assert all(
        one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(short_way, long_way, strict=True)
    )


@own
def test_the_short_way_to_torch_autocast_takes_losses_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    (x,), y = _drawn([(5, 7)]), torch.tensor([0, 6, 2, 3, 1])
    taken: list[object] = []
    look = handover._leaves_of_plain
    monkeypatch.setattr(handover, "_leaves_of_plain", lambda *given: taken.append(look(*given)) or taken[-1])
    monkeypatch.setattr(handover, "device_of", lambda *given: pytest.fail("asked for the long way"))
    with lowp.autocast("bf16"):
        loss = F.cross_entropy(x.bfloat16(), y)
    assert taken == [[]] and loss.dtype is torch.float32
    assert torch.equal(loss, F.cross_entropy(x, y))


@own
def test_other_calls_take_the_long_way_to_torch_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trilinear, "FEW", (0, 0))
    x, weight = _drawn([(5, 7), (3, 7)])
    leaf = nn.Parameter(weight)
    with lowp.autocast("bf16") as region:
        F.linear(x, leaf)
        plan = region._rulebook.plans("")[F.linear]
        assert plan is not None and plan.way is not None

        def taken(*args: Any, **kwargs: Any) -> bool:
            return handover.as_usual(current_engine(), plan, F.linear, args, kwargs) is not handover.ELSEWHERE

        held = nn.Parameter(weight), nn.Parameter(weight)  # alive until the end: uses are counted by id
        assert taken(x, weight) and taken(x, held[0], None)
        assert not taken(x, leaf)  # its cast is kept from the second use on
        with torch.no_grad():
            wide, large = torch.ones(5, 256), nn.Parameter(torch.ones(257, 256))
            assert taken(x, leaf) and taken(wide, large) and not taken(wide, large)  # small casts are not kept
        assert taken(x, weight=held[1]) and not taken(x, weight, out=None)
        assert not taken([x], weight)
        assert not taken(x.double(), weight.double())
        assert not taken(x.to_sparse(), weight)
        assert not taken(x.as_subclass(type("Own", (Tensor,), {})), weight)
        for way in ("native", "bitwise", "reference"):
            with kernels.use(way):
                assert not taken(x, weight)


class _Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that an operation was given or wrote."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in (*args, result):
            if isinstance(one, Tensor):
                self.numbers = max(self.numbers, one.numel())
        return result


_APART: dict[str, _Product] = {
    "linear of transposed rows": lambda many, one: F.linear(many.transpose(0, 1), one),
    "transposed matrices by one": lambda many, one: many.transpose(0, 1) @ one,
    "one matrix by many": lambda many, one: one @ many.mT,
}


@own
@pytest.mark.parametrize("product", _APART.values(), ids=_APART)
@pytest.mark.parametrize("records", ["gradients", "none", "those of the rows"])
@pytest.mark.parametrize("way", [None, "native"])
def test_one_matrix_is_not_copied_for_each_of_many_others(product: _Product, records: str, way: str | None) -> None:
    many, one = _drawn([(20, 40, 64), (64, 64)])
    leaves = many.requires_grad_(records != "none"), one.requires_grad_(records == "gradients")
    with kernels.use(way) if way else nullcontext(), lowp.autocast("bf16"), _Largest() as seen:
        y = product(*leaves)
    assert seen.numbers == many.numel()
    wide = product(many.detach(), one.detach())
    assert y.stride() == wide.stride() and torch.allclose(y.float(), wide, atol=_ROUNDING * 64)
    if records != "none":
        y.float().sum().backward()
        assert torch.allclose(many.grad, _gradient(product, many, one), rtol=0.02, atol=0.2)


def _gradient(product: _Product, many: Tensor, one: Tensor) -> Tensor:
    leaf = many.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(product(leaf, one.detach()).sum(), leaf)
    return found


@own
@pytest.mark.skipif(accelerator() is not None, reason="torch.autocast widens sums on accelerators")
def test_a_sum_on_a_cpu_is_not_offered_to_torch_autocast_whose_list_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    under_autocast = handover._under_autocast
    monkeypatch.setattr(
        handover,
        "_under_autocast",
        lambda engine, func, *given: asked.append(func.__name__) or under_autocast(engine, func, *given),
    )
    monkeypatch.setattr(handover, "device_of", lambda way, *given: asked.append(way.op))
    monkeypatch.setattr(trilinear, "FEW", (0, 0))
    x, weight = _drawn([(5, 7), (3, 7)])
    with lowp.autocast("bf16"):
        y = F.linear(x, weight)
        total = y.sum()
    assert asked == ["linear"] and torch.equal(total, y.float().sum())


@own
@pytest.mark.parametrize(("rows", "columns"), [(128, 1024), (129, 1024), (128, 1025)])
def test_a_small_linear_layer_is_summed_in_fp32_and_rounded_once_wherever_it_runs(rows: int, columns: int) -> None:
    x, weight, bias = _drawn([(rows, 64), (columns, 64), (columns,)])
    x.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        y = F.linear(x, weight, bias)
        return y.detach(), *torch.autograd.grad(y.float().square().sum(), x)

    with lowp.autocast("bf16"):
        found = run()
        assert torch.equal(F.linear(x, weight, bias=bias), found[0])
        assert torch.equal(F.linear(input=x, weight=weight, bias=bias), found[0])
        with kernels.use("cpu"):
            emulated = run()
        with kernels.use("native"):
            native = run()
    end = lowp.observe(lambda one: None)
    try:
        with lowp.autocast("bf16"):
            observed = run()
    finally:
        end()
    is_small = (rows, columns) == (128, 1024)
    expected = emulated if is_small else native
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, observed, expected))
    assert not (is_small and torch.equal(emulated[1], native[1]))
