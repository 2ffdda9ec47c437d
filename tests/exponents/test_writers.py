"""Writers of ops and of an optimizer's step: when they write from integers or all at once, and who sees what."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from lowp.casts import Cast, parse
from lowp.exponents import Flush, SharedExponents, SiteWriter, StepWriter, Trail, learning
from lowp.exponents.delayed import DelayedScales, SiteScales
from lowp.exponents.learning import both
from lowp.exponents.shared import Summary
from lowp.exponents.writer import SumEntry
from lowp.kernels.choose.dispatch import available, use
from lowp.kernels.int16 import entries, payloads
from lowp.kernels.int16.cpu_int16 import Seen
from lowp.kernels.int16.integer_run import Multiplied
from lowp.kernels.int16.mantissas import values
from lowp.kernels.triton import mantissas

FLEX, NOT_QUICK = parse("flex16+5:autoflex"), [parse("flex16+5:reactive"), parse("flex16+5:stochastic:autoflex")]
SITE = "output of linear"


def begun(cast: Cast = FLEX) -> SharedExponents:
    """Return exponents of one site, after a step."""
    exponents = SharedExponents()
    exponents.write(torch.ones(3), cast, SITE)
    exponents.flush()
    return exponents


def test_a_sum_is_written_from_its_integers_where_its_site_is_known() -> None:
    exponents = begun()
    trail, table = Trail(training=True), exponents.table(FLEX)
    writer = SiteWriter(exponents, FLEX, "linear", True, trail)
    assert table is not None and writer.places_of(["output"]) == (table, [0])
    assert writer.places_of(["output", "input gradient"]) is None and exponents.sites() == [SITE]
    entry = writer.entry("output")
    assert entry is not None and (entry.table, entry.place) == (table, 0) and entry.has_begun
    assert list(trail.exponents) == [SITE] and torch.equal(trail.exponents[SITE], table.exponent(0))
    new = writer.entry("input gradient")
    assert new is not None and not new.has_begun
    assert list(trail.exponents) == [SITE]  # a gradient is written once, by the run that is repeated
    exponents.write(torch.ones(3), FLEX, SITE)
    assert writer.places_of(["output"]) is None and writer.entry("output") is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: SiteWriter(begun(), FLEX, "linear", False),
        lambda: SiteWriter(begun(), FLEX, "linear", True, tell=lambda *_: None),
        lambda: SiteWriter(SharedExponents(), FLEX, "linear", True),
        *(lambda cast=cast: SiteWriter(begun(cast), cast, "linear", True) for cast in NOT_QUICK),
    ],
    ids=["evaluation", "observer", "no entries", *map(str, NOT_QUICK)],
)
def test_who_has_to_see_a_sum_gets_it_as_a_tensor(make: Callable[[], SiteWriter]) -> None:
    writer = make()
    assert writer.entry("output") is None and writer.places_of(["output"]) is None


def test_what_is_computed_again_is_written_as_a_tensor_but_for_gradients() -> None:
    trail = Trail(training=True)
    trail.is_repeated = True
    writer = SiteWriter(begun(), FLEX, "linear", True, trail)
    assert writer.entry("output") is None and writer.entry("input gradient") is not None


def test_an_observer_sees_each_result_before_it_is_written_and_keeps_what_it_saw() -> None:
    seen: list[tuple[Tensor, str, Cast]] = []
    writer = SiteWriter(begun(), FLEX, "linear", True, tell=lambda *given: seen.append(given))
    x = torch.tensor([1.0, 1 / 3])
    written = writer.write(x, "output", in_place=True).values
    assert seen == [(x, "output", FLEX)] and x[1] == torch.tensor(1 / 3) != written[1]


@pytest.mark.parametrize("how", [{}, {"in_place": True}], ids=str)
def test_memory_is_written_over_only_where_nobody_else_reads_it(how: dict[str, bool]) -> None:
    for of_op in (True, False):
        x, exponents = torch.tensor([1.0, 1 / 3]), begun()
        writer = SiteWriter(exponents, FLEX, "linear", True)
        result = (writer.write(x, "output", **how) if of_op else exponents.write(x, FLEX, SITE, **how)).values
        assert result[1] != torch.tensor(1 / 3)
        assert bool(x[1] == torch.tensor(1 / 3)) is (not how or "cpu" not in available())


@pytest.mark.parametrize("cast", NOT_QUICK, ids=str)
def test_a_step_writes_one_by_one_what_is_not_rounded_to_nearest_under_predictions(cast: Cast) -> None:
    exponents, x = begun(cast), torch.tensor([1 / 3])
    assert StepWriter(exponents, cast, (), ()).end([x], [SITE], ()) == ({}, [0])
    assert x == torch.tensor([1 / 3])


@pytest.mark.skipif("cpu" not in available(), reason="steps are written all at once by the C++ library")
@pytest.mark.parametrize(("exponent", "rest"), [(-101, [0]), (-100, []), (100, []), (101, [0])])
def test_a_step_writes_one_by_one_what_is_far_from_one(exponent: int, rest: list[int]) -> None:
    cast = parse(f"dfp16:static({exponent})")
    assert StepWriter(begun(cast), cast, (), ()).end([torch.ones(1)], [SITE], ()) == ({}, rest)


@pytest.mark.skipif("cpu" not in available(), reason="steps are written all at once by the C++ library")
def test_a_step_writes_one_by_one_where_a_site_is_written_twice() -> None:
    given, exponents = [torch.tensor([1 / 3]), torch.tensor([1 / 3])], begun()
    step = StepWriter(exponents, FLEX, (), ())
    assert step.end(given, ["exp_avg of a", "exp_avg of a"], ()) == ({}, [0, 1])
    assert step.end(given[:1], ["exp_avg of a"], ()) == ({}, [])
    assert step.end(given, ["exp_avg of b", "exp_avg of a"], ()) == ({}, [0, 1])  # of which one was written
    assert given[0] != given[1] == torch.tensor(1 / 3) and exponents.sites() == [SITE, "exp_avg of a"]
    exponents.flush()
    assert step.end(given, ["exp_avg of b", "exp_avg of a"], ()) == ({}, [])


def test_what_is_in_the_format_stays_as_it_is_only_where_that_is_asked_for() -> None:
    for how, stays in (({}, False), ({"unless_exact": True}, True)):
        x, writer = torch.tensor([1.0, 0.5]), SiteWriter(begun(), FLEX, "linear", True)
        assert (writer.write(x, "output", **how).values is x) is stays


@pytest.mark.parametrize(
    ("most", "sums", "vanished"), [(0, 0, False), (0, 1, True), (0, 7, True), (1, 7, False), (3, 0, False)]
)
def test_a_sum_that_is_written_from_its_integers_is_noted_as_written(most: int, sums: int, vanished: bool) -> None:
    table = begun().table(FLEX)
    assert table is not None
    entry, payload = SumEntry(table, 0), torch.tensor([most, 0], dtype=torch.int16)
    result = entry.write(Multiplied(payload, 5, most, sums), torch.tensor(-3, dtype=torch.int32))
    assert result.tolist() == [most / 8, 0.0]
    kept = payloads.kept(result, FLEX.format)
    assert kept is not None and torch.equal(kept.payload, payload) and kept.exponent == -3
    assert table.written == {0: True}
    assert torch.equal(table.seen[0], entries.record_of(Seen(most, False, vanished, 5, 2)))


def test_each_product_of_an_op_has_a_writer_and_scales_of_its_own() -> None:
    writer = SiteWriter(begun(), FLEX, "linear", True)
    scales = SiteScales(DelayedScales(), "linear", True)
    for one in (writer, scales):
        parts = [one.part() for _ in range(3)]
        assert parts[0] is one and [part.where for part in parts[1:]] == ["linear, product 2", "linear, product 3"]
        assert parts[1].part() is parts[1] and parts[1].part().where == "linear, product 2, product 2"
        assert [part.training for part in parts] == [True] * 3


def test_a_number_beyond_the_largest_is_told_once_where_it_is_written() -> None:
    exponents = SharedExponents()
    exponents.write(torch.tensor([1e6, 1.0]), FLEX, SITE)
    with pytest.warns(
        UserWarning, match="numbers beyond the largest of flex16.* first in the output of linear"
    ) as told:
        for _ in range(3):
            exponents.write(torch.tensor([1e6, 1.0]), FLEX, SITE)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("way", available())
def test_headroom_is_counted_in_bits_above_each_largest_mantissa(way: str, watched: bool) -> None:
    cast, exponents = parse("flex16+5:frozen"), SharedExponents()
    if watched:
        exponents.watch(lambda flush: None)
    with use(way):
        exponents.write(torch.tensor([1.0]), cast, SITE)
        exponents.flush()
        unit = 2.0 ** exponents.exponent(SITE)
        for mantissa in (1, 2, 4096, 0):
            exponents.write(torch.tensor([mantissa * unit, 0.0]), cast, SITE)
            exponents.flush()
    summary = exponents.summary()["all"]
    first = 15 - math.log2(1.0 / unit)
    assert summary.measured == 4 and summary.headroom_sum == pytest.approx(first + 15 + 14 + 3)


def test_a_state_is_of_version_2_and_no_sites_are_in_no_columns() -> None:
    assert SharedExponents().state_dict() == {"version": 2, "groups": []}
    table = begun().table(FLEX)
    assert table is not None and table.order_of([]).tolist() == [] and table.columns([]).shape == (9, 0)
    new = learning.LearningTable(FLEX, torch.device("cpu"))
    assert new.order_of([]).shape == (0,)


@pytest.mark.parametrize("alone", [False, True])
def test_one_kernel_of_a_device_observes_the_entries_that_were_written(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(learning, "answers_at_once", lambda device: False)
    monkeypatch.setattr(learning, "runs_triton", lambda x: True)
    monkeypatch.setattr(mantissas, "observe", lambda *given: seen.append(given))
    table = learning.LearningTable(FLEX, torch.device("cpu"))
    flag, record = torch.tensor(False), table.seen.new_zeros(entries.WORDS)
    names = ["output of a"] if alone else ["output of a", "output of b", "gradient of c"]
    for name in names:
        table.index(name)
    for when in (True, flag):
        table.note(0, record, True)
        if not alone:
            table.note(2, record, when)
        table.flush()
        assert not table.written
        scaling, state, writes = seen.pop()
        assert scaling is table.scaling and len(state) == len(table.state) + 5 and state[-5] is table.before
        assert writes.places.tolist() == ([0] if alone else [0, 2])
        expected = None if alone or when is True else [True, False]
        assert (writes.written if writes.written is None else writes.written.tolist()) == expected
        assert writes.rows is table.seen and writes.faulty is table._faulty
        assert writes.is_result.tolist() == [name.startswith("output") for name in names]
    monkeypatch.setattr(learning, "runs_triton", lambda x: False)
    table.note(0, record)
    table.flush()
    assert not seen and not table.written


def test_a_device_is_not_asked_what_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "answers_at_once", lambda device: False)
    exponents = SharedExponents()
    exponents.write(torch.tensor([1e6, 1.0]), FLEX, SITE)
    faults = exponents.faults()
    assert list(faults) == [SITE] and not bool(faults[SITE]) and isinstance(faults[SITE], Tensor)
    assert exponents.flush() == ([], [])


def test_each_cast_has_a_table_of_its_own() -> None:
    exponents, other, third = begun(), parse("flex16+5:reactive"), parse("flex16+5:static(-8)")
    exponents.write(torch.ones(3), other, "weight of w")
    for cast in (FLEX, other):
        table = exponents.table(cast)
        assert table is not None and table.cast == cast
    assert exponents.table(third) is None
    assert exponents.sites() == [SITE, "weight of w"]


@pytest.mark.parametrize("way", available())
def test_what_was_not_finite_in_an_earlier_write_of_the_step_is_told_until_its_end(way: str) -> None:
    exponents, site = SharedExponents(), "gradient of w"
    exponents.watch(lambda flush: None)
    with use(way):
        for x in (torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, 2.0])):
            exponents.write(x, FLEX, site)
            assert exponents.faults() == {site: True}
        exponents.flush()
        assert exponents.faults() == {}


@pytest.mark.skipif(
    "cpu" not in available(), reason="without the C++ library mantissas are computed when they are read"
)
def test_what_is_written_outside_of_training_has_its_mantissas_with_it() -> None:
    for x, is_kept in ((torch.tensor([1000.0, 1 / 3]), True), (torch.tensor([1000.0, torch.nan]), False)):
        written = begun().write(x, FLEX, SITE, training=False).values
        kept = payloads.kept(written, FLEX.format)
        assert (kept is not None) is is_kept and (kept is None or torch.equal(values(*kept), written))


def test_the_summary_of_a_run_that_has_written_nothing_counts_nothing() -> None:
    summary = SharedExponents().summary()
    assert not any(asdict(summary["all"]).values()) and list(summary) == ["all"]
    assert summary["all"] == Summary() and Summary().headroom_bits != Summary().headroom_bits  # NaN


def test_a_copy_goes_on_by_itself_where_writes_count_and_nobody_watches() -> None:
    exponents, seen = begun(), list[Flush]()
    exponents.watch(seen.append)
    with exponents.uncounted(True):
        twin = copy.deepcopy(exponents)
    for one in (twin, exponents):
        assert one.summary()["all"].writes == 1
        one.write(torch.tensor([60000.0]), FLEX, SITE)
        one.flush()
        assert (one.summary()["all"].writes, len(seen)) == (2, one is exponents)
    assert twin.exponent(SITE) == exponents.exponent(SITE) > begun().exponent(SITE)


def test_two_conditions_hold_where_both_do_and_those_of_the_host_cost_nothing() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)
    assert both(True, True) is True and both(True, no) is no and both(yes, True) is yes
    assert [bool(both(one, other)) for one in (yes, no) for other in (yes, no)] == [True, False, False, False]


@pytest.mark.parametrize("is_host", [True, False])
def test_a_site_has_begun_on_a_host_with_the_first_number_and_on_a_device_with_the_first_write(
    is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "answers_at_once", lambda device: is_host)
    exponents = begun()
    table = exponents.table(FLEX)
    assert table is not None and table.has_begun(SITE) and not table.has_begun("weight of w")
    exponents.write(torch.zeros(3), FLEX, "weight of w")
    assert table.has_begun("weight of w") is not is_host
