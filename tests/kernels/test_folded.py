"""Which elements share a scale, how groups are folded and put back, codes in panels, and numbers that arrive late."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lowp.errors import Unavailable
from lowp.formats import Scope
from lowp.kernels.int16.late import LateNumber, at_once
from lowp.kernels.numbers import floats
from lowp.kernels.numbers.groups import fold, group_shape, spread, unfold
from lowp.kernels.packed.few_bits import codes_of, pack_codes

SCOPES = [
    *(Scope(kind) for kind in ("tensor", "row", "channel")),
    *(Scope("block", size) for size in (2, 4, 16)),
    *(Scope("tile", size, rows) for size, rows in ((4, 2), (3, 3), (16, 16))),
]
SHAPES = [(), (1,), (7,), (5, 6), (4, 8), (3, 5, 7), (2, 1, 4, 3), (0, 4), (3, 0)]


def group_of(place: tuple[int, ...], scope: Scope) -> tuple[int, ...]:
    """Return which group the element at a place belongs to, by the definition of the scope."""
    if scope.kind == "tensor":
        return ()
    if scope.kind == "channel":
        return place[:1]
    if scope.kind == "row":
        return place[:-1]
    tiled = place[-2:-1] if scope.kind == "block" else tuple(one // scope.rows for one in place[-2:-1])
    return (*place[:-2], *tiled, place[-1] // scope.size)


def places(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


@pytest.mark.parametrize("scope", SCOPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_elements_are_folded_by_their_groups_and_put_back(scope: Scope, shape: tuple[int, ...]) -> None:
    x = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
    folded = fold(x, scope)
    assert torch.equal(unfold(folded, x.shape, scope), x)
    if x.numel() == 0 or not shape:
        return
    expected: dict[tuple[int, ...], set[float]] = {}
    for place in places(shape):
        expected.setdefault(group_of(place, scope), set()).add(float(x[place]))
    rows = folded.reshape(-1, folded.shape[-1])
    assert {frozenset(row.tolist()) - {0.0} for row in rows} == {frozenset(one) for one in expected.values()}
    assert len(rows) == torch.Size(group_shape(x.shape, scope)).numel() == len(expected)


@pytest.mark.parametrize("scope", SCOPES, ids=str)
@pytest.mark.parametrize("shape", [one for one in SHAPES if one and 0 not in one], ids=str)
def test_each_element_has_the_scale_of_its_group(scope: Scope, shape: tuple[int, ...]) -> None:
    scales = torch.arange(torch.Size(group_shape(torch.Size(shape), scope)).numel()).reshape(
        group_shape(torch.Size(shape), scope)
    )
    spreaded = spread(scales, torch.Size(shape), scope).expand(shape)
    for place in places(shape):
        assert spreaded[place] == scales[group_of(place, scope)]


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_in_panels_are_read_back(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (37, 50), generator=torch.Generator().manual_seed(0))
    packed = pack_codes(codes, torch.ones(37, 4), list(range(1 << bits)), 16)
    found = codes_of(packed)
    assert found.dtype is torch.uint8 and found.is_contiguous() and torch.equal(found.long(), codes)


def test_where_a_device_lacks_fp64_exact_sums_are_refused_and_others_made_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(2)
    floats.need_fp64(x, "flex16+5")
    assert floats.home(torch.device("cuda:1")) == torch.device("cuda:1")
    monkeypatch.setattr(floats, "has_fp64", lambda kind: False)
    with pytest.raises(Unavailable, match="needs fp64 for its exact sums, which cpu does not compute in"):
        floats.need_fp64(x, "flex16+5")
    assert floats.home(torch.device("cuda:1")) == torch.device("cpu")


class Event:
    """One of a device that tells when a copy has arrived."""

    device = torch.device("xpu")
    has_happened = False

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        self.has_happened = True


def test_a_number_is_read_when_its_copy_has_arrived_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    number, value, event = LateNumber(), torch.tensor([1.0, 2.0]), Event()
    number.wait()
    assert number.read() is None and not number.is_under_way
    number.send(value)
    value.zero_()
    assert number.read() == [1.0, 2.0] and not number.is_under_way
    number._arrived = event  # type: ignore[assignment]
    assert number.read() is None and number.is_under_way
    assert copy.copy(number).read() is None and not copy.copy(number).is_under_way
    number.wait()
    assert number.read() == [1.0, 2.0] and not number.is_under_way
    event.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert number.read() is None and number.is_under_way  # nothing is asked of an event while a graph is captured


def test_a_number_of_the_host_is_read_at_once_and_one_of_a_device_stays_there() -> None:
    assert at_once(torch.tensor(3)) == 3 and type(at_once(torch.tensor(3.0))) is float
    there = torch.tensor(3.0, device="meta")
    found = at_once(there)
    assert isinstance(found, Tensor) and found.is_meta and found is not there
