"""A cast for the kernels: its form, which is a compile-time constant, and its numbers, which are arguments.

Formats of one form share a compiled kernel: e4m3fn and e5m2 to nearest even differ only in numbers. Does not import
triton.
"""

import functools
from typing import NamedTuple

import torch

from lowp.casts import Cast, Rounding
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.numbers import philox
from lowp.kernels.numbers.bitwise import Parameters, parameters
from lowp.kernels.numbers.floats import CARRIERS

DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_UNLIMITED = 160
_LARGEST_FIELD = 254  # the exponent field of fp32's largest power of two
_DIGITS = 56  # bits of fp32's significand and of a drawn word: bits cut below all of them decide nothing
_MOST_CUT = 18  # bits: in one of 64 blocks, one of 2048 numbers leaves a draw undecided
_DIRECTED = (Rounding.TOWARD_ZERO, Rounding.UP, Rounding.DOWN)
_BY_ADDITION = (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY, *_DIRECTED)


class CastTraits(NamedTuple):
    """The properties that determine the instructions of a cast; all are fields, which is all that kernels see."""

    wide: bool  # computes on fp64's bits, otherwise on fp32's
    rounding: str
    random_bits: int  # 0: no draw; 1 to 32; more: all 160
    overflow: str
    cuts: bool  # bits are cut from normal numbers, or for integers from all numbers below 2**mantissa_bits
    varying: bool  # the format's smallest normal number differs from the carrier's: more bits of small numbers are cut
    by_addition: bool  # rounded by an addition to fp32's bits, and below the normal numbers by fp32's addition
    by_sum: bool  # codes rounded up, down or toward zero by a sum with a power of two of their neighbours' ulp
    by_noise: bool  # stochastic with one word of 32 bits, in fp32's bits
    by_more: bool  # for such a rounding: one word may leave open what all 160 bits decide
    by_product: bool  # for such a rounding: a product moves all numbers so that they are cut at one place
    reaches_subnormals: bool  # for such a rounding: 32 bits may decide on numbers below fp32's normal ones
    by_code: bool  # "even" is the parity of the exponent field
    flush: bool
    has_zero: bool
    signed: bool
    minus_zero: bool
    two_ends: bool  # the smallest number differs from minus the largest
    binary: bool
    is_directed: bool  # finite numbers beyond the largest one may become it while infinity does not
    nan_beyond: bool  # overflow becomes NaN, so that one comparison finds both overflow and NaN


class Numbers(NamedTuple):
    """The numbers of a cast as integers: bits of the carrier, bit positions, exponent fields."""

    dropped: int  # mantissa bits cut from a normal number
    low_field: int  # the exponent field of the format's smallest normal number
    quantum: int  # the bits of the smallest distance between neighbours, the quantum
    smallest_normal: int
    below_half: int  # half a unit of the last kept place of normal numbers, minus one
    anchor: int  # the bits of the power of two whose ulp is the quantum
    lift: int  # 2**(32 - dropped) if most bits are dropped: scales the cut bits to 32 bits
    shrink: int  # the bits of the power of two by which the smallest normal number becomes fp32's
    grow: int  # of its inverse
    flush_below: int
    parity_offset: int
    maximum: int
    minimum: int
    refused: int


class Layout(NamedTuple):
    """The encoding of a format, a compile-time constant."""

    wide: bool
    integer: bool = False
    varying: bool = False
    signed: bool = True
    has_zero: bool = True
    subnormals: bool = True
    minus_zero: bool = False
    infinity: bool = False
    anchored: bool = False  # fp32's addition counts quanta below the normal numbers
    summed: bool = False  # fp32's addition rounds all numbers, too: a power of two with their ulp is not too large
    in_byte: bool = False  # the sign is the eighth bit
    in_nibble: bool = False  # the sign is the fourth bit
    nan: str = "none"  # "above": codes above infinity's, or all ones; "minus-zero": the code of -0; "none"
    by_product: bool = False  # one product with a power of two decodes numbers below the normal ones, too
    packed: bool = False  # two codes per byte


class Codes(NamedTuple):
    """The numbers of an encoding."""

    dropped: int = 0
    low_field: int = 0
    smallest_normal: int = 0
    offset: int = 0  # the difference of the exponent fields of carrier and code, at the position of the code's
    subnormals_from: int = 0  # the code of the smallest normal number
    anchor: int = 0  # the bits of 2**23 (2**52), to which a code is added to decode it
    quantum: int = 0
    unit_anchor: int = 0  # the bits of the power of two whose ulp is the quantum
    magnitude_mask: int = 0
    sign_place: int = 0
    infinity_code: int = 0
    nan_code: int = 0
    most: int = 0  # the code of the largest finite number, or the largest integer
    least: int = 0  # the magnitude of the smallest integer
    beyond: int = 0  # the code of overflow, if the cast does not saturate: that after the largest one's
    spread: int = 0  # bits of the exponent field that fp32 has more, for a product
    digits: int = 0  # the bits of fp32 that a code fills, for a product, with the sign
    power: int = 0  # the bits of the power of two that moves the exponent's bias
    limit: int = 0  # what a product makes of the code from which on numbers are infinite or NaN


