"""A training step on CUDA waits for nothing: no number is read by the host, and nothing is copied to it.

Run on fake CUDA tensors, which have no numbers that could be read, and on CPU tensors under a mode that refuses reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu.fake_cuda import fake_cuda, on_cuda
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowp
from lowp import kernels
from lowp.kernels.int16.late import LateNumber
from lowp.kernels.steps import rules

_READS = frozenset("_local_scalar_dense item is_nonzero nonzero masked_select equal unique_dim _unique2".split())
_WITHOUT_FAKE = "_fused_sgd_"  # in place, returns nothing


class HostReads(TorchDispatchMode):
    """Refuses what needs the numbers of a device on the host; notes what is sent there, which no graph captures.

    `device`: which tensors stand for those of a device.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device, self.sent = device, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _READS and any(x.device.type == self.device for x in _tensors((args, kwargs))):
            raise AssertionError(f"{name} waits for the device")
        is_left_out = name == _WITHOUT_FAKE and any(x.is_cuda for x in _tensors(args))
        result = None if is_left_out else func(*args, **(kwargs or {}))
        given, written = _tensors((args, kwargs)), _tensors(result)
        if any(x.is_cuda for x in given) and any(x.is_cpu for x in written):
            raise AssertionError(f"{name} copies to the host")
        if "copy" in name and any(x.is_cpu for x in given) and any(x.is_cuda for x in written):
            self.sent.append(name)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


@pytest.fixture(autouse=True)
def _as_with_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the scaler believe in CUDA; what arrives later, and is waited for by nobody, does not arrive here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(LateNumber, "send", lambda self, value: None)
    with kernels.use("bitwise"):
        yield


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "torch, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "torch's SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW, split": lambda p: lowp.optim.AdamW(p),
    "AdamW, fp32 masters": lambda p: lowp.optim.AdamW(p, split=False),
    "AdamW, stochastic": lambda p: lowp.optim.AdamW(p, split=False, masters="stochastic", moments="bf16"),
    "AdamW, fp32": lambda p: lowp.optim.AdamW(p, storage=None),
    "SGD": lambda p: lowp.optim.SGD(p, lr=0.1, momentum=0.9),
    "MasterWeights, bf16": lambda p: lowp.MasterWeights(torch.optim.AdamW(p, fused=True), "bf16"),
    "MasterWeights, fp16": lambda p: lowp.MasterWeights(torch.optim.AdamW(p, fused=True), "fp16"),
    "MasterWeights, stochastic": lambda p: lowp.MasterWeights(torch.optim.AdamW(p, fused=True), kind="stochastic"),
    "MasterWeights, split": lambda p: lowp.MasterWeights(torch.optim.AdamW(p, fused=True), "bf16", kind="split"),
    "MasterWeights, SGD": lambda p: lowp.MasterWeights(torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), "bf16"),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["alone", "scaled", "unscaled before"])
def test_two_steps_of_an_optimizer_read_nothing_and_the_second_sends_nothing(name: str, way: str) -> None:
    with fake_cuda(), HostReads() as seen:
        parameters = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in ((3, 4), (4,))]
        optimizer, scaler = OPTIMIZERS[name](parameters), lowp.GradScaler("cuda")
        for _ in range(2):
            seen.sent.clear()
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            if way == "alone":
                optimizer.step()
                continue
            scaler.scale(torch.empty((), device="cuda"))
            if way == "unscaled before":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert not seen.sent


@pytest.mark.parametrize(
    "make",
    [
        lambda lr: rules.AdamWStep(lr, 0.01, False, (0.9, 0.999), 1e-8),
        lambda lr: rules.SgdStep(lr, 0.1, False, 0.9, 0.0, False),
    ],
)
@pytest.mark.parametrize("is_tensor", [False, True])
def test_the_rates_of_a_step_by_one_kernel_are_made_on_the_device(make: Callable[[Any], Any], is_tensor: bool) -> None:
    with fake_cuda(), HostReads() as seen:
        rule = make(torch.ones((), device="cuda") if is_tensor else 0.1)
        table = rule.table(torch.zeros(3, device="cuda"))
    assert table.is_cuda and not seen.sent


PLAIN: dict[str, Make] = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}
# without a loss scale nothing is skipped, and any optimizer will do
STEPS = [(preset, name) for preset in ("fp32", "bf16", "bf16-storage", "fp8") for name in PLAIN]
STEPS += [(preset, name) for preset in ("fp16", "fp16-storage") for name in PLAIN if "fused" in name]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("preset", "name"), STEPS)
def test_a_step_of_a_precision_reads_nothing_and_sends_nothing(
    preset: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("torch.optim.adam"), "_get_value", _on_the_host)
    scale = "dynamic(1024)" if preset.startswith("fp16") else None  # without a number its start is searched for
    empty = _network()
    with fake_cuda():
        model = on_cuda(empty)
        parameters = list(model.parameters())

        def backward(loss: Tensor, **options: Any) -> None:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)

        monkeypatch.setattr(Tensor, "backward", backward)
        monkeypatch.setattr(torch, "equal", lambda one, other: True)  # asked once, while a model is prepared
        precision = lowp.Precision(preset, loss_scale=scale)
        model, optimizer = precision.prepare(model, PLAIN[name](parameters))
        with HostReads() as seen:
            for _ in range(3):
                seen.sent.clear()
                with precision.autocast():
                    loss = model(torch.empty(2, 4, device="cuda")).float().mean()
                precision.backward(loss)
                precision.step(optimizer)
        assert not seen.sent
        assert precision.stepped.shape == ()


