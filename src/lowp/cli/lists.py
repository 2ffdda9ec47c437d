"""Lists on the command line."""

from __future__ import annotations

import re

__all__ = ["listed"]


def listed(text: str | None) -> list[str]:
    """Split at commas, except within parentheses: ``fp32,dfp16:current(headroom=2,words=1)`` has two items."""
    return [word.strip() for word in re.split(r",(?![^()]*\))", text or "") if word.strip()]
