"""A scaler's arguments, in torch's two spellings and lowp's own, and its attributes as they are saved and loaded."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, cast

import torch
from torch.cpu.amp.grad_scaler import GradScaler as TorchCPUScaler
from torch.cuda.amp.grad_scaler import GradScaler as TorchCUDAScaler

from lowp.compat import accelerator, private
from lowp.distributed import resolve
from lowp.errors import InvalidInput, Misuse, unknown
from lowp.loss_scale import LossScale
from lowp.scaling import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    AdaptiveLossScale,
    DynamicLossScale,
    LossScaleState,
    LossScaling,
    StaticLossScale,
)
from lowp.scaling.loss_scale import scaling_of
from lowp.step.guard import StepGuard
from lowp.step.provenance import Provenance

new_stage = cast(Callable[[], dict[str, Any]], private("torch.amp.grad_scaler._refresh_per_optimizer_state"))

# the entries of torch's state dict
_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_LARGEST_FACTOR = 2.0**32  # by which a loaded state may move a scale at a time
# torch.amp.GradScaler's order; torch.cuda.amp's is the same without the device.
_POSITIONAL = ("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of GradScaler, which documents them."""

    device: str | torch.device | None = None
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    loss_scale: LossScaling | LossScale | float | str | None = None
    dynamic: bool = True
    floor: float = SMALLEST_SCALE
    ceiling: float = LARGEST_SCALE
    hysteresis: int = 1
    target_underflow: float | None = None
    sample_interval: int | None = None
    patience: int = 25
    process_group: Any = "auto"

    @classmethod
    def read(cls, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Options:
        """Read a call in torch.amp's spelling, or in torch.cuda.amp's where the first argument is a number."""
        in_cuda_spelling = bool(arguments) and isinstance(arguments[0], Real) and not isinstance(arguments[0], bool)
        positional = _POSITIONAL[1:] if in_cuda_spelling else _POSITIONAL
        if len(arguments) > len(positional):
            raise TypeError(
                f"GradScaler takes at most {len(positional)} positional arguments here ({', '.join(positional)}), "
                f"not {len(arguments)}; give the others by name"
            )
        given = dict(zip(positional, arguments, strict=False))
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                raise TypeError(unknown("argument of GradScaler", name, cls.__dataclass_fields__))
            if name in given:
                raise TypeError(f"GradScaler got two values for {name!r}, one by position and one by name")
        options = cls(**given, **keywords)
        resolve(options.process_group)
        return options

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Return the signature of GradScaler for help(): torch's arguments, and lowp's as keywords."""
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return inspect.Signature(
            [
                inspect.Parameter(field.name, kinds[field.name in _POSITIONAL], default=field.default)
                for field in dataclasses.fields(cls)
            ]
        )

    def scaling(self) -> LossScaling:
        """Return the loss scale that the arguments describe."""
        asked = self.loss_scale
        bounds = {"floor": self.floor, "ceiling": self.ceiling}
        if isinstance(asked, LossScaling):
            return asked
        if isinstance(asked, LossScale):
            return scaling_of(asked) or StaticLossScale(1.0)
        if isinstance(asked, Real) and not isinstance(asked, bool):
            return StaticLossScale(float(asked), **bounds)
        if asked not in (None, "dynamic", "static"):
            raise InvalidInput(
                f"loss_scale cannot be {asked!r}: allowed are a number (a static scale), 'dynamic', 'static' and an "
                "object such as lowp.scaling.DynamicLossScale(...) or a LossScale, as a preset has"
            )
        if asked == "static" or not self.dynamic:
            return StaticLossScale(self.init_scale, **bounds)
        moves = {name: getattr(self, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
        moves |= {"hysteresis": self.hysteresis, **bounds}
        if self.target_underflow is None:
            return DynamicLossScale(self.init_scale, **moves)
        return AdaptiveLossScale(self.init_scale, **moves, target_underflow=self.target_underflow)

    def device_type(self) -> str:
        """Return the kind of device: the one given, else the accelerator of this machine, else the CPU."""
        if self.device is not None:
            return torch.device(self.device).type
        return accelerator() or "cpu"

    def usable(self, stacklevel: int) -> bool:
        """Return whether the scaler is enabled. Warns as torch does if CUDA is requested but not available."""
        if self.enabled and self.device_type() == "cuda" and not torch.cuda.is_available():
            message = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
            warnings.warn(message, stacklevel=stacklevel)
            return False
        return bool(self.enabled)

    def interval_of(self, scaling: LossScaling) -> int:
        """Return the number of steps between two samples of the exponents. Raises InvalidInput for invalid numbers."""
        interval = self.sample_interval
        if interval is None:
            interval = 10 if isinstance(scaling, AdaptiveLossScale) else 100
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (interval, self.patience))
        if not whole or interval < 0 or self.patience < 1:
            raise InvalidInput(
                f"sample_interval={interval!r} and patience={self.patience!r} are numbers of steps: allowed are 0 "
                "(never) or more for the first and 1 or more for the second"
            )
        return interval


class MissingEntries(InvalidInput, KeyError):
    """A state dict lacks entries. Also a KeyError, since torch raises that."""

    __str__ = Exception.__str__


class OutOfOrder(Misuse, AssertionError):
    """A call lacks an earlier one. Also an AssertionError, since torch raises that."""


def _of_scaling(name: str, still: float) -> property:
    """Return a property for a field of a moving scale; its value is `still` for a scale without that field."""

    def get(self: ScalerState) -> Any:
        return getattr(self._scaling, name, still)

    def put(self: ScalerState, value: Any) -> None:
        if isinstance(self._scaling, DynamicLossScale):
            self._scaling = dataclasses.replace(self._scaling, **{name: value})

    return property(get, put)


class ScalerState(TorchCUDAScaler, TorchCPUScaler):
    """The attributes of a scaler, with torch's names where torch has them, and how they are saved and loaded."""

    def __init__(self, options: Options, enabled: bool) -> None:
        self._scaling = options.scaling()
        self._device = options.device_type()
        self._enabled = enabled
        self._init_scale = self._scaling.initial
        self._init_growth_tracker = 0
        self._init_counters = (0, 0)  # overflows and stuck, see LossScaleState
        # On the device after the first call of scale().
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        self._counters: tuple[torch.Tensor, torch.Tensor] | None = None
        self._steps = 0
        self._patience = options.patience
        self._sample_interval = options.interval_of(self._scaling)
        self._process_group = options.process_group
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Initialise the attributes that are neither checkpointed nor pickled."""
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(new_stage)
        self._stepped: torch.Tensor | bool | None = None
        # by id: a WeakKeyDictionary takes microseconds, which small steps feel
        self._stepped_by: dict[int, tuple[weakref.ref[torch.optim.Optimizer], torch.Tensor | bool]] = {}
        self._losses: list[torch.Tensor] = []
        self._skipped_at_floor: list[bool] = []  # only optimizers whose flag was read
        self._exponents: torch.Tensor | None = None
        self._told: torch.Tensor | None = None  # from add_exponents
        self._underflow: torch.Tensor | None = None
        self._provenance = Provenance()
        self._guard = StepGuard(self._patience)
        self._scaled_since_update = False
        self._inverse: tuple[float, torch.Tensor, torch.Tensor] | None = None  # a scale, its inverse, and 0

    # torch's own methods get and set these three by name.
    _growth_factor = _of_scaling("growth_factor", still=1.0)
    _backoff_factor = _of_scaling("backoff_factor", still=1.0)
    _growth_interval = _of_scaling("growth_interval", still=1)

    def begin_with(self, scale: float) -> None:
        """Use this scale for the first step instead of the initial scale; raises Misuse after `scale()`."""
        if self._scale is not None:
            raise Misuse("begin_with() is for the first step: use update(new_scale) for later steps")
        self._init_scale = self._scaling.check(scale, "the loss scale to begin with")

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise OutOfOrder("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._state("scale")

    def _state(self, what: str) -> LossScaleState:
        scale, good_steps = self._scale, self._growth_tracker
        if scale is None or good_steps is None:
            scale, good_steps = self._check_scale_growth_tracker(what)  # raises
        if self._counters is None:
            overflows, stuck = (torch.full_like(good_steps, count) for count in self._init_counters)
            self._counters = overflows, stuck
        return LossScaleState(scale, good_steps, *self._counters)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and "lowp" with lowp's own counters; {} if disabled. Waits for the device."""
        state: dict[str, Any] = super().state_dict()
        if state:
            overflows, stuck = self._counted()
            state["lowp"] = {"steps": self._steps, "overflows": overflows, "stuck": stuck}
        return state

    def _counted(self) -> tuple[int, int]:
        overflows, stuck = self._counters or self._init_counters
        return int(overflows), int(stuck)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of torch or lowp; raises an error for a scale outside the bounds or a missing entry.

        Nothing is changed if anything is wrong. A static scaler takes the scale and keeps its rule.
        """
        if not self._enabled:
            return
        _check_entries(state_dict)
        scale = self._scaling.check(state_dict["scale"], "the scale of the loaded state")
        scaling = _moved_as(state_dict, self._scaling)
        own = {"steps": 0, "overflows": 0, "stuck": 0, **_checked_counters(state_dict)}
        self._scaling, self._steps = scaling, own["steps"]
        self._init_scale, self._init_growth_tracker = scale, own["_growth_tracker"]
        self._init_counters = own["overflows"], own["stuck"]
        if self._scale is not None:
            values = (scale, own["_growth_tracker"], *self._init_counters)
            for kept, value in zip(self._state("load_state_dict"), values, strict=True):
                kept.fill_(value)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise OutOfOrder(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        blank = object.__new__(ScalerState)
        blank._patience = self._patience
        blank._start_afresh()
        state = {name: value for name, value in self.__dict__.items() if name not in vars(blank)}
        state |= {"_init_scale": self.get_scale() if self._enabled else self._init_scale, "_scale": None}
        state |= {"_init_growth_tracker": self._get_growth_tracker(), "_growth_tracker": None}
        state |= {"_init_counters": self._counted(), "_counters": None, "_patience": self._patience}
        if not isinstance(self._process_group, (str, type(None))):
            state["_process_group"] = "auto"  # a process group cannot be pickled
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_afresh()


def _check_entries(state: Mapping[str, Any]) -> None:
    """Raise InvalidInput for what is no scaler's state, MissingEntries for missing entries, Misuse for an empty one."""
    if not isinstance(state, Mapping):
        raise InvalidInput(
            f"the state of a scaler must be a dictionary from state_dict(), not a {type(state).__name__}"
        )
    if len(state) == 0:
        raise Misuse(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
            "Load nothing, or start with enabled=False"
        )
    missing = [name for name in _ENTRIES if name not in state]
    if missing:
        raise MissingEntries(f"a scaler's state needs {', '.join(_ENTRIES)}; missing: {', '.join(missing)}")


def _moved_as(state: Mapping[str, Any], scaling: LossScaling) -> LossScaling:
    """Return a loss scale that moves by the factors of a state; a static one, or one saved by a static one, as it is.

    Raises InvalidInput for factors that no scale has.
    """
    if not isinstance(scaling, DynamicLossScale) or state["growth_factor"] == 1.0:
        return scaling
    moved = dataclasses.replace(scaling, **{name: state[name] for name in _ENTRIES[1:4]})
    for name in _ENTRIES[1:3]:
        if state[name] != getattr(scaling, name) and not 1 / _LARGEST_FACTOR <= state[name] <= _LARGEST_FACTOR:
            raise InvalidInput(
                f"the loaded state has {name}={state[name]!r}, by which one step moves the scale beyond fp16's "
                f"range: allowed is a factor up to {_LARGEST_FACTOR:,.0f} either way, or what this scaler has"
            )
    return moved


def _checked_counters(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of steps in a state. Raises InvalidInput for others."""
    own = state.get("lowp", {})
    if not isinstance(own, Mapping):
        raise InvalidInput(f"the entry 'lowp' of the loaded state must be a dictionary of counters, not {own!r}")
    counters = {"_growth_tracker": state["_growth_tracker"], **own}
    for name, value in counters.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise InvalidInput(f"the loaded state has {name}={value!r}; give a number of steps, 0 or more")
    return counters
