"""Operands without elements: every op and layer gives what it gives in fp32, forward and backward, and ends no process.

The sizes of each shape become 0 in every place. Calls that fp32 refuses may be refused with another error. Each call
runs in one of the precisions, in turn; in all of them with `-m slow`. All run in child processes, since a division
by a size in compiled code ends the process.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp.precision import Precision
from lowp.region import autocast

from .. import forked
from .cases import CHAINS, CONTRACTIONS

Shape = tuple[int, ...]
PRECISIONS = (
    "fp16 bf16 bf16-tpu bf16-trunc e5m7 e4m3fn fp8 fp8-delayed mxfp8 nvfp4 int8 dfp16 flex16+5 torch-2.13-cpu".split()
)
PREPARED = "fp16 bf16-storage fp16-storage fp16-naive e4m3fn dfp16 flex16+5".split()
# masks have one shape, and heads are in groups; with beta=0 torch gives the input a gradient of zeros, lowp none
CALLS = {**CONTRACTIONS, **CHAINS}
OTHERS = ("attention masked", "attention grouped", "addmm without input")
LAYERS: dict[str, tuple[Callable[[Shape], Any], Shape]] = {
    "linear": (lambda n: nn.Linear(n[2], 3), (2, 5, 4)),
    "two layers": (lambda n: nn.Sequential(nn.Linear(n[1], 32), nn.Linear(32, 3)), (2, 32)),
    "batch norm": (lambda n: nn.BatchNorm1d(n[1]), (2, 4, 5)),
    "batch norm in evaluation": (lambda n: nn.BatchNorm2d(n[1]).eval(), (2, 4, 5, 3)),
    "instance norm": (lambda n: nn.InstanceNorm1d(n[1], affine=True), (2, 4, 5)),
    "group norm": (lambda n: nn.GroupNorm(2, n[1]), (2, 4, 5)),
    "layer norm": (lambda n: nn.LayerNorm(n[2]), (2, 5, 4)),
    "RMS norm": (lambda n: nn.RMSNorm(n[2]), (2, 5, 4)),
    "attention": (lambda n: nn.MultiheadAttention(4, 2, batch_first=True), (2, 5, 4)),
    "encoder": (lambda n: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (2, 5, 4)),
    "LSTM": (lambda n: nn.LSTM(n[2], 3, 2, batch_first=True), (2, 5, 4)),
    "GRU": (lambda n: nn.GRU(n[2], 3, bidirectional=True), (5, 2, 4)),
    "GRU cell": (lambda n: nn.GRUCell(n[1], 3), (2, 4)),
    "convolution": (lambda n: nn.Conv2d(n[1], 6, 3, padding=1), (2, 4, 5, 5)),
    "transposed convolution": (lambda n: nn.ConvTranspose2d(n[1], 6, 3), (2, 4, 5, 5)),
    "pooling": (lambda n: nn.MaxPool2d(2), (2, 4, 6, 6)),
    "average": (lambda n: nn.AdaptiveAvgPool2d(1), (2, 4, 6, 6)),
    "GELU": (lambda n: nn.GELU(), (2, 4)),
    "softmax": (lambda n: nn.Softmax(-1), (3, 5)),
    "cross entropy": (lambda n: lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long)), (2, 5)),
    "sums": (lambda n: lambda x: x.sum(1) / (x.abs().mean(1) + 1), (2, 5)),
}


def with_zeros(shapes: Sequence[Shape]) -> Iterator[tuple[Shape, ...]]:
    """Yield the shapes with each of their sizes replaced by 0 wherever it occurs."""
    for size in sorted({size for shape in shapes for size in shape}):
        yield tuple(tuple(0 if one == size else one for one in shape) for shape in shapes)


def with_places(shape: Shape) -> Iterator[Shape]:
    """Yield the shape with a 0 in every place, in every two places, and everywhere."""
    for count in {1, min(2, len(shape)), len(shape)}:
        for places in itertools.combinations(range(len(shape)), count):
            yield tuple(0 if place in places else size for place, size in enumerate(shape))


def called(name: str, shapes: Sequence[Shape], precision: str) -> list[Tensor | None]:
    """Return the result of a call and the gradients of its operands."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with autocast(precision) if precision else nullcontext():
        y = CALLS[name].call(*tensors)
    y.float().sum().backward()
    return [y.detach(), *(x.grad for x in tensors)]


