"""Kernels take the arguments of every call as Triton's own launcher types them on a GPU.

The launcher types a number that fits as int32, makes 1 a constant, and compiles another kernel if a length is not a
multiple of 16. `ahead` compiles the usual case to the end; here every call is compiled to Triton's first IR, without a
GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from exact_casts import FORMATS_TRIED
from torch import Tensor

import lowp
from lowp import kernels
from lowp.casts import Cast, parse
from lowp.errors import LowpError
from lowp.exponents.table import ExponentTable
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels import triton as implementation
from lowp.kernels.int16 import mantissas
from lowp.kernels.int16.integer import multiply
from lowp.kernels.numbers.packing import code_dtype

pytest.importorskip("triton", reason="triton is not installed")

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver

from lowp.kernels.triton import launch, products, scaled, steps
from lowp.kernels.triton import mantissas as int16

_devices = itertools.count(1000)  # of whose kernels Triton has none yet
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Driver:
    """The properties of a GPU that Triton reads before it compiles."""

    def __init__(self) -> None:
        self.number = next(_devices)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)


def first_code(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
    """Run the first stage of triton.compile: from Python to Triton's IR of tensors."""
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compile launches on CPU tensors like those on a GPU, with its blocks; return the kernels' names."""
    names: list[str] = []

    def instead(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4) -> None:
        assert all(0 < size < limit for size, limit in zip(grid, (2**31, 2**16, 2**16), strict=False))
        kernel.warmup(*arguments, grid=grid, num_warps=warps, enable_fp_fusion=False)
        names.append(kernel.fn.__name__)

    for module in (launch, int16, products, scaled, steps):
        monkeypatch.setattr(module, "run", instead)
    monkeypatch.setattr(launch, "block_for", lambda like, count, block: block)
    monkeypatch.setattr(products, "_tile", lambda *given: products.CHAINED_TILE if given[-1] else products.TILE)
    monkeypatch.setattr("triton.compiler.compile", first_code)
    before = driver._active  # what Triton has found, if it was asked
    driver.set_active(Driver())
    with kernels.use("triton"):
        yield names
    driver._active = before


@pytest.mark.parametrize(("name", "count"), [("e4m3fn:stochastic", 7), ("e8m22:stochastic", 64), ("i2s", 1)])
def test_casts_and_codes_of_any_length(launched: list[str], name: str, count: int) -> None:
    x = torch.randn(count)
    lowp.quantize(x, name, seed=3)
    lowp.quantize(x, name, seed=torch.tensor(3), offset=5)
    codes = lowp.encode(x, name, seed=3)
    lowp.decode(codes, parse(name).element)
    assert launched == ["quantize", "quantize", "encode", "decode"]


def test_statistics_of_any_length(launched: list[str]) -> None:
    for count in (1, 64):
        lowp.statistics(torch.randn(count))
    assert launched == ["statistics"] * 2


@pytest.mark.parametrize(
    ("name", "shape"),
    [("mxfp8:stochastic", (1, 32)), ("nvfp4", (3, 64)), ("int8", (3, 4096)), ("nvfp4:4/6", (3, 64)), ("if4", (1, 16))],
)
def test_shared_scales_of_any_shape(launched: list[str], name: str, shape: tuple[int, int]) -> None:
    lowp.quantize(torch.randn(shape), name, seed=1)
    lowp.encode(torch.randn(shape), name, seed=1)
    assert launched.count({"int8": "rows", "nvfp4:4/6": "tried", "if4": "tried"}.get(name, "blocks")) == 2


@pytest.mark.parametrize("shape", [(70, 90, 33), (70, 1, 33), (1, 1, 1)])
def test_products_of_any_shape(launched: list[str], shape: tuple[int, int, int]) -> None:
    m, depth, n = shape
    a, b = torch.ones(2, m, depth, dtype=torch.int16), torch.ones(2, depth, n, dtype=torch.int16)
    multiply(a, b)
    multiply(a.mT.contiguous().mT, b.mT.contiguous().mT, dtype=torch.float32)
    multiply(a, b, dtype=None)
    assert launched == ["matmul"] * 3


def test_a_product_of_more_tiles_than_a_second_axis_of_a_grid_has(launched: list[str]) -> None:
    many = torch.ones(1, dtype=torch.int16).expand(1 << 16, 1, 1)
    multiply(many, many)
    assert launched == ["matmul"]


@pytest.mark.parametrize(("make", "is_split"), [(lowp.optim.AdamW, True), (lowp.optim.SGD, False)])
def test_steps_and_checks_of_gradients(launched: list[str], make: Callable[..., Any], is_split: bool) -> None:
    dtype = torch.bfloat16 if is_split else torch.float32
    parameters = [torch.nn.Parameter(torch.ones(count, dtype=dtype)) for count in (1, 7, 64)]
    optimizer = make(parameters, lr=0.1, **({"storage": "bf16", "split": True} if is_split else {}))
    scaler = lowp.GradScaler("cpu")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert set(launched) == {"check", "step"}


@pytest.mark.parametrize("make", [lowp.optim.AdamW, lowp.optim.SGD, lowp.optim.Lion])
@pytest.mark.parametrize("options", [{"moments": "mxfp4:stochastic"}, {"moments": "bf16", "masters": "split-8"}])
def test_steps_with_few_bits(launched: list[str], make: Callable[..., Any], options: dict[str, str]) -> None:
    parameters = [torch.nn.Parameter(torch.ones(count)) for count in (1, 7, 64)]
    optimizer = make(
        parameters, storage="bf16", seed=1, **options, **({"momentum": 0.9} if make is lowp.optim.SGD else {})
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert launched.count("step") == 1


@pytest.mark.parametrize("count", [0, 1, 7, 64])
def test_int16_under_exponents_of_a_device(launched: list[str], count: int) -> None:
    x, cast = torch.randn(count), parse("flex16+5:autoflex:stochastic" if count == 7 else "flex16+5:autoflex")
    table, given = ExponentTable(cast, torch.device("cpu")), torch.zeros((), dtype=torch.int32)
    for index in map(table.index, ("a", "b")):  # an argument of 1 among them
        table.write(x, index, when=torch.tensor(True) if index else True, otherwise=given)
    mantissas.current_mantissas(x, parse("dfp16"), 1, given)
    mantissas.exact(x, cast, given)
    mantissas.own_exponent(x, parse("dfp16:static(3)"), only_finite=True)
    table.flush()
    write = ["begin", "look", "write"] if count == 1 else ["begin", "write"]  # a single number is never cut off
    assert launched == write * 2 + ["look", "convert", "look", "look_again", "look", "observe"]


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
def test_casts_and_codes_of_every_format_and_dtype(launched: list[str], format: FloatFormat | IntFormat) -> None:
    for dtype, rounding, count in itertools.product(DTYPES, ("nearest-even", "stochastic", "up"), (7, 64)):
        x = torch.ones(count, dtype=dtype)
        for call in (_values, _codes):
            call(x, Cast(format).with_rounding(rounding))
    assert len(launched) > 2 * len(DTYPES)


def _values(x: Tensor, cast: Cast) -> None:
    try:
        lowp.quantize(x, cast, seed=1)
    except LowpError:  # 16 bits do not hold them
        return


def _codes(x: Tensor, cast: Cast) -> None:
    codes = torch.empty(x.shape, dtype=code_dtype(cast.element))
    implementation.encode(x, cast, 1, codes)
    implementation.decode(codes, cast.element, x)
