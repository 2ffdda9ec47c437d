"""Exponents that belong to sites: writes, steps, faults, and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lowp.casts import Cast, parse
from lowp.errors import InvalidInput
from lowp.exponents import (
    Flush,
    SharedExponents,
    SiteWriter,
    StepWriter,
    Trail,
    class_of,
    learning,
    scaling_of,
    table,
)
from lowp.kernels.choose import dispatch
from lowp.kernels.choose.dispatch import available, use, uses_library

FLEX = parse("flex16+5:autoflex")


def mantissas(x: Tensor, exponent: int) -> Tensor:
    return x.double() * 2.0**-exponent


def test_shared_exponents_have_at_most_twelve_verbs() -> None:
    assert len([name for name in dir(SharedExponents) if not name.startswith("_")]) <= 12


def test_a_write_is_rounded_once_to_values_of_the_format() -> None:
    exponents = SharedExponents()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    written = exponents.write(x, FLEX, "output of 0 linear").values
    exponent = exponents.exponent("output of 0 linear")
    found = mantissas(written, exponent)
    assert written.dtype is torch.float32
    assert torch.equal(found, mantissas(x, exponent).round().clamp(-32768, 32767))
    assert 2**13 <= found.abs().max() < 2**15  # the guess leaves at most one bit


def test_writes_of_tensors_without_numbers_are_not_in_the_summary() -> None:
    exponents, site = SharedExponents(), "output of 0 linear"
    for count in range(2):
        assert exponents.write(torch.ones(4, 4, device="meta"), FLEX, site).values.is_meta
        assert exponents.summary()["all"].writes == count
        assert exponents.write(torch.ones(4, 4), FLEX, site).values.sum() == 16
        exponents.flush()


@pytest.mark.parametrize(
    ("site", "rows", "cast", "has_both"),
    [
        ("exp_avg of 0.weight", 1024, FLEX, True),
        ("exp_avg_sq of 0.weight", 1024, FLEX, True),
        ("exp_avg of 0.weight", 1023, FLEX, False),
        ("exp_avg of 0.weight", 1024, parse("flex16+5:autoflex(words=1)"), False),
        ("gradient of 0.weight", 1024, FLEX, False),
        ("weight of 0.weight", 1024, FLEX, False),
    ],
)
def test_moments_of_many_rows_have_two_words_where_one_would_lose_no_row(
    site: str, rows: int, cast: Cast, has_both: bool
) -> None:
    """One moment divides the other, so that small numbers of both count, however few they are."""
    x = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0)) + 0.5
    (exponents, alone), inplace = (SharedExponents(), SharedExponents()), x.clone()
    written = exponents.write(x, cast, site).values
    alone.write(torch.ones(2), cast, "weight of another")
    _, rest = StepWriter(alone, cast, (), ()).end([inplace], [site], ())
    if rest:
        inplace.copy_(alone.write(inplace, cast, site).values)
    assert not rest or not (has_both and uses_library())
    assert torch.equal(written, inplace)
    found = mantissas(written, exponents.exponent(site))
    assert torch.equal(found, found.round()) is not has_both
    if has_both:
        assert (found - mantissas(x, exponents.exponent(site))).abs().max() <= 2.0**-15


@pytest.mark.parametrize(("lost", "has_two"), [(128, False), (129, True)])
def test_gradients_have_two_words_where_more_than_an_eighth_of_their_rows_would_be_lost(
    lost: int, has_two: bool
) -> None:
    x = torch.rand(1024, 2, generator=torch.Generator().manual_seed(0)) + 0.5
    x[:lost] *= 2.0**-20
    exponents = SharedExponents()
    written = exponents.write(x, FLEX, "gradient of 0.weight").values
    assert bool((written[:lost] != 0).all()) is has_two


@pytest.mark.skipif(not uses_library(), reason="the C++ library was not built")
def test_a_step_leaves_the_tensors_that_the_library_cannot_read_to_be_written_one_by_one() -> None:
    exponents, alone = SharedExponents(), SharedExponents()
    first, turned = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    wanted = exponents.write(first, FLEX, "exp_avg of a").values
    alone.write(torch.ones(2), FLEX, "weight of another")
    before, given = turned.t().clone(), [first, turned.t()]
    _, rest = StepWriter(alone, FLEX, (), ()).end(given, ["exp_avg of a", "exp_avg of b"], ())
    assert rest == [1] and torch.equal(first, wanted) and torch.equal(given[1], before)


@pytest.mark.parametrize("way", available())
@pytest.mark.parametrize("spelled", ["flex16+5:autoflex", "flex16+5:reactive"])
def test_what_one_rank_agrees_on_alone_is_what_it_has_seen(spelled: str, way: str) -> None:
    cast = parse(spelled)
    (alone, agreed), x = (table.ExponentTable(cast, torch.device("cpu")) for _ in "ab"), torch.tensor([1.0, 3.0, 60.0])
    for one in (alone, agreed):
        for scale in (1.0, 1.0, 2.0**-60, 8.0, torch.inf):
            one.index("gradient of v")  # which nobody writes
            with use(way):
                one.write(x * scale, one.index("gradient of w"))
                one.flush(None if one is alone else one.columns(list(one.names)))
    for name, value in alone.state._asdict().items():
        assert torch.equal(value, getattr(agreed.state, name)), name


def test_a_maximum_is_predicted_from_the_second_write_on() -> None:
    exponents, flushes = SharedExponents(), list[Flush]()
    exponents.watch(flushes.append)
    for _ in range(3):
        exponents.write(torch.ones(3), FLEX, "output of x")
        exponents.flush()
    predicted = [float(flush.predicted[0]) for flush in flushes if flush.predicted is not None]
    assert math.isnan(predicted[0]) and all(one >= 1 for one in predicted[1:]) and len(predicted) == 3


def test_what_is_computed_again_is_written_under_the_exponents_of_the_first_time() -> None:
    exponents, trail, x = SharedExponents(), Trail(training=True), torch.tensor([1.0, 1 / 3])
    found = []
    for trail.is_repeated in (False, True):
        for role in ("output", "output gradient"):
            found.append(SiteWriter(exponents, FLEX, "linear", True, trail).write(x, role))
            exponents.flush()
        for _ in range(3):  # later steps, of larger numbers
            SiteWriter(exponents, FLEX, "linear", True).write(100 * x, "output")
            exponents.flush()
    assert list(trail.exponents) == ["output of linear"]  # gradients are written once, by the repeated run
    assert torch.equal(found[0].values, found[2].values)
    assert not torch.equal(SiteWriter(exponents, FLEX, "linear", True).write(x, "output").values, found[0].values)


def test_a_tie_goes_to_the_even_mantissa_from_fp64_in_one_step() -> None:
    exponents = SharedExponents()
    # between a tie and the number above it there is room in fp64 alone: fp32 first would make a tie of it
    x = torch.tensor([2.0**14, 6.5, 6.5 + 2**-40, 7.5], dtype=torch.float64) * 2**-8
    assert (exponents.write(x, FLEX, "output of here").values * 2**8).tolist() == [16384.0, 6.0, 7.0, 8.0]


def test_a_second_write_at_a_place_sees_what_the_first_one_taught() -> None:
    exponents = SharedExponents()
    flushes: list[Flush] = []
    exponents.watch(flushes.append)
    for scale in (1.0, 1.0, 1000.0, 1000.0):
        exponents.write(torch.full((3,), scale), FLEX, "output of x")
    exponents.flush()
    found = [int(flush.mantissa[0]) for flush in flushes]
    assert len(found) == 4
    assert found[2] == 32767 and found[3] == 32767  # 1000 does not fit where 1 was expected, nor after one step up
    assert int(flushes[3].exponent[0]) > int(flushes[2].exponent[0])
    assert exponents.summary()["all"].saturated == 2


@pytest.mark.parametrize("jump", [64.0, 1.0 / 64])
def test_a_jump_of_64_is_recovered_from_within_a_few_steps(jump: float) -> None:
    exponents = SharedExponents()
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        x = torch.randn(200, generator=generator) * (jump if step >= 30 else 1.0)
        exponents.write(x, FLEX, "output of x")
        exponents.flush()
        if step == 29:
            before = exponents.summary()["all"].saturated
        if step == 35:
            after = exponents.summary()["all"].saturated
    assert before == 0
    assert (after > 0) == (jump > 1)  # cut off and counted
    assert exponents.summary()["all"].saturated == after  # and then no more
    free = 15 - math.log2(
        float(mantissas(exponents.write(x, FLEX, "output of x").values, exponents.exponent("output of x")).max())
    )
    assert 0 < free < 3


def test_zeros_teach_nothing_and_are_not_the_beginning() -> None:
    exponents = SharedExponents()
    for _ in range(5):
        assert not exponents.write(torch.zeros(4), FLEX, "output of x").values.any()
        exponents.flush()
    small = torch.tensor([1e-6, -2e-6])
    written = exponents.write(small, FLEX, "output of x").values
    assert torch.allclose(written, small, rtol=1e-3)
    exponents.flush()
    assert exponents.summary()["all"].writes == 6 and exponents.summary()["all"].measured == 1


def test_what_is_not_finite_stays_so_and_is_told() -> None:
    exponents = SharedExponents()
    exponents.write(torch.ones(3), FLEX, "output of 0 linear")
    exponents.flush()
    written = exponents.write(torch.tensor([1.0, torch.inf, torch.nan]), FLEX, "output of 0 linear").values
    assert written[0] == 1 and written[1] == torch.inf and written[2].isnan()
    exponents.write(torch.tensor([torch.nan]), FLEX, "output of 1 linear")
    assert list(exponents.faults()) == ["output of 0 linear", "output of 1 linear"]
    exponents.write(torch.tensor([torch.nan]), FLEX, "weight gradient of 1 linear")
    assert list(exponents.faults()) == ["output of 0 linear", "output of 1 linear", "weight gradient of 1 linear"]
    before = exponents.exponent("output of 0 linear")
    exponents.flush()
    assert exponents.exponent("output of 0 linear") == before
    assert exponents.faults() == {} and exponents.summary()["all"].nonfinite == 3


def test_values_outside_the_range_of_exponents_saturate_and_vanish_in_the_counts() -> None:
    exponents = SharedExponents()
    assert exponents.write(torch.tensor([1e9, -1e9]), FLEX, "output of big").values.tolist() == [32767.0, -32768.0]
    assert exponents.exponent("output of big") == 0
    assert exponents.write(torch.tensor([1e-12]), FLEX, "output of small").values.tolist() == [0.0]
    exponents.flush()
    assert exponents.summary()["all"].saturated == 1
    # nothing was seen of the small one: the next write begins anew
    assert exponents.write(torch.tensor([0.5]), FLEX, "output of small").values.tolist() == [0.5]


def test_outside_of_training_nothing_is_remembered_and_nothing_saturates() -> None:
    exponents = SharedExponents()
    exponents.write(torch.ones(2), FLEX, "output of x")
    exponents.flush()
    state = exponents.state_dict()
    x = torch.tensor([1000.0, torch.nan])
    for _ in range(2):
        assert exponents.write(x, FLEX, "output of x", training=False).values[0] == 1000
        assert exponents.write(x, FLEX, "output of y", training=False).values[1].isnan()
    exponents.flush()
    assert exponents.sites() == ["output of x"] and exponents.faults() == {}
    assert torch.equal(
        exponents.state_dict()["groups"][0]["state"]["exponent"], state["groups"][0]["state"]["exponent"]
    )
    fixed = parse("flex16+5:static(-8)")
    assert exponents.write(torch.tensor([1000.0]), fixed, "output of z", training=False).values == 32767 / 256


def test_outside_of_training_the_values_are_the_same_without_the_library() -> None:
    x, found = torch.tensor([1000.0, 0.3, torch.nan]), []
    for way in available():
        with use(way):
            found.append(SharedExponents().write(x, FLEX, "output of y", training=False).values)
    for one in found:
        torch.testing.assert_close(one, found[0], rtol=0, atol=0, equal_nan=True)


def test_the_largest_number_is_that_of_those_that_are_finite() -> None:
    for is_known in (True, False):
        assert table.largest(torch.tensor([-3.0, torch.inf, torch.nan]), is_known) == 3
        assert table.largest(torch.tensor([torch.inf]), is_known) == table.largest(torch.empty(0), is_known) == 0


@pytest.mark.parametrize(("beyond", "is_most"), [(2, False), (3, True)])
def test_a_result_has_lost_most_of_its_numbers_if_more_than_half_are_cut_off(beyond: int, is_most: bool) -> None:
    exponents = SharedExponents()
    for site in ("output of x", "gradient of w"):
        exponents.write(torch.ones(4), FLEX, site)
    exponents.flush()
    for site in ("output of x", "gradient of w"):
        exponents.write(torch.tensor([1000.0] * beyond + [1.0] * (4 - beyond)), FLEX, site)
    assert exponents.flush() == ([], ["output of x"] if is_most else [])


@pytest.mark.parametrize(("largest", "told"), [(32767.0, []), (40000.0, ["gradient of w"])])
def test_a_single_number_that_no_exponent_holds_is_told(largest: float, told: list[str]) -> None:
    exponents = SharedExponents()
    exponents.write(torch.tensor([largest, 1.0, 1.0, 1.0]), FLEX, "gradient of w")
    assert exponents.flush() == (told, [])
    exponents.write(torch.tensor([1e6, 1.0, 1.0, 1.0]), FLEX, "gradient of v")  # beside one that is held
    exponents.write(torch.tensor([32767.0]), FLEX, "gradient of u")
    assert exponents.flush() == (["gradient of v"], [])


@pytest.mark.skipif(not uses_library(), reason="the C++ library was not built")
def test_the_kernel_that_would_write_looks_at_what_was_not_looked_at_where_its_site_is_not_written() -> None:
    x, fixed = torch.ones(2, 3), parse("flex16+5:static(-8)")
    entries = {cast: table.ExponentTable(cast, torch.device("cpu")) for cast in (FLEX, fixed)}
    for one in entries.values():
        assert not one.finds_exact(x, "gradient of w")  # of which nothing is known
        one.index("gradient of w")
    entry = entries[FLEX]
    assert entry.finds_exact(x, "gradient of w") and not entries[fixed].finds_exact(x, "gradient of w")
    assert not entry.finds_exact(torch.ones(6).reshape(2, 3).t(), "gradient of w")
    assert entry.write(x, 0, unless_exact=True).values is x and not entry.finds_exact(x, "gradient of w")
    other = torch.rand(3)
    assert entry.finds_exact(other, "gradient of w")
    entry.write(other, 0)
    assert not entry.finds_exact(torch.ones(3), "gradient of w")


def test_an_entry_may_begin_before_its_first_write_with_the_exponent_of_that() -> None:
    (begun, written), x = (table.ExponentTable(FLEX, torch.device("cpu")) for _ in "ab"), torch.tensor([3.0, 60.0])
    for largest in (x, 1000 * x):  # the second changes nothing
        begun.begin(largest, begun.index("gradient of w"))
    written.write(x, written.index("gradient of w"))
    assert begun.has_begun("gradient of w") and torch.equal(begun.exponent(0), written.exponent(0))
    assert not begun.written and list(written.written) == [0]


@pytest.mark.parametrize(("spelled", "adapts"), [("flex16+5:autoflex", True), ("flex16+5:static(-8)", False)])
def test_an_entry_begins_anew_where_a_tensor_is_larger_than_it_holds(spelled: str, adapts: bool) -> None:
    entry = table.ExponentTable(parse(spelled), torch.device("cpu"))
    sites = ["weight of a", "weight of b", "weight of c"]
    for site in sites:
        entry.write(torch.tensor([1.0, 0.5]), entry.index(site))
    entry.flush()
    held = 32767 * 2.0 ** int(entry.exponent(0))
    history, seen = entry.state.history.clone(), entry.state.seen.clone()
    tensors = [torch.tensor([held]), torch.tensor([0.5, -1.01 * held]), torch.zeros(0), torch.tensor([1e9])]
    entry.admit(tensors, [*sites, "weight of none"])
    stays = [True, not adapts, True]
    assert entry.state.started.tolist() == stays and list(entry.names) == sites
    assert entry.state.seen.tolist() == [int(one) * stay for one, stay in zip(seen, stays, strict=True)]
    assert torch.equal(entry.state.history, history * torch.tensor(stays)[:, None])
    entry.admit([torch.tensor([1e9])], ["weight of none"])
    assert entry.state.started.tolist() == stays


def test_an_entry_counts_as_written_if_one_of_its_writes_does() -> None:
    entry = table.ExponentTable(FLEX, torch.device("cpu"))
    places, (no, yes) = [entry.index(f"output of {name}") for name in "abcd"], torch.tensor([False, True])
    record = entry.seen[0].clone()
    for place, *counts in zip(places, (no, no, no, True), (no, yes, True, no), strict=True):
        entry.note(place, record, counts[0])
        assert entry.written[place] is counts[0]
        entry.note(place, record, counts[1])
    assert [bool(entry.written[place]) for place in places] == [False, True, True, True]
    assert [entry.written[place] is True for place in places] == [False, False, True, True]  # without an operation


@pytest.mark.parametrize("is_skipped", [True, False])
@pytest.mark.parametrize(
    ("cast", "way"), [(FLEX, "bitwise"), (FLEX, "triton"), (parse("flex16+5:reactive"), "bitwise")], ids=str
)
def test_on_a_device_a_second_write_that_is_skipped_teaches_nothing(
    cast: Cast, way: str, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(learning, "answers_at_once", lambda device: False)
    monkeypatch.setattr(dispatch, "is_on_host", lambda x: False)
    x, y, larger = torch.tensor([1.0, 3.0]), torch.tensor([5.0, -2.0]), torch.tensor([1000.0, 7.0])

    def learnt(second: bool, unless: Tensor | None) -> list[Tensor]:
        exponents = SharedExponents()
        for _ in range(2):
            exponents.write(x, cast, "output of x")
            exponents.write(y, cast, "output of y")
            if second:
                with nullcontext() if unless is None else exponents.uncounted(unless):
                    exponents.write(larger, cast, "output of x")
            exponents.write(8 * y, cast, "output of y")
            exponents.flush()
        found = exponents._tables[cast]
        return [*found.state, *found.counts.values(), *map(torch.as_tensor, found.faults().values())]

    with use(way):
        pairs = zip(learnt(True, torch.tensor(is_skipped)), learnt(not is_skipped, None), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_write_that_does_not_count_is_as_outside_of_training() -> None:
    exponents = SharedExponents()
    exponents.write(torch.ones(2), FLEX, "output of x")
    exponents.flush()
    with exponents.uncounted(True):
        assert exponents.write(torch.tensor([1000.0]), FLEX, "output of x").values == 1000
        assert exponents.table(FLEX) is None
    assert exponents.write(torch.tensor([1000.0, 0.0]), FLEX, "output of x").values.amax() < 4
    assert exponents.table(FLEX) is not None


@pytest.mark.parametrize("is_there", [False, True])
def test_a_single_number_beyond_a_places_window_is_not_cut_off_and_is_learnt_from(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        monkeypatch.setattr(learning, "answers_at_once", lambda device: False)
    exponents, site = SharedExponents(), "output of loss"
    for value in (0.25, 2.2272, 2.2272, 1000.0, -7000.0):
        written = exponents.write(torch.tensor(value), FLEX, site).values
        assert float(written) == pytest.approx(value, rel=2**-10)
        exponents.flush()
        held = math.ldexp(32767, exponents.exponent(site))
        assert abs(value) < held
    assert exponents.write(torch.tensor(math.inf), FLEX, site).values == math.inf


@pytest.mark.parametrize("way", available())
def test_what_is_in_the_format_can_stay_as_it_is(way: str) -> None:
    exponents = SharedExponents()
    x = torch.tensor([3.0, -5.0, 0.0]) * 2**-20
    with use(way):
        assert torch.equal(exponents.write(x, FLEX, "gradient of w", unless_exact=True).values, x)
        assert exponents.sites() == []
        exponents.write(torch.tensor([1.0, 2**-20]), FLEX, "gradient of w", unless_exact=True)
        assert exponents.sites() == ["gradient of w"]
        exponents.flush()
        state = exponents.state_dict()["groups"][0]["state"]["writes"].tolist()
        for training in (True, False):
            found = exponents.write(x.clone(), FLEX, "gradient of w", training=training, unless_exact=True)
            assert torch.equal(found.values, x) and found.exponent is None
        exponents.flush()
        assert exponents.state_dict()["groups"][0]["state"]["writes"].tolist() == state == [1]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_place_that_was_changed_from_outside_begins_anew(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_there:
        monkeypatch.setattr(learning, "answers_at_once", lambda device: False)
    exponents = SharedExponents()
    w = exponents.write(torch.linspace(-1, 1, 9), FLEX, "weight of w").values
    exponents.flush()
    entries = exponents.table(FLEX)
    assert entries is not None
    entries.admit([torch.ones(3), w * 64], ["weight of another", "weight of w"])
    assert torch.equal(exponents.write(w * 64, FLEX, "weight of w").values, w * 64)
    exponents.flush()
    assert exponents.summary()["weights"].saturated == 0


def test_a_state_goes_on_where_it_was_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(50, generator=generator) * (1 + step) for step in range(40)]
    for spelled in ("flex16+5:autoflex", "flex16+5:reactive", "flex16+5:frozen"):
        cast = parse(spelled)
        first, second = SharedExponents(), SharedExponents()
        for x in inputs[:25]:
            first.write(x, cast, "output of x")
            first.flush()
        second.load_state_dict(first.state_dict())
        for x in inputs[25:]:
            assert torch.equal(first.write(x, cast, "output of x").values, second.write(x, cast, "output of x").values)
            first.flush()
            second.flush()
        assert first.summary() == second.summary()


@pytest.mark.parametrize("spelled", ["flex16+5:autoflex", "flex16+5:reactive"])
def test_one_state_can_be_restored_several_times(spelled: str) -> None:
    cast, first = parse(spelled), SharedExponents()
    first.write(torch.ones(3), cast, "output of x")
    first.flush()
    state, found = first.state_dict(), []
    for _ in range(2):
        one = SharedExponents()
        one.load_state_dict(state)
        for scale in (4.0, 64.0):
            one.write(torch.full((3,), scale), cast, "output of x")
            one.flush()
        found.append(one.summary())
    assert found[0] == found[1] != first.summary()


def alike(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda good: {**good, "groups": [{**good["groups"][0], name: value}]}


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda good: {**good, "version": 7}, "shared exponents of version 7 cannot be read: this lowp reads 2"),
        (lambda good: {}, "shared exponents of version None cannot be read: this lowp reads 2"),
        (lambda good: [good], "the state of shared exponents must be a dictionary with a list of groups, not .{"),
        (lambda good: {"version": 2}, "must be a dictionary with a list of groups, not {'version': 2}"),
        (lambda good: {**good, "groups": {}}, "must be a dictionary with a list of groups, not"),
        (lambda good: {**good, "groups": [3]}, "in this checkpoint are incomplete: a group without its cast"),
        (alike("cast", None), "in this checkpoint are incomplete: a group without its cast"),
        (alike("sites", ["output of x", "output of y"]), "exponents of flex.* in this checkpoint are incomplete"),
        (alike("sites", ["output of x"] * 2), "exponents of flex.* in this checkpoint are incomplete"),
        (alike("sites", [1]), "exponents of flex.* in this checkpoint are incomplete"),
        (alike("sites", "x"), "exponents of flex.* in this checkpoint are incomplete"),
        (alike("before", torch.zeros(1)), "exponents of flex.* in this checkpoint are incomplete"),  # int32
        (alike("before", torch.zeros(1, 1).int()), "exponents of flex.* in this checkpoint are incomplete"),
        (alike("before", 3), "exponents of flex.* in this checkpoint are incomplete"),
        (alike("counts", 3), "exponents of flex.* in this checkpoint are incomplete"),
        (alike("counts", {}), "exponents of flex.* in this checkpoint are incomplete"),
    ],
)
def test_a_state_of_another_kind_is_refused_and_changes_nothing(
    edit: Callable[[dict[str, Any]], Any], text: str
) -> None:
    exponents = SharedExponents()
    exponents.write(torch.ones(1), FLEX, "output of x")
    exponents.flush()
    with pytest.raises(InvalidInput, match=text):
        exponents.load_state_dict(edit(exponents.state_dict()))
    assert exponents.sites() == ["output of x"] and exponents.summary()["all"].writes == 1


def test_counts_speak_of_classes_of_tensors_and_of_raises_in_time() -> None:
    exponents = SharedExponents()
    for step in range(40):
        grown = torch.tensor([1.01**step])  # slow: each raise is foreseen
        for role in ("weight", "output", "output gradient", "input gradient 2", "update", "exp_avg"):
            exponents.write(grown, FLEX, f"{role} of 0.weight")
        exponents.flush()
    summary = exponents.summary()
    assert {name: one.tensors for name, one in summary.items()} == {
        **{"all": 6, "weights": 1, "activations": 1, "activation gradients": 2, "updates": 1, "optimizer state": 1}
    }
    assert summary["all"].writes == 240 and summary["all"].saturated == 0
    assert summary["all"].raises_in_time == summary["all"].raises_needed
    assert 0.5 < summary["all"].headroom_bits < 3
    assert class_of("bias gradient of fc linear") == class_of("gradient of fc.bias") == "weight gradients"


@pytest.mark.parametrize("spelled", ["flex16+5", "dfp16:delayed", "mxfp8"])
def test_casts_without_such_exponents_are_refused(spelled: str) -> None:
    with pytest.raises(InvalidInput, match="as in flex16\\+5:autoflex"):
        scaling_of(parse(spelled))


def test_the_writes_of_an_accelerator_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(there: bool) -> list[Tensor]:
        exponents = SharedExponents()
        if there:
            monkeypatch.setattr(learning, "answers_at_once", lambda *tensors: False)
        generator = torch.Generator().manual_seed(0)
        found = []
        for step in range(30):
            x = torch.randn(64, generator=generator) * 2.0 ** (step // 4)
            x[5] = torch.nan if step == 7 else 0.0
            found.append(exponents.write(x * (step != 9), FLEX, "output of x").values)
            found.append(torch.tensor(any(map(bool, exponents.faults().values()))))
            exponents.flush()
        found.append(torch.tensor(exponents.summary()["all"].saturated))
        return found

    here, there = trained(False), trained(True)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(here, there, strict=True))


def test_a_place_that_was_never_written_is_not_known() -> None:
    with pytest.raises(InvalidInput, match="nothing has been recorded at the site 'weight of x'"):
        SharedExponents().exponent("weight of x")


def test_headroom_is_kept_free() -> None:
    for bits in range(4):
        exponents = SharedExponents()
        cast = parse(f"flex16+5:autoflex(headroom={bits})") if bits else FLEX
        for _ in range(20):
            exponents.write(torch.tensor([1.5]), cast, "output of x")
            exponents.flush()
        assert exponents.exponent("output of x") == -14 + bits


@pytest.mark.skipif(not uses_library(), reason="steps are written all at once by the C++ library")
def test_weights_that_were_not_written_in_this_step_are_stepped_at_once() -> None:
    exponents = SharedExponents()
    weights = [torch.linspace(-1, 1, 16), torch.linspace(-2, 2, 8)]
    sites = [(f"update of {name}.weight", f"weight of {name}.weight") for name in "ab"]
    for _ in range(3):
        for weight, (update, own) in zip(weights, sites, strict=True):
            exponents.write(weight / 1024, FLEX, update)
            weight.copy_(exponents.write(weight, FLEX, own).values)
        assert not StepWriter(exponents, FLEX, weights, sites).weights
        exponents.flush()
    assert len(StepWriter(exponents, FLEX, weights, sites).weights) == 2
    exponents.write(weights[0], FLEX, sites[0][1])
    (left,) = StepWriter(exponents, FLEX, weights, sites).weights
    assert left is weights[1]
    weights[1][0] = 0.123456  # is not in the format
    assert not StepWriter(exponents, FLEX, weights, sites).weights


@pytest.mark.parametrize("spelled", ["flex16+5:autoflex", "flex16+5:static(-8)", "flex16+5:reactive"])
def test_a_tensor_that_is_in_the_format_is_recognised_alike_by_the_kernel_that_would_write_it(spelled: str) -> None:
    cast, generator = parse(spelled), torch.Generator().manual_seed(0)
    found: dict[str, list[Tensor]] = {"bitwise": [], "best": []}
    exact = torch.randint(-32767, 32768, (40,), generator=generator) * 2.0**-20
    wide = torch.randn(40, generator=generator)
    given = [wide, exact, exact * 2**9, exact * 2.0**-13, torch.zeros(3), wide * exact, torch.tensor([torch.inf, 1.0])]
    given += [torch.tensor(1.0), torch.tensor(1 / 3), torch.zeros(0), exact.double()]
    for way, results in found.items():
        with use(way) if way != "best" else nullcontext():
            exponents = SharedExponents()
            for x in given:
                x = x.clone()
                exponents.write(wide, cast, "gradient of w")
                exponents.flush()
                before = exponents.summary()["all"].writes
                results.append(exponents.write(x, cast, "gradient of w", unless_exact=True).values)
                results.append(torch.tensor([results[-1] is x, bool(exponents.faults())]))
                exponents.flush()
                results.append(torch.tensor(exponents.summary()["all"].writes - before))
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other)


def test_a_tensor_over_ranks_is_refused_with_what_takes_it() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(InvalidInput) as refused:
            SharedExponents().write(x, parse("flex16+5"), "weight of 0")
    finally:
        torch.distributed.destroy_process_group()
    assert str(refused.value) == (
        "a tensor (2, 3) that is distributed over ranks (a DTensor, by tensor parallelism) cannot be written in "
        "flex16+5: an exponent belongs to the whole tensor. Use dfp16, or another precision whose exponents are not "
        "predicted"
    )
