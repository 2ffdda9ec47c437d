"""Module calls: the outermost module runs under the rules and returns fp32 to the script."""

import re
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.compat import private
from lowp.errors import LowpError
from lowp.kernels.tracing import functorch_is_active, is_jit_tracing
from lowp.launch.boot import replaces
from lowp.launch.gradients import SIXTEEN_BIT
from lowp.launch.session import Session

_tree_map = cast(Callable[[Callable[[Any], Any], Any], Any], private("torch.utils._pytree.tree_map"))
_leaves = cast(Callable[[Any], list[Any]], private("torch.utils._pytree.tree_leaves"))
_Loss = cast(type, private("torch.nn.modules.loss._Loss"))
# torch's errors for an op with two dtypes, or with a dtype for which there is no kernel
_DTYPE_ERROR = re.compile(r"dtype|scalar type|same type|not implemented for '(Half|BFloat16)'|must have the same", re.I)


def to_fp32(value: Any) -> Any:
    """Return a 16-bit tensor in fp32, attached to the graph; anything else unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT else value


def _has_parameters(module: nn.Module) -> bool:
    """Whether a module is a model: losses, metrics and augmentations have no parameters."""
    # a replica of nn.DataParallel keeps its parameters as plain attributes
    return next(module.parameters(), None) is not None or getattr(module, "_is_replica", False)


def _first_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a model's first parameter, which a conversion changes; None if it has none."""
    first = next(module.parameters(), None)
    return None if first is None else first.dtype


def _asks_for_shapes(given: Any) -> bool:
    """Whether a module is called for the shapes of its results: with tensors of the meta device, or Keras's symbols."""
    return any(
        one.is_meta if isinstance(one, Tensor) else type(one).__name__ == "KerasTensor" for one in _leaves(given)
    )


def _without_optimizer(model: nn.Module | None) -> tuple[str, str]:
    """Return what runs in fp32, and why, if no optimizer holds the parameters of a model."""
    what = "a model" if model is None else f"model {type(model).__name__}"
    return what, "its parameters are in no optimizer of torch.optim, fastai or Keras, whose step could be skipped"


