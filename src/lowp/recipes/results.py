"""JSON files of results: their header, which describes the machine and versions, and reading and writing them."""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import torch

from lowp import __version__, files
from lowp.errors import InvalidInput, LowpError
from lowp.recipes.recipe import Data, Recipe

VERSION = 1
PICTURES = {".png": b"\x89PNG", ".svg": b"<svg", ".pdf": b"%PDF"}  # by suffix, bytes near the beginning of such a file
_MARK = "lowp_results"


def header(kind: str, command: str | None = None, *, has_gpus: bool = True) -> dict[str, Any]:
    """Return the first entries of every file of results; `kind` is its type, such as ``comparison`` or ``sweep``.

    With `has_gpus` False, GPUs are not queried, since this would initialise CUDA in this process.
    """
    return {
        _MARK: VERSION,
        "kind": kind,
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(has_gpus),
        "versions": {
            "lowp": __version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
    }


def recipe_head(recipe: Recipe, data: Data, size: str | None) -> dict[str, Any]:
    """Return the recipe's entries of a document: name, summary, source, data, size, and number of parameters."""
    own = {name: getattr(recipe, name) for name in ("name", "summary", "source")}
    return {**own, "data": data.description, "size": size, "parameters": recipe.size(size).parameters}


def machine(has_gpus: bool = True) -> dict[str, Any]:
    """Return a description of the machine: ``words`` is a sentence, ``cores`` the number available to this process."""
    cores, memory = available_cores(), None
    with suppress(AttributeError, OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count() if has_gpus else 0)]
    words = [_cpu(), f"{cores} core{'s' * (cores > 1)}"]
    words += [f"{memory / 2**30:.0f} GiB of memory"] if memory else []
    words += gpus or (["no GPU"] if has_gpus else [])
    return {
        "words": ", ".join([*words, platform.system()]),
        "cpu": _cpu(),
        "cores": cores,
        "memory_bytes": memory,
        "gpus": gpus,
        "system": platform.platform(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def available_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    """Return the processor's name, on x86 with family and model, since clouds use one name for several processors."""
    facts: dict[str, str] = {}
    with suppress(OSError):
        rows = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        facts = {key.strip(): value.strip() for key, _, value in rows}
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {facts[key]}" for key in ("cpu family", "model") if facts.get(key)]
    return f"{name} ({', '.join(numbers)})" if numbers else name


# -- files ------------------------------------------------------------------------------------------------------------
def check_writable(path: Path) -> None:
    """Raise InvalidInput if a file cannot be written, or if it exists and was not written by lowp.

    A file of results may replace another one, and an image may replace one written by matplotlib. It is called before
    any other work.
    """
    mark = PICTURES.get(path.suffix.lower())

    def lacks(target: Path) -> str:
        if mark is None:
            return "" if _MARK in files.json_object(target) else "a file of lowp's results"
        content = target.read_bytes()
        is_own = mark in content[:512] and b"atplotlib" in content  # matplotlib's signature
        return "" if is_own else "a picture made by lowp"

    files.check_target(path, lacks)


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document as JSON, atomically; infinities and NaNs are written as null."""
    files.write(path, files.json_text(document))


def read(path: Path, kind: str) -> dict[str, Any]:
    """Read a document of this kind; raise InvalidInput for any other file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {path}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read as results of lowp: {error}") from None
    if not isinstance(document, dict) or _MARK not in document:
        raise InvalidInput(f"{path} does not contain results of lowp")
    if document[_MARK] != VERSION or document.get("kind") != kind:
        raise InvalidInput(
            f"{path} holds a {document.get('kind')} of version {document[_MARK]}, not a {kind} of version {VERSION}"
        )
    return document


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise InvalidInput, naming the file, for errors inside that a missing or malformed entry of its document causes.

    Errors of lowp itself are not changed.
    """
    try:
        yield
    except LowpError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidInput(
            f"{path} has been changed since lowp wrote it ({type(error).__name__}: {error}): "
            f"create it again, or give another file"
        ) from error


def command_line() -> str:
    """Return the command line as typed."""
    import shlex

    return shlex.join(["lowp", *sys.argv[1:]])
