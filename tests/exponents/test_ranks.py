"""Ranks agree on shared exponents by the names of sites, also if they run different ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from lowp.casts import parse
from lowp.errors import Misuse
from lowp.exponents import DelayedScales, SharedExponents
from lowp.precision import Precision

FLEX = parse("flex16+5:autoflex")


def same_places(rank: int) -> dict[str, Any]:
    """Both ranks write two sites in different order; one writes a larger maximum and a NaN."""
    exponents = SharedExponents()
    for step in range(6):
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            exponents.write(torch.tensor([1.0, 40.0 if rank and step > 2 else 2.0]), FLEX, f"output of {name}")
        if rank == 1 and step == 4:
            exponents.write(torch.tensor([torch.nan]), FLEX, "output of a")
        exponents.flush()
    found: dict[str, Any] = {name: exponents.exponent(f"output of {name}") for name in ("a", "b")}
    summary = exponents.summary()["all"]
    return {**found, "writes": summary.writes, "nonfinite": summary.nonfinite}


def other_places(rank: int) -> dict[str, Any]:
    """Each rank writes as many sites as the other, one of them with another name and another size."""
    exponents = SharedExponents()
    for _ in range(4):
        exponents.write(torch.tensor([1.0]), FLEX, "output of both")
        exponents.write(torch.tensor([1000.0 if rank else 0.001]), FLEX, f"output of {'large' if rank else 'small'}")
        if rank:
            exponents.write(torch.tensor([7.0]), parse("flex16+5:reactive"), "output of another cast")
        exponents.flush()
    return {site: exponents.exponent(site) for site in sorted(exponents.sites())}


class Skipping(nn.Module):
    """Stochastic depth: each rank omits another block in every second step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if self.calls % 2 or index == self.rank:
                x = x + block(x).relu()
        return self.last(x)


def trained(rank: int, spoiled: int = -1) -> dict[str, Any]:
    torch.manual_seed(0)
    precision = Precision("flex16+5")
    model = Skipping(rank)
    prepared, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(rank)
    losses, stepped = [], []
    for step in range(8):
        x = torch.randn(16, 4, generator=generator)
        labels = (x.sum(1) > 0).long()
        if step == spoiled and rank == 1:
            x = x * torch.nan
        optimizer.zero_grad()
        with precision.autocast():
            loss = F.cross_entropy(prepared(x), labels)
        precision.backward(loss)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            precision.step(optimizer)
        losses.append(float(loss.detach()))
        stepped.append(bool(precision.stepped))
    assert precision.exponents is not None
    exponents = {site: precision.exponents.exponent(site) for site in sorted(precision.exponents.sites())}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "stepped": stepped, "exponents": exponents, "weights": weights}


def loaded_on_one_rank(rank: int) -> str:
    precision = Precision("flex16+5")
    model = nn.Linear(3, 1)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = SharedExponents()
    other.load_state_dict(SharedExponents().state_dict())
    if rank == 0:
        assert precision.exponents is not None
        precision.exponents.load_state_dict(other.state_dict())
    with precision.autocast():
        loss = model(torch.ones(2, 3)).sum()
    precision.backward(loss)
    with pytest.raises(Misuse, match="load_state_dict") as caught:
        precision.step(optimizer)
    return str(caught.value)


def delayed(rank: int) -> dict[str, Any]:
    """Ranks see other maxima, one of them a NaN, and sites of their own."""
    scales, cast = DelayedScales(), parse("e4m3fn@fp32/tensor:delayed(window=2)")
    found = []
    for step in range(4):
        scales.rounded(torch.tensor([448.0 * (1 + step + rank)]), cast, "input of both")
        scales.rounded(torch.tensor([448.0]), cast, f"input of rank {rank}")
        if rank and step == 2:
            scales.rounded(torch.tensor([torch.nan]), cast, "input of both")
        scales.flush()
        found.append([float(scales.scale(site)) for site in sorted(scales.sites())])
    return {"scales": found, "sites": sorted(scales.sites())}


def trained_delayed(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    precision, model = Precision("fp8-delayed"), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped = nn.parallel.DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = (1 + 3 * rank) * torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        with precision.autocast():
            loss = F.cross_entropy(wrapped(x), (x.sum(1) > 0).long())
        precision.backward(loss)
        precision.step(optimizer)
    assert precision.scales is not None
    scales = {site: precision.scales.scale(site) for site in sorted(precision.scales.sites())}
    return {**scales, **model.state_dict()}


SCENES: dict[str, Callable[[int], Any]] = {
    "same sites": same_places,
    "other sites": other_places,
    "stochastic depth": trained,
    "a NaN on one rank": lambda rank: trained(rank, spoiled=4),
    "loaded on one rank": loaded_on_one_rank,
    "delayed": delayed,
    "trained under delayed scales": trained_delayed,
}


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save({name: scene(rank) for name, scene in SCENES.items()}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    forked.ranks(run_rank, (str(folder),), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_every_exponent_is_that_of_the_largest_maximum(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["same sites"] for rank in ranks)
    assert first == second
    assert 2.0 ** first["b"] * 32767 >= 40 and first["writes"] == 12 and first["nonfinite"] == 1


def test_places_of_one_rank_alone_keep_their_own_exponents_on_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["other sites"] for rank in ranks)
    assert first == second
    sizes = {"output of both": 1, "output of large": 1000, "output of small": 0.001, "output of another cast": 7}
    assert first.keys() == sizes.keys()
    for site, size in sizes.items():
        assert size < 2.0 ** first[site] * 32767 < 8 * size, site


def test_ranks_that_run_different_ops_train_one_model(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["stochastic depth"] for rank in ranks)
    assert first["exponents"] == second["exponents"] and all(first["stepped"])
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    assert sum(first["losses"][-3:]) < sum(first["losses"][:3]) < 10


def test_a_nan_on_one_rank_skips_the_step_on_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["a NaN on one rank"] for rank in ranks)
    assert first["stepped"] == second["stepped"] == [step != 4 for step in range(8)]
    assert first["exponents"] == second["exponents"]
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]) and weight.isfinite().all(), name


def test_places_that_one_rank_alone_has_loaded_are_refused_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "the ranks remember different sites of shared exponents" in rank["loaded on one rank"]


def test_ranks_agree_on_the_maxima_of_delayed_scales_and_forget_what_is_not_finite(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["delayed"] for rank in ranks)
    assert one == other and one["sites"] == ["input of both", "input of rank 0", "input of rank 1"]
    assert [scale for scale, *_ in one["scales"]] == [2.0, 3.0, 3.0, 5.0]  # the NaN of the third step is left out
    assert all(own == [1.0, 1.0] for _, *own in one["scales"])


def test_a_model_under_delayed_scales_stays_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["trained under delayed scales"] for rank in ranks)
    assert "grad of 0 linear" in one and one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
