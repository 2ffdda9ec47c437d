"""Plants faults in lowp and counts those that the tests find: `make mutants`.

    python tests/mutants.py [--room ROOM ...] [--count 10] [--seed 0] [--workers 2] [--json FILE] [FILE[:LINE] ...]

A mutant is lowp with one expression changed: a comparison, a bound, a condition, an arithmetic operator, a constant, a
returned value. Of every room (`ops`, `kernels`, …) a sample is drawn, or of the files and lines named; the room's own
tests, without the slow ones, run on a copy of the package in a temporary folder, those first that enter the changed
function, and of the rest those that may see it (`reached.py`). Mutants that change nothing which a test can see are
listed in `mutants_equal.txt` with the reason and are not drawn. The exit code is 1 if less than 95 % are caught.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parent
SOURCES = TESTS.parent / "src" / "lowp"
EQUAL = TESTS / "mutants_equal.txt"
ENOUGH = 0.95

_PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr)),
)
OTHER = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
# the copy comes before an editable install, also in the processes that tests start; none of them outlives its time
SITE = """\
import resource, sys
sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "ScikitBuildRedirectingFinder"]
resource.setrlimit(resource.RLIMIT_CPU, ({limit}, {limit}))
"""


@dataclass(frozen=True)
class Mutant:
    """One change of one file: `new` in the place of the bytes from `start` to `end`."""

    file: str
    line: int
    change: str
    start: int
    end: int
    new: str
    text: str  # of the line

    def __str__(self) -> str:
        return f"{self.place}  {self.change}"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def key(self) -> str:
        """What names it in the list of equal ones, which lines may pass by; a constant alone is known by its line."""
        is_constant = self.change[0].isdigit() or self.change.startswith(("True ", "False "))
        return f"{self.file}  {self.change}" + (f"  in  {self.text}" if is_constant else "")

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


# -- faults -----------------------------------------------------------------------------------------------------------
def mutants(path: Path) -> list[Mutant]:
    """Return every mutant of a file."""
    source = path.read_bytes()
    starts = [0]
    lines = source.splitlines(keepends=True)
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node, new in _changes(ast.parse(source)):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)
        old, changed = ast.unparse(node), ast.unparse(new)
        text = f"({changed})" if isinstance(new, ast.expr) else changed
        file = path.relative_to(SOURCES).as_posix()
        line = lines[node.lineno - 1].decode().strip()
        found.append(Mutant(file, node.lineno, f"{old}  ->  {changed}", start, end, text, line))
    return found


def _changes(tree: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    """Yield nodes of a tree, each with a changed one in its place."""
    for node in _run(tree):
        for name, place, value in _parts(node):
            new = copy.deepcopy(node)
            if place is None:
                setattr(new, name, value)
            else:
                getattr(new, name)[place] = value
            yield node, new
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if not isinstance(test, ast.Compare | ast.UnaryOp):  # whose other operators are the same change
                    yield test, ast.UnaryOp(ast.Not(), test)
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield node, operand
            case ast.Constant(value=bool()):
                yield node, ast.Constant(not node.value)
            case ast.Constant(value=int()):
                yield node, ast.Constant(node.value + 1)


def _parts(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """Yield what can be changed inside a node: the field, the place in a list, and the new value."""
    match node:
        case ast.Compare(ops=ops):
            for place, one in enumerate(ops):
                yield "ops", place, OTHER[type(one)]()
        case ast.BoolOp(op=one) | ast.BinOp(op=one) | ast.AugAssign(op=one):
            if type(one) in OTHER:
                yield "op", None, OTHER[type(one)]()
        case ast.Return(value=ast.AST() as value):
            if not isinstance(value, ast.Constant):
                yield "value", None, ast.Constant(None)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: not annotations, decorators, guards such as `strict=True`, nor what is said to mypy.

    Nor whether the host waits for a copy, which changes no number of a CPU.
    """
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test):
                continue
            if isinstance(one, ast.keyword) and one.arg in ("strict", "non_blocking"):
                continue
            if isinstance(one, ast.AST) and not isinstance(one, ast.JoinedStr | ast.Raise | ast.Assert):
                yield from _run(one)


