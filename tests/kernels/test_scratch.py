"""Kept memory: the bits are those of plain conversions, and none of it is visible outside."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp.kernels.products import scratch
from lowp.kernels.products.scratch import HUGE_PAGE, LEAST, Scratch
from lowp.policy import Policy, Rule

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1),
    "with gaps": lambda x: x[:, ::2],
    "repeated": lambda x: x[:1].expand(x.shape),
    "small": lambda x: x[:1, :1],
}


class Passing(TorchDispatchMode):
    """A mode that passes every operation unchanged."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> scratch._Blocks:
    """Return the blocks of this thread: none yet."""
    fresh = scratch._Blocks()
    monkeypatch.setattr(scratch, "_blocks", fresh)
    return fresh


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wide_copy_has_the_values_and_the_strides_of_a_conversion(layout: str, blocks: scratch._Blocks) -> None:
    x = LAYOUTS[layout](torch.randn(8, 16, 24, 24).bfloat16())
    with torch.no_grad(), Scratch() as one:
        found = one.wide(x)
        assert torch.equal(found, x.float()) and found.stride() == x.float().stride()
    assert bool(blocks.free) == (layout in ("contiguous", "channels last"))


def test_blocks_are_used_again_and_make_room_for_larger_ones(
    blocks: scratch._Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)  # with it, blocks are whole pages

    def use(*elements: int) -> list[int]:
        with torch.no_grad(), Scratch() as one:
            for count in elements:
                one.wide(torch.zeros(count, dtype=torch.half))
        return sorted(count for count, _ in blocks.free)

    assert use(LEAST, 2 * LEAST) == use(2 * LEAST, LEAST) == [LEAST, 2 * LEAST]
    assert use(3 * LEAST) == [LEAST, 3 * LEAST]
    assert use(LEAST - 1) == use(scratch.MOST + 1) == [LEAST, 3 * LEAST]
    assert use(LEAST, LEAST, LEAST) == use(LEAST, LEAST) == [LEAST, LEAST, 3 * LEAST]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_blocks_are_whole_huge_pages(blocks: scratch._Blocks) -> None:
    page = HUGE_PAGE // 4
    for elements, pages in ((1, 1), (page, 1), (page + 1, 2)):
        count, block = blocks.take(elements)
        block.fill_(1)
        assert count == block.numel() == pages * page and float(block.sum()) == count
        assert block.data_ptr() % HUGE_PAGE == 0


def test_what_torch_follows_is_not_lent(blocks: scratch._Blocks) -> None:
    x = torch.zeros(2 * LEAST).half()
    with Scratch() as one:  # gradients are recorded
        one.wide(x.requires_grad_()).sum().backward()

    def wide(x: Tensor) -> Tensor:
        with torch.no_grad(), Scratch() as one:
            return one.wide(x).sum()

    with Passing():
        wide(x)
    with forward_ad.dual_level():
        wide(x)
    assert x.grad is not None and not blocks.free


@pytest.mark.usefixtures("emulated")
def test_results_and_gradients_are_not_written_over_by_the_next_call() -> None:
    rule = Rule.of("contraction", input="bf16", weight="bf16", grad="bf16", output="fp32")
    cases: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (F.linear, [torch.randn(256, 160), torch.randn(224, 160), torch.randn(224)]),
        (torch.addmm, [torch.randn(256, 224), torch.randn(256, 160), torch.randn(160, 224)]),
        (torch.addmm, [torch.randn(224), torch.randn(256, 160), torch.randn(160, 224)]),
        (torch.matmul, [torch.randn(256, 160), torch.randn(160, 224)]),
        (torch.conv2d, [torch.randn(4, 8, 40, 40), torch.randn(8, 8, 3, 3), torch.randn(8)]),
        (F.scaled_dot_product_attention, [torch.randn(4, 4, 64, 64)] * 3),
        (lambda x: F.layer_norm(x, (160,)), [torch.randn(256, 160)]),
    ]
    for region in (lowp.autocast("bf16"), lowp.autocast(Policy((rule,)))):
        for function, tensors in cases:
            leaves = [one.clone().requires_grad_() for one in tensors]
            with region:
                result = function(*leaves)
            found = [result, *torch.autograd.grad(result, leaves, torch.ones_like(result))]
            kept = [one.clone() for one in found]
            with torch.no_grad(), Scratch() as one:
                for _ in range(6):
                    one.wide(torch.full((1 << 18,), torch.nan, dtype=torch.half))
            assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))


def test_the_smallest_block_that_is_large_enough_is_taken_and_of_equal_ones_the_latest() -> None:
    free, memory = scratch._Blocks(), [torch.empty(0) for _ in range(5)]
    free.free = list(zip((20, 30, 18, 18, 40), memory, strict=True))
    assert free.take(16)[1] is memory[3] and free.take(19)[1] is memory[0] and free.take(31)[1] is memory[4]
    assert [count for count, _ in free.free] == [30, 18]
    free.free.reverse()
    assert free.take(31)[0] >= 31 and [count for count, _ in free.free] == [18], "in the place of the largest"


def test_a_block_begins_at_a_huge_page_wherever_its_memory_does(
    blocks: scratch._Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    sizes: list[int] = []
    inner, mapped = torch.frombuffer, mmap.mmap

    def counted(*given: Any, **named: Any) -> mmap.mmap:
        sizes.append(given[1])
        return mapped(*given, **named)

    monkeypatch.setattr(torch, "frombuffer", lambda region, dtype: inner(region, dtype=dtype)[16:])
    monkeypatch.setattr(mmap, "mmap", counted)
    count, block = blocks.take(HUGE_PAGE // 4 + 1)
    assert block.data_ptr() % HUGE_PAGE == 0 and count == block.numel() == 2 * HUGE_PAGE // 4
    assert sizes == [3 * HUGE_PAGE]  # of address space: one more, since it begins anywhere
    block.fill_(1)


def test_a_block_of_the_very_size_is_taken() -> None:
    free, memory = scratch._Blocks(), [torch.empty(0) for _ in range(2)]
    free.free = list(zip((20, 30), memory, strict=True))
    assert free.take(30)[1] is memory[1] and free.take(20)[1] is memory[0] and not free.free


def test_tensors_of_unknown_values_are_lent_from_the_smallest_to_the_largest(
    blocks: scratch._Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "MOST", 2 * LEAST)
    cases = [
        (LEAST - 1, torch.float32, False),
        (LEAST, torch.float32, True),
        (2 * LEAST, torch.float32, True),
        (2 * LEAST + 2, torch.float32, False),
        (LEAST, torch.float16, False),
    ]
    for elements, dtype, is_lent in cases:
        shape = (2, elements // 2) if elements % 2 == 0 else (elements, 1)
        strides = (1, 2) if elements % 2 == 0 else (1, elements)
        with torch.no_grad(), Scratch() as one:
            found = one.strided(shape, strides, dtype, "cpu")
            assert len(one.lent) == is_lent
            assert (found.shape, found.stride(), found.dtype) == (shape, strides, dtype)
        if dtype is torch.float32:
            with torch.no_grad(), Scratch() as one:
                assert torch.equal(one.wide(torch.ones(shape).half()), torch.ones(shape))
                assert len(one.lent) == is_lent
    with torch.enable_grad(), Scratch() as one:
        assert one.strided((LEAST,), (1,), torch.float32, "cpu").shape == (LEAST,) and not one.lent
    with torch.no_grad(), Scratch() as one:
        meta = one.strided((8, 8), (1, 8), torch.float32, "meta")
    assert meta.is_meta and meta.stride() == (1, 8)
