"""Where a monitor listens: calls of modules, backward passes, and the object that scales the loss of a step."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lowp import distributed
from lowp.compat import forward_hooks, is_compiled, is_compiled_in_place, skipped_by_compilers, unwrapped
from lowp.hooks import Uncopied, listed
from lowp.kernels.choose.hardware import is_on_host
from lowp.monitoring.pace import Pace, now
from lowp.numerics.models import Models
from lowp.numerics.modes import in_backward
from lowp.numerics.tape import random_state, set_random_state
from lowp.precision import Precision

_CALLERS = 10  # frames between an optimizer's hook and the scaler that steps it


class Listener:
    """What hears of backward passes: `told` is called with the loss of each before it, and False.

    Where that returns true it is called after the pass, too, with True. A loss on the host that is not above `limit` is
    appended to `usual` instead, up to `most` of them: in nearly all steps this is all, without a call.
    """

    __slots__ = ("limit", "most", "told", "usual")

    def __init__(self, told: Callable[[Tensor, bool], bool], most: int) -> None:
        self.told, self.most, self.limit, self.usual = told, most, -math.inf, list[float]()


_listeners: list[Listener] = []
_original: list[Callable[..., Any]] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Let a listener hear of backward passes; return what ends this.

    `Tensor.backward`, GradScaler and lowp's Precision all call torch.autograd.backward.
    """
    end = listed(_listeners, listener)
    if not _original:
        _original.append(torch.autograd.backward)
        setattr(torch.autograd, "backward", _wrapped(torch.autograd.backward))  # noqa: B010

    def stop() -> None:
        end()
        if not _listeners and _original and getattr(torch.autograd.backward, "__wrapped__", None) is _original[0]:
            setattr(torch.autograd, "backward", _original.pop())  # noqa: B010

    return stop


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @skipped_by_compilers
    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        told: list[Listener] = []
        if isinstance(tensors, Tensor) and not (tensors.dim() and in_backward()):  # of a checkpoint
            is_read = type(tensors) is Tensor and not tensors.dim() and is_on_host(tensors)
            loss = tensors.item() if is_read else math.inf
            for one in tuple(_listeners):  # a comprehension would be a function
                if type(loss) is float and loss <= one.limit and len(one.usual) < one.most:
                    one.usual.append(loss)
                elif one.told(tensors, False):
                    told.append(one)
        result = original(tensors, *args, **kwargs)
        for one in told:
            one.told(tensors, True)
        return result

    return backward


def visible(models: Models) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that run as Python, with their paths: compiled ones as a whole, and nothing within them."""
    for root in models.roots.values():
        if not is_compiled_in_place(root):
            yield from within(root, models)


def within(module: nn.Module, models: Models) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those within it, as `visible` does for the roots."""
    inner = getattr(module, "_orig_mod", None)
    path = models.paths.get(id(module if inner is None else inner))
    if path is not None:
        yield path, module
    if inner is None:
        for child in module.children():
            if not is_compiled_in_place(child):
                yield from within(child, models)


class Followed:
    """Modules whose calls are followed: between `start` and `stop`, `ended` is called with path and result of each."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], ended: Callable[[str, Any], None]) -> None:
        self.modules = list(modules)
        self._hooks = [(forward_hooks(module), Uncopied(_saw, ended, path)) for path, module in self.modules]

    def start(self) -> None:
        """Follow the calls from now on."""
        for hooks, hook in self._hooks:
            hooks[self] = hook

    def stop(self) -> None:
        """Follow them no more."""
        for hooks, _ in self._hooks:
            hooks.pop(self, None)

    def any_compiled(self) -> bool:
        """Whether one of the modules was compiled in place since."""
        return any(is_compiled_in_place(module) for _, module in self.modules)


class Calls:
    """The calls of all modules of the models in a look: `ended` is called with path and result of each.

    What a compiled model computes within is seen as it is run once more as it was written, before its call; not in
    several ranks, where a forward pass of one alone would wait for the others.
    """

    def __init__(self, models: Models, pace: Pace, ended: Callable[[str, Any], None]) -> None:
        self._models, self._pace, self._ended = models, pace, ended
        self._version = -1  # of the models, of which the following are
        self._visible = Followed((), ended)
        self._compiled: list[nn.Module] = []
        self._inner: dict[int, Followed] = {}  # by the ids of compiled models, what is within them
        self._handles: list[Any] = []
        self.is_aside = False

    def start(self) -> None:
        """Follow the calls from now on."""
        self._models.renew()
        if self._version != self._models.version or self._visible.any_compiled():
            self._version = self._models.version
            self._visible = Followed(visible(self._models), self._ended)
            self._compiled = [root for root in self._models.roots.values() if is_compiled(root)]
            self._inner.clear()
        self._visible.start()
        for root in () if distributed.has_other_ranks() else self._compiled:
            again = Uncopied(self._run_inside)
            self._handles.append(root.register_forward_pre_hook(again, prepend=True, with_kwargs=True))

    def stop(self) -> None:
        """Follow them no more."""
        self._visible.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _run_inside(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_aside or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        started, own, model = now(), self._pace.seconds, unwrapped(root)
        inner = self._inner.get(id(root)) or self._inner.setdefault(
            id(root), Followed(within(model, self._models), self._ended)
        )
        inner.start()
        self.is_aside = True
        try:
            with aside(self._models):
                model(*args, **kwargs)
        except Exception as error:  # of code that need not run twice: the training goes on
            print(f"lowp monitor: the compiled model is seen from outside alone: {error}"[:200], file=sys.stderr)
        finally:
            self.is_aside = False
            inner.stop()
        self._pace.spent(started, own - self._pace.seconds)  # what its hooks took is counted


def _saw(ended: Callable[[str, Any], None], path: str, module: nn.Module, given: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and not in_backward():
        ended(path, result)


@contextmanager
def aside(models: Models) -> Iterator[None]:
    """Run a forward pass in here as it was written, without a trace: random state and buffers are put back."""
    random = random_state()
    buffers = [(one, one.clone()) for _, one in models.named_buffers()]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        set_random_state(random)
        with torch.no_grad():
            for one, value in buffers:
                one.copy_(value)


def owners_of_step() -> tuple[Any, Any]:
    """Return the scaler and the precision of lowp's that run the optimizer's step that is going on; None without."""
    scaler = precision = None
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_CALLERS):
        if frame is None:
            break
        one = frame.f_locals.get("self")
        if isinstance(one, torch.amp.GradScaler) and one.is_enabled():
            scaler = scaler or one
        elif isinstance(one, Precision):
            precision = precision or one
            scaler = scaler or (one.scaler if one.scaler.is_enabled() else None)
        frame = frame.f_back
    return scaler, precision
