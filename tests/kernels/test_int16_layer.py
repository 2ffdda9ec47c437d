"""A layer of int16 in one call of the library in each direction has the bits of its parts, one after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.casts import Cast, parse
from lowp.errors import Unavailable
from lowp.exponents.table import ExponentTable
from lowp.kernels import cpu
from lowp.kernels.int16 import entries
from lowp.kernels.int16.cpu_int16 import Seen, memory_of
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.integer_run import observed
from lowp.kernels.int16.layer import LayerPlan, Target, serves
from lowp.kernels.int16.mantissas import Mantissas, current_mantissas, mantissas_and_values, sums, values
from lowp.ops.convolution import Convolution
from lowp.ops.int16.layer import plan_of
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Einsum, Form, Linear
from lowp.policy import Rule

HAS_LIBRARY = "cpu" in kernels.available()
pytestmark = pytest.mark.skipif(not HAS_LIBRARY, reason="the C++ library was not built")
DFP16, FLEX = parse("dfp16"), parse("flex16+5:autoflex")
SETS = cpu.available() if HAS_LIBRARY else ()
# x, weight, and of convolutions stride, padding, dilation and groups
LAYERS: dict[str, tuple[Any, ...]] = {
    "one number": ((1, 1), (1, 1)),
    "a row": ((1, 3), (5, 3)),
    "a column": ((7, 9), (1, 9)),
    "no depth": ((4, 1), (6, 1)),
    "small": ((32, 64), (128, 64)),
    "deep": ((3, 1031), (17, 1031)),
    "of sequences": ((2, 3, 8), (5, 8)),
    "3x3": ((2, 5, 9, 7), (6, 5, 3, 3), 1, 1, 1, 1),
    "strided": ((2, 6, 9, 8), (4, 3, 3, 2), (2, 3), (1, 0), (1, 2), 2),
    "depthwise": ((2, 4, 8, 8), (4, 1, 3, 3), 1, 1, 1, 4),
    "one dimension": ((3, 34, 30), (13, 34, 5), 1, 2, 1, 1),
    "three dimensions": ((1, 3, 5, 4, 6), (4, 3, 2, 3, 1), (1, 2, 1), (1, 1, 0), 1, 1),
}
# x, weight, their letters, and in which order their dimensions lie
PRODUCTS: dict[str, tuple[Any, ...]] = {
    "two matrices": ((5, 7), (7, 3), ("mk", "kn", "mn")),
    "a number": ((1,), (1,), ("k", "k", "")),
    "vectors": ((40,), (40,), ("k", "k", "")),
    "an outer product": ((6,), (5,), ("m", "n", "mn")),
    "a matrix and a vector": ((6, 9), (9,), ("mk", "k", "m")),
    "batches": ((4, 9, 16), (4, 16, 17), ("bmk", "bkn", "bmn")),
    "many for one": ((4, 9, 16), (16, 5), ("bmk", "kn", "bmn")),
    "deep batches": ((2, 3, 700), (2, 700, 5), ("bmk", "bkn", "bmn")),
    "batches without depth": ((3, 5, 1), (3, 1, 4), ("bmk", "bkn", "bmn")),
    "rows of both": ((3, 5, 8), (3, 4, 8), ("bmk", "bnk", "bmn")),
    "columns of both": ((3, 8, 5), (3, 8, 4), ("bkm", "bkn", "bmn")),
    "turned": ((3, 5, 8), (3, 8, 4), ("bmk", "bkn", "bnm")),
    "two batches": ((2, 3, 5, 8), (2, 3, 8, 4), ("abmk", "abkn", "abmn")),
    "heads": ((2, 3, 5, 8), (2, 3, 8, 4), ("abmk", "abkn", "abmn"), (0, 2, 1, 3), (0, 3, 1, 2)),
    "single ones, laid out otherwise": (
        (2, 1, 5, 1),
        (2, 1, 1, 4),
        ("abmk", "abkn", "abmn"),
        (3, 1, 0, 2),
        (1, 0, 3, 2),
    ),
    "a depth of one between others": ((3, 5, 1), (3, 1, 4), ("bmk", "bkn", "bmn"), (1, 2, 0), (1, 2, 0)),
    "matrices laid out otherwise": ((2, 5, 8), (2, 8, 4), ("bmk", "bkn", "bmn"), (0, 2, 1), (0, 2, 1)),
}


class Case:
    """A layer's plan and drawn tensors, with magnitudes far apart."""

    form: Form

    def __init__(self, name: str, cast: Cast = DFP16, output: Cast | None = None) -> None:
        first, second, *settings = LAYERS.get(name) or PRODUCTS[name]
        orders = [*range(len(first))], [*range(len(second))]
        if name in PRODUCTS:
            self.form, orders = Einsum(settings[0], first, second), settings[1:] or orders
        elif settings:
            whole = [one if isinstance(one, tuple) else (one,) * (len(first) - 2) for one in settings[:3]]
            self.form = Convolution(first, second, *whole, False, (0,) * (len(first) - 2), settings[3])
        else:
            self.form = Linear(first, second)
        rule = Rule(input=cast, weight=cast, grad=cast, output=output)
        lies = [torch.empty([one[at] for at in order]).permute(*map(order.index, range(len(order))))
                for one, order in zip((first, second), orders, strict=True)]  # fmt: skip
        plan = plan_of(self.form, lies[0].stride(), lies[1].stride(), rule)
        assert plan is not None
        self.plan, axis = plan, self.form.bias_axis()
        features = () if axis is None else (plan.result[axis],)
        draw = torch.Generator().manual_seed(0)
        shapes = zip((first, second, features, plan.result), (1.0, 1e-3, 1e-2, 1e-6), strict=True)
        self.x, self.weight, self.bias, self.gradient = (torch.randn(one, generator=draw) * by for one, by in shapes)
        self.x, self.weight = (to.copy_(x) for to, x in zip(lies, (self.x, self.weight), strict=True))
        self.added = None if axis is None else self.bias

    def forward(self, bias: Tensor | None, target: Target = (None, 0), keeps: bool = True) -> Any:
        memory = memory_of(self.x, self.weight, *([] if bias is None else [bias]), as_they_lie=True)
        assert memory is not None
        return self.plan.forward(memory, [None, None], target, keeps)

    @property
    def needs(self) -> list[int | None]:
        """The entries of the gradients that there are."""
        return [1, 2, None if self.added is None else 3]


