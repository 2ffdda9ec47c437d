"""int16 under an exponent of a device, by Triton's kernels: the values, mantissas and observations of a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.fake_cuda import Launches
from torch import Tensor

from lowp import casts, kernels
from lowp.casts import Rounding
from lowp.exponents.table import ExponentTable
from lowp.kernels.choose import dispatch
from lowp.kernels.int16 import entries, mantissas, payloads
from lowp.kernels.int16.cpu_int16 import Seen
from lowp.kernels.int16.mantissas import Mantissas, as_exponent, current_mantissas, mantissas_and_values

pytest.importorskip("triton", reason="triton is not installed")

from lowp.kernels.triton import launch
from lowp.kernels.triton import mantissas as mantissa_kernels

ROUNDINGS = [
    *(str(mode) for mode in Rounding if mode not in (Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C)),
    *("stochastic-8", "stochastic-b-8", "stochastic-c-1"),
]
# all roundings of fp32 numbers, and the usual one of others; with mantissas down to -32768, and to -32767
CASES = [
    *((f"flex16+5:{mode}", torch.float32) for mode in ROUNDINGS),
    *((cast, dtype) for cast in ("dfp16", "flex16+5:stochastic") for dtype in (torch.float16, torch.bfloat16)),
    ("dfp16", torch.float32),
]


def numbers(dtype: torch.dtype, exponent: int = 0) -> Tensor:
    """Return numbers of all sizes around a unit of 2**exponent: neighbours, midpoints, limits, and specials."""
    whole = torch.tensor([0, 1, 2, 3, 16383, 16384, 32766, 32767, 32768, 32769, 65535, 65537, 1 << 20, (1 << 24) - 1])
    near = [whole + fraction for fraction in (0.0, 2.0**-20, 0.25, 0.5 - 2.0**-12, 0.5, 0.5 + 2.0**-12, 0.75)]
    tiny = torch.tensor([2.0**-149, 2.0**-130, 2.0**-126, 3e-39], dtype=torch.float64) * 2.0**-exponent
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(exponent), dtype=torch.float64) * 9000
    all = torch.cat((*near, tiny, drawn)) * 2.0**exponent
    all = torch.cat((all, -all, torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], dtype=torch.float64)))
    return all.to(dtype)


def there(way: str, patch: pytest.MonkeyPatch) -> Any:
    if way == "triton":
        return kernels.use("triton")
    patch.setattr(dispatch, "is_on_host", lambda x: False)
    return kernels.use("bitwise")


def as_told(record: Tensor) -> list[int]:
    """Return what was seen: the largest mantissa, the elements that did not fit, all, and flags."""
    return [int(record[word]) for word in (entries.LARGEST, entries.OVERFLOWED, entries.ELEMENTS, entries.FLAGS)]


@pytest.mark.parametrize(("cast", "dtype"), CASES)
def test_a_write_is_that_of_a_cpu(cast: str, dtype: torch.dtype) -> None:
    for exponent, kind in (*((-20, kind) for kind in ("all", "vanishing", "empty")), (0, "zeros"), (3, "finite")):
        x = numbers(dtype, exponent)
        x = x if kind == "all" else x[x.isfinite()]
        x = {"vanishing": x[x.abs() < 2.0 ** (exponent - 30)], "zeros": x * 0, "empty": x[:0]}.get(kind, x)
        expected, seen = on_a_cpu(x, casts.parse(cast), exponent)
        exponents = torch.tensor([99, exponent], dtype=torch.int32)
        with kernels.use("triton"):
            found = entries.write_unread(x, casts.parse(cast), exponents, 1)
        same_bits(found.values, expected)
        assert as_told(found.record) == as_told(entries.record_of(seen, bool(x.isnan().any())))
        payload = x.double() * 2.0**-exponent
        crowded = int((found.values.double() * 2.0**-exponent)[payload.isfinite()].abs().gt(16383).sum())
        assert int(found.record[entries.CROWDED]) == crowded and int(found.exponent) == exponent


def on_a_cpu(x: Tensor, cast: casts.Cast, exponent: int) -> tuple[Tensor, Seen]:
    _, values, seen = mantissas_and_values(x, cast, exponent)
    return values, seen


def same_bits(found: Tensor, expected: Tensor) -> None:
    """Compare bits, but those of NaNs."""
    assert found.dtype is expected.dtype is torch.float32 and found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(*(one.nan_to_num(nan=0.0).view(torch.int32) for one in (found, expected)))


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("happens", [False, True])
def test_a_write_that_does_not_count_gives_the_tensor_back_and_has_seen_nothing(
    way: str, happens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, cast = numbers(torch.float16), casts.parse("flex16+5")
    exponents, when = torch.tensor([3], dtype=torch.int32), torch.tensor(happens)
    expected, seen = on_a_cpu(x, cast, 3)
    with there(way, monkeypatch):
        found = entries.write_unread(x, cast, exponents, 0, when, torch.tensor(7, dtype=torch.int32))
    same_bits(found.values, expected if happens else x.float())
    assert as_told(found.record) == (as_told(entries.record_of(seen, True)) if happens else [0] * 4)
    assert int(found.exponent) == (3 if happens else 7)


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [*CASES, ("dfp16:static(3)", torch.float32), ("dfp16:current(headroom=2)", torch.float32)],
)
def test_mantissas_of_an_operand_are_those_of_a_cpu(cast: str, dtype: torch.dtype) -> None:
    for x in tensors(dtype, -20 if dtype is torch.float32 else 3):
        expected = current_mantissas(x, casts.parse(cast), 5)
        with kernels.use("triton"):
            found = current_mantissas(x, casts.parse(cast), 5)
        same_mantissas(found, expected)


def tensors(dtype: torch.dtype, exponent: int) -> list[Tensor]:
    """Return tensors with maxima of many sizes, zeros and subnormal numbers alone among them; one is not finite."""
    x = numbers(dtype, exponent)
    finite = x[x.isfinite()]
    limits = [0.0, 2.0**-140, 2.0 ** (exponent - 3), 40000 * 2.0**exponent, torch.inf]
    return [*(finite[finite.abs() <= limit] for limit in limits), finite[:0], x]


def same_mantissas(found: Mantissas, expected: Mantissas) -> None:
    assert torch.equal(found.exponent, expected.exponent)
    if expected.exponent != mantissas.NOT_FINITE:
        assert torch.equal(found.payload, expected.payload)


@pytest.mark.parametrize("hint", [None, -18, 0, 40])
@pytest.mark.parametrize("way", ["torch", "triton"])
def test_whether_a_tensor_is_in_the_format_and_under_which_exponent(
    way: str, hint: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = casts.parse("dfp16")  # whose mantissas are -32767 and above
    given = None if hint is None else torch.tensor(hint, dtype=torch.int32)
    exact = [torch.tensor([1.0, -32768.0]), torch.tensor([-0.0, 3.0, 2.0**13]), torch.tensor([5 * 2.0**-149])]
    for x in [*exact, *tensors(torch.float32, 0), *tensors(torch.bfloat16, -20)]:
        is_own, expected = mantissas.exact(x, cast)
        units = x.double() * 2.0 ** -(hint or 0)
        serves = hint is not None and abs(hint) < 100 and bool(((units.round() == units) & units.abs().le(32767)).all())
        with there(way, monkeypatch):
            is_exact, exponent = mantissas.exact(x, cast, given)
        assert isinstance(is_exact, Tensor) and bool(is_exact) is (serves or bool(is_own))
        if is_exact:
            assert int(exponent) == (hint if serves else expected)
        with kernels.use("triton"):
            rounded = current_mantissas(x, cast, 0, given)
        if serves:
            assert int(rounded.exponent) == hint and torch.equal(rounded.values, x.float())
        else:
            same_mantissas(rounded, current_mantissas(x, cast))


def test_the_exponent_of_what_is_finite() -> None:
    for x in tensors(torch.float32, 3):
        for cast in map(casts.parse, ("dfp16", "flex16+5", "dfp16:static(4)")):
            finite = current_mantissas(torch.where(x.isfinite(), x, 0.0), cast)
            told = finite.exponent if bool(x.isfinite().all()) else as_exponent(mantissas.NOT_FINITE)
            for way in ("triton", "bitwise"):
                with kernels.use(way):
                    assert torch.equal(mantissas.own_exponent(x, cast, only_finite=True), finite.exponent)
                    assert torch.equal(mantissas.own_exponent(x, cast), told)


@pytest.mark.parametrize("spec", ["flex16+5:autoflex", "flex16+5:reactive", "dfp16:reactive"])
def test_an_entry_begins_as_on_a_cpu_and_goes_on_unread(spec: str) -> None:
    cast, device = casts.parse(spec), torch.device("cpu")
    for x in [*tensors(torch.float32, -20), *tensors(torch.bfloat16, 3)]:
        plain = ExponentTable(cast, device)
        first, second = plain.index("first"), plain.index("second")
        expected = plain.write(x, second).values
        with kernels.use("triton"):
            table = ExponentTable(cast, device)
            assert (table.index("first"), table.index("second")) == (first, second) and not table.is_host
            skipped, exponent, _ = table.write(x, second, when=torch.tensor(False), otherwise=torch.tensor(9))
            assert not table.state.started.any() and int(exponent) == 9
            same_bits(skipped, x.float())
            found, exponent, _ = table.write(x, second)
            same_bits(found, expected)
            assert int(exponent) == plain.state.exponent[second] and not table._scratch.any()
            assert torch.equal(table.state.exponent, plain.state.exponent) and torch.equal(table.before, plain.before)
            assert torch.equal(table.state.started, plain.state.started)
            table.written.clear()
            table.seen.zero_()
            if table.state.started[second]:
                assert int(table.write(x * 0 + 3.0**9, second).exponent) == int(exponent)


def ran(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[str]:
    """Return the kernels of Triton that a call launches, and the operations of torch outside of these."""
    names: list[str] = []

    def run(kernel: Any, *arguments: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            launch.interpret(kernel, *arguments)

    with patch.context() as patched, Launches() as seen:
        patched.setattr(launch, "run", run)
        call()
    return names + seen.names()


def test_reactive_exponents_count_mantissas_of_32768_below_zero_as_crowded() -> None:
    cast, x = casts.parse("flex16+5:reactive"), torch.full((3,), -(2.0**20))
    for way in (contextlib.nullcontext(), kernels.use("triton")):
        with way:
            table = ExponentTable(cast, torch.device("cpu"))
            index = table.index("a")
            table.write(torch.ones(3), index)
            table.flush()
            table.write(x, index)
            words = entries.LARGEST, entries.CROWDED, entries.OVERFLOWED
            assert table.seen[index, words].tolist() == [32768, 3, 3]


def test_a_write_takes_three_launches_where_torchs_operations_are_seventy(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cast = torch.randn(64, 8), casts.parse("flex16+5:autoflex")

    def written(way: str) -> list[str]:
        with there(way, monkeypatch):
            table = ExponentTable(cast, torch.device("cpu"))
            index = table.index("a")
            return ran(monkeypatch, lambda: table.write(x, index))

    assert written("triton") == ["begin", "write", "clone"]
    assert len(written("torch")) > 70


def test_an_operand_and_a_look_take_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cast = torch.randn(64, 8), casts.parse("dfp16")
    with kernels.use("triton"):
        assert ran(monkeypatch, lambda: payloads.rounded(x, cast)) == ["look", "convert", "zeros"]
        assert ran(monkeypatch, lambda: payloads.exact_under(x, cast)) == ["look", "look_again", "zeros"]


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter give a program 16 numbers, so that what many programs find is gathered."""
    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 16)


