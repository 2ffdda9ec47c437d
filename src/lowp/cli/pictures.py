"""The option --plot of `bench` and `compare`, and the paths of their figure and JSON file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Add --plot."""
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help=".png, .svg or .pdf file of the picture (default: beside the JSON file)",
    )


def picture_path(plot: Path | None, out: Path) -> Path:
    """Return the picture's path, after a check that it and the JSON file can be written.

    Prints to stderr if there will be no picture. Raises InvalidInput for other suffixes.
    """
    from lowp.recipes import results
    from lowp.report import plots

    plot = plot or out.with_suffix(".png")
    plots.check_suffix(plot)
    results.check_writable(out)
    results.check_writable(plot)
    if not plots.can_plot():
        print(f"there will be no picture: {plots.NO_MATPLOTLIB}", file=sys.stderr, flush=True)
    return plot


def written_line(out: Path, plot: Path) -> str:
    """Return the last line of a command: the files written."""
    from lowp.report import plots

    return f"written: {out}, {plot}" if plots.can_plot() else f"written: {out}; no picture: {plots.NO_MATPLOTLIB}"
