"""The function mode that runs ops by a policy's rules.

torch.autocast is switched on around the mode. So `torch.is_autocast_enabled` and `torch.get_autocast_dtype` return the
region's values, and a user's nested ``torch.autocast(enabled=False)`` can be detected. Every op runs shielded from it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from lowp.compat import COMPILES_REGIONS, constant_when_compiled, is_transformed, private, refuse_compiled_region
from lowp.errors import Unavailable
from lowp.exponents import SharedExponents, SiteWriter, Tell
from lowp.ops import table
from lowp.ops.call import Call
from lowp.ops.casting import draw_seed, functorch_is_active, is_jit_tracing, without_autocast
from lowp.ops.generic import has_irregular
from lowp.ops.observed import observed
from lowp.ops.observing import Observer, Watch, everywhere
from lowp.ops.table import Row
from lowp.policy import Rule
from lowp.region.handover import ELSEWHERE, HandOver, device_of, handed_over, on_host
from lowp.region.paths import ModulePath
from lowp.region.rulebook import Plan, Rulebook
from lowp.region.weights import WRITES_UNSEEN, WeightCasts

__all__ = ["Engine"]

_DisableAutocast = cast(Callable[[], AbstractContextManager[None]], private("torch._C._DisableAutocast"))
_of_thread = cast(Any, private("torch._guards._TLS"))  # holds a tracing context while a compiler's backend runs
_checkpoint_operator = private("torch._higher_order_ops.wrap.tag_activation_checkpoint")
_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16)'|not implemented for (Half|BFloat16)")
# torch's original functions: the replacements in `region.entries` cost more
_is_enabled, _get_dtype, _set_enabled = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.set_autocast_enabled
_PLAIN = (Tensor, torch.nn.Parameter)
_NO_RULE = Rule()
_UNKNOWN = Plan(Row("", ""), None, None)


class Engine(TorchFunctionMode):
    """One entry of a region in one thread. `active` is False while an inner region replaces it."""

    def __init__(
        self,
        rulebook: Rulebook,
        weights: WeightCasts,
        path: ModulePath,
        devices: Sequence[str],
        dtype: torch.dtype,
        observers: Sequence[Observer] = (),
        exponents: SharedExponents | None = None,
    ) -> None:
        super().__init__()
        self.rulebook, self.weights, self.path, self.observers = rulebook, weights, path, observers
        self.traced = rulebook.traced
        self.devices, self.dtype, self.has_host = tuple(devices), dtype, "cpu" in devices
        self.is_on_host = self.devices == ("cpu",)
        self.active = True
        self.look: Callable[[], None] | None = None  # parks or resumes entries of generators and coroutines
        self.running: tuple[str, bool] | None = None  # the op that runs, and whether a rule matches it
        self.plans = rulebook.plans(path.current)
        self.passing = rulebook.passing
        self.uses_paths = rulebook.uses_paths
        self.exponents = exponents
        self.spots = None if exponents is None else exponents.spots()  # position in the step of the next write
        self.resting: FrameType | None = None  # the frame of an optimizer's step that runs

    def __enter__(self) -> Engine:
        if not hasattr(_of_thread, "tracing_context"):
            _of_thread.tracing_context = None  # as torch leaves it; to ask for what is missing takes five times as long
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def move(self) -> None:
        """Use the plans of the present module path."""
        self.plans = self.rulebook.plans(self.path.current)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call by the rule that matches it."""
        kwargs = kwargs or {}
        if is_compiling():
            if not COMPILES_REGIONS:
                refuse_compiled_region()
            ours = self.active and self.is_ours(args, kwargs)
            return self.apply(func, args, kwargs) if ours else func(*args, **kwargs)
        if func in self.passing and self.look is None:
            return func(*args, **kwargs)
        if func in WRITES_UNSEEN:
            self.weights.note(func, args)
        if self.look is not None:
            self.look()
        # a compiler's backend runs traced code, which already contains the casts
        if not self.active or getattr(_of_thread, "tracing_context", None) is not None:
            return func(*args, **kwargs)
        if self.path.running and self.path.settle(sys._getframe()):
            self.move()
        plan = self.plans.get(func, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = self.rulebook.find(func, self.path.current)
            if plan is None and func not in WRITES_UNSEEN:
                self.passing.add(func)
        if plan is None or not self.is_ours(args, kwargs):
            return func(*args, **kwargs)
        quick = plan.first
        if quick is not None and self.resting is None and not (self.observers or everywhere) and self._is_quick(plan):
            if self.is_on_host:  # on a machine without other devices this is `_DisableAutocast`, with less overhead
                try:
                    _set_enabled("cpu", False)
                    result = quick(func, args, kwargs, self)
                finally:
                    _set_enabled("cpu", True)
            else:
                with _DisableAutocast():
                    result = quick(func, args, kwargs, self)
            if result is not None:
                if plan.rounds:
                    self.rulebook.has_rounded = True
                return result
        if self.resting is not None and self.rests():
            with _DisableAutocast():
                return func(*args, **kwargs)
        if plan.suspends:
            with _DisableAutocast():
                return self._suspended(func, args, kwargs)
        if not (self.observers or everywhere):
            if plan.is_plain and not self.rulebook.strict:
                with _DisableAutocast():
                    try:
                        return func(*args, **kwargs)
                    except RuntimeError as error:
                        return self._without_kernel(error, func, args, kwargs)
            way, quick = plan.way, plan.quick
            if way is not None and way.is_usual:
                if not self.rulebook.strict:
                    try:
                        result = on_host(way, func, args, kwargs, self.weights)
                    except RuntimeError as error:
                        with _DisableAutocast():
                            return self._without_kernel(error, func, args, kwargs)
                    if result is not ELSEWHERE:
                        if plan.rounds:
                            self.rulebook.has_rounded = True
                        return result
                if device_of(way, args, kwargs) is not None:
                    return self._handed_over(plan, way, func, args, kwargs)
            if quick is not None and self._is_quick(plan):
                with _DisableAutocast():
                    result = quick(func, args, kwargs, self)
                if result is not None:
                    if plan.rounds:
                        self.rulebook.has_rounded = True
                    return result
            if way is not None and not way.is_usual and device_of(way, args, kwargs) is not None:
                return self._handed_over(plan, way, func, args, kwargs)
        with _DisableAutocast():
            return self._run(plan, func, args, kwargs)

    def _is_quick(self, plan: Plan) -> bool:
        """Whether the arguments of a call alone decide how it runs."""
        return not (self.rulebook.strict or is_transformed() or (plan.looks and is_jit_tracing()))

    def apply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call in this region, also while torch.compile traces it."""
        if not is_compiling():
            plan = self.rulebook.find(func, self.path.current)
            if plan is None or plan.suspends:
                return func(*args, **kwargs) if plan is None else self._suspended(func, args, kwargs)
            return self._run(plan, func, args, kwargs)
        planned: Plan | None = getattr(self.traced.compiled, _name_compiled(self.traced, func, self.path.current))
        if func is _checkpoint_operator:
            raise Unavailable(
                "torch.compile does not follow a region into a checkpoint: compile the checkpointed function, "
                "or omit fullgraph=True, so that the checkpoint runs outside the compiled graph"
            )
        if planned is None:
            return func(*args, **kwargs)
        if planned.way is not None and (device := device_of(planned.way, args, kwargs)) is not None:
            with torch.autocast(device, self.dtype, cache_enabled=False):
                return func(*args, **kwargs)
        with without_autocast():
            if planned.run is None:
                return func(*args, **kwargs)
            return planned.run(Call(planned.row.name, func, args, kwargs, planned.rule or _NO_RULE))

    def _handed_over(
        self, plan: Plan, way: HandOver, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call under torch.autocast, which is switched on around the region."""
        if plan.rounds:
            self.rulebook.has_rounded = True
        before, self.running = self.running, (plan.row.name, plan.rule is not None)
        try:
            return handed_over(way, func, args, kwargs, self.weights)
        except RuntimeError as error:
            with _DisableAutocast():
                return self._without_kernel(error, func, args, kwargs)
        finally:
            self.running = before

    def _run(self, plan: Plan, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row, rule, run, at_site, rounds, looks, *_ = plan
        if looks and is_jit_tracing():
            raise Unavailable(_untraceable(row.name))
        if rounds:
            self.rulebook.note(row.name, _first_tensor(args) if args else _first_tensor(list(kwargs.values())))
        before, self.running = self.running, (row.name, rule is not None)
        watch = self._watch(row) if self.observers or everywhere else None
        try:
            predicts = at_site is not None and self.exponents is not None and not functorch_is_active()
            if predicts and at_site is not None and not has_irregular((args, kwargs)):
                return at_site(self._call_at_site(row, func, args, kwargs, rule or _NO_RULE, watch))
            if run is not None:
                return run(Call(row.name, func, args, kwargs, rule or _NO_RULE, self.weights, draw_seed, None, watch))
            if watch is not None:
                return observed(row, Call(row.name, func, args, kwargs, _NO_RULE, watch=watch))
            return func(*args, **kwargs)
        except RuntimeError as error:
            return self._without_kernel(error, func, args, kwargs)
        finally:
            self.running = before

    def _watch(self, row: Row) -> Watch | None:
        """Return the object that passes an op's tensors to observers; None in torch.func: its tensors have no data."""
        if functorch_is_active():
            return None
        return Watch((self.observers, everywhere), self.path.current, row.name, row.op_class)

    def _call_at_site(
        self,
        row: Row,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rule: Rule,
        watch: Watch | None,
    ) -> Call:
        """Return the call with the site writer of this op at the present position of the step."""
        writer = self.writer(row.name, rule, None if watch is None else watch.at_site)
        return Call(row.name, func, args, kwargs, rule, self.weights, draw_seed, writer, watch)

    def writer(self, op: str, rule: Rule, tell: Tell | None = None) -> SiteWriter:
        """Return the site writer of an op under a rule at the present position of the step."""
        assert self.exponents is not None and self.spots is not None and rule.output is not None
        where = self.path.outermost, self.path.current, op
        return self.spots.writer(self.exponents, rule.output, where, tell)

    def rests(self) -> bool:
        """Whether an optimizer's step runs, to which no rule applies. A step that raised counts as ended."""
        if self.resting is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.resting:
            frame = frame.f_back
        if frame is None:
            self.resting = None
        return frame is not None

    def _suspended(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a backward pass without rules: the forward pass decided how its ops run."""
        self.active = False
        try:
            return func(*args, **kwargs)
        finally:
            self.active = True

    def _without_kernel(
        self, error: RuntimeError, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op in fp32, and plan it so, if the error says that the device has no 16-bit kernel; else raise it."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if is_jit_tracing():
            raise Unavailable(_untraceable(table.name_of(func))) from error
        if not tensors or not _NO_KERNEL.search(str(error)):
            raise error
        plan = self.rulebook.widen(func, self.path.current, tensors[0].device.type)
        assert plan.run is not None and plan.rule is not None
        return plan.run(Call(plan.row.name, func, args, kwargs, plan.rule, self.weights, draw_seed))

    def is_ours(self, args: Any = (), kwargs: Any = None) -> bool:
        """Whether torch.autocast still has this region's setting, at least on the device of the call."""
        if args and type(args[0]) in _PLAIN and args[0].is_cpu and self.has_host:
            return _is_enabled("cpu") and _get_dtype("cpu") is self.dtype
        for device in self.devices:
            if not (_is_enabled(device) and _get_dtype(device) is self.dtype):
                break
        else:
            return True
        first = _first_tensor((args, list((kwargs or {}).values())))
        if first is None or (found := first.device.type) not in self.devices:
            return False
        return _is_enabled(found) and _get_dtype(found) is self.dtype


@constant_when_compiled
def _name_compiled(rulebook: Rulebook, function: Callable[..., Any], path: str) -> str:
    """Return the attribute name of a plan for compiled code, so that torch.compile treats the lookup as a constant."""
    name = rulebook.names.setdefault((function, path), f"plan_{len(rulebook.names)}")
    if not hasattr(rulebook.compiled, name):
        setattr(rulebook.compiled, name, rulebook.find(function, path))
    return name


def _untraceable(op: str) -> str:
    return (
        f"torch.jit.trace cannot record {op} as this region runs it: scales, seeds and shapes of one run would be kept "
        "for all. Trace the model outside the region, or compile it with torch.compile within"
    )


def _first_tensor(values: Any) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_tensor(value)) is not None:
            return found
    return None
