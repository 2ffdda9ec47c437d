"""The rows of the cost figure are those of the cost table."""

from __future__ import annotations

import pytest

from lowp import formats
from lowp.cost import SOURCE, cost
from lowp.errors import InvalidInput, UnknownName
from lowp.formats import FORMATS
from lowp.recipes.recording.costs import record_cost


def test_every_format_has_its_costs_and_how_they_were_found() -> None:
    document = record_cost([*FORMATS, "e5m7", "fp32"])
    assert document["source"] == SOURCE
    assert [row["name"] for row in document["formats"]] == [*FORMATS, "e5m7"]
    for row in document["formats"]:
        found = cost(formats.parse(row["name"]))
        assert row["energy"]["multiply"] == vars(found.multiply_energy) and row["area"]["add"] == vars(found.add_area)
        assert row["energy"]["add"]["value"] == found.add_energy.value
        assert row["area"]["multiply"]["how"] == found.multiply_area.how
        assert {name: one["value"] for name, one in row["read"].items()} == {
            name: one.value for name, one in found.read_energy.items()
        }
    integers = {row["name"] for row in document["formats"] if row["is_integer"]}
    assert {"int8", "flex16+5", "dfp16"} <= integers and not {"fp32", "mxfp8", "e5m7"} & integers


def test_an_unknown_format_or_none_is_refused() -> None:
    with pytest.raises(UnknownName, match="unknown format 'fp61'; did you mean"):
        record_cost(["fp32", "fp61"])
    with pytest.raises(InvalidInput, match="--formats is empty: give formats, such as"):
        record_cost([])
