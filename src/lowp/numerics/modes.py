"""Function modes that come and go while others are active, and the place in model and source of the running code."""

import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.compat import private, sparse_values
from lowp.hooks import Uncopied
from lowp.kernels.tracing import is_transformed
from lowp.numerics.models import Models
from lowp.ops import table
from lowp.ops.table import Row

_modes = cast(Callable[[], list[Any]], private("torch.overrides._get_current_function_mode_stack"))
_push = cast(Callable[[Any], None], private("torch.overrides._push_mode"))
_pop = cast(Callable[[], Any], private("torch.overrides._pop_mode"))
_graph_task = cast(Callable[[], int], private("torch._C._current_graph_task_id"))
_is_wrapped = cast(Callable[[Tensor], bool], private("torch._C._functorch.is_functorch_wrapped_tensor"))
_unwrapped = cast(Callable[[Tensor], Tensor], private("torch._C._functorch.get_unwrapped"))
_outside_transforms = cast(
    Callable[[], AbstractContextManager[object]],
    private("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"),
)
_OWN = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (str(torch.__file__), __file__))
_LOWP = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RECIPES = os.path.join(_LOWP, "recipes") + os.sep


def depth() -> int:
    """Return how many function modes are active."""
    return len(_modes())


def is_on(mode: Any) -> bool:
    """Whether a mode is active."""
    return any(one is mode for one in _modes())


def put_on(mode: Any, place: int) -> None:
    """Put a mode in force below all that were entered since `place` of them were."""
    above = [_pop() for _ in range(max(depth() - place, 0))]
    _push(mode)
    for one in reversed(above):
        _push(one)


def take_off(mode: Any) -> bool:
    """Remove a mode, wherever it is on the stack. Return False if it is not active, or is running."""
    if not is_on(mode):
        return False
    above = []
    while (one := _pop()) is not mode:
        above.append(one)
    for one in reversed(above):
        _push(one)
    return True


def in_backward() -> bool:
    """Whether a backward pass runs here: a forward computation is then a recomputation of a checkpoint."""
    return _graph_task() != -1


@cache
def op_of(function: Callable[..., Any]) -> Row | None:
    """Return the row of a function in the op table; None if it moves, describes or makes tensors."""
    row = table.row_of(function)
    return None if row is None or row.op_class == "structural" else row


_PLAIN = (Tensor, nn.Parameter)


def numbers_of(x: Tensor) -> Tensor:
    """The strided tensor that a tensor's numbers lie in: this rank's shard of a distributed one, the values of a sparse
    one, which may be shorter; an empty one where torch shows none. Any other as it is.
    """
    found: Tensor = x.to_local() if type(x) not in _PLAIN and hasattr(x, "to_local") else x
    if found.layout is torch.strided:
        return found
    values = sparse_values(found)
    return torch.empty(0) if values is None else values


@contextmanager
def untransformed(x: Tensor) -> Iterator[Tensor]:
    """Leave all transforms of torch.func, and give a tensor as it is there, such as the whole batch of vmap."""
    if not is_transformed():
        yield x
        return
    while _is_wrapped(x):
        x = _unwrapped(x)
    with _outside_transforms():
        yield x


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dictionaries, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in tensors_in(part)]
    return []


def source_line() -> str:
    """Return the line of the user's code that called the running function, as ``train.py:88``; '' if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_library(file):
            return _line(file, frame.f_lineno)
        frame = frame.f_back
    return ""


@cache
def _line(file: str, number: int) -> str:
    return f"{os.path.basename(file)}:{number}"


@cache
def _is_library(file: str) -> bool:
    if file.startswith("<"):
        return True
    file = os.path.abspath(file)
    return file.startswith(_OWN) or (file.startswith(_LOWP) and not file.startswith(_RECIPES))


class Paths:
    """The names of the modules that run."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._stack: list[str] = []

    def follow(
        self,
        entered: Callable[[nn.Module], None] = lambda module: None,
        left: Callable[[nn.Module, Any], None] = lambda module, result: None,
        only: Collection[str] | None = None,
        running: nn.Module | None = None,
    ) -> Callable[[], None]:
        """Follow the calls of the modules, or of those that are named and what is within them; return what ends that.

        Outside of what is followed the path is that of the module around it, '' where there is none. `running` is a
        module whose call has begun, so that no hook will tell of it.
        """
        self.clear()
        handles: list[Any] = []
        ended: list[bool] = []  # a call that runs already goes on to call hooks that were removed

        def enter(module: nn.Module, given: Any) -> None:
            if not ended:
                self._stack.append(self._models.paths.get(id(module), self.current))
                entered(module)

        def leave(module: nn.Module, given: Any, result: Any) -> None:
            if not ended:
                left(module, result)
                if self._stack:
                    self._stack.pop()

        for name, module in self._models.modules.items():
            if only is None or name in only or any(name.startswith(f"{one}." if one else "") for one in only):
                handles.append(module.register_forward_pre_hook(Uncopied(enter)))
                handles.append(module.register_forward_hook(Uncopied(leave), always_call=True))
                if module is running:
                    self._stack.append(name)

        def end() -> None:
            ended.append(True)
            for handle in handles:
                handle.remove()

        return end

    @property
    def current(self) -> str:
        """The path of the module that runs; '' for a single model itself and outside of all modules."""
        return self._stack[-1] if self._stack else ""

    @property
    def around(self) -> str:
        """The path of the caller of the module that runs, '' as for `current`."""
        return self._stack[-2] if len(self._stack) > 1 else ""

    def clear(self) -> None:
        """Leave every module."""
        self._stack.clear()


class CompilerStance:
    """Whether compiled code runs compiled or as it was written: hooks in it must be neither compiled nor guarded."""

    def __init__(self) -> None:
        self._eager: Any = None

    def set(self, compiled: bool) -> None:
        """Run compiled code compiled from now on, or as it was written."""
        if not compiled and self._eager is None and "torch._dynamo" in sys.modules:
            self._eager = torch.compiler.set_stance("force_eager")
            self._eager.__enter__()
        elif compiled and self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None
