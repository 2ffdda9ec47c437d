"""What a release consists of: the wheel's files and metadata, the sdist, and the files about the project.

The slow test builds both, installs them into fresh environments beside the torch of this one, and trains.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import lowp

ABSENT = os.path.join(os.sep, "nowhere", "c++")


def build(kind: str, repository: Path, folder: Path) -> Path:
    """Build with what is installed; a wheel without what CMake adds: the library takes a minute."""
    pytest.importorskip("scikit_build_core")
    code = (
        f"from scikit_build_core.build import build_{kind} as build; "
        f"print(build({str(folder)!r}, {{'wheel.cmake': 'false', 'build-dir': {str(folder / 'build')!r}}}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return folder / ran.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(build("wheel", repository, tmp_path_factory.mktemp("wheel"))) as file:
        yield file


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"lowp-{lowp.__version__}.dist-info/METADATA").decode())


def of_the_package(repository: Path) -> set[str]:
    """Return the files of the package that users need, as they are named in a wheel."""
    kept = (".py", ".pyi", ".typed", ".css", ".html", ".js", ".toml")
    files = (
        file for file in (repository / "src" / "lowp").rglob("*") if file.suffix in kept or file.name == "py.typed"
    )
    return {file.relative_to(repository / "src").as_posix() for file in files}


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile, repository: Path) -> None:
    names = set(wheel.namelist())
    inside = {name for name in names if name.startswith("lowp/")}
    assert inside == of_the_package(repository)
    assert {
        "lowp/py.typed",
        "lowp/__init__.pyi",
        *(f"lowp/report/profile.{one}" for one in ("css", "html", "js")),
    } <= inside
    about = f"lowp-{lowp.__version__}.dist-info"
    told = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert names - inside == {f"{about}/{name}" for name in told}


def test_the_metadata_say_what_lowp_needs_and_the_command_that_it_brings(
    metadata: Message, wheel: zipfile.ZipFile
) -> None:
    assert metadata["Name"] == "lowp" and metadata["Version"] == lowp.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.10"
    needed = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert [re.match(r"[\w-]+", one)[0] for one in needed] == ["torch", "numpy", "rich", "tomli-w", "tomli"]  # type: ignore[index]
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    entries = wheel.read(f"lowp-{lowp.__version__}.dist-info/entry_points.txt").decode()
    assert "".join(entries.split()) == "[console_scripts]lowp=lowp.cli:main"


@pytest.mark.slow
def test_the_sdist_has_what_a_build_and_the_tests_need(repository: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", repository, tmp_path)) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    room = (repository / "src" / "lowp" / "kernels" / "cpu").iterdir()
    sources = {file.relative_to(repository).as_posix() for file in room if file.suffix in (".cpp", ".hpp", ".inc")}
    assert sources <= names and {f"src/{name}" for name in of_the_package(repository)} <= names
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "src/lowp/launch/lowp-launch.pth"} <= names
    assert not {name for name in names if name.endswith((".so", ".pyc"))}


def test_the_citation_names_the_version(repository: Path) -> None:
    cited = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert cited["version"] == lowp.__version__ and cited["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= set(cited)


def test_an_issue_form_asks_for_what_is_needed(repository: Path) -> None:
    for form in (repository / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        asked = yaml.safe_load(form.read_text())
        if form.name != "config.yml":
            assert {"name", "description", "body"} <= set(asked)
            fields = [one for one in asked["body"] if one["type"] != "markdown"]
            assert fields and all(one["id"] and one["attributes"]["label"] for one in fields)


@pytest.fixture
def links(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("absolute_links", repository / ".ci" / "absolute_links.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_description_lead_to_the_repository(links: ModuleType, repository: Path) -> None:
    text = "![a chart](docs/a.png) [b](docs/b.md#c) [d](#e) [f](https://g/h) [i](mailto:j)"
    made = links.absolute(text, "https://k/blob/v1")
    assert made == (
        "![a chart](https://k/blob/v1/docs/a.png?raw=true) [b](https://k/blob/v1/docs/b.md#c) "
        "[d](#e) [f](https://g/h) [i](mailto:j)"
    )
    whole = links.absolute((repository / "README.md").read_text(), "https://k/blob/v1")
    assert not re.findall(r"\]\((?!https:|#)", whole)


# -- built and installed ----------------------------------------------------------------------------------------------
def environment(folder: Path) -> Path:
    """Make an environment that has the packages of this one but lowp; return its folder of commands."""
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for old in packages.glob("setuptools*"):  # of the interpreter, too old for torch
        shutil.rmtree(old)
    others = folder / "others"
    others.mkdir()
    for place in map(Path, sys.path):
        for found in place.glob("*") if place.name == "site-packages" and place.is_dir() else ():
            taken = found.suffix == ".pth" or "lowp" in found.name or found.name.startswith(("pip", "_distutils"))
            if not taken and not (others / found.name).exists():
                (others / found.name).symlink_to(found)
    (packages / "others.pth").write_text(f"{others}\n")
    return folder / "bin"


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOWP_", "PYTHON"))}
    words = [str(word) for word in command]
    ran = subprocess.run(words, cwd=cwd, env={**kept, **variables}, capture_output=True, text=True)
    assert ran.returncode == 0, f"{words}\n{ran.stdout}\n{ran.stderr}"
    return ran


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="environments are laid out as on Linux")
def test_a_wheel_installs_and_trains_in_a_minute_and_an_sdist_without_a_compiler_says_so_once(
    repository: Path, tmp_path: Path
) -> None:
    sdist = build("sdist", repository, tmp_path)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path)
    run(*pip, sdist, cwd=tmp_path)
    (built,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"lowp-{re.escape(lowp.__version__)}-py3-none-linux_\w+\.whl", built.name)
    with zipfile.ZipFile(built) as file:
        names = set(file.namelist())
    assert {"lowp/kernels/cpu/liblowp_cpu.so", "lowp-launch.pth"} <= names
    assert {name for name in names if name.startswith("lowp/")} == of_the_package(repository) | {
        "lowp/kernels/cpu/liblowp_cpu.so"
    }

    commands = environment(tmp_path / "compiled")
    begin = time.monotonic()
    run(commands / "pip", "install", "--no-index", built, cwd=tmp_path)
    assert time.monotonic() - begin < 60
    ran = run(commands / "lowp", "compare", "digits", "--epochs", "1", "--seeds", "1", cwd=tmp_path)
    assert "converges" in ran.stdout and "Warning" not in ran.stderr
    told = run(commands / "lowp", "--version", "--verbose", cwd=tmp_path)
    assert "C++ library: " in told.stdout and "not used" not in told.stdout

    commands = environment(tmp_path / "pure")
    run(commands / "pip", "install", "--no-deps", sdist, cwd=tmp_path, CXX=ABSENT)
    ran = run(commands / "lowp", "compare", "digits", "--epochs", "1", "--seeds", "1", cwd=tmp_path)
    assert ran.stderr.count("was not built") == 1
