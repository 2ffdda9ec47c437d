"""Files that are replaced completely or not at all, by one process at a time; only regular files are replaced."""

import contextlib
import importlib
import json
import math
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import IO, Any

from lowp.errors import InvalidInput, LowpError, NotWritten, Unavailable, brief

try:
    _fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # not a POSIX system: files are replaced completely, but not locked
    _fcntl = None

_own: set[Path] = set()  # locks and temporary files of this process
_LONGEST_NAME = 200  # bytes of a name repeated in the temporary file's name; systems allow 255 in all


def table(name: str) -> dict[str, Any]:
    """Return what a TOML file of this package holds, such as numerics/findings.toml."""
    reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found: dict[str, Any] = reader.loads(resources.files("lowp").joinpath(name).read_text(encoding="utf-8"))
    return found


def json_text(document: object) -> str:
    """Return data as strict JSON (RFC 8259), which has no infinity and no NaN: they become null."""
    return json.dumps(_without_nan(document), indent=1, allow_nan=False) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value


def json_object(path: Path, first_line: bool = False) -> dict[str, Any]:
    """Return the JSON object that a file holds, or its first line; an empty one if there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.readline() if first_line else file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def target_of(path: Path) -> Path:
    """Return the file to which a path leads, through links.

    Raises InvalidInput, for every file that lowp writes, if the target is not regular or is read-only, and for links of
    other users: who may write to a folder could otherwise lead lowp to any file of its user.
    """
    try:
        if path.is_dir():
            raise InvalidInput(f"{path} is a folder: give a file in it, such as {path / 'run'}")
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise InvalidInput(f"{path}: there is no folder {path.parent}: create it first")
        found = os.lstat(target) if os.path.lexists(target) else None
        if path.is_symlink() and not _is_own(path):
            raise InvalidInput(f"{path} is a link of another user and is not followed: give the file itself, {target}")
    except (OSError, ValueError) as error:
        if isinstance(error, LowpError):
            raise
        raise InvalidInput(f"{brief(str(path))} cannot be a file: {getattr(error, 'strerror', error)}") from None
    if found is None:
        return target
    if not stat.S_ISREG(found.st_mode):
        raise InvalidInput(f"{path} is a device, a pipe or a socket and is not replaced: give the name of a file")
    if not (found.st_mode & 0o222 and os.access(target, os.W_OK)):  # root may write everywhere, but was asked not to
        raise InvalidInput(f"{path} cannot be written: it is read-only")
    return target


def _is_own(link: Path) -> bool:
    """Whether a link, and those to which it leads, are of this user or of the folder's owner."""
    if not hasattr(os, "geteuid"):
        return True
    for _ in range(40):  # as many as Linux follows
        if os.lstat(link).st_uid not in (os.geteuid(), os.stat(link.parent).st_uid):
            return False
        link = link.parent / os.readlink(link)
        if not link.is_symlink():
            break
    return True


def check_target(path: Path, lacks: Callable[[Path], str] = lambda target: "", overwrite: bool = True) -> Path:
    """Return `target_of` a path. Raises InvalidInput, before any work, if its folder is not writable.

    And for a file, not empty, that is another one's: `lacks` returns the words for what it is not, and '' for one that
    may be replaced. None may be there without `overwrite`.
    """
    target = target_of(path)
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
    if not target.exists():
        return target
    if not overwrite:
        raise InvalidInput(f"{path} already exists: give --overwrite (overwrite=True), or another file")
    if target.stat().st_size and (what := lacks(target)):
        raise InvalidInput(f"{path} is not {what} and was not changed: give another name")
    return target


