"""A small GPT on bytes, of a text such as tiny Shakespeare or of Python's own documentation.

The products of linear layers and attention run in low precision; layer normalisation and softmax read and write 16
bits and compute in fp32; the cross-entropy is fp32. Gradients are unscaled before they are clipped.

The network is a transformer that predicts the next byte: Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019: normalisation before attention and MLP, learned positions, output weights shared with the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.classification import score_metrics
from lowp.recipes.data.text import pythons_text, read_passages, text_data
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adamw_where, one_cycle, tokens_of

# -- the network -------------------------------------------------------------------------------------------------------
BYTES = 256


class GPT(nn.Module):
    """A GPT on bytes: from int64 [N, T], T up to `length`, to scores of each next byte [N, T, 256]."""

    def __init__(self, layers: int, heads: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.normalise = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # the more layers, the smaller the initial weights of residual branches
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ".add" in name else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next byte at each position, [N, T, 256]."""
        x = self.drop(self.embed(text) + self.position(torch.arange(text.shape[1], device=text.device)))
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.normalise(x), self.embed.weight)


class Block(nn.Module):
    """A transformer block: attention and an MLP of four times the width, both with residual connections.

    `is_causal`: a position attends to those before it and to itself.
    """

    def __init__(self, heads: int, width: int, dropout: float, is_causal: bool = True) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.add_attention = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.add_perceptron = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.add_attention(self._attend(self.before_attention(x))))
        wide = nn.functional.gelu(self.widen(self.before_perceptron(x)))
        output: Tensor = x + self.drop(self.add_perceptron(wide))
        return output

    def _attend(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.query_key_value(x).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return attended.transpose(1, 2).reshape(count, length, width)


# -- the recipe --------------------------------------------------------------------------------------------------------
def load(size: Size, path: Path | None) -> Data:
    """Return passages of the user's text, or of Python's documentation, of the network's length."""
    length = size.options["length"]
    if path is not None:
        return read_passages(path, length)
    training, held, source = pythons_text(size.options["bytes"])
    return text_data(training, held, length, source)


def make_model(size: Size) -> nn.Module:
    """Return a GPT of this size."""
    return GPT(*(size.options[name] for name in ("layers", "heads", "width", "length", "dropout")))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the cross-entropy of the next byte, averaged over all positions."""
    text, following = batch
    return nn.functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``bits_per_byte``, ``accuracy`` (the share of correct bytes) and ``loss``, the cross-entropy."""
    metrics = score_metrics((model(text).flatten(0, 1), following.flatten()) for text, following in batches)
    return {"bits_per_byte": metrics["loss"] / math.log(2), **metrics}


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: to matrices, not to biases and normalisations."""
    return parameter.dim() > 1


GPT_RECIPE = Recipe(
    name="gpt",
    summary="small GPT: predicts the next byte of a text",
    source="Radford et al. 2019, Language Models are Unsupervised Multitask Learners; size of nanoGPT's Shakespeare",
    data="embedded: the documentation in Python's own library; --data DIR or FILE: a text (tiny Shakespeare, WikiText)",
    sizes={
        "cpu": Size(
            4,
            32,
            3e-3,
            366_432,
            {"layers": 3, "heads": 4, "width": 96, "length": 64, "dropout": 0.0, "bytes": 300_000},
        ),
        "full": Size(
            20,
            64,
            1e-3,
            10_844_160,
            {"layers": 6, "heads": 6, "width": 384, "length": 256, "dropout": 0.2, "bytes": 10_000_000},
        ),
    },
    metric=Metric("bits_per_byte", higher_is_better=False, share=False),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=partial(adamw_where, decays, weight_decay=0.1, betas=(0.9, 0.95)),
    schedule=one_cycle,
    clip=1.0,
    unit="tokens",
    units=tokens_of,
)
