"""List the policies, print one, or check a policy file.

  lowp policy list
  lowp policy show fp16
  lowp policy show fp16 --toml > my.toml
  lowp policy show torch-2.13-cpu --ops
  lowp policy check my.toml

A policy is a list of rules that give the format of each operand by op and module; the first match applies. The
printed TOML file can be given to `lowp.autocast("my.toml")`, `lowp train digits --precision my.toml` and
`lowp run --policy my.toml script.py`.
"""

import argparse
import textwrap

from lowp import presets
from lowp.cli.options import OUTPUT, Option
from lowp.cli.output import print_json, print_table
from lowp.errors import InvalidInput, UnknownName, counted, near, unknown
from lowp.policy import OP_CLASSES, Policy, check_ops
from lowp.presets import PRESETS, Preset

ACTIONS = ("list", "show", "check")


OPTIONS = (
    Option("action", "what to do", "list|show|check"),
    Option("name", "a preset, a format, torch-2.13-cpu, torch-2.13-cuda or a file (.toml)", more={"nargs": "?"}),
    Option("--toml", "print it as a policy file for autocast", kind=bool),
    Option("--ops", "also print the class of each op", kind=bool),
    *OUTPUT,
)


def run(arguments: argparse.Namespace) -> int:
    """List the policies, show one, or check a file."""
    if arguments.action not in ACTIONS:
        shown = arguments.action in PRESETS or arguments.action.endswith(".toml")
        hint = f"; `lowp policy show {arguments.action}` shows it" if shown else ""
        raise UnknownName(unknown("action", arguments.action, ACTIONS) + hint)
    if arguments.action == "list":
        if arguments.name is not None:
            raise InvalidInput(
                f"lowp policy list does not take a name: lowp policy show {arguments.name} shows one policy"
            )
        _list(arguments.json)
        return 0
    if arguments.name is None:
        example = "fp16" if arguments.action == "show" else "my.toml"
        raise InvalidInput(f"lowp policy {arguments.action} needs a name or a file, such as {example}")
    if arguments.action == "check":
        checked = _check(arguments.name)
        print_json({"file": arguments.name, "checked": checked}) if arguments.json else print(checked)
    elif arguments.json:
        if arguments.toml:
            raise InvalidInput("--json and --toml are two notations of a policy: give one of them")
        print_json(_document(_preset(arguments.name), arguments.ops))
    elif arguments.toml:
        print(_preset(arguments.name).policy.to_toml(), end="")
    else:
        print(_text(_preset(arguments.name)))
        if arguments.ops:
            print("\n" + _ops(_preset(arguments.name).policy.table))
    return 0


def _list(as_json: bool) -> None:
    from lowp.ops.table import TORCH_POLICIES

    rows = {name: preset.summary for name, preset in PRESETS.items()}
    rows |= {name: f"torch.autocast's own lists, {policy.rules[0].input}" for name, policy in TORCH_POLICIES.items()}
    print_table(None, ("policy", "what"), rows.items(), as_json=as_json)
    if not as_json:
        print("Any format is a policy, too: e4m3fn, e5m7, bf16:stochastic put the operands of contractions in it.")


def _document(preset: Preset, ops: bool) -> dict[str, object]:
    from lowp.ops.table import TABLES

    document = preset.policy.document()
    document |= {"loss_scale": str(preset.loss_scale), "masters": str(preset.masters)}
    if ops:
        document["ops"] = {row.name: row.op_class for row in TABLES[preset.policy.table].values()}
    return document


def _preset(name: str) -> Preset:
    """Return a preset by its name, one of torch's policies, or a policy file."""
    from lowp.ops.table import TORCH_POLICIES

    if name in TORCH_POLICIES:
        return presets.parse(TORCH_POLICIES[name])
    try:
        return presets.parse(name)
    except UnknownName as error:
        if nearest := near(name, TORCH_POLICIES):
            raise UnknownName(f"{error}; or {' or '.join(nearest)}") from None
        raise


def _text(preset: Preset) -> str:
    lines = [str(preset.policy), f"loss scale {preset.loss_scale}, master weights {preset.masters}"]
    if preset.policy.name in PRESETS:
        lines += [preset.summary, f"source: {preset.source}"]
    return "\n".join(lines)


def _check(file: str) -> str:
    """Return a summary of a policy file; raise InvalidInput for an error in it."""
    from lowp.ops.table import op_names

    policy = Policy.load(file)
    check_ops(policy, op_names(policy.table))
    rules = counted(len(policy.rules), "rule")
    hidden = [
        index
        for index, rule in enumerate(policy.rules, 1)
        if any(not earlier.ops and earlier.where == "*" for earlier in policy.rules[: index - 1])
    ]
    if hidden:
        return f"{file}: {rules}; rule {hidden[0]} is never reached: a rule before it matches every op everywhere"
    return f"{file}: {rules}, every op is known to table {policy.table}"


def _ops(name: str) -> str:
    """Return an op table as text, one paragraph per class."""
    from lowp.ops.table import TABLES

    lines = [f"op table {name}; what is not listed is pointwise"]
    for op_class, meaning in OP_CLASSES.items():
        names = [row.name for row in TABLES[name].values() if row.op_class == op_class]
        if names:
            lines += ["", f"{op_class}: {meaning}", textwrap.indent(textwrap.fill(" ".join(names), 108), "  ")]
    return "\n".join(lines)
