"""What all commands share: the first words, help that fits the terminal, JSON, exit codes, and completions."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from safetensors.torch import save_file

from lowp import cli
from lowp.errors import InvalidInput
from lowp.launch.comparison import RunOutcome

Lowp = Callable[..., Any]
QUICK = ("--epochs", "1", "--batch", "600")
# A call of every command that prints a table, with --json.
TABLES = {
    "formats": ("formats",),
    "one format": ("formats", "fp16", "e5m7"),
    "explain": ("explain", "1.125", "+", "0.25", "--in", "fp16"),
    "policies": ("policy", "list"),
    "policy": ("policy", "show", "fp16", "--ops"),
    "recipes": ("recipes",),
    "recipe": ("recipes", "digits"),
    "train": ("train", "digits", "--precision", "fp16", *QUICK),
    "compare": ("compare", "digits", "--precision", "bf16", "--seeds", "1", *QUICK, "--timing", "0", "--jobs", "1"),
    "serving": ("compare", "digits", "--inference", "int8", *QUICK),
    "bench": ("bench", "digits", "--precision", "bf16", "--no-torch-amp", "--seconds", "0.05"),
    "convert": ("convert", "model.safetensors", "small.safetensors", "--to", "int8"),
    "profile": ("profile", "digits", "--steps", "4", "--max-overhead", "none", "--precision", "e5m7", "--verify"),
    "run": ("run", "--compare", "fp32,bf16", "train.py"),
    "figures": ("figure", "--list"),
    "figure": ("figure", "cost", "--formats", "fp16,int8"),
}
WORDS = {"cut", "kept", "module"}  # keys of text that looks like a number: the bits cut off, the module called 2


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([forked.SOURCES, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("lowp.benchmarking.largest_batch.process_growth", lambda *_: None)
    save_file({"weight": torch.randn(8, 32)}, "model.safetensors")
    Path("train.py").write_text("")


def once(code: int) -> Callable[..., RunOutcome]:
    """Return a function in the place of that which runs a script in a process of its own."""
    return lambda precision, *_: RunOutcome(precision, code, 0.5, f"loss 0.{code}", 3, 0, 9, 0, ())


def test_alone_it_says_what_to_do_first_with_commands_that_exist(lowp: Lowp) -> None:
    result = lowp()
    assert (result.code, result.err) == (0, "") and max(map(len, result.out.splitlines())) <= 80
    named = [line.split()[1] for line in result.out.splitlines() if line.startswith("  lowp ")]
    assert named and set(named) <= cli.COMMANDS.keys()
    assert "lowp --help" in result.out


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_fits_the_terminal(lowp: Lowp, monkeypatch: pytest.MonkeyPatch, name: str, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = lowp(*filter(None, ("help", name))).out
    assert max(map(len, text.splitlines())) <= columns


def leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the plain values of a document with the key that they stand under."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, key)
    else:
        yield key, value


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("arguments", TABLES.values(), ids=TABLES.keys())
def test_what_is_a_table_is_json_too_with_numbers_as_numbers(
    lowp: Lowp, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("lowp.launch.comparison._once", once(0))
    result = lowp(arguments[0], "--json", *arguments[1:])
    assert result.code in (0, cli.EXIT_NO), result.err  # a policy need not hold after four steps
    document = json.loads(result.out, parse_constant=refuse)
    assert document
    for key, value in leaves(document):
        assert not isinstance(value, str) or key in WORDS or not is_number(value), (key, value)


def test_every_command_that_prints_a_table_has_been_asked_for_json(lowp: Lowp) -> None:
    have = {name for name in cli.COMMANDS if " --json " in lowp("help", name).out}
    asked = {arguments[0] for arguments in TABLES.values()} | {"watch"}  # of a file that test_watch.py writes
    assert have == asked == cli.COMMANDS.keys() - {"completions"}


def test_the_version_is_json_too(lowp: Lowp) -> None:
    facts = json.loads(lowp("--version", "--verbose", "--json").out)
    assert facts["torch"] == torch.__version__ and "processor" in facts
    assert list(json.loads(lowp("--version", "--json").out)) == ["lowp"]


def test_json_and_another_notation_are_one_too_many(lowp: Lowp) -> None:
    assert "--json and --toml are two notations" in lowp("policy", "show", "fp16", "--json", "--toml").err
    assert "--json is for --compare: --report FILE.json writes" in lowp("run", "--json", "train.py").err


# -- exit codes -------------------------------------------------------------------------------------------------------
def interrupted(arguments: argparse.Namespace) -> int:
    raise KeyboardInterrupt


def wrong(arguments: argparse.Namespace) -> int:
    raise InvalidInput("a scale of 0")


def ended(arguments: argparse.Namespace) -> int:
    raise cli._Terminated


@pytest.mark.parametrize(
    ("run", "code"),
    [(lambda _: 0, 0), (lambda _: 1, 1), (wrong, 2), (interrupted, 130), (ended, 143)],
)
def test_exit_codes_are_those_of_the_help(
    lowp: Lowp, monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int], code: int
) -> None:
    monkeypatch.setattr("lowp.cli.recipes.run", run)
    assert lowp("recipes").code == code
    assert code in cli.EXIT_CODES and f"\n  {code:<3}  {cli.EXIT_CODES[code]}\n" in lowp("--help").out


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (7, cli.EXIT_NO), (-9, cli.EXIT_NO)])
def test_a_failed_run_of_a_comparison_is_a_no(
    lowp: Lowp, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int
) -> None:
    monkeypatch.setattr("lowp.launch.comparison._once", once(code))
    result = lowp("run", "--compare", "bf16,fp32", "train.py")
    assert result.code == exit_code and "compared with fp32" in result.out
    assert f"1/2  bf16: exit code {code}, 0.5 s\n" in result.err
    assert ("the same line" if code == 0 else "failed") in result.out


# -- completions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_know_commands_options_and_names(lowp: Lowp, shell: str) -> None:
    result = lowp("completions", shell)
    assert (result.code, result.err) == (0, "")
    for word in (*cli.COMMANDS, "loss-scale", "resnet-20", "bf16-tpu", "mxfp4", "activation-gradients"):
        assert word in result.out
    if path := shutil.which(shell):
        Path("lowp").write_text(result.out)
        subprocess.run([path, "-n", "lowp"], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("lowp comp", "compare completions"), ("lowp train dig", "digits digits-hard"), ("lowp formats mxfp4", "mxfp4")],
)
def test_bash_completes_what_is_typed(lowp: Lowp, typed: str, offered: str) -> None:
    Path("lowp").write_text(lowp("completions", "bash").out)
    script = (
        f"source ./lowp; COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE='{typed}'\n"
        '$(complete -p lowp | sed "s/.*-F \\([^ ]*\\) .*/\\1/") lowp "${COMP_WORDS[COMP_CWORD]}"\n'
        'echo "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert sorted(ran.stdout.split()) == offered.split(), ran.stderr


def test_without_shtab_completions_say_what_to_install(lowp: Lowp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    result = lowp("completions", "bash")
    assert result.code == 2 and "which is not installed: pip install shtab" in result.err


def test_a_shell_that_is_not_known_lists_the_near_ones(lowp: Lowp) -> None:
    assert "unknown shell 'bsh'; did you mean bash" in lowp("completions", "bsh").err
    assert "unknown --cost 'aera'; did you mean area?" in lowp("profile", "--cost", "aera", "digits").err
