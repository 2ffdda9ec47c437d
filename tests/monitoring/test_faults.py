"""Planted faults are named within 50 steps, and healthy trainings raise no alarm; `bench/monitoring.py` prints them."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import forked
import planted
import pytest
import torch
import torch.distributed

from lowp.monitoring import Alarm

PLAIN = [fault for fault in planted.FAULTS if "plain" in fault.modes]
SAMPLE = ("NaN in a layer", "a layer cut from the graph", "a dead ReLU")
RANKS = 2


def told(alarms: list[Alarm]) -> str:
    return "\n".join(map(str, alarms)) or "no alarm"


def trained(mode: str, fault: planted.Fault | None) -> list[Alarm]:
    """Train and return the alarms; every step is looked at, so that nothing depends on the speed of the machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = planted.Run(mode, fault)
        run.watch(max_overhead=None)
        return run.train(planted.WITHIN + (0 if fault is None else fault.begin), fault)


@pytest.mark.parametrize("fault", PLAIN, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_with_its_layer(fault: planted.Fault) -> None:
    alarms = trained("plain", fault)
    found = fault.named(alarms)
    assert found is not None, told(alarms)
    assert f"(lowp explain {found.id})" in str(found) and "\n" not in str(found)


def compiled(fault: planted.Fault) -> None:
    torch.compiler.reset()
    alarms = trained("compiled", fault)
    assert fault.named(alarms) is not None, told(alarms)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_within_a_compiled_model_is_named(name: str) -> None:
    compiled(next(one for one in PLAIN if one.name == name))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [one for one in PLAIN if one.name not in SAMPLE], ids=lambda fault: fault.name)
def test_every_fault_within_a_compiled_model_is_named(fault: planted.Fault) -> None:
    compiled(fault)


def work(rank: int, names: tuple[str, ...], folder: str) -> None:
    """Act as one of the ranks: write what the monitor has told of a healthy run and of each fault."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results: dict[str, Any] = {"healthy": told(trained("ddp", None))}
    for fault in planted.FAULTS:
        if fault.name in names:
            try:
                alarms = trained("ddp", fault)
                results[fault.name] = "" if fault.named(alarms) else told(alarms)
            except Exception:
                results[fault.name] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def in_ranks(names: tuple[str, ...], folder: Path) -> None:
    """Check that rank 0, which judges for all, names the faults and says nothing of a healthy run."""
    forked.ranks(work, (names, str(folder)), RANKS)
    found = torch.load(folder / "0.pt")
    assert found.pop("healthy") == "no alarm"
    assert set(found) == set(names)
    assert {name: text for name, text in found.items() if text} == {}


def test_a_rank_apart_is_named(tmp_path: Path) -> None:
    in_ranks(("a rank apart",), tmp_path)


@pytest.mark.slow
def test_every_fault_of_several_ranks_is_named(tmp_path: Path) -> None:
    in_ranks(tuple(fault.name for fault in planted.FAULTS), tmp_path)


@pytest.mark.parametrize("precision", [None, "bf16", "fp16", "dfp16", "flex16+5", "fp8"])
def test_a_healthy_training_raises_no_alarm(precision: str | None) -> None:
    run = planted.Run("plain", precision=precision)
    run.watch(max_overhead=None)
    assert told(run.train(40)) == "no alarm"
