"""A watch by hand: which tensors of a step it counts, and what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp import presets
from lowp.casts import parse
from lowp.kernels.steps.spectra import slope_of
from lowp.numerics import watching
from lowp.numerics.models import Models
from lowp.numerics.modes import Seam
from lowp.numerics.part import Key
from lowp.numerics.spectrum import Spectrum, Updates
from lowp.numerics.tape import Tape, beside
from lowp.numerics.watching import StepWatch
from lowp.ops.observing import Observation

SCALE = 4.0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))


def key(text: str) -> Key:
    return Key(*(("" if part == "-" else part) for part in text.split()))


LAST = ["3 linear input forward", "3 linear output forward", "3 weight weight step", "3 bias weight step"]
LAST += ["3 linear grad backward", "3 weight weight_grad backward", "3 bias weight_grad backward"]
LAST += ["3 weight update step", "3 bias update step"]


def test_a_watch_counts_the_tensors_of_its_modules_alone() -> None:
    model, seam, x = network(), Seam(), torch.randn(5, 3)
    watch = StepWatch(7, seam, Models(model), lambda: SCALE, ["3"])
    assert (watch.is_whole, watch.is_complete, watch.beside) == (False, True, False)
    assert [watch.looks_at(one) for one in ("", "0", "3")] == [False, False, True]
    assert StepWatch(7, seam, Models(model), lambda: SCALE).looks_at("0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.follow()
    hidden = model[:3](x).detach()
    output = model(x)
    outputs = output.detach().clone()
    watch.begin_backward()
    (output.square().sum() * SCALE).backward()
    assert watch.exponents().tolist() == Spectrum.of(2 * outputs).octaves.tolist()
    before = [one.detach().clone() for one in model.parameters()]
    watch.before_step(model.named_parameters())
    optimizer.step()
    watch.after_step(model.named_parameters())
    watch.pause()
    model(x)
    part = watch.finish()
    assert set(part.tensors) == {key(one) for one in LAST}
    layer: Any = model[3]
    expected: dict[str, Any] = {
        **{"3 linear input forward": hidden, "3 linear output forward": outputs, "3 linear grad backward": 2 * outputs},
        **{"3 weight weight step": before[4], "3 bias weight step": before[5]},
        **{"3 weight update step": layer.weight.detach() - before[4]},
        **{"3 weight weight_grad backward": layer.weight.grad / SCALE},
    }
    for name, tensor in expected.items():
        assert part.tensors[key(name)].document() == Spectrum.of(tensor).document(), name
    (seen,) = part.ops.values()
    assert set(part.ops) == {("3", "linear")} and seen.line.startswith("test_watching.py:")
    assert (seen.op_class, seen.calls, seen.multiplications) == ("contraction", 1, 5 * 2 * 4)
    assert seen.parameters == {"weight": "3.weight", "bias": "3.bias"}
    assert seen.dtypes == {"input": "float32", "output": "float32"}
    update = Updates.of(before[4], layer.weight.detach() - before[4], layer.weight.grad)
    assert set(part.updates) == {"3.weight", "3.bias"}
    assert part.updates["3.weight"].document() == update.document()
    assert set(part.slopes) == {key("3 linear output forward"), key("3 linear input forward")}
    assert np.allclose(part.slopes[key(LAST[1])], slope_of(outputs.flatten(), 2 * SCALE * outputs.flatten(), SCALE))
    assert list(part.prints) == list(part.octaves) == [7]
    assert sorted(str(one.key) for one in part.prints[7]) == sorted(
        str(key(one)) for one in LAST if "update" not in one
    )
    assert set(part.octaves[7]) == {key(one) for one in LAST if "input" not in one}
    assert watch.exponents().sum() == 0


def test_what_a_checkpoint_computes_again_gives_gradients_to_the_modules_that_are_looked_at() -> None:
    for modules, seen in ((None, {"0", "1", "2", "3"}), (["1", "2"], {"1", "2"}), (["3"], {"3"})):
        model, seam = network(), Seam()
        watch = StepWatch(0, seam, Models(model), lambda: 1.0, modules)
        watch.follow()
        loss = checkpoint(model, torch.randn(5, 3), use_reentrant=False).sum()
        watch.begin_backward()
        loss.backward()
        assert seam.let(watch._saw_call, False) is False, "what follows in the backward pass is not seen"
        part = watch.finish()
        assert {module for module, _ in part.ops} - {""} == seen
        assert all(one.calls == 1 for one in part.ops.values())
        assert {one.module for one in part.tensors if one.role == "grad"} - {""} == seen


@pytest.mark.parametrize("factor", [None, 3.0])
def test_a_step_that_runs_again_is_looked_at_with_the_gradient_of_its_loss(factor: float | None) -> None:
    model, seam, x = network(), Seam(), torch.randn(5, 3)
    models, tape = Models(model), Tape(seam)
    watch = StepWatch(2, seam, models, lambda: 1.0, None, True)
    assert (watch.is_whole, watch.is_complete, watch.beside) == (True, False, True)
    watch.follow()
    tape.begin(model, (x,), {})
    output = model(x)
    tape.open(model, output)
    tape.end(loss := output.square().sum())
    loss.backward()
    assert not watch.part.ops, "the step's own ops are left alone"
    seconds = watch.seconds
    with beside(tape, models):
        watch.look_again(tape, None if factor is None else torch.tensor(factor))
    assert watch.is_complete and watch.seconds == seconds
    found = watch.part
    watch.finish()
    gradient = 2 * output.detach() * (factor or 1.0)
    assert found.tensors[key("3 linear grad backward")].document() == Spectrum.of(gradient).document()
    tape.loss = None
    with beside(tape, models), pytest.raises(ValueError, match="was not computed from a call of the model"):
        watch.look_again(tape, None)
    assert seam.let(watch._saw_call, False) is False


def test_the_time_of_a_look_is_from_when_it_began_and_that_which_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StepWatch(0, Seam(), Models(network()), lambda: 1.0)
    monkeypatch.setattr("lowp.numerics.watching.time.perf_counter", lambda: 5.0)
    watch._spent(2.0, 0.5)
    watch._spent(4.0, 0.25)
    assert watch.seconds == 4.75


def told(role: str, tensor: Tensor, phase: str = "forward", op: str = "linear", cast: str | None = None) -> Observation:
    op_class = "contraction" if op == "linear" else "elementwise"
    return Observation("0", op, op_class, role, phase, tensor, None if cast is None else parse(cast))


def test_what_a_region_tells_of_is_counted_by_its_role() -> None:
    model = network()
    watch = StepWatch(1, Seam(), Models(model), lambda: SCALE)
    x, y, gradient = torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 4)
    watch.observed(told("grad", gradient * 8, "backward"))  # a trial of a loss scale
    first: Any = model[0]
    watch.observed(told("weight", first.weight.detach()))
    for _ in range(2):
        watch.observed(told("input", x, cast="e4m3fn"))
        watch.observed(told("output", y))
    watch.observed(told("output", y, op="gelu", cast="bf16"))
    watch.observed(told("input", y, op="gelu"))
    watch.begin_backward()
    watch.observed(told("grad", gradient, "backward"))
    watch.observed(told("grad", 2 * gradient, "backward"))
    watch.observed(told("input gradient", x, "backward"))
    watch.observed(told("grad", gradient[0, 0], "backward", "gelu"))
    watch.observed(told("grad", gradient, "backward", "gelu"))
    watch.begin_backward()
    both = Spectrum.of(gradient / SCALE) + Spectrum.of(2 * gradient / SCALE)
    assert watch.exponents().tolist() == (both + Spectrum.of(gradient / SCALE)).octaves.tolist()
    part = watch.finish()
    assert {str(one): seen.tensors for one, seen in part.tensors.items()} == {
        **{"0 linear input": 2, "0 linear output": 2, "0 linear grad": 2, "0 gelu output": 1, "0 gelu grad": 1},
    }
    assert part.tensors[key("0 linear grad backward")].document() == both.document()
    linear, gelu = part.ops["0", "linear"], part.ops["0", "gelu"]
    assert (linear.calls, gelu.calls, linear.operands) == (2, 1, "input weight")
    assert linear.parameters == {"weight": "0.weight"}
    assert linear.dtypes == {"input": "e4m3fn", "output": "float32"} and gelu.dtypes == {"output": "bf16"}
    # the first gradient is of the last call; one input has none, so that which one had is not certain
    assert set(part.slopes) == {key("0 linear output forward")}
    slope = sum(slope_of(y.flatten(), one.flatten(), SCALE) for one in (gradient, 2 * gradient))
    assert np.allclose(part.slopes[key("0 linear output forward")], slope)
    assert not watch._told and not watch._answered and not watch._unanswered


@pytest.mark.parametrize(
    ("op", "given", "output", "products"),
    [
        ("matmul", [(5, 7), (7, 3)], (5, 3), 5 * 7 * 3),
        ("linear", [(2, 5, 7), (3, 7)], (2, 5, 3), 2 * 5 * 3 * 7),
        ("dot", [(7,), (7,)], (), 7),
        ("matmul", [(5, 7)], (5, 3), 0),
        ("mul", [(), (7,)], (7,), 0),
        ("conv1d", [(2, 4, 9), (6, 2, 3)], (2, 6, 7), 2 * 6 * 7 * 2 * 3),
        ("conv_transpose1d", [(2, 4, 9), (4, 6, 3)], (2, 6, 11), 2 * 6 * 11 * 4 * 3),
        ("conv1d", [(2, 4, 9), (1, 4, 3)], (2, 1, 7), 2 * 1 * 7 * 4 * 3),
        ("conv_transpose1d", [(2, 4, 9), (4, 1, 3)], (2, 1, 11), 2 * 1 * 11 * 4 * 3),
    ],
)
def test_the_products_of_a_contraction_are_counted(op: str, given: Any, output: Any, products: int) -> None:
    found = watching._multiplications(op, [torch.zeros(one) for one in given], torch.zeros(output))
    assert found == products


def test_the_optimizer_s_step_is_looked_at_where_there_is_one() -> None:
    model, given = nn.ParameterDict(), torch.tensor([3.0, 4.0])
    for name in ("used", "late", "frozen"):
        model[name] = nn.Parameter(torch.tensor([1.0, 2.0]))
    model["complex"] = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model["short"] = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    model["frozen"].requires_grad_(False)
    watch = StepWatch(3, Seam(), Models(model), lambda: SCALE)
    watch.follow()
    sum((model[name] * given).abs().sum() for name in ("used", "complex", "short")).backward()
    model["late"].grad = given / 2  # which no backward pass left, and without the loss scale then
    watch.before_step(model.named_parameters())
    with torch.no_grad():
        for one in model.parameters():
            one.sub_(0.5)
    watch.before_step(model.named_parameters())  # of a second optimizer: the weight of before stays
    watch.after_step(model.named_parameters())
    watch.after_step(model.named_parameters())
    part = watch.finish()
    found = {(one.op, one.role): seen for one, seen in part.tensors.items() if one.module == "" and one.op in model}
    assert {name for name, _ in found} == {"used", "late", "frozen", "short"}
    roles = {name: sorted(role for own, role in found if own == name) for name in ("used", "late", "frozen", "short")}
    assert roles == {
        **{name: ["update", "weight", "weight_grad"] for name in ("used", "late", "short")},
        "frozen": ["weight"],
    }
    for name, gradient in (("used", given / SCALE), ("late", given / 2), ("short", given / SCALE)):
        assert found[name, "weight"].document() == Spectrum.of(torch.tensor([1.0, 2.0])).document()
        assert found[name, "weight_grad"].document() == Spectrum.of(gradient).document()
        assert found[name, "update"].document() == Spectrum.of(torch.full((2,), -0.5)).document()
        assert part.updates[name].gradient_energy.sum() > 0
    assert set(part.updates) == {"used", "late", "short"}


def test_names_of_a_model_that_came_later_are_those_of_all_that_was_seen() -> None:
    model, other = network(), nn.Linear(2, 2)
    models = Models(model)
    watch = StepWatch(4, Seam(), models, lambda: 1.0)
    watch.follow()
    waits = model(torch.randn(5, 3)).sum()
    model(torch.randn(5, 3)).sum().backward()
    watch.rename(models.add(other))
    watch.follow()
    waits.backward()
    watch.before_step([("Sequential.0.weight", next(model.parameters()))])
    watch.pause()
    part = watch.finish()
    names = {"Sequential", "Sequential.0", "Sequential.1", "Sequential.2", "Sequential.3"}
    assert {one.module for one in part.tensors} <= names and {one for one, _ in part.ops} <= names
    assert part.tensors[Key("Sequential.3", "linear", "grad", "backward")].tensors == 2
    assert {one.module for one in part.slopes} == {"Sequential.0", "Sequential.1", "Sequential.3"}
    assert {one.key.module for one in part.prints[4]} <= names


def test_the_ops_that_a_watch_sees_are_counted_by_what_they_read() -> None:
    model = nn.Linear(3, 3)
    models = Models(model)
    watch = StepWatch(5, Seam(), models, lambda: 1.0)
    x = torch.randn(4, 3, requires_grad=True)
    functional, shown = nn.functional, torch.randn(3, 3, requires_grad=True)

    def saw(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = func(*args, **kwargs)
        watch._saw_call(func, args, kwargs, found)
        return found

    twice = x * 2
    product = saw(functional.linear, twice, shown * 1, model.bias)
    gelu = saw(functional.gelu, product)
    saw(torch.eq, product, gelu)  # no number comes of it
    saw(functional.gelu, torch.empty(2, device="meta"))
    meta = torch.empty(2, device="meta", requires_grad=True) * 1
    saw(functional.softmax, meta, dim=-1).sum().backward()
    saw(functional.softmax, product[:0], dim=-1)
    saw(torch.reshape, product, (-1,))
    total = saw(torch.sum, gelu)
    loss = total + saw(functional.softmax, product, dim=-1)[0, 0]
    torch.autograd.backward(loss)
    with torch.no_grad():
        saw(functional.linear, twice, shown)
    part = watch.finish()
    assert {f"{one.op} {one.role}": seen.tensors for one, seen in part.tensors.items()} == {
        **{"linear input": 2, "linear weight": 2, "linear output": 2, "linear grad": 1},
        **{"gelu output": 1, "gelu grad": 1, "sum input": 1, "sum output": 1, "sum grad": 1},
        **{"softmax input": 2, "softmax output": 2, "softmax grad": 1},
    }
    slopes = ["linear input", "linear output", "linear weight", "softmax input", "softmax output"]
    assert sorted(f"{one.op} {one.role}" for one in part.slopes) == slopes
    fp32 = "float32"
    assert {op: (one.calls, one.parameters, one.dtypes) for (_, op), one in part.ops.items()} == {
        "linear": (2, {"bias": "bias"}, {"input": fp32, "weight": fp32, "output": fp32}),
        "gelu": (2, {}, {"output": fp32}),
        "sum": (1, {}, {"input": fp32, "output": fp32}),
        "softmax": (3, {}, {"input": fp32, "output": fp32}),
    }
    assert part.ops["", "linear"].multiplications == 2 * 4 * 3 * 3


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(torch.cos(x)))


@pytest.mark.parametrize(("modules", "ops"), [([""], {"cos", "sin"}), (["inner"], {"linear"})])
def test_a_module_is_looked_at_again_when_those_within_it_have_ended(modules: list[str], ops: set[str]) -> None:
    model = Outer()
    watch = StepWatch(0, Seam(), Models(model), lambda: 1.0, modules)
    watch.follow()
    for _ in range(2):
        model(torch.randn(2, 3))
    part = watch.finish()
    assert {op for _, op in part.ops} == ops and {one.calls for one in part.ops.values()} == {2}
    assert {module for module, _ in part.ops} == set(modules)


def test_calls_within_a_region_are_left_to_the_region() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    watch = StepWatch(0, Seam(), Models(model), lambda: 1.0)
    watch.follow()
    with lowp.autocast(presets.PRESETS["bf16"].policy):
        model(x)
    assert not watch.part.ops
    model(x)
    assert watch.finish().ops["", "linear"].calls == 1


def test_calls_are_left_to_a_region_that_a_profile_began_in_too() -> None:
    model, x, seam = nn.Linear(3, 3), torch.randn(2, 3), Seam()
    watch = StepWatch(0, seam, Models(model), lambda: 1.0)
    with lowp.autocast(presets.PRESETS["bf16"].policy):
        seam.begin()
        watch.follow()
        torch.nn.functional.linear(x, model.weight)
        assert not watch.part.ops
        with lowp.autocast(enabled=False):
            torch.nn.functional.linear(x, model.weight)
        assert watch.part.ops["", "linear"].calls == 1
        watch.pause()
