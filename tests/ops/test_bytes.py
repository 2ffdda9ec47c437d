"""Linear layers in products of bytes, without a gradient and in training: exact sums in every implementation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.inference import training_policy
from lowp.kernels import cpu
from lowp.ops.direct import LEAST_ROWS
from lowp.policy import Policy, Rule

POLICY = training_policy("int8")


def layer_and_input() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(70, 33), torch.randn(2, LEAST_ROWS // 2, 70)


def exact(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the sum of integers, rounded once, times the scale of the column and then that of the row, plus bias."""
    rows, weight = (kernels.encode(one.detach(), "int8") for one in (x.reshape(-1, x.shape[-1]), layer.weight))
    sums = (rows.payload.double() @ weight.payload.double().t()).float()
    return ((sums * weight.scale) * rows.scale[:, None] + layer.bias.detach()).reshape(*x.shape[:-1], -1)


def test_without_a_gradient_the_sum_is_exact_and_near_the_emulated_one() -> None:
    layer, x = layer_and_input()
    with lowp.autocast(POLICY):
        emulated = layer(x)
        with torch.no_grad():
            found, again = layer(x), layer(x)
    assert emulated.requires_grad
    assert torch.equal(found, exact(layer, x))
    assert torch.equal(again, found)
    torch.testing.assert_close(found, emulated.detach(), rtol=1e-5, atol=1e-6)
    with kernels.use("reference"), torch.no_grad(), lowp.autocast(POLICY):
        torch.testing.assert_close(layer(x), found, rtol=1e-5, atol=1e-6)


def test_a_result_is_rounded_as_the_rule_says() -> None:
    layer, x = layer_and_input()
    rule = Rule(("contraction",), input="int8", weight="int8", output="bf16")  # type: ignore[arg-type]
    with torch.no_grad(), lowp.autocast(Policy((rule,))):
        assert torch.equal(layer(x), exact(layer, x).bfloat16())


def test_a_weight_that_is_written_within_a_region_is_packed_anew() -> None:
    layer, x = layer_and_input()
    with torch.no_grad(), lowp.autocast(POLICY):
        layer(x)
        layer.weight.mul_(0.3)
        assert torch.equal(layer(x), exact(layer, x))


def test_few_rows_and_infinite_numbers_go_the_long_way() -> None:
    layer, x = layer_and_input()
    with lowp.autocast(POLICY):
        few = layer(x[0]).detach()
        with torch.no_grad():
            assert torch.equal(layer(x[0]), few)
            x[0, 0, 0] = torch.inf
            assert bool(layer(x)[0, 0].isinf().all())
            assert bool(layer(x)[0, 1:].isfinite().all())


# -- training -----------------------------------------------------------------------------------------------------


def coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 codes of rows in fp64, and their scales."""
    found = kernels.encode(x.detach(), "int8")
    return found.payload.double(), found.scale.reshape(-1, 1)


def trained(rule: Rule, layer: nn.Linear, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the result and the gradients of x, weight and bias."""
    x = x.detach().requires_grad_()
    with lowp.autocast(Policy((rule,))):
        y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), gradient)]


NEAREST = Rule.of("linear", input="int8", weight="int8", grad="int8", accumulate="int32")
STOCHASTIC = Rule.of("linear", input="int8", weight="int8", grad="int8:stochastic", accumulate="int32")


def levels() -> list[str]:
    return [] if cpu.library() is None else list(cpu.available())


@pytest.mark.parametrize("level", ["best", *levels()])
@pytest.mark.parametrize("shape", [(5, 7, 3), (33, 70, 40), (300, 65, 130)], ids=str)
def test_all_three_products_sum_integers_and_scales_are_multiplied_afterwards(
    level: str, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    torch.manual_seed(0)
    layer, x, gradient = nn.Linear(k, n), torch.randn(m, k), torch.randn(m, n) * 1e-3
    (rows, of_rows), (weight, of_weight) = coded(x), coded(layer.weight)
    y = ((rows @ weight.t()).float() * of_weight.t()) * of_rows + layer.bias.detach()
    incoming, scales = coded(gradient * of_weight.t())
    of_x = (incoming @ weight).float() * scales
    turned, scales = coded((gradient * of_rows).t().contiguous())
    expected = [y, of_x, (turned @ rows).float() * scales]
    asked = cpu.asked() if levels() else ""
    try:
        if level != "best":
            cpu.select(level)
        found = trained(NEAREST, layer, x, gradient)
    finally:
        if levels():
            cpu.select(asked or None)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=False))
    torch.testing.assert_close(found[3], gradient.sum(0))