class Forward:
    """The module calls of one session. `original` is torch's own `nn.Module.__call__`."""

    def __init__(self, session: Session, original: Callable[..., Any]) -> None:
        self.session, self.original = session, original
        # by model: whether it is left alone, and the dtype of its first parameter when that was found
        self._left_alone: weakref.WeakKeyDictionary[nn.Module, tuple[bool, Any]] = weakref.WeakKeyDictionary()
        self._in_fp32: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # models that no optimizer holds: the sentence noted, and whether a backward pass has shown it
        self._unstepped: weakref.WeakKeyDictionary[nn.Module, tuple[str, bool]] = weakref.WeakKeyDictionary()
        self._needs_steps = session.is_scaling or session.preset.policy.parameters is not None
        self.has_models = False  # whether the script has called a model, be it one that is left alone
        self._rounded: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose gradients the rules have changed
        # the models that the script has called to train them
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def outermost(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module that the script calls."""
        session = self.session
        if session.rests or _asks_for_shapes((args, kwargs)) or self._is_plain(module):
            with session.in_script():
                return self.original(module, *args, **kwargs)
        if torch.is_grad_enabled():
            self._rounded.add(module)
            if module.training:
                self._meet(module)
        return self.under_rules(lambda: self.inner(module, args, kwargs))

    def _meet(self, module: nn.Module) -> None:
        """Prepare a model that is trained, once."""
        if module not in self.models:
            self.models.add(module)
            if self.session.preset.policy.parameters is None:  # else at the first step, with the optimizer
                self.session.precision.prepare(module)

    def under_rules(self, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute` under the rules, in fp32."""
        session = self.session
        if not functorch_is_active():  # a transform cannot write the scale: a later pass ends the step
            session.end_step()
        session.record.calls += 1
        with session.at(calls=session.local.calls + 1), session.precision.autocast():
            output = compute()
        return to_fp32(output) if isinstance(output, Tensor) else _tree_map(to_fp32, output)

    def inner(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module within one that runs under the rules; in fp32 from the first error of dtypes or of lowp on.

        The innermost module sees the error first, so that only this module is kept in fp32.
        """
        if module in self._in_fp32:
            return self._wide(module, args, kwargs)
        try:
            return self.original(module, *args, **kwargs)
        except (RuntimeError, LowpError) as error:
            is_refused = isinstance(error, LowpError)
            if not is_refused and not _DTYPE_ERROR.search(str(error)):
                raise
            try:
                output = self._wide(module, args, kwargs)
            except (RuntimeError, LowpError):
                raise error from None
            self._in_fp32.add(module)
            first = str(error).strip().splitlines()[0]
            why = first.partition(": ")[0] if is_refused else f"its code mixes dtypes ({first})"
            self.session.keeps_in_fp32(f"module {type(module).__name__}", why)
            return output

    def _wide(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.session.in_fp32():
            return self.original(module, *_tree_map(to_fp32, args), **_tree_map(to_fp32, kwargs))

    def leave_alone(self, leaves: Iterable[Tensor]) -> None:
        """From now on run the models with any of these parameters, which no optimizer holds, in fp32."""
        parameters = {id(leaf) for leaf in leaves}

        def reached(models: Iterable[nn.Module]) -> list[nn.Module]:
            return [one for one in models if any(id(parameter) in parameters for parameter in one.parameters())]

        rounded = reached(self._rounded)
        self._rounded.difference_update(rounded)
        models: list[nn.Module | None] = [*(rounded or reached(self._unstepped))]
        for module in models or [None]:  # None: what was called is not known
            what, why = _without_optimizer(module)
            why += "; its calls before its first backward pass were rounded" if rounded else ""
            sentence = self.session.keeps_in_fp32(what, why)
            if module is not None:
                self._unstepped[module] = sentence, True
                self._left_alone[module] = True, _first_dtype(module)

    def look_again(self) -> None:
        """Recompute which models are left alone: an optimizer was made, possibly after the first backward pass."""
        self._left_alone.clear()
        former = set()
        for module, (sentence, is_shown) in list(self._unstepped.items()):
            if is_shown and not any(map(self.session.is_stepped, module.parameters())):
                self._left_alone[module] = True, _first_dtype(module)
            else:
                del self._unstepped[module]
                former.add(sentence)
        for sentence in former.difference(sentence for sentence, _ in self._unstepped.values()):
            self.session.record.take_back(sentence)

    def _waits(self, module: nn.Module) -> bool:
        """Whether a model is trained before there is any optimizer, without which it is to run in fp32."""
        if not self._needs_steps or self.session.stepped or not (module.training and torch.is_grad_enabled()):
            return False
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return False
        self._meet(module)
        if module not in self._unstepped:
            sentence = self.session.keeps_in_fp32(*_without_optimizer(module), is_certain=False)
            self._unstepped[module] = sentence, False
        return True

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether a module that the script calls does not run under the rules."""
        alone, dtype = self._left_alone.get(module, (None, None))
        if alone is None or dtype is not _first_dtype(module):
            if isinstance(module, _Loss) or not _has_parameters(module):
                return True  # not kept: a module may make its parameters in its first call
            alone = self._is_left_alone(module)
            self._left_alone[module] = alone, _first_dtype(module)
        return (
            alone or self._waits(module) or is_jit_tracing()
        )  # what is recorded belongs to the script, as its checkpoints do

    def _is_left_alone(self, module: nn.Module) -> bool:
        """Whether the rules do not apply to a model, because it is not in fp32."""
        self.has_models = True
        dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
        if other := dtypes - {torch.float32}:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in other))
            what = f"the parameters of {type(module).__name__} are {names} by the script's own choice"
            if self.session.record.note(f"{what}: it is not changed") and self.session.settings.strict:
                self.session.refuse(what)
            return True
        return False


