"""Casts of weights are computed at every entry, and again within one if a weight may have been written."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from lowp import kernels
from lowp.casts import parse
from lowp.ops import contraction, prepared
from lowp.region import autocast, weights


class CountCasts(TorchDispatchMode):
    """Counts how often a weight is converted."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.count = weight, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self.weight
        return func(*args, **(kwargs or {}))


PRECISIONS = ("bf16", "e5m7")


@pytest.fixture(autouse=True)
def small_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the casts of small weights as those of large ones."""
    monkeypatch.setattr(weights, "_SMALL", 0)
    monkeypatch.setattr(prepared, "SMALL", 0)
    monkeypatch.setattr(contraction, "direct", cast(Any, contraction.direct).__wrapped__)  # what is known is made anew


def ones() -> nn.Linear:
    """Return a layer without bias whose weights are 1."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def write_through_pointer(parameter: Tensor) -> None:
    values = (ctypes.c_float * parameter.numel())(*[3.0] * parameter.numel())
    ctypes.memmove(parameter.data_ptr(), values, ctypes.sizeof(values))


def write_as_fsdp_does(parameter: Tensor) -> None:
    """Free the memory, allocate and fill it again, with the version preserved."""
    storage, size = parameter.untyped_storage(), parameter.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
        parameter.fill_(3.0)


def write_in_a_hook(parameter: Tensor) -> None:
    """Write during a backward pass, like optimizers within it."""
    other = torch.ones(1, requires_grad=True)
    other.register_post_accumulate_grad_hook(lambda _: (parameter.data.fill_(3.0), None)[1])
    other.sum().backward()


def step_of_an_optimizer(parameter: Tensor) -> None:
    parameter.grad = torch.full_like(parameter, -2.0)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    parameter.grad = None


# how weights of 1 become 3, as other code does it
WRITES: dict[str, Callable[[Tensor], object]] = {
    "data in place": lambda p: p.data.add_(2.0),
    "data copied from another": lambda p: p.data.copy_(torch.full_like(p, 3.0)),
    "data replaced": lambda p: setattr(p, "data", torch.full((4, 4), 3.0)),
    "one element of data": lambda p: [p.data.view(-1).__setitem__(i, 3.0) for i in range(p.numel())],
    "in place without gradients": lambda p: p.detach().fill_(3.0),
    "NumPy": lambda p: p.detach().numpy().fill(3.0),
    "DLPack": lambda p: torch.from_dlpack(p.detach()).fill_(3.0),
    "storage": lambda p: p.untyped_storage().copy_(torch.full_like(p, 3.0).untyped_storage()),
    "swapped": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.full((4, 4), 3.0))),
    "raw pointer": write_through_pointer,
    "as FSDP does": write_as_fsdp_does,
    "hook of a backward pass": write_in_a_hook,
    "fused optimizer": step_of_an_optimizer,
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_weight_that_was_written_between_two_entries_is_cast_anew(
    write: Callable[[Tensor], object], precision: str
) -> None:
    layer, region, x = ones(), autocast(precision), torch.ones(1, 4)
    with region:
        assert layer(x).tolist() == [[4.0] * 4]
    write(layer.weight)
    with region:
        assert layer(x).tolist() == [[12.0] * 4]


