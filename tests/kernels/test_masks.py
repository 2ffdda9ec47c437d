"""Masks with one bit per element: packed, on gradients, and ReLU of mantissas; equal on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.kernels import cpu, use
from lowp.kernels.int16 import masks, payloads
from lowp.kernels.int16.mantissas import as_exponent
from lowp.kernels.int16.masks import nonzero, packed, passed, passed_where_positive, unpacked

FLEX = parse("flex16+5")
SPECIAL = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 6.0, -1.0])
COUNTS = [0, 1, 7, 8, 9, 16, 64, 1001, 200_003]
needs_library = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")


@pytest.fixture(params=cpu.available() if cpu.library() is not None else ())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    cpu.select(request.param)
    yield
    cpu.select(None)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    flat[: len(SPECIAL)] = SPECIAL[: len(flat)]
    flat[100:200] = 0
    return x


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@needs_library
def test_a_tensor_without_memory_is_refused_and_not_read() -> None:
    x, mask, mantissas = drawn(64), nonzero(drawn(64)), torch.ones(64, dtype=torch.int16)
    x.untyped_storage().resize_(0)
    for read in (lambda: nonzero(x), lambda: passed(x, mask), lambda: passed_where_positive(x, mantissas)[0]):
        with pytest.raises(InvalidInput, match="without memory: its storage was resized to 0"):
            read()


@pytest.mark.parametrize("count", COUNTS)
def test_bits_become_the_mask_they_were(count: int) -> None:
    mask = drawn(count) > 0
    found = packed(mask.clone())
    assert found.bits.dtype is torch.uint8 and found.bits.numel() == (count + 7) // 8
    assert torch.equal(unpacked(found).bool(), mask)
    pairs = mask[: count // 2 * 2].view(2, -1)
    column_major = torch.empty_strided(pairs.shape, (1, 2), dtype=torch.bool).copy_(pairs)
    assert torch.equal(unpacked(packed(column_major)).bool(), pairs)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("count", COUNTS)
def test_one_pass_packs_what_is_not_zero_and_another_lets_it_pass(count: int) -> None:
    x, gradient = drawn(count), drawn(count, seed=1)
    found = nonzero(x)
    with use("bitwise"):  # torch's own operations
        expected = nonzero(x)
        slope = passed(gradient, expected)
    assert torch.equal(found.bits, expected.bits) and torch.equal(unpacked(found).bool(), x.bool())
    assert torch.equal(bits_of(passed(gradient, found)), bits_of(slope))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("count", COUNTS)
def test_gradients_pass_where_mantissas_are_positive(count: int) -> None:
    mantissas = (drawn(count, seed=2).nan_to_num(0, 1, -1) * 10).to(torch.int16)
    gradient = drawn(count, seed=1)
    found, own = passed_where_positive(gradient, mantissas, mantissas)
    assert torch.equal(bits_of(found), bits_of(torch.ops.aten.threshold_backward(gradient, mantissas, 0)))
    assert own is None or torch.equal(own, mantissas.clamp(min=0))
    assert (own is None) is (cpu.library() is None)


def test_images_pass_as_they_lie_and_what_lies_otherwise_by_torch() -> None:
    x = drawn(3, 4, 5, 6)
    for one in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(1, 2), x[..., 1:], x[:0]):
        found = nonzero(one.clone())
        gradient = torch.empty_strided(found.shape, found.stride).copy_(drawn(*one.shape, seed=1))
        result = passed(gradient, found)
        assert result.stride() == gradient.stride()
        assert torch.equal(bits_of(result), bits_of(gradient.masked_fill(one == 0, 0.0)))


@needs_library
def test_the_library_reads_what_lies_as_an_image_side_by_side() -> None:
    flat, image, film = drawn(2, 3, 4), drawn(2, 3, 4, 5), drawn(2, 3, 4, 5, 2)
    last = image.contiguous(memory_format=torch.channels_last), film.contiguous(memory_format=torch.channels_last_3d)
    assert all(map(masks._serves, (flat, flat[0], image, film, *last, image[:1])))
    turned = flat.transpose(1, 2), image.transpose(1, 2), image.transpose(2, 3), last[0].transpose(2, 3)
    assert not any(map(masks._serves, (*turned, film.transpose(1, 2), image[..., 1:], image[:, :1], drawn(4, 3).t())))
    assert not any(map(masks._serves, (drawn(2, 3, 4, 5, 2, 2).movedim(-1, 1), drawn(2, 4, 3).movedim(-1, 1))))


def test_a_mask_that_lies_otherwise_than_the_tensor_is_that_of_the_same_elements() -> None:
    x, gradient = drawn(2, 3, 4, 5), drawn(2, 3, 4, 5, seed=1)
    last = x.contiguous(memory_format=torch.channels_last)
    expected = bits_of(gradient.masked_fill(x == 0, 0.0))
    assert torch.equal(bits_of(passed(gradient, nonzero(last))), expected)
    assert torch.equal(bits_of(passed(gradient.contiguous(memory_format=torch.channels_last), nonzero(x))), expected)
    chosen = (drawn(2, 3, 4, 5, seed=2).nan_to_num(0, 1, -1) * 3).to(torch.int16)
    chosen[0, 0, 0, :3] = torch.tensor([1, 0, -1])
    expected = bits_of(gradient.masked_fill(chosen <= 0, 0.0))
    for one in (chosen, chosen.contiguous(memory_format=torch.channels_last)):
        found, own = passed_where_positive(gradient, one, None)
        assert torch.equal(bits_of(found), expected) and own is None
    with use("bitwise"):
        assert torch.equal(bits_of(passed_where_positive(gradient, chosen, chosen)[0]), expected)


@needs_library
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("count", [1, 9, 1023, 1024, 200_003])
def test_relu_of_mantissas_is_relu_of_their_values(count: int) -> None:
    payload = torch.randint(-32768, 32768, (count,), generator=torch.Generator().manual_seed(3)).to(torch.int16)
    x = payload.float() * 2.0**-20
    payloads.keep(x, FLEX.format, as_exponent(-20), payload)
    found = payloads.relu(x, FLEX)
    assert found is not None and found[1] is not None
    assert found[0].exponent == -20 and torch.equal(found[0].payload, payload.clamp(min=0))
    assert torch.equal(found[1], torch.relu(x))


@needs_library
@pytest.mark.parametrize("place", [0, 1023, 1024, 199_999])
def test_relu_sees_every_element_that_was_written_unseen(place: int) -> None:
    payload = torch.randint(-1000, 1000, (200_000,), generator=torch.Generator().manual_seed(3)).to(torch.int16)
    x = payload.float()
    payloads.keep(x, FLEX.format, as_exponent(0), payload)
    x.numpy()[place] = 1234.0
    found = payloads.relu(x, FLEX)
    assert found is not None and torch.equal(found[0].values, torch.relu(x))
    x.numpy()[place] = 0.3  # no number of the format beside the others
    assert payloads.relu(x, FLEX) is None


def test_without_the_library_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gradient = drawn(50), drawn(50, seed=1)
    monkeypatch.setattr(cpu, "loaded", lambda: pytest.fail("the library was asked"))
    with use("bitwise"):
        assert not masks._serves(x)
        assert torch.equal(bits_of(passed(gradient, nonzero(x))), bits_of(gradient.masked_fill(x == 0, 0.0)))
