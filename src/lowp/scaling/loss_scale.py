"""How a loss scale moves: static, dynamic (torch's rule), and one that follows the exponents of the gradients.

Here alone is decided what the next scale is. `lowp.loss_scale.LossScale` describes one in a preset or a policy file,
and `lowp.GradScaler` asks this one at every `update`.
A scale always stays a finite fp32 number between its floor and its ceiling. torch's own can underflow to 0, after which
the next finite gradients become 0 * inf = NaN and are written into the weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple, cast

import torch

from lowp.compat import private, widest_float
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, parse
from lowp.presets import LossScale
from lowp.scaling.powers import times

# The smallest normal and the largest fp32 number. The reciprocal of a smaller scale, by which gradients are multiplied,
# could be infinite.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127

_FP32_BIAS = 127
_update_scale_ = cast(Callable[..., torch.Tensor], private("torch._amp_update_scale_"))


class InvalidLossScale(InvalidInput, AssertionError):
    """A loss scale, or a parameter that moves it, is invalid. Also an AssertionError, since torch raises that."""


class LossScaleState(NamedTuple):
    """What a loss scale remembers: 0-dimensional tensors on one device."""

    scale: torch.Tensor  # fp32
    good_steps: torch.Tensor  # int32: steps with finite gradients since the scale last moved or a step was skipped
    overflows: torch.Tensor  # int32: skipped steps since the scale last grew, for the hysteresis
    stuck: torch.Tensor  # int32: skipped steps in a row while the scale was at its floor


class GradientsSeen(NamedTuple):
    """What one step saw of the gradients, as tensors."""

    nonfinite: torch.Tensor  # 0-dimensional; larger than 0 if any gradient was infinite or NaN
    exponents: torch.Tensor | None = None  # int64[256]: finite nonzero SCALED gradients by biased fp32 exponent


@dataclass(frozen=True)
class LossScaling:
    """A loss scale between a floor and a ceiling; subclasses define how it changes. `LossScale` describes one.

    `initial`, `floor` and `ceiling` are finite fp32 numbers, 2**-126 or larger; otherwise InvalidLossScale is raised.
    """

    initial: float = 2.0**16
    floor: float = SMALLEST_SCALE
    ceiling: float = LARGEST_SCALE

    def __post_init__(self) -> None:
        bounds = (self.floor, self.ceiling)
        if not all(map(_is_real, bounds)) or not SMALLEST_SCALE <= self.floor <= self.ceiling <= LARGEST_SCALE:
            raise InvalidLossScale(
                f"a loss scale cannot move between floor={self.floor!r} and ceiling={self.ceiling!r}: allowed are "
                f"{SMALLEST_SCALE:.8g} <= floor <= ceiling <= {LARGEST_SCALE:.8g} (the normal fp32 numbers)"
            )
        # convert Python numbers to float: torch accepts no integers beyond 64 bits
        object.__setattr__(self, "initial", self.check(self.initial, "the initial loss scale"))
        for name in ("floor", "ceiling"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def check(self, value: object, what: str) -> float:
        """Return `value` as a float if the scale may take it; raise InvalidLossScale, naming `what` it was, if not."""
        number = _as_float(value)
        if not self.floor <= number <= self.ceiling:
            raise InvalidLossScale(
                f"{what} cannot be {value!r}: allowed is a finite number from the floor {self.floor:.8g} to the "
                f"ceiling {self.ceiling:.8g}. Powers of two are exact; 65536 is common for fp16"
            )
        return number

    def init(self, device: torch.device | str | None = None) -> LossScaleState:
        """Return the state at the start: `initial`, and nothing seen."""
        scale = torch.full((), self.initial, dtype=torch.float32, device=device)
        return LossScaleState(scale, *(torch.zeros((), dtype=torch.int32, device=device) for _ in range(3)))

    def observe(self, state: LossScaleState, seen: GradientsSeen) -> LossScaleState:
        """Return the state after one step; the scale stays, only the counters move."""
        bad, overflows, stuck = self._count(state, seen)
        return LossScaleState(self._bounded(state.scale), (state.good_steps + 1) * ~bad, overflows, stuck)

    def observe_(self, state: LossScaleState, seen: GradientsSeen, is_good: bool) -> None:
        """Do `observe` in place. `is_good`: the host knows that the step was; most of those are only counted there."""
        if is_good and self._only_counts(state):
            state.good_steps.fill_(state.good_steps.item() + 1)  # several times as fast as add_
            if state.stuck.item():
                state.stuck.zero_()
            return
        for kept, new in zip(state, self.observe(state, seen), strict=True):
            kept.copy_(new.expand_as(kept))

    def _only_counts(self, state: LossScaleState) -> bool:
        """Whether `observe` of a good step does no more than to count it; waits for the device."""
        return self.floor <= state.scale.item() <= self.ceiling

    def scale(self, state: LossScaleState) -> torch.Tensor:
        """Return the scale, a 0-dimensional fp32 tensor."""
        return state.scale

    def _count(self, state: LossScaleState, seen: GradientsSeen) -> tuple[torch.Tensor, ...]:
        bad = (seen.nonfinite > 0).reshape(())
        return bad, state.overflows + bad, (state.stuck + 1) * (bad & self._at_floor(state))

    def _at_floor(self, state: LossScaleState) -> torch.Tensor:
        """Return whether no smaller scale is left to try."""
        return state.scale <= self.floor

    def _bounded(self, scale: torch.Tensor) -> torch.Tensor:
        """Clamp a scale to its bounds. NaN, which compares false with everything, becomes the floor."""
        return scale.nan_to_num(nan=self.floor).clamp(self.floor, self.ceiling)


@dataclass(frozen=True)
class StaticLossScale(LossScaling):
    """A constant loss scale; steps with non-finite gradients are skipped as well."""

    def _at_floor(self, state: LossScaleState) -> torch.Tensor:
        return torch.ones_like(state.scale, dtype=torch.bool)


@dataclass(frozen=True)
class DynamicLossScale(LossScaling):
    """Grow after `growth_interval` good steps in a row, back off when a step overflows: torch's rule, with bounds.

    `hysteresis`: the scale backs off at that many overflows since it last grew, and at each one from there on; 1 backs
    off at once, as torch does. A growth beyond fp32 is not taken. Micikevicius et al. 2018, arXiv 1710.03740, sec. 3.2;
    hysteresis as in Megatron-LM.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_real(self.growth_factor) or not 1.0 < self.growth_factor < math.inf:
            raise InvalidLossScale(
                f"The growth factor must be > 1.0 and finite, not {self.growth_factor!r}; 2.0 is usual"
            )
        if not _is_real(self.backoff_factor) or not 0.0 < self.backoff_factor < 1.0:
            raise InvalidLossScale(
                f"The backoff factor must be < 1.0 and larger than 0, not {self.backoff_factor!r}; 0.5 is usual"
            )
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) < 2**31:
                raise InvalidLossScale(f"{name} must be a number of steps from 1 to 2**31 - 1, not {value!r}")

    def observe(self, state: LossScaleState, seen: GradientsSeen) -> LossScaleState:
        """Return the state after one step."""
        if self._is_torchs and state.scale.dtype is torch.float32:
            return self._observed_by_torch(state, seen)
        bad, overflows, stuck = self._count(state, seen)
        good_steps = (state.good_steps + 1) * ~bad
        grows, grown = self._growth(state, good_steps, overflows, seen)
        grows = grows & ~bad
        lowered = _product(state.scale, self.backoff_factor)
        scale = torch.where(bad & (overflows >= self.hysteresis), lowered, torch.where(grows, grown, state.scale))
        return LossScaleState(
            self._bounded(scale), torch.where(grows, 0, good_steps), torch.where(grows, 0, overflows), stuck
        )

    @property
    def _is_torchs(self) -> bool:
        """Whether torch's kernel has this rule, but for the bounds: one launch on a device in place of thirty."""
        return self.hysteresis == 1

    def _observed_by_torch(self, state: LossScaleState, seen: GradientsSeen) -> LossScaleState:
        bad, overflows, stuck = self._count(state, seen)
        scale, good_steps = state.scale.clone(), state.good_steps.clamp(max=self.growth_interval - 1)
        found = seen.nonfinite.reshape(()).float()
        _update_scale_(scale, good_steps, found, self.growth_factor, self.backoff_factor, self.growth_interval)
        stays = (good_steps > 0) | bad  # a growth is not kept as a good step
        return LossScaleState(self._bounded(scale), good_steps, overflows * stays, stuck)

    def _only_counts(self, state: LossScaleState) -> bool:
        return super()._only_counts(state) and state.good_steps.item() + 1 < self.growth_interval

    def _growth(
        self, state: LossScaleState, good_steps: torch.Tensor, overflows: torch.Tensor, seen: GradientsSeen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether the scale may grow, and the new scale. As in torch, it never becomes infinite."""
        grown = _product(state.scale, self.growth_factor)
        return good_steps >= self.growth_interval, torch.where(torch.isfinite(grown), grown, state.scale)


@dataclass(frozen=True)
class AdaptiveLossScale(DynamicLossScale):
    """A dynamic loss scale that grows when gradients underflow, by as much as needed, instead of at fixed intervals.

    When exponents are seen and more than `target_underflow` (a share, 0 to 1) of the nonzero gradients would be flushed
    to zero by `format`, the scale grows by the smallest power of two that brings the share down to the target, leaving
    `headroom` powers of two between the largest gradient and the format's maximum. After an overflow it waits for
    `growth_interval` good steps before it grows again; it backs off as DynamicLossScale does.
    """

    target_underflow: float = 1e-3
    format: str = "fp16"
    headroom: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.target_underflow < 1.0:
            raise InvalidLossScale(
                f"target_underflow must be a share of the gradients from 0 to below 1, not {self.target_underflow!r}; "
                "1e-3 allows one in a thousand to be flushed"
            )
        flush_field(self.format)

    _is_torchs = False

    def _only_counts(self, state: LossScaleState) -> bool:
        return False  # exponents may let the scale grow at any step

    def _growth(
        self, state: LossScaleState, good_steps: torch.Tensor, overflows: torch.Tensor, seen: GradientsSeen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if seen.exponents is None:
            return torch.zeros_like(state.scale, dtype=torch.bool), state.scale
        number_format = _float_format(self.format)
        counts = seen.exponents.to(state.scale.device)
        below = counts.cumsum(0)
        # Growing by 2**k moves every field up by k, so that values below field `flush` - k are flushed instead of those
        # below `flush`. The share of flushed values falls with k, so the number of shares above the target is the
        # smallest sufficient k.
        flush = flush_field(self.format)
        needed = (below[: flush + 1] > self.target_underflow * below[-1]).sum()
        fields = torch.arange(counts.numel(), device=counts.device)
        largest = torch.where(counts > 0, fields, 0).amax()
        room = (number_format.max_exponent + _FP32_BIAS - self.headroom - largest).clamp(min=0)
        power = torch.minimum(needed, room)
        grown = times(state.scale, power)  # exactly; a device may compute ldexp by a power that is rounded
        quiet = (overflows == 0) | (good_steps >= self.growth_interval)
        return quiet & (power > 0), torch.where(torch.isfinite(grown), grown, state.scale)


def scaling_of(described: LossScale) -> LossScaling | None:
    """Return the loss scaling that a precision describes; None if it scales nothing."""
    if described.kind == "none":
        return None
    bounds = {"floor": described.floor, "ceiling": described.ceiling}
    if described.kind == "static":
        return StaticLossScale(described.initial, **bounds)
    return DynamicLossScale(
        described.initial,
        growth_factor=described.growth,
        backoff_factor=described.backoff,
        growth_interval=described.interval,
        hysteresis=described.hysteresis,
        **bounds,
    )


def flush_field(name: str) -> int:
    """Return the largest biased fp32 exponent whose numbers a format all rounds to zero.

    With subnormals these are the numbers below half the smallest one; without, the numbers below the smallest normal.
    """
    number_format = _float_format(name)
    smallest = number_format.smallest
    flushed_below = smallest / 2 if number_format.subnormals else smallest
    return max(math.frexp(flushed_below)[1] - 2 + _FP32_BIAS, 0)


def underflow(exponents: torch.Tensor, name: str = "fp16") -> torch.Tensor:
    """Return the share of the nonzero gradients that a format flushes: 0-dimensional fp32; 0 without gradients."""
    flushed = exponents[: flush_field(name) + 1].sum()
    return (flushed / exponents.sum().clamp(min=1)).to(torch.float32)


def _as_float(value: object) -> float:
    """Return a real number as a float, infinite if it is too large; NaN for anything else."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.inf


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _float_format(name: str) -> FloatFormat:
    number_format = parse(name)
    if not isinstance(number_format, FloatFormat):
        raise InvalidInput(
            f"underflow can be measured for a floating-point format such as fp16 or e5m2, not for {name!r}, "
            "which shares a scale"
        )
    return number_format


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale in fp32, rounded once, as torch's kernel does: twice, by way of fp64, is the same."""
    return scale.reciprocal().float()


def _product(scale: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in fp64 and round once, as torch's kernel does."""
    return (scale.to(widest_float(scale.device)) * factor).float()
