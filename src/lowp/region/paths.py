"""Where in the model an op runs: the path of its module."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import NamedTuple

from torch import nn

from lowp.compat import unwrapped

__all__ = ["ModulePath"]


class _Running(NamedTuple):
    """A module that runs: its path, its identity, and the frame of torch's that calls it; None for one elsewhere."""

    path: str
    module: int
    frame: FrameType | None


class ModulePath:
    """The path of the module that runs, relative to the outermost module that was called.

    Wrappers are transparent: below DataParallel, DistributedDataParallel and compiled modules paths are those of the
    model within. A module that the outermost one does not hold keeps the path of its caller.

    torch tells of a module's end by a hook, but of none that an exception like KeyboardInterrupt has ended: `settle`
    asks the stack of the thread, whose innermost frames are nearly always those of the module itself.
    """

    def __init__(self) -> None:
        self.running: list[_Running] = []
        self._names: dict[int, str] = {}
        self._outermost: weakref.ReferenceType[nn.Module] | None = None

    @property
    def current(self) -> str:
        """The path, '' in the outermost module and outside any."""
        return self.running[-1].path if self.running else ""

    @property
    def outermost(self) -> nn.Module | None:
        """The outermost module that was called, while one runs."""
        return self._outermost() if self.running and self._outermost is not None else None

    def copy(self) -> ModulePath:
        """Return a path that stands where this one stands now and goes its own way."""
        other = ModulePath()
        other.running = [one._replace(frame=None) for one in self.running]
        other._names, other._outermost = self._names, self._outermost
        return other

    def enter(self, module: nn.Module, frame: FrameType | None = None) -> None:
        """Follow a call into a module, whose call by torch is `frame`."""
        if frame is not None:
            self.settle(frame)
        if not self.running and (self._outermost is None or self._outermost() is not module):
            self._outermost = weakref.ref(module)
            self._names = {id(one): name for name, one in unwrapped(module).named_modules()}
        self.running.append(_Running(self._names.get(id(module), self.current), id(module), frame))

    def leave(self, module: nn.Module) -> None:
        """Follow a return from a module, and from what was called within it and has not told of its end.

        A module that was not entered changes nothing: a region may begin within it, and a hook before it may raise.
        """
        for index in range(len(self.running) - 1, -1, -1):
            if self.running[index].module == id(module):
                del self.running[index:]
                return

    def settle(self, frame: FrameType) -> bool:
        """Leave the modules that run no more, `frame` being one of this thread's that runs; return whether any did."""
        found = len(self.running)
        while self.running and (last := self.running[-1].frame) is not None and not _is_below(last, frame):
            self.running.pop()
        return len(self.running) != found


def _is_below(wanted: FrameType, frame: FrameType) -> bool:
    """Whether a frame has called another one, by however many calls."""
    below: FrameType | None = frame
    while below is not None and below is not wanted:
        below = below.f_back
    return below is not None