def install(session: Session) -> None:
    """Run the outermost module call under the session's rules. Without rules, only note the first call."""
    if session.is_plain:
        _watch_first_call(session)
        return
    original = nn.Module.__call__
    forward = session.forward = Forward(session, original)
    local = session.local
    is_compiling = torch.compiler.is_compiling

    @replaces(nn.Module)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or local.alone or local.backward or session.rests:
            return original(self, *args, **kwargs)
        if local.calls:
            return forward.inner(self, args, kwargs)
        return forward.outermost(self, args, kwargs)

    _install_functions(session)
    _install_compile(session, forward)
    _install_checkpoints(session, forward)
    _install_traces(session)


def _watch_first_call(session: Session) -> None:
    """Note at the first module call that a model ran; patches by other code stay in place."""
    original = nn.Module.__call__

    @replaces(nn.Module)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        session.record.calls = 1
        if nn.Module.__call__ is __call__:
            nn.Module.__call__ = original  # type: ignore[method-assign]
        return original(self, *args, **kwargs)


def _install_compile(session: Session, forward: Forward) -> None:
    """Run a compiled function under the rules as a whole: the modules within cannot be told apart."""
    original = cast(Callable[..., Any], torch.compile)
    local = session.local

    def around(compiled: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(compiled, nn.Module):
            return compiled

        @wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if session.rests or local.calls or local.alone or local.backward or torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            return forward.under_rules(lambda: compiled(*args, **kwargs))

        return call

    @replaces(torch)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is not None:
            return around(original(model, *args, **kwargs))
        decorate = original(model, *args, **kwargs)
        return lambda function: around(decorate(function))


def _install_checkpoints(session: Session, forward: Forward) -> None:
    """Recompute checkpointed functions in the backward pass in the formats of the forward pass.

    A function that is checkpointed outside of any module runs under the rules as a whole, as a compiled one does.
    """
    module = cast(Any, sys.modules["torch.utils.checkpoint"])
    original = cast(Callable[..., Any], module.checkpoint)
    local = session.local

    @replaces(module)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if session.rests or torch.compiler.is_compiling():
            return original(function, *args, **kwargs)
        if not (local.calls or local.alone or local.backward):
            return forward.under_rules(lambda: checkpoint(function, *args, **kwargs))
        calls, alone = local.calls, local.alone

        @wraps(function)
        def recomputed(*given: Any, **named: Any) -> Any:
            with session.at(calls=calls, alone=alone, backward=0):
                return function(*given, **named)

        return original(recomputed, *args, **kwargs)


def _install_traces(session: Session) -> None:
    """Let torch.jit.trace compare what it has recorded, a plain model, with the plain model."""
    module = cast(Any, torch.jit)

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def trace(*args: Any, **kwargs: Any) -> Any:
            with session.in_script():
                return original(*args, **kwargs)

        return trace

    module.trace, module.trace_module = patched(module.trace), patched(module.trace_module)


def _install_functions(session: Session) -> None:
    """Keep a user's autograd Function in fp32 unless it declares its casts: its backward is written for one dtype."""
    function = cast(Any, torch.autograd.Function)
    original = function.__dict__["apply"].__get__  # a class method, from torch 2.15 on of C

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        run, local = original(None, cls), session.local
        if not local.calls or session.rests or local.backward or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        is_declared = cls.__module__.partition(".")[0] in ("torch", "lowp") or hasattr(
            cast(Any, cls).forward, "__wrapped__"
        )
        if is_declared or not any(isinstance(one, Tensor) and one.is_floating_point() for one in args):
            return run(*args, **kwargs)
        session.keeps_in_fp32(f"autograd Function {cls.__name__}", "its forward has no torch.amp.custom_fwd decorator")
        with session.in_fp32():
            return run(*map(to_fp32, args), **kwargs)

    function.apply = classmethod(apply)
