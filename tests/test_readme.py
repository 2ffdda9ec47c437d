"""Every code block of the README and of docs/ runs and prints the shown output.

A `python` block is executed; the blocks of one file share their names, from top to bottom. An `output` block after it
is its output; with `raises` or `warns` after the language it also has the final exception, or the warnings, as Python
prints them. A block with `file=NAME` is not run but written to that file. In a `console` block every `$ lowp ...` line
is run, and the text below it is its output. `...` stands for any text, and lines of an `output` may be broken anywhere;
without shown output nothing is compared. `needs=MODULE` after the language skips a block if the module is not
installed, `not-run` skips it always, and `slow` runs it only in `make slow`. Both sides of a `diff` block are executed,
each after the `python` block above it.
"""

from __future__ import annotations

import doctest
import importlib.util
import io
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lowp.region.rulebook import traced

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


RUN = ("python", "diff", "console")


class Block(NamedTuple):
    """A fenced block: its language, the words after it, its text, its first line in the file, and its output."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int
    output: str | None = None


def blocks(text: str) -> Iterator[Block]:
    found: list[Block] = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        if match[1] == "output":
            found[-1] = found[-1]._replace(output=match[3])
        else:
            found.append(Block(match[1], tuple(match[2].split()), match[3], line))
    return iter(found)


def pages() -> list[Any]:
    """Return a parameter (path, blocks) for every page with code, and another one for the slow code of a page."""
    parameters = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        runnable = [b for b in blocks(path.read_text()) if b.language in RUN and "not-run" not in b.words]
        name = path.relative_to(ROOT).as_posix()
        if quick := [block for block in runnable if "slow" not in block.words]:
            parameters.append(pytest.param(path, quick, id=name))
        if slow := [block for block in runnable if "slow" in block.words]:
            parameters.append(pytest.param(path, slow, id=f"{name}, slow", marks=pytest.mark.slow))
    return parameters


def commands(block: Block) -> Iterator[tuple[list[str], str]]:
    """Yield each `$ lowp ...` line as arguments, with the output shown below it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        words = shlex.split(command, comments=True)
        if words[0] == "lowp":
            yield words[1:], shown


def sides(block: Block) -> Iterator[Block]:
    """Yield the code before and after a change; lines of the other side are blank, so that numbers of lines hold."""
    for other in "+-":
        lines = ("" if line.startswith(other) else line[1:] for line in block.text.splitlines())
        yield block._replace(text="\n".join(lines))


def run_python(path: Path, block: Block, names: dict[str, object]) -> str:
    """Execute a block; return its output, and its exception or warnings if it declares them."""
    # Blank lines first, so that a traceback names the line of the page.
    code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
    said: list[str] = []
    with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings(record="warns" in block.words) as caught:
        if caught is not None:
            warnings.simplefilter("always")
        if "raises" not in block.words:
            exec(code, names)
        else:
            try:
                exec(code, names)
            except Exception as error:
                said += traceback.format_exception_only(error)
            assert said, f"{path}:{block.line}: nothing was raised"
    said += [f"{one.category.__name__}: {one.message}" for one in caught or ()]
    return "\n".join([out.getvalue(), *said])


def run_page(path: Path, chosen: list[Block], lowp: Callable[..., Any]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    freely = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for block in chosen:
        needs = [word[6:] for word in block.words if word.startswith("needs=")]
        if not all(importlib.util.find_spec(name) for name in needs):
            continue
        if file := next((word[5:] for word in block.words if word.startswith("file=")), ""):
            Path(file).write_text(block.text)
        elif block.language == "python":
            above = block
            got = run_python(path, block, names)
            if block.output is not None:
                same = doctest.OutputChecker().check_output(block.output.strip(), got.strip(), freely)
                assert same, f"{path}:{block.line}: it prints\n{got}"
        elif block.language == "diff":
            for side in sides(block):
                run_python(path, above, names)
                run_python(path, side, names)
        else:
            run_commands(path, block, lowp)


def run_commands(path: Path, block: Block, lowp: Callable[..., Any]) -> None:
    """Run the `$ lowp ...` lines of a block, and compare the output shown below them."""
    for arguments, shown in commands(block):
        result = lowp(*arguments)
        assert result.code == 0, f"{path}:{block.line}: lowp {shlex.join(arguments)}\n{result.err}"
        if shown.strip():
            got = result.out.rstrip() + "\n"
            same = doctest.OutputChecker().check_output(shown.rstrip() + "\n", got, doctest.ELLIPSIS)
            assert same, f"{path}:{block.line}: lowp {shlex.join(arguments)} prints\n{got}"


@pytest.mark.parametrize(("path", "chosen"), pages())
def test_code_on_a_page_does_what_it_says(
    path: Path, chosen: list[Block], lowp: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    traced.cache_clear()  # a region's report also tells what was compiled under its policy, here by other tests
    run_page(path, chosen, lowp)


def test_what_the_readme_installs_is_enough_for_the_command_below_it(
    lowp: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = next(block for block in blocks((ROOT / "README.md").read_text()) if "pip install" in block.text)
    install, command = (shlex.split(line[2:], comments=True) for line in shown.text.splitlines())
    for name in ("sklearn", "sklearn.datasets"):  # what the recipes need beside lowp's own requirements
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    [extra] = re.findall(r"pip install 'lowp(\[\w+\])'", lowp(*command[1:]).err)
    assert install == ["pip", "install", f".{extra}"]


@pytest.mark.parametrize(
    "page",
    [
        "```python\nassert 1 == 2\n```\n",
        "```python\n```\n```diff\n-assert 1 == 2\n+assert 1 == 1\n```\n",
        "```python\n```\n```diff\n-assert 1 == 1\n+assert 1 == 2\n```\n",
        "```console\n$ lowp --version\nlowp 9.9.9\n```\n",
        "```console\n$ lowp fromats\n```\n",
        "```python\nprint(1)\n```\n\n```output\n2\n```\n",
        "```python raises\nprint(1)\n```\n\n```output\n1\n```\n",
        "```python raises\nint('a')\n```\n\n```output\nValueError: b\n```\n",
        "```python warns\nprint(1)\n```\n\n```output\n1\nUserWarning: old\n```\n",
    ],
)
def test_a_page_that_is_wrong_is_noticed(page: str, lowp: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        run_page(Path("page.md"), list(blocks(page)), lowp)
