"""The dynamic loss scale of `Precision` starts at a scale that fits the first gradients, without a skipped step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowp
from lowp.step import searching
from lowp.step.searching import HEADROOM, first_scale


class Net(nn.Module):
    """A network with state that an additional backward could disturb: dropout's draws and BatchNorm's statistics."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3))
        self.last = nn.Linear(64, 20)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.first(x))  # type: ignore[no-any-return]
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))  # type: ignore[no-any-return]


def train(
    loss_scale: str | None = None, steps: int = 8, times: float = 30.0, net: Net | None = None
) -> tuple[lowp.Precision, nn.Module, list[float]]:
    """Train with a sum of squares as the loss, as in an autoencoder; gradients overflow at 2^16 and far below."""
    torch.manual_seed(0)
    x = torch.randn(64, 20)
    precision = lowp.Precision("fp16", loss_scale=loss_scale)
    model, optimizer = precision.prepare(net or Net(), None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with precision.autocast():
            loss = times * (model(x.requires_grad_(True)).float() - x).square().sum()
        precision.backward(loss)
        precision.step(optimizer)
        losses.append(float(loss.detach()))
    return precision, model, losses


def test_no_step_is_lost_where_a_scale_of_65536_loses_several() -> None:
    precision, _, losses = train()
    assert precision.skipped_steps == 0
    assert 0 < precision.scale < 1024
    assert losses[-1] < losses[0]
    assert train("dynamic(65536)")[0].skipped_steps >= 4


def test_the_search_changes_nothing_but_the_scale() -> None:
    precision, model, losses = train()
    plain, same, again = train(f"dynamic({precision.scale:g})")
    assert (plain.scale, again) == (precision.scale, losses)
    for name, value in model.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name


def test_a_gradient_that_a_hidden_tensor_retains_is_that_of_the_backward_alone() -> None:
    weight = torch.full((2,), 1e3, requires_grad=True)
    hidden = weight * 1.0
    hidden.retain_grad()
    precision = lowp.Precision("fp16")
    precision.backward((hidden.half() * 3.0).sum())
    assert precision.scale < 65536 and hidden.grad is not None
    assert torch.equal(hidden.grad, torch.full((2,), 3.0 * precision.scale))


def test_a_scale_that_fits_with_room_stays_at_its_start() -> None:
    assert train(times=1e-6)[0].scale == 65536


@pytest.mark.parametrize("limit", [-2, 0, 3, 12, 17, 40])
def test_it_is_the_largest_scale_that_leaves_the_room(limit: int) -> None:
    """The gradient is infinite from a scale of 2^limit on."""

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.where(gradient.abs() < 2.0**limit, gradient, torch.inf)

    weight = torch.ones((), requires_grad=True)
    found = first_scale(Narrow.apply(weight), 2.0**16, 1.0)  # type: ignore[no-untyped-call]
    most = limit - 1 - HEADROOM
    assert found == (2.0**16 if limit <= 0 else min(max(2.0**most, 1.0), 2.0**16))
    assert weight.grad is None


def test_a_loss_that_is_not_finite_is_no_reason_for_another_scale() -> None:
    precision, _, _ = train(times=float("inf"), steps=1)
    assert (precision.skipped_steps, precision.scale) == (1, 32768)


def test_gradients_that_accumulate_have_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("lowp.precision.first_scale", lambda *given, **options: calls.append(given) or 256.0)
    precision = lowp.Precision("fp16")
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        for _ in range(3):
            with precision.autocast():
                loss = weight * 1.0
            precision.backward(loss)
        precision.step(optimizer)
    assert len(calls) == 1 and precision.scale == 256


def test_a_run_that_goes_on_does_not_search(monkeypatch: pytest.MonkeyPatch) -> None:
    state = train(steps=2)[0].state_dict()
    monkeypatch.setattr("lowp.precision.first_scale", lambda *given, **options: pytest.fail("searched"))
    precision = lowp.Precision("fp16")
    precision.load_state_dict(state)
    precision.backward(torch.ones((), requires_grad=True) * 1.0)
    assert precision.scale == state["scaler"]["scale"]
    # and torch's own, from a run of torch.amp
    precision = lowp.Precision("fp16")
    precision.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=512.0).state_dict())
    precision.backward(torch.ones((), requires_grad=True) * 1.0)
    assert precision.scale == 512


def test_checkpointed_modules_are_recomputed_for_each_try() -> None:
    assert train(net=Net(reentrant=False))[0].skipped_steps == 0


def test_a_graph_that_cannot_be_run_twice_begins_with_the_initial_scale() -> None:
    precision, _, losses = train(net=Net(reentrant=True), steps=20)
    assert precision.skipped_steps >= 4
    assert losses[-1] < losses[0]


def test_a_selective_checkpoint_begins_with_the_initial_scale() -> None:
    net = Net()
    saved = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = partial(create_selective_checkpoint_contexts, saved)
    whole = net.first.forward
    net.first.forward = lambda x: checkpoint(whole, x, use_reentrant=False, context_fn=contexts)
    precision, _, losses = train(net=net, steps=20)
    assert precision.skipped_steps >= 4
    assert losses[-1] < losses[0]


def test_the_inputs_and_the_gradient_of_the_backward_are_those_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        searching.torch.autograd, "grad", lambda loss, leaves, *rest, **_: seen.append((leaves, rest)) or leaves
    )
    a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
    given = torch.full((3,), 2.0)
    first_scale(a * b, 2.0**16, 1.0, inputs=a, gradient=given)
    assert seen[0][0] == [a] and seen[0][1][0] is given


def test_a_scale_begins_with_another_only_before_its_first_use() -> None:
    scaler = lowp.GradScaler("cpu")
    scaler.begin_with(8.0)
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == 8
    with pytest.raises(lowp.errors.Misuse, match=r"for the first step: use update\(new_scale\)"):
        scaler.begin_with(16.0)


def _node(name: str = "AddBackward0", **attributes: Any) -> Any:
    node = type(name, (), {})()
    node.__dict__.update(attributes)
    return node


@pytest.mark.parametrize(
    "nodes, can",
    [
        ([], True),
        ([_node(), _node("CheckpointFunctionBackward")], True),  # its try fails, which changes nothing
        ([_node("RegisterPostBackwardFunctionBackward"), _node()], True),
        ([_node("RegisterPostBackwardFunctionBackward"), _node("CompiledFunctionBackward")], False),
        ([_node("CheckpointFunctionBackward"), _node("RegisterPostBackwardFunctionBackward")], False),
        ([_node(ddp_weakref=lambda: _node(static_graph=False))], True),
        ([_node(), _node(ddp_weakref=lambda: _node(static_graph=True))], False),
        ([_node(ddp_weakref=lambda: None)], True),  # the wrapper is gone
    ],
)
def test_graphs_of_wrappers_that_reduce_once_are_not_tried(nodes: list[Any], can: bool) -> None:
    assert searching._can_run_twice(nodes) is can
