"""The path of the running module, and after it."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowp.policy import Policy, Rule
from lowp.region import autocast
from lowp.region.paths import ModulePath


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


def test_a_path_is_that_of_the_innermost_module_of_the_outermost_one() -> None:
    models: list[Any] = [nn.Sequential(nn.Sequential(nn.ReLU()), nn.Tanh()) for _ in "abc"]
    (model, other, alone), path = models, ModulePath()
    wrapper = nn.DataParallel(model)
    assert path.current == "" and path.outermost is None
    assert path.enter(wrapper) and not path.enter(model) and path.current == ""
    assert not path.enter(model[0]) and path.current == "0"
    assert not path.enter(model[0][0]) and path.current == "0.0"
    assert not path.enter(alone) and path.current == "0.0"  # of none of them: as its caller
    other_path = path.copy()
    path.leave(other)  # which was not entered
    assert path.current == "0.0" and len(path.running) == 5
    path.leave(model[0])  # with what was called within it
    assert path.current == "" and len(path.running) == 2 and other_path.current == "0.0"
    path.leave(model)
    path.leave(model)
    assert len(path.running) == 1 and path.outermost is wrapper
    path.running.clear()
    assert path.outermost is None and path.enter(other) and path.outermost is other
    assert not path.enter(other[1]) and path.current == "1" and other_path.outermost is not other
    path.enter(other[0])
    path.enter(other[0])  # which calls itself
    path.leave(other[0])
    assert path.current == "0" and len(path.running) == 3


def test_modules_that_no_longer_run_are_taken_off_their_thread_alone() -> None:
    path = ModulePath()
    model: Any = nn.Sequential(nn.Sequential(nn.ReLU()))

    def call(*modules: nn.Module) -> None:
        frame = sys._getframe()
        for module in modules:
            path.enter(module, frame)
        assert not path.settle(frame)
        if len(modules) == 1:
            call(model[0], model[0][0])
            assert [one.path for one in path.running] == ["", "0", "0.0"]
            assert path.settle(frame) and [one.path for one in path.running] == [""]
            call(model[0], model[0][0])
            path.enter(model[0], frame)  # as if the others had ended by an error
            assert [one.path for one in path.running] == ["", "0"]

    call(model)
    assert path.settle(sys._getframe()) and not path.running and not path.settle(sys._getframe())
    path.enter(model)  # in another thread
    path.enter(model[0], sys._getframe())
    assert not path.settle(sys._getframe()) and path.current == "0"
    copied = path.copy()
    assert not copied.settle(sys._getframe()) and [one.frame for one in copied.running] == [None, None]
