"""int16 mantissas under one power of two: mantissas_and_values, recognised, and moved by an optimizer's step."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowp
from lowp.casts import Cast, parse
from lowp.errors import InvalidInput
from lowp.exponents.table import ExponentTable
from lowp.kernels import available, cpu, use
from lowp.kernels.int16 import cpu_int16, entries, low_words, mantissas
from lowp.kernels.int16.entries import record_of
from lowp.kernels.int16.mantissas import (
    as_exponent,
    current_mantissas,
    exact_mantissas,
    mantissas_and_values,
    own_exponent,
    sums,
    to_mantissas,
    values,
)

from .test_cpu import at_any_byte

FLEX, AUTOFLEX = parse("flex16+5"), parse("flex16+5:autoflex")
needs_library = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def table_of(exponents: Sequence[int]) -> ExponentTable:
    """Return a table whose entries have begun with these exponents."""
    table = ExponentTable(AUTOFLEX, torch.device("cpu"))
    for place, exponent in enumerate(exponents):
        index = table.index(f"weight of {place}")
        table.state.exponent[index], table.state.started[index] = exponent, True
    return table


def written(x: Tensor, exponent: int, how: int = entries.VALUES) -> Tensor:
    """Write a tensor in place under an exponent; return what was seen."""
    table = table_of([exponent])
    entries.write_in_place(table.block, FLEX, [(x, 0, how)])
    return table.seen[0]


def defined(x: Tensor, exponent: int) -> tuple[Tensor, int]:
    """Return mantissas by their definition in fp64, and how many were saturated."""
    scaled = torch.ldexp(x.double(), torch.tensor(-exponent)).round()
    bounded = scaled.clamp(-32768, 32767)
    return bounded.to(torch.int16), int((bounded != scaled).sum())


def exact_exponent(x: Tensor, cast: Cast) -> int | None:
    """Return the exponent of x's maximum if x is in the format under it."""
    is_exact, exponent = mantissas.exact(x, cast)
    return int(exponent) if is_exact else None


_READERS = {
    "current_mantissas": lambda x: current_mantissas(x, FLEX),
    "exact_mantissas": lambda x: exact_mantissas(x, FLEX, as_exponent(-14)),
    "to_mantissas": lambda x: to_mantissas(x, FLEX, -14),
    "mantissas_and_values": lambda x: mantissas_and_values(x, FLEX, -14),
    "sums": lambda x: sums(x.view(torch.int16), 0),
    "values": lambda x: values(x.view(torch.int16), -14),
}


def test_tensors_that_begin_at_any_byte_have_the_mantissas_of_aligned_ones() -> None:
    # a processor of today reads them all the same: `make sanitize` fails where the library reads them as aligned
    x, other, bias = drawn(70, 40), drawn(30, 40, seed=1), drawn(30, seed=2)
    exponent, words = own_exponent(x, FLEX), to_mantissas(x, FLEX, -12)
    shifted = at_any_byte(x)
    assert own_exponent(shifted, FLEX) == exponent
    assert exact_exponent(at_any_byte(words.values), FLEX) == exact_exponent(words.values, FLEX)
    assert torch.equal(to_mantissas(shifted, FLEX, -12).payload, words.payload)
    with lowp.autocast("dfp16"):
        assert torch.equal(F.linear(shifted, at_any_byte(other), at_any_byte(bias)), F.linear(x, other, bias))


@pytest.mark.parametrize("name", _READERS)
@needs_library
def test_a_tensor_without_memory_is_refused_and_not_read(name: str) -> None:
    x = drawn(64)
    _READERS[name](x)
    x.untyped_storage().resize_(0)  # as FSDP frees parameters
    with pytest.raises(InvalidInput, match="without memory: its storage was resized to 0"):
        _READERS[name](x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 5000, 200_000])
def test_mantissas_and_values_come_from_one_pass(dtype: torch.dtype, count: int) -> None:
    x = drawn(count).to(dtype)
    found, result, seen = mantissas_and_values(x, FLEX, -14)
    payload, cut = defined(x, -14)
    assert torch.equal(found.payload, payload)
    assert seen[:4] == (int(payload.int().abs().max()) if count else 0, False, False, cut)
    assert torch.equal(result, payload.float() * 2.0**-14) and torch.equal(values(payload, -14), result)


@needs_library
def test_what_is_not_finite_has_no_value_and_is_counted() -> None:
    x = drawn(3000)
    x[[5, 1500, 2999]] = torch.tensor([math.inf, math.nan, -math.inf])
    _, result, seen = mantissas_and_values(x, FLEX, -14)
    assert seen.nonfinite
    assert torch.equal(result[~x.isfinite()].nan_to_num(7.0), x[~x.isfinite()].nan_to_num(7.0))
    row = written(x, -14)
    assert torch.equal(row, record_of(seen, has_nan=True)) and torch.equal(x.nan_to_num(), result.nan_to_num())


@needs_library
def test_in_place_is_the_same_and_counts_as_a_change() -> None:
    x = drawn(5, 700)
    _, result, _ = mantissas_and_values(x, FLEX, -12)
    version = x._version
    written(x, -12)
    assert torch.equal(x, result) and x._version > version


