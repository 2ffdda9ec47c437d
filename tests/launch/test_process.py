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
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import forked
import pytest
from launch.test_scripts import python

from lowp.errors import InvalidInput
from lowp.launch import comparison, record
from lowp.launch.record import RUN, ProcessRecord, RunSettings
from lowp.launch.session import Session, without_own


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
    assert re.fullmatch(r"lowp run: bf16, 1 optimizer step, 0 skipped, .* s\n", ran.stderr)


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
    assert re.fullmatch(r"lowp run: bf16, 1 optimizer step, .* s\n", ran.stderr)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "the script is missing"),
        (("--precision", "bf17", "s.py"), "unknown precision 'bf17'"),
        (
            ("--compare", "fp32", "bf16", "s.py"),
            "'bf16' is a precision and not a script: give several precisions as one",
        ),
        (("bf16", "s.py"), "fp32,bf16 train.py, and one as in lowp run --precision bf16 train.py"),
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


def test_a_report_counts_models_called_passes_steps_and_skips(tmp_path: Path) -> None:
    text = (
        "import torch\ntorch.manual_seed(0)\n"
        "m = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))\n"
        "o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    loss = m(torch.ones(2, 4) * (1e9 if step == 1 else 1)).sum()\n"
        "    o.zero_grad()\n    loss.backward()\n    o.step()\n"
        "torch.autograd.grad(m(torch.ones(2, 4)).sum(), m.parameters())\n"
    )
    ran = lowp_run(tmp_path, text, "--precision", "fp16", "--report", "report.json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    summary = report["summary"]
    assert report["processes"] == [summary] and summary.pop("process") > 0
    scales = summary.pop("scales")
    assert [step for step, _ in scales] == [1, 2] and scales[0][1] == 2 * scales[1][1] == 2 * summary.pop("loss_scale")
    assert summary == {
        **{"precision": "fp16", "rank": 0, "calls": 4, "backward_passes": 3, "steps": 3, "skipped": 1, "writes": 0},
        **{"saturated": 0, "stood_down": "", "notes": [], "alarms": []},
    }


# -- settings and records ---------------------------------------------------------------------------------------------
def test_settings_go_through_the_environment_and_damaged_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings("fp16", "1024", True, True, "r.json", "m.jsonl", "/records", 7, 0.5)
    assert settings.to_environment().keys() == {"LOWP_PRECISION", "LOWP_RUN"}
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    assert RunSettings.from_environment() == settings
    monkeypatch.setenv("LOWP_PRECISION", " bf16 ")
    assert RunSettings.from_environment() == RunSettings(**{**vars(settings), "precision": "bf16"})
    for text in ("{", "[1]", '{"unknown": 1}', "x" * 100):
        monkeypatch.setenv("LOWP_RUN", text)
        with pytest.raises(InvalidInput) as refused:
            RunSettings.from_environment()
        assert str(refused.value) == (
            f"LOWP_RUN is set by `lowp run` for the processes that it starts, and {text[:80]!r} was not set by it: "
            "unset LOWP_RUN; LOWP_PRECISION sets the precision"
        )
    monkeypatch.setenv("LOWP_RUN", "")
    usual = RunSettings.from_environment()
    assert usual is not None and vars(usual) == {
        **{"precision": "bf16", "loss_scale": "", "strict": False, "override": False, "report": "", "monitor": None},
        **{"directory": "", "leader": 0, "started": usual.started},
    }
    monkeypatch.setenv("LOWP_PRECISION", " ")
    assert RunSettings.from_environment() is None


def test_a_process_starts_with_the_folder_of_lowp_before_other_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    site = str(Path(record.__file__).parent / "site")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert record.started_with({"A": "1"})["PYTHONPATH"] == f"{site}{os.pathsep}/mine"
    monkeypatch.delenv("PYTHONPATH")
    assert record.started_with({"A": "1"}) == {**os.environ, "A": "1", "PYTHONPATH": site}


def test_records_of_processes_are_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    for rank, process, steps in ((1, 30, 5), (0, 40, 5), (0, 20, 4)):
        ProcessRecord("bf16", rank, process, steps=steps, notes=["shared", f"of {process}"]).save(str(folder))
    ProcessRecord("bf16", 2, 50, stood_down="because").save(str(folder))
    (folder / "damaged.json").write_text("{")
    (folder / "another.json").write_text('{"precision": "bf16", "unknown": 1}')
    assert [one.name for one in folder.glob("*.part")] == [] and folder.stat().st_mode & 0o777 == 0o700
    records = record.gathered(str(folder))
    assert [one.process for one in records] == [20, 40, 30, 50]
    whole = record.merged(records, "bf16")
    assert (whole.process, whole.steps, whole.stood_down) == (40, 5, "because")
    assert whole.notes == ["shared", "of 40", "of 20", "of 30"]
    nothing = record.merged([], "fp16")
    assert (nothing.precision, nothing.steps, nothing.has_content) == ("fp16", 0, False)


def test_a_record_has_content_once_anything_was_done_and_a_note_once() -> None:
    for given in ({"calls": 1}, {"steps": 1}, {"backward_passes": 1}, {"notes": ["a"]}, {"stood_down": "b"}):
        assert ProcessRecord("bf16", **given).has_content  # type: ignore[arg-type]
    assert not ProcessRecord("bf16", 3, skipped=1, writes=1).has_content
    one = ProcessRecord("bf16")
    assert (one.note("a"), one.note("a"), one.note("b"), one.notes) == (True, False, True, ["a", "b"])
    one.take_back("a")
    one.take_back("c")
    assert one.notes == ["b"] and one.process == os.getpid()


LINES: list[tuple[dict[str, Any], str]] = [
    ({}, "lowp run: bf16, 0 optimizer steps, 0 skipped, 1.2 s"),
    ({"steps": 3, "skipped": 1, "loss_scale": 1024.0}, "bf16, 3 optimizer steps, 1 skipped, loss scale 1024, 1.2 s"),
    ({"writes": 9, "saturated": 2}, "bf16, 0 optimizer steps, 0 skipped, 2 of 9 tensors saturated, 1.2 s"),
    ({"writes": 9}, "bf16, 0 optimizer steps, 0 skipped, 1.2 s"),
    ({"alarms": [{}]}, "bf16, 0 optimizer steps, 0 skipped, 1 alarm, 1.2 s"),
    ({"alarms": [{}, {}], "notes": ["a", "b"]}, "0 skipped, 2 alarms, 1.2 s\nlowp run: a\nlowp run: b"),
    ({"stood_down": "a scaler", "steps": 3}, "lowp run: disabled, a scaler (--override replaces it), 1.2 s"),
]


@pytest.mark.parametrize(("given", "said"), LINES)
def test_a_run_ends_with_a_line_of_what_it_did(given: dict[str, Any], said: str) -> None:
    text = record.line(ProcessRecord("bf16", **given), 1.23)
    assert text.startswith("lowp run: ") and text.endswith(said)


def test_a_report_is_the_records_and_their_sum_and_replaces_reports_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["s.py", "--fast"])
    monkeypatch.setattr("time.time", lambda: 12.5)
    report, folder = tmp_path / "report.json", tmp_path / "records"
    settings = RunSettings("bf16", report=str(report), directory=str(folder), started=10.0)
    ProcessRecord("bf16", 1, 5, steps=1).save(str(folder))
    own = ProcessRecord("bf16", 0, 4, steps=2, scales=[(1, 2.0)])
    record.tell_of_run([own], settings)
    assert not folder.exists() and capsys.readouterr() == ("", "lowp run: bf16, 2 optimizer steps, 0 skipped, 2.5 s\n")
    text = report.read_text()
    assert text.startswith('{\n "kind": "lowp run",\n "version": 1,\n') and text.endswith("}\n")
    found = json.loads(text)
    assert {name: found[name] for name in ("precision", "seconds", "command")} == {
        **{"precision": "bf16", "seconds": 2.5, "command": ["s.py", "--fast"]},
    }
    assert found["summary"] == found["processes"][0] == {**vars(own), "scales": [[1, 2.0]]}
    assert [one["process"] for one in found["processes"]] == [4, 5]
    record.check_report(report)
    record.tell([own], RunSettings("bf16", report=str(tmp_path / "no" / "where.json"), started=10.0))
    assert "lowp run: the report was not written: " in capsys.readouterr().err
    report.write_text("{}")
    with pytest.raises(InvalidInput, match="is not a report of lowp run and was not changed"):
        record.check_report(report)


