"""Steps of optimizers, and weights stored as rounded masters: their definitions, and the library's bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowp import kernels, optim
from lowp.casts import parse
from lowp.errors import Unavailable
from lowp.kernels.numbers import philox
from lowp.kernels.steps import stored, updates
from lowp.kernels.steps.rules import AdamWStep, LionStep, SgdStep, StepRule
from lowp.kernels.steps.spectra import numbers_at, sampled, slope_of

from .test_cpu import at_any_byte

native = pytest.mark.skipif("cpu" not in kernels.available(), reason="needs the C++ library")

SGD = {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
GROUPS: list[tuple[type[StepRule], dict[str, Any]]] = [
    (AdamWStep, {"betas": (0.9, 0.99), "eps": 1e-3}),
    (AdamWStep, {"betas": (0.4, 0.9), "eps": 1e-8}),  # more than half of the average is new
    (SgdStep, {**SGD, "momentum": 0.0}),
    (SgdStep, {**SGD, "dampening": 0.25}),
    (SgdStep, {**SGD, "nesterov": True}),
    (LionStep, {"betas": (0.9, 0.75)}),
]
COMMON = [
    {"lr": 0.125, "weight_decay": 0.0, "maximize": False},
    {"lr": torch.tensor(0.125), "weight_decay": 0.25, "maximize": True},
]
FP32 = parse("fp32")


def moments_of(rule: StepRule) -> int:
    return 2 if isinstance(rule, AdamWStep) else int(not isinstance(rule, SgdStep) or rule.momentum != 0)


def drawn(seed: int, count: int = 50) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675, program 1, in the precision of its parameters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (one,), (beta1, beta2), lr = group["params"], group["betas"], float(group["lr"])
            gradient = -one.grad if group["maximize"] else one.grad
            average = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
            toward = (beta1 * average + (1 - beta1) * gradient).sign()
            one.data -= lr * (toward + group["weight_decay"] * one.data)
            average.copy_(beta2 * average + (1 - beta2) * gradient)


@pytest.mark.parametrize("common", COMMON, ids=["plain", "decayed, upwards"])
@pytest.mark.parametrize(("kind", "own"), GROUPS)
def test_a_rule_is_torchs_own_step_rounded(kind: type[StepRule], own: dict[str, Any], common: dict[str, Any]) -> None:
    rule, weight = kind.of({**common, **own}), drawn(0)
    moments = [torch.zeros(50) for _ in range(moments_of(rule))]
    wide = nn.Parameter(weight.double())
    makers: dict[type[StepRule], Any] = {AdamWStep: torch.optim.AdamW, SgdStep: torch.optim.SGD}
    maker = makers.get(kind, Lion)
    optimizer = maker([wide], **common, **own) if maker is not Lion else Lion([wide], {**common, **own})
    for step in range(3):
        gradient = drawn(step + 1)
        rule.step(weight, gradient, moments, torch.tensor(float(step)))
        wide.grad = gradient.double()
        optimizer.step()
    torch.testing.assert_close(weight.double(), wide.detach(), rtol=1e-5, atol=1e-6)


def test_a_rule_tells_kernels_what_determines_its_instructions() -> None:
    def flags(kind: type[StepRule], **own: Any) -> dict[str, Any]:
        return kind.of({**COMMON[0], **own}).flags()

    for beta, is_near in ((0.9, True), (0.5, False), (0.25, False), (0.501, True)):
        assert flags(AdamWStep, betas=(beta, 0.99), eps=1e-8) == {"adamw": True, "near": is_near}
    for momentum, nesterov, decay in ((0.0, False, 0.0), (1.0, True, 1.0), (0.5, False, 0.25)):
        found = flags(SgdStep, **{**SGD, "momentum": momentum, "nesterov": nesterov, "weight_decay": decay})
        assert found == {"momentum": momentum > 0, "nesterov": nesterov, "decay": decay > 0}
    assert flags(LionStep, betas=(0.9, 0.99)) == {"lion": True}


def test_an_average_that_is_half_new_is_reckoned_from_the_new_half() -> None:
    rule = AdamWStep.of({**COMMON[0], "betas": (0.5, 0.75), "eps": 1e-8})
    gradient, before = drawn(1), drawn(2)
    average, square = before.clone(), drawn(3).square()
    rule.step(drawn(0), gradient, [average, square], torch.tensor(1.0))
    assert torch.equal(average, gradient - (gradient - before) * 0.5)
    assert not torch.equal(average, before + (gradient - before) * 0.5)


def columns(weights: Sequence[Tensor], gradients: Sequence[Tensor], count: int, before: float) -> updates.Columns:
    moments = [[torch.zeros_like(one) for one in weights] for _ in range(count)]
    nothing = [0] * len(weights)
    return updates.Columns(
        weights, None, gradients, moments, [torch.tensor(before) for _ in weights], (), nothing, nothing
    )


@native
@pytest.mark.parametrize("dtype", updates.GRADIENTS)
@pytest.mark.parametrize("common", COMMON, ids=["plain", "decayed, upwards"])
@pytest.mark.parametrize(("kind", "own"), GROUPS)
def test_the_library_steps_bit_for_bit_as_the_rule(
    kind: type[StepRule], own: dict[str, Any], common: dict[str, Any], dtype: torch.dtype
) -> None:
    rule, sizes = kind.of({**common, **own}), (50, 1, 3000)
    weights, scale = [drawn(size, size) for size in sizes], torch.tensor(4.0)
    given = columns([one.clone() for one in weights], [drawn(7, size).to(dtype) for size in sizes], moments_of(rule), 0)
    expected = columns([one.clone() for one in weights], given.gradients, moments_of(rule), 0)
    kept = updates.Kept(None, FP32, [False, True][: moments_of(rule)])
    for step in range(2):
        now = [torch.tensor(float(step)) for _ in sizes]
        updates.step_on_cpu(given._replace(steps=now), rule, kept, scale, 1024)
        for place, weight in enumerate(expected.weights):
            own_moments = [kind[place] for kind in expected.moments]
            rule.step(weight, given.gradients[place].float() / scale, own_moments, now[place])
    for found, wanted in zip((given.weights, *given.moments), (expected.weights, *expected.moments), strict=True):
        assert all(map(torch.equal, found, wanted))


@native
def test_the_library_steps_what_it_can_read() -> None:
    x, rest = torch.ones(8), torch.ones(8)[1:]
    assert updates.fits_library([x, rest, x.half(), nn.Parameter(x)], FP32)
    negated = torch.complex(x, x).conj().imag
    for one in (torch.ones(2, device="meta"), negated, at_any_byte(x)):
        assert not updates.fits_library([x, one], FP32) and not updates.fits_library([one, x], FP32)
    fitting = ("fp32", "bf16", "int8", "mxfp4", "e2m3@fp32/32", "i16s@fp32/64", "e4m3fn@fp32/1024")
    assert all(updates.fits_library([x], parse(one)) for one in fitting)
    unfit = ("e4m3fn@fp32/1025", "e4m3fn@fp32/2048", "i4s@fp32/1025", "i12s@fp32/64", "e5m7@fp32/64")
    assert not any(updates.fits_library([x], parse(one)) for one in unfit)
    with kernels.use("bitwise"):
        assert not updates.fits_library([x], FP32)
    with TorchDispatchMode():
        assert not updates.fits_library([x], FP32), "a mode would not see the step"


# as storage, moments and rule have it; a split one has remainders of 16 or of 8 bits
KEPT: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (optim.AdamW, {"moments": "int8", "masters": "split-8", "betas": (0.4, 0.9)}),
    (optim.AdamW, {"moments": "mxfp4:stochastic", "storage": "e5m7", "masters": "stochastic", "maximize": True}),
    (optim.SGD, {"moments": "mxint8", "storage": "fp16", "masters": "stochastic", "momentum": 0.9, "dampening": 0.5}),
    (optim.SGD, {"moments": "fp8", "storage": None, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"moments": "bf16", "masters": "stochastic"}),
    (optim.Lion, {"moments": "bf16", "maximize": True}),
]


@native
@pytest.mark.parametrize(("make", "options"), KEPT, ids=lambda one: getattr(one, "__name__", str(one)))
def test_moments_and_weights_in_few_bits_are_stepped_in_one_call_with_the_bits_of_the_definition(
    make: type[torch.optim.Optimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = updates.step_on_cpu

    def counted(columns: updates.Columns, *rest: Any) -> None:
        calls.append(len(columns.weights))
        real(columns, *rest)

    monkeypatch.setattr(updates, "step_on_cpu", counted)
    found = []
    for way in ("cpu", "bitwise"):
        ours = [nn.Parameter(drawn(3, 66_000)), nn.Parameter(drawn(1, 33).view(3, 11))]
        optimizer = make(ours, lr=0.01, seed=7, **options)  # type: ignore[call-arg]
        for step in range(2):
            for place, one in enumerate(ours):
                one.grad = (drawn(10 * step + place, one.numel()) * 0.1).view(one.shape).to(one.dtype)
                one.grad.view(-1)[:2] = torch.tensor([0.0, 1e-20])
            if step:
                optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
            with kernels.use(way):
                optimizer.step()
        found.append([one for p in ours for one in (p.detach(), *optimizer.state[p].values())])
    assert calls == [2, 2]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@native
@pytest.mark.parametrize(("make", "options"), KEPT, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_parameter_alone_is_stepped_as_several_are(
    make: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    found = []
    for way in ("cpu", "bitwise"):
        one = nn.Parameter(drawn(3, 70))
        optimizer = make([one], lr=0.01, **options)  # type: ignore[call-arg]
        one.grad = drawn(4, 70).to(one.dtype)
        with kernels.use(way):
            optimizer.step()
        found.append((one.detach(), *optimizer.state[one].values()))
    assert all(map(torch.equal, *found))


def test_gradients_are_checked_by_a_devices_kernel_where_it_reads_them() -> None:
    x = torch.ones(2, 3, 4, 4)
    with pytest.raises(Unavailable, match=r"no kernel checks gradients on cpu: lowp.kernels.use\('triton'\) has one"):
        updates.check([x], torch.zeros(1))
    assert not updates.can_check([x])
    pytest.importorskip("triton")
    with kernels.use("triton"):
        last = (
            x.to(memory_format=torch.channels_last),
            torch.ones(1, 2, 3, 3, 3).to(memory_format=torch.channels_last_3d),
        )
        assert updates.can_check([x, x.half(), x.bfloat16(), *last]) and not updates.can_check([])
        for other in (x.double(), x[:, :, ::2], torch.ones(4, 4).t()[:2], torch.eye(2).to_sparse()):
            assert not updates.can_check([x, other])


@pytest.mark.parametrize(
    ("word", "expected"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (2**64 + 5, 5), (-1, -1)]
)
def test_a_word_of_64_bits_is_a_twos_complement_number(word: int, expected: int) -> None:
    assert philox.signed(word) == expected


# -- stored weights ---------------------------------------------------------------------------------------------------
@native
def test_weights_are_stored_in_one_call_where_the_library_reads_and_writes_them() -> None:
    x, memory = torch.randn(8), torch.zeros(64)
    fit = [
        (torch.zeros(8, dtype=torch.bfloat16), x),
        (memory[:8], memory[8:16]),  # side by side
        (memory[8:16], memory[:8]),
        (torch.zeros(0), torch.zeros(0)),
    ]
    assert stored.serves(fit[:3]) == [True] * 3
    unfit = [
        (memory[:8], memory[:8]),
        (memory[4:12], memory[:8]),
        (memory[:8], memory[7:15]),
        (torch.zeros(8), x.double()),
        (torch.zeros(8), x.bfloat16()),
        (torch.zeros(4, 2), x),
        (torch.zeros(16)[::2], x),
        (torch.zeros(8, dtype=torch.float64), x),
        (torch.zeros(8, device="meta"), torch.zeros(8, device="meta")),
        (at_any_byte(x), x),
        (torch.zeros(8), at_any_byte(x)),
    ]
    assert stored.serves(unfit) == [False] * len(unfit)
    with kernels.use("bitwise"):
        assert stored.serves(fit) == [False] * len(fit)


@native
@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("e4m3fn", torch.float32)]
)
def test_masters_are_stored_rounded_and_whether_they_are_is_found_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    masters, cast = [drawn(0, 3000), drawn(1, 5), torch.tensor([1.0, torch.nan])], parse(name)
    weights = [(torch.zeros_like(one, dtype=dtype), one) for one in masters]
    versions = [weight._version for weight, _ in weights]
    assert stored.store_rounded(weights, cast) == [True, True, False]
    assert [weight._version for weight, _ in weights] == [one + 1 for one in versions]
    for weight, master in weights[:2]:
        assert torch.equal(weight, kernels.quantize(master, cast).to(dtype))
    assert stored.are_rounded(weights, cast) == [True, True, False]
    weights[1][0][4] += 1
    assert stored.are_rounded(weights, cast) == [True, False, False]
    assert stored.are_rounded([], cast) == stored.store_rounded([], cast) == []


# -- samples of the profiler ------------------------------------------------------------------------------------------
def test_a_sample_is_a_copy_of_numbers_at_places_that_depend_on_the_shape_alone() -> None:
    x = torch.arange(1000.0).view(20, 50)
    found = sampled(x, 64)
    assert found.shape == (64,) and len(found.unique()) == 64
    assert torch.equal(sampled(2 * x, 64), 2 * found)
    assert torch.equal(sampled(x.t().contiguous().t(), 64), found)
    assert found.diff().unique().numel() > 1  # no steps of equal length
    whole = sampled(x, 1000)
    assert torch.equal(whole, x.reshape(-1)) and whole.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_few_numbers_are_read_as_they_are_or_divided_by_a_scale(dtype: torch.dtype) -> None:
    x = torch.arange(8.0).to(dtype)
    assert numbers_at(x, [5, 0, 2]) == [5.0, 0.0, 2.0]
    assert numbers_at(x, [5, 0, 2], 4.0) == [1.25, 0.0, 0.5]


def test_squares_of_gradients_are_summed_by_the_exponent_of_their_number() -> None:
    x = torch.tensor([1.0, 1.5, 2.0, -2.0, 2.0**-100, 2.0**100, 1.0])
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, torch.inf])
    found = slope_of(x, gradient)
    first = int(np.flatnonzero(found == 5.0)[0])  # of 1 <= |x| < 2
    assert found.shape == (96,) and found.dtype == np.float64
    assert found[first + 1] == 25.0 and found[0] == 25.0 and found[-1] == 36.0 and found.sum() == 91.0
    assert np.array_equal(slope_of(x, gradient, 2.0), found / 4)
    gradient[-2:] = torch.tensor([torch.nan, -torch.inf])
    assert slope_of(x, gradient).sum() == 55.0
