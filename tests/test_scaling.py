"""Loss scales: torch's rule if torch has one, and a scale that never becomes 0."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowp.errors import InvalidInput
from lowp.presets import LossScale
from lowp.scaling import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    AdaptiveLossScale,
    DynamicLossScale,
    GradientsSeen,
    LossScaleState,
    LossScaling,
    StaticLossScale,
    loss_scale,
)
from lowp.scaling.loss_scale import flush_field, inverse_of, scaling_of, underflow

GOOD, BAD = torch.zeros(()), torch.ones(())
SCALES = (StaticLossScale(), DynamicLossScale(), DynamicLossScale(hysteresis=2), AdaptiveLossScale())


def after(scaling: LossScaling, steps: Iterable[bool], state: LossScaleState | None = None) -> LossScaleState:
    """Return the state after steps that overflowed (True) or not."""
    state = scaling.init() if state is None else state
    for overflowed in steps:
        state = scaling.observe(state, GradientsSeen(BAD if overflowed else GOOD))
    return state


def counts(exponents: dict[int, int]) -> torch.Tensor:
    """Return a histogram with the given counts at powers of two."""
    histogram = torch.zeros(256, dtype=torch.int64)
    for exponent, count in exponents.items():
        histogram[exponent + 127] = count
    return histogram


class Defined(DynamicLossScale):
    """Never moved by torch's kernel."""

    _is_torchs = False


# -- the dynamic rule --------------------------------------------------------------------------------------------------
@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 4),
    st.sampled_from([1.1, 2.0, 3.7, 16.0]),
    st.sampled_from([0.1, 0.5, 0.7]),
)
def test_the_dynamic_scale_moves_as_torchs_kernel_does_to_the_bit(
    steps: list[bool], interval: int, growth: float, backoff: float
) -> None:
    options: dict[str, Any] = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    scaling, defined = DynamicLossScale(**options), Defined(**options)
    state, scale, tracker = scaling.init(), torch.full((), 2.0**16), torch.zeros((), dtype=torch.int32)
    for overflowed in steps:
        by_definition = after(defined, [overflowed], state)
        state = after(scaling, [overflowed], state)
        assert [one.item() for one in by_definition] == [one.item() for one in state]
        torch._amp_update_scale_(scale, tracker, BAD if overflowed else GOOD, growth, backoff, interval)
        if scale < SMALLEST_SCALE:  # from here on torch's scale dies
            return
        assert torch.equal(state.scale, scale) and torch.equal(state.good_steps, tracker)


@given(
    st.sampled_from(SCALES),
    st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf]), max_size=300),
    st.floats(width=32),
    st.sampled_from([(1.1, 0.9), (2.0, 0.5), (1e30, 1e-30), (3.4e38, 1e-300)]),
)
def test_a_scale_is_never_zero_infinite_or_nan(
    scaling: LossScaling, seen: list[float], start: float, factors: tuple[float, float]
) -> None:
    if isinstance(scaling, DynamicLossScale):
        growth, backoff = factors
        scaling = dataclasses.replace(scaling, growth_factor=growth, backoff_factor=backoff, growth_interval=1)
    # Even where somebody has written nonsense into the tensor.
    state = scaling.init()._replace(scale=torch.tensor(start))
    for nonfinite in [*seen, 0.0]:
        state = scaling.observe(state, GradientsSeen(torch.tensor(nonfinite), counts({-40: 3, 3: 1})))
        assert scaling.floor <= state.scale.item() <= scaling.ceiling
        assert math.isfinite(1.0 / state.scale.item())


def test_observe_leaves_the_state_it_was_given() -> None:
    for scaling in SCALES:
        state = scaling.init()
        before = [part.clone() for part in state]
        after(scaling, [True, False], state)
        assert all(torch.equal(part, kept) for part, kept in zip(state, before, strict=True))


@given(
    st.sampled_from(
        [dataclasses.replace(one, growth_interval=3) for one in SCALES if isinstance(one, DynamicLossScale)]
    ),
    st.lists(st.booleans(), max_size=20),
    st.sampled_from([2.0**16, SMALLEST_SCALE, LARGEST_SCALE, math.inf, 0.0]),
)
def test_a_state_that_is_moved_in_place_moves_as_a_new_one_does(
    scaling: LossScaling, steps: list[bool], start: float
) -> None:
    for one in (scaling, StaticLossScale()):
        new = one.init()._replace(scale=torch.tensor(start))
        kept = LossScaleState(*(part.clone() for part in new))
        for overflowed in steps:
            seen = GradientsSeen(BAD if overflowed else GOOD, counts({-27: 1, 0: 1}))
            new = one.observe(new, seen)
            one.observe_(kept, seen, is_good=not overflowed)
            assert [part.item() for part in kept] == [part.item() for part in new]
            assert one.scale(kept) is kept.scale


