"""A default device (``with torch.device("meta")``) applies to tensors that a program creates, not to lowp's."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from random_words import random_block, random_words
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lowp
from lowp.casts import parse
from lowp.exponents.delayed import DelayedTable
from lowp.exponents.table import ExponentTable
from lowp.kernels import available, cpu, dequantize, use
from lowp.kernels.casts.functions import quantize_measured
from lowp.kernels.cpu import abi
from lowp.kernels.int16 import cpu_int16, entries, integer, mantissas, masks
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.layer import LayerPlan
from lowp.kernels.packed import byte_rows, few_bits, few_rows
from lowp.kernels.products import fp32_products, sum_of_rows
from lowp.kernels.steps import spectra, stored
from lowp.ops.int16.layer import products_of
from lowp.ops.trilinear import Linear

FLEX = parse("flex16+5:autoflex")
X = torch.linspace(-3, 3, 120).reshape(3, 40)
INTEGERS = torch.arange(-60, 60, dtype=torch.int16).reshape(10, 12)
SHAPE = ConvolutionShape.of((2, 3, 5, 5), (4, 3, 3, 3), padding=1)
FORWARD = {"input": SHAPE.input, "weight": SHAPE.weight, "gradient": SHAPE.output}
OPERANDS = {
    "forward": ("input", "weight"),
    "input_gradient": ("gradient", "weight"),
    "weight_gradient": ("input", "gradient"),
}


def operand(name: str) -> Tensor:
    count = torch.Size(FORWARD[name]).numel()
    return (torch.arange(count, dtype=torch.int32, device="cpu") % 251 - 125).to(torch.int16).reshape(FORWARD[name])


CASTS = ("fp16", "bf16", "e4m3fn:stochastic", "e8m0", "i8", "mxfp4", "nvfp4", "int8", "int8-affine", "dfp16")


def casts() -> object:
    found: list[object] = []
    for name in (name for name in available() if name != "native"):
        with use(name):
            found.append([lowp.statistics(X).exponent_histogram, lowp.statistics(X).maximum])
            for cast in CASTS:
                found += [lowp.quantize(X, cast, seed=3), lowp.quantize(X.numpy(), cast, seed=3)]
                codes = lowp.encode(X.abs() + 1, cast, seed=3, packed=True)
                if isinstance(codes, Tensor):
                    found += [codes, lowp.decode(codes, cast, packed=True, length=40)]
                else:
                    found += [codes.payload, codes.scale, dequantize(codes)]
    with use("native"):
        return [*found, lowp.quantize(X, "fp16"), lowp.quantize(X, "bf16")]


def given_scales() -> object:
    measured = quantize_measured(X, parse("e4m3fn@fp32/tensor"), torch.tensor(0.5, device="cpu"), 0)
    delayed = DelayedTable(parse("e4m3fn@fp32/tensor:delayed(window=4)"), torch.device("cpu"))
    delayed.flush()
    return [lowp.quantize(X, "int8-affine", scale=(0.1, 3)), *measured]


def products() -> object:
    found: list[object] = []
    for kernel in (None, "reference"):
        found += integer.multiply(INTEGERS, INTEGERS.mT, kernel=kernel)
        found += integer.multiply(INTEGERS, INTEGERS.mT, kernel=kernel, dtype=None)
        for product, names in OPERANDS.items():
            a, b = map(operand, names)
            found += integer.convolve(product, a, b, SHAPE, exponent=-4, kernel=kernel)
            found += integer.convolve(product, a, b, SHAPE, kernel=kernel, dtype=None)
    return [*found, fp32_products.multiply(X, X.t()), sum_of_rows(X)]


def under_exponents() -> object:
    cast = parse("dfp16")
    written, values, _ = mantissas.mantissas_and_values(X, cast, -13)
    current = mantissas.current_mantissas(X, cast)
    assert current is not None
    return [
        mantissas.to_mantissas(X, cast, -13).payload,
        mantissas.values(written.payload, -13),
        mantissas.sums(written.payload, 0),
        mantissas.values(written.payload.t()[::2], -13),
        mantissas.exact_mantissas(values, cast, mantissas.as_exponent(-13)),
        mantissas.own_exponent(X, cast),
        current.payload,
        mantissas.exact(X, cast),
        written.payload,
        values,
    ]


def layers() -> object:
    to, table, found = parse("dfp16"), ExponentTable(FLEX, torch.device("cpu")), list[object]()
    places = [begun(table, f"output of {place}") for place in range(4)]
    convolved = tuple(operand(name).float() for name in OPERANDS["forward"])
    of_matrices = products_of(Linear(tuple(X.shape), tuple(X.shape)), X.stride(), X.stride())
    assert of_matrices is not None
    for x, weight, shape in ((X, X.clone(), of_matrices), (*convolved, SHAPE)):
        for output in (None, FLEX):
            lies = ((tuple(one.shape), one.stride()) for one in (x, weight))
            plan = LayerPlan(*lies, shape, (to, to, to), output)
            memory = cpu_int16.memory_of(x, weight)
            assert memory is not None
            result = plan.forward(memory, [None, None], (table.block, places[0]), True)
            assert result is not None
            made, *saved = result
            gradients = plan.backward(made.values, None, saved, table.block, places[1:])  # type: ignore[arg-type]
            assert gradients is not None
            found += [made, saved, gradients]
    return found


def begun(table: ExponentTable, site: str) -> int:
    index = table.index(site)
    table.state.exponent[index], table.state.started[index] = -9, True
    return index


def stored_weights() -> object:
    weight = torch.zeros_like(X, dtype=torch.bfloat16)
    return [f([(weight, X.clone())], parse("bf16")) for f in (stored.store_rounded, stored.are_rounded)], weight


def table_written() -> object:
    table, weight = ExponentTable(FLEX, torch.device("cpu")), X.clone()
    places = [table.index(f"{role} of x") for role in ("output", "update", "weight", "exp_avg_sq")]
    found: list[object] = [table.write(X, places[0]), table.write(X, places[1]), table.write(X, places[2])]
    table.flush()
    entries.write_in_place(table.block, FLEX, [(weight, places[2], entries.VALUES)])
    steps = entries.Steps(table.block, [weight], (places[1], places[2]))
    found.append(entries.write_in_place(table.block, FLEX, [], steps))
    found += [
        entries.met(table.block, len(table.names)),
        table.write(X / 3, table.index("output of y"), unless_exact=True),
    ]
    ways = entries.TWO_WORDS, entries.ROOTS
    entries.write_in_place(table.block, FLEX, [(X.clone(), places[3], how) for how in ways])
    table.run.watchers.append(found.append)
    table.flush()
    return [*found, table.state, weight]


def library_functions() -> object:
    out, before = torch.zeros_like(X), torch.zeros_like(X)
    weight, old = X.clone(), torch.zeros_like(X, dtype=torch.int16)
    exponent, zero = mantissas.as_exponent(-13), mantissas.as_exponent(0)
    return [
        cpu.statistics(X),
        random_words(3, 5, 7),
        random_block(3, (1, 2, 3, 4)),
        cpu_int16.to_int16(X, parse("dfp16"), exponent, old),
        cpu_int16.is_exact_int16(X, parse("dfp16")),
        cpu_int16.exact_int16(X.round(), zero, old),
        cpu_int16.is_int16(X, old, zero, cpu_int16.Rows(1, X.numel(), X.numel())),
        cpu_int16.rounds_to_int16(X, old, exponent, cpu_int16.Rows(1, X.numel(), X.numel()), True),
        cpu_int16.are_int16(array("q", (X.data_ptr(), old.data_ptr(), 1, X.numel(), X.numel(), zero.data_ptr()))),
        layers(),
        stored_weights(),
        table_written(),
        cpu_int16.relu(X.round(), X.round().to(torch.int16), zero),
        masks.passed(X, masks.nonzero(X)),
        masks.passed_where_positive(X, X.round().to(torch.int16)),
        byte_rows.own_range(X, 127),
        byte_rows.to_bytes(X, 0.1, 3, 127).payload,
        few_bits.multiply_signs(few_bits.signs(X), few_bits.signs(X)),
        few_rows.multiply(X, X.bfloat16()),
        spectra.count_tensor(X),
        spectra.largest_of([X]),
        spectra.some_of([X]),
        spectra.count_updates(X, before, weight),
        quantize_measured(X, parse("e4m3fn@fp32/tensor"), torch.tensor(0.5, device="cpu"), 0),
        *(out, weight, old),
    ]


def optimizers() -> object:
    found: list[object] = []
    for make in (
        lambda p: lowp.optim.AdamW(p, storage="bf16", split=True),
        lambda p: lowp.optim.AdamW(p, moments="int8"),
        lambda p: lowp.optim.SGD(p, lr=0.1, momentum=0.9, storage="bf16"),
        lambda p: lowp.MasterWeights(torch.optim.SGD(p, lr=0.1), storage="bf16"),
    ):
        weight = torch.nn.Parameter(X.clone())
        optimizer = make([weight])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        found.append(weight.detach())
    return found


def regions() -> object:
    found: list[object] = []
    for preset in ("fp16", "bf16", "e5m7", "e4m3fn:stochastic", "fp8", "dfp16", "flex16+5"):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(X[:, :8] / 64)
        kernel = torch.nn.Parameter(X[0, :9].clone().reshape(1, 1, 3, 3))
        optimizer = torch.optim.SGD([weight, kernel], lr=0.1)
        precision = lowp.Precision(preset)
        with precision.autocast():
            hidden = torch.nn.functional.conv2d(X[:, :32].reshape(3, 1, 4, 8), kernel, padding=1).relu().mean((1, 2))
            loss = torch.nn.functional.linear(hidden, weight).square().mean()
        precision.backward(loss)
        precision.step(optimizer)
        found += [loss.detach(), weight.detach(), kernel.detach()]
    return found


def served() -> object:
    torch.manual_seed(0)
    found: list[object] = []
    x = torch.linspace(-1, 1, 2 * 3 * 64, device="cpu").reshape(2, 3, 8, 8)
    for format in ("int8", "int4", "binary", "e4m3fn"):
        with torch.device("cpu"):
            model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 64))
        for values in model.parameters():
            values.data = torch.linspace(-1, 1, values.numel(), device="cpu").reshape(values.shape)
        found += [lowp.quantize_model(model, format)(x).detach(), *by_librarys_products(model, format, x)]
    return found


def by_librarys_products(model: torch.nn.Module, format: str, x: Tensor) -> list[Tensor]:
    """Return the served model with the library's byte products: on processors with instructions for them, if forced."""
    if cpu.library() is None:
        return []
    asked = cpu.asked()
    cpu.select("portable")
    try:
        return [lowp.quantize_model(model, format)(x).detach()]
    finally:
        cpu.select(asked or None)


@pytest.mark.parametrize(
    "calls", [casts, given_scales, products, under_exponents, library_functions, optimizers, regions, served]
)
def test_every_kernel_gives_the_same_under_a_foreign_default_device(calls: Callable[[], object]) -> None:
    if cpu.library() is None and calls is library_functions:
        pytest.skip("the C++ library was not built")
    wanted = tree_leaves(calls())
    with torch.device("meta"):
        found = tree_leaves(calls())
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, Tensor):
            assert one.device == other.device
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        elif isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other


def test_these_calls_reach_every_function_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpu.library()
    if library is None:
        pytest.skip("the C++ library was not built")

    class Recorder:
        called: set[str] = set()  # noqa: RUF012

        def __getattr__(self, name: str) -> Any:
            self.called.add(name)
            return getattr(library, name)

    monkeypatch.setattr(cpu, "library", Recorder)
    monkeypatch.setattr(cpu, "loaded", Recorder)
    for calls in (casts, given_scales, products, under_exponents, library_functions, optimizers, served):
        calls()
    kept = {"lowp_program"}  # by programs, of which `regions` runs some
    assert Recorder.called >= abi.SIGNATURES.keys() - {"lowp_build", "lowp_casts_select", "lowp_set_team", *kept}
