"""Casts of shards: which a rank can cast alone, what it asks of the others, and that it gets the bits of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lowp import quantize
from lowp.casts import parse
from lowp.kernels.casts.shards import extremes, in_whole, placed, whole

RANKS = 4
TENSOR, NVFP4 = "e4m3fn@fp32/tensor", "nvfp4"


def sharded(local: Tensor, placement: Any, ranks: int = RANKS) -> Any:
    return DTensor.from_local(local, init_device_mesh("cpu", (ranks,)), [placement], run_check=False)


@pytest.mark.parametrize(
    ("cast", "shape", "dims"),
    [
        (None, (8, 128), ()),  # codes and statistics are those of the whole
        ("e4m3fn:stochastic", (8, 128), ()),
        ("e4m3fn", (8, 128), (0, 1)),
        ("flex16+5:static(-8)", (8, 128), (0, 1)),
        (TENSOR, (8, 128), (0, 1)),
        ("dfp16", (8, 128), (0, 1)),
        ("i2s@fp32/tensor", (8, 128), ()),  # whose scale is a mean
        ("ternary", (8, 128), (0,)),  # of a row
        ("e4m3fn@fp32/row", (8, 128), (0,)),
        ("e4m3fn@fp32/channel", (8, 128), (0,)),
        ("e4m3fn@fp32/channel", (8, 4, 128), (0,)),
        ("mxfp8", (8, 128), (0, 1)),  # each rank has whole blocks of 32
        ("mxfp8", (8, 64), (0,)),
        ("mxfp8", (8, 4, 128), (0, 1, 2)),
        ("e4m3fn@fp32/4x16", (32, 64), (0, 1)),  # and whole tiles
        ("e4m3fn@fp32/16x16", (32, 64), (1,)),
        ("e4m3fn@fp32/4x32", (32, 64), (0,)),
    ],
)
def test_a_rank_casts_its_shard_where_no_shared_scale_crosses_it(
    cast: str | None, shape: tuple[int, ...], dims: tuple[int, ...], as_rank: Callable[[int, int], None]
) -> None:
    as_rank(0, RANKS)
    for dim in range(len(shape)):
        local = torch.zeros([size // RANKS if at == dim else size for at, size in enumerate(shape)])
        for axis in (dim, dim - len(shape)):
            found: Any = placed(sharded(local, Shard(axis)), None if cast is None else parse(cast))
            assert found.shape == shape
            assert found.placements[0].is_shard() is (dim in dims)
    assert placed(sharded(torch.zeros(shape), Partial()), parse("e4m3fn")).placements == (Replicate(),)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cast", "placement", "asks"),
    [
        (TENSOR, Shard(0), True),
        (TENSOR, Replicate(), False),
        ("dfp16", Shard(1), True),
        (NVFP4, Shard(0), True),
        ("mxfp8", Shard(0), False),
        ("e4m3fn@fp32/row", Shard(0), False),
        ("e4m3fn", Shard(0), False),
        ("flex16+5:static(-8)", Shard(0), False),
    ],
)
def test_a_rank_asks_the_others_for_extremes_where_a_scale_is_that_of_the_whole(
    cast: str, placement: Any, asks: bool, as_rank: Callable[[int, int], None]
) -> None:
    as_rank(0, 1)
    x = torch.linspace(-3, 2, 32).view(2, 16)
    for value, told in ((1.0, [2.0, 3.0, 0.0]), (torch.inf, [2.0, 3.0, 1.0]), (torch.nan, [2.0, 3.0, 1.0])):
        x[1, 1] = value
        found: Any = extremes(sharded(x, placement, 1), parse(cast))
        assert (found is not None) is asks and (found is None or found.to_local().tolist() == told)
        assert found is None or found.placements == (Replicate(),)
    if asks:  # a shard may be empty
        found = extremes(sharded(torch.zeros(0, 16), Shard(0), 1), parse(cast))
        assert found.to_local().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("cast", [TENSOR, "dfp16", NVFP4, "i8s@fp32/tensor", "i8@fp32/tensor/affine", "i8@e8m0/tensor"])
@pytest.mark.parametrize("beyond", [None, torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("shape", [(8, 48), (6, 3, 16), (5, 16)], ids=str)
def test_a_part_is_rounded_as_in_the_whole_of_which_it_knows_the_extremes(
    cast: str, shape: tuple[int, ...], beyond: float | None
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 5
    x[-1].view(-1)[3], x[-1].view(-1)[7] = 30.0, -40.0
    if beyond is not None:
        x[-1].view(-1)[5] = beyond
    finite = x[x.isfinite()]
    ends = torch.stack([finite.max(), -finite.min(), torch.tensor(float(beyond is not None))])
    for part in (slice(0, 2), slice(2, 3), slice(0, len(x))):
        found = in_whole(quantize, x[part], ends, parse(cast))
        torch.testing.assert_close(found, quantize(x, cast)[part], rtol=0, atol=0, equal_nan=True)


def test_the_whole_of_a_plain_tensor_is_itself(as_rank: Callable[[int, int], None]) -> None:
    as_rank(0, 1)
    x = torch.ones(3)
    assert whole(x) is x and torch.equal(whole(sharded(x, Shard(0), 1)), x)
