"""`lowp.autocast`: what is given to it, and how it is entered and left."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowp import presets
from lowp.errors import InvalidInput, Unavailable
from lowp.exponents import SharedExponents, Spots
from lowp.ops import table
from lowp.policy import Policy, check_ops
from lowp.presets import Preset
from lowp.region import steps, threads
from lowp.region.audit import Audit
from lowp.region.engine import Engine, Observation, Rulebook
from lowp.region.paths import ModulePath
from lowp.region.report import Report
from lowp.region.threads import Entry
from lowp.region.weights import WeightCasts, forget_all

__all__ = ["autocast"]

_DEVICES = ("cpu", "cuda", "mps", "xpu", "mtia", "maia", "hpu", "ipu", "xla", "privateuseone")
_TORCH_ATTRIBUTES = ("prev", "prev_fastdtype", "prev_cache_enabled")
_warned: set[Policy] = set()


class TorchAutocast(torch.autocast):
    """torch.autocast, which also puts a region of lowp's own to rest that it is entered in."""

    def __enter__(self) -> Any:
        entry = Entry(self)
        entry.attributes = {name: self.__dict__[name] for name in _TORCH_ATTRIBUTES if name in self.__dict__}
        threads.push(entry)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any:
        result = super().__exit__(kind, value, traceback)
        self.__dict__.update(threads.pop(self).attributes)
        return result