@pytest.mark.parametrize("rounding", ["nearest-even", "stochastic-8"])
@pytest.mark.usefixtures("small_programs")
def test_many_programs_find_together_what_one_does(rounding: str) -> None:
    cast, exponent = casts.parse(f"flex16+5:{rounding}"), torch.tensor([99, -3], dtype=torch.int32)
    for place, largest in ((0, -6000.0), (20, 5000.0), (71, torch.inf), (71, torch.nan), (0, 0.0)):
        x = torch.linspace(-2000, 2000, 72) / 3
        x[place], x[35] = largest, 4095.0
        expected, seen = on_a_cpu(x, cast, -3)
        with kernels.use("triton"):
            found = entries.write_unread(x, cast, exponent, 1)
            rounded = current_mantissas(x, cast, 5)
        same_bits(found.values, expected)
        assert as_told(found.record) == as_told(entries.record_of(seen, bool(x.isnan().any())))
        assert int(found.record[entries.CROWDED]) == int((expected * 8).abs()[x.isfinite()].gt(16383).sum())
        same_mantissas(rounded, current_mantissas(x, cast, 5))


@pytest.mark.parametrize("spec", ["dfp16", "flex16+5"])
@pytest.mark.usefixtures("small_programs")
def test_a_hint_serves_if_all_numbers_are_mantissas_under_it(spec: str) -> None:
    cast, roomy = casts.parse(spec), casts.parse(f"{spec}:current(headroom=2)")
    lowest = -32767.0 if spec == "dfp16" else -32768.0
    for one, serves in (
        *((32767.0, True), (lowest, True), (32768.0, False), (lowest - 1, False), (0.5, False), (-32766.5, False)),
        *((2.0**-140, False), (-0.0, True), (3e38, False), (torch.inf, False), (torch.nan, False)),
    ):
        for place in (20, 39):  # in the second of three programs, and in the last
            x = torch.arange(40.0)
            x[place] = one
            hint, own = torch.tensor(0, dtype=torch.int32), current_mantissas(x, roomy).exponent
            with kernels.use("triton"):
                is_exact, exponent = mantissas.exact(x, cast, hint)
                look = mantissa_kernels.look(x, roomy, hint)
            assert bool(is_exact) is (serves or bool(mantissas.exact(x, cast)[0])), one
            assert int(exponent) == 0 or not serves
            assert bool(look.all[6]) is serves and torch.equal(look.told, hint if serves else own), one
            assert bool(look.is_finite) is bool(x.isfinite().all())


