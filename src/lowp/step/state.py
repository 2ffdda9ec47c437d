"""The attributes of a scaler and how they are saved: the loss scale's state, its checkpoint and its pickle."""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.cpu.amp.grad_scaler import GradScaler as TorchCPUScaler
from torch.cuda.amp.grad_scaler import GradScaler as TorchCUDAScaler

from lowp.compat import private
from lowp.errors import Misuse
from lowp.scaling import DynamicLossScale, LossScaleState
from lowp.step.guard import StepGuard
from lowp.step.options import Options, read_state
from lowp.step.provenance import Provenance

new_stage = cast(Callable[[], dict[str, Any]], private("torch.amp.grad_scaler._refresh_per_optimizer_state"))

_NOT_PICKLED = (
    "_per_optimizer_states",
    "_stepped",
    "_stepped_by",
    "_losses",
    "_seen",
    "_agreed_with",
    "_skipped_at_floor",
    "_exponents",
    "_told",
    "_underflow",
    "_provenance",
    "_guard",
    "_scaled_since_update",
    "_inverse",
)


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
        self._init_overflows = 0
        self._init_stuck = 0
        # On the device after the first call of scale().
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        self._overflows: torch.Tensor | None = None
        self._stuck: torch.Tensor | None = None
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
        self._overflows = torch.full((), self._init_overflows, dtype=torch.int32, device=dev)
        self._stuck = torch.full((), self._init_stuck, dtype=torch.int32, device=dev)

    def _state(self, what: str) -> LossScaleState:
        scale, good_steps, overflows, stuck = self._scale, self._growth_tracker, self._overflows, self._stuck
        if scale is None or good_steps is None:
            scale, good_steps = self._check_scale_growth_tracker(what)  # raises
        if overflows is None or stuck is None:  # torch's two attributes were set by hand
            overflows = self._overflows = torch.full_like(good_steps, self._init_overflows)
            stuck = self._stuck = torch.full_like(good_steps, self._init_stuck)
        return LossScaleState(scale, good_steps, overflows, stuck)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries and "lowp" with lowp's own counters; {} if disabled. Waits for the device."""
        state: dict[str, Any] = super().state_dict()
        if state:
            state["lowp"] = {"steps": self._steps, **self._own_counters()}
        return state

    def _own_counters(self) -> dict[str, int]:
        overflows = self._init_overflows if self._overflows is None else int(self._overflows.item())
        stuck = self._init_stuck if self._stuck is None else int(self._stuck.item())
        return {"overflows": overflows, "stuck": stuck}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of torch or lowp; raises an error for a scale outside the bounds or a missing entry.

        Nothing is changed if anything is wrong. A static scaler takes the scale and keeps its rule.
        """
        if not self._enabled:
            return
        loaded = read_state(state_dict, self._scaling)
        self._scaling = loaded.scaling
        self._steps = loaded.steps
        self._init_scale, self._init_growth_tracker = loaded.scale, loaded.good_steps
        self._init_overflows, self._init_stuck = loaded.overflows, loaded.stuck
        if self._scale is not None:
            values = (loaded.scale, loaded.good_steps, loaded.overflows, loaded.stuck)
            for kept, value in zip(self._state("load_state_dict"), values, strict=True):
                kept.fill_(value)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise OutOfOrder(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        own = self._own_counters()
        state = {**self.__dict__}
        state |= {"_init_scale": self.get_scale() if self._enabled else self._init_scale}
        state |= {"_init_growth_tracker": self._get_growth_tracker()}
        state |= {"_init_overflows": own["overflows"], "_init_stuck": own["stuck"]}
        state |= dict.fromkeys(("_scale", "_growth_tracker", "_overflows", "_stuck"))
        if not isinstance(self._process_group, (str, type(None))):
            state["_process_group"] = "auto"  # a process group cannot be pickled
        for name in _NOT_PICKLED:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_afresh()
