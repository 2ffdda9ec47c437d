"""Keys and values in few bits: attention over what they represent, position by position as at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.errors import InvalidInput
from lowp.inference.cache import KeyValueCache
from lowp.kernels.packed.few_rows import FEW
from lowp.recipes.gpt import GPT, generate

FORMATS = ["fp32", "bf16", "fp16", "int8", "e4m3fn@fp32/row", "e4m3fn", "e5m2"]


def _tensors(positions: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(positions)
    query, key, value = (torch.randn(2, 3, positions, 20, generator=generator) for _ in range(3))
    return query, key, value


@pytest.mark.parametrize("format", FORMATS)
def test_attention_is_that_over_the_numbers_that_are_kept(format: str) -> None:
    query, key, value = _tensors(FEW + 9)
    kept = (one if format == "fp32" else lowp.quantize(one, format).float() for one in (key, value))
    wanted = nn.functional.scaled_dot_product_attention(query, *kept, is_causal=True)
    for steps in ([FEW + 9], [FEW + 3, 1, 2, 1, 1, 1], [5] + [1] * (FEW + 4)):
        cache, found, first = KeyValueCache(64, format), [], 0
        for new in steps:
            some = [one[:, :, first : first + new] for one in (query, key, value)]
            found.append(cache.attend(0, *some))
            cache.advance(new)
            first += new
        torch.testing.assert_close(torch.cat(found, 2), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("format", ["bf16", "int8", "e4m3fn@fp32/row"])
def test_the_products_have_the_bits_of_their_definition(format: str) -> None:
    found = []
    for implementation in ("cpu", "reference"):
        with kernels.use(implementation):
            cache = KeyValueCache(8, format)
            found.append(cache.attend(0, *_tensors(5)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_cache_of_bytes_takes_a_quarter_and_a_scale() -> None:
    sizes = {}
    for format in ("fp32", "int8", "e5m2"):
        cache = KeyValueCache(16, format)
        cache.attend(0, *_tensors(3))
        sizes[format] = cache.nbytes
    assert sizes == {"fp32": 2 * 6 * 16 * 20 * 4, "int8": 2 * 6 * 16 * (20 + 4), "e5m2": 2 * 6 * 16 * 20}


def test_a_text_is_generated_as_without_a_cache_and_by_a_served_model() -> None:
    torch.manual_seed(0)
    model = GPT(2, 2, 32, 24, 0.0).eval()
    text = torch.randint(0, 256, (2, 5))
    wanted = text
    for _ in range(12):
        wanted = torch.cat([wanted, model(wanted)[:, -1:].argmax(-1)], 1)
    for format in ("fp32", "int8"):
        found = generate(model, text, 12, format)
        assert found.shape == (2, 17) and (found == wanted).float().mean() > 0.95
    assert generate(lowp.quantize_model(model, "int4"), text, 3, "int8").shape == (2, 8)
    assert torch.equal(generate(model, text, 0), text)


def test_what_cannot_be_kept_is_refused_in_words() -> None:
    for format in ("int4", "mxfp8", "int8-affine"):
        with pytest.raises(InvalidInput, match=f"a cache in {format}: give fp32, bf16, fp16, or a format of 8 bits"):
            KeyValueCache(4, format)
    with pytest.raises(InvalidInput, match="5 positions do not fit a cache of 4: make it longer, or generate less"):
        KeyValueCache(4).attend(0, *_tensors(5))


@pytest.mark.parametrize("format", FORMATS)
def test_a_cache_is_full_with_its_last_position_and_each_layer_has_its_own(format: str) -> None:
    query, key, value = _tensors(5)
    cache, other = KeyValueCache(5, format), KeyValueCache(9, format)
    first = cache.attend(0, query, key, value)
    assert torch.equal(other.attend(3, query, key, value), first) and cache.positions == 0
    cache.attend(1, query, value, key)
    assert torch.equal(cache.attend(0, query, key, value), first)
    each = {"fp32": 4, "bf16": 2, "fp16": 2}.get(format, 1) * 20 + 4 * (format in ("int8", "e4m3fn@fp32/row"))
    assert cache.nbytes == 2 * 2 * 6 * 5 * each
    cache.advance(5)
    with pytest.raises(InvalidInput, match="6 positions do not fit a cache of 5"):
        cache.attend(0, *(one[:, :, :1] for one in (query, key, value)))


def test_formats_of_other_widths_and_scopes_are_not_kept() -> None:
    for format in ("e5m7", "i16@fp32/row", "i8s@fp32/32", "e4m3fn@fp32/tensor", "dfp16", "e2m1"):
        with pytest.raises(InvalidInput, match="give fp32, bf16, fp16, or a format of 8 bits"):
            KeyValueCache(4, format)
