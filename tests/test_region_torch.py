"""Regions and the rest of torch: checkpoints, derivatives, torch.func, torch.compile, custom Functions, caches."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lowp.policy import Policy, Rule
from lowp.presets import PRESETS
from lowp.region import autocast
from lowp.region.threads import bound

PRECISIONS = ("fp16", "bf16-trunc", "e4m3fn")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


class Net(nn.Module):
    """Two linear layers, a norm and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x)))).softmax(-1)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.float().pow(2).sum(), list(model.parameters())))


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- recomputation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_checkpoints_recompute_under_the_policy_of_the_forward(
    model: Net, precision: str, reentrant: bool, inside: bool
) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with autocast(precision):
        expected = gradients(model, model(x))
    with autocast(precision):
        y = checkpoint(model, x, use_reentrant=reentrant)
        if inside:
            y.float().pow(2).sum().backward()
    if not inside:
        y.float().pow(2).sum().backward()
    assert same(expected, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_where_in_the_model_it_was(reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x = Outer(), torch.randn(2, 8, requires_grad=True)
    with autocast(Policy((Rule.of("linear", where="inner", input="bf16", weight="bf16", output="bf16"),))) as region:
        y = model(x)
        assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert region.report().unseen == ()


def test_a_checkpoint_outside_a_region_or_switched_off_inside_is_torch_s(model: Net) -> None:
    x = torch.randn(3, 8)
    expected = gradients(model, model(x))
    assert same(expected, gradients(model, checkpoint(model, x, use_reentrant=False)))
    with autocast("fp16"), torch.autocast("cpu", enabled=False):
        y = checkpoint(model, x, use_reentrant=False)
    assert same(expected, gradients(model, y))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(model, x, use_reentrant=False)
    gradients(model, y)


# -- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_penalty_runs(model: Net, precision: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with autocast(precision):
        (gradient,) = torch.autograd.grad(model(x).float().pow(2).sum(), x, create_graph=True)
        gradient.float().pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p is not model.last.bias)


@pytest.mark.parametrize("call", ["method", "autograd.backward", "autograd.grad"])
def test_backward_within_a_region_gives_what_it_gives_outside(model: Net, call: str) -> None:
    x = torch.randn(3, 8)
    with autocast("fp16"):
        loss = model(x).float().pow(2).sum()
    expected = list(torch.autograd.grad(loss, list(model.parameters())))
    with autocast("fp16"):
        loss = model(x).float().pow(2).sum()
        if call == "autograd.grad":
            found = list(torch.autograd.grad(loss, list(model.parameters())))
        else:
            loss.backward() if call == "method" else torch.autograd.backward(loss)
            found = [p.grad for p in model.parameters()]
    assert same(expected, found)


def test_backward_in_another_thread(model: Net) -> None:
    with autocast("fp16"):
        y = model(torch.randn(3, 8))
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(gradients(model, y)))
    thread.start()
    thread.join()
    assert len(found) == 6
    assert all(one.dtype is torch.float32 for one in found)


def test_torch_func_runs(model: Net) -> None:
    parameters, x = dict(model.named_parameters()), torch.randn(3, 8)

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (x,)).float().pow(2).sum()

    with autocast("fp16"):
        found = torch.func.grad(loss)(parameters, x)
        expected = gradients(model, model(x))
        rows = torch.func.vmap(lambda row: model(row))(x)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        assert torch.equal(rows, model(x))
    assert same(expected, list(found.values()))
    assert each["first.weight"].shape == (3, 16, 8)


class Product(torch.autograd.Function):
    """A product of the user's own, as the documentation of torch.amp writes it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.seen = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        assert ctx.seen == (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        return gradient @ b.t(), a.t() @ gradient


class WideProduct(torch.autograd.Function):
    """The same in fp32 whatever comes in."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        assert (a.dtype, torch.is_autocast_enabled("cpu")) == (torch.float32, False)
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        assert (gradient.dtype, torch.is_autocast_enabled("cpu")) == (torch.float32, False)
        return gradient @ b.t(), a.t() @ gradient


