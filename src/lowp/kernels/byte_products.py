"""Products for inference: bytes by bytes in int32, 4-bit weights by fp32, signs by signs. Exact, or in a fixed order.

The C++ library computes them; without it, and where `lowp.kernels.use` asks for another implementation, the lines of
torch below do, which are the definition: the bits are the same on every machine and in every implementation.
"""

from __future__ import annotations

import functools
import os
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.errors import InvalidInput, Unavailable
from lowp.kernels import cpu
from lowp.kernels.dispatch import uses_library

__all__ = ["Bytes", "Nibbles", "Panels", "Signs", "multiply", "pack", "pack_nibbles", "signs", "to_bytes", "windows"]

PANEL, EIGHT, CHUNK, BLOCK = 16, 8, 32, 64  # as in cpu/bytes.hpp
MOST_DEPTH = (1 << 31) // (255 * 128)  # elements whose products int32 holds, whatever they are


class Bytes(NamedTuple):
    """Activations: value = (payload - zero) * scale, of [rows, depth] bytes from 0 to `highest`."""

    payload: Tensor
    scale: float
    zero: int
    highest: int


class Panels(NamedTuple):
    """int8 weights [n, k] as the byte product reads them, for activations up to `highest`; made by `pack`."""

    memory: Tensor  # int8 [n / 16, depth / 4, 16, 4], filled up with zeros
    ways: Tensor  # uint8 [n / 16, depth / 32]
    sums: Tensor  # int32, of every column
    scales: Tensor  # fp32, of every column
    n: int
    k: int
    highest: int


class Nibbles(NamedTuple):
    """Weights [n, k] in 4-bit codes, two's complement or by a table of 16, with a scale a group; by `pack_nibbles`."""

    memory: Tensor  # uint8 [n, blocks of 64, 8 words, 4]
    scales: Tensor  # fp32 [n, groups]
    table: Tensor | None
    n: int
    k: int
    group: int


class Signs(NamedTuple):
    """Rows of +1 and -1 as bits (1 is -1), 64 to a word, and what each row is multiplied by."""

    memory: Tensor  # int64 [rows, words]
    scales: Tensor  # fp32 [rows]
    length: int


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


@functools.cache
def _level() -> int:
    """The instruction set, as `lowp.kernels.cpu` numbers them: -1 is the best."""
    chosen = os.environ.get("LOWP_CPU_ISA")
    return cpu.INSTRUCTION_SETS.index(chosen) if chosen in cpu.INSTRUCTION_SETS else -1


def _on_cpu(x: Tensor, what: str) -> Tensor:
    if x.device.type != "cpu":
        raise Unavailable(f"{what} is on {x.device}; the products of bytes, nibbles and signs run on a CPU")
    return x


# -- bytes ------------------------------------------------------------------------------------------------------------
def to_bytes(x: Tensor, scale: float, zero: int, highest: int, level: int | None = None) -> Bytes:
    """Round fp32 [rows, k] to bytes: clamp(round(x / scale) + zero, 0, highest), to nearest even; a NaN becomes 0.

    The depth is k rounded up to 8 and filled up with zeros (bytes of `zero`).
    """
    rows, k = _on_cpu(x, "x").shape
    depth = _up(k, EIGHT)
    if not uses_library():
        rounded = (x / scale).round().clamp(-zero, highest - zero).nan_to_num(nan=-zero)
        payload = torch.full((rows, depth), zero, dtype=torch.uint8, device="cpu")
        payload[:, :k] = (rounded.to(torch.int32) + zero).to(torch.uint8)
        return Bytes(payload, scale, zero, highest)
    x = x if x.stride(-1) == 1 or k < 2 else x.contiguous()
    payload = torch.empty(rows, depth, dtype=torch.uint8, device="cpu")
    _library().lowp_bytes_quantize(
        _level() if level is None else level,
        cpu.address(x),
        rows,
        k,
        x.stride(0),
        scale,
        zero,
        highest,
        depth,
        cpu.address(payload),
        cpu.threads(),
    )
    return Bytes(payload, scale, zero, highest)


