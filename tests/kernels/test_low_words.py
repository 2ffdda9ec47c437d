"""A second word of int16 for gradients of many features, and the warning without one."""

from __future__ import annotations

import linecache
import math
import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp.casts import ScalingSpec, parse
from lowp.errors import InvalidInput
from lowp.exponents.table import ExponentTable
from lowp.kernels import cpu
from lowp.kernels.int16 import entries, low_words
from lowp.kernels.int16.mantissas import NOT_FINITE, NOTHING, as_exponent, own_exponent, to_mantissas, values
from lowp.policy import Policy, Rule
from lowp.precision import Precision

DFP = parse("dfp16:current(headroom=2)")


def gradient(classes: int, examples: int = 16) -> Tensor:
    """Return the gradient of a softmax at the start of a training."""
    scores = torch.randn(examples, classes, generator=torch.Generator().manual_seed(0)).requires_grad_()
    F.cross_entropy(scores, torch.arange(examples)).backward()
    assert scores.grad is not None
    return scores.grad


def exponent_of(x: Tensor) -> Tensor:
    exponent = own_exponent(x, DFP)
    assert exponent != NOT_FINITE
    return exponent


def test_two_words_hold_what_one_loses() -> None:
    x = gradient(20_000)
    high = to_mantissas(x, DFP, exponent_of(x))
    low = low_words.low_word(x, high, DFP)
    one = values(high.payload, high.exponent)
    both = one + values(low.payload, low.exponent)
    assert (one == 0).float().mean() > 0.5  # most classes are lost in one word
    assert ((both - x).abs() <= 2.0 ** (low.exponent - 1)).all() and ((both - x).abs() / x.abs()).median() < 1e-3
    assert torch.equal(both, one + low_words.low_value(x, one, high.exponent))
    assert torch.equal(both, low_words.with_low_word(x, one, DFP))
    assert int(low.payload.abs().max()) <= 2 ** (low_words.LOW_BITS - 1)


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize(
    ("shape", "has_two"),
    [
        *(((2, 1023), False), ((2, 1024), True), ((1024,), False), ((0, 1024), False)),
        *(((2, 1, 1024), True), ((2, 1024, 3), False), ((1024, 2), False)),
    ],
)
def test_values_have_a_second_word_from_1024_features_on(shape: tuple[int, ...], has_two: bool) -> None:
    x = torch.full(shape, 2.0**-20).index_fill(-1, torch.tensor([0]), 1.0)
    high = x.round()
    assert (low_words.with_low_word(x, high, DFP) is high) is not has_two
    assert torch.equal(low_words.with_low_word(x, high, DFP), x if has_two else high)


def test_what_is_not_finite_becomes_the_positive_nan_whatever_the_processor_makes() -> None:
    x, cast = torch.tensor([1.0, math.inf, -math.inf, -math.nan, 0.0] * 9), parse("flex16+5:autoflex")
    table = ExponentTable(cast, torch.device("cpu"))
    index = table.index("exp_avg of w")
    entries.write_in_place(table.block, cast, [(x, index, entries.TWO_WORDS)])
    assert table.faults() == {"exp_avg of w": True} and set(x.view(torch.int32).tolist()) == {0x3F800000, 0x7FC00000, 0}


def test_a_second_word_is_taken_by_many_features_that_are_lost_and_by_nothing_else() -> None:
    x = gradient(20_000)
    assert low_words.is_coarse(x, exponent_of(x))
    assert low_words.is_coarse(x.t().contiguous(), exponent_of(x), axis=0)
    few = gradient(1000)
    assert not low_words.is_coarse(few, exponent_of(few) + 8)
    plain = torch.randn(16, 20_000, generator=torch.Generator().manual_seed(1))
    assert not low_words.is_coarse(plain, exponent_of(plain))
    silent = plain * (torch.arange(20_000) % 3 == 0)  # features of zeros have nothing to lose
    assert not low_words.is_coarse(silent, exponent_of(plain))
    assert not low_words.is_coarse(torch.zeros(4, 5000), as_exponent(0))
    assert not low_words.is_coarse(torch.zeros(0, 5000), as_exponent(0))
    few = gradient(16)
    assert low_words.low_word(few, to_mantissas(few, DFP, exponent_of(few)), DFP).exponent == NOTHING


def test_the_number_of_words_is_part_of_a_cast() -> None:
    cast = parse("flex16+5:autoflex(headroom=1,words=1)")
    assert cast.scaling == ScalingSpec("autoflex", headroom=1, words=1) and parse(str(cast)) == cast
    assert str(parse("dfp16:current(words=2)")) == "dfp16"
    assert low_words.has_low_word(DFP) and not low_words.has_low_word(parse("dfp16:current(words=1)"))
    assert not low_words.has_low_word(parse("dfp16:stochastic")) and not low_words.has_low_word(parse("bf16"))
    with pytest.raises(InvalidInput, match="3 words are not possible: give 1 or 2"):
        parse("dfp16:current(words=3)")


