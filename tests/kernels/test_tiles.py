"""Scales of tiles: rows and columns of a matrix share one, so that its transpose has the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.formats import parse as parse_format
from lowp.kernels import cpu
from lowp.policy import Policy, Rule

TILED = ["e2m1@e4m3fn@fp32/16x16", "e4m3fn@e8m0/16x16", "e4m3fn@e8m0/32x32:rceil", "i8s@fp32/4x8", "e5m2@e8m0/1x32"]
DRAWN = ["e2m1@e4m3fn@fp32/16x16:stochastic", "e4m3fn@e8m0/4x24:stochastic", "e2m1@fp32/2x3:stochastic"]
TRIED = ["e2m1@e4m3fn@fp32/16x16:4/6", "e2m1@e4m3fn@fp32/32x8:4/6", "e2m1@e4m3fn/3x5:4/6", "e2m1@fp32/2x300:4/6"]
SHAPES = [(32, 48), (33, 50), (3, 20, 40), (7,), (1, 1), (5, 3), (0, 16)]


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-9, 9, shape, generator=generator)


def block_by_block(x: Tensor, text: str) -> Tensor:
    """Return x cast tile by tile, each as a row of its own; without an outer scale."""
    cast = parse(text)
    scope = cast.format.scope  # type: ignore[union-attr]
    rows = text.replace(f"/{scope}", "/row")
    found = torch.empty_like(x)
    whole = (1, 1, *x.shape)[-max(x.ndim, 3) :]
    matrix, result = x.reshape(whole), found.view(whole)
    for index in range(matrix.shape[0]):
        for top in range(0, matrix.shape[1], scope.rows):
            for left in range(0, matrix.shape[2], scope.size):
                tile = (index, slice(top, top + scope.rows), slice(left, left + scope.size))
                result[tile] = lowp.quantize(matrix[tile].reshape(1, -1), rows).reshape(matrix[tile].shape)
    return found


@pytest.mark.parametrize("text", [text for text in TILED if "@fp32/" not in text or text.startswith("i8s")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_is_cast_as_a_row_of_its_numbers(text: str, shape: tuple[int, ...]) -> None:
    x = numbers(*shape)
    assert torch.equal(lowp.quantize(x, text), block_by_block(x, text))


@pytest.mark.parametrize("text", TILED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_have_the_values_and_every_implementation_the_same(text: str, shape: tuple[int, ...]) -> None:
    x = numbers(*shape)
    found = lowp.quantize(x, text)
    codes = lowp.encode(x, text)
    assert torch.equal(kernels.dequantize(codes), found)
    blocks = [-(-length // side) for length, side in zip(shape[-2:], sides(text)[-len(shape) :], strict=True)]
    assert codes.scale.shape == (*shape[:-2], *blocks)
    for name in ("reference", "bitwise"):
        with kernels.use(name):
            assert torch.equal(lowp.quantize(x, text), found)


def sides(text: str) -> tuple[int, int]:
    scope = parse(text).format.scope  # type: ignore[union-attr]
    return scope.rows, scope.size


@pytest.mark.parametrize("text", [*TILED, *DRAWN, *TRIED])
def test_the_library_has_the_bits_of_the_definition_with_every_instruction_set(text: str) -> None:
    for shape in [(33, 50), (17, 600), (4, 6, 3, 3)]:
        for x in (numbers(*shape), numbers(*shape).double(), numbers(*shape).bfloat16().float()):
            for bad in (0.0, float("inf"), -float("nan")):
                x.view(-1)[x.numel() // 2] = bad
                with kernels.use("bitwise"):
                    wanted = lowp.quantize(x, text, seed=7)
                for name in cpu.available():
                    cpu.select(name)
                    found = lowp.quantize(x, text, seed=7)
                    cpu.select(None)
                    assert torch.equal(found.nan_to_num(9), wanted.nan_to_num(9)), (shape, name)


def test_a_matrix_and_its_transpose_have_the_same_numbers_in_square_tiles() -> None:
    x = numbers(40, 72)
    for text in ("e2m1@e4m3fn@fp32/16x16", "e4m3fn@e8m0/16x16"):
        assert torch.equal(lowp.quantize(x.t().contiguous(), text).t(), lowp.quantize(x, text))
    assert not torch.equal(lowp.quantize(x.t().contiguous(), "mxfp8").t(), lowp.quantize(x, "mxfp8"))


def test_a_format_of_tiles_is_parsed_and_printed() -> None:
    format = parse_format("e2m1@e4m3fn@fp32/16x16")
    assert str(format) == "e2m1@e4m3fn@fp32/16x16" and parse_format(str(format)) == format
    assert format.bytes == (4 + 8 / 256) / 8
    for text, message in {
        "e2m1@e8m0/0x16": "a tile needs 1 or more, as in 16x16",
        "e2m1@e8m0/16x": "unknown scope '16x'",
        "e2m1@e8m0/4096x4096": "a block of 16777216 elements is too long",
    }.items():
        with pytest.raises((InvalidInput, ValueError), match=message):
            parse_format(text)


def test_all_products_of_a_layer_read_the_weight_that_the_tiles_give() -> None:
    text = "e2m1@e4m3fn@fp32/16x16"
    policy = Policy((Rule.of("contraction", weight=text),))
    layer, x = nn.Linear(48, 32, bias=False), numbers(5, 48).requires_grad_()
    weight = lowp.quantize(layer.weight.detach(), text)
    with lowp.autocast(policy):
        y = layer(x)
        y.backward(gradient := numbers(5, 32))
    assert torch.allclose(y, x.detach() @ weight.t(), rtol=1e-5, atol=1e-4)
    assert torch.allclose(x.grad, gradient @ weight, rtol=1e-5, atol=1e-4)  # type: ignore[arg-type]


def test_an_infinity_poisons_its_tile_alone() -> None:
    x = torch.ones(32, 32)
    x[3, 5] = torch.inf
    found = lowp.quantize(x, "e4m3fn@e8m0/16x16")
    assert bool(found[:16, :16].isnan().all()) and bool((found[16:] == 1).all()) and bool((found[:16, 16:] == 1).all())
