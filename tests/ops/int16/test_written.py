"""Linear layers and convolutions under shared exponents: bits and observations of the general path, by two calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp.exponents import SharedExponents
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.int16.layer import LayerPlan
from lowp.ops.int16 import layer
from lowp.region import handover

needs_library = pytest.mark.skipif(not uses_library(), reason="the C++ library was not built")


class Layers(nn.Module):
    """Layers on matrices and on tensors of three dimensions, with and without bias, a shared and a computed weight."""

    def __init__(self, classes: int = 3, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 8, bias=False)
        self.head, self.checkpointed = nn.Linear(8, classes), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        y = checkpoint(self.second, y, use_reentrant=False) if self.checkpointed else self.second(y)
        y = self.second(y) + y
        return self.head(F.linear(y.mT.contiguous().mT, self.second.weight * 2))


class Convolutions(nn.Module):
    """Convolutions of one to three dimensions, with and without bias, in groups, strided, dilated and transposed."""

    def __init__(self, channels: int = 6, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, (3, 1), stride=2, dilation=(1, 2), padding=1, groups=3, bias=False)
        self.third, self.back = nn.Conv3d(1, 2, (2, 1, 3)), nn.ConvTranspose1d(2, 2, 3)
        self.last, self.checkpointed = nn.Conv1d(2, 3, 5, padding=2), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        y = checkpoint(self.second, y, use_reentrant=False) if self.checkpointed else self.second(y)
        z = self.third((y + F.conv2d(y, self.second.weight * 2, None, 1, (1, 0), 1, 3)).unsqueeze(1))
        z = self.last(self.back(z.flatten(2)))
        result: Tensor = self.last.weight.sum() * z.mT.contiguous().mT + z
        return result.mean(-1)


class Products(nn.Module):
    """Products of matrices and of batches in torch's functions, of heads, sequences, parameters and rows of two."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.project, self.mixed = nn.Linear(12, 12), nn.Parameter(torch.randn(12, 12) / 4)
        self.bias, self.checkpointed = nn.Parameter(torch.randn(3)), checkpointed

    def attended(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2)
        weights = torch.matmul(heads, heads.transpose(-1, -2)).softmax(-1)
        return (weights @ heads).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.attended, x, use_reentrant=False) if self.checkpointed else self.attended(x)
        y = y + torch.einsum("bqd,bkd->bqk", y, x.relu()) @ y[:, : x.shape[1]]
        y = torch.bmm(y, self.mixed.relu().expand(len(y), -1, -1).contiguous()) + y.matmul(self.mixed)
        y = torch.einsum("ij,bkj->bki", self.mixed, y) + self.mixed @ y[:, :1, : len(self.mixed)].mT.mean(0).t()[0]
        result: Tensor = (
            torch.addmm(self.bias, y.flatten(0, 1), self.mixed[:, :3]) + torch.mm(y[:, 0], self.mixed)[0, :3]
        )
        return result + torch.baddbmm(self.bias, y, y.mT[..., :3])[:, :1].sum(0)


class Wide(nn.Module):
    """Products with as many features as may need a second word for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(12, 1030)), nn.Parameter(torch.randn(1030))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight) + x.mm(self.weight) + (x.unsqueeze(0) @ self.weight)[0]


def state(exponents: SharedExponents | None) -> list[Any]:
    """Everything that shared exponents remember of their sites."""
    assert exponents is not None
    found: list[Any] = []

    def collect(one: Any) -> None:
        if isinstance(one, dict):
            for key, value in one.items():
                found.append(str(key))
                collect(value)
        elif isinstance(one, (list, tuple)):
            for value in one:
                collect(value)
        else:
            found.append(one)

    collect(exponents.state_dict())
    return found


def trained(model: nn.Module, x: Tensor, steps: int = 4, twice: bool = True) -> list[Any]:
    """Outputs, gradients, those of a gradient's norm, an evaluation, and the state of all sites, of some steps."""
    numbers, found = lowp.Precision("flex16+5"), list[Any]()
    model, optimizer = numbers.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for _ in range(steps):
        with numbers.autocast():
            y = model(x)
            loss = F.cross_entropy(y.flatten(0, -2), torch.zeros(y[..., 0].numel(), dtype=torch.int64))
        inputs = [one for one in (x, *model.parameters()) if one.requires_grad]
        if twice:
            gradients = torch.autograd.grad(loss, inputs, create_graph=True)
            found += [*gradients, *torch.autograd.grad(gradients[0].square().sum(), inputs, allow_unused=True)]
        else:
            numbers.backward(loss)
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
            numbers.step(optimizer)
            optimizer.zero_grad()
        with numbers.autocast(), torch.no_grad():
            found += [y, loss, model(x)]
        if twice and numbers.exponents is not None:
            numbers.exponents.flush()
        found += state(numbers.exponents)
    return found


