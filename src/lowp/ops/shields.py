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
_is_batched = cast(Callable[[Tensor], bool], private("torch._C._functorch.is_legacy_batchedtensor"))
_deeper, _less_deep = (
    cast(Callable[[], int], private(f"torch._C._vmapmode_{name}crement_nesting")) for name in ("in", "de")
)
_unbatched = cast(Callable[..., Tensor], private("torch._remove_batch_dim"))
_batched = cast(Callable[..., Tensor], private("torch._add_batch_dim"))


def shield() -> AbstractContextManager[object]:
    """Disable function modes and torch.autocast within the context: a backward may be called within a region."""
    return without_autocast() if torch.compiler.is_compiling() else _Shield()


def shielded(function: Callable[..., _Answer], gradient: Tensor, *given: Any) -> _Answer:
    """Return the result of a backward function within `shield`, which is entered only if a mode could interfere.

    `given`: its context, and what that saved: read before, outside of the shield, as a checkpoint runs its region then.
    The gradients of is_grads_batched=True are computed one after the other, as by calls of their own.
    """
    if not torch.compiler.is_compiling() and type(gradient) is Tensor:
        if _is_batched(gradient):
            return cast(_Answer, _each(function, gradient, *given))
        if not (_function_modes() or _is_any_autocast_enabled()):
            return function(gradient, *given)
    with shield():
        return function(gradient, *given)


def _each(function: Callable[..., Any], gradient: Tensor, *given: Any) -> Any:
    """Return the results of a backward function for each gradient of a batch, as batches."""
    level = _deeper() - 1
    _less_deep(), _less_deep()  # out of the batch, in which torch draws no random numbers
    try:
        found = [shielded(function, one, *given) for one in _unbatched(gradient, level, 1, 0).unbind()]
    finally:
        _deeper()
    if isinstance(found[0], Tensor):
        return _batched(torch.stack(found), 0, level)
    columns = zip(*found, strict=True)
    return [None if one[0] is None else _batched(torch.stack(one), 0, level) for one in columns]


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