def test_gradients_are_drawn_from_torchs_generator() -> None:
    torch.manual_seed(0)
    layer, x, gradient = nn.Linear(40, 24), torch.randn(16, 40), torch.randn(16, 24)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(trained(STOCHASTIC, layer, x, gradient))
    assert all(torch.equal(one, other) for one, other in zip(*found[:2], strict=True))
    assert torch.equal(found[0][0], found[2][0]) and not torch.equal(found[0][1], found[2][1])
    mean = torch.stack([trained(STOCHASTIC, layer, x, gradient)[2] for _ in range(400)]).mean(0)
    rows, scales = coded(x)
    torch.testing.assert_close(mean, gradient.t() @ (rows * scales).float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", ["input", "gradient"])
def test_what_is_not_finite_reaches_the_gradients(place: str, bad: float) -> None:
    torch.manual_seed(0)
    layer, x, gradient = nn.Linear(8, 4), torch.randn(6, 8), torch.randn(6, 4)
    (x if place == "input" else gradient)[2, 1] = bad
    y, of_x, of_weight, _ = trained(STOCHASTIC, layer, x, gradient)
    assert y.isfinite().all() == (place != "input")
    assert not of_weight.isfinite().all() and (place == "input" or not of_x.isfinite().all())


def test_gradients_of_gradients_are_those_of_the_values() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4), torch.randn(6, 8).requires_grad_()
    with lowp.autocast("int8"):
        y = layer(x)
    (of_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (of_weight,) = torch.autograd.grad(of_x.square().sum(), layer.weight)
    reference = nn.Linear(8, 4)
    reference.load_state_dict(layer.state_dict())
    (plain,) = torch.autograd.grad(reference(x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(plain.square().sum(), reference.weight)
    torch.testing.assert_close(of_weight, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


def test_what_backward_reads_takes_a_byte_a_number() -> None:
    layer, x, saved = nn.Linear(256, 128), torch.randn(64, 256, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        with lowp.autocast("int8"):
            layer(x)
    assert {one.dtype for one in saved if one.dim() == 2} == {torch.int8}
    assert sum(one.numel() * one.element_size() for one in saved) == x.numel() + layer.weight.numel() + 4 * (64 + 128)


def seen(region: lowp.autocast) -> lowp.autocast:
    region.observe(lambda observation: None)
    return region


WAYS = {
    "observed": lambda run: run(seen(lowp.autocast("int8"))),
    "differentiated once more": lambda run: run(lowp.autocast("int8"), create_graph=True),
    "by torch alone": lambda run: by_bitwise(run),
}


def by_bitwise(run: Callable[..., list[Tensor]]) -> list[Tensor]:
    with kernels.use("bitwise"):
        return run(lowp.autocast("int8"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 2100, 40)], ids=str)
def test_the_definition_sums_integers_too(way: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    torch.manual_seed(0)
    layer, x, gradient = nn.Linear(k, n), torch.randn(m, k), torch.randn(m, n)

    def run(region: lowp.autocast, create_graph: bool = False) -> list[Tensor]:
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        with region:
            y = layer(given)
        return [y, *torch.autograd.grad(y, (given, layer.weight), gradient, create_graph=create_graph)]

    fast = run(lowp.autocast("int8"))
    slow = WAYS[way](run)
    assert type(slow[0].grad_fn).__name__ != type(fast[0].grad_fn).__name__ or way == "differentiated once more"
    assert all(torch.equal(one, other) for one, other in zip(fast, slow, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_transform_sums_integers_too() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 24), torch.randn(6, 40)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    with lowp.autocast(Policy((NEAREST,))):
        y = torch.nn.functional.linear(x, weight, bias)
        each = torch.vmap(lambda row: torch.nn.functional.linear(row, weight, bias))(x)
        loss = lambda x, weight: torch.nn.functional.linear(x, weight, bias).square().sum()  # noqa: E731
        found = torch.func.grad(loss, (0, 1))(x, weight)
        _, along = torch.func.jvp(lambda x: torch.nn.functional.linear(x, weight, bias), (x,), (torch.ones_like(x),))
    assert torch.equal(each, y)
    expected = trained(NEAREST, layer, x, 2 * y)
    assert torch.equal(found[0], expected[1]) and torch.equal(found[1], expected[2])
    (_, _), (codes, scales) = coded(x), coded(weight)
    torch.testing.assert_close(along, (codes * scales).float().sum(1).expand(6, 24), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_gradients_of_every_sample_are_those_of_one() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(4, 8), torch.randn(3, 2, 8)
    loss = lambda weight, x: torch.nn.functional.linear(x, weight).square().sum()  # noqa: E731
    with lowp.autocast(Policy((NEAREST,))):
        each = torch.vmap(torch.func.grad(loss), (None, 0))(weight, x)
        assert torch.equal(each, torch.stack([torch.func.grad(loss)(weight, one) for one in x]))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["bitwise", *(["cpu"] if "cpu" in kernels.available() else [])])
def test_the_gradient_of_a_bias_is_the_sum_of_the_gradients_as_they_arrive(name: str, create_graph: bool) -> None:
    x, weight, bias = (torch.randn(shape).requires_grad_() for shape in ((7, 40), (5, 40), (5,)))
    with kernels.use(name), lowp.autocast("int8"):
        y = torch.nn.functional.linear(x, weight, bias)
        arriving = torch.randn(7, 5)
        for wanted in ([bias], [bias, x], [bias, weight, x]):
            found, *_ = torch.autograd.grad(y, wanted, arriving, retain_graph=True, create_graph=create_graph)
            torch.testing.assert_close(found, arriving.sum(0), rtol=0, atol=1e-6)
