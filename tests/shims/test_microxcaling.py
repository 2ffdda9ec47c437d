"""mx_specs: defaults and finalisation as in microxcaling, exact blocks, and the equivalent policy."""

from __future__ import annotations

import itertools
import math
from enum import Enum
from fractions import Fraction
from typing import Any

import pytest
import torch
from exact_casts import exact_cast
from torch import Tensor, nn

import lowp
from lowp.casts import Cast
from lowp.casts import parse as parse_cast
from lowp.formats import FloatFormat, IntFormat, parse
from lowp.shims import (
    MxSpecs,
    apply_mx_specs,
    finalize_mx_specs,
    get_backwards_mx_specs,
    get_default_mx_specs,
    policy_from_mx_specs,
    quantize_bfloat,
    quantize_elemwise_op,
    quantize_mx_op,
)
from lowp.shims.microxcaling import ELEMENTS, ROUNDINGS

SPECS: dict[str, Any] = {
    "w_elem_format": "fp8_e4m3",
    "a_elem_format": "fp8_e4m3",
    "scale_bits": 8,
    "block_size": 32,
    "bfloat": 16,
}


# -- the dictionary ---------------------------------------------------------------------------------------------------
def test_the_defaults_round_nothing() -> None:
    specs = get_default_mx_specs()
    assert len(specs) == 29
    assert specs["round"] == specs["round_mx_grad_output_grad_weight"] == "nearest"
    assert specs["w_elem_format"] is None and specs["block_size"] == specs["bfloat"] == specs["scale_bits"] == 0
    assert specs["bfloat_subnorms"] and specs["quantize_backprop"] and specs["shared_exp_method"] == "max"
    assert finalize_mx_specs(specs) is None
    assert finalize_mx_specs({"bfloat": None, "round": "even"}) is None
    assert finalize_mx_specs({}, early_exit=False) == specs


def test_finalising_hands_formats_and_roundings_down() -> None:
    given = {"a_elem_format": "int8", "w_elem_format": "fp4", "a_elem_format_bp_os": "fp8_e5m2", "round": "even"}
    specs = finalize_mx_specs({**given, "round_grad_input": "floor"})
    assert specs is not None
    assert (specs["w_elem_format_bp"], specs["a_elem_format_bp_ex"]) == ("fp4", "int8")
    assert specs["a_elem_format_bp_os"] == "fp8_e5m2"
    even = {"round", "round_m", "round_weight", "round_output", "round_grad_weight", "round_mx_output"}
    assert {key for key in specs if key.startswith("round") and specs[key] == "even"} == even
    assert {specs[key] for key in specs if key.startswith("round") and key not in even} == {"floor"}
    assert given == {**given}  # what was given is left alone


def test_specs_apply_over_defaults_and_none_means_the_default() -> None:
    specs = apply_mx_specs({"bfloat": 16, "round": None}, {"round": "even", "fp": 0})
    assert specs["bfloat"] == 16 and specs["round"] == "even"
    assert isinstance(apply_mx_specs(None), MxSpecs)


def test_backward_rounds_nothing_without_quantize_backprop() -> None:
    backward = get_backwards_mx_specs(MxSpecs(SPECS, quantize_backprop=False))
    assert backward["a_elem_format"] is None and backward["bfloat"] == backward["block_size"] == 0
    assert get_backwards_mx_specs(SPECS)["bfloat"] == 16


BAD_SPECS = [
    ({"blok_size": 32}, r"unknown key of mx_specs 'blok_size'; did you mean block_size\?"),
    ({"w_elem_format": "fp8_e4m"}, r"unknown MX element format 'fp8_e4m'; did you mean fp8_e4m3"),
    ({"round_output": "evn"}, r"unknown rounding of mx_specs 'evn'; did you mean even\?"),
    ({"shared_exp_method": "maximum"}, "unknown shared_exp_method 'maximum'"),
    ({"block_size": -1}, r"mx_specs\['block_size'\] must be a whole number from 0"),
    ({"bfloat": "16"}, r"mx_specs\['bfloat'\] must be a whole number"),
    ({"custom_cuda": 1}, r"mx_specs\['custom_cuda'\] is True or False, not 1"),
]


