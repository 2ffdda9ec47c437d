"""Checkpoints: written completely or not at all, verified by checksums when read, readable anywhere, never unpickled.

A checkpoint is a torch file of plain tensors, numbers, text, lists and dictionaries, read with ``weights_only=True``:
an untrusted file can fail to load but cannot run code. Its ``model`` entry is fp32 whatever format the parameters are
stored in, so ``torch.load(path, weights_only=True)["model"]`` opens it without lowp.
"""

import os
import pickle
import re
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

from lowp import files
from lowp.errors import InvalidInput, LowpError, brief
from lowp.nested import mapped
from lowp.optim.state_dicts import check_saved, kind_of
from lowp.rng_state import check_rng_states, restore_rng_states, rng_states

VERSION = 1
KEY = "lowp_checkpoint"
_OWN = (KEY, "kinds", "random", "extra")  # entries that are not the caller's


class InvalidCheckpoint(LowpError, ValueError):
    """A file that is not a checkpoint of lowp, is damaged or hostile, or has another version or model."""


class Stateful(Protocol):
    """An object with torch's `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state."""


# -- writing ----------------------------------------------------------------------------------------------------------
def save(path: str | Path, *, extra: Mapping[str, Any] | None = None, **parts: Stateful) -> None:
    """Write the states of `parts` (model=, optimizer=, precision=, scheduler= …) and the random states to `path`.

    The file is written under a temporary name, synchronised to the disk and renamed: at any time `path` is the old
    checkpoint or the new one, even after a power failure or kill -9. A file that is replaced keeps its mode; a link
    stays, and the file to which it leads is replaced. `extra` holds plain values of the caller (epoch, history). Raises
    InvalidInput for a part without `state_dict`, for values that could not be read back, or if `path` is read-only, not
    a regular file, or a link of another user; NotWritten if the disk is full or no file can be opened.
    """
    _check_parts(parts)
    content = {
        KEY: VERSION,
        **{name: part.state_dict() for name, part in parts.items()},
        "kinds": {name: kind_of(part) for name, part in parts.items()},
        "random": rng_states(),
        "extra": dict(extra or {}),
    }
    _check_plain(content, "")
    compute_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # `load` relies on the checksums
    try:
        with files.replacing(Path(path)) as file:
            torch.save(content, file)
    finally:
        torch.serialization.set_crc32_options(compute_checksums)


def check_replaceable(path: Path) -> None:
    """Raise InvalidInput, before any work, if `save` could not write or would replace a file that is no checkpoint."""

    def lacks(target: Path) -> str:
        try:
            read(target)
        except InvalidCheckpoint as error:
            return f"a checkpoint of this lowp ({error})"
        return ""

    files.check_target(path, lacks)


def _check_parts(parts: Mapping[str, Stateful]) -> None:
    for name, part in parts.items():
        if name in _OWN:
            raise InvalidInput(
                f"{name}= is a reserved entry of a checkpoint: give the part another name (rng_state= "
                "of lowp.load decides whether the random generators are restored)"
            )
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise InvalidInput(f"{name}= is a {type(part).__name__}, which has no state_dict: pass it in extra=")


