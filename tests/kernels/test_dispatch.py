"""Which implementation computes: by device, by what is there, and by what is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowp import kernels
from lowp.compat import accelerator
from lowp.errors import Misuse, Unavailable
from lowp.kernels import cpu, triton
from lowp.kernels.choose import dispatch
from lowp.kernels.choose.choices import choices
from lowp.kernels.numbers import bitwise
from lowp.kernels.numbers.philox import draw_seed
from lowp.kernels.products import contraction

CPU, CUDA, XPU, MPS = map(torch.device, ("cpu", "cuda", "xpu", "mps"))


def test_who_computes_on_a_device_is_what_is_there() -> None:
    everywhere = ("reference", "bitwise", "native")
    assert kernels.available() == (*everywhere, *(["cpu"] if cpu.library() is not None else []))
    assert kernels.available("cuda") == (*everywhere, *(["triton"] if triton.is_installed() else []))


def test_the_fastest_is_the_devices_own_and_torchs_integers_where_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "is_installed", lambda: True)
    assert dispatch.fastest(CUDA) is triton and dispatch.fastest(MPS) is bitwise
    assert dispatch.fastest(CUDA, "no such function") is bitwise
    assert dispatch.fastest(CPU) is (bitwise if cpu.library() is None else cpu)
    monkeypatch.setattr(triton, "is_installed", lambda: False)
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert dispatch.fastest(CUDA) is dispatch.fastest(CPU) is bitwise
    assert not dispatch.uses_library()


def test_what_is_not_there_is_refused_with_who_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: None)
    text = "the cpu kernels are not on this machine; reference, bitwise, native give the same bits"
    with pytest.raises(Unavailable, match=text):
        kernels.use("cpu")


@pytest.mark.skipif("cpu" not in kernels.available(), reason="needs the C++ library")
def test_each_takes_the_devices_that_it_computes_on() -> None:
    for way in kernels.available():
        with kernels.use(way):
            assert dispatch.implementation(CPU) is dispatch.IMPLEMENTATIONS[way]
            assert dispatch.uses_library() is (way == "cpu")
    with kernels.use("cpu"), pytest.raises(Unavailable, match="take tensors on the CPU, not on cuda: bitwise and"):
        dispatch.implementation(CUDA)
    with kernels.use("bitwise"):
        assert dispatch.implementation(CUDA) is dispatch.implementation(XPU) is bitwise
        with pytest.raises(Unavailable, match=r"bitwise has no such; .* have it"):
            dispatch.implementation(CPU, "such")
    assert dispatch.uses_library()


@pytest.mark.skipif(not triton.is_installed(), reason="triton is not installed")
def test_triton_writes_numbers_of_32_and_16_bits_that_are_there() -> None:
    x = torch.ones(2)
    assert not dispatch.runs_triton(x) and not dispatch.by_triton(x)
    with kernels.use("triton"):
        assert dispatch.implementation(CPU) is dispatch.implementation(CUDA) is triton
        assert dispatch.by_triton(x) and dispatch.by_triton(x.half()) and dispatch.by_triton(x.bfloat16())
        assert dispatch.runs_triton(x.double()) and not dispatch.by_triton(x.double())

        def is_run(x: Tensor) -> Tensor:
            assert not dispatch.runs_triton(x)  # of which torch traces or transforms operations
            return x

        torch.func.vmap(is_run)(x)


def test_observations_are_known_at_once_on_a_host_alone() -> None:
    x, there = torch.ones(2), torch.ones(2, device="meta")
    assert dispatch.answers_at_once(x) and dispatch.answers_at_once(CPU)
    assert not dispatch.answers_at_once(there) and not dispatch.answers_at_once(CUDA)
    if triton.is_installed():
        with kernels.use("triton"):
            assert not dispatch.answers_at_once(x)
    with kernels.use("bitwise"):
        assert dispatch.answers_at_once(x)


def test_a_gpu_that_torch_does_not_find_has_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dispatch.capability.cache_clear()
    assert dispatch.capability(torch.device("cuda:7")) == (0, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    dispatch.capability.cache_clear()
    assert dispatch.capability(torch.device("cuda:7")) == (9, 7)
    dispatch.capability.cache_clear()


def test_torchs_own_16_bit_kernels_are_used_where_they_are_asked_for_or_compute_in_fp32() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    with kernels.use("native"):
        assert contraction.is_torchs_own(half) is True and contraction.is_torchs_own(half, is_exact=True) is True
    with kernels.use("bitwise"):
        assert contraction.is_torchs_own(half) is False and contraction.is_torchs_own(half, is_exact=True) is False
    assert contraction.is_torchs_own(half, is_exact=True) is True


def test_what_was_chosen_is_told_with_the_processor_and_how_to_choose_otherwise() -> None:
    found = choices()
    assert found["processor"].startswith(f"torch uses {torch.backends.cpu.get_cpu_capability()}, ")
    assert "thread" in found["processor"] and found["processor"].endswith("no accelerator") is (accelerator() is None)
    with kernels.use("bitwise"):
        words = choices()["int16 products"]
        assert words == "torch's fp64 products, which are exact; other: with lowp.kernels.use('bitwise')"
    if cpu.library() is not None:
        assert choices()["int16 products"] == "the C++ library; other: with lowp.kernels.use('bitwise')"
        assert choices()["casts"] == "the C++ library; other: with lowp.kernels.use('bitwise'): the same bits"


def test_seeds_are_drawn_from_all_of_62_bits() -> None:
    seeds = [int(draw_seed()) for _ in range(40)]
    assert 2**58 < max(seeds) < 2**62 and min(seeds) >= 0 and len(set(seeds)) == 40
    torch.manual_seed(3)
    first = int(draw_seed())
    torch.manual_seed(3)
    assert int(draw_seed()) == first


def test_a_seed_that_is_not_drawn_says_what_to_do_within_vmap_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str) -> Tensor:
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "randint", lambda *given, **named: refused("vmap: in randomness error mode"))
    with pytest.raises(Misuse, match="give it randomness='different', or 'same'"):
        draw_seed()
    monkeypatch.setattr(torch, "randint", lambda *given, **named: refused("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        draw_seed()
    assert not isinstance(raised.value, Misuse)


def test_statistics_of_two_tensors_have_the_larger_maximum_and_the_sum_of_squares() -> None:
    one, other = (
        kernels.statistics(torch.tensor([3.0, 4.0, torch.nan])),
        kernels.statistics(torch.tensor([6.0, -torch.inf])),
    )
    for both in (one + other, other + one):
        assert (both.maximum, both.sum_squares, both.count, both.nan, both.inf, both.zeros) == (6.0, 61.0, 5, 1, 1, 0)
