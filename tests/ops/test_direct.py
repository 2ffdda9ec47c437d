"""Contractions straight from their arguments have the bits of their definition, and take plain calls alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.kernels import cpu
from lowp.ops.backward import Back
from lowp.ops.direct import Direct, one_dtype
from lowp.policy import Policy, Rule
from lowp.region import handover
from lowp.region.engine import Engine

SHAPES = {
    "matrix": ((5, 7), (3, 7)),
    "row": ((7,), (3, 7)),
    "batches": ((2, 4, 7), (3, 7)),
    "vector": ((5, 7), (7,)),
    "empty": ((0, 7), (3, 7)),
    "nothing summed": ((5, 0), (3, 0)),
}


def tensors(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    bias = torch.randn(shapes[1][0], generator=generator) if len(shapes[1]) == 2 else None
    return [x.to(dtype).requires_grad_(), nn.Parameter(weight), None if bias is None else nn.Parameter(bias)]


def results(region: Any, given: list[Tensor | None], twice: bool) -> list[Tensor]:
    """Return the output and all gradients; with `twice` also the gradients of the gradients."""
    there = [one for one in given if one is not None]
    with region:
        y = F.linear(*given)  # type: ignore[arg-type]
    found = torch.autograd.grad(y, there, y.detach() + 1, create_graph=twice)
    if twice:
        loss = sum(one.float().square().sum() for one in found)
        return [y, *found, *torch.autograd.grad(loss, there[:2])]  # type: ignore[arg-type]
    with region, torch.no_grad():
        return [y, *found, F.linear(*given)]  # type: ignore[arg-type]


def taken_straight(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each contraction adds whether it ran straight from its arguments."""
    taken: list[bool] = []
    contract = Direct.contract

    def noted(*given: Any) -> Any:
        result = contract(*given)
        taken.append(result is not None)
        return result

    monkeypatch.setattr(Direct, "contract", noted)
    return taken


