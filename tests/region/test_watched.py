"""What watches a step changes none of its numbers, and sees all of its products."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lowp

FORMATS = ["bf16", "fp16", "bf16-tpu", "e5m7", "fp8", "mxfp8", "nvfp4", "int8", "dfp16", "flex16+5"]
Region = Callable[[], AbstractContextManager[object]]


def network() -> nn.Module:
    torch.manual_seed(0)
    flat = (nn.Flatten(), nn.Linear(8 * 36, 32), nn.GELU(), nn.Linear(32, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *flat)


def gradients(model: nn.Module, region: Region) -> list[Tensor]:
    """Return a step's loss and gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    x, y = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
    with region():
        loss = F.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_region_computes_what_another_does(name: str) -> None:
    model = network()
    regions = [lowp.autocast(name), lowp.autocast(name, strict=True)]
    plain, strict = (gradients(model, lambda one=region: one) for region in regions)  # type: ignore[misc]
    assert len(plain) == 7
    assert all(torch.equal(one, other) for one, other in zip(plain, strict, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_the_operations_of_a_step_are_counted_as_those_of_fp32(name: str) -> None:
    model, counts = network(), list[int]()
    regions: list[Region] = [nullcontext, lambda: lowp.autocast(name)]
    for region in regions:
        with FlopCounterMode(display=False) as counter:
            gradients(model, region)
        counts.append(counter.get_total_flops())
    assert counts[0] > 0
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["dfp16", "flex16+5"])
def test_integers_are_summed_as_they_are_where_their_products_are_counted(name: str) -> None:
    model = network()
    regions: list[Region] = [lambda: lowp.autocast(name), lambda: lowp.autocast(name)]
    plain = gradients(model, regions[0])
    with FlopCounterMode(display=False):
        counted = gradients(model, regions[1])
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))


def test_matrix_products_by_the_definition_are_counted_once() -> None:
    model, x, counts = nn.Linear(8, 5), torch.randn(3, 8), list[int]()
    for way in ("cpu", "bitwise") if lowp.kernels.cpu.library() is not None else ("bitwise", "reference"):
        with lowp.kernels.use(way), FlopCounterMode(display=False) as counter:
            with lowp.autocast("dfp16"):
                loss = model(x).sum()
            loss.backward()
        counts.append(counter.get_total_flops())
    assert counts == [2 * (2 * 3 * 8 * 5)] * 2  # forward, and the gradient of the weight
