"""The place in the model where an op runs."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import NamedTuple

from torch import nn

from lowp.compat import unwrapped


class _Running(NamedTuple):
    """A running module: its path, its id, and torch's frame that calls it, or None for a frame of another thread."""

    path: str
    module: int
    frame: FrameType | None


class ModulePath:
    """The path of the running module, relative to the outermost module that was called.

    Wrappers are transparent: below DataParallel, DistributedDataParallel and compiled modules, paths are those of the
    wrapped model. A module that is not part of the outermost module keeps the path of its caller.

    torch calls a hook when a module returns, but not if an exception such as KeyboardInterrupt ended the module. So
    `settle` checks the thread's stack, whose innermost frames are nearly always those of the module itself.
    """

    def __init__(self) -> None:
        self.running: list[_Running] = []
        self._names: dict[int, str] = {}
        self._outermost: weakref.ReferenceType[nn.Module] | None = None

    @property
    def current(self) -> str:
        """The path: '' in the outermost module and outside any module."""
        return self.running[-1].path if self.running else ""

    @property
    def outermost(self) -> nn.Module | None:
        """The outermost module that was called, or None if no module runs."""
        return self._outermost() if self.running and self._outermost is not None else None

    def copy(self) -> ModulePath:
        """Return an independent copy at the present position."""
        other = ModulePath()
        other.running = [one._replace(frame=None) for one in self.running]
        other._names, other._outermost = self._names, self._outermost
        return other

    def enter(self, module: nn.Module, frame: FrameType | None = None) -> bool:
        """Record a call of a module; return whether it is the outermost. `frame` is torch's frame that calls it."""
        if frame is not None and self.running:
            self.settle(frame)
        is_outermost = not self.running
        if is_outermost and (self._outermost is None or self._outermost() is not module):
            self._outermost = weakref.ref(module)
            self._names = {id(one): name for name, one in unwrapped(module).named_modules()}
        path = self._names.get(id(module))
        self.running.append(_Running(self.current if path is None else path, id(module), frame))
        return is_outermost

    def leave(self, module: nn.Module) -> None:
        """Record the return of a module, and of modules called within it whose end was not reported.

        A module that was not entered is ignored: a region may begin within it, and an earlier hook may raise.
        """
        for index in reversed(range(len(self.running))):
            if self.running[index].module == id(module):
                del self.running[index:]
                return

    def settle(self, frame: FrameType) -> bool:
        """Remove modules that no longer run, given a running frame of this thread. Return whether any was removed."""
        found = len(self.running)
        while self.running and (last := self.running[-1].frame) is not None:
            below: FrameType | None = frame
            while below is not None and below is not last:  # has `last` called it, directly or through other calls?
                below = below.f_back
            if below is not None:
                break
            self.running.pop()
        return len(self.running) != found
