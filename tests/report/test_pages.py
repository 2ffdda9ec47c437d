"""The pages of profiles made by hand say what `pages.txt` lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.pages import PAGES, listed

LISTED = dict(
    part.split("\n", 1)
    for part in f"\n{(Path(__file__).parent / 'pages.txt').read_text(encoding='utf-8')}".split("\n# ")[1:]
)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_is_known_of_a_run(name: str) -> None:
    assert listed(name) == LISTED[name].splitlines()


def test_every_page_is_listed() -> None:
    assert list(LISTED) == list(PAGES)
