"""Profile a training run: predict the effect of every number format on it, and recommend a policy.

  lowp profile digits
  lowp profile gpt --steps 60 --html report.html --policy policy.toml
  lowp profile --max-overhead 5% --out run.json train.py --lr 0.1
  lowp profile run.json --html report.html
  lowp profile --diff a.json b.json --html both.html

The training runs in fp32. Some of its steps are recorded in full; the added time is measured and limited by
--max-overhead. The record is a JSON file. Verdict, findings, policy and report are computed from it, and can be
computed again from the file. Use the policy with `lowp run --policy`, `lowp compare --precision` or lowp.autocast.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp import files, presets
from lowp.cli.interrupts import Interrupts
from lowp.cli.options import BATCH, DATA, DEVICE, EPOCHS, OUTPUT, RATE, SIZE, Option, given, words_of
from lowp.cli.output import print_json
from lowp.errors import InvalidInput, LowpError
from lowp.policy import Policy
from lowp.report.terminal import console

if TYPE_CHECKING:
    from lowp.numerics.prediction import Window
    from lowp.numerics.record import Record

_VERIFIED = 40  # steps
USAGE = (
    "lowp profile [arguments] RECIPE | run.json | script.py [its arguments]\n       lowp profile --diff A.json B.json"
)


OPTIONS = (
    Option(
        "--diff",
        "print the first tensor in which two recorded runs differ; --html shows both",
        ("A.json", "B.json"),
        Path,
        more={"nargs": 2},
    ),
    Option(
        "--max-overhead",
        "largest share of time that recording may add, such as 3%%; none: no limit; auto (default): 3%%, or 0.25 s if "
        "that is more",
        "SHARE",
        default="auto",
    ),
    Option("--out", "record file; while the run lasts, one line for each recorded step", "FILE.json", Path),
    # files that are computed from a record
    Option("--html", "report as a single HTML file", "FILE.html", Path),
    Option("--policy", "recommended policy, as a policy file", "FILE.toml", Path),
    Option("--csv", "statistics of every tensor, as a CSV file", "FILE.csv", Path),
    Option("--tensorboard", "directory for TensorBoard histograms", "DIR", Path),
    *OUTPUT,
    # a recipe's training
    Option(
        "--steps",
        "number of steps of a recipe (default: 100, and up to a minute more until 4 are recorded)",
        "N",
        int,
        least=1,
    ),
    *(replace(one, help="option of the recipe, as for `lowp train`") for one in (SIZE, EPOCHS, BATCH, RATE, DEVICE)),
    Option("--seed", "seed of the recipe's weights and batches (default: 0)", kind=int, default=0, setting="seed"),
    replace(DATA, help="folder or file of the recipe's data set"),
    # further predictions, and their verification by training
    Option("--precision", "also predict the effect of this precision or policy file", "NAME"),
    Option(
        "--high",
        "keep N layers of --precision in bf16, those that cost the loss most; print, or write to --policy, that policy",
        "N",
        int,
        least=1,
    ),
    Option("--verify", "train with the recommended policy and with fp32, and print the difference", kind=bool),
    Option(
        "--verify-steps",
        f"number of steps that --verify and --bits compare; all: the whole recipe (default: {_VERIFIED}, or --steps "
        "if that is fewer). Implies --verify",
        "N",
    ),
    Option("--bits", "search for the cheapest policy whose operands have at most N bits", "N", int),
    Option("--cost", "what --bits minimizes (default: area)", default="area", more={"choices": ("area", "bytes")}),
    Option("--least-signal", "lowest signal-to-noise ratio that --bits accepts (default: 20 dB)", "DB", float, 20.0),
)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return lowp's own arguments, and the profiled object with its arguments, which starts at the first unknown one.

    lowp's arguments may follow a recipe or a record; all arguments after a script belong to the script.
    """
    own: list[str] = []
    rest = list(arguments)
    while rest and (rest[0].startswith("-") and rest[0] != "-m"):
        if not (count := words_of(rest[0], OPTIONS)):
            return [rest[0]], []  # refused by name, not with what follows it
        own, rest = own + rest[:count], rest[count:]
    if rest and not _is_script(rest[0]):
        return own + rest[1:], rest[:1]
    return own, rest


def _is_script(name: str) -> bool:
    return name == "-m" or name.endswith(".py")


def run(arguments: argparse.Namespace) -> int:
    """Profile, or read a profile; print it, and write the requested files."""
    if arguments.diff is not None:
        return _difference(arguments)
    if not arguments.script:
        raise InvalidInput("nothing to profile: give a recipe (lowp profile digits), a script, or a record run.json")
    name = arguments.script[0]
    _check(arguments)
    is_record = name.endswith((".json", ".jsonl"))
    if is_record or _is_script(name):
        _require_recipe(arguments)
    if is_record:
        from lowp.numerics.record import Record

        code, document = 0, _report(Record.load(name), arguments, "lowp run --policy policy.toml train.py")
    else:
        code, document = _script(arguments) if _is_script(name) else _recipe(name, arguments)
    if arguments.json and document:
        print_json(document)
    return code


