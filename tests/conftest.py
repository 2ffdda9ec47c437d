"""Common fixtures: reproducible hypothesis, one thread per worker, and the command line as a function."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# Two workers with all cores each would only disturb each other; read by torch when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# Tables are as wide as COLUMNS says, which the workers of pytest-xdist find set to the width of its own terminal, and
# a dumb terminal is so only where LINES is not set.
for _size in ("COLUMNS", "LINES"):
    os.environ.pop(_size, None)

# The same examples in every run, so that a failure is the change's. HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


class Result(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def no_mode_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves one of torch's modes on the stack, and remove the mode for later tests."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        left = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        for _ in range(left[0]):
            torch._C._pop_torch_function_stack()
        for _ in range(left[1]):
            torch._C._pop_torch_dispatch_stack()
        assert left == (0, 0)


@pytest.fixture(autouse=True)
def the_random_numbers_of_a_test_are_the_same_in_every_run() -> None:
    """Seed torch before each test: which tests a worker ran before it differs from run to run."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def instruction_set_is_again_what_the_environment_says() -> Iterator[None]:
    """Undo the selection of a test, so that `make test-portable` limits later tests to their level."""
    held = os.environ.get("LOWP_CPU_ISA", "")
    yield
    cpu = sys.modules.get("lowp.kernels.cpu")
    if cpu is not None and cpu._asked != held and cpu.library() is not None:
        cpu.select(held or None)


@pytest.fixture(autouse=True)
def regions_of_other_tests_are_not_counted() -> None:
    """Forget regions made for one step each: a warning counts them, and would depend on the order of tests."""
    context = sys.modules.get("lowp.region.context")
    if context is not None:
        context._for_one_step.clear()


@pytest.fixture(scope="module", autouse=True)
def what_is_there_already_is_not_searched() -> None:
    """Exclude modules and collected tests from the garbage collector, which lowp searches for tensors."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def emulated() -> Iterator[None]:
    """Compute 16-bit products as fp32 products of rounded operands on every CPU, also on those with their own."""
    from lowp.kernels import available, use

    with use("cpu" if "cpu" in available() else "bitwise"):
        yield


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    """Return a function that lets this process be a rank of several, as_rank(0, 4): nothing is sent to the others."""
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def begin(rank: int, ranks: int) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())

    yield begin
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def lowp(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs the command line in this process: lowp("formats", "bf16").out."""
    from lowp.cli import main

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the checkout of these tests."""
    return Path(__file__).resolve().parent.parent
