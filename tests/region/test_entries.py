"""Entries of regions in a thread: what they save, and how they are taken off."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.errors import Misuse
from lowp.policy import Policy, Rule
from lowp.region import entries

MODES = torch.overrides._get_current_function_mode_stack
PATHS = Policy((Rule.of("linear", where="a.*", input="bf16"), Rule.of("contraction", input="e5m7", weight="e5m7")))


@pytest.mark.parametrize(
    ("kind", "there", "names"),
    [
        (None, ("cpu", "cuda"), ("cpu", "cuda")),
        ("xpu", ("cpu", "cuda", "xpu"), ("cpu", "cuda", "xpu")),
        ("cuda", ("cpu", "cuda"), ("cpu", "cuda")),
        ("odd", ("cpu",), ("cpu",)),
    ],
)
def test_the_state_of_each_device_that_torch_autocast_knows_is_saved(
    kind: str | None, there: tuple[str, ...], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "accelerator", lambda: kind)
    monkeypatch.setattr(torch.amp, "is_autocast_available", there.__contains__)
    assert entries.devices.__wrapped__() == names


def test_a_state_is_what_torch_tells_and_takes() -> None:
    before = entries.autocast_state()
    assert [device for device, *_ in before] == list(entries.devices()) and before == entries.present_state()
    assert ("cpu", False, torch.get_autocast_dtype("cpu")) in before
    with lowp.autocast("fp16"):
        assert entries.autocast_state() == [(device, True, torch.float16) for device, *_ in before]
        entries.set_autocast_state(before)
        assert not torch.is_autocast_enabled("cpu")
        entries.set_autocast_state([("cpu", True, torch.float16)])
    assert entries.autocast_state() == before


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_region_is_taken_off_wherever_it_is_and_the_others_stay_in_order(place: int) -> None:
    regions = [lowp.autocast(name) for name in ("fp16", "bf16", "e5m7")]
    for region in regions:
        region.__enter__()
    engines: list[Any] = list(MODES())
    assert len(engines) == 3 and [one.active for one in engines] == [False, False, True]
    regions.pop(place).__exit__(None, None, None)
    left = [one for one in engines if one is not engines[place]]
    assert MODES() == left and [one.active for one in left] == [False, True]
    entries.take_off(engines[place])  # which is not on the stack
    assert MODES() == left
    assert entries.current_engine() is left[-1] and torch.get_autocast_dtype("cpu") is left[-1].dtype
    for region in regions:
        region.__exit__(None, None, None)
    entries.take_off(engines[0])
    assert MODES() == [] and entries.current_engine() is None and entries.current() is None


def test_an_entry_that_was_removed_is_removed_once() -> None:
    with lowp.autocast("fp16") as region:
        entry = entries.find(region)
        with lowp.autocast("bf16"):
            state = entries.autocast_state()
            other = entries.Entry(region)
            entries.remove(other)  # which was never made
            assert entries.autocast_state() == state
    assert not entries.is_in(region) and not torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", True)
    entries.remove(entry)
    assert torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)


def test_a_region_that_this_thread_is_not_in_is_not_found() -> None:
    region, found = lowp.autocast("fp16"), list[bool]()
    with region:
        thread = threading.Thread(target=lambda: found.append(entries.is_in(region)))
        thread.start()
        thread.join()
        assert entries.is_in(region) and entries.find(region).region is region and found == [False]
    with pytest.raises(
        Misuse, match=r"autocast\('fp16'\) was left in a thread or task that has not entered it, or was"
    ):
        region.__exit__(None, None, None)
    assert entries.abandoned(object()) is None


def test_an_inner_region_without_paths_follows_modules_by_the_path_of_the_outer_one() -> None:
    assert entries.followed_engine() is entries.following() is None
    with lowp.autocast("e5m7"):
        assert entries.followed_engine() is entries.following() is None
    with lowp.autocast(PATHS) as outer:
        engine = entries.current_engine()
        assert engine is not None and entries.followed_engine() is engine
        assert entries.following() is entries.find(outer)
        with lowp.autocast("e5m7"):
            inner = entries.current_engine()
            assert inner is not engine and entries.followed_engine() is inner and inner is not None
            assert inner.path is engine.path and entries.following() is entries.find(outer)
        with lowp.autocast("fp32"):
            assert entries.current_engine() is entries.followed_engine() is None
    assert entries.following() is None


def test_generators_and_coroutines_are_told_by_their_frames_and_functions_are_not() -> None:
    def plain() -> Any:
        return entries.suspendable(0)

    def generator() -> Any:
        yield entries.suspendable(0)

    def nested() -> Any:
        yield plain()

    running = generator()
    frame = next(running)
    assert plain() is None and next(nested()) is None and frame is running.gi_frame
    assert entries.is_suspended(frame) and not entries.is_coroutine(frame)

    async def coroutine() -> Any:
        return entries.suspendable(0)

    started = coroutine()
    frame = started.cr_frame
    with pytest.raises(StopIteration) as end:
        started.send(None)
    assert end.value.value is frame and entries.is_coroutine(frame)


def test_module_hooks_go_with_the_last_entry_that_has_them() -> None:
    hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    before = [len(one) for one in hooks]
    with lowp.autocast(PATHS):
        with lowp.autocast(PATHS):
            assert [len(one) for one in hooks] == [count + 1 for count in before]
        assert [len(one) for one in hooks] == [count + 1 for count in before]
    assert [len(one) for one in hooks] == before
