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
from lowp.kernels.choose.hardware import multiplies
from lowp.step import expect_step

ROOT = str(Path(lowp.__file__).parent)
CASTS = [
    "fp16",
    "bf16",
    "e5m7",
    "fp8",
    "mxfp8",
    "nvfp4:nearest-even",
    "i8s@fp32/row",
    "int8",
    "e4m3fn:stochastic",
    "mxfp8:stochastic",
]
# functions of a layer with its gradient, and of its backward, in which torch's own call passes five of the region's
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "linear": (lambda: nn.Linear(8, 8), (4, 8), 15, 24),
    "wide linear": (lambda: nn.Linear(64, 64), (4, 64), 15, 24),
    "convolution": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8), 24, 48),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 8, 8), 24, 48),
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


# functions of a whole step of two linear layers: forward, loss, backward, the optimizer's update and its roundings
STEPS = {"flex16+5": 400, "dfp16": 215}


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize("precision", STEPS)
def test_a_step_of_int16_runs_few_functions(precision: str) -> None:
    torch.manual_seed(0)
    expect_step(lowp.GradScaler())  # from the first loss scale of a process on all optimizers are watched
    numbers, model = lowp.Precision(precision), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    model, optimizer = numbers.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x, y = torch.randn(32, 64), torch.randint(10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        with numbers.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        numbers.backward(loss)
        numbers.step(optimizer)

    found = [functions_of_lowp(step) for _ in range(5)]  # the first begins the exponents, another may begin one anew
    assert min(found) <= STEPS[precision], found


@pytest.mark.parametrize("kind", ["name", "equal policies", "file", "paths"])
def test_a_region_made_anew_for_each_step_takes_few_functions_more(kind: str, tmp_path: Path) -> None:
    file, name = tmp_path / "mine.toml", "nvfp4" if kind == "paths" else "e5m7"
    file.write_text(lowp.autocast(name).policy.to_toml())
    made: dict[str, Callable[[], str | Path | lowp.Policy]] = {"file": lambda: file}
    made |= {"equal policies": lambda: lowp.Policy.load(file), "name": lambda: name, "paths": lambda: name}
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)), torch.randn(32, 64)

    def step(region: lowp.autocast) -> int:
        def run() -> None:
            with region:
                model(x)

        return functions_of_lowp(run)

    once = lowp.autocast(made[kind]())
    step(once)
    least = step(once)
    assert step(lowp.autocast(made[kind]())) <= least + 60  # hundreds where nothing is known of its rules


@pytest.mark.usefixtures("emulated")
@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("precision", CASTS)
def test_a_planned_layer_runs_few_functions(precision: str, layer: str) -> None:
    if precision == "bf16" and multiplies("cpu", torch.bfloat16):
        pytest.skip("the processor's own product is looked for first")
    make, shape, forward, backward = LAYERS[layer]
    module, x = make(), torch.randn(shape, requires_grad=True)
    found: list[int] = []
    results: list[Tensor] = []
    with lowp.autocast(precision):
        for _ in range(3):  # the first call is planned
            found.append(functions_of_lowp(lambda: results.append(module(x))))
            found.append(functions_of_lowp(lambda: results.pop().sum().backward()))
    assert found[-2] <= forward and found[-1] <= backward, found


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


@pytest.mark.parametrize("precision", ["fp8", "int8", "dfp16"])
def test_a_model_stored_in_16_bits_whose_norm_meets_fp32_is_told_what_to_do(precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    told = r"layer_norm was given bfloat16 and float32: .* Convert the model with float\(\)"
    with lowp.autocast(precision), pytest.raises(RuntimeError, match=told):
        model(torch.ones(3, 8, dtype=torch.bfloat16))
