"""Quantized: a tensor as packed codes and their shared scales. Data only; `lowp.dequantize` gives the values."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Quantized:
    """A tensor encoded by `lowp.encode` in a format with a shared scale: value = element * scale (* outer).

    `payload` holds the elements: codes (uint8, uint16) of a float element, two's complement (int8, int16) of an integer
    element; with `length` set, bit-packed uint8 whose rows hold `length` elements.
    `scale` holds one scale a group, in the group's shape (tensor: 0-d; row: x.shape[:-1]; channel: x.shape[:1]; block:
    the last dimension counts blocks). fp32 scales are float32 values; e8m0 and other float formats are codes; powers of
    two are their exponents: a 0-d int32 for scope tensor, else uint8 or uint16 above the smallest exponent.
    `outer` is the fp32 scale of the whole tensor (nvfp4); `zero_point` is subtracted from the elements (affine).
    `dtype` is the dtype of the encoded tensor and of the result of `dequantize`.
    """

    payload: Tensor
    scale: Tensor
    cast: Cast
    outer: Tensor | None = None
    zero_point: Tensor | None = None
    dtype: torch.dtype = torch.float32
    length: int | None = None

    def __post_init__(self) -> None:
        if self.cast.scaling is None:
            raise InvalidInput(f"{self.cast} has no shared scale: store its codes in a plain tensor")

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        if self.length is None:
            return self.payload.shape
        return torch.Size((*self.payload.shape[:-1], self.length))

    @property
    def device(self) -> torch.device:
        """Where the payload is."""
        return self.payload.device

    @property
    def nbytes(self) -> int:
        """Bytes of payload, scales and zero points together."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Quantized:
        """Return the same on another device. For another dtype, dequantize and convert the values."""
        if isinstance(device, torch.dtype):
            raise InvalidInput(
                f"a Quantized can be moved to a device, not to {device}: convert the result of lowp.dequantize"
            )
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def detach(self) -> Quantized:
        """Return the same outside of autograd (codes have no gradient, a given scale may)."""
        return self._map(Tensor.detach)

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by the names of the fields."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _map(self, function: Any) -> Quantized:
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"Quantized({self.cast}, {shape}, {self.nbytes} bytes, {self.dtype}, {self.device})"
