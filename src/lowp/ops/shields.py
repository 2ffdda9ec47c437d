"""Shields of our own products from torch.autocast and from function modes: a backward may be called within a region."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lowp.compat import accelerator, private

_Answer = TypeVar("_Answer")
DisableAutocast = cast(Callable[[], AbstractContextManager[None]], private("torch._C._DisableAutocast"))
DisableTorchFunction = cast(Callable[[], AbstractContextManager[None]], private("torch._C.DisableTorchFunction"))
_function_modes = cast(Callable[[], int], private("torch._C._len_torch_function_stack"))
_is_any_autocast_enabled = cast(Callable[[], bool], private("torch._C._is_any_autocast_enabled"))


def shield() -> AbstractContextManager[object]:
    """Disable function modes and torch.autocast within the context: a backward may be called within a region."""
    return without_autocast() if torch.compiler.is_compiling() else _Shield()


def shielded(function: Callable[[Tensor, Any], _Answer], gradient: Tensor, ctx: Any) -> _Answer:
    """Return the result of a backward function within `shield`, which is entered only if a mode could interfere."""
    if not torch.compiler.is_compiling() and type(gradient) is Tensor:
        if not (_function_modes() or _is_any_autocast_enabled()):
            return function(gradient, ctx)
    with shield():
        return function(gradient, ctx)


def without_autocast() -> AbstractContextManager[object]:
    """Switch torch.autocast off while torch.compile traces, on the CPU and on the accelerator present."""
    kind = accelerator()
    return torch.autocast("cpu", enabled=False) if kind is None else _without_autocast(kind)


@contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast(kind, enabled=False):
        yield


class _Shield:
    """Both contexts in one: an ExitStack takes several times as long."""

    __slots__ = ("autocast", "functions")

    def __enter__(self) -> None:
        self.functions, self.autocast = DisableTorchFunction(), DisableAutocast()
        self.functions.__enter__()
        self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.autocast.__exit__(*error)
        self.functions.__exit__(*error)
