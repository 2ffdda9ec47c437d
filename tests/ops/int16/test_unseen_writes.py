"""Writes that bypass torch into a tensor that lowp has computed with: the next op reads the current values.

torch does not count writes through ``.data``, NumPy, DLPack, collectives, `torch.utils.swap_tensors` and the pointers
of C++ extensions, which may change a single element anywhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lowp
from lowp.policy import Policy, Rule
from lowp.region import handover

ROWS, COLUMNS = 64, 96  # 24 kB: a look at the ends and the middle misses most of it
CAST = "dfp16:toward-zero"
EXACT = Policy((Rule.of("contraction", input=CAST, weight=CAST, grad=CAST, accumulate="exact"),), name="toward zero")
PRECISIONS = ("dfp16", "flex16+5", EXACT)


def _part(x: Tensor) -> Tensor:
    return x.detach().view(-1)[7 * COLUMNS : 9 * COLUMNS]


def _data(x: Tensor) -> None:
    x.data[24:40] = 0


def _numpy(x: Tensor) -> None:
    x.detach().numpy()[11, 5:17] *= 3


def _dlpack(x: Tensor) -> None:
    torch.from_dlpack(x.detach().__dlpack__())[50, 3] = -2.5


def _pointer(x: Tensor) -> None:
    (ctypes.c_float * x.numel()).from_address(x.data_ptr())[ROWS * COLUMNS // 3] = 1.75


def _smallest_change(x: Tensor) -> None:
    flat = x.detach().numpy().reshape(-1)
    flat[4000] = 0.0 if flat[4000] else 2.0**-6


def _negated(x: Tensor) -> None:
    _part(x).numpy()[:] *= -1


def _one_element(seed: int) -> Callable[[Tensor], None]:
    def write(x: Tensor) -> None:
        index = int(torch.randint(x.numel(), (), generator=torch.Generator().manual_seed(seed)))
        x.detach().numpy().reshape(-1)[index] += 0.5

    return write


@contextmanager
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _collective(x: Tensor) -> None:
    with _group():
        dist.all_gather([_part(x)], torch.full((2 * COLUMNS,), 0.25))


WRITES: dict[str, Callable[[Tensor], None]] = {
    "data": _data,
    "NumPy": _numpy,
    "DLPack": _dlpack,
    "a collective": _collective,
    "a pointer": _pointer,
    "the smallest change": _smallest_change,
    "signs": _negated,
    **{f"one element, {seed}": _one_element(seed) for seed in range(4)},
}


@pytest.fixture(autouse=True)
def _masks_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ReLU keep bits whatever its size: torch's own keeps its result, which may not be written."""
    monkeypatch.setattr(handover, "_LITTLE", 0)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _trained(precision: str | Policy, write: Callable[[Tensor], None], anew: bool) -> list[Tensor]:
    """Return result and gradients of an op after a write to its operand, or to a new copy if `anew`."""
    x, w, v = _random(ROWS, 40, seed=0), _random(COLUMNS, 40, seed=1), _random(32, COLUMNS, seed=2)
    w, v = w.requires_grad_(), v.requires_grad_()
    with lowp.autocast(precision):
        h = torch.relu(F.linear(x, w))
        first = F.linear(h, v)
        if anew:
            h = h.detach().clone().requires_grad_()
        write(h)
        z = F.linear(h, v)
    z.sum().backward()
    assert v.grad is not None
    return [first.detach(), z.detach(), v.grad]


@pytest.mark.parametrize("precision", PRECISIONS, ids=["dfp16", "flex16+5", "toward-zero"])
@pytest.mark.parametrize("write", WRITES)
def test_an_operand_is_read_and_kept_for_backward_as_it_is_now(precision: str | Policy, write: str) -> None:
    found = _trained(precision, WRITES[write], anew=False)
    expected = _trained(precision, WRITES[write], anew=True)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0], found[1])


