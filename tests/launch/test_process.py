"""The process behaves like the script's own: argv, __main__, standard input, exit codes, tracebacks, children."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import forked
import pytest
from launch.test_scripts import python

from lowp.errors import InvalidInput
from lowp.launch import comparison
from lowp.launch.record import RUN


def lowp_run(
    tmp_path: Path, text: str, *options: str, script: tuple[str, ...] = ("script.py",)
) -> subprocess.CompletedProcess[str]:
    """Write a script and run it under lowp."""
    (tmp_path / "script.py").write_text(text)
    return python("-m", "lowp", "run", "--precision", "bf16", *options, *script, cwd=tmp_path)


def test_a_script_sees_itself_as_python_would_run_it(tmp_path: Path) -> None:
    text = "import sys, os\nprint(sys.argv, __name__, __file__, sys.path[0] == os.getcwd(), __spec__)\n"
    (tmp_path / "script.py").write_text(text)
    given = ("script.py", "--lr", "0.1", "--precision", "x")
    assert lowp_run(tmp_path, text, script=given).stdout == python(*given, cwd=tmp_path).stdout


def test_a_module_runs_by_its_name(tmp_path: Path) -> None:
    ran = lowp_run(tmp_path, "import sys\nprint(__name__, __spec__.name, sys.argv[1:])\n", script=("-m", "script", "a"))
    assert ran.stdout == "__main__ script ['a']\n"


@pytest.mark.parametrize(
    ("text", "code"), [("raise SystemExit(7)", 7), ("import sys; sys.exit('no')", 1), ("1 / 0", 1)]
)
def test_exit_codes_are_the_scripts_own(tmp_path: Path, text: str, code: int) -> None:
    assert lowp_run(tmp_path, text).returncode == code


def test_a_traceback_shows_the_script_alone(tmp_path: Path) -> None:
    text = (
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        raise ValueError('boo')\n"
        "M()(torch.ones(1))\n"
    )
    ran = lowp_run(tmp_path, text)
    assert ran.returncode == 1 and "ValueError: boo" in ran.stderr
    assert "lowp/launch" not in ran.stderr


def test_a_process_without_torch_is_left_as_it_is(tmp_path: Path) -> None:
    ran = lowp_run(tmp_path, "import sys\nprint('torch' in sys.modules, 'lowp.launch.session' in sys.modules)\n")
    assert ran.stdout == "False False\n"
    assert ran.stderr == ""


def test_standard_input_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(input()[::-1])")
    found = python("-m", "lowp", "run", "script.py", cwd=tmp_path, given="abc\n")
    assert found.stdout == "cba\n", found.stderr


def test_ctrl_c_reaches_the_script(tmp_path: Path) -> None:
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process may have begun without
    try:
        ran = lowp_run(tmp_path, text)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran.returncode == -signal.SIGINT and "KeyboardInterrupt" in ran.stderr


STEP = (
    "import multiprocessing, os, signal, time, torch\nm = torch.nn.Linear(2, 1)\n"
    "o = torch.optim.SGD(m.parameters(), 0.1)\nm(torch.ones(1, 2)).sum().backward()\no.step()\n"
)


def test_sigterm_ends_the_script_as_python_does_and_the_run_is_told(tmp_path: Path) -> None:
    text = "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)\nfinally:\n    print('no', flush=True)\n"
    ran = lowp_run(tmp_path, STEP + text)
    assert (ran.returncode, ran.stdout) == (-signal.SIGTERM, "")
    assert re.fullmatch(r"lowp run: bf16, 1 optimizer steps, 0 skipped, .* s\n", ran.stderr)


def test_a_script_that_handles_sigterm_itself_finds_what_it_finds_in_python(tmp_path: Path) -> None:
    text = (
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "child.start()\nchild.terminate()\nchild.join()\nassert child.exitcode == -signal.SIGTERM\n"
        "handler = lambda *_: print('handled')\n"
        "assert signal.signal(signal.SIGTERM, handler) == signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGTERM) is handler\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is handler\n"
        "print('default', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    ran = lowp_run(tmp_path, STEP + text)
    assert (ran.returncode, ran.stdout) == (-signal.SIGTERM, "handled\ndefault\n"), ran.stderr
    assert re.fullmatch(r"lowp run: bf16, 1 optimizer steps, .* s\n", ran.stderr)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "the script is missing"),
        (("--precision", "bf17", "s.py"), "unknown precision 'bf17'"),
        (
            ("--compare", "fp32", "bf16", "s.py"),
            "'bf16' is a precision and not a script: give several precisions as one",
        ),
        (("nothere.py",), "there is no script 'nothere.py' here"),
        (("--lr", "0.1", "s.py"), "'--lr' is not an option of lowp run: give options of the script after its name"),
        (("--precision", "bf16-storage", "s.py"), "use --precision bf16"),
        (("-m",), "-m needs the name of a module"),
        (("--report", "no/where.json", "s.py"), "there is no folder no"),
        (("--report", "/dev/null", "s.py"), "/dev/null is a device, a pipe or a socket and is not replaced"),
        (("--report", "s.py", "s.py"), "s.py is not a report of lowp run and was not changed"),
    ],
)
def test_bad_input_is_an_error_in_words(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    (tmp_path / "s.py").write_text("print('ran')")
    ran = python("-m", "lowp", "run", *options, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr and len(ran.stderr.strip().splitlines()) == 1, ran.stderr


def test_a_precision_in_the_environment_that_does_not_exist_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import torch\nprint('ran')")
    code = "import lowp.launch.boot as b; b.start(); exec(open('s.py').read())"
    ran = forked.run("-c", code, cwd=tmp_path, environment={**os.environ, "LOWP_PRECISION": "bf17"})
    assert ran.returncode == 2 and "unknown precision 'bf17'" in ran.stderr and ran.stdout == ""


def test_several_precisions_stand_side_by_side(
    tmp_path: Path, lowp: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(
        command: list[str], cwd: Path, env: Mapping[str, str], stdout: IO[bytes], **_: object
    ) -> SimpleNamespace:
        ran = forked.run(*command[1:], cwd=cwd, environment=env)
        stdout.write((ran.stdout + ran.stderr).encode())
        return SimpleNamespace(wait=lambda seconds=None: ran.returncode, kill=lambda: None)

    monkeypatch.chdir(tmp_path)
    made = {"Popen": process, "STDOUT": None, "DEVNULL": None, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr("lowp.launch.comparison.subprocess", SimpleNamespace(**made))
    text = (
        "import torch\ntorch.manual_seed(0)\nm = torch.nn.Linear(4, 1)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "import os, sys\nassert open(sys.argv[1]).read() == 'above'\n"
        "assert not os.path.exists('checkpoint.pt'), 'resumed'\nassert not os.path.exists('lowp-compare')\n"
        "count = int(open('data/count').read())\nopen('data/count', 'w').write('7')\n"
        "for _ in range(count):\n    loss = m(torch.randn(2, 4)).square().mean()\n    loss.backward()\n    o.step()\n"
        "torch.save(m, 'checkpoint.pt')\nprint('loss', loss.item())\n"
    )
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    (tmp_path / "above.txt").write_text("above")
    (here / "data" / "count").write_text("3")
    (here / "data" / "not written").write_text("")
    (here / "script.py").write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("COLUMNS", "160")
    for number in ("", "-2"):
        ran = lowp("run", "--compare", "fp32,flex16+5", "script.py", "../above.txt")
        assert ran.code == 0, ran.err
        rows = re.findall(r"^(fp32|flex16\+5) +0 .* s +0 of 3 +(\d+ of \d+)? +loss (\S+) *(.*)$", ran.out, re.MULTILINE)
        (_, none, exact, nothing), (_, saturated, rounded, apart) = rows
        assert none == nothing == "" and re.fullmatch(r"\d+ of [1-9]\d*", saturated)
        assert re.fullmatch(rf"\S+ % off: {rounded} for {exact}", apart)
        folder = here / f"lowp-compare{number}"
        assert str(folder) in ran.err
        for name in ("fp32", "flex16+5"):
            wrote = {str(path.relative_to(folder / name)) for path in (folder / name).rglob("*") if path.is_file()}
            assert wrote == {"checkpoint.pt", "data/count"}
            assert exact in (folder / "fp32.txt").read_text()
    assert (here / "data" / "count").read_text() == "3" and not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    ("line", "other", "said"),
    [
        ("loss 0.5", "loss 0.5", "the same line"),
        ("epoch 2 loss 0.55 accuracy 99", "epoch 2 loss 0.5 accuracy 100", "10 % off: 0.55 for 0.5"),
        ("loss nan", "loss 0.5", "off: nan for 0.5"),
        ("loss 0.1", "loss 0.0", "off: 0.1 for 0.0"),
        ("Error: 3", "loss 0.5", "other words"),
        ("done", "finished", "other words"),
    ],
)
def test_a_last_line_is_compared_by_its_numbers(line: str, other: str, said: str) -> None:
    assert comparison.difference(line, other) == said


def test_large_files_and_hidden_folders_of_a_run_are_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_COPIED", 10)
    here = tmp_path / "here"
    (here / ".hidden").mkdir(parents=True)
    for name, size in (("small", 4), ("large", 11), (".hidden/one", 1)):
        (here / name).write_bytes(b"x" * size)
    place = comparison.Workplace(comparison.new_folder(tmp_path, "run"), here)
    assert {path.name: path.is_symlink() for path in place.folder.iterdir()} == {
        "small": False,
        "large": True,
        ".hidden": True,
    }
    place.leave()
    assert not place.folder.exists() and len(list(here.rglob("*"))) == 4
    with pytest.raises(InvalidInput, match="which cannot be made: Not a directory"):
        comparison.new_folder(here / "small", "run")


def test_a_comparison_that_is_stopped_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-S", "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    runs = comparison.Runs(command)
    one = runs.add("fp32", {**os.environ, RUN: json.dumps({"directory": str(tmp_path / "fp32")})}, stop=lambda: True)
    assert one.code == -signal.SIGTERM and runs.outcomes == [one] and runs.document()["base"] == "fp32"


def test_a_launcher_that_does_not_import_torch_tells_of_what_it_has_launched(tmp_path: Path) -> None:
    text = (
        "import json, os, sys\nfrom lowp.launch.record import ProcessRecord\n"
        "ProcessRecord('bf16', process=1, steps=3).save(json.loads(os.environ['LOWP_RUN'])['directory'])\n"
        "print('torch' in sys.modules)\n"
    )
    ran = lowp_run(tmp_path, text, "--report", "report.json")
    assert ran.stdout == "False\n"
    assert re.fullmatch(r"lowp run: bf16, 3 optimizer steps, 0 skipped, .* s\n", ran.stderr)
    assert json.loads((tmp_path / "report.json").read_text())["summary"]["steps"] == 3


TRAIN = (
    "import torch\nm = torch.nn.Linear(4, 1)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
    "for _ in range(3):\n    m(torch.randn(2, 4)).sum().backward()\n    o.step()\nprint(m.weight.dtype)\n"
)
FORWARD = "import torch\nprint(torch.nn.Linear(4, 1)(torch.randn(2, 4)).dtype)\n"


@pytest.mark.parametrize(
    ("text", "rank", "said"),
    [
        (TRAIN, "0", r"lowp run: bf16, 3 optimizer steps, 0 skipped, \d+\.\d s\n"),
        (FORWARD, "0", r"lowp run: bf16, 0 optimizer steps, 0 skipped, \d+\.\d s\n(lowp run: .*\n)?"),
        (FORWARD, "1", ""),
        ("import torch; print(torch.float32)", "0", ""),
    ],
)
def test_where_only_the_environment_names_a_precision_the_first_rank_tells_if_it_ran_a_model(
    text: str, rank: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "s.py").write_text(text)
    code = "import lowp.launch.boot as b; b.start(); b.start(); exec(open('s.py').read())"  # a second start is none
    ran = forked.run("-c", code, cwd=tmp_path, environment={**os.environ, "LOWP_PRECISION": "bf16", "RANK": rank})
    assert (ran.returncode, ran.stdout) == (0, "torch.float32\n"), ran.stderr
    assert re.fullmatch(said, ran.stderr)


def test_of_a_script_without_torch_a_comparison_shows_its_code_and_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "print('first\\n  ' + 'x' * 159 + 'yz  \\n\\nlowp monitor: an alarm'); raise SystemExit(3)"
    runs = comparison.Runs([sys.executable, "-S", "-c", text])
    for precision in ("bf16", "fp32"):
        given = {**os.environ, RUN: json.dumps({"directory": str(tmp_path / precision)})}
        one = runs.add(precision, given, stop=lambda: False)
        assert (one.precision, one.code, one.last_line) == (precision, 3, "x" * 159 + "y")
        assert (one.steps, one.skipped, one.writes, one.saturated, one.notes) == (0, 0, 0, 0, ())
    assert runs.base is one and [runs.apart(each) for each in runs.outcomes] == ["failed", ""]
