"""A small GPT on bytes of text: tiny Shakespeare where it is given, else the documentation that Python carries.

The products of the linear layers and of attention compute in few bits; layer normalisation and softmax read and write
16 bits and compute in fp32; the cross-entropy is fp32. Gradients are clipped, after they are unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.data.text import pythons_text, read_passages, text_data
from lowp.recipes.networks.gpt import GPT
from lowp.recipes.recipe import Data, Metric, Recipe, Size, one_cycle, tokens_of


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
    summed, right, count = 0.0, 0, 0
    for text, following in batches:
        scores = model(text).float().flatten(0, 1)
        summed += float(nn.functional.cross_entropy(scores, following.flatten(), reduction="sum"))
        right += int((scores.argmax(1) == following.flatten()).sum())
        count += following.numel()
    mean = summed / count
    return {"bits_per_byte": mean / math.log(2), "accuracy": right / count, "loss": mean}


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW; matrices decay by 0.1, and biases and normalisations not at all."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


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
    make_optimizer=make_optimizer,
    schedule=one_cycle,
    clip=1.0,
    unit="tokens",
    units=tokens_of,
)