# -- reading ----------------------------------------------------------------------------------------------------------
def load(path: str | Path, *, rng_state: bool = True, map_location: Any = None, **parts: Stateful) -> dict[str, Any]:
    """Read a checkpoint into `parts`, and return the caller's `extra`.

    All or nothing: every checksum is compared, every part is checked to be there and of the kind that was saved, and if
    one refuses its state the others get theirs back. `rng_state=False` leaves all random generators alone. Raises
    InvalidCheckpoint for a file that is missing, cut short, changed in any bit, not a checkpoint of this version, or
    made for another model or optimizer; nothing in a file is ever executed.
    """
    _check_parts(parts)
    content = read(path, map_location)
    missing = [name for name in (*parts, "random", "extra") if name not in content]
    if missing:
        present = [name for name in content if name not in _OWN]
        raise InvalidCheckpoint(f"{path} holds {', '.join(present)}, but no {', '.join(missing)}")
    kinds = _kinds(path, content)
    before_random = rng_states()
    states = {name: part.state_dict() for name, part in parts.items()}
    before: dict[str, dict[str, Any]] = mapped(lambda one: one.detach().clone(), states)
    for name, part in parts.items():
        try:
            check_saved(part, content[name], kinds.get(name), before[name])
        except LowpError as error:
            raise _does_not_fit(path, name, error) from error
    if rng_state:
        try:
            check_rng_states(content["random"])
        except InvalidInput as error:
            raise damaged(path, str(error)) from None
    # models first, precisions last: writing into a model changes the shared exponents that a precision holds
    ordered = sorted(parts, key=lambda name: isinstance(parts[name], torch.nn.Module), reverse=True)
    ordered.sort(key=lambda name: not isinstance(parts[name], (torch.nn.Module, torch.optim.Optimizer)))
    loading = ""
    try:
        for loading in ordered:
            parts[loading].load_state_dict(content[loading])
    except BaseException as error:
        for name in ordered:
            parts[name].load_state_dict(before[name])
        restore_rng_states(before_random)
        if not isinstance(error, Exception):
            raise
        raise _does_not_fit(path, loading, error) from error
    # a part, such as a precision, may restore random states itself: the final states are therefore set last
    restore_rng_states(content["random"] if rng_state else before_random)
    return cast("dict[str, Any]", content["extra"])


