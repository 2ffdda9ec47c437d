"""Activations as rows of bytes over a range, and the windows of a convolution.

`byte_products` uses them. The C++ library computes them, or the torch code here, which is the definition.
"""

import math
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import Unavailable
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library

EIGHT = 8  # the depth of rows of bytes is a multiple of this, as in cpu/bytes.hpp


class Range(NamedTuple):
    """value = (byte - zero) * scale, bytes 0 to `highest`."""

    scale: float
    zero: int
    highest: int


class Activations(NamedTuple):
    """fp32 [rows, k], to be converted to bytes over a given range or over their own."""

    values: Tensor
    over: Range | int  # an int is the highest byte of the activations' own range


class Bytes(NamedTuple):
    """Activations: value = (payload - zero) * scale, of [rows, depth] bytes from 0 to `highest`."""

    payload: Tensor
    scale: float
    zero: int
    highest: int


# -- what the calls of the library share -------------------------------------------------------------------------------
def up(value: int, to: int) -> int:
    """Return the next multiple of `to`."""
    return -(-value // to) * to


def on_cpu(x: Tensor, what: str) -> Tensor:
    """Return the tensor itself. Raises Unavailable for a tensor on another device."""
    if x.device.type != "cpu":
        raise Unavailable(f"{what} is on {x.device}; the products of bytes, nibbles and signs run on a CPU")
    return x


def numbered(x: Tensor) -> Tensor:
    """Return a tensor whose rows are contiguous in memory, with its signs there: x itself, or a copy."""
    return (x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()).resolve_neg()


def matrix(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a `numbered` matrix as the library takes it: with its rows, columns, and row stride."""
    return x, *x.shape, x.stride(0)


# -- bytes ------------------------------------------------------------------------------------------------------------
def range_of(low: float, high: float, highest: int) -> Range:
    """Return the byte range that holds low .. high and exactly zero. Infinite or NaN bounds give a scale of NaN."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = array("f", [(high - low) / highest])[0]  # rounded to fp32
    if scale == 0 or not math.isfinite(scale):
        return Range(1.0 if scale == 0 else math.nan, 0, highest)
    return Range(scale, min(max(round(-low / scale), 0), highest), highest)


def own_range(x: Tensor, highest: int) -> Range:
    """Return the `range_of` the values of fp32 [rows, k] themselves."""
    if not x.numel():
        return Range(1.0, 0, highest)
    if not uses_library():
        low, high = torch.aminmax(x)
        return range_of(low.item(), high.item(), highest)
    x, found = numbered(x), array("f", (0.0, 0.0))
    cpu.loaded().lowp_bytes_extremes(cpu.level(), *matrix(x), found, torch.get_num_threads())
    lowest, largest = found
    return range_of(lowest, largest, highest)


def to_bytes(x: Tensor, scale: float, zero: int, highest: int) -> Bytes:
    """Round fp32 [rows, k] to bytes: clamp(round(x / scale) + zero, 0, highest), to nearest even; a NaN becomes 0.

    The depth is k rounded up to 8 and filled up with zeros (bytes of `zero`).
    """
    on_cpu(x, "x")
    if not uses_library():
        rounded = (x / scale).round().clamp(-zero, highest - zero).nan_to_num(nan=-zero)
        return Bytes(_in_rows(rounded, zero), scale, zero, highest)
    x, depth = numbered(x), up(x.shape[1], EIGHT)
    payload = torch.empty(x.shape[0], depth, dtype=torch.uint8, device="cpu")
    cpu.loaded().lowp_bytes_quantize(
        cpu.level(), *matrix(x), scale, zero, highest, depth, payload, torch.get_num_threads()
    )
    return Bytes(payload, scale, zero, highest)


def _in_rows(numbers: Tensor, zero: int) -> Tensor:
    """Return whole numbers [rows, k] plus `zero` as bytes, with rows filled up with `zero`."""
    rows, k = numbers.shape
    payload = torch.full((rows, up(k, EIGHT)), zero, dtype=torch.uint8, device="cpu")
    payload[:, :k] = (numbers.to(torch.int32) + zero).to(torch.uint8)
    return payload


def windows(
    x: Bytes,
    shape: tuple[int, int, int, int],
    geometry: dict[str, tuple[int, int]],
    taken: tuple[int, int] | None = None,
) -> tuple[Bytes, int, int]:
    """The windows of a convolution over bytes [batch, height, width, channels] as rows, and their height and width.

    `geometry` has kernel, stride, padding and dilation; outside of x lies zero. The depth is in the order kernel row,
    kernel column, channel; `taken` is the first channel and how many, if not all.
    """
    batch, height, width, channels = shape
    begin, count = taken or (0, channels)
    kernel, stride, padding, dilation = (geometry[name] for name in ("kernel", "stride", "padding", "dilation"))
    high, wide = (
        (size + 2 * pad - step * (reach - 1) - 1) // by + 1
        for size, pad, step, reach, by in zip((height, width), padding, dilation, kernel, stride, strict=True)
    )
    depth = up(kernel[0] * kernel[1] * count, EIGHT)
    rows = batch * high * wide
    if not uses_library():
        image = x.payload.reshape(batch, height, width, channels)[..., begin : begin + count]
        image = image.permute(0, 3, 1, 2).double()
        image = torch.nn.functional.pad(image, (padding[1],) * 2 + (padding[0],) * 2, value=x.zero)
        found = torch.nn.functional.unfold(image, kernel, dilation, 0, stride)
        found = found.reshape(batch, count, -1, found.shape[-1]).permute(0, 3, 2, 1).reshape(rows, -1)
        return x._replace(payload=_in_rows(found - x.zero, x.zero)), high, wide
    out = torch.empty(rows, depth, dtype=torch.uint8, device="cpu")
    sizes = [batch, height, width, channels, begin, count, *kernel, high, wide, *stride, *padding, *dilation, depth]
    cpu.loaded().lowp_bytes_windows(x.payload, sizes, x.zero, out, torch.get_num_threads())
    return x._replace(payload=out), high, wide
