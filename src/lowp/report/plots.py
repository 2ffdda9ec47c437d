"""What all pictures share: whether matplotlib is there, a figure to draw on, and the file it is written to."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from lowp import files
from lowp.errors import InvalidInput, unknown

__all__ = ["NO_MATPLOTLIB", "SUFFIXES", "can_plot", "check_suffix", "new_figure", "save"]

SUFFIXES = (".png", ".svg", ".pdf")
NO_MATPLOTLIB = "matplotlib is not installed: pip install 'lowp[plot]'"


def can_plot() -> bool:
    """Whether matplotlib is there; it is loaded only when a picture is made."""
    return importlib.util.find_spec("matplotlib") is not None


def check_suffix(path: Path) -> None:
    """Raise InvalidInput for a kind of picture that is not made."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput(unknown("kind of picture", path.suffix or path.name, SUFFIXES))


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def save(figure: Any, path: Path) -> None:
    """Write a figure in the kind that the file's name tells, whole or not at all; the bytes are the figure's alone."""
    from matplotlib import rc_context

    check_suffix(path)
    kind = path.suffix[1:].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with files.replacing(path) as file, rc_context({"svg.hashsalt": "lowp"}):
        figure.savefig(file, format=kind, metadata=undated)
