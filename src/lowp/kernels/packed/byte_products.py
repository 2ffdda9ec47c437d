"""Products for inference: bytes by bytes, summed exactly in int32.

The C++ library computes them. Without it, and if `lowp.kernels.use` selects another implementation, the torch code
below does. This code is the definition: the bits are the same on every machine and in every implementation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import private
from lowp.errors import InvalidInput, Unavailable
from lowp.kernels import cpu
from lowp.kernels.casts import cpu_groups
from lowp.kernels.casts.functions import encode
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.choose.hardware import tiles_of_bytes
from lowp.kernels.int16.integer import matmul_exact
from lowp.kernels.packed.byte_rows import (
    EIGHT,
    MIDDLE,
    Activations,
    ByteRows,
    Bytes,
    matrix,
    numbered,
    on_cpu,
    own_range,
    rows_in_int8,
    to_bytes,
    up,
)

__all__ = [
    "Panels",
    "RowCodes",
    "encoded",
    "multiply",
    "multiply_codes",
    "pack",
    "repacked",
    "unpacked",
    "weights_in_bytes",
]

_int_mm: Any = private("torch._int_mm")

PANEL, CHUNK = 16, 32  # as in cpu/bytes.hpp
MOST_DEPTH = (1 << 31) // (255 * 128)  # number of products whose sum int32 always holds


class Panels(NamedTuple):
    """int8 weights [n, k] in the layout of the byte product, for activations up to `highest`; made by `pack`.

    The layout tells which code multiplies it: four dimensions lowp's kernels, two torch's own product of bytes.
    """

    memory: Tensor  # int8 [n / 16, depth / 4, 16, 4], or [n, depth], filled up with zeros
    ways: Tensor  # uint8 [n / 16, depth / 32]
    sums: Tensor  # int32, of every column
    scales: Tensor  # fp32, of every column
    n: int
    k: int
    highest: int


def multiplies_bytes() -> bool:
    """Whether the processor has tiles for products of bytes (AMX), for which torch has code.

    Then `pack` leaves the weights in the layout of `torch._int_mm`, whose sums are equally exact. If an instruction set
    is selected, lowp's own kernels are used.
    """
    return not cpu.asked() and tiles_of_bytes()


def pack(weight: Tensor, scales: Tensor, highest: int) -> Panels:
    """Return int8 weights [n, k] and one scale per row [n], packed for activations of 0 to `highest`."""
    n, k = on_cpu(weight, "the weight").shape
    if k > MOST_DEPTH:
        raise Unavailable(f"a product over {k} bytes may leave int32: {MOST_DEPTH} is the most")
    width, depth = up(n, PANEL), up(k, EIGHT)
    padded = torch.zeros(width, depth, dtype=torch.int8, device="cpu")
    padded[:n, :k] = weight
    scale = torch.zeros(width, dtype=torch.float32, device="cpu")
    scale[:n] = scales
    sums = padded.sum(1, dtype=torch.int32)
    if multiplies_bytes():
        return Panels(padded, torch.zeros(0, dtype=torch.uint8, device="cpu"), sums, scale, n, k, highest)
    ways = torch.full((width // PANEL, up(depth, CHUNK) // CHUNK), 2, dtype=torch.uint8, device="cpu")
    memory = padded.reshape(width // PANEL, PANEL, depth // 4, 4).transpose(1, 2).contiguous()
    if cpu.library() is not None and memory.numel():
        cpu.loaded().lowp_bytes_pack(*matrix(padded), 1, highest, memory, ways, sums, torch.get_num_threads())
    return Panels(memory, ways, sums, scale, n, k, highest)


def weights_in_bytes(weight: Tensor) -> Panels | None:
    """Weights fp32 [n, k] as format int8 has them, ready for `rows_in_bytes`; None where one is infinite or NaN."""
    found = rows_in_int8(weight, 0, None)
    return None if found is None else pack(found[0].view(torch.int8)[:, : weight.shape[1]], found[1], 255)


def unpacked(panels: Panels) -> Tensor:
    """Return the int8 weights [n, k]."""
    memory = panels.memory
    if memory.ndim == 4:
        memory = memory.transpose(1, 2).reshape(memory.shape[0] * PANEL, -1)
    return memory[: panels.n, : panels.k]


def repacked(panels: Panels) -> Panels:
    """Return the same weights in the layout of this machine."""
    if (panels.memory.ndim == 2) == multiplies_bytes():
        return panels
    return pack(unpacked(panels), panels.scales[: panels.n], panels.highest)


def multiply(
    a: Bytes | Activations | ByteRows, b: Panels, bias: Tensor | None = None, level: int | None = None
) -> Tensor:
    """Return a @ b.T (+ bias) in fp32 [rows, n]: an exact int32 sum, rounded to fp32, times the product of the scales.

    Scales of rows are multiplied afterwards.
    """
    row_scales = None
    if isinstance(a, ByteRows):
        row_scales, a = a.scales, Bytes(a.payload, 1.0, MIDDLE, 255)
    if isinstance(a, Activations):
        if uses_library() and b.memory.ndim == 4 and a.values.numel() and a.values.shape[1] == b.k:
            return _linear(a, b, bias, level)
        over = own_range(a.values, a.over, level) if isinstance(a.over, int) else a.over
        a = to_bytes(a.values, *over, level)
    rows, depth = a.payload.shape
    if depth != up(b.k, EIGHT) or a.highest > b.highest:
        raise InvalidInput(
            f"bytes of depth {depth} up to {a.highest} do not fit weights of {b.k} inputs for bytes up to {b.highest}"
        )
    if b.memory.ndim == 2 or not uses_library():
        sums = _torch_sums(a, b) if uses_library() else _defined_sums(a, b)
        result = sums.float() * (torch.tensor(a.scale, dtype=torch.float32, device="cpu") * b.scales[: b.n])
        result = result if row_scales is None else result.mul_(row_scales[:, None])
        return result if bias is None else result + bias.detach().float()
    bias = None if bias is None else _padded(bias.detach().float(), b.scales.shape[0])
    out = torch.empty(rows, b.n, dtype=torch.float32, device="cpu")
    left, right, finish = (a.payload, rows, depth), (b.memory, b.ways, b.n), (b.scales, b.sums, row_scales, bias, out)
    cpu.loaded().lowp_bytes_multiply(cpu.level(level), *left, *right, a.scale, a.zero, *finish, torch.get_num_threads())
    return out


class RowCodes(NamedTuple):
    """A matrix in int8, one scale per row: value = payload * scale."""

    payload: Tensor  # int8 [rows, k]
    scales: Tensor  # fp32 [rows]

    @property
    def values(self) -> Tensor:
        """The numbers in fp32."""
        return self.payload.float().mul_(self.scales[:, None])


def encoded(x: Tensor, cast: Cast, seed: int | Tensor = 0) -> RowCodes | None:
    """Return fp32 [rows, k] in a cast to int8 with a scale per row; None where a number is infinite or NaN."""
    x = on_cpu(x, "x").contiguous()
    if not math.isfinite(float(x.sum())) and not bool(x.isfinite().all()):  # a sum that overflows means a second look
        return None
    if uses_library() and (known := cpu_groups.encode_groups(x, cast, seed, False)) is not None:
        return RowCodes(known[0], known[1].reshape(-1))
    found = encode(x, cast, seed=seed)
    return RowCodes(found.payload, found.scale.reshape(-1))


def multiply_codes(a: RowCodes, b: Tensor, scales: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return a @ b.T of codes a [m, k] and int8 b [n, k], in fp32 [m, n].

    An exact int32 sum, rounded to fp32, times the scale of b's row (if any), times that of a's row, plus bias [n]: each
    rounded once. The neighbours in b's memory may be those along k or along n.
    """
    (m, k), n = a.payload.shape, b.shape[0]
    if k > MOST_DEPTH:
        raise Unavailable(f"a product over {k} bytes may leave int32: {MOST_DEPTH} is the most")
    way = (cpu.asked() or cpu.available()[-1]) if uses_library() else ""
    if not (m and n and k) or not way:
        result = (a.payload.double() @ b.double().t()).float()
    elif multiplies_bytes():
        result = _int_mm(a.payload, b.t())
    elif way == "avx512":
        return _by_bytes(a, b, scales, bias)
    else:  # without VNNI products of int16 are faster
        sums = matmul_exact(a.payload.short(), b.short(), transpose_b=True, dtype=torch.float32)
        result = sums.values
    return _scaled(result, a.scales, scales, bias)


