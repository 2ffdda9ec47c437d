"""Lists on the command line."""

from __future__ import annotations

import re

__all__ = ["listed"]


def listed(text: str | None) -> list[str]:
    """What stands between commas; those inside parentheses part nothing: ``fp32,dfp16:current(headroom=2,words=1)``."""
    return [word.strip() for word in re.split(r",(?![^()]*\))", text or "") if word.strip()]