def words(x: Tensor, cast: Cast) -> Mantissas:
    found = current_mantissas(x, cast)
    assert found is not None
    return found


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cast", ["dfp16", "dfp16:current(headroom=2)"])
@pytest.mark.parametrize("name", [*LAYERS, *PRODUCTS])
def test_one_call_gives_the_bits_of_chains(name: str, cast: str, has_bias: bool, instruction_set: str) -> None:
    to, before = parse(cast), cpu.asked()
    case = Case(name, to)
    added = case.added if has_bias else None
    try:
        cpu.select(instruction_set)
        made, *saved = case.forward(added)
        alone, *nothing = case.forward(added, keeps=False)
        found = case.plan.backward(case.gradient, None, saved, None, case.needs)
    finally:
        cpu.select(before or None)
    a, b, g = words(case.x, to), words(case.weight, to), words(case.gradient, to)
    with kernels.use("reference"):
        y, of_x, of_weight = (
            case.form.integer_product(slot, *operands, False, torch.float32, bias)
            for slot, *operands, bias in ((OUTPUT, a, b, added), (FIRST, b, g, None), (SECOND, a, g, None))
        )
    assert torch.equal(made.values, y) and torch.equal(alone.values, made.values)
    assert nothing[:2] == [None] * 2 and saved[2].tolist()[:2] == [a.exponent, b.exponent]
    assert torch.equal(saved[0], a.payload) and torch.equal(saved[1], b.payload)
    assert found is not None and found[0] is not None and found[1] is not None
    assert torch.equal(found[0].values, of_x) and torch.equal(found[1].values, of_weight)
    if (axis := case.form.bias_axis()) is None:
        assert found[2] is None
    else:
        of_bias = (sums(g.payload, axis).double() * 2.0**g.exponent).float()
        assert found[2] is not None and torch.equal(found[2].values, of_bias)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", [*LAYERS, *PRODUCTS])
