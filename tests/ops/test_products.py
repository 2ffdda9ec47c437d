"""Properties of every product: saved tensors, higher derivatives, transforms, accumulators, emulated formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp32_defined import defined
from ops.cases import CONTRACTIONS, sixteen_bit, under
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_versions import compiles_regions

import lowp
from lowp import kernels
from lowp.errors import Unavailable
from lowp.kernels import cpu
from lowp.ops.call import Call
from lowp.ops.table import row_of
from lowp.policy import Rule

FP32 = Rule.of(input="fp32", weight="fp32", grad="fp32", output="fp32")
TWICE = [name for name in CONTRACTIONS if "without input" not in name]


def saved_bytes(run: Callable[[], Any], *but: Tensor) -> int:
    """Return the bytes that autograd saves for backward, each storage once, without those of the given tensors."""
    kept: dict[int, int] = {}
    ignored = {x.untyped_storage().data_ptr() for x in but}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in ignored:
            kept[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    del result
    return sum(kept.values())


@pytest.mark.parametrize("cast", ["fp16", "bf16", "bf16-tpu", "e4m3fn", "e5m2", "e5m7", "bf16-trunc"])
def test_operands_are_saved_in_16_bits(cast: str) -> None:
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    assert saved_bytes(lambda: under(sixteen_bit(cast), F.linear, x, weight)) == 2 * (32 * 64 + 16 * 64)
    assert saved_bytes(lambda: under(sixteen_bit(cast, output=None), F.linear, x, weight)) == 2 * (32 * 64 + 16 * 64)


def test_an_operand_is_saved_only_for_a_gradient_that_is_needed() -> None:
    x, weight = torch.randn(32, 64), torch.randn(16, 64, requires_grad=True)
    assert saved_bytes(lambda: under(sixteen_bit("bf16"), F.linear, x, weight)) == 2 * 32 * 64
    x.requires_grad_()
    assert saved_bytes(lambda: under(sixteen_bit("bf16"), F.linear, x, weight.detach())) == 2 * 16 * 64


def test_attention_saves_16_bits_of_its_operands_and_twice_of_its_result() -> None:
    tensors = [torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    run = lambda: under(sixteen_bit("bf16"), F.scaled_dot_product_attention, *tensors)  # noqa: E731
    numbers, rows = 2 * 4 * 16 * 8, 2 * 4 * 16
    # the result, which the next operation saves as well, what its rounding took off, and an fp32 number a row
    assert saved_bytes(run) == 5 * 2 * numbers + 4 * rows
    with kernels.use("reference"):
        assert saved_bytes(run) == 3 * 2 * numbers


@pytest.mark.parametrize("name", TWICE)
def test_double_backward_gives_the_second_derivatives_of_float64(name: str) -> None:
    case = CONTRACTIONS[name]
    tensors = [x.requires_grad_() for x in case.tensors()]
    wide = [x.detach().double().requires_grad_() for x in tensors]

    def twice(result: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(result.sin().sum(), inputs, create_graph=True)
        total = torch.stack([one.sin().sum() for one in first]).sum()
        return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)

    if "attention" in name:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            wanted = twice(case.call(*wide), wide)
    else:
        wanted = twice(case.call(*wide), wide)
    for one, other in zip(twice(case.run(FP32, *tensors), tensors), wanted, strict=True):
        scale = max(float(other.abs().max()), 1.0)
        assert (one.double() - other).abs().max() <= 2e-4 * scale


RULES = [sixteen_bit("bf16"), Rule.of(input="e4m3fn", weight="e4m3fn", grad="e5m2"), Rule.of(input="bf16-tpu")]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", TWICE)
def test_double_backward_does_not_change_the_first_gradient(name: str, rule: Rule) -> None:
    case = CONTRACTIONS[name]
    tensors = [x.requires_grad_() for x in case.tensors()]
    result = case.run(rule, *tensors)
    gradient = torch.randn_like(result)
    lean = torch.autograd.grad(result, tensors, gradient, retain_graph=True)
    graph = torch.autograd.grad(result, tensors, gradient, create_graph=True)
    assert all(map(torch.equal, lean, graph))


# -- emulated formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["bf16-tpu", "e4m3fn", "e5m7", "e4m3fn@fp32/tensor", "bf16:toward-zero"])
def test_emulated_operands_are_rounded_by_role_and_gradients_stay_fp32(cast: str) -> None:
    x, weight = torch.randn(8, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    rule = Rule.of(input=cast, weight="e3m4", grad="e5m2")
    result = under(rule, F.linear, x, weight)
    xq, wq = kernels.quantize(x.detach(), cast), kernels.quantize(weight.detach(), "e3m4")
    assert result.dtype is torch.float32 and torch.equal(result, F.linear(xq, wq))
    gradient = torch.randn_like(result)
    gq = kernels.quantize(gradient, "e5m2")
    found = torch.autograd.grad(result, (x, weight), gradient)
    assert torch.equal(found[0], gq @ wq)
    assert torch.equal(found[1], gq.t() @ xq)


def test_gradients_that_stay_fp32_are_exact_in_double_backward_too() -> None:
    x, weight = torch.randn(8, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    rule = Rule.of(input="bf16-tpu", weight="bf16-tpu")
    result = under(rule, F.linear, x, weight)
    (first,) = torch.autograd.grad(result.pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    xq, wq = (kernels.quantize(one.detach(), "bf16-tpu").requires_grad_() for one in (x, weight))
    (first,) = torch.autograd.grad(F.linear(xq, wq).pow(2).sum(), xq, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), wq)
    torch.testing.assert_close(second, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("left", "right"), [((4, 64), (64, 8)), ((2, 4, 64), (64, 8)), ((64,), (64, 8))])
def test_blocks_of_a_shared_scale_run_along_the_contracted_dimension(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    a, b = torch.randn(left) * 100, torch.randn(right)
    b[32:] *= 1000
    result = under(Rule.of(input="mxfp8", weight="mxfp8"), torch.matmul, a, b)
    columns = kernels.quantize(b.t().contiguous(), "mxfp8").t().double()
    rows = kernels.quantize(a, "mxfp8").double()
    bound = 64 * 2**-24 * (rows.abs() @ columns.abs())  # 64 roundings of a sum in fp32, in any order
    assert bool(((result - rows @ columns).abs() <= bound).all())
    if cpu.library() is not None:
        rows = kernels.quantize(a, "mxfp8").reshape(-1, a.shape[-1])
        assert torch.equal(result.flatten(), defined(rows, columns.reshape(columns.shape[0], -1)).flatten())


def test_stochastic_operands_repeat_with_torch_s_seed() -> None:
    x, weight = torch.randn(8, 32), torch.randn(16, 32)
    rule = Rule.of(input="e4m3fn:stochastic", weight="e4m3fn")

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        result = under(rule, F.linear, x, weight)
        assert isinstance(result, Tensor)
        return result

    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))


# -- accumulators -------------------------------------------------------------------------------------------------


def test_an_fp16_accumulator_stops_at_2048() -> None:
    ones = torch.ones(1, 4096)
    rule = Rule.of(input="fp16", weight="fp16")
    assert under(rule, F.linear, ones, ones).item() == 4096
    assert under(Rule.of(input="fp16", weight="fp16", accumulate="fp16/1"), F.linear, ones, ones).item() == 2048
    assert under(Rule.of(input="fp16", weight="fp16", accumulate="fp16/16"), F.linear, ones, ones).item() == 4096
    assert under(Rule.of(input="bf16", weight="bf16", accumulate="bf16/1"), F.linear, ones, ones).item() == 256


@pytest.mark.parametrize("name", [name for name in CONTRACTIONS if "attention" not in name])
def test_an_accumulator_of_one_long_block_is_one_rounding_in_every_product(name: str) -> None:
    case = CONTRACTIONS[name]
    tensors = [x.requires_grad_() for x in case.tensors()]
    rule = Rule.of(accumulate="bf16/1000000")
    result, plain = case.run(rule, *tensors), case.call(*tensors)
    bias = None if case.bias is None else tensors[case.bias]
    if bias is None or case.kwargs.get("beta") == 0:
        assert_rounded(result, plain, case.kwargs.get("alpha", 1))
    gradient = torch.randn_like(plain)
    found = torch.autograd.grad(result, tensors, gradient, allow_unused=True)
    wanted = torch.autograd.grad(plain, tensors, gradient, allow_unused=True)
    for x, one, other in zip(tensors, found, wanted, strict=True):
        if x is bias or one is None or other is None:
            continue
        assert_rounded(one, other, case.kwargs.get("alpha", 1))


def assert_rounded(one: Tensor, exact: Tensor, alpha: float) -> None:
    torch.testing.assert_close(one, (exact / alpha).bfloat16().float() * alpha, rtol=2.0**-7, atol=1e-5)


def test_the_accumulator_walks_the_contracted_dimension_in_its_order() -> None:
    a, b = torch.randn(3, 20).half().float(), torch.randn(20, 2).half().float()
    running = torch.zeros(3, 2)
    for start in range(0, 20, 8):
        running = (running + a[:, start : start + 8] @ b[start : start + 8]).half().float()
    assert torch.equal(under(Rule.of(accumulate="fp16/8"), torch.mm, a, b), running)


def test_attention_with_a_narrow_accumulator_is_two_contractions() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    rule = Rule.of(input="fp16", accumulate="fp16/4", output="fp16")
    result = under(rule, F.scaled_dot_product_attention, q, k, v, is_causal=True)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert result.dtype is torch.float16
    assert 0 < (result.float() - plain).abs().max() < 0.01


def test_accumulators_of_integers_ask_for_integers() -> None:
    with pytest.raises(Unavailable, match="accumulate=int32 sums int16 mantissas, and input is fp32"):
        under(Rule.of(accumulate="int32"), F.linear, torch.randn(2, 3), torch.randn(4, 3))


# -- transforms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["linear bias", "conv2d", "attention"])
def test_checkpointing_gives_the_same_gradients(name: str, reentrant: bool) -> None:
    case = CONTRACTIONS[name]

    def gradients(through: Callable[..., Any]) -> tuple[Tensor, ...]:
        tensors = [x.requires_grad_() for x in case.tensors()]
        result = through(lambda *ts: case.run(sixteen_bit("bf16"), *ts), *tensors)
        return torch.autograd.grad(result.float().sin().sum(), tensors) if not reentrant else backward(result, tensors)

    def backward(result: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        result.float().sin().sum().backward()  # type: ignore[no-untyped-call]
        return tuple(x.grad for x in tensors if x.grad is not None)

    plain = gradients(lambda run, *tensors: run(*tensors))
    recomputed = gradients(lambda run, *tensors: checkpoint(run, *tensors, use_reentrant=reentrant))
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("cast", ["bf16", "e4m3fn", "bf16-tpu"])
@pytest.mark.parametrize("name", ["linear", "matmul 3x3", "conv2d groups", "einsum ij,jk", "attention"])
def test_torch_func_transforms(name: str, cast: str) -> None:
    case = CONTRACTIONS[name]
    rule = Rule.of(input=cast, weight=cast, grad=cast, output="bf16" if cast == "bf16" else None)
    first, *rest = case.tensors()

    def loss(x: Tensor) -> Tensor:
        result: Tensor = case.run(rule, x, *rest).float().sin().sum()
        return result

    (wanted,) = torch.autograd.grad(loss(leaf := first.clone().requires_grad_()), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(first), wanted, rtol=1e-2, atol=1e-2)
    batch = torch.stack([first, first * 2, first * 3])
    values = torch.func.vmap(loss)(batch)
    torch.testing.assert_close(values, torch.stack([loss(x) for x in batch]), rtol=1e-2, atol=5e-1)
    each = torch.func.vmap(torch.func.grad(loss))(batch)
    torch.testing.assert_close(each[0], wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("emulated")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_forward_mode_derivatives_are_those_of_the_product() -> None:
    x, weight, bias = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)
    dx, dw, db = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)
    rule = sixteen_bit("bf16")
    found = torch.func.jvp(lambda *ts: under(rule, F.linear, *ts), (x, weight, bias), (dx, dw, db))
    value, tangent = found[0], found[1]
    xq, wq = x.bfloat16().float(), weight.bfloat16().float()
    assert torch.equal(value, F.linear(xq, wq, bias).bfloat16())
    torch.testing.assert_close(tangent.float(), F.linear(dx, wq) + F.linear(xq, dw) + db, rtol=2e-2, atol=5e-2)


def test_a_backward_inside_torch_autocast_is_not_cast_again() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    result = under(Rule.of(input="fp32"), F.linear, x.requires_grad_(), layer.weight, layer.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(found, torch.ones(8, 64) @ layer.weight)


def test_a_tensor_changed_in_place_before_backward_is_noticed() -> None:
    x, weight = torch.randn(4, 6).bfloat16(), torch.randn(5, 6, requires_grad=True)
    result = under(sixteen_bit("bf16"), F.linear, x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@compiles_regions
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("linear bias", RULES[1]),
        pytest.param("matmul 3x2", RULES[0], marks=pytest.mark.slow),
        pytest.param("matmul 3x2", Rule.of(input="mxfp8", weight="mxfp8"), marks=pytest.mark.slow),
        pytest.param("conv2d", RULES[1], marks=pytest.mark.slow),
        ("attention", RULES[0]),
    ],
    ids=str,
)
def test_torch_compile_gives_the_same_numbers_in_one_graph(name: str, rule: Rule) -> None:
    case = CONTRACTIONS[name]
    row = row_of(case.function)
    assert row is not None
    run = row.run(rule)

    def function(*tensors: Tensor) -> Tensor:
        result: Tensor = run(Call(row.name, case.function, tensors, case.kwargs, rule))
        return result

    def gradients(compiled: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        tensors = [x.requires_grad_() for x in case.tensors()]
        result = compiled(*tensors)
        return result, *torch.autograd.grad(result.float().sin().sum(), tensors)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(function), gradients(compiled), strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-8, atol=1e-4)


def test_the_gradient_of_a_matrix_that_is_added_is_not_in_memory_that_later_passes_use() -> None:
    def gradients(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        given = [torch.randn(256, 256, requires_grad=True) for _ in range(3)]
        with lowp.autocast("e5m7"):
            y = torch.addmm(*given)
        return list(torch.autograd.grad(y, given, torch.randn(256, 256)))

    with kernels.use("bitwise"):  # where the definition runs
        found = gradients(0)
        kept = [one.clone() for one in found]
        gradients(1)
    assert all(map(torch.equal, found, kept))