@pytest.mark.parametrize(("function", "dtype"), [(Product, torch.float16), (WideProduct, torch.float32)])
@pytest.mark.parametrize("inside", [False, True])
def test_custom_functions_run_as_under_torch_amp(function: Any, dtype: torch.dtype, inside: bool) -> None:
    a, b = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with autocast("fp16"):
        y = function.apply(a, b.half())
        assert y.dtype is dtype
        if inside:
            y.sum().backward()
    if not inside:
        y.sum().backward()
    assert a.grad is not None and b.grad is not None
    assert (a.grad.dtype, b.grad.dtype) == (torch.float32, torch.float32)


# -- cast weights -------------------------------------------------------------------------------------------------


class CountCasts(TorchDispatchMode):
    """Counts how often a weight is converted."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.count = weight, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self.weight
        return func(*args, **(kwargs or {}))


def test_gradient_accumulation_casts_a_weight_once() -> None:
    layer, region, x = nn.Linear(4, 4), autocast("fp16"), torch.randn(2, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with CountCasts(layer.weight) as casts:
        for step in (1, 2):
            for _ in range(3):
                with region:
                    loss = layer(x).float().sum() + layer(x).float().sum()
                loss.backward()
            assert casts.count == step
            assert layer.weight.grad is not None
            assert torch.equal(layer.weight.grad, (6 * x.half().float().sum(0).half().float()).expand(4, 4))
            optimizer.step()
            optimizer.zero_grad()


def test_a_use_without_gradients_does_not_lose_those_of_the_next() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    for first in (torch.no_grad, torch.inference_mode):
        with autocast("fp16"):
            with first():
                layer(x)
            layer(x).sum().backward()
        assert layer.weight.grad is not None
        layer.zero_grad()


def test_changed_weights_are_cast_anew_and_dead_ones_forgotten() -> None:
    layer, region, x = nn.Linear(2, 2, bias=False), autocast("bf16"), torch.ones(1, 2)
    with region:
        layer(x)
        with torch.no_grad():
            layer.weight.fill_(1)
        assert layer(x).tolist() == [[2, 2]]
        layer.weight.data = torch.full((2, 2), 2.0)
        assert layer(x).tolist() == [[4, 4]]
    layer.weight.data.fill_(3.0)  # not seen: the documented exception
    region.forget()
    with region:
        assert layer(x).tolist() == [[6, 6]]
    assert len(region._weights) == 1
    del layer
    assert len(region._weights) == 0


class DataSGD(torch.optim.Optimizer):
    """Writes through `.data`, which counts no version up, as many optimizers outside torch do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(getattr(torch.optim, name), lr=0.1, fused=True) for name in ("SGD", "Adam", "AdamW", "Adagrad")),
        partial(torch.optim.AdamW, lr=0.1, foreach=True),
        DataSGD,
    ],
    ids=["fused SGD", "fused Adam", "fused AdamW", "fused Adagrad", "foreach AdamW", "data"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kept_region_sees_every_optimizers_steps(make: Callable[..., torch.optim.Optimizer], compiled: bool) -> None:
    layer, region, x = nn.Linear(4, 4), autocast("bf16"), torch.randn(2, 4)
    other = nn.Linear(4, 4)
    optimizer = make(layer.parameters())
    if compiled:  # which once took the hooks off the optimizers that are there
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="eager")(x)
    with CountCasts(other.weight) as casts:
        for _ in range(3):
            optimizer.zero_grad()
            with region:
                loss = (layer(x) + other(x)).float().square().sum()
            loss.backward()
            optimizer.step()
            with region, torch.no_grad():
                seen = layer(x)
            with autocast("bf16"), torch.no_grad():
                assert torch.equal(seen, layer(x))
    assert casts.count == 1  # a weight that no optimizer steps stays as it was


# -- torch.compile ------------------------------------------------------------------------------------------------


