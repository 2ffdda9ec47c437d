"""Spectra and updates: their counts, their sums, and their JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from lowp.errors import InvalidInput
from lowp.numerics.spectrum import PARTS, Spectrum, Updates

NUMBERS = [0.0, -0.0, 1.0, 1.25, -2.0, 3e-5, 1e-42, 65504.0]


def test_a_spectrum_counts_each_number_in_its_32nd_of_an_octave() -> None:
    seen = Spectrum.of(torch.tensor(NUMBERS))
    assert (seen.count, seen.zeros, seen.nonzero, seen.maximum) == (8, 2, 6, 65504.0)
    assert seen.bins[127 * PARTS] == 1 and seen.bins[127 * PARTS + PARTS // 4] == 1 and seen.bins[128 * PARTS] == 1
    assert seen.bins[:PARTS].sum() == 1, "what is below 2^-126 is in the first octave"


def test_significant_bits_tell_numbers_that_a_format_holds_as_they_are() -> None:
    seen = Spectrum.of(torch.tensor([1.0, -4.0, 1.5, 1.25, 1 + 2.0**-10]))
    assert {bits: int(count) for bits, count in enumerate(seen.significant) if count} == {1: 2, 2: 1, 3: 1, 11: 1}


def test_nan_and_infinity_are_counted_and_change_nothing_else() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    plain, mixed = Spectrum.of(x), Spectrum.of(torch.cat((x, torch.tensor([math.nan, math.inf, -math.inf]))))
    assert (mixed.nan, mixed.inf, mixed.nonzero) == (1, 2, 100)
    assert np.array_equal(plain.bins, mixed.bins) and np.array_equal(plain.significant, mixed.significant)
    assert (plain.maximum, plain.sum_squares) == (mixed.maximum, pytest.approx(mixed.sum_squares))


def test_the_spectra_of_two_halves_add_up_to_that_of_the_whole() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    whole, both = Spectrum.of(x), Spectrum.of(x[:300]) + Spectrum.of(x[300:])
    assert np.array_equal(whole.bins, both.bins) and whole.maximum == both.maximum and both.tensors == 2
    assert both.sum_squares == pytest.approx(whole.sum_squares)
    assert (Spectrum() + whole).document() == whole.document()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_point_dtype_has_a_spectrum(dtype: torch.dtype) -> None:
    assert Spectrum.of(torch.tensor([1.5, -0.25], dtype=dtype)).nonzero == 2


def test_an_empty_tensor_has_an_empty_spectrum() -> None:
    seen = Spectrum.of(torch.empty(0, 3))
    assert (seen.count, seen.lowest, seen.highest, seen.root_mean_square, seen.below(200)) == (0, None, None, 0, 0)
    assert (seen.document()["first_bin"], seen.document()["bins"]) == (0, [])


def test_a_spectrum_tells_where_its_numbers_begin_and_end_and_their_root_mean_square() -> None:
    seen = Spectrum.of(torch.tensor([0.0, 3.0, -1.0, 0.25, math.nan, -math.inf]))
    assert (seen.lowest, seen.highest, seen.nonfinite) == (-2, 1, 2)
    assert seen.root_mean_square == pytest.approx(math.sqrt((9 + 1 + 0.0625) / 4))
    assert [seen.below(exponent) for exponent in (-200, -2, -1, 0, 1, 2, 200)] == [0, 0, 1, 1, 2, 3, 3]
    assert [Spectrum.of(torch.tensor([2.0**-130])).below(exponent) for exponent in (-127, -126)] == [0, 1]


def test_a_spectrum_comes_back_from_json() -> None:
    seen = Spectrum.of(torch.tensor([*NUMBERS, math.inf]))
    again = Spectrum.read(json.loads(json.dumps(seen.document())))
    assert np.array_equal(again.bins, seen.bins) and again.document() == seen.document()
    assert np.array_equal(again.powers, seen.powers)
    assert Spectrum.read({**Spectrum.of(torch.ones(1)).document(), "first_bin": 8191}).bins[-1] == 1


@pytest.mark.parametrize("scale", [2.0**-20, 0.5, 1.0, 2.0**20])
def test_a_spectrum_times_a_power_of_two_is_that_of_the_scaled_tensor(scale: float) -> None:
    x = torch.tensor([0.0, 1.0, -1.5, 0.7, 3e-5, 2.0**-100, -3.0])
    found, expected = Spectrum.of(x).scaled(scale), Spectrum.of(x * scale)
    assert np.array_equal(found.bins, expected.bins) and np.array_equal(found.powers, expected.powers)
    assert (found.count, found.zeros, found.maximum) == (7, 1, 3 * scale)
    assert found.sum_squares == pytest.approx(expected.sum_squares, rel=1e-12)


@pytest.mark.parametrize("scale", [1000.0, 0.3])
def test_a_spectrum_times_another_number_is_right_to_the_bin(scale: float) -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(3))
    found, expected = Spectrum.of(x).scaled(scale), Spectrum.of(x * scale)
    assert np.abs(np.cumsum(found.octaves) - np.cumsum(expected.octaves)).max() <= 4000 / PARTS
    assert found.nonzero == 4000 and not found.powers.any()
    assert found.sum_squares == pytest.approx(expected.sum_squares, rel=1e-5)
    centres = 1 + (torch.arange(PARTS) + 0.5) / PARTS
    assert np.array_equal(Spectrum.of(centres).scaled(scale).bins, Spectrum.of(centres * scale).bins)


@pytest.mark.parametrize(
    "change", [{"bins": [-1]}, {"significant": [1]}, {"count": None}, {"first_bin": 8192}, {"first_bin": -1}]
)
def test_a_damaged_spectrum_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="an invalid spectrum"):
        Spectrum.read({**Spectrum.of(torch.ones(3)).document(), **change})


def test_updates_are_counted_by_both_sizes_and_by_what_they_do_to_the_weight() -> None:
    weight, update = torch.tensor([1.0, 1.0, 1.5, -0.75, 0.0]), torch.tensor([-0.25, 0.25, -0.125, -0.5, 0.0])
    seen = Updates.of(weight, update, torch.ones(5))
    assert seen.joint.sum((0, 1)).tolist() == [2, 1, 1], "two grow, one shrinks, one shrinks from a power of two"
    assert (seen.present, seen.none, seen.count) == (4, 1, 5)
    assert seen.ratios() == {0: 1, 2: 2, 3: 1}


def test_updates_add_up_and_come_back_from_json() -> None:
    weight, update = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    one, other = Updates.of(weight, update * 1e-3, weight), Updates.of(update, weight * 1e-3, None)
    again = Updates.read(json.loads(json.dumps((Updates() + one + other).document())))
    assert np.array_equal(again.joint, one.joint + other.joint) and again.count == 1000


@pytest.mark.parametrize(
    "change", [{"gradient_energy": [1.0]}, {"cells": [1, 2, 0, -1]}, {"cells": [1]}, {"none": None}]
)
def test_damaged_updates_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="invalid updates"):
        Updates.read({**Updates.of(torch.ones(3), torch.ones(3), None).document(), **change})


def test_numbers_below_a_size_are_left_out() -> None:
    numbers = torch.tensor([0.0, 2.0**-30, 3e-5, 0.5, 1.0, 1.5, 4.0])
    seen = Spectrum.of(numbers)
    assert np.array_equal(seen.from_size(1.0).bins, Spectrum.of(numbers[4:]).bins)
    assert np.array_equal(seen.from_size(1.0).powers, Spectrum.of(numbers[4:]).powers)
    assert np.array_equal(seen.from_size(1.25).powers, Spectrum.of(numbers[6:]).powers)
    assert (seen.from_size(1.0).zeros, seen.from_size(1.0).nonzero, seen.from_size(1.0).maximum) == (4, 3, 4.0)
    assert seen.from_size(0.0) is seen and seen.from_size(1e9).maximum == 0.0 and seen.from_size(1e-40).nonzero == 6


@pytest.mark.parametrize(
    "size", [2.0**-149, 1e-40, 2.0**-127, 1.5 * 2.0**-127, 2.0**-126, 1.5 * 2.0**-126, 2.0**127, 3e38]
)
def test_of_numbers_as_small_and_as_large_as_fp32_has_those_from_a_size_on_are_kept(size: float) -> None:
    numbers = torch.tensor([2.0**-130, 2.0**-128, 2.0**-127, 1.75 * 2.0**-127, 2.0**-126, 2.0**-125, 2.0**127, 3.3e38])
    seen, kept = Spectrum.of(numbers).from_size(size), Spectrum.of(numbers[numbers >= size])
    assert np.array_equal(seen.bins, kept.bins) and np.array_equal(seen.powers, kept.powers)
    assert seen.zeros == len(numbers) - kept.count