@pytest.mark.usefixtures("small_programs")
def test_many_programs_let_an_entry_begin() -> None:
    for spec in ("flex16+5:autoflex", "dfp16:reactive"):
        for place, largest in ((0, 5000.0), (20, 3e38), (71, 0.3), (71, torch.inf), (3, torch.nan)):
            x = torch.linspace(-0.1, 0.2, 72) * (largest == largest)
            x[place] = largest
            cast, device = casts.parse(spec), torch.device("cpu")
            plain = ExponentTable(cast, device)
            second = (plain.index("first"), plain.index("second"))[1]
            expected = plain.write(x, second).values
            with kernels.use("triton"):
                table = ExponentTable(cast, device)
                table.index("first"), table.index("second")
                same_bits(table.write(x, second).values, expected)
            assert torch.equal(table.state.exponent, plain.state.exponent) and not table._scratch.any()
            assert torch.equal(table.state.started, plain.state.started)


def test_zeros_are_mantissas_under_any_hint() -> None:
    cast = casts.parse("dfp16")
    for hint in (-300, -254, 254, 300):
        with kernels.use("triton"):
            found = mantissas.exact(torch.tensor([0.0, -0.0]), cast, torch.tensor(hint, dtype=torch.int32))
        assert bool(found[0]) and int(found[1]) == hint


