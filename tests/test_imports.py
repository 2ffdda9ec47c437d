"""Light imports stay light, and the public names match the stubs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowp
from lowp.formats import ScaledFormat

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIGHT = {  # a statement, and the modules of lowp that it may load
    "import lowp.formats": ("import lowp.formats", {"lowp", "lowp.errors", "lowp.formats"}),
    "import lowp.casts": ("import lowp.casts", {"lowp", "lowp.casts", "lowp.errors", "lowp.formats", "lowp.hashing"}),
    "lowp --help": ("import lowp.cli; lowp.cli.main(['--help'])", {"lowp", "lowp.cli", "lowp.errors"}),
}
CHILD = """
import sys
before = set(sys.modules)
{statement}
print("LOADED", *sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize(("statement", "own"), LIGHT.values(), ids=LIGHT.keys())
def test_what_is_light_loads_the_standard_library_and_little_of_lowp(statement: str, own: set[str]) -> None:
    """The loaded modules determine the cost of an import on any machine; its time depends on the load."""
    command = [sys.executable, "-c", CHILD.format(statement=statement)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    loaded = next(line.split()[1:] for line in lines if line.startswith("LOADED"))
    mine = {name for name in loaded if name.partition(".")[0] == "lowp"}
    assert "lowp" in mine
    assert {".".join(name.split(".")[:2]) for name in mine} <= own
    others = {name.partition(".")[0] for name in loaded} - {"lowp"}
    assert not others - set(sys.stdlib_module_names)
    assert not others & {"asyncio", "email", "http", "multiprocessing", "sqlite3", "unittest", "urllib", "xml"}


def test_the_stubs_name_what_the_package_exports() -> None:
    stub = ast.parse(Path(lowp.__file__).with_suffix(".pyi").read_text())
    bound: set[str] = {"__version__"}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            continue  # what a stub imports it gives to nobody, unless it is in __all__
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound.add(node.target.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
    assert sorted(name for name in bound if name == "__version__" or not name.startswith("_")) == lowp.__all__
    exported = next(one.value for one in stub.body if isinstance(one, ast.Assign) and "__all__" in ast.unparse(one))
    assert sorted(ast.literal_eval(exported)) == lowp.__all__


def test_the_stubs_take_what_the_functions_take() -> None:
    stub = ast.parse(Path(lowp.__file__).with_suffix(".pyi").read_text())
    written = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in written} == {"quantize", "encode", "decode"}
    for node in written:
        takes = inspect.signature(getattr(lowp, node.name)).parameters
        assert [one.arg for one in (*node.args.args, *node.args.kwonlyargs)] == list(takes)
        keywords = [name for name, one in takes.items() if one.kind is inspect.Parameter.KEYWORD_ONLY]
        assert [one.arg for one in node.args.kwonlyargs] == keywords


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    for name in lowp.__all__:
        assert getattr(lowp, name) is not None
    assert lowp.kernels is not None  # type: ignore[attr-defined]  # loaded by now, and not listed
    assert dir(lowp) == lowp.__all__


@pytest.mark.parametrize("name", sorted(set(lowp.__all__) - {"FORMATS", "__version__"}))
def test_help_says_what_a_name_is_and_what_it_takes(name: str) -> None:
    value = getattr(lowp, name)
    first, _, rest = inspect.getdoc(value).partition("\n")  # type: ignore[union-attr]
    assert "." in first or ":" in first, first
    assert not rest or rest.startswith("\n"), "one line, then an empty one"
    shown = pydoc.plain(pydoc.render_doc(value))
    assert "*args" not in shown.splitlines()[2] and "*arguments" not in shown.splitlines()[2]
    for member, own in vars(value).items() if inspect.isclass(value) else ():
        if not member.startswith("_") and (callable(own) or isinstance(own, (property, classmethod, staticmethod))):
            assert inspect.getdoc(getattr(value, member)), f"{name}.{member}"


def test_each_error_of_the_public_names_is_caught_as_lowp_s() -> None:
    named = [getattr(lowp, name) for name in lowp.__all__]
    errors = [one for one in named if inspect.isclass(one) and issubclass(one, Exception)]
    assert len(errors) == 8
    assert all(issubclass(error, lowp.LowpError) for error in errors)


def test_every_package_that_is_imported_is_declared_and_the_other_way_round(repository: Path) -> None:
    imported: set[str] = set()
    for file in (repository / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module)
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                imported |= {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and one.value}
    packages = {name.partition(".")[0] for name in imported if isinstance(name, str)} - {"lowp"}
    # triton and typing_extensions come with torch, sitecustomize is the user's, tomllib is Python's own from 3.11 on
    foreign = packages - set(sys.stdlib_module_names) - {"", "sitecustomize", "tomllib", "triton", "typing_extensions"}
    foreign.add("lightning")  # imported by the name of that of its packages which a script uses
    foreign.add("onnxscript")  # imported by torch.onnx
    with (repository / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    of_users = ("recipes", "plot", "completions", "integrations", "keras", "fastai", "onnx")
    declared = [*project["dependencies"], *(one for name in of_users for one in extras[name])]
    names = {re.match(r"[\w-]+", one)[0] for one in declared}  # type: ignore[index]
    assert {{"PIL": "pillow", "sklearn": "scikit-learn"}.get(name, name.replace("_", "-")) for name in foreign} == names


def test_before_python_3_11_the_reader_of_toml_is_tomli() -> None:
    script = "import lowp.policy; print(lowp.policy.Policy.from_toml('name = \"a\"').name)"
    if sys.version_info >= (3, 11):  # as on Python 3.10
        without = "import sys, tomllib; sys.modules['tomli'] = tomllib; sys.modules['tomllib'] = None; "
        script = f"{without}sys.version_info = (3, 10, 0); {script}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "a\n"


@pytest.mark.slow
def test_the_types_of_the_public_names_hold(repository: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "src", "tests/public_types.py"]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_an_unknown_name_lists_the_near_ones() -> None:
    with pytest.raises(AttributeError, match=r"unknown name in lowp '__verison__'; did you mean __version__\?"):
        _ = lowp.__verison__  # type: ignore[attr-defined]


def test_the_installed_version_is_the_package_s() -> None:
    metadata = importlib.import_module("importlib.metadata")
    try:
        installed = metadata.version("lowp")
    except metadata.PackageNotFoundError:
        installed = lowp.__version__  # run from the sources
    assert installed == lowp.__version__


def test_the_stub_names_the_formats_with_a_shared_scale() -> None:
    stub = ast.parse(Path(lowp.__file__).with_suffix(".pyi").read_text())
    (names,) = (
        ast.literal_eval(node.value.slice)
        for node in ast.walk(stub)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Subscript)
        and node.targets[0].id == "_ScaledName"  # type: ignore[attr-defined]
    )
    assert list(names) == [name for name, format in lowp.FORMATS.items() if isinstance(format, ScaledFormat)]


def test_help_of_every_public_name_is_its_own() -> None:
    for name in lowp.__all__:
        if name != "__version__":
            shown = inspect.getdoc(getattr(lowp, name)) or ""
            assert shown and shown != dict.__doc__ and shown.splitlines()[0].endswith((".", ":", "``")), name
