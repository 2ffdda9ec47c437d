"""Rules whose products have casts of their own: what each product reads, rotations of its operands, who is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.cases import CONTRACTIONS, under
from ops.test_products import TWICE, saved_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_versions import compiles_regions

import lowp
from lowp import kernels
from lowp.errors import Unavailable
from lowp.kernels.numbers import hadamard
from lowp.ops.call import Call
from lowp.ops.observing import Observation, observe
from lowp.ops.table import row_of
from lowp.policy import Policy, Rule

CASTS = {"input": "mxfp8", "weight": "mxfp8", "grad": "mxfp8-e5m2"}
APART = Rule.of(**CASTS, input_gradient="weight=mxfp8 grad=mxfp6", weight_gradient="input=nvfp4 grad=bf16")
WIDE = Rule.of(
    **dict.fromkeys(("input", "weight", "grad", "output"), "fp32"),
    input_gradient="weight=fp32 grad=fp32",
    weight_gradient="input=fp32 grad=fp32",
)
ROTATED = Rule.of(
    **dict.fromkeys(("input", "weight", "grad", "output"), "fp32"), weight_gradient="input=fp32 hadamard=2"
)


def along(x: Tensor, cast: str, axis: int) -> Tensor:
    """Return x rounded with groups along a dimension."""
    return kernels.quantize(x.detach().movedim(axis, -1).contiguous(), cast).movedim(-1, axis)


def gradients(result: Tensor, *leaves: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return gradients, and the gradient of the result that led to them."""
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(9))
    return torch.autograd.grad(result, leaves, gradient), gradient


@pytest.mark.parametrize("shape", [(40, 64), (5, 8, 64)], ids=str)
def test_each_product_of_a_layer_rounds_what_it_reads_along_its_own_sum(shape: tuple[int, ...]) -> None:
    x, w, b = (torch.randn(one).requires_grad_() for one in (shape, (48, 64), (48,)))
    result = under(APART, F.linear, x, w, b)
    found, g = gradients(result, x, w, b)
    torch.testing.assert_close(result, F.linear(along(x, "mxfp8", -1), along(w, "mxfp8", -1), b), rtol=1e-6, atol=1e-5)
    rows, of_rows = g.reshape(40, 48), x.detach().reshape(40, 64)
    with torch.no_grad():
        of_input = along(rows, "mxfp6", -1) @ along(w, "mxfp8", 0)
        of_weight = along(rows, "bf16", 0).t() @ along(of_rows, "nvfp4", 0)
    torch.testing.assert_close(found[0].reshape(40, 64), of_input, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1], of_weight, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[2], along(rows, "mxfp8-e5m2", -1).sum(0), rtol=1e-6, atol=1e-5)


def test_a_convolution_and_a_product_of_batches_round_along_their_own_sums() -> None:
    x, w = torch.randn(2, 32, 6, 6, requires_grad=True), torch.randn(64, 32, 3, 3, requires_grad=True)
    found, g = gradients(under(APART, F.conv2d, x, w, None, 1, 1), x, w)
    a, b = along(w, "mxfp8", 0).requires_grad_(), x.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(F.conv2d(b, a, None, 1, 1), b, along(g, "mxfp6", 1))
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=1e-4)
    b, a = along(x, "nvfp4", -1), w.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(F.conv2d(b, a, None, 1, 1), a, along(g, "bf16", -1))
    torch.testing.assert_close(found[1], wanted, rtol=1e-5, atol=1e-4)

    x, w = torch.randn(3, 20, 32, requires_grad=True), torch.randn(3, 32, 24, requires_grad=True)
    found, g = gradients(under(APART, torch.bmm, x, w), x, w)
    of_input = along(g, "mxfp6", -1) @ along(w, "mxfp8", -1).transpose(1, 2)
    of_weight = along(x, "nvfp4", 1).transpose(1, 2) @ along(g, "bf16", 1)
    torch.testing.assert_close(found[0], of_input, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1], of_weight, rtol=1e-6, atol=1e-5)


def test_a_product_that_names_no_operand_reads_what_forward_has_rounded() -> None:
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    casts = {"input": "mxfp8", "weight": "e4m3fn@fp32/16x16", "grad": "mxfp8"}
    plain, _ = gradients(under(Rule.of(**casts), F.linear, x, w), x, w)
    apart, g = gradients(under(Rule.of(**casts, weight_gradient="input=bf16 grad=bf16"), F.linear, x, w), x, w)
    again, _ = gradients(under(Rule.of(**casts, input_gradient="weight=e4m3fn@fp32/16x16"), F.linear, x, w), x, w)
    assert torch.equal(plain[0], apart[0]) and torch.equal(plain[0], again[0])  # in tiles both ways are the same
    assert torch.equal(apart[1], (g.bfloat16().float().t() @ x.detach().bfloat16().float()))
    assert torch.equal(plain[1], again[1]) and not torch.equal(plain[1], apart[1])


