"""The site of docs/: its order, its words, and the addresses that messages name. `make docs` builds it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from test_docs import DOCS, ROOT, anchors, without_code

SECTIONS = ("Start", "Guides", "Understand", "Reference", "Results")


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml."""


def site() -> dict[str, Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # type: ignore[no-any-return]


def leaves(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for one in part.values() if isinstance(part, dict) else part:
            yield from leaves(one)


def section(name: str) -> list[str]:
    (found,) = (one[name] for one in site()["nav"] if name in one)
    return [page for page in leaves(found) if page.endswith(".md")]


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def words() -> ModuleType:
    return program("words")


@pytest.fixture(scope="module")
def terms() -> ModuleType:
    return program("terms")


def test_every_page_and_notebook_has_its_place_in_the_order_of_a_reader() -> None:
    assert [name for one in site()["nav"] for name in one] == list(SECTIONS)
    listed = list(leaves(site()["nav"]))
    there = [path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("notebooks/*.py")]]
    assert sorted(listed) == sorted(there), "add the page to nav in mkdocs.yml"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_has_one_title_and_begins_with_its_answer(page: Path) -> None:
    text = without_code(page)
    assert len(re.findall("^# ", text, re.MULTILINE)) == 1 and text.startswith("# ")
    assert page.name == "glossary.md" or not text.split("\n\n")[1].startswith(("#", "|", "!"))


@pytest.mark.parametrize("page", [page for name in SECTIONS[:3] for page in section(name)])
def test_a_page_to_read_has_less_than_900_words(page: str, words: ModuleType) -> None:
    assert words.count(words.prose((DOCS / page).read_text())) < 900


def test_all_pages_together_have_at_most_25000_words(words: ModuleType) -> None:
    assert sum(words.count(text) for text in words.pages().values()) <= 25_000, "say it once, or cut: docs/words.py"


def test_addresses_in_messages_lead_to_pages_and_headings() -> None:
    named = set()
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "bench").rglob("*.py"), *(ROOT / "src").rglob("*.md")]:
        named |= set(re.findall(r"\bdocs/([\w-]+\.md)(?:#([\w-]+))?", file.read_text()))
    assert named
    for page, anchor in named:
        assert (DOCS / page).exists() and (not anchor or anchor in anchors(DOCS / page)), f"docs/{page}#{anchor}"


def test_every_term_of_the_glossary_is_linked_from_a_page() -> None:
    linked = set(re.findall(r"glossary\.md#([\w-]+)", "".join(page.read_text() for page in DOCS.glob("*.md"))))
    inside = set(re.findall(r"\]\(#([\w-]+)\)", (DOCS / "glossary.md").read_text()))
    assert anchors(DOCS / "glossary.md") - {"glossary"} == (linked | inside) & anchors(DOCS / "glossary.md")


def test_a_term_is_linked_where_a_page_first_uses_it_and_the_page_does_not(terms: ModuleType) -> None:
    assert set(terms.TERMS.values()) <= anchors(DOCS / "glossary.md")
    page = (
        "# A region\n\n`region` [my region](a.md) Regions and regions.\n\n```text\na preset\n```\n\n::: lowp.policy\n"
    )
    made = terms.linked(page)
    assert made == page.replace("Regions", "[Regions](glossary.md#region)")
    assert terms.linked(made) == made
    for path in DOCS.glob("*.md"):
        assert without_links(terms.linked(path.read_text())) == without_links(path.read_text())


def without_links(text: str) -> str:
    return re.sub(r"\[([^\[\]]*)\]\(glossary\.md#[\w-]+\)", r"\1", text)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(DOCS.glob("notebooks/*.py")), ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    exec(compile(notebook.read_text(), str(notebook), "exec"), {"__name__": "__main__"})