def test_each_number_of_a_description_is_kept() -> None:
    numbers = {"growth": 3.0, "backoff": 0.25, "interval": 7, "hysteresis": 2, "floor": 0.5, "ceiling": 64.0}
    found = scaling_of(LossScale("dynamic", 8.0, **numbers))  # type: ignore[arg-type]
    assert found == DynamicLossScale(8.0, 0.5, 64.0, 3.0, 0.25, 7, 2)
    assert scaling_of(LossScale("static", 8.0, floor=0.5, ceiling=64.0)) == StaticLossScale(8.0, 0.5, 64.0)
    assert scaling_of(LossScale.parse("none")) is None


def test_the_inverse_of_a_scale_is_rounded_once() -> None:
    for scale in (3.0, 1e-38, 2.0**-126, LARGEST_SCALE):
        held = torch.tensor(scale)
        assert inverse_of(held) == torch.tensor(1 / held.item()) and inverse_of(held).dtype is torch.float32


def test_a_scale_backs_off_to_its_floor_and_no_further() -> None:
    state = after(DynamicLossScale(initial=16.0, floor=1.5), [True] * 9)
    assert state.scale == 1.5
    assert state.stuck == 5  # 16, 8, 4, 2 still fell


def test_a_scale_grows_to_its_ceiling_and_no_further() -> None:
    assert after(DynamicLossScale(initial=2.0**14, ceiling=2.0**15, growth_interval=1), [False] * 4).scale == 2.0**15


def test_a_growth_beyond_fp32_is_not_taken() -> None:
    assert after(DynamicLossScale(initial=1e38, growth_factor=16.0, growth_interval=1), [False]).scale == torch.tensor(
        1e38
    )


@pytest.mark.parametrize(
    ("hysteresis", "steps", "scale"),
    [
        (1, [True], 32768.0),
        (2, [True], 65536.0),
        (2, [True, True], 32768.0),
        (2, [True, False, True], 32768.0),  # counted since the last growth, in a row or not
        (2, [True, True, True], 16384.0),  # and at each one from there on
        (2, [True, False, False, False, True], 131072.0),  # growth starts the count again
    ],
)
def test_hysteresis_tolerates_overflows(hysteresis: int, steps: list[bool], scale: float) -> None:
    assert after(DynamicLossScale(hysteresis=hysteresis, growth_interval=3), steps).scale == scale


def test_torchs_kernel_moves_scales_in_fp32_of_the_plain_rule_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[torch.dtype] = []
    kernel = loss_scale._update_scale_
    monkeypatch.setattr(loss_scale, "_update_scale_", lambda *given: launched.append(given[0].dtype) or kernel(*given))
    for scaling in SCALES:
        state = scaling.init()
        wide = after(scaling, [True], state._replace(scale=state.scale.double()))
        assert wide.scale.dtype is torch.float64
        assert [one.item() for one in wide] == [one.item() for one in after(scaling, [True], state)]
    assert launched == [torch.float32]


def test_the_usual_numbers_are_torchs_but_for_the_bounds() -> None:
    usual = torch.amp.GradScaler("cpu")
    scale = DynamicLossScale()
    assert (scale.growth_factor, scale.backoff_factor, scale.growth_interval, scale.initial, scale.hysteresis) == (
        *(usual.get_growth_factor(), usual.get_backoff_factor(), usual.get_growth_interval(), usual.get_scale(), 1),
    )
    adaptive = AdaptiveLossScale()
    assert (adaptive.target_underflow, adaptive.format, adaptive.headroom) == (1e-3, "fp16", 1)


def test_a_smaller_growth_interval_works_at_once() -> None:
    """torch tests for equality, so that its scale never grows again once the interval is below the count."""
    state = after(DynamicLossScale(growth_interval=100), [False] * 50)
    assert after(DynamicLossScale(growth_interval=10), [False], state).scale == 2.0**17


def test_a_static_scale_stays_and_counts_what_it_skips() -> None:
    state = after(StaticLossScale(128.0), [True, True, False, True, True, True])
    assert (state.scale, state.stuck) == (128.0, 3)


# -- what the exponents say --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "smallest_kept"), [("fp16", -25), ("bf16", -134), ("e5m2", -17), ("e4m3fn", -10)])
def test_a_format_flushes_what_rounds_to_its_zero(name: str, smallest_kept: int) -> None:
    # Half the smallest number itself is a tie and goes to zero; everything above it in its octave rounds up.
    assert flush_field(name) == max(smallest_kept - 1 + 127, 0)
    if smallest_kept > -126 and name == "fp16":
        kept = torch.tensor([1.5, 1.0]) * 2.0**smallest_kept
        assert kept.half().tolist() == [2.0**-24, 0.0]


def test_underflow_is_the_share_of_nonzero_values_that_are_flushed() -> None:
    assert underflow(counts({-30: 1, -26: 2, -25: 4, 0: 5})) == 0.25
    assert underflow(torch.zeros(256, dtype=torch.int64)) == 0.0