def _kinds(path: str | Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the classes of the saved parts; {} for files written before classes were saved."""
    kinds = content.get("kinds", {})
    for name, entry in (("kinds", kinds), ("extra", content["extra"])):
        if not isinstance(entry, dict):
            raise damaged(path, f"its entry {name!r} is a dictionary, not {brief(entry)}")
    return cast("dict[str, Any]", kinds)


def damaged(path: str | Path, what: str) -> InvalidCheckpoint:
    """Return the error for a file of which nothing is loaded."""
    return InvalidCheckpoint(f"{path} is damaged, and nothing was loaded: {what}")


def unreadable(path: str | Path, error: OSError) -> InvalidCheckpoint:
    """Return the error for a file that the system does not open or read, damaged or not."""
    return InvalidCheckpoint(f"{path} cannot be read: {error.strerror or error}")


def _does_not_fit(path: str | Path, name: str, error: Exception) -> InvalidCheckpoint:
    is_missing = type(error) is KeyError and len(error.args) == 1  # whose text is only the key
    said = f"its entry {error.args[0]!r} is missing" if is_missing else str(error)
    return InvalidCheckpoint(f"{path} does not fit {name}, and nothing was loaded: {said}")


def read(path: str | Path, map_location: Any = None) -> dict[str, Any]:
    """Return the content of a checkpoint as plain values. Raises InvalidCheckpoint for anything else."""
    path = Path(path)
    if not os.path.isfile(path):  # unlike Path.is_file, False for every name that no file can have
        raise InvalidCheckpoint(f"there is no checkpoint {path}")
    content = read_torch(path, map_location, is_mapped=False)
    if not isinstance(content, dict) or KEY not in content:
        raise InvalidCheckpoint(
            f"{path} is a torch file, but not a checkpoint of lowp.save: read its weights with lowp.load(path)"
        )
    if type(content[KEY]) is not int or content[KEY] != VERSION:
        raise InvalidCheckpoint(f"{path} has version {brief(content[KEY])}, and this lowp reads version {VERSION}")
    if not all(isinstance(name, str) for name in content):
        raise InvalidCheckpoint(f"{path} is damaged or not a torch file: its entries have no names")
    return content


def read_torch(path: Path, map_location: Any = "cpu", is_mapped: bool = True) -> Any:
    """Return the content of a torch file of plain values. Raises InvalidCheckpoint for anything else.

    `is_mapped`: tensors are read from the disk when they are used, and a file of torch before 1.6 is read, too.
    """
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a problem of an untrusted file ends as an error here
            is_archive = not is_mapped or zipfile.is_zipfile(file)
            file.seek(0)
            if is_archive:
                check_archive(file)
            elif (begins := file.read(8))[:1] != b"\x80":  # a pickle, as torch wrote files before version 1.6
                held = f"begins with {begins!r}" if begins else "is empty"
                raise InvalidCheckpoint(f"{path} is not a torch file, or damaged: it {held}")
            file.seek(0)
            mmap = is_mapped and is_archive
            return torch.load(path if is_mapped else file, map_location=map_location, weights_only=True, mmap=mmap)
    except LowpError:
        raise
    except pickle.UnpicklingError as error:
        raise InvalidCheckpoint(
            f"{path} asks for objects that are not plain tensors and numbers, or is not a torch file, and was not "
            f"opened: if you trust it, load it with torch.load and save its state_dict ({_refused(error)})"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # an edited file may make the unpickler raise anything
        if "map_location" in str(error):
            raise InvalidCheckpoint(
                f"{path} needs a device that this machine does not have: give map_location='cpu'"
            ) from error
        said = repr((str(error) or type(error).__name__).splitlines()[0])[1:-1]  # escaped: a file may have chosen it
        raise InvalidCheckpoint(f"{path} is damaged or not a torch file: {said}") from None


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError unless the file is an archive as torch writes it: complete, uncompressed, all checksums right.

    torch's own reader compares no checksums, and one flipped bit can multiply a weight by 2**127. Python's reader
    compares them here. An archive in which torch's reader could find other bytes is refused: it looks for the directory
    in another way, ignores the case of names, and leaves memory uninitialised for an entry that is marked as a folder.
    """
    with zipfile.ZipFile(file) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        if any(one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size for one in entries):
            raise ValueError("an entry is compressed, which torch never writes")
        if len({entry.filename.lower() for entry in entries}) < len(entries):
            raise ValueError("two entries have one name")
        _check_directory(file, archive.start_dir, len(entries))
        ends = [*(entry.header_offset for entry in entries[1:]), archive.start_dir]
        for entry, end in zip(entries, ends, strict=True):
            # a writer may set the mode of a Unix file, the upper half of the attributes
            if entry.flag_bits & ~_USUAL_FLAGS or entry.external_attr & 0xFFFF or entry.is_dir():
                raise ValueError(f"its entry {entry.filename} is marked as a folder or as encrypted")
            file.seek(entry.header_offset + 26)
            named = sum(int.from_bytes(file.read(2), "little") for _ in ("name", "extra field"))
            if entry.header_offset + 30 + named + entry.file_size > end:
                raise ValueError(f"its entry {entry.filename} overlaps another")
        wrong = archive.testzip()
    if wrong is not None:
        raise ValueError(f"the checksum of its entry {wrong} is wrong")


_USUAL_FLAGS = 0x0808  # the checksum is repeated behind the payload; names are UTF-8


def _check_directory(file: IO[bytes], start: int, count: int) -> None:
    """Raise ValueError unless a directory of `count` entries reaches from `start` to its end records, the file's last.

    Source: PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.14 to 4.3.16.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - 98))
    tail = file.read()
    is_zip64 = tail[-42:-38] == b"PK\x06\x07"
    end = size - (98 if is_zip64 else 22)
    length, most = max(0, end - start), 0xFFFFFFFF
    counts = [min(count, 0xFFFF)] * 2
    written = struct.pack("<4s2H2H2LH", b"PK\x05\x06", 0, 0, *counts, min(length, most), min(start, most), 0)
    if is_zip64:
        record = struct.pack("<4sQ4s2L4Q", b"PK\x06\x06", 44, tail[12:16], 0, 0, count, count, length, start)
        written = record + struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1) + written
    if tail[-len(written) :] != written:
        raise ValueError("its directory is not where its end says")


# -- plain values -----------------------------------------------------------------------------------------------------
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.Size, torch.dtype, torch.device)


def _refused(error: pickle.UnpicklingError) -> str:
    """Return what torch's unpickler refused, without the advice around it."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    said = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return f"it names {named[1]}" if named else brief(said.splitlines()[0])


def _check_plain(value: Any, place: str) -> None:
    """Raise InvalidInput for a value that `load` would refuse, so that the problem appears when the file is written."""
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _check_plain(key, f"{place}[{key!r}]")
            _check_plain(item, f"{place}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            _check_plain(item, f"{place}[{index}]")
    elif type(value) not in _PLAIN and not isinstance(value, torch.Tensor):
        raise InvalidInput(
            f"checkpoint{place} is a {type(value).__module__}.{type(value).__qualname__}, which only pickle could "
            "restore: give numbers, text, tensors, lists or dictionaries"
        )
