"""Derivatives through a region: double backward, torch.func, custom Functions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from region.small_model import PRECISIONS, Net, gradients, same
from torch import Tensor, nn
from torch.autograd import forward_ad

from lowp.errors import Misuse
from lowp.policy import Policy, Rule
from lowp.region import autocast


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_penalty_runs(model: Net, precision: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with autocast(precision):
        (gradient,) = torch.autograd.grad(model(x).float().pow(2).sum(), x, create_graph=True)
        gradient.float().pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p is not model.last.bias)


@pytest.mark.parametrize("precision", ["bf16", "e4m3fn", "mxfp8", "dfp16", "flex16+5"])
def test_gradients_that_can_be_differentiated_again_are_the_same_numbers(precision: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 32, 3), nn.Flatten(2), nn.LayerNorm(36), nn.Linear(36, 64, bias=False))
    given, target = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 32, 16)

    def found(create_graph: bool) -> list[Tensor]:
        x = given.clone().requires_grad_()
        with autocast(precision):  # each with exponents of its own
            y = model(x).unflatten(-1, (4, 16)).transpose(1, 2)
            y = nn.functional.scaled_dot_product_attention(y, y @ torch.eye(16), y)
            leaves = [x, *model.parameters()]
            return list(torch.autograd.grad((y.float() * target).mean(), leaves, create_graph=create_graph))

    plain, graph = found(False), found(True)
    assert all(one.requires_grad for one in graph)
    assert same(plain, [one.detach() for one in graph])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "e4m3fn", "mxfp8", "int8", "dfp16", "flex16+5"])
def test_gradients_of_a_batch_are_those_of_each(precision: str) -> None:
    layers = nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Linear(8, 16), nn.LayerNorm(16)
    model, x = nn.Sequential(*layers), torch.randn(2, 4, 18, requires_grad=True)
    with autocast(precision):
        y = model(x)[None]
        y = (nn.functional.scaled_dot_product_attention(y, y, y) @ torch.ones(16, 4)).float()
        incoming = torch.randn(3, *y.shape)
        inputs = [x, *model.parameters()]
        for _ in range(2):  # exponents begin in the first
            each = [torch.autograd.grad(y, inputs, one, retain_graph=True) for one in incoming]
        found = torch.autograd.grad(y, inputs, incoming, is_grads_batched=True)
        rows = torch.autograd.functional.jacobian(lambda x: model(x).float().sum(0), x, vectorize=True)
    assert rows.shape == (8, 16, *x.shape) and rows.isfinite().all()
    wanted = [torch.stack(one) for one in zip(*each, strict=True)]
    if precision in ("int8", "flex16+5"):  # which draws at random, or goes on with its exponents
        largest = max(float(one.abs().max()) for one in wanted)
        assert all((one - other).abs().max() <= 0.02 * largest for one, other in zip(wanted, found, strict=True))
    else:
        assert same(wanted, list(found))


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


@pytest.mark.parametrize("precision", ["int8", "nvfp4", "e4m3fn:stochastic"])
def test_stochastic_casts_draw_for_each_example_of_vmap_as_its_randomness_says(precision: str) -> None:
    linear, x = nn.Sequential(nn.Linear(64, 16)), torch.randn(64).expand(4, 64)

    def gradient(row: Tensor) -> Tensor:
        return torch.func.grad(lambda one: linear(one).sin().sum())(row)

    rule = Rule(("linear",), input="e4m3fn", weight="e4m3fn", grad=precision)
    with autocast(Policy((rule,)) if ":" in precision else precision):
        same = torch.func.vmap(gradient, randomness="same")(x)
        different = torch.func.vmap(gradient, randomness="different")(x)
        with pytest.raises(Misuse, match=r"a cast rounds stochastically .* give it randomness='different', or 'same'"):
            torch.func.vmap(gradient)(x)
    assert torch.equal(same, same[:1].expand(4, 64))
    assert not torch.equal(different, different[:1].expand(4, 64))


class Product(torch.autograd.Function):
    """A user's own product, as in the documentation of torch.amp."""

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
    """The same in fp32 for any input."""

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


@pytest.mark.parametrize("precision", ["fp16", "e5m7", "e4m3fn", "int8", "flex16+5"])
def test_what_outlives_a_transform_is_an_operand_as_what_it_wraps(precision: str) -> None:
    left: list[Tensor] = []

    def kept(x: Tensor) -> Tensor:
        left.append(x * 1.0)
        return (x * x).sum()

    x = torch.randn(8, 8)
    torch.func.grad(lambda x: torch.func.grad(kept)(x).sum())(x)
    torch.func.grad(kept)(x)
    weight = torch.randn(8, 8, requires_grad=True)
    with autocast(precision):
        for wrapper in left:
            for product in (nn.functional.linear, torch.matmul):
                assert torch.equal(product(wrapper, weight), product(x, weight))
                assert torch.equal(product(weight, wrapper), product(weight, x))
                with torch.no_grad():
                    assert torch.equal(product(wrapper, weight), product(x, weight))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("precision", ["fp16", "bf16-tpu", "e5m7", "e4m3fn", "fp8", "dfp16", "flex16+5"])
def test_forward_mode_derivatives_are_those_of_backward(model: Net, precision: str) -> None:
    parameters, x, direction = dict(model.named_parameters()), torch.randn(3, 8), torch.randn(3, 8)

    def loss(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).float().pow(2).sum()

    with autocast(precision):
        gradient = torch.func.grad(loss)(x)
        _, along = torch.func.jvp(loss, (x,), (direction,))
        with forward_ad.dual_level():
            eager = forward_ad.unpack_dual(loss(forward_ad.make_dual(x, direction))).tangent
        forward = torch.func.jacfwd(loss)(x)
        second = torch.func.hessian(loss)(x[0])
    tolerance = {"fp8": 0.5, "e4m3fn": 0.3}.get(precision, 0.05) * gradient.abs().max().item()
    assert torch.allclose(forward, gradient, atol=tolerance)
    assert torch.allclose(along, (gradient * direction).sum(), atol=8 * tolerance)
    assert torch.allclose(eager, along, rtol=1e-3, atol=1e-4)
    assert second.shape == (8, 8) and bool(second.isfinite().all())
    assert torch.allclose(second, second.t(), atol=0.3 * second.abs().max().item())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("precision", ["fp16", "bf16-tpu", "e5m7", "flex16+5"])
@pytest.mark.parametrize("twice", ["hessian", "jacrev of jacrev", "jacfwd of jacfwd"])
def test_second_derivatives_of_a_matrix_are_those_of_fp32(precision: str, twice: str) -> None:
    weight, x = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]]), torch.tensor([1.0, -2.0, 0.5])

    def loss(weight: Tensor) -> Tensor:
        return (weight @ x).float().pow(2).sum()

    def rounded(weight: Tensor) -> Tensor:
        with autocast(precision):
            return loss(weight)

    second = {
        "hessian": torch.func.hessian,
        "jacrev of jacrev": lambda function: torch.func.jacrev(torch.func.jacrev(function)),
        "jacfwd of jacfwd": lambda function: torch.func.jacfwd(torch.func.jacfwd(function)),
    }[twice]
    torch.testing.assert_close(second(rounded)(weight), second(loss)(weight), rtol=0.02, atol=0.02)
