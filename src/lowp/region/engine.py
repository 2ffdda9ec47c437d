"""The function mode that runs ops by a policy's rules.

torch.autocast is switched on around the mode. So `torch.is_autocast_enabled` and `torch.get_autocast_dtype` return the
region's values, and a user's nested ``torch.autocast(enabled=False)`` can be detected. Every op runs shielded from it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence, Set
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from lowp.compat import COMPILES_REGIONS, constant_when_compiled, plain_when_run, private, refuse_compiled_region
from lowp.errors import Unavailable
from lowp.exponents import DelayedScales, SharedExponents, SiteScales, SiteWriter, Spots, Tell
from lowp.kernels.numbers.philox import draw_seed
from lowp.kernels.tracing import functorch_is_active, is_jit_tracing
from lowp.nested import tensors_of
from lowp.ops import table
from lowp.ops.call import Call
from lowp.ops.generic import has_irregular
from lowp.ops.observed import observed
from lowp.ops.observing import Observer, Watch, everywhere
from lowp.ops.rows import Row
from lowp.ops.shields import DisableAutocast, without_autocast
from lowp.policy import Rule
from lowp.region.handover import ELSEWHERE, device_of
from lowp.region.paths import ModulePath
from lowp.region.rulebook import Plan, Rulebook
from lowp.region.weights import WRITES_UNSEEN, WeightCasts

_of_thread = cast(Any, private("torch._guards._TLS"))  # holds a tracing context while a compiler's backend runs
_checkpoint_operator = private("torch._higher_order_ops.wrap.tag_activation_checkpoint")
_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16)'|not implemented for (Half|BFloat16)")
_MIXED = re.compile(r"mixed dtype|expected scalar type")
_NOT_THE_SAME = re.compile(r"the same dtype|should be the same")
# torch's original functions: the replacements in `region.entries` cost more
_is_enabled, _get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_PLAIN = (Tensor, nn.Parameter)
_ROUNDED = {torch.float32, torch.float16, torch.bfloat16}
_DispatchMode = cast(type, private("torch.utils._python_dispatch.TorchDispatchMode"))
_current_autograd_node = cast(Callable[[], object], private("torch._C._current_autograd_node"))
_CONTRACTIONS = frozenset(
    """
    mm bmm addmm baddbmm addbmm addmv mv addr dot vdot _addmm_activation convolution _convolution
    convolution_overrideable cudnn_convolution cudnn_convolution_transpose mkldnn_convolution conv_tbc _trilinear
    _scaled_mm _grouped_mm _int_mm _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _native_multi_head_attention _transformer_encoder_layer_fwd
    _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn miopen_rnn linear
    """.split()
)
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
        scales: DelayedScales | None = None,
    ) -> None:
        super().__init__()
        self.rulebook, self.weights, self.path, self.observers = rulebook, weights, path, observers
        self.traced = rulebook.traced
        self.is_strict = rulebook.strict
        self.devices, self.dtype, self.has_host = tuple(devices), dtype, "cpu" in devices
        self.is_on_host = self.devices == ("cpu",)
        self.active = True
        self.look: Callable[[], None] | None = None  # parks or resumes entries of generators and coroutines
        self.running: tuple[str, bool] | None = None  # the op that runs, and whether a rule matches it
        self.plans = rulebook.plans(path.current)
        self.passing = rulebook.passing
        self.uses_paths = rulebook.uses_paths
        self.exponents, self.scales = exponents, scales
        of_sites = exponents or scales
        self.spots = None if of_sites is None else Spots(of_sites.passes)  # position in the step of the next write
        self.resting: FrameType | None = None  # the frame of an optimizer's step that runs

    def __enter__(self) -> Engine:
        if not hasattr(_of_thread, "tracing_context"):
            _of_thread.tracing_context = None  # as torch leaves it; to ask for what is missing takes five times as long
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def move(self) -> None:
        """Use the plans of the present path; none in compiled code, for which a new path is one to compile again."""
        self.plans = {} if is_compiling() else self.rulebook.plans(self.path.current)

    @plain_when_run
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call by the rule that matches it."""
        kwargs = kwargs or {}
        if is_compiling():
            return self._compiled(func, args, kwargs)
        if self.look is not None:
            self.look()
        elif func in self.passing:
            return func(*args, **kwargs)
        if func in WRITES_UNSEEN:
            self.weights.note(func, args)
        # a compiler's backend runs traced code, which already contains the casts
        if not self.active or getattr(_of_thread, "tracing_context", None) is not None:
            return func(*args, **kwargs)
        if self.path.running and self.path.settle(sys._getframe()):
            self.move()
        plan = self.plans.get(func, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = self._found(func)
        if self.is_on_host:  # as `is_ours`, which asks each device
            is_ours = _is_enabled("cpu") and _get_dtype("cpu") is self.dtype
        else:
            is_ours = self.is_ours(args, kwargs)
        if plan is None or not is_ours:
            return func(*args, **kwargs)
        if not (self.observers or everywhere or self.resting):
            for way in plan.ways:
                result = way(self, plan, func, args, kwargs)
                if result is not ELSEWHERE:
                    self.rulebook.has_rounded |= plan.rounds
                    return result
        with DisableAutocast():
            return self._run(plan, func, args, kwargs)

    def _compiled(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call that torch.compile traces."""
        if not COMPILES_REGIONS:
            refuse_compiled_region()
        ours = self.active and self.is_ours(args, kwargs)
        return self.apply(func, args, kwargs) if ours else func(*args, **kwargs)

    def _found(self, func: Callable[..., Any]) -> Plan | None:
        """Return the plan of a function that is called for the first time at this path."""
        self.move()  # compiled code leaves the plans of its place unknown
        plan = self.plans[func] if func in self.plans else self.rulebook.find(func, self.path.current)
        if plan is None and func not in WRITES_UNSEEN:
            self.passing.add(func)
        return plan

    def apply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call in this region, also while torch.compile traces it."""
        if not is_compiling():
            plan = self.rulebook.find(func, self.path.current)
            return func(*args, **kwargs) if plan is None else self._run(plan, func, args, kwargs)
        if func is torch.Tensor.backward:  # which torch.compile follows where it is called as a method
            return args[0].backward(*args[1:], **kwargs)
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

    def _run(self, plan: Plan, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call by its runner, in a shield from torch.autocast."""
        if self.resting is not None and self.rests():
            return func(*args, **kwargs)
        if plan.suspends:
            return self._suspended(func, args, kwargs)
        row, rule = plan.row, plan.rule
        if plan.looks and is_jit_tracing():
            raise Unavailable(_untraceable(row.name))
        if plan.rounds:
            self.rulebook.note(row.name, _first_tensor((args, kwargs)))
        watch = self._watch(row) if self.observers or everywhere else None
        call = Call(row.name, func, args, kwargs, rule or _NO_RULE, self.weights, draw_seed, None, watch)
        before, self.running = self.running, (row.name, rule is not None)
        try:
            run = plan.run if plan.at_site is None else self._placed(plan, call)
            if run is not None:
                return run(call)
            return func(*args, **kwargs) if watch is None else observed(row, call)
        except RuntimeError as error:
            return self.without_kernel(error, func, args, kwargs)
        finally:
            self.running = before

    def _placed(self, plan: Plan, call: Call) -> Callable[[Call], Any] | None:
        """Return the runner of a call whose results, or scales, have a site, which the call is given, if it has one."""
        spots, given = self.spots, (*call.args, *call.kwargs.values()) if call.kwargs else call.args
        if spots is None or functorch_is_active() or has_irregular(given):
            return plan.run
        if plan.is_delayed and self.scales is not None:
            spot = spots.spot(self.path.outermost, self.path.current, call.op)
            call.scales = SiteScales(self.scales, spot, spots.training)
        else:
            call.writer = self.writer(call.op, call.rule, None if call.watch is None else call.watch.at_site)
        return plan.at_site

    def _watch(self, row: Row) -> Watch | None:
        """Return the object that passes an op's tensors to observers; None in torch.func: its tensors have no data."""
        if functorch_is_active():
            return None
        return Watch((self.observers, everywhere), self.path.current, row.name, row.op_class)

    def writer(self, op: str, rule: Rule, tell: Tell | None = None) -> SiteWriter:
        """Return the site writer of an op under a rule at the present position of the step."""
        assert self.exponents is not None and self.spots is not None and rule.output is not None
        path, spots = self.path, self.spots
        running = path.running
        where = (path._outermost(), running[-1].path) if running and path._outermost is not None else (None, "")
        trail = spots.trail
        training = torch.is_grad_enabled() or (trail is not None and trail.training)  # `Spots.training`, in no function
        return SiteWriter(self.exponents, rule.output, spots.spot(*where, op), training, trail, tell)

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

    def without_kernel(
        self, error: RuntimeError, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op in fp32, and plan it so, if the error says that the device has no 16-bit kernel; else raise it."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if is_jit_tracing():
            raise Unavailable(_untraceable(table.name_of(func))) from error
        text, dtypes = str(error), {x.dtype for x in tensors if x.is_floating_point()}
        if is_same := bool(_NOT_THE_SAME.search(text)):  # tensors of integers count, too
            dtypes = {x.dtype for x in tensors}
        if len(dtypes) > 1 and (dtypes - _ROUNDED if is_same else _MIXED.search(text)):
            raise RuntimeError(f"{error}. {_mixed(table.name_of(func), dtypes)}") from error
        if not tensors or not _NO_KERNEL.search(text):
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
        first = _first_tensor((args, kwargs))
        if first is None or (found := first.device.type) not in self.devices:
            return False
        return _is_enabled(found) and _get_dtype(found) is self.dtype


class Audit(_DispatchMode):  # type: ignore[misc, valid-type]
    """Finds contractions that reach the dispatcher without having passed a rule. Costs about 20 us per op."""

    lets_kernels_read = True  # for lowp.kernels.tracing: what a rule has run need not be seen

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a contraction that no rule has run. Ops of a backward pass are exempt: the forward pass decided them."""
        name = str(func).partition(".")[2].partition(".")[0]
        if name in _CONTRACTIONS and self.engine.active and _current_autograd_node() is None:
            running = self.engine.running
            if running is None and self.engine.is_ours(args, kwargs):
                self._miss(name)
            elif running is not None and not running[1]:
                self._miss(running[0])
        return func(*args, **(kwargs or {}))

    def _miss(self, name: str) -> None:
        path = self.engine.path.current
        self.engine.rulebook.missed(f"{name} in {path}" if path else name)


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


def _mixed(op: str, dtypes: Set[torch.dtype]) -> str:
    """Return what is said of an op whose operands have several dtypes: one that no rule rounds, or one of products."""
    why = (
        "products in this region write another dtype than the model is stored in. Convert the model with float(), or "
        "store it in few bits by lowp.Precision(...).prepare(model, optimizer)"
    )
    if dtypes - _ROUNDED:
        why = (
            "as under torch.autocast, a region rounds float32, float16 and bfloat16 and leaves other dtypes to torch, "
            "which multiplies tensors of one dtype: convert the others with float()"
        )
    return f"{op} was given {' and '.join(sorted(str(one).removeprefix('torch.') for one in dtypes))}: {why}"


def _first_tensor(given: Any) -> Tensor | None:
    return next(iter(tensors_of(given)), None)
