"""A folder of its own for each of several runs of a script: with what the script reads, nothing of the other runs."""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path

from lowp.errors import InvalidInput

NAME = "lowp-compare"  # the folder with those of all runs
_COPIED = 256 << 20  # bytes of files that a run may overwrite in its folder; larger ones are links
_COPIED_FILES = 10_000


def new_folder(base: Path, name: str) -> Path:
    """Make a folder of a name in `base`, or the first free one of name-2, name-3 …"""
    number = 1
    while True:
        folder = base / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InvalidInput(f"the runs work in a folder in {base}, which cannot be made: {error.strerror}") from None


def from_above(argument: str, base: Path) -> str:
    """Return an argument of a script with a path above its folder, as ``--data=../data``, made absolute."""
    name, equals, value = argument.rpartition("=") if argument.startswith("-") else ("", "", argument)
    is_above = value.startswith("..") and (base / value).exists()
    return f"{name}{equals}{(base / value).resolve()}" if is_above else argument


class Workplace:
    """The folder in which one run works, made from the folder in which the command was given.

    Files are copies, so that a script may overwrite them: the smallest first, to 256 MiB and 10,000 files in all.
    Larger files, hidden folders and what is more are links to the originals. Earlier comparisons are not in it.
    """

    def __init__(self, folder: Path, origin: Path) -> None:
        self.folder = folder
        self._given: dict[Path, tuple[int, int] | None] = {}  # size and time of each copy; None for a link
        files = list[tuple[int, Path, Path]]()
        todo = deque([(origin, folder)])
        while todo:
            here, there = todo.popleft()
            for entry in os.scandir(here):
                path, to = Path(entry.path), there / entry.name
                if here == origin and entry.name.startswith(NAME):
                    continue
                is_folder = entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                if is_folder and len(files) < _COPIED_FILES:
                    to.mkdir()
                    todo.append((path, to))
                elif entry.is_file(follow_symlinks=False):
                    files.append((entry.stat().st_size, path, to))
                else:
                    self._link(path, to)
        self._take(sorted(files))

    def _take(self, files: list[tuple[int, Path, Path]]) -> None:
        copied = 0
        for number, (size, path, to) in enumerate(files):
            copied += size
            if copied > _COPIED or number >= _COPIED_FILES:
                self._link(path, to)
                continue
            try:
                shutil.copy2(path, to)
            except OSError:  # unreadable here, as it is there
                self._link(path, to)
                continue
            self._given[to] = _state(to)

    def _link(self, path: Path, to: Path) -> None:
        to.symlink_to(path)
        self._given[to] = None

    def leave(self) -> None:
        """Remove what the run was given and has not changed: what it has written remains, if anything."""
        for path, state in self._given.items():
            if path.is_symlink() if state is None else path.is_file() and _state(path) == state:
                path.unlink()
        for here, _, _ in os.walk(self.folder, topdown=False):
            if not os.listdir(here):
                os.rmdir(here)


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
