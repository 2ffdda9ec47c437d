"""The parts of attention: where it goes under masks, and the numbers that its gradient is computed from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowp.kernels.products.attention import joined, probabilities, split, widened
from lowp.kernels.products.scratch import Scratch


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "boolean", "added"])
def test_attention_goes_where_a_mask_lets_it_and_a_row_that_is_hidden_is_zeros(kind: str, is_causal: bool) -> None:
    scores, allowed = torch.randn(2, 5, 5, dtype=torch.float64), torch.rand(5, 5) < 0.6
    allowed[1], allowed[3] = False, True
    added = torch.where(allowed, torch.randn(5, 5).double(), -torch.inf)
    mask = {"none": None, "boolean": allowed, "added": added}[kind]
    found = probabilities(scores, mask, is_causal)
    weights = scores.exp() * (1 if kind == "none" else allowed if kind == "boolean" else added.exp())
    weights = weights.tril() if is_causal else weights
    total = weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found, torch.where(total > 0, weights / total, 0.0))
    if kind != "none":
        assert not found[:, 1].any()


def test_what_rounding_removed_is_kept_and_added_again() -> None:
    with Scratch() as scratch:
        wide = torch.randn(4, 6)
        rounded = wide.bfloat16()
        exact = wide.clone()
        rest = split(wide, rounded, scratch)
        assert rest is not None and rest.dtype is torch.bfloat16
        assert torch.equal(rest, (exact - rounded.float()).bfloat16())
        whole = joined(rounded, rest, scratch)
        assert torch.equal(whole, rounded.float() + rest.float())
        assert (whole - exact).abs().max() <= 2.0**-17 * exact.abs().max()
        assert split(exact, exact, scratch) is None and torch.equal(joined(exact, None, scratch), exact)


def test_tensors_are_widened_at_once_where_they_fill_a_block_of_one_dtype() -> None:
    whole = torch.randn(3, 4, 6).bfloat16()
    other = whole.view(torch.float16)
    groups: list[list[Tensor]] = [
        list(whole.unbind()),
        [whole[2].t(), whole[0], whole[1].t()],
        [whole[0], whole[1]],
        [whole[0], other[1], whole[2]],
        [whole[0], torch.randn(4, 6).bfloat16(), whole[1]],
        [torch.randn(4, 6), torch.randn(2).half()],
    ]
    for tensors in groups:
        with Scratch() as scratch:
            found = widened(tensors, scratch)
            assert [one.dtype for one in found] == [torch.float32] * len(tensors)
            assert all(torch.equal(wide, one.float()) for wide, one in zip(found, tensors, strict=True))
