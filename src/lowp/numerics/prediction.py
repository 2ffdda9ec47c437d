"""The effect of a number format on a tensor, from the tensor's spectrum: arithmetic on counts, without the tensor.

Float formats are judged directly, a format with one scale under that for the tensor's largest number, and formats
whose blocks share a scale by the blocks that were counted. Without these, and for rows, the scale of the whole tensor
is a bound: each group's own scale is smaller or equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lowp import casts
from lowp.casts import Cast, doubles
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, Format, IntFormat, PowerOfTwo, ScaledFormat
from lowp.numerics.blocks import RATIOS, SIGNIFICANDS, Blocks, midpoints
from lowp.numerics.spectrum import LOWEST_UPDATE, LOWEST_WEIGHT, PARTS, ROWS, Spectrum, Updates, place_of

_BIAS = 127
_EXPONENTS = np.arange(256) - _BIAS
# where each bin begins, as a multiple of 2^exponent, and the mean square of numbers spread evenly over it
_STARTS = 1 + np.arange(PARTS) / PARTS
_MEAN_SQUARES = ((_STARTS + 1 / PARTS) ** 3 - _STARTS**3) * PARTS / 3
# the mean square, in ulps, of the error of a number that needs so many bits more than the format has
_ERROR_OF_BITS = np.array([0.0, 1 / 4, *(1 / 12 - 1 / (3 * 4.0**bits) for bits in range(2, 24))])
_PLACES = 8  # of scales in an octave
_ROOM = 3  # powers of two
_SMALLEST, _LARGEST = -100, 40  # of loss scales: fp32 has a reciprocal, `LossScale` a ceiling
MOST_FLUSHED = 1e-3  # of the numbers that are not zero: the bound that the window of loss scales keeps


@dataclass(frozen=True)
class Effect:
    """The effect of a cast on a tensor. Shares are of the finite nonzero numbers, 0 to 1.

    `signal_to_noise` is in dB, infinite if every number is kept exactly. `is_bound`: scales belong to groups whose
    maxima are not recorded, so that the tensor itself fares at least as well.
    """

    flushed: float
    subnormal: float
    overflow: float
    signal_to_noise: float
    largest: float
    maximum: float
    is_bound: bool = False

    @property
    def overflows(self) -> bool:
        """Whether any number is rounded beyond the largest of the format."""
        return self.overflow > 0

    @property
    def error(self) -> float:
        """The mean square error, as a share of the mean square."""
        return math.pow(10, -self.signal_to_noise / 10)


@dataclass(frozen=True)
class _Grid:
    """A format seen as a grid: spacing 2^(max(e, lowest) - precision + 1), a largest number, nothing below `flush`.

    `ties`: numbers at `flush` itself are halfway between zero and the smallest number, and go to zero, which is even.
    """

    precision: int
    lowest: int
    maximum: float
    overflow_from: float
    flush: float
    fixed: bool = False
    ties: bool = True


@lru_cache(maxsize=512)
def _grid(format: FloatFormat | IntFormat) -> _Grid:
    if isinstance(format, IntFormat):
        top = float(format.maximum)
        return _Grid(format.bits, format.bits - 1, top, top + 0.5, 0.5, fixed=True)
    ulp = math.ldexp(1.0, format.max_exponent - format.mantissa_bits)
    flush = format.smallest / 2 if format.subnormals else format.smallest_normal
    top = format.maximum + ulp / 2
    return _Grid(format.precision, format.min_exponent, format.maximum, top, flush, ties=format.subnormals)


def effect(seen: Spectrum, to: str | Cast | Format, scale: float = 1.0, blocks: Blocks | None = None) -> Effect:
    """Return the effect of a cast on a tensor first multiplied by `scale`, as gradients are by the loss scale.

    `blocks` are those in which the cast reads the tensor, if its format has blocks and they were counted.
    """
    format = casts.parse(to).format
    if seen.nonzero == 0:
        return Effect(0.0, 0.0, 0.0, math.inf, 0.0, _maximum(format))
    bound = False
    if isinstance(format, ScaledFormat):
        if blocks is not None:
            return _in_blocks(blocks, to if isinstance(to, Cast) else Cast(format), seen.maximum * scale)
        bound = format.scope.kind != "tensor" or format.outer is not None
        scale, format = scale * _shared_scale(seen.maximum * scale, format), format.element
    return replace(_on_grid(seen, _grid(format), scale), is_bound=bound)


def _in_blocks(blocks: Blocks, cast: Cast, largest: float) -> Effect:
    """The effect of a cast whose blocks share a scale; `largest` is that of the tensor.

    A number is taken to be anywhere in its bin, however large its block is beside others. What a scale cuts off counts
    as error, not as overflow. The rule 4/6 takes the better of two scales, if4 of two elements: this is one of them.
    """
    format = cast.format
    assert isinstance(format, ScaledFormat)
    grid, (tops, of_tops) = _grid(format.element), _tops(blocks, cast, largest)
    ratios = midpoints()
    quotient = (ratios.flatten()[:, None] * tops).clip(1e-30)
    spacing = np.sqrt(_squared_spacing(np.floor(np.log2(quotient)), grid))
    down = np.floor(quotient / spacing)
    is_stochastic = cast.rounding.is_stochastic
    kept = np.minimum((down if is_stochastic else np.round(quotient / spacing)) * spacing, grid.maximum)
    error, flushed = np.square(1 - kept / quotient), kept == 0.0
    if is_stochastic:
        up = quotient / spacing - down
        inside = quotient < grid.maximum
        error = np.where(inside, up * (1 - up) * np.square(spacing / quotient), error)
        flushed = np.where(inside, flushed * (1 - up), 0.0)
    small = (quotient < math.ldexp(1.0, grid.lowest)) * float(not grid.fixed) - flushed
    shares = blocks.ratios

    def mean(what: NDArray[np.float64], row: int) -> float:
        return float(shares[row] @ what.reshape(RATIOS, -1, len(tops)).mean(1) @ of_tops[row])

    noise = mean(error, 1)
    ratio = -10 * math.log10(noise) if noise else math.inf
    is_bound = format.other is not None or (cast.scaling is not None and cast.scaling.rule == "4/6")
    return Effect(mean(flushed, 0), max(mean(small, 0), 0.0), 0.0, ratio, float(tops.max()), grid.maximum, is_bound)


def _tops(blocks: Blocks, cast: Cast, largest: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the largest numbers of blocks are in units of their scales, and how many blocks: fp64 [n], [2, n]."""
    format = cast.format
    assert isinstance(format, ScaledFormat)
    element, highest = format.element, _maximum(format.element)
    if format.has_powers_of_two:
        heads = 1 + (np.arange(2 * SIGNIFICANDS) + 0.5) / (2 * SIGNIFICANDS)
        halved = np.array([doubles(Fraction(head), cast) for head in heads])
        return heads * 2.0**element.max_exponent / (1 + halved), blocks.significands.repeat(2, 1) / 2
    if not isinstance(format.scale, FloatFormat) or format.scale.bits > 16:
        return np.array([highest]), np.ones((2, 1))
    # a scale of few bits is rounded, too, and without an outer one is normal; the largest of a block is taken to be
    # anywhere in its octave
    grid, shares = _grid(format.scale), blocks.below
    most = grid.maximum if format.outer is not None else largest / highest
    octaves = np.arange(shares.shape[1], dtype=np.float64)[:, None]
    scales = most * np.exp2(-octaves - (np.arange(_PLACES) + 0.5) / _PLACES + (octaves > 0) / 2)
    spacing = np.sqrt(_squared_spacing(np.floor(np.log2(scales)), grid))
    smallest = 0.0 if format.outer is not None else format.scale.smallest_normal
    rounded = np.clip(np.round(scales / spacing) * spacing, smallest, grid.maximum)
    tops = highest * np.divide(scales, rounded, out=np.zeros_like(scales), where=rounded > 0)
    return tops.flatten(), (shares / _PLACES).repeat(_PLACES, 1)


