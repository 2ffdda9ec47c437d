"""The published energies and areas, and the estimates between them."""

from __future__ import annotations

import pytest

from lowp.cost import TABLE, cost
from lowp.formats import FORMATS, ScaledFormat, parse


def test_the_table_is_the_source_s() -> None:
    fp16, fp32, int8, int32 = (cost(parse(name)) for name in ("fp16", "fp32", "i8", "i32"))
    assert [c.add_energy.value for c in (int8, int32, fp16, fp32)] == [0.03, 0.1, 0.4, 0.9]
    assert [c.multiply_energy.value for c in (int8, int32, fp16, fp32)] == [0.2, 3.1, 1.1, 3.7]
    assert [c.add_area.value for c in (int8, cost(parse("i16")), int32, fp16, fp32)] == [36, 67, 137, 1360, 4184]
    assert [c.multiply_area.value for c in (int8, int32, fp16, fp32)] == [282, 3495, 1640, 7700]
    for each in (int8, int32, fp16, fp32):
        for estimate in (each.add_energy, each.multiply_energy, each.add_area, each.multiply_area):
            assert estimate.how == "table"
            assert not str(estimate).startswith("~")
    assert {name: energy.value for name, energy in fp32.read_energy.items()} == {"SRAM of 8 KB": 5, "DRAM": 640}
    assert cost(parse("bf16")).read_energy["DRAM"].value == 320


def test_a_multiplier_grows_with_the_square_of_the_significand() -> None:
    squares = {"bf16": 64, "fp16": 121, "fp32": 576}
    assert {name: cost(parse(name)).significand_bits ** 2 for name in squares} == squares
    bf16, fp16 = cost(parse("bf16")), cost(parse("fp16"))
    assert bf16.relative_multiplier_area == pytest.approx(1 / 9)
    assert bf16.relative_multiplier_area / fp16.relative_multiplier_area == pytest.approx(64 / 121)
    # on the line through (11^2, 1.1) and (24^2, 3.7)
    assert bf16.multiply_energy.value == pytest.approx(1.1 - (121 - 64) * 2.6 / 455)
    assert cost(parse("i16")).multiply_energy.value == pytest.approx(0.2 + (256 - 64) * 2.9 / 960)


def test_estimates_say_how_they_were_found() -> None:
    expected = {
        "tf32": "table",
        "bf16": "extrapolated",
        "e4m3fn": "extrapolated",
        "i16": "interpolated",
        "e4m12": "interpolated",
    }
    assert {name: cost(parse(name)).multiply_energy.how for name in expected} == expected
    assert str(cost(parse("bf16")).multiply_energy) == "~0.774 pJ"
    assert cost(parse("fp16")).read_energy["DRAM"].how == "interpolated"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_cost(name: str) -> None:
    format = FORMATS[name]
    found = cost(format)
    for estimate in (found.add_energy, found.multiply_energy, found.add_area, found.multiply_area):
        assert estimate.value > 0
    if isinstance(format, ScaledFormat):
        assert found.multiply_energy == cost(format.element).multiply_energy


def test_the_square_rule_rises_between_the_rows_of_the_table() -> None:
    for (kind, _), rows in TABLE.items():
        assert list(rows) == sorted(rows), kind
        assert [row[0] for row in rows.values()] == sorted(row[0] for row in rows.values())
