"""Small linear layers without gradients: rounded into memory kept for their shapes, with the bits of new tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.kernels import small

HAS_LIBRARY = "cpu" in kernels.available()
CASTS = ("e5m7", "bf16-tpu", "e4m3fn@fp32/tensor")
SHAPES = [
    ((1, 8), (8, 8)),
    ((5, 3), (7, 3)),
    ((3,), (2, 3)),
    ((2, 4, 6), (5, 6)),
    ((1, 1), (1, 1)),
    ((17, 60), (17, 60)),
]


def in_sixteen_bits(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the definition: every operand converted to a tensor of its own."""
    return lambda x, weight, bias: F.linear(x.to(dtype).float(), weight.to(dtype).float(), bias).to(dtype)


def in_format(name: str) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    return lambda x, weight, bias: F.linear(lowp.quantize(x, name), lowp.quantize(weight, name), bias)


FUNCTIONS: dict[str, tuple[small.Product, Callable[[Tensor, Tensor, Tensor | None], Tensor]]] = {
    "fp16": (small.sixteen_bits(torch.float16), in_sixteen_bits(torch.float16)),
    "bf16": (small.sixteen_bits(torch.bfloat16), in_sixteen_bits(torch.bfloat16)),
}
if HAS_LIBRARY:
    FUNCTIONS |= {name: (small.rounded_by_library(parse(name), parse(name)), in_format(name)) for name in CASTS}
pytestmark = pytest.mark.usefixtures("emulated")
every = pytest.mark.parametrize("name", FUNCTIONS)


def drawn(x: tuple[int, ...], weight: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second, bias = (torch.randn(shape, generator=generator) for shape in (x, weight, weight[:1]))
    return first * 1e-3, second * 50, bias


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)


@every
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_results_have_the_bits_of_conversions_into_new_tensors(name: str, shapes: Any, has_bias: bool) -> None:
    run, definition = FUNCTIONS[name]
    for seed in range(3):  # the second call finds the memory that the first one has left
        x, weight, bias = drawn(*shapes, seed=seed)
        with torch.no_grad():
            found, expected = (
                run(x, weight, bias if has_bias else None),
                definition(x, weight, bias if has_bias else None),
            )
        assert found is not None
        assert torch.equal(bits(found), bits(expected))


@every
def test_results_share_no_memory_with_later_ones(name: str) -> None:
    run, definition = FUNCTIONS[name]
    first, second = (drawn((4, 6), (5, 6), seed) for seed in (1, 2))
    with torch.no_grad():
        kept = run(*first)
        run(*second)
        assert kept is not None and torch.equal(kept, definition(*first))


@every
def test_infinities_and_nans_reach_the_result(name: str) -> None:
    run, definition = FUNCTIONS[name]
    x, weight, bias = drawn((2, 3), (4, 3))
    x[0, 1], weight[2, 0] = float("inf"), float("nan")
    with torch.no_grad():
        found = run(x, weight, bias)
        if name in ("fp16", "bf16"):
            assert found is not None and torch.equal(bits(found), bits(definition(x, weight, bias)))
        else:  # left to casts that keep them
            assert found is None
        after = run(*drawn((2, 3), (4, 3)))
        assert after is not None and torch.equal(after, definition(*drawn((2, 3), (4, 3))))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@every
def test_other_tensors_are_left_to_the_general_path(name: str) -> None:
    run, _ = FUNCTIONS[name]
    x, weight, bias = drawn((4, 6), (5, 6))
    others: list[tuple[Any, Any, Any]] = [
        (x.double(), weight, bias),
        (x, weight.half(), bias),
        (x, weight, bias.double()),
        (x.t().contiguous().t(), weight, bias),
        (x, weight[:, :3].contiguous(), bias),
        (x, weight[0], None),
        (torch.zeros(0, 6), weight, bias),
        (torch.zeros(small.MOST, 6), weight, bias),
        (x, torch.zeros(small.MOST, 6), None),
        (x.to_sparse(), weight, bias),
        (x.to_sparse_csr(), weight, bias),
        (torch.nested.nested_tensor([x, x]), weight, bias),
        (x.to("meta"), weight, bias),
        (x, weight.as_subclass(_Subclass), bias),
        (None, weight, bias),
        (1.0, weight, bias),
    ]
    with torch.no_grad():
        for args in others:
            assert run(*args) is None, args
        for forced in ("reference", "native"):
            with kernels.use(forced):
                assert run(x, weight, bias) is None


