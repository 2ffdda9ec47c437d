"""Files from which tensors are read one at a time, safetensors and torch's, and `lowp.load`; no code is executed."""

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lowp import checkpoint
from lowp.checkpoint import InvalidCheckpoint, Stateful, read_torch, unreadable
from lowp.errors import InvalidInput, brief
from lowp.kernels.numbers.floats import CARRIERS
from lowp.portable import safetensors_file
from lowp.portable.stored import SUFFIXES, Packed, unpack

INDEX = ".index.json"  # the index of a sharded checkpoint: {"metadata": {...}, "weight_map": {tensor: file}}
METADATA = "__metadata__"  # the key of text in a torch file: in the `_metadata` of its state_dict, beside the modules'
KEY = "lowp.tensors"  # the key of packed tensors in the metadata
_LONGEST_INDEX = 100_000_000
_MOST_REPEATED = 1 << 30  # bytes of a tensor of which the file holds only some numbers
_STATE_ENTRIES = ("model", "state_dict", "model_state_dict", "model_state")


class Source(AbstractContextManager["Source"]):
    """Tensors by name, and metadata. A packed tensor counts as one tensor with its values.

    `stored` reads each of the tensors in the file, in its order. `modules` is torch's metadata of modules, `left_out`
    the types of entries that are not tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: dict[str, Callable[[], Tensor]] = {}
        self.metadata: dict[str, str] = {}
        self.modules: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self._packed: dict[str, Packed] = {}
        self._open = ExitStack()  # what is closed at the end
        with ExitStack() as stack:
            self._read(stack)
            self._open = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self.stored.clear()

    @abstractmethod
    def _read(self, stack: ExitStack) -> None:
        """Read what the file holds; `stack` closes what stays open."""

    def file_of(self, name: str) -> str:
        """Return the file of a tensor."""
        return self.path.name

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        parts = {f"{name}{suffix}": name for name in self._packed for suffix in SUFFIXES.values()}
        return list(dict.fromkeys(parts.get(name, name) for name in self.stored))

    def tensor(self, name: str) -> Tensor:
        """Return the values of a tensor."""
        packed = self._packed.get(name)
        if packed is None:
            return self.stored[name]()
        parts = {part: self.stored[part]() for part in map(name.__add__, SUFFIXES.values()) if part in self.stored}
        try:
            return unpack(name, packed, parts)
        except InvalidInput as error:
            raise InvalidCheckpoint(f"{self.path} is damaged: {error}") from None

    def _read_packed(self) -> None:
        """Read from the metadata which tensors are packed, and remove that entry."""
        text = self.metadata.pop(KEY, None)
        if text is None:
            return
        try:
            given = json.loads(text)
            self._packed.update({name: Packed.from_json(value) for name, value in given.items()})
        except (ValueError, AttributeError, RecursionError) as error:
            raise InvalidCheckpoint(f"{self.path} is damaged: its metadata {KEY}: {brief(str(error))}") from None


class SafetensorsSource(Source):
    """One safetensors file."""

    def _read(self, stack: ExitStack) -> None:
        file = stack.enter_context(self.path.open("rb"))
        entries, self.metadata = safetensors_file.read_header(file, self.path)
        self.stored = {name: partial(safetensors_file.read_tensor, file, entry) for name, entry in entries.items()}
        self._read_packed()


class ShardedSource(Source):
    """Several files, shard by shard, and an index of the file of each tensor."""

    def _read(self, stack: ExitStack) -> None:
        self._shard_of: dict[str, Source] = {}
        self.index = _read_index(self.path)
        weight_map = self.index["weight_map"]
        shards = {
            file: stack.enter_context(open_source(self.path.parent / file))
            for file in dict.fromkeys(weight_map.values())
        }
        for shard in shards.values():
            for name in shard.names():
                if name in self._shard_of:
                    raise InvalidCheckpoint(f"{self.path} is damaged: {brief(name)} is in two of its files")
                self._shard_of[name] = shard
            self.stored.update(shard.stored)
            self.metadata.update(shard.metadata)
            self._packed.update(shard._packed)
        missing = [name for name, file in weight_map.items() if name not in shards[file].stored]
        if missing:
            raise InvalidCheckpoint(
                f"{self.path} is damaged: {brief(missing[0])} is not in the file that its index names"
            )

    def file_of(self, name: str) -> str:
        return self._shard_of[name].path.name

    def tensor(self, name: str) -> Tensor:
        return self._shard_of[name].tensor(name)


def _read_index(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LONGEST_INDEX:
        raise InvalidCheckpoint(f"{path} is not an index of shards: it has {path.stat().st_size:,} bytes")
    try:
        index = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path} is not an index of shards: {brief(str(error))}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidCheckpoint(f"{path} is not an index of shards: it has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or file.endswith(INDEX) or "\\" in file or "\0" in file:
            raise InvalidCheckpoint(
                f"{path} names {brief(file)}, which is not a file in the same folder: nothing was opened"
            )
        if not (path.parent / file).is_file():
            raise InvalidCheckpoint(f"{path} names {file}, which does not exist: all files of the index are needed")
    return {"metadata": index.get("metadata") or {}, "weight_map": weight_map}


class TorchSource(Source):
    """A torch file: a state_dict, or a dictionary that contains one, in its entry `entry`."""

    def __init__(self, path: Path, entry: str | None = None) -> None:
        self._entry = entry
        super().__init__(path)

    def _read(self, stack: ExitStack) -> None:
        content = _state_of(self.path, read_torch(self.path), self._entry)
        for name, value in content.items():
            if isinstance(value, Tensor):
                self.stored[name] = partial(self._dense, name, value.detach())
            else:
                self.left_out[name] = type(value).__name__
        modules = getattr(content, "_metadata", None)
        if isinstance(modules, dict):
            self.modules = dict(modules)
            text = self.modules.pop(METADATA, {})
            if isinstance(text, dict):
                self.metadata = {str(key): str(value) for key, value in text.items()}
        self._read_packed()

    def _dense(self, name: str, found: Tensor) -> Tensor:
        """Return a mapped tensor, whose pages are read when they are used."""
        kinds = {"quantized": found.is_quantized, "nested": found.is_nested, "meta": found.is_meta}
        kind = next((name for name, holds in kinds.items() if holds), str(found.layout))
        if kind != "torch.strided":
            raise InvalidInput(f"{self.path}: {name} is a {kind} tensor: give dense tensors, for example by to_dense()")
        if found.nbytes > max(self.path.stat().st_size, _MOST_REPEATED):
            raise InvalidCheckpoint(
                f"{self.path}: {name} has {found.nbytes:,} bytes, more than the file: its numbers are repeated (expand)"
            )
        return found


def _state_of(path: Path, content: Any, entry: str | None) -> Mapping[str, Any]:
    """Return the state_dict of a file: the content itself, or its entry `entry` or one of the usual names."""
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{path} holds a {type(content).__name__}, not a state_dict")
    if entry is not None:
        if not isinstance(content.get(entry), dict):
            dictionaries = [str(name) for name, value in content.items() if isinstance(value, dict)]
            raise InvalidInput(f"{path} has no dictionary {entry!r}; it has {', '.join(dictionaries) or 'none'}")
        content = content[entry]
    elif not any(isinstance(value, Tensor) for value in content.values()):
        held = [name for name in _STATE_ENTRIES if isinstance(content.get(name), dict)]
        if len(held) != 1:
            raise InvalidCheckpoint(
                f"{path} holds {', '.join(brief(name) for name in content) or 'nothing'}, and it is not clear which is "
                "the state_dict: give its entry (--entry, entry=)"
            )
        content = content[held[0]]
    if not all(isinstance(name, str) for name in content):
        raise InvalidCheckpoint(f"{path} holds tensors whose names are not text")
    return cast("Mapping[str, Any]", content)


def open_source(path: str | Path, entry: str | None = None) -> Source:
    """Open a file, an index of shards, or a folder with one of them.

    `entry` names the state_dict in a torch file of several. Raises InvalidCheckpoint for what is missing, damaged or
    hostile.
    """
    path = Path(path)
    if os.path.isdir(path):
        path = _in_folder(path)
    if not os.path.isfile(path):
        raise InvalidCheckpoint(f"there is no checkpoint {path}")
    try:
        with path.open("rb") as file:
            begins = file.read(16)
        if path.name.endswith(".json"):
            return ShardedSource(path)
        if path.suffix == ".safetensors" or begins[8:10] == b'{"':
            return SafetensorsSource(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return TorchSource(path, entry)


def _in_folder(folder: Path) -> Path:
    found = sorted(folder.glob(f"*{INDEX}")) or sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        names = ", ".join(one.name for one in found) or "no index and no safetensors file"
        raise InvalidCheckpoint(f"{folder} contains {names}: give one of these files")
    return found[0]


def load(
    path: str | Path,
    *,
    rng_state: bool = True,
    map_location: Any = None,
    dtype: torch.dtype | None = None,
    **parts: Stateful,
) -> dict[str, Any]:
    """Load a checkpoint of `lowp.save` into `parts` and return its `extra`, or a file of weights as a state_dict.

    With parts (model=, optimizer= …), and for a checkpoint without `dtype`, loading succeeds as a whole or changes
    nothing: every checksum is verified, every part must be in the file and of the class that was saved, and if one part
    rejects its state the others are restored. `rng_state=False` does not restore the random generators.

    Without parts, files that `lowp convert` wrote, safetensors files (single, or given by the index or folder of their
    shards) and torch files return their tensors by name: floating-point tensors in `dtype` (default: float32),
    regardless of the format in which they are stored, others unchanged. With `dtype` a checkpoint of `lowp.save`
    returns the tensors of its model.

    Raises InvalidCheckpoint for a file that is missing, cut short, changed in any bit that a checksum covers, hostile,
    or made for another model or optimizer; nothing in a file is ever executed.
    """
    if dtype is not None and dtype not in CARRIERS:
        raise InvalidInput(f"weights can be read as {', '.join(map(str, CARRIERS))}, not as {brief(dtype)}")
    if parts or (dtype is None and _is_of_a_run(Path(path))):
        if dtype is not None:
            raise InvalidInput(f"dtype={dtype} is for weights without parts: {', '.join(parts)} decide what they hold")
        return checkpoint.load(path, rng_state=rng_state, map_location=map_location, **parts)
    state: dict[str, Any] = {}
    with open_source(path) as source:
        for name in source.names():
            tensor = source.tensor(name)
            wanted = (dtype or torch.float32) if tensor.is_floating_point() else tensor.dtype
            state[name] = tensor.to(device=map_location, dtype=wanted, copy=True)
    return state


def _is_of_a_run(path: Path) -> bool:
    """Whether a file is from `lowp.save`, or cannot contain weights; its reader then reports the error."""
    if os.path.isdir(path) or path.suffix in (".safetensors", ".json"):
        return False
    if not os.path.isfile(path):
        return True
    content = read_torch(path)
    return isinstance(content, dict) and checkpoint.KEY in content
