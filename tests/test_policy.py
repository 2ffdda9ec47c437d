"""Policies: rules match in order, print, and are unchanged by TOML; errors explain wrong ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowp.casts import parse
from lowp.errors import InvalidInput, UnknownName
from lowp.ops.table import op_names
from lowp.policy import OP_CLASSES, Accumulation, Policy, Rule, check_ops
from lowp.presets import PRESETS

DELAYED = "e4m3fn@fp32/tensor:delayed"
CASTS = st.none() | st.sampled_from(["fp16", "bf16:toward-zero", "e4m3fn:saturate", "flex16+5", "mxfp8", "bf16-tpu"])
ACCUMULATIONS = st.none() | st.sampled_from(["fp32", "fp16/16", "bf16/128", "int32", "exact"])


def _rule(ops: list[str], where: str, casts: tuple[str, ...], accumulate: str | None, products: dict[str, str]) -> Rule:
    roles = dict(zip(("input", "weight", "grad", "output"), casts, strict=True))
    sums_integers = accumulate in ("int32", "exact")
    return Rule.of(*ops, where=where, accumulate=accumulate, **roles, **({} if sums_integers else products))


PRODUCTS = st.fixed_dictionaries(
    {},
    optional={
        "input_gradient": st.sampled_from(["weight=mxfp8", "grad=bf16", "weight=e4m3fn grad=e5m2 hadamard=16"]),
        "weight_gradient": st.sampled_from(["input=nvfp4:stochastic hadamard=128", {"grad": "bf16"}, ""]),
        "saved": st.sampled_from(["e4m3fn@fp32/128", "int8", "bf16"]),
    },
)
RULES = st.builds(
    _rule,
    st.lists(st.sampled_from(["linear", "conv*", "contraction", "norm", 'a"b\\c\nd\x7f']), max_size=2),
    st.sampled_from(["*", "layer4.*", "*.head"]) | st.text(st.characters(exclude_categories=["Cs"])),
    st.tuples(CASTS, CASTS, CASTS, CASTS),
    ACCUMULATIONS,
    PRODUCTS,
)
POLICIES = st.builds(
    Policy,
    st.lists(RULES, max_size=4).map(tuple),
    st.sampled_from([None, "bf16"]),
    st.sampled_from(Policy.TABLES),
    st.sampled_from(["", "mine"]) | st.text(st.characters(exclude_categories=["Cs"])),
    st.none() | st.sampled_from(["none", "dynamic", "dynamic(8192)", "dynamic(1048576)", "128", "0.1"]),
)


@given(POLICIES)
def test_a_policy_survives_toml(policy: Policy) -> None:
    again = Policy.from_toml(policy.to_toml())
    assert again == policy
    assert again.name == policy.name
    assert hash(again) == hash(policy)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_a_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(PRESETS[name].policy.to_toml())
    assert Policy.load(file) == PRESETS[name].policy


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_names_ops_that_exist(name: str) -> None:
    check_ops(PRESETS[name].policy, op_names(PRESETS[name].policy.table))


@pytest.mark.parametrize(
    ("rule", "op", "op_class", "path", "expected"),
    [
        (Rule(), "relu", "pointwise", "", True),
        (Rule.of("linear"), "linear", "contraction", "a.b", True),
        (Rule.of("linear"), "conv2d", "contraction", "", False),
        (Rule.of("contraction"), "conv2d", "contraction", "", True),
        (Rule.of("conv*"), "conv2d", "contraction", "", True),
        (Rule.of("conv*", where="stem.*"), "conv2d", "contraction", "stem.0", True),
        (Rule.of("conv*", where="stem.*"), "conv2d", "contraction", "stem", False),
        (Rule.of("conv*", where="*.head"), "conv2d", "contraction", "a.b.head", True),
        (Rule(where="head"), "relu", "pointwise", "head", True),
        (Rule(where="head"), "relu", "pointwise", "", False),
    ],
)
def test_what_a_rule_speaks_of(rule: Rule, op: str, op_class: str, path: str, expected: bool) -> None:
    assert rule.matches(op, op_class, path) is expected


def test_the_first_match_wins_and_the_unused_are_told() -> None:
    special, general = Rule.of("linear", where="head"), Rule.of("contraction", input="fp16")
    policy = Policy((general,)).before(special)
    assert policy.match("linear", "contraction", "head") is special
    assert policy.match("linear", "contraction", "body") is general
    assert policy.match("relu", "pointwise") is None
    assert policy.uses_paths
    assert not Policy((general,)).uses_paths
    assert policy.unused([general]) == (special,)
    assert special.is_empty
    assert not general.is_empty
    assert Policy((general,), name="mine") == Policy((general,)) != Policy()


def test_a_policy_prints_its_rules() -> None:
    policy = Policy((Rule.of("linear", where="head", input="bf16", accumulate="fp16/16"), Rule()), name="mine")
    assert str(policy).splitlines() == [
        "policy mine on op table lowp-1, parameters as they are",
        "  1. linear in head: input=bf16 accumulate=fp16/16",
        "  2. every op: as it is",
    ]


def test_a_rule_with_casts_by_product_prints_and_is_a_sub_table() -> None:
    rule = Rule.of(
        "linear", input="mxfp8", weight_gradient="input=bf16 grad=bf16 hadamard=16", input_gradient={"weight": "fp16"}
    )
    assert str(rule) == (
        "linear: input=mxfp8 input_gradient=(weight=fp16) weight_gradient=(input=bf16 grad=bf16 hadamard=16)"
    )
    text = Policy((rule,)).to_toml()
    assert '[rule.weight_gradient]\ninput = "bf16"\ngrad = "bf16"\nhadamard = 16\n' in text
    inline = '[[rule]]\nops = ["linear"]\ninput = "mxfp8"\ninput_gradient = "weight=fp16"\n'
    assert Policy.from_toml(inline + 'weight_gradient = "grad=bf16 input=bf16 hadamard=16"').rules == (rule,)
    assert rule != Rule.of("linear", input="mxfp8") and not Rule.of(weight_gradient="grad=bf16").is_empty
    assert Rule.of(weight_gradient="") == Rule() and [str(one) for one in rule.grads] == ["bf16"]
    assert [str(one) for one in rule.casts] == ["mxfp8", "bf16", "fp16", "bf16"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"weight_gradient": "wieght=bf16"},
            "a product of the backward pass: unknown key 'wieght'; did you mean weight",
        ),
        ({"weight_gradient": "weight=bf16"}, "weight_gradient: its product reads grad and input: omit weight"),
        ({"input_gradient": "input=bf16 grad=bf16"}, "input_gradient: its product reads grad and weight: omit input"),
        ({"input_gradient": "grad=bf16 hadamard=16"}, "hadamard=16 rotates both operands before their casts: name wei"),
        (
            {"weight_gradient": "input=bf16 hadamard=12"},
            "hadamard=12: give a power of two from 2 to 256, or 0 for none",
        ),
        ({"weight_gradient": {"hadamard": True}}, "hadamard=True: give a power of two"),
        ({"weight_gradient": "input=bf61"}, "unknown format 'bf61'; did you mean bf16"),
        ({"weight_gradient": "grad=bf16 grad=fp16"}, "grad=bf16 grad=fp16: a key is given twice"),
        ({"weight_gradient": 16}, '16 is not the casts of a product: give text, as "grad=bf16 input=bf16"'),
        (
            {"weight_gradient": "grad=bf16", "accumulate": "int32"},
            "accumulate=int32 sums the integers that forward has rounded, in all products: omit input_gradient, wei",
        ),
        (
            {"saved": "e4m3fn", "accumulate": "exact"},
            "accumulate=exact sums the integers that forward has rounded, .*, weight_gradient and saved, or accumulate",
        ),
        (
            {"weight_gradient": "grad=bf16", "output": "flex16+5:autoflex"},
            "output=flex16\\+5:autoflex is written at sites, whose products read what forward has rounded: omit",
        ),
    ],
)
def test_wrong_casts_by_product_are_explained(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        Rule.of("linear", **given)


@pytest.mark.parametrize("text", ["fp32", "fp16/16", "bf16/128", "int32", "exact"])
def test_an_accumulation_prints_as_it_is_read(text: str) -> None:
    assert str(Accumulation.parse(text)) == text
    assert str(Accumulation.parse("fp16")) == "fp16/1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[rule]]\nops = 3\n", "rule 1: ops must be a list of names"),
        ("[[rule]]\ninput = 'bf61'\n", "rule 1: unknown format 'bf61'; did you mean bf16"),
        ("[[rule]]\nimput = 'bf16'\n", "rule 1: unknown key 'imput'; did you mean input"),
        ("[[rule]]\naccumulate = 'fp16/x'\n", "after the slash comes the block length"),
        ("[[rule]]\naccumulate = 'fp32/8'\n", "fp16 and bf16 need a block"),
        ("[[rule]]\ninput = 16\n", 'input must be text, as in input = "fp16"'),
        ("table = 'lowp-2'\n", "unknown op table 'lowp-2'; did you mean lowp-1"),
        ("tabel = 'lowp-1'\n", "unknown key 'tabel'; did you mean table"),
        ("ops = 'linear'\n", "unknown key 'ops'; allowed: name, table, parameters, loss_scale, rule"),
        ("[[rule]]\nweight_gradient = 3\n", "rule 1: 3 is not the casts of a product"),
        ("[[rule]]\n[rule.weight_gradient]\nimput = 'bf16'\n", "unknown key 'imput'; did you mean input"),
        ("rule = 3\n", r"rules must be \[\[rule\]\] tables"),
        ("rule = [", "is not TOML"),
        ("", "is empty: give rules, as `lowp policy show fp16 --toml` prints them, or the name of an op table, such"),
        ("# rules follow\n", "is empty: give rules"),
        ("loss_scale = true\n", "loss scale 'True' is not valid: give none, a number"),
        ("loss_scale = 'dynamc'\n", "loss scale 'dynamc' is not valid: give none, a number"),
        ("loss_scale = -1\n", "loss scale '-1': give a finite number above zero"),
        ("parameters = 'fp61'\n", "unknown format 'fp61'"),
    ],
)
def test_a_wrong_file_is_explained(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=expected) as caught:
        Policy.load(file)
    assert "wrong.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = " + "[" * 100_000, "is not TOML: its values are nested too deeply"),
        ("a = " + "{b=" * 50_000, "is not TOML: its values are nested too deeply"),
        (".".join("a" * 100_000) + " = 1", "a line has 99999 dots outside strings, but a policy has no dotted keys"),
        ("[" + ".".join(['"a.b"'] * 30_000) + "]", "a line has 29999 dots outside strings, but a policy has no dotted"),
        ("# " + "x" * 300_000, r"is 300,002 bytes long, and a policy has 262,144 at most: is it another file\?"),
        ("a = " + "9" * 10_000, "is not TOML: Exceeds the limit"),
    ],
    ids=["arrays", "tables", "key", "header", "length", "number"],
)
def test_a_deep_or_huge_file_is_refused_at_once(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "huge.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=expected) as caught:
        Policy.load(file)
    assert "huge.toml" in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(InvalidInput, match=expected):
        Policy.from_toml(text)


def test_a_file_of_a_quarter_of_a_mebibyte_is_the_longest(tmp_path: Path) -> None:
    file, text = tmp_path / "policy.toml", 'name = "long"\n#'
    for more, is_read in ((0, True), (1, False)):
        long = text.ljust(2**18 + more, "x")
        file.write_text(long)
        for read in (partial(Policy.load, file), partial(Policy.from_toml, long)):
            if is_read:
                assert read().name == "long"
            else:
                with pytest.raises(InvalidInput, match="is 262,145 bytes long, and a policy has 262,144 at most"):
                    read()


def test_paths_with_dots_are_no_dotted_keys() -> None:
    rules = tuple(Rule.of("linear", where=".".join(["layer"] * 50), input="fp16") for _ in range(2))
    assert Policy.from_toml(Policy(rules).to_toml()) == Policy(rules)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"binary\.toml is not UTF-8 text, which TOML requires"):
        Policy.load(tmp_path / "binary.toml")


def test_names_that_no_file_could_hold_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the name of a policy must be valid Unicode text"):
        Policy(name="\ud800")
    with pytest.raises(InvalidInput, match="where and ops of a rule must be text, not 3"):
        Rule(where=3)  # type: ignore[arg-type]


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="lowp policy show fp16 --toml"):
        Policy.load(tmp_path / "gone.toml")


def test_an_op_that_no_table_has_is_named_with_the_near_ones() -> None:
    with pytest.raises(UnknownName, match="unknown op 'layernorm'; did you mean layer_norm"):
        check_ops(Policy((Rule.of("layernorm"),)), op_names())
    with pytest.raises(UnknownName, match=r"unknown op 'konv\*'"):
        check_ops(Policy((Rule.of("konv*"),)), op_names())
    check_ops(Policy((Rule.of("conv*", *OP_CLASSES, "relu"),)), op_names())


@pytest.mark.parametrize("text", ["e9m8", "e8m7fn", "e5m2b-885", "e11m20:saturate"])
def test_a_range_that_a_training_step_does_not_carry_is_refused(text: str) -> None:
    told = rf"={text}: {text.partition(':')[0]} has numbers from 2\*\*.* carries them in fp32, from 2\*\*-149"
    with pytest.raises(InvalidInput, match="grad" + told):
        Rule.of("linear", grad=text)
    with pytest.raises(InvalidInput, match="parameters" + told):
        Policy(parameters=parse(text))
    assert Rule.of("linear", grad="e8m20").grad == parse("e8m20") and Rule.of(output="fp64").output == parse("fp64")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"output": DELAYED},
            "output=.*: delayed scales are for the operands of products, input, weight and grad",
        ),
        ({"saved": DELAYED}, "saved=.*: delayed scales are for the operands of products"),
        ({"input": "mxfp8:delayed"}, "mxfp8:delayed: a delayed scale is that of a whole tensor .* e4m3fn@e8m0/tensor"),
        ({"input": "nvfp4:delayed"}, "give a format such as e2m1@e4m3fn/tensor, or omit delayed"),
        ({"input": "ternary:delayed"}, "give a format such as e4m3fn@fp32/tensor"),
        (
            {"input": "dfp16:delayed", "accumulate": "int32"},
            "accumulate=int32 sums integers under scales",
        ),
        ({"input": DELAYED, "output": "flex16[+]5:autoflex"}, "is written at sites, whose operands are the values"),
    ],
)
def test_a_delayed_scale_is_refused_where_none_can_be(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        Rule.of("linear", **{role: cast.replace("[+]", "+") for role, cast in given.items()})  # type: ignore[arg-type]


def test_a_delayed_scale_stands_beside_others_in_a_rule() -> None:
    assert Rule.of("linear", input=DELAYED, weight="mxfp8", grad="bf16", output="fp16").is_delayed


def test_parameters_are_not_stored_under_delayed_scales() -> None:
    with pytest.raises(InvalidInput, match=r"parameters=.*: delayed scales are for the operands of products"):
        Policy((), parse("e4m3fn@fp32/tensor:delayed"))


def test_the_current_form_of_a_rule_keeps_its_margin_and_all_else() -> None:
    cast = "e5m2@fp32/tensor:stochastic:delayed(window=3,headroom=2)"
    rule = Rule.of("linear", input="bf16", grad=cast, weight_gradient=f"input={DELAYED}", accumulate="fp16/16")
    own = "e5m2@fp32/tensor:stochastic:current(headroom=2)"
    whole = "e4m3fn@fp32/tensor"
    assert rule.current == Rule.of(
        "linear", input="bf16", grad=own, weight_gradient=f"input={whole}", accumulate="fp16/16"
    )
    assert rule.is_delayed and not rule.current.is_delayed and rule.current.current == rule.current