def _scaled(result: Tensor, rows: Tensor, columns: Tensor | None, bias: Tensor | None) -> Tensor:
    if result.dtype is torch.int32:  # in the same memory
        result = result.view(torch.float32).copy_(result)
    result = result if columns is None else result.mul_(columns)
    result = result.mul_(rows[:, None])
    return result if bias is None else result.add_(bias.detach().float())


def _by_bytes(a: RowCodes, b: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `multiply_codes` by unsigned bytes (AVX512-VNNI)."""
    (m, k), n = a.payload.shape, b.shape[0]
    width, depth, threads = up(n, PANEL), up(k, EIGHT), torch.get_num_threads()
    panels = torch.empty(width * depth, dtype=torch.int8, device="cpu")
    sums = torch.empty(width, dtype=torch.int32, device="cpu")
    line, step = b.stride() if 1 in b.stride() else (k, 1)
    b = b if 1 in b.stride() else b.contiguous()
    library = cpu.loaded()
    library.lowp_bytes_pack(b, n, k, line, step, 0, panels, None, sums, threads)
    shifted = (a.payload ^ -128).view(torch.uint8)
    shifted = shifted if k == depth else torch.nn.functional.pad(shifted, (0, depth - k), value=MIDDLE)
    by = torch.ones(n, dtype=torch.float32, device="cpu") if scales is None else scales
    out = torch.empty(m, n, dtype=torch.float32, device="cpu")
    bias = None if bias is None else _padded(bias.detach().float(), width)
    given = shifted, m, depth, panels, _NO_WAYS, n, 1.0, MIDDLE, _padded(by, width), sums, a.scales, bias, out
    library.lowp_bytes_multiply(cpu.level(), *given, threads)
    return out


_NO_WAYS = bytes(1)  # where all products of bytes are summed in one way


def _linear(a: Activations, b: Panels, bias: Tensor | None, level: int | None) -> Tensor:
    """The product of activations that become bytes, in one call of the library."""
    x = numbered(on_cpu(a.values, "x"))
    scale, zero, highest = (0.0, 0, a.over) if isinstance(a.over, int) else a.over
    if highest > b.highest:
        raise InvalidInput(f"bytes up to {highest} do not fit weights for bytes up to {b.highest}")
    bias = None if bias is None else _padded(bias.detach().float(), b.scales.shape[0])
    payload = torch.empty(x.shape[0] * up(b.k, EIGHT), dtype=torch.uint8, device="cpu")
    out = torch.empty(x.shape[0], b.n, dtype=torch.float32, device="cpu")
    right, finish = (b.memory, b.ways, b.n), (b.scales, b.sums, bias, payload, out)
    cpu.loaded().lowp_bytes_linear(
        cpu.level(level), *matrix(x), scale, zero, highest, *right, *finish, torch.get_num_threads()
    )
    return out


def _defined_sums(a: Bytes, b: Panels) -> Tensor:
    """Return the sums in fp64, which holds them exactly."""
    return (a.payload[:, : b.k].double() - a.zero) @ unpacked(b).double().t()


def _torch_sums(a: Bytes, b: Panels) -> Tensor:
    """Return the sums in int32 by torch's product of signed bytes; larger bytes are reduced by 128 first."""
    shift = 128 if a.highest > 127 else 0
    signed = (a.payload ^ 128 if shift else a.payload).view(torch.int8)
    sums: Tensor = _int_mm(signed, b.memory.t())[:, : b.n]
    return sums - (a.zero - shift) * b.sums[: b.n]


def _padded(x: Tensor, size: int) -> Tensor:
    return x.contiguous() if x.shape[0] == size else torch.nn.functional.pad(x, (0, size - x.shape[0]))
