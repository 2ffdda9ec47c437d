"""The command `lowp` itself: its help, errors and interruption."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lowp import __version__, cli
from lowp.cli.options import Option, add_options, check_least, given, split_list, words_of
from lowp.errors import InvalidInput, Misuse
from lowp.kernels.cpu import asked, available, library, select


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Return a function that makes `lowp sample [--count N]` a command that calls a given function."""

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        module: Any = types.ModuleType("lowp.cli.sample", "What the sample does.")
        module.OPTIONS = (Option("--count", kind=int, default=1),)
        module.run = run
        monkeypatch.setitem(sys.modules, "lowp.cli.sample", module)
        monkeypatch.setitem(cli.COMMANDS, "sample", "a sample")

    return install


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("help",)])
def test_help_lists_every_command(lowp: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    result = lowp(*arguments)
    assert (result.code, result.err) == (0, "")
    for name, text in cli.COMMANDS.items():
        assert f"  {name} " in result.out
        assert f"  {text}\n" in result.out


def test_every_command_that_is_listed_has_its_help(lowp: Callable[..., Any]) -> None:
    for name in cli.COMMANDS:
        assert importlib.util.find_spec(f"lowp.cli.{name}") is not None
        result = lowp(name, "--help")
        assert result.code == 0
        assert result.out.startswith(f"usage: lowp {name} ")
        examples = [line for line in result.out.splitlines() if line.lstrip().startswith(f"lowp {name} ")]
        assert all(line.count(f"lowp {name} ") == 1 for line in examples), "examples run into each other"


def test_the_version_is_printed(lowp: Callable[..., Any]) -> None:
    assert lowp("--version") == (0, f"lowp {__version__}\n", "")


def test_the_verbose_version_says_what_was_chosen_and_how_to_choose_otherwise(lowp: Callable[..., Any]) -> None:
    text = " ".join(lowp("--version", "--verbose").out.split())
    assert text.startswith(f"lowp {__version__} torch: {torch.__version__} processor: torch uses ")
    assert "int16 products:" in text and "bf16 products: " in text
    assert "fp16 products: fp32 products of rounded operands, " in text
    assert "did you mean --verbose" in lowp("--version", "--verbos").err


@pytest.mark.skipif(library() is None, reason="the C++ library was not built")
def test_the_verbose_version_tells_an_instruction_set_that_was_asked_for(lowp: Callable[..., Any]) -> None:
    asked_before = asked()
    try:
        for instruction_set, words in (("", "the best this processor has"), ("portable", "asked for")):
            chosen = select(instruction_set)
            text = " ".join(lowp("--version", "--verbose").out.split())
            assert f"C++ library: {chosen}, {words}, of {', '.join(available())}; other: LOWP_CPU_ISA=" in text
    finally:
        select(asked_before)


def test_an_unknown_command_lists_the_near_ones(lowp: Callable[..., Any], command: Callable[..., None]) -> None:
    command(lambda arguments: 0)
    result = lowp("smaple")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("lowp: error: unknown command 'smaple'; did you mean sample? Also allowed: ")
    assert result.err.count("\n") == 1


def test_an_unknown_option_lists_the_near_ones(lowp: Callable[..., Any]) -> None:
    result = lowp("--versoin")
    assert result.code == 2
    assert result.err.startswith("lowp: error: unknown option '--versoin'; did you mean --version? Also allowed: ")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_misspelled_option_of_a_command_lists_the_near_ones_whatever_follows_it(
    lowp: Callable[..., Any], name: str
) -> None:
    listed = [word.strip(",") for word in lowp(name, "--help").out.split() if word.startswith("--")]
    option = next((one for one in listed if one not in ("--help", "--json") and one[2:].isalpha()), "--help")
    misspelled = f"{option[:-2]}x{option[-2:]}"
    for arguments in ((misspelled, "x"), (f"{misspelled}=x",), ("x", misspelled))[: 2 if name == "run" else 3]:
        result = lowp(name, *arguments)
        assert (result.code, result.out) == (2, "")
        assert f"'{misspelled}'" in result.err and "did you mean --" in result.err and option in result.err
        assert result.err.startswith("lowp: error: ") and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train",), "lowp train: the following arguments are required: recipe (`lowp train --help` says what"),
        (("train", "digits", "--epochs", "x"), "lowp train: argument --epochs: invalid int value: 'x'"),
        (("train", "digits", "--s=1"), "ambiguous option: --s=1 could match --size, --seed"),
        (("--version", "--verbose", "x"), "unknown option of --version 'x'"),
        (("help", "trian"), "unknown command 'trian'; did you mean train?"),
    ],
)
def test_what_argparse_refuses_is_one_line(lowp: Callable[..., Any], arguments: tuple[str, ...], words: str) -> None:
    result = lowp(*arguments)
    assert (result.code, result.out) == (2, "")
    assert words in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compare digits --precision ,", "--precision is empty: give items with commas"),
        ("compare digits --inference ,", "--inference is empty"),
        ("compare digits --loss-scale ,", "--loss-scale is empty"),
        ("bench digits --precision ,", "--precision is empty"),
        ("figure curves --precision ,", "--precision is empty"),
        ("run --compare , x.py", "--compare is empty"),
        ("run --precision= x.py", "unknown precision ''"),
        ("bench digits --memory -3GB", "--memory '-3GB' is not a size"),
        ("train digits --lr -1e-3", "learning rate -0.001: give a finite number above zero"),
        ("profile digits --max-overhead -3%", "max_overhead='-3%' is not valid: give a share"),
        ("profile digits --bits 8 --least-signal nan", "--least-signal nan: give decibels above 0"),
        (
            "profile --steps 3 x.py",
            "--steps is for recipes, and x.py is none: options of the script come after",
        ),
        ("profile run.json --epochs 3", "--epochs is for recipes, and run.json is none"),
        ("formats --json --markdown", "--json cannot be combined with --markdown"),
        ("policy bf16", "unknown action 'bf16'; allowed: list, show, check; `lowp policy show bf16` shows it"),
    ],
)
def test_what_a_command_cannot_heed_is_refused_before_any_work(
    lowp: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    result = lowp(*command.split(" "))
    assert (result.code, result.out) == (2, "")
    assert words in result.err and result.err.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["x.py"]


def test_help_of_a_command_is_its_own(lowp: Callable[..., Any]) -> None:
    assert lowp("help", "train") == lowp("train", "--help")


def test_arguments_reach_the_command_and_its_code_comes_back(
    lowp: Callable[..., Any], command: Callable[..., None]
) -> None:
    command(lambda arguments: int(arguments.count))
    assert lowp("sample", "--count", "3").code == 3
    refused = lowp("sample", "--count", "three")
    assert refused.code == 2
    assert "argument --count: invalid int value: 'three'" in refused.err
    assert "What the sample does." in lowp("sample", "--help").out


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InvalidInput("a scale of 0\nis not possible"), "a scale of 0 is not possible"),
        (Misuse("unscaled twice"), "unscaled twice"),
        (
            FileNotFoundError(2, "No such file or directory", "run.json"),
            "[Errno 2] No such file or directory: 'run.json'",
        ),
    ],
)
def test_an_error_of_ours_is_one_line(
    lowp: Callable[..., Any],
    command: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    line: str,
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    command(run)
    monkeypatch.delenv("LOWP_TRACEBACK", raising=False)
    assert lowp("sample") == (2, "", f"lowp: error: {line}\n")
    monkeypatch.setenv("LOWP_TRACEBACK", "1")
    with pytest.raises(type(error)):
        lowp("sample")


def test_a_value_that_lowp_refuses_is_one_line(lowp: Callable[..., Any], command: Callable[..., None]) -> None:
    from lowp.formats import parse

    command(lambda arguments: len(str(parse("fp61"))))
    result = lowp("sample")
    assert result.code == 2
    assert result.err.startswith("lowp: error: unknown format 'fp61'; did you mean ")
    assert result.err.count("\n") == 1


def test_a_defect_keeps_its_traceback(lowp: Callable[..., Any], command: Callable[..., None]) -> None:
    command(lambda arguments: int("not a number"))
    with pytest.raises(ValueError, match="invalid literal"):
        lowp("sample")


def test_control_c_is_one_line(lowp: Callable[..., Any], command: Callable[..., None]) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command(run)
    assert lowp("sample") == (130, "", "lowp: interrupted\n")


def test_sigterm_ends_a_command_in_words(command: Any, lowp: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    command(lambda _: signal.raise_signal(signal.SIGTERM))
    assert lowp("sample") == (143, "", "lowp: ended by SIGTERM\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_of_sigterm_that_the_caller_has_stays_and_is_called(command: Any, lowp: Callable[..., Any]) -> None:
    called: list[int] = []

    def handler(number: int, _: object) -> None:
        called.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        command(lambda _: signal.raise_signal(signal.SIGTERM) or 3)
        assert lowp("sample") == (3, "", "") and called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_command_runs_in_a_thread_where_no_handler_can_be_set(command: Any, lowp: Callable[..., Any]) -> None:
    command(lambda _: 3)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lowp, "sample").result() == (3, "", "")


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run([sys.executable, "-m", "lowp", "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (process.returncode, process.stderr) == (cli.EXIT_BROKEN_PIPE, b"")


@pytest.mark.parametrize("module", ["lowp", "lowp.cli"])
def test_the_module_is_the_command(module: str) -> None:
    printed = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert printed.stdout == f"lowp {__version__}\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fp32, bf16,,", ["fp32", "bf16"]),
        ("flex16+5:autoflex(headroom=1,words=1),fp16", ["flex16+5:autoflex(headroom=1,words=1)", "fp16"]),
        ("", []),
        (None, []),
    ],
)
def test_commas_inside_parentheses_part_no_list(text: str | None, found: list[str]) -> None:
    assert split_list(text) == found


TABLE = (
    Option("name", None, more={"nargs": "*"}, setting="recipe"),
    Option("--steps", "number", "N", int, 3, least=2, setting="steps"),
    Option("--all", "whether all", kind=bool, group="more"),
    Option("--learning-rate", None, "R", float, least=0, setting="learning_rate", excludes=True),
    Option("--diff", None, "FILE", more={"nargs": 2, "dest": "both"}, excludes=True),
)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        *(("--steps", 2), ("--steps=3", 1), ("--all", 1), ("--diff", 3), ("--diff=a", 1), ("--learning-rate", 2)),
        *(("--help", 1), ("-h", 1), ("--help=1", 1), ("--step", 0), ("--step=3", 0), ("train.py", 0), ("name", 1)),
    ],
)
def test_an_option_has_as_many_words_as_its_row_says(word: str, words: int) -> None:
    assert words_of(word, TABLE) == words


