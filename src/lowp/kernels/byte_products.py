"""Products for inference: bytes by bytes, summed exactly in int32.

The C++ library computes them; without it, and where `lowp.kernels.use` asks for another implementation, the lines of
torch below do, which are the definition: the bits are the same on every machine and in every implementation.
"""

from __future__ import annotations

import functools
import math
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import parse
from lowp.compat import private
from lowp.errors import InvalidInput, Unavailable
from lowp.kernels import bitwise, cpu, run
from lowp.kernels.dispatch import uses_library

__all__ = [
    "Activations",
    "ByteRows",
    "Bytes",
    "Panels",
    "Range",
    "multiply",
    "pack",
    "range_of",
    "repacked",
    "rows_in_bytes",
    "to_bytes",
    "unpacked",
    "weights_in_bytes",
    "windows",
]

_int_mm: Any = private("torch._int_mm")

PANEL, EIGHT, CHUNK = 16, 8, 32  # as in cpu/bytes.hpp
MOST_DEPTH = (1 << 31) // (255 * 128)  # elements whose products int32 holds, whatever they are


class Range(NamedTuple):
    """value = (byte - zero) * scale, bytes 0 to `highest`."""

    scale: float
    zero: int
    highest: int


class Activations(NamedTuple):
    """fp32 [rows, k], to become bytes over a range: one that was found before, or their own."""

    values: Tensor
    over: Range | int  # of their own the highest byte


class Bytes(NamedTuple):
    """Activations: value = (payload - zero) * scale, of [rows, depth] bytes from 0 to `highest`."""

    payload: Tensor
    scale: float
    zero: int
    highest: int


class ByteRows(NamedTuple):
    """Rows in format int8, each under its own scale: value = (payload - 128) * scale."""

    payload: Tensor  # uint8 [rows, depth]
    scales: Tensor  # fp32 [rows]


class Panels(NamedTuple):
    """int8 weights [n, k] as the byte product reads them, for activations up to `highest`; made by `pack`.

    The memory tells who multiplies it: four dimensions lowp's kernels, two torch's own product of bytes.
    """

    memory: Tensor  # int8 [n / 16, depth / 4, 16, 4], or [n, depth], filled up with zeros
    ways: Tensor  # uint8 [n / 16, depth / 32]
    sums: Tensor  # int32, of every column
    scales: Tensor  # fp32, of every column
    n: int
    k: int
    highest: int


