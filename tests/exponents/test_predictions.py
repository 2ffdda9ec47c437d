"""The C++ library updates predictions like their definition in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.exponents.learning import COUNTS
from lowp.exponents.table import ExponentTable
from lowp.kernels.int16 import entries
from lowp.kernels.int16.cpu_int16 import Seen
from lowp.scaling import Autoflex
from lowp.scaling.powers import sum_by_halves

SITES = 37


def _flushed(scaling: Autoflex, way: str, steps: int) -> ExponentTable:
    """Return a table after random writes, including too large, zero, vanished and non-finite ones."""
    table = ExponentTable(parse("flex16+5:autoflex"), torch.device("cpu"))
    table.scaling = scaling
    table.state = scaling.init("cpu", 0)
    for site in range(SITES):
        table.index(f"output of {site} linear")
    table.state.started.fill_(True)
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        for site in range(SITES):
            kind, size = torch.rand(2, generator=draw).tolist()
            if kind < 0.2:
                continue  # a site that is not written in this step
            mantissa = 0 if kind < 0.3 else 32767 + (site % 2) if kind < 0.35 else int(2 ** (15 * size))
            seen = Seen(mantissa, kind > 0.95, mantissa == 0 and kind < 0.25, 0, 8)
            table.note(site, entries.record_of(seen, seen.nonfinite))
        with kernels.use(way):
            table.flush()
        assert not table.written and not table.seen.any(), step
    return table


@pytest.mark.skipif("cpu" not in kernels.available(), reason="needs the C++ library")
@pytest.mark.parametrize(
    "scaling",
    [
        Autoflex(),
        Autoflex(warm_headroom=0, headroom=1),
        Autoflex(window=5, bits=12, beta=1.5, gamma=3.0),
        Autoflex(window=1),
        Autoflex(min_exponent=-20, max_exponent=-4),
        Autoflex(adapt=False),
    ],
)
def test_entries_move_to_the_same_bits_by_the_library(scaling: Autoflex) -> None:
    defined, found = _flushed(scaling, "reference", 40), _flushed(scaling, "cpu", 40)
    for name, column in defined.state._asdict().items():
        assert torch.equal(getattr(found.state, name), column), name
    assert torch.equal(found.before, defined.before)
    assert found.faults() == defined.faults()
    for name in COUNTS:
        # sums of up to 40 logarithms, each within an ulp of 15: the two logarithms are of different libraries
        bound = 40 * 15 * 2.0**-51 if name == "headroom_sum" else 0.0
        torch.testing.assert_close(found.counts[name], defined.counts[name], rtol=0, atol=bound)
    assert defined.state.writes.min() > 0 and defined.state.saturated.sum() > 0 and defined.state.nonfinite.sum() > 0
    assert bool(defined.state.moved.any()) is scaling.adapt
    assert bool(defined.state.started.all()) is not scaling.adapt  # what has vanished begins anew


def test_sums_by_halves_take_a_row_of_any_length() -> None:
    for length in (1, 2, 3, 7, 16, 31):
        rows = torch.arange(3 * length, dtype=torch.float64).reshape(3, length)
        assert torch.equal(sum_by_halves(rows), rows.sum(1))
    ones = torch.tensor([[1.0, 2.0**-53, -1.0, 2.0**-53]], dtype=torch.float64)
    assert sum_by_halves(ones).item() == 2.0**-52  # (1 - 1) + (2**-53 + 2**-53), which no order from the left gives


def test_a_window_that_is_too_long_for_the_library_is_left_to_torch() -> None:
    scaling = replace(Autoflex(), window=257)
    defined, found = _flushed(scaling, "reference", 3), _flushed(scaling, kernels.available()[-1], 3)
    assert torch.equal(found.state.exponent, defined.state.exponent)


def test_a_step_of_parameters_needs_no_library() -> None:
    model = torch.nn.Linear(4, 3)
    precision = lowp.Precision("flex16+5")
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = model.weight.detach().clone()
    for _ in range(2):
        with kernels.use("reference"):
            with precision.autocast():
                loss = model(torch.ones(2, 4)).square().sum()
            precision.backward(loss)
            precision.step(optimizer)
    assert not torch.equal(model.weight, before)
