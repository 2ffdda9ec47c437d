"""Where in the model an op runs: the path of its module."""

from __future__ import annotations

import weakref

from torch import nn

__all__ = ["ModulePath"]


class ModulePath:
    """The path of the module that runs, relative to the outermost module that was called.

    Wrappers are transparent: below DataParallel, DistributedDataParallel and compiled modules paths are those of the
    model within. A module that the outermost one does not hold keeps the path of its caller.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._outermost: weakref.ReferenceType[nn.Module] | None = None

    @property
    def current(self) -> str:
        """The path, '' in the outermost module and outside any."""
        return self._stack[-1] if self._stack else ""

    @property
    def outermost(self) -> nn.Module | None:
        """The outermost module that was called, while one runs."""
        return self._outermost() if self._stack and self._outermost is not None else None

    def copy(self) -> ModulePath:
        """Return a path that stands where this one stands now and goes its own way."""
        other = ModulePath()
        other._stack, other._names, other._outermost = list(self._stack), self._names, self._outermost
        return other

    def enter(self, module: nn.Module) -> None:
        """Follow a call into a module."""
        if not self._stack and (self._outermost is None or self._outermost() is not module):
            self._outermost = weakref.ref(module)
            self._names = {id(one): name for name, one in _unwrapped(module).named_modules()}
        self._stack.append(self._names.get(id(module), self.current))

    def leave(self) -> None:
        """Follow a return; one too many is harmless, as when a region begins within a module."""
        if self._stack:
            self._stack.pop()


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model within DataParallel, DistributedDataParallel and compiled modules."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module