def up(value: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-value // to) * to


def chosen_level(level: int | None) -> int:
    """The instruction set, as `lowp.kernels.cpu` numbers them: a test's, what was asked for, or -1, the best."""
    if level is not None:
        return level
    asked = cpu.asked()
    return cpu.INSTRUCTION_SETS.index(asked) if asked in cpu.INSTRUCTION_SETS else -1


def multiplies_bytes() -> bool:
    """Whether the processor reports tiles for products of bytes (AMX), for which torch has code.

    Then `pack` leaves the weights as `torch._int_mm` takes them: its sums are as exact. An instruction set that was
    asked for is lowp's own.
    """
    return not cpu.asked() and _reports_tiles()


@functools.cache
def _reports_tiles() -> bool:
    reported = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return bool(reported.get("amx_int8")) and has_onednn and torch.backends.cpu.get_cpu_capability() == "AVX512"


def on_cpu(x: Tensor, what: str) -> Tensor:
    """The tensor itself; raises Unavailable for one elsewhere."""
    if x.device.type != "cpu":
        raise Unavailable(f"{what} is on {x.device}; the products of bytes, nibbles and signs run on a CPU")
    return x


# -- bytes ------------------------------------------------------------------------------------------------------------
def range_of(low: float, high: float, highest: int) -> Range:
    """The bytes that hold low .. high, and zero exactly. Infinite or NaN bounds give a scale of NaN."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return Range(math.nan, 0, highest)
    low, high = min(low, 0.0), max(high, 0.0)
    scale = array("f", [(high - low) / highest])[0]  # rounded to fp32
    if scale == 0 or not math.isfinite(scale):
        return Range(1.0 if scale == 0 else math.nan, 0, highest)
    return Range(scale, min(max(round(-low / scale), 0), highest), highest)


def own_range(x: Tensor, highest: int, level: int | None = None) -> Range:
    """The `range_of` the numbers of fp32 [rows, k] themselves."""
    if not x.numel():
        return Range(1.0, 0, highest)
    if not uses_library():
        low, high = torch.aminmax(x)
        return range_of(low.item(), high.item(), highest)
    x, found = _rows(x), array("f", (0.0, 0.0))
    library().lowp_bytes_extremes(
        chosen_level(level), cpu.address(x), *x.shape, x.stride(0), found.buffer_info()[0], cpu.threads()
    )
    lowest, largest = found
    return range_of(lowest, largest, highest)


def _rows(x: Tensor) -> Tensor:
    """A matrix whose rows lie in memory number by number."""
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def to_bytes(x: Tensor, scale: float, zero: int, highest: int, level: int | None = None) -> Bytes:
    """Round fp32 [rows, k] to bytes: clamp(round(x / scale) + zero, 0, highest), to nearest even; a NaN becomes 0.

    The depth is k rounded up to 8 and filled up with zeros (bytes of `zero`).
    """
    rows, k = on_cpu(x, "x").shape
    depth = up(k, EIGHT)
    if not uses_library():
        rounded = (x / scale).round().clamp(-zero, highest - zero).nan_to_num(nan=-zero)
        payload = torch.full((rows, depth), zero, dtype=torch.uint8, device="cpu")
        payload[:, :k] = (rounded.to(torch.int32) + zero).to(torch.uint8)
        return Bytes(payload, scale, zero, highest)
    x = _rows(x)
    payload = torch.empty(rows, depth, dtype=torch.uint8, device="cpu")
    library().lowp_bytes_quantize(
        chosen_level(level),
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


MIDDLE = 128  # of the bytes of int8 rows
_INT8 = parse("int8")


def rows_in_bytes(x: Tensor, level: int | None = None) -> ByteRows | None:
    """fp32 [rows, k] as format int8 has them; None where a number is infinite or NaN."""
    found = _in_int8(x, MIDDLE, level)
    return None if found is None else ByteRows(*found)


def weights_in_bytes(weight: Tensor) -> Panels | None:
    """Weights fp32 [n, k] as format int8 has them, ready for `rows_in_bytes`; None where one is infinite or NaN."""
    found = _in_int8(weight, 0, None)
    return None if found is None else pack(found[0].view(torch.int8)[:, : weight.shape[1]], found[1], 255)


def _in_int8(x: Tensor, zero: int, level: int | None) -> tuple[Tensor, Tensor] | None:
    """The codes of format int8 plus `zero`, in bytes whose rows are filled up, and the scales of the rows."""
    rows, k = on_cpu(x, "x").shape
    depth = up(k, EIGHT)
    if not uses_library():
        if not bool(x.isfinite().all()):
            return None
        codes = run.encode_scaled(bitwise, x, _INT8, None, 0, False)
        payload = torch.full((rows, depth), zero, dtype=torch.uint8, device="cpu")
        payload[:, :k] = (codes.payload.to(torch.int32) + zero).to(torch.uint8)
        return payload, codes.scale
    x = _rows(x)
    payload = torch.empty(rows, depth, dtype=torch.uint8, device="cpu")
    scales = torch.empty(rows, device="cpu")
    finite = library().lowp_bytes_rows(
        chosen_level(level),
        cpu.address(x),
        rows,
        k,
        x.stride(0),
        zero,
        depth,
        cpu.address(payload),
        cpu.address(scales),
        cpu.threads(),
    )
    return (payload, scales) if finite else None


def pack(weight: Tensor, scales: Tensor, highest: int) -> Panels:
    """int8 weights [n, k] and a scale a row of them (n), ready for activations of 0 to `highest`."""
    n, k = on_cpu(weight, "the weight").shape
    if k > MOST_DEPTH:
        raise Unavailable(f"a product over {k} bytes may leave int32: {MOST_DEPTH} is the most")
    width, depth = up(n, PANEL), up(k, EIGHT)
    padded = torch.zeros(width, depth, dtype=torch.int8, device="cpu")
    padded[:n, :k] = weight
    scale = torch.zeros(width, device="cpu")
    scale[:n] = scales
    sums = padded.sum(1, dtype=torch.int32)
    if multiplies_bytes():
        return Panels(padded, torch.zeros(0, dtype=torch.uint8, device="cpu"), sums, scale, n, k, highest)
    ways = torch.full((width // PANEL, up(depth, CHUNK) // CHUNK), 2, dtype=torch.uint8, device="cpu")
    memory = padded.reshape(width // PANEL, PANEL, depth // 4, 4).transpose(1, 2).contiguous()
    if cpu.library() is not None and memory.numel():
        library().lowp_bytes_pack(
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
    memory = panels.memory
    if memory.ndim == 4:
        memory = memory.transpose(1, 2).reshape(memory.shape[0] * PANEL, -1)
    return memory[: panels.n, : panels.k]


def repacked(panels: Panels) -> Panels:
    """The same weights as this machine multiplies them."""
    if (panels.memory.ndim == 2) == multiplies_bytes():
        return panels
    return pack(unpacked(panels), panels.scales[: panels.n], panels.highest)


def multiply(
    a: Bytes | Activations | ByteRows, b: Panels, bias: Tensor | None = None, level: int | None = None
) -> Tensor:
    """Return a @ b.T (+ bias) in fp32 [rows, n]: an exact sum in int32, rounded to fp32, times the scales' product.

    Scales of rows are multiplied with afterwards.
    """
    if isinstance(a, ByteRows):
        result = multiply(Bytes(a.payload, 1.0, MIDDLE, 255), b, None, level).mul_(a.scales[:, None])
        return result if bias is None else result.add_(bias.detach().float())
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
        result = sums.float() * (torch.tensor(a.scale, device="cpu") * b.scales[: b.n])
        return result if bias is None else result + bias.detach().float()
    bias = None if bias is None else _padded(bias.detach().float(), b.scales.shape[0])
    out = torch.empty(rows, b.n, device="cpu")
    library().lowp_bytes_multiply(
        chosen_level(level),
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


def _linear(a: Activations, b: Panels, bias: Tensor | None, level: int | None) -> Tensor:
    """The product of activations that become bytes, in one call of the library."""
    x = _rows(on_cpu(a.values, "x"))
    scale, zero, highest = (0.0, 0, a.over) if isinstance(a.over, int) else a.over
    if highest > b.highest:
        raise InvalidInput(f"bytes up to {highest} do not fit weights for bytes up to {b.highest}")
    rows, k = x.shape
    bias = None if bias is None else _padded(bias.detach().float(), b.scales.shape[0])
    payload = torch.empty(rows * up(k, EIGHT), dtype=torch.uint8, device="cpu")
    out = torch.empty(rows, b.n, device="cpu")
    library().lowp_bytes_linear(
        chosen_level(level),
        cpu.address(x),
        rows,
        k,
        x.stride(0),
        scale,
        zero,
        highest,
        cpu.address(b.memory),
        cpu.address(b.ways),
        b.n,
        cpu.address(b.scales),
        cpu.address(b.sums),
        None if bias is None else cpu.address(bias),
        cpu.address(payload),
        cpu.address(out),
        cpu.threads(),
    )
    return out


def _defined_sums(a: Bytes, b: Panels) -> Tensor:
    """The sums in fp64, which holds them exactly."""
    return (a.payload[:, : b.k].double() - a.zero) @ unpacked(b).double().t()


def _torch_sums(a: Bytes, b: Panels) -> Tensor:
    """The sums in int32 by torch's product of signed bytes: larger ones go in less 128."""
    shift = 128 if a.highest > 127 else 0
    signed = (a.payload ^ 128 if shift else a.payload).view(torch.int8)
    sums: Tensor = _int_mm(signed, b.memory.t())[:, : b.n]
    return sums - (a.zero - shift) * b.sums[: b.n]


def _padded(x: Tensor, size: int) -> Tensor:
    return x.contiguous() if x.shape[0] == size else torch.nn.functional.pad(x, (0, size - x.shape[0]))


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
        out = torch.full((rows, depth), x.zero, dtype=torch.uint8, device="cpu")
        out[:, : found.shape[1]] = found.to(torch.uint8)
        return x._replace(payload=out), high, wide
    out = torch.empty(rows, depth, dtype=torch.uint8, device="cpu")
    sizes = (batch, height, width, channels, begin, count, *kernel, high, wide, *stride, *padding, *dilation, depth)
    numbers = array("q", sizes)
    library().lowp_bytes_windows(
        cpu.address(x.payload), numbers.buffer_info()[0], x.zero, cpu.address(out), cpu.threads()
    )
    return x._replace(payload=out), high, wide


def library() -> Any:
    """The C++ library, where `uses_library` has said that it serves."""
    found = cpu.library()
    assert found is not None
    return found
