"""The options shared by `lowp train` and `lowp compare`, and the settings made from them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowp.recipes.training import Settings


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and the options that change its defaults."""
    parser.add_argument("recipe", help="a recipe of `lowp recipes`, or your own as module:NAME")
    parser.add_argument("--size", help="size of the recipe: cpu (default) or full")
    parser.add_argument("--epochs", type=int, help="number of epochs (default: the recipe's)")
    parser.add_argument("--batch", type=int, help="batch size (default: the recipe's)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the recipe's)")
    parser.add_argument(
        "--accumulate", metavar="FORMAT", help="accumulation of contractions: fp32, fp16/16, bf16/128 ..."
    )
    parser.add_argument("--device", help="cpu (default), cuda, cuda:1 ...")
    parser.add_argument("--data", metavar="DIR", help="folder or file of the real data set")


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given on the command line, by their names in `Settings`."""
    named = {
        "recipe": arguments.recipe,
        "size": arguments.size,
        "epochs": arguments.epochs,
        "batch": arguments.batch,
        "learning_rate": arguments.lr,
        "accumulate": arguments.accumulate,
        "device": arguments.device,
        "data": None if arguments.data is None else str(Path(arguments.data)),
    }
    return {name: value for name, value in named.items() if value is not None}


def filled(settings: dict[str, Any]) -> Settings:
    """Return settings with the recipe's defaults; raise for an unknown recipe, precision, size or device."""
    from lowp.recipes.training import Settings

    return Settings(**settings).filled()
