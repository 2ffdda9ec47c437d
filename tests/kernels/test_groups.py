"""Casts under shared scales by the C++ library have the bits of the definition, on every instruction set and thread."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from exact_casts import bits, inputs
from torch import Tensor

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.casts import checks, cpu_groups
from lowp.kernels.casts.functions import quantize_operand
from lowp.kernels.numbers import packing, scaled
from lowp.quantized import Quantized

NAMED = [name for name, row in FORMATS.items() if isinstance(row, ScaledFormat)]
SPELLED = [
    "e4m3fn@fp32/tensor",
    "e5m2@fp32/row",
    "i8s@fp32/channel",
    "e2m1@2^-20..20/4",
    "i4s@e4m3fn/16",
    "i8s@fp16/row",
]
SPELLED += [
    "e3m2@e8m0/tensor",
    "e4m0fn@fp32/row",
    "bf16@e8m0/32",
    "i8s@fp64/row",
    "e2m1@e4m3fn@fp16/16",
    "e5m7@fp32/row",
]
SPELLED += ["i4s@e4m3fn@fp32/16", "bf16-tpu@fp32/row", "e4m3fn@e8m0/5", "e4m3fnuz@e8m0/32", "e4m3fn@e5m2@fp32/8"]
SPELLED += ["mxfp8:rceil", "mxfp4:ceil", "mxfp4:even", "mxint8:rceil", "e5m2@e8m0/32:even", "e2m1@2^-1022..20/4:ceil"]
SPELLED += ["mxfp8:static(-127)", "mxfp8:static(0)", "dfp16:static(-8)"]
NEAREST = ("", "nearest-away", "saturate", "current(headroom=2)")
OTHERS = ("toward-zero", "up", "down", "to-odd", "stochastic", "stochastic-8", "stochastic-b-6", "stochastic-c-6")
SETS = cpu.available() if cpu.library() is not None else ()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    if not SETS:
        pytest.skip("the C++ library was not built")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    cpu.select(None)


def numbers(text: str, dtype: torch.dtype) -> Tensor:
    """Return rows whose quotients are every code, midpoint and neighbour of the element, under scales of all sizes.

    Every 16 numbers begin with one that makes the scale known, exactly for powers of two. More rows have infinities and
    NaNs, zeros of both signs, subnormal numbers, and small numbers beside huge ones.
    """
    cast, generator = parse(text), torch.Generator().manual_seed(2)
    element = cast.element
    points = inputs(element, torch.float64, random=0, at_most=40).nan_to_num(1.0, 1.0, 1.0)
    points = points.clamp(-element.maximum, element.maximum)
    rows = -(-len(points) // 60)
    x = torch.nn.functional.pad(points, (0, 60 * rows - len(points))).reshape(rows, 4, 15)
    x = torch.cat([torch.full((rows, 4, 1), float(element.maximum)), x], dim=-1).reshape(rows, 64)
    scale = torch.rand(rows, 1, generator=generator) + 1
    scale = scale if not scaled.scaled_format(cast).has_powers_of_two else torch.ones(rows, 1)
    x = (x * scale).to(dtype)
    x[1::3] = torch.nextafter(x[1::3], x.new_tensor(torch.inf))
    more = torch.randn(9, 64, generator=generator) * 2.0 ** torch.randint(-6, 6, (9, 64), generator=generator)
    more[0] *= 2.0**-130
    more[1] *= 2.0**100
    more[2, :32], more[2, 32:] = 0.0, -0.0
    more[3, 5], more[3, 40], more[4, 6] = torch.inf, -torch.inf, -torch.nan
    more[5], more[5, 3] = 0.0, 1e-45
    more[6] = torch.rand(64, generator=generator) * 2.0**-126
    more[7, ::2], more[7, 1::2] = 3.4e38, -1e-38
    more[8], more[8, 0] = 1e-40, 2.0**20
    return torch.cat([x, more.to(dtype)])


def outcome(call: object, *arguments: object, **named: object) -> object:
    """Return a result, or the words of what refuses it."""
    try:
        return call(*arguments, **named)  # type: ignore[operator]
    except InvalidInput as error:
        return str(error)


def parts(result: object) -> list[object]:
    """Return what is compared: a text, the bits of a tensor, or those of all tensors of a Quantized."""
    if isinstance(result, Quantized):
        return [result.length, *(part for one in (result.payload, result.scale, result.outer) for part in parts(one))]
    if isinstance(result, Tensor):
        return [result.shape, result.dtype, bits(result) if result.is_floating_point() else result]
    return [result]


def agree(one: object, other: object) -> bool:
    pairs = zip(parts(one), parts(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)


def compare(x: Tensor, text: str, sets: tuple[str, ...] = SETS) -> None:
    """Compare values, codes, packed codes and their values on all instruction sets with the definition."""
    cast = parse(text)
    marks = getattr(cast.element, "has_nan", False) or "e8m0" in cast.format.spelling or bool(cast.format.outer)  # type: ignore[union-attr]
    coded = x if marks else x.nan_to_num(posinf=1.0, neginf=-1.0)
    with kernels.use("bitwise"):
        values = outcome(kernels.quantize, x, cast, seed=5)
        codes = [outcome(kernels.encode, coded, cast, seed=5, packed=packed) for packed in (False, True)]
        decoded = [outcome(kernels.dequantize, q) for q in codes if isinstance(q, Quantized)]
    for name in sets:
        cpu.select(name)
        assert agree(outcome(kernels.quantize, x, cast, seed=5), values), (name, text, x.dtype)
        found = [outcome(kernels.encode, coded, cast, seed=5, packed=packed) for packed in (False, True)]
        assert all(map(agree, found, codes)), (name, text, x.dtype)
        again = [outcome(kernels.dequantize, q) for q in codes if isinstance(q, Quantized)]
        assert all(map(agree, again, decoded)), (name, text, x.dtype)


def with_mode(text: str, mode: str) -> str | None:
    """Return a cast in words; None if the format has no such cast."""
    is_float = isinstance(parse(text).element, FloatFormat)
    has_scaling = parse(text).scaling != parse("mxfp8").scaling
    if (has_scaling and mode.startswith("current")) or (mode == "saturate" and not is_float):
        return None
    return f"{text}:{mode}" if mode else text


@pytest.mark.parametrize("text", [*NAMED, *SPELLED])
def test_values_and_codes_are_those_of_the_definition(text: str) -> None:
    x = numbers(text, torch.float32)
    for cast in filter(None, (with_mode(text, mode) for mode in (*NEAREST, *OTHERS))):
        compare(x, cast)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_tensors_of_other_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    for text in (*NAMED, "e4m3fn@fp32/tensor", "i8s@fp16/row", "e5m2@fp32/channel"):
        x = numbers(text, dtype)
        for cast in (text, f"{text}:stochastic", f"{text}:up"):
            if checks.holds(parse(cast), dtype):
                compare(x, cast)
                compare(x[1:3], cast)  # 16 bits hold these under every scale


@pytest.mark.parametrize("instruction_set", SETS)
def test_products_halfway_between_two_numbers_of_bf16_are_rounded_to_the_even_one(instruction_set: str) -> None:
    cpu.select(instruction_set)
    wholes = torch.arange(-127.0, 128).view(1, -1)
    wanted = (3 * wholes).bfloat16()
    assert (wanted != 3 * wholes).any()
    x = (3 * wholes).double().sub(wholes.sign()).bfloat16()  # nearer to 3 * wholes than to its neighbours
    found = cpu_groups.quantize_scaled(x, parse("i8s@fp32/row"), torch.tensor([[3.0]], dtype=torch.float64), 0)
    assert torch.equal(bits(found), bits((3 * (x.double() / 3).round()).float().bfloat16()))
    most = torch.full((2, 64), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    for text in ("int8", "nvfp4"):
        assert torch.isfinite(lowp.quantize(most, text)).all()
        compare(most, text)


@pytest.mark.parametrize(
    "shape", [(), (1,), (70,), (5, 40), (3, 2, 33), (4, 3000), (2, 17_000), (40, 1), (3, 1025)], ids=str
)
def test_groups_may_be_cut_short_long_or_alone(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    for text in (
        "mxfp8",
        "mxfp6",
        "mxfp4:stochastic",
        "nvfp4",
        "int8",
        "int4",
        "dfp16:up",
        "e2m1@fp32/7",
        "i8s@fp32/channel",
        "e3m2@e8m0/tensor",
        "e4m3fn@e8m0/2000:stochastic",
        "e4m3fn@e4m3fn@fp32/20000",
    ):
        compare(x, text, SETS[-1:])


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "int8", "dfp16", "mxfp4:stochastic", "mxfp8-e5m2:stochastic"])
def test_the_number_of_threads_changes_no_bit_and_many_numbers_are_drawn_for(text: str) -> None:
    x = torch.randn(70, 1024, generator=torch.Generator().manual_seed(5))
    x = x * torch.exp2(torch.randint(-20, 1, x.shape, generator=torch.Generator().manual_seed(6)))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        compare(x, text, SETS if threads == 1 else SETS[-1:])


@pytest.mark.parametrize("text", [*NAMED, *SPELLED])
def test_groups_along_another_dimension_have_the_bits_of_rows(text: str) -> None:
    cast, x = parse(text), numbers(text, torch.float32)
    if scaled.scaled_format(cast).scope.kind == "tensor":
        pytest.skip("one scale")
    finite = x.nan_to_num(1.0, 2.0, -2.0)
    wide = torch.randn(2, 70, 9, 31, generator=torch.Generator().manual_seed(9))
    for name in SETS:
        cpu.select(name)
        for mode in ("", "nearest-away", "up", "toward-zero", "stochastic"):
            cast = parse(with_mode(text, mode) or text)
            for one, axis in ((x.t().contiguous(), 0), (finite.t().contiguous(), 0), (wide, 1), (wide, -2), (wide, 0)):
                found = quantize_operand(one, cast, 3, False, axis=axis)
                wanted = quantize_operand(one.movedim(axis, -1).contiguous(), cast, 3, False).movedim(-1, axis)
                assert torch.equal(bits(found), bits(wanted)), (name, text, mode, axis)
                runs = bool(one.isfinite().all()) and scaled.follow_largest(cast)
                runs = runs and (one.dim() == 2 or scaled.scaled_format(cast).scope.kind != "channel")
                assert found.is_contiguous() or not runs


SHORT = ["nvfp4", "int8", "mxfp4", "i8s@e4m3fn/16", "e4m3fn@fp32/row", "e3m2@e4m3fn@fp32/12", "e2m1@fp32/40"]


@pytest.mark.parametrize("mode", ["nearest-even", "stochastic"])
@pytest.mark.parametrize("text", SHORT)
def test_numbers_of_few_bits_near_midpoints_and_along_columns_have_the_bits_of_the_definition(
    text: str, mode: str
) -> None:
    cast, generator = parse(f"{text}:{mode}"), torch.Generator().manual_seed(11)
    for shape in ((96, 300), (2, 40, 17), (37, 45)):
        normal = torch.randn(shape, generator=generator)
        for x in (normal, normal.bfloat16(), torch.randint(-8, 9, shape, generator=generator) / 2, normal.half()):
            for axis in range(len(shape)):
                rows = x.float().movedim(axis, -1).contiguous()
                with kernels.use("bitwise"):
                    wanted = kernels.quantize(rows, cast, seed=12345678901).movedim(-1, axis)
                for name in SETS:
                    cpu.select(name)
                    out, along = torch.empty(shape), axis if axis < len(shape) - 1 else -1
                    assert cpu_groups.quantize_finite(x, cast, 12345678901, out, along)
                    assert torch.equal(out, wanted), (name, shape, x.dtype, axis)


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "int8", "e2m1@fp32/7", "mxfp4:static(0)", "e4m3fn@fp32/20000"])
@pytest.mark.parametrize("shape", [(3, 70), (2, 17_000), (5, 40_000)], ids=str)
def test_a_cast_tells_whether_all_numbers_are_finite(text: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(10))
    for threads, turned in ((1, False), (3, False), (1, True), (3, True)):
        torch.set_num_threads(threads)
        one, axis = (x.t().contiguous(), 0) if turned else (x, 1)
        assert cpu_groups.quantize_finite(one, parse(text), 0, torch.empty_like(one), axis)
        for bad in (torch.inf, -torch.inf, torch.nan, -torch.nan):
            for place in (0, one.numel() // 2, one.numel() - 1):
                other = one.clone()
                other.view(-1)[place] = bad
                assert not cpu_groups.quantize_finite(other, parse(text), 0, torch.empty_like(one), axis)


@pytest.mark.parametrize("text", ["mxfp8", "mxfp8:rceil", "mxfp4", "nvfp4", "if4", "int8", "e5m2@fp32/row", "dfp16"])
def test_blocks_around_fp32_s_largest_number_have_the_bits_of_the_definition(text: str) -> None:
    largest = torch.finfo(torch.float32).max
    signs = torch.randn(12, 96, generator=torch.Generator().manual_seed(0)).sign()
    x = signs * largest * torch.linspace(0.4, 1, 96).pow(3) * 2.0 ** -torch.arange(12.0)[:, None]
    x[::3, :32] *= 2.0**-60  # blocks far below beside them
    with kernels.use("cpu"):
        found = lowp.quantize(x, text)
    with kernels.use("reference"):
        assert torch.equal(bits(found), bits(lowp.quantize(x, text)))


@pytest.mark.parametrize("text", ["mxfp8", "mxfp8:rceil", "mxfp4", "e5m2@e8m0/32", "mxint8", "dfp16", "i8s@e8m0/row"])
def test_blocks_of_every_magnitude_have_the_bits_of_the_definition(text: str) -> None:
    x = torch.randn(277, 64, generator=torch.Generator().manual_seed(0))
    x[::5, 32:], x[::7, :8] = -0.0, x[::7, :8] * 2.0**-9
    x = (x.double() * 2.0 ** (torch.arange(277.0) - 149)[:, None].double()).float()
    compare(x, text)
    for row in range(0, 277, 9):  # alone: a strip of near scales only
        compare(x[row], text, SETS[-1:])


def test_results_may_be_in_place_and_tensors_begin_at_any_byte() -> None:
    x = torch.randn(9, 4100, generator=torch.Generator().manual_seed(7))
    for text in ("mxfp8", "mxfp8:stochastic", "nvfp4", "int8", "dfp16", "int8-affine"):
        wanted = kernels.quantize(x, text)
        own, memory = x.clone(), bytearray(x.numel() * 4 + 1)
        assert torch.equal(kernels.quantize(own, text, out=own), wanted)
        moved = torch.frombuffer(memory, dtype=torch.float32, count=x.numel(), offset=1).view_as(x).copy_(x)
        assert torch.equal(kernels.quantize(moved, text), wanted)
        assert torch.equal(kernels.quantize(x, text, out=moved), wanted)
        assert torch.equal(kernels.quantize(x.t().contiguous().t(), text), wanted)


def test_a_scale_that_is_given_is_that_of_a_result_in_place() -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(7))
    for text, scale in (("e4m3fn@fp32/tensor", torch.tensor(3.0)), ("int8", torch.full((9, 1), 0.125))):
        wanted = kernels.quantize(x, text, scale=scale)
        assert not torch.equal(wanted, kernels.quantize(x, text))
        assert torch.equal(kernels.quantize(x, text, scale=scale, out=torch.empty_like(x)), wanted)


def test_pieces_draw_the_bits_of_the_whole() -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(8))
    for text in ("mxfp4:stochastic", "i8s@fp32/row:stochastic-9", "nvfp4:stochastic"):
        with kernels.use("bitwise"):
            wanted = kernels.quantize(x, text, seed=3, offset=96 * 5)
        assert torch.equal(kernels.quantize(x, text, seed=3, offset=96 * 5), wanted)


def test_the_library_casts_every_format_of_the_table_but_those_of_other_scales() -> None:
    x = torch.randn(2, 64)
    left = {name for name in NAMED if cpu_groups.quantize_groups(x, parse(name), 0) is None}
    assert left == {"int8-affine", "ternary", "binary"}
    assert {name for name in NAMED if cpu_groups.encode_groups(x, parse(name), 0, True) is None} == left
    decoded = (cpu_groups.decode_groups(kernels.encode(x, name)) for name in NAMED)
    assert all(isinstance(found, Tensor) for found in decoded)


# a scope, a shape and an axis; the layout: numbers, a row of them, how many share a scale there, the distance of a
# row's numbers and how many neighbouring rows share scales; None where the definition has to move the axis
LAYOUTS: list[tuple[str, tuple[int, ...], int, tuple[int, ...] | None]] = [
    ("i8s@fp32/tensor", (4, 6), 0, (24, 24, 24, 1, 1)),
    ("i8s@fp32/tensor", (), -1, (1, 1, 1, 1, 1)),
    ("i8s@fp32/row", (2, 3, 4), -1, (24, 4, 4, 1, 1)),
    ("i8s@fp32/row", (2, 3, 4), 2, (24, 4, 4, 1, 1)),
    ("i8s@fp32/row", (2, 3, 4), 1, (24, 3, 3, 4, 1)),
    ("i8s@fp32/row", (2, 3, 4), -3, (24, 2, 2, 12, 1)),
    ("i8s@fp32/row", (5,), 0, (5, 5, 5, 1, 1)),
    ("i8s@fp32/channel", (2, 3, 4), -1, (24, 12, 12, 1, 1)),
    ("i8s@fp32/channel", (2, 3, 4), 0, None),
    ("i8s@fp32/channel", (2, 6), 0, (12, 2, 2, 6, 1)),
    ("i8s@fp32/channel", (2, 6), 1, (12, 6, 6, 1, 1)),
    ("mxfp8", (4, 96), -1, (384, 96, 32, 1, 1)),
    ("mxfp8", (4, 20), -1, (80, 20, 20, 1, 1)),
    ("mxfp8", (64, 5), 0, (320, 64, 32, 5, 1)),
    ("mxfp8", (2, 64, 5), -2, (640, 64, 32, 5, 1)),
    ("e4m3fn@fp32/8x4", (16, 12), -1, (192, 16, 8, 12, 4)),
    ("e4m3fn@fp32/8x4", (16, 12), 1, (192, 16, 8, 12, 4)),
    ("e4m3fn@fp32/8x4", (16, 4), -1, (64, 64, 32, 1, 1)),
    ("e4m3fn@fp32/8x4", (3, 16, 12), 2, (576, 16, 8, 12, 4)),
    ("e4m3fn@fp32/8x4", (16, 12), 0, None),
    ("e4m3fn@fp32/4x256", (8, 512), -1, (4096, 8, 4, 512, 256)),
    ("e4m3fn@fp32/4x257", (8, 514), -1, None),
    ("e4m3fn@fp32/4x257", (8, 257), -1, (2056, 2056, 1028, 1, 1)),
]


@pytest.mark.parametrize(("text", "shape", "axis", "layout"), LAYOUTS)
def test_the_library_is_told_how_groups_lie(
    text: str, shape: tuple[int, ...], axis: int, layout: tuple[int, ...] | None
) -> None:
    found = cpu_groups.groups_along(torch.Size(shape), parse(text), axis)
    assert (None if found is None else tuple(found)) == layout
    x, out = torch.randn(shape), torch.empty(shape)
    assert cpu_groups.quantize_finite(x, parse(text), 0, out, axis) is (layout is not None)
    x.view(-1)[-1] = math.nan
    assert not cpu_groups.quantize_finite(x, parse(text), 0, out, axis)


PACKED = [((4, 64), 32, 4), ((4, 64), 32, 6), ((3, 5), 5, 4), ((1, 5), 5, 4), ((5,), 5, 3), ((2, 8), 4, 3)]
PACKED += [((2, 8), 8, 3), ((1, 9), 4, 3), ((4, 64), 32, 8), ((4, 64), 32, 1), ((2, 4), 4, 2), ((2, 6), 6, 4)]


@pytest.mark.parametrize(("shape", "group", "bits"), PACKED)
def test_packed_rows_and_groups_are_written_in_one_pass_where_all_begin_at_whole_bytes(
    shape: tuple[int, ...], group: int, bits: int
) -> None:
    columns, rows = shape[-1], math.prod(shape[:-1])
    begins = [row * columns * bits for row in range(rows)]
    begins += [begin + at * bits for begin in begins for at in range(0, columns, group)]
    is_whole = all(begin % 8 == 0 for begin in begins) and 1 < bits < 8
    assert cpu_groups._fills_bytes(torch.Size(shape), group, bits) is is_whole


def test_empty_tensors_and_those_without_their_own_scales_are_left_to_the_definition() -> None:
    for text in ("mxfp8", "i8s@fp32/tensor", "nvfp4"):
        assert cpu_groups.quantize_groups(torch.ones(0, 32), parse(text), 0) is None
        assert cpu_groups.encode_groups(torch.ones(0, 32), parse(text), 0, True) is None
        assert cpu_groups.quantize_groups(torch.ones(1, 32), parse(text), 0) is not None
    out = torch.empty(2, 32)
    assert cpu_groups.quantize_groups(torch.ones(2, 32), parse("mxfp8"), 0, out) is out and bool((out == 1).all())
    assert cpu_groups.encode_groups(torch.ones(8, 8), parse("e4m3fn@fp32/8x4"), 0, True) is None  # tiles
    assert cpu_groups.encode_groups(torch.ones(8, 8), parse("i17s@fp32/row"), 0, True) is None
    q = kernels.encode(torch.ones(2, 64), "mxfp4", packed=True)
    kept = dict(payload=q.payload, scale=q.scale, cast=q.cast, zero_point=None, outer=None, dtype=q.dtype, length=64)
    for changed in (
        {"payload": q.payload.to(torch.int32)},
        {"scale": q.scale[:, :1]},
        {"scale": q.scale.float()},
        {"cast": parse("e2m1@e8m0/4x16")},
    ):
        assert cpu_groups.decode_groups(Quantized(**{**kept, **changed})) is None  # type: ignore[arg-type]
    assert torch.equal(cpu_groups.decode_groups(Quantized(**kept)), torch.ones(2, 64))  # type: ignore[arg-type]


def test_codes_in_another_layout_are_decoded_by_the_definition() -> None:
    q = kernels.encode(torch.randn(3, 64), "mxfp4", packed=True)
    wider = Quantized(torch.nn.functional.pad(q.payload, (0, 2)), q.scale, q.cast, None, None, q.dtype, q.length)
    assert torch.equal(kernels.dequantize(wider), kernels.dequantize(q))
    turned = Quantized(q.payload.t().contiguous().t(), q.scale.t().contiguous().t(), q.cast, None, None, q.dtype, 64)
    assert torch.equal(kernels.dequantize(turned), kernels.dequantize(q))


RULED = [f"{name}:{rule}" for name in ("mxfp8", "mxfp4", "mxfp6") for rule in ("floor", "rceil", "ceil", "even")]


@pytest.mark.parametrize("text", RULED)
def test_the_rule_of_a_scale_is_that_of_exact_fractions(text: str) -> None:
    cast, rule = parse(text), text.partition(":")[2]
    largest = Fraction(cast.element.maximum)
    top = math.floor(math.log2(largest))
    assert isinstance(cast.element, FloatFormat)
    digits = cast.element.mantissa_bits
    maxima = torch.cat([step * 2.0 ** torch.arange(-20.0, 20) for step in torch.linspace(1, 2, 257)[:-1]])
    x = torch.zeros(len(maxima), 32)
    x[:, 3] = maxima
    scales = 2.0 ** (lowp.encode(x, cast).scale.to(torch.float64).flatten() - 127)
    for maximum, scale in zip(maxima.tolist(), scales.tolist(), strict=True):
        exact = Fraction(maximum)
        least = math.floor(math.log2(maximum)) - top
        significand = exact / Fraction(2) ** math.floor(math.log2(maximum))
        doubled = {
            "floor": False,
            "rceil": exact / largest > Fraction(2) ** least,
            "ceil": significand > 1,
            "even": round(significand * 2**digits) == 2 ** (digits + 1),  # Python rounds ties to even
        }[rule]
        assert scale == 2.0 ** (least + doubled), maximum


def test_under_rceil_no_number_saturates() -> None:
    x = torch.full((1, 32), 500.0)
    assert lowp.quantize(x, "mxfp8").unique().tolist() == [448.0]
    assert lowp.quantize(x, "mxfp8:rceil").unique().tolist() == [512.0]


TRIED = ["nvfp4:4/6", "nvfp4:stochastic:4/6", "e2m1@fp32/32:4/6", "e2m1@e4m3fn@fp32/16x16:4/6", "e2m1@e4m3fn/20:4/6"]
EITHER = [f"e2m1+i4s@e4m3fn@fp32/{rest}" for rest in ("16", "16:stochastic", "300")]  # the first is if4
EITHER += ["e2m1+i4s@e5m2@fp32/20", "e2m3+i6s@e4m3fn@fp32/16"]


@pytest.mark.parametrize("text", TRIED + EITHER)
def test_four_or_six_or_either_element_has_the_smaller_error_of_two(text: str) -> None:
    x = torch.randn(32, 80, generator=torch.Generator().manual_seed(4)) * torch.logspace(-6, 3, 80)
    x[3, :20] = 0.0
    x[4] *= 1e-20  # whose scales are zero
    cast = parse(text)
    plain, tried = (kernels.quantize(x, one) for one in (re.sub(r":4/6|\+i\ds", "", text), text))
    if not cast.is_stochastic:
        assert ((x - tried) ** 2).double().sum() < ((x - plain) ** 2).double().sum()
    if "@fp32/32" not in text:  # whose groups have no scale of NaN
        x[5, 3], x[6, 40] = math.inf, math.nan
    with kernels.use("bitwise"):
        wanted, codes = kernels.quantize(x, cast, seed=5), kernels.encode(x, cast, seed=5, packed=True)
    found = kernels.quantize(x, cast, seed=5)
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num()) and torch.equal(found.isnan(), wanted.isnan())
    again = kernels.encode(x, cast, seed=5, packed=True)
    assert torch.equal(again.payload, codes.payload) and torch.equal(again.scale, codes.scale)
    assert torch.equal(kernels.dequantize(again).nan_to_num(), wanted.nan_to_num())


def test_a_block_that_four_serves_better_gets_it() -> None:
    x = torch.tensor([[10.0, 20.0, 30.0, 40.0] * 4, [15.0, 30.0, 60.0, 10.0] * 4])  # the example of the paper
    found = kernels.quantize(x, "e2m1@fp32/16:4/6")
    assert torch.equal(found, x)
    assert not torch.equal(kernels.quantize(x, "e2m1@fp32/16"), x)
    q = lowp.encode(x, "nvfp4:4/6")
    assert q.outer is not None and float(q.outer) == pytest.approx(60 / (256 * 6))


def test_a_block_of_if4_has_the_element_of_the_smaller_squared_error_as_its_authors_compute_it() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    outer = (x.abs().max() / (6 * 448)).float().double()
    blocks = x.reshape(-1, 16) / outer
    scale = kernels.quantize(blocks.abs().amax(1, keepdim=True) / 6, "e4m3fn:saturate")
    floats = kernels.quantize(blocks / scale, "e2m1") * scale
    wholes = (blocks / scale * 7 / 6).clamp(-7, 7).round() * 6 / 7 * scale
    takes_wholes = (wholes - blocks).square().sum(1) < (floats - blocks).square().sum(1)
    q = kernels.encode(x, "if4")
    assert torch.equal(q.scale.reshape(-1) > 127, takes_wholes) and 0.3 < takes_wholes.double().mean() < 0.8
    assert q.outer == outer.float()
    wanted = torch.where(takes_wholes[:, None], wholes, floats).reshape(x.shape) * outer
    torch.testing.assert_close(kernels.quantize(x, "if4"), wanted, rtol=1e-15, atol=0)


def test_every_code_of_if4_has_its_value_under_scales_of_both_signs_and_of_few_bits() -> None:
    scales = torch.tensor([0x38, 0x01, 0x07, 0x7E, 0x00], dtype=torch.uint8)  # 1; subnormal; the largest; zero
    payload = torch.arange(16, dtype=torch.uint8).repeat(10, 1)
    q = Quantized(payload, torch.cat((scales, scales | 0x80))[:, None], parse("if4"), torch.tensor(0.5))
    by = 0.5 * kernels.decode(scales, "e4m3fn", dtype=torch.float64)[:, None]
    whole = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float64)
    floats = kernels.decode(payload[0], "e2m1", dtype=torch.float64)
    wanted = torch.cat((by * floats, whole * (by * 6 / 7))).float()
    assert torch.equal(kernels.dequantize(q), wanted)
    packed = replace(q, payload=packing.pack(payload, q.cast.element), length=16)
    assert torch.equal(kernels.dequantize(packed), wanted)
    with kernels.use("reference"):
        assert torch.equal(kernels.dequantize(q), wanted) and torch.equal(kernels.dequantize(packed), wanted)


@pytest.mark.parametrize("text", TRIED + EITHER)
def test_groups_whose_errors_are_equal_or_nearly_are_decided_as_the_definition_decides(text: str) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(0, 15, (64, 80), generator=generator) / 2.0  # whole numbers and their midpoints, under ...
    x[:8], x[8:16] = 6.0, torch.eye(8, 80) * 7.0  # all alike; alone
    x[16:24] = x[16:24].clamp(max=2.0)  # exact under both
    x[24:32] = 2.5 + torch.rand(8, 80, generator=generator) * 2**-20
    x = torch.cat((x, x * 0.7, x * torch.logspace(-9, 0, 64)[:, None]))  # ... scales of many bits, and of few
    x[5, 3], x[7, 40], x[9, 2] = math.inf, math.nan, -0.0
    x *= torch.randint(0, 2, x.shape, generator=generator) * 2.0 - 1
    compare(x, text)
    compare(x * 2.0**-125, text)
    compare(x[:, :5].double() / 3, text)
    for name in SETS if scaled.follow_largest(parse(text)) and "x16" not in text else ():
        cpu.select(name)
        assert cpu_groups.quantize_finite(x[10:], parse(text), 0, out := torch.empty_like(x[10:]), 0)
        assert torch.equal(out, kernels.quantize(x[10:].t().contiguous(), text).t())


def test_a_block_of_if4_that_both_elements_serve_alike_has_floats() -> None:
    q = kernels.encode(torch.tensor([[6.0] + 15 * [0.0], [7.0, 1.0, 3.0, 5.0] * 4]), "e2m1+i4s@e4m3fn@fp32/16")
    assert (q.scale > 127).flatten().tolist() == [False, True]
    assert q.payload[1].tolist() == [7, 1, 3, 5] * 4


@pytest.mark.parametrize("text", ["nvfp4:4/6", "e2m1@e4m3fn/20:4/6", "if4", "if4:stochastic"])
def test_columns_are_tried_as_the_rows_of_the_transpose(text: str) -> None:
    x = torch.randn(100, 300, generator=torch.Generator().manual_seed(4))
    out = torch.empty_like(x)
    assert cpu_groups.quantize_finite(x, parse(text), 0, out, 0)
    assert torch.equal(out, kernels.quantize(x.t().contiguous(), text).t())


def test_the_largest_number_of_a_tensor_is_divided_to_the_largest_scale_times_element() -> None:
    assert scaled.largest_scaled(parse("nvfp4")) == 448 * 6
    assert scaled.largest_scaled(parse("nvfp4:4/6")) == 256 * 6, "a scale of 384, too, is in e4m3"
    assert scaled.largest_scaled(parse("nvfp4:eden")) == 256 * 6 / (0.93 * 17 / 16)
    # the largest scales of these are 3 * 2^7, of which 4 / 6 is a power of two, 13 * 2^12 and 5 * 2^29
    largest = {"e4m2fn": 256 * 6, "ue5m3nuz": 32768 * 6, "binary8p3ue": 2**30 * 6}
    assert {name: scaled.largest_scaled(parse(f"e2m1@{name}@fp32/16:4/6")) for name in largest} == largest


@pytest.mark.parametrize("to", ["mxfp8", "nvfp4", "e4m3fn", "int8"])
def test_an_operand_is_given_in_the_dtype_that_was_asked_for(to: str) -> None:
    x = torch.randn(4, 32)
    wanted = lowp.quantize(x, to)
    for is_traced in (False, True):
        assert torch.equal(quantize_operand(x, parse(to), 0, is_traced), wanted)
        if to in ("mxfp8", "e4m3fn"):  # whose values bf16 has
            found = quantize_operand(x, parse(to), 0, is_traced, torch.bfloat16)
            assert found.dtype is torch.bfloat16 and torch.equal(found.float(), wanted)


@pytest.mark.parametrize("to", ["e4m3fn:saturate", "i8s", "mxint8"])
def test_operands_that_are_not_finite_are_given_as_they_are_in_the_dtype_that_was_asked_for(to: str) -> None:
    x = torch.randn(4, 32)
    x[1, 2], x[3, 4] = torch.inf, torch.nan
    for is_traced in (False, True):
        found = quantize_operand(x, parse(to), 0, is_traced, torch.bfloat16)
        wide = quantize_operand(x, parse(to), 0, is_traced)
        assert found.dtype is torch.bfloat16 and wide.dtype is torch.float32
        assert torch.equal(found.float().nan_to_num(7.0), wide.nan_to_num(7.0))
        assert found[1, 2] == torch.inf and found[3, 4].isnan() and found[0].isfinite().all()


@pytest.mark.parametrize(("to", "dtype"), [("i8s@2^-200..55/32", torch.uint8), ("i8s@2^-200..99/32", torch.uint16)])
def test_scales_of_more_than_8_bits_are_kept_in_16(to: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0] * 32, [2.0**60] * 32, [2.0**-100] * 32])
    found = kernels.encode(x, to)
    assert isinstance(found, Quantized) and found.scale.dtype is dtype
    assert torch.equal(kernels.dequantize(found), lowp.quantize(x, to))


@pytest.mark.parametrize("name", [name for name in kernels.available() if name != "native"])
def test_the_scale_of_signs_is_the_mean_of_the_finite_magnitudes(name: str) -> None:
    with kernels.use(name):
        assert lowp.quantize(torch.tensor([[3.0], [-5.0]]), "binary").tolist() == [[3.0], [-5.0]]
        assert lowp.quantize(torch.tensor([[1.0, -2.0, 6.0]]), "binary").tolist() == [[3.0, -3.0, 3.0]]
    x = torch.tensor([[3.0, torch.inf, torch.nan], [torch.nan] * 3])
    assert scaled._mean_magnitude(x, parse("binary").format.scope).flatten().tolist() == [3.0, 1.0]
    assert scaled._mean_magnitude(torch.full((1, 0), 0.0), parse("binary").format.scope).tolist() == [1.0]


def test_the_scale_of_a_ternary_row_is_the_mean_of_the_magnitudes_above_seven_tenths_of_their_mean() -> None:
    rows = [[7.0, -13.0, 10.0], [10.0, 1.0, -1.0], [math.nan, math.inf, -5.0], [0.0, 0.0, -0.0], [math.inf] * 3]
    found = scaled._mean_of_large(torch.tensor(rows, dtype=torch.float64), parse("ternary").format.scope)
    assert found.tolist() == [11.5, 10.0, 5.0, 1.0, 1.0]


FOLLOWING = [
    "mxfp8",
    "nvfp4",
    "int8",
    "dfp16:static(-8)",
    "mxfp8:static(0)",
    "i8s@e8m0/row:static(3)",
    "e4m3fn@ue5m3/32",
]
FOLLOWING += ["e4m3fn@fp32/tensor:current(headroom=2)", "e3m2@e4m3fn/16", "e4m3fn@e8m0/row", "ue8m0nuz@fp32/32"]
FOLLOWING += ["if4", "e2m1+i4s@e4m3fn@fp32/1", "e2m1+i4s@e4m3fn@fp32/256", "nvfp4:4/6", "e2m1@fp32/1:4/6"]
FOLLOWING += ["e2m1@fp32/256:4/6"]
OTHERWISE = ["fp16", "int8-affine", "binary", "ternary", "nvfp4:eden", "e8m0@fp32/32", "mxfp8:delayed", "int8:delayed"]
OTHERWISE += ["e4m3fn@fp32/tensor:static(0)", "if4:static(0)", "e2m1+i4s@e4m3fn@fp32/257", "e2m3+i6s@e4m3fn@fp32/16"]
OTHERWISE += ["e2m1@fp32/257:4/6", "e2m1@fp32/row:4/6", "dfp16:delayed"]


@pytest.mark.parametrize("text", FOLLOWING + OTHERWISE)
def test_scales_that_follow_from_the_largest_magnitudes_are_told_from_others(text: str) -> None:
    assert scaled.follow_largest(parse(text)) is (text in FOLLOWING)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("e4m3fn@e8m0/tensor:delayed", [2.0**-8, 2.0**-8, 2.0**-4, 1.0]),
        ("e4m3fn@e8m0/tensor:delayed(headroom=2)", [2.0**-6, 2.0**-6, 2.0**-2, 1.0]),
        ("dfp16:delayed(headroom=1)", [2.0**-13, 2.0**-13, 2.0**-9, 1.0]),
        ("e4m3fn@fp32/tensor:delayed(headroom=1)", [2 / 448, 3 / 448, 60 / 448, 1.0]),
        ("i8s@fp32/tensor", [1 / 127, 1.5 / 127, 30 / 127, 1.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scales_of_maxima_are_those_of_groups(text: str, wanted: list[float], dtype: torch.dtype) -> None:
    found = scaled.scale_of_maxima(torch.tensor([1.0, 1.5, 30.0, 0.0], dtype=dtype), parse(text))
    assert found.dtype is dtype and torch.equal(found, torch.tensor(wanted).to(dtype))


@pytest.mark.parametrize("name", [name for name in kernels.available() if name != "native"])
def test_a_scale_of_nan_marks_groups_that_are_not_finite_where_scales_have_up_to_8_bits(name: str) -> None:
    x = torch.full((3, 32), 3.0)
    x[0, 3], x[1, 20] = math.inf, math.nan
    with kernels.use(name):
        for scale, marks in (
            ("e4m3fn", True),
            ("e3m3fn", True),
            ("e5m3", False),
            ("fp16", False),
            ("e4m3finite", False),
        ):
            found = kernels.quantize(x, f"e2m1@{scale}/16")
            whole = [found[0, :16].isnan().all(), found[1, 16:].isnan().all()]
            assert whole == [marks, marks] and bool((found[0, 16:] == 3).all() and (found[2] == 3).all()), scale
            if not marks:
                others = torch.cat((found[0, :3], found[0, 4:16], found[1, 16:20], found[1, 21:]))
                assert bool((others == 3).all()), scale


def test_ternary_elements_are_symmetric_integers_of_2_bits_under_fractions() -> None:
    ternary = {"ternary": True, "i2s@fp32/row": True, "i2s@fp32/16": True}
    others = ("i2@fp32/row", "i3s@fp32/row", "i2s@e8m0/row", "i2s@fp16/row", "int8-affine", "i2s@fp32/row/affine")
    every = {**ternary, **dict.fromkeys((*others, "e2m1@fp32/row", "fp16", "i2s", "binary"), False)}
    assert {text: scaled.is_ternary(parse(text).format) for text in every} == every


@pytest.mark.parametrize("bits", [2, 8, 31, 32])
@pytest.mark.parametrize("mode", ["nearest-even", "nearest-away", "up", "down", "toward-zero", "to-odd", "stochastic"])
def test_integers_with_a_zero_point_reach_over_the_whole_range(bits: int, mode: str) -> None:
    x = torch.tensor([[0.0, 1.0, 3.0, 2.0**-20], [-3.0, -1.0, 0.5, -0.1]], dtype=torch.float64)
    to, found = f"i{bits}@fp64/row/affine:{mode}", []
    for name in kernels.available():
        if name != "native":
            with kernels.use(name):
                coded = kernels.encode(x, to, seed=3)
                found += [kernels.quantize(x, to, seed=3), kernels.dequantize(coded)]
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], x, rtol=0, atol=1.5 * 3.5 / (2**bits - 1))
    assert bool(found[0][0, 2] == found[0][0].amax()) and bool(found[0][1, 0] == found[0][1].amin())
