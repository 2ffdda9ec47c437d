"""Regions that are interrupted, suspended, or left in an order other than that of entry."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from lowp.errors import Misuse
from lowp.policy import Policy, Rule
from lowp.region import autocast, blocks, context, entries, following

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


# -- signals ------------------------------------------------------------------------------------------------------


_FILES = {module.__file__ for module in (context, entries, blocks, following)}


class Interrupt:
    """Raises KeyboardInterrupt at the n-th point at which a signal can be handled while regions are entered and left.

    A signal is handled when a function starts or a generator resumes, before its first line, and between lines. An
    exception of a tracing function occurs at the same points, except for a generator that resumes in Python 3.10: there
    it occurs before, outside of any ``try`` of the generator, so that the next instruction is used instead.
    """

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call" and frame.f_code.co_filename not in _FILES:
            return None
        goes_on = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_lasti >= 0
        if goes_on and sys.version_info < (3, 11):
            frame.f_trace_opcodes = True
        elif event in ("call", "line") or (event == "opcode" and frame.f_trace_opcodes):
            frame.f_trace_opcodes = False
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def global_hooks() -> int:
    """Return how many hooks the modules of all models have."""
    return len(nn.modules.module._global_forward_hooks) + len(nn.modules.module._global_forward_pre_hooks)


REGIONS: dict[str, Callable[[], Any]] = {
    "bf16": lambda: autocast("bf16"),
    "with paths": lambda: autocast(Policy((Rule.of("linear", where="a.*", input="bf16"), Rule.of("matmul")))),
    "off": lambda: autocast("fp32"),
    "strict": lambda: autocast("bf16", strict=True),
    "within another": lambda: autocast("e5m7"),
}


@pytest.mark.filterwarnings(
    "ignore:policy unnamed. nothing matched:UserWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("name", REGIONS)
def test_a_signal_anywhere_in_entering_and_leaving_leaves_nothing_behind(name: str) -> None:
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
                finished = interrupt.left > 0  # else it was raised where Python forgets a generator, and is ignored
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            assert not entries.is_in(region), at
            assert product() is expected, at
            assert global_hooks() == hooks, at
            assert torch.is_autocast_enabled("cpu") is (expected is HALF), at
    assert at > 20
    assert torch.overrides._get_current_function_mode_stack() == []


def test_an_exception_within_leaves_nothing_behind() -> None:
    with pytest.raises(KeyboardInterrupt), autocast("fp16"), autocast("e5m7"):
        raise KeyboardInterrupt
    assert product() is FULL


def test_a_real_signal_that_python_answers_where_the_exit_begins_leaves_nothing_behind() -> None:
    if not hasattr(signal, "setitimer"):
        pytest.skip("no timers here")
    region, interrupted = autocast("bf16"), 0
    for delay in range(60):
        try:
            with region:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (delay + 1))
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert not entries.is_in(region) and product() is FULL
    assert interrupted


def error_with_a_signal() -> None:
    """Raise OSError in C while a signal is pending."""
    list(map(signal.raise_signal, (signal.SIGINT, -1)))


@contextlib.contextmanager
def answering_signals() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", REGIONS)
def test_an_error_and_a_signal_that_come_together_leave_nothing_behind(name: str) -> None:
    region, hooks = REGIONS[name](), global_hooks()
    with answering_signals():
        with pytest.raises(KeyboardInterrupt):
            with region:
                error_with_a_signal()
        with pytest.raises(KeyboardInterrupt):
            with region.resume():
                error_with_a_signal()
        with autocast("e5m7"):
            with pytest.raises(KeyboardInterrupt), contextlib.suppress(OSError):
                with region:
                    error_with_a_signal()
            assert not entries.is_in(region) and product() is FULL
            assert torch.get_autocast_dtype("cpu") is FULL
    assert product() is FULL and global_hooks() == hooks


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="later Pythons call the exit")
def test_an_error_and_a_signal_that_come_together_leave_torch_autocast_on() -> None:
    try:
        with answering_signals(), pytest.raises(KeyboardInterrupt):
            with torch.autocast("cpu", dtype=BRAIN):
                error_with_a_signal()
        assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.autocast_decrement_nesting()


def test_an_exit_that_is_only_looked_at_leaves_nothing() -> None:
    with autocast("bf16") as region:
        assert callable(region.__exit__)
        assert product() is BRAIN
    with contextlib.ExitStack() as stack:
        stack.enter_context(region)
        assert product() is BRAIN
    region.__enter__()
    region.__exit__(None, None, None)
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
    with pytest.raises(Misuse, match=r"steps\(\) continued in autocast\('fp16'\) while steps\(\) has entered .*'bf16'"):
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


def test_a_decorated_generator_ends_in_its_region_where_it_is_closed() -> None:
    ended: list[torch.dtype] = []

    @autocast("fp16")
    def half() -> Iterator[torch.dtype]:
        try:
            yield product()
            yield product()
        finally:
            ended.append(product())

    one, other = half(), half()
    assert next(one) is HALF
    one.close()
    one.close()
    assert ended == [HALF] and product() is FULL
    next(other)
    with pytest.raises(KeyError):
        other.throw(KeyError())
    assert ended == [HALF] * 2 and product() is FULL and list(other) == []


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


def test_a_region_applies_while_a_task_waits_in_another_of_the_same_dtype() -> None:
    x, ended = torch.randn(4, 4), asyncio.Event()
    expected = {}
    for name in ("e5m7", "e4m3fn"):
        with autocast(name):
            expected[name] = x @ x

    async def holds() -> torch.Tensor:
        with autocast("e4m3fn"):
            await ended.wait()
            return x @ x

    async def main() -> None:
        task = asyncio.create_task(holds())
        await asyncio.sleep(0)
        for _ in range(2):
            assert torch.equal(x @ x, expected["e5m7"])
            await asyncio.sleep(0)
        ended.set()
        assert torch.equal(await task, expected["e4m3fn"]) and torch.equal(x @ x, expected["e5m7"])

    with autocast("e5m7"):
        asyncio.run(main())
        assert torch.equal(x @ x, expected["e5m7"])


def switches() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def test_another_task_is_told_of_its_own_region_and_switches_its_own() -> None:
    outside = switches()

    async def holds(precision: str, told: list[Any]) -> None:
        with autocast(precision):
            for _ in range(3):
                told.append(switches())
                await asyncio.sleep(0)
                told.append(product())

    async def uses_torch_s(told: list[Any]) -> None:
        told.append(switches())
        await asyncio.sleep(0)
        with torch.autocast("cpu", dtype=BRAIN):
            told.append((switches(), product()))
        told.append((switches(), product()))

    async def main() -> list[list[Any]]:
        told: list[list[Any]] = [[], [], []]
        await asyncio.gather(holds("fp16", told[0]), uses_torch_s(told[1]), holds("bf16", told[2]))
        assert switches() == outside and product() is FULL
        return told

    first, other, second = asyncio.run(main())
    assert first == [(True, HALF), HALF] * 3
    assert second == [(True, BRAIN), BRAIN] * 3
    assert other == [outside, ((True, BRAIN), BRAIN), (outside, FULL)]


def test_a_region_that_ends_while_another_task_holds_one_leaves_that_as_it_is() -> None:
    outer, ended = autocast("e5m7"), asyncio.Event()

    async def holds() -> torch.dtype:
        with autocast("fp16"):
            await ended.wait()
            return product()

    async def main() -> torch.dtype:
        outer.__enter__()
        task = asyncio.create_task(holds())
        await asyncio.sleep(0)
        outer.__exit__(None, None, None)
        assert (switches()[0], product()) == (False, FULL)
        ended.set()
        return await task

    assert asyncio.run(main()) is HALF
    assert (switches()[0], product()) == (False, FULL)


def test_a_generator_that_asks_while_a_later_one_waits_in_its_region_is_refused() -> None:
    def asks(precision: str) -> Iterator[tuple[bool, torch.dtype]]:
        with autocast(precision):
            yield switches()
            yield switches()

    first, second = asks("fp16"), asks("bf16")
    assert (next(first), next(second)) == ((True, HALF), (True, BRAIN))
    with pytest.raises(Misuse, match=r"asks\(\) continued in autocast\('fp16'\) while asks\(\) has entered"):
        next(first)
    second.close()
    assert not switches()[0]


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


def test_a_decorated_asynchronous_generator_is_sent_thrown_and_closed_in_its_region() -> None:
    ended: list[torch.dtype] = []

    @autocast("fp16")
    async def half(count: int) -> Any:
        try:
            sent = None
            for _ in range(count):
                try:
                    await asyncio.sleep(0)
                    sent = yield product(), sent
                except KeyError:
                    sent = "caught"
        finally:
            await asyncio.sleep(0)
            ended.append(product())

    async def main() -> None:
        one: Any = half(4)
        assert await one.__anext__() == (HALF, None) and product() is FULL
        assert await one.asend("sent") == (HALF, "sent") and await one.athrow(KeyError()) == (HALF, "caught")
        with pytest.raises(ValueError, match="thrown"):
            await one.athrow(ValueError("thrown"))
        assert ended == [HALF] and product() is FULL
        other: Any = half(4)
        await other.__anext__()
        await other.aclose()
        assert ended == [HALF] * 2 and [item async for item in half(2)] == [(HALF, None)] * 2
        assert ended == [HALF] * 3 and product() is FULL

    asyncio.run(main())


def test_a_decorated_coroutine_may_await_what_is_no_coroutine_and_is_thrown_into() -> None:
    class Item:
        def __await__(self) -> Any:
            try:
                yield product()
            except KeyError:
                yield "thrown"
            return "end"

    @autocast("fp16")
    async def half() -> Any:
        return await Item(), product()

    running = half()
    assert running.send(None) is HALF and product() is FULL and running.throw(KeyError()) == "thrown"
    with pytest.raises(StopIteration) as end:
        running.send(None)
    assert end.value.value == ("end", HALF) and product() is FULL
    assert next(blocks._Awaited(autocast("fp16"), Item()).__await__()) is HALF
