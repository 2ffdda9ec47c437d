"""Which implementation computes a product, and in which dtype, on devices that multiply 16 bits and on others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from fp32_defined import defined
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lowp import kernels
from lowp.casts import parse
from lowp.kernels.int16.mantissas import Mantissas
from lowp.kernels.packed.few_bits import signs
from lowp.kernels.products import contraction, fp32_products, programs
from lowp.kernels.products.contraction import (
    contract,
    contract_packed,
    is_native,
    is_torchs_own,
    ready_operand,
    sum_of_rows,
    torchs_own_device,
)
from lowp.kernels.products.scratch import Scratch
from lowp.ops.trilinear import OUTPUT, Linear
from lowp.policy import Accumulation

BF16, FP16 = torch.bfloat16, torch.float16
HERE = programs.is_here()


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def by(way: str | None) -> AbstractContextManager[None]:
    return nullcontext() if way is None else kernels.use(way)


@pytest.fixture
def device_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have a CPU that multiplies these dtypes itself, or none."""

    def of(*dtypes: torch.dtype) -> None:
        monkeypatch.setattr(contraction, "multiplies", lambda device, dtype: device == "cpu" and dtype in dtypes)

    of()
    return of


WAYS = {  # the implementation in use, and whether the device multiplies bf16; whether torch's own product is taken
    (None, False): False,
    (None, True): True,
    ("native", False): True,
    ("native", True): True,
    ("reference", True): False,
    ("bitwise", True): False,
}


@pytest.mark.parametrize(("way", "multiplies"), WAYS)
def test_torchs_own_product_is_taken_where_the_device_multiplies_or_by_force(
    way: str | None, multiplies: bool, device_that_multiplies: Callable[..., None]
) -> None:
    is_own = WAYS[way, multiplies]
    device_that_multiplies(*[BF16] * multiplies)
    x, w = drawn(3, 8, dtype=BF16), drawn(5, 8, dtype=BF16)
    cast, other = parse("bf16"), parse("fp16")
    with by(way):
        assert is_native(cast, x, w) is is_own
        assert (torchs_own_device(x, BF16) == "cpu") is is_own
        assert torchs_own_device(x, BF16) in (None, "cpu")
        # a fused op is torch's own by force alone; an exact one on a CPU unless something else is forced
        assert is_native(cast, x, w, w) is (way == "native")
        assert is_torchs_own(x) is (way == "native")
        assert is_torchs_own(x, is_exact=True) is (way in (None, "native"))
        assert is_torchs_own(x.float(), is_exact=True) is (way == "native")
        # what has other operands or another result is not
        assert not is_native(None, x, w) and not is_native(other, x, w)
        assert not is_native(cast, x, w.half()) and not is_native(cast, x.half(), w)
        assert not is_native(parse("bf16:toward-zero"), x, w)
        assert is_native(other, x.half(), w.half()) is (way == "native")
        # an operand of several products is widened once, where they are fp32 products
        ready = ready_operand(x)
        assert (ready is x) is is_own and (is_own or (ready.dtype is torch.float32 and torch.equal(ready, x.float())))
        with Scratch() as scratch:
            assert (ready_operand(x, scratch) is x) is is_own
            assert torch.equal(ready_operand(x, scratch).float(), x.float())


class Big(Linear):
    """A linear layer whose products on a device with 16-bit products are torch's."""

    is_small = False  # type: ignore[assignment]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", [Linear, Big])
