"""What the kernels are told of casts and codes: traits, which choose the instructions, and numbers."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from lowp.casts import parse
from lowp.formats import FloatFormat
from lowp.kernels.triton import plans

# a line a cast of fp32: rounding, random bits, overflow, and traits besides the usual ones, or that it lacks (-)
USUAL_OF_CASTS = {"signed", "has_zero", "minus_zero"}
TRAITS = """
fp32                   nearest-even   0 inf
fp64                   nearest-even   0 inf      wide
bf16                   nearest-even   0 inf      cuts by_addition
e4m3fn                 nearest-even   0 nan      cuts varying by_addition nan_beyond
e4m3fn:saturate        nearest-even   0 saturate cuts varying by_addition
e5m2                   nearest-even   0 inf      cuts varying by_addition
e5m2:nan               nearest-even   0 nan      cuts varying by_addition nan_beyond
e4m3fnuz:nearest-away  nearest-away   0 nan      -minus_zero cuts varying by_addition nan_beyond
ue5m3nuz               nearest-even   0 inf      -signed -minus_zero cuts varying by_addition
ue4m3fnuz              nearest-even   0 nan      -signed -minus_zero cuts varying by_addition
ue4m3finite            nearest-even   0 saturate -signed -minus_zero cuts varying by_addition
e3m0finite             nearest-even   0 saturate cuts varying by_code
ue4m0finite            nearest-even   0 saturate -signed -has_zero -minus_zero cuts varying flush
e8m0                   nearest-even   0 nan      -signed -has_zero -minus_zero wide cuts varying flush
e8m10ftz               nearest-even   0 inf      cuts by_addition flush
e8m22                  nearest-even   0 inf      cuts by_addition
e8m23:stochastic       stochastic   160 inf      by_noise
e6m22                  nearest-even   0 inf      cuts varying by_addition
e6m23                  nearest-even   0 inf      cuts varying
e8m24                  nearest-even   0 inf      wide cuts varying
e11m51:stochastic      stochastic   160 inf      wide cuts
e4m3b-106finite        nearest-even   0 saturate cuts varying by_addition
e4m3b-107finite        nearest-even   0 saturate cuts varying
e4m3b126               nearest-even   0 inf      cuts varying by_addition
e4m3b127               nearest-even   0 inf      cuts by_addition
e4m3fn:toward-zero     toward-zero    0 nan      cuts varying by_addition by_sum is_directed
e5m2:up                up             0 inf      cuts varying by_addition by_sum is_directed
e2m1:down              down           0 saturate cuts varying by_addition by_sum is_directed
e5m2:to-odd            to-odd         0 inf      cuts varying is_directed
e4m3fn:to-odd          to-odd         0 nan      cuts varying is_directed
ue4m3:up               up             0 inf      -signed -minus_zero cuts varying by_addition is_directed
e5m10:up               up             0 inf      cuts varying by_addition by_sum is_directed
e5m11:up               up             0 inf      cuts varying by_addition is_directed
e4m3b124:up            up             0 inf      cuts varying by_addition by_sum is_directed
e4m3b125:up            up             0 inf      cuts varying by_addition is_directed
e4m3b-92:up            up             0 inf      cuts varying by_addition by_sum is_directed
e4m3b-93:up            up             0 inf      cuts varying by_addition is_directed
e8m7:up                up             0 inf      cuts by_addition is_directed
e4m3fn:stochastic      stochastic   160 nan      cuts varying by_noise by_more by_product nan_beyond
e4m3fn:stochastic-19   stochastic    19 nan      cuts varying by_noise by_product nan_beyond
e4m3fn:stochastic-20   stochastic    20 nan      cuts varying by_noise nan_beyond
e4m3fn:stochastic-b-8  stochastic-b   8 nan      cuts varying by_noise by_product nan_beyond
e5m2:stochastic-b-31   stochastic-b  31 inf      cuts varying by_noise
e5m2:stochastic-b-32   stochastic-b  32 inf      cuts varying
e5m2:stochastic-c-8    stochastic-c   8 inf      cuts varying
bf16:stochastic        stochastic   160 inf      cuts by_noise
e5m5:stochastic        stochastic   160 inf      cuts varying by_noise by_more by_product
e5m6:stochastic        stochastic   160 inf      cuts varying by_noise by_more
ue4m3:stochastic       stochastic   160 inf      -signed -minus_zero cuts varying by_noise by_more by_product
ue4m0finite:stochastic-8 stochastic     8 saturate -signed -has_zero -minus_zero cuts varying by_noise flush
e4m3b0:stochastic      stochastic   160 inf      cuts varying by_noise by_more by_product
e4m3b-1:stochastic     stochastic   160 inf      cuts varying by_noise by_more
e4m7b108:stochastic    stochastic   160 inf      cuts varying by_noise by_more reaches_subnormals
e4m7b87:stochastic     stochastic   160 inf      cuts varying by_noise by_more
e4m7b88:stochastic     stochastic   160 inf      cuts varying by_noise by_more reaches_subnormals
i1                     nearest-even   0 saturate -has_zero -minus_zero cuts varying by_addition binary
i1:stochastic          stochastic   160 saturate -has_zero -minus_zero wide cuts varying binary
i2s                    nearest-even   0 saturate -minus_zero cuts varying by_addition
i8                     nearest-even   0 saturate -minus_zero cuts varying by_addition two_ends
i8:up                  up             0 saturate -minus_zero cuts varying by_addition two_ends is_directed
i8:stochastic          stochastic   160 saturate -minus_zero cuts varying by_noise by_more two_ends
i24                    nearest-even   0 saturate -minus_zero cuts varying by_addition two_ends
i25                    nearest-even   0 saturate -minus_zero wide cuts varying two_ends
"""


def traits(value: plans.CastTraits | plans.Layout) -> set[str]:
    return {name for name, one in value._asdict().items() if one is True}


def expected(usual: set[str], names: list[str]) -> set[str]:
    lacking = {name[1:] for name in names if name[0] == "-"}
    assert lacking <= usual
    return (usual | set(names)) - lacking - {f"-{name}" for name in lacking}


@pytest.mark.parametrize("line", TRAITS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_a_cast_has_these_traits(line: str) -> None:
    text, rounding, random_bits, overflow, *names = line.split()
    form = plans.plan(parse(text), torch.float32).form
    assert (form.rounding, form.random_bits, form.overflow) == (rounding, int(random_bits), overflow)
    wanted = expected(USUAL_OF_CASTS, names)
    assert traits(form) == wanted
    assert traits(plans.exact(form)) == wanted - {"by_noise", "by_more"}


def number(bits: int, wide: bool = False) -> float:
    """Return the positive number with these bits."""
    return float(
        struct.unpack("<d", struct.pack("<q", bits))[0] if wide else struct.unpack("<f", struct.pack("<i", bits))[0]
    )


NAMES = (
    "fp16 bf16 e4m3fn e5m2 e2m1 e4m3fnuz e4m3nuz ue4m3 e3m0finite e6m22 e8m23 e4m3b127 e5m11 e8m10ftz e4m3b-106finite"
)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", NAMES.split())
def test_numbers_of_a_cast_are_those_of_the_format(name: str, wide: bool) -> None:
    cast, dtype = parse(name), torch.float64 if wide else torch.float32
    format, carrier = cast.element, 52 if wide else 23
    assert isinstance(format, FloatFormat)
    quantum = math.ldexp(format.smallest_normal, -format.mantissa_bits)
    for numbers in (plans.plan(cast, dtype).numbers, plans.layout(format, wide)[1]):
        assert numbers.dropped == carrier - format.mantissa_bits
        assert numbers.low_field == format.min_exponent + (1023 if wide else 127)
        assert number(numbers.smallest_normal, wide) == format.smallest_normal
        assert number(numbers.quantum, wide) == quantum
        anchor = numbers.anchor if isinstance(numbers, plans.Numbers) else numbers.unit_anchor
        assert number(anchor, wide) == quantum * 2.0**carrier
    numbers = plans.plan(cast, dtype).numbers
    half_bits = carrier - format.mantissa_bits - 1
    assert numbers.below_half == (2**half_bits - 1 if half_bits >= 0 else 0)
    assert number(numbers.maximum, wide) == number(numbers.minimum, wide) == format.maximum
    assert number(numbers.flush_below, wide) == (0.0 if format.subnormals else format.smallest_normal)
    bias = 1023 if wide else 127
    assert numbers.parity_offset == (format.bias - bias if format.mantissa_bits == 0 else 0)
    assert (numbers.lift, number(numbers.shrink, wide), number(numbers.grow, wide)) == (0, 1.0, 1.0)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m5", "e3m0finite", "e4m3b0", "e4m3b124"])
def test_numbers_of_a_product_move_a_format_s_normal_numbers_to_those_of_fp32(name: str) -> None:
    cast = parse(f"{name}:stochastic")
    numbers, format = plans.plan(cast, torch.float32).numbers, cast.element
    assert isinstance(format, FloatFormat)
    assert numbers.lift == 2 ** (9 + format.mantissa_bits)
    assert number(numbers.shrink) * format.smallest_normal == 2.0**-126
    assert number(numbers.shrink) * number(numbers.grow) == 1.0


def test_numbers_that_are_not_represented_are_bounded() -> None:
    assert number(plans.plan(parse("e4m3b-107finite"), torch.float32).numbers.anchor) == 2.0**127
    assert number(plans.layout(_float("e4m3b-107finite"), False)[1].unit_anchor) == 2.0**127
    refused = [plans.plan(parse(name), torch.float32).numbers.refused for name in ("ue4m0finite", "ue4m3")]
    assert refused == [plans.plan(parse("ue4m0finite"), torch.float32).numbers.quantum, 0x7FC00000]


def _float(name: str) -> FloatFormat:
    format = parse(name).element
    assert isinstance(format, FloatFormat)
    return format


# a line a format: what NaN is, and the traits of its encoding relative to fp32, likewise
USUAL_OF_CODES = {"signed", "has_zero", "subnormals"}
LAYOUTS = """
fp32            above      minus_zero infinity anchored
fp64            above      wide minus_zero infinity
bf16            above      minus_zero infinity anchored
e8m10ftz        above      -subnormals minus_zero infinity anchored
e5m7ftz         above      -subnormals varying minus_zero infinity anchored summed
fp16            above      varying minus_zero infinity anchored summed by_product
e4m3fn          above      varying minus_zero anchored summed in_byte by_product
e4m3fnuz        minus-zero varying anchored summed in_byte by_product
e4m3nuz         minus-zero varying infinity anchored summed in_byte by_product
e2m1            none       varying minus_zero anchored summed in_nibble by_product
e3m0finite      none       varying minus_zero anchored summed in_nibble by_product
e3m0fn          above      varying minus_zero anchored summed in_nibble by_product
ue4m3           above      -signed varying infinity anchored
ue5m3finite     none       -signed varying anchored
ue5m3nuz        above      -signed varying infinity anchored
ue4m0finite     none       -signed -has_zero -subnormals varying
ue8m0b130fn     above      -signed -has_zero -subnormals wide varying
e4m3b0          above      varying minus_zero infinity anchored summed in_byte by_product
e4m3b-1         above      varying minus_zero infinity anchored summed in_byte
e4m3b-106finite none       varying minus_zero anchored in_byte
e4m3b-107finite none       varying minus_zero in_byte
e5m11           above      varying minus_zero infinity anchored
e7m8            above      varying minus_zero infinity anchored summed by_product
e4m3b125        above      varying minus_zero infinity anchored in_byte by_product
i8              none       integer
i25             none       wide integer
"""


@pytest.mark.parametrize("line", LAYOUTS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_an_encoding_has_these_traits(line: str) -> None:
    name, nan, *names = line.split()
    format = parse(name).element
    shape, _ = plans.layout(format, False)
    assert (shape.nan, traits(shape)) == (nan, expected(USUAL_OF_CODES, names))
    in_fp64, _ = plans.layout(format, True)
    assert traits(in_fp64) >= {"wide"} and not traits(in_fp64) & {"anchored", "summed", "by_product"}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", [*NAMES.split(), "ue5m3finite", "ue5m3nuz", "e3m0fn"])
def test_numbers_of_an_encoding_are_those_of_the_format(name: str, wide: bool) -> None:
    format = _float(name)
    codes = plans.layout(format, wide)[1]
    assert (codes.infinity_code, codes.nan_code) == (format.infinity_code or 0, format.nan_code or 0)
    assert (codes.most, codes.sign_place) == (format.encode(format.maximum), format.bits - 1)
    assert codes.magnitude_mask == 2 ** (format.bits - format.signed) - 1
    assert codes.subnormals_from == format.encode(format.smallest_normal)
    assert (codes.beyond, codes.least) == (format.infinity_code or format.nan_code or 0, 0)
    assert number(codes.anchor, wide) == 2.0 ** (52 if wide else 23)
    assert (codes.smallest_normal >> codes.dropped) - codes.offset == codes.subnormals_from
    if plans.layout(format, wide)[0].by_product:
        assert (codes.spread, codes.power >> 23) == (8 - format.exponent_bits, 254 - format.bias)
        assert codes.digits == (codes.magnitude_mask << codes.dropped) - 2**31
        if name in ("fp16", "e5m2"):
            assert number(codes.limit) == 2.0**16
        elif name == "e4m3fn":
            assert number(codes.limit) == 480.0
    else:
        assert (codes.spread, codes.power, codes.digits, codes.limit) == (0, 0, 0, 0)


def test_integers_are_bounded_by_their_codes() -> None:
    for name, most, least in (("i1", 1, 1), ("i4", 7, 8), ("i8s", 127, 127), ("i32", 2**31 - 1, 2**31)):
        codes = plans.layout(parse(name).element, False)[1]
        assert {name: one for name, one in codes._asdict().items() if one} == {"most": most, "least": least}


# a line a rounding: casts whose codes are computed directly, and casts whose values are rounded first
DIRECT = {
    "": (
        "e4m3fn e4m3fn:saturate e5m2:nan e2m1 e4m3fnuz e4m3nuz fp16 bf16 i8 i4s i24",
        "fp32 e3m0finite ue4m3 e8m10ftz i25",
    ),
    ":stochastic": ("e4m3fn e5m2:nan bf16 i8", "fp64 ue4m3 e8m10ftz e8m23 i1 i25"),
    ":up": ("e4m3fn e5m2 e5m2:saturate e4m3fnuz e2m1 bf16:saturate i8", "e5m2:nan e5m11 e4m3nuz:nan bf16 ue4m3 i1"),
    ":to-odd": ("", "e4m3fn e2m1 i8"),
    ":nearest-away": ("e4m3fn e5m2 e5m11:nan", "e3m0finite ue4m3"),
}


@pytest.mark.parametrize("rounding", DIRECT)
def test_codes_are_computed_directly_where_overflow_is_in_the_code(rounding: str) -> None:
    for expected, names in zip((True, False), DIRECT[rounding], strict=True):
        for name in names.split():
            name, _, overflow = name.partition(":")
            cast = parse(name + rounding + (overflow and ":" + overflow))
            form = plans.plan(cast, torch.float32).form
            assert plans.is_direct(form, plans.layout(cast.element, form.wide)[0]) is expected, cast
