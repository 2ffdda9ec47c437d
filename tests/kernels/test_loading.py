"""How the C++ library is loaded: its threads, its instruction set, and which of these this processor has."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowp.errors import InvalidInput, Unavailable
from lowp.kernels import cpu
from lowp.kernels.products import programs

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the C++ library is not here")


@pytest.mark.parametrize("asked", ["", "own", "torch"])
@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize("has_openmp", [False, True])
def test_threads_are_torchs_where_there_are_any(
    asked: str, is_forked: bool, has_openmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWP_THREADS", asked)
    monkeypatch.setattr(cpu, "_forked", is_forked)
    monkeypatch.setattr(cpu, "_openmp_parallel", lambda: 4096 if has_openmp else None)
    assert cpu.uses_own_threads() is (asked == "own" or is_forked or not has_openmp)


def test_threads_that_there_are_none_of_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWP_THREADS", "mine")
    with pytest.raises(InvalidInput, match=r"LOWP_THREADS='mine': allowed are 'torch' .* and 'own'"):
        cpu.uses_own_threads()


def test_a_fork_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_forked", False)
    cpu._note_fork()
    assert cpu._forked is True


def test_torchs_openmp_is_where_torch_brings_it() -> None:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    has = path.exists() and hasattr(ctypes.CDLL(str(path)), "GOMP_parallel")
    assert bool(cpu._openmp_parallel.__wrapped__()) is has


@pytest.mark.parametrize("asked", ["own", "torch"])
def test_a_library_that_is_loaded_has_its_threads_and_its_instruction_set(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, list[tuple[Any, ...]]] = {}

    def guarded(function: Any, places: list[int]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            given.setdefault(function.__name__, []).append(arguments)
            return function(*arguments) if function.__name__ != "lowp_set_team" else None

        return call

    monkeypatch.setattr(cpu, "_guarded", guarded)
    monkeypatch.setenv("LOWP_THREADS", asked)
    monkeypatch.setenv("LOWP_CPU_ISA", "portable")
    own = cpu.library.__wrapped__()
    assert isinstance(own, ctypes.CDLL)
    assert cpu.asked() == "portable" and given["lowp_casts_select"] == [(0,)]
    ((team,),) = given["lowp_set_team"]
    assert team is None if cpu.uses_own_threads() else team.value == cpu._openmp_parallel()
    given.clear()
    monkeypatch.delenv("LOWP_CPU_ISA")
    assert cpu.library.__wrapped__() is not None and "lowp_casts_select" not in given


def test_a_missing_library_is_said_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "PATH", tmp_path / "liblowp_cpu.so")
    with pytest.warns(RuntimeWarning, match=r"is not used \(it was not built\)") as seen:
        assert cpu.library.__wrapped__() is None
    assert seen[0].filename == __file__


def test_instruction_sets_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    own, every = cpu.loaded(), cpu.available()
    assert every == cpu.INSTRUCTION_SETS[: len(every)] and own.lowp_casts_select(-1) == len(every) - 1
    cpu.select(None)
    assert cpu.level() == -1 and cpu.asked() == ""
    for level, name in enumerate(every):
        assert cpu.select(name) == name and cpu.asked() == name and cpu.level() == level
        assert cpu.available() == every  # and what was selected stays
        assert own.lowp_casts_select(cpu._level(own, name)) == level
    for machine in ("arm64", "aarch64", "AArch64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert cpu._level(own, "neon") == 0
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(Unavailable, match=r"this CPU has no neon; it has portable"):
        cpu._level(own, "neon")


MACHINES = {  # processors and the instruction sets that they have; whether one of them multiplies and adds at once
    ("x86_64", 1): False,
    ("AMD64", 1): False,
    ("x86_64", 2): True,
    ("AMD64", 3): True,
    ("aarch64", 1): True,
    ("riscv64", 1): True,
}


@pytest.mark.parametrize(("machine", "count"), MACHINES)
def test_processors_multiply_and_add_at_once_but_x86_without_avx2(
    machine: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "available", lambda: cpu.INSTRUCTION_SETS[:count])
    assert cpu.has_multiply_add.__wrapped__() is MACHINES[machine, count]


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("multiplies", [False, True])
def test_programs_are_where_the_library_multiplies_and_adds(
    is_loaded: bool, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = object() if is_loaded else None
    monkeypatch.setattr(cpu, "library", lambda: found)
    monkeypatch.setattr(cpu, "has_multiply_add", lambda: multiplies)
    assert programs.is_here.__wrapped__() is (is_loaded and multiplies)
