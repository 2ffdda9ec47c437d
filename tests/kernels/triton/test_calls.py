"""What a call launches: blocks, tails, keys; and tensors of every layout and offset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowp
from lowp.casts import parse
from lowp.errors import Unavailable
from lowp.kernels.numbers import bitwise
from lowp.kernels.numbers.packing import as_integers, code_dtype
from lowp.kernels.numbers.philox import Draw

pytest.importorskip("triton", reason="triton is not installed")

from triton.errors import TritonError

from lowp.kernels.triton import calls, launch

SEED = 0x1234_5678_9ABC_DEF0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the list of launches that `calls` asks for instead of making them."""
    made: list[tuple[Any, ...]] = []

    def instead(kernel: Any, like: Tensor, count: int, block: int, *arguments: Any, warps: int = 4) -> None:
        made.append((kernel.fn.__name__, count, block, warps, arguments))

    monkeypatch.setattr(calls, "launch", instead)
    return made


@pytest.mark.parametrize(("first", "count", "end", "tail"), [(0, 32, 32, False), (5, 31, 32, False), (6, 32, 34, True)])
def test_casts_are_launched_in_blocks_with_a_tail_if_there_is_one(
    first: int, count: int, end: int, tail: bool, launched: list[tuple[Any, ...]]
) -> None:
    cast, out = parse("e4m3fn:stochastic"), torch.empty(count, dtype=torch.uint8)
    for dtype, block in ((torch.float32, 2048), (torch.float64, 512)):
        x = torch.zeros(count, dtype=dtype)
        calls.quantize(x, cast, Draw(7, first), x)
        calls.encode(x, cast, Draw(7, first), out)
        for name, (*found, arguments) in zip(("quantize", "encode"), launched[-2:], strict=True):
            assert (*found, arguments[-1]) == (name, end, block, 4, tail)
            key, given = arguments[2], arguments[3:] if name == "quantize" else arguments[4:]
            assert int(key) == 7 and given[:3] == (count, first % 4, first // 4 * 4)


def test_a_cast_to_nearest_reads_no_seed(launched: list[tuple[Any, ...]]) -> None:
    x, unread = torch.zeros(8), SimpleNamespace()
    calls.quantize(x, parse("e4m3fn"), unread, x)  # type: ignore[arg-type]
    calls.encode(x, parse("e4m3fn"), unread, torch.empty(8, dtype=torch.uint8))  # type: ignore[arg-type]
    assert [one[0] for one in launched] == ["quantize", "encode"]


@pytest.mark.parametrize(("count", "tail"), [(32, False), (33, True)])
def test_codes_are_decoded_by_fp32_in_blocks(count: int, tail: bool, launched: list[tuple[Any, ...]]) -> None:
    calls.decode(torch.zeros(count, dtype=torch.uint8), parse("e4m3fn").element, torch.empty(count))
    ((name, end, block, warps, arguments),) = launched
    assert (name, end, block, warps, arguments[-1]) == ("decode", count, 2048, 4, tail)
    assert (arguments[-2].wide, arguments[-2].packed) == (False, False)


@pytest.mark.parametrize(("count", "tail"), [(20000, False), (20001, True)])
def test_statistics_of_a_gpu_are_of_four_blocks_a_program(
    count: int, tail: bool, launched: list[tuple[Any, ...]]
) -> None:
    for device, rounds, programs in (("meta", 4, 3), ("cpu", 1, 1)):
        calls.statistics(torch.empty(count, device=device))
        name, turns, block, warps, arguments = launched[-1]
        assert (name, turns, block, warps) == ("statistics", -(-count // rounds), 2048, 8)
        assert arguments[1].shape == (programs, 264) and arguments[2:] == (count, "fp32", True, tail, rounds)


def test_signs_are_drawn_by_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(calls, "run", lambda kernel, grid, *arguments: made.append((grid, *arguments[1:])))
    calls.signs(16, 5, torch.device("cpu"))
    assert made == [((1,), torch.tensor(5), 16)]


def test_a_gpu_gets_programs_of_blocks_and_the_interpreter_few() -> None:
    like, cpu = torch.empty(0, device="meta"), torch.empty(0)
    assert [launch.programs_for(like, count, 64) for count in (0, 1, 64, 65)] == [1, 1, 1, 2]
    assert [launch.block_for(like, count, 64) for count in (1, 1000)] == [64, 64]
    assert [launch.block_for(cpu, count, 64) for count in (1, 16, 17, 1 << 17, 1 << 20)] == [16, 16, 32, *[1 << 17] * 2]
    assert [launch.programs_for(cpu, count, 64) for count in (0, 1 << 17, (1 << 17) + 1)] == [1, 1, 2]


class Recorded:
    """A kernel that notes how it is launched, or cannot be."""

    fn = SimpleNamespace(__name__="some")

    def __init__(self, error: TritonError | None = None) -> None:
        self.error = error
        self.made: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*arguments: Any, **options: Any) -> None:
            if self.error is not None:
                raise self.error
            self.made.append((grid, arguments[1:], options))

        return launched


def test_a_device_is_told_the_grid_and_the_warps_and_fuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(device=lambda one: nullcontext()))
    x, kernel = torch.empty(0, device="meta"), Recorded()
    launch.launch(kernel, x, 65, 64, x, 3)
    launch.launch(kernel, x, 64, 64, x, 3, warps=8)
    launch.run(kernel, (2, 3), x)
    wanted = [((2,), (3, 64), 4), ((1,), (3, 64), 8), ((2, 3), (), 4)]
    assert kernel.made == [(*one, {"num_warps": warps, "enable_fp_fusion": False}) for *one, warps in wanted]
    expected = r"Triton cannot run some on meta: TritonError: no; lowp.kernels.use\('bitwise'\) gives the same bits"
    with pytest.raises(Unavailable, match=expected):
        launch.run(Recorded(TritonError("no")), (1,), x)


def test_results_of_any_layout_are_written() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    cast = parse("e4m3fn")
    values, codes, decoded = torch.empty(4, 6).t(), torch.empty(4, 6, dtype=torch.uint8).t(), torch.empty(4, 6).t()
    calls.quantize(x, cast, 0, values)
    assert calls.encode(x, cast, 0, codes) == 0
    calls.decode(codes, cast.element, decoded)
    assert torch.equal(values, lowp.quantize(x, cast)) and torch.equal(codes, lowp.encode(x, cast))
    assert torch.equal(decoded, values)
    wide = torch.zeros(6, 8)[:, ::2].copy_(x)
    again = torch.zeros(6, 8, dtype=torch.uint8)[:, ::2]
    calls.encode(wide, cast, 0, again)
    assert torch.equal(again, codes)


def test_the_codes_of_a_dtype_are_its_bits() -> None:
    x = torch.tensor([-1.5, 0.0, -0.0, torch.inf, -torch.inf, 5e-324, -1.7e308], dtype=torch.float64)
    raw, out = x.view(torch.int64).view(code_dtype(parse("fp64").element)), torch.empty_like(x)
    calls.decode(raw, parse("fp64").element, out)
    assert torch.equal(out.view(torch.int64), x.view(torch.int64))


def test_of_nothing_there_are_no_codes() -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    assert calls.encode(torch.empty(0), parse("e4m3fn"), 0, nothing) == 0
    calls.decode(nothing, parse("e4m3fn").element, torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nans_without_a_code_are_counted(dtype: torch.dtype) -> None:
    x = torch.zeros(40, dtype=dtype)
    x[3], x[20], x[5] = torch.nan, -torch.nan, torch.inf
    for places, counted in (([3, 20], 2), ([39], 3), ([5], 0)):
        x[39] = torch.nan if 39 in places else 1.0
        given = x if counted else x.nan_to_num(posinf=torch.inf)
        for name in ("i8", "i25", "e2m1", "ue4m3finite", "e8m2b140finite", "e3m0finite", "i1"):
            out = torch.empty(40, dtype=code_dtype(parse(name).element))
            assert calls.encode(given, parse(name), 0, out) == counted, name
            assert calls.encode(given[:32], parse(name), 0, out[:32]) == min(counted, 2), name
            if name not in ("i8", "e2m1"):  # the codes of whose NaNs are any
                assert int(as_integers(out)[3]) == 0 or not counted, name
        assert calls.encode(given, parse("e4m3fn"), 0, torch.empty(40, dtype=torch.uint8)) == 0


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_neighbours_in_memory_are_neither_read_nor_written(
    dtype: torch.dtype, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 32)

    def fail(x: Tensor) -> Tensor:
        raise AssertionError("the kernel has seen a NaN")

    for count in (48, 37):
        x = torch.full((count + 80,), torch.nan, dtype=dtype)
        x[40:-40] = torch.randn(count, generator=torch.Generator().manual_seed(1))
        for name in ("i8:stochastic", "e2m1:stochastic-8"):
            wanted, cast = bitwise.quantized(x[40:-40], parse(name), Draw(5, first)), parse(name)
            values, codes = torch.full_like(x, 7.0), torch.full(x.shape, 85, dtype=code_dtype(cast.element))
            calls.quantize(x[40:-40], cast, Draw(5, first), values[40:-40])
            with monkeypatch.context() as patch:
                patch.setattr(Tensor, "isnan", fail)
                assert calls.encode(x[40:-40], cast, Draw(5, first), codes[40:-40]) == 0
            decoded = torch.full_like(x, 7.0)
            calls.decode(codes[40:-40], cast.element, decoded[40:-40])
            assert torch.equal(values[40:-40], wanted) and torch.equal(decoded, values)
            for guarded, mark in ((values, 7.0), (codes, 85)):
                assert bool((guarded[:40] == mark).all()) and bool((guarded[-40:] == mark).all())


def test_rows_of_other_lengths_are_not_packed_here() -> None:
    e2m1, values = parse("e2m1"), torch.ones(3, 8)
    packed = torch.full((3, 4), 0x22, dtype=torch.uint8)
    assert calls.decode_packed(packed, e2m1.element, values)
    for shape in ((3, 7), (3, 6), (2, 8), ()):
        assert not calls.decode_packed(packed, e2m1.element, torch.empty(shape))
    assert not calls.decode_packed(packed, parse("e4m3fn").element, values)
    assert calls.decode_packed(packed.expand(2, 3, 4).contiguous(), e2m1.element, values.expand(2, 3, 8).contiguous())
    assert calls.encode_packed(values, e2m1, Draw(0, 2)) is not None
    for x, seed, name in ((values, Draw(0, 3), "e2m1"), (torch.tensor(1.0), 0, "e2m1"), (values, 0, "e4m3fn")):
        assert calls.encode_packed(x, parse(name), seed) is None
    assert calls.encode_packed(values[:, :7], e2m1, 0) is None


FAR = (1 << 36) + 5, (1 << 33) - 3, 2


@pytest.mark.parametrize("first", FAR)
@pytest.mark.parametrize("name", ["e4m3fn:stochastic", "e5m2:stochastic-1", "i1:stochastic", "bf16:stochastic-c-32"])
def test_draws_of_any_place_of_a_long_tensor_and_any_seed_are_those_of_the_definition(name: str, first: int) -> None:
    x = torch.rand(37, generator=torch.Generator().manual_seed(0)) * 2 - 1
    cast = parse(name)
    for seed in (SEED, -SEED, 1):
        wanted, found = torch.empty_like(x), torch.empty_like(x)
        bitwise.quantize(x, cast, Draw(seed, first), wanted)
        calls.quantize(x, cast, Draw(seed, first), found)
        assert torch.equal(found, wanted)
        codes = torch.empty(x.shape, dtype=code_dtype(cast.element))
        calls.encode(x, cast, Draw(seed, first), codes)
        assert torch.equal(lowp.decode(codes, cast.element), wanted)