@pytest.mark.parametrize("nested", [False, True], ids=["", "in a region within"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_weight_that_was_written_within_an_entry_is_cast_anew(
    write: Callable[[Tensor], object], nested: bool
) -> None:
    layer, x = ones(), torch.ones(1, 4)
    with autocast("fp16"):
        assert layer(x).tolist() == [[4.0] * 4]
        with autocast("e5m7") if nested else nullcontext():
            write(layer.weight)
        assert layer(x).tolist() == [[12.0] * 4]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_torch_casts_a_weight_first_and_the_second_cast_is_kept_until_it_is_written(
    write: Callable[[Tensor], object],
) -> None:
    layer, x = ones(), torch.ones(1, 4)
    with kernels.use("native"), autocast("bf16") as region, CountCasts(layer.weight) as casts:
        for kept in (0, 1, 1):
            assert layer(x).tolist() == [[4.0] * 4] and len(region._weights) == kept
        assert casts.count == 2
        write(layer.weight)
        assert layer(x).tolist() == [[12.0] * 4]


def test_a_weight_that_is_given_by_its_name_is_kept_as_others_are() -> None:
    layer, x = ones(), torch.ones(1, 4)
    with kernels.use("native"), autocast("bf16") as region, CountCasts(layer.weight) as casts:
        for kept in (0, 1, 1):
            assert nn.functional.linear(x, weight=layer.weight).tolist() == [[4.0] * 4] and len(region._weights) == kept
        assert casts.count == 2


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(4, requires_grad=True) * 2,
        torch.ones(4).as_subclass(type("Other", (Tensor,), {})),
        torch.nested.nested_tensor([torch.ones(4), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["computed", "of another class", "nested"],
)
def test_no_cast_is_kept_of_what_is_no_plain_leaf(weight: Tensor) -> None:
    held = weights.WeightCasts()
    assert held(weight, parse("bf16")).dtype is torch.bfloat16
    assert len(held) == 0


def test_a_long_entry_looks_for_weights_that_are_let_go_whenever_their_number_has_doubled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(weights, "_PRUNE_AT", 4)
    monkeypatch.setattr(weights, "_are_alone", lambda entries: looks.append(len(entries)))
    held, alive = weights.WeightCasts(), [nn.Parameter(torch.ones(1)) for _ in range(64)]
    for weight in alive:
        held(weight, parse("bf16"))
    assert len(held) == 64 and len(looks) == 4 + 8 + 16 + 32 + 64


# what writes to a weight later on, taken before the region was entered
KEPT: dict[str, Callable[[Tensor], Callable[[], object]]] = {
    "data": lambda p: partial(p.data.fill_, 3.0),
    "a row of data": lambda p: (lambda rows: lambda: [row.fill_(3.0) for row in rows])(list(p.data)),
    "NumPy": lambda p: partial(p.detach().numpy().fill, 3.0),
    "DLPack": lambda p: partial(torch.from_dlpack(p.detach()).fill_, 3.0),
    "storage": lambda p: (lambda s: lambda: s.copy_(torch.full((4, 4), 3.0).untyped_storage()))(p.untyped_storage()),
}


@pytest.mark.parametrize("take", KEPT.values(), ids=KEPT)
def test_what_was_taken_of_a_weight_before_an_entry_may_write_within_it(
    take: Callable[[Tensor], Callable[[], object]],
) -> None:
    layer, x = ones(), torch.ones(1, 4)
    write = take(layer.weight)
    with autocast("fp16"):
        assert layer(x).tolist() == [[4.0] * 4]
        write()
        assert layer(x).tolist() == [[12.0] * 4]


def test_a_lazy_module_makes_its_parameters_within_a_region() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3))
    with autocast("bf16"):
        assert model(torch.randn(2, 3, 6, 6)).dtype is torch.bfloat16
    assert all(type(one) is nn.Parameter for one in model.parameters())


def test_a_weight_in_memory_of_others_is_cast_at_every_use() -> None:
    array, x = np.ones((4, 4), np.float32), torch.ones(1, 4)
    layer = ones()
    layer.weight = nn.Parameter(torch.from_numpy(array))
    shared = ones()
    shared.weight.share_memory_()
    with autocast("fp16") as region:
        layer(x)
        array.fill(3.0)
        assert layer(x).tolist() == [[12.0] * 4]
        shared(x)
        assert len(region._weights) == 0


@pytest.mark.parametrize("first", [False, True], ids=["attached later", "attached from the start"])
def test_a_debugger_changes_nothing_of_which_casts_serve_again(first: bool) -> None:
    free, held, x = ones(), ones(), torch.ones(1, 4)
    storage = held.weight.untyped_storage()  # held by another: it may be written through
    weights._one_holder.cache_clear()
    if not first:
        weights._one_holder()
    with autocast("fp16") as region:
        sys.setprofile(lambda *_: None)
        try:
            free(x)
            held(x)
        finally:
            sys.setprofile(None)
        assert len(region._weights) == 1
        free(x)
        held(x)
        assert len(region._weights) == 1
    assert storage.nbytes() == 64


def test_a_raw_address_of_before_is_what_forget_is_for() -> None:
    layer, x = ones(), torch.ones(1, 4)
    address, values = layer.weight.data_ptr(), (ctypes.c_float * 16)(*[3.0] * 16)
    with autocast("fp16") as region:
        layer(x)
        ctypes.memmove(address, values, 64)
        region.forget()
        assert layer(x).tolist() == [[12.0] * 4]


def test_target_networks_and_weights_that_a_loop_writes_itself_train_as_without_a_kept_region() -> None:
    def losses(region: Callable[[], autocast]) -> list[float]:
        torch.manual_seed(0)
        model, target, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(8, 4)
        found = []
        for _ in range(4):
            with region():
                loss = (model(x) - target(x).detach() - 1).square().mean()
            loss.backward()
            for ours, theirs in zip(model.parameters(), target.parameters(), strict=True):
                ours.data.add_(ours.grad, alpha=-0.3)
                theirs.data.copy_(ours.data)
                ours.grad = None
            found.append(loss.item())
        return found

    for precision in PRECISIONS:
        kept = autocast(precision)
        assert losses(lambda kept=kept: kept) == losses(partial(autocast, precision))


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("whole", [False, True], ids=["an entry a step", "one entry for all steps"])
def test_fully_sharded_weights_train_as_whole_ones(process_group: None, precision: str, whole: bool) -> None:
    def losses(is_sharded: bool) -> list[float]:
        torch.manual_seed(0)
        model, region, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), autocast(precision), torch.randn(8, 4)
        for part in (*model, model) if is_sharded else ():
            fully_shard(part)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        with region if whole else nullcontext():
            for _ in range(3):
                with nullcontext() if whole else region:
                    loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_micro_batches_give_the_gradients_of_their_sum_in_several_entries_and_in_one() -> None:
    layer, region, x = nn.Linear(4, 4), autocast("fp16"), torch.randn(2, 4)
    expected = (6 * x.half().float().sum(0).half().float()).expand(4, 4)
    with CountCasts(layer.weight) as casts:
        for _ in range(3):
            with region:
                (layer(x).float().sum() + layer(x).float().sum()).backward()
        assert torch.equal(layer.weight.grad, expected)
        layer.weight.grad = None
        with region:
            loss = sum(layer(x).float().sum() for _ in range(6))
        loss.backward()
        assert torch.allclose(layer.weight.grad, expected, rtol=1e-2)  # one graph sums them in 16 bits
    assert casts.count == 4  # one an entry