def equal() -> dict[str, str]:
    """Return the reasons of the list of equal mutants, by what names these."""
    lines = [line for line in EQUAL.read_text(encoding="utf-8").splitlines() if line.strip() and line[0] != "#"]
    return dict(line.rsplit("  # ", 1) for line in lines)


# -- rooms ------------------------------------------------------------------------------------------------------------
def rooms() -> list[str]:
    """Return the packages and modules of lowp that have tests."""
    every = [one.stem for one in SOURCES.iterdir() if one.suffix == ".py" or (one / "__init__.py").exists()]
    return sorted(room for room in every if tests(room))


def sources(room: str) -> list[Path]:
    """Return a room's files, without those of libraries that are not installed, whose tests are skipped."""
    every = sorted((SOURCES / room).rglob("*.py")) or [SOURCES / f"{room}.py"]
    return [one for one in every if all(map(find_spec, _libraries(one)))]


def _libraries(path: Path) -> set[str]:
    """Return the names of the packages that a file imports first."""
    body = ast.parse(path.read_bytes()).body
    named = {alias.name for one in body if isinstance(one, ast.Import) for alias in one.names}
    named |= {one.module for one in body if isinstance(one, ast.ImportFrom) and one.module}
    return {name.partition(".")[0] for name in named}


def tests(room: str, module: str = "") -> list[Path]:
    """Return a room's test files, or those that import it: first that named like a module, then those that name it."""
    own = sorted((TESTS / room).rglob("test_*.py")) + sorted(TESTS.glob(f"test_{room}*.py"))

    def names(file: Path, word: str) -> bool:
        return re.search(rf"\b{word}\b", file.read_text(encoding="utf-8")) is not None

    found = own or [one for one in sorted(TESTS.rglob("test_*.py")) if names(one, rf"lowp\.{room}")]

    def remote(file: Path) -> tuple[int, bool]:
        return -len(os.path.commonprefix([file.stem, f"test_{module}"])), not (module and names(file, module))  # noqa: RUF071

    return sorted(found, key=remote)


def sample(room: str, count: int, seed: str) -> list[Mutant]:
    """Draw mutants of a room, the same for the same seed, without those known to be equal."""
    known = equal()
    every = [one for path in sources(room) for one in mutants(path) if one.key not in known]
    return random.Random(f"{seed} {room}").sample(every, min(count, len(every)))


