"""The first difference of two runs: step, tensor, and distance in ulp."""

from __future__ import annotations

import math

import pytest
import torch
from numerics.small import network, train

import lowp
from lowp.errors import InvalidInput
from lowp.numerics.record import Record, difference, ulps


def run(spoil: bool = False, rate: float = 0.1) -> Record:
    model = network()
    if spoil:
        with torch.no_grad():
            model[3].weight.view(torch.int32)[0, 0] ^= 1 << 10
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        train(model, optimizer, 3)
    return profile.record


def test_two_equal_runs_do_not_part() -> None:
    assert difference(run(), run()) is None


def test_one_bit_of_one_weight_is_found_in_the_first_thing_that_it_changes() -> None:
    found = difference(run(), run(spoil=True))
    assert found is not None
    assert (found.step, found.key.module, found.key.op, found.key.role) == (0, "3", "linear", "output")
    assert 0 < found.ulp < 1 << 20 and found.equal_before > 5
    assert "part at step 0 in 3 linear output" in str(found)


def test_another_learning_rate_is_found_at_the_second_step() -> None:
    found = difference(run(), run(rate=0.11))
    assert found is not None and found.step == 1 and found.key.module == "0"


def budgeted(record: Record, *looked_at: str) -> Record:
    """Return the record under a budget that had time only for these modules."""
    for step, prints in record.part.prints.items():
        record.part.prints[step] = [one for one in prints if one.key.module in looked_at]
    return record


def test_of_two_budgeted_runs_what_both_have_seen_is_compared() -> None:
    assert difference(budgeted(run(), "0", "3"), budgeted(run(), "3", "2")) is None
    found = difference(budgeted(run(), "0", "3"), budgeted(run(spoil=True), "3", "2"))
    assert found is not None and (found.step, found.key.module, found.equal_before) == (0, "3", 1)
    with pytest.raises(InvalidInput, match="no tensor was recorded in the same step of both"):
        difference(budgeted(run(), "0"), budgeted(run(), "3"))


def test_runs_of_other_models_cannot_be_compared() -> None:
    other = run()
    other.header["fingerprint"] = "another"
    with pytest.raises(InvalidInput, match="a model with other parameters"):
        difference(run(), other)
    empty = run()
    empty.part.prints.clear()
    with pytest.raises(InvalidInput, match="no tensor was recorded in the same step of both"):
        difference(run(), empty)


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [(1.0, 1.0, 0), (0.0, -0.0, 0), (1.0, 1.0 + 2**-23, 1), (-(2.0**-149), 2.0**-149, 2), (math.nan, math.nan, 0)],
)
def test_ulps_count_the_numbers_between(one: float, other: float, distance: int) -> None:
    assert ulps(one, other) == distance
    assert ulps(one, math.nan) > 1 << 31 or math.isnan(one)
