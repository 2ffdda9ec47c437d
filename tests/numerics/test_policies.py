"""A whole policy on a record: each tensor under its rule's cast for its role."""

from __future__ import annotations

import pytest
from numerics.small import recorded

import lowp
from lowp import presets
from lowp.numerics.policies import effects, worst
from lowp.numerics.prediction import effect
from lowp.numerics.record import Key, Record


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
