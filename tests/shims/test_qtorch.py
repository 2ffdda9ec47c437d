"""The functions of QPyTorch: signatures, ranges, correct rounding, and straight-through gradients."""

from __future__ import annotations

import inspect
import math
from fractions import Fraction

import pytest
import torch
from exact_casts import exact_cast
from torch import Tensor

from lowp import shims
from lowp.casts import Cast
from lowp.formats import FloatFormat, Specials
from lowp.shims import (
    BlockFloatingPoint,
    FixedPoint,
    FloatingPoint,
    Number,
    Quantizer,
    block_quantize,
    fixed_point_quantize,
    float_quantize,
    quantizer,
)

SIGNATURES = {
    "float_quantize": "x, exp, man, rounding='stochastic'",
    "fixed_point_quantize": "x, wl, fl, clamp=True, symmetric=False, rounding='stochastic'",
    "block_quantize": "x, wl, dim=-1, rounding='stochastic'",
    "quantizer": "forward_number=None, backward_number=None, forward_rounding='stochastic', "
    "backward_rounding='stochastic', clamping_grad_zero=False, backward_hooks=()",
    "Quantizer": "forward_number=None, backward_number=None, forward_rounding='stochastic', "
    "backward_rounding='stochastic'",
    "FixedPoint": "wl, fl, clamp=True, symmetric=False",
    "FloatingPoint": "exp, man",
    "BlockFloatingPoint": "wl, dim=-1",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_and_defaults_are_those_of_qpytorch(name: str) -> None:
    parameters = inspect.signature(getattr(shims, name)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert ", ".join(map(str, plain)) == SIGNATURES[name]


def corners(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-(2**31), 2**31, (100,), generator=generator).to(torch.int32)
    powers = torch.tensor([2.0**e * m for e in range(-149, 128, 9) for m in (1, 1.0625, 1.5, 1.999999)])
    near = powers.view(torch.int32)
    special = torch.tensor([0x7F800000, 0x7F800001, 0x7FFFFFFF, 0, 1], dtype=torch.int32)
    positive = torch.cat([near - 1, near, near + 1, special])
    return torch.cat([positive.view(torch.float32), -positive.view(torch.float32), noise.view(torch.float32)])


def same(found: Tensor, wanted: list[float]) -> bool:
    expected = torch.tensor(wanted, dtype=torch.float64)
    equal = (found.double() == expected) & (found.signbit() == expected.signbit())
    return bool((equal | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("rounding", ["nearest", "nearest-away", "toward-zero", "up", "down"])
@pytest.mark.parametrize(("exp", "man"), [(2, 1), (4, 3), (5, 2), (5, 10), (6, 20), (7, 23), (8, 7), (8, 22), (8, 23)])
def test_float_is_exact_on_corner_cases(exp: int, man: int, rounding: str) -> None:
    format = FloatFormat("", exp, man, Specials.IEEE if exp == 8 else Specials.FINITE)
    assert FloatingPoint(exp, man).format == format
    cast = Cast(format, rounding.replace("nearest", "nearest-even") if rounding == "nearest" else rounding)  # type: ignore[arg-type]
    x = corners()
    assert same(float_quantize(x, exp, man, rounding), [exact_cast(v, cast) for v in x.tolist()])


def evenly_spaced(value: float, unit: Fraction, lowest: Fraction, highest: Fraction) -> float:
    if math.isnan(value):
        return value
    if math.isinf(value):
        return float(highest if value > 0 else lowest)
    return float(min(max(round(Fraction(value) / unit) * unit, lowest), highest))  # round() takes ties to even


def test_one_exponent_bit_is_evenly_spaced() -> None:
    x, unit = corners(), Fraction(1, 4)
    found = float_quantize(x, 1, 3, "nearest")
    limit = 4 - unit
    wanted = [math.copysign(evenly_spaced(v, unit, -limit, limit), v) for v in x.tolist()]
    assert same(found, wanted)
    with pytest.raises(ValueError, match=r"evenly spaced and not a FloatFormat: use FixedPoint\(5, 2\)"):
        _ = FloatingPoint(1, 3).format


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("wl", "fl"), [(1, 2), (2, 1), (8, 4), (16, 8), (8, 0), (8, -3), (8, 12), (40, 20)])
def test_fixed_point_is_exact_on_corner_cases(wl: int, fl: int, symmetric: bool) -> None:
    x, unit = corners(), Fraction(2) ** -fl
    highest = (2 ** (wl - 1) - 1) * unit
    lowest = -highest if symmetric else -(2 ** (wl - 1)) * unit
    wanted = [evenly_spaced(v, unit, lowest, highest) + 0.0 for v in x.tolist()]
    wanted = torch.tensor(wanted, dtype=torch.float64).float().tolist()  # 40 bits are more than fp32 holds
    assert same(fixed_point_quantize(x, wl, fl, symmetric=symmetric, rounding="nearest"), wanted)


def test_fixed_point_without_clamp_has_no_range() -> None:
    x = corners()
    x = x[x.isfinite()]
    found = fixed_point_quantize(x, 4, 2, clamp=False, rounding="nearest")
    assert same(found, [float(round(Fraction(v) * 4) / Fraction(4)) + 0.0 for v in x.tolist()])
    assert fixed_point_quantize(torch.tensor([math.inf]), 4, 2, False, rounding="nearest").item() == math.inf


@pytest.mark.parametrize("dim", [-1, 0, 1, 2])
@pytest.mark.parametrize("wl", [2, 4, 8, 16, 24])
def test_blocks_share_the_exponent_of_their_largest_number(wl: int, dim: int) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-30, 1, 3, 1e20])[:, None]
    x[0, 0, 0], x[1, 1, 1] = 0.99999994, -0.0
    found = block_quantize(x, wl, dim, "nearest")
    groups = [(x, found)] if dim == -1 else zip(x.unbind(dim), found.unbind(dim), strict=True)
    for before, after in groups:
        unit = Fraction(2) ** (math.frexp(before.abs().max().item())[1] - 1 - (wl - 2))
        limit = (2 ** (wl - 1) - 1) * unit
        assert same(after.flatten(), [evenly_spaced(v, unit, -limit, limit) + 0.0 for v in before.flatten().tolist()])


def test_a_nan_and_an_infinity_leave_their_block_alone() -> None:
    found = block_quantize(torch.tensor([1.0, math.nan, -math.inf, 0.3]), 4, rounding="nearest")
    assert same(found, [1.0, math.nan, -1.75, 0.25])


# Each input is one on which QPyTorch 0.3.0 gives the last number.
WRONG_THERE = [
    (lambda x: float_quantize(x, 4, 3, "nearest"), 1.0625, 1.0, 1.125),
    (lambda x: float_quantize(x, 4, 3, "nearest"), -0.0, -0.0, 0.0),
    (lambda x: float_quantize(x, 4, 3, "nearest"), math.nan, math.nan, 480.0),
    (lambda x: fixed_point_quantize(x, 8, 0, rounding="nearest"), 0.50000006, 1.0, 0.0),
    (lambda x: block_quantize(torch.cat([x, torch.tensor([64.0])]), 8, rounding="nearest")[:1], 2.5, 2.0, 3.0),
]


@pytest.mark.parametrize(("function", "given", "right", "wrong"), WRONG_THERE)
def test_what_the_original_gets_wrong_is_right(function, given: float, right: float, wrong: float) -> None:  # type: ignore[no-untyped-def]
    found = function(torch.tensor([given]))
    assert same(found, [right])
    assert not same(found, [wrong])


def test_stochastic_rounding_is_unbiased_below_the_normal_numbers() -> None:
    # 2**-12 is an eighth of the smallest subnormal number 2**-9 of exp 4, man 3
    x = torch.full((1 << 15,), 2.0**-12)
    found = float_quantize(x, 4, 3, seed=5)
    assert set(found.unique().tolist()) == {0.0, 2.0**-9}
    assert abs((found > 0).double().mean().item() - 0.125) < 5 * math.sqrt(0.125 * 0.875 / len(x))


STOCHASTIC = {
    "float": lambda x, **k: float_quantize(x, 4, 3, **k),
    "float, one exponent bit": lambda x, **k: float_quantize(x, 1, 3, **k),
    "float, wide": lambda x, **k: float_quantize(x, 5, 20, **k),
    "fixed": lambda x, **k: fixed_point_quantize(x, 8, 4, **k),
    "fixed, open": lambda x, **k: fixed_point_quantize(x, 8, 4, False, **k),
    "block": lambda x, **k: block_quantize(x, 4, **k),
    "block along a dimension": lambda x, **k: block_quantize(x.reshape(4, -1), 4, 1, **k),
}


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_seed_of_torch_or_a_given_one_repeats_the_numbers(name: str) -> None:
    x, function = torch.randn(64, generator=torch.Generator().manual_seed(0)), STOCHASTIC[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first, second = function(x), function(x)
        torch.manual_seed(3)
        assert torch.equal(first, function(x))
    assert not torch.equal(first, second)
    assert torch.equal(function(x, seed=7), function(x, seed=7))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_gradients_pass_straight_through(name: str) -> None:
    x = torch.randn(16, requires_grad=True)
    y = STOCHASTIC[name](x)
    weights = torch.arange(16.0).reshape(y.shape)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    assert torch.equal(gradient, weights.reshape(16))


def test_a_quantizer_rounds_forward_and_backward_by_their_own_numbers() -> None:
    called = []

    def doubled(gradient: Tensor) -> Tensor:
        called.append(gradient)
        return gradient * 2

    function = quantizer(FixedPoint(4, 2), FloatingPoint(5, 2), "nearest", "nearest", True, [doubled])
    x = torch.tensor([0.3, 5.0, -9.0, 1.0], requires_grad=True)
    y = function(x)
    assert y.tolist() == [0.25, 1.75, -2.0, 1.0]
    y.backward(torch.tensor([0.55, 1.0, 1.0, 1.0]))
    assert x.grad is not None and x.grad.tolist() == [1.0, 0.0, 0.0, 2.0]
    assert len(called) == 1


@pytest.mark.parametrize(("symmetric", "lowest"), [(False, -2.0), (True, -1.75)])
def test_the_ends_of_a_range_lie_within_it(symmetric: bool, lowest: float) -> None:
    function = quantizer(FixedPoint(4, 2, symmetric=symmetric), None, "nearest", clamping_grad_zero=True)
    x = torch.tensor([1.75, 1.874, 1.876, 2.0, lowest, lowest - 0.124, lowest - 0.126], requires_grad=True)
    y = function(x)
    y.sum().backward()
    assert y.tolist() == [1.75] * 4 + [lowest] * 3
    assert x.grad is not None and x.grad.tolist() == [1, 1, 0, 0, 1, 1, 0]


def test_a_quantizer_without_numbers_changes_nothing() -> None:
    x = torch.randn(5, requires_grad=True)
    y = Quantizer()(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert x.grad is not None and x.grad.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0625, 1.1875, -3.3], dtype=dtype)
    wanted = float_quantize(x.double(), 4, 3, "nearest")
    for found in (float_quantize(x, 4, 3, "nearest"), block_quantize(x, 5, rounding="nearest")):
        assert found.dtype == dtype
    assert torch.equal(float_quantize(x, 4, 3, "nearest").double(), wanted)
    assert float_quantize(torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64), 5, 10, "nearest") > 1


