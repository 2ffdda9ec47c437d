"""The exponent of a first write from the table is that of the algorithm, on every bound and between bounds."""

from __future__ import annotations

import pytest
import torch

from lowp.exponents.scalings import FirstExponents
from lowp.scaling import Autoflex, Reactive

SCALINGS = (
    Autoflex(),
    Autoflex(headroom=2, start_headroom=2),
    Autoflex(min_exponent=-142, max_exponent=113),
    Autoflex(min_exponent=-4, max_exponent=-4),
    Autoflex(bits=8),
    Reactive(),
)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_maximum_begins_as_algorithm_1_says(scaling: Autoflex | Reactive, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = 2.0 ** torch.randint(-60, 60, (20000,), generator=generator).double()
    first = FirstExponents(scaling, torch.device("cpu"))
    guess = scaling.guess
    edges = torch.tensor([2.0**k for k in range(guess.bits)] + [guess.limit, 2.0 ** (guess.bits - 1) - 1.5]) - 0.5
    exponents = torch.arange(max(guess.min_exponent, -100), min(guess.max_exponent, 100) + 1)
    bounds = (edges.double()[:, None] * 2.0 ** exponents.double()).flatten().to(dtype)
    up, down = (torch.nextafter(bounds, torch.tensor(one, dtype=dtype)) for one in (torch.inf, 0.0))
    maxima = torch.cat([(torch.rand(20000, generator=generator) * spread).to(dtype), bounds, up, down, bounds[:1] * 0])
    state = guess.start(guess.init("cpu", len(maxima)), maxima)
    found, begins = first(maxima)
    assert torch.equal(found, state.exponent) and torch.equal(begins, state.started)
    assert len(found.unique()) > (1 if guess.min_exponent < guess.max_exponent else 0)
