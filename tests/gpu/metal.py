"""Devices such as Apple's GPUs, on CPU tensors: a mode that refuses what they lack."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchgen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WIDE = (torch.float64, torch.complex128)
# composites, or ops of parts, that end in a kernel which Apple's GPUs lack
_MISSING = frozenset("frexp ldexp bincount histc searchsorted bucketize nextafter".split())
_ANY = {"MPS", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}


class _Row(NamedTuple):
    """An op of torch's table: the devices that have a kernel, and the op whose kernel it takes."""

    keys: frozenset[str]
    delegate: str | None


@cache
def _table() -> dict[str, _Row]:
    """Return torch's own table of ops, which comes with it; empty if there is no YAML to read it with."""
    try:
        import yaml
    except ImportError:
        return {}
    file = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    rows = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = {}
    for row in rows:
        given = row.get("dispatch") or {"CompositeImplicitAutograd": ""}
        keys = frozenset(key.strip() for text in given for key in text.split(","))
        found[row["func"].partition("(")[0]] = _Row(keys, row.get("structured_delegate"))
    return found


@cache
def has_kernel(op: str) -> bool:
    """Whether torch has a kernel of an op, such as ``add.Tensor``, for Apple's GPUs, or makes it of other ops."""
    if op.partition(".")[0] in _MISSING:
        return False
    row = _table().get(op)
    if row is None:
        return True  # made by torch's generators of one that is looked at
    return has_kernel(row.delegate) if row.delegate else bool(row.keys & _ANY)


class WithoutFp64(TorchDispatchMode):
    """Refuses tensors of fp64, and ops that Apple's GPUs lack; notes the names of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        op = name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        self.seen.add(op)
        if any(x.dtype in _WIDE for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)):
            raise AssertionError(f"{op} asks for fp64")
        if space == "aten" and not has_kernel(op):
            raise AssertionError(f"{op} has no kernel on Apple's GPUs")
        return result
