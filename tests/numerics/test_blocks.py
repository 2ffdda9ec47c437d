"""Blocks: what casts whose blocks share a scale do to a tensor, told by ratios of its numbers to their largest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import lowp
from lowp import casts
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, ScaledFormat
from lowp.kernels.numbers import hadamard
from lowp.numerics.blocks import (
    _SIGNS,
    BlockLayout,
    Blocks,
    _some,
    _turned,
    blocks_of,
    layout_of,
    midpoints,
    products_of,
)
from lowp.numerics.prediction import effect
from lowp.numerics.spectrum import Spectrum
from lowp.ops.convolution import Convolution
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Form, Linear

CASTS = ["mxfp8", "mxfp6", "mxfp4", "nvfp4", "mxfp4:ceil", "mxfp8:rceil", "mxfp4:even", "i8s@e8m0/32", "e2m1@fp32/16"]
CASTS += ["mxfp4:stochastic", "nvfp4:stochastic", "nvfp4:eden", "e5m2@e8m0/32", "e2m1@e4m3fn@fp32/16x16"]


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 128, generator=generator)  # as many blocks of 32 as are read
    return {
        "gradients": normal * 1e-6,
        "activations": normal.relu(),
        "weights": torch.rand(64, 128, generator=generator) - 0.5,
        "features": normal * torch.exp(torch.randn(128, generator=generator)),
        "tokens": normal * torch.exp(2 * torch.randn(64, 1, generator=generator)),
    }


def format_of(cast: str) -> ScaledFormat:
    format = casts.parse(cast).format
    assert isinstance(format, ScaledFormat)
    return format


def measured(x: Tensor, cast: str) -> tuple[float, float]:
    """Return the share of nonzero numbers that a cast flushes, and the signal-to-noise ratio in dB."""
    draws = range(16 if casts.parse(cast).is_stochastic else 1)
    cut = torch.stack([lowp.quantize(x, cast, **({"seed": seed} if len(draws) > 1 else {})) for seed in draws])
    ratio = float(len(draws) * (x.double() ** 2).sum() / ((cut.double() - x.double()) ** 2).sum())
    return float((cut == 0)[:, x != 0].float().mean()), 10 * math.log10(ratio)


def test_blocks_of_zeros_count_nothing() -> None:
    x, zeros = tensors()["weights"][:32], torch.zeros(32, 128)
    found, padded = (blocks_of(one, "weight", "linear", 0.5) for one in (x, torch.cat((x, zeros))))
    plain = [layout for layout in found if not layout.turned]  # signs of rotations go by place
    assert plain and all(np.array_equal(found[layout].counts, padded[layout].counts) for layout in plain)
    assert not any(one.counts.any() for one in blocks_of(zeros, "weight", "linear", 0.5).values())


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("axis", [1, 0])
def test_what_a_cast_flushes_and_rounds_is_told(cast: str, axis: int) -> None:
    for what, x in tensors().items():
        seen = Spectrum.of(x)
        layout = BlockLayout(0 if "x16" in cast else axis, str(format_of(cast).scope))
        told = effect(seen, casts.parse(cast), 1.0, blocks_of(x, "weight", "linear", seen.maximum)[layout])
        flushed, ratio = measured(x if axis else x.t().contiguous(), cast)
        assert told.flushed == pytest.approx(flushed, abs=0.015), what
        assert told.signal_to_noise == pytest.approx(ratio, abs=1.0), what
        assert not told.is_bound and not told.overflows


@pytest.mark.parametrize("turned", [16, 32])
def test_rotated_blocks_are_told_too(turned: int) -> None:
    for what, x in tensors().items():
        seen = Spectrum.of(x)
        blocks = blocks_of(x, "input", "linear", seen.maximum)[BlockLayout(0, "16", turned)]
        rotated = [hadamard.rotate(x.t(), hadamard.signs(turned, seed, x.device)) for seed in range(8)]
        flushed, ratio = measured(torch.stack(rotated), "nvfp4")
        told = effect(seen, casts.parse("nvfp4"), 1.0, blocks)
        assert told.flushed == pytest.approx(flushed, abs=0.015), what
        assert told.signal_to_noise == pytest.approx(ratio, abs=0.5), what


def test_blocks_whose_scale_a_format_of_scales_flushes_are_flushed() -> None:
    x = torch.randn(64, 128) * torch.exp2(-torch.arange(64.0))[:, None]
    seen = Spectrum.of(x)
    told = effect(seen, casts.parse("nvfp4"), 1.0, blocks_of(x, "input", "linear", seen.maximum)[BlockLayout(1, "16")])
    assert told.flushed == pytest.approx(measured(x, "nvfp4")[0], abs=0.02) and told.flushed > 0.7


@pytest.mark.parametrize("text", ["nvfp4:4/6", "if4"])
def test_the_better_of_two_scales_or_elements_is_a_bound(text: str) -> None:
    x = tensors()["gradients"]
    seen = Spectrum.of(x)
    blocks = blocks_of(x, "input", "linear", seen.maximum)[BlockLayout(1, "16")]
    told = effect(seen, casts.parse(text), 1.0, blocks)
    assert told.is_bound and told.signal_to_noise < measured(x, text)[1]


def _convolution(transposed: bool) -> Convolution:
    return Convolution((2, 8, 5, 5), (8, 8, 3, 3), (1, 1), (0, 0), (1, 1), transposed, (0, 0), 1)


@pytest.mark.parametrize("op", ["linear", "conv2d", "conv_transpose2d"])
def test_blocks_follow_the_dimension_that_each_product_sums(op: str) -> None:
    if op == "linear":
        form: Form = Linear((8, 16), (4, 16))
        shapes = (2, 2)
    else:
        form, shapes = _convolution("transpose" in op), (4, 4)
    roles = {OUTPUT: ("input", "weight"), FIRST: ("weight", "grad"), SECOND: ("input", "grad")}
    names = {OUTPUT: "forward", FIRST: "input_gradient", SECOND: "weight_gradient"}
    for slot, pair in form.contracted.items():
        told = products_of(op)[names[slot]]
        for role, axis, dims in zip(roles[slot], pair, shapes, strict=True):
            last = -1 if told[role] == dims - 1 else told[role]
            assert last == axis, (names[slot], role)


def test_layouts_are_those_of_rows_images_and_weights() -> None:
    plain = {"1/16", "1/32", "0/16", "0/32", "0/16x16"}
    turned = {f"0/{size} hadamard={turned}" for size in (16, 32) for turned in (16, 32)}
    image = torch.randn(3, 40, 6, 7)
    told = blocks_of(image, "input", "conv2d", 5.0)
    assert {str(one) for one in told} == {"1/16", "1/32", "-1/16", "-1/32"}
    one, alone = (blocks_of(x, "input", "conv2d", 5.0) for x in (image[:1], image[0]))
    assert one.keys() == told.keys() and all(np.array_equal(alone[key].counts, one[key].counts) for key in one)
    rows, tokens = (blocks_of(x, "input", "linear", 5.0) for x in (image[0, 0], image[0, :1]))
    assert {str(key) for key in rows} == (plain | turned) - {"0/16x16"}
    assert all(np.array_equal(tokens[key].counts, rows[key].counts) for key in rows)
    assert {str(key) for key in blocks_of(image, "weight", "", 5.0)} == {"0/16", "0/32", "1/16", "1/32"}
    batches = blocks_of(image[None], "input", "conv2d", 5.0)
    assert all(np.array_equal(batches[key].counts, one.counts) for key, one in told.items())
    weight = blocks_of(torch.randn(40, 50), "weight", "embedding", 5.0)
    assert {str(one) for one in weight} == plain | turned
    assert not blocks_of(image, "input", "matmul", 5.0) and not blocks_of(image * 0, "input", "conv2d", 0.0)
    assert layout_of("linear", "weight_gradient", "grad", format_of("nvfp4"), 16) == BlockLayout(0, "16", 16)
    assert layout_of("linear", "weight_gradient", "grad", format_of("nvfp4"), 64) is None
    assert layout_of("linear", "forward", "weight", format_of("int8"), 0) is None


def test_blocks_are_added_and_come_back_from_plain_data() -> None:
    (blocks, *_) = blocks_of(torch.randn(64, 64), "input", "linear", 5.0).values()
    twice = blocks + blocks
    assert np.array_equal(twice.counts, 2 * blocks.counts) and twice.counts[0].sum() == 3 * 2 * 64 * 64
    assert np.array_equal(Blocks.read(twice.document()).counts, twice.counts)
    assert len(str(twice.document())) < 1500
    with pytest.raises(InvalidInput, match="it contains invalid blocks: 3 counts, but there must be 290"):
        Blocks.read([1, 2, 3])
    for layout in blocks_of(torch.randn(64, 64), "weight", "linear", 5.0):
        assert BlockLayout.parse(str(layout)) == layout


@pytest.mark.parametrize("length", [15, 17, 31, 33, 40])
def test_what_is_left_of_a_row_after_whole_blocks_is_no_block(length: int) -> None:
    found = blocks_of(torch.ones(7, length), "weight", "", 1.0)
    read = min(length, 32)
    for size in (16, 32):
        own = min(size, length)
        assert found[BlockLayout(1, str(size))].counts[0, 0] == 7 * (read // own) * own


# -- by the definition ------------------------------------------------------------------------------------------------
def bin_of(ratio: float) -> int:
    """Eight bins an octave down to 2^-8, one an octave down to 2^-40, and whatever is smaller in the last of those."""
    fraction, exponent = math.frexp(ratio)
    if exponent > -8:
        return 8 * (1 - exponent) - math.floor(8 * (2 * fraction - 1))
    return min(64 - 8 - (exponent - 1), 96)


def defined(blocks: Tensor, largest: float) -> np.ndarray:
    """Count blocks [n, size] number by number."""
    counts, energy = np.zeros((2, 145)), float((blocks.double() ** 2).sum())
    for block in blocks.abs().numpy():
        top = block.max()
        fraction, exponent = math.frexp(top)
        places = 97 + int((2 * fraction - 1) * 16), 113 + min(math.frexp(largest)[1] - exponent, 31)
        for number in block[block > 0]:
            counts[:, [bin_of(number / top), *places]] += np.array([[1.0], [1e6 * float(number) ** 2 / energy]])
    return counts


def wide(*shape: int) -> Tensor:
    """Numbers of 50 octaves, of which the largest of a row is mostly large, and zeros."""
    generator = torch.Generator().manual_seed(5)
    found = torch.randn(shape, generator=generator)
    found *= torch.exp2(-torch.randint(50, shape, generator=generator).float())
    found[torch.rand(shape, generator=generator) < 0.1] = 0.0
    return found


def test_blocks_are_counted_by_their_definition() -> None:
    x = wide(48, 64)
    x[:, :16] *= 2.0**-40  # below the last octave that is told apart
    largest = float(x.abs().max())
    found = blocks_of(x, "weight", "", largest)
    tiles = x.reshape(3, 16, 4, 16).transpose(1, 2).flatten(2).reshape(-1, 256)
    wanted = {
        "1/16": x.reshape(-1, 16),
        "1/32": x.reshape(-1, 32),
        "0/16": x[:32].mT.reshape(-1, 16),  # of the longest blocks that are whole
        "0/32": x[:32].mT.reshape(-1, 32),
        "0/16x16": tiles,
    }
    for layout, blocks in wanted.items():
        counts = found[BlockLayout.parse(layout)].counts
        told = defined(blocks, largest)
        assert np.array_equal(counts[0], told[0]), layout
        assert np.abs(counts[1] - told[1]).max() <= 0.51, layout


def test_blocks_of_images_and_of_weights_of_two_rows_are_counted_by_their_definition() -> None:
    x, flat = wide(2, 20, 6, 18), wide(2, 64)
    largest = 2.0**5
    images, rows = blocks_of(x, "input", "conv2d", largest), blocks_of(flat, "weight", "", largest)
    for found, layout, blocks in (
        (images, "1/32", x.movedim(1, -1).reshape(-1, 20)),
        (images, "-1/16", x[..., :16].reshape(-1, 16)),
        (rows, "0/16x16", flat.reshape(2, 4, 16).transpose(0, 1).reshape(4, 32)),
        (rows, "0/32", flat.T),
    ):
        told = defined(blocks, largest)
        assert np.array_equal(found[BlockLayout.parse(layout)].counts[0], told[0]), layout


def test_the_points_of_a_bin_of_ratios_are_spread_over_it_and_counted_in_it() -> None:
    points = midpoints()
    assert points.shape == (97, 8) and (points[0] == 1).all()
    steps = np.diff(points[1:], axis=1)
    assert np.allclose(steps, steps[:, :1], rtol=1e-9, atol=0) and (steps > 0).all()
    lower, upper = points[1:, 0] - steps[:, 0] / 2, points[1:, -1] + steps[:, 0] / 2
    assert upper[0] == 1 and np.allclose(upper[1:], lower[:-1], rtol=1e-9, atol=0) and lower[-1] == 2.0**-40
    rows = torch.from_numpy(np.concatenate((np.ones((97, 1)), points, np.zeros((97, 7))), axis=1)).float()
    (counts,) = (
        one.counts[0] for layout, one in blocks_of(rows, "input", "linear", 1.0).items() if str(layout) == "1/16"
    )
    assert counts[:97].tolist() == [97 + 8, *[8] * 96]


def test_some_of_many_blocks_are_read_all_over_the_tensor() -> None:
    x = torch.arange(40.0 * 8 * 4).reshape(40, 32)
    assert torch.equal(torch.from_numpy(_some(x, 4, 1, 320)), x.reshape(-1, 4))
    found = _some(x, 4, 1, 256)
    starts = np.sort(found[:, 0]) / 4
    assert found.shape == (256, 4) and (np.diff(found) == 1).all() and len(set(starts)) > 240
    assert starts[0] == 0 and starts[-1] > 317 and np.diff(starts).max() <= 3
    tiles = _some(x, 8, 4, 7)
    assert tiles.shape == (7, 32)
    assert all((one.reshape(8, 4) == one[0] + np.arange(8)[:, None] + 32 * np.arange(4)).all() for one in tiles)
    image = torch.randn(2, 8, 3, 5)
    assert torch.equal(torch.from_numpy(_some(image.movedim(1, -1), 32, 1, 256)), image.movedim(1, -1).reshape(-1, 8))
    for op, counted in (("input", 256 * 32), ("weight", 64 * 256)):
        layout = BlockLayout(1, "32") if op == "input" else BlockLayout(0, "16x16")
        assert blocks_of(torch.ones(512, 32 * 3), op, "linear", 1.0)[layout].counts[0, 0] == counted


def test_rotations_mix_so_many_neighbours_under_signs_that_no_other_block_has() -> None:
    assert _SIGNS.shape == (256 * 32,) and _SIGNS[:8].tolist() == [1, -1, -1, -1, 1, 1, 1, 1]
    assert (_SIGNS**2 == 1).all() and abs(_SIGNS.mean()) < 0.03
    blocks = torch.randn(3, 40).numpy()
    for size, whole in ((16, 32), (32, 32)):
        found = _turned(blocks, size)
        signed = (blocks[:, :whole].reshape(-1) * _SIGNS[: 3 * whole]).reshape(-1, size)
        matrix = np.array([[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)])
        wanted = (signed @ matrix / math.sqrt(size)).reshape(3, whole)
        assert np.allclose(found[:, :whole], wanted, rtol=1e-4, atol=1e-5)
        assert np.array_equal(found[:, whole:], blocks[:, whole:])


@pytest.mark.parametrize(
    ("filled", "document"),
    [({}, [-290]), ({0: 5, 289: 3}, [5, -288, 3]), ({1: 7, 2: 1, 100: 2}, [-1, 7, 1, -97, 2, -189])],
)
def test_zeros_are_written_by_their_number(filled: dict[int, int], document: list[int]) -> None:
    counts = np.zeros(290, np.int64)
    counts[list(filled)] = list(filled.values())
    blocks = Blocks(counts.reshape(2, 145))
    assert blocks.document() == document and np.array_equal(Blocks.read(document).counts, blocks.counts)
    assert Blocks.read([*document, 0]).document() == document, "no zeros add nothing"
    with pytest.raises(InvalidInput, match="invalid blocks: 291 counts"):
        Blocks.read([*document, -1])


def test_shares_are_those_of_what_was_counted() -> None:
    counts = np.zeros((2, 145), np.int64)
    counts[0, [0, 97, 113]], counts[1, [96, 112, 144]], counts[1, 0] = 1, 3, 9
    blocks = Blocks(counts)
    assert [one.shape for one in (blocks.ratios, blocks.significands, blocks.below)] == [(2, 97), (2, 16), (2, 32)]
    assert (blocks.ratios[0, 0], blocks.ratios[1, 0], blocks.ratios[1, 96]) == (1.0, 0.75, 0.25)
    assert (blocks.significands[0, 0], blocks.significands[1, 15]) == (1.0, 1.0)
    assert (blocks.below[0, 0], blocks.below[1, 31]) == (1.0, 1.0)
    assert not Blocks(counts * 0).ratios.any()


LARGEST = {
    "mxfp4": 7.9375,
    "mxfp4:rceil": 5.9375,
    "mxfp4:ceil": 3.96875,
    "mxfp4:even": 6.9375,
    "mxfp4:stochastic": 7.9375,
}


@pytest.mark.parametrize("cast", [*LARGEST, "mxfp6", "mxfp8"])
def test_of_ratios_and_significands_that_lie_evenly_the_shares_are_those_of_a_cast(cast: str) -> None:
    heads = 1 + (torch.arange(32) + 0.5) / 32
    ratios = torch.from_numpy(midpoints()[1:63:2]).flatten().reshape(8, 31)  # of every second bin down to 2^-8
    rows = torch.cat((torch.ones(8, 1, dtype=torch.float64), ratios), 1)
    x = (heads[:, None, None] * rows).reshape(256, 32).float()
    seen = Spectrum.of(x)
    told = effect(seen, casts.parse(cast), 1.0, blocks_of(x, "input", "linear", seen.maximum)[BlockLayout(1, "32")])
    flushed, ratio = measured(x, cast)
    assert told.flushed == pytest.approx(flushed, abs=1e-9 if "stochastic" not in cast else 0.005)
    assert told.signal_to_noise == pytest.approx(ratio, abs=0.05)
    element = format_of(cast).element
    assert isinstance(element, FloatFormat) and told.maximum == element.maximum
    assert told.largest == LARGEST.get(cast, told.largest)
    if "stochastic" not in cast:
        scales = torch.exp2(lowp.encode(x, cast).scale.double() - 127).expand(256, 1)  # of whole rows
        sizes = (x.double() / scales).abs()
        is_small = (sizes < element.smallest_normal) & (lowp.quantize(x, cast) != 0)
        assert told.subnormal == pytest.approx(float(is_small.double().mean()), abs=1e-9)


@pytest.mark.parametrize(
    ("cast", "exponent", "octave"),
    [
        *(("nvfp4", 0, octave) for octave in (1, 13, 15, 17, 19)),  # scales from the largest down to none
        *((cast, power, 1) for cast in ("i8s@e4m3fn/16", "e2m1@e4m3fn/16") for power in (-9, -4, 3, 13)),
        *(("e4m3fn@e5m2/16", power, 1) for power in (-9, 9)),
        *((f"e2m1@{scale}/16", -12, 1) for scale in ("fp16", "bf16", "e8m8", "fp32")),
    ],
)
def test_scales_of_few_bits_are_rounded_as_those_of_a_cast(cast: str, exponent: int, octave: int) -> None:
    ratios = torch.from_numpy(midpoints()[1:61:4]).flatten().reshape(8, 15)
    rows = torch.cat((torch.ones(8, 1, dtype=torch.float64), ratios), 1)
    tops = torch.exp2(exponent + 1 - octave - (torch.arange(32, dtype=torch.float64) + 0.5) / 8)  # of four octaves
    x, largest = (tops[:, None, None] * rows).reshape(256, 16).float(), 2.0 ** (exponent + 0.5)
    whole = torch.cat((torch.full((1, 16), largest), x))
    blocks = blocks_of(x, "input", "linear", largest)[BlockLayout(1, "16")]
    told, cut = effect(Spectrum.of(whole), casts.parse(cast), 1.0, blocks), lowp.quantize(whole, cast)[1:]
    assert told.flushed == pytest.approx(float((cut == 0).double().mean()), abs=1e-9)
    error = (cut.double() - x).square().sum()
    # every place of an octave is given the same energy, of which the larger ones have more
    assert told.signal_to_noise == pytest.approx(10 * math.log10(x.double().square().sum() / error), abs=1.0)
    scaled = effect(Spectrum.of(whole / 4), casts.parse(cast), 4.0, blocks)
    assert scaled == told and not (told.subnormal and cast[0] == "i")
    highest = told.maximum
    assert (told.largest == highest) == (cast in ("e2m1@e8m8/16", "e2m1@fp32/16"))
