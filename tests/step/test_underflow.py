"""Underflow is measured and followed; a skipped step changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step.cases import INF, NAN, OPTIMIZERS, one_parameter, parameter_of, started
from torch import nn

from lowp.errors import InvalidInput
from lowp.kernels.steps import updates
from lowp.step import GradScaler
from lowp.step import gradients as grads
from lowp.step.checking import combined


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_underflow_rate_is_the_share_that_fp16_flushes_at_this_scale(name: str) -> None:
    scaler = started(init_scale=2.0)
    assert scaler.underflow is None
    optimizer = one_parameter([0.0, 1.0, 2.0**-26, -(2.0**-27), 2.0**-25, 1e-45], name)
    scaler.step(optimizer)
    assert scaler.underflow is not None and scaler.underflow.item() == pytest.approx(3 / 5)


def test_underflow_is_sampled_every_so_often() -> None:
    scaler = started(sample_interval=3)
    rates = []
    for number in range(5):
        scaler.step(one_parameter([1.0, 1e-30] if number < 3 else [1.0, 1.0]))
        scaler.update()
        assert scaler.underflow is not None
        rates.append(scaler.underflow.item())
    assert rates == [0.5, 0.5, 0.5, 0.0, 0.0]
    silent = started(sample_interval=0)
    silent.step(one_parameter([1e-30]))
    assert silent.underflow is None


def test_the_underflow_of_large_gradients_is_that_of_a_sample_of_them() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(1000, 1024) * 2.0**-24
    scaler = started()
    scaler.step(one_parameter(gradient.clone()))
    flushed = ((gradient != 0) & (gradient.half() == 0)).float().mean().item()
    assert 0.2 < flushed < 0.5
    assert scaler.underflow is not None and scaler.underflow.item() == pytest.approx(flushed, abs=0.005)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scale_that_follows_underflow_ends_it(name: str) -> None:
    torch.manual_seed(0)
    scaler = GradScaler("cpu", init_scale=1.0, target_underflow=1e-3, sample_interval=1)
    gradient = torch.randn(4096) * 1e-8
    optimizer = one_parameter(gradient, name)
    rates = []
    for _ in range(3):
        scaler.scale(torch.ones(()))
        parameter_of(optimizer).grad = gradient * scaler.get_scale()
        scaler.step(optimizer)
        assert scaler.underflow is not None
        rates.append(scaler.underflow.item())
        scaler.update()
    assert rates[0] > 0.9 and rates[1] <= 1e-3 and rates[2] <= 1e-3
    assert 2.0**10 < scaler.get_scale() < 2.0**18


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batch_norm_statistics_survive_a_skipped_step(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = GradScaler("cpu")
    scaler.protect(model)
    for overflowed in (False, True, False):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        scaler.scale(model(x * INF if overflowed else x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        after = model.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before) == overflowed


def test_scale_works_under_functional_transforms() -> None:
    scaler = started(init_scale=4.0)
    assert torch.func.grad(lambda x: scaler.scale(x * x))(torch.tensor(3.0)) == 24.0
    scaler.step(one_parameter([INF]))
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_scale_compiles_without_a_graph_break() -> None:
    scaler = started(init_scale=4.0)
    scaled = torch.compile(lambda x: scaler.scale((x * x).sum()), fullgraph=True, backend="eager")
    x = torch.ones(3, requires_grad=True)
    scaled(x).backward()
    assert x.grad is not None and x.grad.tolist() == [8.0] * 3


@pytest.mark.parametrize("counts", [torch.zeros(255), torch.zeros(256, 1), [0] * 256], ids=["255", "two axes", "list"])
def test_counts_of_further_gradients_are_a_tensor_with_a_number_for_each_exponent(counts: Any) -> None:
    scaler = started(target_underflow=0.01)
    with pytest.raises(InvalidInput, match=r"takes a count for each of the 256 exponents of fp32, an int64 tensor"):
        scaler.add_exponents(counts)
    scaler.add_exponents(torch.zeros(256, dtype=torch.int64))


def test_gradients_are_counted_by_their_exponents() -> None:
    def counted(*values: torch.Tensor) -> dict[int, int]:
        kinds = grads.by_kind(grads.Gradient(one, place) for place, one in enumerate(values))
        counts = grads.exponent_histogram(kinds, torch.device("cpu"))
        assert counts.dtype is torch.int64 and counts.shape == (256,)
        return {field: int(count) for field, count in enumerate(counts) if count}

    few = torch.tensor([[1.0, -2.0, 0.0, 3.0], [2.0**-126, -1e-45, INF, -NAN], [2.0**127, 0.0, 1.5, -0.0]])
    assert counted(few) == {0: 1, 1: 1, 127: 2, 128: 2, 254: 1}
    assert counted(few, few[0].half(), few[:, :2].double()) == {0: 2, 1: 2, 127: 4, 128: 5, 254: 2}
    assert counted(torch.zeros(0)) == {}
    assert counted(torch.ones(2**19 - 1)) == {127: 2**19 - 1}
    assert counted(torch.ones(2**19), torch.zeros(0)) == {127: 174763}  # each third
    assert counted(torch.ones(2**19), torch.ones(2**19)) == {127: 2 * 104858}  # each fifth


def test_gradients_are_measured_by_their_places() -> None:
    values = {0: torch.tensor([[1.0, -3.0]]), 2: torch.zeros(0), 3: torch.tensor([2.0, 0.5]), 5: torch.tensor(-INF)}

    def of(*more: tuple[int, torch.Tensor]) -> grads.Kinds:
        return grads.by_kind(grads.Gradient(one, place) for place, one in (*values.items(), *more))

    cpu = torch.device("cpu")
    sizes = grads.largest(of((1, torch.tensor([7.0, -8.0]).half())), 7, cpu)
    assert sizes.dtype is torch.float32 and sizes.tolist() == [3.0, 8.0, 0.0, 2.0, 0.0, INF, 0.0]
    sizes = grads.largest(of((6, torch.tensor([-1e300], dtype=torch.float64))), 7, cpu)
    assert sizes.dtype is torch.float64 and sizes.tolist() == [3.0, 0.0, 0.0, 2.0, 0.0, INF, 1e300]
    assert grads.largest(of(), 6, cpu).tolist() == [3.0, 0.0, 0.0, 2.0, 0.0, INF]
    assert grads.largest(grads.by_kind([]), 0, cpu).shape == (0,)
    assert grads.largest_finite(of()) == 3.0
    assert grads.largest_finite(of((1, torch.tensor([NAN, -9.0])))) == 9.0
    assert grads.largest_finite(grads.by_kind([grads.Gradient(torch.tensor([NAN, INF]), 0)])) == 0.0


def test_flags_are_combined_to_the_largest() -> None:
    cpu, flag = torch.device("cpu"), torch.ones(())
    assert combined([flag], cpu) is flag
    assert combined([], cpu).item() == 0.0
    for flags, found in (([flag, torch.zeros(())], 1.0), ([torch.zeros(1)], 0.0), ([torch.tensor(True)], 1.0)):
        whole = combined(flags, cpu)
        assert (whole.item(), whole.dtype, whole.dim()) == (found, torch.float32, 0)


def test_gradients_in_fp16_alone_are_widened() -> None:
    narrow, wide, without = (
        nn.Parameter(torch.ones(2, dtype=kind)) for kind in (torch.half, torch.bfloat16, torch.half)
    )
    narrow.grad, wide.grad = torch.tensor([3.0, 2.0**-24]).half(), torch.ones(2).bfloat16()
    grads.widen_fp16(torch.optim.SGD([narrow, wide, without], lr=1.0))
    assert (narrow.grad.dtype, narrow.grad.tolist()) == (torch.float32, [3.0, 2.0**-24])
    assert wide.grad.dtype is torch.bfloat16 and without.grad is None


@pytest.mark.parametrize("unscale", [True, False])
def test_the_results_of_a_kernel_are_put_together_by_place(monkeypatch: pytest.MonkeyPatch, unscale: bool) -> None:
    def check(values: Any, found: Any, inverse: Any, histogram: bool) -> updates.CheckedGradients:
        assert found.item() == 0.0
        sizes = torch.stack([one.abs().amax().float() for one in values])
        if inverse is not None:
            for one in values:
                one.mul_(inverse)
        bins = torch.arange(256, dtype=torch.int32) * len(values) if histogram else None
        return updates.CheckedGradients(sizes, bins)

    monkeypatch.setattr(updates, "can_check", lambda values: len(values) < 3)
    monkeypatch.setattr(updates, "check", check)

    def of(count: int, places: list[int], exponents: bool) -> tuple[Any, list[float]]:
        values = [torch.full((2,), float(place + 1), dtype=torch.float16 if place == 2 else None) for place in places]
        kinds = grads.by_kind(map(grads.Gradient, values, places))
        checked = grads.checked_by_kernel(kinds, count, torch.tensor(0.5), unscale, exponents)
        return checked, [one[0].item() for one in values]

    after = 0.5 if unscale else 1.0
    checked, values = of(2, [0, 1], False)
    assert checked.sizes.tolist() == [1.0, 2.0] and checked.exponents is None and values == [after, 2 * after]
    checked, values = of(5, [0, 2, 3], True)
    assert checked.sizes.tolist() == [1.0, 0.0, 3.0, 4.0, 0.0] and values == [after, 3 * after, 4 * after]
    assert checked.exponents.dtype is torch.int64 and checked.exponents.tolist() == [3 * field for field in range(256)]
    assert of(4, [0, 1, 2, 3], True) == (None, [1.0, 2.0, 3.0, 4.0])