class CastPlan(NamedTuple):
    """A cast for tensors of one dtype."""

    form: CastTraits
    numbers: Numbers


@functools.lru_cache(maxsize=1024)
def plan(cast: Cast, dtype: torch.dtype) -> CastPlan:
    """Return the plan of an element-wise cast; shared scales are divided out before."""
    p = parameters(cast, dtype)
    form = _form(cast, p)
    return CastPlan(form, _numbers(form, p))


def _form(cast: Cast, p: Parameters) -> CastTraits:
    element = cast.element
    wide, varying = p.carrier == CARRIERS[torch.float64], _low_field(p) > 1
    anchored = _anchor_field(p) <= _LARGEST_FIELD
    by_addition = anchored and not wide and _adds(cast, p)
    by_noise = not wide and _adds_noise(cast)
    below = by_noise and varying  # it draws for numbers below the normal ones, too
    (signed, minus_zero), two_ends = _signs(element), p.minimum != p.maximum
    is_directed = str(cast.rounding) in ("toward-zero", "to-odd", "up", "down")
    return CastTraits(
        wide=wide,
        rounding=str(cast.rounding),
        random_bits=(cast.random_bits or _UNLIMITED) if cast.is_stochastic else 0,
        overflow=str(cast.overflow),
        cuts=p.dropped > 0 or varying,
        varying=varying,
        by_addition=by_addition,
        by_sum=by_addition and varying and cast.rounding in _DIRECTED and _is_summed(element, p),
        by_noise=by_noise,
        by_more=below and cast.random_bits is None,
        by_product=below and anchored and _cuts_most(cast, p),
        reaches_subnormals=below and p.dropped + _low_field(p) <= _DIGITS,
        by_code=p.parity_offset is not None,
        flush=p.flush_below != 0,
        has_zero=element.has_zero,
        signed=signed,
        minus_zero=minus_zero,
        two_ends=two_ends,
        binary=isinstance(element, IntFormat) and element.bits == 1,
        is_directed=is_directed,
        nan_beyond=str(cast.overflow) == "nan" and signed and not (wide or two_ends or is_directed),
    )


def _signs(element: FloatFormat | IntFormat) -> tuple[bool, bool]:
    """Return whether a format has numbers below zero, and whether it has -0."""
    return (element.signed, element.has_minus_zero) if isinstance(element, FloatFormat) else (True, False)


def _adds(cast: Cast, p: Parameters) -> bool:
    """Whether an addition to the carrier's bits rounds normal numbers, of which it cuts bits; integers have none."""
    is_cut = isinstance(cast.element, IntFormat) or 0 < p.dropped < p.carrier.mantissa_bits
    return cast.rounding in _BY_ADDITION and is_cut


def exact(form: CastTraits) -> CastTraits:
    """Return the form whose stochastic rounding compares all 160 bits of every number."""
    return form._replace(by_noise=False, by_more=False)


def _adds_noise(cast: Cast) -> bool:
    """Whether 32 bits of noise are equivalent to the draw: not for ties to even, nor for a 33rd bit rounded half up."""
    is_half_up = cast.rounding is Rounding.STOCHASTIC_B
    return cast.rounding is Rounding.STOCHASTIC or (is_half_up and (cast.random_bits or _UNLIMITED) < 32)


def _cuts_most(cast: Cast, p: Parameters) -> bool:
    """Whether the bits cut from a normal number decide nearly all numbers, or all of them with N random bits."""
    enough = cast.random_bits is None or cast.random_bits < p.dropped
    return enough and p.dropped >= _MOST_CUT and cast.element.has_zero and p.min_exponent <= 1


def _is_summed(element: FloatFormat | IntFormat, p: Parameters) -> bool:
    """Whether fp32 represents the powers of two whose ulps are the distances of neighbours, and the distances."""
    if not isinstance(element, FloatFormat) or not element.signed or element.bits > 16:
        return False
    return element.max_exponent + 1 + p.dropped <= p.carrier.bias and p.quantum >> p.carrier.mantissa_bits > 0


def _low_field(p: Parameters) -> int:
    """Return the exponent field below which more bits are cut; none are if the carrier has none below it."""
    return p.min_exponent + p.carrier.bias