def _activated(write: Callable[[Tensor], None], anew: bool) -> list[Tensor]:
    """Return the same for functions between contractions, which save mantissas under shared exponents."""
    x, w = _random(ROWS, 40, seed=0), _random(COLUMNS, 40, seed=1).requires_grad_()
    results: list[Tensor] = []
    with lowp.autocast("flex16+5"):
        h = F.linear(x, w)
        if anew:
            h = h.detach().clone().requires_grad_()
        write(h)
        for function in (torch.relu, F.gelu, lambda y: F.layer_norm(y, (COLUMNS,)), lambda y: y * y):
            leaf = h.detach().requires_grad_() if anew else h
            (slope,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
            results.append(slope)
    return results


@pytest.mark.parametrize("write", WRITES)
def test_functions_between_contractions_keep_what_they_read(write: str) -> None:
    expected = _activated(WRITES[write], anew=True)
    for one, other in zip(_activated(WRITES[write], anew=False), expected, strict=True):
        assert torch.equal(one, other)


def _with_gradient(precision: str | Policy, write: Callable[[Tensor], None], anew: bool) -> Tensor:
    """Return the gradient of a weight below a hook that writes to the gradient, or to a copy of it."""
    x, w, v = _random(ROWS, 40, seed=0), _random(COLUMNS, 40, seed=1), _random(32, COLUMNS, seed=2)
    w = w.requires_grad_()

    def hook(gradient: Tensor) -> Tensor | None:
        gradient = gradient.clone() if anew else gradient
        write(gradient)
        return gradient if anew else None

    with lowp.autocast(precision):
        h = F.linear(x, w)
        h.register_hook(hook)
        F.linear(torch.relu(h), v).square().mean().backward()
    assert w.grad is not None
    return w.grad


@pytest.mark.parametrize("precision", PRECISIONS, ids=["dfp16", "flex16+5", "toward-zero"])
@pytest.mark.parametrize("write", WRITES)
def test_a_gradient_is_read_as_it_is_now(precision: str | Policy, write: str) -> None:
    found, expected = (_with_gradient(precision, WRITES[write], anew) for anew in (False, True))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("precision", PRECISIONS, ids=["dfp16", "flex16+5", "toward-zero"])
def test_tensors_can_be_swapped(precision: str | Policy) -> None:
    x, v = _random(ROWS, COLUMNS, seed=0), _random(32, COLUMNS, seed=2)
    with lowp.autocast(precision), torch.no_grad():
        first, second = torch.relu(F.linear(x, x)), torch.sigmoid(F.linear(x, x))
        before = [F.linear(one, v[:, :ROWS]) for one in (first, second)]
        torch.utils.swap_tensors(first, second)
        after = [F.linear(one, v[:, :ROWS]) for one in (first, second)]
    assert torch.equal(before[0], after[1]) and torch.equal(before[1], after[0])


@pytest.mark.parametrize("precision", PRECISIONS, ids=["dfp16", "flex16+5", "toward-zero"])
def test_memory_that_another_tensor_takes_over_is_read_anew(precision: str | Policy) -> None:
    x, v = _random(ROWS, COLUMNS, seed=0), _random(32, ROWS, seed=2)
    with lowp.autocast(precision), torch.no_grad():
        h, other = F.linear(x, x), torch.relu(F.linear(x, -x))
        F.linear(h, v)
        h.set_(other.clone())  # type: ignore[call-overload]
        assert torch.equal(F.linear(h, v), F.linear(other.clone(), v))


@pytest.mark.parametrize("precision", PRECISIONS, ids=["dfp16", "flex16+5", "toward-zero"])
@pytest.mark.parametrize("write", ["data", "one element, 0", "a pointer"])
def test_views_are_read_as_they_are_now(precision: str | Policy, write: str) -> None:
    x, w = _random(ROWS, 40, seed=0), _random(COLUMNS, 40, seed=1).requires_grad_()
    results = []
    for anew in (False, True):
        with lowp.autocast(precision):
            h = F.linear(x, w)
            F.linear(h, w.t())
            h = h.detach().clone() if anew else h
            WRITES[write](h)
            parts = h.view(8, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
            results.append([parts[0] @ parts[1].transpose(-1, -2), parts[2] @ parts[2].mT, h.t() @ h])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
