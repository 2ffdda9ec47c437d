"""The monitor: looks at as many steps of a training as 2 % of its time allow, and raises alarms."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowp import distributed
from lowp.compat import adds_up, is_compiled, norms, unwrapped
from lowp.errors import InvalidInput
from lowp.hooks import Uncopied
from lowp.monitoring import places
from lowp.monitoring.alarms import Alarm, Alarms, TrainingAlarm
from lowp.monitoring.log import JsonLines
from lowp.monitoring.look import Look
from lowp.monitoring.losses import Losses
from lowp.monitoring.ranks import RankCheck
from lowp.monitoring.seen import Sight
from lowp.monitoring.sinks import Sink, record_of, sinks_of
from lowp.monitoring.state import RunState
from lowp.numerics.models import Cycle, Models
from lowp.numerics.modes import numbers_of
from lowp.numerics.sampling import Budget

_SHARE, _ALLOWANCE = 0.02, 0.5  # of the time, and seconds, of which the first steps are looked at
_BEGINNING, _FIRST, _EACH = 64, 4, 3  # steps that the allowance is for: the first four, and each third
_IDLE = 7e-6  # seconds that a step takes which is not looked at
_MOST_PASSES = 32  # backward passes after which no step is waited for if the loss scale falls

Hook = TypeVar("Hook", bound=Callable[..., Any])
OnAlarm = Literal["warn", "raise"] | Callable[[Alarm], object]


def _harmless(hook: Hook) -> Hook:
    """Let an error of the monitor itself end the monitor and not the training; what `on_alarm` raises passes."""

    @wraps(hook)
    def guarded(self: Monitor, *given: Any) -> None:
        try:
            hook(self, *given)
        except Exception as error:
            if self._is_telling:
                raise
            self._fail(error)

    return cast(Hook, guarded)


class Monitor:
    """Watch a training and warn of what spoils it: ``monitor = lowp.Monitor(model, optimizer)`` before the loop.

    `model` is a model as it is called (compiled, in DistributedDataParallel, sharded by fully_shard), or a dictionary
    of several by name; one that is named "ema", or an AveragedModel, is watched as an average. `optimizer` is the one
    that trains it, a list of several, or None for all that step its parameters. Make the monitor after models,
    optimizers and checkpoints are ready; it works in fp32, under torch.autocast and in lowp's precisions.

    * scaler, precision: what scales the loss; found at the first step otherwise.
    * sinks: where the numbers of each look go, on rank 0: paths of JSONL files (see `lowp watch`), functions of one
      dictionary, objects with `add_scalar` (SummaryWriter) or `log` (a run of W&B, its module).
    * on_alarm: ``"warn"`` prints one line on standard error, ``"raise"`` raises TrainingAlarm in the optimizer's step;
      a function is called with the Alarm. Alarms are also kept in `alarms`.
    * patience: in how many looks in a row most kinds of alarms must hold.
    * max_overhead: the share of the time that looks may take, 0.02 or ``"2%"``; None looks at every step. Of the first
      64 steps some are looked at in any case, for at most half a second together.

    An error of the monitor, or of a sink, ends it with a line on standard error, which `failure` keeps; the training
    goes on. Nothing waits for a device: numbers of a GPU are judged when they have arrived, some steps later. `close`
    ends the monitor, as does the end of a ``with`` block. Raises TypeError or InvalidInput for anything else.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        scaler: Any = None,
        precision: Any = None,
        sinks: Sequence[Sink] | Sink = (),
        on_alarm: OnAlarm = "warn",
        patience: int = 3,
        max_overhead: str | float | None = _SHARE,
    ) -> None:
        if not callable(on_alarm) and on_alarm not in ("warn", "raise"):
            raise InvalidInput(f"on_alarm={on_alarm!r} is not valid: give 'warn', 'raise' or a function of an Alarm")
        if type(patience) is not int or patience < 1:
            raise InvalidInput(f"patience={patience!r} is not valid: give a number of looks, 1 or more")
        self.models, self.alarms, self.step = Models(model, in_place=True), list[Alarm](), 0
        self.budget = Budget.parse(max_overhead)
        self.budget.allowance = _ALLOWANCE
        self.failure: str | None = None
        self._is_telling = False
        self._on_alarm, self._judge = on_alarm, Alarms(patience)
        given = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for one in given:
            if not isinstance(one, Optimizer):
                raise TypeError(f"a monitor needs a torch optimizer, not {type(one).__name__}")
        self._state = RunState(self.models, scaler, precision, given)
        self._cycle, self._ranks = Cycle(self.models), RankCheck(self.models)
        self._alone: Optimizer | None = None
        self._is_alone = len(given) == 1  # whether all gradients are of one optimizer
        self._sinks = sinks_of(sinks, self.models, precision) if distributed.rank() == 0 else []
        self._look: Look | None = None
        self._look_at = 0  # the next step that is looked at
        self._cost = 1e-3  # seconds that a look takes
        self._seconds = 0.0  # of the look that is taken
        self._looked = -1
        self._handles: list[Any] = []
        self._waiting: deque[tuple[Look, Sight]] = deque()
        self._losses = Losses(self.models)
        self._compared: list[tuple[str, Tensor]] = []
        self._passes, self._added = 0, True  # backward passes since the last step
        self._probe: tuple[str, nn.Parameter] | None = None  # a parameter that tells of the gradients between passes
        self._had = False  # whether it had one after the latest pass
        self._apart: dict[str, tuple[int, float]] = {}
        after = Uncopied(self._after_step)
        register = [register_optimizer_step_post_hook] if not given else [one.register_step_post_hook for one in given]
        self._before = (
            [register_optimizer_step_pre_hook] if not given else [one.register_step_pre_hook for one in given]
        )
        self._ends: list[Callable[[], None]] = [one(after).remove for one in register]
        self._ends.append(places.listen(self._saw_backward))
        self._begin()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching, after the numbers that are under way have been judged; waits for a device."""
        for end in self._ends:
            end()
        self._ends.clear()
        self._unhook()
        self._look = None
        for look, _ in self._waiting:
            look.wait()
        self._collect()
        self.budget.end()
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                sink.close(self.step)
        self._sinks = []

    def add(self, model: nn.Module) -> None:
        """Watch one more model, from the next look on; its paths begin with the name of its class."""
        self.models.add(model, renames=False)

    def losses_are_scaled(self) -> bool:
        """Whether losses carry the loss scale when they are seen: not where backward passes multiply by it."""
        return True

    def compare(self, name: str, ours: Tensor, others: Tensor) -> None:
        """Compare numbers that should agree, such as log-probabilities of training and of rollout, by their mean |Δ|.

        Raises InvalidInput if their shapes differ. An alarm follows where the mean is above 0.02, in nats.
        """
        if ours.shape != others.shape:
            raise InvalidInput(f"{name}: shapes {tuple(ours.shape)} and {tuple(others.shape)} cannot be compared")
        with torch.no_grad():
            self._compared.append((name, (ours.detach().float() - others.detach().float()).abs().mean()))

    @property
    def overhead(self) -> float:
        """The share that the monitor has added to the time of the training, as it has measured itself."""
        return self.budget.overhead

    # -- a step -------------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Prepare to look at the coming step."""
        started = time.perf_counter()
        self.models.renew()
        self._look = Look(self.step, of_flushed=self._state.scaler is None)
        self._seconds, self._probe = 0.0, None
        self._handles = places.follow(places.visible(self.models), self._saw_output)
        before = Uncopied(self._before_step)
        self._handles += [register(before) for register in self._before]
        if not distributed.has_other_ranks():  # a forward pass of one rank alone would wait for the others
            for root in self.models.roots.values():
                if is_compiled(root):
                    again = Uncopied(self._look_inside)
                    self._handles.append(root.register_forward_pre_hook(again, prepend=True, with_kwargs=True))
        self._spent(started)

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _spent(self, started: float) -> None:
        seconds = time.perf_counter() - started
        self._seconds += seconds
        self.budget.spent(seconds, True)

    @_harmless
    def _saw_output(self, path: str, module: nn.Module, output: Any) -> None:
        started = time.perf_counter()
        if self._look is not None and (torch.is_grad_enabled() or self._is_aside):
            self._look.saw_output(path, module, output)
        self._spent(started)

    _is_aside = False

    @_harmless
    def _look_inside(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        """Run a compiled model once more as it was written, to see what it computes within."""
        if self._is_aside or self._look is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        started, inner = time.perf_counter(), unwrapped(root)
        handles = places.follow(places.within(inner, self.models), self._saw_output)
        self._is_aside = True
        try:
            with places.aside(self.models):
                inner(*args, **kwargs)
        except Exception as error:  # of code that need not run twice: the training goes on
            print(f"lowp monitor: the compiled model is seen from outside alone: {error}"[:200], file=sys.stderr)
        finally:
            self._is_aside = False
            for handle in handles:
                handle.remove()
        self._spent(started)

    @_harmless
    def _saw_backward(self, loss: Tensor, ended: bool) -> None:
        """Take a backward pass into account; nearly all that the monitor costs in a step that is not looked at."""
        if ended:
            if self._probe is None:
                named = ((name, one) for name, one in self.models.named_parameters() if one.grad is not None)
                self._probe = next(named, None)
            self._had = self._probe is not None and self._probe[1].grad is not None
            if self._look is not None and self._passes > 1:
                self._add_probe("latest")
            return
        if self._had and self._is_alone and self._probe is not None and self._probe[1].grad is None:
            self._end_step()  # the loss scaler has skipped the optimizer's
        elif self._passes and self._look is not None:
            self._add_probe("carried")
        self._passes += 1
        if not loss.dim() or loss.numel() == 1:
            self._saw_loss(loss)
        look = self._look
        if look is not None and self._passes % _MOST_PASSES == 0 and self._state.scale is not None:
            self._end_look(look)

    def _saw_loss(self, loss: Tensor) -> None:
        scale = None if self._state.scaler is None else self._state.scale
        scaled = scale is not None and self.losses_are_scaled()
        if self._look is not None:
            self._added = self._added and adds_up(loss, scaled)
        self._losses.add(self.step, loss, scale, scaled)

    def _add_probe(self, kind: str) -> None:
        """Note a gradient between passes: whether they add up, and whether the script divides them before the step."""
        if self._look is not None and self._probe is not None and (gradient := self._probe[1].grad) is not None:
            self._look.add(kind, [self._probe[0]], norms([numbers_of(gradient.detach())]))

    @_harmless
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        started = time.perf_counter()
        if self._look is not None and (parameters := self._cycle.parameters(optimizer)):
            self._look.before_step(parameters, getattr(optimizer, "grad_scale", None))
        self._spent(started)

    @_harmless
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        look = self._look
        if optimizer is not self._alone or look is not None:
            started = time.perf_counter()
            parameters = self._cycle.parameters(optimizer)
            if not parameters and not self._cycle.knows(optimizer):
                return
            if not self._passes and self._cycle.is_wrapper(optimizer):  # around the one that has just stepped
                return
            if self._state.searches:
                self._state.find(*places.owners_of_step())
                if (scale := self._state.scale) is not None and self.losses_are_scaled():
                    self._losses.unscale(scale)
            if look is not None:
                look.after_step(parameters)
                self._state.saw(optimizer, parameters)
            ends = self._cycle.ends_with(optimizer)
            self._alone = self._cycle.alone
            self._is_alone = self._alone is not None
            self._spent(started)
            if not ends:
                return
        self._ranks.step(self.step)
        self._end_step()

    def _end_step(self) -> None:
        """Begin the next step."""
        if self._look is not None:
            self._end_look(self._look)
        self.step += 1
        self._passes, self._added, self._had = 0, True, False
        if self._waiting:
            self._collect()
        if self.step >= self._look_at:
            self._begin_if_there_is_room()

    def _begin_if_there_is_room(self) -> None:
        """Look at the coming step, or set the step at which there is time for it."""
        budget = self.budget
        budget.pass_by(_IDLE * max(self.step - self._looked - 1, 0))
        self._looked = self.step - 1
        is_beginning = self.step < _BEGINNING and budget.own < budget.allowance
        missing = 0.0 if budget.share is None else self._cost - budget.share * budget.training + budget.own
        if missing <= 0 or (is_beginning and (self.step < _FIRST or self.step % _EACH == 0)):
            self._begin()
            return
        a_step = budget.training / self.step
        earned = (budget.share or 0.0) * a_step - _IDLE
        steps = missing / earned if earned > 0 else 1e3
        steps = max(math.ceil(min(steps, 1e5)), 1)
        self._look_at = self.step + (min(steps, _EACH - self.step % _EACH) if is_beginning else steps)

    # -- the end of a look --------------------------------------------------------------------------------------------
    def _end_look(self, look: Look) -> None:
        started = time.perf_counter()
        self._unhook()
        self._look = None
        state = self._state
        look.saw_buffers(self.models.named_buffers())
        state.add_to(look)
        for name, value in self._compared:
            look.add("compared", [name], value)
        self._compared.clear()
        steps = self._losses.move_to(look)
        look.send()
        seen = state.described(look, steps, self._passes, self._added)
        seen.suspects = self._losses.suspects or []
        self._waiting.append((look, seen))
        self._spent(started)
        self._cost = max(self._seconds, 0.5 * self._cost)

    def _collect(self) -> None:
        """Judge the looks whose numbers have arrived."""
        started = time.perf_counter()
        if self._ranks.is_used:
            self._apart.update(self._ranks.collect())
        told: list[Alarm] = []
        while self._waiting and (numbers := self._waiting[0][0].read()) is not None:
            seen = self._state.completed(self._waiting.popleft()[1], numbers)
            seen.apart, self._apart = self._apart, {}
            alarms = self._judge.judge(seen)
            told += alarms
            record = record_of(seen, alarms, time.perf_counter() - self.budget.started) if self._sinks else {}
            for sink in self._sinks:
                sink(record)
        self._spent(started)
        self.alarms += told
        for alarm in told:
            self._tell(alarm)

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        self._waiting.clear()
        print(f"lowp monitor: it has stopped watching, because of {self.failure}", file=sys.stderr)
        try:
            self.close()
        except Exception:  # of a sink that has failed before
            self._sinks = []

    def _tell(self, alarm: Alarm) -> None:
        self._is_telling = True
        if callable(self._on_alarm):
            self._on_alarm(alarm)
        elif self._on_alarm == "raise":
            raise TrainingAlarm(alarm)
        elif distributed.rank() == 0 or self._state.is_sharded:
            rank = f" (rank {distributed.rank()})" if distributed.rank() else ""
            print(f"lowp monitor{rank}: {alarm}", file=sys.stderr, flush=True)
        self._is_telling = False