def pack(weight: Tensor, scales: Tensor, highest: int) -> Panels:
    """int8 weights [n, k] and a scale a row of them (n), ready for activations of 0 to `highest`."""
    n, k = _on_cpu(weight, "the weight").shape
    if k > MOST_DEPTH:
        raise Unavailable(f"a product over {k} bytes may leave int32: {MOST_DEPTH} is the most")
    width, depth = _up(n, PANEL), _up(k, EIGHT)
    padded = torch.zeros(width, depth, dtype=torch.int8, device="cpu")
    padded[:n, :k] = weight
    scale = torch.zeros(width, device="cpu")
    scale[:n] = scales
    sums = padded.sum(1, dtype=torch.int32)
    ways = torch.full((width // PANEL, _up(depth, CHUNK) // CHUNK), 2, dtype=torch.uint8, device="cpu")
    memory = padded.reshape(width // PANEL, PANEL, depth // 4, 4).transpose(1, 2).contiguous()
    if cpu.library() is not None and memory.numel():
        _library().lowp_bytes_pack(
            cpu.address(padded),
            width,
            depth,
            depth,
            highest,
            cpu.address(memory),
            cpu.address(ways),
            cpu.address(sums),
            cpu.threads(),
        )
    return Panels(memory, ways, sums, scale, n, k, highest)


def unpacked(panels: Panels) -> Tensor:
    """The int8 weights [n, k]."""
    memory = panels.memory.transpose(1, 2)
    return memory.reshape(memory.shape[0] * PANEL, -1)[: panels.n, : panels.k]


def multiply(a: Bytes, b: Panels, bias: Tensor | None = None, level: int | None = None) -> Tensor:
    """Return a @ b.T (+ bias) in fp32 [rows, n]: an exact sum in int32, rounded to fp32, times the scales' product."""
    rows, depth = a.payload.shape
    if depth != _up(b.k, EIGHT) or a.highest > b.highest:
        raise InvalidInput(
            f"bytes of depth {depth} up to {a.highest} do not fit weights of {b.k} inputs for bytes up to {b.highest}"
        )
    bias = None if bias is None else _padded(bias.detach().float(), b.scales.shape[0])
    if not uses_library():
        sums = (a.payload[:, : b.k].double() - a.zero) @ unpacked(b).double().t()
        result = sums.float() * (torch.tensor(a.scale, device="cpu") * b.scales[: b.n])
        return result if bias is None else result + bias[: b.n]
    out = torch.empty(rows, b.n, device="cpu")
    _library().lowp_bytes_multiply(
        _level() if level is None else level,
        cpu.address(a.payload),
        rows,
        depth,
        cpu.address(b.memory),
        cpu.address(b.ways),
        b.n,
        a.scale,
        a.zero,
        cpu.address(b.scales),
        cpu.address(b.sums),
        None if bias is None else cpu.address(bias),
        cpu.address(out),
        cpu.threads(),
    )
    return out


def _padded(x: Tensor, size: int) -> Tensor:
    return x.contiguous() if x.shape[0] == size else torch.nn.functional.pad(x, (0, size - x.shape[0]))


def windows(x: Bytes, shape: tuple[int, int, int, int], geometry: dict[str, tuple[int, int]]) -> tuple[Bytes, int, int]:
    """The windows of a convolution over bytes [batch, height, width, channels] as rows, and their height and width.

    `geometry` has kernel, stride, padding and dilation; outside of x lies zero. The depth is in the order kernel row,
    kernel column, channel.
    """
    batch, height, width, channels = shape
    kernel, stride, padding, dilation = (geometry[name] for name in ("kernel", "stride", "padding", "dilation"))
    high, wide = (
        (size + 2 * pad - step * (reach - 1) - 1) // by + 1
        for size, pad, step, reach, by in zip((height, width), padding, dilation, kernel, stride, strict=True)
    )
    depth = _up(kernel[0] * kernel[1] * channels, EIGHT)
    rows = batch * high * wide
    if not uses_library():
        image = x.payload.reshape(batch, height, width, channels).permute(0, 3, 1, 2).double()
        image = torch.nn.functional.pad(image, (padding[1],) * 2 + (padding[0],) * 2, value=x.zero)
        found = torch.nn.functional.unfold(image, kernel, dilation, 0, stride)
        found = found.reshape(batch, channels, -1, found.shape[-1]).permute(0, 3, 2, 1).reshape(rows, -1)
        out = torch.full((rows, depth), x.zero, dtype=torch.uint8, device="cpu")
        out[:, : found.shape[1]] = found.to(torch.uint8)
        return x._replace(payload=out), high, wide
    out = torch.empty(rows, depth, dtype=torch.uint8, device="cpu")
    sizes = (batch, height, width, channels, 0, channels, *kernel, high, wide, *stride, *padding, *dilation, depth)
    numbers = array("q", sizes)
    _library().lowp_bytes_windows(
        cpu.address(x.payload), numbers.buffer_info()[0], x.zero, cpu.address(out), cpu.threads()
    )
    return x._replace(payload=out), high, wide


# -- 4 bits -----------------------------------------------------------------------------------------------------------
def pack_nibbles(codes: Tensor, scales: Tensor, group: int, table: Tensor | None = None) -> Nibbles:
    """Codes 0 to 15 (int64 [n, k]) and a scale for every `group` (16, 32 or 64) of a row, ready for `multiply_nibbles`.

    `table` has the value of every code in fp32; without one a code is a number in two's complement.
    """
    n, k = _on_cpu(codes, "the weight").shape
    if group not in (16, 32, 64):
        raise InvalidInput(f"scales for groups of {group}: give 16, 32 or 64")
    depth = _up(k, BLOCK)
    padded = torch.nn.functional.pad(codes, (0, depth - k))
    words = padded.reshape(n, depth // BLOCK, 8, 8).transpose(2, 3)  # [.., word, place]
    memory = (words[..., 0::2] | words[..., 1::2] << 4).to(torch.uint8).contiguous()
    missing = depth // group - scales.shape[1]
    return Nibbles(memory, torch.nn.functional.pad(scales.float(), (0, missing)).contiguous(), table, n, k, group)


def nibble_values(w: Nibbles) -> Tensor:
    """The weights in fp32 [n, k]."""
    codes = torch.arange(16, device="cpu")
    values = (codes - ((codes >> 3) << 4)).float() if w.table is None else w.table
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)  # of a byte, the low half first
    unscaled = torch.nn.functional.embedding(w.memory.int(), pairs).flatten(-2)
    grouped = unscaled.transpose(2, 3).reshape(w.n, -1, w.group) * w.scales[..., None]
    return grouped.reshape(w.n, -1)[:, : w.k]


def multiply_nibbles(x: Tensor, w: Nibbles, bias: Tensor | None = None, level: int | None = None) -> Tensor:
    """Return x @ w.T (+ bias) in fp32, of x fp32 [rows, k]; few rows stream the weights as they are packed.

    Many rows, and other implementations than the C++ library, multiply the values of the weights.
    """
    rows = _on_cpu(x, "x").shape[0]
    if rows > 8 or not uses_library():
        return torch.nn.functional.linear(x, nibble_values(w), bias)
    depth = w.memory.shape[1] * BLOCK
    padded = torch.nn.functional.pad(x, (0, depth - w.k)) if depth > w.k else x.contiguous()
    out = torch.empty(rows, w.n, device="cpu")
    bias = None if bias is None else bias.detach().float().contiguous()
    _library().lowp_nibbles_multiply(
        _level() if level is None else level,
        cpu.address(padded),
        rows,
        cpu.address(w.memory),
        None if w.table is None else cpu.address(w.table),
        cpu.address(w.scales),
        w.n,
        depth // BLOCK,
        w.group,
        None if bias is None else cpu.address(bias),
        cpu.address(out),
        cpu.threads(),
    )
    return out


# -- signs ------------------------------------------------------------------------------------------------------------
def signs(x: Tensor) -> Signs:
    """Rows [rows, k] as their signs (-1 for x < 0, else +1) and their mean magnitudes, as format binary has them."""
    return Signs(_words(_on_cpu(x, "x") < 0), x.double().abs().mean(1).float(), x.shape[1])


def multiply_signs(a: Bytes | Signs, b: Signs, bias: Tensor | None = None, level: int | None = None) -> Tensor:
    """Return a @ b.T (+ bias) in fp32, of signs or bytes by signs: sums are counts of bits, exact, then scaled.

    A byte is the sum of its bits: bit i counts 2**i times the half of (sum of b - product of b with the bit as a sign).
    """
    if isinstance(a, Signs):
        if a.length != b.length:
            raise InvalidInput(f"rows of {a.length} signs do not fit rows of {b.length}")
        scales = a.scales[:, None] * b.scales
        result = _counted(a.memory, b, level).float() * scales
    else:
        rows = a.payload.shape[0]
        if a.payload.shape[1] != _up(b.length, EIGHT):
            raise InvalidInput(f"bytes of depth {a.payload.shape[1]} do not fit rows of {b.length} signs")
        if rows > 8 and b.length * a.highest < 1 << 24:  # every sum of these is exact in fp32, in any order
            exact = (a.payload[:, : b.length].float() - a.zero) @ sign_values(b).t()
            result = exact * (torch.tensor(a.scale, device="cpu") * b.scales)
            return result if bias is None else result + bias.float()
        places = a.highest.bit_length()
        bits = (
            a.payload[None, :, : b.length] >> torch.arange(places, dtype=torch.uint8, device="cpu")[:, None, None] & 1
        )
        products = _counted(_words(bits.reshape(places * rows, -1) != 0), b, level).reshape(places, rows, -1)
        sums = _counted(torch.zeros(1, b.memory.shape[1], dtype=torch.int64, device="cpu"), b, level)[
            0
        ]  # of +1 everywhere
        weights = (1 << torch.arange(places, dtype=torch.int32, device="cpu"))[:, None, None]
        exact = ((sums - products) // 2 * weights).sum(0, dtype=torch.int32) - a.zero * sums
        result = exact.float() * (torch.tensor(a.scale, device="cpu") * b.scales)
    return result if bias is None else result + bias.float()


def _counted(a: Tensor, b: Signs, level: int | None) -> Tensor:
    """The products of rows of signs, in int32."""
    if not uses_library():
        left, right = (sign_values(Signs(one, b.scales, b.length)) for one in (a, b.memory))
        return (left.double() @ right.double().t()).to(torch.int32)
    sums = torch.empty(a.shape[0], b.memory.shape[0], dtype=torch.int32, device="cpu")
    _library().lowp_bits_multiply(
        _level() if level is None else level,
        cpu.address(a),
        a.shape[0],
        cpu.address(b.memory),
        b.memory.shape[0],
        a.shape[1],
        b.length,
        cpu.address(sums),
        cpu.threads(),
    )
    return sums


def _words(negative: Tensor) -> Tensor:
    """Rows of truth as bits, 64 to an int64."""
    rows, length = negative.shape
    padded = torch.nn.functional.pad(negative, (0, _up(length, 64) - length))
    octets = padded.reshape(rows, -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device="cpu")
    return octets.sum(-1, dtype=torch.uint8).view(torch.int64)


def sign_values(s: Signs) -> Tensor:
    """The signs in fp32 [rows, length], without their scales."""
    bits = s.memory.view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    return 1.0 - 2.0 * bits.reshape(s.memory.shape[0], -1)[:, : s.length].float()


def _library() -> Any:
    found = cpu.library()
    assert found is not None  # `uses_library` has said so
    return found
