"""The plans of functions under a policy, and what a rulebook notes of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowp import presets
from lowp.errors import InvalidInput
from lowp.kernels import cpu
from lowp.policy import Policy, Rule
from lowp.region import handover, rulebook
from lowp.region.rulebook import Report, Rulebook, traced

HALF = Rule.of("contraction", input="fp16", weight="fp16", output="fp16")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "linear": F.linear,
    "matmul": torch.matmul,
    "dot": torch.dot,
    "attention": F.multi_head_attention_forward,
    "lstm": torch.lstm,
    "relu": F.relu,
    "exp": torch.exp,
    "cat": torch.cat,
    "softmax": F.softmax,
    "loss": F.binary_cross_entropy,
    "view": Tensor.view,
    "backward": Tensor.backward,
}
SHORT, HANDED = "quickly handed_over", "run quickly handed_over"
LEFT = {"relu": "as_it_is", "exp": "as_it_is", "softmax": "as_it_is", "loss": "as_it_is", "cat": HANDED}
LEFT |= {"view": "none", "backward": "suspends"}
OWN = {"linear": "run rounds quickly", "matmul": "run rounds quickly", "dot": "run rounds", "attention": "run rounds"}
OWN |= {"lstm": "run rounds looks"}
LOOKS = {"linear": "run rounds looks quickly", "matmul": "run rounds looks quickly", "lstm": "run rounds looks"}
LOOKS |= {"dot": "run rounds looks", "attention": "run rounds looks"}
TORCHS = {"linear": f"run rounds {SHORT}", "matmul": f"run rounds {SHORT}", "dot": HANDED, "exp": HANDED}
TORCHS |= {
    "attention": "run rounds handed_over",
    "lstm": "run rounds looks handed_over",
    "softmax": "run",
    "loss": "run",
}
FIRST = "as_usual handed_over quickly"
AT_SITE = dict.fromkeys(("dot", "relu", "exp", "cat", "softmax", "loss"), "run at_site looks")
# of each precision, what its plans are, on a machine whose CPU multiplies (*) 16 bits itself, or not
PLANS: dict[str, dict[str, str]] = {
    "fp16": {**LEFT, **TORCHS},
    "bf16*": {**LEFT, **TORCHS, "linear": "run rounds quickly as_usual handed_over", "matmul": f"run rounds {FIRST}"}
    | {"cat": f"run {FIRST}"},
    "e4m3fn": {**LEFT, **OWN},
    "e5m7:stochastic": {**LEFT, **LOOKS},
    "mxfp8": {**LEFT, **LOOKS},
    "int8": {**LEFT, **LOOKS, "attention": "run rounds looks inner", "relu": "run while_small"},
    "fp8-delayed": {**LEFT, **dict.fromkeys(("linear", "matmul", "dot"), "run at_site rounds looks is_delayed")}
    | {"attention": "run rounds looks is_delayed", "lstm": "run rounds looks is_delayed"},
    "flex16+5": {**LEFT, **AT_SITE, "linear": "run at_site rounds looks quickly"}
    | {"matmul": "run at_site rounds looks quickly", "attention": "run at_site rounds looks"}
    | {"lstm": "run at_site rounds looks"},
}
FLAGS = ("run", "at_site", "rounds", "looks", "is_delayed", "suspends", "inner")


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize("kind", PLANS)
def test_each_function_has_its_plan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "accelerator", lambda: None)
    monkeypatch.setattr(handover, "multiplies", lambda *given: kind.endswith("*"))
    given = presets.parse(kind.removesuffix("*")).policy
    book, found = Rulebook(Policy(given.rules), False), {}  # one of its own, of which no plan is known
    for name, function in FUNCTIONS.items():
        plan = book.find(function, "")
        flags = [] if plan is None else [flag for flag in FLAGS if getattr(plan, flag)]
        found[name] = "none" if plan is None else " ".join([*flags, *(way.__name__ for way in plan.ways)])
        assert book.plans("anywhere")[function] is plan and (
            plan is None or bool(plan.way) == ("handed" in found[name])
        )
    assert found == PLANS[kind]


def test_what_is_planned_for_all_rulebooks_of_a_policy_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rulebook, "_MOST", 3)
    policy = Policy((HALF, Rule.of("linear", where="a", input="bf16")))
    book, known = Rulebook(policy, False), rulebook._plans_of(policy)
    counts = []
    for function, path in (
        (F.linear, ""),
        (F.linear, "a"),
        (F.linear, "a"),
        (torch.mm, ""),
        (torch.mv, ""),
        (F.relu, ""),
    ):
        assert Rulebook(policy, False).find(function, path) is book.find(function, path)
        counts.append(len(known))
    assert counts == [1, 2, 2, 3, 1, 2]


def test_plans_are_of_a_path_where_rules_have_paths() -> None:
    both = Rule.of("linear", where="a", input="bf16"), HALF
    for policy, is_apart in ((Policy(both), True), (Policy(both[1:]), False)):
        book = Rulebook(policy, False)
        plans = [book.find(F.linear, path) for path in ("a", "b")]
        assert [one is not None and one.rule for one in plans] == [policy.rules[0], HALF]
        assert (book.plans("a") is not book.plans("b")) is is_apart
        assert (plans[0] is not plans[1]) is is_apart


@pytest.mark.parametrize(
    ("rules", "inner", "unused"),
    [
        ((Rule.of("linear", input="bf16"), HALF), True, 0),
        ((Rule.of("linear", input="e5m7:stochastic"), HALF), True, 0),
        (
            (Rule.of("multi_head_attention_forward", input="fp16", weight="fp16"), Rule.of("linear", input="bf16")),
            False,
            1,
        ),
        ((HALF,), False, 0),
    ],
)
def test_the_projections_of_an_attention_have_the_rule_of_linear_layers(
    rules: tuple[Rule, ...], inner: bool, unused: int
) -> None:
    book = Rulebook(Policy(rules), False)
    plan = book.find(F.multi_head_attention_forward, "")
    assert plan is not None and plan.inner == (rules[0] if inner else None)
    assert plan.looks is ("stochastic" in str(rules[0]))
    assert len(book.report().unused) == unused
    plan = book.find(F.scaled_dot_product_attention, "")
    assert plan is None or plan.inner is None


def test_a_rulebook_reports_what_it_has_found_and_what_compiled_code_has() -> None:
    policy = Policy((HALF, Rule.of("conv2d", "dot", input="fp32"), Rule.of("prelu")), name="of one's own")
    book, compiled = Rulebook(policy, False), traced(policy, False)
    assert book.traced is compiled and not book.has_run
    book.find(Tensor.view, "")
    book.find(Tensor.backward, "")
    assert book.has_run and book.report().ops == book.report().unseen == ()  # a backward pass is a plan
    other = Rulebook(policy, False)
    assert not other.has_run
    compiled.find(torch.mm, "b")
    assert other.has_run
    other.find(F.linear, "a")
    other.find(torch.kron, "a.b")
    other.find(torch.kron, "")
    other.find(torch.dot, "")
    report = other.report()
    assert report.ops == ("linear", "dot", "mm") and report.unused == (policy.rules[2],) and report.unseen == ()
    assert report.unrounded == ("kron in a.b", "kron") and not report.audited
    compiled.find(torch.cdist, "c")
    compiled.left_alone["mm in float64"] = None
    compiled.missed("mv in c")
    report = other.report()
    assert report.unrounded == ("kron in a.b", "kron", "cdist in c") and report.left_alone == ("mm in float64",)
    assert report.unseen == ("mv in c",) and Rulebook(Policy(()), True).report().audited
    assert not Report(policy).audited and str(Report(policy)) == (
        "policy of one's own: 0 ops ran under its rules\n"
        "  contractions inside other functions were not watched: strict=True watches them"
    )


@pytest.mark.parametrize(
    ("rule", "is_wide"),
    [
        (None, True),
        (Rule.of("pointwise"), True),
        (Rule.of("pointwise", input="fp32", output="fp32"), True),
        (Rule.of("pointwise", input="fp32", output="e4m3fn"), False),
        (Rule.of("pointwise", weight="bf16"), False),
        (Rule.of("kron"), False),
    ],
)
def test_an_op_made_of_products_is_unrounded_where_no_rule_rounds_or_names_it(rule: Rule | None, is_wide: bool) -> None:
    book = Rulebook(Policy(() if rule is None else (rule,)), False)
    book.find(torch.kron, "")
    book.find(torch.exp, "")
    assert book.report().unrounded == (("kron",) if is_wide and rule is not None else ())


def test_contractions_that_no_rule_matches_are_told_with_their_place() -> None:
    policy = Policy((Rule.of("conv2d", input="fp16"),), name="mine")
    book, strict = Rulebook(policy, False), Rulebook(policy, True)
    for path in ("a.b", ""):
        book.find(F.linear, path)
    book.missed_script("c")
    assert book.report().unseen == ("linear in a.b", "linear", "the TorchScript module c")
    with pytest.raises(InvalidInput) as told:
        strict.find(F.linear, "a.b")
    assert str(told.value) == (
        "no rule of policy mine matches the contraction linear in a.b: add one, such as Rule.of('linear', input=..., "
        "weight=...), or one without casts to leave it unrounded, or omit strict=True"
    )
    with pytest.raises(InvalidInput, match="module c is TorchScript's, whose ops no rule of policy mine reaches: call"):
        strict.missed_script("c")
    assert strict.report().unseen == ("linear in a.b", "the TorchScript module c")
    alone = Rulebook(Policy(()), True)  # of no rules nothing is missed
    alone.find(F.linear, "")
    assert alone.report().unseen == alone.report().unrounded == ()


@pytest.mark.parametrize("strict", [False, True])
def test_the_first_operand_tells_whether_a_contraction_is_rounded(strict: bool) -> None:
    def of(dtype: torch.dtype, is_mkldnn: bool = False) -> Any:
        return SimpleNamespace(dtype=dtype, is_mkldnn=is_mkldnn, is_floating_point=lambda: dtype.is_floating_point)

    book = Rulebook(Policy((HALF,), name="mine"), strict)
    for one in (None, of(torch.int64)):
        book.note("mm", one)
    assert not book.has_rounded and not book.left_alone
    kinds = {"float64": of(torch.float64), "complex64": of(torch.complex64), "MKLDNN": of(torch.float32, True)}
    for kind, one in kinds.items():
        if strict:
            with pytest.raises(InvalidInput, match=f"policy mine rounds mm, but its operands are {kind}, which is not"):
                book.note("mm", one)
        else:
            book.note("mm", one)
    assert not book.has_rounded and list(book.left_alone) == [f"mm in {kind}" for kind in kinds]
    book.note("mm", of(torch.bfloat16))
    book.note("mm", None)
    assert book.has_rounded and book.report().left_alone == tuple(book.left_alone)


@pytest.mark.parametrize("rule", [HALF, None])
def test_an_op_without_a_kernel_is_planned_in_fp32_from_then_on(rule: Rule | None) -> None:
    book = Rulebook(Policy((Rule.of("conv2d", where="a"), *(() if rule is None else (rule,)))), False)
    before = book.find(torch.dot if rule is None else torch.mm, "a")
    function = torch.dot if rule is None else torch.mm
    after = book.widen(function, "a", "mps")
    assert before is not None and book.plans("a")[function] is after and function not in book.plans("")
    assert book.report().widened == (f"{function.__name__} on mps",)
    assert after.rule is not None and str(after.rule.input) == "fp32" and after.row.runner == "generic:wide"
    assert after.rule.weight == (None if rule is None else rule.weight) and after.ways == () and not after.row.product


def test_the_dtype_of_a_region_is_what_its_linear_layers_write() -> None:
    half, wide = Rule.of("linear", output="fp16"), Rule.of("linear", input="bf16", weight="bf16")
    rules = {
        torch.float16: (half, wide),
        torch.float32: (wide, half),
        torch.bfloat16: (Rule.of("linear", output="bf16"),),
    }
    assert {Rulebook(Policy(some), False).main_dtype(): some for some in rules.values()} == rules
    assert Rulebook(Policy((Rule.of("conv2d", output="fp16"),)), False).main_dtype() is torch.float32


def test_a_policy_is_known_by_what_its_rules_hold() -> None:
    names = {"fp16": (False, False), "flex16+5": (True, False), "fp8-delayed": (False, True)}
    books = {name: Rulebook(presets.parse(name).policy, False) for name in names}
    assert {name: (book.is_flexpoint, book.is_delayed) for name, book in books.items()} == names
