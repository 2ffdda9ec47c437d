"""Presets: each matches its name and has a source, and formats and policies are converted to one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowp.errors import InvalidInput, UnknownName
from lowp.policy import Policy, Rule
from lowp.presets import PRESETS, LossScale, Masters, Preset, clipped_gradients, parse

NAMES = ("fp32", "fp16", "bf16", "fp16-storage", "bf16-storage", "bf16-tpu", "bf16-trunc", "fp16-naive", "fp8")


def test_the_presets_are_these() -> None:
    assert set(NAMES) <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_source_a_summary_and_its_own_name(name: str) -> None:
    preset = PRESETS[name]
    assert preset.name == preset.policy.name == name
    assert preset.source and preset.summary
    assert parse(name) is preset
    assert parse(preset) is preset


@pytest.mark.parametrize(
    ("name", "scale", "masters", "parameters"),
    [
        ("fp32", "none", "none", None),
        ("fp16", "dynamic", "none", None),
        ("bf16", "none", "none", None),
        ("fp16-storage", "dynamic", "fp32", "fp16"),
        ("bf16-storage", "none", "fp32", "bf16"),
        ("bf16-tpu", "none", "none", None),
        ("fp16-naive", "none", "none", "fp16"),
    ],
)
def test_scale_masters_and_storage(name: str, scale: str, masters: str, parameters: str | None) -> None:
    preset = PRESETS[name]
    stored = preset.policy.parameters
    assert (str(preset.loss_scale), str(preset.masters)) == (scale, masters)
    assert (None if stored is None else str(stored)) == parameters


def test_fp32_has_no_rules() -> None:
    assert PRESETS["fp32"].policy.rules == ()


def test_fp8_is_e4m3_forward_and_e5m2_backward_with_current_scaling() -> None:
    (rule,) = PRESETS["fp8"].policy.rules
    assert (str(rule.input), str(rule.weight), str(rule.grad), rule.output) == (
        "e4m3fn@fp32/tensor",
        "e4m3fn@fp32/tensor",
        "e5m2@fp32/tensor",
        None,
    )
    assert rule.input is not None and str(rule.input.scaling) == "current"


@pytest.mark.parametrize(
    ("name", "weight", "input_gradient"),
    [("nvfp4", "e2m1@e4m3fn@fp32/16x16", None), ("mxfp4", "mxfp4", "weight=mxfp4 hadamard=16")],
)
def test_four_bits_have_stochastic_and_rotated_gradients_and_a_last_layer_in_bf16(
    name: str, weight: str, input_gradient: str | None
) -> None:
    policy = PRESETS[name].policy
    rule = policy.match("linear", "contraction", "blocks.1.widen")
    assert policy.match("addmm", "contraction", "blocks.1.widen") is rule
    convolution = policy.match("conv2d", "contraction", "embed")
    assert rule is not None and convolution is not None and convolution.weight == rule.weight
    assert convolution.grads == rule.grads and not convolution.has_products
    assert (str(rule.input), str(rule.weight), str(rule.grad)) == (name, weight, f"{name}:stochastic")
    assert str(rule.weight_gradient) == f"input={name} hadamard=16"
    assert input_gradient == (None if rule.input_gradient is None else str(rule.input_gradient))
    (bf16, *rest) = PRESETS["bf16"].policy.rules
    for op, path in (("linear", ""), ("linear", "lm_head"), ("linear", "classifier"), ("matmul", "blocks.0")):
        found = policy.match(op, "contraction", path)
        assert found is not None and vars(found) == {**vars(bf16), "where": found.where}
    assert list(policy.rules[-2:]) == rest
    assert Policy.from_toml(policy.to_toml()) == policy
    assert "contraction in the model itself: input=bf16" in str(policy)
    bare = parse(f"{name}:nearest-even")  # the format for all operands, to nearest
    assert bare.name == f"{name}:nearest-even" and parse("dfp16:nearest-even") is PRESETS["dfp16"]
    assert len(bare.policy.rules) == 1 and str(bare.policy.rules[0].grad) == name


def test_nvfp4_keeps_the_first_of_many_blocks_in_bf16_and_other_presets_do_not() -> None:
    def weight(path: str, name: str = "nvfp4") -> str:
        rule = PRESETS[name].policy.match("linear", "contraction", path)
        return "" if rule is None else str(rule.weight)

    firsts = (
        "blocks.0.widen",
        "model.layers.0.mlp.up_proj",
        "bert.encoder.layer.0.output.dense",
        "transformer.h.0.attn",
    )
    assert {weight(path) for path in firsts} == {"bf16"}
    others = [path.replace(".0.", number) for path in firsts for number in (".1.", ".10.")]
    assert {weight(path) for path in (*others, "0.widen", "layers.0")} == {"e2m1@e4m3fn@fp32/16x16"}
    assert {weight(firsts[0], name) for name in ("mxfp4", "quartet2")} == {"mxfp4", "nvfp4:4/6"}


def test_mxfp8_rceil_has_blocks_along_the_sum_of_each_product_and_mxfp8_is_the_format_alone() -> None:
    policy = PRESETS["mxfp8-rceil"].policy
    rule, last = (policy.match("linear", "contraction", path) for path in ("blocks.0.widen", "lm_head"))
    assert rule is not None and last is not None and str(last.weight) == "bf16"
    assert {str(cast) for cast in rule.casts} == {"mxfp8:rceil", "bf16"} and str(rule.output) == "bf16"
    assert (str(rule.input_gradient), str(rule.weight_gradient)) == ("weight=mxfp8:rceil", "input=mxfp8:rceil")
    (bare,) = parse("mxfp8").policy.rules
    assert str(bare.grad) == "mxfp8" and bare.output is None and not bare.has_products


def test_quartet2_rounds_forward_by_four_or_six_and_all_that_backward_reads_without_bias() -> None:
    policy = PRESETS["quartet2"].policy
    rule, last = (policy.match("linear", "contraction", path) for path in ("blocks.0.widen", "lm_head"))
    assert rule is not None and last is not None and str(last.weight) == "bf16"
    assert (str(rule.input), str(rule.weight), rule.grad, str(rule.output)) == ("nvfp4:4/6", "nvfp4:4/6", None, "bf16")
    assert str(rule.input_gradient) == "weight=nvfp4:eden grad=nvfp4:eden hadamard=32"
    assert str(rule.weight_gradient) == "input=nvfp4:eden grad=nvfp4:eden hadamard=32"


@pytest.mark.parametrize(
    ("text", "scale", "forward", "backward"),
    [
        ("e4m3fn", "dynamic", "e4m3fn:saturate", "e4m3fn"),
        ("e5m7", "dynamic", "e5m7", "e5m7"),
        ("e6m9", "none", "e6m9", "e6m9"),
        ("e8m3", "none", "e8m3", "e8m3"),
        ("mxfp8", "none", "mxfp8", "mxfp8"),
        ("bf16:stochastic", "none", "bf16:stochastic", "bf16:stochastic"),
    ],
)
def test_a_bare_format_is_for_operands_and_gradients(text: str, scale: str, forward: str, backward: str) -> None:
    preset = parse(text)
    (rule,) = preset.policy.rules
    assert rule.ops == ("contraction",)
    assert (str(rule.input), str(rule.weight), str(rule.grad)) == (forward, forward, backward)
    assert rule.output is None
    assert str(preset.loss_scale) == scale


def test_gradients_that_are_clipped_below_a_dynamic_loss_scale_are_told_of() -> None:
    def told(grad: str | None, loss_scale: str = "dynamic") -> str | None:
        rules = Rule.of("conv2d", input="fp16"), Rule.of("linear", input="fp16", grad=grad)
        return clipped_gradients(replace(parse("fp16"), policy=Policy(rules), loss_scale=LossScale.parse(loss_scale)))

    for grad in ("fp16", "e5m2", "mxfp8", "i8s@fp32/tensor", None):
        assert told(grad) is None
    assert told("e4m3fn:saturate", "64") is told("e4m3fn:saturate", "none") is None
    assert told("e4m3fn:saturate") == (
        "gradients in e4m3fn:saturate are clipped at 448 and never overflow, so the dynamic loss scale is not lowered "
        "for them: give a constant loss scale, such as 64, or a format with a shared scale, such as mxfp6 or mxfp4"
    )
    assert str(told("e2m1")).startswith("gradients in e2m1 are clipped at 6 and")


def test_a_policy_and_a_file_become_a_preset(tmp_path: Path) -> None:
    policy = Policy((Rule.of("contraction", input="fp16", grad="fp16"),), parameters="fp16", name="mine")  # type: ignore[arg-type]
    file = tmp_path / "mine.toml"
    file.write_text(policy.to_toml())
    for given in (policy, file, str(file)):
        preset = parse(given)
        assert preset.policy == policy
        assert (preset.name, str(preset.loss_scale), str(preset.masters)) == ("mine", "dynamic", "fp32")


def test_an_unknown_precision_names_the_near_ones() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown precision 'fp61'; did you mean .*fp16.*; or any format, such as e5m7"
    ):
        parse("fp61")
    with pytest.raises(InvalidInput, match="e9m3 has numbers from 2"):
        parse("e9m3")


@pytest.mark.parametrize("text", ["none", "dynamic", "dynamic(1024)", "128", "0.5"])
def test_a_loss_scale_prints_as_it_is_read(text: str) -> None:
    scale = LossScale.parse(text)
    assert str(scale) == text
    assert LossScale.parse(scale) is scale
    assert 0 < scale.floor <= scale.initial <= scale.ceiling


@pytest.mark.parametrize("text", ["fast", "0", "-1", "inf", "nan", "dynamic(x)", "dynamic(0)"])
def test_a_loss_scale_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="loss scale"):
        LossScale.parse(text)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown kind of master weights 'split16'; did you mean split"):
        Masters("split16")
    with pytest.raises(UnknownName, match="unknown loss scale"):
        LossScale("dynamical")
    with pytest.raises(InvalidInput, match="between its floor"):
        LossScale("static", 0.5)


def test_presets_are_values() -> None:
    assert PRESETS["fp16"] == Preset(**vars(PRESETS["fp16"]))
    assert hash(PRESETS["fp16"].policy) == hash(Policy(PRESETS["fp16"].policy.rules))


def test_a_policy_with_a_loss_scale_of_its_own_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('loss_scale = 128\n[[rule]]\ninput = "fp16"\ngrad = "fp16"\n')
    assert parse(file).loss_scale == LossScale("static", 128.0)
    assert parse(Policy.from_toml('[[rule]]\ngrad = "fp16"')).loss_scale == LossScale.parse("dynamic")
    assert parse(Policy(loss_scale=LossScale.parse("dynamic(0.5)"))).loss_scale.floor == 0.5


@pytest.mark.parametrize("power", [-100, -20, 0, 20, 40])
def test_a_loss_scale_prints_all_of_its_number(power: int) -> None:
    scale = LossScale.parse(f"dynamic({2.0**power!r})")
    assert LossScale.parse(str(scale)) == scale and scale.initial == 2.0**power
