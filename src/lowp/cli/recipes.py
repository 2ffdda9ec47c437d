"""List the recipes: networks of the literature, their sizes and data.

  lowp recipes
  lowp recipes digits
  lowp recipes module:NAME       a recipe of your own

With a name, one of them in full.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

from lowp.cli.options import OUTPUT, Option
from lowp.cli.output import print_json, print_table
from lowp.errors import counted
from lowp.recipes import RECIPES, get

if TYPE_CHECKING:
    from lowp.recipes.recipe import Recipe


OPTIONS = (Option("recipe", "the recipe to show in full", more={"nargs": "?"}), *OUTPUT)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one recipe."""
    if arguments.json:
        one = arguments.recipe
        print_json([_document(get(name)) for name in RECIPES] if one is None else _document(get(one)))
        return 0
    if arguments.recipe is not None:
        from lowp.report.terminal import console

        screen = console()
        screen.print(_full(get(arguments.recipe), screen.width), markup=False, soft_wrap=True)
        return 0
    rows = []
    for recipe in map(get, RECIPES):
        what = [recipe.summary, f"data: {recipe.data}", f"source: {recipe.source}"]
        sizes = [size + " (default)" * (size == recipe.default_size) for size in recipe.sizes]
        parameters = [f"{row.parameters:,}" for row in recipe.sizes.values()]
        rows.append([recipe.name, *("\n".join(lines) for lines in (what, sizes, parameters))])
    print_table(None, ("recipe", "what", "size", "parameters"), rows)
    return 0


def _document(recipe: Recipe) -> dict[str, Any]:
    named = ("name", "summary", "source", "data", "default_size")
    sized = ("epochs", "batch", "learning_rate", "parameters", "options")
    sizes = {name: {key: getattr(size, key) for key in sized} for name, size in recipe.sizes.items()}
    return {**{key: getattr(recipe, key) for key in named}, "metric": recipe.metric.name, "sizes": sizes}


def _full(recipe: Recipe, width: int) -> str:
    lines = [f"{recipe.name}: {recipe.summary}", f"  data    {recipe.data}", f"  source  {recipe.source}"]
    for name, size in recipe.sizes.items():
        options = ", ".join(f"{key} {value}" for key, value in size.options.items())
        default = ", the default" if name == recipe.default_size else ""
        lines.append(
            f"  {name:<7} {size.parameters:,} parameters, {counted(size.epochs, 'epoch')}, batch {size.batch}, "
            f"learning rate {size.learning_rate:g}{', ' * bool(options)}{options}{default}"
        )
    lines.append(f"  judged by {recipe.metric.name}")
    indent = " " * 10
    return "\n".join(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False) for line in lines)
