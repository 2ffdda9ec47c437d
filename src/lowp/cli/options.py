"""The command line as rows: an option is a row, those of several commands stand here; and what rows alone tell."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.errors import InvalidInput

if TYPE_CHECKING:
    from lowp.recipes.training import Settings


@dataclass(frozen=True)
class Option:
    """An option or, with a name without dashes, an argument of a command.

    `kind` converts the text; bool: the option stands alone. `setting`: the entry of `Settings` that it gives. `least`:
    the smallest number allowed. `group`: the heading in the help. `excludes`: it stands for one of several options, of
    which one can be given. `more`: further arguments for argparse.
    """

    name: str
    help: str | None = None
    metavar: Any = None
    kind: Callable[[str], Any] | None = None
    default: Any = None
    setting: str = ""
    least: int | None = None
    group: str = ""
    excludes: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dest(self) -> str:
        """The name of the value among the arguments."""
        name: str = self.more.get("dest", self.name.lstrip("-").replace("-", "_"))
        return name

    @property
    def words(self) -> int:
        """The number of words on a command line that ends in another one, the option's own included."""
        count = self.more.get("nargs", 1)
        return 1 + count if self.kind is not bool and isinstance(count, int) else 1

    def add_to(self, parser: Any) -> None:
        """Add it to a parser of argparse, or a group of it."""
        if self.kind is bool:
            parser.add_argument(self.name, action="store_true", help=self.help)
        else:
            given = {"help": self.help, "metavar": self.metavar, "type": self.kind, "default": self.default}
            parser.add_argument(self.name, **given, **self.more)


def _path(text: str) -> str:
    return str(Path(text))


RECIPE = Option("recipe", "a recipe of `lowp recipes`, or your own as module:NAME", setting="recipe")
SIZE = Option("--size", "size of the recipe: cpu (default) or full", setting="size")
EPOCHS = Option("--epochs", "number of epochs (default: the recipe's)", kind=int, setting="epochs")
BATCH = Option("--batch", "batch size (default: the recipe's)", kind=int, setting="batch")
RATE = Option("--lr", "learning rate (default: the recipe's)", kind=float, setting="learning_rate")
DEVICE = Option("--device", "cpu (default), cuda, cuda:1 ...", setting="device")
DATA = Option("--data", "folder or file of the real data set", "DIR", _path, setting="data")
# of a training: the recipe, and what changes its defaults
TRAINING = (
    RECIPE,
    SIZE,
    EPOCHS,
    BATCH,
    RATE,
    Option("--accumulate", "accumulation of contractions: fp32, fp16/16, bf16/128 ...", "FORMAT", setting="accumulate"),
    DEVICE,
    DATA,
)
PLOT = Option("--plot", ".png, .svg or .pdf file of the picture (default: beside the JSON file)", "FILE", Path)
# of every command that prints a table
OUTPUT = (
    Option("--json", "print the same facts as JSON, and nothing else", kind=bool),
    Option("--plain", "print without colours, as with NO_COLOR=1", kind=bool),
)


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add the rows of a command to its parser."""
    groups: dict[str, Any] = {"": parser}
    alternatives: Any = None
    for one in options:
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group(one.group)
        if one.excludes and alternatives is None:
            alternatives = parser.add_mutually_exclusive_group()
        one.add_to(alternatives if one.excludes else groups[one.group])


def check_least(options: Iterable[Option], arguments: argparse.Namespace) -> None:
    """Raise InvalidInput for a number below the smallest of its option."""
    for one in options:
        value = getattr(arguments, one.dest)
        if one.least is not None and value is not None and value < one.least:
            raise InvalidInput(f"{one.name} {value}: give {one.least} or more")


def words_of(word: str, options: Iterable[Option]) -> int:
    """Return how many words of a command line belong to the option that begins with this one; 0 for another word."""
    name, equals, _ = word.partition("=")
    found = next((one.words for one in options if one.name == name), 1 if name in ("--help", "-h") else 0)
    return min(found, 1) if equals else found


def given(options: Iterable[Option], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given on the command line, by their names in `Settings`."""
    named = {one.setting: getattr(arguments, one.dest) for one in options if one.setting}
    return {name: value for name, value in named.items() if value is not None}


def filled(settings: dict[str, Any]) -> Settings:
    """Return settings with the recipe's defaults; raise for an unknown recipe, precision, size or device."""
    from lowp.recipes.training import Settings

    return Settings(**settings).filled()


def split_list(text: str | None, option: str = "") -> list[str]:
    """Split text at commas that are not in parentheses: ``fp32,dfp16:current(headroom=2,words=1)`` has two items.

    Raises InvalidInput if an option, named for the message, was given without any item.
    """
    items = [word.strip() for word in re.split(r",(?![^()]*\))", text or "") if word.strip()]
    if option and text is not None and not items:
        raise InvalidInput(f"{option} is empty: give items with commas between them, such as fp16,bf16, or omit it")
    return items


def check_json_name(path: Path | None) -> None:
    """Raise InvalidInput if --out names no JSON file."""
    if path is not None and path.suffix != ".json":
        raise InvalidInput(f"--out {path}: the numbers are written as JSON: give a name that ends in .json")
