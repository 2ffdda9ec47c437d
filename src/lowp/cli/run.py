"""Train an unmodified PyTorch script in a precision of your choice.

  lowp run --precision bf16 train.py --lr 0.1
  lowp run --precision fp16 -m package.train --epochs 3
  lowp run --policy policy.toml train.py
  lowp run --precision bf16 -m torch.distributed.run --nproc-per-node 2 train.py
  lowp run --compare fp32,bf16,fp16,flex16+5 train.py
  lowp run --monitor=run.jsonl train.py

The script runs as under `python train.py --lr 0.1`. Its modules compute in the precision; its losses,
gradients and checkpoints are fp32. At the end one line on standard error reports the run. Options of lowp
come before the script. LOWP_PRECISION=bf16 in the environment does the same for launchers with their own command line.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lowp import presets
from lowp.cli.interrupts import Interrupts
from lowp.cli.options import OUTPUT, Option, split_list, words_of
from lowp.cli.output import print_json, print_table, say
from lowp.errors import InvalidInput, LowpError, near

if TYPE_CHECKING:
    from lowp.launch.comparison import Runs

USAGE = "lowp run [arguments] script.py | -m module [arguments of the script]"
OPTIONS = (
    Option("--precision", "a preset or a format such as e5m7 (default: bf16; with --monitor fp32)", excludes=True),
    Option("--policy", "a policy file", "FILE.toml", excludes=True),
    Option("--compare", "run the script once in each of these precisions and compare", "LIST", excludes=True),
    Option("--loss-scale", "none, a number, or dynamic (default: the precision's)", "SCALE"),
    Option("--strict", "end the script if something cannot run in the precision", kind=bool),
    Option("--override", "replace the script's own autocast and GradScaler", kind=bool),
    Option("--report", "write a report of the run to this file", "FILE.json", Path),
    Option(
        "--monitor",
        "warn of what spoils the training; --monitor=FILE.jsonl writes its numbers for lowp watch",
        "FILE.jsonl",
        more={"nargs": "?", "const": ""},  # the file stands behind "="
    ),
    *OUTPUT,
)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return lowp's own arguments, and the script with its arguments, which starts at the first unknown one."""
    index = 0
    while index < len(arguments) and (count := words_of(arguments[index], OPTIONS)):
        index += count
    return arguments[:index], arguments[index:]


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the script's Python process; with --compare, run the script several times."""
    command = _command(arguments.script)
    if arguments.compare is not None:
        if arguments.report is not None:
            raise InvalidInput("--report is for one run and --compare for several: give one of them")
        if arguments.monitor:
            raise InvalidInput("--monitor=FILE is for one run: with --compare give --monitor alone")
        return _compare(command, arguments)
    if arguments.json:
        raise InvalidInput("--json is for --compare: --report FILE.json writes the report of one run")
    default = "bf16" if arguments.monitor is None else "fp32"
    chosen = next(one for one in (arguments.policy, arguments.precision, default) if one is not None)
    environment = _environment(chosen, arguments)
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(command[0], command, environment)
    return subprocess.call(command, env=environment)


def _compare(command: list[str], arguments: argparse.Namespace) -> int:
    """Run the script once in each precision, and print the runs; return 1 if one has failed."""
    from lowp.launch import comparison
    from lowp.report.terminal import Bar

    environments = [(name, _environment(name, arguments)) for name in split_list(arguments.compare, "--compare")]
    with (
        Interrupts(keeping="the run is being ended") as interrupts,
        Bar(Path(command[-1]).name, len(environments), "runs") as bar,
    ):
        runs = comparison.Runs(command)
        for done, (precision, environment) in enumerate(environments, 1):
            bar.advance(0, f"{precision}: {' '.join(command[1:])}")
            one = runs.add(precision, environment, interrupts)
            bar.line(f"{done}/{len(environments)}  {precision}: exit code {one.code}, {one.seconds:.1f} s")
            bar.advance(1)
            if interrupts():
                break
    if arguments.json:
        print_json(runs.document())
    else:
        _print(runs)
    say(f"complete outputs, and what the runs have written: {runs.folder}")
    return interrupts.exit_code if interrupts() else int(any(one.code for one in runs.outcomes))


def _print(runs: Runs) -> None:
    names = ("precision", "exit", "time", "skipped\nsteps", "saturated\ntensors", "last line", "difference")
    rows = []
    for one in runs.outcomes:
        skipped = f"{one.skipped} of {one.steps}" if one.steps else ""
        saturated = f"{one.saturated} of {one.writes}" if one.writes else ""
        cells = [one.precision, str(one.code), f"{one.seconds:.1f} s", skipped, saturated, one.last_line]
        rows.append([*cells, runs.apart(one)])
    print_table(f"compared with {runs.base.precision}", names, rows)
    for one in runs.outcomes:
        for note in one.notes:
            print(f"{one.precision}: {note}")


def _command(script: list[str]) -> list[str]:
    """Return the command that runs the script as Python would; raise InvalidInput if there is no script."""
    from lowp.launch.record import check_script

    script = script[1:] if script[:1] == ["--"] else script
    if not script:
        raise InvalidInput("the script is missing. For example: lowp run --precision bf16 train.py --lr 0.1")
    if script[0].startswith("-") and script[0] != "-m":
        name = script[0].partition("=")[0]
        meant = "".join(f"; did you mean {one}?" for one in near(name, [one.name for one in OPTIONS], 1))
        raise InvalidInput(f"{name!r} is not an option of lowp run: give options of the script after its name{meant}")
    if script[0] != "-m" and not os.path.exists(script[0]) and (also := _precisions(script)):
        raise InvalidInput(
            f"{script[0]!r} is a precision and not a script: give several precisions as one list with commas, as in "
            f"lowp run --compare {','.join(['fp32', *(one for one in also if one != 'fp32')])} train.py, "
            f"and one as in lowp run --precision {script[0]} train.py"
        )
    if script[0].endswith(".jsonl") and len(script) > 1:
        raise InvalidInput(f"{script[0]!r} is not a script: a monitor's file stands behind '=', --monitor={script[0]}")
    check_script(script, "lowp run --precision bf16 -m package.train")
    return [sys.executable, *script]


def _precisions(words: list[str]) -> list[str]:
    """Return the words at the beginning that are precisions."""
    for count, word in enumerate(words):
        try:
            presets.parse(word)
        except LowpError:
            return words[:count]
    return words


def _environment(precision: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a run in a precision; raise InvalidInput for one that cannot run a script."""
    from lowp.launch.record import RunSettings, check_report, started_with
    from lowp.monitoring.log import check_log

    if precision.endswith(".toml"):
        precision = os.path.abspath(precision)
    preset = presets.parse(precision, arguments.loss_scale)
    if preset.masters.kind != "none" or preset.name == "fp16-naive":
        plain = preset.name.removesuffix("-storage").removesuffix("-naive")
        raise InvalidInput(
            f"{preset.name} stores the parameters in few bits, which may break a script that reads them: "
            f"use --precision {plain}, which computes the same in fp32 parameters"
        )
    if arguments.report is not None:
        check_report(arguments.report)
    settings = RunSettings(
        precision,
        loss_scale=arguments.loss_scale or "",
        strict=arguments.strict,
        override=arguments.override,
        report="" if arguments.report is None else str(arguments.report.resolve()),
        monitor=arguments.monitor and str(check_log(Path(arguments.monitor)).resolve()),
        directory=os.path.join(tempfile.gettempdir(), f"lowp-run-{secrets.token_hex(8)}"),
        leader=os.getpid() if os.name == "posix" else 0,
    )
    return started_with(settings.to_environment())