def applied(name: str, shape: Shape, precision: str, prepared: bool = False) -> list[Tensor | None]:
    """Return the result of a layer, and the gradients of its input and parameters; those of a prepared one are used."""
    torch.manual_seed(0)
    layer, x = LAYERS[name][0](shape), torch.randn(shape, requires_grad=True)
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    precise = Precision(precision, loss_scale="none") if prepared and precision and parameters else None
    if precise is not None:
        layer, optimizer = precise.prepare(layer, torch.optim.SGD(parameters, lr=0.1))
    region = nullcontext() if not precision else autocast(precision) if precise is None else precise.autocast()
    with region:
        y = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
        while isinstance(y, tuple):
            y = y[0]
        loss = y.float().sum()
    if precise is None:
        loss.backward()
        return [y.detach(), x.grad] if prepared else [y.detach(), x.grad, *(one.grad for one in parameters)]
    precise.backward(loss)
    precise.step(optimizer)
    return [y.detach(), x.grad]


def differences(run: Callable[..., list[Tensor | None]], given: tuple[Any, ...], precision: str) -> Iterator[str]:
    """Yield what a precision does otherwise than fp32."""
    try:
        expected = run(*given, "")
    except (RuntimeError, ValueError, IndexError, AssertionError):
        expected = None
    try:
        found = run(*given, precision)
    except Exception as error:
        if expected is not None:
            yield f"{precision}: {given}: {error!r}"
        return
    for wanted, got in zip(expected or (), found, strict=False):
        same = (wanted is None) == (got is None)
        if same and wanted is not None and got is not None:
            close = partial(torch.allclose, atol=0.3, rtol=0.1, equal_nan=True)
            same = wanted.shape == got.shape and close(wanted.float(), got.float())
        if not same:
            yield f"{precision}: {given}: {got} for {wanted}"


def child(_: int, run: Callable[..., list[Tensor | None]], todo: list[tuple[Any, ...]], note: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for given, precision in todo:
        note.write_text(f"{precision}: {given}")  # what it was, should it end the process
        found += differences(run, given, precision)
    assert not found, "\n".join(found)


def run_in_turn(
    run: Callable[..., list[Tensor | None]],
    given: list[tuple[Any, ...]],
    precisions: Sequence[str],
    every: bool,
    tmp_path: Path,
) -> None:
    turn = itertools.cycle(precisions)
    todo = [(one, precision) for one in given for precision in (precisions if every else [next(turn)])]
    note = tmp_path / "note"
    try:
        forked.ranks(child, (run, todo, note), 1)
    except Exception as error:
        pytest.fail(f"{error}\nthe last one was {note.read_text()}")


SOME_OR_ALL = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


@SOME_OR_ALL
def test_products_of_empty_operands_are_those_of_fp32_in_every_precision(every: bool, tmp_path: Path) -> None:
    given = [(name, shapes) for name in sorted(CALLS.keys() - OTHERS) for shapes in with_zeros(CALLS[name].shapes)]
    run_in_turn(called, given, PRECISIONS, every, tmp_path)


def test_attention_without_heads_width_rows_or_keys_is_that_of_fp32_in_every_precision(tmp_path: Path) -> None:
    names = ("attention", "attention causal")
    given = [(name, shapes) for name in names for shapes in with_zeros(CALLS[name].shapes)]
    given.append(("attention grouped", ((2, 0, 9, 8), (2, 0, 11, 8), (2, 0, 11, 8))))
    run_in_turn(called, given, PRECISIONS, True, tmp_path)


@SOME_OR_ALL
def test_layers_of_empty_tensors_give_what_they_give_in_fp32(every: bool, tmp_path: Path) -> None:
    given = [(name, places) for name, (_, shape) in LAYERS.items() for places in with_places(shape)]
    run_in_turn(applied, given, PRECISIONS, every, tmp_path)


def test_empty_batches_are_rotated_and_cast_under_delayed_scales(tmp_path: Path) -> None:
    given = [("two layers", (0, 32)), ("convolution", (0, 4, 5, 5))]
    run_in_turn(applied, given, ("mxfp4", "quartet2", "nvfp4", "fp8-delayed"), True, tmp_path)


@SOME_OR_ALL
def test_prepared_layers_of_empty_tensors_give_what_they_give_in_fp32_and_step(every: bool, tmp_path: Path) -> None:
    given = [(name, places) for name, (_, shape) in LAYERS.items() for places in with_places(shape)]
    run_in_turn(partial(applied, prepared=True), given, PREPARED, every, tmp_path)
