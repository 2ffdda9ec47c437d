"""The command `lowp`: one file per command, imported only when the command is called.

A command module `lowp/cli/NAME.py` has a docstring (shown by `lowp NAME --help`), OPTIONS, a row of `options` each, and
`run(arguments: argparse.Namespace) -> int`, whose result is the exit code. A command whose command line ends in that of
another program also has USAGE and `split(arguments: list[str])`, which returns its own part and the other part; the
latter becomes `arguments.script`.
"""

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from lowp.errors import InvalidInput, LowpError, UnknownName, unknown

# By name, which is that of the command's module in this package, the line in `lowp --help`.
COMMANDS: dict[str, str] = {
    "formats": "list the number formats, show one in full, draw their bits",
    "explain": "show a number, a sum or a weight update bit by bit",
    "policy": "list the policies, print one, check a policy file",
    "recipes": "list the networks that can be trained",
    "train": "train one recipe in one precision, with checkpoints",
    "compare": "train one in several precisions, report which converge as fp32",
    "bench": "measure training steps beside fp32 and torch.amp",
    "convert": "write a checkpoint in another number format",
    "profile": "predict what every format would do to a training",
    "run": "train an unmodified PyTorch script in a precision",
    "watch": "show a running training live, with what its monitor warns of",
    "figure": "draw a figure of the literature from a real run",
    "completions": "print the completions for bash, zsh or fish",
}

_FIRST = """\
lowp trains PyTorch models in few bits: fp16, bf16, fp8, Flexpoint, or any
format that you define.

Try first:
  lowp train digits --precision fp16   a small network, in fp16: seconds
  lowp compare digits                  four precisions beside fp32: a minute
  lowp profile digits                  what each format would do to it
  lowp explain 0.1 --to fp16           one number, bit by bit

Then your own script, unchanged:
  lowp run --precision bf16 train.py

All commands: lowp --help. One command with its options: lowp help COMMAND.
"""
_HELP_HEAD = ("usage: lowp COMMAND [arguments]", "", "Train neural networks in low precision.", "", "commands:")
_HELP_TAIL = (
    "",
    "options:",
    "  --help     this text; for one command `lowp help COMMAND`",
    "  --version  the version; with --verbose also the processor and its kernels",
    "",
    "exit codes:",
)

EXIT_NO = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # as shells report SIGINT
EXIT_TERMINATED = 143  # as shells report SIGTERM
EXIT_BROKEN_PIPE = 141  # as shells report SIGPIPE
EXIT_CODES: dict[int, str] = {
    0: "the command has done its work",
    EXIT_NO: "the answer is no: see `profile --diff`, `--verify`, `run --compare`",
    EXIT_ERROR: "wrong input, a file that cannot be used, or a failed training",
    EXIT_INTERRUPTED: "ended by Ctrl-C; what was finished is kept",
    EXIT_BROKEN_PIPE: "the reader of the output has gone, such as head",
    EXIT_TERMINATED: "ended by SIGTERM; what was finished is kept",
}


