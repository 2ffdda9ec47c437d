"""Checkpoints: written whole or not at all, opened anywhere, and never unpickled.

A checkpoint is a torch file of plain tensors, numbers, text, lists and dictionaries, read with ``weights_only=True``:
a stranger's file can fail to load, but not run code. Its ``model`` entry is fp32 whatever format the parameters are
stored in, so ``torch.load(path, weights_only=True)["model"]`` opens it without lowp.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from lowp.errors import InvalidInput, LowpError
from lowp.random_state import check_random_states, random_states, restore_random_states

__all__ = ["InvalidCheckpoint", "Stateful", "load", "read", "save", "write_whole"]

VERSION = 1
_KEY = "lowp_checkpoint"


class InvalidCheckpoint(LowpError, ValueError):
    """A file that is no checkpoint of lowp, is damaged, hostile, or of a version or model that does not fit."""


class Stateful(Protocol):
    """What can be saved: anything with torch's `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take it back."""


def save(path: str | Path, *, extra: Mapping[str, Any] | None = None, **parts: Stateful) -> None:
    """Write the states of `parts` (model=, optimizer=, precision=, scheduler= …) and the random states to `path`.

    The file is written beside `path`, synchronised to the disk and renamed: at any moment `path` is the old checkpoint
    or the new one, also after a power cut or kill -9. `extra` holds plain values of the caller's (epoch, history).
    Raises InvalidInput for a part without `state_dict` or values that could not be read back.
    """
    for name, part in parts.items():
        if not hasattr(part, "state_dict"):
            raise InvalidInput(
                f"{name}= is a {type(part).__name__}, which has no state_dict: give it in extra= instead"
            )
    content = {
        _KEY: VERSION,
        **{name: part.state_dict() for name, part in parts.items()},
        "random": random_states(),
        "extra": dict(extra or {}),
    }
    _check_plain(content, "")
    write_whole(Path(path), content)


def write_whole(path: Path, content: Any) -> None:
    """Write a torch file atomically: a temporary file in the same folder, synchronised, then renamed over `path`."""
    folder = path.parent
    if not folder.is_dir():
        raise InvalidInput(f"{path}: there is no folder {folder}: make it first")
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _synchronise(folder)


def _synchronise(folder: Path) -> None:
    """Make the rename itself durable, where the system can open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load(path: str | Path, *, random: bool = True, map_location: Any = None, **parts: Stateful) -> dict[str, Any]:
    """Read a checkpoint into `parts`, and return the caller's `extra`.

    All or nothing: every part is checked to be there, and if one refuses its state the others get theirs back.
    `random=False` leaves the random states alone. Raises InvalidCheckpoint for a file that is missing, cut short, not
    a checkpoint of this version, or made for another model; nothing in a file is ever executed.
    """
    content = read(path, map_location)
    missing = [name for name in (*parts, "random", "extra") if name not in content]
    if missing:
        present = [name for name in content if name not in (_KEY, "random", "extra")]
        raise InvalidCheckpoint(f"{path} holds {', '.join(present)}, but no {', '.join(missing)}")
    if random:
        try:
            check_random_states(content["random"])
        except InvalidInput as error:
            raise InvalidCheckpoint(f"{path} is damaged, and nothing was loaded: {error}") from None
    before = {name: part.state_dict() for name, part in parts.items()}
    before = cast("dict[str, dict[str, Any]]", _copied(before))
    done: list[str] = []
    try:
        for name, part in parts.items():
            done.append(name)
            part.load_state_dict(content[name])
    except Exception as error:
        for name in done:
            parts[name].load_state_dict(before[name])
        raise InvalidCheckpoint(f"{path} does not fit {done[-1]}, and nothing was loaded: {_said(error)}") from error
    if random:
        restore_random_states(content["random"])
    return cast("dict[str, Any]", content["extra"])


def read(path: str | Path, map_location: Any = None) -> dict[str, Any]:
    """The content of a checkpoint as plain values; raises InvalidCheckpoint for anything else."""
    path = Path(path)
    if not path.is_file():
        raise InvalidCheckpoint(f"there is no checkpoint {path}")
    try:
        with warnings.catch_warnings():  # what torch warns of in a stranger's file ends as an error here
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidCheckpoint(
            f"{path} asks for objects that are not plain tensors and numbers, and was not opened: load it where you "
            f"trust it and save its state_dict ({_first_line(error)})"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InvalidCheckpoint(f"{path} is damaged or no torch file: {_first_line(error)}") from None
    if not isinstance(content, dict) or _KEY not in content:
        raise InvalidCheckpoint(f"{path} is a torch file, but no checkpoint of lowp.save: read it with torch.load")
    if content[_KEY] != VERSION:
        raise InvalidCheckpoint(f"{path} has version {content[_KEY]!r}, and this lowp reads version {VERSION}")
    return content


# -- plain values -----------------------------------------------------------------------------------------------------
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.Size, torch.dtype, torch.device)


def _said(error: Exception) -> str:
    """What an error says; of a KeyError's text, which is the key alone, what it means."""
    plain = type(error) is KeyError and len(error.args) == 1
    return f"its entry {error.args[0]!r} is missing" if plain else str(error)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _check_plain(value: Any, place: str) -> None:
    """Raise InvalidInput for a value that `load` would refuse: it is noticed when writing, not when it is needed."""
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _check_plain(key, f"{place}[{key!r}]")
            _check_plain(item, f"{place}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            _check_plain(item, f"{place}[{index}]")
    elif type(value) not in _PLAIN and not isinstance(value, torch.Tensor):
        raise InvalidInput(
            f"checkpoint{place} is a {type(value).__module__}.{type(value).__qualname__}, which only unpickling could "
            "read back: give numbers, text, tensors, lists or dictionaries"
        )


def _copied(value: Any) -> Any:
    """Values whose tensors no longer share memory with those that are about to change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