def test_a_path_above_its_folder_is_made_absolute_where_it_exists(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "here" / "..data").mkdir(parents=True)
    there = str(tmp_path / "data")
    for argument, found in {
        "../data": there,
        "--data=../data": f"--data={there}",
        "--a=b=../data": f"--a=b={there}",
        **{one: one for one in ("../none", "--data=../none", "a=../data", "data", "--fast", "-x=1")},
    }.items():
        assert comparison.from_above(argument, tmp_path / "here") == found


def test_what_a_run_has_changed_or_made_remains_in_its_folder(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "deep" / "lowp-compare").mkdir(parents=True)
    (here / "lowp-compare-2").mkdir()
    for name in ("kept", "changed", "deep/kept", "lowp-compare-2/old", "lowp-compare.txt"):
        (here / name).write_text("1")
    (here / "link").symlink_to(here / "kept")
    place = comparison.Workplace(comparison.new_folder(tmp_path, "run"), here)
    given = {str(path.relative_to(place.folder)) for path in place.folder.rglob("*")}
    assert {"kept", "changed", "deep", "deep/kept", "deep/lowp-compare", "link"} <= given
    assert not {"lowp-compare-2", "lowp-compare.txt"} & given and (place.folder / "link").is_symlink()
    (place.folder / "changed").write_text("22")
    (place.folder / "deep" / "made").write_text("")
    (place.folder / "link").unlink()
    (place.folder / "link").write_text("mine")
    place.leave()
    left = {str(path.relative_to(place.folder)) for path in place.folder.rglob("*") if path.is_file()}
    assert left == {"changed", "deep/made", "link"} and (here / "kept").read_text() == "1"


