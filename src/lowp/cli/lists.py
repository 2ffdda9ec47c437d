"""Lists on the command line."""

from __future__ import annotations

import re

__all__ = ["split_list"]


def split_list(text: str | None) -> list[str]:
    """Split text at commas that are not in parentheses: ``fp32,dfp16:current(headroom=2,words=1)`` has two items."""
    return [word.strip() for word in re.split(r",(?![^()]*\))", text or "") if word.strip()]
