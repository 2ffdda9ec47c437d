"""A histogram gives the same results as counting the numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lowp.numerics.spectrum import Spectrum
from lowp.recipes.recipe import Metric
from lowp.recipes.recording.runs import below, head, histogram, in_fp16, median


def make_numbers() -> Tensor:
    """Return numbers of all magnitudes between 2^-40 and 2^20, ties of fp16, zeros, infinities and NaNs."""
    draw = torch.Generator().manual_seed(0)
    exponents = torch.randint(-40, 20, (5000,), generator=draw).float()
    numbers = torch.exp2(exponents) * (1 + torch.rand(5000, generator=draw)) * torch.randn(5000, generator=draw).sign()
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-25, 2.0**-24, 2.0**-14, 65504.0, 65519.0, 65520.0]
    return torch.cat([numbers, torch.tensor(special)])


def spectrum_of(x: Tensor) -> Spectrum:
    return sum(map(Spectrum.of, x.split(700)), Spectrum())


def test_every_exponent_is_counted_and_what_has_none_is_apart() -> None:
    x = make_numbers()
    document = histogram(spectrum_of(x))
    present = x[x.isfinite() & (x != 0)]
    exponents = torch.frexp(present)[1] - 1
    assert document["lowest"] == int(exponents.min())
    assert document["counts"] == torch.bincount(exponents - exponents.min()).tolist()
    assert (document["elements"], document["zeros"], document["nonfinite"]) == (len(x), 2, 3)
    assert document["largest"] == present.abs().max()


@pytest.mark.parametrize("exponent", [-127, -50, -24, -14, 0, 17, 127])
def test_the_share_below_a_power_of_two_is_that_of_the_numbers_below_it(exponent: int) -> None:
    x = make_numbers()
    present = x[x.isfinite() & (x != 0)]
    assert below(spectrum_of(x), exponent) == int((present.abs() < 2.0**exponent).sum()) / len(present)


def test_what_is_below_the_normal_numbers_of_fp32_is_in_the_first_bin_without_the_zeros() -> None:
    document = histogram(spectrum_of(torch.tensor([0.0, 2.0**-140, 2.0**-127, 2.0**-126])))
    assert (document["lowest"], document["counts"], document["zeros"]) == (-127, [2, 1], 1)


def test_the_median_is_right_to_a_part_of_a_bin() -> None:
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(1)) * 2.0**-9
    found = median(spectrum_of(x))
    assert found is not None and abs(found - math.log2(x.abs().median())) < 0.1
    assert median(spectrum_of(torch.tensor([1.0, 1.0, 4.0, 4.0]))) == 1.0  # the upper end of the first bin's half
    assert median(spectrum_of(torch.zeros(3))) is None


def test_nothing_added_is_an_empty_histogram() -> None:
    document = histogram(Spectrum())
    assert (document["counts"], document["elements"], document["median"]) == ([], 0, None)
    assert below(Spectrum(), -24) == 0


def test_what_fp16_makes_zero_or_infinite_is_what_torch_s_cast_makes_so() -> None:
    x = make_numbers()
    document = in_fp16(spectrum_of(x))
    present = x[x.isfinite() & (x != 0)]
    magnitude = present.abs().double()
    assert document["zero"] == int((present.half() == 0).sum()) / len(present)
    assert document["below"] == int((magnitude < 2**-24).sum()) / len(present) > document["zero"] > 0
    infinite = int((magnitude >= 65520).sum()) / len(present)
    assert infinite > 0
    assert document["infinite"] == pytest.approx(infinite, abs=1e-3)  # as if numbers were spread evenly in a bin
    subnormal = (magnitude >= 2**-24) & (magnitude < 2**-14)
    assert document["subnormal"] == pytest.approx(int(subnormal.sum()) / len(present), abs=1e-15)


def test_the_header_of_a_run_has_its_length_and_its_last_metric() -> None:
    def document(*accuracies: float) -> dict[str, Any]:
        training = SimpleNamespace(
            settings=SimpleNamespace(recipe="toy", precision="fp16", seed=3),
            data=SimpleNamespace(description="some data"),
            recipe=SimpleNamespace(metric=Metric("accuracy")),
            history=[{"accuracy": one} for one in accuracies],
            **{"epochs": 2, "steps": 8, "failure": None},
        )
        return head("lowp toy", cast(Any, training))

    found = document(0.25, 0.5)
    own = ("kind", "recipe", "data", "precision", "seed", "epochs", "steps", "failure")
    assert [found[name] for name in own] == ["lowp toy", "toy", "some data", "fp16", 3, 2, 8, None]
    assert found["metric"] == {"name": "accuracy", "is_share": True, "value": 0.5}
    assert document()["metric"]["value"] is None
