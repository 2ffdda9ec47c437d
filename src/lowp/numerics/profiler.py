"""The profiler: it watches a training from outside, a few steps in full and the others hardly at all."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowp import distributed
from lowp.compat import unwrapped
from lowp.errors import InvalidInput, Misuse
from lowp.grad_scaler import GradScaler
from lowp.numerics.advice import window_of
from lowp.numerics.divergence import Fault
from lowp.numerics.guard import Guard
from lowp.numerics.identity import header_of
from lowp.numerics.modes import Paths, depth, in_backward, put_on, take_off
from lowp.numerics.record import Journal, Part, Record, StepSeen
from lowp.numerics.sampling import Budget, parse_share
from lowp.numerics.watching import Watch
from lowp.ops.observing import Observation, observe

__all__ = ["Profiler"]

_TYPICAL = 20  # steps whose time says what a step takes


class Profiler:
    """Watch the training of a model; what was seen is in `record` afterwards.

    Used as a context manager around the training loop. Steps end with `optimizer.step()`. `precision` or `scaler` is
    what scales the loss, so that gradients are recorded as they are without it. `out` is a file that gets a line a
    step and is the whole record at the end. `max_overhead` is the share of time that may be added, None for no limit;
    `divergence=False` leaves out the search for what made a loss or a gradient infinite or NaN.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        precision: Any = None,
        scaler: Any = None,
        out: str | Path | None = None,
        max_overhead: str | float | None = "3%",
        divergence: bool = True,
        title: str = "",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"a profile needs a torch module, not {type(model).__name__}")
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise InvalidInput(
                "the model was compiled in place by model.compile(), within which nothing can be watched: profile it "
                "before that, or compile it by torch.compile(model) and give what that returns"
            )
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"a profile needs a torch optimizer, not {type(optimizer).__name__}")
        self.model, self.optimizer = model, optimizer
        self.budget = Budget(parse_share(max_overhead))
        self.step = 0
        self._scaler = scaler if scaler is not None else getattr(precision, "scaler", None)
        self._divergence = divergence
        self._inner = unwrapped(model)
        self._named = {id(one): name for name, one in self._inner.named_parameters()}
        self._paths = Paths(model)
        self._header = {"title": title or type(self._inner).__name__, **header_of(self._inner, precision)}
        self._out = None if out is None else Path(out)
        self._journal: Journal | None = None
        self._part = Part()
        self._watch: Watch | None = None
        self._guard = Guard(self._paths, self._named, self._saw_loss, self._looking_away)
        self._times: deque[float] = deque(maxlen=_TYPICAL)
        self._ends: list[Callable[[], None]] = []
        self._place = 0
        self._entered = False
        self._eager: Any = None
        self._begun = self._own_before = 0.0
        self._scale_before: float | None = None
        self._next = False
        self._end_observing: Callable[[], None] = lambda: None

    # -- beginning and end --------------------------------------------------------------------------------------------
    def __enter__(self) -> Profiler:
        if self._entered:
            raise Misuse("a profile can be entered once: create a new one for another run")
        self._entered = True
        if self._out is not None:
            self._journal = Journal(self._out, {**self._header, "max_overhead": self.budget.share})
        self.budget.started = time.perf_counter()
        self._place = depth()
        hooks: list[Any] = [
            self.model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
        ]
        if self.optimizer is not None:
            hooks.append(self.optimizer.register_step_pre_hook(self._before_step))
            hooks.append(self.optimizer.register_step_post_hook(self._after_step))
        else:
            hooks.append(register_optimizer_step_pre_hook(self._before_step))
            hooks.append(register_optimizer_step_post_hook(self._after_step))
        self._ends = [hook.remove for hook in hooks]
        self._prepare()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._stop()
        if self._journal is not None and (kind is None or self._part.tensors):
            self.save(self._journal.path)
        if kind is None:
            self.record.require_content()

    def end(self) -> None:
        """End as the context does, but write what this rank alone has seen: others may have ended before."""
        self._stop()
        if self._journal is not None:
            self.record.save(self._journal.path)

    def _stop(self) -> None:
        for end in self._ends:
            end()
        self._drop_watch()
        self._guard.end()
        self.budget.end()
        if self._journal is not None:
            self._journal.close()

    def begin_within(self, module: nn.Module, args: Any) -> None:
        """Take a call of the model that runs already for the first."""
        self._before_forward(module, args, {})

    @property
    def record(self) -> Record:
        """What was seen so far."""
        budget = self.budget
        sampling = {
            "max_overhead": budget.share,
            "overhead": budget.overhead,
            "own_seconds": budget.own,
            "every_step_seconds": budget.always,
            "total_seconds": budget.total,
            "steps": self.step,
            "sampled": budget.taken,
            "unguarded": self._guard.unguarded,
        }
        return Record(dict(self._header), self._part, sampling, complete=self.budget.ended is not None)

    def save(self, path: str | Path) -> None:
        """Write the record as JSON; of several ranks, which must all call this, the first writes what all have seen."""
        record = self.record
        if distributed.has_other_ranks():
            others = distributed.gather((self._header["fingerprint"], self._part.document()), distributed.world())
            if distributed.rank():
                return
            for fingerprint, document in others[1:]:
                record = record.merge(Record({"fingerprint": fingerprint}, Part.read(document)))
        record.save(path)

    # -- the hooks ----------------------------------------------------------------------------------------------------
    @contextmanager
    def _own_time(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.budget.spent(time.perf_counter() - started, self._watch is not None)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._guard.is_replaying or not self._inner.training or not torch.is_grad_enabled() or in_backward():
            return
        with self._own_time():
            self._note_skipped()
            if self._watch is None and self._next:
                self._begin_watch()
            if self._divergence and self._can_afford_guard():
                self._guard.begin(module, args, kwargs)
            else:
                self._guard.rest()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self._guard.is_replaying or in_backward()) and self._inner.training and torch.is_grad_enabled():
            self._guard.open(module, output, self._place)

    def _begin_watch(self) -> None:
        self._watch = Watch(self.step, self._paths, self._inner, self._scale)
        self._watch.on_backward = self._saw_loss
        if _uses_compiler():
            self._eager = torch.compiler.set_stance("force_eager")
            self._eager.__enter__()
        self._watch.follow()
        put_on(self._watch, self._place)

    def _prepare(self) -> None:
        """Decide whether the next step is looked at: regions of lowp's must know before they are entered."""
        self._next = self.budget.wants(self.step)
        if self._next:
            self._end_observing = observe(self._observed)

    def _observed(self, seen: Observation) -> None:
        if self._watch is not None and not self._guard.is_replaying:
            self._watch.observed(seen)

    def _drop_watch(self) -> None:
        self._next = False
        self._end_observing()
        if self._watch is not None:
            self._watch.stop()
            take_off(self._watch)
            self._watch = None
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    def _scale(self) -> float:
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        return float(scaler.get_scale())

    def _saw_loss(self, loss: Tensor) -> None:
        """Note a loss whose backward pass begins."""
        scale = self._scale()
        if self._scaler is not None:
            self._scale_before = scale
        seen = self._guard.current(self.step)
        seen.scale = scale if self._scaler is not None else None
        if loss.numel() == 1:
            seen.loss = float(loss.detach()) / scale
            self._keep(self._guard.saw_loss(loss, seen, scale))

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        """Take the watch off while the guard runs the step again."""
        watch = self._watch
        taken = watch is not None and take_off(watch)
        try:
            yield
        finally:
            if taken:
                put_on(watch, self._place)

    def _keep(self, fault: Fault | None) -> None:
        if fault is not None:
            self._part.faults.append(fault.document())
            if self._journal is not None:
                self._journal.add(Part(faults=[fault.document()]))

    def _note_skipped(self) -> None:
        """End a step that a loss scaler has skipped: its optimizer was not called."""
        scaler, before = self._scaler, self._scale_before
        if scaler is None or before is None:
            return
        now = float(scaler.get_scale())
        self._scale_before = None
        if now < before:
            seen = self._guard.current(self.step)
            seen.skipped = True
            self._part.add(Part(steps=[seen]))
            self._end_step()

    def _parameters(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        found = [one for group in optimizer.param_groups for one in group["params"]]
        return [(self._named[id(one)], one) for one in found if id(one) in self._named]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = self._parameters(optimizer)
        if not parameters:
            return
        with self._own_time():
            seen = self._guard.current(self.step)
            self._guard.close()
            if self._watch is not None:
                self._watch.stop()
                take_off(self._watch)
            self._keep(self._guard.before_step([one for _, one in parameters], seen, self._scale()))
            if self._watch is not None:
                self._feed(self._watch.exponents())
                self._watch.before_step(parameters)

    def _feed(self, counts: NDArray[np.int64]) -> None:
        """Tell a scaler of lowp's of the gradients of activations, which underflow as those of weights do."""
        feed = getattr(self._scaler, "add_exponents", None)
        if feed is not None:
            power = round(math.log2(self._scale()))
            scaled = np.zeros(256, np.int64)
            places = np.flatnonzero(counts)
            np.add.at(scaled, np.clip(places + power, 0, 254), counts[places])
            feed(torch.from_numpy(scaled))

    def grad_scaler(self, device: str | None = None, target_underflow: float = 1e-3) -> GradScaler:
        """A scaler that begins where this profile says and grows when more than this share of gradients is lost.

        Raises InvalidInput for an empty profile, or one in which no loss scale fits all layers.
        """
        window, outside = window_of(self.record.require_content())
        if window.is_empty:
            raise InvalidInput(f"no loss scale fits fp16 here: {outside}")
        return GradScaler(device, init_scale=2.0**window.recommended, target_underflow=target_underflow)

    def _can_afford_guard(self) -> bool:
        """Whether this step is guarded, or rests where guarding every step would cost more than half of the budget."""
        budget = self.budget
        if budget.share is None or self._watch is not None or budget.always <= budget.share / 2 * budget.training:
            return True
        self._guard.unguarded += 1
        return False

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = self._parameters(optimizer)
        if not parameters:
            return
        with self._own_time():
            self._scale_before = None
            self._guard.forget()
            if self._watch is not None:
                self._watch.after_step(parameters)
            self._end_step()

    def _end_step(self) -> None:
        """Keep what a step has seen, and count its time."""
        seen = self._guard.current(self.step)
        watch = self._watch
        if watch is not None:
            part = watch.finish()
            seen.sampled = True
            part.steps = [StepSeen(**vars(seen))]
            self._part.add(part)
            if self._journal is not None:
                self._journal.add(part)
            self._drop_watch()
        elif self._has_changed(seen):
            self._part.add(Part(steps=[StepSeen(**vars(seen))]))
        self._clock(watch is not None)
        self.step += 1
        if watch is not None or not self._next:
            self._prepare()

    def _has_changed(self, seen: StepSeen) -> bool:
        """Whether a step that was not looked at is kept: the scale was another one."""
        before = self._part.steps[-1] if self._part.steps else None
        return seen.scale is not None and (before is None or before.scale != seen.scale)

    def _clock(self, sampled: bool) -> None:
        """Count what a step took longer than those that were not looked at: hooks and modes cost time around them."""
        now = time.perf_counter()
        took, self._begun = now - self._begun, now
        own, self._own_before = self.budget.own - self._own_before, self.budget.own
        if not sampled:
            self._times.append(took)
        else:
            hidden = took - own - statistics.median(self._times) if self._times else 0.0
            if hidden > 0:
                self.budget.spent(min(hidden, took - own), True)
                self._own_before = self.budget.own
            self.budget.took()


def _uses_compiler() -> bool:
    """Whether torch.compile has been used in this process: loading it would take seconds."""
    return "torch._dynamo" in sys.modules