def test_nothing_is_held_after_an_entry_and_by_threads_apart() -> None:
    layer, region, x, counts = nn.Linear(4, 4, bias=False), autocast("fp16"), torch.randn(2, 4), []

    def work() -> None:
        with region:
            layer(x)
            counts.append(len(region._weights))
        counts.append(len(region._weights))

    with region:
        layer(x)
        mine = region._weights
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert len(mine) == 1
    assert counts == [1, 0] and len(mine) == 0


def test_casts_that_backward_keeps_are_told() -> None:
    layer, region = nn.Linear(40, 40), autocast("fp16")
    with region:
        y = layer(torch.randn(2, 40, requires_grad=True) + 1)
    assert [one.dtype for one in region.cast_weights()] == [torch.float16]
    del y
    assert region.cast_weights() == []


def test_a_use_without_gradients_does_not_lose_those_of_the_next() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    for first in (torch.no_grad, torch.inference_mode):
        with autocast("fp16"):
            with first():
                layer(x)
            layer(x).sum().backward()
        assert layer.weight.grad is not None
        layer.zero_grad()


def test_changed_weights_are_cast_anew() -> None:
    layer, region, x = nn.Linear(2, 2, bias=False), autocast("bf16"), torch.ones(1, 2)
    with region:
        layer(x)
        with torch.no_grad():
            layer.weight.fill_(1)
        assert layer(x).tolist() == [[2, 2]]
        layer.weight.data = torch.full((2, 2), 2.0)
        assert layer(x).tolist() == [[4, 4]]


def test_weights_that_nobody_uses_any_more_are_let_go_in_a_long_entry() -> None:
    x, kept = torch.ones(1, 4), ones()
    with autocast("mxfp8") as region, torch.no_grad():
        kept(x)
        for _ in range(1100):
            ones()(x)
        assert 1 <= len(region._weights) < 200


