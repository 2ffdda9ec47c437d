"""The cost of a planned call, as the number of lowp's functions that run in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.exponents import Trail
from lowp.kernels import cpu
from lowp.kernels.choose.hardware import multiplies
from lowp.region.engine import Audit
from lowp.region.entries import current_engine
from lowp.step import expect_step

set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
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


def test_a_thread_that_enters_a_region_has_the_compilers_state_that_calls_ask_for() -> None:
    found: list[bool] = []

    def enter() -> None:
        with lowp.autocast("fp16"):
            found.append(hasattr(torch._guards._TLS, "tracing_context"))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [True]


def test_results_have_sites_unless_an_operand_is_irregular_or_transformed() -> None:
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], Tensor]] = {
        "sparse": lambda: torch.mm(x.to_sparse(), x),
        "sparse by name": lambda: torch.mm(x.to_sparse(), mat2=x),
        "another sparse by name": lambda: torch.mm(x, mat2=x.to_sparse()),
        "transformed": lambda: torch.func.vmap(torch.mv, (None, 0))(x, x),
    }
    for call in calls.values():
        with lowp.autocast("flex16+5") as region:
            call()
            assert region.exponents is not None and region.exponents.sites() == []
    with lowp.autocast("flex16+5") as region:
        torch.mm(x, mat2=x)
        assert region.exponents is not None and region.exponents.sites() == ["output of mm"]


def test_a_writer_writes_for_training_where_gradients_are_recorded_or_will_be() -> None:
    rule = lowp.presets.parse("flex16+5").policy.rules[0]

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            note(None)
            return x

    with lowp.autocast("flex16+5"):
        engine = current_engine()
        assert engine is not None and engine.spots is not None
        spots, found = engine.spots, list[tuple[bool, str]]()

        def note(training: bool | None) -> None:
            engine.spots = spots.within(None if training is None else Trail(training))
            writer = engine.writer("linear", rule)
            found.append((writer.training, writer.where))

        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for training in (None, True, False):
                    note(training)
        assert [training for training, _ in found] == [True, True, True, False, True, False]
        found.clear()
        note(None)
        nn.Sequential(Noting())(torch.ones(2, 2))
        assert [where.partition(" #")[0].partition(",")[0] for _, where in found] == ["linear", "0 linear"]


@pytest.mark.parametrize("precision", ["fp8", "int8", "dfp16"])
def test_a_model_stored_in_16_bits_whose_norm_meets_fp32_is_told_what_to_do(precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    told = r"layer_norm was given bfloat16 and float32: .* Convert the model with float\(\)"
    with lowp.autocast(precision), pytest.raises(RuntimeError, match=told):
        model(torch.ones(3, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_region_is_in_force_where_torch_autocast_has_its_setting_on_the_device_of_the_call(kind: str) -> None:
    other, there = {"cpu": "cuda", "cuda": "cpu"}[kind], torch.ones(2, device="meta")
    here = torch.ones(2)
    with lowp.autocast("fp16"):
        engine = current_engine()
        assert engine is not None
        engine.devices, engine.is_on_host = ("cpu", "cuda"), False
        given: list[tuple[Any, ...]] = [(here,), (nn.Parameter(here),), ([here],), (3, here), (here.as_subclass(Own),)]
        nowhere: list[tuple[Any, ...]] = [(there,), (3,), ()]
        for args in (*given, *nowhere):
            assert engine.is_ours(args, {})
        for change in (lambda: set_enabled(kind, False), lambda: set_dtype(kind, torch.bfloat16)):
            change()
            is_there = other == "cpu"
            for args in given:
                assert engine.is_ours(args, {}) is is_there and engine.is_ours((), {"x": args}) is is_there
            assert not any(engine.is_ours(args, {}) for args in nowhere) and not engine.is_ours()
            assert ((here @ here).dtype is torch.float16) is is_there
            set_enabled(kind, True)
            set_dtype(kind, torch.float16)
        engine.devices, engine.has_host = ("cuda",), False
        set_enabled("cpu", False)
        assert engine.is_ours((here,), {}) and engine.is_ours((there,), {})
        set_enabled("cuda", False)
        assert not engine.is_ours((here,), {})
        set_enabled("cpu", True)
        set_enabled("cuda", True)


class Own(Tensor):
    """A tensor of a user's own class."""


