"""A feed-forward network on a shop's daily sales: 22 embedded categories and 16 numbers.

Embeddings are looked up in fp32 and concatenated with the normalised numbers; the linear layers run in low precision.
It is an example of a network with little arithmetic: the published run on a V100 was 7 % slower in mixed precision,
since the casts cost more time than the products save. (The program of that measurement reshapes the embeddings such
that rows of a batch are mixed; here they are not.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.data.rossmann import CATEGORIES, NUMBERS, drawn_tables, read_tables, sales_data
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adam, one_cycle

# The embedding length of each column of CATEGORIES, in their order; the sum is 199.
LENGTHS = (80, 4, 3, 6, 10, 2, 10, 10, 3, 3, 3, 9, 4, 6, 15, 9, 4, 4, 3, 3, 4, 4)


class SalesNetwork(nn.Module):
    """A network from categories int64 [N, 22] and numbers float [N, 16] to the logarithm of sales [N].

    With hidden layers of 1000 and 500 it has 811,618 parameters: 91,585 in the embeddings, 32 in the normalisation of
    the numbers, 720,001 in the linear layers and their normalisations.
    """

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embed = nn.ModuleList(
            nn.Embedding(count, length) for count, length in zip(CATEGORIES.values(), LENGTHS, strict=True)
        )
        self.drop = nn.Dropout(0.04)
        self.normalise = nn.BatchNorm1d(len(NUMBERS))
        first, second = hidden
        self.layers = nn.Sequential(
            nn.Linear(sum(LENGTHS) + len(NUMBERS), first),
            nn.ReLU(),
            nn.BatchNorm1d(first),
            nn.Dropout(0.001),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.BatchNorm1d(second),
            nn.Dropout(0.01),
        )
        self.output = nn.Linear(second, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """Return the logarithm of sales, float [N]."""
        vectors = [embed(categories[:, index]) for index, embed in enumerate(self.embed)]
        features = torch.cat([self.drop(torch.cat(vectors, dim=1)), self.normalise(numbers)], dim=1)
        output: Tensor = self.output(self.layers(features)).squeeze(1)
        return output


def load(size: Size, path: Path | None) -> Data:
    """Return the competition's tables if a path is given, otherwise tables drawn with their statistics."""
    return sales_data(read_tables(path) if path is not None else drawn_tables(*size.options["drawn"]))


def make_model(size: Size) -> nn.Module:
    """Return a network with torch's initialisation, small initial embeddings, and an output bias of 8.8.

    8.8 is about the mean logarithm of sales; with a bias of 0 the first epochs only learn this constant.
    """
    network = SalesNetwork(size.options["hidden"])
    for embed in network.embed:
        for vectors in embed.parameters():
            nn.init.normal_(vectors, std=0.05)
    nn.init.constant_(network.output.bias, 8.8)
    return network


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the mean squared error of the logarithm of sales."""
    categories, numbers, target = batch
    return nn.functional.mse_loss(model(categories, numbers).float(), target)


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``rmspe``, the root mean square relative error of sales (the metric of the competition), and ``loss``."""
    relative_squares = squares = 0.0
    count = 0
    for categories, numbers, target in batches:
        error = model(categories, numbers).float() - target
        squares += float(error.square().sum())
        relative_squares += float(error.exp().sub(1).square().sum())
        count += len(target)
    return {"rmspe": (relative_squares / count) ** 0.5, "loss": squares / count}


ROSSMANN = Recipe(
    name="rossmann",
    summary="feed-forward network with embeddings: a shop's daily sales",
    source="Guo and Berkhahn 2016, arXiv 1604.06737; sizes as in A. Bilogur's guide to mixed precision, 2020",
    data="generated with the statistics of the real tables; --data DIR: Rossmann store sales (train.csv, store.csv)",
    sizes={
        "cpu": Size(10, 512, 0.01, 118_618, {"hidden": (100, 50), "drawn": (100, 300)}),
        "full": Size(20, 512, 0.003, 811_618, {"hidden": (1000, 500), "drawn": (1115, 942)}),
    },
    classes=None,
    metric=Metric("rmspe", higher_is_better=False, share=False),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=adam,
    schedule=one_cycle,
)
