"""Mantissas kept beside a tensor's memory: used only if every element is unchanged."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.exponents import SharedExponents
from lowp.kernels import cpu, use
from lowp.kernels.choose.dispatch import available
from lowp.kernels.int16 import cpu_int16, mantissas, payloads
from lowp.kernels.int16.mantissas import as_exponent

from .test_cpu import at_any_byte

FLEX, DFP = parse("flex16+5"), parse("dfp16")
needs_library = pytest.mark.skipif(cpu.library() is None, reason="without the library each reader rounds for itself")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "reshaped": lambda x: x.view(2, 20, 42),
    "rows": lambda x: x[3:11],
    "columns": lambda x: x[:, 5:29],
    "columns, transposed": lambda x: x[:, 5:29].t(),
    "every other": lambda x: x[::2, ::3],
    "heads": lambda x: x.view(4, 10, 3, 2, 7)[:, :, 1].permute(0, 2, 1, 3),
    "expanded": lambda x: x[:1].expand(5, 42),
    "one element": lambda x: x[7, 9],
}


def values(seed: int = 0) -> Tensor:
    x = torch.randn(40, 42, generator=torch.Generator().manual_seed(seed))
    return lowp.quantize(x, "flex16+5")  # type: ignore[no-any-return]


def written() -> Tensor:
    """Return a result that an op has just written, whose mantissas are kept."""
    with lowp.autocast("flex16+5"):
        return F.linear(values(), values(1).requires_grad_()).detach()


def stands_for(x: Tensor) -> bool:
    found = payloads.exact(x, FLEX)
    assert found is not None and found.payload.shape == x.shape
    return torch.equal(found.payload.double() * 2.0**found.exponent, x.double())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_served_from_what_is_kept_of_the_whole(layout: str) -> None:
    x = torch.cat([written(), written()[:, :2]], 1)
    kept = payloads.exact(x, FLEX)
    view = LAYOUTS[layout](x)
    found = payloads.exact(view, FLEX)
    assert kept is not None and found is not None and stands_for(view)
    assert found.payload.untyped_storage().data_ptr() == kept.payload.untyped_storage().data_ptr()
    assert found.exponent == kept.exponent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_what_has_changed_are_computed_anew(layout: str) -> None:
    x = torch.cat([written(), written()[:, :2]], 1)
    kept = payloads.exact(x, FLEX)
    view = LAYOUTS[layout](x)
    view.detach().numpy()[...] *= 2
    found = payloads.exact(view, FLEX)
    assert kept is not None and found is not None and stands_for(view)
    assert found.payload.untyped_storage().data_ptr() != kept.payload.untyped_storage().data_ptr()


def test_every_single_element_is_compared() -> None:
    x = written()
    for index in range(x.numel()):
        numbers = x.numpy().reshape(-1)
        before = float(numbers[index])
        for other in (before + 2.0**-6, -before if before else 1.0, float("nan"), float("inf")):
            numbers[index] = other
            found = payloads.exact(x, FLEX)
            assert (found is None) == (abs(other) == float("inf") or other != other)
            assert found is None or float(found.payload.view(-1)[index]) * 2.0**found.exponent == other
        numbers[index] = before


@pytest.mark.parametrize("exponent", [-120, -100, 0, 100])
def test_units_beyond_those_of_fp32_are_told_apart(exponent: int) -> None:
    cast = parse("dfp16")
    x = torch.full((1000,), 2.0**exponent)
    payloads.keep(x, cast.format, as_exponent(100), torch.zeros(1000, dtype=torch.int16))
    found = payloads.exact(x, cast)
    assert found is not None and bool((found.payload.double() * 2.0**found.exponent == x).all())


@needs_library
@pytest.mark.parametrize("layout", ["whole", "heads", "transposed"])
def test_a_tensor_that_its_own_cast_leaves_is_known_by_its_mantissas(layout: str) -> None:
    x = torch.cat([written(), written()[:, :2]], 1)
    view = LAYOUTS[layout](x)
    assert not payloads.is_kept(view, FLEX)
    assert payloads.exact(x, FLEX) is not None
    assert payloads.is_kept(view, FLEX) and torch.equal(lowp.quantize(view, FLEX), view)
    others = ("flex16+5:stochastic", "flex16+5:static(-8)", "dfp16", "bf16")
    assert not any(payloads.is_kept(view, parse(other)) for other in others)
    view.detach().numpy()[...] *= 1.01
    assert not payloads.is_kept(view, FLEX)


@needs_library
def test_the_lowest_mantissa_is_none_that_a_cast_leaves() -> None:
    mantissas = torch.full((40,), 3, dtype=torch.int16)
    mantissas[7] = -32768
    x = mantissas.float() * 2.0**-5
    payloads.keep(x, FLEX.format, as_exponent(-5), mantissas)
    assert payloads.exact(x, FLEX) is not None and not payloads.is_kept(x, FLEX)
    assert not torch.equal(lowp.quantize(x, FLEX), x)  # 3 is no mantissa under -4, the exponent of its maximum


@needs_library
def test_a_cast_that_rounded_another_maximum_is_made_anew() -> None:
    with lowp.autocast("dfp16"):
        x = torch.tanh(values().requires_grad_())
    first = payloads.rounded(x, DFP)
    again = payloads.rounded(x, DFP)
    x.detach().numpy()[3, 3] = 5.0
    other = payloads.rounded(x, DFP)
    assert first is not None and again is not None and other is not None
    assert first.payload.data_ptr() == again.payload.data_ptr() != other.payload.data_ptr()
    assert other.exponent == first.exponent + 3
    x.detach().numpy()[3, 3] = float("inf")
    assert payloads.rounded(x, DFP) is None


def test_what_is_kept_ends_with_the_memory() -> None:
    x = written()
    known = payloads.kept(x, FLEX.format)
    assert known is not None
    alias, payload = x.detach(), weakref.ref(known.payload)
    del x, known
    assert payload() is not None and stands_for(alias)
    del alias
    assert payload() is None


def test_swapped_tensors_keep_what_is_their_own() -> None:
    x, y = written(), torch.ones(3)
    torch.utils.swap_tensors(x, y)
    assert stands_for(x) and stands_for(y)


def test_nothing_is_kept_of_parameters_views_and_what_has_no_memory() -> None:
    for x in (nn.Parameter(values()), values()[1:], torch._efficientzerotensor((3,)), values().double()):
        payloads.keep(x, FLEX.format, as_exponent(-10))
        assert payloads.hint(x) is None
    assert payloads.exact(torch._efficientzerotensor((3,)), FLEX) is not None


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_without_the_library_the_answers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = written()
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert stands_for(x) and stands_for(x[3:, 2:])
    x.numpy()[20, 20] += 1.0
    assert stands_for(x) and stands_for(x[3:, 2:])


@pytest.mark.parametrize("kernel", ["cpu", "bitwise"])
def test_the_lowest_mantissa_is_exact_under_the_exponent_that_is_kept(kernel: str) -> None:
    if kernel == "cpu" and cpu.library() is None:
        pytest.skip("the C++ library was not built")
    cast = parse("flex16+5")
    with use(kernel):
        x = torch.tensor([-32768.0, 3.0, 0.0]) * 2.0**-9
        assert not payloads.is_exact(x, cast)  # under the exponent of its own maximum
        payloads.keep(x, cast.format, as_exponent(-9))
        assert payloads.is_exact(x, cast)
        x[1] += 2.0**-11
        assert not payloads.is_exact(x, cast)


@pytest.mark.parametrize("way", available())
def test_the_lowest_mantissa_is_exact_under_the_largest_exponent_which_no_maximum_leaves(way: str) -> None:
    """Of numbers that end, begin or stand anywhere, at any byte; 32768 is none of the format, nor any of dfp16."""
    among, predicted = torch.arange(-9000.0, 9000.0), parse("flex16+5:autoflex")
    with use(way):
        for place in (0, 4097, -1):
            x = among.clone()
            x[place] = -32768.0
            assert payloads.exact_under(x, FLEX) == (True, 0)
            assert not payloads.is_exact(2 * x, FLEX) and not payloads.is_exact(x / 2, FLEX)
            assert not payloads.is_exact(x * 2.0**113, DFP)
            given = x.clone()
            exponents = SharedExponents()
            for _ in range(2):
                assert exponents.write(given, predicted, "gradient of w", unless_exact=True).values is given
                exponents.write(given / 3, predicted, "gradient of w")
                exponents.flush()
            x[place - 1] = 32768.0
            assert not payloads.is_exact(x, FLEX)


# -- what is kept, and of which memory --------------------------------------------------------------------------------
def kept_under(exponent: int, *numbers: int) -> Tensor:
    """Return numbers times 2**exponent, whose mantissas are kept."""
    payload, under = torch.tensor(numbers, dtype=torch.int16), as_exponent(exponent)
    x = payload.float() * 2.0**exponent
    payloads.keep(x, FLEX.format, under, payload)
    return x


@needs_library
def test_several_tensors_are_compared_with_what_is_kept_of_them_and_views_with_their_part() -> None:
    x, y = kept_under(-3, 20000, -5, 7, 4), kept_under(4, 3, 2, 30000)
    assert payloads.are_exact([x, y], FLEX) == [True, True]
    assert payloads.are_exact([x, x[1:3], y], FLEX) == [True, True, True]
    assert payloads.are_exact([x[1:3]], FLEX) == [True]
    y[1] += 0.5
    assert payloads.are_exact([x, y], FLEX) == [True, False] and payloads.are_exact([y, x], FLEX) == [False, True]
    assert payloads.are_exact([], FLEX) == []


@needs_library
def test_one_call_compares_all_tensors_that_lie_as_what_is_kept_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    alone: list[Tensor] = []
    together, one_by_one = cpu_int16.are_int16, payloads.is_exact

    def counted(given: array[int]) -> list[bool]:
        asked.extend(given[::6])
        assert [given[place] for place in range(2, len(given), 6)] == [1] * (len(given) // 6)
        assert given[3::6] == given[4::6]
        return together(given)

    monkeypatch.setattr(cpu_int16, "are_int16", counted)
    monkeypatch.setattr(payloads, "is_exact", lambda x, cast: alone.append(x) or one_by_one(x, cast))
    x, y, square = kept_under(-3, 20000, -5, 7, 4), kept_under(4, 3, 2, 30000), kept_under(0, 1, 2, 3, 4).view(2, 2)
    payloads.keep(square := square.clone(), FLEX.format, as_exponent(0), square.short())
    assert payloads.are_exact([x, square, y], FLEX) == [True] * 3 and not alone
    assert asked == [one.data_ptr() for one in (x, square, y)]
    memory = torch.zeros(8)
    inner, shifted, wrong = memory.data[2:5].data, at_any_byte(torch.ones(3)), kept_under(1, 5, 6)
    payloads.keep(inner, FLEX.format, as_exponent(0), torch.zeros(3, dtype=torch.int16))
    payloads.keep(shifted, FLEX.format, as_exponent(0), torch.ones(3, dtype=torch.int16))
    wrong += 2.0**-20
    asked.clear()
    others = [x[:2], x[1:], square.t(), torch.as_strided(inner, (3,), (1,), 3), shifted, torch.ones(5), x.double()]
    assert payloads.are_exact([x, *others, wrong, inner], FLEX) == [True] * 8 + [False, True]
    assert asked == [one.data_ptr() for one in (x, wrong, inner)]
    assert [id(one) for one in alone] == [*map(id, others), id(wrong)]
    asked.clear()
    with use("bitwise"):
        assert payloads.are_exact([x, wrong], FLEX) == [True, False] and not asked
    x.untyped_storage().resize_(0)
    with pytest.raises(InvalidInput, match="without memory"):
        payloads.are_exact([x], FLEX)
    assert not asked


@needs_library
def test_of_empty_and_of_single_numbers_it_is_known_whether_their_cast_leaves_them() -> None:
    for numbers, expected in (((), True), ((32767,), True), ((-32767,), True), ((-32768,), False), ((16384,), True)):
        x = kept_under(-9, *numbers)
        assert payloads.is_kept(x, FLEX) is expected
        with use("bitwise"):
            assert not payloads.is_kept(x, FLEX)


@needs_library
def test_new_tensors_of_a_kernel_are_given_what_it_wrote() -> None:
    payload, under = torch.tensor([3, 4], dtype=torch.int16), as_exponent(-2)
    x, y = payload.float() / 4, torch.ones(2)
    made = payloads.keep_own([(x, payload, under), None, (y, None, None)], FLEX.format)
    assert made[0] is x and made[1] is None and made[2] is y
    found = payloads.kept(x, FLEX.format)
    assert found is not None and found.payload is payload and found.exponent is under
    assert payloads.kept(y, FLEX.format) is None and payloads.hint(y) is None
    assert payloads.kept(x[:0], FLEX.format) is None, "of no elements nothing is kept"
    part = payloads.kept(x[1:], FLEX.format)
    assert part is not None and part.payload.tolist() == [4]


def test_what_passes_where_numbers_are_positive_keeps_its_mantissas() -> None:
    chosen = torch.tensor([1, 0, 5, -1], dtype=torch.int16)
    x = kept_under(-1, 7, 8, -9, 10)
    with torch.no_grad():
        passed = payloads.passed_where_positive(x, chosen)
    assert passed.tolist() == [3.5, 0, -4.5, 0] and payloads.hint(passed) is not None
    if cpu.library() is not None:
        found = payloads.kept(passed, FLEX.format)
        assert found is not None and found.payload.tolist() == [7, 0, -9, 0] and int(found.exponent) == -1
        plain = payloads.passed_where_positive(torch.ones(4), chosen)
        assert payloads.hint(plain) is None
    graph = payloads.passed_where_positive(x.requires_grad_(), chosen)
    assert graph.requires_grad and payloads.hint(graph) is None and graph.tolist() == [3.5, 0, -4.5, 0]
    graph.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 0, 1, 0]


@needs_library
def test_mantissas_of_another_cast_do_not_stand_for_a_rounding_toward_zero() -> None:
    x = torch.tensor([1.0, 2.0**-14 * 0.75]).requires_grad_() * 1
    down = parse("dfp16:toward-zero")
    nearest, cut = payloads.rounded(x, DFP), payloads.rounded(x, down)
    assert nearest is not None and cut is not None
    assert nearest.exponent == cut.exponent == -14
    assert nearest.payload.tolist() == [16384, 1] and cut.payload.tolist() == [16384, 0]
    again = payloads.rounded(x, down)
    assert again is not None and again.payload.tolist() == [16384, 0]


def test_values_of_relu_are_made_if_they_are_asked_for_and_one_pass_gives_them() -> None:
    x = kept_under(-1, 7, -8, 9, -10).view(2, 2)
    for one, with_values in ((x, True), (x, False), (x.t(), True), (x.t(), False), (x.clone(), True)):
        found = payloads.relu(one, FLEX, with_values)
        assert found is not None and torch.equal(found[0].values, one.relu())
        is_made = with_values and one is x and cpu.library() is not None
        assert (found[1] is not None) is is_made and (found[1] is None or torch.equal(found[1], one.relu()))


def test_what_is_exact_is_kept_with_its_exponent() -> None:
    x = torch.tensor([3.0, -0.5])
    assert payloads.exact_under(x, FLEX) == (True, -13) and payloads.hint(x) == (FLEX.format, -13)
    other = torch.tensor([3.0, 2.0**-30])
    assert not payloads.exact_under(other, FLEX)[0] and payloads.hint(other) is None


def test_a_device_is_given_the_exponent_under_which_a_tensor_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    x = kept_under(-9, -32768, 3, 0)
    for module in (payloads, mantissas):
        monkeypatch.setattr(module, "answers_at_once", lambda _: False)
    is_exact, exponent = payloads.exact_under(x, FLEX)
    assert isinstance(is_exact, Tensor) and bool(is_exact) and int(exponent) == -9
    fresh, _ = payloads.exact_under(x.clone(), FLEX)
    assert isinstance(fresh, Tensor) and not bool(fresh), "-32768 is none under the exponent of its own maximum"
    assert not payloads.is_exact(x, FLEX) and payloads.exact(x, FLEX) is None and not payloads.is_kept(x, FLEX)
    for cast, expected in (("flex16+5", -9), ("flex16+5:current(headroom=1)", -7), ("dfp16", -8), ("flex16+5:up", -9)):
        found = payloads.rounded(x, parse(cast))
        assert found is not None and int(found.exponent) == expected, cast
    unknown = payloads.rounded(x.clone(), FLEX)
    assert unknown is not None and int(unknown.exponent) == -8
    bad = payloads.rounded(torch.tensor([1.0, torch.inf]), FLEX)
    assert bad is not None and int(bad.exponent) == mantissas.NOT_FINITE
    assert payloads.rounded(x.double(), FLEX) is None


def test_what_is_kept_of_a_format_is_what_it_is_rounded_to() -> None:
    x = kept_under(-9, -32768, 3, 0)
    found, unknown = payloads.rounded(x, FLEX), payloads.rounded(x.clone(), FLEX)
    assert found is not None and int(found.exponent) == -9 and found.payload.tolist() == [-32768, 3, 0]
    assert unknown is not None and int(unknown.exponent) == -8 and unknown.payload.tolist() == [-16384, 2, 0]
    wider = payloads.rounded(x, parse("flex16+5:current(headroom=1)"))
    assert wider is not None and int(wider.exponent) == -7


def test_a_stochastic_cast_draws_by_seed_0_if_none_is_given() -> None:
    cast, x = parse("dfp16:stochastic"), torch.rand(64, generator=torch.Generator().manual_seed(0))
    drawn = [payloads.rounded(x, cast, *seed) for seed in ((), (lambda: 0,), (lambda: 1,))]
    first, same, other = (one.payload for one in drawn if one is not None)
    assert torch.equal(first, same) and not torch.equal(first, other)


@needs_library
def test_a_rounding_is_known_again_where_the_library_reads_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) + 0.5).requires_grad_() * 1
    whole = payloads.rounded(x, DFP)
    assert whole is not None
    for view, payload in ((x, whole.payload), (x.t(), whole.payload.t()), (x[:, :3], whole.payload[:, :3])):
        again = payloads.rounded(view, DFP)
        assert again is not None and again.payload.data_ptr() == whole.payload.data_ptr()
        assert torch.equal(again.payload, payload)
    apart = payloads.rounded(x[:, ::2], DFP)
    assert apart is not None and torch.equal(apart.payload, whole.payload[:, ::2])
    monkeypatch.setattr(cpu_int16, "rounds_to_int16", lambda *_: pytest.fail("the library was asked"))
    with use("bitwise"):
        without = payloads.rounded(x, DFP)
    assert without is not None and torch.equal(without.payload, whole.payload)


def test_memory_is_rows_where_dimensions_lie_one_in_another() -> None:
    whole = torch.zeros(4, 6, 10)
    layouts = {
        "contiguous": (whole, (1, 240, 240)),
        "transposed": (whole.permute(2, 0, 1), (1, 240, 240)),
        "columns": (whole[:, :, :4], (24, 4, 10)),
        "one row each": (whole[:, :1, :4], (4, 4, 60)),
        "a row again and again": (whole[0, :1].expand(3, 10), (1, 10, 10)),
    }
    for name, (x, rows) in layouts.items():
        assert payloads._rows(x) == rows, name
    assert payloads._rows(whole[:, :, ::2]) is None and payloads._rows(whole[:, :2, :4]) is None
    assert payloads._rows(torch.zeros(64, dtype=torch.uint8)[2:18].view(torch.uint8)) is None


def test_what_is_kept_begins_where_the_tensor_does() -> None:
    x = torch.zeros(8).data[3:].data
    x += 1
    payload, under = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int16), as_exponent(0)
    assert x._base is None and x.storage_offset() == 3
    payloads.keep(x, FLEX.format, under, payload)
    found, part = payloads.kept(x, FLEX.format), payloads.kept(x[2:4], FLEX.format)
    assert found is not None and found.payload is payload
    assert part is not None and part.payload.tolist() == [3, 4]
    for size, offset in ((2, 1), (5, 2)):
        before = torch.as_strided(x, (size,), (1,), offset)
        assert payloads.kept(before, FLEX.format) is None, "of elements before it nothing is known"
    inner = torch.zeros(8).data[2:5].data
    payloads.keep(inner, FLEX.format, under, torch.tensor([1, 2, 3], dtype=torch.int16))
    for size, step, offset, expected in (
        *(
            (3, 1, 2, [1, 2, 3]),
            (2, 1, 3, [2, 3]),
            (2, 2, 2, [1, 3]),
            (1, 1, 4, [3]),
            (1, 5, 3, [2]),
            (4, 0, 3, [2] * 4),
        ),
        *((2, 1, 4, None), (1, 1, 5, None), (3, 1, 3, None), (2, 2, 3, None), (3, 2, 2, None), (0, 1, 3, None)),
    ):
        found = payloads.kept(torch.as_strided(inner, (size,), (step,), offset), FLEX.format)
        assert (None if found is None else found.payload.tolist()) == expected, (size, step, offset)
    square = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    y = square.float()
    payloads.keep(y, FLEX.format, under, square)
    turned = payloads.kept(y.t(), FLEX.format)
    assert turned is not None and turned.payload.tolist() == [[1, 3], [2, 4]]


def test_mantissas_that_lie_otherwise_are_not_kept_and_others_do_not_read_what_is() -> None:
    x, whole = torch.ones(2, 2), torch.ones(5, dtype=torch.int16)
    for payload in (whole[1:].view(2, 2), whole[:4].view(2, 2).t(), torch.ones(3, 2, dtype=torch.int16)[1:]):
        payloads.keep(x, FLEX.format, as_exponent(0), payload)
        assert payloads.kept(x, FLEX.format) is None and payloads.hint(x) == (FLEX.format, 0)
    payloads.keep(x, FLEX.format, as_exponent(0), whole[:4].view(2, 2))
    assert payloads.kept(x, FLEX.format) is not None and payloads.kept(x, DFP.format) is None
    for other in (nn.Parameter(x), x.view(torch.int32), torch._neg_view(x), x.to_sparse(), x.clone()):
        assert payloads.hint(other) is None and payloads.kept(other, FLEX.format) is None


def test_gradients_of_ops_keep_what_they_were_rounded_to_and_other_tensors_do_not() -> None:
    for cast, kept in ((DFP, True), (parse("dfp16:stochastic"), False)):
        made = torch.rand(8).requires_grad_() * 2
        payloads.rounded(made, cast, lambda: 5)
        record = payloads._find(made, cast)
        assert (record is not None) == kept
        if record is not None and cpu.library() is not None:
            again = payloads.rounded(made, cast)
            assert again is not None and again.payload is record.payload
        plain = torch.rand(8)
        payloads.rounded(plain, cast, lambda: 5)
        assert payloads._find(plain) is None