@pytest.mark.parametrize(("specs", "text"), BAD_SPECS)
def test_a_bad_key_or_value_names_the_near_ones(specs: dict[str, Any], text: str) -> None:
    for function in (apply_mx_specs, finalize_mx_specs, MxSpecs, policy_from_mx_specs):
        with pytest.raises(ValueError, match=text):
            function(specs)
    with pytest.raises(ValueError, match=text):
        get_default_mx_specs().update(specs)


# -- blocks -----------------------------------------------------------------------------------------------------------
def exact_block(block: list[float], element: FloatFormat | IntFormat, mode: str, scale_bits: int = 8) -> list[float]:
    """Round a block by the definition of OCP MX 1.0, section 6.3, in rational arithmetic."""
    if not all(map(math.isfinite, block)):
        return [math.nan] * len(block)
    largest, limit = max(map(abs, block)), 2 ** (scale_bits - 1) - 1
    behind = 0 if isinstance(element, FloatFormat) else element.bits - 2
    top = element.max_exponent if isinstance(element, FloatFormat) else 0
    exponent = max(math.frexp(largest)[1] - 1 - top, -limit) if largest else -limit
    if exponent > limit:
        return [math.nan] * len(block)
    unit = Fraction(2) ** (exponent - behind)
    cast = Cast(element, mode, "saturate")  # type: ignore[arg-type]
    quotients = [math.copysign(float(Fraction(v) / unit), v) for v in block]
    return [float(Fraction(e) * unit) if e else e for e in (exact_cast(q, cast) for q in quotients)]


def assert_blocks(found: Tensor, x: Tensor, element: FloatFormat | IntFormat, mode: str, scale_bits: int = 8) -> None:
    wanted = torch.tensor([exact_block(row, element, mode, scale_bits) for row in x.tolist()], dtype=torch.float64)
    equal = (found.double() == wanted) & (found.signbit() == wanted.signbit())
    assert (equal | (found.isnan() & wanted.isnan())).all()


