"""Products for inference with weights of 4 bits by fp32, and of signs by bytes or signs, in a fixed order.

The C++ library computes them; without it, and where `lowp.kernels.use` asks for another implementation, the lines of
torch below do, which are the definition: the bits are the same on every machine and in every implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.kernels import cpu
from lowp.kernels.byte_products import EIGHT, Bytes, chosen_level, library, on_cpu, up
from lowp.kernels.dispatch import uses_library

__all__ = ["Nibbles", "Signs", "multiply_nibbles", "multiply_signs", "pack_nibbles", "signs", "trits"]

BLOCK, FEW = 64, 8  # codes of a block, as in cpu/bytes.hpp; rows that are streamed past packed weights


class Nibbles(NamedTuple):
    """Weights [n, k] in 4-bit codes, two's complement or by a table of 16, with a scale a group; by `pack_nibbles`."""

    memory: Tensor  # uint8 [n, blocks of 64, 8 words, 4]
    scales: Tensor  # fp32 [n, groups]
    table: Tensor | None
    n: int
    k: int
    group: int


class Signs(NamedTuple):
    """Rows of +1 and -1 as bits (1 is -1), 64 to a word, and what each row is multiplied by.

    Ternary rows, of +1, 0 and -1, are half the sum of two such rows: one has +1 for 0, the other -1.
    """

    memory: Tensor  # int64 [rows, words]; of ternary rows all of one kind, then all of the other
    scales: Tensor  # fp32 [rows]
    length: int
    ternary: bool = False


# -- 4 bits -----------------------------------------------------------------------------------------------------------
def pack_nibbles(codes: Tensor, scales: Tensor, group: int, table: Tensor | None = None) -> Nibbles:
    """Codes 0 to 15 (int64 [n, k]) and a scale for every `group` (16, 32 or 64) of a row, ready for `multiply_nibbles`.

    `table` has the value of every code in fp32; without one a code is a number in two's complement.
    """
    n, k = on_cpu(codes, "the weight").shape
    if group not in (16, 32, 64):
        raise InvalidInput(f"scales for groups of {group}: give 16, 32 or 64")
    depth = up(k, BLOCK)
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
    rows = on_cpu(x, "x").shape[0]
    if rows > FEW or not uses_library():
        return torch.nn.functional.linear(x, nibble_values(w), bias)
    depth = w.memory.shape[1] * BLOCK
    padded = torch.nn.functional.pad(x, (0, depth - w.k)) if depth > w.k else x.contiguous()
    out = torch.empty(rows, w.n, device="cpu")
    bias = None if bias is None else bias.detach().float().contiguous()
    library().lowp_nibbles_multiply(
        chosen_level(level),
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
    return Signs(_words(on_cpu(x, "x") < 0), x.double().abs().mean(1).float(), x.shape[1])


def trits(numbers: Tensor, scales: Tensor) -> Signs:
    """Rows [rows, k] of whole numbers from -1 to 1 as ternary rows, and what each is multiplied by."""
    return Signs(_words(torch.cat((on_cpu(numbers, "x") < 0, numbers <= 0))), scales.float(), numbers.shape[1], True)


def multiply_signs(a: Bytes | Signs, b: Signs, bias: Tensor | None = None, level: int | None = None) -> Tensor:
    """Return a @ b.T (+ bias) in fp32, of signs or bytes by signs or ternary rows: counts of bits, exact, then scaled.

    A byte is the sum of its bits: bit i counts 2**i times the half of (sum of b - product of b with the bit as a sign).
    """
    if isinstance(a, Signs):
        if a.length != b.length:
            raise InvalidInput(f"rows of {a.length} signs do not fit rows of {b.length}")
        scales = a.scales[:, None] * b.scales
        result = _halved(_counted(a.memory, b, level), b).float() * scales
    else:
        rows = a.payload.shape[0]
        if a.payload.shape[1] != up(b.length, EIGHT):
            raise InvalidInput(f"bytes of depth {a.payload.shape[1]} do not fit rows of {b.length} signs")
        if rows > FEW and b.length * a.highest < 1 << 24:  # every sum of these is exact in fp32, in any order
            exact = (a.payload[:, : b.length].float() - a.zero) @ sign_values(b).t()
            result = exact * (torch.tensor(a.scale, device="cpu") * b.scales)
            return result if bias is None else result + bias.float()
        places = a.highest.bit_length()
        products = _counted(_planes(a, b.length, places), b, level).reshape(places, rows, -1)
        sums = _counted(torch.zeros(1, b.memory.shape[1], dtype=torch.int64, device="cpu"), b, level)[0]  # of +1 alone
        weights = (1 << torch.arange(places, dtype=torch.int32, device="cpu"))[:, None, None]
        exact = ((sums - products) // 2 * weights).sum(0, dtype=torch.int32) - a.zero * sums
        result = _halved(exact, b).float() * (torch.tensor(a.scale, device="cpu") * b.scales)
    return result if bias is None else result + bias.float()


def _halved(sums: Tensor, b: Signs) -> Tensor:
    """The products with ternary rows, of those with both of their rows."""
    if not b.ternary:
        return sums
    first, second = sums.chunk(2, -1)
    return (first + second) // 2


def _planes(a: Bytes, length: int, places: int) -> Tensor:
    """Every bit of the bytes as a row of words [places * rows, words]: of all rows the lowest first."""
    rows, depth = a.payload.shape
    if not uses_library():
        shifts = torch.arange(places, dtype=torch.uint8, device="cpu")[:, None, None]
        return _words((a.payload[None, :, :length] >> shifts & 1).reshape(places * rows, -1) != 0)
    planes = torch.empty(places * rows, up(length, 64) // 64, dtype=torch.int64, device="cpu")
    library().lowp_bits_planes(cpu.address(a.payload), rows, depth, length, places, cpu.address(planes))
    return planes


def _counted(a: Tensor, b: Signs, level: int | None) -> Tensor:
    """The products of rows of signs, in int32."""
    if not uses_library():
        left, right = (sign_values(Signs(one, b.scales, b.length)) for one in (a, b.memory))  # row by row
        return (left.double() @ right.double().t()).to(torch.int32)
    sums = torch.empty(a.shape[0], b.memory.shape[0], dtype=torch.int32, device="cpu")
    library().lowp_bits_multiply(
        chosen_level(level),
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
    padded = torch.nn.functional.pad(negative, (0, up(length, 64) - length))
    octets = padded.reshape(rows, -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device="cpu")
    return octets.sum(-1, dtype=torch.uint8).view(torch.int64)


def sign_values(s: Signs) -> Tensor:
    """The signs in fp32 [rows, length], or the numbers of ternary rows, without their scales."""
    bits = s.memory.view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    values = 1.0 - 2.0 * bits.reshape(s.memory.shape[0], -1)[:, : s.length].float()
    if not s.ternary:
        return values
    first, second = values.chunk(2)
    return (first + second) / 2
