"""The networks of the literature as recipes, trained and compared in any precision: `lowp recipes` lists them."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from lowp.errors import InvalidInput, UnknownName, unknown

if TYPE_CHECKING:
    from lowp.recipes.recipe import Recipe

# One row per recipe: its name and its module. A recipe is imported when it is used, so that a command does not load the
# dependencies of other networks.
RECIPES: dict[str, str] = {
    "digits": "lowp.recipes.digits:DIGITS",
    "digits-hard": "lowp.recipes.digits:DIGITS_HARD",
    "mnist": "lowp.recipes.classification:MNIST",
    "cifar10-mlp": "lowp.recipes.classification:CIFAR10_MLP",
    "resnet-20": "lowp.recipes.resnet:RESNET_20",
    "resnet-110": "lowp.recipes.resnet:RESNET_110",
    "resnet-50": "lowp.recipes.resnet:RESNET_50",
    "resnet-101": "lowp.recipes.resnet:RESNET_101",
    "alexnet": "lowp.recipes.alexnet:ALEXNET",
    "vit": "lowp.recipes.vit:VIT",
    "unet": "lowp.recipes.unet:UNET",
    "rossmann": "lowp.recipes.rossmann:ROSSMANN",
    "gpt": "lowp.recipes.gpt:GPT_RECIPE",
    "words": "lowp.recipes.words:WORDS",
    "bert": "lowp.recipes.bert:BERT",
    "seq2seq": "lowp.recipes.seq2seq:SEQ2SEQ",
    "ssd": "lowp.recipes.ssd:SSD_RECIPE",
    "faster-rcnn": "lowp.recipes.faster_rcnn:FASTER_RCNN",
}


def get(name: str) -> Recipe:
    """Return a recipe by name, or the user's own by ``module:NAME``. Raises UnknownName, with similar names."""
    if name not in RECIPES:
        if ":" in name:
            return _of_user(name)
        raise UnknownName(unknown("recipe", name, RECIPES) + "; or your own, as module:NAME")
    module, _, attribute = RECIPES[name].partition(":")
    recipe: Recipe = getattr(import_module(module), attribute)
    return recipe


def _of_user(spelled: str) -> Recipe:
    """Return the Recipe of this name in a user's module, or in a module of the present folder.

    Raises InvalidInput if the module or the name does not exist, or is not a Recipe.
    """
    from lowp.recipes.recipe import Recipe

    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    module, _, attribute = spelled.partition(":")
    try:
        recipe = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            f"recipe {spelled!r}: {error}. Your own is spelled module:NAME, the module in {folder} or on PYTHONPATH"
        ) from None
    if not isinstance(recipe, Recipe):
        raise InvalidInput(f"recipe {spelled!r} is {type(recipe).__name__}, not a lowp.recipes.recipe.Recipe")
    return recipe
