"""What MkDocs adds to the pages: output of commands, names of torch to link to, a report, and llms.txt."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from terms import linked

# names of torch in signatures, by the page of torch's documentation that has them
TORCH = {
    "tensors.html": ("Tensor",),
    "tensor_attributes.html": ("dtype", "device"),
    "generated/torch.nn.Module.html": ("nn.Module",),
    "optim.html": ("optim.Optimizer",),
    "distributed.html": ("distributed.ProcessGroup",),
}


@event_priority(100)  # before mkdocstrings reads the inventory
def on_config(config: Any) -> Any:
    """Write the names of torch as the inventory that mkdocstrings reads, so that no network is needed."""
    from mkdocstrings import Inventory

    names = Inventory(project="torch")
    for page, found in TORCH.items():
        for name in found:
            names.register(name=f"torch.{name}", domain="py", role="class", uri=f"{page}#torch.{name}")
    path = Path(config.config_file_path).parent / "build" / "torch.inv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(names.format_sphinx())
    config.plugins["mkdocstrings"].config.handlers["python"]["inventories"][0]["url"] = path.as_uri()
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leave of a fence what is for readers, link terms, and put tables of the package where a page has their mark."""
    markdown = re.sub(r"^```(\w+) [^\n]*$", r"```\1", markdown, flags=re.MULTILINE)
    if page.file.src_uri.endswith(".md") and page.file.src_uri != "glossary.md":
        markdown = linked(markdown)
    for written in (commands, findings, formats, recipes, report):
        mark = f"<!-- {written.__name__} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, written())
    return markdown


def commands() -> str:
    """Return the help of every command."""
    from lowp.cli import COMMANDS, main

    parts = []
    for name in COMMANDS:
        with redirect_stdout(io.StringIO()) as out:
            main(["help", name])
        parts.append(f"## lowp {name}\n\n```text\n{out.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


def findings() -> str:
    """Return the findings of a profile by number."""
    from lowp.numerics.findings import FINDINGS

    parts = [
        f"### {kind.id}: {kind.title}\n\n{kind.meaning}\n\n**Why.** {kind.cause}\n\n**What to do.** {kind.change}\n\n"
        f"Source: {kind.source}\n"
        for kind in FINDINGS.values()
    ]
    return "\n".join(parts)


def formats() -> str:
    """Return the table of formats."""
    from lowp.cli.formats import markdown
    from lowp.formats import FORMATS

    return markdown(list(FORMATS.values()))


def recipes() -> str:
    """Return a row for every recipe: what it is, the parameters of its sizes, what judges it, and its source."""
    from lowp.recipes import RECIPES, get

    lines = ["| recipe | what | parameters, cpu | full | judged by | source |", "| --- | --- | --: | --: | --- | --- |"]
    for name in RECIPES:
        recipe = get(name)
        sizes = " | ".join(f"{size.parameters:,}" for size in recipe.sizes.values())
        lines.append(f"| `{name}` | {recipe.summary} | {sizes} | {recipe.metric.name} | {recipe.source} |")
    return "\n".join(lines)


def report() -> str:
    """Return a sentence that leads to the report of a small transformer, which is made when the site is."""
    return f'<a href="report.html">The report of {_REPORTED}</a> opens in the browser.'


_REPORTED, _STEPS = "gpt", 9  # a recipe with blocks of layers
_SEEN: dict[str, tuple[str, str]] = {}  # by address: title and first paragraph of a page


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Remember what a page begins with."""
    first = re.search(r"<p>(.*?)</p>", html, re.DOTALL)
    words = re.sub(r"<[^>]+>", "", first[1]) if first else ""
    _SEEN[page.url] = (page.title, " ".join(words.split()))
    return html


def on_post_build(config: Any) -> None:
    """Write the report of a recipe, and llms.txt: every page with its first paragraph (llmstxt.org)."""
    from lowp.numerics.advice import advise
    from lowp.recipes.profiling import profiled
    from lowp.recipes.training import Settings
    from lowp.report.profile_html import page

    record = profiled(Settings(_REPORTED), _STEPS, None)
    text = page(record, advise(record), command=f"lowp compare {_REPORTED} --precision policy.toml")
    (Path(config.site_dir) / "report.html").write_text(text, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    lines += [f"- [{title}]({url}): {words}" for url, (title, words) in _SEEN.items()]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
