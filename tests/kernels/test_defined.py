"""Definitions of integer products that devices and compilers run, on numbers of every size, against Python's own."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import fp32_defined
import pytest
import torch
from torch import Tensor

from lowp import kernels
from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.exponents import SharedExponents
from lowp.kernels.casts import checks
from lowp.kernels.int16 import integer, low_words, payloads
from lowp.kernels.int16.integer_reference import ConvolutionShape, digits, summed_to_odd, times, to_int16, to_odd
from lowp.kernels.int16.mantissas import NOTHING, own_exponent
from lowp.kernels.packed import byte_products

FLEX = parse("flex16+5:autoflex")
WIDE = [0, 1, -1, 3, 2**24 + 1, -(2**24) - 3, 2**53 + 1, -(2**53) - 3, 2**60 + 1, 2**62 - 1, -(2**62) + 7, 2**54 + 2]
# beside the middle of two numbers of fp32, which fp64 does not tell from it
WIDE += [sign * (2**60 + odd * 2**36 + by) for sign in (1, -1) for odd in (1, 3) for by in (1, 0, -1)]


def nearest(value: Fraction, bits: int) -> float:
    """Return a number rounded to nearest even at so many significant bits."""
    if not value:
        return 0.0
    unit = Fraction(2) ** (math.floor(math.log2(abs(value))) - bits + 1)
    while abs(value) / unit >= 2**bits:
        unit *= 2
    while abs(value) / unit < 2 ** (bits - 1):
        unit /= 2
    return float(round(value / unit) * unit)


@pytest.mark.parametrize("depth", [1, 7, 1024])
def test_products_of_digits_to_the_base_256_sum_exactly(depth: int) -> None:
    draw = torch.Generator().manual_seed(depth)
    left, right = (torch.randint(-32768, 32768, shape, generator=draw) for shape in ((3, depth), (depth, 5)))
    left[0], right[:, 0] = -32768, -32768
    left[1], right[:, 1] = 32767, -32768
    assert torch.equal(digits(left.to(torch.int32), right.to(torch.int32)), left @ right)


@pytest.mark.parametrize("exponent", [0, -3, 5, -40])
def test_sums_times_a_power_of_two_are_rounded_once(exponent: int) -> None:
    sums, scale = torch.tensor(WIDE), torch.tensor(2.0**exponent, dtype=torch.float64)
    for dtype, bits in ((torch.float32, 24), (torch.float64, 53)):
        expected = [nearest(one * Fraction(2) ** exponent, bits) for one in WIDE]
        assert times(sums, scale, dtype).tolist() == expected
    assert torch.equal(times(sums, scale, torch.int64), sums)


@pytest.mark.parametrize("exponent", [0, 3, 20, -1, -2, -17, -54, -62, -63])
def test_sums_are_rounded_once_to_int16_and_cut(exponent: int) -> None:
    several = [0, 1, 2, 3, 5, 6, 7, -1, -3, -5, 2**16, 3 << 16, -(3 << 16), 2**61, 3 * 2**60, -(2**62), 2**62]
    several += [2**54 + 2**53 + 2, 2**54 + 2**53 - 2]  # beside a tie of 2, whose last bit fp64 does not hold
    rounded = [round(one * Fraction(2) ** exponent) for one in several]
    expected = [max(-32767, min(32767, one)) for one in rounded]
    values, counts = to_int16(to_odd(torch.tensor(several), torch.float64) * 2.0**exponent, -32767)
    assert values.tolist() == expected
    saturated = sum(one != held for one, held in zip(rounded, expected, strict=True))
    assert counts.tolist() == [saturated, max(map(abs, expected))]


def test_two_words_and_a_bias_are_added_so_that_rounding_the_result_rounds_the_exact_sum() -> None:
    high, low = [0, 1, -5, 2**24 + 1, -(2**24) - 1, 2**40 + 3, 7, 1], [0, 0, 3, 0, 0, -1, 2**20, 2**13]
    high, low = [*high, 2**23 + 2, 2**23 + 2, 2**23 + 6], [*low, 0, 0, 0]  # ties of 22 bits but for the bias
    lowest = -8 - low_words.LOW_BITS  # the exponent of second words
    biases: list[list[float] | None] = [None, [0.0, 2.0**-40, 1.0, -3.0, 2.0**-20, 1e9, -7.5, -(2.0**-30)]]
    biases[1] += [2.0**-40, 0.0, -(2.0**-40)]  # type: ignore[operator]
    for bias in biases:
        for exponent, is_there in ((lowest, True), (NOTHING, False)):
            exponents = [torch.tensor(one, dtype=torch.int32) for one in (-8, exponent)]
            given = None if bias is None else torch.tensor(bias)
            found = summed_to_odd([torch.tensor(high), torch.tensor(low)], exponents, given)
            for place, one in enumerate(found.tolist()):
                exact = high[place] * Fraction(2) ** -8 + is_there * low[place] * Fraction(2) ** lowest
                exact += 0 if given is None else Fraction(given[place].item())
                held = Fraction(2) ** (math.floor(math.log2(abs(exact))) - 21 if exact else 0)  # 22 bits
                for unit in (max(held, Fraction(2) ** lowest), 8 * held, 4096 * held):
                    if unit >= Fraction(2) ** lowest:
                        assert round(Fraction(one) / unit) == round(exact / unit)
                assert one != 0 or exact == 0
    exponents = [torch.tensor(-8, dtype=torch.int32)]
    infinite = summed_to_odd([torch.tensor([1, 1])], exponents, torch.tensor([math.inf, math.nan]))
    assert infinite[0] == math.inf and infinite[1].isnan()


def to_odd_of(exact: Fraction) -> float:
    """Return a number in 24 bits, rounded to odd."""
    top = abs(exact.numerator).bit_length() - exact.denominator.bit_length()  # of a power of two
    unit = Fraction(2) ** (top - 23)
    whole = math.floor(exact / unit)
    return float((whole | (whole * unit != exact)) * unit)


def test_a_bias_of_any_size_is_added_once_and_what_fp32_does_not_hold_is_rounded_to_odd() -> None:
    sums = [5, 0, -7, 2**40 + 1, -(2**53) + 1]
    for exponent in (-80, -8, 20):
        for places in (30, 50, 51, 52, 53, 60, 90):  # from 52 on beyond the integers in which sums and biases are added
            for bias in (1.0, -1.0, 1.5, -1.75 + 2.0**-23, 2 - 2.0**-23):
                added = math.ldexp(bias, places + exponent)
                found = summed_to_odd([torch.tensor(sums)], [torch.tensor(exponent).int()], torch.full((5,), added))
                exact = [one * Fraction(2) ** exponent + Fraction(added) for one in sums[: 5 if places < 52 else 4]]
                assert found.tolist()[: len(exact)] == [to_odd_of(one) for one in exact], (exponent, places, bias)


@pytest.mark.parametrize("batch", [(), (2,), (2, 1, 3)], ids=str)
def test_products_of_digits_are_the_exact_sums_of_each_matrix(batch: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    for depth in (1, 5, 1024):
        left, right = (torch.randint(-32768, 32768, (*batch, *size), generator=draw).short()
                       for size in ((4, depth), (depth, 3)))  # fmt: skip
        left[..., 0, :], right[..., 0] = -32768, -32768
        assert torch.equal(digits(left, right), left.long() @ right.long())


def test_sums_to_odd_in_fp64_are_rounded_to_fp32_as_the_exact_sums() -> None:
    units = range(-4, 5)  # of fp64, about the middle of two numbers of fp32
    x = torch.tensor([1 + odd * 2.0**-24 + unit * 2.0**-52 for odd in (1, 3) for unit in units], dtype=torch.float64)
    for small in (2.0**-60, 0.0, -(2.0**-60), 2.0**-53, -(2.0**-54)):
        for sign in (1.0, -1.0):
            total = fp32_defined._added(sign * x, torch.tensor(sign * small, dtype=torch.float64)).float()
            exact = [Fraction(sign * one) + Fraction(sign * small) for one in x.tolist()]
            assert total.tolist() == [nearest(one, 24) for one in exact]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("way", [one for one in kernels.available() if one != "native"])
def test_products_of_int16_have_any_leading_dimensions(way: str, batch: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-999, 999, (*batch, *size), generator=draw) for size in ((4, 5), (5, 2)))
    with kernels.use(way):
        found = integer.multiply(left.to(torch.int16), right.to(torch.int16), exponent=0, dtype=torch.float32).values
    assert torch.equal(found, (left @ right).float())


@pytest.mark.parametrize(
    ("spelled", "fp16", "bf16"),
    [
        ("e4m3fn", True, True),
        ("e5m9", True, True),  # of what is in bf16 already
        ("fp16", True, True),
        ("bf16", False, True),
        ("i9s", True, True),
        ("i12s", True, False),
        ("mxfp8", True, True),
        ("dfp16", False, False),  # its digits are those of its element
        ("e4m9@e8m0/32", True, False),
        ("i12s@e8m0/32", True, False),
        ("i16s@fp32/row", True, True),  # products with any scale are rounded once more
    ],
)
def test_a_cast_of_a_dtype_gives_numbers_of_it(spelled: str, fp16: bool, bf16: bool) -> None:
    cast = parse(spelled)
    assert checks.holds(cast, torch.float32) and checks.holds(cast, torch.float64)
    assert (checks.holds(cast, torch.float16), checks.holds(cast, torch.bfloat16)) == (fp16, bf16)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (((2, 3), (4, 3)), r"input \(2, 3\) and weight \(4, 3\); both must have 1 to 3 spatial dimensions after two"),
        (((1,) * 6, (1,) * 6), "both must have 1 to 3 spatial dimensions after two others"),
        (((2, 3, 5), (4, 3, 3, 3)), "both must have 1 to 3 spatial dimensions after two others"),
        (((2, 3, 5), (4, 3, 3), 0), r"stride \(0,\); allowed: 1 integers of at least 1"),
        (((2, 3, 5), (4, 3, 3), 1, -1), r"padding \(-1,\); allowed: 1 integers of at least 0"),
        (((2, 3, 5), (4, 3, 3), 1, 0, 0), r"dilation \(0,\); allowed: 1 integers of at least 1"),
        (((2, 3, 5), (4, 3, 3), (1, 1)), r"stride \(1, 1\); allowed: 1 integers of at least 1"),
    ],
)
def test_a_convolution_that_cannot_be_is_refused(given: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        ConvolutionShape.of(*given)


@pytest.mark.parametrize("site", ["output of x", "gradient of w"])
@pytest.mark.parametrize("way", kernels.available())
def test_an_infinite_result_is_an_ordinary_value_and_a_nan_is_not(way: str, site: str) -> None:
    is_result = site.startswith("output")
    for value, is_bad in ((1.0, False), (math.inf, not is_result), (math.nan, True)):
        exponents = SharedExponents()
        with kernels.use(way):
            exponents.write(torch.tensor([value, 2.0]), FLEX, site)
            assert exponents.faults() == ({} if math.isfinite(value) else {site: True})
            exponents.flush()
        assert exponents.summary()["all"].nonfinite == int(is_bad)


def test_the_share_of_lost_features_is_that_of_those_with_numbers() -> None:
    cast = parse("dfp16:current(headroom=3)")
    x = torch.ones(2, 1024)
    x[:, 512:] = 0
    value = x.clone()
    value[:, :64] = 0  # an eighth of the 512 is not more than an eighth
    low_words.warn_of_loss(x, value, cast, "the gradient")
    value[:, :128] = 0
    low_words._warned.discard(cast)
    with pytest.warns(UserWarning, match="the gradient: of its 1024 features 25% are lost under the shared scale of"):
        low_words.warn_of_loss(x, value, cast, "the gradient")
    low_words.warn_of_loss(x, value, cast, "the gradient")  # once
    low_words._warned.discard(cast)


# -- bytes ------------------------------------------------------------------------------------------------------------
def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@pytest.mark.parametrize("depth", [1, 2, 1024, 1025, 3000])
@pytest.mark.parametrize("has_bytes", [False, True])
def test_products_of_codes_are_exact_sums_rounded_once(
    depth: int, has_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_products, "multiplies_bytes", lambda: has_bytes)
    left, right = integers(3, depth), integers(4, depth, seed=1)
    left[0] = right[0] = -128
    exact = left.long() @ right.long().t()
    found = byte_products.multiply_codes(left.float(), right.float())
    assert found.dtype is torch.float32 and torch.equal(found, exact.double().float())
    spoiled = left.float()
    spoiled[1, 0] = math.inf
    found = byte_products.multiply_codes(spoiled, right.float())
    assert torch.equal(found[0], exact[0].double().float()) and not found[1].isfinite().any()


def test_packed_bytes_are_unpacked_and_packed_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scales = integers(37, 19), torch.rand(37)
    packed = {}
    for has_bytes in (False, True):
        monkeypatch.setattr(byte_products, "multiplies_bytes", lambda has_bytes=has_bytes: has_bytes)
        packed[has_bytes] = byte_products.pack(weight, scales, 127)
        assert torch.equal(byte_products.unpacked(packed[has_bytes]), weight)
        assert byte_products.repacked(packed[has_bytes]) is packed[has_bytes]
    again = byte_products.repacked(packed[False])
    for found, expected in zip(again, packed[True], strict=True):
        assert torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected


def test_bytes_are_multiplied_by_the_processor_unless_an_instruction_set_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for has_tiles, asked, expected in ((True, "", True), (True, "avx2", False), (False, "", False)):
        monkeypatch.setattr(byte_products, "tiles_of_bytes", lambda has_tiles=has_tiles: has_tiles)
        monkeypatch.setattr(byte_products.cpu, "asked", lambda asked=asked: asked)
        assert byte_products.multiplies_bytes() is expected


@pytest.mark.parametrize("way", [one for one in kernels.available() if one != "native"])
@pytest.mark.parametrize("power", [-149, -130, -129, -128, -127, -126, -20, 0, 127])
def test_the_own_exponent_of_a_number_leaves_14_places_below_it_also_of_a_subnormal_one(way: str, power: int) -> None:
    cast = parse("dfp16")
    lowest = cast.format.scale.min_exponent  # type: ignore[union-attr]
    with kernels.use(way):
        found = own_exponent(torch.tensor([2.0**power, 0.0]), cast)
    assert int(found) == max(lowest, power - 14)


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1, -(2**63)])
def test_a_seed_of_64_bits_draws_the_same_where_an_operator_casts(seed: int) -> None:
    x, cast = torch.linspace(-3, 3, 300), "e4m3fn:stochastic"
    found = torch.func.vmap(lambda one: kernels.quantize(one, cast, seed=seed))(x[None])
    assert torch.equal(found[0], kernels.quantize(x, cast, seed=seed))


@pytest.mark.parametrize(
    ("cast", "fit", "unfit"),
    [
        ("mxfp8", (2.0, 2.0**-127), (3.0, -2.0, 0.0, math.inf, 2.0**128)),
        ("e2m1@e4m3fn/16", (2.0, 3.0, 448.0), (3.1, 449.0, -2.0, 0.0, math.inf, math.nan)),
        ("i8s@fp32/row", (0.1, 3.0), (-2.0, 0.0, math.inf, math.nan)),
    ],
)
def test_a_scale_is_a_positive_number_of_the_format_of_scales(
    cast: str, fit: tuple[float, ...], unfit: tuple[float, ...]
) -> None:
    x = torch.zeros(32)
    for scale in fit:
        assert torch.equal(kernels.quantize(x, cast, scale=torch.tensor(scale)), x)
    for scale in unfit:
        with pytest.raises(InvalidInput, match="scale"):
            kernels.quantize(x, cast, scale=scale)


@pytest.mark.parametrize("way", kernels.available())
def test_which_of_several_tensors_are_in_a_format_is_found_of_each(way: str) -> None:
    exact, other = torch.tensor([3.0, -5.0, 0.0]) * 2**-20, torch.tensor([1.0, 2.0**-20])
    written = SharedExponents().write(torch.randn(9), FLEX, "output of x").values
    with kernels.use(way):
        assert payloads.are_exact([exact, other, written, torch.zeros(0)], FLEX) == [True, False, True, True]
        written[0] = 1 / 3
        assert payloads.are_exact([written, exact], FLEX) == [False, True]
