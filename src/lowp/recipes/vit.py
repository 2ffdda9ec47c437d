"""A vision transformer: a picture is a sequence of patches.

The network is that of Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, arXiv 2010.11929, for images of 32x32;
the mean over the patches is classified, as in Beyer, Zhai, Kolesnikov 2022, arXiv 2205.01580. Its blocks are the GPT's,
without the causal mask.
"""

from functools import partial

import torch
from torch import Tensor, nn

from lowp.recipes.classification import DRAWN_SMALL, classifier, load_small
from lowp.recipes.gpt import Block, decays, initialise
from lowp.recipes.recipe import Size, adamw_where, built, one_cycle

SIDE = 32


class VisionTransformer(nn.Module):
    """A vision transformer, from float images [N, 3, 32, 32] to scores [N, classes]; `patch` pixels a side."""

    def __init__(self, layers: int, heads: int, width: int, patch: int, dropout: float, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(torch.empty((SIDE // patch) ** 2, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(heads, width, dropout, is_causal=False) for _ in range(layers)))
        self.normalise = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)
        initialise(self, layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [N, classes]."""
        patches = self.embed(images).flatten(2).transpose(1, 2)
        x = self.normalise(self.blocks(self.drop(patches + self.position)))
        scores: Tensor = self.classify(x.mean(1))
        return scores


_SMALL = {"layers": 3, "heads": 4, "width": 64, "patch": 4, "dropout": 0.0, "images": (2000, 500)}
_FULL = {"layers": 6, "heads": 6, "width": 192, "patch": 4, "dropout": 0.1, "images": (10_000, 2000)}

VIT = classifier(
    name="vit",
    summary="vision transformer for images of 32x32",
    source="Dosovitskiy et al. 2020, arXiv 2010.11929; classified as in Beyer et al. 2022, arXiv 2205.01580",
    data=DRAWN_SMALL,
    sizes={"cpu": Size(20, 50, 2e-3, 157_962, _SMALL), "full": Size(100, 128, 1e-3, 2_693_194, _FULL)},
    load=partial(load_small, padding=4),
    make_model=built(VisionTransformer, "layers", "heads", "width", "patch", "dropout"),
    make_optimizer=partial(adamw_where, decays, weight_decay=0.05),
    schedule=one_cycle,
    clip=1.0,
)