@pytest.mark.parametrize("bits", [1, 2, 3, (1 << 22) - 1, 1 << 22, (1 << 23) - 1, 1 << 23, (1 << 23) + 1, 1 << 24])
def test_exponents_of_subnormal_maxima(bits: int) -> None:
    x = torch.tensor([bits, 0, bits // 3], dtype=torch.int32).view(torch.float32)
    for spec in ("i16s@2^-180..127/tensor", "i16s@2^-141..127/tensor", "i16@2^-180..-150/tensor"):
        expected = current_mantissas(x, casts.parse(spec))
        with kernels.use("triton"):
            same_mantissas(current_mantissas(x, casts.parse(spec)), expected)
            assert int(mantissas.own_exponent(x, casts.parse(spec))) == int(expected.exponent)


def test_numbers_that_vanish_beside_infinity() -> None:
    exponents = torch.zeros(1, dtype=torch.int32)
    for x in (torch.tensor([torch.inf, 2.0**-60]), torch.tensor([torch.nan, 0.0]), torch.tensor([2.0**-149, 0.0])):
        _, seen = on_a_cpu(x, casts.parse("dfp16"), 0)
        with kernels.use("triton"):
            found = entries.write_unread(x, casts.parse("dfp16"), exponents, 0)
        assert as_told(found.record) == as_told(entries.record_of(seen, bool(x.isnan().any())))
        assert int(found.record[entries.LARGEST]) == 0


def test_what_is_not_finite_counts_for_nothing() -> None:
    cast = casts.parse("dfp16")
    for x, exponent in ((torch.tensor([torch.inf, -torch.nan]), 0), (torch.tensor([torch.nan, 3.0]), 1 - 14)):
        with kernels.use("triton"):
            assert int(mantissas.own_exponent(x, cast, only_finite=True)) == exponent
            assert int(mantissas.own_exponent(x, cast)) == mantissas.NOT_FINITE


@pytest.mark.parametrize("rounding", ["nearest-even", "toward-zero", "stochastic-1"])
def test_mantissas_of_what_is_not_finite_are_zeros(rounding: str) -> None:
    cast, x = casts.parse(f"flex16+5:{rounding}"), torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 8.0])
    found = mantissa_kernels.convert(x, cast, torch.tensor(-2, dtype=torch.int32), 3)
    assert found.tolist() == [0, 0, 0, 32767, -32768, 32]


def test_an_entry_begins_with_the_guess_below_at_and_above_a_bound() -> None:
    bounds, guesses = torch.tensor([0.25, 4.0, 1024.0], dtype=torch.float64), torch.arange(10, 17, dtype=torch.int32)
    for largest, guess in (
        *((0.125, 10), (0.25, 11), (0.5, 12), (-3.0, 12), (4.0, 13), (-5.0, 14), (1024.0, 15), (3e38, 16)),
        *((2.0**-149, 10), (0.0, -7), (torch.inf, -7)),
    ):
        exponents, before = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
        started, scratch = torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int32)
        x = torch.tensor([0.0, largest, largest / 8])
        for when in (torch.tensor(False), torch.tensor(True), None):
            mantissa_kernels.begin(x, (exponents, before, started), 1, when, bounds, guesses, -7, scratch)
            wanted = 0 if when is not None and not when else guess
            assert exponents.tolist() == [0, wanted] and before.tolist() == [1, wanted or 1]
            assert started.tolist() == [False, wanted > 0] and not scratch.any()
