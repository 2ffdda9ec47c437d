"""Cached hashes of frozen values, which are needed at every call of an op."""

from dataclasses import fields
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def hashed_once(cls: _Class) -> _Class:
    """Class decorator above `dataclass`: the instances of a frozen dataclass cache their hash.

    Copies and pickles contain neither the hash nor other cached properties, since the hash of a text differs between
    processes.
    """
    computed: Any = cls.__hash__

    def __hash__(self: Any) -> int:
        found = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = computed(self)
        return int(found)

    def __getstate__(self: Any) -> dict[str, Any]:
        return {field.name: self.__dict__[field.name] for field in fields(self)}

    setattr(cls, "__hash__", __hash__)  # noqa: B010
    setattr(cls, "__getstate__", __getstate__)  # noqa: B010
    return cls
