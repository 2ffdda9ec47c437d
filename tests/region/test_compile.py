"""Regions and torch.compile."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from region.small_model import Net, gradients
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch_versions import compiles_regions

from lowp.ops import shields, trilinear
from lowp.policy import Policy, Rule
from lowp.precision import Precision
from lowp.presets import PRESETS
from lowp.region import autocast, context

pytestmark = compiles_regions

# one dtype of torch's own and one that is emulated, each in one of two places; compiling takes seconds
AROUND = [pytest.param("fp16", marks=pytest.mark.slow), "e4m3fn"]
INSIDE = ["fp16", pytest.param("e4m3fn", marks=pytest.mark.slow)]

# torch.compile itself makes an instance of a Function, about which torch complains
compiles = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@compiles
@pytest.mark.parametrize("precision", AROUND)
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
def test_compiled_attention_is_one_graph() -> None:
    torch._dynamo.reset()
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 4, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with autocast("bf16"):  # torch's own products where the processor multiplies bf16, else rounded ones
        y, z = (net(x, x, x, need_weights=False)[0] for net in (compiled, layer))
    assert y.dtype is z.dtype is torch.bfloat16
    assert torch.equal(y, z)


@compiles
def test_compiled_products_on_the_cpu_of_a_machine_with_an_accelerator_are_not_left_to_torch_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(shields, "accelerator", lambda: "cuda")
    monkeypatch.setattr(context, "_present", lambda: ("cpu", "cuda"))
    layer, x = nn.Linear(64, 64, bias=False), torch.randn(3, 64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with autocast("fp16"):
        assert torch.equal(compiled(x), layer(x))


@compiles
@pytest.mark.parametrize("precision", ["fp16"])
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
@pytest.mark.parametrize("precision", INSIDE)
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
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_module_paths_around_a_compiled_model(model: Net) -> None:
    torch._dynamo.reset()
    policy = PRESETS["fp16"].policy.before(Rule.of("linear", where="last", input="bf16", weight="bf16", output="bf16"))
    seen: list[tuple[str, str]] = []
    around = autocast(policy)
    around.observe(lambda one: seen.append((one.path, str(one.cast))) if one.role == "output" else None)
    with around:
        torch.compile(model, backend="aot_eager")(torch.randn(3, 8))
    assert set(seen) <= {
        ("first", "fp16"),
        ("norm", "fp16"),
        ("", "fp16"),
        ("", "None"),
        ("last", "bf16"),
    }
    region = autocast(policy)

    def run(x: Tensor) -> Tensor:
        with region:
            return model.last(x)

    for fullgraph in (True, False):  # a mere break of the graph would run the model in fp32
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="enter it around the call"):
            torch.compile(run, backend="aot_eager", fullgraph=fullgraph)(torch.randn(3, 16))


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


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) + 1
        return y.mul_(2).relu_()


@compiles
@pytest.mark.parametrize(
    "precision", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("bf16", "dfp16")), "flex16+5"]
)
def test_compiled_modules_that_write_in_place_give_what_they_give_else_and_nothing_is_said(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(trilinear, "FEW", (0, 0))  # compiled code knows no small layers
    model, x = InPlace(), torch.randn(4, 8)
    with autocast(precision):
        alone = model(x)
    with autocast(precision):
        y = torch.compile(model, backend="aot_eager")(x)
    assert y.dtype is alone.dtype
    assert (y - alone).abs().max() <= 2**-13 * alone.abs().max()  # chains of ops are written once where they can be
    alone.float().sum().backward()
    weight = model.layers[0].weight
    expected, weight.grad = weight.grad, None
    y.float().sum().backward()
    assert expected is not None and weight.grad is not None
    assert (weight.grad - expected).abs().max() <= 2**-6 * expected.abs().max()


def test_gradients_are_rounded_through_what_is_written_in_place() -> None:
    rounds = Rule.of("pointwise", output="e5m7", grad="e5m7")
    x = torch.ones(2, requires_grad=True)
    with autocast(Policy((rounds,))):
        y = x + 1
        y.mul_(3)
    y.backward(torch.tensor([1.001, 2.0]))
    assert torch.equal(x.grad, torch.tensor([3.0, 6.0]))  # type: ignore[arg-type]


def test_torch_spelling_inside_a_compiled_function(model: Net) -> None:
    torch._dynamo.reset()

    def run(x: Tensor) -> Tensor:
        with autocast("cpu", dtype=torch.bfloat16):
            return model.first(x)

    assert torch.compile(run, backend="aot_eager")(torch.randn(3, 8)).dtype is torch.bfloat16


@compiles
@pytest.mark.parametrize("precision", ["fp8-delayed", "flex16+5", "nvfp4"])
def test_a_region_that_follows_modules_compiles_a_model_once_however_often_it_is_entered(precision: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    counter = CompileCounterWithBackend("aot_eager")
    compiled, plan = torch.compile(model, backend=counter), Precision(precision)
    compiled, optimizer = plan.prepare(compiled, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(3):
        with plan.autocast():
            loss = compiled(torch.randn(4, 32)).float().pow(2).mean()
        plan.backward(loss)
        plan.step(optimizer)
    assert counter.frame_count == 1


@compiles
@pytest.mark.parametrize("precision", ["bf16", "fp8", "flex16+5"])
def test_beside_a_graph_break_the_code_of_a_region_is_not_compiled(precision: str) -> None:
    torch._dynamo.reset()

    class Break(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x

    model, x = nn.Sequential(Break(), nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager")
    with autocast(precision):
        found = compiled(x)
    with autocast(precision):
        assert torch.equal(model(x), found)
    seen = [Path(code().co_filename) for code in torch._dynamo.convert_frame.input_codes.seen]
    assert Path(__file__) in seen  # of Break
    assert not [one for one in seen if one.is_relative_to(Path(context.__file__).parents[1])]


@compiles
def test_both_operands_of_a_compiled_product_are_rotated_by_the_same_signs() -> None:
    torch._dynamo.reset()
    linear, x, gradient = nn.Linear(64, 48), torch.randn(32, 64), torch.randn(32, 48)
    casts = {"input": "fp16", "weight": "fp16", "grad": "fp16", "weight_gradient": "input=fp16 hadamard=16"}
    with autocast(Policy((Rule.of("linear", **casts),))):
        torch.compile(linear, backend="aot_eager")(x).backward(gradient)
    assert linear.weight.grad is not None
    torch.testing.assert_close(linear.weight.grad, gradient.t() @ x, rtol=0.0, atol=0.05)


@compiles
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, where Dynamo has given up on a function
def test_a_region_inside_a_function_that_the_compiler_gives_up_on_rounds_and_is_left() -> None:
    torch._dynamo.reset()
    layer, x, region = nn.Linear(8, 8), torch.randn(3, 8), autocast("e5m7")

    def run(x: Tensor) -> Tensor:
        with region:
            for _ in range(2):
                x = layer(x)
                torch._dynamo.graph_break()
        return x

    assert torch.equal(torch.compile(run, backend="eager")(x), run(x))
    assert not torch.is_autocast_enabled("cpu")
