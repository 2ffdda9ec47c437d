"""int16 under an exponent of a device: tensors and casts as the kernels' arguments, and what they found.

And Autoflex there: what the writes of a step do to a table, in one launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import IntFormat
from lowp.kernels.int16.cpu_int16 import exponent_bounds
from lowp.kernels.int16.mantissas import int16_element, readable
from lowp.kernels.triton.calls import integers, key_of
from lowp.kernels.triton.device import mantissas, predictions
from lowp.kernels.triton.launch import BLOCK, block_for, launch, run
from lowp.kernels.triton.plans import DTYPES, CastTraits, Numbers, exact, plan
from lowp.scaling import Autoflex

ENTRIES = 8  # of a program that observes: a step has some hundred of them, and each a window
WARPS = 8  # of a program: with four ptxas spills some forms
WORDS = 8  # of a record, int64
_FLAGS, _EXPONENT = 6, 7
# rounds fp32 numbers as integers of any size are rounded: larger ones have no fraction, and saturate alike
_WHOLE = IntFormat("whole", 24, symmetric=True)


class Own(NamedTuple):
    """How the exponent follows from a maximum."""

    offset: int  # from floor(log2 maximum); or the exponent, where that is fixed
    lowest: int
    highest: int


class Found(NamedTuple):
    """What was found of a tensor, on its device: views of one int32 tensor."""

    exponent: Tensor  # any where not all is finite
    told: Tensor  # the same, and NOT_FINITE there
    is_finite: Tensor
    all: Tensor


def rounding(cast: Cast) -> tuple[CastTraits, Numbers]:
    """Return the plan of a cast's rounding to integers."""
    form, numbers = plan(Cast(_WHOLE, cast.rounding, None, None, cast.random_bits), torch.float32)
    return exact(form), numbers


def own(cast: Cast) -> tuple[Own, bool]:
    """Return how a cast finds an exponent, and whether it is fixed."""
    if cast.scaling is not None and cast.scaling.exponent is not None:
        return Own(cast.scaling.exponent, 0, 0), True
    return Own(*exponent_bounds(cast)), False


def look(x: Tensor, cast: Cast, hint: Tensor | None = None, only_finite: bool = False) -> Found:
    """Return the exponent of a contiguous tensor of fp32 or 16 bits: `hint` where all of it is a mantissa under that.

    `only_finite`: infinities and NaNs count for nothing.
    """
    found = torch.zeros(8, dtype=torch.int32, device=x.device)
    form, is_fixed = own(cast)
    lowest = int16_element(cast).minimum
    _over(
        mantissas.look, x, integers(x), found if hint is None else hint, found, x.numel(), form,
        lowest, hint is not None, is_fixed, only_finite, DTYPES[x.dtype],
    )  # fmt: skip
    return Found(found[3], found[4], found[5], found)


