"""The monitor: looks at as many steps of a training as 2 % of its time allow, and raises alarms."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowp import distributed
from lowp.compat import adds_up, is_multiplied, stages_of
from lowp.errors import InvalidInput
from lowp.hooks import Uncopied
from lowp.monitoring import places
from lowp.monitoring.alarms import Alarm, Alarms, TrainingAlarm
from lowp.monitoring.log import JsonLines
from lowp.monitoring.look import Look, Probe
from lowp.monitoring.losses import Losses
from lowp.monitoring.pace import Pace, now
from lowp.monitoring.ranks import RankCheck
from lowp.monitoring.seen import Sight
from lowp.monitoring.sinks import Sink, record_of, sinks_of
from lowp.monitoring.state import RunState
from lowp.numerics.models import Cycle, Models

_SHARE = 0.02  # of the time
_HOOK = 3e-6  # seconds that torch takes for a hook
_SKIPS = 9  # steps, so many as an alarm needs, after which a look is taken
_MOST_PASSES = 32  # backward passes after which no step is waited for if the loss scale falls

Hook = TypeVar("Hook", bound=Callable[..., Any])
OnAlarm = Literal["warn", "raise"] | Callable[[Alarm], object]


def _harmless(hook: Hook) -> Hook:
    """Let an error of the monitor itself end the monitor and not the training; what `on_alarm` raises passes."""

    @wraps(hook)
    def guarded(self: Monitor, *given: Any) -> Any:
        try:
            return hook(self, *given)
        except Exception as error:
            if self._is_telling:
                raise
            self._fail(error)

    return cast(Hook, guarded)


class Monitor(AbstractContextManager["Monitor"]):
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
    * max_overhead: the share of the time that looks may take, 0.02 or ``"2%"``; None looks at every step. The first
      step is looked at in any case, as is the one after a loss that has ceased to be finite or is far above the others;
      of steps below 1.6 ms a part of the losses is seen, in turns. The share of the first four seconds,
      80 ms, is spent sooner, and where something seems wrong a few looks are taken in advance.

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
        self._pace, self._started = Pace(max_overhead), time.perf_counter()
        self.failure: str | None = None
        self._on_alarm, self._judge, self._is_telling = on_alarm, Alarms(patience), False
        given = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if wrong := [type(one).__name__ for one in given if not isinstance(one, Optimizer)]:
            raise TypeError(f"a monitor needs a torch optimizer, not {wrong[0]}")
        self._state = RunState(self.models, scaler, precision, given)
        self._cycle, self._ranks = Cycle(self.models), RankCheck(self.models)
        self._alone: Optimizer | None = None
        self._is_alone = len(given) == 1  # whether all gradients are of one optimizer
        self._sinks = sinks_of(sinks, self.models, precision) if distributed.rank() == 0 else []
        self._look: Look | None = None
        self._look_at = 0  # the next step that may be looked at
        self._is_urgent = False  # whether the next one is in any case, as the loss has ceased to be finite
        self._wakes = 0  # the step before which nothing but counting is to be done
        self._hears, self._turn = False, 0  # whether backward passes are heard between looks, and before which step
        self._unheard: Callable[[], None] | None = None  # ends that they are
        self._calls = places.Calls(self.models, self._pace, self._saw_output)
        self._ends_of_look, self._waiting = ExitStack(), deque[tuple[Look, Sight]]()
        self._losses = Losses(self.models, self._sees_backward)
        self._compared: list[tuple[str, Tensor]] = []
        self._passes, self._added = 0, True  # backward passes since the last step
        self._probe, self._skips = Probe(self.models), 0  # steps that the scaler has skipped
        self._stages: Any = None  # the scaler's then
        # whether losses carry the loss scale when they are seen: not where backward passes multiply by it
        self.losses_are_scaled: Callable[[], bool] = lambda: True
        self._apart: dict[str, tuple[int, float]] = {}
        hooks = [(one.register_step_pre_hook, one.register_step_post_hook) for one in given]
        hooks = hooks or [(register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
        self._before, after = [before for before, _ in hooks], Uncopied(self._stepped)
        self._ends = [*(register(after).remove for _, register in hooks), self._rest]
        self._begin()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching, after the numbers that are under way have been judged; waits for a device."""
        self._pace.charge(self.step, self._unheard is not None)
        for end in self._ends:
            end()
        self._ends.clear()
        self._ends_of_look.close()
        self._look = None
        for look, _ in self._waiting:
            look.wait()
        self._collect()
        self._pace.charge(self.step, False)
        self._pace.budget.end()
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                sink.close(self.step)
        self._sinks = []

    def add(self, model: nn.Module) -> None:
        """Watch one more model, from the next look on; its paths begin with the name of its class."""
        self.models.add(model, renames=False)

    def compare(self, name: str, ours: Tensor, others: Tensor) -> None:
        """Compare numbers that should agree, such as log-probabilities of training and of rollout, by their mean |Δ|.

        Raises InvalidInput if their shapes differ. An alarm follows where the mean is above 0.02, in nats.
        """
        if ours.shape != others.shape:
            raise InvalidInput(f"{name}: shapes {tuple(ours.shape)} and {tuple(others.shape)} cannot be compared")
        self._compared.append((name, (ours.detach().float() - others.detach().float()).abs().mean()))

    @property
    def overhead(self) -> float:
        """The share that the monitor has added to the time of the training, as it has measured itself."""
        return self._pace.budget.overhead

    # -- a step -------------------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        """Hear of backward passes from now on."""
        if self._unheard is None:
            self._unheard = places.listen(self._losses)
            self._losses.wake()

    def _rest(self) -> None:
        if self._unheard is not None:
            self._unheard()
        self._unheard = None

    def _begin(self) -> None:
        """Prepare to look at the coming step."""
        started = now()
        self._listen()
        self._look = Look(self.step, of_flushed=self._state.scaler is None)
        self._wakes = 0
        self._probe.forget()
        self._losses.keep(False)
        self._calls.start()
        before = Uncopied(self._before_step)
        self._ends_of_look.callback(self._calls.stop)
        for register in self._before:
            self._ends_of_look.callback(register(before).remove)
        self._pace.spent(started)

    @_harmless
    def _saw_output(self, path: str, output: Any) -> None:
        started = now()
        if self._look is not None and (torch.is_grad_enabled() or self._calls.is_aside):
            self._look.saw_output(path, output)
        self._pace.spent(started, _HOOK)

    def _sees_backward(self, loss: Tensor, ended: bool) -> bool:
        """Take a backward pass into account. Return whether its end is of interest, too."""
        if self._losses.is_plain:
            self._saw_loss(loss)
            return False
        started = now()
        is_wanted = bool(self._saw_backward(loss, ended))
        self._pace.spent(started) if self._look is not None else self._pace.heard(started)
        return is_wanted

    @_harmless
    def _saw_backward(self, loss: Tensor, ended: bool) -> bool:
        if ended:
            self._probe.passed()
            self._stages = stages_of(self._state.scaler)
            if self._passes > 1:
                self._probe.tell(self._look, "latest")
            return False  # behind the pass nobody asks
        if self._passes and self._probe.is_cleared and self._is_alone and self._was_skipped(loss):
            self._skips += 1
            self._is_urgent = self._is_urgent or (self._skips % _SKIPS == 0 and self._pace.may_confirm())
            self._end_step()
        elif self._passes and self._look is not None:
            self._probe.tell(self._look, "carried")
        self._passes += 1
        self._saw_loss(loss)
        if self._look is not None and self._passes % _MOST_PASSES == 0 and self._state.scale is not None:
            self._end_look(self._look)
        return self._passes > 1 or self._state.searches or self._state.scaler is not None

    def _was_skipped(self, loss: Tensor) -> bool:
        """Whether gradients are cleared as a loss scaler, known or still looked for, has skipped a step.

        Without one, or without its update since, the script has cleared them between two passes of a step, as
        sharpness-aware training does.
        """
        if self._state.scaler is None:
            return self._state.searches and is_multiplied(loss)
        return self._stages is None or stages_of(self._state.scaler) is not self._stages

    @_harmless
    def _saw_loss(self, loss: Tensor) -> None:
        if loss.numel() != 1 or loss.is_complex():
            return
        scale = None if self._state.scaler is None else self._state.scale
        scaled = scale is not None and self.losses_are_scaled()
        if self._look is not None:
            self._added = self._added and adds_up(loss, scaled)
        if self._losses.add(self.step, loss, scale, scaled):
            self._wakes, self._is_urgent = 0, True

    @_harmless
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        started = now()
        if self._look is not None and (parameters := self._cycle.parameters(optimizer)):
            self._look.before_step(parameters, getattr(optimizer, "grad_scale", None))
        self._pace.spent(started, _HOOK)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step; all that is done in nearly all of them."""
        if self.step < self._wakes and optimizer is self._alone:
            self.step += 1
            self._passes = 0
        else:
            self._after_step(optimizer)

    @_harmless
    def _after_step(self, optimizer: Optimizer) -> None:
        look = self._look
        if optimizer is not self._alone or look is not None or self._state.searches:
            started = now()
            parameters = self._cycle.parameters(optimizer)
            if not (parameters or self._cycle.knows(optimizer)):  # a foreign one
                return
            if not self._passes and self._cycle.is_wrapper(optimizer):  # around one that has stepped
                return
            if self._state.searches:
                self._state.find(*places.owners_of_step())
                if (scale := self._state.scale) is not None and self.losses_are_scaled():
                    self._losses.unscale(scale)
            if look is not None:
                look.after_step()
                self._state.saw(optimizer, parameters)
            ends = self._cycle.ends_with(optimizer)
            self._alone = self._cycle.alone
            self._is_alone = self._alone is not None
            self._pace.spent(started)
            if not ends:
                return
        if self._ranks.is_due(self.step):
            started = now()
            self._ranks.step(self.step)
            self._pace.spent(started)
        self._end_step()

    def _end_step(self) -> None:
        """Begin the next step."""
        look = self._look
        if look is not None:
            self._end_look(look)
        self.step += 1
        self._passes, self._added = 0, True
        if self._waiting:
            self._collect()
        if look is not None:
            self._pace.looked(look.step)
        self._pace.charge(self.step, self._unheard is not None)
        if self.step >= self._look_at or self._is_urgent:
            self._look_at = self._pace.next(self.step)
            if self._is_urgent or self._look_at == self.step:
                self._is_urgent, self._look_at = False, self.step
                self._begin()
        self._go_on()

    def _go_on(self) -> None:
        """Decide until when steps are but counted, and losses seen."""
        counts = self._look is None and not self._state.searches and self._is_alone
        self._losses.keep(counts and self._state.scaler is None)
        if not counts or self._waiting:
            self._wakes = 0
            return
        if self.step >= self._turn:
            heard, unheard = self._pace.turns(self.step)
            self._hears = not self._hears or not unheard
            self._turn = self.step + (heard if self._hears else unheard)
        (self._listen if self._hears else self._rest)()
        self._wakes = min(self._look_at, self._turn, self._ranks.next_after(self.step) + 1) - 1

    # -- the end of a look --------------------------------------------------------------------------------------------
    def _end_look(self, look: Look) -> None:
        started = now()
        self._ends_of_look.close()
        self._look = None
        look.saw_buffers(self.models.named_buffers())
        self._state.add_to(look)
        for name, value in self._compared:
            look.add("compared", [name], value)
        self._compared.clear()
        losses = self._losses.move_to(look)
        look.send()
        seen = self._state.described(look, losses, self._passes, self._added)
        seen.suspects = self._losses.suspects or []
        self._waiting.append((look, seen))
        self._pace.spent(started)

    def _collect(self) -> None:
        """Judge the looks whose numbers have arrived."""
        started = now()
        if self._ranks.is_used:
            self._apart.update(self._ranks.collect())
        told: list[Alarm] = []
        while self._waiting and (numbers := self._waiting[0][0].read()) is not None:
            seen = self._state.completed(self._waiting.popleft()[1], numbers)
            seen.apart, self._apart = self._apart, {}
            for step, loss in seen.losses if seen.are_late else ():
                self._losses.judge(step, loss)
            seen.spikes, self._losses.spikes = self._losses.spikes, []
            alarms = self._judge.judge(seen)
            told += alarms
            if self._judge.suspects and self._pace.may_confirm():
                self._is_urgent = True
            record = record_of(seen, alarms, time.perf_counter() - self._started) if self._sinks else {}
            for sink in self._sinks:
                sink(record)
        self._pace.spent(started)
        self.alarms += told
        for alarm in told:
            self._tell(alarm)

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        self._waiting.clear()
        print(f"lowp monitor: it has stopped watching, because of {self.failure}", file=sys.stderr)
        with suppress(Exception):  # of a sink that has failed before
            self.close()
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
