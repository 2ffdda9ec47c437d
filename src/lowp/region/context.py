"""`lowp.autocast`: its arguments, and how a region is entered and left."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowp import presets
from lowp.compat import (
    COMPILES_REGIONS,
    accelerator,
    constant_when_compiled,
    once,
    refuse_compiled_region,
    remembered,
    remembered_by_identity,
)
from lowp.errors import InvalidInput, Unavailable
from lowp.exponents import DelayedScales, SharedExponents, Spots
from lowp.exponents.sites import Passes
from lowp.hooks import listed
from lowp.ops import table
from lowp.ops.observing import Observer, everywhere
from lowp.policy import OP_CLASSES, Policy, check_ops
from lowp.presets import Preset
from lowp.region import entries
from lowp.region.blocks import Leaving, decorated, exit_of
from lowp.region.engine import Audit, Engine
from lowp.region.entries import Entry, suspendable
from lowp.region.following import follow_modules, install, unfollow_modules
from lowp.region.paths import ModulePath
from lowp.region.rulebook import Report, Rulebook
from lowp.region.weights import WeightCasts, forget_all

_DEVICES = ("cpu", "cuda", "mps", "xpu", "mtia", "maia", "hpu", "ipu", "xla", "privateuseone")
_TORCH_ATTRIBUTES = ("prev", "prev_fastdtype", "prev_cache_enabled")
_warned: set[Policy] = set()
_told_unrounded: set[Policy] = set()
# of policies with scales from earlier steps: the passes of the latest region, and how many before it had one step each
_for_one_step: dict[Policy, tuple[Passes, int]] = {}
_MANY = 4  # regions for one step each, which are no chance


class TorchAutocast(torch.autocast):
    """torch.autocast that also suspends the lowp region around it."""

    def __enter__(self) -> Any:
        entry = Entry(self)
        entry.attributes = {name: self.__dict__[name] for name in _TORCH_ATTRIBUTES if name in self.__dict__}
        try:
            entries.push(entry)
            return super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            entries.remove(entry)
            raise

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any:
        entry, state = entries.find(self), entries.autocast_state()
        try:
            return super().__exit__(kind, value, traceback)
        finally:
            entries.set_autocast_state(state)  # keep the state of a region that was entered later and is in use
            entries.remove(entry)
            self.__dict__.update(entry.attributes)


class _Regions(type):
    """The metaclass of `autocast`: isinstance also holds for the objects made in torch's spelling."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (cls is autocast and isinstance(instance, TorchAutocast))