def test_one_call_writes_exact_sums_and_notes_what_was_seen(name: str, instruction_set: str) -> None:
    case, before, table = Case(name, output=FLEX), cpu.asked(), ExponentTable(FLEX, torch.device("cpu"))
    a, b, g = (words(x, DFP16) for x in (case.x, case.weight, case.gradient))
    sites, tops = ("output of y", "input gradient", "weight gradient", "bias gradient"), (-14, -26, -22, -20)
    for site, exponent in zip(sites, tops, strict=True):
        index = table.index(site)
        table.state.exponent[index], table.state.started[index] = exponent, True
    try:
        cpu.select(instruction_set)
        made, *saved = case.forward(case.added, (table.block, 0))
        found = case.plan.backward(case.gradient, None, saved, table.block, case.needs)
        given = ((OUTPUT, a, b, case.added), (FIRST, b, g, None), (SECOND, a, g, None))
        for at, (slot, left, right, bias) in enumerate(given):
            exact = case.form.mantissas(slot, left, right, torch.tensor(tops[at], dtype=torch.int32), True, bias)
            assert exact is not None
            seen = Seen(exact.largest_mantissa, False, exact.largest_mantissa == 0 and exact.largest_sum > 0,
                        exact.saturated, exact.values.numel())  # fmt: skip
            result = (made, *(found or ()))[at]
            assert torch.equal(result.payload, exact.values)
            assert result.exponent == tops[at] and torch.equal(result.values, values(result.payload, tops[at]))
            assert torch.equal(table.seen[at], entries.record_of(seen))
    finally:
        cpu.select(before or None)
    if (axis := case.form.bias_axis()) is not None:
        summed = sums(g.payload, axis).double() * 2.0**g.exponent
        of_bias, _, of_bias_seen = mantissas_and_values(summed, FLEX, tops[3])
        assert found is not None and found[2] is not None
        assert torch.equal(found[2].payload, of_bias.payload)
        assert torch.equal(table.seen[3], entries.record_of(of_bias_seen))


def test_nothing_is_written_at_an_entry_that_has_not_begun() -> None:
    case, table = Case("small", output=FLEX), ExponentTable(FLEX, torch.device("cpu"))
    index = table.index("output of y")
    assert case.forward(case.bias, (table.block, index)) is None and not table.seen.any()


def test_a_gradient_of_any_layout_is_read() -> None:
    case = Case("small")
    _, *saved = case.forward(case.bias)
    needs = [0] * 3
    for one in (case.gradient.t().contiguous().t(), case.gradient[:1, :1].expand(32, 128)):  # a sum's is expanded
        made, expected = (case.plan.backward(x, None, saved, None, needs) for x in (one, one.contiguous()))
        assert made is not None and expected is not None
        assert all(torch.equal(a.values, b.values) for a, b in zip(made, expected, strict=True) if a and b)
    assert case.plan.backward(case.gradient.double(), None, saved, None, needs) is None


def test_backward_reads_what_was_kept_in_any_layout_and_known_mantissas_of_the_gradient() -> None:
    case = Case("small")
    _, *saved = case.forward(case.bias)
    expected = case.plan.backward(case.gradient, None, saved, None, case.needs)
    assert expected is not None
    turned = [saved[0].t().contiguous().t(), saved[1].t().contiguous().t(), saved[2]]
    known = words(case.gradient, DFP16)
    exact, other = known.values, known.values * 3
    for gradient, of_gradient, kept in (
        *((case.gradient, None, turned), (exact, (known, True), saved), (exact, (known, False), saved)),
        *((other, (known, False), saved), (case.gradient.double(), (known, False), saved)),
    ):
        found = case.plan.backward(gradient, of_gradient, kept, None, case.needs)
        assert found is not None
        assert all(torch.equal(a.values, b.values) for a, b in zip(found, expected, strict=True) if a and b)
    assert case.plan.backward(other, (known, True), saved, None, case.needs) is None
    assert case.plan.backward(exact.double(), (known, True), saved, None, case.needs) is None


def test_instructions_that_the_processor_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("small")
    _, *saved = case.forward(case.bias)
    monkeypatch.setattr(cpu, "asked", lambda: "avx3")
    with pytest.raises(Unavailable, match="this processor has no avx3"):
        case.forward(case.bias)
    with pytest.raises(Unavailable, match="this processor has no avx3"):
        case.plan.backward(case.gradient, None, saved, None, case.needs)


def test_gradients_that_are_not_needed_are_not_made() -> None:
    case = Case("small")
    _, *saved = case.forward(case.bias)
    made = case.plan.backward(case.gradient, None, saved, None, [None, 0, None])
    assert made is not None and made[0] is None and made[1] is not None and made[2] is None


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_no_integer_stands_for_is_left_to_others(bad: float) -> None:
    for name in ("x", "weight", "gradient"):
        case = Case("small")
        kept = case.forward(case.bias)
        getattr(case, name)[0, 0] = bad
        if name == "gradient":
            assert case.plan.backward(case.gradient, None, kept[1:], None, [0] * 3) is None
        else:
            assert case.forward(case.bias) is None


