"""Show a running training live in the terminal: loss, scale and layers as sparklines, and the alarms of its monitor.

  lowp run --monitor=run.jsonl train.py
  lowp watch run.jsonl

A monitor writes the file: lowp run --monitor=FILE, or lowp.Monitor(model, optimizer, sinks=FILE). It ends when the run
ends, or at Ctrl-C, which the run does not notice. Where the output is no terminal, the present state is printed once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lowp.cli import EXIT_INTERRUPTED
from lowp.cli.options import OUTPUT, Option
from lowp.cli.output import print_json
from lowp.errors import InvalidInput

if TYPE_CHECKING:
    from lowp.monitoring.log import Tail
    from lowp.report.watching import Board

_SECONDS = 0.5


OPTIONS = (
    Option("file", "the file that a monitor writes", "FILE.jsonl", Path),
    Option("--every", f"pause between looks (default: {_SECONDS})", "SECONDS", float, _SECONDS),
    *OUTPUT,
)


def run(arguments: argparse.Namespace) -> int:
    """Show the file until its run ends; return 0, or 130 after Ctrl-C."""
    from lowp.monitoring.log import Tail
    from lowp.report.watching import Board

    if not 0 < arguments.every <= 3600:
        raise InvalidInput(f"--every {arguments.every:g}: give seconds, more than 0")
    with contextlib.closing(Tail(arguments.file)) as tail:
        return _shown(tail, Board(arguments.file.name), arguments)


def _shown(tail: Tail, board: Board, arguments: argparse.Namespace) -> int:
    from lowp.report.terminal import console

    board.take(tail.more())
    if arguments.json:
        print_json(board.document())
        return 0
    screen = console()
    if not sys.stdout.isatty():
        screen.print(board.shown(screen, is_whole=True))
        return 0
    from rich.live import Live

    try:
        with Live(board.shown(screen), console=screen, auto_refresh=False) as live:
            while board.ended is None and not board.is_gone:
                time.sleep(arguments.every)
                board.take(tail.more())
                live.update(board.shown(screen), refresh=True)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0
