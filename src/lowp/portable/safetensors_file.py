"""The safetensors container: an eight-byte length, a JSON header, and the bytes of the tensors.

It is read and written without the library of that name, whose writer needs all tensors in memory at once, and so that
every number in the header of an untrusted file is checked.
Source: https://github.com/huggingface/safetensors, "Format" of its README.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lowp.checkpoint import InvalidCheckpoint, damaged
from lowp.errors import InvalidInput, brief
from lowp.portable.stored import is_shape

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # the limit of the library
_LENGTH = struct.Struct("<Q")


class TensorEntry(NamedTuple):
    """The position of a tensor, from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


# -- reading ----------------------------------------------------------------------------------------------------------
def read_header(file: IO[bytes], path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a file and its metadata; raise InvalidCheckpoint unless they cover every byte."""
    size = file.seek(0, 2)
    file.seek(0)
    length = _LENGTH.unpack(file.read(8))[0] if size >= 8 else -1
    if not 2 <= length <= min(size - 8, LONGEST_HEADER):
        raise damaged(path, "it is truncated, or not a safetensors file")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON: {brief(str(error))}") from None
    if not isinstance(header, dict):
        raise damaged(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, "its metadata is not text by name")
    entries = {name: _entry(path, name, given, 8 + length) for name, given in header.items()}
    reached = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != reached:
            raise damaged(path, f"the bytes of {brief(name)} overlap others, or leave a gap")
        reached = entry.stop
    if reached != size:
        raise damaged(path, f"its header declares {reached:,} bytes, but it has {size:,}: it is truncated or extended")
    return entries, metadata


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice")
    return found


def _entry(path: Path, name: str, given: Any, first: int) -> TensorEntry:
    if not isinstance(given, dict):
        raise damaged(path, f"its entry {brief(name)} is not a JSON object")
    shape: Any = given.get("shape")
    offsets: Any = given.get("data_offsets")
    dtype = DTYPES.get(given["dtype"]) if isinstance(given.get("dtype"), str) else None
    if dtype is None:
        raise damaged(path, f"{brief(name)} has dtype {brief(given.get('dtype'))}; allowed: {', '.join(DTYPES)}")
    if not is_shape(shape) or not is_shape(offsets) or len(offsets) != 2:
        raise damaged(path, f"{brief(name)} has no shape, or none that torch can have, or no offsets: {brief(given)}")
    start, stop = offsets
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise damaged(path, f"{brief(name)} of shape {brief(tuple(shape))} does not fill its {stop - start:,} bytes")
    return TensorEntry(dtype, tuple(shape), first + start, first + stop)


def read_tensor(file: IO[bytes], entry: TensorEntry) -> Tensor:
    """Return a tensor in new memory."""
    raw = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    file.seek(entry.start)
    memory: Any = raw.numpy()
    if raw.numel() and file.readinto(memory) != raw.numel():  # type: ignore[attr-defined]
        raise InvalidCheckpoint(f"{file.name} was truncated while it was read")
    return raw.view(entry.dtype).reshape(entry.shape)


# -- writing ----------------------------------------------------------------------------------------------------------
class Spool(ExitStack):
    """Collects tensors that are written one after the other, before their number is known.

    They are stored in unnamed files in `folder`, one per width of elements. The widest are written first to the final
    file, so that every tensor begins at a multiple of its element width, as needed for mapping the file into memory.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._parts: dict[int, IO[bytes]] = {}
        self._sizes: dict[int, int] = {}
        self._entries: dict[str, TensorEntry] = {}

    def add(self, name: str, pieces: list[Tensor], shape: tuple[int, ...]) -> None:
        """Add a tensor, split along its first dimension; raise InvalidInput for a second one with the same name."""
        if name in self._entries:
            raise InvalidInput(f"two tensors would be called {name}: rename one of them first")
        dtype = pieces[0].dtype
        if dtype not in NAMES:
            raise InvalidInput(
                f"{name} is {dtype}, which safetensors files do not support; allowed: {', '.join(NAMES.values())}"
            )
        width = dtype.itemsize
        if width not in self._parts:
            self._parts[width] = self.enter_context(tempfile.TemporaryFile(dir=self._folder))
        start = self._sizes.get(width, 0)
        stop = start
        for piece in pieces:
            raw = piece.contiguous().reshape(-1).view(torch.uint8)
            memory: Any = raw.numpy()
            self._parts[width].write(memory)
            stop += raw.numel()
        self._sizes[width] = stop
        self._entries[name] = TensorEntry(dtype, shape, start, stop)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors so far."""
        return sum(self._sizes.values())

    @property
    def names(self) -> list[str]:
        """The names of the tensors so far, in order."""
        return list(self._entries)

    def write(self, out: IO[bytes], metadata: Mapping[str, str]) -> None:
        """Write the whole file."""
        order = sorted(self._parts, reverse=True)
        base = {width: sum(self._sizes[wider] for wider in order if wider > width) for width in order}
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        for name, (dtype, shape, start, stop) in self._entries.items():
            first = base[dtype.itemsize]
            header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [first + start, first + stop]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        out.write(_LENGTH.pack(len(text)) + text)
        for width in order:
            self._parts[width].seek(0)
            shutil.copyfileobj(self._parts[width], out, 1 << 22)

    def mapped(self) -> dict[str, Tensor]:
        """Return the tensors mapped from the disk; pages are read when they are used."""
        for part in self._parts.values():
            part.flush()
        return {name: self._map(entry) for name, entry in self._entries.items()}

    def _map(self, entry: TensorEntry) -> Tensor:
        import mmap

        count = (entry.stop - entry.start) // entry.dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=entry.dtype)
        memory = mmap.mmap(self._parts[entry.dtype.itemsize].fileno(), entry.stop, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=entry.dtype, count=count, offset=entry.start).reshape(entry.shape)