def test_a_parameter_that_comes_first_is_the_weight() -> None:
    w, x = nn.Parameter(torch.randn(48, 64)), torch.randn(64, 40, requires_grad=True)
    found, g = gradients(under(APART, torch.matmul, w, x), w, x)
    with torch.no_grad():
        of_weight = along(g, "bf16", 1) @ along(x, "nvfp4", 1).t()
        of_input = along(w, "mxfp8", 0).t() @ along(g, "mxfp6", 0)
    torch.testing.assert_close(found[0], of_weight, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1], of_input, rtol=1e-6, atol=1e-5)


def test_what_is_rounded_in_backward_is_kept_as_it_came() -> None:
    x, w = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(16, 64, requires_grad=True)
    assert saved_bytes(lambda: under(APART, F.linear, x, w), x, w) == 0
    assert saved_bytes(lambda: under(APART, F.linear, x * 1, w), w) == 2 * 32 * 64
    assert saved_bytes(lambda: under(APART, F.linear, x * 1, w.detach()), w) == 0
    only = Rule.of(**CASTS, weight_gradient="input=bf16")  # the weight is read as forward has rounded it
    assert saved_bytes(lambda: under(only, F.linear, x, w), x) == 4 * 16 * 64


@pytest.mark.parametrize("rule", [WIDE, ROTATED], ids=["casts", "rotated"])
@pytest.mark.parametrize("name", [name for name in TWICE if "attention" not in name])
def test_second_derivatives_are_those_of_float64(name: str, rule: Rule) -> None:
    case = CONTRACTIONS[name]
    tensors = [x.requires_grad_() for x in case.tensors()]
    wide = [x.detach().double().requires_grad_() for x in tensors]

    def twice(result: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(result.sin().sum(), inputs, create_graph=True)
        total = torch.stack([one.sin().sum() for one in first]).sum()
        return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)

    try:
        result = case.run(rule, *tensors)
    except Unavailable as error:
        assert rule is ROTATED and "sums along no dimension in which both operands can be rotated" in str(error)
        return
    for one, other in zip(twice(result, tensors), twice(case.call(*wide), wide), strict=True):
        assert (one.double() - other).abs().max() <= 2e-4 * max(float(other.abs().max()), 1.0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
@pytest.mark.parametrize("name", ["linear", "matmul 3x3", "conv2d groups", "einsum ij,jk"])
def test_torch_func_and_checkpoints_give_the_same_gradients(name: str) -> None:
    case = CONTRACTIONS[name]
    first, *rest = case.tensors()
    rest[0].requires_grad_()

    def loss(x: Tensor) -> Tensor:
        result: Tensor = case.run(APART, x, *rest).sin().sum()
        return result

    leaf = first.clone().requires_grad_()
    wanted = torch.autograd.grad(loss(leaf), [leaf, rest[0]])
    torch.testing.assert_close(torch.func.grad(loss)(first), wanted[0])
    each = torch.func.vmap(torch.func.grad(loss))(torch.stack([first, first * 2]))
    torch.testing.assert_close(each[0], wanted[0], rtol=1e-5, atol=1e-5)
    again = checkpoint(loss, leaf, use_reentrant=False)
    assert all(torch.equal(*pair) for pair in zip(wanted, torch.autograd.grad(again, [leaf, rest[0]]), strict=True))
    _, tangent = torch.func.jvp(loss, (first,), (torch.ones_like(first),))
    assert tangent.isfinite()


@compiles_regions
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_a_compiled_layer_has_the_same_gradients() -> None:
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    rule = Rule.of(**CASTS, input_gradient="weight=mxfp8", weight_gradient="input=e4m3fn grad=e4m3fn")
    row = row_of(F.linear)
    assert row is not None
    run = row.run(rule)

    def layer(x: Tensor, w: Tensor) -> Any:
        return run(Call("linear", F.linear, (x, w), {}, rule))

    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(layer(x, w), x, w)[0], gradients(compiled(x, w), x, w)[0], strict=True):
        torch.testing.assert_close(one, other)


