"""Which elements share a scale, how groups are folded and put back, codes in panels, and numbers that arrive late."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lowp.errors import InvalidInput, Unavailable
from lowp.formats import IntFormat, Scope, parse
from lowp.kernels.int16.late import LateNumber, at_once
from lowp.kernels.numbers import floats, packing
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


def test_codes_of_8_16_32_and_64_bits_fill_bytes_and_are_packed_as_they_are() -> None:
    assert [bits for bits in range(1, 33) if packing.fills_bytes(IntFormat("i", bits))] == [8, 16, 32]
    of_floats = {text: packing.fills_bytes(parse(text)) for text in ("fp64", "e11m51", "e11m36", "fp32", "e2m1")}  # type: ignore[arg-type]
    assert of_floats == {"fp64": True, "e11m51": False, "e11m36": False, "fp32": True, "e2m1": False}
    codes = torch.arange(6, dtype=torch.uint8).view(2, 3)
    assert packing.pack(codes, IntFormat("i8", 8)) is codes
    assert packing.unpack(codes, IntFormat("i8", 8), 2).tolist() == [[0, 1], [3, 4]]
    assert packing.unpack(codes[0, 1], IntFormat("i8", 8)).tolist() == 1
    with pytest.raises(InvalidInput, match="a row of 1 bytes holds 1 codes of i8, not 2"):
        packing.unpack(codes[0, 1], IntFormat("i8", 8), 2)


def test_a_row_holds_as_many_codes_as_fit() -> None:
    packed, element = torch.zeros(3, 2, dtype=torch.uint8), IntFormat("i3", 3)
    assert packing.unpack(packed, element).shape == packing.unpack(packed, element, 5).shape == (3, 5)
    assert packing.unpack(packed, element, 0).shape == (3, 0)
    for length in (-1, 6):
        with pytest.raises(InvalidInput, match=f"a row of 2 bytes holds 5 codes of i3, not {length}"):
            packing.unpack(packed, element, length)


def test_a_code_has_the_smallest_dtype_that_holds_it() -> None:
    of_integers = {bits: packing.code_dtype(IntFormat("i", bits)) for bits in (1, 8, 9, 16, 17, 32)}
    eight, sixteen, more = torch.int8, torch.int16, torch.int32
    assert of_integers == {1: eight, 8: eight, 9: sixteen, 16: sixteen, 17: more, 32: more}
    names = ("e4m3fn", "e5m3", "fp16", "e8m8", "fp32", "e11m20", "e11m21", "fp64")
    dtypes = (torch.uint8, *[torch.uint16] * 2, *[torch.uint32] * 3, *[torch.uint64] * 2)
    assert tuple(packing.code_dtype(parse(name)) for name in names) == dtypes  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 12])
def test_rows_of_codes_are_packed_from_their_lowest_bits_and_read_back(bits: int, dtype: torch.dtype) -> None:
    element = IntFormat("i", bits)
    every = torch.arange(element.minimum, element.maximum + 1)[:100].to(dtype)
    codes = torch.tensor([[1, -1, -1]], dtype=dtype) if bits == 1 else every.expand(2, -1)
    packed = packing.pack(codes, element)
    numbers = [
        sum(int(code < 0 if bits == 1 else code % (1 << bits)) << bits * at for at, code in enumerate(row))
        for row in codes.tolist()
    ]
    assert packed.dtype is torch.uint8
    assert [int.from_bytes(bytes(row), "little") for row in packed.tolist()] == numbers
    assert torch.equal(packing.unpack(packed, element, codes.shape[1]), codes.long())
    for given in (packed.to(torch.int16), packed[0, 0]):
        with pytest.raises(
            InvalidInput, match=f"packed codes of i{bits} must be rows of torch.uint8, not {given.ndim}-d"
        ):
            packing.unpack(given, element)


def test_a_single_number_is_a_group_of_its_own() -> None:
    for scope in (*SCOPES, Scope("block", 1), Scope("tile", 1, 1)):
        wanted = () if scope.kind in ("tensor", "row") else (1,)
        assert group_shape(torch.Size(()), scope) == wanted, scope
