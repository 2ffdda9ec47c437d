"""Count the words of README and of every page: `python docs/words.py`. A word has a letter or a digit.

Code and tables count; bars and rules of tables, which `wc -w` counts too, do not.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def count(text: str) -> int:
    """Return the number of words of a text."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def prose(text: str) -> str:
    """Return a page without its code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Return the text of every page by its name."""
    return {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}


if __name__ == "__main__":
    found = pages()
    for name, text in found.items():
        print(f"{name:24} {count(text):6,}  without code {count(prose(text)):6,}")
    texts = "".join(found.values())
    print(f"{'all pages':24} {count(texts):6,}  without code {count(prose(texts)):6,}  wc -w {len(texts.split()):,}")
