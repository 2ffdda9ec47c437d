"""CI's tools are pinned, and CI runs commands available to a contributor."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import versions
import yaml

from lowp.kernels import cpu
from lowp.kernels.cpu.abi import SIGNATURES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_every_action_is_pinned_by_commit(repository: Path) -> None:
    used = [
        line.strip()
        for file in (repository / ".github" / "workflows").glob("*.yml")
        for line in file.read_text().splitlines()
        if "uses:" in line
    ]
    assert used
    assert [line for line in used if not re.fullmatch(r"- uses: [\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line)] == []


def test_a_release_is_published_without_a_password_after_all_its_files_are_tested(repository: Path) -> None:
    text = (repository / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    publish = jobs["publish"]
    assert set(publish["needs"]) == set(jobs) - {"publish"} and publish["if"] == "github.event_name == 'push'"
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"
    assert "secrets." not in text and all("permissions" not in job for job in jobs.values() if job is not publish)
    runners = jobs["wheels"]["strategy"]["matrix"]["runner"]
    assert [one.partition("-")[0] for one in runners] == ["ubuntu", "ubuntu", "macos", "windows"]


def test_every_target_that_ci_makes_is_in_the_makefile(repository: Path) -> None:
    text = "".join(file.read_text() for file in (repository / ".github" / "workflows").glob("*.yml"))
    targets = re.findall(r"run: make ([\w-]+)", text)
    assert {"sanitize", "slow", "test-portable", "test-nightly", "test-integrations", "test-arm"} <= set(targets)
    makefile = (repository / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in targets)


def test_the_oldest_versions_of_other_libraries_are_those_that_are_declared(repository: Path) -> None:
    with (repository / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["optional-dependencies"]["integrations"]
    makefile = (repository / "Makefile").read_text()
    for name, version in (one.split(">=") for one in declared):
        assert re.search(rf" {name}=={re.escape(version)}(\.\d+)?\b", makefile), name


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize("code", [0, 1])
def test_the_tests_run_as_other_processors_would(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import portable

    ran: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], cwd: Path, env: dict[str, str]) -> SimpleNamespace:
        ran.append((command, env))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(portable.subprocess, "run", run)
    assert portable.main(["sse4", "library-absent", "--", "tests/ops"]) == 2 * code
    assert [command[1:] for command, _ in ran] == [["-m", "pytest", "-q", "tests/ops"]] * 2
    assert ran[0][1]["ATEN_CPU_CAPABILITY"] == "default" and "LOWP_CPU_LIBRARY" not in ran[0][1]
    assert not Path(ran[1][1]["LOWP_CPU_LIBRARY"]).exists()
    assert ran[0][1]["TORCHINDUCTOR_CACHE_DIR"] != ran[1][1]["TORCHINDUCTOR_CACHE_DIR"]
    told = capsys.readouterr().out.splitlines()[-1]
    failed = ", not sse4, not library-absent" if code else ""
    assert told == f"== {2 - 2 * code} of 2 configurations passed{failed}"
    assert portable.main(["mips"]) == 2
    assert "no configuration mips on this machine; it has sse4, " in capsys.readouterr().err


def test_the_tests_on_arm_forward_every_function_and_name_the_packages_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import arm

    rows = arm.calls().splitlines()
    assert len(rows) == len(SIGNATURES) and "CALL(lowp_build, const char*, (), (k_lowp_build))" in rows
    monkeypatch.setattr(arm.shutil, "which", lambda program: None if program == "qemu-aarch64" else program)
    assert arm.main([]) == 2
    assert capsys.readouterr().err == "missing: apt-get install qemu-user\n"


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_each_level_that_the_machine_has_is_a_configuration() -> None:
    import portable

    levels = [one["LOWP_CPU_ISA"] for one in portable.configurations().values() if "LOWP_CPU_ISA" in one]
    assert levels == list(cpu.available())


@pytest.mark.parametrize("version", ["2.11.0", versions.VERSIONS[-1], "nightly"])
def test_the_newest_torch_is_tested_with_all_tests_and_others_with_a_part(
    version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **given: object) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(versions.subprocess, "run", run)
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as if every version were installed
    monkeypatch.setattr(Path, "touch", lambda path: None)
    assert versions.main([version]) == 0 and capsys.readouterr().out == "== 1 of 1 versions passed\n"
    assert any("nightly/cpu" in word for word in ran[0]) is (version == "nightly")
    assert [word for word in ran[-1] if word.startswith("tests/")] == (
        [f"tests/{one}" for one in versions.PART] if version == "2.11.0" else []
    )
