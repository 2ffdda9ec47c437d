"""Stochastic rounding by chosen words: those of a number itself, and their neighbours, in all words that may decide."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from exact_casts import bits, exact_cast
from torch import Tensor

from lowp import kernels
from lowp.casts import Cast, parse
from lowp.formats import FloatFormat

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from lowp.kernels.triton import launch
from lowp.kernels.triton.device import binary, stochastic
from lowp.kernels.triton.device import bits as device_bits

WORDS = 5  # of 32 bits: one number's draw


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of draws, of 160 bits each, that the kernels take for those of the elements from 0 on."""
    draws: list[int] = []

    def instead(counter: Any, seed: Any, KIND: Any) -> tuple[Any, ...]:
        places = numpy.asarray(counter.handle.data, dtype=numpy.int64)
        is_first = {0: True, 1: False}[int(getattr(KIND, "value", KIND))]
        words = [[draw >> 32 * (WORDS - 1 - word) & 0xFFFFFFFF for word in range(WORDS)] for draw in draws]
        words += [[0x5A5A5A5A] * WORDS] * 4096  # behind the end, where zeros leave nothing open
        found = [
            [words[4 * place + turn][0] if is_first else words[place][turn + 1] for place in places]
            for turn in range(4)
        ]
        kind = tl.block_type(tl.uint32, [len(places)])
        return tuple(tl.tensor(TensorHandle(numpy.array(one, dtype=numpy.uint32), tl.uint32), kind) for one in found)

    for scope in [launch._scope(module.__name__) for module in (device_bits, binary, stochastic)]:
        monkeypatch.setitem(scope, "philox", instead)
    return draws


def share(value: float, cast: Cast) -> Fraction:
    """Return the part of the way to the larger neighbour, or the probability of +1, in all its bits."""
    if not isinstance(cast.element, FloatFormat):
        size = abs(Fraction(value))
        return (1 + Fraction(value)) / 2 if cast.element.bits == 1 else size % 1
    unit = Fraction(cast.element.ulp(value)) if value else Fraction(1)
    return abs(Fraction(value)) / unit % 1


def draws_near(value: float, cast: Cast) -> Iterator[int]:
    """Yield draws: the number's own digits, and one more and less in each of the words; of N bits also the rest."""
    whole = int(share(value, cast) * 2**160)
    if cast.random_bits is None:
        steps = [0, *(sign << 32 * word for word in range(WORDS) for sign in (1, -1))]
        found = [whole + step for step in steps]
    else:
        unit = 1 << (160 - cast.random_bits)
        first = whole // unit * unit
        found = [first + step * unit + rest for step in (-1, 0, 1, 2) for rest in (0, unit - 1)]
    yield from (one for one in found if 0 <= one < 1 << 160)


def cases(values: list[float], cast: Cast) -> tuple[Tensor, list[int]]:
    pairs = [(value, draw) for value in values for draw in draws_near(value, cast)]
    return torch.tensor([value for value, _ in pairs], dtype=torch.float64), [draw for _, draw in pairs]


def check(x: Tensor, draws: list[int], cast: Cast, first: int = 0) -> None:
    uniforms = [Fraction(draw >> (160 - (cast.random_bits or 160)), 1 << (cast.random_bits or 160)) for draw in draws]
    wanted = torch.tensor(
        [exact_cast(value, cast, uniform) for value, uniform in zip(x.tolist(), uniforms, strict=True)], dtype=x.dtype
    )
    with kernels.use("triton"):
        found, codes = kernels.quantize(x, cast, offset=first), kernels.encode(x, cast, offset=first)
    same = bits(found) == bits(wanted)
    assert same.all(), (x[~same][:4].tolist(), found[~same][:4].tolist())
    assert torch.equal(kernels.decode(codes, cast.element, dtype=torch.float64), wanted.double())


def numbers_cut(cast: Cast, dtype: torch.dtype) -> list[float]:
    """Return numbers of a dtype of which few or all bits are cut, above a format's smallest normal number and below."""
    mantissa, low = (52, -1074) if dtype is torch.float64 else (23, -149)
    format = cast.element
    smallest = format.min_exponent if isinstance(format, FloatFormat) else 0
    half = 1 << (mantissa - 1)
    parts = [0, 1, 0x5A5A5B & (half - 1), half - 1, half, half + 1, 2 * half - 1]
    depths = [3, 1, 0, -1, -2, -4, -7, -9, -16, -17, -19, -31, -33, -60, -110, -170]
    exponents = [smallest + depth for depth in depths if smallest + depth >= low]
    found = [math.ldexp((1 << mantissa) + part, exponent - mantissa) for exponent in exponents for part in parts]
    found = [torch.tensor(value, dtype=torch.float64).to(dtype).item() for value in found]
    generator = random.Random(str(cast))
    return [value * generator.choice((1.0, -1.0)) for value in sorted(set(found)) if value]


