"""Find and open the files of published data sets at the user's path, compressed or not."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowp.errors import InvalidInput, Unavailable

_LISTED = 6  # names of a folder in an error


@dataclass(frozen=True)
class Published:
    """A published data set: its name for error messages, and where to get it."""

    name: str
    where: str

    def find(self, path: Path, names: Sequence[str]) -> Path:
        """Return the first file under `path` that matches one of `names`; raise InvalidInput if there is none.

        `names` are patterns of `Path.glob`, and also match with the suffix .gz. `path` is the file itself, or a folder
        with the file directly in it or up to two folders below.
        """
        file = self.find_or_none(path, names)
        if file is None:
            raise self.missing(path, names)
        return file

    def find_or_none(self, path: Path, names: Sequence[str]) -> Path | None:
        """Return the same as `find`, or None if there is no such file."""
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
        """Return the error for a missing data set: the names searched for, the content of `path`, and the source."""
        content = "it is a file" if path.exists() else "it is not there"
        if path.is_dir():
            inside = sorted(entry.name for entry in path.iterdir())
            more = f" and {len(inside) - _LISTED} more" if len(inside) > _LISTED else ""
            content = f"it holds {', '.join(inside[:_LISTED]) + more or 'nothing'}"
        return InvalidInput(
            f"{self.name}: looked for {' or '.join(names)} in {path}; {content}. Get it from {self.where}"
        )

    def broken(self, path: Path, why: str) -> InvalidInput:
        """Return the error for a file that exists but is damaged or of another kind."""
        return InvalidInput(f"{self.name}: {path} {why}. Get it again from {self.where}")


@contextmanager
def optional(use: str) -> Iterator[None]:
    """Import a package of the extra "recipes" inside; raise Unavailable without it, beginning with its `use`."""
    try:
        yield
    except ImportError:
        raise Unavailable(f"{use}, which is not installed: pip install 'lowp[recipes]'") from None


def read_bytes(published: Published, path: Path) -> bytes:
    """Return all bytes of a file, decompressed if it ends in .gz; raise InvalidInput if it cannot be read."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise published.broken(path, f"cannot be read: {error}") from None


def read_text(published: Published, path: Path) -> str:
    """Return the text of a UTF-8 file, decompressed if it ends in .gz; raise InvalidInput for other bytes."""
    try:
        return read_bytes(published, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise published.broken(
            path, f"is not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}"
        ) from None


def read_columns(published: Published, path: Path, names: Sequence[str]) -> list[Any]:
    """Return the line numbers of the rows of a CSV file with a header, and then each named column.

    Raises InvalidInput for other files, missing columns, and rows of another length; blank lines are left out.
    """
    reader = csv.reader(io.StringIO(read_text(published, path), newline=""), strict=True)
    try:
        header = next(reader, [])
        rows = [(reader.line_num, *row) for row in reader if row]
    except csv.Error as error:
        raise published.broken(path, f"is not CSV: {error}") from None
    if missing := [name for name in names if name not in header]:
        raise published.broken(path, f"has no column {', '.join(missing)}; it has {', '.join(header) or 'nothing'}")
    for line, *row in rows:
        if len(row) != len(header):
            raise published.broken(path, f"has {len(header)} columns, but line {line} has a different number")
    columns = list(zip(*rows, strict=True)) or [()] * (1 + len(header))
    return [columns[0], *(columns[1 + header.index(name)] for name in names)]
