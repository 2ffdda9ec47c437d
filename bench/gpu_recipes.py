"""The recipes that `gpu.py` trains: lowp's own at full size, with less data drawn, and a size `tiny` to try the lines.

A step does not depend on how many examples there are to choose from; what the full data take is 20 s on a slow host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowp.recipes import get
from lowp.recipes.recipe import Recipe, Size

EXAMPLES = {"rossmann": 847_400, "unet": 200, "bert": 24_732}  # to train on at full size: of an epoch


def _sized(name: str, less: dict[str, Any], tiny: Size) -> Recipe:
    """Return a recipe with its full size, of which some options are others, and a tiny one."""
    recipe = get(name)
    full = recipe.size("full")
    return replace(recipe, sizes={"full": replace(full, options={**full.options, **less}), "tiny": tiny})


# days beyond the six weeks that are held back
ROSSMANN = _sized("rossmann", {"drawn": (1115, 60)}, Size(1, 2, 0.003, 95_266, {"hidden": (16, 8), "drawn": (60, 50)}))
UNET = _sized(
    "unet",
    {"images": (40, 4)},
    Size(1, 2, 1e-3, 1_821, {"widths": (4, 8), "side": 20, "border": 8, "images": (4, 2)}),
)
BERT = _sized(
    "bert",
    {"drawn": 1500},
    Size(1, 2, 3e-5, 1_007_106, {"layers": 1, "width": 32, "heads": 2, "length": 24, "drawn": 60}),
)
