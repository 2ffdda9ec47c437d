"""Products of bytes by bytes, summed exactly in int32: for inference, and the definition of those of int8 training.

The C++ library computes them. Without it, and if `lowp.kernels.use` selects another implementation, the torch code
below does. This code is the definition: the bits are the same on every machine and in every implementation.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.compat import private, widest_float
from lowp.errors import InvalidInput, Unavailable
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.choose.hardware import tiles_of_bytes
from lowp.kernels.packed.byte_rows import EIGHT, Activations, Bytes, matrix, numbered, on_cpu, own_range, to_bytes, up
from lowp.kernels.tracing import is_eager

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


def multiply(a: Bytes | Activations, b: Panels, bias: Tensor | None = None) -> Tensor:
    """Return a @ b.T (+ bias), fp32 [rows, n]: an exact int32 sum, rounded to fp32, times the product of the scales."""
    if isinstance(a, Activations):
        if uses_library() and b.memory.ndim == 4 and a.values.numel() and a.values.shape[1] == b.k:
            return _linear(a, b, bias)
        over = own_range(a.values, a.over) if isinstance(a.over, int) else a.over
        a = to_bytes(a.values, *over)
    rows, depth = a.payload.shape
    if depth != up(b.k, EIGHT) or a.highest > b.highest:
        raise InvalidInput(
            f"bytes of depth {depth} up to {a.highest} do not fit weights of {b.k} inputs for bytes up to {b.highest}"
        )
    if b.memory.ndim == 2 or not uses_library():
        sums = _torch_sums(a, b) if uses_library() else _defined_sums(a, b)
        result = sums.float() * (torch.tensor(a.scale, dtype=torch.float32, device="cpu") * b.scales[: b.n])
        return result if bias is None else result + bias.detach().float()
    bias = _padded(bias, b.scales.shape[0])
    out = torch.empty(rows, b.n, dtype=torch.float32, device="cpu")
    left, right, finish = (a.payload, rows, depth), (b.memory, b.ways, b.n), (b.scales, b.sums, None, bias, out)
    cpu.loaded().lowp_bytes_multiply(cpu.level(), *left, *right, a.scale, a.zero, *finish, torch.get_num_threads())
    return out


def multiply_codes(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.T of codes of int8 [m, k] and [n, k], whole numbers in fp32: the exact sums, rounded once to fp32.

    An infinity or a NaN counts as in fp32. Sums of `_EXACT` products are exact there in any order.
    """
    if is_eager(a) and a.is_cpu and multiplies_bytes() and math.isfinite(float(a.sum() + b.sum())):
        right = b.to(torch.int8)
        # of a depth of 1 torch misreads the strides of right.t(), both of which are 1 (2.13)
        right = right.t() if right.shape[1] > 1 else right.reshape(1, -1)
        return _int_mm(a.to(torch.int8), right).float()  # type: ignore[no-any-return]
    blocks = [a[:, at : at + _EXACT] @ b[:, at : at + _EXACT].t() for at in range(0, a.shape[1], _EXACT)]
    if len(blocks) == 1:
        return blocks[0]
    return sum(one.to(widest_float(a.device)) for one in blocks).float()  # type: ignore[union-attr]


_EXACT = (1 << 24) // (128 * 128)


def _linear(a: Activations, b: Panels, bias: Tensor | None) -> Tensor:
    """The product of activations that become bytes, in one call of the library."""
    x = numbered(on_cpu(a.values, "x"))
    scale, zero, highest = (0.0, 0, a.over) if isinstance(a.over, int) else a.over
    if highest > b.highest:
        raise InvalidInput(f"bytes up to {highest} do not fit weights for bytes up to {b.highest}")
    bias = _padded(bias, b.scales.shape[0])
    payload = torch.empty(len(x) * up(b.k, EIGHT), dtype=torch.uint8, device="cpu")
    out = torch.empty(x.shape[0], b.n, dtype=torch.float32, device="cpu")
    right, finish = (b.memory, b.ways, b.n), (b.scales, b.sums, bias, payload, out)
    cpu.loaded().lowp_bytes_linear(
        cpu.level(), *matrix(x), scale, zero, highest, *right, *finish, torch.get_num_threads()
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


def _padded(bias: Tensor | None, size: int) -> Tensor | None:
    if bias is None:
        return None
    x = numbered(bias.detach().float())
    return x if len(x) == size else torch.nn.functional.pad(x, (0, size - len(x)))
