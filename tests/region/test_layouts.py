"""Operands that are not strided: the values of sparse and nested tensors are rounded, in every policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput, Misuse, Unavailable
from lowp.region import autocast

PRECISIONS = ("fp16", "bf16", "e5m7", "bf16-tpu", "fp8", "dfp16", "flex16+5", "torch-2.13-cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC|.*) tensor support is in beta:UserWarning"),
]


def dense() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 4).relu()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "COO": Tensor.to_sparse,
    "CSR": Tensor.to_sparse_csr,
    "CSC": Tensor.to_sparse_csc,
    "BSR": lambda x: x.to_sparse_bsr((2, 2)),
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda a, x: a @ x,
    "mm": torch.mm,
    "sparse.mm": torch.sparse.mm,
    "matmul": torch.matmul,
    "spmm": torch.spmm,
    "vector": lambda a, x: a @ x[0],
    "addmm": lambda a, x: torch.addmm(x, a, x),
    "sparse first": lambda a, x: x @ a,
}


# two precisions each, others from one to the next
SPARSE = [
    (name, layout, PRECISIONS[(5 * row + column + turn) % len(PRECISIONS)])
    for row, name in enumerate(PRODUCTS)
    for column, layout in enumerate(LAYOUTS)
    for turn in (0, 4)
]


@pytest.mark.parametrize(("name", "layout", "precision"), SPARSE)
def test_a_product_with_a_sparse_operand_is_that_of_rounded_values(name: str, layout: str, precision: str) -> None:
    a, x = dense(), torch.randn(4, 4)
    sparse = LAYOUTS[layout](a)
    try:
        PRODUCTS[name](sparse, x)
    except RuntimeError:  # which torch itself does not compute
        with autocast(precision), pytest.raises(RuntimeError):
            PRODUCTS[name](sparse, x)
        return
    with autocast(precision):
        expected, found = (PRODUCTS[name](one, x) for one in (a, sparse))
    assert found.dtype is expected.dtype
    assert torch.allclose(found.float(), expected.float(), rtol=2**-6, atol=2**-6)
    assert not torch.equal(found.float(), PRODUCTS[name](a, x))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["COO", "CSR"])
def test_gradients_reach_what_a_sparse_matrix_multiplies(layout: str, precision: str) -> None:
    a, x = dense(), torch.randn(4, 4)
    found = []
    for one in (a, LAYOUTS[layout](a)):
        leaf = x.clone().requires_grad_()
        with autocast(precision):
            (one @ leaf).float().square().sum().backward()
        found.append(leaf.grad)
    assert torch.allclose(*found, rtol=2**-4, atol=2**-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_reach_a_sparse_matrix(precision: str) -> None:
    a = dense().to_sparse().requires_grad_()
    with autocast(precision):
        torch.sparse.mm(a, torch.ones(4, 4)).float().sum().backward()
    assert torch.equal(a.grad.to_dense()[dense() > 0], torch.full((int((dense() > 0).sum()),), 4.0))


def test_entries_that_are_given_in_parts_are_added_before_they_are_rounded() -> None:
    parts = torch.sparse_coo_tensor([[0, 0], [0, 0]], [1.0, 2.0**-9], (1, 1), check_invariants=False)
    with autocast("bf16"):
        assert (parts @ torch.ones(1, 1)).item() == 1.0
    with autocast("e5m7"):
        assert (parts @ torch.ones(1, 1)).item() == 1.0


def test_a_scale_of_rows_or_blocks_is_refused_in_words() -> None:
    with pytest.raises(InvalidInput, match=r"rounds strided tensors, not one of layout torch\.sparse_coo"):
        with autocast("mxfp8"):
            dense().to_sparse() @ torch.ones(4, 4)


def ragged(layout: torch.layout) -> Tensor:
    torch.manual_seed(0)
    return torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_linear_layer_of_nested_rows_is_that_of_each(layout: torch.layout, precision: str) -> None:
    layer, x = nn.Linear(4, 4), ragged(layout)
    with autocast(precision):
        found = layer(x)
        expected = [layer(one) for one in x.unbind()]
    tolerance = 2**-3 if precision == "fp8" else 2**-6  # fp8 has one scale for all rows
    for one, other in zip(found.unbind(), expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ops_between_leave_sparse_tensors_to_torch(precision: str) -> None:
    a = dense().to_sparse()
    with autocast(precision):
        for op in (lambda: a * 2, lambda: a + a, lambda: a.relu(), lambda: a.sum(), lambda: torch.sparse.softmax(a, 1)):
            assert op().dtype is torch.float32


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_with_sparse_gradients_train_and_shared_exponents_refuse_them_in_words(make: Any) -> None:
    for precision in PRECISIONS:
        table = make(4, 3, sparse=True)
        with autocast(precision):
            loss = table(torch.tensor([[0, 1], [1, 1]])).float().sum()
        if precision == "flex16+5":
            with pytest.raises(Misuse, match=r"a gradient is sparse .* create the embedding with sparse=False"):
                loss.backward()
        else:
            loss.backward()
            assert table.weight.grad.is_sparse


# -- torch.jit.trace ----------------------------------------------------------------------------------------------

TRACED = {
    "linear": (lambda: nn.Linear(64, 4), (129, 64)),  # on a CPU that multiplies bf16 a trace does not know small ones
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
    "batch norm": (lambda: nn.BatchNorm1d(8).eval(), (3, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0), (65, 2, 64)),
    "recurrent": (lambda: nn.LSTM(8, 4), (3, 2, 8)),
}


@pytest.mark.filterwarnings("ignore:.*(TracerWarning|torch.jit|trace).*")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("precision", [*PRECISIONS, "e5m7:stochastic", "int8", "mxfp8"])
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_gives_what_the_model_gives_or_is_refused_in_words(name: str, precision: str) -> None:
    make, shape = TRACED[name]
    module, first, second = make(), torch.randn(shape), torch.randn(shape)
    with autocast(precision):
        try:
            traced = torch.jit.trace(module, first, check_trace=False)
        except Unavailable as error:
            assert "torch.jit.trace cannot record" in str(error)
            assert precision not in ("fp16", "bf16") or name == "recurrent"
            return
        expected = module(second)
    assert torch.equal(traced(second), expected)


def test_the_functions_of_lowp_itself_take_sparse_values() -> None:
    values = dense().to_sparse().values()
    assert torch.equal(lowp.quantize(values, "e5m7"), lowp.quantize(dense(), "e5m7")[dense() > 0])


def test_an_mkldnn_operand_stays_as_it_is() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    with autocast("e5m7"):
        nn.Linear(4, 4)(x)
        found = F.linear(x.to_mkldnn(), weight.to_mkldnn()).to_dense()
    assert torch.equal(found, F.linear(x.to_mkldnn(), weight.to_mkldnn()).to_dense())