def blocks(columns: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-148, 127, (60, 1), generator=generator)
    x = torch.ldexp(torch.randn(60, columns, generator=generator, dtype=torch.float64).clamp(-1.9, 1.9), exponents)
    x = torch.cat([x.float(), torch.randn(20, columns, generator=generator)])
    x[:8] = 0.0
    x[1, 0], x[2, 1], x[3, 2], x[4, 3] = math.inf, math.nan, -0.0, 2.0**-149
    x[5, 0] = x[60, 0] = 7.9999995  # the block where floor(log2) in fp32 goes wrong
    x[6] = 0.0624999962747 * torch.tensor([1.0, -1.0] * (columns // 2))
    x[7, :2] = torch.tensor([3.4028234663852886e38, 1e-45])
    return x


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_element_format_and_rounding_is_exact(name: str) -> None:
    element, x = parse(ELEMENTS[name]), blocks()
    assert isinstance(element, (FloatFormat, IntFormat))
    for given in ("nearest", "even", "floor"):
        found = quantize_mx_op(x, SPECS, name, axes=[-1], block_size=8, round=given)
        assert_blocks(found, x, element, ROUNDINGS[given])


@pytest.mark.parametrize("scale_bits", [0, 4, 5, 8])
def test_the_bits_of_the_scale_limit_its_exponent(scale_bits: int) -> None:
    x, element = blocks(), parse("e2m1")
    assert isinstance(element, FloatFormat)
    found = quantize_mx_op(x, {"scale_bits": scale_bits}, "fp4_e2m1", block_size=8, axes=-1, round="even")
    assert_blocks(found, x, element, "nearest-even", scale_bits or 8)
    assert bool(found[7].isnan().all()) == (scale_bits in (4, 5))


def test_blocks_agree_with_the_named_formats() -> None:
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    for name, format in {"fp8_e4m3": "mxfp8", "fp8_e5m2": "mxfp8-e5m2", "fp6_e2m3": "mxfp6", "int8": "mxint8"}.items():
        assert torch.equal(quantize_mx_op(x, SPECS, name, axes=[-1], round="even"), lowp.quantize(x, format))


def naive_tiles(x: Tensor, axes: tuple[int, ...], size: int) -> Tensor:
    """Round tile by tile, in Python's loops."""
    found = torch.empty_like(x)
    axes = tuple(axis % x.dim() for axis in axes)
    steps = [(size or length) if axis in axes else 1 for axis, length in enumerate(x.shape)]
    for corner in itertools.product(*(range(0, n, step) for n, step in zip(x.shape, steps, strict=True))):
        place = tuple(slice(start, start + step) for start, step in zip(corner, steps, strict=True))
        found[place] = lowp.quantize(x[place].reshape(1, -1), "e4m3fn@e8m0/row").reshape(x[place].shape)
    return found


@pytest.mark.parametrize("axes", [(0,), (1,), (-1,), (0, 2), (1, 2), (2, 0, 1)])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 32])
def test_blocks_lie_along_the_axes(axes: tuple[int, ...], size: int) -> None:
    x = torch.randn(5, 4, 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)
    found = quantize_mx_op(x, SPECS, "fp8_e4m3", size, list(axes), "even")
    assert torch.equal(found, naive_tiles(x, axes, size))


def test_without_sharing_each_element_has_its_own_scale() -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found = quantize_mx_op(x, {"shared_exp_method": "none"}, "fp8_e4m3", 32, [-1], "even")
    assert torch.equal(found, lowp.quantize(x, "e4m3fn@e8m0/1"))


def test_blocks_of_fp32_subnormals_can_be_flushed() -> None:
    x = torch.tensor([[1e-40, -1e-41], [2.0**-126, 1e-40]])
    flushed = quantize_mx_op(x, {"mx_flush_fp32_subnorms": True}, "bf16", 2, [-1])
    kept = quantize_mx_op(x, {}, "bf16", 2, [-1])
    assert flushed[0].tolist() == [0, 0] and torch.equal(flushed[1], kept[1])
    assert kept[0, 0] > 0


def test_element_formats_are_given_in_any_case_or_as_an_enumeration() -> None:
    x, member = torch.randn(2, 32), Enum("ElemFormat", {"fp6_e3m2": 6}).fp6_e3m2  # type: ignore[attr-defined]
    assert torch.equal(quantize_mx_op(x, SPECS, member, axes=[-1]), quantize_mx_op(x, SPECS, "FP6_E3M2", axes=[-1]))
    assert quantize_mx_op(x, SPECS) is x


def test_exponents_just_below_a_power_of_two_are_right() -> None:
    x = torch.tensor([7.9999995, 0.7])
    assert torch.log2(x[0]).item() == 3.0  # what microxcaling goes by
    assert quantize_mx_op(x, SPECS, "fp4_e2m1", 2, [0], "even").tolist() == [6.0, 0.5]  # there [8, 1]
    assert quantize_elemwise_op(x, {"bfloat": 12}, "floor").tolist() == [7.5, 0.6875]


def test_dither_is_unbiased_and_repeatable() -> None:
    x = torch.full((1 << 14,), 1.125)
    x[0] = 1.875
    found = quantize_mx_op(x, SPECS, "int4", 0, [0], "dither", seed=3)
    assert set(found[1:].tolist()) == {1.0, 1.25}
    assert abs(found[1:].mean().item() - 1.125) < 5 * 0.125 / 128
    assert torch.equal(found, quantize_mx_op(x, SPECS, "int4", 0, [0], "dither", seed=3))