class _Terminated(KeyboardInterrupt):
    """SIGTERM was received outside an `Interrupts` block."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: one of EXIT_CODES, or that of the script which it has run.

    An error about the input or about a file is printed as one line on stderr; LOWP_TRACEBACK=1 adds the traceback. Any
    other exception is a defect and keeps its traceback.
    """
    handled = _answer_sigterm()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has exited: print nothing, and keep the interpreter from flushing again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except _Terminated:
        print("lowp: ended by SIGTERM", file=sys.stderr)
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        print("lowp: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("LOWP_TRACEBACK", "") not in ("", "0") or not _is_about_input(error):
            raise
        print_error(" ".join(str(error).split()) or type(error).__name__)
        return EXIT_ERROR
    finally:
        if handled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _answer_sigterm() -> bool:
    """Make SIGTERM end a command as Ctrl-C does, with cleanup and a message; return whether a handler was installed."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return False

    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, end)
    return True


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_FIRST, end="")
        return 0
    if arguments[0] == "help":  # lowp help train
        arguments = [*arguments[1:2], "--help"]
    if arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        return _version(arguments[1:])
    name, *rest = arguments
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise UnknownName(unknown(kind, name, [*COMMANDS, "--help", "--version"]))
    module = import_module(f"lowp.cli.{name}")
    usage = getattr(module, "USAGE", None)
    parser = Parser(prog=f"lowp {name}", usage=usage, description=module.__doc__, formatter_class=_Help)
    from lowp.cli.options import add_options, check_least

    add_options(parser, module.OPTIONS)
    split = getattr(module, "split", None)
    own, script = (rest, None) if split is None else split(rest)
    parser.check_options(own)
    try:
        parsed = parser.parse_args(own, None if script is None else argparse.Namespace(script=script))
    except SystemExit:  # argparse has printed its help
        return 0
    check_least(module.OPTIONS, parsed)
    from lowp.cli.output import colours

    with colours(getattr(parsed, "plain", False)):
        return int(module.run(parsed))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help whose paragraphs are as wide as the terminal; those with an indented line, the examples, stay as written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        import textwrap

        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(part if "\n  " in f"\n{part}" else textwrap.fill(part, min(width, 100)) for part in parts)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of lowp: one line, with the options that resemble an unknown one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # a negative number is an argument, not an option, in every spelling: -1e-5, -inf, -1/3, -0x1p3, -3%
        self._negative_number_matcher = re.compile(r"^-(\d|\.\d|inf|nan).*$")

    def check_options(self, arguments: Sequence[str]) -> None:
        """Raise UnknownName for an unknown option, before argparse takes the value after it for another argument."""
        known = self._option_string_actions
        for argument in arguments[: arguments.index("--")] if "--" in arguments else arguments:
            name = argument.partition("=")[0]
            is_value = len(argument) == 1 or " " in argument or self._negative_number_matcher.match(argument)
            # with two dashes a longer name will do, as argparse finds it
            is_option = any(one == name or (name.startswith("--") and one.startswith(name)) for one in known)
            if name.startswith("-") and not is_value and not is_option:
                options = [option for option in known if option.startswith("--")]
                raise UnknownName(unknown(f"option of {self.prog}", name, options))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise UnknownName for a value that is not one of an argument's choices."""
        if action.choices is not None and value not in action.choices:
            raise UnknownName(unknown("/".join(action.option_strings) or action.dest, value, action.choices))

    def error(self, message: str) -> NoReturn:
        """Raise InvalidInput."""
        raise InvalidInput(f"{self.prog}: {message} (`{self.prog} --help` says what is allowed)")


def _version(arguments: Sequence[str]) -> int:
    from lowp import __version__

    options = ("--verbose", "--json")
    if unexpected := [one for one in arguments if one not in options]:
        raise UnknownName(unknown("option of --version", unexpected[0], options))
    facts = {}
    if "--verbose" in arguments:
        import torch

        from lowp.kernels.choose.choices import choices

        facts = {"torch": torch.__version__, **choices()}
    if "--json" in arguments:
        from lowp.cli.output import print_json

        print_json({"lowp": __version__, **facts})
    else:
        import textwrap

        print(f"lowp {__version__}")
        for name, text in facts.items():
            print(textwrap.fill(f"{name}: {text}", 100, subsequent_indent="  ", break_on_hyphens=False))
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS), default=0)
    commands = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    codes = [f"  {code:<3}  {text}" for code, text in EXIT_CODES.items()]
    last = "A script that `run` or `profile` has run gives its own code, if it is not 0."
    return "\n".join([*_HELP_HEAD, *commands, *_HELP_TAIL, *codes, "", last])


def print_error(text: str) -> None:
    """Print an error as one line on stderr; on a terminal with a red word, and wrapped between words."""
    if not sys.stderr.isatty():
        print(f"lowp: error: {text}", file=sys.stderr)
        return
    from rich.text import Text

    from lowp.report.terminal import console

    console(sys.stderr).print(Text.assemble("lowp: ", ("error:", "bold red"), f" {text}"))


def _is_about_input(error: Exception) -> bool:
    """Return whether to print an error in one line: a LowpError, an OSError, or a ValueError raised by lowp's code."""
    if isinstance(error, (LowpError, OSError)):
        return True
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = "" if innermost is None else str(innermost.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, ValueError) and module.partition(".")[0] == "lowp"
