"""Products, sums and moves of whole tensors agree with the arithmetic of single mantissas, which is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.explain import FlexNumber, flex_product, flex_sum
from lowp.explain import rescale as rescale_one
from lowp.kernels import dequantize, encode
from lowp.kernels.flexpoint import add, multiply, rescale
from lowp.quantized import Quantized

MANTISSAS = st.integers(-(2**15), 2**15 - 1)
EXPONENTS = st.integers(-31, 0)


def tensor(mantissas: list[int], exponent: int) -> Quantized:
    payload = torch.tensor(mantissas, dtype=torch.int16)
    return Quantized(payload, torch.tensor(exponent, dtype=torch.int32), parse("flex16+5"))


def numbers(found: Quantized) -> list[FlexNumber]:
    return [FlexNumber(mantissa, int(found.scale)) for mantissa in found.payload.tolist()]


@given(MANTISSAS, MANTISSAS, EXPONENTS, EXPONENTS)
def test_a_tensor_of_one_element_computes_as_a_number(a: int, b: int, ea: int, eb: int) -> None:
    left, right = FlexNumber(a, ea), FlexNumber(b, eb)
    cast = parse("flex16+5")
    assert numbers(add(tensor([a], ea), tensor([b], eb)).values) == [flex_sum(left, right, cast).result]
    assert numbers(multiply(tensor([a], ea), tensor([b], eb)).values) == [flex_product(left, right, cast).result]
    moved, expected = rescale(tensor([a], ea), eb), rescale_one(left, eb)
    assert numbers(moved.values) == [expected.result] and int(moved.saturated) == expected.saturated


def test_the_largest_element_decides_the_exponent_of_all() -> None:
    total = add(tensor([30000, 1, -3], -14), tensor([30000, 2, 0], -14))
    assert int(total.values.scale) == -13
    assert total.values.payload.tolist() == [30000, 2, -2]  # 3 / 2 and -3 / 2 are ties: to the even mantissa
    product = multiply(tensor([20000, 3], -10), tensor([2, 2], 0))
    assert int(product.values.scale) == -9 and product.values.payload.tolist() == [20000, 3]


def test_a_sum_of_encoded_tensors_is_near_the_sum_of_their_values() -> None:
    x, y = torch.randn(50, generator=torch.Generator().manual_seed(0)).split(25)
    total = add(encode(x, "flex16+5"), encode(y, "flex16+5"))
    assert int(total.saturated) == 0
    unit = 2.0 ** int(total.values.scale)
    assert (dequantize(total.values) - (x + y)).abs().max() <= 2.5 * unit


def test_a_move_counts_what_saturates() -> None:
    moved = rescale(tensor([1, 2, 30000], -10), -11)
    assert moved.values.payload.tolist() == [2, 4, 32767] and int(moved.saturated) == 1


def test_other_formats_are_refused() -> None:
    x = torch.ones(4)
    with pytest.raises(InvalidInput, match="two formats: encode both tensors in one"):
        add(encode(x, "flex16+5"), encode(x, "dfp16"))
    with pytest.raises(InvalidInput, match="possible are flex16\\+5 and dfp16"):
        multiply(encode(x, "mxfp8"), encode(x, "mxfp8"))