# -- runs -------------------------------------------------------------------------------------------------------------
class Runs:
    """Runs of tests, each on a copy of the package as it was at first; leaving ends those under way."""

    def __init__(self, workers: int) -> None:
        self.pool = ThreadPoolExecutor(workers)
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.ended = False

    def __enter__(self) -> Runs:
        self.folder = tempfile.TemporaryDirectory(prefix="lowp-mutants-")
        shutil.copytree(SOURCES, Path(self.folder.name, "lowp"))
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        for process in list(self.processes):
            _end(process)
        self.pool.shutdown()
        self.folder.cleanup()

    def clean(self, room: str, drawn: list[Mutant]) -> str:
        """Run the tests of a room on lowp as it is, and note those that reach each fault."""
        self.reached(room).write_text(json.dumps([one.place for one in drawn]))
        return self.outcome(room, None, 3600)

    def reached(self, room: str) -> Path:
        return Path(self.folder.name, f"{room}.json")

    def files(self, room: str, mutant: Mutant | None) -> list[Path]:
        """Return the test files that may see a fault: those with tests that reach it or start processes; else all."""
        if mutant is None:
            return tests(room)
        every, found = tests(room, Path(mutant.file).stem), json.loads(self.reached(room).read_text())
        first = found[mutant.place]
        named = {TESTS.parent / one.partition("::")[0] for one in (*first, *found["processes"])}
        return [one for one in every if one in named] if first else every

    def outcome(self, room: str, mutant: Mutant | None, limit: float) -> str:
        """Run the tests of a room on lowp with a fault, or as it is, for a number of seconds at most."""
        if self.ended:
            return "ended"
        with tempfile.TemporaryDirectory(dir=self.folder.name) as folder:
            shutil.copytree(Path(self.folder.name, "lowp"), Path(folder, "lowp"))
            Path(folder, "sitecustomize.py").write_text(SITE.format(limit=int(limit)))
            shutil.copy(TESTS / "reached.py", folder)
            if mutant is not None:
                path = Path(folder, "lowp", mutant.file)
                path.write_bytes(mutant.planted(path.read_bytes()))
            files = map(str, self.files(room, mutant))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "reached", *files]
            environment = {**os.environ, "PYTHONPATH": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
            environment |= {"LOWP_REACHED": str(self.reached(room)), "LOWP_PLACE": mutant.place if mutant else ""}
            output = Path(folder, "output")
            with output.open("w") as stream:
                result = self._waited(command, environment, limit, stream)
            if mutant is None and result != "survived" and not self.ended:
                print(output.read_text()[-5000:], file=sys.stderr)
            return result

    def _waited(self, command: list[str], environment: dict[str, str], limit: float, output: IO[str]) -> str:
        process = subprocess.Popen(
            command, cwd=TESTS.parent, env=environment, start_new_session=True, stdout=output, stderr=output
        )
        self.processes.add(process)
        if self.ended:
            _end(process)
        try:
            return "caught" if process.wait(limit) else "survived"
        except subprocess.TimeoutExpired:
            _end(process)
            process.wait()
            return "timed out"
        finally:
            self.processes.discard(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def told(drawn: dict[str, list[Mutant]], workers: int) -> dict[str, dict[str, Any]]:
    """Run every mutant, print the outcomes and return them by room; rooms whose tests fail without a fault raise."""
    with Runs(workers) as runs:

        def timed(room: str) -> tuple[str, float]:
            start = time.monotonic()
            return runs.clean(room, drawn[room]), time.monotonic() - start

        limits = dict(zip(drawn, runs.pool.map(timed, drawn), strict=True))
        if failed := [room for room, (outcome, _) in limits.items() if outcome != "survived"]:
            raise SystemExit(f"tests fail without any fault: {', '.join(failed)}")
        futures = {
            (room, one): runs.pool.submit(runs.outcome, room, one, 60 + 3 * limits[room][1])
            for room in drawn
            for one in drawn[room]
        }
        for (_, one), future in futures.items():
            if future.result() == "survived":
                print(f"survived  {one}", flush=True)
    table = {}
    for room in drawn:
        outcomes = {one: futures[room, one].result() for one in drawn[room]}
        survivors = [one for one, outcome in outcomes.items() if outcome == "survived"]
        table[room] = {
            "mutants": len(outcomes),
            "caught": len(outcomes) - len(survivors),
            "timed out": list(outcomes.values()).count("timed out"),
            "survivors": [{"file": one.file, "line": one.line, "change": one.change} for one in survivors],
        }
        print(f"{room:16} {table[room]['caught']} of {len(outcomes)} caught, {table[room]['timed out']} by their time")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plants faults in lowp and counts those that the tests find.")
    parser.add_argument("places", nargs="*", metavar="FILE[:LINE]", help="every mutant of this place in src/lowp")
    parser.add_argument("--room", action="append", choices=rooms(), help="a package or module of lowp; default: all")
    parser.add_argument("--count", type=int, default=10, help="mutants a room")
    parser.add_argument("--seed", default="0", help="chooses the sample")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    asked = parser.parse_args(arguments)
    os.nice(10)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    drawn: dict[str, list[Mutant]] = {}
    for place in asked.places:
        file, _, line = place.partition(":")
        found = [one for one in mutants(SOURCES / file) if not line or one.line == int(line)]
        drawn.setdefault(Path(file).parts[0].removesuffix(".py"), []).extend(found)
    if not asked.places:
        drawn = {room: sample(room, asked.count, asked.seed) for room in asked.room or rooms()}
    try:
        table = told({room: some for room, some in drawn.items() if some}, asked.workers)
    except KeyboardInterrupt:
        return 130
    if asked.json:
        asked.json.write_text(json.dumps(table, indent=1))
    count, caught = (sum(row[what] for row in table.values()) for what in ("mutants", "caught"))
    print(f"{caught} of {count} caught")
    return int(caught < ENOUGH * count)


if __name__ == "__main__":
    sys.exit(main())