@pytest.mark.parametrize(("seen", "share"), [({}, 0.0), ({-26: 1}, 1.0), ({-25: 1}, 0.0), ({-126: 1, 0: 1}, 0.5)])
def test_underflow_of_few_values_is_their_share(seen: dict[int, int], share: float) -> None:
    found = underflow(counts(seen))  # of numbers from 2**-25 on most are kept
    assert found.dtype is torch.float32 and found.shape == () and found.item() == share


@pytest.mark.parametrize(
    ("exponents", "target", "scale"),
    [
        ({-26: 1, 0: 999}, 1e-3, 2.0**16),  # one in a thousand: allowed
        ({-26: 2, 0: 998}, 1e-3, 2.0**17),
        ({-30: 2, 0: 998}, 1e-3, 2.0**21),  # grows by what is needed
        ({-30: 2, 9: 998}, 1e-3, 2.0**21),
        ({-30: 2, 12: 998}, 1e-3, 2.0**18),  # and keeps a power of two to the maximum of fp16
        ({-30: 2, 14: 998}, 1e-3, 2.0**16),
        ({-30: 2, 15: 998}, 1e-3, 2.0**16),
        ({}, 1e-3, 2.0**16),
        ({-26: 1, 0: 10**9}, 0.0, 2.0**17),
    ],
)
def test_an_adaptive_scale_grows_as_far_as_gradients_underflow(
    exponents: dict[int, int], target: float, scale: float
) -> None:
    scaling = AdaptiveLossScale(target_underflow=target)
    state = scaling.observe(scaling.init(), GradientsSeen(GOOD, counts(exponents)))
    assert state.scale == scale


def test_an_adaptive_scale_does_not_grow_by_the_clock() -> None:
    assert after(AdaptiveLossScale(growth_interval=1), [False] * 5).scale == 2.0**16


def test_an_adaptive_scale_waits_after_an_overflow() -> None:
    scaling = AdaptiveLossScale(growth_interval=3)
    state = after(scaling, [True])
    seen = GradientsSeen(GOOD, counts({-27: 1, 0: 1}))
    scales = []
    for _ in range(3):
        state = scaling.observe(state, seen)
        scales.append(state.scale.item())
    assert scales == [2.0**15, 2.0**15, 2.0**17]


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DynamicLossScale(0.0), "initial loss scale cannot be 0.0: allowed is a finite number from the floor"),
        (lambda: DynamicLossScale(math.inf), "initial loss scale cannot be inf"),
        (lambda: StaticLossScale(math.nan), "initial loss scale cannot be nan"),
        (lambda: StaticLossScale(-1.0), "initial loss scale cannot be -1.0"),
        (lambda: StaticLossScale("high"), "initial loss scale cannot be 'high'"),
        (lambda: DynamicLossScale(floor=0.0), "floor=0.0"),
        (lambda: DynamicLossScale(floor=4.0, ceiling=2.0), "floor=4.0 and ceiling=2.0"),
        (lambda: DynamicLossScale(ceiling=math.inf), "ceiling=inf"),
        (lambda: DynamicLossScale(growth_factor=1.0), "growth factor must be > 1.0 and finite, not 1.0"),
        (lambda: DynamicLossScale(growth_factor=math.inf), "growth factor must be > 1.0 and finite, not inf"),
        (lambda: DynamicLossScale(growth_factor="2"), "growth factor must be > 1.0 and finite, not '2'"),  # type: ignore[arg-type]
        (lambda: DynamicLossScale(floor=True), "floor=True"),
        (lambda: DynamicLossScale(backoff_factor=1.0), "backoff factor must be < 1.0 and larger than 0, not 1.0"),
        (lambda: DynamicLossScale(backoff_factor=0.0), "backoff factor must be < 1.0 and larger than 0, not 0.0"),
        (lambda: DynamicLossScale(growth_interval=0), "growth_interval must be a number of steps from 1"),
        (lambda: DynamicLossScale(growth_interval=2**31), "a number of steps from 1 to 2**31 - 1, not 2147483648"),
        (lambda: DynamicLossScale(hysteresis=0), "hysteresis must be a number of steps from 1"),
        (lambda: AdaptiveLossScale(target_underflow=1.0), "target_underflow must be a share"),
        (lambda: AdaptiveLossScale(format="mxfp8"), "not for 'mxfp8', which shares a scale"),
        (lambda: AdaptiveLossScale(format="fp61"), "did you mean fp64, fp16"),
    ],
)
def test_what_cannot_work_is_refused(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidInput) as caught:
        make()
    assert text in str(caught.value)


def test_the_bounds_are_the_normal_fp32_numbers() -> None:
    limits = torch.finfo(torch.float32)
    assert (SMALLEST_SCALE, LARGEST_SCALE) == (limits.tiny, limits.max)