class autocast(TorchFunctionMode):
    """Run ops in the number formats that a policy says: ``with lowp.autocast("fp16"): ...``, or as a decorator.

    `precision` is a preset (``fp16``), any format (``e5m7``: operands and gradients of contractions in it), a Policy,
    a Preset, the path of a policy file (.toml), or ``torch-2.13-cpu`` or ``torch-2.13-cuda``, torch's lists as rules.
    An inner region replaces the outer one; ``lowp.autocast("fp32")`` and ``enabled=False`` switch it off. `strict`
    raises InvalidInput for a contraction that no rule speaks of, and on leaving for a rule of the user's that nothing
    matched. Within, `torch.is_autocast_enabled` is true and `torch.get_autocast_dtype` is the dtype that contractions
    write; a nested ``torch.autocast(enabled=False)`` is honoured.

    torch's own spellings, ``lowp.autocast("cuda", dtype=torch.float16)`` and ``lowp.autocast()`` as in
    torch.cuda.amp, give a torch.autocast, with torch's own lists.

    The same object can be entered again and again, also within itself and by several threads. Every entry casts the
    weights it uses and drops the casts when it is left; within an entry a cast serves again while nothing can have
    written the weight. Raises UnknownName, with the near names, for a precision or an op in a rule that does not exist.
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
                "under a precision of lowp's the rules hold on every device"
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
        if dtype is not None:
            raise InvalidInput(f"autocast({precision!r}, dtype={dtype}): a precision says its formats: leave dtype out")
        super().__init__()
        self.preset = presets.parse(table.TORCH_POLICIES.get(str(precision), precision))
        self.policy = self.preset.policy
        _check(self.policy)
        self._rulebook = Rulebook(self.policy, strict)
        self._is_users = not isinstance(precision, str) or precision.endswith(".toml")
        self._weights = WeightCasts()  # of the latest entry
        self._observers: list[Callable[[Observation], object]] = []
        self._devices = _devices()
        self._dtype = self._rulebook.main_dtype()
        self._enabled = enabled
        # the exponents of results that are written under places; None where no rule asks for them
        self.exponents = SharedExponents() if self._rulebook.is_predicted else None
        self._compiled = self._engine(ModulePath())

    # -- entering and leaving -------------------------------------------------------------------------------------

    def __enter__(self) -> autocast:
        self.enter()
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self.leave(strict=kind is None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call where torch.compile has entered the region itself: it puts a mode to work without entering it.

        There torch.autocast is not switched on, so that a nested ``torch.autocast(enabled=False)`` is not seen.
        """
        if not self._enabled or not self.policy.rules:
            return func(*args, **(kwargs or {}))
        if self.policy.uses_paths:
            raise Unavailable(
                "a policy with rules for module paths cannot be entered inside a compiled function, where modules "
                "cannot be followed: enter it around the call of the compiled function"
            )
        return self._compiled.apply(func, args, kwargs or {})

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which runs in this region."""
        if not callable(function):
            raise InvalidInput(f"as a decorator {self!r} takes a function, not {type(function).__name__}")

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run

    def enter(self, path: ModulePath | None = None, spots: Spots | None = None) -> None:
        """Enter the region in this thread; `path` is where in the model it is entered, if not where the thread is.

        `spots` are those of a shared exponent's places where the entry goes on with what another one has begun.
        """
        entry = Entry(self)
        outer = threads.push(entry)
        if path is None:
            path = outer.engine.path if outer is not None and outer.engine is not None else ModulePath()
        runs = self._runs
        for device in self._devices:
            state = torch.is_autocast_enabled(device)
            if runs or state:
                entry.before.append((device, state, torch.get_autocast_dtype(device)))
                torch.set_autocast_enabled(device, runs)
                torch.set_autocast_dtype(device, self._dtype if runs else entry.before[-1][2])
        if not runs:
            return
        threads.install()
        steps.install()
        entry.engine = engine = self._engine(path)
        engine.spots = spots or engine.spots
        if self.policy.uses_paths or self._observers or self.exponents is not None:
            entry.follows_modules = True
            threads.follow_modules(True)
        if self._rulebook.strict:
            entry.audit = Audit(engine)
            entry.audit.__enter__()
        engine.__enter__()  # type: ignore[no-untyped-call]

    @property
    def _runs(self) -> bool:
        return self._enabled and bool(self.policy.rules or self._observers)

    def _engine(self, path: ModulePath) -> Engine:
        self._weights = WeightCasts()
        return Engine(self._rulebook, self._weights, path, _present(), self._dtype, self._observers, self.exponents)

    def leave(self, strict: bool = True) -> None:
        """Leave the region in this thread; `strict` also complains about rules that nothing matched."""
        entry = threads.pop(self)
        if entry.engine is not None:
            entry.engine.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if entry.audit is not None:
            entry.audit.__exit__(None, None, None)
        if entry.follows_modules:
            threads.follow_modules(False)
        for device, enabled, dtype in entry.before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        if entry.engine is not None:
            entry.engine.weights.forget()
            if strict and not threads.is_in(self):
                self._complain()

    def _complain(self) -> None:
        """Tell about rules of the user's that nothing matched: raise if strict, else warn once for a policy."""
        if not self._is_users or not self._rulebook.has_run:
            return
        report = self._rulebook.report()
        if not report.unused_by_user:
            return
        text = (
            f"policy {self.policy.name or 'unnamed'}: nothing matched "
            + "; ".join(f"rule {self.policy.rules.index(rule) + 1} ({rule})" for rule in report.unused_by_user)
            + f". Ops under a rule so far: {', '.join(report.ops) or 'none'}"
        )
        if self._rulebook.strict:
            raise InvalidInput(text + ". Mend its ops or where, or leave out strict=True")
        if self.policy not in _warned:
            _warned.add(self.policy)
            warnings.warn(text, UserWarning, stacklevel=4)

    # -- what was seen --------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return what this region has seen so far: unused rules, unseen contractions, ops that went to fp32."""
        return self._rulebook.report()

    def observe(self, callback: Callable[[Observation], object]) -> Callable[[], None]:
        """Call `callback` with an Observation after every op, from the next entry on; return what ends that.

        Costs nothing where there is no callback. The callback runs outside the policy, with module paths.
        """
        self._observers.append(callback)

        def end() -> None:
            if callback in self._observers:
                self._observers.remove(callback)

        return end

    def cast_weights(self) -> list[torch.Tensor]:
        """Return the cast weights of the latest entry that are alive, within it or kept for backward.

        For measuring the memory of a step.
        """
        return self._weights.tensors()

    def forget(self) -> None:
        """Cast every weight anew at its next use, within this entry too.

        Needed only where weights are written within an entry through a raw address that was taken before it.
        """
        forget_all()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle what was asked for and the shared exponents; what was seen and who observes stays behind."""
        asked = (self.preset, self._is_users, self._enabled, self._rulebook.strict)
        return _again, asked, {"exponents": self.exponents}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.exponents = state["exponents"]
        self._compiled = self._engine(ModulePath())

    def __repr__(self) -> str:
        return f"autocast({self.preset.name!r}{'' if self._enabled else ', enabled=False'})"


def _again(preset: Preset, is_users: bool, enabled: bool, strict: bool) -> autocast:
    """Return a region as another one was made."""
    region: autocast = autocast(preset, enabled=enabled, strict=strict)
    region._is_users = is_users
    return region


def _is_torch_spelling(device: object, dtype: torch.dtype | None) -> bool:
    if isinstance(device, str):
        return device in _DEVICES or isinstance(dtype, torch.dtype)
    return not isinstance(device, (Policy, Preset, Path))


@cache
def _check(policy: Policy) -> None:
    """Raise UnknownName for a rule that names an op the table does not have."""
    rows = table.TABLES[policy.table]
    if not {op for rule in policy.rules for op in rule.ops} <= rows.keys() | {row.op_class for row in rows.values()}:
        check_ops(policy, table.op_names(policy.table))


@cache
def _devices() -> tuple[str, ...]:
    """Return the devices whose torch.autocast tells of a region: the CPU, CUDA (the default) and the one present."""
    accelerator = torch.accelerator.current_accelerator()
    names = ["cpu", "cuda", *([] if accelerator is None else [accelerator.type])]
    return tuple(dict.fromkeys(name for name in names if torch.amp.is_autocast_available(name)))


@cache
def _present() -> tuple[str, ...]:
    """Return the devices on which ops can run here."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
