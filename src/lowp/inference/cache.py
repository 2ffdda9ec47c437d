"""Keys and values of a generated text's earlier positions, kept in few bits and read as they are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowp import casts, kernels
from lowp.errors import InvalidInput
from lowp.formats import ScaledFormat
from lowp.kernels.packed.few_rows import FEW, StoredRows
from lowp.kernels.products import contract_packed

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class KeyValueCache:
    """Keys and values of up to `length` positions, layer by layer, and attention over them.

    `format`: ``fp32``, ``bf16``, ``fp16``, or one of 8 bits with a scale for each head and position (``int8``,
    ``e4m3fn@fp32/row``) or without (``e4m3fn``, ``e5m2``). Codes are multiplied as they are kept, by the products of
    few rows (`kernels.packed.few_rows`): queries with keys, and with the values the probabilities times their scales.
    """

    def __init__(self, length: int, format: str = "int8") -> None:
        self.cast, self.length, self.positions = casts.parse(format), length, 0
        scaled = self.cast.format if isinstance(self.cast.format, ScaledFormat) else None
        if str(self.cast) not in _DTYPES and (
            self.cast.element.bits != 8 or (scaled is not None and (scaled.scope.kind != "row" or scaled.affine))
        ):
            raise InvalidInput(
                f"a cache in {self.cast}: give fp32, bf16, fp16, or a format of 8 bits without a scale or with one a "
                "row, as int8 or e4m3fn@fp32/row"
            )
        self._is_plain = str(self.cast) in _DTYPES
        self._layers: dict[int, tuple[_Kept, _Kept]] = {}
        self._scales: dict[int, Tensor] = {}  # fp32 [keys and values, heads, positions]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales, of all positions that have room."""
        return sum(kept.nbytes for pair in self._layers.values() for kept in pair)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> tuple[_Kept, _Kept]:
        """Keep the keys and values of new positions, [N, heads, positions, size], without attention."""
        count, heads, new, size = key.shape
        if self.positions + new > self.length:
            raise InvalidInput(
                f"{self.positions + new} positions do not fit a cache of {self.length}: make it longer, or generate "
                "less"
            )
        if layer not in self._layers:
            room = (count * heads, self.length, size)
            scales = torch.zeros(2, *room[:2], dtype=torch.float32, device="cpu")
            self._scales[layer] = scales
            self._layers[layer] = _Kept(room, self, scales[0], False), _Kept(room, self, scales[1], True)
        both = torch.stack([key.detach(), value.detach()]).flatten(1, 2)  # encoded in one call
        codes = both if self._is_plain else kernels.encode(both.float(), self.cast)
        if not isinstance(codes, Tensor):
            self._scales[layer][:, :, self.positions : self.positions + new] = codes.scale
            codes = codes.payload
        for kept, some in zip(self._layers[layer], codes.unbind(), strict=True):
            kept.write(self.positions, some)
        return self._layers[layer]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the keys and values of new positions, and return their causal attention over all so far.

        Tensors are [N, heads, positions, size]. `advance` moves on when every layer has attended.
        """
        count, heads, new, size = query.shape
        keys, values = self.keep(layer, key, value)
        end = self.positions + new
        scores = keys.product(query.flatten(0, 1).float(), end) / math.sqrt(size)
        if new > 1:
            mask = torch.ones(new, end, dtype=torch.bool, device=query.device).tril(self.positions)
            scores = scores.masked_fill(~mask, -math.inf)
        found = values.product(scores.softmax(-1), end)
        return found.reshape(count, heads, new, size).to(query.dtype)

    def advance(self, count: int) -> None:
        """Go on by as many positions."""
        self.positions += count


class _Kept:
    """Keys [heads, positions, size], or values, whose positions come last, so that both are rows of a product."""

    def __init__(self, room: tuple[int, int, int], cache: KeyValueCache, scales: Tensor, is_value: bool) -> None:
        self._cast, self._is_value = cache.cast, is_value
        self._plain = _DTYPES.get(str(self._cast))
        heads, positions, size = room
        element = torch.uint8 if str(self._cast) != "int8" else torch.int8
        shape = (heads, size, positions) if is_value else room
        self._memory = torch.zeros(shape, dtype=self._plain or element, device="cpu")
        self._scales = scales
        self.nbytes = self._memory.nbytes + (self._scales.nbytes if self._cast.scaling is not None else 0)

    def write(self, begin: int, codes: Tensor) -> None:
        """Keep what is at some positions: numbers or codes [heads, new, size]."""
        end = begin + codes.shape[1]
        place = self._memory[:, :, begin:end] if self._is_value else self._memory[:, begin:end]
        place.copy_(codes.transpose(1, 2) if self._is_value else codes)

    def product(self, x: Tensor, end: int) -> Tensor:
        """Of queries with the keys of positions up to `end`, or of their probabilities with the values."""
        memory = self._memory[:, :, :end] if self._is_value else self._memory[:, :end]
        scaled = self._cast.scaling is not None
        if self._plain is torch.float32:
            return x @ memory.transpose(1, 2)
        scales = self._scales[:, :end, None] if scaled and not self._is_value else None
        element = None if self._plain else self._cast.element
        if scaled and self._is_value:
            x = x * self._scales[:, None, :end]
        weight = StoredRows(memory, memory.shape[2], element, scales)
        return torch.cat([contract_packed((some.contiguous(), weight)) for some in torch.split(x, FEW, 1)], 1)