WAYS = ["", "-8", "-b-8", "-b-32", "-c-8", "-c-32"]
CAST = [(f"e5m7:stochastic{way}", torch.float64) for way in WAYS]
CAST += [(f"e5m7:stochastic{way}", torch.float32) for way in ("", "-8", "-b-8", "-c-15")]
CAST += [("e4m3b123:stochastic-c-8", torch.float32), ("e10m10b1022:stochastic-c-8", torch.float64)]
CAST += [("e11m7:stochastic", torch.float64), ("e2m20:stochastic", torch.float64)]
CAST += [(f"{name}:stochastic{way}", torch.float32) for name in ("e4m3fn", "e4m7b120") for way in WAYS]
CAST += [(f"{name}:stochastic{way}", torch.float32) for name in ("bf16", "i8") for way in ("", "-13", "-b-13", "-c-5")]
CAST += [
    ("e6m22:stochastic", torch.float32),
    ("i25:stochastic", torch.float64),
    ("e5m2:stochastic-b-31", torch.float32),
]


@pytest.mark.parametrize(("name", "dtype"), CAST, ids=str)
def test_numbers_are_rounded_by_all_words(name: str, dtype: torch.dtype, drawn: list[int]) -> None:
    cast = parse(name)
    x, draws = cases(numbers_cut(cast, dtype), cast)
    drawn.extend(draws)
    check(x.to(dtype), draws, cast)


@pytest.mark.parametrize("name", ["e4m3fn", "e2m1", "e5m7", "e4m7b108", "e4m7b120", "i8", "bf16"])
def test_numbers_that_a_word_decides_are_rounded_by_it(name: str, drawn: list[int]) -> None:
    cast = parse(f"{name}:stochastic")
    step = 1 << (31 - 19) if name in ("e4m3fn", "e2m1") else 1  # more than what a rounded product leaves open
    values = []
    for value in numbers_cut(cast, torch.float32):
        word = int(share(value, cast) * 2**32)
        for draw in (word - step, word + step):
            if 0 <= draw < 1 << 32:
                values.append(value)
                drawn.append(draw << 128 | 0x5A5A << 90)
    check(torch.tensor(values), list(drawn), cast)


def test_a_word_between_a_number_and_its_product_that_was_rounded_up_leaves_it_to_all_bits(drawn: list[int]) -> None:
    cast = parse("e4m3fn:stochastic")
    for word, value in (((5 << 12) + 0xDFF, 5.875), ((5 << 12) + 0xE01, 5.875), (5 << 12, 5.125)):
        drawn[:] = [word << 128]
        check(torch.tensor([value * 2.0**-29]), list(drawn), cast)


@pytest.mark.parametrize(("first", "count"), [(0, 512), (3, 600), (9, 518)])
@pytest.mark.parametrize("name", ["e5m7:stochastic", "e4m3fn:stochastic", "i1:stochastic"])
def test_draws_that_words_leave_open_belong_to_their_numbers_in_every_piece(
    name: str, first: int, count: int, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 256)
    cast, generator = parse(name), random.Random(first)
    x = torch.tensor([generator.uniform(-1, 1) for _ in range(count)])
    steps = (-1, 0, 1, 1 << 64, -1 << 70)
    draws = [int(share(value, cast) * 2**160) + generator.choice(steps) for value in x.tolist()]
    drawn.extend([0] * first + draws)
    check(x, draws, cast, first)


BINARY = ["i1:stochastic", "i1:stochastic-8", "i1:stochastic-b-8", "i1:stochastic-c-8", "i1:stochastic-c-32"]


@pytest.mark.parametrize("name", [*BINARY, "i1:stochastic-32", "i1:stochastic-1", "i1:stochastic-b-32"])
def test_one_bit_is_drawn_by_all_words(name: str, drawn: list[int]) -> None:
    cast = parse(name)
    values = [
        0.0,
        1.0,
        0.5,
        0.75,
        2.0**-32,
        2.0**-33,
        3 * 2.0**-40,
        2.0**-8 + 2.0**-9,
        2.0**-8 - 2.0**-40,
        1 - 2.0**-53,
    ]
    values += [2.0**-70, 3 * 2.0**-100, 2.0**-132, 2.0**-159, 2.0**-160, 5 * 2.0**-161, 2.0**-200, 2.0**-700, 5e-324]
    values += [2.0**-108 * (1 + 2.0**-52), 2.0**-107 * (1 + 2.0**-52), 1.25, 2.0**60]
    values += [2.0**-32 * (1 + 2.0**-38), 3 * 2.0**-32, 3 * 2.0**-8, 5 * 2.0**-34]
    values += [-value for value in values]
    x, draws = cases(values, cast)
    drawn.extend(draws)
    check(x, draws, cast)
