"""Contractions under a rule: equal to the definition bit by bit, in every spelling, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.cases import CHAINS, CONTRACTIONS, DTYPES, Case, sixteen_bit, under
from torch import Tensor, nn

from lowp import kernels
from lowp.ops.call import Call
from lowp.ops.contraction import chain, linear
from lowp.policy import Rule
from lowp.region import autocast


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def by_definition(case: Case, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return the fp32 result of operands rounded to a dtype, and those operands; a bias is not rounded."""
    operands = [
        (x if index == case.bias else x.to(dtype).float()).requires_grad_() for index, x in enumerate(case.tensors())
    ]
    return case.call(*operands), operands


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_the_output_is_the_fp32_product_of_cast_operands_rounded_once(name: str, format: str) -> None:
    case, dtype = CONTRACTIONS[name], DTYPES[format]
    result = case.run(sixteen_bit(format), *case.tensors())
    assert result.dtype is dtype
    wanted = by_definition(case, dtype)[0].detach()
    # up to the order of the sums: torch's is that of `fp32_products` for few products
    assert torch.equal(result, wanted.to(dtype)) or (name == "matmul large" and is_rounded_once(result, wanted, dtype))


def is_rounded_once(found: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether `found` is the fp32 result rounded to a dtype, up to the order of the sums."""
    slack = 2.0**-20 * exact.abs().max()
    return bool(((exact - slack).to(dtype) <= found).all() and (found <= (exact + slack).to(dtype)).all())


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_gradients_are_fp32_products_of_cast_operands_rounded_once(name: str, format: str) -> None:
    case, dtype = CONTRACTIONS[name], DTYPES[format]
    tensors = leaves(case.tensors())
    result = case.run(sixteen_bit(format), *tensors)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad(result, tensors, gradient, allow_unused=True)
    wanted_result, operands = by_definition(case, dtype)
    wanted = torch.autograd.grad(wanted_result, operands, gradient.float(), allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        if case.kwargs.get("beta") == 0 and (one is None or other is None):
            assert one is None and (other is None or not other.any())  # an input that is ignored has no gradient
            continue
        assert one is not None and other is not None
        assert one.dtype is torch.float32
        assert is_rounded_once(one, other, dtype)


@pytest.mark.parametrize("name", [*CONTRACTIONS, *CHAINS])
def test_fp32_operands_give_the_gradients_of_float64(name: str) -> None:
    case = {**CONTRACTIONS, **CHAINS}[name]
    tensors = leaves(case.tensors())
    wide = [x.detach().double().requires_grad_() for x in tensors]
    rule = Rule.of(input="fp32", weight="fp32", grad="fp32", output="fp32")
    result = run_case(case, rule, *tensors)
    reference = case.call(*wide)
    torch.testing.assert_close(result.double(), reference, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(result.sin().sum(), tensors, allow_unused=True)
    wanted = torch.autograd.grad(reference.sin().sum(), wide, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


def run_case(case: Case, rule: Rule, *tensors: Tensor) -> Any:
    """Run a case; a chain of matrices is passed as a list."""
    if case is CHAINS["multi_dot"]:
        return under(rule, torch.linalg.multi_dot, list(tensors))
    return case.run(rule, *tensors)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_close_to_the_definition(name: str) -> None:
    case = CHAINS[name]
    result = run_case(case, sixteen_bit("bf16"), *case.tensors())
    wanted = case.call(*case.tensors())
    assert result.dtype is torch.bfloat16
    assert (result.float() - wanted).abs().max() <= 0.03 * wanted.abs().max()


def test_einsum_contracts_in_pairs_and_rounds_every_intermediate() -> None:
    a, b, c = CHAINS["einsum of three"].tensors()
    half = torch.einsum("bi,oij->boj", a.bfloat16().float(), b.bfloat16().float()).bfloat16()
    wanted = torch.einsum("boj,bj->bo", half.float(), c.bfloat16().float()).bfloat16()
    assert torch.equal(under(sixteen_bit("bf16"), torch.einsum, "bi,oij,bj->bo", a, b, c), wanted)


SPELLINGS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
    "keywords": (F.linear, (), {"input": 0, "weight": 1, "bias": None}),
    "list of operands": (torch.einsum, ("nk,mk->nm", [0, 1]), {}),
    "lists of indices": (torch.einsum, (0, [0, 1], 1, [2, 1], [0, 2]), {}),
    "spaces": (torch.einsum, (" n k , m k -> n m ", 0, 1), {}),
    "implicit output": (torch.einsum, ("ab,cb", 0, 1), {}),
    "tensordot of negative dims": (torch.tensordot, (0, 1), {"dims": ([-1], [-1])}),
    "inner": (torch.inner, (0, 1), {}),
}


@pytest.mark.parametrize("precision", ["fp16", "e5m7", "dfp16"])
@pytest.mark.parametrize(("kernel", "end"), [((2, 3), (1, 1, 0, 1)), ((3, 4), (1, 2, 1, 1)), ((1, 3), (1, 1, 0, 0))])
def test_an_odd_padding_to_the_same_size_pads_the_end_by_one_more(
    kernel: tuple[int, int], end: tuple[int, ...], precision: str
) -> None:
    x, weight = torch.arange(20.0).reshape(1, 1, 4, 5), torch.ones(2, 1, *kernel)
    with autocast(precision):
        found = F.conv2d(x, weight, padding="same")
    assert torch.equal(found.float(), F.conv2d(F.pad(x, end), weight))


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_product_gives_the_same(name: str) -> None:
    function, args, kwargs = SPELLINGS[name]
    tensors = [torch.randn(4, 6), torch.randn(5, 6)]

    def placed(value: Any) -> Any:
        if type(value) is list and value == [0, 1] and name == "list of operands":
            return tensors
        return tensors[value] if type(value) is int else value

    result = under(
        sixteen_bit("bf16"), function, *map(placed, args), **{key: placed(one) for key, one in kwargs.items()}
    )
    assert torch.equal(result, F.linear(tensors[0].bfloat16().float(), tensors[1].bfloat16().float()).bfloat16())


def test_out_takes_the_result_and_is_returned() -> None:
    a, b, out = torch.randn(4, 6), torch.randn(6, 5), torch.empty(0)
    result = under(sixteen_bit("bf16"), torch.mm, a, b, out=out)
    assert result is out
    assert torch.equal(out, (a.bfloat16().float() @ b.bfloat16().float()).bfloat16().float())


def test_out_refuses_what_autograd_would_have_to_follow() -> None:
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5)
    with pytest.raises(RuntimeError, match=r"mm\(\): functions with out=.* don't support automatic differentiation"):
        under(sixteen_bit("bf16"), torch.mm, a, b, out=torch.empty(4, 5))


@pytest.mark.parametrize("name", ["addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"])
def test_in_place_forms_write_into_their_input(name: str) -> None:
    case = CONTRACTIONS[{"addmm_": "addmm method"}.get(name, name[:-1])]
    bias, *operands = case.tensors()
    wanted = case.run(sixteen_bit("bf16"), bias.clone(), *operands).float()
    result = under(sixteen_bit("bf16"), getattr(torch.Tensor, name), bias, *operands, **case.kwargs)
    assert result is bias and torch.equal(bias, wanted)


def test_tensors_that_no_rule_speaks_of_are_left_alone() -> None:
    for tensors in (torch.randn(2, 3, 3).double(), torch.arange(18).reshape(2, 3, 3), torch.randn(2, 3, 3) * 1j):
        assert torch.equal(under(sixteen_bit("bf16"), torch.matmul, *tensors), tensors[0] @ tensors[1])


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "linear": (F.linear, (torch.randn(2, 3), torch.randn(4, 5)), {}),
    "matmul": (torch.matmul, (torch.randn(2, 3), torch.randn(4, 5)), {}),
    "matmul of a number": (torch.matmul, (torch.randn(2, 3), torch.tensor(1.0)), {}),
    "an unknown keyword": (torch.mm, (torch.randn(2, 3), torch.randn(3, 5)), {"colour": 1}),
    "too few": (torch.mm, (torch.randn(2, 3),), {}),
    "einsum": (torch.einsum, ("ij,jk->il", torch.randn(2, 3), torch.randn(3, 4)), {}),
    "conv2d": (F.conv2d, (torch.randn(1, 3, 5, 5), torch.randn(4, 2, 3, 3)), {}),
    "same with a stride": (
        F.conv2d,
        (torch.randn(1, 3, 5, 5), torch.randn(4, 3, 3, 3)),
        {"padding": "same", "stride": 2},
    ),
    "multi_dot": (torch.linalg.multi_dot, ([torch.randn(2, 3)],), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(name: str) -> None:
    function, args, kwargs = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError)) as plain:
        function(*args, **kwargs)
    with pytest.raises(type(plain.value)) as found:
        under(sixteen_bit("bf16"), function, *args, **kwargs)
    assert str(found.value).split("\n")[0] == str(plain.value).split("\n")[0]


APART: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "matmul": (torch.matmul, ((2, 3), (4, 5))),
    "matmul of one column": (torch.matmul, ((2, 1), (4, 5))),
    "matmul with one row": (torch.matmul, ((2, 3), (1, 5))),
    "matmul with a vector of one": (torch.matmul, ((2, 3), (1,))),
    "batches": (torch.matmul, ((2, 3, 4), (5, 4, 6))),
    "__rmatmul__": (lambda x, y: x.__rmatmul__(y), ((4, 5), (2, 1))),
    "mm": (torch.mm, ((2, 1), (4, 5))),
    "mv": (torch.mv, ((2, 3), (1,))),
    "dot": (torch.dot, ((1,), (3,))),
    "bmm": (torch.bmm, ((5, 2, 1), (5, 3, 4))),
    "bmm of one": (torch.bmm, ((1, 2, 3), (5, 3, 4))),
    "bmm with one": (torch.bmm, ((5, 2, 3), (1, 3, 4))),
    "inner": (torch.inner, ((2, 1), (4, 3))),
    "linear": (F.linear, ((2, 3), (4, 1))),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), ((2, 3), (4, 5))),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), ((2, 3), (4, 5))),
    "bilinear": (F.bilinear, ((2, 3), (2, 1), (5, 3, 4))),
}


@pytest.mark.parametrize("precision", ["e5m7", "mxfp8", "fp16", "dfp16", "flex16+5"])
@pytest.mark.parametrize("name", APART)
def test_operands_that_torch_does_not_multiply_are_refused_in_its_words(name: str, precision: str) -> None:
    function, shapes = APART[name]
    operands = [torch.ones(shape) for shape in shapes]
    with pytest.raises(RuntimeError) as plain:
        function(*operands)
    with pytest.raises(RuntimeError) as found, autocast(precision):
        function(*operands)
    assert str(found.value) == str(plain.value)


SHAPES: dict[str, tuple[Callable[..., Tensor], list[tuple[tuple[int, ...], ...]]]] = {
    "inner": (torch.inner, [((3,), (3,)), ((2, 3), (3,)), ((3,), (4, 3)), ((1, 3), (4, 3)), ((2, 3), (5, 4, 3))]),
    "outer": (torch.outer, [((3,), (4,)), ((1,), (1,))]),
    "matmul": (torch.matmul, [((1,), (1,)), ((1, 1), (1,)), ((2, 3), (3, 1)), ((1, 2, 3), (4, 3, 1))]),
    "vecdot": (torch.linalg.vecdot, [((3,), (3,)), ((2, 3), (3,)), ((1, 3), (2, 3))]),
    "no dimension": (partial(torch.tensordot, dims=0), [((2,), (3,)), ((2, 3), (4,))]),
    "one dimension": (partial(torch.tensordot, dims=1), [((3,), (3,)), ((2, 3), (3, 4)), ((2, 1), (1, 4))]),
    "all dimensions": (partial(torch.tensordot, dims=2), [((2, 3), (2, 3)), ((4, 2, 3), (2, 3, 5))]),
    "named dimensions": (partial(torch.tensordot, dims=([1, 0], [-1, -2])), [((2, 3), (2, 3)), ((2, 3), (4, 2, 3))]),
    "bilinear": (F.bilinear, [((3,), (4,), (5, 3, 4)), ((2, 3), (2, 4), (1, 3, 4), (1,)), ((0, 3), (0, 4), (5, 3, 4))]),
    "batches of letters": (partial(torch.einsum, "...ij,...jk->...ik"), [((2, 3), (3, 4)), ((5, 2, 3), (3, 4))]),
    "a diagonal": (partial(torch.einsum, "iij,jk->ik"), [((2, 2, 3), (3, 4))]),
    "letters of one size": (partial(torch.einsum, "ij,jk->ik"), [((2, 1), (3, 4)), ((2, 3), (1, 4)), ((1, 1), (1, 1))]),
    "sums": (partial(torch.einsum, "ab,c"), [((2, 3), (4,)), ((1, 1), (1,))]),
    "sums of all": (partial(torch.einsum, "ab,ca->"), [((2, 3), (4, 2))]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_small_integers_are_multiplied_exactly_and_rounded_in_every_shape(name: str) -> None:
    function, shapes = SHAPES[name]
    for one in shapes:
        operands = leaves([torch.randint(-2, 3, shape).float() for shape in one])
        expected = function(*operands)
        found = under(sixteen_bit("bf16"), function, *operands)
        assert found.dtype is torch.bfloat16 and torch.equal(found.float(), expected.detach())
        found, wanted = (torch.autograd.grad(y.float().sum(), operands) for y in (found, expected))
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("shapes", [((2, 1), (2, 3)), ((5, 3), (1, 3)), ((5, 3), (3,)), ((4, 5, 3), (1, 5, 1))])
def test_vectors_are_multiplied_as_torch_broadcasts_them(shapes: tuple[tuple[int, ...], ...]) -> None:
    first, second = (torch.randint(-8, 9, shape).float() for shape in shapes)
    for x, y in ((first, second), (second, first)):
        expected = torch.linalg.vecdot(x, y)
        with autocast("e5m7"):
            assert torch.equal(torch.linalg.vecdot(x, y).float(), expected.bfloat16().float())


IMPOSSIBLE: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "a longer kernel": (F.conv1d, (1, 1, 2), (1, 1, 3), {}),
    "a larger kernel": (F.conv2d, (1, 1, 1, 4), (1, 1, 5, 3), {"padding": 1}),
    "a spread kernel": (F.conv2d, (1, 1, 4, 4), (1, 1, 3, 3), {"dilation": 2, "padding": "valid"}),
    "no input": (F.conv2d, (1, 1, 0, 4), (1, 1, 3, 3), {}),
    "no kernel": (F.conv2d, (1, 1, 4, 4), (1, 1, 0, 3), {}),
    "no stride": (F.conv2d, (1, 1, 4, 4), (1, 1, 3, 3), {"stride": 0}),
    "no dilation": (F.conv2d, (1, 1, 4, 4), (1, 1, 3, 3), {"dilation": 0}),
    "negative padding": (F.conv2d, (1, 1, 4, 4), (1, 1, 3, 3), {"padding": -1}),
    "other channels": (F.conv2d, (1, 2, 4, 4), (1, 1, 3, 3), {}),
    "channels that groups do not divide": (F.conv2d, (1, 2, 4, 4), (3, 1, 3, 3), {"groups": 2}),
    "another bias": (F.conv2d, (1, 1, 4, 4), (1, 1, 3, 3), {"bias": torch.zeros(2)}),
    "a transposed output below zero": (F.conv_transpose2d, (1, 1, 1, 1), (1, 1, 1, 1), {"padding": 1}),
}


@pytest.mark.parametrize("precision", ["dfp16", "flex16+5"])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_convolution_of_integers_is_refused_in_torch_s_words(name: str, precision: str) -> None:
    function, x, weight, options = IMPOSSIBLE[name]
    with pytest.raises(RuntimeError) as plain:
        function(torch.randn(x), torch.randn(weight), **options)
    with pytest.raises(RuntimeError) as found, autocast(precision):
        function(torch.randn(x), torch.randn(weight), **options)
    assert str(found.value) == str(plain.value)


def test_a_parameter_that_stands_first_is_the_weight() -> None:
    rule = Rule.of(input="bf16", weight="fp16")
    weight, x = nn.Parameter(torch.randn(4, 6)), torch.randn(6, 5)
    assert torch.equal(under(rule, torch.matmul, weight, x), weight.half().float() @ x.bfloat16().float())


def test_leaf_parameters_are_cast_by_the_session() -> None:
    seen: list[tuple[Tensor, str]] = []

    def cached(weight: Tensor, to: Any) -> Tensor:
        seen.append((weight, str(to)))
        return weight.to(torch.bfloat16)

    weight, x = nn.Parameter(torch.randn(5, 6)), torch.randn(4, 6)
    with kernels.use("bitwise"):  # the definition: what runs straight from its arguments asks the region itself
        linear(Call("linear", F.linear, (x, weight), {}, sixteen_bit("bf16"), cached))
    assert len(seen) == 1 and seen[0][0] is weight and seen[0][1] == "bf16"


def test_the_chain_with_fewest_multiplications_is_taken() -> None:
    sizes = [10, 100, 5, 50]
    matrices = [torch.randn(sizes[i : i + 2]) for i in range(3)]
    rule = sixteen_bit("bf16")
    inner = under(rule, torch.mm, matrices[0], matrices[1])
    wanted = under(rule, torch.mm, inner, matrices[2])
    assert torch.equal(chain(Call("linalg_multi_dot", torch.linalg.multi_dot, (matrices,), {}, rule)), wanted)


def test_no_rows_give_an_empty_result_and_zero_gradients() -> None:
    x, weight = torch.randn(0, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    result = under(sixteen_bit("bf16"), F.linear, x, weight)
    result.float().sum().backward()
    assert result.shape == (0, 5) and weight.grad is not None and not weight.grad.any()


def test_the_values_of_a_sparse_operand_are_rounded() -> None:
    x, y = torch.randn(4, 4).relu(), torch.randn(4, 4)
    found = under(Rule.of(input="e4m3fn"), torch.mm, x.to_sparse(), y)
    torch.testing.assert_close(found, kernels.quantize(x, "e4m3fn") @ kernels.quantize(y, "e4m3fn"))


def test_a_transposed_convolution_with_one_result_is_rounded_and_one_of_other_channels_is_refused_by_torch() -> None:
    x, weight = torch.randn(2, 3, 1), torch.randn(3, 4, 1)
    rule = Rule.of(input="e4m3fn", weight="e5m2")
    found = under(rule, F.conv_transpose1d, x, weight)
    wanted = F.conv_transpose1d(kernels.quantize(x, "e4m3fn"), kernels.quantize(weight, "e5m2"))
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="expected input"):
        under(rule, F.conv_transpose1d, torch.randn(2, 2, 3), weight)


@pytest.mark.parametrize(
    ("precision", "way"),
    [("bf16", "native"), ("fp16", "native"), *itertools.product(["bf16", "fp8", "mxfp8", "dfp16"], ["cpu", "bitwise"])],
)
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(5, 64), (64, 7)]),
        (torch.matmul, [(2, 5, 64), (64, 7)]),
        (torch.bmm, [(2, 5, 64), (2, 64, 7)]),
        (torch.addmm, [(7,), (5, 64), (64, 7)]),
        (torch.baddbmm, [(2, 5, 7), (2, 5, 64), (2, 64, 7)]),
    ],
)
def test_results_and_gradients_of_matrices_lie_one_row_after_the_other(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], precision: str, way: str
) -> None:
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with kernels.use(way), autocast(precision):
        y = function(*operands)
    found = torch.autograd.grad(y, operands, torch.randn(y.shape).to(y.dtype))
    assert y.is_contiguous() and all(one.is_contiguous() for one in found)


@pytest.mark.parametrize("transposed", [False, True], ids=["conv2d", "conv_transpose2d"])
def test_blocks_of_a_convolution_lie_along_what_its_products_sum_over(transposed: bool) -> None:
    """A kernel of one place is a linear layer of the channels; the gradient of its weight is summed over places."""
    x, weight, direction = torch.randn(2, 40, 2, 40), torch.randn(70, 40), torch.randn(2, 70, 2, 40)
    images, rows = x.clone().requires_grad_(), x.movedim(1, -1).clone().requires_grad_()
    filters = (weight.t() if transposed else weight)[:, :, None, None].clone().requires_grad_()
    with autocast("mxfp8"):
        found = (F.conv_transpose2d if transposed else F.conv2d)(images, filters)
        expected = F.linear(rows, weight)
    found.backward(direction)
    expected.backward(direction.movedim(1, -1))
    assert torch.allclose(found.movedim(1, -1), expected, atol=1e-4)
    assert images.grad is not None and rows.grad is not None and filters.grad is not None
    assert torch.allclose(images.grad.movedim(1, -1), rows.grad, atol=1e-4)
    forward = kernels.quantize(x.movedim(1, -1).contiguous(), "mxfp8")  # which the gradient of the weight reads again
    summed = torch.einsum("nohw,nhwi->oi", kernels.quantize(direction, "mxfp8"), forward)
    assert torch.allclose((filters.grad.squeeze().t() if transposed else filters.grad.squeeze()), summed, atol=1e-3)


def test_blocks_of_an_input_that_is_cast_again_for_the_gradient_of_the_weight_lie_along_its_last_dimension() -> None:
    x, direction = torch.randn(2, 4, 2, 40), torch.randn(2, 6, 2, 40)
    filters = torch.randn(6, 4, 1, 1, requires_grad=True)
    rule = Rule.of(input="fp32", weight="fp32", grad="fp32", weight_gradient="input=mxfp8 grad=fp32")
    under(rule, F.conv2d, x, filters).backward(direction)
    summed = torch.einsum("nohw,nihw->oi", direction, kernels.quantize(x, "mxfp8"))
    assert filters.grad is not None and torch.allclose(filters.grad.flatten(1), summed, atol=1e-4)


def test_a_layer_stored_in_16_bits_says_which_shapes_do_not_fit() -> None:
    layer = nn.Linear(8, 3).bfloat16()
    with autocast("bf16"), pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(4x7 and 8x3\)"):
        layer(torch.randn(4, 7))
