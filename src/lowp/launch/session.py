"""One process of `lowp run`: its precision, whether lowp rests, and its report."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lowp import presets
from lowp.errors import LowpError
from lowp.launch import record as records
from lowp.launch.boot import replaces, tell_first
from lowp.launch.record import ProcessRecord, RunSettings

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lowp.launch.forward import Forward
    from lowp.launch.gradients import Gradients
    from lowp.launch.waiting import MonitorSearch
    from lowp.precision import Precision

_EXIT_REFUSED = 2


class _Local(threading.local):
    """The position of one thread: in a module under the rules or left alone, in a pass, in a hook, in a step."""

    calls = 0
    alone = 0
    backward = 0
    hooks = 0
    steps = 0


class Session:
    """State shared by the patched places of torch. While `rests` is True, nothing is cast, scaled or skipped."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.preset = presets.parse(settings.precision, settings.loss_scale or None)
        self.local = _Local()
        # all leaves and optimizers share one scale, so only one thread at a time runs a scaled pass or step
        self.turn = threading.RLock()
        self.record = ProcessRecord(self.preset.name, rank=int(os.environ.get("RANK", 0)))
        # objects that the places make for each other; without a loss scale `gradients` stays None
        from torch.utils.weak import WeakTensorKeyDictionary

        self.stepped: Any = WeakTensorKeyDictionary()  # the parameters that optimizers hold
        self._shard_of: Any = WeakTensorKeyDictionary()  # weak references to shards, by the parameter gathered of them
        self.end_step: Callable[[], None] = nothing  # ends a step in which further optimizers may still step
        self.forward: Forward | None = None
        self.gradients: Gradients | None = None
        self.watching: MonitorSearch | None = None
        # plain fp32 changes nothing, so only steps are counted
        self.is_plain = not self.preset.policy.rules and self.preset.loss_scale.kind == "none"
        self.rests = self.is_plain

    @cached_property
    def precision(self) -> Precision:
        """The precision, made when the first module runs: a process that only imports torch does not pay for it."""
        from lowp.precision import Precision

        return Precision(self.preset, strict=self.settings.strict)

    @cached_property
    def is_scaling(self) -> bool:
        """Whether this precision scales losses."""
        return self.preset.loss_scale.kind != "none"

    def in_fp32(self) -> AbstractContextManager[object]:
        """Return a context in which nothing is cast."""
        from lowp.region import autocast

        region: AbstractContextManager[object] = autocast("fp32")
        return region

    def in_pass(self) -> AbstractContextManager[None]:
        """Run a backward pass: modules and passes that it calls belong to it."""
        return self.at(backward=self.local.backward + 1, hooks=0)

    def in_hook(self) -> AbstractContextManager[None]:
        """Run a hook of the script within a backward pass: modules and passes that it calls are the script's."""
        return self.at(backward=0, hooks=1)

    @contextmanager
    def at(self, **place: int) -> Iterator[None]:
        """Be at another position of this thread, see `_Local`."""
        of_thread = self.local.__dict__  # a dictionary for each thread
        before = {name: getattr(self.local, name) for name in place}
        of_thread.update(place)
        try:
            yield
        finally:
            of_thread.update(before)

    def in_script(self) -> AbstractContextManager[None]:
        """Run what the script runs by itself: no module in it is under the rules."""
        return self.at(alone=self.local.alone + 1)

    def keeps_in_fp32(self, what: str, why: str, is_certain: bool = True) -> str:
        """Note that something does not run in the precision; return the sentence. Exits under --strict if certain."""
        sentence = f"{what} runs in fp32: {why}"
        self.record.note(sentence)
        if is_certain and self.settings.strict:
            self.refuse(sentence)
        return sentence

    def refuse(self, sentence: str) -> None:
        """End the script, which --strict asks for where it cannot run wholly in the precision."""
        print(f"lowp run: error: {sentence}; without --strict the script would continue", file=sys.stderr, flush=True)
        raise SystemExit(_EXIT_REFUSED)

    def is_stepped(self, parameter: Tensor) -> bool:
        """Whether an optimizer holds a parameter, or the shards of which FSDP2 gathered it."""
        return self.held_as(parameter) in self.stepped

    def held_as(self, leaf: Tensor) -> Tensor:
        """Return the shard that an optimizer holds in place of a parameter gathered by FSDP2; else the leaf itself."""
        reference = self._shard_of.get(leaf)
        shard: Tensor | None = None if reference is None else reference()
        return leaf if shard is None else shard

    @contextmanager
    def exchanging(self, one: Tensor, other: Tensor) -> Iterator[None]:
        """Let torch.utils.swap_tensors exchange two tensors, which it refuses if they have weak references.

        Optimizers hold the same objects as before. Shards are matched anew.
        """
        self._shard_of.clear()
        held = [at for at in (one, other) if self.stepped.pop(at, False)]
        try:
            with nullcontext() if self.gradients is None else self.gradients.exchanging(one, other):
                yield
        finally:
            for at in held:
                self.stepped[at] = True

    def match_shards(self) -> None:
        """Find the shard of each parameter that FSDP2 has gathered, if some optimizer holds shards."""
        from torch.utils.weak import TensorWeakRef

        from lowp.compat import gathered_parameters
        from lowp.optim.shards import is_fully_sharded, is_sharded

        if self.forward is None or not any(map(is_sharded, self.stepped)):
            return
        for module in (part for model in self.forward.models for part in model.modules() if is_fully_sharded(part)):
            for gathered, shard in gathered_parameters(module):
                self._shard_of[gathered] = TensorWeakRef(shard)

    def models_of(self, optimizer: Optimizer) -> list[nn.Module]:
        """Return the models that the script has called and this optimizer trains."""
        assert self.forward is not None
        parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return [one for one in self.forward.models if any(id(p) in parameters for p in one.parameters())]

    # -- the end ----------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Report, or leave the record for the process that reports; only once."""
        record, settings = self.record, self.settings
        with suppress(LowpError):  # NonFiniteGradients ends a running script, not one that has ended
            self.end_step()
        if self.watching is not None:
            self.watching.end()
        if "precision" in self.__dict__:
            record.skipped = self.precision.skipped_steps
            if self.is_scaling and record.steps:
                record.loss_scale = self.precision.scale
            if (exponents := self.precision.exponents) is not None:
                written = exponents.summary()["all"]
                record.writes, record.saturated = written.writes, written.saturated
            for name in self.precision.report().unseen:
                record.note(f"{name} runs in fp32: no rule matches it")
        if settings.directory and os.getpid() != settings.leader:
            if record.has_content:
                record.save(settings.directory)
        elif settings.directory:
            records.tell_of_run([record] if record.has_content else [], settings)
        elif record.has_content and record.rank == 0:
            records.tell([record], settings)
        self.close = nothing  # type: ignore[method-assign]


