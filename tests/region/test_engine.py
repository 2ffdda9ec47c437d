"""The cost of a planned call, as the number of lowp's functions that run in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.kernels import cpu

ROOT = str(Path(lowp.__file__).parent)
# of a linear layer without gradient, with it, and of its backward; a tenth above what they are
MOST = {
    "fp16": (12, 18, 24),
    "bf16": (16, 23, 24),  # where the processor multiplies bf16, its own products are looked for first
    "e5m7": (12, 13, 20),
    "fp8": (16, 16, 20),
    "mxfp8": (16, 16, 20),
    "nvfp4": (16, 16, 20),
    "e4m3fn:stochastic": (20, 19, 22),
    "mxfp8:stochastic": (20, 20, 23),
    "i8s@fp32/row": (18, 16, 20),
    "int8": (80, 80, 90),
    "dfp16": (18, 34, 30),
}


def functions_of_lowp(run: Callable[[], object]) -> int:
    """Return the number of calls of lowp's own functions in a call."""
    count = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(ROOT)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize("precision", MOST)
def test_a_planned_linear_layer_runs_few_functions(precision: str) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    found: list[int] = []
    results: list[Tensor] = []
    with lowp.autocast(precision):
        for _ in range(2):  # the first call is planned
            with torch.no_grad():
                found.append(functions_of_lowp(lambda: F.linear(x, layer.weight, layer.bias)))
            found.append(functions_of_lowp(lambda: results.append(F.linear(x, layer.weight, layer.bias))))
            found.append(functions_of_lowp(lambda: results.pop().sum().backward()))
    assert all(count <= most for count, most in zip(found[3:], MOST[precision], strict=True)), found


def test_functions_that_no_rule_concerns_are_known_after_their_first_call() -> None:
    """They include what torch.no_grad calls; those that expose a weight's memory are noted at every call."""
    x = nn.Parameter(torch.randn(3))
    with lowp.autocast("fp16") as region:
        for _ in range(2):
            with torch.no_grad():
                x.grad = None
            assert x.detach().data_ptr() == x.data_ptr()
    passing = region._rulebook.passing
    assert torch._C._set_grad_enabled in passing
    assert not passing & {Tensor.detach, Tensor.data_ptr, F.linear, F.relu, Tensor.backward}


def test_a_region_leaves_the_compilers_state_of_a_thread_as_torch_does() -> None:
    with lowp.autocast("fp16"):
        assert torch._guards.TracingContext.try_get() is None
