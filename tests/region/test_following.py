"""Regions apply in checkpoints, worker threads and wrappers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from region.small_model import PRECISIONS, Net, gradients, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowp.exponents import Spots
from lowp.policy import Policy, Rule
from lowp.presets import PRESETS
from lowp.region import autocast
from lowp.region.entries import current_engine
from lowp.region.following import Repeats, bound
from lowp.region.paths import ModulePath


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_checkpoints_recompute_under_the_policy_of_the_forward(
    model: Net, precision: str, reentrant: bool, inside: bool
) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with autocast(precision):
        expected = gradients(model, model(x))
    with autocast(precision):
        y = checkpoint(model, x, use_reentrant=reentrant)
        if inside:
            y.float().pow(2).sum().backward()
    if not inside:
        y.float().pow(2).sum().backward()
    assert same(expected, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_where_in_the_model_it_was(reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x = Outer(), torch.randn(2, 8, requires_grad=True)
    with autocast(Policy((Rule.of("linear", where="inner", input="bf16", weight="bf16", output="bf16"),))) as region:
        y = model(x)
        assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert region.report().unseen == ()


def test_a_checkpoint_outside_a_region_or_switched_off_inside_is_torch_s(model: Net) -> None:
    x = torch.randn(3, 8)
    expected = gradients(model, model(x))
    assert same(expected, gradients(model, checkpoint(model, x, use_reentrant=False)))
    with autocast("fp16"), torch.autocast("cpu", enabled=False):
        y = checkpoint(model, x, use_reentrant=False)
    assert same(expected, gradients(model, y))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(model, x, use_reentrant=False)
    gradients(model, y)


def test_the_workers_of_data_parallel_run_in_the_region(model: Net) -> None:
    with autocast("fp16"):
        worker = sys.modules["torch.nn.parallel.parallel_apply"].threading.Thread
        found: list[torch.dtype] = []
        thread = worker(target=lambda x: found.append(model(x).dtype), args=(torch.randn(3, 8),))
    thread.start()
    thread.join()
    assert found == [torch.float16]


def test_nothing_is_bound_where_there_is_no_region() -> None:
    def function() -> None:
        return None

    assert bound(function) is function
    with autocast("fp32"):
        assert bound(function) is function
    with autocast("fp16"):
        assert bound(function) is not function
        with torch.autocast("cpu", enabled=False):
            assert bound(function) is function


def test_what_is_bound_runs_where_it_was_bound_as_often_as_it_is_called() -> None:
    policy = Policy((Rule.of("linear", where="0", output="bf16"), Rule.of("linear", output="fp16")))
    found: list[torch.dtype] = []

    class Binding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for path in (None, ModulePath()):
                functions.append(bound(super().forward, path))
            return super().forward(x)

    functions: list[Callable[..., Tensor]] = []
    x = torch.ones(2, 2)
    with autocast(policy):
        nn.Sequential(Binding(2, 2))(x)
        assert nn.Linear(2, 2)(x).dtype is torch.float16
    for _ in range(2):
        found += [function(x).dtype for function in functions]
    assert found == [torch.bfloat16, torch.float16] * 2
    assert nn.Linear(2, 2)(x).dtype is torch.float32


def test_the_autocast_of_a_checkpoint_is_off_where_its_function_enters_the_region() -> None:
    keywords = sys.modules["torch.utils.checkpoint"]._get_autocast_kwargs

    def enabled() -> set[bool]:
        return {one["enabled"] for one in keywords("cpu") if one is not None}

    with autocast("fp16"):
        assert enabled() == {False} and {"dtype", "cache_enabled"} <= keywords("cpu")[1].keys()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert enabled() == {True}
    assert enabled() == {False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert enabled() == {True}


def test_the_warning_of_compiled_wrappers_beside_hooks_is_silenced_once() -> None:
    def silenced() -> int:
        return sum("global hooks" in str(one[1] and one[1].pattern) for one in warnings.filters)  # type: ignore[union-attr]

    with warnings.catch_warnings():
        warnings.resetwarnings()
        for _ in range(2):
            with autocast("flex16+5"):
                assert silenced() == 1
            warnings.simplefilter("error")  # the user's own, which stays before it
        with autocast("flex16+5"):
            assert warnings.filters[0][0] == "error"


def test_repeats_of_a_function_write_where_its_first_run_has_written() -> None:
    assert Repeats.here() is None
    with autocast("fp16"):
        assert Repeats.here() is None
    with autocast("flex16+5"):
        engine, repeats = current_engine(), Repeats.here()
        assert engine is not None and engine.spots is not None and repeats is not None
        outer = engine.spots

        def names(spots: Spots) -> list[str]:
            return [spots.spot(None, "a", "linear") for _ in range(2)]

        with repeats.first_run():
            first = engine.spots
            assert first is not outer and first.trail is not None and not first.trail.is_repeated
            assert names(first) == ["a linear", "a linear #2"]
        assert engine.spots is outer and outer.spot(None, "a", "linear") == "a linear #3"
        for _ in range(2):
            again = repeats()
            assert again is not first and again.trail is first.trail and first.trail.is_repeated
            assert names(again) == ["a linear", "a linear #2"] and again.training
        assert outer.spot(None, "a", "linear") == "a linear #4"
        with torch.no_grad():
            assert not Repeats(outer)().training


def test_the_paths_below_wrappers_are_those_of_the_model(model: Net) -> None:
    policy = PRESETS["fp16"].policy.before(Rule.of("linear", where="last", input="bf16", weight="bf16", output="bf16"))
    seen: list[str] = []
    region = autocast(policy)
    region.observe(lambda one: seen.append(one.path) if one.role == "output" else None)
    with region:
        nn.DataParallel(model)(torch.randn(2, 8))
        model.first(torch.randn(2, 8))
    assert seen == ["first", "norm", "", "last", "", ""]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_regions_without_gradients(model: Net, mode: Callable[[], Any]) -> None:
    x = torch.randn(3, 8)
    with autocast("fp16"):
        expected = model(x).detach()
        with mode():
            assert torch.equal(model(x), expected)


def test_a_default_device_and_other_modes_keep_working(model: Net) -> None:
    with torch.device("meta"), autocast("fp16"):
        assert torch.ones(2).device.type == "meta"
        assert nn.Linear(2, 2)(torch.ones(2, 2)).dtype is torch.float16