def are_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def both_ways(run: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    quick = run()
    in_parts(monkeypatch)
    return quick, run()


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no fast path, and no plan."""
    monkeypatch.setattr(handover, "functorch_transforms", lambda: True)
    monkeypatch.setattr(layer.Layers, "_planned", lambda *given: None)


def drawn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_(grad)


CASES: dict[str, Callable[[], list[Any]]] = {
    "matrices": lambda: trained(Layers(), drawn(6, 12, grad=True), twice=True),
    "three dimensions": lambda: trained(Layers(), drawn(2, 3, 12, grad=True)),
    "trained": lambda: trained(Layers(), drawn(2, 3, 12), twice=False),
    "checkpointed": lambda: trained(Layers(checkpointed=True), drawn(6, 12), twice=False),
    "many classes": lambda: trained(Layers(1030), drawn(6, 12), twice=False),
    "a large input": lambda: trained(Layers(), drawn(3000, 12, grad=True), twice=False),
    "an infinite input": lambda: trained(Layers(), drawn(6, 12).index_fill(0, torch.tensor([1]), math.inf), 2),
    "convolutions": lambda: trained(Convolutions(), drawn(2, 3, 8, 7, grad=True)),
    "convolutions, trained": lambda: trained(Convolutions(), drawn(2, 3, 8, 7), twice=False),
    "convolutions, channels last": lambda: trained(Convolutions(), drawn(2, 8, 7, 3).permute(0, 3, 1, 2), twice=False),
    "convolutions, checkpointed": lambda: trained(Convolutions(checkpointed=True), drawn(2, 3, 8, 7), twice=False),
    "many channels": lambda: trained(Convolutions(1026), drawn(1, 3, 4, 7), 3, twice=False),
    "a large picture": lambda: trained(Convolutions(), drawn(2, 3, 31, 33, grad=True), twice=False),
    "products": lambda: trained(Products(), drawn(2, 5, 12, grad=True)),
    "products, trained": lambda: trained(Products(), drawn(2, 5, 12), twice=False),
    "products, checkpointed": lambda: trained(Products(checkpointed=True), drawn(2, 5, 12), twice=False),
    "wide products": lambda: trained(Wide(), drawn(6, 12), 3, twice=False),
    "products of an infinity": lambda: trained(
        Products(), drawn(2, 5, 12).index_fill(1, torch.tensor([1]), math.inf), 2
    ),
    "an infinite picture": lambda: trained(Convolutions(), drawn(2, 3, 8, 7) / drawn(3, 1, 1).relu(), 2, twice=False),
}


@pytest.mark.filterwarnings("ignore:an infinity or a NaN")
@pytest.mark.parametrize("case", CASES)
def test_layers_have_the_bits_exponents_and_observations_of_the_general_path(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        return [one.nan_to_num(7) if isinstance(one, Tensor) else one for one in CASES[case]()]

    quick, slow = both_ways(run, monkeypatch)
    assert len(quick) == len(slow) and all(map(are_same, quick, slow))


@needs_library
@pytest.mark.parametrize("instruction_set", cpu.available() if uses_library() else ())
def test_every_instruction_set_gives_the_same_bits(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu.asked()

    def run() -> list[Any]:
        torch.manual_seed(0)
        layers = trained(Layers(), drawn(6, 12), twice=False)
        return [*layers, *trained(Convolutions(), drawn(2, 3, 8, 7), twice=False)]

    try:
        cpu.select(instruction_set)
        quick = run()
        cpu.select(before)
        in_parts(monkeypatch)
        assert all(map(are_same, quick, run()))
    finally:
        cpu.select(before)


@needs_library
def test_a_layer_is_one_call_forward_and_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(("forward", "backward"), 0)
    for name in counts:
        original = getattr(LayerPlan, name)

        def counted(*given: Any, name: str = name, original: Any = original) -> Any:
            found = original(*given)
            counts[name] += found is not None
            return found

        monkeypatch.setattr(LayerPlan, name, counted)
    trained(Layers(), drawn(2, 3, 12, grad=True), steps=3, twice=False)
    # the first step begins exponents; one input lies otherwise
    assert counts == {"forward": 2 * 4, "backward": 2 * 4}
    trained(Convolutions(), drawn(2, 3, 8, 7), steps=3, twice=False)
    assert counts == {"forward": 2 * 4 + 2 * 5, "backward": 2 * 4 + 2 * 5}
    torch.manual_seed(0)
    trained(Products(), drawn(2, 5, 12), steps=2, twice=False)
    # but for slices of parameters, a view with gaps, and a bias of all rows
    assert counts == {"forward": 18 + 9, "backward": 18 + 9}


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_mantissas_of_memory_that_was_written_are_not_used(
    where: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        first: nn.Module = nn.Linear(12, 8) if kind == "linear" else nn.Conv1d(6, 8, 3)
        second: nn.Module = nn.Linear(8, 8) if kind == "linear" else nn.Conv1d(8, 8, 3)
        x = drawn(1, 6, 12)
        numbers, found = lowp.Precision("flex16+5"), list[Any]()
        for _ in range(3):
            with numbers.autocast():
                inner = first(x)
                if where == "input":
                    inner.data.numpy().flat[0] = 0.3712345
                outer = second(inner)
            gradient = torch.autograd.grad(outer, [inner], outer.detach())[0]
            if where == "gradient":
                gradient.numpy().flat[0] = 0.3712345
            found += [outer, *torch.autograd.grad(inner, list(first.parameters()), gradient)]
            assert numbers.exponents is not None
            numbers.exponents.flush()
            found += state(numbers.exponents)
        return found

    quick, slow = both_ways(run, monkeypatch)
    assert len(quick) == len(slow) and all(map(are_same, quick, slow))


def test_an_infinite_bias_reaches_the_result() -> None:
    layer, numbers = nn.Linear(4, 3), lowp.Precision("flex16+5")
    for step in range(2):
        with numbers.autocast():
            y = layer(drawn(2, 4))
        assert bool(y.isfinite().all()) == (step == 0)
        with torch.no_grad():
            layer.bias[0] = math.inf
    assert y[:, 0].isinf().all() and y[:, 1:].isfinite().all()
