"""The seam where calls of torch's functions are seen, and the place in model and source of the running code."""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowp.compat import private, sparse_values
from lowp.hooks import Uncopied
from lowp.kernels.tracing import is_transformed
from lowp.numerics.models import Models
from lowp.numerics.schedule import MODE
from lowp.ops import table
from lowp.ops.rows import Row

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


class Seam(TorchFunctionMode):
    """Lets observers see each call of a function of torch's that has run: the function, its arguments, its result.

    One mode for all of them, in force while there are any, below the modes that were entered since `begin`.
    `seconds` counts what the observers take, and what torch needs to come here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._observers: list[Callable[[Callable[..., Any], Any, Any, Any], None]] = []
        self._is_on = self._rests = False
        self._place = 0

    def begin(self) -> None:
        """Stay below the modes that are entered from now on."""
        self._place = len(_modes())

    def take_seconds(self) -> float:
        """The seconds since this was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def let(self, observer: Callable[[Callable[..., Any], Any, Any, Any], None], sees: bool) -> bool:
        """Let an observer see the calls from now on, or no more; return whether that is new."""
        if sees is (observer in self._observers):
            return False
        (self._observers.append if sees else self._observers.remove)(observer)
        self._turn()
        return True

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Let nobody see calls in here."""
        self._rests = True
        self._turn()
        try:
            yield
        finally:
            self._rests = False
            self._turn()

    def _turn(self) -> None:
        """Be in force or not."""
        above: list[Any] = []
        if self._observers and not self._rests:
            if not self._is_on:
                above = [_pop() for _ in range(max(len(_modes()) - self._place, 0))]
                _push(self)
                self._is_on = True
        elif self._is_on and any(one is self for one in _modes()):  # a mode that is running is off the stack
            while (one := _pop()) is not self:
                above.append(one)
            self._is_on = False
        for one in reversed(above):
            _push(one)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call, and let it be seen."""
        result = func(*args, **(kwargs or {}))
        started = time.perf_counter()
        for saw in tuple(self._observers):
            saw(func, args, kwargs or {}, result)
        self.seconds += time.perf_counter() - started + MODE
        return result


def hear_backward(heard: Callable[..., None]) -> Callable[[], None]:
    """Let `heard` make the calls of `Tensor.backward`, which it is given before their arguments; return what ends that.

    A mode that is called for `Tensor.backward` is put in force again by torch when that returns. It would then cost
    time in each call up to the optimizer's step, of which clipping alone makes several a parameter.
    """
    owner: Any = Tensor
    original: Callable[..., Any] = owner.backward

    @wraps(original)
    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        heard(original, loss, *args, **kwargs)

    def end() -> None:
        if owner.backward is backward:
            owner.backward = original

    owner.backward = backward
    return end


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
