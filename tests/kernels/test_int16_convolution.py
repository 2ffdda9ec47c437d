"""Convolutions written under a given exponent in one call: bits and observations of a sum, rounded, and its values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.casts import parse
from lowp.exponents.table import ExponentTable, SumEntry
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.int16 import convolution as int16_convolution
from lowp.kernels.int16 import payloads
from lowp.kernels.int16 import written as int16_written
from lowp.kernels.int16.integer import observed
from lowp.kernels.int16.mantissas import Mantissas
from lowp.ops.convolution import Convolution
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND

pytestmark = pytest.mark.skipif(not uses_library(), reason="the C++ library was not built")

# input, weight, then stride, padding, dilation, transposed, output padding, groups
FORMS = {
    "3x3": ((2, 5, 9, 7), (6, 5, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    "strided": ((2, 6, 9, 8), (4, 3, 3, 2), (2, 3), (1, 0), (1, 2), False, (0, 0), 2),
    "1x1 strided": ((2, 4, 8, 8), (6, 4, 1, 1), (2, 2), (0, 0), (1, 1), False, (0, 0), 1),
    "depthwise": ((2, 4, 8, 8), (4, 1, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 4),
    "one dimension": ((3, 34, 70), (13, 34, 5), (1,), (2,), (1,), False, (0,), 1),
    "three dimensions": ((1, 3, 5, 4, 6), (4, 3, 2, 3, 1), (1, 2, 1), (1, 1, 0), (1, 1, 1), False, (0, 0, 0), 1),
    "transposed": ((2, 4, 5, 5), (4, 3, 4, 4), (2, 2), (1, 1), (1, 1), True, (0, 0), 1),
}
CAST = parse("flex16+5:autoflex")


def mantissas(shape: tuple[int, ...], seed: int, exponent: int, reach: int = 32768) -> Mantissas:
    generator = torch.Generator().manual_seed(seed)
    return Mantissas(torch.randint(-reach, reach, shape, generator=generator).to(torch.int16), exponent)


def operands(form: Convolution, slot: int, reach: int) -> tuple[Mantissas, Mantissas]:
    output = F.conv_transpose2d if form.transposed else (F.conv1d, F.conv2d, F.conv3d)[len(form.stride) - 1]
    settings: dict[str, Any] = {"output_padding": form.output_padding} if form.transposed else {}
    settings |= {"stride": form.stride, "padding": form.padding, "dilation": form.dilation, "groups": form.groups}
    shape = tuple(output(torch.zeros(form.first), torch.zeros(form.second), **settings).shape)
    first, second = mantissas(form.first, 1, -9, reach), mantissas(form.second, 2, -17, reach)
    gradient = mantissas(shape, 3, -12, reach)
    return {OUTPUT: (first, second), FIRST: (second, gradient), SECOND: (first, gradient)}[slot]


def noted(entry: SumEntry, values: Tensor, payload: Tensor) -> list[Any]:
    """Return what a write gives, what was seen of it, and the mantissas that are kept."""
    kept = payloads.kept(values, entry.table.cast.format)
    return [values, payload, *entry.table.pending.pop(entry.place), *([] if kept is None else kept[:2])]


@pytest.mark.parametrize("instruction_set", cpu.available() if uses_library() else ())
@pytest.mark.parametrize("slot", [FIRST, SECOND, OUTPUT])
@pytest.mark.parametrize("name", FORMS)
def test_it_is_what_the_sum_and_its_values_are(name: str, slot: int, instruction_set: str) -> None:
    form, before = Convolution(*FORMS[name]), cpu.asked()
    table = ExponentTable(CAST, torch.device("cpu"))
    bias = torch.linspace(-900, 900, form.channels) if slot == OUTPUT else None
    try:
        cpu.select(instruction_set)
        for reach, exponent in ((32768, -10), (300, -25), (300, 40), (2, 0), (32768, -101), (32768, 140)):
            left, right = operands(form, slot, reach)
            entry = SumEntry(table, table.index("output of a convolution"), exponent)
            given = slot, left, right, exponent, table.is_symmetric, bias
            found, expected = form.written(*given), form.mantissas(*given)
            assert found is not None and expected is not None
            one = noted(entry, entry.wrote(found), found.payload)
            other = noted(entry, entry.write(expected), expected.values)
            assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))
    finally:
        cpu.select(before)


def test_it_leaves_to_others_what_it_does_not_serve() -> None:
    form = Convolution(*FORMS["3x3"])
    left, right = operands(form, OUTPUT, 300)
    bias = torch.zeros(form.channels)

    def is_served(exponent: int = -10, bias: Tensor | None = None) -> bool:
        return form.written(OUTPUT, left, right, exponent, True, bias) is not None

    assert is_served() and is_served(bias=bias)
    assert not is_served(bias=bias.index_fill(0, torch.tensor([2]), math.inf))
    assert not is_served(bias=bias[:-1])
    assert not is_served(exponent=2000)
    with lowp.kernels.use("reference"):
        assert not is_served()
    with observed(lambda operations: torch.no_grad()):
        assert not is_served()
    windowed = Convolution((2, 5, 3, 3), (5, 6, 2, 2), (1, 1), (0, 0), (3, 3), True, (2, 2), 1)
    of_windowed = mantissas(windowed.first, 1, 0), mantissas(windowed.second, 2, 0)
    assert windowed.mantissas(OUTPUT, *of_windowed, -10, True, None) is not None
    assert windowed.written(OUTPUT, *of_windowed, -10, True, None) is None
    other = left._replace(payload=left.payload[1:])
    assert form.written(OUTPUT, other, right, -10, True, None) is None
    assert int16_convolution.Product.of("forward", Convolution((0, 5, 9, 7), *FORMS["3x3"][1:])._shape) is None


def test_a_network_trains_alike_with_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    original = int16_convolution.written

    def counted(*given: Any) -> Any:
        found = original(*given)
        served.append(found is not None)
        return found

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 2, 2, bias=False), nn.Flatten()
        network, numbers = nn.Sequential(*layers, nn.Linear(96, 3)), lowp.Precision("flex16+5")
        network, optimizer = numbers.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        x, y = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1])
        for _ in range(4):
            with numbers.autocast():
                loss = F.cross_entropy(network(x), y)
            numbers.backward(loss)
            numbers.step(optimizer)
            optimizer.zero_grad()
        assert numbers.exponents is not None
        exponents = [group.state.exponent for group in numbers.exponents._groups.values()]
        return [*network.parameters(), loss.detach(), *exponents]

    layers_at_once = trained()
    monkeypatch.setattr(int16_written, "convolution", lambda *_: None)
    monkeypatch.setattr(int16_convolution, "written", counted)
    quick = trained()
    assert all(map(torch.equal, quick, layers_at_once))
    assert sum(served) == len(served) == 3 * 5  # two outputs and three gradients; the first step begins exponents
    monkeypatch.setattr(int16_convolution, "written", lambda *_: None)
    assert all(map(torch.equal, quick, trained()))
