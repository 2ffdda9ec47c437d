"""lowp's own SGD and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.errors import InvalidInput
from lowp.optim import SGD, AdamW, blockwise
from lowp.optim.blockwise import BlockwiseOptimizer

Make = Callable[..., Any]
PAIRS: dict[str, tuple[Make, Make]] = {
    "adamw": (lambda p, **k: AdamW(p, lr=1e-2, **k), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "sgd": (
        lambda p, **k: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    ),
    "sgd_plain": (lambda p, **k: SGD(p, lr=0.1, **k), lambda p: torch.optim.SGD(p, lr=0.1)),
}
SHAPES = ((3, 5), (70_001,), (), (0,), (4, 3, 2, 2))


def _parameters(layout: torch.memory_format = torch.contiguous_format) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(one.to(memory_format=layout) if one.dim() == 4 else one) for one in made]


def _give(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("storage", ["split", "fp32_masters", "plain"])
@pytest.mark.parametrize("name", PAIRS)
def test_every_storage_equals_torch_on_fp32_bit_for_bit(name: str, storage: str, layout: torch.memory_format) -> None:
    own, reference = PAIRS[name]
    options: dict[str, Any] = {"split": {}, "fp32_masters": {"split": False}, "plain": {"storage": None}}[storage]
    expected, parameters = _parameters(), _parameters(layout)
    ours, theirs = own(parameters, **options), reference(expected)
    for step in range(4):
        _give(expected, step)
        _give(parameters, step)
        theirs.step()
        ours.step()
    for wanted, parameter in zip(expected, parameters, strict=True):
        assert torch.equal(ours.master(parameter), wanted)


def test_bytes_a_parameter_are_fourteen_and_ten() -> None:
    for moments, bytes_each in (("fp32", 14), ("bf16", 10)):
        weight = nn.Parameter(torch.randn(1000))
        optimizer = AdamW([weight], moments=moments)
        _give([weight], 0)
        optimizer.step()
        assert weight.grad is not None
        assert (sum(optimizer.memory().values()) + weight.grad.nbytes) / weight.numel() == bytes_each


@pytest.mark.parametrize("name", PAIRS)
def test_a_skipped_step_changes_nothing_and_reads_nothing(name: str) -> None:
    parameters = _parameters()
    optimizer: BlockwiseOptimizer = PAIRS[name][0](parameters)
    scaler = lowp.GradScaler("cpu", init_scale=4.0)
    _give(parameters, 0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    before = [optimizer.master(parameter).clone() for parameter in parameters]
    _give(parameters, 1)
    grad = parameters[1].grad
    assert grad is not None
    grad[17] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.stepped
    for value, parameter in zip(before, parameters, strict=True):
        assert torch.equal(optimizer.master(parameter), value)
        assert float(optimizer.state[parameter]["step"]) == 1.0
        assert all(not kept.isnan().any() for kept in optimizer.state[parameter].values())


def test_gradients_are_unscaled_as_the_scaler_would() -> None:
    results = []
    for unscale_first in (True, False):
        parameters = _parameters()
        optimizer = AdamW(parameters)
        scaler = lowp.GradScaler("cpu", init_scale=3.0)
        _give(parameters, 0)
        scaler.scale(torch.ones(()))
        if unscale_first:
            for parameter in parameters:  # as fp32, which keeps what bf16 would round away
                assert parameter.grad is not None
                widened = parameter.grad.float()
                parameter.grad_dtype = None
                parameter.grad = widened
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        results.append([optimizer.master(parameter) for parameter in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bf16_moments_do_not_stall() -> None:
    exact, weight = nn.Parameter(torch.zeros(20_000)), nn.Parameter(torch.zeros(20_000))
    pair = (AdamW([exact], betas=(0.9, 0.999)), AdamW([weight], betas=(0.9, 0.999), moments="bf16"))
    for _ in range(300):
        for optimizer, parameter in zip(pair, (exact, weight), strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    wanted = float(pair[0].state[exact]["exp_avg_sq"].mean())
    assert float(pair[1].state[weight]["exp_avg_sq"].float().mean()) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize("target", [{}, {"split": False}, {"storage": None}], ids=["split", "fp32", "plain"])
def test_a_checkpoint_continues_bit_for_bit_in_any_storage(target: dict[str, Any]) -> None:
    first, second = _parameters(), _parameters()
    optimizer, resumed = AdamW(first), AdamW(second, **target)
    _give(first, 0)
    optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    for parameters, one in ((first, optimizer), (second, resumed)):
        _give(parameters, 1)
        one.step()
    assert all(torch.equal(optimizer.master(a), resumed.master(b)) for a, b in zip(first, second, strict=True))


def test_a_torch_checkpoint_loads() -> None:
    reference_parameters, parameters = _parameters(), _parameters()
    reference, optimizer = torch.optim.AdamW(reference_parameters, lr=1e-2), AdamW(parameters, lr=1e-2)
    _give(reference_parameters, 0)
    reference.step()
    optimizer.load_state_dict(reference.state_dict())
    optimizer.set_masters(dict(zip(parameters, reference_parameters, strict=True)))
    for one, these in ((reference, reference_parameters), (optimizer, parameters)):
        _give(these, 1)
        one.step()
    assert all(torch.equal(optimizer.master(b), a) for a, b in zip(reference_parameters, parameters, strict=True))


def test_the_block_length_does_not_change_stochastic_free_results(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for block in (1 << 16, 1000):
        monkeypatch.setattr(blockwise, "BLOCK", block)
        parameters = _parameters()
        optimizer = AdamW(parameters)
        _give(parameters, 0)
        optimizer.step()
        results.append([optimizer.master(parameter) for parameter in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bad_input_is_named() -> None:
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(InvalidInput, match="moments are kept in fp32 or bf16, not fp16"):
        AdamW([weight], moments="fp16")
    with pytest.raises(InvalidInput, match="both lie in"):
        AdamW([weight], betas=(1.0, 0.9))
    with pytest.raises(InvalidInput, match="nesterov momentum needs"):
        SGD([weight], nesterov=True)
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = SGD(embedding.parameters(), storage=None)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidInput, match="takes no sparse gradients"):
        optimizer.step()
