"""Every format compiled as people compile: a model, a function with its region, a whole step, an exported program."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_versions import compiles_regions

import lowp
from lowp.formats import FORMATS
from lowp.presets import PRESETS

pytestmark = [
    compiles_regions,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch's own, of a Function
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # of its compiler, when first used
]

# fp64 beside the fp32 parameters of a norm is torch's error, without torch.compile too
NAMES = [*PRESETS, *(name for name in FORMATS if name not in PRESETS and name != "fp64"), "e5m7"]
# what is not the same to the bit with backend="aot_eager": a bound of the difference of gradients, relative to all
APART = {
    **dict.fromkeys(
        ["fp16", "fp16-storage", "fp16-naive", "bf16", "bf16-storage", "bf16-trunc", "mxfp8-rceil"], 1e-2
    ),  # sums in another order
    "dfp16": 1e-6,
    "flex16+5": 1e-3,  # compiled, each tensor has the exponent of its own maximum
    "int8": 5e-2,  # gradients are rounded stochastically, by other draws
    **dict.fromkeys(["nvfp4", "mxfp4", "quartet2"], 0.2),  # so, too: as far apart as two runs of other seeds
}
SUMS = 1e-5  # inductor sums in an order of its own
WAYS = ["around", "inside", "step around", "step inside"]
SAMPLE = [("mxfp8", "around"), ("dfp16", "around"), ("int8", "inside"), ("e4m3fn", "step around")]


class Net(nn.Module):
    """A convolution, a norm, attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv1d(4, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8)
        self.after = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Of inputs [N, 4, T]."""
        y = F.relu(self.norm(self.before(x))).transpose(1, 2)[:, None]
        return self.after(y + F.scaled_dot_product_attention(y, y, y)).mean((1, 2))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def traces_backward() -> Any:
    """Return a context in which torch.compile follows `backward`."""
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("torch.compile of this torch does not follow backward")
    return torch._dynamo.config.patch(trace_autograd_ops=True)


def taken(model: nn.Module, name: str, way: str, compiled: Callable[[Any], Any] = lambda f: f) -> tuple[float, Tensor]:
    """Return the loss and all gradients of one step in a region, of which some part is compiled."""
    region, x = lowp.autocast(name), torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))

    def loss_of(x: Tensor) -> Tensor:
        return model(x).float().square().mean()  # type: ignore[no-any-return]

    def within(x: Tensor) -> Tensor:
        with region:
            return loss_of(x)

    def step(x: Tensor) -> Tensor:
        loss = within(x) if way.endswith("inside") else loss_of(x)
        loss.backward(torch.full_like(loss, 0.5))
        return loss.detach()

    if way == "inside":
        loss = compiled(within)(x)
        loss.backward()
    elif way == "step inside":
        loss = compiled(step)(x)
    else:
        call = compiled(loss_of if way == "around" else step)
        with region:
            loss = call(x)
        if way == "around":
            loss.backward()
    found = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    return loss.item(), torch.cat(found)


def check(name: str, way: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Net()
    expected, wanted = taken(copy.deepcopy(model), name, way)
    options: dict[str, Any] = {"fullgraph": True, "backend": backend}
    if way.startswith("step"):
        with traces_backward():
            loss, found = taken(model, name, way, lambda f: torch.compile(f, **options))
    else:
        loss, found = taken(model, name, way, lambda f: torch.compile(f, **options))
    bound = APART.get(name, 0.0) + (SUMS if backend == "inductor" else 0.0)
    assert torch.equal(found.isnan(), wanted.isnan())  # formats of few powers of two leave nothing else of this network
    found, wanted = found.nan_to_num(), wanted.nan_to_num()
    apart = float((found - wanted).norm())
    assert apart <= bound * float(wanted.norm()), (name, way, apart)
    assert loss == expected or abs(loss - expected) <= max(bound, 1e-7) * expected or loss != loss, (name, way, loss)


@pytest.mark.parametrize(("name", "way"), SAMPLE)
def test_a_format_compiles_as_one_graph_to_what_it_is_else(name: str, way: str) -> None:
    check(name, way, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_compiles_as_one_graph_to_what_it_is_else(name: str, way: str) -> None:
    is_refused = way.endswith("inside") and lowp.autocast(name).policy.uses_paths
    with pytest.raises(Exception, match="inside a compiled function") if is_refused else nullcontext():
        check(name, way, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16", "e4m3fn", "mxfp8", "flex16+5"])
def test_torch_s_own_compiler_compiles_a_whole_step(name: str) -> None:
    check(name, "step inside", "inductor")


def test_compiled_autograd_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    twin, x = copy.deepcopy(model), torch.randn(3, 8)
    region, other = lowp.autocast("mxfp8"), lowp.autocast("mxfp8")

    def step(x: Tensor) -> None:
        with region:
            loss = model(x).square().mean()
        loss.backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(x)
    with other:
        loss = twin(x).square().mean()
    loss.backward()
    assert model.weight.grad is not None and twin.weight.grad is not None
    assert torch.equal(model.weight.grad, twin.weight.grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler asks each tensor for
@pytest.mark.parametrize("name", ["fp16", "mxfp8", "flex16+5", "bf16-storage", "int8"])
def test_a_whole_step_with_loss_scale_and_optimizer_compiles_in_parts(name: str) -> None:
    curves: list[list[float]] = []
    x, target = torch.randn(8, 16), torch.arange(8) % 3
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
        precision = lowp.Precision(name)
        model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

        def step(x: Tensor, model: Any = model, precision: Any = precision, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            with precision.autocast():
                loss = F.cross_entropy(model(x), target)
            precision.backward(loss)
            precision.step(optimizer)
            return loss

        call: Callable[..., Tensor] = torch.compile(step, backend="aot_eager") if is_compiled else step
        curves.append([call(x).item() for _ in range(4)])
        assert precision.steps == 4 and precision.skipped_steps == 0
    for plain, compiled in zip(*curves, strict=True):
        assert abs(plain - compiled) <= 1e-3 * plain, curves


@pytest.mark.parametrize("name", ["e4m3fn", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_an_exported_program_of_a_region_records_its_casts(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(3, 8)
    with lowp.autocast(name), torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,))
    assert any("lowp.quantize" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x), expected)
    assert not torch.equal(model(x), expected)
