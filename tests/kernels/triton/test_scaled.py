"""Triton's kernels of blocks and rows that share a scale, in its interpreter, have the bits of the definition."""

from __future__ import annotations

import pytest
import torch
from exact_casts import INTEGERS, bits
from torch import Tensor

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, IntFormat, ScaledFormat
from lowp.kernels.casts.functions import quantize_operand
from lowp.kernels.numbers import hadamard, packing

pytest.importorskip("triton", reason="triton is not installed")

NAMED = [name for name, row in FORMATS.items() if isinstance(row, ScaledFormat)]
SERVED = ["mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp6-e3m2", "mxfp4", "mxint8", "nvfp4", "int8", "int4", "e4m3fn@fp32/row"]
CASTS = [*SERVED, "e5m2@fp32/channel:saturate", "mxfp8:nearest-away", "int8:nearest-away", "nvfp4:saturate"]
CASTS += ["nvfp4:4/6", "if4", "e2m1@e5m2@fp32/32:4/6"]
CASTS += ["mxfp8:rceil", "mxfp4:ceil", "mxfp8:even", "mxfp6:rceil"]
CASTS += ["mxfp8:stochastic", "mxfp4:stochastic-b-8", "mxfp8:current(headroom=1)", "int8:current(headroom=1)"]
CASTS += ["e4m0fn@fp32/row", "e2m1@e8m0/16", "e4m3fn@fp32/tensor", "e5m2@fp32/tensor"]
CASTS += ["e2m1@e4m3fn@fp32/4x16", "e4m3fn@e8m0/2x8"]
CASTS += ["int8:stochastic", "nvfp4:stochastic", "e5m2@fp32/tensor:stochastic-b-8"]
CASTS += ["e2m1@e8m0@fp32/16"]  # whose outer scale is not used
TILES = "e2m1@e4m3fn@fp32/4x16"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(dtype: torch.dtype) -> Tensor:
    """Return rows of every magnitude: tiny, huge, zeros of both signs, specials, and midpoints of elements."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 64, generator=generator) * 2.0 ** torch.randint(-6, 6, (12, 64), generator=generator)
    x[0] *= 2.0**-130
    x[1] *= 2.0**100
    x[2, :32], x[2, 32:] = 0.0, -0.0
    x[3, 5], x[4, 6] = torch.inf, -torch.nan
    x[5], x[5, 3] = 0.0, 1e-45
    x[6] = torch.randint(-254, 255, (64,), generator=generator) / 2
    x[6, 0] = 127.0  # so that int8's scale is 1, and halves are in the middle
    x[7, 1], x[8] = 448.0 * 8, 3.4e38
    x[9] = torch.randint(-24, 25, (64,), generator=generator) / 4
    x[10, 7] = torch.inf
    x = x.to(dtype)
    x.view(INTEGERS[dtype])[10, 7] += 1  # the first NaN beyond infinity
    return x


def served(text: str, dtype: torch.dtype, codes: bool = False) -> bool:
    from lowp.kernels.triton import scaled

    return scaled.planned(parse(text), dtype, codes) is not None


# each cast with one dtype in the fast suite, and with all in the slow one
CASES = [
    pytest.param(text, dtype, marks=[] if (place + turn) % 3 == 0 else pytest.mark.slow, id=f"{text} {dtype}")
    for place, text in enumerate(CASTS)
    for turn, dtype in enumerate(DTYPES)
]


def _has_nan(text: str) -> bool:
    """Whether elements or scales have a NaN."""
    format = parse(text).format
    return "e8m0" in str(getattr(format, "scale", "")) or bool(getattr(parse(text).element, "has_nan", False))


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter give a program 64 numbers, so that infinities and NaNs decide on few others' path."""
    from lowp.kernels.triton import launch

    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 64)