def test_of_many_files_the_smallest_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name, size in (("a", 3), ("b", 1), ("c", 2)):
        (here / name).write_bytes(b"x" * size)
    for most, count, copied in ((6, 10, "abc"), (5, 10, "bc"), (6, 2, "bc"), (0, 10, ""), (1, 0, "")):
        monkeypatch.setattr(comparison, "_COPIED", most)
        monkeypatch.setattr(comparison, "_COPIED_FILES", count)
        place = comparison.Workplace(comparison.new_folder(tmp_path, "run"), here)
        assert "".join(sorted(path.name for path in place.folder.iterdir() if not path.is_symlink())) == copied
        place.leave()
    assert (comparison._SHOWN, comparison.NAME) == (160, "lowp-compare")


# -- a session in this process ----------------------------------------------------------------------------------------
def test_a_session_rests_in_fp32_and_scales_where_the_precision_does() -> None:
    for precision, loss_scale, is_plain, is_scaling in (
        *(("fp32", "", True, False), ("bf16", "", False, False), ("fp16", "", False, True)),
        *(("fp32", "1024", False, True), ("fp16", "none", False, False)),
    ):
        one = Session(RunSettings(precision, loss_scale))
        assert (one.is_plain, one.rests, one.is_scaling) == (is_plain, is_plain, is_scaling)


def test_a_thread_is_at_one_place_and_back_at_the_one_before() -> None:
    session = Session(RunSettings("bf16"))

    def place() -> tuple[int, ...]:
        return session.local.calls, session.local.alone, session.local.backward, session.local.hooks

    with session.in_pass():
        assert place() == (0, 0, 1, 0)
        with session.in_hook():
            assert place() == (0, 0, 0, 1)
            with session.in_pass(), session.in_script(), session.in_script():
                assert place() == (0, 2, 1, 0)
        assert place() == (0, 0, 1, 0)
        with session.in_pass(), suppress(ValueError), session.at(calls=5):
            assert place() == (5, 0, 2, 0)
            raise ValueError
        assert place() == (0, 0, 1, 0)
    assert place() == (0, 0, 0, 0)


def test_what_runs_in_fp32_is_noted_once_and_ends_a_strict_script_if_it_is_certain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for strict, is_certain in ((False, True), (True, False)):
        session = Session(RunSettings("bf16", strict=strict))
        for _ in range(2):
            assert session.keeps_in_fp32("A", "why", is_certain) == "A runs in fp32: why"
        assert session.record.notes == ["A runs in fp32: why"] and capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as ended:
        Session(RunSettings("bf16", strict=True)).keeps_in_fp32("A", "why")
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "lowp run: error: A runs in fp32: why; without --strict the script would continue\n"
    )


@pytest.mark.parametrize(
    "case",  # whether there is a directory and this is the leader, rank, steps; whether it is told and saved
    [
        *((True, False, 0, 1, False, True), (True, False, 0, 0, False, False), (True, False, 1, 1, False, True)),
        *((True, True, 0, 1, True, False), (True, True, 0, 0, True, False), (True, True, 1, 1, True, False)),
        *((False, False, 0, 1, True, False), (False, False, 0, 0, False, False), (False, False, 1, 1, False, False)),
    ],
)
def test_at_its_end_a_process_tells_of_itself_or_leaves_its_record(
    case: tuple[bool, bool, int, int, bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    has_directory, is_leader, rank, steps, is_told, is_saved = case
    monkeypatch.setenv("RANK", str(rank))
    folder = tmp_path / "records"
    session = Session(
        RunSettings("bf16", directory=str(folder) * has_directory, leader=os.getpid() if is_leader else 1)
    )
    session.record.steps = steps
    ended: list[str] = []
    session.end_step = lambda: ended.append("step")
    for _ in range(2):
        session.close()
    assert ended == ["step"] and (folder / f"{os.getpid()}.json").exists() == is_saved
    said = capsys.readouterr().err
    assert (said.count("lowp run: bf16") == is_told and f"{steps} optimizer step" in said) or not is_told


def test_a_traceback_has_the_frames_of_the_package_alone_or_none_of_them() -> None:
    def lines(traceback: Any) -> list[str]:
        return [one.tb_frame.f_code.co_name for one in iterated(traceback)]

    def iterated(traceback: Any) -> Any:
        while traceback is not None:
            yield traceback
            traceback = traceback.tb_next

    try:
        with Session(RunSettings("bf16")).at(calls=1):
            raise ValueError
    except ValueError as error:
        mine = error.__traceback__
    try:
        RunSettings(**{**vars(RunSettings("bf16")), "precision": 1}).to_environment()
        record.check_script(["missing.py"], "")
    except InvalidInput as error:
        both = error.__traceback__
    assert lines(mine) == lines(without_own(mine)) and lines(without_own(None)) == []
    assert both is not None and both.tb_next is not None
    assert lines(both) == [
        "test_a_traceback_has_the_frames_of_the_package_alone_or_none_of_them",
        "check_script",
    ]
    assert lines(without_own(both)) == lines(both)[:1]
    assert without_own(both.tb_next) is both.tb_next
