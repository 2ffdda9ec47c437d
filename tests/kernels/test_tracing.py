"""Whether torch must see a call: what modes, torch.func and its wrappers, subclasses and autograd are told by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from lowp.kernels import tracing


class Seeing(TorchDispatchMode):
    """A mode that must see every operator."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


class Blind(Seeing):
    """A mode that need not see what kernels do."""

    lets_kernels_read = True


@contextmanager
def both(first: type[Seeing], second: type[Seeing]) -> Iterator[None]:
    with first(), second():
        yield


def asked() -> dict[str, bool]:
    x = torch.ones(2)
    told = {name: getattr(tracing, name)() for name in ("is_quiet", "is_transformed", "functorch_is_active")}
    return {**told, "is_functionalized": tracing.is_functionalized(), "is_plain": tracing.is_plain(x)}


QUIET = {"is_quiet": True, "is_transformed": False, "functorch_is_active": False, "is_functionalized": False}
QUIET["is_plain"] = True
SEEN = {**QUIET, "is_quiet": False, "is_plain": False}
INSIDE = {**SEEN, "is_transformed": True, "functorch_is_active": True}
MODES: dict[str, tuple[Callable[[], Any], dict[str, bool]]] = {
    "nothing": (nullcontext, QUIET),
    "a mode": (Seeing, SEEN),
    "a mode that lets kernels read": (Blind, QUIET),
    "the second of two": (lambda: both(Blind, Seeing), SEEN),
    "the first of two": (lambda: both(Seeing, Blind), SEEN),
    "two that let kernels read": (lambda: both(Blind, Blind), QUIET),
    "forward-mode differentiation": (forward_ad.dual_level, INSIDE),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_told_apart(mode: str) -> None:
    begin, wanted = MODES[mode]
    with begin():
        found = asked()
    assert found == wanted and asked() == QUIET


TRANSFORMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "vmap": (torch.func.vmap, False),
    "grad": (torch.func.grad, False),
    "functionalize": (torch.func.functionalize, True),
    "functionalize within vmap": (lambda call: torch.func.vmap(torch.func.functionalize(call)), True),
    "vmap within functionalize": (lambda call: torch.func.functionalize(torch.func.vmap(call)), False),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_and_what_they_wrap_are_told_apart(name: str) -> None:
    transform, is_functional = TRANSFORMS[name]
    seen: list[Any] = []

    def call(x: Tensor) -> Tensor:
        seen.extend((asked(), tracing.is_real(x), tracing.is_eager(x), tracing.unwrapped(x) is x))
        return x.sum()

    transform(call)(torch.ones(2, 3) if name != "grad" else torch.ones(3))
    found, *of_x = seen
    assert found == {**INSIDE, "is_functionalized": is_functional} and of_x == [False, False, True]


def test_a_tensor_that_outlived_its_transform_is_what_it_wraps() -> None:
    kept: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    torch.func.grad(call)(torch.arange(3.0))
    (dead,) = kept
    assert not tracing.is_real(dead) and not tracing.is_eager(dead)
    alive = tracing.unwrapped(dead)
    assert tracing.is_real(alive) and alive.tolist() == [0.0, 1.0, 2.0]
    assert tracing.unwrapped(alive) is alive


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_torch_jit_traces_is_seen() -> None:
    seen: list[dict[str, bool]] = []

    def call(x: Tensor) -> Tensor:
        seen.append(asked())
        return x + 1

    torch.jit.trace(call, torch.ones(2), check_trace=False)  # type: ignore[no-untyped-call]
    assert seen == [SEEN]


def test_ordinary_tensors_are_real_and_plain_without_gradients_and_lazy_signs() -> None:
    class Own(Tensor):
        pass

    x = torch.ones(2)
    parameter = torch.nn.Parameter(x)
    for one, is_real in ((x, True), (parameter, True), (x.as_subclass(Own), False), (x.to("meta"), False)):
        assert tracing.is_real(one) is is_real is tracing.is_eager(one)
    with Seeing():
        assert tracing.is_real(x) and not tracing.is_eager(x)
    assert tracing.is_differentiated(parameter) and not tracing.is_plain(parameter)
    assert not tracing.is_differentiated(x) and tracing.is_plain(x)
    with torch.no_grad():
        assert not tracing.is_differentiated(parameter) and tracing.is_plain(parameter)
    assert not tracing.is_plain(torch._neg_view(x))


def test_a_sharded_tensor_has_a_mesh_and_placements() -> None:
    assert tracing.is_sharded(SimpleNamespace(device_mesh=1, placements=2))
    for one in (SimpleNamespace(device_mesh=1), SimpleNamespace(placements=2), torch.ones(1)):
        assert not tracing.is_sharded(one)
