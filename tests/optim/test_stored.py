"""Weights stored as rounded masters, by the C++ library: the bits of the same in torch operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowp import casts
from lowp.kernels import cpu, use
from lowp.kernels.steps import stored
from lowp.optim import MasterWeights
from lowp.optim.storage import Storage

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
STORAGES = ("bf16", "fp16", "fp32:toward-zero", "e5m7", "e4m3fn", "bf16-tpu", "bf16:toward-zero", "fp16:saturate")
_LENGTH = 3 * 4096 + 5  # parts of a block of the kernel, and elements beyond its last vector
_SPECIAL = (0.0, -0.0, math.inf, -math.inf, 65504.0, 65519.99, 65520.0, -65520.0, 3.4e38, 2.0**-14, 2.0**-24, 2.0**-25)


def _numbers() -> Tensor:
    """Numbers of every exponent, midpoints of bf16 and fp16 and their neighbours, and special ones; no NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (_LENGTH,), generator=generator).to(torch.int32)
    bits[1::4] = bits[1::4] & -0x10000 | 0x8000  # midpoints of bf16
    bits[2::4] = bits[2::4] & -0x2000 | 0x1000
    bits[3::8] = (bits[3::8] & -0x2000 | 0x1000) + 1
    x = bits.view(torch.float32)
    x = torch.where(torch.arange(_LENGTH) % 2 == 0, x, torch.randn(_LENGTH, generator=generator) * 1e-4)
    x = torch.cat((torch.tensor(_SPECIAL), x))[:_LENGTH]
    return torch.where(x.isnan(), 1.0, x)


def _written(storage: Storage, master: Tensor) -> Tensor:
    """The stored weight as torch operations write it."""
    parameter = torch.empty(master.shape, dtype=storage.dtype)
    storage.save(parameter, {}, master)
    return parameter


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("level", cpu.available() if cpu.library() is not None else ())
@pytest.mark.parametrize("name", STORAGES)
def test_masters_are_stored_with_the_bits_of_torch_operations(name: str, level: str) -> None:
    master, storage = _numbers(), Storage.parse(name, "fp32")
    assert storage.cast is not None
    wanted, found = _written(storage, master), torch.zeros(_LENGTH, dtype=storage.dtype)
    short = torch.zeros(3, dtype=storage.dtype)
    cpu.select(level)
    try:
        weights = [(found, master), (short, master[:3])]
        assert stored.serves(weights) == [True, True]
        assert stored.store_rounded(weights, storage.cast) == [True, True]
        assert stored.are_rounded(weights, storage.cast) == [True, True]
        _bits(found)[-1] ^= 1
        assert stored.are_rounded(weights, storage.cast) == [False, True]
        _bits(found)[-1] ^= 1
    finally:
        cpu.select(None)
    assert torch.equal(_bits(found), _bits(wanted))
    assert torch.equal(_bits(short), _bits(wanted[:3]))


def test_a_zero_of_the_other_sign_is_not_the_rounded_master() -> None:
    weights = [(torch.tensor([-0.0], dtype=torch.bfloat16), torch.tensor([0.0]))]
    assert stored.are_rounded(weights, casts.parse("bf16")) == [False]


@pytest.mark.parametrize("threads", [1, 2])
def test_large_weights_are_stored_by_all_threads(threads: int) -> None:
    master, before = torch.randn(300_001), torch.get_num_threads()
    found = torch.zeros(300_001, dtype=torch.bfloat16)
    torch.set_num_threads(threads)
    try:
        assert stored.store_rounded([(found, master)], casts.parse("bf16")) == [True]
        assert torch.equal(found, master.to(torch.bfloat16))
        found[200_000] += 1
        assert stored.are_rounded([(found, master)], casts.parse("bf16")) == [False]
    finally:
        torch.set_num_threads(before)


def test_weights_with_a_nan_are_left_to_torch_operations() -> None:
    master = torch.randn(5000)
    master[4500] = math.nan
    weights = [(torch.zeros(5000, dtype=torch.float16), master), (torch.zeros(2, dtype=torch.float16), master[:2])]
    assert stored.store_rounded(weights, casts.parse("fp16")) == [False, True]
    weights[0][0].copy_(master)
    assert stored.are_rounded(weights, casts.parse("fp16")) == [False, True]


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn"])
def test_what_is_written_beside_a_nan_depends_on_neither_processor_nor_threads(name: str) -> None:
    bits = torch.tensor([0x7FC00000, 0x7F800001, -1, -0x3FFFFF]).int()  # NaNs with other signs and payloads
    master = torch.randn(90_000)  # enough for two threads
    master[3000:3004] = bits.view(torch.float32)
    cast, found, before = casts.parse(name), [], torch.get_num_threads()
    dtype = Storage.parse(name, "fp32").dtype
    for level in cpu.available():
        for threads in (1, 2):
            written = torch.zeros(master.shape, dtype=dtype)
            cpu.select(level)
            torch.set_num_threads(threads)
            try:
                assert stored.store_rounded([(written, master)], cast) == [False]
            finally:
                cpu.select(None)
                torch.set_num_threads(before)
            found.append(_bits(written))
    assert all(torch.equal(one, found[0]) for one in found)


def test_what_the_library_cannot_read_is_left_to_torch_operations() -> None:
    x, half = torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.bfloat16)
    with torch.inference_mode():
        unversioned = torch.zeros(4, 6, dtype=torch.bfloat16)
    others = [(half.t(), x.t()), (half, x.t()), (half[:, 1:3], x[:, 1:3]), (half.double(), x), (half, half), (x, x)]
    others += [(half[:0], x[:0]), (half[0], x), (half.to("meta"), x), (unversioned, x), (half, x.double())]
    assert stored.serves(others) == [False] * len(others)
    assert stored.serves([(half, x)]) == [True]
    with use("reference"):
        assert stored.serves([(half, x)]) == [False]


@pytest.mark.parametrize("kind", ["fp32", "none"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "e5m7", "e4m3fn"])
def test_steps_are_those_of_torch_operations(name: str, kind: str) -> None:
    assert torch.equal(*(_trained(name, kind, by_library) for by_library in (True, False)))


def _trained(name: str, kind: str, by_library: bool) -> Tensor:
    """Return the bits of parameters and masters after steps, with what scripts and faults write between them."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator) for shape in ((64, 130), (7,), (33, 65), (2, 3, 4, 5))]
    parameters = [torch.nn.Parameter(one) for one in drawn]
    parameters[3].data = parameters[3].data.to(memory_format=torch.channels_last)
    optimizer = MasterWeights(torch.optim.SGD(parameters, lr=2.0**-9), name, kind=kind)
    with pytest.MonkeyPatch.context() as patched:
        if not by_library:
            patched.setattr(stored, "serves", lambda weights: [False] * len(weights))
        for step in range(6):
            for one in parameters:
                one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)
            with torch.no_grad():
                if step == 2:
                    parameters[0][3] = torch.tensor([0.0, -0.0]).repeat(65)
                if step == 4:
                    parameters[2][1, 1] = math.nan
                    parameters[1].grad[2] = math.nan
            before = parameters[0]._version
            optimizer.step()
            assert parameters[0]._version > before
    values = [value.detach().contiguous() for one in parameters for value in (one, optimizer.master(one))]
    return torch.cat([_bits(value).flatten().to(torch.int32) for value in values])
