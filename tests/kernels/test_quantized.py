"""Formats with a shared scale: the scales, the elements, the values, and their storage in `Quantized`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from exact_casts import bits, exact_cast
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels import available, dequantize, encode, quantize, use
from lowp.quantized import Quantized

SCALED = [row for row in FORMATS.values() if isinstance(row, ScaledFormat)]
SPELLED = ["e4m3fn@fp32/tensor", "e5m2@fp32/row", "i8s@fp32/channel", "i8@fp32/tensor/affine", "i4@fp32/8/affine"]
SPELLED += ["i8s@2^-20..20/row", "e2m1@2^-20..20/4", "i4s@e4m3fn/16", "i8s@fp16/row", "e3m2@e8m0/tensor"]
NAMES = [str(row) for row in SCALED] + SPELLED


def sample(*shape: int, scale: float = 1.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * scale
    x.flatten()[:: max(1, x.numel() // 3)].mul_(20)
    return x


def floor_log2(value: float) -> int:
    return math.frexp(value)[1] - 1


# -- the scale --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp6-e3m2", "mxfp4", "mxint8"])
@pytest.mark.parametrize("largest", [1.0, 0.99999994, 1.99, 2.0**-126, 1e-42, 3e38, 448.0])
def test_a_block_is_scaled_as_ocp_mx_says(name: str, largest: float) -> None:
    row = FORMATS[name]
    assert isinstance(row, ScaledFormat)
    x = torch.linspace(-1, 1, 32) * torch.tensor(largest)
    top = row.element.max_exponent if isinstance(row.element, FloatFormat) else 6
    lowest = -127 if isinstance(row.element, FloatFormat) else -133
    exponent = max(floor_log2(x.abs().max().item()) - top, lowest)
    codes = encode(x, name).scale
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [exponent - lowest]
    scale = Fraction(2) ** exponent
    wanted = [exact_cast(float(Fraction(v) / scale), parse(name).element_cast) for v in x.tolist()]
    assert quantize(x.double(), name).tolist() == [float(Fraction(v) * scale) for v in wanted]


def test_the_shared_exponents_of_integers_leave_no_bit_unused() -> None:
    for name, smallest in (("flex16+5", -31), ("dfp16", -128)):
        for largest in (0.5, 0.9999, 1.0, 1.7, 2.0**-14, 2.0**-16, 2.0**-17):
            x = torch.tensor([largest, -largest / 3])
            q = encode(x, name)
            assert q.scale.dtype == torch.int32
            assert q.scale.item() == max(floor_log2(x.max().item()) - 14, smallest)
            if q.scale.item() > smallest:
                assert 1 << 14 <= q.payload.abs().max().item() < 1 << 15
        assert encode(torch.zeros(3), name).scale.item() == 0


def test_headroom_and_static_exponents() -> None:
    x = torch.tensor([1.0, 0.3])
    assert encode(x, "dfp16:current(headroom=2)").scale.item() == -12
    assert encode(x, "dfp16:static(-8)").scale.item() == -8
    assert quantize(x, "dfp16:static(-8)").tolist() == [1.0, 77 / 256]
    assert quantize(x, "dfp16", scale=2.0**-8).tolist() == [1.0, 77 / 256]


def test_integers_are_scaled_to_their_maximum() -> None:
    x = sample(4, 50)
    q = encode(x, "int8")
    assert torch.equal(q.scale, (x.abs().amax(-1).double() / 127).float())
    assert q.payload.abs().amax(-1).tolist() == [127] * 4
    assert torch.equal(q.payload.double(), (x.double() / q.scale.double()[:, None]).round())
    assert encode(torch.zeros(2, 3), "int8").scale.tolist() == [1.0, 1.0]


def test_affine_integers_reach_both_ends_and_zero() -> None:
    x = torch.tensor([[0.5, 3.0, 1.0], [-4.0, 1.0, 0.0], [-3.0, -1.0, -2.0]])
    q = encode(x, "int8-affine")
    assert q.zero_point is not None
    assert torch.allclose(q.scale, torch.tensor([3.0, 5.0, 3.0]) / 255)
    assert q.zero_point.tolist() == [-128, 76, 127]
    assert quantize(torch.zeros(3, 1).expand(3, 4), "int8-affine").eq(0).all()
    assert (dequantize(q) - x).abs().max() <= q.scale.max() / 2


def test_ternary_and_binary_have_their_few_values() -> None:
    x = torch.tensor([[0.9, -0.1, -1.0, 0.6]])
    large = torch.tensor([0.9, 1.0, 0.6]).double().mean().float().item()  # above 0.7 of the mean, 0.65: Li et al. 2016
    assert torch.equal(quantize(x, "ternary"), large * torch.tensor([[1.0, 0.0, -1.0, 1.0]]))
    mean = x.double().abs().mean().float().item()  # Rastegari et al. 2016
    assert torch.equal(quantize(x, "binary"), mean * torch.tensor([[1.0, -1.0, -1.0, 1.0]]))


def test_nvfp4_has_two_levels_of_scale() -> None:
    x = sample(3, 40)
    q = encode(x, "nvfp4")
    assert q.outer is not None
    outer = (x.abs().max().double() / (448 * 6)).float()
    assert torch.equal(q.outer, outer)
    blocks = torch.nn.functional.pad(x, (0, 8)).unflatten(-1, (3, 16)).abs().amax(-1).double() / 6 / outer.double()
    assert torch.equal(q.scale, encode(blocks, "e4m3fn:saturate"))
    assert q.scale.max() == 0x7E  # the block with the largest number has the largest scale, 448


# -- special numbers --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_marks_its_block(name: str, value: float) -> None:
    x = torch.ones(64)
    x[3] = value
    for found in (quantize(x, name), dequantize(encode(x, name))):
        assert found[:16].isnan().all()
        assert torch.equal(found[32:], torch.ones(32))


@pytest.mark.parametrize("name", ["int8", "flex16+5", "dfp16", "mxint8", "int4"])
def test_integers_keep_nan_in_values_and_refuse_it_in_codes(name: str) -> None:
    x = torch.tensor([torch.nan, torch.inf, -0.5, 0.25])
    found = quantize(x, name)
    assert found.isnan().tolist() == [True, False, False, False]
    assert found[1] > 0.4  # saturated, under the scale of the finite numbers
    with pytest.raises(InvalidInput, match="1 of 4 numbers are NaN"):
        encode(x, name)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_tiny_and_huge_numbers_stay_finite(name: str) -> None:
    for value in (0.0, 1e-45, 1e-38, 3.4e38):
        x = torch.full((2, 40), value)
        for found in (quantize(x, name), quantize(-x, name)):
            assert found.isfinite().all()
            assert (found.abs() <= 3.4028235e38).all()
            if value == 0:
                assert (found == 0).all() or name == "binary"


# -- values and codes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_codes_hold_the_values(name: str, packed: bool) -> None:
    tried = [(shape, torch.float32, "") for shape in ((3, 2, 33), (5,), (), (2, 0), (0, 4))]
    tried += [((4, 70), dtype, mode) for dtype in (torch.float32, torch.float64) for mode in ("", ":stochastic")]
    for shape, dtype, mode in [*tried, ((4, 70), torch.float32, ":toward-zero")]:
        x, cast = sample(*shape).to(dtype), f"{name}{mode}"
        q = encode(x, cast, packed=packed, seed=11)
        assert isinstance(q, Quantized)
        if not (packed and shape == ()):
            assert (q.shape, q.dtype, q.device) == (x.shape, dtype, x.device)
            assert torch.equal(bits(dequantize(q)), bits(quantize(x, cast, seed=11)))


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_gives_the_same_bits(name: str) -> None:
    x = sample(5, 70)
    x[2] *= 1e-40
    wanted = quantize(x, name, seed=1)
    for text in (name, f"{name}:stochastic", f"{name}:up"):
        results = []
        for implementation in available():
            if implementation != "native":
                with use(implementation):
                    results.append(bits(quantize(x, text, seed=1)))
        assert all(torch.equal(results[0], other) for other in results[1:])
    assert wanted.shape == x.shape


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_a_value_is_its_element_times_its_scale(numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    for name in ("mxfp4", "dfp16", "mxint8"):
        row = FORMATS[name]
        assert isinstance(row, ScaledFormat)
        q = encode(x, name)
        element = dequantize(q).double()
        # half a unit of the last place of the largest element, unless it saturates
        unit = 2.0 ** (floor_log2(x.abs().max().item()) - (1 if name == "mxfp4" else 14 if name == "dfp16" else 6))
        unit = max(unit, 2.0**-127)
        assert ((element - x.double()).abs() <= unit * (1 + (name == "mxfp4"))).all()


def in_every_implementation(call: Callable[[], Tensor]) -> list[Tensor]:
    found = []
    for name in available():
        if name != "native":
            with use(name):
                found.append(call())
    return found


@pytest.mark.parametrize("kind", ["delayed", "autoflex", "frozen", "reactive"])
def test_a_scale_from_tensors_before_is_asked_for_in_words(kind: str) -> None:
    x = torch.tensor([3.0, -1.0])
    text = f"dfp16:{kind}: a {kind} scale depends on earlier tensors, which a cast does not record: use current "
    with pytest.raises(InvalidInput, match=re.escape(text)):
        quantize(x, f"dfp16:{kind}")
    assert torch.equal(quantize(x, f"dfp16:{kind}", scale=2.0**-13), x)


def test_zero_points_are_those_of_the_element() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0]])
    for found in in_every_implementation(lambda: quantize(x, "int8-affine", scale=(0.25, 127))):
        assert found.tolist() == [[0.0, -2.0, 0.0]]
    for offset in (300, 128, -129, torch.tensor([[math.nan]])):
        for name in available():
            with (
                use(name),
                pytest.raises(InvalidInput, match="is not a number of i8: give whole numbers from -128 to 127"),
            ):
                quantize(x, "int8-affine", scale=(0.25, offset))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_value_too_large_for_its_dtype_saturates(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[0.99 * largest, -0.99 * largest]], dtype=dtype)
    for found in in_every_implementation(lambda: quantize(x, "int8", scale=0.65 * largest)):
        assert found.tolist() == [[largest, -largest]]


def test_the_scale_code_that_is_none_is_nan() -> None:
    q = encode(torch.ones(1, 32), "mxint8")
    q.scale.fill_(255)
    assert dequantize(q).isnan().all()
    with pytest.raises(InvalidInput, match="is not a number of the format of its scale"):
        encode(torch.ones(1, 32), "mxint8", scale=math.nan)


def test_a_zero_keeps_its_sign_in_a_block_too_small_for_its_scale() -> None:
    x = torch.full((1, 32), -0.0)
    x[0, 1], x[0, 16] = -1e-30, 6.0
    wanted = [True] * 16 + [False] + [True] * 15
    for found in in_every_implementation(lambda: quantize(x, "nvfp4")):
        assert found.signbit().tolist() == [wanted]
    assert dequantize(encode(x, "nvfp4")).signbit().tolist() == [wanted]


def test_a_block_longer_than_any_row_is_the_row() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0], [0.5, 7.0, 0.25]])
    for size in (3, 2**20):
        for found in in_every_implementation(lambda size=size: quantize(x, f"i8s@fp32/{size}")):
            assert torch.equal(found, quantize(x, "i8s@fp32/row"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", ["int8", "int8-affine", "nvfp4", "binary", "e4m3fn@fp32/tensor"])
def test_16_bits_take_one_more_rounding(text: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 40).to(dtype)
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    wanted = quantize(quantize(x.double(), text), name).to(dtype)  # torch's own conversion would round twice
    for found in in_every_implementation(lambda: quantize(x, text)):
        assert found.dtype == dtype
        assert torch.equal(found, wanted)
    assert torch.equal(dequantize(encode(x, text)), wanted)


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4", "ternary", "binary", "i4@fp32/tensor"])
def test_a_number_alone_comes_back_alone(text: str) -> None:
    for shape in ((), (1,), (3,)):
        x = torch.full(shape, -1.5)
        for packed in (False, True):
            q = encode(x, text, packed=packed)
            assert q.shape == shape
            assert torch.equal(dequantize(q), quantize(x, text))


def test_payloads_are_as_small_as_documented() -> None:
    x = torch.ones(8, 64)
    sizes = {str(row): encode(x, row, packed=True).nbytes for row in SCALED}
    assert sizes["mxfp8"] == 512 + 16
    assert sizes["mxfp6"] == 512 * 6 // 8 + 16
    assert sizes["mxfp4"] == 256 + 16
    assert sizes["nvfp4"] == 256 + 32 + 4
    assert sizes["dfp16"] == sizes["flex16+5"] == 1024 + 4
    assert sizes["int8"] == 512 + 32
    assert sizes["ternary"] == 128 + 32
    assert sizes["binary"] == 64 + 32
    for row in SCALED:
        kept = encode(x, row).payload.dtype
        signed = isinstance(row.element, IntFormat)
        assert kept == ((torch.int16 if row.bits == 16 else torch.int8) if signed else torch.uint8)
        assert isinstance(row.scale, (FloatFormat, PowerOfTwo))


# -- the value itself -------------------------------------------------------------------------------------------------
def test_a_quantized_moves_and_detaches() -> None:
    q = encode(sample(2, 40).requires_grad_(), "nvfp4")
    moved = q.to("meta")
    assert moved.device.type == "meta"
    assert moved.outer is not None and moved.outer.device.type == "meta"
    assert (moved.shape, moved.cast) == (q.shape, q.cast)
    assert torch.equal(dequantize(q.detach()), dequantize(q))
    assert repr(q) == "Quantized(nvfp4, 2x40, 90 bytes, torch.float32, cpu)"
    with pytest.raises(InvalidInput, match=r"can be moved to a device, not to torch.float16"):
        q.to(torch.float16)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        q.payload = q.scale  # type: ignore[misc]


def test_a_quantized_needs_a_shared_scale() -> None:
    with pytest.raises(InvalidInput, match="fp16 has no shared scale: store its codes in a plain tensor"):
        Quantized(torch.zeros(2), torch.ones(()), parse("fp16"))
