"""A whole policy on a record: each tensor under its rule's cast for its role."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from numerics.small import network, recorded

import lowp
from lowp import presets
from lowp.formats import ScaledFormat
from lowp.numerics import policies
from lowp.numerics.blocks import BlockLayout
from lowp.numerics.policies import cheapest, effects, high_layers, products, readings, sensitivities, worst
from lowp.numerics.prediction import Effect, effect
from lowp.numerics.record import Key, OpSeen, Part, Record
from lowp.numerics.spectrum import Spectrum


@pytest.fixture(scope="module")
def record() -> Record:
    return recorded(2)


def test_each_tensor_is_judged_under_the_cast_of_its_role(record: Record) -> None:
    found = effects(record, presets.PRESETS["fp8"].policy)
    operand, gradient = Key("0", "linear", "input", "forward"), Key("0", "linear", "grad", "backward")
    assert found[operand] == effect(record.tensors[operand], "e4m3fn@fp32/tensor")
    assert found[gradient] == effect(record.tensors[gradient], "e5m2@fp32/tensor")
    assert Key("2", "layer_norm", "input", "forward") not in found, "fp8 rounds operands of products alone"


def test_of_the_casts_of_products_the_one_that_leaves_least_counts(record: Record) -> None:
    casts = {"input": "bf16", "weight": "bf16", "grad": "bf16"}
    rule = lowp.Rule.of("linear", **casts, input_gradient="weight=e2m1", weight_gradient="input=e4m3fn grad=e5m2")
    found = effects(record, lowp.Policy((rule,)))
    for key, cast in (
        (Key("0", "linear", "input", "forward"), "e4m3fn"),
        (Key("0", "linear", "grad", "backward"), "e5m2"),
        (Key("0", "weight", "weight", "step"), "e2m1"),
    ):
        assert found[key] == effect(record.tensors[key], cast)


def test_the_loss_scale_moves_what_backward_writes(record: Record) -> None:
    policy = presets.PRESETS["fp16"].policy
    key = Key("0", "weight", "weight_grad", "backward")
    assert effects(record, policy, 2.0**30)[key].overflows and not effects(record, policy)[key].overflows
    assert worst(effects(record, policy, 2.0**30))[0][1].overflows


def test_rules_of_modules_and_the_policy_of_fp32_are_followed(record: Record) -> None:
    policy = lowp.Policy((lowp.Rule.of("linear", where="3", weight="e2m1"),))
    assert set(effects(record, policy)) == {Key("3", "weight", "weight", "step")}
    assert not effects(record, presets.PRESETS["fp32"].policy)


def test_blocks_are_read_along_the_sum_of_each_product(record: Record) -> None:
    found = products(record, presets.parse("mxfp4:nearest-even").policy)["3", "linear"]
    seen, blocks = record.tensors, record.part.blocks
    gradient = Key("3", "linear", "grad", "backward")
    operand, weight = Key("3", "linear", "input", "forward"), Key("3", "weight", "weight", "step")
    one, two = BlockLayout(1, "32"), BlockLayout(0, "32")
    forward, back, updates = (found[one].operands for one in ("forward", "input_gradient", "weight_gradient"))
    cast = lowp.Cast("mxfp4")
    assert forward == [effect(seen[key], cast, 1.0, blocks[key, one]) for key in (operand, weight)]
    assert back[0] == effect(seen[gradient], cast, 1.0, blocks[gradient, one]) and back[1] == forward[1]
    assert updates[0] == effect(seen[gradient], cast, 1.0, blocks[gradient, two]) and updates[1] == forward[0]
    assert found["forward"].error == sum(one.error for one in forward)
    assert found["forward"].flushed == max(one.flushed for one in forward)
    assert not any(one.is_bound for one in effects(record, presets.parse("mxfp4").policy).values())


def test_what_a_product_reads_under_a_cast_of_its_own_is_told(record: Record) -> None:
    rule = lowp.Rule.of("linear", **OPERANDS, saved="e4m3fn", weight_gradient="input=mxfp4 hadamard=16")
    found = readings(record, lowp.Policy((rule,)), "3", "linear")
    layouts = {(one.product, one.key.role): one.layout for one in found}
    assert layouts["weight_gradient", "input"] == BlockLayout(0, "32", 16)
    assert layouts["weight_gradient", "grad"] == BlockLayout(0, "16", 16)
    assert layouts["input_gradient", "grad"] == BlockLayout(1, "16") and layouts["saved", "input"] is None
    plain = lowp.Rule.of("linear", **OPERANDS)
    policies = (lowp.Policy((one,)) for one in (plain, replace(plain, saved="e5m2")))
    one, kept = (products(record, policy)["3", "linear"] for policy in policies)
    assert kept["forward"] == one["forward"] and kept["input_gradient"] == one["input_gradient"]
    assert kept["weight_gradient"] != one["weight_gradient"], "which reads what was kept for backward"


OPERANDS = {"input": "nvfp4", "weight": "nvfp4", "grad": "nvfp4"}


def test_layers_whose_rounding_costs_the_loss_most_stay_high(record: Record) -> None:
    policy = lowp.Policy((lowp.Rule.of("linear", **OPERANDS),), name="four")
    changes = sensitivities(record, policy)
    high = high_layers(record, policy, 1)
    squares = {path: sum(one**2 for name, one in changes.items() if name[0] == path) for path in ("0", "3")}
    assert list(high.shares) == sorted(squares, key=lambda path: -squares[path])
    for path, share in high.shares.items():
        assert share == pytest.approx(squares[path] / sum(squares.values()))
    assert sum(high.shares.values()) == pytest.approx(1.0) and high.kept == (next(iter(high.shares)),)
    first, *rest = high.policy.rules
    assert first.where == high.kept[0] and str(first.weight) == "bf16" and tuple(rest) == policy.rules
    assert high.policy.name == "four" and lowp.Policy.from_toml(high.policy.to_toml()) == high.policy
    with lowp.autocast(high.policy) as region:
        network()(torch.randn(8, 16))
    assert not region.report().unused
    assert len(high_layers(record, policy, 9).kept) == 2


def test_without_a_number_the_layers_stay_high_that_hold_half_if_they_are_few(record: Record) -> None:
    policy = lowp.Policy((lowp.Rule.of("linear", **OPERANDS),))
    alone = high_layers(record, policy)
    assert len(alone.kept) == (1 if max(alone.shares.values()) >= 0.5 else 0)
    part = Part.read(record.part.document())
    for name, seen in part.updates.items():
        seen.gradient_energy[:] = 1.0 if name in ("0.weight", "3.weight") else 0.0
    wide = Record(record.header, part)
    for place in range(9):  # nine layers like the last
        part.ops[f"more.{place}", "linear"] = replace(part.ops["3", "linear"])
    even = high_layers(wide, policy)
    assert not even.kept and even.policy == policy and max(even.shares.values()) < 0.5


def test_a_precision_of_16_bits_keeps_no_layer_high(record: Record) -> None:
    assert not high_layers(record, presets.PRESETS["fp16"].policy).shares
    assert not high_layers(record, presets.PRESETS["fp32"].policy, 3).kept


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_the_blocks_that_a_preset_reads_are_counted(record: Record, preset: str) -> None:
    for place in (("0", "linear"), ("3", "linear")):
        for one in readings(record, presets.PRESETS[preset].policy, *place):
            format = one.cast.format
            if one.product in ("forward", "input_gradient", "weight_gradient") and isinstance(format, ScaledFormat):
                assert not format.scope.elements or (one.key, one.layout) in record.part.blocks, str(one)


def test_where_blocks_were_counted_a_change_is_that_of_their_error(record: Record) -> None:
    policy = lowp.Policy((lowp.Rule.of("linear", **OPERANDS),))
    key = Key("3", "linear", "input", "forward")
    seen, slope = record.tensors[key], record.part.slopes[key]
    assert seen.tensors == 2 and seen.count == 2 * 8 * 32
    error = effect(seen, "nvfp4", 1.0, record.part.blocks[key, BlockLayout(1, "16")]).error
    per_step = error * seen.sum_squares / seen.count * slope.sum() / 2
    assert sensitivities(record, policy)[str(key)] == pytest.approx(per_step**0.5)


def by_hand(gradient: list[float], operand: list[float], *work: int) -> Record:
    """Layers a, b, … of so many multiplications, with the same tensors but for those of b, which 8 bits do not hold."""
    part = Part()
    for name, multiplications in zip("abc", work, strict=False):
        part.ops[name, "linear"] = OpSeen("contraction", 1, multiplications=multiplications)
        many = [1.0 + place / 4096 for place in range(256)]
        for role, phase, values in (("input", "forward", operand), ("grad", "backward", gradient)):
            numbers = many if name == "b" else values
            part.tensors[Key(name, "linear", role, phase)] = Spectrum.of(torch.tensor(numbers))
    return Record({}, part, {"max_overhead": None})


POWERS = [6.0, -3.0]  # which e2m1 holds as they are


@pytest.mark.parametrize(
    ("work", "bits", "what", "layers", "share"),
    [
        ((300, 100), 4, "bytes", ["e2m1", "bf16"], (3 * 0.125 + 0.5) / 4),
        ((0, 0), 4, "bytes", ["e2m1", "bf16"], (0.125 + 0.5) / 2),
        ((300, 100), 4, "area", ["e2m1", "bf16"], (3 * 4 + 64) / 4 / 576),
        ((300, 100), 3, "area", ["bf16", "bf16"], 64 / 576),
        ((300, 100, 0), 8, "bytes", ["e2m1", "bf16", "e2m1"], (300 * 0.125 + 100 * 0.5 + 0.125) / 401),
    ],
)
def test_the_cost_of_a_policy_is_that_of_its_formats_by_their_work(
    work: tuple[int, ...], bits: int, what: str, layers: list[str], share: float
) -> None:
    found = cheapest(by_hand(POWERS, POWERS, *work), bits, what, 60.0)
    assert [one.partition("@")[0] for one in found.layers.values()] == layers
    assert found.share == pytest.approx(share, rel=1e-12) and found.policy.name == f"{bits}-bit"
    few = f"e2m1@fp32/tensor for {layers.count('e2m1')}" if "e2m1" in layers else ""
    counts = ", ".join(filter(None, (f"bf16 for {layers.count('bf16')}", few)))
    assert str(found) == f"cheapest policy: {counts} of {len(layers)} layers; {what} {100 * share:.1f} % of fp32's"


def test_gradients_may_keep_eight_decibels_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "CANDIDATES", ("e2m1",))
    rough = [6.0, -3.0, 1.3, 5.1, 2.2]
    ratio = effect(Spectrum.of(torch.tensor(rough)), "e2m1@fp32/tensor").signal_to_noise
    assert 16 < ratio < 24, "so that eight more are exact"
    for gradient, operand, least in ((POWERS, rough, ratio), (rough, POWERS, ratio + 8.0)):
        record = by_hand(gradient, operand, 1)
        told = [cheapest(record, 8, least_signal=signal).layers["a"] for signal in (least, least + 1e-9)]
        assert told == ["e2m1@fp32/tensor", "bf16"]


def test_the_worst_tensors_are_those_that_overflow_and_then_those_that_keep_least() -> None:
    def of(ratio: float, overflow: float = 0.0) -> Effect:
        return Effect(0.0, 0.0, overflow, ratio, 1.0, 1.0)

    keys = [Key(name, "linear", "input", "forward") for name in "abcdef"]
    found = dict(zip(keys, (of(30.0), of(float("inf")), of(10.0), of(50.0, 0.1), of(60.0, 0.2), of(20.0)), strict=True))
    assert "".join(key.module for key, _ in worst(found)) == "edcfa" and len(worst(found, 6)) == 6


@pytest.mark.parametrize(
    ("changes", "kept"),
    [([1.0, 1.0], "a"), ([1.0, 2.0], "b"), ([2.0, 1.5, 1.5], ""), ([2.0, 1.0, 1.0], "a"), ([0.0, 0.0], "")],
)
def test_of_few_layers_one_stays_high_if_it_holds_half(
    changes: list[float], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    squares = dict(zip("abc", changes, strict=False))
    monkeypatch.setattr(policies, "_changes", lambda record, policy, module, op: [(module, squares[module] ** 0.5)])
    record = by_hand(POWERS, POWERS, *[1] * len(changes))
    found = high_layers(record, lowp.Policy((lowp.Rule.of("linear", **OPERANDS),)))
    assert "".join(found.kept) == kept
    assert found.shares == pytest.approx({name: one / (sum(changes) or 1.0) for name, one in squares.items()})