def lacking(what: str, mark: bytes) -> Callable[[Path], str]:
    """Return what `check_target` asks of a file: it is `what` if it has these bytes in its first 4 KiB."""

    def lacks(target: Path) -> str:
        with target.open("rb") as file:
            return "" if mark in file.read(4096) else what

    return lacks


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, through links; the file need not exist."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return one.exists() and other.exists() and os.path.samefile(one, other)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` after the block has ended without an error.

    The file is written beside `path`, synchronised to the disk and renamed: at any moment `path` is the old file or the
    new one, even after a power failure or kill -9. The new file has the old one's mode and owner, or the umask's mode.
    Temporary files of killed writers are removed. Raises InvalidInput as `target_of`, NotWritten if the system refuses
    (disk full).
    """
    target = target_of(path)
    _remove_leftovers(target)
    before = os.stat(target) if target.exists() else None
    temporary: Path | None = None
    try:
        temporary, descriptor = _new_part(target, 0o666 if before is None else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if before is not None and hasattr(os, "fchmod"):
                with contextlib.suppress(OSError):  # only root may change the owner
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            os.fsync(descriptor)
            if _fcntl is None:
                file.close()  # Windows renames no file that is open
            os.replace(temporary, target)
            _own.discard(temporary)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
            _own.discard(temporary)
        refused = _system_error(error)
        if refused is not None:
            raise NotWritten(f"{path} was not written, and is as it was: {refused.strerror or refused}") from error
        raise
    _synchronise(target.parent)


def write(path: Path, text: str) -> None:
    """Replace a file by a text, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Lock a file for this process during the block. Raises Unavailable if another process holds the lock.

    The lock is a file beside it (``.run.pt.lock``) that is removed at the end. A lock of a killed process does not
    count. Without effect if the system or the file system has no locks.
    """
    lock = _beside(target_of(path), "lock")
    descriptor = _locked(lock, path) if _fcntl is not None else None
    try:
        yield
    finally:
        if descriptor is not None:
            _release(lock, descriptor)


def _release(lock: Path, descriptor: int) -> None:
    lock.unlink(missing_ok=True)
    _own.discard(lock)
    os.close(descriptor)


def remove_own() -> None:
    """Remove the locks and temporary files of this process, which is about to end without leaving its blocks."""
    for path in tuple(_own):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _locked(lock: Path, path: Path) -> int | None:
    """Return the open lock file, which holds this process's number; None if there are no locks."""
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise _not_locked(lock, path, error) from error
        try:
            _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise Unavailable(
                f"{path} is being written by another process{f' ({holder})' if holder else ''}: wait until it has "
                "ended, or give another file"
            ) from None
        except OSError:
            os.close(descriptor)
            return None
        if _is_at(descriptor, lock):
            _own.add(lock)
            try:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
            except OSError as error:  # the disk is full
                _release(lock, descriptor)
                raise _not_locked(lock, path, error) from error
            return descriptor
        os.close(descriptor)  # the holder removed it meanwhile: try again


def _not_locked(lock: Path, path: Path, error: OSError) -> NotWritten:
    return NotWritten(f"{lock}, the lock of {path}, cannot be written: {error.strerror}")


def _new_part(target: Path, mode: int) -> tuple[Path, int]:
    """Create a temporary file beside the target, open and locked, so that others know that its writer is running."""
    while True:
        temporary = _beside(target, f"{secrets.token_hex(8)}.part")
        binary = getattr(os, "O_BINARY", 0)  # Windows would write line ends of its own
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | binary, mode)
        _own.add(temporary)
        if _fcntl is None:
            return temporary, descriptor
        with contextlib.suppress(OSError):  # a file system without locks
            _fcntl.flock(descriptor, _fcntl.LOCK_EX)
        if _is_at(descriptor, temporary):
            return temporary, descriptor
        _own.discard(temporary)
        os.close(descriptor)  # removed as a leftover before it was locked: try again


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of this target whose writers have ended without removing them."""
    if _fcntl is None:
        return
    left = re.compile(re.escape(_beside(target, "").name) + r"[a-z0-9_]{8,16}\.part")
    names: list[str] = []
    with contextlib.suppress(OSError):  # a folder that may not be listed, or no descriptor left
        names = os.listdir(target.parent)
    for name in names:
        if left.fullmatch(name):
            with contextlib.suppress(OSError):  # a running writer's, or another user's
                descriptor = os.open(target.parent / name, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
                    os.unlink(target.parent / name)
                finally:
                    os.close(descriptor)


def _beside(target: Path, ending: str) -> Path:
    """Return a hidden name in the target's folder that repeats the target's name, up to the maximum length."""
    name = os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])
    return target.with_name(f".{name}.{ending}")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _system_error(error: BaseException) -> OSError | None:
    """Return the OSError behind an error, if any: for a full disk torch raises a RuntimeError."""
    behind = error.__cause__ or error.__context__ if type(error) is RuntimeError else error
    return behind if isinstance(behind, OSError) else None


def _synchronise(folder: Path) -> None:
    """Make the rename durable, if the system can open a folder."""
    if hasattr(os, "O_DIRECTORY") and os.access(folder, os.R_OK):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
