"""Steps of optimizers and checks of gradients in one launch, in Triton's interpreter: the bits of the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp import kernels
from lowp.errors import Unavailable
from lowp.kernels import updates
from lowp.optim import SGD, AdamW

pytest.importorskip("triton", reason="triton is not installed")

MAKES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (lambda p, **k: AdamW(p, lr=1e-2, **k), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "adamw, far end": (
        lambda p, **k: AdamW(p, lr=1e-2, betas=(0.4, 0.9), maximize=True, **k),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.4, 0.9), maximize=True),
    ),
    "sgd": (
        lambda p, **k: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    ),
    "sgd, damped": (
        lambda p, **k: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    ),
    "sgd, plain": (lambda p, **k: SGD(p, lr=0.1, **k), lambda p: torch.optim.SGD(p, lr=0.1)),
}
SHAPES = ((3, 5), (70,), (), (0,), (4, 3, 2, 2))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give(ours: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in ours:
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)


@pytest.mark.parametrize("name", MAKES)
def test_every_storage_gives_the_same_bits_and_torchs_numbers(name: str) -> None:
    make, torchs = MAKES[name]
    wanted = parameters()
    theirs = torchs(wanted)
    kinds: list[dict[str, Any]] = [{}, {"storage": None}, {"split": False}]  # of the last one no kernel takes more
    ours = [parameters() for _ in kinds]
    optimizers = [make(one, **options) for one, options in zip(ours, kinds, strict=True)]
    for step in range(3):
        give(wanted, step)
        theirs.step()
        for one, optimizer in zip(ours, optimizers, strict=True):
            give(one, step)
            with kernels.use("triton"):
                optimizer.step()
    split, plain, copies = ([o.master(p) for p in one] for one, o in zip(ours, optimizers, strict=True))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(split, plain, copies, strict=True))
    for found, expected in zip(split, wanted, strict=True):
        # fused or not, and in which order: a few roundings a step of numbers below 4
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=3 * 8 * 2.0**-23)


def test_parameters_are_stepped_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = updates.adamw
    monkeypatch.setattr(
        updates, "adamw", lambda columns, *rest: calls.append(len(columns.weights)) or real(columns, *rest)
    )
    ours = parameters()
    optimizer = AdamW(ours)
    give(ours, 0)
    with kernels.use("triton"):
        optimizer.step()
    assert calls == [4]  # all but the empty one


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_skipped_step_changes_nothing(name: str) -> None:
    ours = parameters()
    optimizer = MAKES[name][0](ours)
    scaler = lowp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        give(ours, step)
        grad = ours[1].grad
        assert grad is not None
        if step == 1:
            before = [optimizer.master(parameter).clone() for parameter in ours]
            grad[17] = torch.inf
        scaler.scale(torch.ones(()))
        with kernels.use("triton"):
            scaler.step(optimizer)
        scaler.update()
    assert not scaler.stepped
    assert all(torch.equal(optimizer.master(p), value) for p, value in zip(ours, before, strict=True))
    assert all(float(optimizer.state[p]["step"]) == 1.0 for p in ours)


def test_gradients_are_divided_by_the_scale_of_the_loss() -> None:
    results = []
    for scale in (1.0, 3.0):
        ours = parameters()
        optimizer = AdamW(ours, storage=None)
        give(ours, 0)
        for parameter in ours:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(1)  # type: ignore[attr-defined]
        with kernels.use("triton"):
            optimizer.step()
        results.append([optimizer.master(parameter) for parameter in ours])
    for one, three in zip(*results, strict=True):
        torch.testing.assert_close(three, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_pass_unscales_checks_counts_and_sums_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowp.kernels.triton import steps

    monkeypatch.setattr(steps, "INTERPRETED_BLOCK", 64)  # several programs
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, generator=generator).to(dtype) for n in (1, 0, 16, 200)]
    gradients[3][7], gradients[3][8] = 0.0, 2.0**-14
    wanted = [gradient.clone() for gradient in gradients]
    found, inverse = torch.zeros(()), torch.tensor(1 / 3)
    with kernels.use("triton"):
        seen = updates.check(gradients, found, inverse, histogram=True)
    torch._amp_foreach_non_finite_check_and_unscale_([one for one in wanted if len(one)], torch.zeros(1), inverse)
    assert all(torch.equal(one, other) for one, other in zip(gradients, wanted, strict=True))
    assert found == 0 and seen.histogram is not None and int(seen.histogram.sum()) == 216
    assert float(seen.squares) == pytest.approx(sum(float((one.double() ** 2).sum()) for one in wanted), rel=1e-2)
    gradients[2][3] = torch.nan
    with kernels.use("triton"):
        seen = updates.check(gradients, found, histogram=True)
    assert found == 1 and seen.histogram is not None and int(seen.histogram.sum()) == 215
    exact = sum(float((one.double().nan_to_num(0.0) ** 2).sum()) for one in gradients)
    assert float(seen.squares) == pytest.approx(exact, rel=1e-12)


def test_a_device_without_the_kernel_says_so() -> None:
    with pytest.raises(Unavailable, match=r"no kernel checks gradients on cpu: lowp.kernels.use\('triton'\) has one"):
        updates.check([torch.ones(3)], torch.zeros(()))


def test_what_changes_by_step_is_read_from_tensors() -> None:
    """The same launch again goes on: steps are on the device, and so is a rate that is given as a tensor."""
    ours, others = parameters(), parameters()
    one, other = AdamW(ours, lr=torch.tensor(1e-2)), AdamW(others, lr=1e-2)  # type: ignore[arg-type]
    for step in range(2):
        for parameters_, optimizer in ((ours, one), (others, other)):
            give(parameters_, step)
            with kernels.use("triton"):
                optimizer.step()
    assert all(torch.equal(one.master(a), other.master(b)) for a, b in zip(ours, others, strict=True))
