"""A step that is captured once and replayed: nothing that changes from step to step is kept in Python.

A CUDA graph replays the operations that were captured, on the same memory. Traced to a graph of operations on the CPU,
a step shows the same: whatever Python computed while it was traced is a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu.fake_cuda import fake_cuda
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import lowp
from lowp import kernels
from lowp.exponents import SharedExponents
from lowp.kernels.choose import dispatch
from lowp.kernels.numbers.philox import draw_seed
from lowp.optim.storage import seed_of
from lowp.step.guard import BatchNormJournal

Step = Callable[[Tensor], Tensor]


def _training(preset: str) -> tuple[nn.Module, lowp.GradScaler, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    scaler = lowp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, sample_interval=0)

    def step(x: Tensor) -> Tensor:
        with lowp.autocast(preset):
            loss = model(x).float().square().mean()
        gradients = torch.autograd.grad(scaler.scale(loss), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, scaler, step


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("preset", ["fp16", "bf16"])
def test_a_step_that_was_traced_once_trains_as_the_eager_one_with_skips_and_scales(preset: str) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(3, 4) for _ in range(6)]
    batches[3] = batches[3] * torch.inf
    model, scaler, step = _training(preset)
    expected = [step(x) for x in batches]
    other, other_scaler, other_step = _training(preset)
    found = [other_step(batches[0])]
    replay = make_fx(other_step)(batches[1].clone())  # which takes this step, too
    found += [expected[1], *(replay(x) for x in batches[2:])]
    assert torch.equal(torch.stack(found).nan_to_num(7), torch.stack(expected).nan_to_num(7))
    assert scaler.get_scale() == other_scaler.get_scale() != 2.0**10
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def _normed() -> Callable[[Tensor, Tensor], Tensor]:
    norm = nn.BatchNorm1d(3)
    journal = BatchNormJournal(norm)

    def step(x: Tensor, stepped: Tensor) -> Tensor:
        norm(x)
        journal.settle(stepped)
        assert norm.running_mean is not None and norm.num_batches_tracked is not None
        return torch.cat((norm.running_mean, norm.num_batches_tracked.reshape(1)))

    return step


def test_statistics_of_a_skipped_step_are_those_of_the_replay_before() -> None:
    batches = [torch.randn(5, 3, generator=torch.Generator().manual_seed(number)) for number in range(5)]
    given = [(x, torch.tensor(number != 3)) for number, x in enumerate(batches)]
    eager, other = _normed(), _normed()
    with torch.no_grad():
        expected = [eager(*one) for one in given]
        other(*given[0])
        replay = make_fx(other)(*given[1])  # which takes this step, too
        found = [replay(*one) for one in given[2:]]
    assert all(torch.equal(*pair) for pair in zip(found, expected[2:], strict=True)) and found[-1][-1] == 4


def test_replayed_with_the_same_tensors_it_does_the_same() -> None:
    _, _, step = _training("fp16")
    x = torch.randn(3, 4)
    step(x)
    forward = make_fx(lambda x, seed: lowp.quantize(x, "e4m3fn:stochastic", seed=seed))(x, torch.tensor(5))
    assert torch.equal(forward(x, torch.tensor(5)), forward(x, torch.tensor(5)))
    assert torch.equal(forward(x * 8, torch.tensor(9)), lowp.quantize(x * 8, "e4m3fn:stochastic", seed=9))


def test_seeds_are_drawn_on_the_device_that_they_are_for() -> None:
    with fake_cuda(), kernels.use("bitwise"):
        assert draw_seed("cuda").is_cuda
        step = torch.empty((), device="cuda")
        assert isinstance(seed_of(1, step, 2), Tensor) and seed_of(1, step, 2).is_cuda  # type: ignore[union-attr]


def test_masters_that_draw_count_their_steps_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph replays is counted there; a checkpoint asks the device, and a loaded one tells it."""
    weights = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    eager, replayed = (lowp.MasterWeights(torch.optim.SGD([w], lr=1e-3), kind="stochastic") for w in weights)
    there = torch.zeros((), dtype=torch.int64)
    replayed._steps_there[torch.device("cuda", 0)] = there  # as if the weight lay on it
    monkeypatch.setattr(replayed, "_steps_on", lambda device: there)
    for _ in range(3):
        for weight, optimizer in zip(weights, (eager, replayed), strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        replayed.steps = 0  # which a replay does not count
    assert int(there) == 3 and torch.equal(*weights)
    saved = replayed.state_dict()
    assert saved["state"][0]["master_steps"] == 3
    there.zero_()
    replayed.load_state_dict(saved)
    assert int(there) == 3
    with fake_cuda(), kernels.use("bitwise"):
        parameter = nn.Parameter(torch.empty(3, device="cuda"))
        optimizer = lowp.MasterWeights(torch.optim.SGD([parameter], lr=0.1), kind="stochastic")
        counter = optimizer._steps_on(parameter.device)
        assert isinstance(counter, Tensor) and counter.is_cuda and optimizer._steps_on(parameter.device) is counter


def test_shared_exponents_of_a_step_that_was_traced_once_move_as_those_of_the_eager_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(dispatch, "is_on_host", lambda x: False)
    batches = [torch.randn(5, 4) * 3.0**number for number in range(9)]
    step, exponents = _flexpoint_step()
    expected = [step(x) for x in batches]
    other, replayed = _flexpoint_step()
    found = [other(x) for x in batches[:3]]  # all sites are there, and have started
    replay = make_fx(other)(batches[3].clone())
    with torch.no_grad():  # torch 2.15 traces `.data` as an alias that still requires gradients
        found += [expected[3], *(replay(x) for x in batches[4:])]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert exponents.summary()["all"].moved > 0
    for site in exponents.sites():
        assert replayed.exponent(site) == exponents.exponent(site)


def _flexpoint_step() -> tuple[Step, SharedExponents]:
    """Return a step of gradient descent in flex16+5, and its exponents."""
    precision = lowp.Precision("flex16+5")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((6, 4), (2, 6))]
    exponents = precision.exponents
    assert exponents is not None

    def step(x: Tensor) -> Tensor:
        with precision.autocast():
            loss = nn.functional.linear(nn.functional.linear(x, weights[0]).relu(), weights[1]).square().sum()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data.sub_(gradient * 2.0**-12)
        exponents.flush()
        return loss.detach()

    return step, exponents


def test_a_drawn_seed_is_a_node_of_the_graph_and_no_constant_of_it() -> None:
    x = torch.full((512,), 1.001)
    replay = make_fx(lambda x: lowp.quantize(x, "bf16:stochastic", seed=draw_seed()))(x)
    assert not torch.equal(replay(x), replay(x))


def test_a_stochastic_region_draws_anew_at_each_replay() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        with lowp.autocast("bf16:stochastic"):
            return x @ w

    x, w = torch.randn(8, 64), torch.randn(64, 8)
    replay = make_fx(forward)(x, w)
    assert not torch.equal(replay(x, w), replay(x, w))
