"""The layers of the package: allowed imports, and the modules that may use private and native names."""

from __future__ import annotations

import ast
import operator
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TORCH_FREE = ("errors", "formats", "casts", "cost", "explain", "loss_scale", "policy", "presets")


def lint_imports(source: Path, configuration: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("importlinter", reason="import-linter is not installed: pip install -e '.[dev]'")
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


# Who may ask on which device a tensor lies, beside the kernels, and why.
MAY_ASK = {
    "recipes/": "programs, which choose their device and measure it",
    "benchmarking/": "times and memory of a device",
    "cli/bench.py": "devices that cannot be timed are refused by name",
    "compat.py": "the kind of accelerator that torch tells of",
    "distributed.py": "a group's back ends are told by device",
    "exponents/base.py": "entries are made on the device that the other ranks' are on",
    "step/": "the scale is placed where the gradients are",
    "ops/attention.py": "the state of a device's random generator",
    "optim/masters.py": "state is placed where the parameters are",
    "optim/optimizers.py": "a counter and a rate on an accelerator are not read",
    "optim/storage.py": "a seed on an accelerator is not read",
    "precision.py": "the scale is placed where the model is",
    "region/context.py": "torch.autocast is spelled with a device",
    "region/engine.py": "torch.autocast is asked by device",
    "region/handover.py": "torch.autocast is entered for a device whose lists agree",
    "region/weights.py": "memory that processes share is told by what a CPU's storage says",
}
DEVICES = {"cpu", "cuda", "mps", "xpu", "hpu", "ipu", "xla", "mtia", "maia", "vulkan", "privateuseone"}
ASKING = {"type", "get_device", *(f"is_{name}" for name in DEVICES)}


def questions(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes that query the device of a tensor.

    A comparison of two devices is allowed; so is `is_meta`, which queries whether there are numbers.
    """
    devices = named_devices(tree)
    return [node for node in ast.walk(tree) if asks_for_a_device(node, devices)]


def named_devices(tree: ast.AST) -> frozenset[str]:
    """Return the names of devices in a file besides `device`: where = x.device, one of them or another's name."""
    found: frozenset[str] = frozenset()
    pairs = [pair for node in ast.walk(tree) for pair in assigned(node)]
    while more := {target for target, value in pairs if is_a_device(value, found)} - found:
        found |= more
    return found


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield names that a node assigns with their values; both values of a conditional expression."""
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    else:
        return
    for target, value in pairs:
        several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for one, given in zip(target.elts, value.elts, strict=False) if several else [(target, value)]:  # type: ignore[union-attr]
            for each in (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,):
                if isinstance(one, (ast.Name, ast.Attribute)) and each is not None:
                    yield one.id if isinstance(one, ast.Name) else one.attr, each


def asks_for_a_device(node: ast.AST, devices: frozenset[str]) -> bool:
    if isinstance(node, ast.Attribute):  # x.is_cuda, x.device.type, and so `where.type`; x.device.index
        return node.attr in ASKING or (node.attr == "index" and is_a_device(node.value, devices))
    if isinstance(node, ast.Compare):  # device == "cpu", x.device != CPU, device in ("cuda", "mps")
        sides = [node.left, *node.comparators]
        named = any(names_a_device(side) for side in sides)
        of_devices = [is_a_device(side, devices) for side in sides]
        return named or (any(of_devices) and not all(map(operator.or_, of_devices, map(is_none, sides))))
    if isinstance(node, ast.MatchValue):  # case "cpu":
        return names_a_device(node.value)
    if isinstance(node, ast.Call):  # getattr(x, "is_cuda"), str(x.device).startswith("cuda")
        words = [word for one in node.args if isinstance(one, ast.Constant) and isinstance(word := one.value, str)]
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("getattr", "attrgetter", "hasattr"):
            return any(part in ASKING for word in words for part in word.split("."))
        return called in ("startswith", "removeprefix", "partition") and any(word in DEVICES for word in words)
    if isinstance(node, ast.Subscript):  # {"cpu": one, "cuda": other}[kind]
        keys = node.value.keys if isinstance(node.value, ast.Dict) else []
        return any(key is not None and names_a_device(key) for key in keys)
    return False


def is_a_device(node: ast.AST, devices: frozenset[str]) -> bool:
    """Whether a node is named as a device: x.device, self._device, device, its_device, or one of `devices`."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "device" or name.endswith("_device") or name in devices


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def names_a_device(node: ast.AST) -> bool:
    """Whether this is the name of a device type, a `torch.device(...)`, or a collection that contains one."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.partition(":")[0] in DEVICES
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "torch.device"
    return isinstance(node, (ast.Tuple, ast.List, ast.Set)) and any(names_a_device(one) for one in node.elts)


def test_outside_the_kernels_nobody_asks_on_which_device_a_tensor_lies(repository: Path) -> None:
    found = {
        path: lines
        for path, tree in sources(repository)
        if not path.startswith("kernels/") and (lines := sorted({node.lineno for node in questions(tree)}))  # type: ignore[attr-defined]
    }
    allowed = {path: next((one for one in MAY_ASK if path == one or path.startswith(one)), None) for path in found}
    assert {path: lines for path, lines in found.items() if allowed[path] is None} == {}
    assert MAY_ASK.keys() == set(allowed.values()), "who no longer asks is taken off the list"


@pytest.mark.parametrize(
    "written",
    [
        "x.is_cuda", "x.untyped_storage().is_cpu", "x.get_device() < 0", "torch.Tensor.is_mps.__get__(x)",
        "x.device.type", "self._device.type", "where.type", "x.device.index is None", "x.type()",
        "device == 'cpu'", "'cuda' in str(x.device)", "kind not in ('cpu', 'mps')", "str(x.device) != 'cuda:0'",
        "x.device == torch.device('cpu')", "device in {torch.device('cpu')}", "x.device == CPU", "CPU != x.device",
        "device in ACCELERATORS", "self._device == self.cpu",
        "getattr(x, 'is_cuda')", "getattr(x.device, 'type')", "attrgetter('device.type')(x)", "hasattr(x, 'is_cuda')",
        "str(x.device).startswith('cuda')", "{'cpu': one, 'cuda': other}[kind]",
        "match kind:\n  case 'cpu':\n    pass", "match x.device.type:\n  case _:\n    pass",
        "where = x.device\nwhere == ours", "(where := x.device) and where in some", "at, n = x.device, 3\nat != HOST",
        "self.at = y.device if y else x.device\nz = self.at\nz == HOST",
    ],
)  # fmt: skip
def test_questions_for_a_device_are_recognised(written: str) -> None:
    assert questions(ast.parse(written))


@pytest.mark.parametrize(
    "written",
    [
        "x.device", "a.device == b.device", "x.device is None", "x.device != own_device",
        "where = x.device\nwhere == y.device", "where = x.device\nthere = y.device\nwhere != there",
        "where = x\nwhere == y",
        "torch.zeros(3, device='cpu')", "x.to('cuda')",
        "kernels.answers_at_once(x)", "x.is_meta", "x.type_as(y)", "states['cuda'] == 1", "isinstance(x, Tensor)",
        "{'cpu': one, 'cuda': other}", "name.startswith('cp')", "getattr(x, name)", "{x.device: y}[z]",
    ],
)  # fmt: skip
def test_what_only_goes_along_with_a_device_is_no_question(written: str) -> None:
    assert not questions(ast.parse(written))


def test_integrations_use_the_public_names_of_lowp_alone(repository: Path) -> None:
    parts = [(path, name) for path, tree in sources(repository) for name in imported(tree) if "integrations/" in path]
    ours = {(path, name) for path, name in parts if name.partition(".")[0] == "lowp"}
    assert ours and {name for _, name in ours if not name.startswith("lowp.integrations.")} == {"lowp"}


def test_a_class_name_stands_for_one_class(repository: Path) -> None:
    places: dict[str, list[str]] = {}
    for path, tree in sources(repository):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not is_private(node.name):
                places.setdefault(node.name, []).append(path)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {"Number": ["explain/numbers.py", "shims/qtorch.py"]}  # the latter is a name of qtorch


def test_the_readme_of_the_kernels_names_every_file(repository: Path) -> None:
    kernels = repository / "src" / "lowp" / "kernels"
    text = (kernels / "README.md").read_text()
    modules = {path.stem for path in kernels.rglob("*.py") if "triton" not in path.parts} - {"__init__"}
    sources = {path.name for path in (kernels / "cpu").iterdir() if path.suffix in (".cpp", ".hpp", ".inc")}
    unnamed = [name for name in sorted(modules) if f"`{name}`" not in text and f"`{name}.py`" not in text]
    assert unnamed + [name for name in sorted(sources) if name not in text] == []