@pytest.mark.parametrize("with_library", [True, False])
def test_dense_heads_are_written_as_they_lie(with_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_library:
        monkeypatch.setattr(mantissas, "uses_library", lambda: False)
    x = drawn(3, 50, 4, 16)
    x[0, 1, 2, 3], x[2, 49, 3, 15] = 9.0, math.inf
    heads = x.transpose(1, 2)
    expected, result, expected_seen = mantissas_and_values(heads.contiguous(), FLEX, -14)
    found, mine, seen = mantissas_and_values(heads, FLEX, -14)
    assert mine.stride() == found.payload.stride() == heads.stride() and mine._base is None
    assert torch.equal(mine, result) and torch.equal(found.payload, expected.payload) and seen == expected_seen
    assert seen.overflowed > 1 and seen.nonfinite


@pytest.mark.parametrize("layout", ["channels last", "a part", "expanded", "negated", "stochastic"])
def test_other_layouts_are_written_contiguously(layout: str) -> None:
    x, cast = drawn(3, 6, 4, 16), FLEX
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "a part":
        x = x[..., 3:9].transpose(1, 2)
    elif layout == "expanded":
        x = x[:, :1].expand(3, 6, 4, 16)
    elif layout == "negated":
        x = torch.complex(drawn(3, 4, 6, 16), x.transpose(1, 2)).conj().imag.transpose(1, 2)
    else:
        x, cast = x.transpose(1, 2), parse("flex16+5:stochastic")
    expected, result, expected_seen = mantissas_and_values(x.contiguous().resolve_neg(), cast, -14)
    found, mine, seen = mantissas_and_values(x, cast, -14)
    assert not x.is_contiguous() and mine.is_contiguous() and found.payload.is_contiguous()
    assert torch.equal(mine, result) and torch.equal(found.payload, expected.payload) and seen == expected_seen


def test_values_reach_beyond_the_range_of_their_unit() -> None:
    payload = torch.tensor([-32768, -1, 0, 1, 32767], dtype=torch.int16)
    for exponent in (-149, -140, -101, -100, 100, 101, 112):
        exact = torch.tensor([math.ldexp(m, exponent) for m in payload.tolist()], dtype=torch.float64)
        assert torch.equal(values(payload, exponent), exact.float())


@pytest.mark.parametrize("unit", [-31, -14, -3, 0])
def test_a_tensor_in_the_format_is_recognised_and_one_bit_more_is_not(unit: int) -> None:
    x = torch.ldexp(torch.randint(-32767, 32768, (3000,)).float(), torch.tensor(unit))
    x[0] = math.ldexp(32767, unit)
    assert exact_exponent(x, FLEX) == own_exponent(x, FLEX) == unit
    assert exact_exponent(x.double(), FLEX) == unit and exact_exponent(x.view(50, 60).t(), FLEX) == unit
    x[2999] = math.ldexp(0.5, unit)
    assert exact_exponent(x, FLEX) is None and exact_exponent(x.double(), FLEX) is None


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_whether_numbers_are_in_the_format_does_not_depend_on_the_scaling(name: str) -> None:
    if name not in available():
        pytest.skip("the C++ library was not built")
    x = torch.tensor([32767.0, -3.0, 1.0]) * 2.0**-20
    with use(name):
        for cast in (FLEX, parse("flex16+5:current(headroom=2)"), AUTOFLEX, Cast(FLEX.format)):
            assert exact_exponent(x, cast) == exact_exponent(x.double(), cast) == -20, cast
            assert exact_exponent(x + x[1:2].abs() * 2.0**-3, cast) is None


@pytest.mark.parametrize("unit", [-30, -14])
def test_a_transposed_tensor_in_the_format_is_recognised_where_it_lies(
    unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.library() is not None:
        monkeypatch.setattr(mantissas, "own_exponent", lambda *_: pytest.fail("it was copied"))
    x = values(torch.randint(-32767, 32768, (7, 90), generator=torch.Generator().manual_seed(0)).short(), unit)
    assert exact_exponent(x.t(), FLEX) == exact_exponent(x, FLEX) is not None
    x[3, 3] += 2.0 ** (unit - 3)
    assert exact_exponent(x.t(), FLEX) is None


def test_what_no_int16_holds_is_not_in_the_format() -> None:
    largest = torch.tensor([32768.0, 3.0])  # needs the exponent 1, beyond the largest, 0
    for x in (largest, torch.tensor([math.inf]), torch.tensor([math.nan]), torch.tensor([1.0, 2.0**-40])):
        assert exact_exponent(x, FLEX) is None
    assert exact_exponent(torch.tensor([2.0**20]), FLEX) is None  # beyond the largest exponent, 0
    assert exact_exponent(torch.tensor([2.0**-149]), FLEX) is None
    assert exact_exponent(torch.zeros(4), FLEX) == exact_exponent(torch.zeros(0), FLEX) == 0


@needs_library
def test_exact_mantissas_try_a_hint_first() -> None:
    x = torch.ldexp(torch.randint(-900, 900, (100, 7)).float(), torch.tensor(-10))
    hinted, corrected = (exact_mantissas(x, FLEX, as_exponent(one)) for one in (-10, -5))
    assert hinted is not None and corrected is not None
    assert hinted.exponent == -10 and corrected.exponent == exact_exponent(x, FLEX)
    for found in (hinted, corrected):
        assert torch.equal(found.values, x)
    assert exact_mantissas(x + 2.0**-20, FLEX, as_exponent(-10)) is None
    nothing = exact_mantissas(torch.zeros(5), FLEX, as_exponent(-10))
    assert nothing is not None and nothing.exponent == -10 and not nothing.payload.any()
    assert exact_mantissas(torch.tensor([-32768.0, 2.0]), parse("dfp16"), as_exponent(0)).exponent == 1  # symmetric


@needs_library
@pytest.mark.parametrize("instructions", [None, "portable"])
def test_a_step_writes_the_update_and_then_the_weight(instructions: str | None) -> None:
    cpu.select(instructions)
    old = to_mantissas(drawn(3, 1000, scale=0.3), FLEX, -14)
    before = values(old.payload, -14)
    moved, other = before.clone(), before[:1].clone()
    table = table_of((-21, -14, -21, -14))
    steps = entries.Steps(table.block, [moved, other], (0, 1, 2, 3))
    assert all(map(torch.equal, steps.before, (before, before[:1])))
    moved += drawn(3, 1000, seed=1, scale=0.01)
    moved[1, 3] = math.nan
    _, update_values, update = mantissas_and_values(moved.double() - before.double(), FLEX, -21)
    _, expected, weight = mantissas_and_values(before.double() + update_values.double(), FLEX, -14)
    version = moved._version
    assert sorted(entries.write_in_place(table.block, FLEX, [], steps)) == [0, 1, 2, 3]
    assert torch.equal(other, before[:1]) and table.seen[2, 0] == 0 and moved._version > version
    assert torch.equal(moved.nan_to_num(), expected.nan_to_num()) and moved[1, 3].isnan()
    assert update.overflowed > 0
    for row, seen in zip(table.seen, (update, weight), strict=False):
        assert torch.equal(row, record_of(seen))


@needs_library
def test_steps_of_weights_that_moved_or_do_not_fit_are_left_to_others() -> None:
    table, weights = (
        table_of((-20, -14, -20, -14, -20, -14)),
        [drawn(9).round() / 4, drawn(9) * 1e-3, drawn(9) * 2.0**20],
    )
    steps = entries.Steps(table.block, weights, (0, 1, 2, 3, 4, 5))
    assert len(steps.weights) == 1 and steps.weights[0] is weights[0]
    assert not steps.have_moved()
    weights[0].set_(weights[0].clone())  # type: ignore[call-overload]
    assert steps.have_moved()


@needs_library
def test_of_several_weights_those_that_fit_are_stepped_each_under_its_own_entries() -> None:
    exponents = {1: -14, 3: -12, 4: -10}
    table = table_of([one for place in range(5) for one in (-20 - place, exponents.get(place, -14))])
    weights = [drawn(9) * 2.0**20, drawn(33, seed=1), drawn(9) * 1e-3, drawn(65, seed=2), drawn(2, seed=3)]
    for place, exponent in exponents.items():
        weights[place] = values(to_mantissas(weights[place], FLEX, exponent).payload, exponent)
    begun = [one.clone() for one in weights]
    steps = entries.Steps(table.block, weights, range(10))
    assert [id(one) for one in steps.weights] == [id(weights[place]) for place in exponents] and not steps.have_moved()
    assert all(map(torch.equal, steps.before, [begun[place] for place in exponents])) and len(steps.before) == 3
    first, second, third = (at - steps.rows[3] for at in steps.rows[3::5])
    assert steps.rows[3] % 64 == 0 and second - first == 2 * (64 + 32) and third - second == 2 * 96, "as lines lie"
    for place in exponents:
        weights[place] += drawn(len(weights[place]), seed=9, scale=0.01)
    after = [one.clone() for one in weights]
    assert sorted(entries.write_in_place(table.block, FLEX, [], steps)) == [2, 3, 6, 7, 8, 9]
    assert torch.equal(weights[0], begun[0]) and torch.equal(weights[2], begun[2])
    for place, exponent in exponents.items():
        _, update, seen = mantissas_and_values(after[place].double() - begun[place].double(), FLEX, -20 - place)
        _, expected, whole = mantissas_and_values(begun[place].double() + update.double(), FLEX, exponent)
        assert torch.equal(weights[place], expected) and not torch.equal(expected, begun[place])
        assert torch.equal(table.seen[2 * place], record_of(seen))
        assert torch.equal(table.seen[2 * place + 1], record_of(whole))


@needs_library
def test_a_table_knows_whether_anything_was_not_finite_and_whether_anything_did_not_fit() -> None:
    for numbers, expected in (
        ([1.0], (False, False)),
        ([math.inf], (True, False)),
        ([1.0, 3.0], (False, True)),
        ([math.nan, 3.0], (True, True)),
    ):
        table = table_of([-20, -14])
        assert entries.met(table.block, 2) == (False, False)
        entries.write_in_place(table.block, FLEX, [(torch.tensor(numbers), 1, entries.VALUES)])
        assert entries.met(table.block, 2) == expected


@needs_library
@pytest.mark.parametrize("instructions", [None, "portable"])
@pytest.mark.parametrize("exponent", [-14, -31])
def test_two_words_in_place_are_the_first_and_what_it_leaves_in_a_second(
    instructions: str | None, exponent: int
) -> None:
    x = drawn(3, 1000, scale=math.ldexp(0.3, exponent + 16))  # some are cut off
    x[0, :500] = torch.ldexp(x[0, :500], torch.arange(500) // -12)  # down to what both words lose
    x[1, 3] = math.inf
    _, first, seen = mantissas_and_values(x, FLEX, exponent)
    low = low_words.low_value(x, first, as_exponent(exponent), None)
    version = x._version
    cpu.select(instructions)
    row = written(x, exponent, entries.TWO_WORDS)
    assert torch.equal(x.nan_to_num(), (low + first).nan_to_num())
    assert seen.overflowed > 0 and x[1, 3].isnan() and x._version > version
    assert torch.equal(row, record_of(seen, has_nan=True))


@needs_library
def test_several_tensors_are_looked_at_and_written_as_each_alone() -> None:
    tensors = [drawn(3, 1000), drawn(2), drawn(70000, seed=2)]
    exponents = (-13, -14, -12)
    values_of = [mantissas_and_values(x, FLEX, exponent) for x, exponent in zip(tensors, exponents, strict=True)]
    changed, table = [x.clone() for x in tensors], table_of(exponents)
    given = [(x, place, entries.VALUES) for place, x in enumerate(changed)]
    entries.write_in_place(table.block, FLEX, given)
    for one, (_, of_one, seen), row in zip(changed, values_of, table.seen, strict=True):
        assert torch.equal(one, of_one) and torch.equal(row, record_of(seen)) and one._version > 0
    whole = array("q")
    for x, (one, *_) in zip(changed, values_of, strict=True):
        whole.extend((x.data_ptr(), one.payload.data_ptr(), 1, x.numel(), x.numel(), one.exponent.data_ptr()))
    assert cpu_int16.are_int16(whole) == [True] * 3
    changed[1].numpy()[0] += 1  # unseen by torch
    assert cpu_int16.are_int16(whole) == [True, False, True]


@needs_library
def test_a_step_without_effect_tells_so() -> None:
    weight, table = torch.zeros(10), table_of((-20, -14))
    steps = entries.Steps(table.block, [weight], (0, 1))
    weight.fill_(1e-9)
    entries.write_in_place(table.block, FLEX, [], steps)
    assert table.seen[:, [0, entries.FLAGS]].tolist() == [[0, 1 << 16], [0, 0]]  # the update has vanished


# a sum of 2^15 or more smallest numbers leaves int32; columns are summed in blocks of 1024
SUMMED = (((70000, 3), -1), ((2, 3, 40000), 1), ((3, 1100), 1), ((4,), 0), ((0, 2), 1))


@pytest.mark.parametrize(("shape", "axis"), SUMMED)
def test_sums_of_channels_are_exact(shape: tuple[int, ...], axis: int) -> None:
    for payload in (torch.randint(-32768, 32768, shape).to(torch.int16), torch.full(shape, -32768).to(torch.int16)):
        moved = payload.to(torch.int64).movedim(axis, 0).reshape(shape[axis], -1).sum(1)
        assert torch.equal(mantissas.sums(payload, axis), moved)
        with lowp.kernels.use("bitwise"):
            assert torch.equal(mantissas.sums(payload, axis), moved)


@pytest.mark.parametrize(
    "rounding", ["nearest-even", "toward-zero", "up", "down", "to-odd", "stochastic", "stochastic-8"]
)
@pytest.mark.parametrize("format", ["dfp16", "flex16+5"])
def test_values_under_the_own_exponent_are_those_of_the_definition(format: str, rounding: str) -> None:
    cast = parse(f"{format}:{rounding}")
    for x in (
        drawn(100, 77),
        drawn(3000, scale=1e-30),
        drawn(3000, scale=1e5),
        drawn(1000, scale=1e-42),
        torch.zeros(5),
        torch.tensor([1.0, -1.0, -0.0, 1e-9, -1e-9]),
        torch.tensor([-65535.9, 1.0]),
        torch.tensor([math.inf, 1.0, math.nan]),
        drawn(8, 9).t(),
        torch.tensor(3.7),
        torch.empty(0),
    ):
        found = lowp.quantize(x, cast, seed=3)
        with use("reference"):
            expected = lowp.quantize(x, cast, seed=3)
        assert torch.equal(found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


@needs_library
@pytest.mark.parametrize("instructions", cpu.available() if cpu.library() is not None else ())
@pytest.mark.parametrize("exponent", [-126, -101, -100, -14, 0, 100, 101])
def test_blocks_in_which_nothing_saturates_and_others_are_written_alike(instructions: str, exponent: int) -> None:
    cpu.select(instructions)
    try:
        for largest in (
            0.0,
            0.4,
            0.5,
            0.6,
            32766.4,
            32766.5,
            32766.6,
            32767.0,
            32767.4,
            32767.5,
            32768.0,
            1e6,
            math.inf,
        ):
            for sign in (1, -1):
                units = drawn(2100, scale=0.1 * min(largest, 1e4)).clamp(-largest, largest)
                units[[1030, 2090]] = torch.tensor([sign * largest, -0.0])
                x = torch.ldexp(units, torch.tensor(exponent))
                found, result, seen = mantissas_and_values(x, FLEX, exponent)
                x = x.where(x.isfinite(), 0.0)
                payload, cut = defined(x, exponent)
                assert torch.equal(found.payload, payload) or math.isinf(largest)
                assert seen.overflowed == cut
                finite = payload[x != 0].int().abs() if math.isinf(largest) else payload.int().abs()
                assert seen.mantissa == int(finite.max())
                assert seen.vanished == (int(finite.max()) == 0 and bool(x.any()) and not math.isinf(largest))
                assert torch.equal(to_mantissas(x, FLEX, exponent).payload, payload)
                if not math.isinf(largest):
                    assert torch.equal(result, torch.ldexp(payload.double(), torch.tensor(exponent)).float())
    finally:
        cpu.select(None)


@needs_library
@pytest.mark.parametrize("to", ["dfp16", "flex16+5"])
@pytest.mark.parametrize(
    "numbers",
    [
        [1.0, -2.0, 16383.4, 0.0],
        [16383.0],
        [16383.5, 16384.0, -16384.5],
        [40000.0, -40000.0, 32767.4, -32768.0],
        [0.25, -0.25],
        [0.0, -0.0],
        [0.25, math.inf],
        [-0.25, math.nan],
        [math.inf, 20000.0],
        [],
    ],
)
def test_the_library_and_torch_tell_the_same_of_what_they_wrote(to: str, numbers: list[float]) -> None:
    cast = parse(to)
    for exponent in (0, -20):
        x = torch.tensor(numbers) * 2.0**exponent
        found = mantissas_and_values(x, cast, exponent)
        with use("bitwise"):
            defined = mantissas_and_values(x, cast, exponent)
        assert found[2] == defined[2]
        assert found[1].view(torch.int32).tolist() == defined[1].view(torch.int32).tolist()
        finite = x.isfinite()
        assert torch.equal(found[0].payload[finite], defined[0].payload[finite])
    record = mantissas.written(torch.tensor(numbers), cast, as_exponent(0))[2].tolist()
    limit = 32767
    finite_numbers = [min(abs(one), limit) for one in numbers if math.isfinite(one)]
    assert record[2] == sum(one > limit // 2 for one in map(round, finite_numbers))
    is_finite = len(finite_numbers) == len(numbers)
    vanished = is_finite and any(finite_numbers) and not any(map(round, finite_numbers))
    assert record[6] == (not is_finite) + 256 * any(map(math.isnan, numbers)) + 65536 * vanished


@needs_library
def test_under_exponents_that_fp32_may_not_hold_nothing_is_compared() -> None:
    payload, lie = torch.zeros(4, dtype=torch.int16), cpu_int16.Rows(1, 4, 4)
    x = payload.float()
    assert cpu_int16.is_int16(x, payload, as_exponent(100), lie) is True
    assert cpu_int16.is_int16(x, payload, as_exponent(101), lie) is None
    assert cpu_int16.is_int16(x + 1, payload, as_exponent(0), lie) is False
    assert cpu_int16.rounds_to_int16(x, payload, as_exponent(0), lie, True) == 0.0
    assert cpu_int16.rounds_to_int16(x - 0.25, payload, as_exponent(0), lie, True) == 0.25
    assert cpu_int16.rounds_to_int16(x + 0.75, payload, as_exponent(0), lie, True) is None
    assert cpu_int16.rounds_to_int16(x, payload, as_exponent(101), lie, True) is None
    lowest = payload - 32768
    assert cpu_int16.rounds_to_int16(lowest.float(), lowest, as_exponent(0), lie, False) == 32768
    assert cpu_int16.rounds_to_int16(lowest.float(), lowest, as_exponent(0), lie, True) is None
    assert cpu_int16.rounds_to_int16(lowest * 1.5, lowest, as_exponent(0), lie, False) == 49152, "which saturates"
    assert cpu_int16.rounds_to_int16(lowest * 1.5, lowest + 1, as_exponent(0), lie, True) == 49152


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_an_exponent_that_is_given_once_serves_whatever_the_numbers_are(name: str) -> None:
    if name not in available():
        pytest.skip("the C++ library was not built")
    with use(name):
        for x in (torch.ones(3), torch.zeros(2), torch.full((2,), 1e30)):
            assert int(own_exponent(x, parse("flex16+5:static(exponent=-8)"))) == -8
        assert int(own_exponent(torch.tensor([1.0, math.inf]), FLEX)) == mantissas.NOT_FINITE
        assert int(own_exponent(torch.tensor([1.0, math.inf]), FLEX, only_finite=True)) == -14


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_the_exponent_of_a_maximum_is_that_of_subnormal_numbers_too(name: str) -> None:
    if name not in available():
        pytest.skip("the C++ library was not built")
    wide = parse("i16@2^-180..20/tensor")
    with use(name):
        for largest, exponent in (
            *((2.0**place, place - 14) for place in (-149, -148, -140, -127, -126, -125, 0, 34)),
            *((3 * 2.0**-149, -162), (2.0**-126 - 2.0**-149, -141), (2.0**35, 20), (0.0, 0), (1.75, -14)),
        ):
            for cast in (wide, Cast(wide.format)):
                x = torch.tensor([0.0, -largest, largest / 2])
                assert int(own_exponent(x, cast)) == int(own_exponent(x, cast, only_finite=True)) == exponent
        for place in (-149, -126, 3):
            lower = parse("i16@2^-100..20/tensor:current(headroom=2)")
            assert int(own_exponent(torch.tensor([2.0**place]), lower)) == max(place - 12, -100)


def test_scales_beyond_all_exponents_are_nan_or_nothing() -> None:
    x = torch.tensor([3.0, -1.0, 0.0])
    assert mantissas.times(x, as_exponent(-2)).tolist() == [0.75, -0.25, 0.0]
    assert not mantissas.times(x, as_exponent(mantissas.NOTHING)).any()
    for far in (mantissas.NOT_FINITE, mantissas.NOT_FINITE - 900):
        assert mantissas.times(x, as_exponent(far)).isnan().all() and mantissas.power(as_exponent(far)).isnan()
    powers = {-1022: -1022, -2000: -1022, 0: 0, -31: -31, 1023: 1023, 2000: 1023}
    assert all(float(mantissas.power(as_exponent(one))) == 2.0**other for one, other in powers.items())
    assert mantissas.power(as_exponent(mantissas.NOTHING)) == 0
    for exponent in (-300, 300):
        assert mantissas.power(as_exponent(mantissas.NOTHING + exponent)) == 0
        assert mantissas.power(as_exponent(mantissas.NOT_FINITE + exponent)).isnan()
    assert mantissas.power(as_exponent(mantissas.NOT_FINITE + mantissas.NOTHING)).isnan()


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_are_rounded_in_each_direction_under_any_exponent(name: str, dtype: torch.dtype) -> None:
    if name not in available():
        pytest.skip("the C++ library was not built")
    units = torch.tensor([0.25, 1.5, -2.5, -0.75, 40000.0, -40000.0, 3.0], dtype=dtype)
    expected = {
        "toward-zero": [0, 1, -2, 0, 32767, -32767, 3],
        "up": [1, 2, -2, 0, 32767, -32767, 3],
        "down": [0, 1, -3, -1, 32767, -32767, 3],
        "nearest-even": [0, 2, -2, -1, 32767, -32767, 3],
    }
    with use(name):
        for rounding, integers in expected.items():
            cast = parse(f"dfp16:{rounding}")
            for exponent in (-90, -3, 0, 7):
                assert to_mantissas(units * 2.0**exponent, cast, exponent).payload.tolist() == integers, rounding
            tiny = to_mantissas(torch.tensor([2.0**-149, -(2.0**-149)], dtype=dtype), cast, 20).payload.tolist()
            assert tiny == [int(rounding == "up"), -int(rounding == "down")]


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_whether_numbers_are_in_the_format_is_asked_of_a_hint_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in available():
        pytest.skip("the C++ library was not built")
    lowest, small = torch.tensor([-32768.0, 3.0]) * 2.0**-9, torch.tensor([4.0, 8.0]) * 2.0**-3
    with use(name):
        for dtype in (torch.float32, torch.float64):
            x = lowest.to(dtype)
            assert mantissas.exact(x, FLEX, as_exponent(-9)) == (True, -9) and not mantissas.exact(x, FLEX)[0]
            assert mantissas.exact(small.to(dtype), FLEX, as_exponent(-5)) == (True, -5)
            assert mantissas.exact(small.to(dtype), FLEX, as_exponent(-2)) == (True, -2)
            assert mantissas.exact(small.to(dtype), FLEX, as_exponent(2)) == (True, -14)
        assert exact_exponent(small.half(), FLEX) == exact_exponent(small.bfloat16(), FLEX) == -14
        finer = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
        assert exact_exponent(finer, FLEX) is None and not mantissas.exact(finer, FLEX, as_exponent(-14))[0]
        monkeypatch.setattr(mantissas, "answers_at_once", lambda _: False)  # as on a device
        for x, hint, is_exact in (
            (small, None, True),
            (small + 2.0**-20, None, False),
            (lowest, as_exponent(-9), True),
        ):
            found, _ = mantissas.exact(x, FLEX, hint)
            assert isinstance(found, Tensor) and found.shape == () and bool(found) is is_exact


def test_numbers_of_fp64_are_rounded_as_they_are() -> None:
    x = torch.tensor([0.5 + 2.0**-40, 1.5 - 2.0**-40, 2.5 + 2.0**-50], dtype=torch.float64)
    for rounding, expected in (("", [1, 1, 3]), (":toward-zero", [0, 1, 2]), (":up", [1, 2, 3])):
        with use("bitwise"):
            assert to_mantissas(x, parse(f"dfp16{rounding}"), as_exponent(0)).payload.tolist() == expected


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_views_that_negate_are_read_as_what_they_stand_for(name: str) -> None:
    if name not in available():
        pytest.skip("the C++ library was not built")
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    with use(name):
        found, value, _ = mantissas_and_values(torch._neg_view(x), FLEX, -2)
        assert found.payload.tolist() == [[-4, 8], [-2, -12]] and torch.equal(value, -x)
        assert torch.equal(values(to_mantissas(torch._neg_view(x), FLEX, as_exponent(-2)).payload, as_exponent(-2)), -x)
        assert int(own_exponent(torch._neg_view(x), FLEX)) == int(own_exponent(x, FLEX))


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_a_write_of_which_nothing_is_read_counts_only_where_its_condition_holds(name: str) -> None:
    if name not in available():
        pytest.skip("the C++ library was not built")
    x = torch.tensor([1.0, 3.0, 0.3, math.inf], dtype=torch.float64)
    exponents, other = torch.tensor([-9, -14], dtype=torch.int32), as_exponent(-3)
    with use(name):
        alone = entries.write_unread(x, FLEX, exponents, 1)
        row = torch.zeros(entries.WORDS, dtype=torch.int64)
        into = entries.write_unread(x, FLEX, exponents, 1, row=row)
        yes, no = torch.tensor(True), torch.tensor(False)
        held = [entries.write_unread(x, FLEX, exponents, 1, yes, one) for one in (None, other)]
        left = [entries.write_unread(x, FLEX, exponents, 1, no, one) for one in (None, other)]
    exponents.fill_(0)  # by the next step
    assert alone.values.tolist() == [1.0, 32767 / 16384, 4915 / 16384, math.inf] and alone.values.dtype is torch.float32
    assert alone.record.tolist() == [32767, 1, 2, 0, 0, 4, 1, 0]
    assert int(alone.exponent) == -14 and into.record is row and torch.equal(row, alone.record)
    for found in held:
        assert torch.equal(found.values, alone.values) and torch.equal(found.record, alone.record)
        assert int(found.exponent) == -14
    for found, exponent in zip(left, (-14, -3), strict=True):
        assert torch.equal(found.values, x.float()) and not found.record.any() and int(found.exponent) == exponent


def test_two_writes_at_one_entry_are_one_of_all_their_elements() -> None:
    first, second = (torch.arange(start, start + 8) for start in (10, 30))
    first[entries.FLAGS], second[entries.FLAGS] = 1, 1 << 16
    assert entries.joined(first, second).tolist() == [30, 42, 44, 46, 48, 50, 65537, 17 | 37]
    assert entries.joined(second, first).tolist() == [30, 42, 44, 46, 48, 50, 65537, 17 | 37]


@needs_library
def test_squares_are_written_as_those_of_the_roots_of_which_none_vanishes() -> None:
    x, table = torch.tensor([4.0, 2.0, 1e-12, 0.0, math.nan, -1.0, 2.0**-30]), table_of([-14, -13])
    entries.write_in_place(table.block, FLEX, [(x, 1, entries.ROOTS)])
    root = round(math.sqrt(2) * 2**13)
    expected = [4.0, torch.tensor((root * 2.0**-13) ** 2).item(), 2.0**-26, 0.0]
    assert x[:4].tolist() == expected and x[4:6].isnan().all() and x[6] == 2.0**-26
    assert table.seen[0].tolist() == [0] * entries.WORDS
    assert table.seen[1, [entries.LARGEST, entries.OVERFLOWED, entries.ELEMENTS]].tolist() == [1 << 14, 0, 7]
    assert entries.nonfinite_of(table.seen).tolist() == [False, True]


@needs_library
def test_a_single_number_is_written_under_an_exponent_that_holds_it_and_noted_in_units_of_its_entry() -> None:
    for number, exponent, noted in (
        (1.0, -14, 16384),
        (4.0, -12, 65536),
        (-(2.0**9), -5, 1 << 23),
        (2.0**14, 0, 1 << 28),
    ):
        table, x = table_of([-3, -14]), torch.tensor([number])
        payload, result = torch.zeros(1, dtype=torch.int16), torch.zeros(1)
        under, nonfinite = entries.write(table.block, FLEX, 1, x, payload, result)
        assert int(under) == exponent and nonfinite == 0 and torch.equal(result, x)
        assert payload.item() * 2.0**exponent == number
        assert table.seen[1, [entries.LARGEST, entries.ELEMENTS]].tolist() == [noted, 1] and not table.seen[0].any()
    table, x = table_of([-31]), torch.tensor([2.0**10])
    entries.write(table.block, FLEX, 0, x, payload, result)
    assert table.seen[0, entries.LARGEST] == entries.MOST_MANTISSA == 1 << 29


@needs_library
def test_what_is_in_the_format_is_left_if_it_may_be() -> None:
    table, x = table_of([-9]), torch.tensor([3.0, -5.0, 0.5])
    payload, result = torch.zeros(3, dtype=torch.int16), torch.zeros(3)
    exponent, found = entries.write(table.block, FLEX, 0, x, payload, result, entries.UNLESS_EXACT)
    assert int(exponent) == -12 and found == -1 and not result.any()
    exponent, found = entries.write(table.block, FLEX, 0, x, payload, result)
    assert int(exponent) == -9 and found == 0 and torch.equal(result, x)
    exponent, found = entries.write(table.block, FLEX, 0, x + 2.0**-20, payload, result, entries.UNLESS_EXACT)
    assert int(exponent) == -9 and found == 0 and payload.tolist() == [1536, -2560, 256]
    assert entries.write(table.block, FLEX, 0, x / 0, payload, result)[1] == 1


def test_the_longest_window_is_that_of_the_library() -> None:
    text = (Path(cpu.__file__).parent / "exponents.cpp").read_text(encoding="utf-8")
    assert f"constexpr int kMostWindow = {entries.MOST_WINDOW};" in text


@pytest.mark.parametrize("name", ["cpu", "bitwise"])
def test_without_a_seed_a_cast_draws_by_seed_0(name: str) -> None:
    if name not in available():
        pytest.skip("the C++ library was not built")
    cast, x = parse("dfp16:stochastic"), drawn(64)
    with use(name):
        by_zero, by_one = (current_mantissas(x, cast, seed) for seed in (0, 1))
        given = to_mantissas(x, cast, by_zero.exponent), mantissas_and_values(x, cast, by_zero.exponent)[0]
        for found in (current_mantissas(x, cast), *given, to_mantissas(x, cast, by_zero.exponent, 0)):
            assert torch.equal(found.payload, by_zero.payload)
    assert not torch.equal(by_one.payload, by_zero.payload)


def test_rows_of_what_was_seen_tell_faults_counts_and_the_largest_by_entry() -> None:
    flags = (0, 1, 1 | 1 << 8, 1 << 16)  # nothing, an infinity, a NaN, all has vanished
    rows = torch.tensor(
        [[7 + place, 10 + place, 20 + place, 3, 4, 50 + place, one, 9] for place, one in enumerate(flags)]
    )
    assert entries.nonfinite_of(rows).tolist() == [False, True, True, False]
    overflowed, elements = entries.counts_of(rows)
    assert overflowed.tolist() == [10, 11, 12, 13] and elements.tolist() == [50, 51, 52, 53]
    written = torch.tensor([True, False, True, True])
    for is_result, nonfinite in ((True, [False, False, True, False]), (False, [False, True, True, False])):
        seen = entries.observed(rows, torch.full((4,), is_result), written)
        assert seen.mantissa.tolist() == [7, 8, 9, 10] and seen.mantissa.dtype is torch.int32
        assert seen.nonfinite.tolist() == nonfinite and seen.vanished.tolist() == [False, False, False, True]
        assert [one.tolist() for one in seen[-3:]] == [[10, 11, 12, 13], [20, 21, 22, 23], [50, 51, 52, 53]]
        assert seen.mask is written


class Sending(Tensor):
    """A tensor that is still on its way, as torch's AsyncCollectiveTensor; its own numbers are none."""

    def trigger_wait(self) -> Tensor:
        return torch.tensor([1.0, 2.0])


def test_what_is_still_sent_is_waited_for() -> None:
    x = torch.zeros(2).as_subclass(Sending)
    assert mantissas.readable(x).tolist() == mantissas.laid_out(x, FLEX).tolist() == [1.0, 2.0]
    plain = torch.tensor([3.0, 4.0])
    assert mantissas.readable(plain.as_subclass(Numbers)).tolist() == [3.0, 4.0]
    assert mantissas.laid_out(plain, FLEX).data_ptr() == mantissas.readable(plain).data_ptr() == plain.data_ptr()


class Numbers(Tensor):
    """A tensor of another type, which is there."""


def test_on_a_processor_no_other_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels import triton

    monkeypatch.delattr(triton, "mantissas", raising=False)
    monkeypatch.setitem(sys.modules, "lowp.kernels.triton.mantissas", None)
    x, hint = torch.tensor([4.0, 8.0]), as_exponent(-5)
    for name in ("cpu", "bitwise"):
        if name in available():
            with use(name):
                assert int(current_mantissas(x, FLEX).exponent) == int(own_exponent(x, FLEX)) == -11
                assert int(current_mantissas(x, FLEX, 0, hint).exponent) == -5
                assert mantissas.exact(x, FLEX, hint) == (True, -5)
                assert int(current_mantissas(x, parse("flex16+5:static(-8)")).exponent) == -8


@needs_library
def test_the_library_reads_numbers_of_fp32_at_multiples_of_their_size() -> None:
    x = torch.ones(9)
    assert cpu_int16.memory_of(x, x[1:], x[2:]) == [x.data_ptr() + 4 * place for place in range(3)]
    assert cpu_int16.memory_of(at_any_byte(x)) is None and cpu_int16.memory_of(x, x.double()) is None
    assert cpu_int16.memory_of(x[::2]) is None and cpu_int16.memory_of(x[::2], as_they_lie=True) == [x.data_ptr()]
    with use("bitwise"):
        assert cpu_int16.memory_of(x) is None
