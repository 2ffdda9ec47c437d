"""Writers of ops and of an optimizer's step: when they write from integers or all at once, and who sees what."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from lowp.casts import Cast, parse
from lowp.exponents import Flush, SharedExponents, SiteWriter, StepWriter, Trail, learning
from lowp.exponents.learning import both
from lowp.exponents.shared import Summary
from lowp.kernels.choose.dispatch import available, use
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.mantissas import values

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