def _on_the_host(steps: Tensor) -> float:
    """Return a number of steps, which torch's optimizers that are not fused count in a tensor of the CPU."""
    assert steps.is_cpu
    return 1.0


def _network() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def _no_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let optimizers of a torch built for CUDA not ask the driver, which may not be there, for a captured graph."""
    check = "_accelerator_graph_capture_health_check"
    monkeypatch.setattr(torch.optim.Optimizer, check, lambda self: None, raising=False)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.usefixtures("as_on_a_device")
def test_on_real_numbers_a_step_is_skipped_without_a_read(bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_captures(monkeypatch)
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer, scaler = torch.optim.AdamW(parameters, lr=0.1, fused=True), lowp.GradScaler("cpu", init_scale=4.0)
    with HostReads("cpu"):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float("inf") if bad and len(parameter) == 2 else 8.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert bool(scaler.stepped) is not bad
    assert all(bool((parameter == 1).all()) is bad for parameter in parameters)
    assert scaler.get_scale() == (2.0 if bad else 4.0)


MOMENTA: dict[str, dict[str, Any]] = {
    "plain": {},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("options", MOMENTA.values(), ids=MOMENTA)
@pytest.mark.parametrize("storage", [None, "bf16"])
def test_a_momentum_begins_after_skipped_steps_as_torch_begins_it(storage: str | None, options: dict[str, Any]) -> None:
    start = torch.tensor([-0.0, 0.0, 1.5, -2.0])
    gradients = torch.stack((start, torch.tensor([-0.0, 0.0, 3.0, 1e-40])))

    def trained(skipped: int) -> list[Tensor]:
        parameter, late = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        inner = torch.optim.SGD([parameter, late], lr=0.25, momentum=0.5, fused=True, **options)
        optimizer = inner if storage is None else lowp.MasterWeights(inner, storage)
        scaler = lowp.GradScaler("cpu", init_scale=1.0, growth_interval=9, floor=1.0)
        for number, row in enumerate(torch.cat((torch.full((skipped, 4), torch.nan), gradients, gradients))):
            parameter.grad = row.to(parameter.dtype)
            late.grad = row.to(parameter.dtype) if number > skipped else None  # begins a step later
            # on a CPU MasterWeights compares what it stores: of a tensor of no CUDA nothing is refused
            with HostReads("cpu" if storage is None else "cuda"):
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
                scaler.update()
        kept = [one["momentum_buffer"] for one in optimizer.state.values()]
        assert len(kept) == 2
        return [parameter.detach(), late.detach(), *kept]

    def by_torch() -> list[Tensor]:
        parameters = [nn.Parameter(start.clone()) for _ in range(2)]
        optimizers = [torch.optim.SGD([one], lr=0.25, momentum=0.5, fused=True, **options) for one in parameters]
        for number, row in enumerate(torch.cat((gradients, gradients))):
            for parameter, optimizer in list(zip(parameters, optimizers, strict=True))[: 1 if number == 0 else 2]:
                parameter.grad = row.clone()
                optimizer.step()
        return [one.detach() for one in parameters] + [
            optimizer.state[one]["momentum_buffer"] for one, optimizer in zip(parameters, optimizers, strict=True)
        ]

    found = trained(0)
    assert _bits(trained(2)) == _bits(found)
    if storage is None:
        assert _bits(found) == _bits(by_torch())


def _bits(tensors: list[Tensor]) -> list[list[int]]:
    return [one.float().view(torch.int32).tolist() for one in tensors]


@pytest.mark.usefixtures("as_on_a_device")
def test_a_momentum_with_dampening_costs_a_read_in_its_first_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    scaler = lowp.GradScaler("cpu", init_scale=1.0)
    for number in range(2):
        parameter.grad = torch.ones(3)
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match="waits for the device") if number == 0 else HostReads("cpu"):
            with HostReads("cpu"):
                scaler.step(optimizer)
        if number == 0:
            scaler.update()
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
        scaler.update()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full((3,), 0.9 + 0.5))


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_another_optimizer_of_torchs_costs_the_one_read_that_torchs_own_scaler_makes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_captures(monkeypatch)
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = PLAIN[name]([parameter]), lowp.GradScaler("cpu")
    parameter.grad = torch.ones(3)
    scaler.scale(torch.ones(()))
    reads: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reads.append(func._schema.name.partition("::")[2])
            return func(*args, **(kwargs or {}))

    asked: list[object] = []
    plain = Tensor.tolist
    with Counted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", lambda self: (asked.append(self), plain(self))[1])
        scaler.step(optimizer)
        scaler.update()
    assert len(asked) == 1 and not _READS & set(reads) - {"_local_scalar_dense"}
