"""Print the completions of the command line for a shell: commands, options, and the names that they take.

  lowp completions bash > ~/.local/share/bash-completion/completions/lowp
  lowp completions zsh > ~/.zfunc/_lowp
  lowp completions fish > ~/.config/fish/completions/lowp.fish

In a new shell the Tab key completes `lowp comp` and `lowp train dig`. zsh looks into ~/.zfunc after
`fpath+=~/.zfunc` before compinit in ~/.zshrc. Needs shtab: pip install 'lowp[completions]'. Repeat the command after an
update of lowp.
"""

import argparse
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lowp.cli import COMMANDS
from lowp.cli.figure import FIGURES
from lowp.cli.options import Option, add_options
from lowp.cli.policy import ACTIONS
from lowp.errors import Unavailable
from lowp.formats import FORMATS
from lowp.presets import PRESETS
from lowp.recipes import RECIPES

SHELLS = ("bash", "zsh", "fish")


OPTIONS = (Option("shell", "the shell", "|".join(SHELLS), more={"choices": SHELLS}),)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        raise Unavailable("completions are written by shtab, which is not installed: pip install shtab") from None
    print(shtab.complete(whole_parser(shtab.FILE), arguments.shell))
    return 0


def whole_parser(file: Any) -> argparse.ArgumentParser:
    """Return one parser of all commands; `choices` are the names to offer, and `complete` is `file` for a path."""
    parser = argparse.ArgumentParser(prog="lowp")
    parser.add_argument("--version", action="store_true", help="the version")
    commands = parser.add_subparsers()
    names = _names()
    for command, summary in COMMANDS.items():
        one = commands.add_parser(command, help=summary)
        module = import_module(f"lowp.cli.{command}")
        add_options(one, module.OPTIONS)
        one.description = summary
        if hasattr(module, "split"):
            one.add_argument("script", type=Path, help="a script, and its arguments")
        for action in one._actions:
            if vars(action)["type"] is Path or action.dest in ("policy", "data"):
                action.complete = file  # type: ignore[attr-defined]
            elif offered := names.get(f"{command} {action.dest}") or names.get(action.dest):
                action.choices = list(offered)
    commands.add_parser("help", help="the help of a command").add_argument("command", choices=list(COMMANDS))
    return parser


def _names() -> Mapping[str, Iterable[str]]:
    """Return the names that an argument takes, by its name or that of its command and its own."""
    return {
        **dict.fromkeys(("recipe", "recipes"), RECIPES),
        **dict.fromkeys(("to", "within", "source", "via", "formats name"), FORMATS),
        **dict.fromkeys(("precision", "policy name"), tuple(dict.fromkeys((*PRESETS, *FORMATS)))),
        "policy action": ACTIONS,
        "figure name": FIGURES,
    }
