"""The profiler: records some modules of a training in some of its steps, within a budget of time."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowp.errors import Misuse, NotWritten
from lowp.hooks import Uncopied
from lowp.kernels.tracing import functorch_is_active, is_jit_tracing
from lowp.numerics.divergence import Fault, Guard
from lowp.numerics.models import Cycle, Models
from lowp.numerics.modes import Seam, hear_backward, in_backward
from lowp.numerics.record import Part, Record, Recording, merged_over_ranks
from lowp.numerics.schedule import Budget, Schedule
from lowp.numerics.tape import beside
from lowp.numerics.watching import StepWatch
from lowp.numerics.windows import WatchedScale, initial_scale
from lowp.ops.observing import Observation, observe
from lowp.region import entries
from lowp.step import GradScaler


class Profiler:
    """Record the training of a model, or of several by name: see `lowp.profile`; the result is `record`.

    A context manager around the training loop. A step ends with `optimizer.step()`, of several optimizers when each has
    stepped. `out` is a file to which each recorded step is written, and the whole record at the end.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | None = None,
        *,
        precision: Any = None,
        scaler: Any = None,
        out: str | Path | None = None,
        max_overhead: str | float | None = "auto",
        divergence: bool = True,
        title: str = "",
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"a profile needs a torch optimizer, not {type(optimizer).__name__}")
        self.models, self.optimizer = Models(model), optimizer
        self.budget, self.step = Budget.parse(max_overhead), 0
        self._scale = WatchedScale(scaler if scaler is not None else getattr(precision, "scaler", None))
        self._precision, self._title, self._divergence = precision, title, divergence
        self.schedule = Schedule(self.models, self.budget, divergence)
        self._kept = Recording(self._described(), None if out is None else Path(out))
        self._watch: StepWatch | None = None
        self._seam = Seam()
        self._guard = Guard(self.models, self._seam, divergence)
        self._cycle = Cycle(self.models)
        self._ends: list[Callable[[], None]] = []
        self._entered = self._observes = False
        self._look = ExitStack()  # what ends with a look
        self._hooks: list[Any] = []  # around each call of the models, and before each step of an optimizer
        self._alone: Optimizer | None = None  # the only one that steps, while nothing is kept of its steps
        self._guarded = 0  # steps

    # -- beginning and end --------------------------------------------------------------------------------------------
    def __enter__(self) -> Profiler:
        if self._entered:
            raise Misuse("a profile can be entered once: create a new one for another run")
        self._entered = True
        self._kept.begin(self.budget.share)
        self._seam.begin()
        self.schedule.start()
        owner = self.optimizer
        register = register_optimizer_step_post_hook if owner is None else owner.register_step_post_hook
        self._ends.append(register(self._after_step).remove)
        self._ends.append(hear_backward(self._backward))
        self._prepare()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._stop()
        if self._kept.path is not None and (kind is None or self._kept.part.tensors):
            try:
                self.save(self._kept.path)
            except NotWritten as refused:  # what follows, such as saving the model, runs all the same
                warnings.warn(f"{refused}; the profile is in memory: write it elsewhere by save()", stacklevel=2)
        if kind is None:
            self._require_steps()

    def end(self) -> None:
        """Stop, and write what this rank has recorded, even if that is nothing, without waiting for other ranks."""
        self._stop()
        if self._kept.path is not None:
            self.record.save(self._kept.path)

    def _require_steps(self) -> None:
        """Raise if no step ran; print the reason if all were skipped, or the budget too small to record any module."""
        if not self.step and not self._kept.part.faults:
            self.record.require_content()
        elif self.record.is_empty:
            print(f"lowp profile: {self.record.why_empty}", file=sys.stderr)

    def _stop(self) -> None:
        for end in self._ends:
            end()
        self._hook(False)
        self._drop_watch()
        self._guard.tape.forget()
        self.budget.end()
        self._kept.close()

    def add(self, model: nn.Module, args: Any = None) -> None:
        """Record one more model from this point on; `args` are the arguments of its call if it is running already.

        With two models or more the paths of modules begin with the name of their model.
        """
        renamed = self.models.add(model)
        if renamed:
            self._rename(renamed)
        self._kept.describe(self._described(), renamed)
        self.schedule.take_turns()
        self._hook(False)
        self._hook(True)
        if self._watch is not None:
            self._watch.follow(None if args is None else model)
        if args is not None:
            self._before_forward(model, args, {})

    def begin_within(self, model: nn.Module, args: Any) -> None:
        """Take a call of a model that runs already for the first; not for one to run again, as arguments are lost."""
        if not self.schedule.beside:
            self._before_forward(model, args, {})

    @property
    def is_replaying(self) -> bool:
        """Whether a step is being run again to find what made it non-finite."""
        return self._guard.is_replaying

    def _hook(self, on: bool) -> None:
        """Have the hooks that a busy step needs, or remove them."""
        if not on:
            for handle in self._hooks:
                handle.remove()
            self._hooks.clear()
        elif not self._hooks:
            for root in self.models.roots.values():
                before, after = Uncopied(self._before_forward), Uncopied(self._after_forward)
                self._hooks.append(root.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._hooks.append(root.register_forward_hook(after, always_call=True))
            owner = self.optimizer
            register = register_optimizer_step_pre_hook if owner is None else owner.register_step_pre_hook
            self._hooks.append(register(self._before_step))

    def _rename(self, first: str) -> None:
        """Continue with the new names of modules; a recording of some of them in progress is discarded."""
        if self._watch is not None and self._watch.is_whole:
            self._watch.rename(first)
            self.schedule.rename(True)
        else:
            self._drop_watch()
            self.schedule.rename(False)

    def _described(self) -> dict[str, Any]:
        header = self.models.header(self._precision)
        return {"title": self._title or header["model"], **header}

    @property
    def record(self) -> Record:
        """The record of what was seen so far."""
        sampling = {
            **self.budget.account(),
            "steps": self.step,
            **self.schedule.account(),
            "unguarded": self.step - self._guarded if self._divergence else self.step,
        }
        return Record(dict(self._kept.header), self._kept.part, sampling, complete=self.budget.ended is not None)

    def save(self, path: str | Path) -> None:
        """Write the record as JSON. With several ranks all must call this, and the first writes the merged record."""
        record = merged_over_ranks(self.record)
        if record is not None:
            record.save(path)

    # -- the forward pass ---------------------------------------------------------------------------------------------
    def _is_idle(self, module: nn.Module) -> bool:
        """Whether nothing is to be recorded for this call of a model."""
        if self._guard.is_replaying or in_backward() or is_jit_tracing() or torch.compiler.is_exporting():
            return True
        if module.training and torch.is_grad_enabled():
            return False
        return self._cycle.trains(module) or not self.step  # a model that is never trained is seen beside the others

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        started = time.perf_counter()
        if not self._is_idle(module):
            if self._scale.is_used and self._scale.has_skipped():
                self._skip_step()
            if self.schedule.modules and self._watch is None:
                self._begin_watch(module)
            if self.schedule.guards and torch.is_grad_enabled() and not functorch_is_active():
                self._guard.unguarded = self.step - self._guarded
                self._guard.tape.begin(module, args, kwargs)
        self._spent(started)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.schedule.guards:
            started = time.perf_counter()
            self._guard.tape.open(module, output)
            self._spent(started)

    def _spent(self, started: float) -> None:
        self.schedule.spent_since(started, self._watch is not None)

    def _begin_watch(self, running: nn.Module) -> None:
        schedule, entry, is_whole = self.schedule, entries.current(), self.schedule.is_whole
        if self.models.renew():
            schedule.take_turns()
        region = entry.region if entry is not None and entry.engine is not None else None
        if schedule.beside and region is not None and region.exponents is not None:
            schedule.never_beside()  # a shared exponent follows every tensor that is written
        if region is not None and not schedule.beside and not self._observes:
            schedule.in_region = True  # it must know before it is entered that it is observed
            schedule.modules = []
            return
        modules = None if is_whole else schedule.modules
        self._watch = StepWatch(self.step, self._seam, self.models, self._scale.value, modules, schedule.beside)
        if not schedule.beside and "torch._dynamo" in sys.modules:  # hooks must be neither compiled nor guarded
            self._look.enter_context(torch.compiler.set_stance("force_eager"))
        self._watch.follow(running)

    def _prepare(self) -> None:
        """Prepare for the next step, or leave it unrecorded."""
        schedule = self.schedule
        schedule.decide(self.step)
        if schedule.modules and schedule.in_region and not schedule.beside and not self._observes:
            self._observes = True
            self._look.callback(observe(self._observed))
        busy = schedule.is_busy or self._scale.is_used
        self._hook(busy)
        self._alone = None if busy else self._cycle.alone

    def _observed(self, seen: Observation) -> None:
        if self._watch is not None and not self._guard.is_replaying:
            self._watch.observed(seen)

    def _drop_watch(self) -> None:
        self.schedule.modules = []
        if self._watch is not None:
            self._watch.pause()
            self._watch = None
        self._look.close()
        self._observes = False

    # -- the backward pass --------------------------------------------------------------------------------------------
    def _backward(self, run: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Make a backward pass of the training, in which no calls are seen."""
        is_recorded, watch = self._guard.tape.rest(), self._watch
        if not is_recorded and watch is None:
            run(loss, *args, **kwargs)
            return
        if watch is not None:
            watch.begin_backward()
        self._saw_loss(loss, is_recorded)
        run(loss, *args, **kwargs)
        if watch is not None and not watch.beside:
            watch.resume()
        self._after_backward(args[0] if args else kwargs.get("gradient"))

    def _saw_loss(self, loss: Tensor, is_recorded: bool) -> None:
        """Note a loss whose backward pass begins; `is_recorded`: how it was computed is on the tape."""
        started = time.perf_counter()
        scale = self._scale.begin_backward()
        seen = self._guard.current(self.step)
        seen.scale = scale if self._scale.is_used else None
        if loss.numel() == 1:
            seen.loss = float(loss.detach()) / scale
            if is_recorded:
                self._keep_fault(self._guard.saw_loss(loss, seen, scale))
        self._spent(started)

    def _keep_fault(self, fault: Fault | None) -> None:
        if fault is not None:
            self._kept.add(Part(faults=[fault.document()]))

    def _after_backward(self, gradient: Tensor | None) -> None:
        """Run a compiled step once more, as it was written, where it is looked at."""
        watch, tape = self._watch, self._guard.tape
        if watch is None or not watch.beside:
            return
        started = time.perf_counter()
        watch.pause()
        try:
            with self._guard.replaying(), beside(tape, self.models):
                watch.look_again(tape, gradient)
        except Exception as error:  # of the model's own code, which need not run twice: the training goes on
            self.schedule.failed(f"{type(error).__name__}: {error}".splitlines()[0][:200])
        watch.follow()
        self._spent(started)

    def _skip_step(self) -> None:
        """End a step that a loss scaler has skipped: its optimizer was not called."""
        seen = self._guard.current(self.step)
        seen.skipped = True
        self._kept.part.add(Part(steps=[seen]))
        self._end_step()

    # -- the optimizer's step -----------------------------------------------------------------------------------------
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch is None and not self.schedule.guards:
            return
        started = time.perf_counter()
        parameters = self._cycle.parameters(optimizer)
        if parameters:
            if self._watch is not None:
                self._watch.pause()  # before what the guard computes
            if self.schedule.guards:
                seen = self._guard.current(self.step)
                self._keep_fault(self._guard.before_step([one for _, one in parameters], seen, self._scale.value()))
            if self._watch is not None:
                self._scale.feed(self._watch.exponents())
                self._watch.before_step(parameters)
        self._spent(started)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        started = time.perf_counter()
        if optimizer is self._alone and self.schedule.rests(self.step):
            self.step += 1
            self.schedule.pass_by(started)
            return
        parameters = self._cycle.parameters(optimizer)
        if not parameters:
            return
        self._scale.stepped()
        if self.schedule.guards:
            self._guard.tape.forget()
        if self._watch is not None:
            self._watch.after_step(parameters)
        if self._cycle.ends_with(optimizer):
            self._spent(started)
            self._end_step()
        else:
            if self._watch is not None:
                self._watch.follow()
            self._spent(started)

    def grad_scaler(self, device: str | None = None, target_underflow: float = 1e-3) -> GradScaler:
        """A scaler that begins where this profile says and grows when more than this share of gradients is lost.

        Where a budget left modules out, whose gradients may be larger, it begins at 2^16, as torch's does, or below.
        Raises InvalidInput for an empty profile, for one without gradients, and where no loss scale fits all layers.
        """
        scale = initial_scale(self.record.require_content())
        return GradScaler(device, init_scale=scale, target_underflow=target_underflow)

    def _end_step(self) -> None:
        """Keep the data of a step, and count its time."""
        started = time.perf_counter()
        watch, looked = self._watch, self.schedule.modules
        if watch is not None and not watch.is_complete:
            self.schedule.failed()
            self._drop_watch()
            watch = None
        if watch is not None:
            seen = self._guard.current(self.step)
            part = watch.finish()
            seen.sampled = seen.is_finite or not self._kept.part.tensors
            if not seen.sampled:  # a training that has diverged says nothing of the formats
                part = Part(prints=part.prints)
            part.steps = [replace(seen)]
            self._kept.add(part)
            self._drop_watch()
        elif self._scale.is_used:
            self._kept.add_scale(self._guard.current(self.step))
        self.budget.spent(self._seam.take_seconds() + time.perf_counter() - started, watch is not None)
        if watch is not None:
            self.budget.spent(watch.seconds, True)
            self.schedule.end_look(looked, watch.beside)
        else:
            self.schedule.end(self.schedule.guards)
        self.step += 1
        self._guarded += self.schedule.guards
        started = time.perf_counter()
        if not self.schedule.modules:
            self._prepare()
        self.budget.spent(time.perf_counter() - started, watch is not None)
