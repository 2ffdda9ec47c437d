"""The C++ kernels: the same bits with every instruction set, any number of threads, after a fork, in every CPU mode."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import warnings
from array import array
from collections.abc import Iterator
from ctypes import c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import forked
import pytest
import torch
from exact_casts import FORMATS_TRIED, bits, casts, exact_cast, inputs, uniform
from random_words import random_block, random_words
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowp import kernels
from lowp.casts import Cast, Rounding, parse
from lowp.errors import InvalidInput, Unavailable
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels import cpu
from lowp.kernels.casts import checks, cpu_groups
from lowp.kernels.cpu import abi
from lowp.kernels.int16 import cpu_int16, integer
from lowp.kernels.int16.mantissas import as_exponent
from lowp.kernels.numbers import bitwise, reference

SEED = 0x0123_4567_89AB_CDEF
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LARGE = 300_001  # several threads, several blocks, and a rest
SETS = cpu.available() if cpu.library() is not None else ()


@pytest.fixture(autouse=True)
def threads_again() -> Iterator[None]:
    if cpu.library() is None:
        pytest.skip("the C++ library was not built")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def quantized(x: Tensor, cast: Cast, seed: int = SEED) -> Tensor:
    out = torch.empty_like(x)
    cpu.quantize(x, cast, seed, out)
    return out


def mixed_numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, generator=generator) * torch.exp2(torch.randint(-28, 18, (count,), generator=generator))
    x[::1000], x[1::1000], x[2::1000] = torch.nan, torch.inf, 0.0
    return x.to(dtype)


def test_the_library_is_there_and_has_portable_kernels() -> None:
    assert SETS[0] == "portable"


# -- the same bits everywhere -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
def test_all_instruction_sets_give_the_same_values_and_codes(format: FloatFormat | IntFormat) -> None:
    code_dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[code_bytes(format)]
    for dtype in DTYPES:
        x = inputs(format, dtype)
        for cast in casts(format):
            found = []
            for name in SETS:
                cpu.select(name)
                codes = torch.empty(x.shape, dtype=code_dtype)
                nans = cpu.encode(x, cast, SEED, codes)
                values = torch.empty_like(x)
                cpu.decode(codes, format, values)
                found.append((quantized(x, cast), codes, nans, values))
            for other in found[1:]:
                assert torch.equal(bits(found[0][0]), bits(other[0])), (str(cast), dtype)
                assert torch.equal(found[0][1], other[1]), (str(cast), dtype)
                assert found[0][2] == other[2]
                assert torch.equal(bits(found[0][3]), bits(other[3])), (str(cast), dtype)


def code_bytes(format: FloatFormat | IntFormat) -> int:
    return next(size for size in (1, 2, 4, 8) if format.bits <= 8 * size)


def test_every_instruction_set_agrees_with_rational_arithmetic() -> None:
    for format in FORMATS_TRIED:
        for dtype in (torch.float32, torch.float64):
            x = inputs(format, dtype, random=20)
            every = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(5))[:36]]
            for place, cast in enumerate(casts(format)):
                if not checks.holds(cast, dtype):
                    continue
                x = every[place % 6 :: 6].contiguous()
                drawn = [uniform(SEED, i, cast.random_bits) if cast.is_stochastic else None for i in range(len(x))]
                wanted = [exact_cast(v, cast, u) for v, u in zip(x.tolist(), drawn, strict=True)]
                for name in SETS:
                    cpu.select(name)
                    for v, found, exact in zip(x.tolist(), quantized(x, cast).tolist(), wanted, strict=True):
                        assert same(found, exact), (name, str(cast), v, found, exact)


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1.0, a) == math.copysign(1.0, b))


@pytest.mark.parametrize("name", ["fp16", "e4m3fn:stochastic", "i8:up", "e8m0", "e5m2b142:stochastic"])
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    x, cast = mixed_numbers(LARGE), parse(name)
    torch.set_num_threads(1)
    wanted = quantized(x, cast)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(bits(quantized(x, cast)), bits(wanted))


def test_in_place_unaligned_and_large_outputs_hold_the_same_values() -> None:
    torch.set_num_threads(2)
    tried = [("e5m7", dtype) for dtype in DTYPES] + [("e5m7:stochastic", torch.float32), ("e5m7:up", torch.bfloat16)]
    for name, dtype in tried:
        cast = parse(name)
        x = mixed_numbers((1 << 23) // dtype.itemsize + 5, dtype)  # large enough to be written around the cache
        wanted = quantized(x, cast)
        shifted = torch.empty(len(x) + 1, dtype=dtype)[1:]
        cpu.quantize(x, cast, SEED, shifted)
        assert torch.equal(bits(shifted), bits(wanted))
        cpu.quantize(x, cast, SEED, x)
        assert torch.equal(bits(x), bits(wanted))


def at_any_byte(x: Tensor) -> Tensor:
    """Return a tensor with x's numbers whose address is one byte beyond a multiple of their size."""
    memory = bytearray(x.numel() * x.element_size() + 9)
    start = 1 + -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 8
    moved = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape)
    assert moved.data_ptr() % x.element_size() == 1 % x.element_size()
    return moved.copy_(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_that_begins_at_any_byte_gives_the_same_bits(dtype: torch.dtype) -> None:
    x = mixed_numbers(5000).clamp(-60000, 60000).to(dtype)
    for name in ("e5m2", "e5m2:stochastic", "e5m2b142:up", "i8"):
        cast = parse(name)
        moved, out, codes = at_any_byte(x), at_any_byte(x), torch.empty(x.shape, dtype=torch.int16)
        cpu.quantize(moved, cast, SEED, out)
        assert torch.equal(bits(out.clone()), bits(quantized(x, cast)))
        wanted = torch.empty_like(codes)
        assert cpu.encode(moved, cast, SEED, codes) == cpu.encode(x, cast, SEED, wanted)
        assert torch.equal(codes, wanted)
        values = torch.empty_like(x)
        cpu.decode(codes, cast.element, values)
        cpu.decode(at_any_byte(codes), cast.element, out)
        assert torch.equal(bits(out.clone()), bits(values))
    assert cpu.statistics(moved)[1:] == cpu.statistics(x)[1:]
    finite = torch.where(x.isfinite(), x, 1)
    assert torch.equal(kernels.quantize(at_any_byte(finite), "mxfp8"), kernels.quantize(finite, "mxfp8"))


def test_empty_tensors_are_left_alone() -> None:
    empty = torch.empty(0)
    assert quantized(empty, parse("fp16")).shape == (0,)
    assert cpu.statistics(empty)[1:] == (0.0, 0.0, 0, 0, 0)
    seen = cpu_int16.to_int16(empty, Cast(IntFormat("int16", 16)), as_exponent(0), empty.to(torch.int16))
    assert seen == cpu_int16.Seen(0, False, False, 0, 0)


@pytest.mark.parametrize("name", SETS)
def test_flush_to_zero_of_the_processor_changes_no_bit(name: str) -> None:
    cpu.select(name)
    torch.set_num_threads(2)
    x = (torch.arange(70_000, dtype=torch.int32) * 997 % (1 << 24)).view(torch.float32)  # fp32 subnormals and above
    for text in ("bf16", "bf16:stochastic", "e5m2b140", "e8m0", "fp32", "e5m2b120:up", "e6m9b126:stochastic"):
        cast = parse(text)
        wanted = quantized(x, cast)
        codes, plain, flushed = (torch.empty(x.shape, dtype=torch.int32) for _ in range(3))
        cpu.encode(x, cast, SEED, plain)
        assert torch.set_flush_denormal(True)
        try:
            found = quantized(x, cast)
            cpu.encode(x, cast, SEED, codes)
            cpu.decode(codes, cast.element, flushed.view(torch.float32))
            squares = cpu.statistics(x)[2]
            still_flushing = torch.tensor([1e-40]) * 1.0 == 0
        finally:
            torch.set_flush_denormal(False)
        assert still_flushing, "the caller's mode is left as it was"
        assert torch.equal(bits(found), bits(wanted))
        assert torch.equal(codes, plain)
        assert torch.equal(flushed, wanted.view(torch.int32))
        assert squares == cpu.statistics(x)[2] > 0


# -- random numbers ---------------------------------------------------------------------------------------------------
# Random123 1.14, tests/kat_vectors: philox4x32 10
KNOWN = [
    ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFF_FFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0_A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("name", SETS)
def test_philox_gives_the_published_words(name: str) -> None:
    cpu.select(name)
    for counter, seed, words in KNOWN:
        assert " ".join(f"{word:08x}" for word in random_block(seed, counter)) == words


@pytest.mark.parametrize("name", SETS)
def test_the_vectorised_philox_equals_one_counter_at_a_time(name: str) -> None:
    cpu.select(name)
    for start in (0, 3, 2**32 - 20, 2**40 + 1, 2**64 - 8):
        for seed in (0, SEED, 2**64 - 1):
            found = random_words(seed, start, 70).tolist()
            counters = [(start + i) % 2**64 for i in range(70)]
            assert found == [random_block(seed, (c & 0xFFFFFFFF, c >> 32, 0, 0)) for c in counters]


def test_an_element_depends_on_its_position_but_not_on_the_length() -> None:
    cast, x = parse("e4m3fn:stochastic"), mixed_numbers(5000)
    wanted = quantized(x, cast)
    for length in (1, 3, 1023, 1025, 4097):
        assert torch.equal(bits(quantized(x[:length].contiguous(), cast)), bits(wanted[:length]))
    assert not torch.equal(bits(quantized(x, cast, SEED + 1)), bits(wanted))


@pytest.mark.parametrize("name", SETS)
def test_where_the_first_random_bits_do_not_decide_the_next_ones_do(name: str) -> None:
    """The discarded fraction is put within 2**-24 (fp32) or 2**-32 (fp64) of the element's first random word."""
    cpu.select(name)
    words = random_words(SEED, 0, 16).flatten().tolist()
    decided = set()
    for dtype, format, places in (
        (torch.float32, "e4m3fn", 24),
        (torch.float64, "fp16", 32),
        (torch.float64, "i8", 32),
    ):
        cast = parse(f"{format}:stochastic")
        unit = 2.0**-9 if format == "e4m3fn" else 2.0**-24 if format == "fp16" else 1.0
        for extra in (0.0, 0.25, 0.5, 0.75):
            fractions = [((word >> (32 - places)) + extra) * 2.0**-places for word in words]
            x = (torch.tensor(fractions, dtype=torch.float64) * unit).to(dtype)
            found = quantized(x, cast).tolist()
            wanted = [exact_cast(v, cast, uniform(SEED, i, None)) for i, v in enumerate(x.tolist())]
            assert found == wanted, (cast, extra)
            decided |= {v > 0 for v in wanted} if extra else set()
    assert decided == {False, True}


@pytest.mark.parametrize("name", SETS)
def test_numbers_below_the_normal_ones_are_rounded_with_all_their_bits(name: str) -> None:
    """They include zeros and tiny numbers: the quick kernel leaves blocks to the slower one, here a tenth of them."""
    cpu.select(name)
    x = torch.linspace(-(2.0**-13), 2.0**-13, 1 << 17)
    x[::3] = 0.0
    x[1::3] *= 2.0**-11
    for text in ("fp16:stochastic", "fp16:stochastic-20", "e5m7:stochastic", "e5m2fnuz:stochastic"):
        wanted = torch.empty_like(x)
        bitwise.quantize(x, parse(text), SEED, wanted)
        assert torch.equal(bits(quantized(x, parse(text))), bits(wanted)), text


def test_stochastic_rounding_is_unbiased() -> None:
    count = 1 << 20
    for text, x in (("fp16", 1.0 + 0.3 * 2**-10), ("e4m3fn", 0.7 * 2**-9), ("i8", -3.05), ("bf16", 1e-39)):
        cast = parse(f"{text}:stochastic")
        rounded = quantized(torch.full((count,), x), cast).to(torch.float64)
        low, high = rounded.min().item(), rounded.max().item()
        value = torch.tensor(x).item()
        assert low < value < high and set(rounded.unique().tolist()) == {low, high}
        probability = (value - low) / (high - low)
        # the mean of `count` draws deviates by more than six of its standard deviations once in 5e8 tries
        bound = 6 * math.sqrt(probability * (1 - probability) / count) * (high - low)
        assert abs(rounded.mean().item() - value) < bound, text


def test_few_random_bits_round_up_for_exactly_the_right_share_of_the_numbers_drawn() -> None:
    """stochastic-4: of the 16 numbers that can be drawn, floor(16 t) round away from zero."""
    words = random_words(SEED, 0, 256).flatten() >> 28
    for sixteenths in range(17):
        for dtype in (torch.float32, torch.float64):
            x = torch.full((1024,), 1.0 + (sixteenths + 0.5) / 16 * 2**-3 if sixteenths < 16 else 1.125, dtype=dtype)
            away = quantized(x, parse("e4m3fn:stochastic-4")) == 1.125
            assert torch.equal(away, words < sixteenths if sixteenths < 16 else torch.ones(1024, dtype=torch.bool))


# -- statistics -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_the_definition(dtype: torch.dtype) -> None:
    x = torch.cat([mixed_numbers(9000), torch.tensor([1e-40, -1e-45, 3e38, -0.0])]).to(dtype)
    if dtype == torch.float64:
        x = torch.cat([x, torch.tensor([1e-300, 5e-324, 1e150], dtype=dtype)])
    histogram, maximum, squares, zeros, nans, infinities = reference.statistics(x)
    for name in SETS:
        cpu.select(name)
        found = cpu.statistics(x)
        assert torch.equal(found[0], histogram)
        assert (found[1], *found[3:]) == (maximum, zeros, nans, infinities)
        # both sums are rounded after at most len(x) additions of positive numbers
        assert abs(found[2] - squares) <= squares * len(x) * 2.0**-53


@pytest.mark.parametrize("size", [64, 4096, 3 * 4096 + 128, 5000])
def test_histograms_of_few_and_of_many_exponents_are_those_of_the_definition(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(3))
    bits = torch.randint(-(2**31), 2**31 - 1, (size,), generator=torch.Generator().manual_seed(4), dtype=torch.int64)
    special = x.clone()
    special[::3], special[5], special[7] = 0.0, torch.inf, torch.nan
    steps = x.sign() * 2.0 ** -(torch.arange(size) % 33)  # one exponent more than are compared
    for numbers in (x, bits.to(torch.int32).view(torch.float32), special, x * 0, x * 1e-39, x * 1e38, steps):
        wanted = reference.statistics(numbers)
        for instruction_set in cpu.available():
            cpu.select(instruction_set)
            histogram, maximum, _, *kinds = cpu.statistics(numbers)
            assert torch.equal(histogram, wanted[0]) and [maximum, *kinds] == [wanted[1], *wanted[3:]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_do_not_depend_on_threads_or_instruction_set(dtype: torch.dtype) -> None:
    x = mixed_numbers(LARGE, dtype)
    found = []
    for name in SETS:
        cpu.select(name)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            histogram, *rest = cpu.statistics(x)
            found.append((histogram.tolist(), rest))
    assert all(other == found[0] for other in found)
    assert sum(found[0][0]) == len(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("text", ["mxfp8", "mxfp8:up", "e4m3fn@e8m0/24", "nvfp4"])
def test_a_group_with_a_nan_of_either_sign_is_what_the_definition_says(text: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 192, dtype=dtype).reshape(2, 96)
    x[0, 3], x[0, 40], x[1, 70] = math.nan, -math.nan, -math.inf
    with kernels.use("bitwise"):
        wanted = kernels.quantize(x, text)
    for name in SETS:
        cpu.select(name)
        assert torch.equal(bits(kernels.quantize(x, text)), bits(wanted)), name


# -- shared scales ----------------------------------------------------------------------------------------------------
def test_scaled_values_are_quotient_cast_and_product_in_fp64() -> None:
    x = mixed_numbers(6 * 1111).reshape(6, 1111)
    for dtype in DTYPES:
        numbers = x.to(dtype)
        for text, group in (("int8", 0), ("e4m3fn@fp32/32", 32), ("e3m2@fp32/100:stochastic", 100), ("i4s@fp32/7", 7)):
            cast = parse(text)
            groups = -(-1111 // (group or 1111))
            scale = torch.rand(6, groups, generator=torch.Generator().manual_seed(1)) + 0.01
            wide = numbers.to(torch.float64)
            each = scale.to(torch.float64).repeat_interleave(group or 1111, dim=1)[:, :1111]
            wanted = reference.values(wide / each, cast.element_cast, SEED) * each
            for name in SETS:
                cpu.select(name)
                out = cpu_groups.quantize_scaled(numbers, cast, scale.to(torch.float64), SEED)
                assert torch.equal(out.isnan(), wanted.isnan())
                assert torch.equal(out.nan_to_num(), wanted.to(dtype).nan_to_num()), (text, dtype)


WHOLE = ["e4m3fn@fp32/tensor", "e5m2@fp32/tensor:stochastic", "i8s@fp32/tensor:current(headroom=3)", "e2m1@fp32/tensor"]
MAXIMA = [1.0, 3.4e38, 1e-40, 1e-45, 0.0, -0.0, 448.0, math.inf, math.nan]


@pytest.mark.parametrize("text", WHOLE)
@pytest.mark.parametrize("maximum", MAXIMA)
def test_the_scale_of_a_whole_tensor_is_that_of_the_definition(text: str, maximum: float) -> None:
    spread = torch.linspace(-1, 1, 40) * (maximum if math.isfinite(maximum) else 1.0)
    x = torch.cat([spread, torch.tensor([-maximum])])
    with kernels.use("reference"):
        expected = kernels.quantize(x, text, seed=3)
    assert torch.equal(kernels.quantize(x, text, seed=3).view(torch.int32), expected.view(torch.int32))


def test_a_zero_point_moves_the_range_of_the_integers() -> None:
    x = torch.linspace(-1.0, 3.0, 4000).reshape(2, 2000)
    scale, point = torch.tensor([[0.01], [0.02]]), torch.tensor([[-28], [-100]])
    out = cpu_groups.quantize_scaled(x, parse("int8-affine"), scale.double(), 0, zero_point=point)
    codes = (x.double() / scale.double()).round() + point
    wanted = (codes.clamp(-128, 127) - point) * scale.double()
    assert torch.equal(out, wanted.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int16_mantissas_are_the_rounded_saturated_multiples(dtype: torch.dtype) -> None:
    x = torch.cat([mixed_numbers(3000), torch.tensor([1e-38, -1e-45, 3e38, 0.5, 1.5, 2.5])]).to(dtype)
    for exponent in (-31, -8, 0, 3, -128, 127):
        for symmetric in (False, True):
            for rounding in Rounding:
                bits = 8 if rounding in (Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C) else None
                cast = Cast(IntFormat("int16", 16, symmetric), rounding, random_bits=bits)
                scaled = x.to(torch.float64) * 2.0**-exponent
                wanted = reference.values(scaled, cast, SEED).nan_to_num(0.0).to(torch.int16)
                wide = reference.values(scaled, Cast(IntFormat("wide", 32), rounding, random_bits=bits), SEED)
                far = x.isfinite() & ((wide > 32767) | (wide < (-32767 if symmetric else -32768)))
                for name in SETS:
                    cpu.select(name)
                    out = torch.empty(x.shape, dtype=torch.int16)
                    seen = cpu_int16.to_int16(x, cast, as_exponent(exponent), out, seed=SEED)
                    assert torch.equal(out, wanted), (exponent, rounding)
                    largest = int(wanted[x.isfinite()].to(torch.int32).abs().max())  # infinities stay outside
                    assert seen == cpu_int16.Seen(largest, not x.isfinite().all(), False, int(far.sum()), x.numel())


# -- threads, forks and the end ---------------------------------------------------------------------------------------
# The children call no operation of torch that uses its threads: torch's own (OpenMP) do not survive a fork.
def _child(x: Tensor, queue: multiprocessing.Queue[list[int]]) -> None:
    queue.put(bits(quantized(x, parse("e5m7")))[-2000:].tolist())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    torch.set_num_threads(2)
    x = mixed_numbers(LARGE)
    wanted = bits(quantized(x, parse("e5m7")))
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        queue: multiprocessing.Queue[list[int]] = context.Queue()
        process = context.Process(target=_child, args=(x, queue), daemon=True)
        process.start()
        try:
            assert queue.get(timeout=forked.PATIENCE) == wanted[-2000:].tolist()
            process.join(timeout=forked.PATIENCE)
            assert process.exitcode == 0
        finally:
            process.kill()
    assert torch.equal(bits(quantized(x, parse("e5m7"))), wanted)


class _Samples(torch.utils.data.Dataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        torch.set_num_threads(2)  # a worker starts with one
        return quantized(self.x, parse("fp16:stochastic"), seed=index)[:1000]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_workers_of_a_data_loader_can_quantise() -> None:
    torch.set_num_threads(2)
    x = mixed_numbers(LARGE)
    wanted = torch.stack([quantized(x, parse("fp16:stochastic"), seed=index)[:1000] for index in range(4)])
    loader = torch.utils.data.DataLoader(
        _Samples(x), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=forked.PATIENCE
    )
    assert torch.equal(bits(torch.cat(list(loader))), bits(wanted))


def test_two_python_threads_can_call_at_once() -> None:
    torch.set_num_threads(2)
    x, names = mixed_numbers(LARGE), ["fp16", "e4m3fn", "bf16:stochastic", "i8"]
    wanted = {name: quantized(x, parse(name)) for name in names}
    wrong: list[str] = []

    def work(name: str) -> None:
        torch.set_num_threads(2)
        for _ in range(30):
            if not torch.equal(bits(quantized(x, parse(name))), bits(wanted[name])):
                wrong.append(name)

    workers = [threading.Thread(target=work, args=(name,)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=forked.PATIENCE)
    assert wrong == [] and not any(worker.is_alive() for worker in workers)


def test_the_interpreter_can_end_while_a_daemon_thread_quantises() -> None:
    code = (
        "import threading, torch; from lowp.kernels import cpu; from lowp.casts import parse\n"
        "torch.set_num_threads(2); x = torch.randn(1 << 20); cast = parse('fp16:stochastic')\n"
        "def work():\n    while True: cpu.quantize(x, cast, 0, x)\n"
        "threading.Thread(target=work, daemon=True).start(); cpu.quantize(x, cast, 0, x.clone())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=forked.PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")


def _threads_started(environment: dict[str, str]) -> tuple[int, int]:
    """Return the number of additional threads of a process after an operation of torch, and of the library."""
    code = (
        "import os, torch; from lowp.kernels import cpu; from lowp.casts import parse\n"
        "torch.set_num_threads(2); x = torch.randn(1 << 20); before = len(os.listdir('/proc/self/task'))\n"
        "x.exp_(); torchs = len(os.listdir('/proc/self/task')) - before\n"
        "cpu.quantize(x, parse('fp16'), 0, x); print(torchs, len(os.listdir('/proc/self/task')) - before)"
    )
    run = [sys.executable, "-c", code]
    ended = subprocess.run(
        run, capture_output=True, text=True, timeout=forked.PATIENCE, env={**os.environ, **environment}
    )
    assert ended.stderr == ""
    torchs, both = ended.stdout.split()
    return int(torchs), int(both)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc")
def test_the_library_works_on_torch_s_threads_unless_it_is_to_have_its_own() -> None:
    torchs, both = _threads_started({"LOWP_THREADS": "own"})
    assert both == torchs + 1
    if not cpu.uses_own_threads():  # torch's runtime is known
        torchs, both = _threads_started({"LOWP_THREADS": "torch"})
        assert torchs == both == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="masks are read in Linux's /proc")
def test_a_handler_of_faults_runs_on_the_library_s_threads_and_no_other_signal_does() -> None:
    code = (
        "import os, signal, time, torch; from lowp.kernels import cpu; from lowp.casts import parse\n"
        "torch.set_num_threads(2); x = torch.zeros(1 << 20); before = {*os.listdir('/proc/self/task')}\n"
        "cpu.quantize(x, parse('fp16'), 0, x); new, = {*os.listdir('/proc/self/task')} - before\n"
        "blocked = lambda: int(open(f'/proc/self/task/{new}/status').read().split('SigBlk:')[1].split()[0], 16)\n"
        # a thread that is being made still blocks them all
        "end = time.monotonic() + 30\n"
        "while blocked() >> signal.SIGSEGV - 1 & 1 and time.monotonic() < end: time.sleep(0.01)\n"
        "print(*(blocked() >> one - 1 & 1 for one in (signal.SIGSEGV, signal.SIGBUS, signal.SIGINT)))"
    )
    ended = forked.run("-c", code, environment={"LOWP_THREADS": "own"})
    assert (ended.stdout, ended.stderr) == ("0 0 1\n", "")


def test_other_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWP_THREADS", "tbb")
    with pytest.raises(InvalidInput, match="LOWP_THREADS='tbb': allowed are 'torch'"):
        cpu.uses_own_threads()


def _forget_the_library() -> None:
    cpu.library.cache_clear()
    cpu.loaded.cache_clear()


def _first_use(x: Tensor, queue: multiprocessing.Queue[list[int]]) -> None:
    _forget_the_library()  # as in a parent that had not used it
    _child(x, queue)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_that_uses_the_library_first_does_not_wait_for_threads_of_its_parent() -> None:
    torch.set_num_threads(2)
    x = mixed_numbers(LARGE)
    wanted = bits(quantized(x, parse("e5m7")))[-2000:].tolist()
    x.clone().exp_()  # torch's threads have started
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[list[int]] = context.Queue()
    process = context.Process(target=_first_use, args=(x, queue), daemon=True)
    process.start()
    try:
        assert queue.get(timeout=forked.PATIENCE) == wanted
    finally:
        process.kill()


# -- choosing ---------------------------------------------------------------------------------------------------------
def test_the_environment_chooses_the_instruction_set() -> None:
    code = "from lowp.kernels import cpu; cpu.library(); cpu.select(None); print(cpu.available())"
    for chosen, error in (("portable", ""), ("mmx", "no kernels for 'mmx'; allowed: portable, avx2, avx512, neon")):
        ended = forked.run("-c", code, environment={"LOWP_CPU_ISA": chosen})
        assert error in ended.stderr
        assert (ended.returncode == 0) == (error == "")


@pytest.mark.parametrize("asked", ["portable", "neon", "avx512"])
def test_one_choice_holds_for_casts_and_integer_products_or_is_refused_for_both(asked: str) -> None:
    try:
        cpu.select(asked)
    except Unavailable as error:
        assert f"this CPU has no {asked}; it has portable" in str(error)
        assert integer.chosen_kernel(torch.zeros(1)) == cpu.asked() != asked
    else:
        assert cpu.available() and integer.chosen_kernel(torch.zeros(1)) == asked
    cpu.select(None)
    assert integer.chosen_kernel(torch.zeros(1)) == ""


def test_an_instruction_set_that_is_not_there_is_named() -> None:
    for name in set(cpu.INSTRUCTION_SETS) - set(SETS):
        with pytest.raises(Unavailable, match=f"this CPU has no {name}; it has portable"):
            cpu.select(name)
    with pytest.raises(Unavailable, match="no kernels for 'sse9'; allowed: portable, avx2, avx512, neon"):
        cpu.select("sse9")


@pytest.mark.parametrize(
    ("own", "foreign", "reason"),
    [
        (0, b"0.0.9", r"it is of lowp 0\.0\.9, this is lowp .*: build it again, or start Python anew"),
        (1, b"0" * 64, "it was built from other sources than those in .*cpu: build it again"),
        (None, b"lowp_birth", "it was built for an earlier version of lowp: build it again"),
    ],
)
def test_a_stale_library_is_refused_and_the_bits_stay_the_same(
    own: int | None, foreign: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, stale = mixed_numbers(2000), tmp_path / "liblowp_cpu.so"
    wanted = kernels.quantize(x, "e4m3fn:stochastic", seed=3)
    replaced = b"lowp_build" if own is None else cpu.loaded().lowp_build().split()[own]
    assert len(replaced) == len(foreign)
    stale.write_bytes(cpu.PATH.read_bytes().replace(replaced, foreign))
    monkeypatch.setattr(cpu, "PATH", stale)
    _forget_the_library()
    try:
        with pytest.warns(RuntimeWarning, match=reason):
            found = kernels.quantize(x, "e4m3fn:stochastic", seed=3)
    finally:
        monkeypatch.undo()
        _forget_the_library()
    assert torch.equal(bits(found), bits(wanted))


def test_a_wheel_without_the_sources_asks_for_the_version_alone(tmp_path: Path) -> None:
    assert cpu._sources(tmp_path) is None
    (tmp_path / "a.cpp").write_text("int a;")
    first = cpu._sources(tmp_path)
    (tmp_path / "a.cpp").write_text("int b;")
    assert first != cpu._sources(tmp_path)


def test_python_calls_the_functions_as_the_sources_declare_them() -> None:
    types = {"int": c_int, "int64_t": c_int64, "uint64_t": c_uint64, "float": c_float, "double": c_double, "void": None}
    sources = Path(cpu.__file__).parent
    text = "".join(file.read_text() for file in sorted(sources.glob("*.cpp")))
    text = text.replace('extern "C" __attribute__((visibility("default")))', "LOWP_EXPORT")
    declared = {
        match[2]: tuple("*" if "*" in one else types[one.split()[0]] for one in [match[1], *match[3].split(",")] if one)
        for match in re.finditer(r"^LOWP_EXPORT ((?:const )?\w+\*?) (lowp_\w+)\(([^)]*)\)", text, re.MULTILINE)
    }
    called = {
        name: tuple("*" if one in (c_void_p, c_char_p) else one for one in (result, *arguments))
        for name, (result, arguments) in abi.SIGNATURES.items()
    }
    assert declared == called


def test_a_missing_library_is_said_once_and_the_bits_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = mixed_numbers(2000)
    wanted = kernels.quantize(x, "e4m3fn:stochastic", seed=3)
    monkeypatch.setattr(cpu, "PATH", Path("nowhere/liblowp_cpu.so"))
    _forget_the_library()
    try:
        with pytest.warns(RuntimeWarning, match=r"nowhere/liblowp_cpu.so is not used \(it was not built\)"):
            found = kernels.quantize(x, "e4m3fn:stochastic", seed=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernels.quantize(x, "fp16")
        with pytest.raises(Unavailable, match="the bitwise and reference kernels are"):
            cpu.quantize(x, parse("fp16"), 0, x)
    finally:
        monkeypatch.undo()
        _forget_the_library()
    assert torch.equal(bits(found), bits(wanted))


# -- what the library is given -----------------------------------------------------------------------------------------
def without_memory() -> dict[str, Tensor]:
    """Tensors that have no memory of their own on the CPU."""
    freed = torch.ones(8)
    view = freed[2:]
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(8)
    return {"fake": fake, "meta": torch.ones(8, device="meta"), "freed": freed, "a view of what was freed": view}


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize("kind", without_memory())
def test_no_function_of_the_library_is_reached_with_a_tensor_without_memory(kind: str) -> None:
    x, own = without_memory()[kind], cpu.loaded()
    for name, (_, arguments) in abi.SIGNATURES.items():
        for place in (at for at, one in enumerate(arguments) if one is c_void_p):
            for given in (x, [1, x]):
                others = [None] * len(arguments)
                with pytest.raises(InvalidInput, match=r"no memory of its own|without memory"):
                    getattr(own, name)(*others[:place], given, *others[place + 1 :])


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_no_number_stands_for_memory() -> None:
    x = torch.ones(8)
    with pytest.raises(TypeError, match="a number for the memory at 0"):
        cpu.loaded().lowp_sum_int16(x.data_ptr(), 1, 8, 1, array("q", (0,) * 8), 1)


def ordinary() -> dict[str, tuple[Tensor, bool]]:
    """Tensors, and whether each is an ordinary one: in memory of its own on the CPU, read by torch alone."""
    whole, complex_ones = torch.ones(4, 4), torch.ones(4, dtype=torch.complex64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return {
        **{"fp32": (whole, True), "a view": (whole[1:, 2:], True), "transposed": (whole.t(), True)},
        **{"expanded": (torch.ones(1).expand(4), True), "a parameter": (torch.nn.Parameter(whole), True)},
        **{"fp16": (whole.half(), True), "bf16": (whole.bfloat16(), True), "empty": (torch.ones(0, 3), True)},
        **{"fp64": (whole.double(), False), "int32": (whole.int(), False), "complex": (complex_ones, False)},
        **{"negated": (torch._neg_view(whole), False), "sparse": (whole.to_sparse(), False)},
        **{"nested": (nested, False), "on meta": (whole.to("meta"), False), "fake": (without_memory()["fake"], False)},
        **{"of a class": (whole.as_subclass(Mine), False), "zeros": (torch._efficientzerotensor(3), False)},
    }


class Mine(Tensor):
    """A class of a script's own."""


@pytest.mark.parametrize("kind", ordinary())
def test_ordinary_tensors_are_told_from_others_in_one_place(kind: str) -> None:
    (x, is_ordinary), other = ordinary()[kind], torch.ones(2)
    first = other.data_ptr()
    for given, at in (([x], 0), ([other, None, x], 2), ([x, other], 0)):
        found = cpu.addresses(given)
        if not is_ordinary:
            assert found is None
            continue
        wanted = [0 if one is None else first for one in given]
        assert found == [*wanted[:at], x.data_ptr(), *wanted[at + 1 :]]
        assert cpu.addresses(given, [torch.float64]) is None
    assert cpu.addresses([]) == [] and cpu.addresses([None]) == [0]
    assert cpu.addresses([torch.ones(2, dtype=torch.int8)], (*cpu.FLOATS, torch.int8)) is not None
    if kind in ("on meta", "fake"):
        with pytest.raises(InvalidInput, match="has no memory of its own that the"):
            cpu.address(x)
    elif x.layout is torch.strided and not x.is_nested and kind != "zeros":
        assert cpu.address(x) == x.data_ptr() == cpu.addresses_of([other, x])[1]
        assert cpu.numbers_of([3, x, None, 0, other]) == [3, x.data_ptr(), 0, 0, first]
        assert cpu.numbers_of([x, other]) == [x.data_ptr(), first]


def test_the_guard_of_memory_looks_at_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper of a transform, and elements whose storage is freed, are no ordinary tensors."""
    seen: list[list[int] | None] = []

    def looked_at(x: Tensor) -> Tensor:
        seen.append(cpu.addresses([x]))
        return x.sum()

    torch.func.vmap(looked_at)(torch.ones(2, 3))
    torch.func.grad(looked_at)(torch.ones(3))
    assert seen == [None, None]
    for name in ("freed", "a view of what was freed"):
        for ask in (cpu.address, lambda x: cpu.addresses([x]), lambda x: cpu.addresses_of([x]), cpu.begin):
            with pytest.raises(InvalidInput, match="without memory: its storage was resized to 0"):
                ask(without_memory()[name])
