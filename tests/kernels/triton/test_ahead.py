"""Every Triton kernel compiles for GPUs ahead of time, without spills, in few registers."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from exact_casts import FORMATS_TRIED, casts

from lowp.casts import parse
from lowp.kernels.casts import checks

pytest.importorskip("triton", reason="triton is not installed")

import ahead
from ahead import Configuration

from lowp.kernels.triton.steps import Way

CAPABILITIES = (75, 80, 90, 100)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# registers a thread, of 255: two programs of four warps and more share a multiprocessor's 65,536
MOST, MOST_OF_WIDE, MOST_OF_PRODUCTS = 200, 240, 255
# bytes of registers that Triton 3.8 (64) and 3.9 (8) spill of the products of sm_80, which 3.7 does not
SPILLED = 64 if tuple(map(int, version("triton").split(".")[:2])) >= (3, 8) else 0

# bytes that ptxas spills by choice: 80 registers a thread let more programs share a multiprocessor
BY_CHOICE = {("quantize e4m3fn@fp32/tensor fp16", 90): 8}


def check(configuration: Configuration, capability: int, most: int, stack: int = 0) -> ahead.Compiled:
    found = ahead.compiled(configuration, capability)
    assert found.stack <= stack and found.local == 0, (configuration.name, capability, found.stack, found.local)
    assert found.registers <= most, (configuration.name, capability, found.registers)
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_a_cast_and_an_optimizers_step_compile_with_vectors() -> None:
    found = check(ahead.quantize(parse("e4m3fn:stochastic"), torch.bfloat16), 90, MOST)
    assert "LDG.E.128" in found.sass and "STG.E.128" in found.sass
    way = Way("bf16", rest=16, scaled=True, maximize=False, adamw=True, near=True)
    found = check(ahead.step(way), 75, MOST)
    assert "LDG.E.128" in found.sass and "STG.E.128" in found.sass
    check(ahead.check("fp32", unscale=True, counts=True), 80, MOST)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [*CAPABILITIES, 120])
def test_steps_with_few_bits_spill_next_to_nothing(capability: int) -> None:
    for given in ahead.FEW_BITS:  # ptxas spills a few registers where that lets two programs run beside each other
        check(ahead.few_bits(*given), capability, MOST, stack=16 + SPILLED)


def test_a_step_with_moments_of_eight_bits_compiles() -> None:
    check(ahead.few_bits("lion", None, "mxfp8:stochastic", 16), 80, MOST)


def test_codes_of_four_bits_are_packed_where_they_are_made() -> None:
    check(ahead.packed(ahead.encode(parse("e2m1"), torch.float32)), 90, MOST)
    check(ahead.packed(ahead.decode(parse("e2m1"), torch.bfloat16)), 75, MOST)


def test_tensors_become_int16_by_vectors_whatever_the_rounding() -> None:
    for kind, rounding in (("write perhaps", "nearest-even"), ("convert", "stochastic")):
        found = check(ahead.mantissas(kind, torch.float32, rounding), 100, MOST)
        assert "LDG.E.128" in found.sass and "STG.E." in found.sass


@pytest.mark.parametrize("capability", [75, 100])
def test_divisions_of_rare_groups_spill_nothing(capability: int) -> None:
    check(ahead.shared("int8", torch.float32, True), capability, MOST)
    check(ahead.shared("int8", torch.float32, False), capability, MOST)


@pytest.mark.parametrize(("text", "capability"), [("if4", 75), ("nvfp4:4/6", 120)])
def test_comparisons_of_two_errors_spill_nothing(text: str, capability: int) -> None:
    check(ahead.packed(ahead.shared(text, torch.float32, True)), capability, MOST)


def test_integer_products_run_on_tensor_cores() -> None:
    found = check(ahead.product("int16", ahead.TILE), 80, MOST_OF_PRODUCTS, SPILLED)
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
        most = MOST_OF_WIDE if "fp64" in configuration.name else MOST
        check(configuration, capability, most, BY_CHOICE.get((configuration.name, capability), 0))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_fiftieth_of_the_forms_of_casts_compiles_without_spills(capability: int) -> None:
    """A different fiftieth for each chip: all of them, about 7,000, take hours."""
    for configuration in itertools.islice(every_form(), CAPABILITIES.index(capability), None, 50):
        check(configuration, capability, MOST_OF_WIDE)


@pytest.mark.slow
def test_every_integer_product_compiles_for_tensor_cores() -> None:
    for configuration in ahead.products_of_integers():
        assert "IMMA" in check(configuration, 80, MOST_OF_PRODUCTS, SPILLED).sass
        assert "IGMMA" in check(configuration, 90, MOST_OF_PRODUCTS).sass


@pytest.fixture
def gpu_static(repository: Path) -> Iterator[ModuleType]:
    sys.path.insert(0, str(repository / "bench"))
    try:
        yield importlib.import_module("gpu_static")
    finally:
        sys.path.pop(0)


def test_the_bounds_are_those_of_the_slower_of_memory_and_issue(gpu_static: ModuleType) -> None:
    (chip,) = (chip for chip in gpu_static.CHIPS if chip.name == "A100")
    found = gpu_static.bound(ahead.quantize(parse("e4m3fn"), torch.float32), chip)
    assert found.bytes == 8 and found.memory == pytest.approx(8 / 2.039)
    assert found.is_memory_bound and 8 < found.instructions < 40
    assert gpu_static.tally([found]) == {name: {"A100": "1 of 1"} for name in ("element-wise", "all")}


@pytest.mark.parametrize("name", ["A100", "H100"])
def test_codes_of_8_bits_are_decoded_into_16_as_fast_as_memory_moves_them(gpu_static: ModuleType, name: str) -> None:
    (chip,) = (chip for chip in gpu_static.CHIPS if chip.name == name)
    found = gpu_static.bound(ahead.decode(parse("e5m2"), torch.float16), chip)
    assert found.is_memory_bound and found.instructions < 18


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_rounded_stochastically_as_fast_as_memory_moves_them(
    gpu_static: ModuleType, dtype: torch.dtype
) -> None:
    (chip,) = (chip for chip in gpu_static.CHIPS if chip.name == "H100")
    assert gpu_static.bound(ahead.quantize(parse("e4m3fn:stochastic"), dtype), chip).is_memory_bound


def test_every_instruction_that_a_unit_of_half_rate_or_less_executes_is_counted_there(gpu_static: ModuleType) -> None:
    code = [("VIADD R1, R2, 0x1", 3), ("@!P0 VIMNMX3 R1, R2, R3, R4, !PT", 1), ("VIADDMNMX R1, R2, 0x1, R3, PT", 1)]
    code += [("LEA.HI R1, R2, R3, RZ, 0x1", 1), ("UIADD3 UR4, UR4, 0x1, URZ", 1), ("MOV R1, R2", 1)]
    assert gpu_static.of_unit(code, "integer") == 6
    code = [("STS.128 [R1], R4", 2), ("LDS.U.64 R4, [R1]", 1), ("LDS.U8 R4, [R1]", 1), ("LDSM.16.M88.4 R4, [R1]", 1)]
    assert gpu_static.of_unit(code, "shared memory") == 2 * 4 + 2 + 1 + 4
    assert gpu_static.of_unit([("SHFL.BFLY PT, R4, R5, 0x1, 0x1f", 5)], "shuffle") == 5
    assert gpu_static.of_unit([("F2FP.BF16.PACK_AB R4, R5, R6", 1), ("F2F.F64.F32 R4, R5", 1)], "conversion") == 2


def test_every_kernel_is_of_a_kind(gpu_static: ModuleType) -> None:
    assert {gpu_static.kind(one) for one in ahead.configurations()} == set(gpu_static.KINDS)