def test_large_products_of_sixteen_bits_are_torchs_where_the_device_multiplies_and_small_ones_are_not(
    kind: type[Linear], with_bias: bool, device_that_multiplies: Callable[..., None]
) -> None:
    device_that_multiplies(BF16)
    x, w = drawn(3, 8, dtype=BF16), drawn(5, 8, dtype=BF16)
    bias = drawn(5) if with_bias else None
    form, cast = kind((3, 8), (5, 8)), parse("bf16")
    found = contract(form, OUTPUT, (x, w), output=cast, bias=bias, finish=lambda y: y.to(BF16) + 1)
    wide = F.linear(x.float(), w.float(), bias)
    if kind is Big:  # which rounds once, as its own kernel rounds: `finish` has nothing to do
        assert found.dtype is BF16 and torch.equal(found, F.linear(x, w, None if bias is None else bias.to(BF16)))
    else:
        assert found.dtype is BF16 and torch.allclose(found.float(), wide + 1, atol=0.05)
    with kernels.use("native"):
        found = contract(form, OUTPUT, (x, w), output=cast, bias=bias)
    assert found.dtype is BF16 and torch.equal(found, F.linear(x, w, None if bias is None else bias.to(BF16)))
    batch = x.expand(2, 3, 8)
    several = torch.vmap(lambda one: contract(form, OUTPUT, (one, w), output=cast, bias=bias))(batch)
    assert several.dtype is BF16 and several.shape == (2, 3, 5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_in_fp32_are_those_of_the_definition(with_bias: bool, dtype: torch.dtype) -> None:
    x, w = drawn(3, 300, dtype=dtype), drawn(5, 300, dtype=dtype)
    bias = drawn(5, dtype=dtype) if with_bias else None
    form, cast = Linear((3, 300), (5, 300)), parse("e4m3fn")
    exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    wanted = defined(x.float(), w.float().t(), None if bias is None else bias.float())
    with kernels.use("cpu") if HERE else nullcontext():
        found = contract(form, OUTPUT, (x, w), None, cast, bias, lambda y: -y)
        again = contract(form, OUTPUT, (x, w), Accumulation.parse("fp32"), cast, bias)
    assert found.dtype is torch.float32 and torch.equal(found, -again)
    assert torch.equal(again, wanted) if HERE else torch.allclose(again, wanted, atol=1e-3)
    with kernels.use("reference"):
        found = contract(form, OUTPUT, (x, w), None, cast, bias, lambda y: -y)
    assert found.dtype is torch.float32 and torch.equal(found, -exact.float())
    with kernels.use("bitwise"):
        found = contract(form, OUTPUT, (x, w), None, cast, bias, lambda y: -y)
    plain = -F.linear(x.float(), w.float(), None if bias is None else bias.float())
    assert found.dtype is torch.float32 and torch.equal(found, plain)


@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_fp64_stay_in_fp64(with_bias: bool) -> None:
    x, w, bias = drawn(3, 300, dtype=torch.float64), drawn(5, 300, dtype=torch.float64), drawn(5)
    form = Linear((3, 300), (5, 300))
    found = contract(form, OUTPUT, (x, w), bias=bias if with_bias else None, finish=lambda y: 2 * y)
    assert torch.equal(found, 2 * F.linear(x, w, bias.double() if with_bias else None))


class Apart(Linear):
    """A linear layer whose bias is no number a column."""

    def numbers_a_column(self, bias: Tensor) -> Tensor | None:
        return None


class ByTorch(Linear):
    """A linear layer that is no matrices."""

    are_matrices = False


@pytest.mark.skipif(not HERE, reason="the C++ library is not here")
def test_a_bias_that_is_no_number_a_column_is_added_to_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias = drawn(3, 300), drawn(5, 300), drawn(5, dtype=BF16)
    shapes = (3, 300), (5, 300)
    given: list[Tensor | None] = []
    inner = fp32_products.multiply

    def multiply(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
        given.append(added)
        return inner(left, right, added)

    monkeypatch.setattr(fp32_products, "multiply", multiply)
    sums = inner(x, w.t())
    for form, added in ((Linear(*shapes), bias.float()), (Apart(*shapes), None)):
        found = contract(form, OUTPUT, (x, w), bias=bias)
        assert torch.equal(found, sums + bias.float())
        last = given.pop()
        assert (last is None) is (added is None) and (last is None or torch.equal(last, bias.float()))
    gaps = drawn(5, 2)[:, 0]
    assert torch.equal(contract(Linear(*shapes), OUTPUT, (x, w), bias=gaps), inner(x, w.t(), gaps.contiguous()))
    given.clear()
    for form, operands in (
        (ByTorch(*shapes), (x, w)),  # torch multiplies what is no matrices, and what it records
        (Linear(*shapes), (x.clone().requires_grad_(), w)),
    ):
        found = contract(form, OUTPUT, operands, bias=bias)
        assert torch.equal(found, F.linear(*operands, bias.float())) and not given
    recorded = contract(Linear(*shapes), OUTPUT, (x, w), bias=bias.float().requires_grad_())
    assert recorded.requires_grad and not given


def test_nothing_is_summed_in_blocks_to_zeros() -> None:
    form, given = Linear((3, 0), (5, 0)), (torch.zeros(3, 0), torch.zeros(5, 0))
    assert torch.equal(contract(form, OUTPUT, given, Accumulation.parse("fp16/2")), torch.zeros(3, 5))


def chained(left: Tensor, right: Tensor, exponent: int) -> Tensor:
    total = torch.zeros(len(left), len(right))
    for start in range(0, left.shape[1], 256):
        total = total + (left[:, start : start + 256].long() @ right[:, start : start + 256].long().t()).float()
    return total * 2.0**exponent


@pytest.mark.parametrize("words", [None, "exact"])
def test_integers_are_summed_in_chains_or_exactly(words: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-32000, 32000, (n, 2000), generator=generator).to(torch.int16) for n in (3, 5))
    given = [Mantissas(one, torch.tensor(-9, dtype=torch.int32)) for one in (left, right)]
    form = Linear((3, 2000), (5, 2000))
    accumulate = None if words is None else Accumulation.parse(words)
    for dtype in (torch.float32, torch.float64):
        found = contract(form, OUTPUT, tuple(given), accumulate, dtype=dtype, finish=lambda y: -y)
        exact = (left.long() @ right.long().t()).double() * -(2.0**-18)
        if words == "exact":
            assert found.dtype is dtype and torch.equal(found, exact.to(dtype))
        else:  # flushed to fp32 after 256 products
            assert found.dtype is torch.float32 and torch.equal(found, -chained(left, right, -18))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
def test_the_sum_of_rows_is_a_product_with_ones(dtype: torch.dtype) -> None:
    for x in (drawn(500, 7, dtype=dtype), drawn(500, 14, dtype=dtype)[:, ::2], drawn(7, 500, dtype=dtype).t()):
        found = sum_of_rows(x)
        is_served = HERE and dtype is not torch.float64
        wanted = defined(torch.ones(1, 500), x.float(), None)[0] if is_served else x.float().sum(0)
        assert found.dtype is torch.float32 and torch.equal(found, wanted)
    x = drawn(6, 3).requires_grad_()
    assert sum_of_rows(x).requires_grad
    with kernels.use("bitwise"):
        assert torch.equal(sum_of_rows(drawn(500, 7)), drawn(500, 7).sum(0))


@pytest.mark.skipif(not HERE, reason="the C++ library is not here")
def test_compiled_products_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias = drawn(3, 300), drawn(5, 300), drawn(5)
    wide = x.double(), w.double()
    form, own = Linear((3, 300), (5, 300)), ByTorch((3, 300), (5, 300))

    def all_of_them(x: Tensor, w: Tensor, bias: Tensor, *wide: Tensor) -> list[Tensor]:
        return [
            contract(form, OUTPUT, (x, w), bias=bias),
            contract(form, OUTPUT, (x.bfloat16(), w.bfloat16())),
            contract(form, OUTPUT, wide, bias=bias),
            contract(own, OUTPUT, (x.half(), w), bias=bias),
            sum_of_rows(x),
            sum_of_rows(wide[0]),
        ]

    torch._dynamo.reset()
    found = torch.compile(all_of_them, backend="eager", fullgraph=True)(x, w, bias, *wide)
    for one, other in zip(found, all_of_them(x, w, bias, *wide), strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


def test_packed_weights_are_multiplied_as_they_are_stored() -> None:
    x, w = drawn(3, 100), drawn(5, 100)
    found = contract_packed((signs(x), signs(w)), None)
    scales = x.double().abs().mean(1).float()[:, None] * w.double().abs().mean(1).float()
    assert torch.equal(found, torch.where(x < 0, -1.0, 1.0) @ torch.where(w < 0, -1.0, 1.0).t() * scales)
    assert torch.equal(contract_packed((signs(x), signs(w)), scales[0]), found + scales[0])


@pytest.mark.parametrize("words", ["fp16/8", "bf16/32"])
def test_a_short_sum_is_rounded_after_every_block_from_the_first_element_on(words: str) -> None:
    dtype, block = {"fp16/8": (FP16, 8), "bf16/32": (BF16, 32)}[words]
    x, w, bias = drawn(3, 70), drawn(5, 70), drawn(5)
    total = torch.zeros(3, 5)
    for start in range(0, 70, block):
        total = (total + x[:, start : start + block] @ w[:, start : start + block].t()).to(dtype).float()
    form = Linear((3, 70), (5, 70))
    with kernels.use("bitwise"):
        found = contract(form, OUTPUT, (x, w), Accumulation.parse(words))
        with_bias = contract(form, OUTPUT, (x, w), Accumulation.parse(words), bias=bias, finish=lambda y: -y)
    assert torch.equal(found, total) and torch.equal(with_bias, -(total + bias))


class ThreeOperands:
    """A form that has no matrices, as that of attention."""

    def product(self, slot: int, *operands: Tensor, bias: Tensor | None) -> Tensor:
        return sum(operands, torch.zeros(()) if bias is None else torch.where(bias, 1.0, 0.0))


def test_a_form_without_matrices_is_torchs_and_a_mask_keeps_its_dtype() -> None:
    given, mask = tuple(drawn(2, 3, dtype=BF16) for _ in range(3)), torch.tensor([[True], [False]])
    for way, wide in ((None, torch.float32), ("reference", torch.float64)):
        with by(way):
            found = contract(ThreeOperands(), OUTPUT, given, bias=mask)
        wanted = sum((one.to(wide) for one in given), torch.tensor([[1.0], [0.0]], dtype=wide)).float()
        assert torch.equal(found, wanted) and found.dtype is torch.float32


@pytest.mark.skipif(not HERE, reason="the C++ library is not here")
def test_operands_with_gaps_in_both_directions_are_copied_each_where_it_has_them() -> None:
    left, right = drawn(3, 40), drawn(40, 5)
    with_gaps = drawn(6, 80)[::2, ::2].copy_(left), drawn(80, 10)[::2, ::2].copy_(right)
    wanted = fp32_products.multiply(left, right)
    for a in (left, with_gaps[0]):
        for b in (right, with_gaps[1]):
            assert torch.equal(fp32_products.multiply(a, b), wanted)
    batched = torch.stack([left, -left])
    assert torch.equal(fp32_products.multiply(batched, torch.stack([right, right])), torch.stack([wanted, -wanted]))


def test_the_shape_of_a_product_is_known_before_it_is_computed() -> None:
    with FakeTensorMode():
        for leading in ((), (2,), (2, 3)):
            found = torch.ops.lowp.multiply(torch.empty(*leading, 3, 4), torch.empty(*leading, 4, 5).half(), None)
            assert found.shape == (*leading, 3, 5) and found.dtype is torch.float32


@pytest.mark.parametrize("way", [None, "cpu", "bitwise", "native"])
@pytest.mark.parametrize("is_here", [False, True])
def test_what_is_compiled_is_the_librarys_where_nothing_else_is_asked_for(
    way: str | None, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp32_products, "forced", lambda: way)
    monkeypatch.setattr(programs, "is_here", lambda: is_here)
    assert fp32_products.serves_compiled() is (is_here and way in (None, "cpu"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.ones(2, 3)
    assert contraction._serves(x, x.half()) is (is_here and way in (None, "cpu"))
    assert not contraction._serves(x, x.double()) and not contraction._serves(x.to("meta"))


@pytest.mark.skipif(not HERE, reason="the C++ library is not here")
def test_many_rows_of_packed_weights_are_the_librarys_from_one_number_on() -> None:
    for x, is_served in (
        (drawn(1, 1), True),
        (drawn(3, 4, dtype=FP16), True),
        (drawn(1, 1, dtype=torch.float64), False),
    ):
        assert (contraction._of_rows(x) is contraction._linear) is is_served
    with kernels.use("bitwise"):
        assert contraction._of_rows(drawn(1, 1)) is not contraction._linear