def test_the_audit_tells_of_contractions_below_ops_that_no_rule_matches() -> None:
    missed: list[str] = []
    engine = SimpleNamespace(active=True, running=None, rulebook=SimpleNamespace(missed=missed.append))
    engine.path, engine.is_ours = SimpleNamespace(current=""), lambda args, kwargs: True
    audit, x = Audit(cast(Any, engine)), torch.ones(2, 2)

    def told(function: Any = torch.ops.aten.mm.default) -> list[str]:
        missed.clear()
        given = (x, x) if function is not torch.ops.aten.relu.default else (x,)
        assert torch.equal(audit.__torch_dispatch__(function, (), given), function(*given))
        return [*missed]

    assert told() == ["mm"] and told(torch.ops.aten.add.Tensor) == told(torch.ops.aten.relu.default) == []
    engine.path.current = "a.b"
    assert told() == ["mm in a.b"]
    engine.running = ("tensordot", False)
    assert told() == ["tensordot in a.b"]
    engine.running = ("linear", True)
    assert told() == []
    engine.is_ours = lambda args, kwargs: False
    assert told() == []
    engine.running = None
    assert told() == []
    engine.running = ("tensordot", False)  # which was asked whether it is ours
    assert told() == ["tensordot in a.b"]
    engine.active = False
    assert told() == []
    engine.active, found = True, list[list[str]]()
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda gradient: found.append(told()))
    (2 * leaf).sum().backward()
    assert found == [[]]  # decided by the forward pass


def test_an_error_names_the_kernel_that_is_missing_and_the_rest_is_raised_as_it_is() -> None:
    with lowp.autocast("fp16") as region:
        engine, x = current_engine(), torch.ones(2).half()
        assert engine is not None
        torch.special.bessel_j0(x)
        for text in ("not implemented for 'Half'", '"x" not implemented for BFloat16', "not implemented for Half"):
            assert engine.without_kernel(RuntimeError(text), torch.special.bessel_j0, (), {"x": x}) is not None
        for text in ("not implemented for 'Long'", "not implemented", "Half"):
            with pytest.raises(RuntimeError) as told:
                engine.without_kernel(error := RuntimeError(text), torch.special.bessel_j0, (x,), {})
            assert told.value is error
    assert region.report().widened == ("special_bessel_j0 on cpu",)


def test_what_is_given_in_several_dtypes_is_told_by_what_torch_says_of_them() -> None:
    whole, half, wide = torch.ones(2, dtype=torch.int64), torch.ones(2).half(), torch.ones(2).double()
    engine, call = lowp.autocast("fp16")._compiled, torch.special.bessel_j0
    few, many = "products in this region write another dtype", "leaves other dtypes to torch, which multiplies tensors"
    cases: list[tuple[str, tuple[Tensor, ...], str | None]] = [
        ("expected mat1 and mat2 to have the same dtype", (half, half.float()), None),
        ("expected mat1 and mat2 to have the same dtype", (half, wide), many),
        ("expected mat1 and mat2 to have the same dtype", (half, whole), many),
        ("Input type and bias type should be the same", (half, whole), many),
        ("mixed dtype (CPU)", (half, half.float()), few),
        ("mixed dtype (CPU)", (half, whole), None),
        ("mixed dtype (CPU)", (half, wide), many),
        ("expected scalar type Half", (half, half), None),
        ("gone", (half, wide), None),
    ]
    for text, given, why in cases:
        error = RuntimeError(text)
        with pytest.raises(RuntimeError) as told:
            engine.without_kernel(error, call, given, {})
        assert (told.value is error) is (why is None), text
        assert why is None or why in str(told.value)


def test_a_region_rests_while_the_frame_of_a_step_runs() -> None:
    with lowp.autocast("fp16"):
        engine, x = current_engine(), torch.ones(2, 2)
        assert engine is not None and not engine.rests()

        def step() -> torch.dtype:
            engine.resting = sys._getframe()
            assert engine.rests() and engine.resting is sys._getframe()
            return (x @ x).dtype

        assert step() is torch.float32
        assert not engine.rests() and engine.resting is None  # it has ended, without a word
        engine.resting = sys._getframe()
        assert (x @ x).dtype is torch.float32
        engine.resting = None
        assert (x @ x).dtype is torch.float16
