"""The path of the running module, and after it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from lowp.policy import Policy, Rule
from lowp.region import autocast


class Interrupted(BaseException):
    pass


class Fragile(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            torch.matmul(x, x.t())
            raise self.error
        return x.relu()


@pytest.mark.parametrize(
    "error", [ValueError(), Interrupted(), KeyboardInterrupt()], ids=lambda one: type(one).__name__
)
def test_after_a_module_that_was_interrupted_ops_are_outside_of_it(error: BaseException) -> None:
    model, x = nn.Sequential(Fragile(error), nn.Identity()), torch.randn(2, 3)
    seen: list[tuple[str, str]] = []
    region = autocast("fp32")
    region.observe(lambda one: seen.append((one.path, one.op)) if one.role == "output" else None)
    with region:
        with pytest.raises(type(error)):
            model(x)
        x.tanh()
        model[0].error = None  # type: ignore[union-attr]
        model(x).sigmoid()
    assert seen == [("0", "matmul"), ("", "tanh"), ("0", "relu"), ("", "sigmoid")]


def test_rules_for_a_module_end_with_it_though_it_was_interrupted() -> None:
    model, x = nn.Sequential(Fragile(KeyboardInterrupt())), torch.randn(2, 2)
    with autocast(Policy((Rule.of("matmul", where="0", output="bf16"),))):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert (x @ x).dtype is torch.float32


def test_a_hook_that_raises_before_a_module_is_followed_leaves_its_caller_where_it_is() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.block = nn.Identity(), nn.Sequential()

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.inner(x)
            except RuntimeError:
                return x.relu()
            return x

    model = nn.Sequential(Caller())
    seen: list[str] = []
    region = autocast("fp32")
    region.observe(lambda one: seen.append(one.path))

    def refuse(module: nn.Module, arguments: object) -> None:
        if isinstance(module, nn.Identity):
            raise RuntimeError

    handle = torch.nn.modules.module.register_module_forward_pre_hook(refuse)  # before the region's own
    try:
        with region:
            model(torch.randn(2, 2))
    finally:
        handle.remove()
    assert set(seen) == {"0"}


def test_what_a_module_was_given_is_not_kept_when_it_has_returned() -> None:
    x = torch.randn(2, 3)
    known = weakref.ref(x)
    with autocast(Policy((Rule.of("relu", where="0", output="bf16"),))):
        y = nn.Sequential(nn.ReLU())(x)
        del x
        assert known() is None and y.dtype is torch.bfloat16


def test_a_module_that_calls_itself_is_followed() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(2, 2)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            y: Tensor = self.cell(x)
            return y.tanh() if depth == 0 else self(y, depth - 1).sigmoid()

    seen: list[tuple[str, str]] = []
    region = autocast("fp32")
    region.observe(lambda one: seen.append((one.path, one.op)) if one.role == "output" else None)
    with region:
        Tree()(torch.randn(1, 2), 1)
    assert seen == [("cell", "linear"), ("cell", "linear"), ("", "tanh"), ("", "sigmoid")]
