"""Convert a checkpoint to another number format, and report the errors of every tensor.

  lowp convert model.safetensors model-bf16.safetensors --to bf16
  lowp convert run.pt model-int4.safetensors --to int4 --keep "*embedding*"
  lowp convert llama/ llama-mxfp4/ --to mxfp4
  lowp convert gpt.pt gpt-nvfp4.safetensors --serve nvfp4 --rounding gptq

IN is a safetensors file, the index or the folder of a sharded one, or a torch file (its pickle is not executed). OUT
is a .safetensors file, a torch file (.pt, .pth, .bin, .ckpt), or a folder for shards. Formats with a torch dtype
are stored in that dtype; others are packed with their scales, and lowp.load returns their values. Tensors
are read one at a time. OUT is written under a temporary name and renamed when it is complete.

With --serve IN has the weights of a recipe's model. OUT has its layers packed as lowp.quantize_model packs them,
calibrated on the recipe's data, for lowp.inference.load.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowp import files
from lowp.cli.options import DATA, OUTPUT, SIZE, Option
from lowp.cli.output import print_json, print_table
from lowp.errors import InvalidInput

if TYPE_CHECKING:
    from lowp.portable import Converted
    from lowp.report.terminal import Bar


OPTIONS = (
    Option("source", "a checkpoint: file, index of shards, or folder", "IN", Path),
    Option("target", "a file, or a folder for shards", "OUT", Path),
    Option("--to", "a format or a cast: bf16, int8, e4m3fn:saturate", "FORMAT", excludes=True),
    Option("--serve", "pack the layers of a recipe's model in this format", "FORMAT", excludes=True),
    Option("--rounding", "with --serve: nearest (default) or gptq", "NAME"),
    Option("--recipe", "with --serve: the recipe of the model (default: found)", "NAME"),
    SIZE,
    DATA,
    Option("--keep", "do not convert these tensors", "PATTERN", default=[], more={"action": "append"}),
    Option("--entry", "the entry of a torch file that is the state_dict", "NAME"),
    Option("--seed", "seed of stochastic rounding (default: 0)", kind=int, default=0),
    Option("--overwrite", "replace OUT if it exists", kind=bool),
    *OUTPUT,
    Option("--report", "also write the table to this file", "FILE.json", Path),
)


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print one line per tensor."""
    from lowp import portable
    from lowp.report.terminal import Bar

    if arguments.serve is not None:
        return _serve(arguments)
    if arguments.to is None:
        raise InvalidInput("no format: give --to FORMAT, or --serve FORMAT for the model of a recipe")
    for name in ("rounding", "recipe", "size", "data"):
        if getattr(arguments, name) is not None:
            raise InvalidInput(f"--{name} is for --serve, and --to converts tensors of any model: omit it")
    if arguments.report is not None:
        files.check_target(arguments.report, files.lacking("a report of lowp convert", b'{\n "files": ['))
    bars: list[Bar] = []
    with ExitStack() as stack:
        converted = portable.convert(
            arguments.source,
            arguments.target,
            arguments.to,
            keep=arguments.keep,
            entry=arguments.entry,
            seed=arguments.seed,
            overwrite=arguments.overwrite,
            started=lambda count: bars.append(stack.enter_context(Bar("converting", count, "tensors"))),
            done=lambda name: bars[-1].advance(1, name),
        )
    if arguments.report is not None:
        files.write(arguments.report, files.json_text(converted.as_json()))
    if arguments.json:
        print_json(converted.as_json())
    else:
        _show(converted)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Pack the layers of a recipe's model, and say what became of them."""
    from lowp import inference
    from lowp.recipes.serving import read_model, served_as
    from lowp.report.tables import bytes_of

    for name in ("keep", "report", "entry"):
        if getattr(arguments, name):
            raise InvalidInput(f"--{name} is for --to: omit it")
    files.check_target(arguments.target, overwrite=arguments.overwrite)
    settings, model = read_model(arguments.source, arguments.recipe, arguments.size)
    settings = replace(settings, data=arguments.data or settings.data)
    rounding = arguments.rounding or "nearest"
    served = served_as(settings, model, arguments.serve, rounding)
    inference.save(served, arguments.target)
    before, after = (sum(one.nbytes for one in (*module.parameters(), *module.buffers())) for module in (model, served))
    kept = dict(inference.unquantized(served))
    if arguments.json:
        sizes = {"bytes_before": before, "bytes_after": after}
        print_json({"recipe": settings.recipe, "format": arguments.serve, "rounding": rounding, **sizes, "kept": kept})
        return 0
    for name, reason in kept.items():
        print(f"{name} stays as it was: {reason}")
    share = f"{bytes_of(before)} became {bytes_of(after)} ({after / before:.2f} of them)"
    print(f"{settings.recipe} in {arguments.serve}, rounded by {rounding}: {share}: {arguments.target}")
    return 0


def _show(converted: Converted) -> None:
    from lowp.report.tables import bytes_of
    from lowp.report.terminal import console

    rows = []
    for tensor in converted.tensors:
        numbers = [f"{tensor.largest_error:.3g}", f"{tensor.rms_error:.3g}", f"{tensor.flushed:,}"]
        cells = ["-"] * 3 if tensor.reason else numbers
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        rows.append([tensor.name, shape, bytes_of(tensor.bytes_after), *cells, f"{tensor.overflowed:,}"])
    columns = ["tensor", "shape", "bytes", "max error", "rms error", "flushed", "overflowed"]
    print_table(f"to {converted.format}", columns, rows)
    terminal = console()
    reasons: dict[str, list[str]] = {}
    for tensor in converted.tensors:
        if tensor.reason:
            reasons.setdefault(f"kept in {tensor.dtype}, {tensor.reason}", []).append(tensor.name)
    for reason, names in reasons.items():
        terminal.print(f"{reason}: {', '.join(names)}", markup=False)
    for name, kind in converted.left_out.items():
        terminal.print(f"left out: {name}, a {kind} and no tensor", markup=False)
    before, after = (
        sum(getattr(tensor, name) for tensor in converted.tensors) for name in ("bytes_before", "bytes_after")
    )
    sys.stdout.flush()
    share = f" ({after / before:.2f} of them)" if before else ""
    terminal.print(f"{bytes_of(before)} became {bytes_of(after)}{share}: {', '.join(converted.files)}", markup=False)
