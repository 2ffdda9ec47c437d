"""Regions that are interrupted, suspended, or left in another order than they were entered."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from lowp.errors import Misuse
from lowp.policy import Policy, Rule
from lowp.region import autocast, context, threads

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


# -- signals ------------------------------------------------------------------------------------------------------


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that the modules of regions execute, as a signal's handler would."""

    def __init__(self, at: int) -> None:
        self.left, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call" and frame.f_code.co_filename not in (context.__file__, threads.__file__):
            return None
        # the very first line of what `with` calls stands before any handler can; CPython looks for signals there too
        is_first = frame.f_code.co_name in ("__enter__", "__exit__") and self._seen(frame)
        if event == "line" and not is_first:
            self.lines += 1
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def _seen(self, frame: FrameType) -> bool:
        return frame.f_lineno <= frame.f_code.co_firstlineno + 1


def global_hooks() -> int:
    """Return how many hooks the modules of all models have."""
    return len(nn.modules.module._global_forward_hooks) + len(nn.modules.module._global_forward_pre_hooks)


REGIONS: dict[str, Callable[[], Any]] = {
    "bf16": lambda: autocast("bf16"),
    "with paths": lambda: autocast(Policy((Rule.of("linear", where="a.*", input="bf16"), Rule.of("matmul")))),
    "off": lambda: autocast("fp32"),
    "within another": lambda: autocast("e5m7"),
}


@pytest.mark.filterwarnings("ignore:policy unnamed. nothing matched:UserWarning")
@pytest.mark.parametrize("name", REGIONS)
def test_a_signal_at_any_line_of_entering_and_leaving_leaves_nothing_behind(name: str) -> None:
    with REGIONS[name]():
        product()
    before, at, finished, hooks = sys.gettrace(), 0, False, global_hooks()
    outer = autocast("fp16") if name == "within another" else contextlib.nullcontext()
    with outer:
        expected = product()
        while not finished:
            at += 1
            region, interrupt = REGIONS[name](), Interrupt(at)
            try:
                sys.settrace(interrupt)
                with region:
                    pass
                finished = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            assert not threads.is_in(region), at
            assert product() is expected, at
            assert global_hooks() == hooks, at
            assert torch.is_autocast_enabled("cpu") is (expected is HALF), at
    assert at > 20
    assert torch.overrides._get_current_function_mode_stack() == []


def test_an_exception_within_leaves_nothing_behind() -> None:
    with pytest.raises(KeyboardInterrupt), autocast("fp16"), autocast("e5m7"):
        raise KeyboardInterrupt
    assert product() is FULL


# -- order --------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {
    "fp16": lambda: autocast("fp16"),
    "e5m7": lambda: autocast("e5m7"),
    "off": lambda: autocast("fp32"),
    "torch's": lambda: autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_regions_that_end_in_the_order_they_began_leave_nothing_behind(first: str, second: str) -> None:
    regions = KINDS[first](), KINDS[second]()
    with regions[1]:
        alone = product(), torch.is_autocast_enabled("cpu")
    regions[0].__enter__()
    regions[1].__enter__()
    regions[0].__exit__(None, None, None)
    assert alone == (product(), torch.is_autocast_enabled("cpu"))
    regions[1].__exit__(None, None, None)
    assert product() is FULL


# -- generators ---------------------------------------------------------------------------------------------------


def steps(precision: str) -> Iterator[torch.dtype]:
    with autocast(precision):
        yield product()
        yield product()


def test_generators_that_alternate_in_regions_are_refused_in_words() -> None:
    first, second = steps("fp16"), steps("bf16")
    assert (next(first), next(second)) == (HALF, BRAIN)
    with pytest.raises(Misuse, match=r"steps\(\) goes on in autocast\('fp16'\) while steps\(\) has entered .*'bf16'"):
        next(first)
    second.close()
    assert product() is FULL


def test_a_decorated_generator_is_in_its_region_only_while_it_runs() -> None:
    @autocast("fp16")
    def half() -> Any:
        """Say so."""
        sent = yield product()
        try:
            yield product(), sent
        except KeyError:
            yield product(), "thrown"
        return product()

    @autocast("bf16")
    def brain() -> Iterator[torch.dtype]:
        yield product()
        yield product()

    one, other = half(), brain()
    assert half.__doc__ == "Say so."
    assert (next(one), product(), next(other), product()) == (HALF, FULL, BRAIN, FULL)
    assert (one.send("sent"), next(other)) == ((HALF, "sent"), BRAIN)
    assert one.throw(KeyError()) == (HALF, "thrown")
    with pytest.raises(StopIteration) as end:
        next(one)
    assert end.value.value is HALF and product() is FULL
    other.close()


@contextlib.contextmanager
def context_manager(precision: str) -> Iterator[None]:
    with autocast(precision):
        yield


def test_context_managers_of_generators_hold_their_region_open() -> None:
    def outer() -> Iterator[torch.dtype]:
        with autocast("fp16"):
            with context_manager("bf16"):
                yield product()
            yield product()

    assert list(outer()) == [BRAIN, HALF]
    with context_manager("fp16"):
        assert product() is HALF
        with contextlib.ExitStack() as stack:
            stack.enter_context(context_manager("bf16"))
            assert product() is BRAIN
        assert product() is HALF


# -- asyncio ------------------------------------------------------------------------------------------------------


async def task(precision: str | None, found: list[torch.dtype]) -> None:
    region = contextlib.nullcontext() if precision is None else autocast(precision)
    with region:
        for _ in range(3):
            found.append(product())
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    found.append(product())


@pytest.mark.parametrize("outer", [None, "e5m7"])
def test_tasks_run_in_the_regions_that_they_entered_themselves(outer: str | None) -> None:
    names: list[str | None] = ["fp16", "bf16", None, "fp16"]
    found: list[list[torch.dtype]] = [[] for _ in names]

    async def main() -> None:
        await asyncio.gather(*(task(name, each) for name, each in zip(names, found, strict=True)))
        assert product() is FULL

    with contextlib.nullcontext() if outer is None else autocast(outer):
        asyncio.run(main())
    expected = {"fp16": HALF, "bf16": BRAIN, None: FULL}
    assert found == [[expected[name]] * 3 + [FULL] for name in names]


def test_a_model_of_another_task_is_not_rounded() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    plain, entered, found = layer(x), asyncio.Event(), []

    async def holds() -> None:
        with autocast("e5m7"):
            entered.set()
            await asyncio.sleep(0.01)
            found.append(torch.equal(layer(x), plain))

    async def other() -> None:
        await entered.wait()
        found.append(torch.equal(layer(x), plain))

    async def main() -> None:
        await asyncio.gather(holds(), other())

    asyncio.run(main())
    assert found == [True, False]


def test_decorated_coroutines_run_in_the_region() -> None:
    @autocast("fp16")
    async def half() -> list[torch.dtype]:
        first = product()
        await asyncio.sleep(0)
        return [first, product()]

    @autocast("bf16")
    async def items() -> AsyncIterator[torch.dtype]:
        for _ in range(2):
            yield product()
            await asyncio.sleep(0)

    async def main() -> list[Any]:
        both = await asyncio.gather(half(), half())
        listed = []
        async for one in items():
            listed += [one, product()]
        return [*both, listed, product()]

    assert asyncio.run(main()) == [[HALF] * 2, [HALF] * 2, [BRAIN, FULL] * 2, FULL]