def test_a_bias_that_no_integer_stands_for_is_left_to_others_where_results_are_written() -> None:
    case, table = Case("small", output=FLEX), ExponentTable(FLEX, torch.device("cpu"))
    index = table.index("output of y")
    table.state.exponent[index], table.state.started[index] = -14, True
    case.bias[3] = math.inf
    assert case.forward(case.bias, (table.block, index)) is None and not table.seen.any()
    case.bias[3] = 0.0
    assert case.forward(case.bias, (table.block, index)) is not None


def test_known_mantissas_stand_for_a_tensor_that_is_not_read() -> None:
    case = Case("small")
    memory = memory_of(case.x, case.weight)
    assert memory is not None
    known, whole = (words(case.x, DFP16), False), case.forward(None, keeps=False)
    found = case.plan.forward(memory, [known, None], (None, 0), False)
    assert found is not None and torch.equal(found[0].values, whole[0].values)
    assert case.plan.forward(memory, [(known[0], True), None], (None, 0), False) is None, "which it is not exactly"


def test_kept_mantissas_are_compared_with_their_tensor() -> None:
    case = Case("small")
    known = words(case.x, DFP16)
    exact = values(known.payload, known.exponent)
    memory = memory_of(exact, case.weight)
    assert memory is not None
    found = case.plan.forward(memory, [(known, True), None], (None, 0), False)
    whole = case.plan.forward(memory, [None, None], (None, 0), False)
    assert found is not None and whole is not None and torch.equal(found[0].values, whole[0].values)
    exact[0, 0] += 1
    assert case.plan.forward(memory, [(known, True), None], (None, 0), False) is None


def test_who_counts_operations_sees_them_one_by_one() -> None:
    case = Case("small")
    with observed(lambda operations: pytest.raises(ValueError)):
        assert case.forward(case.bias) is None


def test_there_are_plans_of_products_that_read_all_their_memory_in_place() -> None:
    rule = Rule(input=DFP16, weight=DFP16, grad=DFP16)
    form = Einsum(("bmk", "bkn", "bmn"), (2, 3, 4), (2, 4, 5))
    assert plan_of(form, (12, 4, 1), (20, 5, 1), rule) is not None
    assert plan_of(form, (24, 8, 2), (20, 5, 1), rule) is None  # with gaps
    assert plan_of(form, (0, 4, 1), (20, 5, 1), rule) is None  # one matrix for all
    assert plan_of(Linear((0, 4), (3, 4)), (4, 1), (4, 1), rule) is None
    for terms in (("bmk", "bkn", "mn"), ("bmk", "bnk", "kmn")):  # along two dimensions; with no neighbours in memory
        assert plan_of(Einsum(terms, (2, 3, 4), (2, 4, 4)), (12, 4, 1), (16, 4, 1), rule) is None


def test_there_are_plans_of_convolutions_with_results_and_depths_that_integers_of_64_bits_hold() -> None:
    def is_possible(*sizes: int, kernel: int = 1) -> bool:
        return LayerPlan.is_possible(ConvolutionShape.of(sizes, (1, 1, kernel)))

    assert is_possible(2, 1, 3) and is_possible(1 << 31, 1, 2) and is_possible(1 << 30, 1, 3)
    assert not is_possible(0, 1, 3) and not is_possible(2, 1, 3, kernel=4)
    assert not is_possible((1 << 31) + 1, 1, 2) and not is_possible((1 << 30) + 1, 1, 3)


@pytest.mark.parametrize(
    ("cast", "is_served"),
    [("dfp16", True), ("dfp16:stochastic", False), ("dfp16:static(-8)", False), ("int8", False), ("fp16", False)],
)
def test_casts_to_int16_under_their_own_exponent_are_served(cast: str, is_served: bool) -> None:
    assert serves(parse(cast)) is is_served


def test_a_region_without_gradients_gives_the_bits_of_one_with_them() -> None:
    layer, x = nn.Linear(5, 4), torch.randn(3, 5)
    with lowp.autocast("dfp16"):
        followed = layer(x)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(layer(x), followed)
