"""A small GPT on bytes of text: tiny Shakespeare if it is given, else the documentation that Python contains.

The products of the linear layers and of attention compute in few bits; layer normalisation and softmax read and write
16 bits and compute in fp32; the cross-entropy is fp32. Gradients are clipped after they are unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lowp.recipes.classification import guesses
from lowp.recipes.data.text import pythons_text, read_passages, text_data
from lowp.recipes.networks.gpt import GPT
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adamw_where, one_cycle, tokens_of


def load(size: Size, path: Path | None) -> Data:
    """The user's text, or Python's own, in passages of the network's length."""
    length = size.options["length"]
    if path is not None:
        return read_passages(path, length)
    training, held, source = pythons_text(size.options["bytes"])
    return text_data(training, held, length, source)


def make_model(size: Size) -> nn.Module:
    """Layers, heads, width, length and dropout of the size."""
    return GPT(*(size.options[name] for name in ("layers", "heads", "width", "length", "dropout")))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of the next byte, averaged over all places."""
    text, following = batch
    return nn.functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """``bits_per_byte``, the share of bytes guessed (``accuracy``), and the cross-entropy."""
    measured = guesses((model(text).flatten(0, 1), following.flatten()) for text, following in batches)
    return {"bits_per_byte": measured["loss"] / math.log(2), **measured}


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether a weight decays: matrices, not biases and normalisations."""
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
    make_optimizer=partial(adamw_where, _decays, weight_decay=0.1, betas=(0.9, 0.95)),
    schedule=one_cycle,
    clip=1.0,
    unit="tokens",
    units=tokens_of,
)
