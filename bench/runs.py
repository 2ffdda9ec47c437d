"""Write the recorded runs of bench/results/runs as tables: `python bench/runs.py`.

Each file was written by the `lowp compare` command that it contains. docs/runs.md gets a row a run, docs/fourbits.md a
row a policy, and bench/results/runs/README.md a table a run, between the marks ``<!-- NAME -->`` and ``<!-- end -->``;
other text is not changed.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parent / "results" / "runs"
PRECISIONS = ("fp32", "fp16", "bf16", "flex16+5", "dfp16")
# options that do not change the numbers of a run
_APART = {"--jobs", "--out", "--plot", "--timing"}


def tables(folder: Path = RUNS) -> dict[str, str]:
    """Return the table of every finished comparison in a folder, by the name of its file."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: table(document) for name, document in found.items() if document["kind"] == "comparison"}


def summary(folder: Path = RUNS) -> str:
    """Return a row for each comparison of the usual precisions: the metric of each, and its verdict if not as fp32."""
    lines = [
        "| task | metric | seeds | " + " | ".join(PRECISIONS) + " |",
        "| --- | --- | --: |" + " --- |" * len(PRECISIONS),
    ]
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        rows, recipe = {row["label"]: row for row in document["variants"]}, document["recipe"]
        if tuple(rows) != PRECISIONS:
            continue
        cells = []
        for row in rows.values():
            spread = _spread(row["statistics"][recipe["metric"]], recipe["metric_is_share"])
            verdict = row["verdict"]["verdict"]
            cells.append(spread if verdict in ("baseline", "converges as fp32") else f"{spread}, {verdict}")
        lines.append(f"| `{path.stem}` | {recipe['metric']} | {len(document['seeds'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ingredients(folder: Path = RUNS) -> str:
    """Return what each ingredient of training in four bits is worth: a row for each policy of bench/policies."""
    runs = [json.loads((folder / f"{name}-four-bits.json").read_text(encoding="utf-8")) for name in ("gpt", "vit")]
    lines = [
        "| linear layers in | `gpt`, bits per byte | more than bf16 | `vit`, accuracy |",
        "| --- | --- | --: | --- |",
    ]
    rows = [{Path(row["label"]).stem: row["statistics"] for row in run["variants"]} for run in runs]
    (gpt, vit), (of_gpt, of_vit) = rows, (run["recipe"] for run in runs)
    base = gpt["bf16"][of_gpt["metric"]]["mean"]
    for name, numbers in gpt.items():
        bits, accuracy = numbers[of_gpt["metric"]], vit[name][of_vit["metric"]]
        more = "" if name in ("fp32", "bf16") else f"{bits['mean'] / base - 1:.1%}"
        cells = name, _spread(bits, of_gpt["metric_is_share"]), more, _spread(accuracy, of_vit["metric_is_share"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(document: dict[str, Any]) -> str:
    """Return one comparison: its command, its data and machine, and a row per precision."""
    recipe, seeds = document["recipe"], len(document["seeds"])
    machine = f"{document['machine']['words']}, torch {document['versions']['torch']}"
    epochs = document["settings"]["epochs"]
    lines = [
        f"`{command(document['command'])}`",
        "",
        f"{recipe['parameters']:,} parameters, {epochs} epoch{'s' * (epochs > 1)}, {seeds} seed{'s' * (seeds > 1)}. "
        f"Data: {recipe['data']}. {machine}.",
        "",
        f"| precision | {recipe['metric']} | loss | gap, in seed deviations | verdict | skipped steps | lost updates |",
        "| --- | --: | --: | --: | --- | --: | --: |",
    ]
    return "\n".join([*lines, *(_row(row, recipe) for row in document["variants"])])


def command(line: str) -> str:
    """Return the command without options for output files and for resuming."""
    words = shlex.split(line)
    kept = []
    for place, word in enumerate(words):
        if word not in _APART and word != "--resume" and (place == 0 or words[place - 1] not in _APART):
            kept.append(word)
    return shlex.join(kept)


def _row(row: dict[str, Any], recipe: dict[str, Any]) -> str:
    numbers, verdict = row["statistics"], row["verdict"]
    gap = verdict["gap_in_deviations"]
    # with one seed there is no deviation as the unit of a gap
    seeds = len(row["runs"])
    cells = [
        row["label"],
        _spread(numbers[recipe["metric"]], recipe["metric_is_share"]),
        _spread(numbers["loss"], False),
        "" if gap is None or seeds < 2 or verdict["verdict"] == "baseline" else f"{gap:+.1f}",
        verdict["verdict"],
        f"{numbers['skipped_steps']['mean']:.3g}" if numbers["skipped_steps"]["values"] else "",
        _share(numbers["lost_updates"]["mean"]),
    ]
    return f"| {' | '.join(cells)} |"


def _spread(number: dict[str, Any], is_share: bool) -> str:
    mean, deviation = number["mean"], number["deviation"]
    if mean is None:
        return "not finite"
    shown, unit = (f"{mean:.2%}", 100) if is_share else (f"{mean:.4f}", 1)
    if deviation is None:
        return shown
    return f"{shown} ± {unit * deviation:.2f}" if is_share else f"{shown} ± {deviation:.4f}"


def _share(mean: float | None) -> str:
    return "" if mean is None else "< 0.01%" if 0 < mean < 1e-4 else f"{mean:.2%}"


def written(page: str, found: dict[str, str]) -> str:
    """Return the page with each table between its marks; raise ValueError for a run without marks in the page."""
    for name, text in found.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, mark, rest = page.partition(begin)
        _, stop, after = rest.partition(end)
        if not mark or not stop:
            raise ValueError(f"the page has no marks for {name}: add <!-- {name} --> and {end}")
        page = f"{before}{begin}\n{text}\n\n{end}{after}"
    return page


def pages() -> dict[Path, dict[str, str]]:
    """Return the pages, and the tables of each by their marks."""
    docs = Path(__file__).parent.parent / "docs"
    return {
        docs / "runs.md": {"summary": summary()},
        docs / "fourbits.md": {"ingredients": ingredients()},
        RUNS / "README.md": tables(),
    }


def main() -> None:
    for path, found in pages().items():
        path.write_text(written(path.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
