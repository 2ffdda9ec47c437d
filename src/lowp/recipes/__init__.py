"""The networks of the literature as recipes, trained and compared in any precision: `lowp recipes` lists them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lowp.errors import UnknownName, unknown

if TYPE_CHECKING:
    from lowp.recipes.recipe import Recipe

# A row a recipe: its name, and where it is. A recipe is imported when it is used, so that one command does not load
# what another network needs.
RECIPES: dict[str, str] = {
    "digits": "lowp.recipes.digits:DIGITS",
    "digits-hard": "lowp.recipes.digits:DIGITS_HARD",
    "mnist": "lowp.recipes.mnist:MNIST",
    "cifar10-mlp": "lowp.recipes.cifar_mlp:CIFAR10_MLP",
    "resnet-20": "lowp.recipes.resnet:RESNET_20",
    "resnet-110": "lowp.recipes.resnet:RESNET_110",
    "resnet-50": "lowp.recipes.resnet:RESNET_50",
    "resnet-101": "lowp.recipes.resnet:RESNET_101",
    "alexnet": "lowp.recipes.alexnet:ALEXNET",
    "unet": "lowp.recipes.unet:UNET",
    "rossmann": "lowp.recipes.rossmann:ROSSMANN",
    "gpt": "lowp.recipes.gpt:GPT_RECIPE",
    "bert": "lowp.recipes.bert:BERT",
    "seq2seq": "lowp.recipes.seq2seq:SEQ2SEQ",
    "ssd": "lowp.recipes.ssd:SSD_RECIPE",
    "faster-rcnn": "lowp.recipes.faster_rcnn:FASTER_RCNN",
}


def get(name: str) -> Recipe:
    """Return a recipe by name; raises UnknownName with the near names."""
    if name not in RECIPES:
        raise UnknownName(unknown("recipe", name, RECIPES))
    module, _, attribute = RECIPES[name].partition(":")
    recipe: Recipe = getattr(import_module(module), attribute)
    return recipe
