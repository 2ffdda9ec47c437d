"""Lists on the command line."""

from __future__ import annotations

import re

from lowp.errors import InvalidInput


def split_list(text: str | None, option: str = "") -> list[str]:
    """Split text at commas that are not in parentheses: ``fp32,dfp16:current(headroom=2,words=1)`` has two items.

    Raises InvalidInput if an option, named for the message, was given without any item.
    """
    items = [word.strip() for word in re.split(r",(?![^()]*\))", text or "") if word.strip()]
    if option and text is not None and not items:
        raise InvalidInput(f"{option} is empty: give items with commas between them, such as fp16,bf16, or omit it")
    return items
