"""The op tables: complete against torch's own lists and against every function that torch lets a mode see."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.overrides

from lowp import autocast
from lowp.casts import parse
from lowp.ops import rows
from lowp.ops.generic import quick_wide
from lowp.ops.table import ALIASES, TABLES, is_structural, name_of, op_names, row_of
from lowp.ops.torch_lists import LISTS
from lowp.policy import OP_CLASSES, Policy, Rule

CLASSES = {
    "lower_precision_fp": {"contraction"},
    "fp32": {"wide", "norm"},
    "fp32_set_opt_dtype": {"wide", "softmax"},
    "fp32_append_dtype": {"wide"},
    "promote": {"promote"},
    "banned": {"wide"},
}
SIZES = {
    ("cuda", "lower_precision_fp"): 35,
    ("cuda", "fp32"): 59,
    ("cuda", "fp32_set_opt_dtype"): 11,
    ("cuda", "promote"): 11,
    ("cuda", "fp32_append_dtype"): 2,
    ("cuda", "banned"): 1,
    ("cpu", "lower_precision_fp"): 24,
    ("cpu", "fp32"): 100,
    ("cpu", "promote"): 3,
}
# Python functions that compute in floating point, sum no products, and run in the type they find
POINTWISE_COMPOSITES = {
    *("adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d"),
    *("adaptive_max_pool3d", "adaptive_max_pool1d_with_indices", "adaptive_max_pool2d_with_indices"),
    *("adaptive_max_pool3d_with_indices", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "max_unpool1d", "max_unpool2d", "max_unpool3d"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices"),
    *("fractional_max_pool3d_with_indices", "alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("feature_alpha_dropout", "celu", "elu", "glu", "hardtanh", "leaky_relu", "relu", "relu6", "rrelu", "selu"),
    *("silu", "mish", "softsign", "tanhshrink", "embedding", "embedding_bag", "index", "floor_divide"),
    *("div", "remainder", "rsub"),
}
PRODUCT = re.compile(r"(^|_)(mm|bmm|mv|matmul|conv\w*|attention|lstm|gru|rnn\w*|v?dot|bilinear|einsum|linear)(_|$)")


@pytest.mark.parametrize(("device", "kind"), SIZES)
def test_the_lists_have_the_sizes_that_torch_has(device: str, kind: str) -> None:
    assert len(LISTS[device][kind]) == len(set(LISTS[device][kind])) == SIZES[device, kind]


@pytest.mark.parametrize("kind", LISTS["cuda"])
def test_every_entry_of_the_cuda_lists_has_its_class_in_lowp_1(kind: str) -> None:
    for name in LISTS["cuda"][kind]:
        bare = name.partition(".")[0]
        assert TABLES["lowp-1"][ALIASES.get(bare, bare)].op_class in CLASSES[kind], name


@pytest.mark.parametrize("device", LISTS)
def test_every_entry_of_torch_s_lists_has_its_class_in_torch_s_table(device: str) -> None:
    rows = TABLES[f"torch-2.13-{device}"]
    for kind, names in LISTS[device].items():
        for name in names:
            bare = name.partition(".")[0]
            assert rows[ALIASES.get(bare, bare)].op_class in CLASSES[kind] - {"norm", "softmax"}, name


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_images_are_resized_in_fp32_where_a_list_of_torch_s_says_so(device: str, dtype: torch.dtype) -> None:
    x = torch.ones(1, 2, 4, dtype=torch.bfloat16)
    with autocast(f"torch-2.13-{device}"):
        assert F.interpolate(x, scale_factor=2).dtype is dtype


def test_only_norms_and_softmax_leave_the_fp32_lists() -> None:
    changed = {
        row.name
        for kind in ("fp32", "fp32_set_opt_dtype")
        for name in LISTS["cuda"][kind]
        if (row := TABLES["lowp-1"].get(name.partition(".")[0])) is not None and row.op_class != "wide"
    }
    assert changed == {"layer_norm", "native_layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax"}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_runner_that_exists_and_a_known_class(name: str) -> None:
    for row in TABLES[name].values():
        assert callable(rows.runner(row.runner))
        assert not row.product or callable(rows.runner(row.product))
        assert callable(rows.runner(row.at_site))
        assert row.op_class in OP_CLASSES
        assert set(row.operands.split()) <= {"input", "weight", "bias"}
    assert set(TABLES) == set(Policy.TABLES)


def test_an_op_has_one_row_and_torch_knows_it() -> None:
    names = [name for _, names in rows._ROWS for name in names.split()]
    assert len(names) == len(set(names))
    pointwise = {name for name, row in rows.OPS.items() if row.op_class == "pointwise"}
    assert pointwise - set(op_names()) <= {"hardswish", "hardsigmoid"}  # which torch does not list as overridable
    for row in rows.OPS.values():
        assert all(callable(rows.runner(one)) for one in (row.quick, row.masked) if one)


def test_every_op_of_torchs_cuda_lists_has_a_row() -> None:
    listed = {name.partition(".")[0] for names in LISTS["cuda"].values() for name in names}
    assert {ALIASES.get(name, name) for name in listed} <= set(TABLES["lowp-1"])


def test_every_overridable_function_is_classified_on_purpose() -> None:
    """Python composites are listed; a C function may be pointwise by default unless its name indicates a product."""
    for function in torch.overrides.get_testing_overrides():
        row = row_of(function)
        if row is None:
            assert is_structural(name_of(function))
        elif row.op_class == "pointwise":
            assert not PRODUCT.search(row.name), row.name
            assert not inspect.isfunction(function) or row.name in POINTWISE_COMPOSITES, row.name


def test_the_list_of_pointwise_composites_is_not_longer_than_needed() -> None:
    found = {name_of(f) for f in torch.overrides.get_testing_overrides() if inspect.isfunction(f)}
    assert found >= POINTWISE_COMPOSITES


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.matmul, "matmul"),
        (torch.Tensor.__matmul__, "matmul"),
        (torch.linalg.matmul, "matmul"),
        (torch.ops.aten.mm, "mm"),
        (torch.ops.aten.mm.default, "mm"),
        (torch.Tensor.addmm_, "addmm"),
        (F.linear, "linear"),
        (torch.Tensor.__ipow__, "pow"),
        (torch.Tensor.__rpow__, "pow"),
        (torch.Tensor.__add__, "add"),
        (torch.Tensor.__radd__, "add"),
        (torch.Tensor.__iadd__, "add"),
        (torch.Tensor.__truediv__, "div"),
        (torch.special.expm1, "expm1"),
        (torch.norm, "linalg_norm"),
        (torch.nn.init.normal_, "_normal"),
    ],
)
def test_an_op_has_one_name(function: Callable[..., Any], name: str) -> None:
    assert name_of(function) == name


@pytest.mark.parametrize(
    "function",
    [torch.Tensor.view, torch.Tensor.shape.__get__, torch.zeros, torch.Tensor.to, torch.argmax, torch.nn.init.normal_],
)
def test_what_moves_or_describes_tensors_has_no_row(function: Callable[..., Any]) -> None:
    assert row_of(function) is None


def test_functions_of_lists_are_left_to_optimizers_under_both_of_their_names() -> None:
    def sqrt(tensors: list[torch.Tensor]) -> None:
        """As torch.foreach.sqrt, which torch has from 2.15 on."""

    sqrt.__module__ = "torch.foreach"
    functions = [torch._foreach_sqrt, sqrt, getattr(torch, "foreach", SimpleNamespace(sqrt=sqrt)).sqrt]
    assert [row_of(one) for one in functions] == [None] * 3


def test_rules_can_name_rows_and_pointwise_ops() -> None:
    names = op_names()
    assert names[0] in TABLES["lowp-1"]
    assert {"linear", "relu", "add", "gelu"} <= set(names)
    assert "view" not in names
    assert len(names) == len(set(names))


def test_a_row_tells_which_runner_a_rule_gets() -> None:
    from lowp.ops import contraction, generic
    from lowp.policy import Rule

    dot = TABLES["lowp-1"]["dot"]
    assert dot.run(None) is generic.promote
    assert dot.run(Rule.of("dot")) is generic.promote
    assert dot.run(Rule.of("dot", input="bf16")) is contraction.matmul
    assert not dot.is_contraction
    assert TABLES["lowp-1"]["linear"].is_contraction


def test_functions_that_are_equal_have_one_name() -> None:
    """A cache by function cannot distinguish torch.dsmm from torch.mm, which are one function with two names."""
    names: dict[Callable[..., Any], set[str]] = {}
    for one in ("mm", "dsmm", "spmm", "hsmm", "hspmm", "sspaddmm", "saddmm"):
        names.setdefault(getattr(torch, one), set()).add(name_of.__wrapped__(getattr(torch, one)))
    assert all(len(each) == 1 for each in names.values()), names
    for function in torch.overrides.get_testing_overrides():
        names.setdefault(function, set()).add(name_of.__wrapped__(function))
    assert all(len(each) == 1 for each in names.values())


IN_PLACE: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    **dict.fromkeys(("add_", "mul_", "div_", "pow_", "xlogy_", "atan2_", "clamp_"), lambda other: (other,)),
    **dict.fromkeys(("square_", "log_", "abs_", "sin_"), lambda other: ()),
    "cumprod_": lambda other: (0,),
}


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m7", "flex16+5"])
def test_functions_in_place_have_the_derivatives_of_those_that_are_not(name: str) -> None:
    for function, takes in IN_PLACE.items():
        found = []
        for one in (function, function[:-1]):
            x, w = ((torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)) + 0.5) for seed in (0, 1))
            x, w = x.requires_grad_(), w.requires_grad_()
            with autocast(name):
                y = getattr(x.float() + 0.25, one)(*takes(w))
            y.float().square().sum().backward()
            found.append([y, x.grad, w.grad])
        for changed, kept in zip(*found, strict=True):
            assert changed is kept is None or torch.equal(changed, kept), function


@pytest.mark.parametrize(
    ("others", "named", "is_quick"),
    [
        ((), {}, True),
        ((2, torch.Size([3])), {"index": torch.tensor(1)}, True),
        ((torch.ones(2),), {}, False),
        ((), {"out": (torch.ones(2), torch.ones(2))}, False),
        (([0],), {}, False),
    ],
    ids=["alone", "numbers", "a tensor", "tensors in a tuple", "a list"],
)
def test_an_op_that_widens_is_quick_for_one_tensor_and_no_list(
    others: tuple[Any, ...], named: dict[str, Any], is_quick: bool
) -> None:
    quick = quick_wide(Rule(input=parse("fp32")))
    assert quick is not None
    found = quick(lambda x, *others, **named: x, (torch.ones(2, dtype=torch.float16), *others), named, None)
    assert (None if found is None else found.dtype) is (torch.float32 if is_quick else None)
