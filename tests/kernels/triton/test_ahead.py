"""Every Triton kernel compiles for GPUs ahead of time, without spills, in few registers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from exact_casts import FORMATS_TRIED, casts

from lowp.casts import parse
from lowp.kernels import checks

pytest.importorskip("triton", reason="triton is not installed")

from lowp.kernels.triton import ahead
from lowp.kernels.triton.ahead import Configuration
from lowp.kernels.triton.steps import Way

CAPABILITIES = (75, 80, 90, 100)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# registers a thread, of 255: two programs of four warps and more share a multiprocessor's 65,536
MOST, MOST_OF_WIDE, MOST_OF_PRODUCTS = 200, 240, 255


def check(configuration: Configuration, capability: int, most: int) -> ahead.Compiled:
    found = ahead.compiled(configuration, capability)
    assert (found.stack, found.local) == (0, 0), (configuration.name, capability, found.stack, found.local)
    assert found.registers <= most, (configuration.name, capability, found.registers)
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_a_cast_and_an_optimizers_step_compile_with_vectors() -> None:
    found = check(ahead.quantize(parse("e4m3fn:stochastic"), torch.bfloat16), 90, MOST)
    assert "LDG.E.128" in found.sass and "STG.E.128" in found.sass
    way = Way(True, "bf16", split=True, scaled=True, maximize=False, near=True)
    found = check(ahead.step(way), 75, MOST)
    assert "LDG.E.128" in found.sass and "STG.E.128" in found.sass
    check(ahead.check("fp32", unscale=True, counts=True), 80, MOST)


def test_codes_of_four_bits_are_packed_where_they_are_made() -> None:
    check(ahead.packed(ahead.encode(parse("e2m1"), torch.float32)), 90, MOST)
    check(ahead.packed(ahead.decode(parse("e2m1"), torch.bfloat16)), 75, MOST)


def test_tensors_become_int16_by_vectors_whatever_the_rounding() -> None:
    for kind, rounding in (("write perhaps", "nearest-even"), ("convert", "stochastic")):
        found = check(ahead.mantissas(kind, torch.float32, rounding), 100, MOST)
        assert "LDG.E.128" in found.sass and "STG.E." in found.sass


def test_integer_products_run_on_tensor_cores() -> None:
    found = check(ahead.product("int16", ahead.TILE), 80, MOST_OF_PRODUCTS)
    assert "IMMA" in found.sass


def every_form() -> Iterator[Configuration]:
    """Return one cast of every form, and its codes: formats of one form differ only in numbers."""
    seen: set[object] = set()
    for format in FORMATS_TRIED:
        for cast in casts(format):
            for dtype in DTYPES:
                made = [ahead.encode(cast, dtype)]
                made += [ahead.quantize(cast, dtype)] if checks.holds(cast, dtype) else []
                for one in made:
                    key = (one.kernel.fn.__name__, *map(str, one.constants.values()), str(one.arguments))
                    if key not in seen:
                        seen.add(key)
                        yield one


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_without_spills(capability: int) -> None:
    for configuration in ahead.configurations():
        is_wide = "fp64" in configuration.name
        check(configuration, capability, MOST_OF_WIDE if is_wide else MOST)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_fiftieth_of_the_forms_of_casts_compiles_without_spills(capability: int) -> None:
    """A different fiftieth for each chip: all of them, about 7,000, take hours."""
    for configuration in itertools.islice(every_form(), CAPABILITIES.index(capability), None, 50):
        check(configuration, capability, MOST_OF_WIDE)


@pytest.mark.slow
def test_every_integer_product_compiles_for_tensor_cores() -> None:
    for configuration in ahead.products_of_integers():
        assert "IMMA" in check(configuration, 80, MOST_OF_PRODUCTS).sass
        assert "IGMMA" in check(configuration, 90, MOST_OF_PRODUCTS).sass


def test_the_bounds_are_those_of_the_slower_of_memory_and_issue(repository: Path) -> None:
    sys.path.insert(0, str(repository / "bench"))
    try:
        import gpu_static
    finally:
        sys.path.pop(0)
    (chip,) = (chip for chip in gpu_static.CHIPS if chip.name == "A100")
    found = gpu_static.bound(ahead.quantize(parse("e4m3fn"), torch.float32), chip)
    assert found.bytes == 8 and found.memory == pytest.approx(8 / 2.039)
    assert found.is_memory_bound and 8 < found.instructions < 40