_NO_PAGE = files.lacking("a report of lowp profile", b": lowp profile</title>")
_NO_TABLE = files.lacking("a table of lowp profile", b"module,op,role,phase,")


def _lacks_policy(target: Path) -> str:
    try:
        Policy.from_toml(target.read_text(encoding="utf-8"))
    except (LowpError, UnicodeDecodeError):
        return "a policy of lowp"
    return ""


def _check_files(arguments: argparse.Namespace, **lacks: Callable[[Path], str]) -> None:
    """Raise for a file of these options that cannot be written, or is another one's."""
    for option, one in lacks.items():
        if (path := getattr(arguments, option)) is not None:
            files.check_target(path, one)


def _check(arguments: argparse.Namespace) -> None:
    """Raise, before any work is done, for a file that cannot be written or an invalid number."""
    from lowp.numerics.record import lacks
    from lowp.numerics.schedule import Budget

    Budget.parse(arguments.max_overhead)
    if arguments.precision is not None:
        presets.parse(arguments.precision)
    elif arguments.high is not None:
        raise InvalidInput(f"--high {arguments.high} keeps layers of a precision in bf16: give --precision, too")
    _check_files(arguments, out=lacks, html=_NO_PAGE, csv=_NO_TABLE, policy=_lacks_policy)
    if arguments.tensorboard is not None and arguments.tensorboard.exists() and not arguments.tensorboard.is_dir():
        raise InvalidInput(
            f"--tensorboard {arguments.tensorboard} is a file: give a folder, which is created if necessary"
        )
    if arguments.bits is not None and not 2 <= arguments.bits <= 16:
        raise InvalidInput(f"--bits {arguments.bits}: give 2 to 16, the bits of an operand")
    if not arguments.least_signal > 0.0 or math.isinf(arguments.least_signal):
        raise InvalidInput(f"--least-signal {arguments.least_signal:g}: give decibels above 0, such as 20")
    _steps_to_verify(arguments)


def _require_recipe(arguments: argparse.Namespace) -> None:
    """Raise for options that need a recipe, which can be trained again from the same weights."""
    name = arguments.script[0]
    for option in ("verify", "verify_steps", "bits"):
        if getattr(arguments, option):
            instead = ""
            if _is_script(name):
                script = shlex.join(arguments.script)
                instead = f", or compare whole runs of the script: lowp run --compare fp32,policy.toml {script}"
            spelled = option.replace("_", "-")
            raise InvalidInput(f"--{spelled} trains a recipe: give a recipe instead of {name}{instead}")
    of_recipes = [one for one in OPTIONS if one.setting or one.name == "--steps"]
    if unheeded := [one.name for one in of_recipes if getattr(arguments, one.dest)]:
        after = ": options of the script come after its name" if _is_script(name) else ""
        raise InvalidInput(f"{unheeded[0]} is for recipes, and {name} is none{after}")


def _steps_to_verify(arguments: argparse.Namespace) -> int | None:
    """Return the number of steps to compare, None for the whole recipe; raise InvalidInput for an invalid number."""
    steps = arguments.verify_steps
    if steps is None:
        return min(arguments.steps or _VERIFIED, _VERIFIED)
    if steps == "all":
        return None
    if not steps.isdecimal() or not int(steps):
        raise InvalidInput(f"--verify-steps {steps}: give 1 or more, or all for the whole recipe")
    return int(steps)


def _difference(arguments: argparse.Namespace) -> int:
    from lowp.numerics.advice import advise
    from lowp.numerics.record import Record, difference

    _check_files(arguments, html=_NO_PAGE)
    first, second = (Record.load(path) for path in arguments.diff)
    first_difference = difference(first, second)
    if arguments.html is not None:
        from lowp.report.profile_html import page

        _write_page(arguments.html, page(first, advise(first), second), arguments.json)
    if arguments.json:
        print_json({"difference": None if first_difference is None else first_difference.document()})
        return int(first_difference is not None)
    if first_difference is None:
        print(f"{arguments.diff[0]} and {arguments.diff[1]} are bitwise equal in every step that both recorded")
        return 0
    print(first_difference)
    return 1


