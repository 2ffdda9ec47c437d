"""Every command that README, CONTRIBUTING and docs cite exists, with the options that it is cited with."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from lowp.cli import COMMANDS
from lowp.cli.options import add_options

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "src" / "lowp" / "kernels" / "README.md"])
PROGRAM = r"(?:\.venv/bin/)?(?:python (?:-m pytest|bench/)|bench/\S+\.py|pytest |make |lowp )"


def cited(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a page: of `code` in its text, and of the lines of its consoles."""
    outside, inside = [], []
    for index, part in enumerate(re.split(r"^```(.*)", text, flags=re.MULTILINE)):
        if index % 4 == 0:
            outside.append(part)
        elif index % 4 == 2:
            inside.append(part)
    spans = re.findall("`([^`]+)`", " ".join(outside).replace("\n", " "))
    lines = re.findall(r"^\$ (.*)", "\n".join(inside), flags=re.MULTILINE)
    for command in [*spans, *lines]:
        if re.match(PROGRAM, command):
            words = shlex.split(command, comments=True)
            yield [word.strip("[]") for word in words if word != "…"]


def wrong(words: list[str]) -> list[str]:
    """Return the words of a command that name nothing: a file, a target, a command or an option."""
    program, *rest = words
    if program.endswith("python"):
        program, *rest = rest if rest[0] != "-m" else rest[1:]
    if program == "make":
        return [word for word in rest if "=" not in word and f"\n{word}:" not in (ROOT / "Makefile").read_text()]
    if program == "pytest":
        return [word for word in rest if "/" in word and not (ROOT / word).exists()]
    options = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if program == "lowp":
        return _wrong_of_lowp(rest)
    if not (ROOT / program).exists():
        return [program]
    return [option for option in options if f'"{option}"' not in (ROOT / program).read_text()]


def _wrong_of_lowp(words: list[str]) -> list[str]:
    name, *rest = words
    if name in ("--version", "--help", "help"):
        return [word for word in rest if word not in ("--verbose", "COMMAND", *COMMANDS)]
    if name not in COMMANDS:
        return [] if name.isupper() else [name]
    module, parser = import_module(f"lowp.cli.{name}"), argparse.ArgumentParser()
    add_options(parser, module.OPTIONS)
    own, script = module.split(rest) if hasattr(module, "split") else (rest, [])
    known = set(_options(parser))
    return [word for word in [*own, *script[:1]] if word.startswith("--") and word.partition("=")[0] not in known]


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _options(one)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_that_a_page_cites_exists(page: Path) -> None:
    for words in cited(page.read_text()):
        assert wrong(words) == [], f"{page.name} cites {shlex.join(words)}"


def test_commands_are_found_in_text_and_in_consoles() -> None:
    console = "```console\n$ lowp run --b 'c d' …\nmake y\n```"
    assert list(cited(f"Run `python bench/a.py [--quick]` and `make x`.\n{console}\n`lowp z\n--q`")) == [
        ["python", "bench/a.py", "--quick"],
        ["make", "x"],
        ["lowp", "z", "--q"],
        ["lowp", "run", "--b", "c d"],
    ]


@pytest.mark.parametrize(
    "command",
    [
        *("python bench/absent.py", "bench/gemm.py --avx3", "make absent", "pytest tests/absent.py"),
        *("lowp fromats", "lowp compare digits --precison fp16", "lowp run --policies x train.py", "lowp --verison"),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command: str) -> None:
    assert len(wrong(shlex.split(command))) == 1