class DataSGD(torch.optim.Optimizer):
    """Writes through `.data`, which does not increment the version, like many optimizers outside torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(getattr(torch.optim, name), lr=0.1, fused=True) for name in ("SGD", "Adam", "AdamW", "Adagrad")),
        partial(torch.optim.AdamW, lr=0.1, foreach=True),
        DataSGD,
    ],
    ids=["fused SGD", "fused Adam", "fused AdamW", "fused Adagrad", "foreach AdamW", "data"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kept_region_sees_every_optimizers_steps(make: Callable[..., torch.optim.Optimizer], compiled: bool) -> None:
    layer, region, x = nn.Linear(4, 4), autocast("bf16"), torch.randn(2, 4)
    optimizer = make(layer.parameters())
    if compiled:  # which once took the hooks off the optimizers that are there
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="eager")(x)
    for _ in range(3):
        optimizer.zero_grad()
        with region:
            loss = layer(x).float().square().sum()
        loss.backward()
        optimizer.step()
        with region, torch.no_grad():
            seen = layer(x)
        with autocast("bf16"), torch.no_grad():
            assert torch.equal(seen, layer(x))


def test_one_entry_around_a_whole_training_sees_every_step() -> None:
    layers, x = [nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(2, 4)
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, fused=True) for layer in layers]
    with autocast("bf16"):
        for _ in range(3):
            for layer, optimizer in zip(layers, optimizers, strict=True):
                with nullcontext() if layer is layers[0] else autocast("bf16"):
                    layer(x).float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_a_cast_is_looked_for_by_weight_sign_and_format() -> None:
    held, weight, (half, brain) = weights.WeightCasts(), nn.Parameter(torch.ones(3)), map(parse, ("fp16", "bf16"))
    nothing, sign = held.look(weight, half)
    assert nothing is None and sign is not None and sign[:2] == (0, weight.data_ptr())
    value = held.keep(weight, half, sign, weight.detach().half())
    assert held.look(weight, half) == (value, sign) and held.look(weight, brain) == (None, sign) and len(held) == 1
    held.keep(weight, brain, sign, weight.detach().bfloat16())
    again = held.keep(weight, half, sign, weight.detach().half())  # in the place of the first
    assert held.look(weight, half)[0] is again and len(held) == 2
    with torch.inference_mode():
        assert held.look(weight, half) == (None, None)
    held.keep(weight, brain, None, weight.detach().bfloat16())  # of which nothing is known
    assert held.look(weight, brain)[0] is None and len(held) == 1
    assert held.keep(weight, half, sign, weight) is weight and len(held) == 0 and len(held.tensors()) == 2
    held.hand_out(weight)
    assert held.look(weight, half) == (None, None)
    for nothing_in_memory in (3, None, weight.to_sparse()):
        held.hand_out(nothing_in_memory)


def test_casts_that_are_gone_are_let_go_when_many_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PRUNE_AT", 3)
    held, layers = weights.WeightCasts(), [nn.Parameter(torch.ones(3)) for _ in range(3)]
    kept = [held(layer, parse("fp16")) for layer in layers[:2]]
    kept.pop()
    held.forget()
    assert len(held) == 0 and len(held._made) == 2 and [id(one) for one in held.tensors()] == [id(kept[0])]
    held(layers[2], parse("fp16"))
    held.forget()
    assert len(held._made) == 1


def test_weights_that_were_used_before_are_cast_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SMALL", 8)
    held, leaf, large = weights.WeightCasts(), nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 3))
    x, half = torch.ones(2), nn.Parameter(torch.ones(2).half())
    given = (x, leaf, 3, half, leaf * 1), {"bias": large, "eps": 1}
    for _ in range(2):
        assert held.again([]) == []
        with torch.no_grad():  # small casts without gradients are not kept
            first = [held.again([leaf, large]) for _ in range(2)]
        assert [[id(one) for one in found] for found in first] == [[], [id(large)]]
        held.forget()
    args, kwargs = held.cast_arguments(*given, parse("fp16"))
    assert args is given[0] and kwargs is given[1]
    args, kwargs = held.cast_arguments(*given, parse("fp16"))
    for found, one in zip((*args, *kwargs.values()), (*given[0], *given[1].values()), strict=True):
        is_cast = one is leaf or one is large
        assert (found is not one) is is_cast and (not is_cast or found.dtype is torch.float16)
    assert list(kwargs) == ["bias", "eps"] and len(held) == 2
    assert held.cast_arguments((leaf,), {}, parse("fp16"))[1] == {} and len(held) == 2


def test_what_exposes_memory_and_what_runs_hooks_is_noted() -> None:
    held, (one, other) = weights.WeightCasts(), (nn.Parameter(torch.ones(3)) for _ in "ab")
    cast_to = parse("fp16")
    for weight in (one, other):
        held(weight, cast_to)
    held.note(Tensor.detach, (one, other))
    assert held.look(one, cast_to) == (None, None) and held.look(other, cast_to)[0] is not None
    held.note(Tensor.detach, ())
    assert len(held) == 2
    held.note(torch.autograd.backward, (other,))
    assert len(held) == 0 and held.look(other, cast_to)[1] is not None
