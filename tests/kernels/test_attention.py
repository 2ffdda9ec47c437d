"""The parts of attention: where it goes under masks, and the numbers that its gradient is computed from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowp import kernels
from lowp.kernels.products.attention import attended, gradients, joined, probabilities, split, widened
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


def operands(*, rows: int = 6, keys: int = 9, features: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, n, features, generator=generator).to(dtype) for n in (rows, keys, keys)]


MASKS = {
    "none": lambda: None,
    "boolean": lambda: torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) < 0.8,
    "added": lambda: torch.randn(6, 9, generator=torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_and_its_gradients_are_torchs(kind: str, is_causal: bool, scale: float | None) -> None:
    mask = MASKS[kind]()
    if mask is not None and is_causal:
        return
    given = [one.requires_grad_() for one in operands()]
    wanted = F.scaled_dot_product_attention(*given, mask, is_causal=is_causal, scale=scale)
    gradient = torch.randn_like(wanted)
    plain = [one.detach() for one in given]
    found = attended(plain, mask, is_causal, scale)
    assert found is not None and found.output.dtype is found.logarithms.dtype is torch.float32
    assert torch.equal(found.output, wanted.detach()) and found.logarithms.shape == (2, 3, 6)
    scores = plain[0] @ plain[1].mT * (8**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    scores = scores.masked_fill(~torch.ones(6, 9).bool().tril(), -torch.inf) if is_causal else scores
    torch.testing.assert_close(found.logarithms, scores.logsumexp(-1))
    wanted_gradients = torch.autograd.grad(wanted, given, gradient)
    for one, other in zip(gradients(gradient, plain, found, mask, is_causal, scale), wanted_gradients, strict=True):
        assert torch.equal(one, other)


def test_attention_that_torch_does_not_fuse_is_left() -> None:
    given = operands()
    assert attended(given, None) is not None and attended(given, None, True, 0.5) is not None
    for left in (
        operands(dtype=torch.float64),
        operands(dtype=torch.bfloat16),
        [one[0] for one in given],
        [one[None] for one in given],
        operands(rows=0),
        operands(keys=0),
        [given[0], given[1], given[2][..., :4]],  # torch's kernel takes values as wide as keys
        [one.to("meta") for one in given],
    ):
        assert attended(left, None) is None
    with kernels.use("reference"):
        assert attended(given, None) is None
    with kernels.use("bitwise"):
        assert attended(given, None) is not None
    kept: list[object] = []

    def compiled(*given: Tensor) -> Tensor:
        kept.append(attended(given, None))
        return given[0] + 1

    torch._dynamo.reset()
    torch.compile(compiled, backend="eager", fullgraph=True)(*given)
    assert kept == [None]


def test_a_row_that_a_mask_hides_as_a_whole_is_zeros_wherever_it_stands() -> None:
    scores, allowed = torch.randn(2, 4, 6, dtype=torch.float64), torch.ones(4, 6).bool()
    allowed[2] = False
    for mask in (allowed, torch.where(allowed, 0.0, -torch.inf).double()):
        found = probabilities(scores, mask, False)
        rest = torch.tensor([0, 1, 3])
        assert not found[:, 2].any() and torch.equal(found[:, rest], scores.softmax(-1)[:, rest])
        of_heads = probabilities(scores.expand(3, 2, 4, 6), mask, False)
        assert torch.equal(of_heads, found.expand(3, 2, 4, 6))
    wide = probabilities(scores, None, True)  # the i-th row sees the first i + 1 columns
    for row in range(4):
        assert not wide[:, row, row + 1 :].any()
        torch.testing.assert_close(wide[:, row, : row + 1], scores[:, row, : row + 1].softmax(-1))


def test_a_block_of_memory_is_widened_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    inner = Scratch.wide

    def wide(self: Scratch, x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return inner(self, x)

    monkeypatch.setattr(Scratch, "wide", wide)
    other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.int32}
    for dtype in other:
        whole = torch.randn(3, 8).to(dtype)
        first, second, third = whole.unbind()
        for tensors, wanted in (
            ([first, second, third], [8, 8, 8] if dtype is torch.float32 else [24]),
            ([first, second], [8, 8]),
            ([first, second, third.clone()], [8, 8, 8]),
            ([first, second, whole.view(other[dtype])[2]], [8, 8, 8]),
        ):
            sizes.clear()
            with Scratch() as scratch:
                widened(tensors, scratch)
            assert sizes == wanted