def test_the_rows_of_a_command_are_its_parser_s_options() -> None:
    parser = argparse.ArgumentParser(prog="it", exit_on_error=False)
    add_options(parser, TABLE)
    asked = parser.parse_args(["a", "b", "--all", "--diff", "x", "y"])
    assert vars(asked) == {"name": ["a", "b"], "steps": 3, "all": True, "learning_rate": None, "both": ["x", "y"]}
    assert given(TABLE, asked) == {"recipe": ["a", "b"], "steps": 3}
    with pytest.raises(argparse.ArgumentError, match="not allowed with argument"):
        parser.parse_args(["--diff", "x", "y", "--learning-rate", "0.1"])
    assert "more:\n  --all" in parser.format_help() and "--steps N" in parser.format_help()
    for steps, rate in ((2, None), (2, 0.0), (9, 1.0)):
        check_least(TABLE, argparse.Namespace(**{**vars(asked), "steps": steps, "learning_rate": rate}))
    with pytest.raises(InvalidInput, match="--steps 1: give 2 or more"):
        check_least(TABLE, argparse.Namespace(**{**vars(asked), "steps": 1}))
    with pytest.raises(InvalidInput, match=r"--learning-rate -0\.5: give 0 or more"):
        check_least(TABLE, argparse.Namespace(**{**vars(asked), "learning_rate": -0.5}))
