"""A linear layer of int16 in one call of the library has the bits of its parts, one after the other."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.casts import Cast, parse
from lowp.kernels import cpu
from lowp.kernels.int16 import linear as int16_linear
from lowp.kernels.int16.integer import Bias, matmul_chained, observed
from lowp.kernels.int16.linear import Sizes
from lowp.kernels.int16.mantissas import Mantissas, current_mantissas, sums

HAS_LIBRARY = "cpu" in kernels.available()
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="the C++ library was not built")
DFP16 = parse("dfp16")
SIZES = [Sizes(1, 1, 1), Sizes(1, 5, 3), Sizes(7, 1, 9), Sizes(4, 6, 1), Sizes(32, 128, 64), Sizes(3, 17, 1031)]


def drawn(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight, bias and a gradient of the result, with magnitudes far apart."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((sizes.m, sizes.k), (sizes.n, sizes.k), (sizes.n,), (sizes.m, sizes.n))
    scales = (1.0, 1e-3, 1e-2, 1e-6)
    x, weight, bias, gradient = (
        torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, scales, strict=True)
    )
    return x, weight, bias, gradient


def words(x: Tensor, cast: Cast) -> Mantissas:
    found = current_mantissas(x, cast)
    assert found is not None
    return found


def product(a: Tensor, b: Tensor, exponent: int, bias: Tensor | None = None) -> Tensor:
    return matmul_chained(a, b, exponent=exponent, bias=None if bias is None else Bias(bias)).values


@needs_library
@pytest.mark.parametrize("instruction_set", cpu.available() if HAS_LIBRARY else ())
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cast", ["dfp16", "dfp16:current(headroom=2)"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_call_gives_the_bits_of_its_parts(sizes: Sizes, cast: str, has_bias: bool, instruction_set: str) -> None:
    (x, weight, bias, gradient), to = drawn(sizes), parse(cast)
    added = bias if has_bias else None
    before = cpu.asked()
    try:
        cpu.select(instruction_set)
        found = int16_linear.linear(x, weight, added, (to, to), True)
        assert found is not None and found[1] is not None
        made = int16_linear.gradients(gradient, found[1], sizes, to, (True, True, True))
        alone = int16_linear.linear(x, weight, added, (to, to), False)
    finally:
        cpu.select(before or None)
    a, b, g = words(x, to), words(weight, to), words(gradient, to)
    with kernels.use("reference"):
        y = product(a.payload, b.payload.t(), a.exponent + b.exponent, added)
        of_x = product(g.payload, b.payload, g.exponent + b.exponent)
        of_weight = product(g.payload.t(), a.payload, g.exponent + a.exponent)
        of_bias = (sums(g.payload, 1).double() * 2.0**g.exponent).float()
    assert torch.equal(found[0], y)
    assert alone is not None and torch.equal(alone[0], y) and alone[1] is None
    for one, expected in zip(int16_linear.parts(found[1], sizes), (a, b), strict=True):
        assert torch.equal(one.payload, expected.payload) and one.exponent == expected.exponent
    assert made is not None
    for one, other in zip(made, (of_x, of_weight, of_bias), strict=True):
        assert one is not None and torch.equal(one, other)


@needs_library
def test_a_gradient_of_any_layout_is_read() -> None:
    x, weight, bias, gradient = drawn(Sizes(3, 4, 5))
    found = int16_linear.linear(x, weight, bias, (DFP16, DFP16), True)
    assert found is not None and found[1] is not None
    given = (gradient.t().contiguous().t(), gradient[:1, :1].expand(3, 4))  # of a sum, backward gives such an expansion
    for one in given:
        made = int16_linear.gradients(one, found[1], Sizes(3, 4, 5), DFP16, (True, True, True))
        expected = int16_linear.gradients(one.contiguous(), found[1], Sizes(3, 4, 5), DFP16, (True, True, True))
        assert made is not None and expected is not None
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))  # type: ignore[arg-type]
    assert int16_linear.gradients(gradient.double(), found[1], Sizes(3, 4, 5), DFP16, (True, True, True)) is None


@needs_library
def test_gradients_that_are_not_needed_are_not_made() -> None:
    x, weight, bias, gradient = drawn(Sizes(3, 4, 5))
    found = int16_linear.linear(x, weight, bias, (DFP16, DFP16), True)
    assert found is not None and found[1] is not None
    made = int16_linear.gradients(gradient, found[1], Sizes(3, 4, 5), DFP16, (False, True, False))
    assert made is not None and made[0] is None and made[1] is not None and made[2] is None


@needs_library
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_no_integer_stands_for_is_left_to_others(bad: float) -> None:
    sizes = Sizes(3, 4, 5)
    whole = drawn(sizes)
    kept = int16_linear.linear(*whole[:3], (DFP16, DFP16), True)
    assert kept is not None and kept[1] is not None
    for index in (0, 1, 3):
        given = drawn(sizes)
        given[index][0, 0] = bad
        if index == 3:
            assert int16_linear.gradients(given[3], kept[1], sizes, DFP16, (True,) * 3) is None
        else:
            assert int16_linear.linear(*given[:3], (DFP16, DFP16), False) is None


@needs_library
def test_other_layouts_and_sizes_are_left_to_others() -> None:
    x, weight, bias, _ = drawn(Sizes(3, 4, 5))
    casts = DFP16, DFP16
    assert int16_linear.linear(x.t().contiguous().t(), weight, bias, casts, False) is None
    assert int16_linear.linear(x.double(), weight, bias, casts, False) is None
    assert int16_linear.linear(torch.zeros(300, 200), torch.zeros(4, 200), None, casts, False) is None
    assert int16_linear.linear(torch.zeros(2, 8), torch.zeros(1024, 8), None, casts, False) is None
    with observed(lambda operations: pytest.raises(ValueError)):  # who counts operations sees them one by one
        assert int16_linear.linear(x, weight, bias, casts, False) is None


@pytest.mark.parametrize(
    ("cast", "is_served"),
    [("dfp16", True), ("dfp16:stochastic", False), ("dfp16:static(-8)", False), ("int8", False), ("fp16", False)],
)
def test_casts_to_int16_under_their_own_exponent_are_served(cast: str, is_served: bool) -> None:
    assert int16_linear.serves(parse(cast)) is is_served


@needs_library
@pytest.mark.parametrize("instruction_set", cpu.available() if HAS_LIBRARY else ())
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cast", ["dfp16", "dfp16:current(headroom=2)"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_calls_planned_by_shapes_have_the_same_bits(
    sizes: Sizes, cast: str, has_bias: bool, instruction_set: str
) -> None:
    (x, weight, bias, _), to = drawn(sizes), parse(cast)
    run, added, before = int16_linear.without_gradients((to, to)), bias if has_bias else None, cpu.asked()
    try:
        cpu.select(instruction_set)
        for factor in (1.0, 3.0, 2.0**-20):  # the second and third calls find the plan
            found = run(x * factor, weight, added)
            whole = int16_linear.linear(x * factor, weight, added, (to, to), False)
            assert found is not None and whole is not None
            assert torch.equal(found.view(torch.int32), whole[0].view(torch.int32))
    finally:
        cpu.select(before or None)


@needs_library
def test_calls_planned_by_shapes_leave_the_same_tensors_to_others() -> None:
    run, sizes = int16_linear.without_gradients((DFP16, DFP16)), Sizes(3, 4, 5)
    x, weight, bias, _ = drawn(sizes)
    others: list[tuple[Any, Any, Any]] = [
        (x.t().contiguous().t(), weight, bias),
        (x.double(), weight, bias),
        (x, weight, bias.double()),
        (x, weight, bias[:3]),
        (x, weight, bias.reshape(1, 4)),
        (x, weight, bias.repeat(2)[::2]),
        (x, weight[:, :4].contiguous(), bias),
        (x[0], weight, bias),
        (x[:0], weight, bias),
        (x.to("meta"), weight, bias),
        (x * math.inf, weight, bias),
        (torch.frombuffer(bytearray(64), dtype=torch.float32, offset=1, count=15).view(3, 5), weight, bias),
        (torch.zeros(300, 200), torch.zeros(4, 200), None),
        (torch.zeros(2, 8), torch.zeros(1024, 8), None),
        (None, weight, bias),
    ]
    for given in others:
        assert run(*given) is None, given
    for way in ("reference", "bitwise"):
        with kernels.use(way):
            assert run(x, weight, bias) is None
    with observed(lambda operations: nullcontext()):
        assert run(x, weight, bias) is None
    assert run(x, weight, bias) is not None


@needs_library
def test_a_region_without_gradients_gives_the_bits_of_one_with_them() -> None:
    layer, x = nn.Linear(5, 4), torch.randn(3, 5)
    with lowp.autocast("dfp16"):
        followed = layer(x)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(layer(x), followed)
