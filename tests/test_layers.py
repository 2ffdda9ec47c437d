"""The house keeps its layers: who may import whom, and where private and native names may be used."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TORCH_FREE = ("errors", "formats", "casts", "cost", "explain", "policy", "presets")


def lint_imports(source: Path, configuration: Path) -> subprocess.CompletedProcess[str]:
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    # -S keeps the hook of an editable install away, which would answer for lowp before the path does.
    command = [sys.executable, "-S", "-c", script, "--no-cache", "--config", str(configuration)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *filter(None, sys.path)])}
    return subprocess.run(command, cwd=configuration.parent, env=environment, capture_output=True, text=True)


def test_imports_point_down(repository: Path) -> None:
    result = lint_imports(repository / "src", repository / "pyproject.toml")
    assert result.returncode == 0, result.stdout + result.stderr


POINT_UP = [  # a module, what it may not import, and the contract that says so
    ("formats", "torch", "The numbers and the policies load no torch"),
    ("casts", "lowp.compat", "The numbers and the policies load no torch"),
    ("errors", "lowp.formats", "The layers"),
    ("compat", "ctypes", "Only kernels.cpu loads the C++ library"),
    ("compat", "triton", "Only the kernels import triton"),
]


def test_imports_that_point_up_are_noticed(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "src" / "lowp", tmp_path / "src" / "lowp", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for module, imported, _ in POINT_UP:
        package = tmp_path / "src" / "lowp" / module
        file = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
        file.write_text(f"{file.read_text()}\nimport {imported}\n")
    result = lint_imports(tmp_path / "src", tmp_path / "pyproject.toml")
    assert result.returncode == 1, result.stdout + result.stderr
    for module, imported, broken in POINT_UP:
        assert f"{broken} BROKEN" in result.stdout
        assert f"lowp.{module} -> {imported} " in result.stdout.replace("(", " (")


def test_every_module_without_torch_is_in_the_contract(repository: Path) -> None:
    contracts = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = next(c["source_modules"] for c in contracts if "torch" in c.get("forbidden_modules", []))
    source = repository / "src" / "lowp"
    present = [name for name in TORCH_FREE if (source / f"{name}.py").exists() or (source / name).is_dir()]
    assert named == [f"lowp.{name}" for name in present]


@cache
def sources(repository: Path) -> list[tuple[str, ast.Module]]:
    package = repository / "src" / "lowp"
    return [
        (path.relative_to(package).as_posix(), ast.parse(path.read_text())) for path in sorted(package.rglob("*.py"))
    ]


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def torch_attributes(tree: ast.Module) -> Iterator[str]:
    """Yield dotted names such as torch.amp.autocast_mode._enter_autocast, as written or as imported."""
    yield from (name for name in imported(tree) if name.partition(".")[0] == "torch")
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id == "torch":
            yield ".".join(["torch", *reversed(parts)])


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def test_private_names_of_torch_live_in_compat(repository: Path) -> None:
    found = {
        f"{path}: {name}"
        for path, tree in sources(repository)
        if path != "compat.py"
        for name in torch_attributes(tree)
        if is_private(name)
    }
    assert not found


def test_private_names_of_torch_are_recognised() -> None:
    written = (
        "import torch\nfrom torch._C import a\nimport torch._dynamo as b\ntorch.amp._x()\ntorch.__version__\nself._y\n"
    )
    private = {name for name in torch_attributes(ast.parse(written)) if is_private(name)}
    assert private == {"torch._C.a", "torch._dynamo", "torch.amp._x"}


def test_triton_is_imported_by_the_triton_kernels_alone(repository: Path) -> None:
    found = [
        path
        for path, tree in sources(repository)
        if not path.startswith("kernels/triton/") and any(name.partition(".")[0] == "triton" for name in imported(tree))
    ]
    assert not found
