"""Where a rank's numbers stand in a whole tensor, and that they are rounded there as the whole is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import lowp
from lowp.optim.blockwise import _blocks
from lowp.optim.shards import is_split_twice, local, local_parts, places_of, quantize_at, shard_like, shard_of
from lowp.optim.storage import BLOCK

RANKS = 4
CUTS = {
    "rows": ((RANKS,), [Shard(0)]),
    "columns": ((RANKS,), [Shard(1)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
    "the last axis, in two places": ((2, 2), [Replicate(), Shard(2)]),
}


@pytest.mark.parametrize("shape", [(8, 3, 2), (5, 4, 7), (1, 9, 2)], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_a_ranks_numbers_stand_where_the_whole_was_cut(
    cut: str, shape: tuple[int, ...], as_rank: Callable[[int, int], None]
) -> None:
    mesh_shape, placements = CUTS[cut]
    whole, met = torch.arange(torch.Size(shape).numel()).view(shape), list[Tensor]()
    for rank in range(RANKS):
        as_rank(rank, RANKS)
        mesh = dist.device_mesh.init_device_mesh("cpu", mesh_shape)
        like: Any = dist.tensor.distribute_tensor(torch.empty(shape), mesh, placements, src_data_rank=None)
        part = local(shard_of(whole, like))
        found = places_of(like)
        is_range = bool((part.reshape(-1).diff() == 1).all())
        assert isinstance(found, int) is is_range
        places = torch.arange(part.numel()) + found if isinstance(found, int) else found
        assert torch.equal(places[: part.numel()], part.reshape(-1))
        assert is_split_twice(like) is (Replicate() not in placements and len(placements) == 2)
        again = shard_like(part, like)
        assert isinstance(again, DTensor) and again.shape == shape and again.placements == like.placements
        assert torch.equal(local_parts({"a": again})["a"], part)
        met.append(part.reshape(-1))
    assert torch.equal(torch.cat(met).unique(), whole.reshape(-1))


def test_a_plain_tensor_is_the_whole() -> None:
    x = torch.ones(3, 2)
    assert places_of(x) == 0 and local(x) is x and shard_of(x, x) is x and shard_like(x, x) is x
    assert not is_split_twice(x)


@pytest.mark.parametrize("places", [3, torch.tensor([2, 3, 7, 11, 40]), torch.tensor([5])], ids=str)
def test_a_rank_draws_at_the_places_of_its_numbers_what_the_whole_draws_there(places: int | Tensor) -> None:
    whole, cast = torch.linspace(-3, 3, 50), "e4m3fn:stochastic"
    at = torch.arange(places, places + 6) if isinstance(places, int) else places
    expected = lowp.quantize(whole, cast, seed=5)[at]
    shape = (-1, 1) if len(at) == 5 else (-1,)
    assert torch.equal(quantize_at(whole[at].view(shape), cast, 5, places), expected.view(shape))


@pytest.mark.parametrize(
    ("places", "count"),
    [
        (0, 2 * BLOCK + 5),
        (BLOCK - 3, BLOCK),
        (3 * BLOCK, 7),
        (0, 0),
        (
            torch.cat(
                (torch.arange(5, 9), torch.arange(BLOCK - 2, BLOCK + 2), torch.tensor([5 * BLOCK, 6 * BLOCK - 1]))
            ),
            10,
        ),
    ],
    ids=str,
)
def test_the_blocks_of_a_part_are_those_of_the_whole(places: int | Tensor, count: int) -> None:
    whole = torch.arange(places, places + count) if isinstance(places, int) else places
    met = list[Tensor]()
    for number, within, piece in _blocks(places, count):
        part = whole[piece]
        expected = part - number * BLOCK
        assert len(part) and 0 <= int(expected.min()) <= int(expected.max()) < BLOCK
        assert torch.equal(torch.arange(within, within + len(part)) if isinstance(within, int) else within, expected)
        met.append(part)
    assert torch.equal(torch.cat([whole[:0], *met]), whole) and len({int(part[0]) // BLOCK for part in met}) == len(met)


@pytest.mark.parametrize(("storage", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_a_shard_is_stepped_in_fp32_whatever_it_is_stored_in(
    storage: str | None, dtype: torch.dtype, as_rank: Callable[[int, int], None]
) -> None:
    as_rank(0, 1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    weight = nn.Parameter(dist.tensor.distribute_tensor(torch.ones(4, 2, dtype=dtype), mesh, [Shard(0)]))
    optimizer = lowp.MasterWeights(torch.optim.SGD([weight], lr=0.5), storage)
    for step in range(1, 3):
        weight.grad = torch.ones_like(weight) / 256
        optimizer.step()
        master: Any = optimizer.master(weight)
        assert torch.equal(master.to_local(), torch.full((4, 2), 1 - step / 512))
