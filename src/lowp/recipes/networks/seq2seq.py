"""A recurrent encoder and a recurrent decoder with attention to the encoder's states.

Luong, Pham, Manning, "Effective Approaches to Attention-based Neural Machine Translation", 2015, arXiv 1508.04025:
global attention with the score "general" (equations 5 to 8), here with GRUs (Cho et al. 2014, arXiv 1406.1078).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Translator"]


class Translator(nn.Module):
    """Symbols, int64 [N, S] (0: padding), and the target [N, T] to scores of each next symbol, [N, T, symbols]."""

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
        """Return the scores of the symbol after each target symbol."""
        read, last = self.read(self.drop(self.embed_read(text)))
        states, _ = self.write(self.drop(self.embed_written(written)), last)
        match = torch.bmm(self.compare(states), read.transpose(1, 2))
        share = match.masked_fill((text == 0)[:, None, :], -1e4).softmax(dim=-1)
        found = torch.bmm(share.to(read.dtype), read)
        scores: Tensor = self.choose(self.drop(torch.tanh(self.combine(torch.cat([found, states], dim=-1)))))
        return scores