def exact_under(x: Tensor, cast: Cast, hint: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return whether all of a contiguous tensor is in a cast's format, 0-d bool, and the exponent; any where not."""
    found = look(x, cast, hint)
    answer = torch.empty((), dtype=torch.bool, device=x.device)
    arguments = (integers(x), found.all, answer.view(torch.int8), x.numel(), int16_element(cast).minimum)
    _over(mantissas.look_again, x, *arguments, DTYPES[x.dtype])
    return answer, found.exponent


def convert(x: Tensor, cast: Cast, exponent: Tensor, seed: int | Tensor) -> Tensor:
    """Return a contiguous tensor's mantissas under an exponent, int32 and 0-d, rounded once and saturated."""
    out = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    form, numbers = rounding(cast)
    key, _ = key_of(x, seed, form.random_bits > 0)
    lowest = int16_element(cast).minimum
    arguments = (integers(x), out, exponent, key, x.numel(), numbers, lowest, DTYPES[x.dtype], form)
    _over(mantissas.convert, x, *arguments)
    return out


def begin(
    x: Tensor, entries: tuple[Tensor, Tensor, Tensor], index: int, when: Tensor | None, bounds: Tensor,
    guesses: Tensor, of_zeros: int, scratch: Tensor,
) -> None:  # fmt: skip
    """Let an entry of a table begin, in place, by the largest number of x, if it has not; see `FirstExponents`.

    entries: exponents and those before, int32, and whether they started, bool. scratch: int32 [2], zeros.
    """
    x = readable(x)
    exponents, before, started = entries
    size = len(bounds)
    flag = scratch if when is None else when.view(torch.int8)  # not looked at
    _over(
        mantissas.begin, x, integers(x), exponents, before, started.view(torch.int8), flag, bounds, guesses, scratch,
        x.numel(), index, size, of_zeros, when is not None, 1 << (size - 1).bit_length(), DTYPES[x.dtype],
    )  # fmt: skip


def write(
    x: Tensor, cast: Cast, exponents: Tensor, index: int, when: Tensor | None = None, otherwise: Tensor | None = None,
    row: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the values of x in fp32 under `exponents[index]`, what was seen, and the exponent.

    What was seen is a row of `lowp.kernels.int16.entries`: `row`, of zeros, if it is given.

    All on the device. Where `when`, 0-d bool, does not hold, the values are those of x, nothing was seen, and the
    exponent is `otherwise`, if given.
    """
    x = readable(x)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    record = torch.zeros(WORDS, dtype=torch.int64, device=x.device) if row is None else row
    flags, halves = record.view(torch.int8)[8 * _FLAGS :], record.view(torch.int32)
    form, numbers = rounding(cast)
    place = exponents if when is None else exponents[index] if otherwise is None else otherwise
    flag = flags if when is None else when.view(torch.int8)  # not looked at, as is the place then
    _over(
        mantissas.write, x, integers(x), integers(out), exponents, flag, place, record, flags, x.numel(), index,
        numbers, int16_element(cast).minimum, when is not None, DTYPES[x.dtype], form,
    )  # fmt: skip
    exponent = halves[2 * _EXPONENT]
    return out, record, exponent if row is None else exponent.clone()  # a row is forgotten when a step ends


def _over(kernel: Any, x: Tensor, *arguments: Any) -> None:
    """Run a kernel on all elements of x, in one program at least: the last one tells what was found."""
    launch(kernel, x, max(1, x.numel()), BLOCK, *arguments, warps=WARPS)


# -- Autoflex ----------------------------------------------------------------------------------------------------------


class Exponents(NamedTuple):
    """The numbers of a scaling by which an exponent follows from a maximum."""

    headroom: int
    warm_headroom: int
    lowest: int
    highest: int


class Writes(NamedTuple):
    """The entries that were written, and what was seen, by entry."""

    places: Tensor  # int32
    written: Tensor | None  # bool, of each of them; None where all of them count
    rows: Tensor  # int64, of all entries: see `lowp.kernels.int16.entries`
    is_result: Tensor  # bool
    faulty: Tensor  # bool


def observe(scaling: Autoflex, columns: Sequence[Tensor], seen: Writes) -> None:
    """Update a table in place by writes at different entries, and forget them; nothing is read on the host.

    `columns`: those of `AutoflexState` in order, the exponent of the previous write, and the counts raises_needed,
    raises_in_time, headroom_sum and measured; all have a number per entry.
    """
    count = len(seen.places)
    width = 1 << (scaling.window - 1).bit_length()
    block = block_for(seen.places, count, ENTRIES)
    results, faulty = seen.is_result.view(torch.int8), seen.faulty.view(torch.int8)
    written = results if seen.written is None else seen.written.view(torch.int8)  # not looked at then
    table = [one.view(torch.int8) if one.dtype is torch.bool else one for one in columns]
    form = Exponents(scaling.headroom, scaling.warm_headroom, scaling.min_exponent, scaling.max_exponent)
    run(
        predictions.observe, (-(-count // block),), seen.places, written, seen.rows, results, faulty, *table, count,
        scaling.limit, scaling.bits - 2, form, float(scaling.beta), float(scaling.gamma), seen.written is not None,
        scaling.adapt, scaling.window, width, width.bit_length() - 1, block,
    )  # fmt: skip
