"""What scripts outside of the package take from lowp is there: nothing else tells of a name that has gone."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for folder in ("bench", "examples", "docs", ".ci") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_what_is_there(path: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "lowp":
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{one.name}" for one in node.names if not _has(module, one.name)]
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "lowp":
                    importlib.import_module(one.name)
    assert not missing


def _has(module: object, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:  # a submodule
        importlib.import_module(f"{module.__name__}.{name}")  # type: ignore[attr-defined]
    except ImportError:
        return False
    return True
