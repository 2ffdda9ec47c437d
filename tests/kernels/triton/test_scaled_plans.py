"""Which instructions a cast under shared scales has, on both sides of each bound, and how its programs are launched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.kernels.numbers.philox import Draw

scaled = pytest.importorskip("lowp.kernels.triton.scaled", reason="triton is not installed")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WORDS = ("power", "low", "outer", "marks", "codes", "loses", "direct", "near", "summed")
# of values in fp32, in 16 bits, and of codes: the properties of the scale, with those of `Layout.nan`, and "wide"
PLANS = {
    "mxfp8": ("power marks summed above", "power marks loses summed above", "power marks codes direct"),
    "mxfp8-e5m2": ("power marks summed above", "power marks loses summed above", "power marks codes direct"),
    "mxfp8:stochastic": ("power marks above", "power marks loses above", "power marks codes direct"),
    "mxfp8:nearest-away": ("power marks above", "power marks loses above", "power marks codes direct"),
    "mxfp4:ceil": ("power marks summed", "power marks loses summed", "power marks codes direct"),
    "mxfp6:current(headroom=1)": ("power marks summed", "power marks loses summed", "power marks codes direct"),
    "e4m3ftz@e8m0/32": ("power marks above", "power marks loses above", "power marks codes above"),
    "e4m0fn@e8m0/32": ("power marks above", "power marks loses above", "power marks codes above"),
    "e3m2fnuz@e8m0/32": ("power marks minus-zero", "power marks loses minus-zero", "power marks codes direct"),
    "i3@e8m0/32": ("power marks", "power marks loses", "power marks codes direct"),
    "i8s@2^-133..121/32": ("power low", "power low loses", "power low codes loses direct"),
    "e4m3fn@2^-128..121/32:current(headroom=2)": (
        *("power low summed above", "power low loses summed above"),
        "power low codes direct above",
    ),
    "e4m3fn@2^-127..127/32": ("power summed above", "power loses summed above", "power codes direct above"),
    "e2m1@2^-127..127/32": ("power summed", "power loses summed", "power codes loses direct"),
    "e2m1@e8m0@fp32/16": ("power marks summed", "power marks loses summed", "power marks codes direct"),
    "int8": ("near", "near", "codes loses near"),
    "i3@fp32/row": ("near", "near", "codes loses near"),
    "int8:nearest-away": ("", "", "codes loses"),
    "int8:stochastic": ("wide", "wide", "codes loses wide"),
    "int8:current(headroom=1)": ("", "", "codes loses"),
    "e4m0fn@fp32/row": ("above", "above", "codes above"),
    "e3m2fnuz@fp32/row": ("minus-zero", "minus-zero", "codes minus-zero"),
    "e5m2@fp32/row": ("near above", "near above", "codes near above"),
    "e1m1fn@fp32/tensor": ("near above", "near above", "codes near above"),
    "e4m3fn@fp32/tensor:current(headroom=2)": ("above", "above", "codes above"),
    "nvfp4": ("outer marks near", "outer marks near", "outer marks codes near"),
    "nvfp4:stochastic": ("outer marks wide", "outer marks wide", "outer marks codes wide"),
    "nvfp4:4/6": ("outer marks near tried", "outer marks near tried", "outer marks codes near tried"),
    "if4": ("outer marks near tried", "outer marks near tried", "outer marks codes near tried"),
    "e2m1@e4m3fn@fp32/4x16": ("outer marks near", "outer marks near", "outer marks codes near"),
    "e5m2@e5m2@fp32/32": ("outer marks near above", "outer marks near above", "outer marks codes near above"),
}
# low_bits, the exponent and the number that the largest becomes, what doubles the scale, and the scale's exponents
NUMBERS = {
    "mxfp8": (19, 8, 448.0, 0, -127, 127),
    "mxfp8:current(headroom=1)": (19, 7, 224.0, 0, -127, 127),
    "mxfp8:rceil": (19, 8, 448.0, (1 << 21) - 1, -127, 127),
    "mxfp4:ceil": (21, 2, 6.0, (1 << 23) - 1, -127, 127),
    "i8s@2^-133..121/32": (16, 6, 127.0, 0, -133, 121),
    "i3@fp32/row": (21, 1, 3.0, 0, 0, 0),
    "e4m0fn@fp32/row": (22, 7, 128.0, 0, 0, 0),
    "nvfp4:4/6": (21, 2, 6.0, 0, 0, 0),
}


def words(text: str, dtype: torch.dtype, codes: bool) -> str:
    made = scaled.planned(parse(text), dtype, codes)
    if made is None:
        return "none"
    found = [word for word in WORDS if getattr(made.sharing, word)]
    more = [made.layout.nan] * (made.layout.nan != "none") + ["wide"] * made.form.wide
    return " ".join([*found, *more, *["tried"] * (made.second is not None)])


@pytest.mark.parametrize("text", PLANS)
def test_the_properties_of_a_scale(text: str) -> None:
    values, halves, codes = PLANS[text]
    assert words(text, FP32, False) == values
    assert words(text, BF16, False) == words(text, FP16, False) == halves
    assert words(text, FP32, True) == words(text, BF16, True) == codes
    assert words(text, torch.float64, False) == words(text, torch.float64, True) == "none"


def test_the_numbers_of_a_scale() -> None:
    for text, (low_bits, top, maximum, carry, lowest, highest) in NUMBERS.items():
        made = scaled.planned(parse(text), FP32, False)
        sharing, shared = made.sharing, made.shared
        assert (sharing.low_bits, sharing.tolerance) == (low_bits, 4 if sharing.outer else 0), text
        assert shared[:5] == (top, carry, lowest, highest, maximum), text
        assert shared.inverse == float(np.float32(1 / maximum))
        assert shared.inverse_rest == 1 / maximum - shared.inverse
        assert (sharing.spoils, sharing.keeps, sharing.again) == (False, False, True)
        assert made.second is None or made.second[4:] == (4.0, 0.25, 0.0)
    made = scaled.planned(parse("nvfp4"), FP32, True)  # its scale is e4m3fn, which saturates, and its outer scale fp32
    form, numbers = scaled.plan(parse("e4m3fn:saturate"), FP32)
    assert (made.sharing.form, made.scale_numbers) == (form, numbers)
    assert (made.sharing.layout, made.scale_codes) == scaled.layout(parse("e4m3fn").element, False)
    assert scaled.planned(parse("int8"), FP32, True).sharing.form is None


def test_no_kernel_has_other_scales_and_scopes() -> None:
    for text in (
        *("e4m3fn", "int8:delayed", "mxfp8:static(0)", "int8-affine", "nvfp4:eden", "nvfp4:4/6:stochastic"),
        *("e2m1@e4m3fn@fp32/row:4/6", "e2m1@fp32/16:4/6", "e2m1@e4m3fn@fp32/4x16:stochastic"),
        *(
            "e2m1@bf16/16",
            "e2m1@e4m3fn@bf16/16",
            "e2m1@e4m3finite@fp32/16",
            "e2m1@fp16@fp32/16",
            "e2m1@ue4m3fn@fp32/16",
            "i4s@e4m3fn@fp32/16",
        ),
        *("int8:up", "nvfp4:down", "mxfp8:up", "if4:nearest-away", "if4:stochastic", "e1m2finite+i4s@e4m3fn@fp32/16"),
        *("e4m3ftz@fp32/row", "e2m1ftz@e4m3fn@fp32/16"),
    ):
        assert words(text, FP32, False) == words(text, BF16, True) == "none", text
    assert words("e4m3fn@e8m0/tensor", FP32, True) == "none"  # of zeros alone the scale is 1
    assert words("e4m3fn@e8m0/tensor", FP32, False) == "power marks summed above"


# the last that a kernel has, and the first that none has
BOUNDS = [
    *(("i3@fp32/row", "i2@fp32/row"), ("i8@fp32/row", "i9@fp32/row")),  # bits
    *(("e1m1fn@fp32/row", "e1m0finite@fp32/row"), ("e5m2@fp32/row", "e5m3@fp32/row")),
    ("e4m3@fp32/row", "ue4m3@fp32/row"),
    *(("e3m2b58fn@fp32/row", "e3m2b59fn@fp32/row"), ("e3m2b-52fn@fp32/row", "e3m2b-53fn@fp32/row")),  # to 2**59
    *(("i8s@2^-133..121/32", "i8s@2^-134..121/32"), ("i8s@2^-133..121/32", "i8s@2^-133..122/32")),
    *(("e4m3fn@2^-127..127/32", "e4m3fn@2^-128..127/32"), ("e4m3fn@2^100..127/32", "e4m3fn@2^100..128/32")),
    ("mxfp8:current(headroom=8)", "mxfp8:current(headroom=9)"),
    # the largest element is 1 at least, and 2 where scales are doubled; 64 times that under subnormal scales
    *(("e3m2b7fn@e8m0/32", "e3m2b8fn@e8m0/32"), ("e3m2b6fn@e8m0/32:ceil", "e3m2b7fn@e8m0/32:ceil")),
    ("e3m2b1fn@2^-128..121/32", "e3m2b2fn@2^-128..121/32"),
    ("e3m2b0fn@2^-128..121/32:ceil", "e3m2b1fn@2^-128..121/32:ceil"),
    ("e1m6fn@e2m4fn@fp32/32", "e1m6fn@e2m5fn@fp32/32"),  # 12 bits
    *(("e2m1@e4m3b56fn@fp32/16", "e2m1@e4m3b57fn@fp32/16"), ("e2m1@e4m3b-42fn@fp32/16", "e2m1@e4m3b-43fn@fp32/16")),
    *(("e2m1+i4s@e5m2@fp32/16", "e2m1+i4s@e5m2@bf16/16"), ("nvfp4:nearest-away", "nvfp4:up")),
]


@pytest.mark.parametrize(("last", "first"), BOUNDS)
def test_bounds_of_what_a_kernel_has(last: str, first: str) -> None:
    for codes in (False, True):
        assert words(last, FP32, codes) != "none" == words(first, FP32, codes)


def test_how_many_numbers_share_a_scale() -> None:
    for text, shape, size in (
        *(("e4m3fn@fp32/tensor", (2, 3, 4), 24), ("e4m3fn@fp32/channel", (2, 3, 4), 12), ("int8", (2, 3, 4), 4)),
        *(("mxfp8", (2, 96), 32), ("mxfp8", (2, 48), None), ("mxfp8", (2, 16), 16), ("mxfp8", (2, 24), None)),
        *(("mxfp8", (2, 1), None), ("mxfp8", (0, 32), None), ("mxfp8", (), None), ("int8", (), None)),
        *(("e4m3fn@e8m0/2", (4,), 2), ("e4m3fn@e8m0/512", (1024,), 512), ("e4m3fn@e8m0/1024", (1024,), None)),
    ):
        assert scaled._group(torch.ones(shape), parse(text)) == size, (text, shape)


def test_draws_that_kernels_can_do_begin_at_a_whole_counter() -> None:
    for text, columns, offset, is_served in (
        *(("mxfp8:stochastic", 32, 0, True), ("mxfp8:stochastic", 32, 8, True), ("mxfp8:stochastic", 32, 6, False)),
        *(("int8:stochastic", 64, 4, True), ("int8:stochastic", 64, 1, False), ("int8:stochastic", 6, 4, False)),
        *(("e4m3fn@e8m0/2:stochastic", 2, 0, True), ("int8", 6, 0, True), ("int8:nearest-away", 64, 1, True)),
    ):
        seed = Draw(5, offset) if offset else 5
        found = scaled.quantize_groups(torch.ones(2, columns), parse(text), seed)
        assert (found is not None) == is_served, (text, columns, offset)


def test_groups_are_launched_by_blocks_rows_or_parts_of_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[object, ...]] = []

    def launch(kernel: object, x: torch.Tensor, count: int, block: int, *given: object, warps: int) -> None:
        found.append((kernel.fn.__name__, count, block, given[-1], warps))  # type: ignore[attr-defined]

    def run(kernel: object, grid: tuple[int, ...], *given: object, warps: int = 4) -> None:
        found.append((kernel.fn.__name__, grid, given[-1], warps))  # type: ignore[attr-defined]
        if kernel is scaled.rows.rows:
            found[-1] += (given[-2],)  # whether it is read once

    monkeypatch.setattr(scaled, "launch", launch)
    monkeypatch.setattr(scaled, "run", run)
    assert (scaled.LONGEST_BLOCK, scaled.LONG_ROW, scaled.BLOCK) == (512, 16384, 2048)
    monkeypatch.setattr("lowp.kernels.triton.launch.INTERPRETED_BLOCK", 64)
    for text, shape, *wanted in (
        ("mxfp8", (3, 64), ("blocks", 192, 2048, 32, 4)),
        ("mxfp8:stochastic", (3, 64), ("blocks", 192, 2048, 32, 8)),
        ("if4", (3, 64), ("largest_of_rows", (3, 1), 64, 4), ("tried", 192, 2048, 16, 8)),
        ("int8", (3, 64), ("rows", (3,), 64, 4, True)),
        ("int8", (3, 65), ("rows", (3,), 64, 4, False)),
        ("int8", (3, 33), ("rows", (3,), 64, 4, True)),
        ("int8", (3, 32), ("rows", (3,), 32, 4, True)),
        ("int8:stochastic", (3, 8), ("rows", (3,), 16, 8, True)),
        ("e4m3fn@fp32/channel", (3, 2, 10), ("rows", (3,), 32, 4, True)),
        ("e4m3fn@fp32/tensor", (3, 8192), ("largest_of_rows", (384, 1), 64, 4), ("parts", (384, 1), 64, 4)),
        ("int8", (1, 16384), ("rows", (1,), 64, 4, False)),
        ("int8", (2, 16385), ("largest_of_rows", (257, 2), 64, 4), ("parts", (257, 2), 64, 4)),
    ):
        with kernels.use("triton"):
            lowp.quantize(torch.ones(shape), text)
        assert found == wanted, (text, shape)
        found.clear()