class autocast(TorchFunctionMode, metaclass=_Regions):
    """Run ops in the number formats of a policy: ``with lowp.autocast("fp16"): ...``, or as a decorator.

    `precision` is a preset (``fp16``), any format (``e5m7``: operands and gradients of contractions in it), a Policy,
    a Preset, the path of a policy file (.toml), or ``torch-2.13-cpu`` or ``torch-2.13-cuda``, torch's lists as rules.
    An inner region replaces the outer one; ``lowp.autocast("fp32")`` and ``enabled=False`` disable casting. With
    `strict` a contraction that no rule matches raises InvalidInput, and so does, on leaving, a rule of the user that
    matched nothing. Inside, `torch.is_autocast_enabled` returns True and `torch.get_autocast_dtype` the dtype that
    contractions write; a nested ``torch.autocast(enabled=False)`` is honoured.

    With torch's own signatures, ``lowp.autocast("cuda", dtype=torch.float16)`` and, as in torch.cuda.amp,
    ``lowp.autocast()``, the result is a torch.autocast, with torch's own lists.

    The same object can be entered repeatedly, also within itself and by several threads. Every entry casts the weights
    that it uses, and drops the casts when it is left. Within an entry a cast is reused until the weight may have been
    written. Raises UnknownName, with similar names, for an unknown precision or an unknown op in a rule.
    """

    def __new__(
        cls,
        precision: str | bool | Policy | Preset | Path | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        device_type: str | None = None,
        strict: bool = False,
    ) -> Any:
        """Return a region, or a torch.autocast where the call is spelled as torch's."""
        if isinstance(precision, bool):  # torch.cuda.amp.autocast(enabled, dtype, cache_enabled)
            enabled, precision, cache_enabled = precision, None, enabled if cache_enabled is None else cache_enabled
        if device_type is not None and precision is not None:
            raise InvalidInput(
                f"autocast takes a precision ({precision!r}) or torch's device_type ({device_type!r}), not both: "
                "the rules of a lowp precision apply on every device"
            )
        device = device_type if device_type is not None else "cuda" if precision is None else precision
        if device_type is None and not _is_torch_spelling(device, dtype):
            return super().__new__(cls)
        if strict:
            raise InvalidInput(f"strict=True needs a policy: autocast({device!r}) follows torch's own lists")
        return TorchAutocast(device, dtype, enabled, cache_enabled)  # type: ignore[arg-type]

    def __init__(
        self,
        precision: str | Policy | Preset | Path,
        dtype: None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        device_type: None = None,
        strict: bool = False,
    ) -> None:
        if not COMPILES_REGIONS and torch.compiler.is_compiling():
            refuse_compiled_region()
        if dtype is not None:
            raise InvalidInput(f"autocast({precision!r}, dtype={dtype}): a precision defines its formats: omit dtype")
        super().__init__()
        self._is_users = not isinstance(precision, str) or precision.endswith(".toml")
        self.preset = presets.parse(precision) if self._is_users else _preset(str(precision))
        self.policy = _known(self.preset.policy)
        self._rulebook = Rulebook(self.policy, strict)
        self._has_complained = False  # about rules that matched nothing
        self.was_entered = False
        self._observers: list[Observer] = []
        self._dtype = self._rulebook.main_dtype()
        self._enabled = enabled
        # shared exponents of results that are written at sites; None where no rule uses them
        self.exponents = SharedExponents() if self._rulebook.is_flexpoint else None
        # scales of operands from earlier steps; None where no rule uses them
        self.scales = DelayedScales() if self._rulebook.is_delayed else None
        self._compiled = self._engine(ModulePath())
        if enabled and torch.is_grad_enabled() and (seen := self.exponents or self.scales) is not None:
            self._tell_remade(seen.passes)

    # -- entering and leaving -------------------------------------------------------------------------------------

    def __enter__(self) -> autocast:
        entry = Entry(self, suspendable(1), exit=exit_of(self))
        try:
            self._begin(entry, None)
            return self
        except BaseException:  # also for a signal: no region stays half entered
            self._undo(entry)
            raise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of code that torch.compile traces inside the region: tracing does not call `__enter__`.

        torch.autocast is not switched on there, so a nested ``torch.autocast(enabled=False)`` is not noticed.
        """
        if not self._enabled or not self.policy.rules:
            return func(*args, **(kwargs or {}))
        if not COMPILES_REGIONS:
            refuse_compiled_region()
        if self.policy.uses_paths:
            _refuse_paths()
        return self._compiled.apply(func, args, kwargs or {})

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs `function` in this region."""
        if not callable(function):
            raise InvalidInput(f"as a decorator {self!r} needs a function, not {type(function).__name__}")
        return decorated(self, function)

    def resume(self, path: ModulePath | None = None, spots: Spots | None = None) -> AbstractContextManager[None]:
        """Return a context that continues the region, in this or another thread, without warnings when it is left.

        `path` is the place in the model, None for that of the thread; `spots` counts the sites of shared exponents.
        """
        return _Resumed(self, path, spots)

    def _begin(self, entry: Entry, path: ModulePath | None, spots: Spots | None = None) -> None:
        """Activate an entry. `_undo` reverts all of this, wherever it was interrupted."""
        self.was_entered = True
        entries.push(entry)
        outer = entry.outer
        if path is None:
            path = outer.engine.path if outer is not None and outer.engine is not None else ModulePath()
        runs = self._runs
        state = [(device, runs, self._dtype if runs else dtype) for device, _, dtype in entry.before]
        entries.set_autocast_state(state)
        if not runs:
            return
        install()
        engine = self._engine(path)
        engine.spots = spots or engine.spots
        if entry.frame is not None:
            engine.look = partial(entries.look, entry)
        if self._rulebook.uses_paths or self._observers or everywhere or engine.spots is not None:
            follow_modules(entry)
        if self._rulebook.strict:
            entry.audit = Audit(engine)
            entry.audit.__enter__()
        entry.engine = engine
        engine.__enter__()

    @staticmethod
    def _undo(entry: Entry) -> None:
        """Revert `_begin`, or the part of it that was done."""
        if entry.engine is not None:
            entries.take_off(entry.engine)
            entry.engine.weights.forget()
        if entry.audit is not None and entry.audit in entries.dispatch_modes():
            entry.audit.__exit__(None, None, None)
        unfollow_modules(entry)
        entries.remove(entry)

    def _tell(self, entry: Entry) -> None:
        """Give the warnings of the region when a thread leaves it for the last time and without an error."""
        may_tell = self._is_users or self._rulebook.left_alone
        if may_tell and entry.engine is not None and not entries.is_in(self):
            self._complain()
            self._tell_unrounded()

    __exit__: Any = Leaving(entries.find, _undo, _tell, entries.abandoned)

    @property
    def _runs(self) -> bool:
        return self._enabled and bool(self.policy.rules or self._observers or everywhere)

    def _engine(self, path: ModulePath) -> Engine:
        self._weights = WeightCasts()  # of the latest entry
        given = self._dtype, self._observers, self.exponents, self.scales
        return Engine(self._rulebook, self._weights, path, _present(), *given)

    def _tell_unrounded(self) -> None:
        """Warn, once per policy, if no contraction was rounded because of the dtype or layout of the operands."""
        if self._rulebook.has_rounded or not self._rulebook.left_alone or self.policy in _told_unrounded:
            return
        _told_unrounded.add(self.policy)
        warnings.warn(
            f"{self!r} has rounded no contraction: as under torch.autocast, it does not round "
            f"{', '.join(self._rulebook.left_alone)}. Convert the model and its inputs with float(), or omit the "
            "region",
            UserWarning,
            stacklevel=4,
        )

    def _tell_remade(self, passes: Passes) -> None:
        """Warn of regions made for one step each, once for all in a row: they lose what earlier steps have told."""
        before, count = _for_one_step.get(self.policy, (None, 0))
        count = count + 1 if before is not None and before.step == 1 else 1
        _for_one_step[self.policy] = passes, count
        if count == _MANY:
            warnings.warn(
                f"{self!r} was made {_MANY} times for one step each: it takes scales from earlier steps, which lie in "
                f"the region. Make it once, region = lowp.{self!r}, and enter it in every step: with region: ...",
                UserWarning,
                stacklevel=3,
            )

    def _complain(self) -> None:
        """Report the user's rules that matched nothing: raise if strict, else warn once per policy."""
        if not self._is_users or self._has_complained or not self._rulebook.has_run:
            return
        report = self._rulebook.report()
        self._has_complained = not (report.unused_by_user and self._rulebook.strict)  # also True if nothing is unused
        if not report.unused_by_user:
            return
        if self._rulebook.strict:
            raise InvalidInput(f"{report.complaint}. Correct its ops or where, or omit strict=True")
        if self.policy not in _warned:
            _warned.add(self.policy)
            warnings.warn(report.complaint, UserWarning, stacklevel=4)

    # -- what was seen --------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return a report of this region: unused rules, contractions that no rule matched, ops that ran in fp32."""
        return self._rulebook.report()

    def observe(self, callback: Observer) -> Callable[[], None]:
        """Call `callback` with an Observation of every tensor that an op reads or writes, forward and backward.

        Takes effect at the next entry; returns a function that ends it. Costs nothing without a callback, and changes
        no bit of the training with one. The callback runs outside the policy. `lowp.observe` does the same for all
        regions, and for the steps of lowp's optimizers.
        """
        return listed(self._observers, callback)

    def cast_weights(self) -> list[torch.Tensor]:
        """Return the casts of weights made by the latest entry that are still alive, in it or for backward.

        For measuring the memory of a step. Casts made by torch.autocast (`region.handover`) are not included.
        """
        return self._weights.tensors()

    def forget(self) -> None:
        """Cast every weight again at its next use, also within the present entry.

        Needed only if weights are written within an entry through a raw address that was taken before it.
        """
        forget_all()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the arguments, shared exponents and delayed scales, without the report and the observers."""
        asked = (self.preset, self._is_users, self._enabled, self._rulebook.strict)
        return _again, asked, {"exponents": self.exponents, "scales": self.scales}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.exponents, self.scales = state["exponents"], state["scales"]
        self._compiled = self._engine(ModulePath())

    def __repr__(self) -> str:
        return f"autocast({self.preset.name!r}{'' if self._enabled else ', enabled=False'})"


class _Resumed:
    """Another entry of a region, in this thread or another."""

    def __init__(self, region: autocast, path: ModulePath | None, spots: Spots | None) -> None:
        self._region, self._path, self._spots = region, path, spots

    def __enter__(self) -> None:
        entry = Entry(self._region, exit=exit_of(self))
        try:
            self._region._begin(entry, self._path, self._spots)
        except BaseException:
            self._region._undo(entry)
            raise

    __exit__: Any = Leaving(
        lambda context: entries.find(context._region), autocast._undo, lambda context, entry: None, entries.abandoned
    )


def _again(preset: Preset, is_users: bool, enabled: bool, strict: bool) -> autocast:
    """Return a new region with the arguments of another one."""
    region: autocast = autocast(preset, enabled=enabled, strict=strict)
    region._is_users = is_users
    return region


def _is_torch_spelling(device: object, dtype: torch.dtype | None) -> bool:
    if isinstance(device, str):
        return device in _DEVICES or isinstance(dtype, torch.dtype)
    return not isinstance(device, (Policy, Preset, Path))


@remembered
def _preset(name: str) -> Preset:
    """Return the preset of a name or a format: the same each time, by whose rules it is known how ops run."""
    return presets.parse(table.TORCH_POLICIES.get(name, name))


@remembered_by_identity
def _known(policy: Policy) -> Policy:
    """Return the one of equal policies by whose rules it is known how ops run.

    Raises UnknownName for a rule with an op that is not in the table.
    """
    rows = table.TABLES[policy.table]
    if not all(op in rows or op in OP_CLASSES for rule in policy.rules for op in rule.ops):
        check_ops(policy, table.op_names(policy.table))
    return _first(policy)


@remembered
def _first(policy: Policy) -> Policy:
    """Return the first of equal policies."""
    return policy


@once
def _present() -> tuple[str, ...]:
    """Return the device types on which ops can run on this machine."""
    kind = accelerator()
    return ("cpu",) if kind is None else ("cpu", kind)


@constant_when_compiled
def _refuse_paths() -> None:
    """Raise while torch.compile traces: what traced code raises would break the graph, and run it in fp32, unsaid."""
    raise Unavailable(
        "a policy with rules for module paths cannot be entered inside a compiled function, where modules "
        "cannot be followed: enter it around the call of the compiled function"
    )