BAD_CALLS = [
    (lambda x: quantize_mx_op(x, SPECS, "fp8_e4m3"), "needs axes"),
    (lambda x: quantize_mx_op(x, SPECS, "fp8_e4m3", axes=[2]), r"axes \[2\] are not all dimensions"),
    (lambda x: quantize_mx_op(x, SPECS, "fp8_e4m3", axes=[1, -1]), "name a dimension twice"),
    (lambda x: quantize_mx_op(x, SPECS, "fp9", axes=[-1]), "unknown MX element format 'fp9'"),
    (lambda x: quantize_mx_op(x, SPECS, "fp4", axes=[-1], round="up"), "unknown rounding of mx_specs 'up'"),
    (lambda x: quantize_elemwise_op(x, {"bfloat": 16, "fp": 16}), "bfloat 16 and fp 16: give one"),
    (lambda x: quantize_elemwise_op(x, {"bfloat": 9}), "from 10 to 32, not 9"),
    (lambda x: quantize_elemwise_op(x, {"fp": 6}), "from 7 to 29, not 6"),
]


@pytest.mark.parametrize(("call", "text"), BAD_CALLS, ids=[text for _, text in BAD_CALLS])
def test_bad_arguments_say_what_is_possible(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(torch.ones(2, 2))


# -- element by element -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("specs", [{"bfloat": w} for w in (10, 16, 24, 31)] + [{"fp": w} for w in (7, 8, 16, 24, 29)])
@pytest.mark.parametrize("subnormals", [True, False])
def test_bfloat_and_fp_are_the_formats_of_their_width(specs: dict[str, int], subnormals: bool) -> None:
    ((key, width),) = specs.items()
    exponent_bits = 8 if key == "bfloat" else 5
    format = FloatFormat("", exponent_bits, width - exponent_bits - 1, subnormals=subnormals)
    x = blocks().flatten()
    for name, mode in ROUNDINGS.items():
        if name != "dither":
            found = quantize_elemwise_op(x, {**specs, "bfloat_subnorms": subnormals}, name)
            wanted = torch.tensor([exact_cast(v, Cast(format, mode)) for v in x.tolist()], dtype=torch.float64)  # type: ignore[arg-type]
            same = (found.double() == wanted) & (found.signbit() == wanted.signbit()) | found.isnan() & wanted.isnan()
            assert same.all(), (name, x[~same][:3], found[~same][:3], wanted[~same][:3])


def test_element_wise_rounding_takes_its_mode_from_the_specs() -> None:
    x = torch.tensor([1 + 2.0**-8, 70000.0])
    assert quantize_elemwise_op(x, {"bfloat": 16}).tolist() == [1 + 2.0**-7, 70144.0]
    assert quantize_elemwise_op(x, {"bfloat": 16, "round": "even"}).tolist() == [1.0, 70144.0]
    assert quantize_elemwise_op(x, {"fp": 16}, "floor").tolist() == [1 + 2.0**-8, 65504.0]
    assert quantize_elemwise_op(x, None) is x and quantize_elemwise_op(x, {"bfloat": 32}) is x


def test_quantize_bfloat_rounds_its_gradient_too() -> None:
    for backprop, wanted in ((True, 1 + 2.0**-7), (False, 1 + 2.0**-8)):
        x = torch.ones(1, requires_grad=True)
        quantize_bfloat(x, {"bfloat": 16, "quantize_backprop": backprop}).backward(torch.tensor([1 + 2.0**-8]))
        assert x.grad is not None and x.grad.item() == wanted
    assert quantize_bfloat(x, None) is x


def test_gradients_pass_straight_through() -> None:
    x, weights = torch.randn(3, 40, requires_grad=True), torch.randn(3, 40)
    for y in (quantize_mx_op(x, SPECS, "fp4", axes=[0]), quantize_elemwise_op(x, SPECS), quantize_mx_op(x, SPECS)):
        (gradient,) = torch.autograd.grad((y * weights).sum(), x)
        assert torch.equal(gradient, weights)


# -- the policy -------------------------------------------------------------------------------------------------------
def test_the_policy_names_the_formats_of_the_specs() -> None:
    policy = policy_from_mx_specs({**SPECS, "w_elem_format": "int8", "a_elem_format": "fp6_e3m2", "round": "even"})
    contraction, rest = policy.rules
    assert contraction.input == contraction.grad == parse_cast("mxfp6-e3m2")
    assert contraction.weight == parse_cast("i8s@2^-133..121/32")
    assert contraction.output == rest.output == rest.input == parse_cast("bf16")
    assert policy_from_mx_specs({"round": "even"}).rules == ()
    assert policy_from_mx_specs({"fp": 16}).rules[0].weight == parse_cast("fp16:nearest-away")
    forward_only = policy_from_mx_specs({**SPECS, "quantize_backprop": False, "a_elem_format_bp_os": "fp4"})
    assert forward_only.rules[0].grad is None


VARIANTS: list[dict[str, Any]] = [
    {},
    {"block_size": 0},
    {"shared_exp_method": "none"},
    {"scale_bits": 5},
    {"bfloat": 0},
]
VARIANTS += [{"round": "even"}, {"round": "floor"}, {"w_elem_format": "int8"}, {"bfloat_subnorms": False}]


@pytest.mark.parametrize("extra", VARIANTS, ids=str)
def test_a_linear_layer_under_the_policy_is_that_of_the_operations(extra: dict[str, Any]) -> None:
    specs = finalize_mx_specs({**SPECS, **extra})
    assert specs is not None
    torch.manual_seed(0)
    layer, x = nn.Linear(80, 5, bias=False), torch.randn(7, 80).bfloat16().float()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.bfloat16())  # rounding to bfloat first changes nothing
    with lowp.autocast(policy_from_mx_specs(specs)):
        found = layer(x).float()
        nn.functional.relu(x)  # a rule that nothing matches is warned of
    mode = specs["round_mx_output"]
    left = quantize_mx_op(x, specs, specs["a_elem_format"], axes=[-1], round=mode)
    right = quantize_mx_op(layer.weight, specs, specs["w_elem_format"], axes=[-1], round=mode)
    exact = (left.double() @ right.double().T).float()
    if not specs["bfloat"]:
        torch.testing.assert_close(found, exact)
    else:
        rounded = quantize_elemwise_op(exact, specs, specs["round_output"])
        # the order of the fp32 sum decides ties of the rounding alone: one bf16 ulp
        torch.testing.assert_close(found, rounded, rtol=2**-7, atol=1e-6)
        assert (found == rounded).float().mean() > 0.9


def test_a_network_trains_under_the_policy() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, labels = torch.randn(64, 64), torch.randint(10, (64,))
    losses = []
    for _ in range(10):
        with lowp.autocast(policy_from_mx_specs(SPECS)):
            loss = nn.functional.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


BAD_POLICIES = [
    ({"a_elem_format_bp_os": "fp8_e5m2"}, "must agree: a_elem_format_bp_os fp8_e5m2, a_elem_format_bp_ex fp8_e4m3"),
    ({"w_elem_format_bp": "fp4"}, "must agree: w_elem_format fp8_e4m3, w_elem_format_bp fp4"),
    ({"round_grad_weight": "even"}, "must agree: round_output nearest, round_grad_input nearest, round_grad_weight"),
    ({"mx_flush_fp32_subnorms": True}, "cannot express mx_specs"),
    ({"vec_use_exp2": True}, "cannot express mx_specs"),
]


@pytest.mark.parametrize(("extra", "text"), BAD_POLICIES)
def test_what_a_policy_cannot_say_is_named(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        policy_from_mx_specs({**SPECS, **extra})
