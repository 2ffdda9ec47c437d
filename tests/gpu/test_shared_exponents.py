"""A training step in flex16+5 on a device: the weights of a CPU, bit for bit, and nothing that the host reads.

Shown on CPU tensors that stand for those of a device, with torch's operations and with Triton's interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from gpu.test_no_host_reads import HostReads
from ops.int16.test_device import on_a_device
from torch import Tensor, nn

import lowp
from lowp.exponents import SharedExponents
from lowp.kernels.choose import dispatch
from lowp.kernels.int16.late import LateNumber
from lowp.step import NonFiniteGradients

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
}


def _network(is_convolutional: bool) -> nn.Module:
    torch.manual_seed(0)
    if is_convolutional:
        body = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*body, nn.Linear(4 * 3 * 3, 4))
    return nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))


class Trained(NamedTuple):
    """What steps have left of everything that they change."""

    precision: lowp.Precision
    weights: dict[str, Tensor]
    state: list[Tensor]
    losses: list[Tensor]


def trained(
    make: Make,
    batches: list[Tensor],
    is_convolutional: bool = False,
    between: Callable[[int, nn.Module], object] = lambda number, model: None,
    region: Callable[[], Any] = lambda: HostReads("cuda"),
) -> Trained:
    """Train a network on batches, a step each; `between` is called before each step, which runs in a `region`."""
    precision = lowp.Precision("flex16+5")
    model = _network(is_convolutional)
    model, optimizer = precision.prepare(model, make(model.parameters()))
    losses = []
    for number, x in enumerate(batches):
        between(number, model)
        labels = torch.arange(len(x)) % 4
        with region():
            optimizer.zero_grad()
            with precision.autocast():
                loss = F.cross_entropy(model(x), labels)
            precision.backward(loss)
            precision.step(optimizer)
        losses.append(loss.detach().clone())
    kept = [one for entry in optimizer.state.values() for one in entry.values() if isinstance(one, Tensor)]
    return Trained(precision, {name: one.clone() for name, one in model.state_dict().items()}, kept, losses)


def same(found: Trained, expected: Trained) -> None:
    """Compare weights, state of the optimizer, losses and the entries of both."""
    assert _bits(found.losses) == _bits(expected.losses)
    for name, one in expected.weights.items():
        assert torch.equal(found.weights[name], one), name
    assert len(found.state) == len(expected.state) and all(map(torch.equal, found.state, expected.state))
    there, here = found.precision.exponents, expected.precision.exponents
    assert there is not None and here is not None
    assert there.sites() and {site: there.exponent(site) for site in here.sites()} == _exponents(here)
    mine, other = there.summary()["all"], here.summary()["all"]
    assert (mine.writes, mine.saturated, mine.moved, mine.raises_needed, mine.raises_in_time, mine.measured) == (
        (other.writes, other.saturated, other.moved, other.raises_needed, other.raises_in_time, other.measured)
    )


def _exponents(exponents: SharedExponents) -> dict[str, int]:
    return {site: exponents.exponent(site) for site in exponents.sites()}


def _bits(tensors: list[Tensor]) -> list[list[int]]:
    return [one.reshape(-1).view(torch.int32).tolist() for one in tensors]


def _batches(is_convolutional: bool = False, count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (6, 3, 8, 8) if is_convolutional else (8, 16)
    return [torch.randn(shape, generator=generator) * 3.0**number for number in range(count)]


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("name", "is_convolutional"),
    [*((name, False) for name in OPTIMIZERS), ("SGD with momentum", True), ("AdamW, fused", True)],
)
def test_steps_leave_the_bits_of_a_cpu(name: str, is_convolutional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = _batches(is_convolutional)
    expected = trained(OPTIMIZERS[name], batches, is_convolutional)
    with on_a_device("torch", monkeypatch):
        found = trained(OPTIMIZERS[name], batches, is_convolutional)
    same(found, expected)


def test_so_they_do_by_tritons_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = _batches(count=3)
    expected = trained(OPTIMIZERS["AdamW, fused"], batches)
    with on_a_device("triton", monkeypatch):
        found = trained(OPTIMIZERS["AdamW, fused"], batches)
    same(found, expected)


@contextmanager
def _late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let numbers that arrive later, and are waited for by nobody, not arrive."""
    with monkeypatch.context() as patched:
        patched.setattr(LateNumber, "send", lambda self, value: None)
        yield


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("name", "is_convolutional"), [("SGD", False), ("SGD with momentum", True), ("AdamW, fused", False)]
)
def test_nothing_of_a_step_is_read(name: str, is_convolutional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device("torch", monkeypatch), _late(monkeypatch):
        batches = _batches(is_convolutional, 3)
        trained(OPTIMIZERS[name], batches, is_convolutional, region=lambda: HostReads("cpu"))


@pytest.mark.usefixtures("as_on_a_device")
def test_an_evaluation_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated() -> Tensor:
        precision, model = lowp.Precision("flex16+5"), _network(False)
        model = precision.prepare_model(model).eval()
        with HostReads("cpu" if dispatch.is_on_host.__name__ == "<lambda>" else "cuda"), torch.no_grad():
            with precision.autocast():
                result: Tensor = model(_batches()[1])
        return result

    expected = evaluated()
    with on_a_device("torch", monkeypatch):
        assert torch.equal(evaluated(), expected)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.filterwarnings("ignore:an infinity or a NaN")
@pytest.mark.parametrize(
    ("name", "bad"), [*((name, 2) for name in OPTIMIZERS), ("SGD with momentum", 0), ("AdamW, fused", 0)]
)
def test_a_step_with_infinities_is_skipped_there_as_it_is_here(
    name: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = _batches(True, 3)[: bad + 2]
    batches[bad][1, 2] = torch.inf
    if bad == 0:  # the first writes of a site: an operand of a device is not finite as a whole, and begins nothing
        batches = batches[:1]
    expected = trained(OPTIMIZERS[name], batches, True)
    with on_a_device("torch", monkeypatch):
        found = trained(OPTIMIZERS[name], batches, True)
    assert found.precision.skipped_steps == expected.precision.skipped_steps == 1
    assert found.precision.faults and set(found.precision.faults) <= set(expected.precision.faults)
    finite = [number for number in range(len(batches)) if number != bad]
    found, expected = (one._replace(losses=[one.losses[at] for at in finite]) for one in (found, expected))
    if finite:
        same(found, expected)
    assert all(torch.equal(one, expected.weights[name]) for name, one in found.weights.items())


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.filterwarnings("ignore:an infinity or a NaN")
def test_skipping_without_an_end_gives_up_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = _batches(count=1) * 80
    batches[5:] = [batches[0] * torch.inf] * 75
    with on_a_device("torch", monkeypatch), pytest.warns(UserWarning, match=r"1 of the steps up to 8 were skipped"):
        with pytest.raises(NonFiniteGradients, match=r"gradient of .*: int16 has neither, and 20 steps in a row"):
            trained(OPTIMIZERS["SGD"], batches)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.filterwarnings("ignore:step .* most numbers were cut off:UserWarning")
def test_weights_that_were_put_there_from_outside_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(number: int, model: nn.Module) -> None:
        if number == 3:
            with torch.no_grad():
                model[3].weight.mul_(2.0**9)  # type: ignore[index, union-attr, operator]

    expected = trained(OPTIMIZERS["SGD"], _batches(), between=between)
    with on_a_device("torch", monkeypatch):
        same(trained(OPTIMIZERS["SGD"], _batches(), between=between), expected)


@pytest.mark.usefixtures("as_on_a_device")
def test_accumulated_gradients_have_the_bits_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """More passes than are told apart write at one site: what a write learns from the one before depends on both."""

    def accumulated() -> tuple[list[Tensor], dict[str, int]]:
        precision, model = lowp.Precision("flex16+5"), _network(False)
        model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for number in range(3):
            for x in _batches(count=7):
                with precision.autocast():
                    loss = F.cross_entropy(model(x), torch.arange(len(x)) % 4) * 3.0**-number
                precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
        assert precision.exponents is not None
        return [one.detach().clone() for one in model.parameters()], _exponents(precision.exponents)

    expected, exponents = accumulated()
    with on_a_device("torch", monkeypatch):
        found, others = accumulated()
    assert all(map(torch.equal, found, expected)) and {site: others[site] for site in exponents} == exponents


@pytest.mark.usefixtures("as_on_a_device")
def test_a_copy_of_a_precision_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device("torch", monkeypatch):
        one = trained(OPTIMIZERS["SGD"], _batches()).precision
        other = copy.deepcopy(one)
        assert one.exponents is not None and other.exponents is not None
        before = _exponents(other.exponents)
        for site in one.exponents.sites():
            one.exponents.write(torch.full((3,), 2.0**9), next(iter(one.exponents._tables)), site)
        one.exponents.flush()
        assert _exponents(one.exponents) != before == _exponents(other.exponents)
