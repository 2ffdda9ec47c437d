"""A script that handles its precision itself: lowp stands down and says so, or takes over with --override."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch

from lowp.launch.session import Session


def install(session: Session) -> None:
    """Detect an enabled torch.autocast that is entered and an enabled GradScaler that is made."""
    if session.is_plain:
        return
    _watch_scalers(session)
    _watch_autocast(session)


def _is_own() -> bool:
    """Whether the caller is lowp itself, which also uses torch.autocast."""
    import sys

    return str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0] == "lowp"


def _watch_scalers(session: Session) -> None:
    scaler = cast(Any, torch.amp.GradScaler)
    original: Callable[..., None] = scaler.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self._enabled or session.rests or type(self).__module__.partition(".")[0] == "lowp":
            return
        if session.settings.override:
            self._enabled = False
        else:
            session.stand_down("the script has a GradScaler of its own")

    scaler.__init__ = __init__


def _watch_autocast(session: Session) -> None:
    autocast = cast(Any, torch.autocast)
    original: Callable[..., Any] = autocast.__enter__

    @wraps(original)
    def __enter__(self: Any) -> Any:
        ours = session.rests or session.local.calls or session.local.backward or not self._enabled
        if not ours and not torch.compiler.is_compiling() and not _is_own():
            if session.settings.override:
                self._enabled = False
            else:
                session.stand_down("the script has a torch.autocast of its own")
        return original(self)

    autocast.__enter__ = __enter__
