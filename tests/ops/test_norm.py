"""Norms and softmax under a rule: they read and save 16 bits, compute in fp32, and round once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ops.cases import DTYPES, sixteen_bit, under
from torch import Tensor

import lowp
from lowp import kernels
from lowp.policy import Rule


class Norm(NamedTuple):
    """A function of x and `parameters` vectors of this size."""

    function: Callable[..., Any]
    shape: tuple[int, ...]
    size: int
    parameters: int
    args: Callable[..., tuple[Any, ...]]


NORMS: dict[str, Norm] = {
    "layer_norm": Norm(F.layer_norm, (6, 5, 32), 32, 2, lambda x, w, b: (x, (32,), w, b)),
    "layer_norm alone": Norm(torch.layer_norm, (6, 32), 32, 0, lambda x: (x, (32,))),
    "rms_norm": Norm(F.rms_norm, (6, 5, 32), 32, 1, lambda x, w: (x, (32,), w)),
    "group_norm": Norm(F.group_norm, (3, 8, 5, 4), 8, 2, lambda x, w, b: (x, 4, w, b)),
    "batch_norm": Norm(F.batch_norm, (6, 8, 5, 4), 8, 2, lambda x, w, b: (x, None, None, w, b, True)),
    "batch_norm of torch": Norm(
        torch.batch_norm, (6, 8), 8, 2, lambda x, w, b: (x, w, b, None, None, True, 0.1, 1e-5, True)
    ),
    "batch_norm in evaluation": Norm(
        F.batch_norm, (6, 8, 5), 8, 2, lambda x, w, b: (x, torch.arange(8.0), torch.arange(8.0) + 1, w, b, False)
    ),
    "instance_norm": Norm(F.instance_norm, (3, 8, 5, 4), 8, 2, lambda x, w, b: (x, None, None, w, b)),
    "softmax": Norm(F.softmax, (6, 32), 0, 0, lambda x: (x, -1)),
    "softmax along the first": Norm(torch.softmax, (6, 32), 0, 0, lambda x: (x, 0)),
    "Tensor.softmax": Norm(Tensor.softmax, (6, 32), 0, 0, lambda x: (x, 1)),
    "log_softmax": Norm(F.log_softmax, (6, 32), 0, 0, lambda x: (x, -1)),
    "softmin": Norm(F.softmin, (6, 32), 0, 0, lambda x: (x, -1)),
}


def tensors(norm: Norm) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(norm.shape, generator=generator) * 3
    return x, [torch.randn(norm.size, generator=generator) for _ in range(norm.parameters)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_result_and_gradients_are_those_of_fp32_rounded_once(name: str, format: str) -> None:
    norm, dtype = NORMS[name], DTYPES[format]
    x, parameters = tensors(norm)
    mine = [one.clone().requires_grad_() for one in (x, *parameters)]
    result = under(sixteen_bit(format, weight=None), norm.function, *norm.args(*mine))
    plain = [one.clone().requires_grad_() for one in (x.to(dtype).float(), *parameters)]
    wanted = norm.function(*norm.args(*plain))
    assert result.dtype is dtype and torch.equal(result, wanted.to(dtype))
    gradient = torch.randn_like(result)
    found = torch.autograd.grad(result, mine, gradient)
    exact = torch.autograd.grad(wanted, plain, gradient.float())
    assert torch.equal(found[0], exact[0].to(dtype).float())
    for one, other in zip(found[1:], exact[1:], strict=True):
        assert one.dtype is torch.float32 and torch.equal(one, other)


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "batch_norm", "batch_norm in evaluation"])
def test_torchs_own_norms_of_16_bits_differ_from_fp32_ones_by_the_order_of_sums(name: str, format: str) -> None:
    norm, dtype = NORMS[name], DTYPES[format]
    x, parameters = tensors(norm)
    ulp = torch.finfo(dtype).eps
    found = []
    for way in ("own", "emulated"):
        with nullcontext() if way == "own" else kernels.use("bitwise"):
            mine = [one.clone().requires_grad_() for one in (x, *parameters)]
            result = under(sixteen_bit(format, weight=None), norm.function, *norm.args(*mine))
            assert result.dtype is dtype
            gradients = torch.autograd.grad(result, mine, torch.linspace(-1, 1, x.numel()).view(x.shape).to(dtype))
        found.append([result.float(), *gradients])
    for one, other in zip(*found, strict=True):
        assert ((one - other).abs() <= ulp * other.abs() + 1e-5 * other.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_in_another_format_than_the_output_is_rounded_where_torchs_kernel_would_do_the_rest(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, *gradient = (torch.randn(6, 8, generator=generator).to(dtype) for _ in range(2))
    rule, found = sixteen_bit("bf16", weight=None, grad="e5m2"), []
    for way in ("own", "emulated"):
        with nullcontext() if way == "own" else kernels.use("bitwise"):
            leaves = x.clone().requires_grad_(), torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
            result = under(rule, F.batch_norm, leaves[0], None, None, *leaves[1:], True)
            found.append(torch.autograd.grad(result, leaves, [one.bfloat16() for one in gradient]))
    assert all(map(torch.equal, *found))
    assert torch.equal(found[0][2], kernels.quantize(gradient[0].bfloat16().float(), "e5m2").sum(0))


def test_a_rule_may_cast_the_scale_of_a_norm() -> None:
    x, weight = torch.randn(6, 32), torch.randn(32)
    result = under(Rule.of(weight="e4m3fn"), F.layer_norm, x, (32,), weight)
    assert torch.equal(result, F.layer_norm(x, (32,), kernels.quantize(weight, "e4m3fn")))


@pytest.mark.parametrize("name", NORMS)
def test_the_input_is_kept_in_16_bits(name: str) -> None:
    norm = NORMS[name]
    x, parameters = tensors(norm)
    x.requires_grad_()
    sizes: list[int] = []

    def pack(one: Tensor) -> Tensor:
        if one.numel() == x.numel():
            sizes.append(one.element_size())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        result = under(sixteen_bit("bf16"), norm.function, *norm.args(x, *parameters))
    assert result.requires_grad and sizes == [2]


@pytest.mark.parametrize("name", NORMS)
def test_double_backward_is_that_of_float64(name: str) -> None:
    norm = NORMS[name]
    x, parameters = tensors(norm)
    rule = Rule.of(input="bf16", output="fp32", grad="fp32")

    def second(function: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(function(leaf).sin().sum(), leaf, create_graph=True)
        (found,) = torch.autograd.grad(first.sin().sum(), leaf)
        return found

    leaf = x.bfloat16().float().requires_grad_()
    found = second(lambda one: under(rule, norm.function, *norm.args(one, *parameters)), leaf)
    wide = leaf.detach().double().requires_grad_()
    args = [one.double() for one in parameters]
    exact = second(lambda one: norm.function(*doubled(norm.args(one, *args))), wide)
    assert (found.double() - exact).abs().max() <= 2.0**-6 * max(1.0, float(exact.abs().max()))


def doubled(args: tuple[Any, ...]) -> list[Any]:
    return [one.double() if isinstance(one, Tensor) else one for one in args]


@pytest.mark.usefixtures("emulated")
def test_running_statistics_are_updated_once_in_fp32() -> None:
    x = torch.randn(16, 4, 3, 3) * 100
    mine, plain = (torch.zeros(4), torch.ones(4)), (torch.zeros(4), torch.ones(4))
    leaf = x.clone().requires_grad_()
    result = under(sixteen_bit("bf16"), F.batch_norm, leaf, *mine, None, None, True)
    result.float().sum().backward()
    F.batch_norm(x.bfloat16().float(), *plain, None, None, True)
    assert torch.equal(mine[0], plain[0]) and torch.equal(mine[1], plain[1])
    stored = (torch.zeros(4).half(), torch.ones(4).half())
    under(sixteen_bit("fp16"), F.batch_norm, x, *stored, None, None, True)
    torch.testing.assert_close(stored[0].float(), plain[0], rtol=1e-2, atol=1e-2)


def test_instance_norm_averages_its_running_statistics_over_the_batch() -> None:
    x = torch.randn(16, 4, 3, 3)
    mine, plain = (torch.zeros(4), torch.ones(4)), (torch.zeros(4), torch.ones(4))
    result = under(sixteen_bit("bf16"), F.instance_norm, x, *mine)
    wanted = F.instance_norm(x.bfloat16().float(), *plain)
    assert torch.equal(result, wanted.bfloat16())
    torch.testing.assert_close(mine, plain)


def test_a_dtype_asked_for_is_what_softmax_writes() -> None:
    x = torch.randn(4, 8)
    for dtype in (torch.float32, torch.float64, torch.float16):
        result = under(sixteen_bit("bf16"), F.softmax, x, -1, dtype=dtype)
        assert result.dtype is dtype
        assert torch.equal(result, F.softmax(x.bfloat16().float(), -1).to(dtype)) or dtype is torch.float64


def test_an_emulated_norm_is_rounded_on_the_way_in_and_out() -> None:
    x = torch.randn(6, 32)
    result = under(Rule.of(input="e5m7", output="e5m2"), F.layer_norm, x, (32,))
    assert result.dtype is torch.float32
    assert torch.equal(result, kernels.quantize(F.layer_norm(kernels.quantize(x, "e5m7"), (32,)), "e5m2"))


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "batch_norm", "softmax", "rms_norm"])
def test_torch_func_gives_the_same_gradient(name: str) -> None:
    norm = NORMS[name]
    x, parameters = tensors(norm)

    def loss(one: Tensor) -> Tensor:
        result: Tensor = under(sixteen_bit("bf16"), norm.function, *norm.args(one, *parameters)).float().sin().sum()
        return result

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), wanted, rtol=2e-2, atol=2e-2)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "layer_norm": (F.layer_norm, (torch.randn(2, 3), (4,))),
    "group_norm": (F.group_norm, (torch.randn(2, 3), 2)),
    "batch_norm": (F.batch_norm, (torch.randn(1, 3), None, None, None, None, True)),
    "weight of another size": (F.batch_norm, (torch.randn(4, 3), None, None, torch.ones(2), None, True)),
    "softmax": (torch.softmax, (torch.randn(2, 3), 2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(name: str) -> None:
    function, args = REFUSED[name]
    with pytest.raises((RuntimeError, ValueError, IndexError)) as plain:
        function(*args)
    with pytest.raises(type(plain.value)) as found:
        under(sixteen_bit("bf16"), function, *args)
    assert str(found.value) == str(plain.value)


@pytest.mark.parametrize("precision", ["flex16+5", "dfp16", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "batch_norm"])
def test_parameters_with_gaps_and_their_gradients_are_those_of_dense_ones(name: str, precision: str) -> None:
    case = NORMS[name]
    x, parameters = tensors(case)

    def found(lie: Callable[[Tensor], Tensor]) -> list[Tensor]:
        given = [one.requires_grad_() for one in (x.clone(), *map(lie, parameters))]
        with lowp.autocast(precision):
            result = case.function(*case.args(*given)).float()
        return [result, *torch.autograd.grad(result.square().sum(), given)]

    apart = found(lambda one: torch.stack((one, -one), 1)[:, 0])
    # torch's batch norm takes another kernel for them, with another order of roundings
    torch.testing.assert_close(apart, found(Tensor.clone), rtol=1e-2, atol=1e-2)