def _recipe(name: str, arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Profile a recipe; return the exit code and the profile as plain data, {} without one."""
    from lowp.recipes.profiling import profiled
    from lowp.recipes.training import Settings
    from lowp.report.terminal import Bar

    settings = Settings(name, **given(OPTIONS, arguments))
    with (
        Interrupts(lambda: _left(arguments.out), "the step is being ended") as interrupts,
        Bar(f"profiling {name}", arguments.steps or 0, "steps") as bar,
    ):
        moved = lambda taken, steps: bar.move(taken, total=steps)  # noqa: E731
        record = profiled(settings, arguments.steps, arguments.max_overhead, arguments.out, interrupts, moved)
    if record.is_empty:  # the profiler has printed why
        return interrupts.exit_code if interrupts() else 2, {}
    document = _report(record, arguments, f"lowp compare {name} --precision policy.toml")
    code = interrupts.exit_code
    if not interrupts():
        code = 0
        if arguments.verify or arguments.verify_steps is not None or arguments.bits is not None:
            code = _verified(settings, record, arguments, document)
    return code, document


def _left(out: Path | None) -> str:
    """Return what was saved of a run that is ended within a step."""
    left = "nothing was saved: --out saves each recorded step" if out is None else f"{out} has the recorded steps"
    return f"interrupted; {left}"


def _verified(settings: Any, record: Record, arguments: argparse.Namespace, document: dict[str, Any]) -> int:
    from lowp.numerics.advice import advise
    from lowp.numerics.policies import cheapest
    from lowp.recipes.profiling import verified

    policy = advise(record).policy
    if arguments.bits is not None:
        search = cheapest(record, arguments.bits, arguments.cost, arguments.least_signal)
        policy = search.policy
        document["cheapest"] = {"layers": search.layers, "share": search.share, "of": search.what}
        if not arguments.json:
            print(search)
        if arguments.policy is not None:
            files.write(arguments.policy, policy.to_toml())
    result = verified(settings, policy, _steps_to_verify(arguments))
    document["verified"] = {**asdict(result), "holds": result.holds}
    if not arguments.json:
        print(result)
    return 0 if result.holds else 1


def _script(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Profile a script, as `_recipe` does a recipe."""
    from lowp.launch.profiling import profile_script
    from lowp.numerics.record import Record

    with Interrupts(keeping="the script is being ended") as interrupts:
        code, path = profile_script(
            arguments.script, arguments.max_overhead, arguments.out, interrupts, 2 if arguments.json else None
        )
    code = interrupts.exit_code if interrupts() else code
    if not path.exists():
        print("lowp profile: no step of a torch optimizer ran in the script: nothing was recorded", file=sys.stderr)
        return code or 1, {}
    record = Record.load(path)
    if arguments.out is None:
        path.unlink()
    if record.is_empty:
        print(f"lowp profile: {record.why_empty}", file=sys.stderr)
        return code or 2, {}
    return code, _report(record, arguments, f"lowp run --policy policy.toml {shlex.join(arguments.script)}")


def _report(record: Record, arguments: argparse.Namespace, next_command: str) -> dict[str, Any]:
    """Write the requested files; print a profile, but for --json, and return it as plain data."""
    from lowp.numerics.advice import advise
    from lowp.report.profile import print_profile, to_csv, to_tensorboard
    from lowp.report.profile_html import page

    advice, command = advise(record), next_command
    if arguments.policy is None:
        next_command = f"--policy policy.toml, which writes the policy, then {next_command}"
    else:
        next_command = command = next_command.replace("policy.toml", str(arguments.policy))
        files.write(arguments.policy, advice.policy.to_toml())
    header = {"title": record.header.get("title"), "parameters": record.header.get("parameters")}
    document = {**header, "tensors": len(record.tensors), "steps": len(record.sampled), **advice.document()}
    if not arguments.json:
        print_profile(console(), record, advice, next_command)
    if arguments.precision is not None:
        document["precision"] = _precision(record, advice.window, arguments)
    if arguments.html is not None:
        _write_page(arguments.html, page(record, advice, command=command), arguments.json)
    if arguments.csv is not None:
        to_csv(record, arguments.csv)
    if arguments.tensorboard is not None:
        to_tensorboard(record, arguments.tensorboard)
    return document


def _write_page(path: Path, text: str, as_json: bool) -> None:
    files.write(path, text)
    print(f"report: {path}", file=sys.stderr if as_json else sys.stdout)


def _precision(record: Record, window: Window, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the predicted effect of a precision on tensors, products and the loss; print it, but for --json.

    With --high its policy with so many layers in bf16 is written, or printed.
    """
    from lowp.numerics.policies import effects, high_layers, products, sensitivities, worst
    from lowp.report.profile import print_precision

    preset = presets.parse(arguments.precision)
    scaled = preset.loss_scale.kind != "none" and not window.is_unknown
    scale = 2.0**window.recommended if scaled else 1.0
    predicted, of_products = effects(record, preset.policy, scale), products(record, preset.policy, scale)
    changes = sorted(sensitivities(record, preset.policy).items(), key=lambda pair: -pair[1])[:5]
    high = high_layers(record, preset.policy, arguments.high)
    document = {
        "precision": preset.name,
        "rounded": len(predicted),
        "overflow": sum(effect.overflows for effect in predicted.values()),
        "loss_change": dict(changes),
        "worst": [{**key._asdict(), **asdict(effect)} for key, effect in worst(predicted)],
        "products": [
            {"module": module, "op": op, "product": name, "flushed": one.flushed, "error": one.error}
            for (module, op), found in of_products.items()
            for name, one in found.items()
        ],
        "high": {"kept": list(high.kept), "shares": high.shares, "policy": high.policy.to_toml()},
    }
    if not arguments.json:
        print_precision(console(), preset.name, predicted, of_products, dict(changes), high)
    if arguments.high is not None and arguments.policy is not None:
        files.write(arguments.policy, high.policy.to_toml())
    elif arguments.high is not None and not arguments.json:
        print(high.policy.to_toml(), end="")
    return document
