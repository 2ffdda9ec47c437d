"""Tensors in lists, tuples and dictionaries, as functions are given them, and as models return them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value, at any nesting, in order."""
    found: list[Tensor] = []
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            left += reversed(one)
        elif isinstance(one, Mapping):
            left += reversed(list(one.values()))
    return found


def mapped(change: Callable[[Any], Any], value: Any, kinds: type | tuple[type, ...] = Tensor) -> Any:
    """Return the value with what it holds of these kinds changed, at any nesting."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, dict):
        changed = {key: mapped(change, one, kinds) for key, one in value.items()}
        return changed if type(value) is dict else _like(value, changed)
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [mapped(change, one, kinds) for one in value])
    return value


def rebuilt(value: Any, items: list[Any]) -> Any:
    """Return a list or tuple like another one, a named one too, of these items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _like(value: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A dictionary of the same kind, such as the batches and outputs of transformers, where it can be made."""
    try:
        return type(value)(changed)
    except TypeError:
        return changed