def nothing() -> None:
    """Do nothing."""


def start() -> None:
    """Start in this process, right after the import of torch. Exits if the environment's settings are invalid."""
    try:
        settings = RunSettings.from_environment()
        if settings is None:
            return
        session = Session(settings)
    except (LowpError, OSError) as error:
        print(f"lowp run: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(_EXIT_REFUSED) from None
    from lowp.launch import backward, forward, gradients, stepping, waiting

    # each uses objects of the previous ones
    for place in (gradients, forward, backward, stepping):
        place.install(session)
    _install_standing(session)
    waiting.install(session)
    _hide_frames()
    _close_at_the_end(session)


def _close_at_the_end(session: Session) -> None:
    def close() -> None:
        session.close()

    def in_child(_: object) -> None:  # a forked one has the parent's modules, but has done nothing itself
        session.record, session.end_step = ProcessRecord(session.preset.name, rank=session.record.rank), nothing
        session.watching = None
        multiprocessing.util.Finalize(None, close, exitpriority=0)

    atexit.register(close)
    if session.settings.leader == os.getpid():
        tell_first(close)
    multiprocessing.util.register_after_fork(session, in_child)
    if multiprocessing.current_process().name != "MainProcess" or "--multiprocessing-fork" in sys.argv:
        # a spawned child does not run atexit functions, but runs these
        multiprocessing.util.Finalize(None, close, exitpriority=0)


# -- tracebacks --------------------------------------------------------------------------------------------------------
def _hide_frames() -> None:
    """Print tracebacks without this package's frames, so that errors of the script look as without lowp."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        seen: BaseException | None = error
        passed = set()
        while seen is not None and id(seen) not in passed:
            passed.add(id(seen))
            seen.__traceback__ = without_own(seen.__traceback__)
            seen = seen.__cause__ or seen.__context__
        before(kind, error, error.__traceback__)

    sys.excepthook = hook


def without_own(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of this package; unchanged if all frames are."""
    frames = []
    current = traceback
    here = os.path.dirname(os.path.abspath(__file__))
    while current is not None:
        if os.path.dirname(os.path.abspath(current.tb_frame.f_code.co_filename)) != here:
            frames.append(current)
        current = current.tb_next
    kept = None
    for one in reversed(frames):
        kept = types.TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept if frames else traceback


# -- a script that handles its precision itself ------------------------------------------------------------------------
def _install_standing(session: Session) -> None:
    """Do nothing from an enabled torch.autocast on that the script enters, or an enabled GradScaler that it makes.

    The settings may ask to override these; then they are disabled.
    """
    if session.is_plain:
        return
    made: Any = torch.amp.GradScaler.__init__
    entered: Any = torch.autocast.__enter__

    def found(one: Any, name: str, owner: str) -> None:
        if not one._enabled or session.rests or owner.partition(".")[0] == "lowp":  # which uses both, too
            return
        if session.settings.override:
            one._enabled = False
        else:
            session.rests, session.record.stood_down = True, f"the script has a {name} of its own"

    @replaces(torch.amp.GradScaler)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        found(self, "GradScaler", type(self).__module__)

    @replaces(torch.autocast)
    def __enter__(self: Any) -> Any:
        if not (session.local.calls or session.local.backward or torch.compiler.is_compiling()):
            found(self, "torch.autocast", str(sys._getframe(1).f_globals.get("__name__", "")))
        return entered(self)