def test_text_of_numbers_is_that_of_qpytorch() -> None:
    texts = ["FloatingPoint (exponent=5, mantissa=2)", "FixedPoint (wl=8, fl=4)", "BlockFloatingPoint (wl=8, dim=-1)"]
    for number, text in zip((FloatingPoint(5, 2), FixedPoint(8, 4), BlockFloatingPoint(8)), texts, strict=True):
        assert isinstance(number, Number)
        assert str(number) == repr(number) == text


X = torch.ones(2, 2)
ERRORS = [
    (lambda: float_quantize(X, 5, 2, "nearset"), r"unknown rounding 'nearset'; did you mean nearest"),
    (lambda: float_quantize(X, 9, 2), "exp must be a whole number from 1 to 8, not 9"),
    (lambda: float_quantize(X, 5, 0), "man must be a whole number from 1 to 23, not 0"),
    (lambda: FixedPoint(8, 0), "fl must be a whole number from 1 to 1000, not 0"),
    (lambda: FixedPoint(8, 4, clamp="no"), "clamp is True or False, not 'no'"),  # type: ignore[arg-type]
    (lambda: fixed_point_quantize(X, 0, 4), "wl must be a whole number from 1 to 64, not 0"),
    (lambda: block_quantize(X, 1), "wl must be a whole number from 2 to 32, not 1"),
    (lambda: block_quantize(X, 8, 2), r"dim 2 is not a dimension of a tensor \(2, 2\): give -1 to 1"),
    (lambda: quantizer("fp16"), "a number must be FloatingPoint, FixedPoint, BlockFloatingPoint or None, not str"),  # type: ignore[arg-type]
    (lambda: quantizer(FloatingPoint(5, 2), clamping_grad_zero=True), "clamping_grad_zero needs a FixedPoint"),
    (lambda: float_quantize(X.bfloat16() * 3.14, 5, 10, "up"), "cannot hold every result exactly"),
]


@pytest.mark.parametrize(("call", "text"), ERRORS, ids=[text for _, text in ERRORS])
def test_bad_input_says_what_is_possible(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("function", [float_quantize, fixed_point_quantize])
@pytest.mark.parametrize("x", [[1.0], torch.ones(2, dtype=torch.int32)], ids=["list", "integers"])
def test_only_floating_point_tensors_are_taken(function, x: object) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TypeError, match="tensor"):
        function(x, 5, 2)


def test_torch_compile_takes_them_whole() -> None:
    x = torch.randn(4, 3)
    for function in (
        lambda x: float_quantize(x, 4, 3, "nearest"),
        lambda x: fixed_point_quantize(x, 8, 4, rounding="nearest"),
        lambda x: block_quantize(x, 8, 1, "nearest"),
    ):
        assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))
