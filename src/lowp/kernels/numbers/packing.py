"""Codes that fill no whole bytes, side by side: bit j * bits of a row is the lowest bit of its code j."""

import torch
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.numbers.philox import signed

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def fills_bytes(format: FloatFormat | IntFormat) -> bool:
    """Whether codes have whole bytes each, so that packed ones are the same."""
    return format.bits in (8, 16, 32, 64)


def pack(codes: Tensor, format: FloatFormat | IntFormat) -> Tensor:
    """Return the bits of every code in bytes, each row (last dimension) filled up to a byte with zeros.

    Codes of 8, 16, 32 or 64 bits are packed already. A 0-d tensor becomes one row of one code. Integers are two's
    complement; the one bit of a binary number is its sign: 0 for +1, 1 for -1.
    """
    bits = format.bits
    if fills_bytes(format):
        return codes
    codes = codes.reshape(1) if codes.ndim == 0 else codes
    codes = codes == -1 if bits == 1 else codes  # the sign
    if 8 % bits == 0:
        return _pack_bytes(codes, bits)
    single = as_integers(codes).unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1
    row = single.flatten(-2)
    row = torch.nn.functional.pad(row, (0, -row.shape[-1] % 8))
    row = row.reshape(*row.shape[:-1], row.shape[-1] // 8, 8)
    return (row << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def _pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes of 1, 2 or 4 bits, several to a byte."""
    places = codes.to(torch.uint8) & ((1 << bits) - 1)
    each = 8 // bits
    places = torch.nn.functional.pad(places, (0, -places.shape[-1] % each))
    found = places[..., ::each]
    for place in range(1, each):
        found = found | places[..., place::each] << (place * bits)
    return found


def unpack(packed: Tensor, format: FloatFormat | IntFormat, length: int | None = None) -> Tensor:
    """Return the codes of packed rows as int64; `length` of them a row, or as many as fit.

    Raises ValueError for rows that are too short, and for bytes of another dtype than uint8.
    """
    bits, length = format.bits, length_of(packed, format, length)
    if fills_bytes(format):
        return packed[..., :length] if packed.ndim else packed
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        single = packed.unsqueeze(-1) >> shifts & ((1 << bits) - 1)
        codes = single.flatten(-2)[..., :length].to(torch.int64)
    else:
        single = (packed.to(torch.int64).unsqueeze(-1) >> torch.arange(8, device=packed.device)) & 1
        row = single.flatten(-2)[..., : length * bits].reshape(*packed.shape[:-1], length, bits)
        codes = (row << torch.arange(bits, device=packed.device)).sum(-1)
    if bits == 1:
        return 1 - 2 * codes
    if isinstance(format, IntFormat):
        codes = codes - ((codes >> (bits - 1)) << bits)
    return codes


def length_of(packed: Tensor, format: FloatFormat | IntFormat, length: int | None) -> int:
    """Return how many codes of a packed row are asked for; raise ValueError where it does not hold them."""
    whole = fills_bytes(format)
    if not whole and (packed.dtype != torch.uint8 or packed.ndim == 0):
        raise InvalidInput(f"packed codes of {format} must be rows of torch.uint8, not {packed.ndim}-d {packed.dtype}")
    size = packed.shape[-1] if packed.ndim else 1
    fitting = size if whole else size * 8 // format.bits
    if length is not None and not 0 <= length <= fitting:
        raise InvalidInput(
            f"a row of {size * packed.element_size()} bytes holds {fitting} codes of {format}, not {length}"
        )
    return fitting if length is None else length


def as_integers(codes: Tensor) -> Tensor:
    """Return codes of any integer dtype as int64, whose low bits they are; torch computes little in unsigned dtypes."""
    if codes.dtype.is_signed or codes.dtype == torch.uint8:
        return codes.to(torch.int64)
    mask = signed((1 << 8 * codes.dtype.itemsize) - 1)
    return codes.view(SIGNED[codes.dtype.itemsize]).to(torch.int64) & mask


def wrapped(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return integer codes modulo the width of `dtype`, in `dtype`, signed or not."""
    return codes.to(SIGNED[dtype.itemsize]).view(dtype)


def code_dtype(element: FloatFormat | IntFormat) -> torch.dtype:
    """Return the smallest dtype of a code: unsigned for float formats, signed two's complement for integers."""
    is_signed = isinstance(element, IntFormat)
    if element.bits <= 8:
        return torch.int8 if is_signed else torch.uint8
    if element.bits <= 16:
        return torch.int16 if is_signed else torch.uint16
    if element.bits <= 32:
        return torch.int32 if is_signed else torch.uint32
    return torch.uint64