@pytest.mark.parametrize(("text", "dtype"), CASES)
@pytest.mark.usefixtures("small_programs")
def test_values_and_codes_are_those_of_the_definition(text: str, dtype: torch.dtype) -> None:
    _compare(text, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", ["int8", "int8:stochastic", "e4m3fn@fp32/tensor", "e5m2@fp32/tensor"])
@pytest.mark.usefixtures("small_programs")
def test_long_rows_are_cast_by_several_programs(text: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.triton import launch, scaled

    monkeypatch.setattr(scaled, "LONG_ROW", 48)
    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 32)
    _compare(text, dtype)


def _compare(text: str, dtype: torch.dtype) -> None:
    assert served(text, dtype)
    x = numbers(dtype)
    held = x if dtype is torch.float32 else x[6:8].contiguous()  # 16 bits hold no value under a tiny scale
    found, wanted = [], []
    for way, results in (("bitwise", wanted), ("triton", found)):
        with kernels.use(way):
            results.append(lowp.quantize(held, text, seed=5))
            encoded = lowp.encode(x if _has_nan(text) else x.nan_to_num(posinf=1.0), text, seed=5)
            results += [encoded.payload, encoded.scale, encoded.outer]
    for one, other in zip(found, wanted, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.shape == other.shape and one.dtype is other.dtype
        same = one == other if not one.is_floating_point() else bits(one) == bits(other)
        assert same.all(), (held[~same][:4] if same.shape == held.shape else None, one[~same][:4], other[~same][:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", ["int8", "e4m3fn@fp32/row", "nvfp4"])
def test_16_bits_round_values_under_scales_of_every_size_once(text: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    lowest, highest = (-134, 127) if dtype is torch.bfloat16 else (-26, 15)
    powers = torch.arange(lowest, highest, dtype=torch.float64)
    for power in powers.split(len(powers) if text != "nvfp4" else 30):  # one outer scale for all of them
        x = torch.rand(len(power), 64, generator=generator, dtype=torch.float64) * 2 - 1
        x = (x * 2.0 ** power[:, None]).to(dtype)
        with kernels.use("reference"):
            wanted = lowp.quantize(x, text)
        with kernels.use("triton"):
            assert torch.equal(bits(lowp.quantize(x, text)), bits(wanted))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *(
            (text, dtype)
            for text in ("int8", "int4", "e4m3fn@fp32/row", "e5m2@fp32/row", "nvfp4", "if4")
            for dtype in DTYPES
        ),
        *(
            (text, torch.float32)
            for text in ("int8:nearest-away", "e4m3fn@fp32/row:nearest-away", "nvfp4:nearest-away")
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_programs")
def test_quotients_at_midpoints_of_elements_and_beside_them_are_rounded_once(text: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    scales = 1 + torch.rand(40, 1, generator=generator)
    element = parse(text).element
    codes = torch.arange(1 << element.bits).to(torch.int8 if isinstance(element, IntFormat) else torch.uint8)
    values = lowp.decode(codes[: len(codes) // 2], element)
    finite = values[values.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([middles[torch.randint(len(middles), (40, 63), generator=generator)], finite[-1:].expand(40, 1)], 1)
    x = (x * scales).to(dtype)
    x[::2, :60] = torch.nextafter(x[::2, :60], x.new_tensor(torch.inf))
    x[1::4, :60] = torch.nextafter(x[1::4, :60], x.new_tensor(-torch.inf))
    with kernels.use("reference"):
        values, wanted = lowp.quantize(x, text), lowp.encode(x, text)
    with kernels.use("triton"):
        assert torch.equal(bits(lowp.quantize(x, text)), bits(values))
        found = lowp.encode(x, text)
    assert torch.equal(found.payload, wanted.payload) and torch.equal(found.scale, wanted.scale)


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(one, marks=pytest.mark.slow) for one in DTYPES[1:])])
@pytest.mark.parametrize("text", ["nvfp4:4/6", "if4", pytest.param("e2m1@e5m2@fp32/32:4/6", marks=pytest.mark.slow)])
def test_blocks_have_the_smaller_of_two_errors_also_where_these_are_nearly_equal(
    text: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowp.kernels.triton import launch

    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 1024)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(96, 64, generator=generator)
    x[32:64] = torch.randint(0, 15, (32, 64), generator=generator) / 2.0  # whole numbers and their midpoints
    x[64:72], x[72:76] = 6.0, torch.eye(4, 64) * 7.0  # all alike; alone
    x[76:80] = x[76:80].clamp(-2.0, 2.0)
    x[80:] *= torch.logspace(-7, 0, 16)[:, None]  # under scales of few bits
    x[5, 3], x[7, 40], x[9, :16] = torch.inf, torch.nan, 0.0
    x = torch.cat((x, x * 0.7)).to(dtype)
    small = torch.zeros(2, 64, dtype=dtype)  # whose first scale is zero, and the second is not
    small[:, ::3], small[0, 0] = 3.2e-6 * x.abs().nan_to_num(0.0, 0.0).max(), x.abs().nan_to_num(0.0, 0.0).max()
    x = torch.cat((x, small))
    for scaled in (x, x * 2.0**-120, x * 2.0**105) if dtype is torch.float32 else (x,):
        wanted, codes = lowp.quantize(scaled, text), lowp.encode(scaled, text)
        with kernels.use("triton"):
            assert torch.equal(bits(lowp.quantize(scaled, text)), bits(wanted))
            found = lowp.encode(scaled, text)
        assert torch.equal(found.payload, codes.payload) and torch.equal(found.scale, codes.scale)


@pytest.mark.parametrize("text", ["int8", "e4m3fn@fp32/row", "nvfp4", "mxfp8", "mxfp4"])
@pytest.mark.usefixtures("small_programs")
def test_the_usual_path_serves_all_programs_with_finite_numbers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.triton import scaled

    def without_others(*given: object) -> scaled.ScaledCastPlan:
        made = planned(*given)
        assert made is not None and (made.sharing.near or made.sharing.summed or made.sharing.direct)
        return made._replace(sharing=made.sharing._replace(again=False))

    # one of many bf16 numbers is half of the largest, in int8 nearly the midpoint 63.5
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    values, wanted = lowp.quantize(x, text), lowp.encode(x, text).payload
    planned = scaled.planned
    monkeypatch.setattr(scaled, "planned", without_others)
    with kernels.use("triton"):
        assert torch.equal(lowp.quantize(x, text), values)
        assert torch.equal(lowp.encode(x, text).payload, wanted)


def test_every_format_of_the_table_but_these_has_a_kernel() -> None:
    assert {name for name in NAMED if not served(name, torch.float32)} == {
        *("flex16+5", "dfp16", "int16"),  # mantissas, and more bits than a quotient in fp32 decides
        *("int8-affine", "ternary", "binary"),
    }


def test_elements_and_scales_have_a_kernel_whose_products_fp32_holds() -> None:
    has = {
        **dict.fromkeys(
            ["e5m2@e5m2@fp32/32", "e3m4@e4m3fn@fp32/32", "e2m5@e4m3fn@fp32/32", "nvfp4:nearest-away"], True
        ),
        **dict.fromkeys(
            ["e2m1@e3m2@fp32/16", "e4m3fn@ue4m3@fp32/32", "i8@e4m3fn@fp32/16"], False
        ),  # scales without NaN
        **dict.fromkeys(["if4:nearest-away", "if4:stochastic", "nvfp4:up"], False),
    }
    for codes in (False, True):
        assert {text: served(text, torch.float32, codes) for text in has} == has


@pytest.mark.parametrize(
    "text", ["mxfp8:up", "int8:stochastic", "mxfp8:static(0)", "int8-affine", "e4m3fn@e8m0/24", "nvfp4:4/6:stochastic"]
)
def test_what_no_kernel_has_is_computed_as_before(text: str) -> None:
    x = numbers(torch.float32)
    with kernels.use("triton"):
        found = lowp.quantize(x, text, seed=1)
    assert torch.equal(bits(found), bits(lowp.quantize(x, text, seed=1)))


def test_blocks_that_are_cut_short_and_single_numbers_are_computed_as_before() -> None:
    for x in (numbers(torch.float32)[:, :40], torch.tensor(3.0), torch.ones(0, 32)):
        with kernels.use("triton"):
            found = lowp.quantize(x, "mxfp8")
        assert torch.equal(bits(found), bits(lowp.quantize(x, "mxfp8")))


def test_a_long_row_is_read_twice_and_several_programs_take_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.triton import launch

    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 64)
    x = torch.randn(2, 160, generator=torch.Generator().manual_seed(0))
    for text in ("int8", "mxfp8:stochastic", "nvfp4"):
        with kernels.use("triton"):
            found = lowp.quantize(x, text, seed=9)
        assert torch.equal(found, lowp.quantize(x, text, seed=9))


def test_pieces_draw_the_bits_of_the_whole() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    wanted = lowp.quantize(x, "mxfp4:stochastic", seed=3)
    with kernels.use("triton"):
        assert torch.equal(lowp.quantize(x[2:], "mxfp4:stochastic", seed=torch.tensor(3), offset=64), wanted[2:])


def test_what_16_bits_or_codes_cannot_hold_is_refused_as_before() -> None:
    infinite = torch.full((32,), torch.inf, dtype=torch.float16)  # the largest of nothing finite is 0: a tiny scale
    bad = torch.randn(32)
    bad[3] = torch.nan
    with kernels.use("triton"):
        with pytest.raises(InvalidInput, match=r"mxint8: torch.float16 cannot hold every result exactly"):
            lowp.quantize(infinite, "mxint8")
        with pytest.raises(InvalidInput, match=r"1 of 32 numbers are NaN, which i8s has no code for"):
            lowp.encode(bad, "int8")


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4", "mxfp4:stochastic", "if4"])
def test_packed_codes_of_four_bits_are_written_in_the_same_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(torch.float32)[[2, 5, 6, 8, 9]]
    expected = lowp.encode(x, name, seed=2, packed=True)
    with monkeypatch.context() as patch, kernels.use("triton"):
        if served(name, torch.float32, codes=True):
            patch.setattr(packing, "pack", None)
            if name != "if4":  # whose whole numbers torch reads
                patch.setattr(packing, "unpack", None)
        found = lowp.encode(x, name, seed=2, packed=True)
        values = lowp.dequantize(found)
    assert found.length == expected.length == 64 and found.payload.shape == (5, 32)
    assert torch.equal(found.payload, expected.payload) and torch.equal(found.scale, expected.scale)
    assert torch.equal(values, lowp.dequantize(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "int8:stochastic", "e5m2@fp32/tensor", TILES, "if4"])
@pytest.mark.usefixtures("small_programs")
def test_operands_keep_their_infinities_and_nans(text: str, dtype: torch.dtype) -> None:
    x = numbers(dtype)[3:8].repeat(4, 1).contiguous()
    x[1, :3] = torch.tensor([torch.nan, -torch.inf, torch.inf])
    found = []
    for way in ("bitwise", "triton"):
        with kernels.use(way):
            found.append(quantize_operand(x, parse(text), 5, False))
    assert torch.equal(bits(found[0]), bits(found[1])) and torch.equal(found[1].isinf(), x.isinf())


@pytest.mark.parametrize("text", ["nvfp4", "int8", "mxfp8", "e4m3fn@fp32/tensor"])
def test_a_tensor_of_zeros_has_the_scales_of_the_definition(text: str) -> None:
    found = []
    for way in ("bitwise", "triton"):
        with kernels.use(way):
            found.append(lowp.encode(torch.zeros(2, 32), text))
    for part in ("payload", "scale", "outer"):
        one, other = (getattr(each, part) for each in found)
        assert one is other is None or torch.equal(one, other), part


@pytest.mark.parametrize(("columns", "offset"), [(64, 0), (64, 4), (64, 2), (6, 0), (6, 4)])
@pytest.mark.parametrize("text", ["int8:stochastic", "e5m2@fp32/tensor:stochastic"])
def test_draws_of_any_place_and_length_of_a_row_are_those_of_the_definition(
    text: str, columns: int, offset: int
) -> None:
    x, found = torch.randn(3, columns, generator=torch.Generator().manual_seed(3)), []
    for way in ("bitwise", "triton"):
        with kernels.use(way):
            found.append(lowp.quantize(x, text, seed=5, offset=offset))
    assert torch.equal(*found)


def test_a_matrix_of_whole_tiles_is_cast_by_a_kernel_and_one_with_parts_of_tiles_is_not() -> None:
    from lowp.kernels.triton import scaled

    assert scaled.quantize_groups(torch.ones(8, 32), parse(TILES), 0) is not None
    assert scaled.quantize_groups(torch.ones(6, 32), parse(TILES), 0) is None


@pytest.mark.parametrize("size", [4, 16, 128])
def test_signs_of_a_rotation_are_those_of_the_definition(size: int) -> None:
    from lowp.kernels.triton import calls

    for seed in (7, torch.tensor(2**61 + 12345)):
        cpu = torch.device("cpu")
        assert torch.equal(calls.signs(size, seed, cpu), hadamard.signs(size, seed, cpu))


@pytest.mark.parametrize("text", ["mxfp8:current(headroom=8)", "mxfp8:nearest-away:current(headroom=8)"])
def test_midpoints_under_the_largest_scale_are_decided_alike(text: str) -> None:
    x = torch.arange(32, 60) / 32 * 2.0**127  # elements from 1 on are eighths, and their midpoints sixteenths
    x = torch.cat((x, x[:4] / 2**7)).view(1, 32)
    wanted, codes = lowp.quantize(x, text), lowp.encode(x, text)
    with kernels.use("triton"):
        assert torch.equal(lowp.quantize(x, text), wanted)
        found = lowp.encode(x, text)
    assert torch.equal(found.payload, codes.payload) and torch.equal(found.scale, codes.scale)


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4:nearest-away"])
def test_quotients_by_subnormal_products_of_scales_are_rounded_once(text: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(1, 13, (16, 32), generator=generator) / 2 * (1 + torch.rand(16, 1, generator=generator))
    x[:, 0] = 6.5
    for power in (-118, -123, -127):
        scaled = x * 2.0**power
        with kernels.use("reference"):
            wanted = lowp.encode(scaled, text)
        with kernels.use("triton"):
            found = lowp.encode(scaled, text)
        assert torch.equal(found.payload, wanted.payload) and torch.equal(found.scale, wanted.scale), power