def take_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Direct, "contract", lambda *given: None)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", torch.float32), ("bf16", torch.float32), ("fp16", torch.bfloat16)]
)
def test_both_ways_give_the_same_bits(
    precision: str, dtype: torch.dtype, shape: str, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tensors(SHAPES[shape], dtype)
    taken = taken_straight(monkeypatch)
    fast = results(lowp.autocast(precision), given, twice)
    assert taken and all(taken) is (0 not in SHAPES[shape][0])  # nothing is left to its definition
    take_the_long_way(monkeypatch)
    slow = results(lowp.autocast(precision), given, twice)
    for one, other in zip(fast, slow, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


BY_GROUPS = ["mxfp8", "nvfp4", "i8s@fp32/row", "i8s@fp32/channel"]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("shape", ["matrix", "batches", "vector", "nothing summed"])
@pytest.mark.parametrize("precision", ["e5m7", "fp8", "e4m3fn", "e2m1", "i4s@fp32/tensor", "dfp16", *BY_GROUPS])
def test_calls_made_of_their_arguments_alone_give_the_same_bits(
    precision: str, shape: str, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tensors(SHAPES[shape], torch.float32)
    given[0].data.view(-1)[:1] = 1e9  # type: ignore[union-attr]  # beyond the largest number of all but one
    fast = results(lowp.autocast(precision), given, twice)
    take_the_long_way(monkeypatch)
    monkeypatch.setattr(handover, "functorch_transforms", lambda: True)  # no fast path is taken
    slow = results(lowp.autocast(precision), given, twice)
    for one, other in zip(fast, slow, strict=True):
        assert one.dtype is other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("output", ["e4m3fn", "e4m3fn:saturate", "e2m1", "e5m2"])
def test_infinities_of_results_and_gradients_stay_for_a_loss_scale_to_see(output: str) -> None:
    x, weight = torch.tensor([[math.inf, 1.0], [-math.inf, 2.0], [3.0, 4.0]]), torch.ones(2, 2)
    given = [x.requires_grad_(), weight.requires_grad_()]
    with lowp.autocast(Policy((Rule.of("contraction", output=output, grad="fp32"),))):
        y = F.linear(*given)
        of_x, of_weight = torch.autograd.grad(y, given, torch.tensor([[1.0, 1.0], [0.0, 1.0], [-math.inf, 0.0]]))
    assert y[:2].tolist() == [[math.inf] * 2, [-math.inf] * 2] and y[2].isfinite().all()
    assert of_x[2].tolist() == [-math.inf] * 2 and of_x[:2].isfinite().all()
    assert not of_weight.isfinite().any(1)[0]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_linear_layers_at_sites_give_the_same_bits_from_their_arguments(
    twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps() -> list[Tensor]:
        precision, given = lowp.Precision("flex16+5"), tensors(SHAPES["matrix"], torch.float32)
        found = []
        for _ in range(3):  # the first step of a site begins with its own maximum
            found += results(precision.autocast(), given, twice)
            assert precision.exponents is not None
            precision.exponents.flush()
        return found

    long_ways: list[str] = []
    run = Engine._run
    monkeypatch.setattr(Engine, "_run", lambda *given: long_ways.append("") or run(*given))
    fast = steps()
    assert not long_ways
    monkeypatch.setattr(handover, "functorch_transforms", lambda: True)  # no fast path is taken
    slow = steps()
    assert long_ways
    assert all(torch.equal(one, other) for one, other in zip(fast, slow, strict=True))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("precision", ["e5m7", "fp8", "e2m1", *BY_GROUPS])
def test_what_is_not_finite_stays_so_in_calls_made_of_their_arguments(precision: str, bad: float) -> None:
    for index in (0, 1):
        given = tensors(SHAPES["matrix"], torch.float32)
        given[index].data[0, 0] = bad  # type: ignore[union-attr]
        y, of_x, of_weight, *_ = results(lowp.autocast(precision), given, False)
        assert not y[0, 0].isfinite() and not (of_weight if index == 0 else of_x)[0, 0].isfinite()


@pytest.mark.parametrize("way", ["native", "reference", "bitwise"])
def test_both_ways_are_one_implementation(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(((5, 300), (3, 300)), torch.float32)
    with kernels.use(way):
        fast = results(lowp.autocast("bf16"), given, False)
        take_the_long_way(monkeypatch)
        monkeypatch.setattr(handover, "device_of", lambda *given: None)
        slow = results(lowp.autocast("bf16"), given, False)
    assert all(torch.equal(one, other) for one, other in zip(fast, slow, strict=True))


def by_rule(**casts: Any) -> Any:
    return lambda: lowp.autocast(Policy((Rule.of("contraction", **casts),)))


def observed(region: Any) -> Any:
    region.observe(lambda seen: None)
    return region


HALF = {"input": "fp16", "weight": "fp16", "grad": "fp16", "output": "fp16"}
ASKED = {
    "a shared scale of the results": by_rule(**{**HALF, "output": "mxfp8"}),
    "a cast that clips": by_rule(input="fp16", weight="ternary"),
    "int16 in floating-point sums": by_rule(input="dfp16", weight="dfp16"),
    "blocks": by_rule(**HALF, accumulate="fp16/2"),
    "observers": lambda: observed(lowp.autocast("fp16")),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_else_is_asked_for_goes_the_long_way(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, taken = tensors(SHAPES["matrix"], torch.float32), taken_straight(monkeypatch)
    with ASKED[asked]():
        F.linear(*given)  # type: ignore[arg-type]
    assert not any(taken)


def test_plans_of_rules_that_are_gone_are_not_taken_for_others() -> None:
    x, weight = torch.ones(1, 8), torch.ones(2, 8)
    for format, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)) * 3:
        with by_rule(input=format, weight=format, grad=format, output=format)():
            assert F.linear(x, weight).dtype is dtype


# -- matrices that are not large, in 16 bits ----------------------------------------------------------------------


def long_and_short(run: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the results of a function on the shortest path, which it must take, and on the long one."""
    taken = taken_straight(monkeypatch)
    fast = run()
    assert taken and all(taken)
    take_the_long_way(monkeypatch)
    slow = run()
    assert len(fast) == len(slow)
    for one, other in zip(fast, slow, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


small_matrices = pytest.mark.usefixtures("emulated")


@small_matrices
@pytest.mark.parametrize("frozen", range(7), ids="{:03b}".format)
def test_operands_that_need_no_gradient_get_none(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(SHAPES["matrix"], torch.float32)
    needed = [one for place, one in enumerate(given) if one is not None and not frozen >> place & 1]
    for place, one in enumerate(given):
        assert one is not None
        one.requires_grad_(not frozen >> place & 1)

    def run() -> list[Tensor]:
        with lowp.autocast("fp16"):
            y = F.linear(*given)  # type: ignore[arg-type]
        return [y, *torch.autograd.grad(y, needed, y.detach() + 1)]

    long_and_short(run, monkeypatch)


@small_matrices
def test_a_retained_graph_gives_its_gradients_again_and_operands_may_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> list[Tensor]:
        x, weight, bias = tensors(SHAPES["matrix"], torch.float32)
        assert x is not None and weight is not None and bias is not None
        with lowp.autocast("fp16"):
            y = F.linear(x, weight, bias)
        with torch.no_grad():  # rounded values are saved, not the operands
            x.add_(1)
            weight.mul_(2)
        first = torch.autograd.grad(y, (x, weight, bias), y.detach() + 1, retain_graph=True)
        second = torch.autograd.grad(y, (x, weight, bias), y.detach() + 1)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, (x, weight, bias), y.detach() + 1)
        return [*first, *second]

    long_and_short(run, monkeypatch)


@small_matrices
def test_hooks_see_saved_tensors_gradients_and_the_region_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        packed: list[Tensor] = []
        x, weight, bias = tensors(SHAPES["matrix"], torch.float32)
        assert x is not None and weight is not None and bias is not None
        weight.register_hook(lambda gradient: gradient * 2)
        with lowp.autocast("fp16"):
            with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one) or one, lambda one: one * 2):
                y = F.linear(x, weight, bias)
            assert [one.dtype for one in packed] == [torch.float16] * 2
            y.sum().backward()  # within the region
            assert torch.is_autocast_enabled("cpu")
        assert x.grad is not None and weight.grad is not None and bias.grad is not None
        return [x.grad, weight.grad, bias.grad]

    long_and_short(run, monkeypatch)


@small_matrices
@pytest.mark.parametrize("way", ["reference", "bitwise"])
def test_a_backward_pass_computes_as_it_is_told(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        given = tensors(((5, 300), (3, 300)), torch.float32)
        with lowp.autocast("fp16"):
            y = F.linear(*given)  # type: ignore[arg-type]
        with kernels.use(way):
            return list(torch.autograd.grad(y, given, y.detach() + 1))  # type: ignore[arg-type]

    long_and_short(run, monkeypatch)


@pytest.mark.parametrize(("rows", "is_kept"), [(32, False), (33, True)])
def test_a_large_weights_cast_is_kept_within_an_entry_whose_scales_run_along_its_last_dimension_or_not_at_all(
    rows: int, is_kept: bool
) -> None:
    def kept(precision: str, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> int:
        weight = nn.Parameter(torch.ones(shape))
        with lowp.autocast(precision) as region:
            function(torch.ones(3, 32), weight)
            return len(region._weights)

    assert kept("mxfp8", F.linear, rows, 32) == kept("e5m7", F.linear, rows, 32) == is_kept
    assert kept("e5m7", torch.matmul, 32, rows) == is_kept
    assert kept("mxfp8", torch.matmul, 32, rows) == 0  # along the first


@small_matrices
def test_the_gradients_of_a_weight_used_twice_are_rounded_each_and_added_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> list[Tensor]:
        x, weight, bias = tensors(((5, 3), (3, 3)), torch.float32)
        with lowp.autocast("fp16"):
            y = F.linear(F.linear(x, weight, bias).float(), weight, bias)  # type: ignore[arg-type,union-attr]
        return list(torch.autograd.grad(y.float().sum(), (x, weight, bias)))  # type: ignore[arg-type]

    long_and_short(run, monkeypatch)


def test_an_error_in_a_call_leaves_the_regions_state() -> None:
    x, weight = torch.ones(2, 3), nn.Parameter(torch.ones(4, 3))
    for precision in ("fp16", "bf16", "fp8", "dfp16"):
        with lowp.autocast(precision):
            for grad in (True, False):
                with torch.set_grad_enabled(grad), pytest.raises(RuntimeError):
                    F.linear(x, weight, torch.ones(5))
                assert torch.is_autocast_enabled("cpu")
            assert F.linear(x, weight).shape == (2, 4)
        assert not torch.is_autocast_enabled("cpu")


# -- convolutions and products of batches -------------------------------------------------------------------------

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 8)),
    "without a bias": (lambda: nn.Conv2d(4, 6, 1, bias=False), (2, 4, 5, 5)),
    "strides, dilation, groups": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (1, 2), 2), (2, 4, 9, 8)),
    "one dimension": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "three dimensions": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), (2, 4, 5, 6)),
    "no batch": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 8)),
    "same": (lambda: nn.Conv2d(4, 6, 2, padding="same"), (2, 4, 7, 8)),
}
ROUNDED = ["fp16", "e5m7", "fp8", "mxfp8", "nvfp4", "int8", "i8s@fp32/row", "e4m3fn:stochastic", "mxfp8:stochastic"]


def trained(module: nn.Module, x: Tensor, precision: str, gradient: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the result, and the gradients of the input and the parameters."""
    torch.manual_seed(7)
    given = x.detach().requires_grad_()
    with lowp.autocast(precision):
        y = module(given)
    return [y, *torch.autograd.grad(y, (given, *module.parameters()), gradient(y.detach()))]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("layout", ["dense", "channels last", "spread gradient"])
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("precision", ROUNDED)
def test_convolutions_from_their_arguments_have_the_bits_of_their_definition(
    precision: str, module: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[module]
    layer, x = make(), torch.randn(shape)
    if layout == "channels last":
        if len(shape) != 4:
            pytest.skip("torch has the layout for images alone")
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    spread = lambda y: y.new_ones(()).expand_as(y)  # noqa: E731
    gradient = spread if layout == "spread gradient" else lambda y: y + 1
    taken = taken_straight(monkeypatch)
    fast = trained(layer, x, precision, gradient)
    assert taken
    take_the_long_way(monkeypatch)
    slow = trained(layer, x, precision, gradient)
    for one, other in zip(fast, slow, strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize("before", [torch.relu, torch.square], ids=["saved", "not saved"])
@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "int8", "e5m7"])
def test_gradients_of_gradients_of_convolutions_have_the_bits_of_their_definition(
    precision: str, before: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 7, 8, requires_grad=True)

    def run() -> list[Tensor]:
        torch.manual_seed(7)
        with lowp.autocast(precision):
            y = layer(before(x))
        inputs = x, layer.weight
        alone = torch.autograd.grad(y, inputs, y.detach() + 1, retain_graph=True)
        first = torch.autograd.grad(y, inputs, y.detach() + 1, create_graph=True)
        second = torch.autograd.grad((first[0] * 2).sum() + first[1].square().sum(), (x, layer.weight))
        return [*alone, *first, *second]

    long_and_short(run, monkeypatch)


PRODUCTS: dict[str, tuple[Any, ...]] = {  # a function, and the shapes of its operands; parameters where these are lists
    "matmul": (torch.matmul, (5, 7), (7, 3)),
    "batches": (Tensor.matmul, (2, 3, 5, 7), (2, 3, 7, 4)),
    "one matrix for all": (torch.matmul, (2, 5, 7), (7, 4)),
    "broadcast": (torch.matmul, (2, 1, 5, 7), (1, 3, 7, 4)),
    "vectors": (torch.matmul, (7,), (7,)),
    "mm": (torch.mm, (5, 7), (7, 3)),
    "bmm": (torch.bmm, (2, 5, 7), (2, 7, 3)),
    "a number a column": (torch.addmm, (3,), (5, 7), (7, 3)),
    "a number a column of batches": (torch.baddbmm, (3,), (2, 5, 7), (2, 7, 3)),
    "a matrix added": (torch.addmm, (5, 3), (5, 7), (7, 3)),
    "a column added": (torch.addmm, (5, 1), (5, 7), (7, 3)),
    "factors": (partial(torch.addmm, beta=0.3, alpha=0.7), (3,), (5, 7), (7, 3)),
    "a factor": (partial(torch.addmm, alpha=0.7), (3,), (5, 7), (7, 3)),
    "a factor of what is added": (partial(torch.baddbmm, beta=0.3), (2, 5, 3), (2, 5, 7), (2, 7, 3)),
    "a sum of batches": (partial(torch.addbmm, alpha=3), (5, 3), (2, 5, 7), (2, 7, 3)),
    "a number a row": (torch.addmv, (5,), (5, 7), (7,)),
    "vectors added": (torch.addr, (5, 3), (5,), (3,)),
    "a weight first": (torch.matmul, [5, 7], (7, 3)),
    "weights": (torch.matmul, [5, 7], [7, 3]),
    "a weight by a vector": (torch.mv, [5, 7], (7,)),
    "lying across, expanded": (lambda x, y: torch.bmm(x.permute(2, 1, 0), y.expand(3, 7, 4)), (7, 5, 3), (1, 7, 4)),
    "expanded, lying across": (lambda x, y: torch.bmm(x.expand(3, 5, 7), y.permute(2, 1, 0)), (1, 5, 7), (4, 7, 3)),
    "transposed rows": (lambda x, weight: F.linear(x.transpose(0, 1), weight), (2, 5, 7), (3, 7)),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("precision", ROUNDED)
def test_products_from_their_arguments_have_the_bits_of_their_definition(
    precision: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    function, *shapes = PRODUCTS[product]
    drawn = [(torch.randn(tuple(shape)), type(shape) is list) for shape in shapes]
    operands = [nn.Parameter(one) if is_weight else one.requires_grad_() for one, is_weight in drawn]

    def run() -> list[Tensor]:
        torch.manual_seed(7)
        with lowp.autocast(precision):
            y = function(*operands)
        return [y, *torch.autograd.grad(y, operands, y.detach() + 1)]

    taken = taken_straight(monkeypatch)
    fast = run()
    assert any(taken) == (product not in {"broadcast", "a sum of batches"})  # of which an operand would be copied
    take_the_long_way(monkeypatch)
    for one, other in zip(fast, run(), strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize("function", [torch.mm, torch.bmm, torch.matmul])
def test_products_that_torch_refuses_raise_its_own_error(function: Callable[..., Tensor]) -> None:
    for first, second in (((2, 3), (2, 3)), ((2, 3), (3,)), ((3,), (3, 2)), ((2, 3, 4), (3, 4, 2)), ((4,), (2, 3, 4))):
        x, y = torch.ones(first), torch.ones(second)
        try:
            expected: object = function(x, y).shape
        except RuntimeError as error:
            expected = str(error)
        with lowp.autocast("fp8"):
            try:
                found: object = function(x, y).shape
            except RuntimeError as error:
                found = str(error)
        assert found == expected


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_a_product_of_vectors_along_any_dimension_has_rounded_operands(dim: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 5), torch.randn(5, 5)
    with by_rule(input="e2m1", weight="e2m1")():
        found = torch.linalg.vecdot(x, y, dim=dim)
    wide = [kernels.quantize(one, "e2m1").double() for one in (x, y)]
    torch.testing.assert_close(found, torch.linalg.vecdot(*wide, dim=dim).float())


@pytest.mark.parametrize("count", [1, 4])
def test_a_layer_of_too_few_or_too_many_arguments_is_refused_in_torchs_words(count: int) -> None:
    with lowp.autocast("fp8"), pytest.raises(TypeError, match=r"linear\(\)"):
        F.linear(*[torch.ones(3, 3)] * count)


def test_sums_in_blocks_are_left_to_no_product_of_one_dtype() -> None:
    assert one_dtype(Rule.of("contraction", **HALF)) is torch.float16
    assert one_dtype(Rule.of("contraction", **HALF, accumulate="fp16/2")) is None


def test_a_chain_is_multiplied_in_the_order_of_fewest_multiplications() -> None:
    """The example of Cormen, Leiserson, Rivest and Stein, Introduction to Algorithms, section 15.2."""
    sizes, shapes = [30, 35, 15, 5, 10, 20, 25], []
    region = lowp.autocast("fp8")
    region.observe(lambda seen: shapes.append(tuple(seen.tensor.shape)) if seen.role == "output" else None)
    with region:
        torch.linalg.multi_dot([torch.ones(pair) for pair in itertools.pairwise(sizes)])
    assert shapes == [(35, 5), (30, 5), (5, 20), (5, 25), (30, 25)]


OTHERS = {
    "a stochastic result": {"input": "e4m3fn", "weight": "e4m3fn", "grad": "e5m2", "output": "e5m7:stochastic"},
    "bytes that only layers sum": {"input": "int8", "weight": "int8", "grad": "int8", "accumulate": "int32"},
}


NVFP4, TILES = "nvfp4", "e2m1@e4m3fn@fp32/16x16"
BY_PRODUCT = {
    "nvfp4": {"weight": TILES, "weight_gradient": "input=nvfp4 hadamard=16"},
    "both rotated": {
        **dict.fromkeys(("input", "weight"), "mxfp4"),
        "grad": "mxfp4:stochastic",
        "input_gradient": "weight=mxfp4 hadamard=16",
        "weight_gradient": "input=mxfp4:stochastic hadamard=8",
    },
    "other casts": {"input_gradient": "weight=mxfp8 grad=mxfp6", "weight_gradient": "input=e5m2@fp32/row grad=bf16"},
    "a gradient alone": {"grad": "mxfp8", "input_gradient": "grad=mxfp4:stochastic", "output": "fp16"},
    "rotated alone": {"weight": "bf16", "grad": "bf16", "output": None, "weight_gradient": "input=fp32 hadamard=4"},
    "four or six": {"input": "nvfp4:4/6", "weight": f"{TILES}:4/6", "output": "fp32"},
}
MULTIPLIED: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "matrix": (F.linear, (37, 45), (19, 45)),
    "batches": (F.linear, (3, 12, 64), (48, 64)),
    "row": (F.linear, (64,), (48, 64)),
    "matrices": (torch.matmul, (2, 24, 32), (2, 32, 40)),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (2, 20, 6, 6), (24, 20, 3, 3)),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("name", BY_PRODUCT)
def test_products_with_casts_of_their_own_have_the_bits_of_their_definition(
    name: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa not in cpu.available():
        pytest.skip(f"this processor has no {isa}")
    casts: dict[str, Any] = {"input": NVFP4, "weight": NVFP4, "grad": "nvfp4:stochastic", "output": "bf16"}
    region = by_rule(**{key: value for key, value in (casts | BY_PRODUCT[name]).items() if value is not None})
    ran: list[bool] = []
    back = Back.run
    monkeypatch.setattr(Back, "run", lambda *given: (found := back(*given), ran.append(found is not None))[0])

    def run(product: str, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(7)
        function, *shapes = MULTIPLIED[product]
        x, w = torch.randn(shapes[0]).to(dtype).requires_grad_(), torch.randn(shapes[1], requires_grad=True)
        with region():
            y = function(x, w)
        return [y, *torch.autograd.grad(y, (x, w), y.detach() * 2)]

    calls = [(product, dtype) for product in MULTIPLIED for dtype in (torch.float32, torch.bfloat16)]
    calls = [call for call in calls if call[0] != "convolution" or "hadamard" not in str(BY_PRODUCT[name])]
    taken = taken_straight(monkeypatch)
    cpu.select(isa)
    try:
        fast = [run(*call) for call in calls]
    finally:
        cpu.select(None)
    assert all(taken) and all(ran) and len(taken) == len(ran) == len(calls)
    take_the_long_way(monkeypatch)
    for call, straight in zip(calls, fast, strict=True):
        for one, other in zip(straight, run(*call), strict=True):
            assert one.dtype is other.dtype and torch.equal(one, other), call


def test_what_is_no_number_is_rotated_by_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = by_rule(input="e4m3fn", grad="e5m2", weight_gradient="input=e4m3fn hadamard=4")
    x, w = torch.randn(8, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    x.data[1, 1], x.data[6, 2] = math.inf, math.nan

    def run() -> list[Tensor]:
        torch.manual_seed(7)
        with rule():
            y = F.linear(x, w)
        return list(torch.autograd.grad(y, (x, w), torch.ones_like(y)))

    fast = run()
    take_the_long_way(monkeypatch)
    assert not fast[1].isfinite().all()
    for one, other in zip(fast, run(), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("casts", OTHERS)
@pytest.mark.parametrize("call", ["linear", "matmul", "conv2d"])
def test_other_casts_have_the_bits_of_their_definition(call: str, casts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = ((2, 3, 5, 5), (4, 3, 2, 2)) if call == "conv2d" else ((6, 5), (5, 5))
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    function = torch.matmul if call == "matmul" else getattr(F, call)

    def run() -> list[Tensor]:
        torch.manual_seed(7)
        with by_rule(**OTHERS[casts])():
            y = function(*operands)
        return [y, *torch.autograd.grad(y, operands, y.detach() + 1)]

    fast = run()
    take_the_long_way(monkeypatch)
    assert all(torch.equal(one, other) for one, other in zip(fast, run(), strict=True))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", ["fp8", "e4m3fn@fp32/tensor", "mxfp8"])
def test_gradients_that_may_lose_features_are_looked_at_at_times_and_have_the_same_bits(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x, gradient = nn.Linear(8, 1024), torch.randn(4, 8), torch.randn(4, 1024)
    ran, run = [], Back.run
    monkeypatch.setattr(Back, "run", lambda *given: ran.append(True) or run(*given))
    found = []
    for _ in range(34):
        with lowp.autocast(precision):
            y = layer(x)
        found.append(torch.autograd.grad(y, tuple(layer.parameters()), gradient))
    assert len(ran) == (34 if precision == "mxfp8" else 32)  # the first and the 33rd by the definition
    assert all(torch.equal(one, other) for some in found for one, other in zip(some, found[0], strict=True))
