"""A small GPT: a transformer that predicts the next byte of a text.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: normalisation before attention and MLP,
learned positions, output weights shared with the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["GPT"]

BYTES = 256


class GPT(nn.Module):
    """A GPT on bytes: from int64 [N, T], T up to `length`, to scores of each next byte [N, T, 256]."""

    def __init__(self, layers: int, heads: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(heads, width, dropout) for _ in range(layers))
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


class _Block(nn.Module):
    """A transformer block: causal attention and an MLP of four times the width, both with residual connections."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
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
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(count, length, width)
