"""Common functions of all figures: the test for matplotlib, a new figure, and writing it to a file."""

import importlib.util
from pathlib import Path
from typing import Any

from lowp import files
from lowp.errors import InvalidInput, unknown

SUFFIXES = (".png", ".svg", ".pdf")
NO_MATPLOTLIB = "matplotlib is not installed: pip install 'lowp[plot]'"


def can_plot() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def check_suffix(path: Path) -> None:
    """Raise InvalidInput for an unsupported suffix of a picture."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput(unknown("kind of picture", path.suffix or path.name, SUFFIXES))


def new_figure(width: float, height: float) -> Any:
    """Return a new figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def save(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format given by the suffix; the bytes depend only on the figure."""
    from matplotlib import rc_context

    check_suffix(path)
    kind = path.suffix[1:].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with files.replacing(path) as file, rc_context({"svg.hashsalt": "lowp"}):
        figure.savefig(file, format=kind, metadata=undated)