def _anchor_field(p: Parameters) -> int:
    """Return the exponent field of the power of two whose ulp is the quantum."""
    return _low_field(p) + p.dropped


def _numbers(form: CastTraits, p: Parameters) -> Numbers:
    mantissa_bits, bias = p.carrier.mantissa_bits, p.carrier.bias
    moved = p.min_exponent - p.carrier.min_exponent if form.by_product else 0
    return Numbers(
        dropped=p.dropped,
        low_field=_low_field(p),
        quantum=p.quantum,
        smallest_normal=_low_field(p) << mantissa_bits,
        below_half=(1 << p.dropped) - 1 >> 1,
        anchor=min(_anchor_field(p), 2 * bias) << mantissa_bits,
        lift=1 << (32 - p.dropped) if form.by_product else 0,
        shrink=p.carrier.bits(2.0**-moved),
        grow=p.carrier.bits(2.0**moved),
        flush_below=p.flush_below,
        parity_offset=p.parity_offset or 0,
        maximum=p.maximum,
        minimum=p.minimum,
        refused=p.refused,
    )


@functools.lru_cache(maxsize=1024)
def layout(format: FloatFormat | IntFormat, wide: bool) -> tuple[Layout, Codes]:
    """Return the encoding of a format relative to the bits of fp32, or of fp64 if `wide`."""
    p = parameters(Cast(format), torch.float64 if wide else torch.float32)
    bias, mantissa_bits = p.carrier.bias, p.carrier.mantissa_bits
    wide = p.carrier == CARRIERS[torch.float64]
    if isinstance(format, IntFormat):
        return Layout(wide=wide, integer=True), Codes(most=format.maximum, least=-format.minimum)
    varying, nan = _low_field(p) > 1, format.nan_code
    all_ones = (1 << (format.bits - format.signed)) - 1
    infinity = format.infinity_code
    kind = "none" if nan is None else "minus-zero" if nan > all_ones else "above"
    signed, minus_zero = format.signed, format.has_minus_zero
    most = (infinity or (all_ones + (kind != "above"))) - 1
    beyond = infinity or philox.signed(nan or 0)
    anchored = not wide and format.has_zero and _anchor_field(p) <= _LARGEST_FIELD
    shape = Layout(
        wide=wide,
        varying=varying,
        signed=signed,
        has_zero=format.has_zero,
        subnormals=format.subnormals,
        minus_zero=minus_zero,
        infinity=infinity is not None,
        anchored=anchored,
        summed=anchored and varying and _is_summed(format, p),
        in_byte=signed and format.bits == 8,
        in_nibble=signed and format.bits == 4,
        nan=kind,
        by_product=_is_product(format, wide),
    )
    codes = Codes(
        dropped=p.dropped,
        low_field=_low_field(p),
        smallest_normal=_low_field(p) << mantissa_bits,
        offset=(bias - format.bias) << format.mantissa_bits,
        subnormals_from=1 << format.mantissa_bits,
        anchor=(mantissa_bits + bias) << mantissa_bits,
        quantum=p.quantum,
        unit_anchor=min(_anchor_field(p), 2 * bias) << mantissa_bits,
        magnitude_mask=all_ones,
        sign_place=format.bits - 1,
        infinity_code=infinity or 0,
        nan_code=philox.signed(nan or 0),
        most=most,
        beyond=beyond,
    )
    return shape, _with_product(codes, format) if shape.by_product else codes


def _is_product(format: FloatFormat, wide: bool) -> bool:
    """Whether a code, moved to the place of fp32's exponent and mantissa, is a power of two away from its value."""
    plain = format.signed and format.subnormals and not wide
    return plain and format.bits <= 16 and format.exponent_bits < 8 and format.bias >= 0


def _with_product(codes: Codes, format: FloatFormat) -> Codes:
    special = codes.infinity_code or codes.magnitude_mask  # which is NaN, or no code needs a limit
    return codes._replace(
        spread=8 - format.exponent_bits,
        digits=(codes.magnitude_mask << codes.dropped) - (1 << 31),
        power=(254 - format.bias) << 23,
        limit=(special + codes.offset) << codes.dropped,
    )


def is_direct(form: CastTraits, shape: Layout) -> bool:
    """Whether codes are computed directly from fp32 bits: by addition or a word, for a signed format with subnormals.

    Directed roundings that round some numbers beyond the largest one to it must saturate, or be those by a sum.
    """
    is_known = form.by_addition or form.by_noise
    is_plain = is_known and form.signed and not form.flush and form.has_zero and not shape.wide
    is_followed = form.overflow != "nan" or not shape.infinity
    ends = form.overflow == "saturate" or not form.is_directed or (form.by_sum and is_followed)
    return is_plain and form.overflow == "saturate" if shape.integer else is_plain and ends and form.cuts
