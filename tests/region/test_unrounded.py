"""Operands that a region leaves unchanged, like torch.autocast, are reported: float64, complex and MKLDNN."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowp.errors import InvalidInput
from lowp.policy import Policy, Rule
from lowp.region import autocast, context

OPERANDS = {
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "complex64": torch.randn(3, 4, dtype=torch.complex64),
    "MKLDNN": torch.randn(3, 4).to_mkldnn(),
}


@pytest.fixture(autouse=True)
def nothing_was_told() -> None:
    context._told_unrounded.clear()


def product(x: Tensor) -> Tensor:
    weight = torch.eye(4, dtype=x.dtype)
    return torch.nn.functional.linear(x, weight.to_mkldnn() if x.is_mkldnn else weight)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "e5m7", "dfp16", "flex16+5"])
@pytest.mark.parametrize("kind", OPERANDS)
def test_a_region_that_rounds_no_contraction_says_so_once(precision: str, kind: str) -> None:
    x = OPERANDS[kind]
    with pytest.warns(UserWarning, match=rf"has rounded no contraction: .* not round linear in {kind}\.") as told:
        with autocast(precision) as region:
            y = product(x)
    assert [one.filename for one in told] == [__file__]
    assert y.dtype is x.dtype
    assert region.report().left_alone == (f"linear in {kind}",)
    assert f"left as it is, as under torch.autocast: linear in {kind}" in str(region.report())
    with warnings.catch_warnings(), autocast(precision):
        warnings.simplefilter("error")
        product(x)


@pytest.mark.parametrize("kind", OPERANDS)
def test_a_strict_region_refuses_them(kind: str) -> None:
    with pytest.raises(InvalidInput, match=rf"rounds linear, but its operands are {kind}"):
        with autocast("bf16", strict=True):
            product(OPERANDS[kind])


@pytest.mark.parametrize("called", [lambda layer: layer, torch.func.vmap], ids=["direct", "transformed"])
def test_one_computed_in_float64_beside_rounded_ones_is_reported_and_not_warned_of(
    called: Callable[[nn.Module], Callable[[Tensor], Tensor]],
) -> None:
    x = torch.randn(3, 4)
    with autocast("e5m7") as region:
        called(nn.Linear(4, 4))(x)
        x.double() @ x.double().t()
    assert region.report().left_alone == ("matmul in float64",)


def test_a_product_of_integers_is_none_that_was_rounded() -> None:
    with pytest.warns(UserWarning, match=r"has rounded no contraction: .* not round linear in float64\."):
        with autocast("e5m7"):
            torch.arange(4) @ product(OPERANDS["float64"]).long().t()


def test_a_rule_that_leaves_them_alone_is_enough_where_strict() -> None:
    with autocast(Policy((Rule.of("linear"),)), strict=True) as region:
        product(OPERANDS["float64"])
    assert region.report().left_alone == ()
