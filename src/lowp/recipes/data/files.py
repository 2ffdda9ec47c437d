"""Files of published data sets: found at the user's path and opened, packed or not; errors say what is missing."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lowp.errors import InvalidInput

__all__ = ["Published", "listing", "opened", "read_bytes", "read_text"]


@dataclass(frozen=True)
class Published:
    """A published data set: its name for errors, and where a user can get it."""

    name: str
    where: str

    def find(self, path: Path, names: Sequence[str]) -> Path:
        """The first of these names (patterns of `Path.glob`, packed as .gz too) that `path` holds, or `path` itself.

        `path` may be the file, or a folder that has it directly or one or two folders below. Raises InvalidInput.
        """
        found = self.find_or_none(path, names)
        if found is None:
            raise self.missing(path, names)
        return found

    def find_or_none(self, path: Path, names: Sequence[str]) -> Path | None:
        """As `find`, but returns None if there is no such file."""
        patterns = [pattern for name in names for pattern in (name, f"{name}.gz")]
        if path.is_file():
            return path if any(path.match(pattern) for pattern in patterns) else None
        for depth in ("", "*/", "*/*/"):
            for pattern in patterns:
                hits = sorted(hit for hit in path.glob(depth + pattern) if hit.exists())
                if hits:
                    return hits[0]
        return None

    def missing(self, path: Path, names: Sequence[str]) -> InvalidInput:
        """Return the error for a missing set: what was searched, where, what is there, and where to get the set."""
        there = (
            f"it holds {listing(path)}" if path.is_dir() else ("it is a file" if path.exists() else "it is not there")
        )
        return InvalidInput(
            f"{self.name}: looked for {' or '.join(names)} in {path}; {there}. Get it from {self.where}"
        )

    def broken(self, path: Path, why: str) -> InvalidInput:
        """Return the error for a file that exists but is damaged or of another kind."""
        return InvalidInput(f"{self.name}: {path} {why}. Get it again from {self.where}")


def listing(path: Path, most: int = 6) -> str:
    """Return the first names in a folder, in words."""
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "nothing"


@contextmanager
def opened(published: Published, path: Path) -> Iterator[BinaryIO]:
    """A file as bytes, unpacked where it ends in .gz; raises InvalidInput for one that cannot be read or unpacked."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise published.broken(path, f"cannot be read: {error}") from None


def read_bytes(published: Published, path: Path) -> bytes:
    """All bytes of a file, unpacked."""
    with opened(published, path) as stream:
        return stream.read()


def read_text(published: Published, path: Path) -> str:
    """All text of a file in UTF-8, unpacked; raises InvalidInput for bytes that are not UTF-8."""
    try:
        return read_bytes(published, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise published.broken(
            path, f"is not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}"
        ) from None
