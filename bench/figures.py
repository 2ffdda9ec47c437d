"""Draw every picture of docs/figures from recorded runs and results.

    python bench/figures.py [--record NAME,NAME]

`bench/results/figures` has what `lowp figure` recorded, `bench/results` what the benches wrote; nothing is trained or
measured but with --record, which trains figures anew. A picture holds the SHA-256 of the files that it shows, by which
`tests/test_docs.py` notices one that is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import chart
from tables import ROOT

from lowp.report.figures import benchmark

PICTURES = ROOT / "docs" / "figures"
RECORDS = ROOT / "bench" / "results" / "figures"


class Picture(NamedTuple):
    """A picture: its path, the files that it shows, and a function that draws it to a path."""

    path: Path
    files: list[Path]
    draw: Callable[[Path], None]

    @property
    def digest(self) -> str:
        """The SHA-256 of the files, one after another."""
        return hashlib.sha256(b"".join(file.read_bytes() for file in self.files)).hexdigest()

    def write(self) -> None:
        """Draw the picture and write the hash into it."""
        from PIL import Image, PngImagePlugin

        self.draw(self.path)
        text = PngImagePlugin.PngInfo()
        text.add_text("results", self.digest)
        with Image.open(self.path) as image:
            image.load()
            image.convert("RGB").quantize(256).save(self.path, pnginfo=text, dpi=image.info["dpi"], optimize=True)


def pictures(records: Path = RECORDS) -> Iterator[Picture]:
    """Yield the chart of README, the pictures of `lowp bench` that pages show, and those of `lowp figure`."""
    yield Picture(PICTURES / "overview.png", chart.files(), chart.draw)
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for name in sorted(set(re.findall(r"\(figures/(bench-\w+)\.png\)", text))):
        file = ROOT / "bench" / "results" / f"{name}.json"
        yield Picture(PICTURES / f"{name}.png", [file], partial(_draw, benchmark.chart, file))
    for file in sorted(records.glob("*.json")):
        yield Picture(PICTURES / f"{file.stem}.png", [file], partial(_draw, _function(file), file))


def _draw(draw: Callable[[object, Path], None], file: Path, path: Path) -> None:
    draw(json.loads(file.read_text(encoding="utf-8")), path)


def _function(file: Path) -> Callable[[object, Path], None]:
    """Return the function that draws a record of `lowp figure`, by its kind."""
    from lowp.cli.figure import FIGURES

    kind = json.loads(file.read_text(encoding="utf-8"))["kind"]
    return next(figure.draw for figure in FIGURES.values() if figure.kind == kind)


def shown(picture: Path) -> str | None:
    """Return the hash of the files that a picture shows, as the picture names it."""
    from PIL import Image

    with Image.open(picture) as image:
        return image.info.get("results")


def record(file: Path) -> None:
    """Run the command that a record names once more, and keep what it writes."""
    words = shlex.split(json.loads(file.read_text(encoding="utf-8"))["command"])
    out = ROOT / "build" / file.with_suffix(".png").name
    out.parent.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "lowp", *words[1:-2], "--out", out.name], check=True, cwd=out.parent)
    out.with_suffix(".json").replace(file)
    out.unlink(missing_ok=True)


def main() -> None:
    """Record what is asked for, draw the pictures whose files have changed, and print which."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", default="", help="comma-separated names of figures to train anew")
    parser.add_argument("--all", action="store_true", help="draw also what is up to date")
    given = parser.parse_args()
    for name in filter(None, given.record.split(",")):
        if not (file := RECORDS / f"{name}.json").exists():
            parser.error(f"{name} was not recorded: give some of {', '.join(path.stem for path in RECORDS.glob('*'))}")
        record(file)
    for picture in pictures():
        is_old = given.all or not picture.path.exists() or shown(picture.path) != picture.digest
        if is_old:
            picture.write()
        print(f"{picture.path.relative_to(ROOT)}: {'drawn' if is_old else 'unchanged'}")


if __name__ == "__main__":
    main()
