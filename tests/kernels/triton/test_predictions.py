"""Exponents on a device are predicted by one kernel of Triton, with the bits of their definition in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.fake_cuda import Launches
from torch import Tensor

from lowp import kernels
from lowp.casts import parse
from lowp.exponents.learning import COUNTS, Condition, Flush
from lowp.exponents.table import ExponentTable
from lowp.kernels.choose import dispatch
from lowp.kernels.int16.cpu_int16 import Seen
from lowp.kernels.int16.entries import record_of
from lowp.scaling import Autoflex

pytest.importorskip("triton", reason="triton is not installed")

import ahead

from lowp.kernels.triton import launch
from lowp.kernels.triton import mantissas as implementation

SITES, STEPS = 21, 40
SCALINGS = [
    Autoflex(),
    Autoflex(warm_headroom=0, headroom=1),
    Autoflex(window=5, bits=12, beta=0.1, gamma=0.3),
    Autoflex(window=1),
    Autoflex(window=256, min_exponent=-20, max_exponent=-4),
    Autoflex(adapt=False),
]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "is_on_host", lambda x: False)


def table_of(scaling: Autoflex) -> ExponentTable:
    table = ExponentTable(parse("flex16+5:autoflex"), torch.device("cpu"))
    table.scaling, table.state = scaling, scaling.init("cpu", 0)
    for site in range(SITES):
        table.index(f"{'input' if site % 3 == 0 else 'output'} of {site} linear")
    table.state.started.fill_(True)
    return table


def note_drawn(table: ExponentTable, draw: torch.Generator, whole: bool) -> None:
    """Note what the writes of a step saw: too large, zero, vanished, not finite, and some that do not count."""
    order = range(SITES) if whole else torch.randperm(SITES, generator=draw).tolist()
    for site in order:
        kind, size, counts = torch.rand(3, generator=draw).tolist()
        if kind < 0.2 and not whole:
            continue
        mantissa = 0 if kind < 0.3 else 32767 + (site % 2) if kind < 0.35 else int(2 ** (15 * size))
        when: Condition = True if whole or counts < 0.7 else torch.tensor(counts < 0.85)
        record = record_of(Seen(mantissa, kind > 0.93, mantissa == 0 and kind < 0.25, 0, 8), kind > 0.97)
        table.note(site, record * when, when)


def columns(table: ExponentTable) -> dict[str, Tensor]:
    return {**table.state._asdict(), "before": table.before, "faulty": table._faulty, **table.counts}


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_entries_move_to_the_same_bits(scaling: Autoflex, there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, faulty, real = [], list[int](), launch.interpret
    monkeypatch.setattr(launch, "interpret", lambda *given: launched.append(given[0].fn.__name__) or real(*given))
    defined, found = table_of(scaling), table_of(scaling)
    kept = columns(found)
    guarded = torch.cat((found.seen, torch.ones_like(found.seen[:1])))  # behind the last entry
    found.seen = guarded[:-1]
    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 16)  # two programs
    for step in range(STEPS):
        for table, way in ((defined, "bitwise"), (found, "triton")):
            note_drawn(table, torch.Generator().manual_seed(step), whole=step % 4 == 0)
            with kernels.use(way):
                table._flush()  # `flush` forgets what was faulty
                assert not table.written and not table.seen.any()
        assert torch.equal(defined._faulty, found._faulty)
        faulty.append(int(found._faulty.sum()))
        defined._faulty.zero_(), found._faulty.zero_()
    assert bool((guarded[-1] == 1).all())
    assert any(0 < count < len(found._faulty) for count in faulty)
    assert launched == ["observe"] * STEPS
    for name, column in columns(defined).items():
        assert columns(found)[name].data_ptr() == kept[name].data_ptr(), name  # where a captured graph reads it
        # sums of logarithms of at most 15, each within an ulp: the two logarithms are of different libraries
        bound = STEPS * 15 * 2.0**-51 if name == "headroom_sum" else 0.0
        torch.testing.assert_close(columns(found)[name], column, rtol=0, atol=bound)
    state = defined.state
    assert state.writes.min() > 0 and state.saturated.sum() > 0 and state.nonfinite.sum() > 0
    assert bool(state.moved.any()) is scaling.adapt and bool(state.started.all()) is not scaling.adapt
    assert all(int(defined.counts[name].sum()) > 0 for name in COUNTS) or not scaling.adapt


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_takes_few_launches(whole: bool, there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def run(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            launch.interpret(kernel, *arguments)

    monkeypatch.setattr(implementation, "run", run)
    counted = {}
    for way in ("bitwise", "triton"):
        table = table_of(Autoflex())
        for _ in range(2):  # the first one numbers the entries
            note_drawn(table, torch.Generator().manual_seed(3), whole)
            with kernels.use(way), Launches() as launches:
                table.flush()
        counted[way] = len(launches.names())
    assert counted["triton"] == (1 if whole else 4) and counted["bitwise"] > 60
    assert launched == ["observe"] * 2


@pytest.mark.parametrize("window", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_it_compiles_for_gpus_without_spills(window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for capability in (75, 80, 90, 100):
        found = ahead.compiled(ahead.observe(window), capability)
        assert (found.stack, found.local) == (0, 0) and found.registers <= 224


def test_who_watches_is_told_what_a_cpu_tells(there: None) -> None:
    told = list[Flush]()
    for way in ("bitwise", "triton"):
        table = table_of(Autoflex())
        table.run.watchers.append(told.append)
        note_drawn(table, torch.Generator().manual_seed(1), False)
        with kernels.use(way):
            table.flush()
    for one, other in zip(*map(lambda flush: flush[1:], told), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
