"""Ops under the exponents of sites: each result is written once, from the exact value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.casts import parse
from lowp.exponents import is_result
from lowp.kernels.int16.mantissas import NOT_FINITE, own_exponent, to_mantissas, values
from lowp.policy import Policy, Rule
from lowp.presets import PRESETS

FLEX = parse("flex16+5")


def is_flex(x: Tensor) -> bool:
    """Whether every value is a mantissa of 16 bits under one exponent."""
    exponent = own_exponent(x, FLEX)
    assert exponent != NOT_FINITE
    return torch.equal(values(to_mantissas(x, FLEX, exponent).payload, exponent), x.detach())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flexed(*shape: int, seed: int = 0) -> Tensor:
    """Return a leaf whose values are in the format."""
    x = lowp.quantize(drawn(*shape, seed=seed), "flex16+5")
    assert isinstance(x, Tensor)
    return x.requires_grad_()


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(5, 7), (3, 7), (3,)]),
    "matmul": (torch.matmul, [(4, 5, 7), (7, 3)]),
    "addmm": (lambda x, y, b: torch.addmm(b, x, y), [(5, 7), (7, 3), (3,)]),
    "einsum": (lambda x, y: torch.einsum("bik,bkj->bij", x, y), [(2, 5, 7), (2, 7, 3)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 3, 6, 6), (4, 3, 3, 3), (4,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 4, 4), (3, 4, 3, 3), (4,)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_exact_sums_rounded_once(name: str) -> None:
    function, shapes = PRODUCTS[name]
    operands = [flexed(*shape, seed=index) for index, shape in enumerate(shapes)]
    exact = [one.detach().double().requires_grad_() for one in operands]
    region = lowp.autocast("flex16+5")
    with region:
        result = function(*operands)
    direction = lowp.quantize(drawn(*result.shape, seed=9), "flex16+5")
    result.backward(direction)
    wide = function(*exact)
    wide.backward(direction.double())  # type: ignore[union-attr]
    pairs = [(result, wide), *((one.grad, other.grad) for one, other in zip(operands, exact, strict=True))]
    for got, ideal in pairs:
        assert got is not None and ideal is not None and is_flex(got)
        exponent = own_exponent(got, FLEX)
        assert exponent != NOT_FINITE
        found = [2.0**shifted for shifted in (exponent - 1, exponent, exponent + 1)]
        # fp64 sums of these products are exact: the result is the nearest of the format's values to them
        assert any(torch.equal(torch.round(ideal / unit) * unit, got.double()) for unit in found)


def test_what_selects_elements_writes_nothing() -> None:
    region = lowp.autocast("flex16+5")
    x = flexed(2, 3, 8, 8)
    with region:
        y = F.max_pool2d(torch.relu(x), 2).flatten(1)
    y.sum().backward()
    assert region.exponents is not None and region.exponents.sites() == [] and is_flex(y)


def test_a_function_that_is_fused_is_written_once_and_its_gradients_as_they_leave() -> None:
    region = lowp.autocast("flex16+5")
    x, y = flexed(6, 4), flexed(6, 4, seed=1)
    with region:
        z = F.gelu(x * y)
    z.backward(torch.ones_like(z))
    assert region.exponents is not None
    assert set(region.exponents.sites()) == {
        "output of mul",
        "output of gelu",
        "input gradient of gelu",
        "input gradient of mul",
        "input gradient 2 of mul",
    }
    assert x.grad is not None and y.grad is not None and is_flex(z) and is_flex(x.grad) and is_flex(y.grad)


def test_gradients_of_several_uses_are_written_as_a_sum() -> None:
    region = lowp.autocast("flex16+5")
    x = flexed(6, 4)
    with region:
        h = x * 1.7
        z = torch.tanh(h) + torch.sin(h) * 0.3
    z.backward(torch.ones_like(z))
    assert region.exponents is not None and "output gradient of mul" in region.exponents.sites()


def test_places_are_named_by_module_op_and_occurrence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    region = lowp.autocast("flex16+5")
    assert region.exponents is not None
    for _ in range(2):  # a step that runs again has the same sites
        with region:
            model(drawn(3, 4))
            model(drawn(3, 4))
        region.exponents.flush()
    assert region.exponents.sites() == [
        "output of 0 linear",
        "output of 1.0 linear",
        "output of 0 linear #2",
        "output of 1.0 linear #2",
    ]


def test_two_models_of_a_step_keep_apart() -> None:
    generator, critic = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 1))
    region = lowp.autocast("flex16+5")
    with region:
        critic(generator(drawn(3, 4)))
    assert region.exponents is not None
    assert region.exponents.sites() == [
        "output of 0 linear",
        "output of model 2: 0 linear, differentiable input",
    ]


def test_in_place_and_out_forms_write_what_they_compute() -> None:
    region = lowp.autocast("flex16+5")
    x = torch.full((4,), 1.0)
    with region:
        x.mul_(0.3)
        out = torch.empty(4)
        torch.exp(x, out=out)
    assert is_flex(x) and is_flex(out)
    assert region.exponents is not None and region.exponents.sites() == ["output of mul", "output of exp"]


@pytest.mark.parametrize(
    "write",
    [
        lambda x, count: count.mul_(2.5),
        lambda x, count: count.__itruediv__(2),
        lambda x, count: count.add_(x),
        lambda x, count: (count > 1).add_(count),
        lambda x, count: x.mul_(torch.full((3,), 1j)),
        lambda x, count: torch.add(x, 1.5, out=count),
        lambda x, count: torch.mul(x, torch.full((3,), 1j), out=x),
    ],
)
def test_results_that_a_type_cannot_hold_are_refused_as_by_torch(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, count = torch.full((3,), 0.5), torch.arange(3)
    with pytest.raises(RuntimeError, match=r"result type .* can't be cast to the desired output type"):
        write(x, count)
    with lowp.autocast("flex16+5"):
        with pytest.raises(RuntimeError, match=r"result type .* can't be cast to the desired output type"):
            write(x, count)
        assert torch.equal(count.add_(2), torch.arange(3) + 2)
    assert torch.equal(x, torch.full((3,), 0.5))


def test_attention_and_recurrent_networks_are_written_once() -> None:
    region = lowp.autocast("flex16+5")
    q = flexed(1, 2, 5, 4)
    lstm = nn.LSTM(4, 3)
    with region:
        a = F.scaled_dot_product_attention(q, q, q)
        h, _ = lstm(flexed(5, 1, 4))
    (a.sum() + h.sum()).backward()
    assert is_flex(a) and is_flex(h)
    assert q.grad is not None and q.grad.isfinite().all() and lstm.weight_ih_l0.grad is not None


def test_an_infinity_reaches_the_result() -> None:
    region = lowp.autocast("flex16+5")
    x = drawn(3, 4)
    x[1, 2] = torch.inf
    with region:
        y = F.linear(x, flexed(2, 4))
    assert not y[1].isfinite().any() and y[0].isfinite().all()
    assert region.exponents is not None and all(map(is_result, region.exponents.faults()))


def test_a_gradient_of_a_gradient_flows_through_writes() -> None:
    region = lowp.autocast("flex16+5")
    weight, x = flexed(1, 4), flexed(3, 4)
    with region:
        score = torch.tanh(F.linear(x, weight)).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    penalty.backward()
    assert weight.grad is not None
    plain = weight.detach().clone().requires_grad_()
    score = torch.tanh(F.linear(x, plain)).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    ((slope.norm(dim=1) - 1) ** 2).mean().backward()
    assert plain.grad is not None
    assert torch.allclose(weight.grad, plain.grad, rtol=2e-3, atol=1e-3)


def test_inside_torch_func_every_tensor_has_its_own_maximum() -> None:
    region = lowp.autocast("flex16+5")
    weight = flexed(3, 4).detach()
    with region:
        found = torch.func.vmap(lambda x: F.linear(x, weight))(drawn(5, 4))
    assert torch.allclose(found, F.linear(drawn(5, 4), weight), atol=1e-3)
    assert region.exponents is not None and region.exponents.sites() == []


def test_a_policy_may_write_some_ops_alone_in_any_accumulator() -> None:
    rule = Rule.of("linear", where="1", input="flex16+5", weight="flex16+5", output="flex16+5:autoflex(headroom=2)")
    region = lowp.autocast(Policy((rule,), name="one layer"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with region:
        y = model(drawn(3, 4))
    y.sum().backward()
    assert region.exponents is not None and is_flex(y)
    assert {site.partition(" of ")[2] for site in region.exponents.sites()} == {"1 linear"}


def test_other_precisions_have_no_such_exponents() -> None:
    assert [name for name in PRESETS if lowp.autocast(name).exponents is not None] == ["flex16+5"]


@pytest.mark.parametrize("function", [F.embedding, lambda i, w, *a, **k: F.embedding_bag(i, w, *a, mode="sum", **k)])
@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
def test_rows_are_cut_to_their_largest_norm_as_torch_does(function: Callable[..., Tensor], by_name: bool) -> None:
    rows, weight = torch.tensor([[1, 3], [3, 0]]), flexed(6, 4)
    wide = weight.detach().clone().requires_grad_()
    bound = {"max_norm": 0.5} if by_name else {}
    place = () if by_name else (None, 0.5)
    expected = function(rows, wide, *place, **bound)
    with lowp.autocast("flex16+5"):
        found = function(rows, weight, *place, **bound)
    assert torch.equal(weight, wide) and is_flex(found)
    assert torch.allclose(found, expected, atol=2.0**-14)


def test_a_layer_of_a_single_vector_has_the_gradients_of_a_batch_of_one() -> None:
    found = []
    for shape in ((6,), (1, 6)):
        torch.manual_seed(0)
        layer, precision = nn.Linear(6, 5), lowp.Precision("flex16+5")
        layer, optimizer = precision.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        x = torch.randn(6).view(shape).requires_grad_()  # a leaf of values that the format does not hold
        for _ in range(3):
            with precision.autocast():
                loss = layer(x).square().sum()
            precision.backward(loss)
            precision.step(optimizer)
        found.append([layer.weight.grad, layer.bias.grad, layer.bias.detach()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