def losses(precision: str | Policy, steps: int = 10) -> list[float]:
    """Return the losses of a softmax over 12,000 words, half of which follow from the previous word."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12_000, 8), nn.Linear(8, 12_000))
    chosen = Precision(precision)
    model, optimizer = chosen.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
    found = []
    for _ in range(steps):
        before = (torch.rand(48) * 109).square().long()  # rare words are many
        with chosen.autocast():
            loss = F.cross_entropy(model(before), (before * 7) % 12_000)
        optimizer.zero_grad()
        chosen.backward(loss)
        chosen.step(optimizer)
        found.append(float(loss.detach()))
    return found


def one_word() -> Policy:
    operand = "dfp16:current(headroom=2)"
    grad = "dfp16:current(headroom=2,words=1)"
    return Policy((Rule.of("contraction", input=operand, weight=operand, grad=grad, accumulate="int32"),))


def farthest(precision: str | Policy) -> float:
    """Return the largest difference of a run's losses from fp32's on the same batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return max(abs(a - b) for a, b in zip(losses(precision), in_fp32(), strict=True))


@cache
def in_fp32() -> list[float]:
    return losses("fp32")


def test_a_large_vocabulary_is_learnt_as_in_fp32_with_two_words_and_not_with_one() -> None:
    assert farthest("dfp16") < 0.001 < 0.01 < farthest(one_word())


def test_flexpoint_learns_a_large_vocabulary_with_gradients_and_moments_of_two_words() -> None:
    assert farthest("flex16+5") < farthest("flex16+5:autoflex(words=1)") / 3


@pytest.mark.parametrize("grad", ["dfp16:current(headroom=2,words=1)", "i8s@fp32/tensor"])
def test_a_loss_of_features_without_a_second_word_is_told_once(grad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_words, "_warned", set())
    head = nn.Linear(4, 20_000)
    rule = Rule.of("linear", grad=grad)
    if grad.startswith("dfp16"):
        rule = Rule.of("linear", input="dfp16", weight="dfp16", grad=grad, accumulate="int32")
    precision = Precision(Policy((rule,)), loss_scale="none")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with precision.autocast():
                loss = F.cross_entropy(head(torch.randn(8, 4)), torch.arange(8))
            precision.backward(loss)
    assert len(told) == 1
    assert "of its 20000 features" in str(told[0].message) and "leave words=1 out" in str(told[0].message)


def test_a_gradient_is_coarse_where_more_than_an_eighth_of_its_features_lie_below_some_units() -> None:
    features, exponent = low_words.FEATURES, as_exponent(-3)
    below, at = low_words.UNITS / 8 * 0.999, low_words.UNITS / 8

    def coarse(count: int, size: float) -> bool:
        x = torch.ones(2, features)
        x[:, :count] = size
        return bool(low_words.is_coarse(x, exponent))

    step = features // low_words._SAMPLED
    assert not coarse(features, at) and coarse(features, below)
    assert not coarse(features // 8, below) and coarse(features // 8 + step, below)
    assert not coarse(features // 2, 0.0), "features of zeros count for nothing"
    deep = torch.full((2, 3, features), 2.0**-3)  # a unit, of which 4 are enough
    assert low_words.is_coarse(3.9 * deep, exponent) and not low_words.is_coarse(4 * deep, exponent)
    few = torch.full((2, features - 1), below)
    assert not low_words.is_coarse(few, exponent) and low_words.is_coarse(few.repeat(1, 2), exponent)
    assert low_words.is_coarse(torch.full((features, 2), below), exponent, 0)
    assert not low_words.is_coarse(torch.tensor(below), exponent)
    apart = torch.ones(2, features)
    apart[0] = below
    assert not low_words.is_coarse(apart, exponent), "the largest of a feature counts"
    assert not low_words.is_coarse(apart.unsqueeze(1), exponent)
    apart[:, : features // 2], apart[1, features // 2 : features // 2 + 20 * step] = 0.0, below
    assert low_words.is_coarse(apart, exponent), "20 of the 128 that are not zero"


def test_a_loss_is_told_from_where_it_was_met_if_more_than_an_eighth_lose_more_than_an_eighth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features, step = low_words.FEATURES, low_words.FEATURES // low_words._SAMPLED

    def told(x: Tensor, lost: int, share: float, axis: int = -1) -> list[warnings.WarningMessage]:
        value = x.clone()
        value.movedim(axis, 0)[: lost * step] *= 1 - share
        monkeypatch.setattr(low_words, "_warned", set())
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            low_words.warn_of_loss(x, value, DFP, "it", axis)
            low_words.warn_of_loss(x, value, DFP, "it", axis)
        return found

    x = torch.full((3, features), -2.0)
    x[0] = 1e-3
    assert not told(x, 32, 1.0) and not told(x, 256, 0.125) and not told(x, 256, 0.12)
    (found,) = told(x, 33, 0.126)
    assert str(found.message).startswith(f"it: of its {features} features 13% are lost under the shared scale of {DFP}")
    assert found.filename == __file__ and "low_words.warn_of_loss(" in linecache.getline(__file__, found.lineno)
    x[:, features // 2 :] = 0
    (found,) = told(x, 17, 1.0)
    assert "features 13% are lost" in str(found.message), "of those that are not zero"
    assert not told(x, 16, 1.0) and not told(x[:, : features - 1].contiguous(), 256, 1.0)
    monkeypatch.setattr(low_words, "_warned", set())
    deep = x.repeat(2, 1, 1)
    with pytest.warns(UserWarning, match="features 100% are lost"):
        low_words.warn_of_loss(deep, torch.zeros_like(deep), DFP, "it")
    assert len(told(x.t().contiguous(), 128, 1.0, 0)) == 1 and not told(x, 256, 1.0, 0)
    assert not told(torch.empty(0, features), 256, 1.0) and not told(torch.tensor(1.0).expand(1), 1, 1.0)
    low_words.warn_of_loss(torch.tensor(1.0), torch.tensor(0.0), DFP, "a number")
