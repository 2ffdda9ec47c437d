"""Calls of the kernels on tensors and casts."""

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.numbers.packing import SIGNED
from lowp.kernels.numbers.philox import Draw, Seed, drawn, signed
from lowp.kernels.triton.device import casts, codes, counts, stochastic
from lowp.kernels.triton.launch import BLOCK, COUNTING_WARPS, ROUNDS, WIDE_BLOCK, launch, programs_for, run
from lowp.kernels.triton.plans import DTYPES, exact, is_direct, layout, plan


def quantize(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> None:
    """Write the values that `cast` makes of `x` into `out`, which may be `x`."""
    count = x.numel()
    if count == 0:
        return
    form, numbers = plan(cast, x.dtype)
    source = x.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(source)
    key, first = key_of(x, seed, form.random_bits > 0)
    skipped = first % 4
    end = count + skipped
    given = integers(source), integers(target), key, count, skipped, first - skipped, numbers
    traits = DTYPES[x.dtype], form, exact(form), end % 16 != 0
    launch(casts.quantize, x, end, WIDE_BLOCK if form.wide else BLOCK, *given, *traits)
    if target is not out:
        out.copy_(target)


def encode(x: Tensor, cast: Cast, seed: Seed, out: Tensor, packed: bool = False) -> int:
    """Write the codes of the values into `out`, optionally two per byte; return the number of NaNs without a code.

    Packed rows have an even number of codes of 4 bits, and the first code has an even logical index.
    """
    count = x.numel()
    if count == 0:
        return 0
    form, numbers = plan(cast, x.dtype)
    shape, places = layout(cast.element, form.wide)
    shape = shape._replace(packed=packed)
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    nans = torch.zeros((), dtype=torch.int32, device=x.device)
    key, first = key_of(x, seed, form.random_bits > 0)
    skipped = first % 4
    end, source = count + skipped, x.contiguous()
    given = integers(source), integers(target), key, nans, count, skipped, first - skipped, numbers, places
    traits = DTYPES[x.dtype], form, exact(form), shape, is_direct(form, shape), end % 16 != 0
    launch(codes.encode, x, end, WIDE_BLOCK if form.wide else BLOCK, *given, *traits)
    if target is not out:
        out.copy_(target)
    return int(x.isnan().sum()) if shape.nan == "none" and int(nans) else 0


def decode(raw: Tensor, format: FloatFormat | IntFormat, out: Tensor, packed: bool = False) -> None:
    """Write the value of every code into `out`, exactly; `packed`: two codes per byte."""
    count = out.numel()
    if count == 0:
        return
    shape, places = layout(format, False)
    shape = shape._replace(packed=packed)
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    arguments = (integers(raw.contiguous()), integers(target), count, places, DTYPES[out.dtype], shape, count % 16 != 0)
    launch(codes.decode, raw, count, BLOCK, *arguments)
    if target is not out:
        out.copy_(target)


def encode_packed(x: Tensor, cast: Cast, seed: Seed) -> tuple[Tensor, int] | None:
    """Return codes of 4 bits packed as by `packing.pack`, and the number of NaNs without a code.

    None if the codes have other widths or a row does not fill whole bytes.
    """
    if not _fills_bytes(cast.element, x.shape) or (isinstance(seed, Draw) and seed.first % 2):
        return None
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8, device=x.device)
    return out, encode(x, cast, seed, out, packed=True)


def decode_packed(packed: Tensor, format: FloatFormat | IntFormat, out: Tensor) -> bool:
    """Write the values of packed codes into `out`; return False if a row does not fill whole bytes."""
    if not _fills_bytes(format, out.shape) or packed.shape != (*out.shape[:-1], out.shape[-1] // 2):
        return False
    decode(packed, format, out, packed=True)
    return True


def _fills_bytes(format: FloatFormat | IntFormat, shape: torch.Size) -> bool:
    """Whether codes have 4 bits and rows fill whole bytes."""
    return format.bits == 4 and len(shape) > 0 and shape[-1] % 2 == 0


def signs(size: int, seed: Tensor | int, device: torch.device) -> Tensor:
    """Return the signs of a Hadamard transform of `size` numbers, a power of two from 4 on; see `numbers.hadamard`."""
    out = torch.empty(size, dtype=torch.float32, device=device)
    run(stochastic.signs, (1,), out, key_of(out, seed, True)[0], size)
    return out


def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the exponent histogram, maximum, sum of squares, zeros, NaNs and infinities."""
    x, count, rounds = x.contiguous(), x.numel(), 1 if x.is_cpu else ROUNDS
    partial = torch.zeros(programs_for(x, count, BLOCK * rounds), 264, dtype=torch.int64, device=x.device)
    if count:
        given = (integers(x), partial, count, DTYPES[x.dtype], True, count % 16 != 0, rounds)
        launch(counts.statistics, x, -(-count // rounds), BLOCK, *given, warps=COUNTING_WARPS)
    return merged(partial)


def merged(partial: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the combined results of the programs, in torch: sums, and one maximum."""
    sums = partial.sum(0)
    largest, squares = partial[:, 256].amax(), partial[:, 257].contiguous().view(torch.float64).sum()
    return sums[:256].contiguous(), largest.view(torch.float64), squares, sums[258], sums[259], sums[260]


def integers(x: Tensor) -> Tensor:
    """Return a tensor's memory viewed as integers of its width."""
    return x.detach().view(SIGNED[x.dtype.itemsize])


def key_of(x: Tensor, seed: Seed, draws: bool) -> tuple[Tensor, int]:
    """Return the seed as a tensor on x's device, and the logical index of x's first element."""
    if not draws:
        return integers(x), 0  # not read
    seed, first = drawn(seed)
    if isinstance(seed, Tensor):
        return seed.to(x.device), first
    return torch.full((), signed(seed), dtype=torch.int64, device=x.device), first
