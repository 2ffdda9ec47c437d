"""A recurrent encoder and a recurrent decoder with attention to the encoder's states.

Luong, Pham, Manning, "Effective Approaches to Attention-based Neural Machine Translation", 2015, arXiv 1508.04025:
global attention with the score "general" (equations 5 to 8), here with GRUs (Cho et al. 2014, arXiv 1406.1078).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Translator"]


class Translator(nn.Module):
    """An encoder, a decoder and attention: from a text and a target to scores of each next symbol [N, T, symbols].

    The text is int64 [N, S] and the target int64 [N, T]; 0 is padding.
    """

    def __init__(self, symbols: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed_read = nn.Embedding(symbols, width, padding_idx=0)
        self.embed_written = nn.Embedding(symbols, width, padding_idx=0)
        between = dropout if layers > 1 else 0.0
        self.read = nn.GRU(width, width, layers, batch_first=True, dropout=between)
        self.write = nn.GRU(width, width, layers, batch_first=True, dropout=between)
        self.compare = nn.Linear(width, width, bias=False)
        self.combine = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        self.choose = nn.Linear(width, symbols)

    def forward(self, text: Tensor, written: Tensor) -> Tensor:
        """Return the scores of the symbol after each target symbol, [N, T, symbols]."""
        read, last = self.read(self.drop(self.embed_read(text)))
        states, _ = self.write(self.drop(self.embed_written(written)), last)
        logits = torch.bmm(self.compare(states), read.transpose(1, 2))
        weights = logits.masked_fill((text == 0)[:, None, :], -1e4).softmax(dim=-1)
        context = torch.bmm(weights.to(read.dtype), read)
        scores: Tensor = self.choose(self.drop(torch.tanh(self.combine(torch.cat([context, states], dim=-1)))))
        return scores
