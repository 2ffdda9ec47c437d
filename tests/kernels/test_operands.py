"""Operands of a training step: their infinities and NaN stay, and scales follow from the maxima of earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowp import kernels
from lowp.casts import parse
from lowp.kernels.casts import cpu_groups, functions
from lowp.kernels.casts.functions import quantize_measured, quantize_operand, remember_maxima
from lowp.kernels.numbers import scaled
from lowp.scaling.delayed import DelayedMaximum, MaximaSeen

ONE_PASS = {  # casts, and whether the C++ library rounds a whole tensor by them in one call
    **dict.fromkeys(
        ["bf16", "e5m2:saturate", "e4m3fn:stochastic", "mxfp8", "mxfp4", "nvfp4", "int8", "dfp16", "nvfp4:4/6"], True
    ),
    **dict.fromkeys(["i8@fp32/channel", "e4m3fn@fp32/4x4", "nvfp4:eden"], True),
    **dict.fromkeys(["int8-affine", "i1@fp32/tensor"], False),
}
LIE = {  # how the numbers lie: what is read in place comes first
    "dense": lambda x: x,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "with gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "in fp64": lambda x: x.double(),
    "in bf16": lambda x: x.bfloat16(),
    "negated lazily": lambda x: torch.complex(-x, -x).conj().imag,
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def kept(x: Tensor, cast: str, seed: int | Tensor) -> Tensor:
    return torch.where(x.isfinite(), kernels.quantize(x, cast, seed=seed), x)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.double().nan_to_num(nan=7.25), other.double().nan_to_num(nan=7.25)
    )


@pytest.mark.parametrize("lie", LIE)
@pytest.mark.parametrize("cast", ONE_PASS)
def test_an_operand_is_rounded_but_for_what_is_not_finite(cast: str, lie: str) -> None:
    if lie == "in bf16" and not kernels.casts.checks.holds(parse(cast), torch.bfloat16):
        return
    for spoils in ({}, {(0, 3): torch.inf}, {(1, 2): -torch.inf, (3, 5): torch.nan}):
        x = numbers(8, 16)
        for place, value in spoils.items():
            x[place] = value
        x = LIE[lie](x)
        for seed in (3, torch.tensor(3)):
            wanted = kept(x, cast, seed)
            for is_traced in (False, True):
                assert same(quantize_operand(x, parse(cast), seed, is_traced), wanted)
                assert same(quantize_operand(x, parse(cast), seed, is_traced, torch.float64), wanted.double())


@pytest.mark.parametrize("cast", ["mxfp8", "nvfp4", "int8", "e5m2@fp32/channel", "e4m3fn@fp32/4x4"])
def test_groups_of_an_operand_run_along_an_axis(cast: str) -> None:
    for shape, axis in (((32, 16), 0), ((2, 32, 4, 3), 1)):
        x = numbers(*shape)
        for spoil in (1.0, torch.inf):
            x[(0,) * len(shape)] = spoil
            for one in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
                moved = kept(one.movedim(axis, -1).contiguous(), cast, 0).movedim(-1, axis)
                for dtype in (None, torch.float64):
                    found = quantize_operand(one, parse(cast), 0, False, dtype, axis)
                    assert same(found, moved.to(dtype or torch.float32))
                    assert found.stride() == one.stride()


@pytest.mark.parametrize(("cast", "is_one_pass"), ONE_PASS.items())
def test_what_the_library_reads_in_place_is_rounded_in_one_call(
    cast: str, is_one_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    inner = functions._operand

    def counted(*given: Any) -> Tensor:
        asked.append(cast)
        return inner(*given)

    monkeypatch.setattr(functions, "_operand", counted)
    given = parse(cast)
    assert (given.scaling is None or cpu_groups.is_one_pass(given)) is is_one_pass
    ways: list[tuple[Callable[[Tensor], Tensor], int | Tensor, bool, bool]] = [
        *((LIE[lie], 1, False, is_one_pass and lie in ("dense", "parameter")) for lie in LIE if lie != "in bf16"),
        *((LIE["dense"], torch.tensor(1), False, False), (LIE["dense"], 1, True, False)),
    ]
    for lie, seed, is_traced, is_short in ways:
        is_short = is_short and kernels.choose.dispatch.uses_library()
        asked.clear()
        quantize_operand(lie(numbers(8, 16)), parse(cast), seed, is_traced)
        assert bool(asked) is not is_short


MEASURED = ["e4m3fn@fp32/tensor:delayed", "i8s@fp32/tensor:delayed:stochastic", "dfp16:delayed"]


@pytest.mark.parametrize("cast", MEASURED)
@pytest.mark.parametrize("implementation", sorted({"cpu", "bitwise"} & set(kernels.available())))
def test_a_cast_under_a_given_scale_tells_the_largest_number(cast: str, implementation: str) -> None:
    scale = torch.tensor(2.0**-9)
    with kernels.use(implementation):
        for lie in (LIE["dense"], LIE["with gaps"]):
            for seed in (5, torch.tensor(5)):
                x = numbers(6, 40)
                x[2, 3] = -9.0
                x = lie(x)
                wanted = kernels.quantize(x, cast, scale=scale, seed=seed)
                found, largest = quantize_measured(x, parse(cast), scale, seed)
                assert torch.equal(found, wanted) and float(largest) == 9.0 and largest.shape == ()
                x[0, 0], x[5, 5] = -torch.inf, torch.nan
                found, largest = quantize_measured(x, parse(cast), scale, seed)
                assert same(found, torch.where(x.isfinite(), wanted, x)) and not largest.isfinite()
        found, largest = quantize_measured(torch.empty(0, 3), parse(cast), scale, 5)
        assert found.shape == (0, 3) and float(largest) == 0.0


@pytest.mark.parametrize("cast", ["e4m3fn@fp32/tensor:delayed(window=3)", "int8:delayed(window=3, headroom=2)"])
def test_maxima_are_remembered_as_by_the_definition(cast: str) -> None:
    given = parse(cast)
    assert given.scaling is not None
    maxima = DelayedMaximum(given.scaling.window, given.scaling.headroom)
    state = maxima.init(entries=4)
    rows, defined = torch.zeros(4, 3, dtype=torch.float64), state
    steps = [(1.5, 0.0, 2.0, 9.0), (torch.inf, 3.0, 0.25, 0.0), (1.0, torch.nan, 64.0, 0.0), (0.5, 0.5, 0.5, 0.0)]
    with kernels.use("cpu") if "cpu" in kernels.available() else kernels.use(None):
        for step, row in enumerate([*steps, *steps]):
            rows[:, 1], rows[:, 2] = torch.tensor(row), torch.tensor([1.0, step != 1, 1.0, 0.0])
            seen = MaximaSeen(rows[:, 1].float(), rows[:, 2] > 0)
            defined = maxima.observe(defined, seen)
            held = type(state)(*(one.clone() for one in state))
            if not remember_maxima(rows, held, given):
                assert "cpu" not in kernels.available()
                return
            for one, other in zip(held, defined, strict=True):
                assert torch.equal(one, other)
            scales = scaled.scale_of_maxima(defined.largest.double(), given)
            assert torch.equal(rows[:, 0], scales) and not rows[:, 1:].any()
            state = held


REFUSED = {
    "scales in powers of two": ("e4m3fn@e8m0/tensor:delayed", "cpu"),
    "two levels of scales": ("nvfp4", "cpu"),
    "no scales of earlier steps": ("e4m3fn", "cpu"),
    "another kernel": ("e4m3fn@fp32/tensor:delayed", "bitwise"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_maxima_that_the_library_does_not_remember_are_left(what: str) -> None:
    cast, kernel = REFUSED[what]
    if kernel not in kernels.available():
        return
    rows, state = torch.tensor([[1.0, 3.0, 1.0]], dtype=torch.float64), DelayedMaximum(4).init()
    with kernels.use(kernel):
        assert not remember_maxima(rows, state, parse(cast))
    assert rows.tolist() == [[1.0, 3.0, 1.0]] and not any(one.any() for one in state)


def test_infinities_stay_where_a_format_has_them() -> None:
    keeps = {"fp16": True, "e5m2": True, "e4m3fn": False, "e5m2:saturate": False, "e2m1": False, "int8": False}
    assert {cast: functions.keeps_infinities(parse(cast)) for cast in keeps} == keeps


@pytest.mark.parametrize("cast", ["e2m1", "e5m2:saturate", "e4m3fn", "int8", "mxfp8"])
def test_operands_without_numbers_are_not_asked_for_any(cast: str) -> None:
    with FakeTensorMode():
        for is_traced in (False, True):
            found = quantize_operand(torch.empty(4, 32), parse(cast), 0, is_traced)
            assert found.shape == (4, 32) and found.dtype is torch.float32