def test_attention_reads_operands_that_are_rounded_once() -> None:
    tensors = [torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3)]
    for more in ({}, {"accumulate": "fp16/16"}):
        results = []
        for rule in (APART, Rule.of(**CASTS)):
            rule = Rule(**{**vars(rule), **more})
            results.append(gradients(under(rule, F.scaled_dot_product_attention, *tensors), *tensors)[0])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_model_trains_under_a_file_of_such_rules_and_resumes() -> None:
    policy = Policy.from_toml(
        Policy((Rule.of("linear", **CASTS, weight_gradient="input=mxfp8 hadamard=32"),)).to_toml()
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer, data = torch.optim.SGD(model.parameters(), 0.05), torch.randn(64, 32)
    losses = []
    for _ in range(20):
        with lowp.autocast(policy):
            loss = F.mse_loss(model(data), data[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


# -- observers ----------------------------------------------------------------------------------------------------


def test_observers_hear_of_each_cast_of_the_backward_pass_once() -> None:
    seen: list[Observation] = []
    end = observe(seen.append)
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    rule = Rule.of(**CASTS, input_gradient="grad=mxfp6", weight_gradient="input=nvfp4 grad=bf16 hadamard=16")
    with lowp.autocast(Policy((rule,))):
        result = F.linear(x, w)
    result.backward(torch.ones_like(result))
    end()
    told = [(one.role, one.phase, str(one.cast)) for one in seen]
    assert told == [
        ("input", "forward", "mxfp8"),
        ("weight", "forward", "mxfp8"),
        ("output", "forward", "None"),
        ("grad", "backward", "mxfp6"),
        ("input gradient", "backward", "None"),
        ("input", "backward", "nvfp4"),
        ("grad 2", "backward", "bf16"),
        ("weight gradient", "backward", "None"),
    ]
    rotated = seen[6].tensor  # ones rotated: one number a block and column, of the root of 16
    assert rotated.abs().amax(0).sum() <= 16 * 4 and rotated.square().sum() == pytest.approx(32 * 16, rel=1e-5)


# -- rotations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 16, 128, 256])
def test_a_rotation_is_the_matrix_of_hadamard_and_its_rest_stays(size: int) -> None:
    x, signs = torch.randn(3, 2 * size + 1), hadamard.signs(size, 7, torch.device("cpu"))
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    wanted = (x.double()[:, :-1].reshape(3, 2, size) * signs) @ matrix / size**0.5
    found = hadamard.rotate(x, signs)
    torch.testing.assert_close(found[:, :-1].double(), wanted.reshape(3, -1), rtol=0, atol=2e-5)
    assert torch.equal(found[:, -1], x[:, -1]) and set(signs.tolist()) == {-1.0, 1.0}
    assert torch.equal(hadamard.rotate(x.t(), signs, 0), found.t())
    assert torch.equal(hadamard.rotate(x.clone().requires_grad_(), signs), found)
    assert torch.equal(hadamard.rotate(x.bfloat16(), signs), hadamard.rotate(x.bfloat16().float(), signs))


@pytest.mark.parametrize("rows", [(64,), (4, 16), (50,)], ids=str)
def test_a_rotated_product_is_the_same_in_exact_arithmetic(rows: tuple[int, ...]) -> None:
    x, w = torch.randn(*rows, 64, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    rule = Rule.of(input_gradient="weight=fp32 hadamard=8", weight_gradient="input=fp32 hadamard=16")
    found, g = gradients(under(rule, F.linear, x, w), x, w)
    wanted = torch.autograd.grad(F.linear(x, w), (x, w), g)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


def test_signs_repeat_with_torchs_seed_and_differ_by_product() -> None:
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    rule = Rule.of(weight_gradient="input=e2m1@fp32/row grad=e4m3fn hadamard=16")

    def run(seed: int) -> Tensor:
        result = under(rule, F.linear, x, w)
        torch.manual_seed(seed)
        return gradients(result, x, w)[0][1]

    assert torch.equal(run(3), run(3)) and not torch.equal(run(3), run(4))


def test_a_rotation_spreads_what_stands_out() -> None:
    x = torch.zeros(4, 16)
    x[:, 5] = torch.tensor([1.0, -2.0, 3.0, 100.0])
    found = hadamard.rotate(x, hadamard.signs(16, 1, x.device))
    assert torch.equal(found.abs(), x[:, 5:6].abs().expand(4, 16) / 4)


@pytest.mark.parametrize(
    ("function", "shapes", "options"),
    [
        (F.conv2d, ((2, 32, 6, 6), (32, 32, 3, 3)), {}),
        (F.conv1d, ((2, 32, 6), (32, 1, 3)), {"groups": 32}),
        (F.linear, ((5, 64), (64,)), {}),
    ],
)
def test_a_product_that_no_rotation_leaves_as_it_is_refuses_one(
    function: Any, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]
) -> None:
    product, operand = ("weight", "input") if function is F.conv2d else ("input", "weight")
    rule = Rule.of(**{f"{product}_gradient": f"{operand}=mxfp8 hadamard=16"})
    x, w = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with pytest.raises(Unavailable, match=f"hadamard=16 of the {product} gradient: .* give a rule without hadamard"):
        under(rule, function, x, w, **options)


def test_channels_of_a_convolution_are_rotated_alike() -> None:
    x, w = torch.randn(2, 32, 6, 6, requires_grad=True), torch.randn(32, 32, 3, 3, requires_grad=True)
    found, g = gradients(under(Rule.of(input_gradient="weight=fp32 hadamard=16"), F.conv2d, x, w), x)
    (wanted,) = torch.autograd.grad(F.conv2d(x, w), x, g)
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=1e-4)