class _Subclass(Tensor):
    pass


class _Records(TorchDispatchMode):
    """Counts the conversions of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@every
def test_dispatch_modes_see_conversions_into_new_tensors(name: str) -> None:
    run, given = FUNCTIONS[name][0], drawn((4, 6), (5, 6))
    with torch.no_grad(), _Records() as records:
        assert run(*given) is None
    assert records.seen == []


@every
def test_a_call_within_a_call_and_calls_of_threads_have_their_own_memory(name: str) -> None:
    run, definition = FUNCTIONS[name]
    given = [drawn((4, 6), (5, 6), seed) for seed in range(8)]
    expected = [definition(*one) for one in given]
    wrong = []

    def many(index: int) -> None:
        with torch.no_grad():
            for _ in range(300):
                found = run(*given[index])
                if found is None or not torch.equal(found, expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=copy_context().run, args=(many, index)) for index in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


@every
def test_a_call_that_raises_leaves_the_next_ones_intact(name: str) -> None:
    run, definition = FUNCTIONS[name]
    x, weight, bias = drawn((4, 6), (5, 6))
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            run(x, weight, torch.zeros(4))
        found = run(x, weight, bias)
        assert found is not None and torch.equal(found, definition(x, weight, bias))


@every
def test_memory_of_inference_mode_serves_outside_of_it(name: str) -> None:
    run, definition = FUNCTIONS[name]
    x, weight, bias = drawn((3, 11), (5, 11))
    with torch.inference_mode():
        inside = run(x, weight, bias)
        assert inside is not None and inside.is_inference()
    with torch.no_grad():
        outside = run(x, weight, bias)
        assert outside is not None and not outside.is_inference()
    assert torch.equal(inside, outside) and torch.equal(outside, definition(x, weight, bias))


def test_memory_is_kept_for_a_bounded_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "_MOST_SHAPES", 4)
    free = small._Free()
    for rows in range(1, 12):
        assert free[torch.Size((rows, 3)), torch.Size((2, 3))] == []
        assert 1 <= len(free) <= 4


@pytest.mark.parametrize("precision", ["fp16", "bf16", "bf16-tpu", "e5m7", "fp8"])
def test_a_region_gives_small_layers_the_bits_of_the_general_path(precision: str) -> None:
    layer, x = nn.Linear(6, 5), torch.randn(4, 6)
    with torch.no_grad(), lowp.autocast(precision):
        found = layer(x)
        general = F.linear(x, weight=layer.weight, bias=layer.bias)
        assert torch.equal(bits(found), bits(general))
        layer.weight.data.mul_(2)  # no value of the weight is kept
        assert torch.equal(layer(x), F.linear(x, weight=layer.weight, bias=layer.bias))
        assert not torch.equal(layer(x), found)


@pytest.mark.parametrize("precision", ["fp16", "e5m7", "fp8"])
def test_a_tensor_that_outlived_its_transform_is_multiplied_as_what_it_wraps(precision: str) -> None:
    layer, kept = nn.Linear(6, 5), []
    x = torch.randn(4, 6)
    torch.func.grad(lambda whole: kept.append(whole) or whole.sum())(x)  # type: ignore[func-returns-value]
    with torch.no_grad(), lowp.autocast(precision):
        expected = layer(x)
        for one in kept:
            assert torch.equal(layer(one), expected)