def _on_grid(seen: Spectrum, grid: _Grid, scale: float) -> Effect:
    total = seen.nonzero
    counts = seen.bins.astype(np.float64).reshape(256, PARTS)
    below = _count_flushed(seen, counts, grid, scale)
    small = _count_below(counts, math.ldexp(1.0, grid.lowest) / scale)
    above = total - _count_below(counts, grid.overflow_from / scale)
    largest = seen.maximum * scale
    above = max(above, 1.0) if largest >= grid.overflow_from else 0.0
    noise = _noise(seen, counts, grid, scale)
    energy = seen.sum_squares * scale * scale
    ratio = math.inf if noise == 0 else 10 * math.log10(energy / noise) if energy else -math.inf
    small = max(small - below, 0.0) if not grid.fixed else 0.0
    return Effect(below / total, small / total, above / total, ratio, largest, grid.maximum)


def _count_flushed(seen: Spectrum, counts: NDArray[np.float64], grid: _Grid, scale: float) -> float:
    """How many numbers a grid flushes at a scale; of those at its limit itself, a power of two, `powers` tells."""
    limit = grid.flush / scale
    place = place_of(limit)
    at = int(seen.powers[int(place) // PARTS]) if grid.ties and place % PARTS == 0 else 0
    return _count_below(counts, limit) + at


def _count_below(counts: NDArray[np.float64], limit: float) -> float:
    """Return how many numbers are below a limit, assuming an even distribution in the bin that contains the limit."""
    flat, place = counts.flatten(), place_of(limit)
    return float(flat[: int(place)].sum() + flat[int(place)] * (place % 1))


def _noise(seen: Spectrum, counts: NDArray[np.float64], grid: _Grid, scale: float) -> float:
    """The energy of what rounding changes: of the spacing where numbers are, of what is flushed, of what overflows."""
    exponent = _EXPONENTS.astype(np.float64) + math.log2(scale)
    octave = np.floor(exponent)
    mean_square = np.exp2(2 * exponent)[:, None] * _MEAN_SQUARES
    flush, top = _shares_below(exponent, grid.flush), _shares_below(exponent, grid.overflow_from)
    flushed = counts * flush
    over = counts * (1 - top)
    kept = np.maximum(counts - flushed - over, 0)
    spacing = _squared_spacing(octave, grid)
    missing = np.maximum(grid.lowest - octave, 0)  # bits that a subnormal number has fewer
    error = _error_share(seen, grid, missing.astype(int), scale)
    rounded = float((kept.sum(1) * spacing * error).sum())
    lost = float((flushed * mean_square).sum())
    root = np.exp2(exponent)[:, None] * (_STARTS + 0.5 / PARTS)
    cut = float((over * np.maximum(root - grid.maximum, 0) ** 2).sum())
    return rounded + lost + cut


def _shares_below(exponent: NDArray[np.float64], limit: float) -> NDArray[np.float64]:
    """Return, for each bin, the share of its width that is below a limit."""
    with np.errstate(over="ignore"):
        at = (limit / np.exp2(exponent))[:, None]
    shares: NDArray[np.float64] = np.clip(at - _STARTS, 0.0, 1 / PARTS) * PARTS
    return shares


def _error_share(seen: Spectrum, grid: _Grid, missing: NDArray[np.int64], scale: float) -> NDArray[np.float64]:
    """By octave the mean square error in ulps: 1/12, and less where numbers need few bits, such as 1.0 and 0.5."""
    if scale != 2.0 ** round(math.log2(scale)):
        return np.full(256, 1 / 12)
    shares = seen.significant[1:] / max(int(np.sum(seen.significant[1:])), 1)
    result = np.empty(256)
    known: dict[int, float] = {}
    for row in range(256):
        held = max(grid.precision - int(missing[row]), 0)
        if held not in known:
            extra = np.arange(1, 25) - held
            known[held] = float((shares * _ERROR_OF_BITS[np.clip(extra, 0, 23)]).sum())
        result[row] = known[held]
    return result


def _shared_scale(largest: float, format: ScaledFormat) -> float:
    """Return the factor that maps a tensor's largest number to the largest element."""
    top = _maximum(format.element)
    if not largest:
        return 1.0
    if isinstance(format.scale, PowerOfTwo):  # the smallest scale under which the largest number fits
        exponent = math.ceil(math.log2(Fraction(largest) / Fraction(top)))
        return math.ldexp(1.0, -min(max(exponent, format.scale.min_exponent), format.scale.max_exponent))
    if format.scale.mantissa_bits:
        return top / largest
    return math.ldexp(1.0, format.element.max_exponent - (math.frexp(largest)[1] - 1))  # OCP MX 1.0, section 6.3


def _maximum(format: Format) -> float:
    return _maximum(format.element) if isinstance(format, ScaledFormat) else float(format.maximum)


# -- updates ----------------------------------------------------------------------------------------------------------
def lost_updates(seen: Updates, weights: Spectrum, to: str | Cast | Format) -> float:
    """The share of updates that leave a weight which is stored in the format, rounded to nearest, as it was.

    An update moves a weight if it is half of the spacing there or more. Weights just below a power of two round up to
    it, those just above down to it, where numbers below lie twice as close: how many is read from the spectrum.
    """
    format = casts.parse(to).format
    if not isinstance(format, FloatFormat):
        raise InvalidInput(f"lost updates are predicted for float formats (bf16, fp16, e5m7), not for {format}")
    total = seen.present
    if not total:
        return 0.0
    precision, lowest = format.precision, format.min_exponent
    exponents, moves = np.arange(ROWS) + LOWEST_WEIGHT, np.arange(ROWS) + LOWEST_UPDATE
    spacing_of = np.maximum(exponents, lowest)
    up, down = _edges(weights, exponents, precision, lowest)
    stalls = moves[None, :] <= (spacing_of - precision - 1)[:, None]
    stalls_up = moves[None, :] <= (spacing_of - precision)[:, None]
    stalls_down = moves[None, :] <= (spacing_of - precision - 2)[:, None]
    if not format.subnormals:  # what lies below the smallest number is zero, and stays zero
        flushed = exponents < lowest
        stalls[flushed] = stalls_up[flushed] = stalls_down[flushed] = moves < lowest
    normal = (exponents > lowest)[:, None]
    grows = seen.joint[:, :, 0] * (stalls * (1 - up)[:, None] + stalls_up * up[:, None])
    shrinks = seen.joint[:, :, 1] * (stalls * (1 - down)[:, None] + stalls_down * down[:, None])
    from_power = seen.joint[:, :, 2] * np.where(normal, stalls_down, stalls)
    return float((grows + shrinks + from_power).sum() / total)


def _edges(
    weights: Spectrum, exponents: NDArray[np.int64], precision: int, lowest: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """By octave the shares of weights that are rounded up to the next power of two, and down to their own."""
    counts = weights.bins.astype(np.float64).reshape(256, PARTS)[exponents + _BIAS]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.nan_to_num(counts / counts.sum(1, keepdims=True))
    # half a spacing at either end of an octave, in bins; of a bin that it cuts, the part
    within = np.clip(PARTS * 2.0**-precision - np.arange(PARTS), 0, 1)
    return share[:, ::-1] @ within * (exponents >= lowest), share @ within * (exponents > lowest)


# -- the loss scale ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Window:
    """The loss scales 2^lowest to 2^highest under which gradients fit: none overflow, few are flushed.

    `recommended` leaves three powers of two of room. The window is empty where `lowest` is above `highest`.
    """

    lowest: int
    highest: int

    @property
    def is_empty(self) -> bool:
        """Whether no scale fits."""
        return self.lowest > self.highest

    @property
    def is_unknown(self) -> bool:
        """Whether no gradient has narrowed the window."""
        return self == _WIDEST

    @property
    def recommended(self) -> int:
        """log2 of the scale to use."""
        return min(max(self.lowest, self.highest - _ROOM, _SMALLEST), _LARGEST)

    def meet(self, other: Window) -> Window:
        """Return the scales that both windows allow."""
        return Window(max(self.lowest, other.lowest), min(self.highest, other.highest))


_WIDEST = Window(-126, 127)


def scale_window(seen: Spectrum, to: str | Cast | Format, flushed: float = MOST_FLUSHED) -> Window:
    """The loss scales that bring a gradient into a float format; every one where it is all zeros."""
    format = casts.parse(to).format
    if not isinstance(format, FloatFormat):
        raise InvalidInput(
            f"a loss scale is predicted for float formats (fp16, e5m2), not for {format}: it has its own"
        )
    if not seen.maximum:
        return _WIDEST
    grid = _grid(format)
    highest = math.floor(math.log2(format.maximum / seen.maximum))
    counts, most = seen.bins.astype(np.float64).reshape(256, PARTS), flushed * seen.nonzero
    fit = (power for power in range(-126, 128) if _count_flushed(seen, counts, grid, 2.0**power) < most)
    return Window(next(fit, _WIDEST.highest), highest)


# -- sensitivity ------------------------------------------------------------------------------------------------------
def sensitivity(
    seen: Updates | NDArray[np.float64], to: str | Cast | Format, spectrum: Spectrum | None = None
) -> float:
    """How far the loss moves in a step, to first order, where a tensor x is rounded: sqrt(sum g^2 error(x)^2).

    `seen` is the updates of a weight, or the slope of an activation. The squared error is ulp(x)^2 / 12, and x^2 where
    the format flushes; infinite where it overflows. `spectrum` is that of the same tensors over the same steps, of
    which the mean is returned: formats with a shared scale need it, for their largest number. The scale is that of the
    whole tensor, a bound where blocks or rows have their own.
    """
    energy = seen.gradient_energy if isinstance(seen, Updates) else seen
    format, scale = casts.parse(to).format, 1.0
    if isinstance(format, ScaledFormat):
        if spectrum is None:
            raise InvalidInput(f"the sensitivity to {format} follows the largest number: give the tensor's spectrum")
        scale, format = _shared_scale(spectrum.maximum, format), format.element
    grid = _grid(format)
    exponent = np.arange(len(energy)) + LOWEST_WEIGHT + math.log2(scale)
    octave = np.floor(exponent)
    above = 2 - np.exp2(1 - (exponent - octave))  # of numbers spread evenly, those that the scale brings to the next
    spacing = (1 - above) * _squared_spacing(octave, grid) + above * _squared_spacing(octave + 1, grid)
    mean_square = np.exp2(2 * exponent) * 7 / 3  # of numbers that are spread evenly over an octave
    error = np.where(np.exp2(exponent + 1) <= grid.flush, mean_square, np.minimum(spacing / 12, mean_square))
    if not grid.ties:
        error = np.where(np.exp2(exponent) < grid.flush, mean_square, error)
    error[np.exp2(exponent) >= grid.overflow_from] = math.inf
    present = energy > 0
    total = float((energy[present] * error[present]).sum()) / scale**2
    return math.sqrt(total / max(spectrum.tensors if spectrum is not None else 1, 1))


def _squared_spacing(octave: NDArray[np.float64], grid: _Grid) -> NDArray[np.float64]:
    spacing: NDArray[np.float64] = np.exp2(2.0 * (np.maximum(octave, grid.lowest) - grid.precision + 1))
    return spacing