# torch.compile itself makes an instance of a Function, about which torch complains
compiles = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@compiles
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_region_around_a_compiled_model(model: Net, precision: str) -> None:
    torch._dynamo.reset()
    plain, x = copy.deepcopy(model), torch.randn(3, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with autocast(precision):
        y, z = compiled(x), plain(x)
    assert y.dtype is z.dtype
    assert torch.equal(y, z)
    for a, b in zip(gradients(model, y), gradients(plain, z), strict=True):
        # a compiled backward may sum in another order, which can move a value of 8 bits by one place
        assert (a - b).abs().max() <= 2**-6 * b.abs().max()
    assert compiled(x).dtype is torch.float32  # and outside it is itself again
    assert torch.equal(compiled(x), plain(x))


@compiles
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_new_region_every_step_does_not_compile_again(model: Net, precision: str) -> None:
    torch._dynamo.reset()
    compilations = CompileCounterWithBackend("eager")
    compiled, x = torch.compile(model, backend=compilations), torch.randn(3, 8)
    for _ in range(3):
        with autocast(precision) as region:
            compiled(x)
        assert "linear" in region.report().ops
    assert compilations.frame_count == 1


@compiles
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_region_inside_a_compiled_function(model: Net, precision: str) -> None:
    torch._dynamo.reset()
    region, x = autocast(precision), torch.randn(3, 8)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        with region:
            y = model(x)
        return y, model(x)

    inside, after = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    expected = run(x)
    assert torch.equal(inside, expected[0])
    assert torch.equal(after, expected[1])
    assert after.dtype is torch.float32


@compiles
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_module_paths_around_a_compiled_model(model: Net) -> None:
    torch._dynamo.reset()
    policy = PRESETS["fp16"].policy.before(Rule.of("linear", where="last", input="bf16", weight="bf16", output="bf16"))
    seen: list[tuple[str, torch.dtype]] = []
    around = autocast(policy)
    around.observe(lambda one: seen.extend((one.path, y.dtype) for role, y in one.tensors() if role == "output"))
    with around:
        torch.compile(model, backend="aot_eager")(torch.randn(3, 8))
    assert set(seen) <= {
        ("first", torch.float16),
        ("norm", torch.float16),
        ("", torch.float16),
        ("last", torch.bfloat16),
    }
    region = autocast(policy)

    def run(x: Tensor) -> Tensor:
        with region:
            return model.last(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(run, backend="aot_eager", fullgraph=True)(torch.randn(3, 16))


@compiles
def test_a_checkpoint_within_a_compiled_function_runs_in_the_region_or_raises(model: Net) -> None:
    torch._dynamo.reset()

    def run(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(model, x, use_reentrant=False)
        return result

    x = torch.randn(3, 8)
    with autocast("fp16"):
        expected = model(x)
        assert torch.equal(torch.compile(run, backend="aot_eager")(x), expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(run, backend="aot_eager", fullgraph=True)(x)


def test_torch_spelling_inside_a_compiled_function(model: Net) -> None:
    torch._dynamo.reset()

    def run(x: Tensor) -> Tensor:
        with autocast("cpu", dtype=torch.bfloat16):
            return model.first(x)

    assert torch.compile(run, backend="aot_eager")(torch.randn(3, 8)).dtype is torch.bfloat16


# -- threads ------------------------------------------------------------------------------------------------------


def test_the_workers_of_data_parallel_run_in_the_region(model: Net) -> None:
    with autocast("fp16"):
        worker = sys.modules["torch.nn.parallel.parallel_apply"].threading.Thread
        found: list[torch.dtype] = []
        thread = worker(target=lambda x: found.append(model(x).dtype), args=(torch.randn(3, 8),))
    thread.start()
    thread.join()
    assert found == [torch.float16]


def test_nothing_is_bound_where_there_is_no_region() -> None:
    def function() -> None:
        return None

    assert bound(function) is function
    with autocast("fp32"):
        assert bound(function) is function
    with autocast("fp16"):
        assert bound(function) is not function
        with torch.autocast("cpu", enabled=False):
            assert bound(function) is function


def test_the_paths_below_wrappers_are_those_of_the_model(model: Net) -> None:
    policy = PRESETS["fp16"].policy.before(Rule.of("linear", where="last", input="bf16", weight="bf16", output="bf16"))
    seen: list[str] = []
    region = autocast(policy)
    region.observe(lambda one: seen.append(one.path))
    with region:
        nn.DataParallel(model)(torch.randn(2, 8))
        model.first(torch.randn(2, 8))
    assert seen == ["first", "norm", "", "last", "", ""]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_regions_without_gradients(model: Net, mode: Callable[[], Any]) -> None:
    x = torch.randn(3, 8)
    with autocast("fp16"):
        expected = model(x).detach()
        with mode():
            assert torch.equal(model(x), expected)


def test_a_default_device_and_other_modes_keep_working(model: Net) -> None:
    with torch.device("meta"), autocast("fp16"):
        assert torch.ones(2).device.type == "meta"
        assert nn.Linear(2, 2)(torch.ones(2, 2)).dtype is torch.float16
